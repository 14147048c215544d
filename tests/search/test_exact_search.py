"""The searches by price: exact on small graphs, equal to the integer program on models, never beaten, honest about gap
and price, and keeping what the user decided."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.optimize import linprog
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import shardwise as sw
from raising import raises
from search.checking import MESHES, TINY, Tally, check_emitted, check_plan, check_search, gap_of, tiny_cost
from search.cost_graphs import (
    climbed,
    cluster_of,
    cost_of_model,
    every_assignment,
    random_assignments,
    seconds_of,
    small_cost,
)
from search.integer_program import solve_ilp
from search.small_models import Mlp, TwoProducts
from search.wide_models import WIDE
from shardwise.costs.cluster import Cluster
from shardwise.layouts.choice import Split
from shardwise.layouts.strategy import parse_choices
from shardwise.search import dynamic_programming, message_passing, solving
from shardwise.search.auto import PRICED_SEARCHES, assignment_of, best_completion, run_search
from shardwise.search.constants import BOUND_TOLERANCE
from shardwise.search.cost_graph import BYTES, COMPUTE, EXPOSED, TRAFFIC, CostGraph, CostWeights
from shardwise.search.dynamic_programming import DoesNotFit, step_seconds
from shardwise.search.dynamic_programming import search as search_step
from shardwise.search.elimination import Problem, Solution, fix_variables, solve
from shardwise.search.solving import WideWarning


def wide_llama(layers: int, mesh: sw.Mesh) -> CostGraph:
    """Layers of Llama-3-8B on H100 nodes."""
    config = LlamaConfig(
        num_hidden_layers=layers,
        hidden_size=4096,
        intermediate_size=14336,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=128256,
        use_cache=False,
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config).to(torch.bfloat16)
        ids = torch.zeros(64, 2048, dtype=torch.int64)
    cluster = Cluster.load("h100-4x8").with_devices(mesh.num_devices)
    return cost_of_model(model, {"input_ids": ids, "labels": ids}, mesh, cluster)


# -- small graphs: all assignments -------------------------------------------------------------------------------------


def test_the_bound_under_a_limit_is_the_highest_over_both_multipliers():
    """Over all assignments of small graphs, and by a linear program of all their planes."""
    limited = 0
    for seed in range(60):
        cost = small_cost(seed, 1_000)
        if cost is None:
            continue
        every = every_assignment(cost)
        every = every[np.isfinite(every).all(axis=1)]
        free = every[seconds_of(every).argmin()]
        for share in (0.2, 0.5, 0.8):
            limit = float(every[:, BYTES].min() + share * (free[BYTES] - every[:, BYTES].min()))
            if limit >= free[BYTES] * (1 - 1e-9):
                continue
            limited += 1
            slopes = np.stack([every[:, TRAFFIC] - every[:, COMPUTE], every[:, BYTES] / limit - 1], axis=1)
            planes = np.concatenate([np.ones((len(every), 1)), -slopes], axis=1)
            unit = float(seconds_of(free))
            dual = linprog(
                [-1, 0, 0], A_ub=planes / unit, b_ub=(every[:, EXPOSED] + every[:, COMPUTE]) / unit,
                bounds=[(None, None), (0, 1), (0, None)],
            )  # fmt: skip
            found = search_step(cost, limit)
            best = float(seconds_of(every[every[:, BYTES] <= limit]).min())
            assert found.bound <= best * (1 + 1e-9), (seed, share)
            assert found.bound >= float(dual.x[0]) * (1 - BOUND_TOLERANCE) - 1e-6 * unit, (seed, share)
            assert found.components[BYTES] <= limit
    assert limited >= 20


@pytest.mark.parametrize("start", [0, 35])
@pytest.mark.sampled(1)
def test_small_graphs_against_all_assignments(start):
    tally = Tally()
    for seed in range(start, start + 35):
        check_search(seed, 1_000, tally)
    assert tally.graphs >= 25, tally
    assert tally.optimal >= 0.95 * tally.searches, tally
    assert tally.proven >= 0.6 * tally.searches, tally


def test_the_greedy_search_is_as_good_as_it_says_on_small_graphs():
    for seed in range(30):
        cost = small_cost(seed, 1_000)
        if cost is None:
            continue
        exact, found = (run_search(cost, name, None).outcome for name in PRICED_SEARCHES)
        assert found.seconds >= exact.bound * (1 - 1e-9), seed
        assert found.bound == 0, "nothing is proven about a greedy search"


# -- models ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TINY)
@pytest.mark.sampled(1)
def test_elimination_and_the_integer_program_agree_on_models(name):
    cost = tiny_cost(name, sw.Mesh(x=4, y=2))
    number = list(TINY).index(name)
    weights = (CostWeights(), CostWeights(1.0, 1.0, 0.0, 1e-12), CostWeights(1.0, 0.5, 0.5, 1e-9))[number % 3]
    problem = cost.weighted(weights)
    assert solve_ilp(problem).value == pytest.approx(solve(problem).value, rel=1e-9)


@pytest.mark.long
def test_elimination_and_the_integer_program_agree_on_llama_at_its_real_width():
    cost = wide_llama(2, sw.Mesh(node=4, gpu=8))
    problem = cost.weighted(CostWeights(1.0, 0.3, 0.7))
    assert solve_ilp(problem).value == pytest.approx(solve(problem).value, rel=1e-9)


@pytest.mark.parametrize("name", TINY)
@pytest.mark.sampled(1)
def test_no_random_assignment_and_no_hill_climbing_is_better(name):
    cost = tiny_cost(name, sw.Mesh(x=4, y=2))
    best = run_search(cost, "dynamic_programming", None).outcome
    at = np.array([cost.components(assignment) for assignment in random_assignments(cost, 300, 0)])
    assert seconds_of(at).min() >= best.bound
    for assignment in random_assignments(cost, 2, 1):
        assert climbed(cost, assignment) >= best.bound * (1 - 1e-9)
    assert gap_of(best) <= 0.01


@pytest.mark.parametrize(("name", "mesh"), [*zip(TINY, (*MESHES, MESHES[0]), strict=True)], ids=str)
def test_the_claimed_price_is_that_of_the_emitted_program(name, mesh):
    cost = tiny_cost(name, mesh)
    for search in ("dynamic_programming", "recursive_programming"):
        found = run_search(cost, search, None)
        assert check_emitted(found, found.outcome.assignment, f"{name} {mesh} {search}") or search != PRICED_SEARCHES[0]


@pytest.mark.long
def test_a_search_that_is_beaten_by_another_mesh_stops_with_a_bound_that_says_so():
    stopped = 0
    for number, name in enumerate(TINY):
        cost = tiny_cost(name, sw.Mesh(x=4, y=2), seed=number % 3)
        full = run_search(cost, "dynamic_programming", None).outcome
        for share in (0.5, 0.99, 1.0, 1.1):
            cutoff = share * full.bound
            found = run_search(cost, "dynamic_programming", None, cutoff).outcome
            assert found.bound <= full.seconds * (1 + 1e-9), "a bound holds for every assignment"
            assert found.seconds >= full.seconds * (1 - 1e-9)
            if share < 1:
                assert found.bound > cutoff, f"{name}: not beaten"
                assert found.stopped
                stopped += found.solves < full.solves
            else:
                assert found.assignment == full.assignment
                assert not found.stopped
    assert stopped, "nothing was saved"


# -- plans -------------------------------------------------------------------------------------------------------------


# make sweep-search runs all pairs.
@pytest.mark.parametrize(
    ("name", "search"),
    [
        ("gpt2", "dynamic_programming"),
        ("resnet", "recursive_programming"),
    ],
)
@pytest.mark.long
def test_plans_by_price_equal_one_device_and_perform_what_was_claimed(name, search):
    check_plan(name, search, sw.Mesh(x=2, y=2))


@pytest.mark.parametrize("search", PRICED_SEARCHES)
def test_what_the_user_decided_is_kept_by_every_search(search):
    model, x = Mlp(16, 32), torch.randn(16, 16)
    strategies = {"up": "n@y", "down": "k@y m@x"}
    plan = sw.plan(model, (x,), cluster_of(0, 4), mesh=sw.Mesh(x=2, y=2), search=search, strategies=strategies)
    assert parse_choices(plan.strategies["up/linear"], plan.mesh)["y"] == Split("n"), "and x is the search's"
    assert parse_choices(plan.strategies["down/linear"], plan.mesh) == {"x": Split("m"), "y": Split("k")}
    assert sw.verify(model, (x,), plan).ok
    called = TwoProducts(first=sw.shard(torch.matmul, ((2, 2), (2, 1))))
    plan = sw.plan(called, (torch.randn(16, 32),), cluster_of(0, 4), mesh=sw.Mesh(x=2, y=2), search=search)
    assert parse_choices(plan.strategies["/matmul"], plan.mesh) == {"x": Split("m"), "y": Split("k")}
    assert sw.verify(called, (torch.randn(16, 32),), plan).ok


# -- graphs that are too wide ------------------------------------------------------------------------------------------


class Dense(nn.Module):
    """Every block takes the results of all blocks before it."""

    def __init__(self, blocks: int = 4, width: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(blocks))

    def forward(self, x: Tensor) -> Tensor:
        found = [x]
        for block in self.blocks:
            found.append(torch.tanh(block(sum(found, torch.zeros(())))))
        return torch.stack([own.sum() * (i + 1) for i, own in enumerate(found)]).sum()


def counted_messages(monkeypatch: pytest.MonkeyPatch) -> list[Problem]:
    """The problems that message passing solves from now on."""
    solved: list[Problem] = []

    def solve_wide(problem: Problem) -> Solution:
        solved.append(problem)
        return message_passing.solve_wide(problem)

    monkeypatch.setattr(solving, "solve_wide", solve_wide)
    return solved


def test_a_graph_that_is_too_wide_is_solved_by_message_passing_and_is_the_same(monkeypatch):
    cost = cost_of_model(Dense(), {"x": torch.randn(8, 4)}, sw.Mesh(x=2), cluster_of(1, 2))
    exact = run_search(cost, "dynamic_programming", None).outcome
    cost = cost_of_model(Dense(), {"x": torch.randn(8, 4)}, sw.Mesh(x=2), cluster_of(1, 2))  # which remembers nothing
    monkeypatch.setattr(solving, "MAX_JOINT_COMBINATIONS", 100)
    solved = counted_messages(monkeypatch)
    found = run_search(cost, "dynamic_programming", None).outcome
    assert solved, "it is too wide"
    assert found.seconds == pytest.approx(exact.seconds, rel=1e-9)
    assert found.bound == pytest.approx(exact.bound, rel=1e-9)


def test_what_else_solves_a_graph_that_is_too_wide_does_so_by_message_passing(monkeypatch):
    cost = cost_of_model(Dense(), {"x": torch.randn(8, 4)}, sw.Mesh(x=2), cluster_of(1, 2))
    first = {0: 1}

    def found() -> list[float]:
        """Seconds of the best completion of one strategy, and of the greedy search."""
        completed = cost.components(best_completion(cost, first))
        return [step_seconds(completed), run_search(cost, "recursive_programming", None).outcome.seconds]

    exact = found()
    monkeypatch.setattr(solving, "MAX_JOINT_COMBINATIONS", 30)
    solved = counted_messages(monkeypatch)
    assert found() == pytest.approx(exact, rel=1e-9)
    assert len(solved) >= 2, "two completions are too wide"


def test_message_passing_comes_before_an_elimination_of_seconds_which_solves_what_it_does_not(monkeypatch):
    problem = cost_of_model(Dense(), {"x": torch.randn(8, 4)}, sw.Mesh(x=2), cluster_of(1, 2)).weighted(CostWeights())
    exact = solve(problem)
    monkeypatch.setattr(solving, "FAST_JOINT_COMBINATIONS", exact.largest_joint - 1)
    eliminated = []
    monkeypatch.setattr(solving, "solve", lambda *args, **kwargs: eliminated.append(args) or solve(*args, **kwargs))
    found = solving.minimise(problem)
    assert found.value == pytest.approx(exact.value, rel=1e-9)
    assert found.bound is None
    assert not eliminated
    monkeypatch.setattr(message_passing, "EXACT_GAP", -1.0)  # nothing is taken for proven
    assert solving.minimise(problem).value == exact.value
    assert len(eliminated) == 1

    def fails(problem: Problem) -> Solution:
        raise sw.ShardwiseError("no plan was found")

    monkeypatch.setattr(solving, "solve_wide", fails)
    assert solving.minimise(problem).value == exact.value


@pytest.mark.parametrize("name", WIDE)
@pytest.mark.sampled(1)
def test_plans_of_wide_models_by_message_passing_are_those_of_elimination(name, monkeypatch):
    kind, shape = WIDE[name]
    cost = cost_of_model(kind(), {"x": torch.randn(shape)}, sw.Mesh(x=2), cluster_of(1, 2))
    weights = (CostWeights(), CostWeights(1.0, 0.3, 0.7, 1e-12), CostWeights(0.0, 0.0, 0.0, 1.0))
    for problem in map(cost.weighted, weights):
        found, exact = message_passing.solve_wide(problem), solve(problem)
        assert found.lower <= exact.value * (1 + 1e-9)
        assert exact.value * (1 - 1e-9) <= found.value <= exact.value * (1 + 2e-4)


def test_a_plan_that_is_not_proven_has_its_gap_and_says_so(monkeypatch):
    model, x, mesh = Dense(), torch.randn(8, 4), sw.Mesh(a=2, b=2)
    exact = sw.plan(model, x, 4, mesh=mesh).prediction
    monkeypatch.setattr(solving, "MAX_JOINT_COMBINATIONS", 20)
    monkeypatch.setattr(message_passing, "EXACT_GAP", -1.0)  # nothing is taken for proven
    monkeypatch.setattr(message_passing.Messages, "solved_exactly", lambda messages: None)
    with pytest.warns(WideWarning, match="more than 20: solved by message passing, whose bound"):
        plan = sw.plan(model, x, 4, mesh=mesh)
    found = plan.prediction
    assert 0 < found.bound <= exact.additive_price * (1 + 1e-9)
    assert exact.bound * (1 - 1e-9) <= found.additive_price < 1.5 * exact.additive_price
    assert sw.verify(model, x, plan, steps=1).ok


def test_a_plan_of_another_search_is_completed_where_the_graph_is_too_wide(monkeypatch):
    """Only shared layouts are left to choose: no width that matters."""
    cost = cost_of_model(Dense(), {"x": torch.randn(8, 4)}, sw.Mesh(x=2), cluster_of(1, 2))
    choice = run_search(cost, "dynamic_programming", None).choice()
    monkeypatch.setattr(solving, "MAX_JOINT_COMBINATIONS", 30)
    assert assignment_of(cost, choice) is not None


def test_a_solver_that_stopped_early_is_not_mistaken_for_a_bound(monkeypatch):
    cost = tiny_cost("llama", sw.Mesh(x=4, y=2))
    exact = run_search(cost, "dynamic_programming", None).outcome

    def stopped(problem: Problem) -> Solution:
        """Some assignment, and a bound that is a tenth below the optimum."""
        best = solve(problem)
        other = solve(fix_variables(problem, {0: (best.assignment[0] + 1) % problem.sizes[0]}))
        return Solution(other.assignment, other.value, bound=0.9 * best.value)

    monkeypatch.setattr(dynamic_programming, "minimise", stopped)
    found = search_step(replace(cost), None)  # which remembers no solutions
    assert found.seconds >= exact.seconds * (1 - 1e-9)
    assert found.bound <= 0.9 * exact.bound * (1 + 1e-6)
    assert gap_of(found) >= 0.1


# -- memory ------------------------------------------------------------------------------------------------------------


def test_a_plan_for_less_memory_fits_and_an_impossible_one_is_refused_with_the_least():
    model, x = Mlp(64, 256), torch.randn(32, 64)
    cluster, mesh = cluster_of(1, 4), sw.Mesh(x=4)

    def plan(memory_bytes: float | None, search: str = "dynamic_programming") -> sw.Plan:
        return sw.plan(model, (x,), cluster, mesh=mesh, search=search, memory_bytes=memory_bytes)

    free = plan(None)
    with raises(sw.errors.NothingFits, "storage up.weight", section="nothing-fits", facts=["largest"]):
        plan(1000)
    limit = max(free.prediction.num_bytes, free.prediction.peak_bytes)
    for search in PRICED_SEARCHES:
        fitting = plan(limit, search)
        assert max(fitting.prediction.num_bytes, fitting.prediction.peak_bytes) <= limit
        assert fitting.prediction.step_seconds >= free.prediction.step_seconds * (1 - 1e-9)
        assert sw.verify(model, (x,), fitting).ok


def test_a_model_without_bytes_that_add_up_is_planned_where_the_limit_is_that_of_its_moments():
    class Repeats(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x.repeat(1, 4000) * 2).sum()

    with raises(sw.errors.NothingFits, section="nothing-fits", facts=["needed", "largest", "least"]):
        sw.plan(Repeats(), (torch.randn(64, 1),), 2, mesh=sw.Mesh(dp=2), memory_bytes=1000)


def test_the_least_memory_that_an_error_names_is_enough():
    cost = tiny_cost("bert", sw.Mesh(x=4, y=2))
    with pytest.raises(DoesNotFit) as caught:
        run_search(cost, "dynamic_programming", 1000)
    least = caught.value.num_bytes
    for search in ("dynamic_programming", "recursive_programming"):
        assert run_search(cost, search, least).outcome.components[BYTES] <= least
        with pytest.raises(DoesNotFit):
            run_search(cost, search, least - 1)
