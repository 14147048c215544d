"""Short programs say what a long one takes: seconds and peak of a model of many equal blocks, from programs of few."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import shardwise as sw
from raising import raises
from search.deep_model import LAYERS, Deep
from shardwise.costs.memory import busiest_program
from shardwise.costs.timeline import simulate
from shardwise.graph.capture import capture
from shardwise.graph.folding import Folding, GraphForm
from shardwise.graph.ir import Graph
from shardwise.programs.instructions import Copy
from shardwise.search import block_extrapolation
from shardwise.search.candidates import candidates
from shardwise.search.cost_graph import BYTES
from shardwise.search.dynamic_programming import step_seconds
from shardwise.search.fit_memory import PolicyResult, fit_memory
from shardwise.search.memory_policy import MemoryPolicy
from shardwise.search.planner import Planner
from shardwise.search.planning_cache import PlanningCache
from shardwise.search.stored_program import SearchConfig, build_program


def graph_of(skips: bool = False, layers: int = LAYERS) -> Graph:
    with torch.device("meta"):
        model, ids = Deep(layers, skips=skips), torch.zeros(16, 256, dtype=torch.int64)
    return capture(model, (ids, ids)).graph


@pytest.fixture(scope="module")
def graph() -> Graph:
    return graph_of()


@pytest.fixture(autouse=True)
def small_models_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_extrapolation, "MIN_OPERATORS_TO_FOLD", 0)
    monkeypatch.setattr(block_extrapolation, "MAX_FOLDED_SHARE", 10.0)


def memory_policy(graph: Graph, how: str) -> MemoryPolicy:
    whole = MemoryPolicy.of(graph, (), "full")
    return {
        "none": MemoryPolicy(),
        "cheap": MemoryPolicy.of(graph, (), "cheap"),
        "full": whole,
        "gathered again": MemoryPolicy.of(graph, (), None, "again"),
        "on the host": MemoryPolicy.of(graph, (), None, "held", "all"),
        "half of the blocks": MemoryPolicy("full", segments=whole.segments[:4]),
    }[how]


@pytest.mark.parametrize("how", ["none", "cheap", "full", "gathered again", "on the host", "half of the blocks"])
@pytest.mark.sampled(2)
def test_a_folded_step_is_the_step_of_the_whole_program(graph: Graph, how: str) -> None:
    settings = SearchConfig(memory_policy=memory_policy(graph, how), bucket_bytes=0)
    planner = Planner.of(graph, (), sw.Cluster.load("h100-1x8"), (sw.Mesh(dp=4, tp=2),), settings)
    searches, _ = planner.searches()
    found = candidates(searches, "dynamic_programming", planner.limit)
    assert len(found) > 1
    num_folded = 0
    for candidate in found:
        short, whole = planner._built(candidate), planner._built(candidate, whole=True)
        assert short.step is not None
        assert whole.step is not None
        num_folded += short.spmd is None
        # Messages of neighbours may leave a little earlier or later.
        assert short.step.seconds == pytest.approx(whole.step.seconds, rel=2e-3)
        assert short.num_bytes == pytest.approx(whole.num_bytes, rel=2e-3)
        assert short.step.kept_bytes == whole.step.kept_bytes
        assert short.step.compute == pytest.approx(whole.step.compute, rel=1e-6)
        # Lifetimes are a pass over the program that keeps all: it is the one that ranks get.
        rules, mesh = planner.factored.rules, candidate.search.mesh
        program = build_program(graph, rules, whole.choice, mesh, settings, planner.cache.vjp_cache)
        assert program.busiest == busiest_program(program.spmd, planner.cache.vjp_cache)
    assert num_folded, "some were folded"


def test_the_plan_is_that_of_whole_programs_and_says_what_is_true_of_it(graph: Graph) -> None:
    """Under a limit that takes a memory policy, eased block by block."""
    cluster, mesh = sw.Cluster.load("h100-1x8"), (sw.Mesh(dp=8),)
    settings = SearchConfig(memory_bytes=0.9e9)
    planner = Planner.of(graph, (), cluster, mesh, settings)
    short, whole = fit_memory(planner), fit_memory(replace(planner, folded=None))
    assert short.memory_policy.segments, "it makes something again"
    assert short.prediction.simulated_seconds == pytest.approx(whole.prediction.simulated_seconds, rel=2e-3)
    search = short.searched.search
    own = simulate(short.spmd, search.cost.domains.prices)
    assert short.prediction.simulated_seconds == own.seconds
    eased = {segment.how for segment in short.memory_policy.segments}
    assert len(eased) > 1, "some blocks make less again than others"
    cost = replace(planner, settings=replace(settings, memory_policy=short.memory_policy)).cost_graph(search.mesh)
    components = cost.components(search.outcome.assignment)
    assert short.prediction.num_bytes == components[BYTES]
    assert short.prediction.additive_price >= step_seconds(components)
    assert short.prediction.peak_bytes == own.peak_bytes <= 0.9e9


def test_a_search_for_a_better_step_than_a_known_one_ends_where_prices_are_clearly_above_it(graph: Graph) -> None:
    settings = SearchConfig(memory_bytes=1.2e9, passes=2)
    planner = Planner.of(graph, (), sw.Cluster.load("h100-1x8"), (sw.Mesh(dp=8),), settings)
    free = fit_memory(planner)
    step = free.prediction.planned_seconds
    near, far = (replace(planner, settings=replace(settings, known=own)) for own in (step, 0.1 * step))
    assert fit_memory(near).choice == free.choice
    with raises(sw.PlanError, f"{0.1 * step:.3g}", "known"):
        fit_memory(far)
    together = replace(planner, settings=replace(settings, known=1.5 * step, together=2))
    with raises(sw.PlanError, f"a plan with {1.5 * step:.3g} s", "is known"):
        fit_memory(together)


def test_the_price_of_what_waits_on_the_host_has_its_copies(graph: Graph) -> None:
    cluster, settings = sw.Cluster.load("h100-1x8"), SearchConfig(memory_policy=memory_policy(graph, "on the host"))
    planner = Planner.of(graph, (), cluster, (sw.Mesh(dp=8),), settings)
    policy = PolicyResult(planner)
    ((search,), _) = policy.searches
    built = planner._built(candidates([search], "dynamic_programming", planner.limit)[0], whole=True)
    assert built.spmd is not None
    program = busiest_program(built.spmd, planner.cache.vjp_cache)
    out = [one for one in program.forward if isinstance(one, Copy)]
    copied = sum(program.forms[name].num_bytes for one in out for name in one.operands)
    assert copied > 0
    assert policy._copies(search) == pytest.approx(2 * copied / cluster.device.host_bandwidth, rel=0.05)


def test_a_shorter_graph_computes_the_shorter_model(graph: Graph) -> None:
    folding = Folding.of(graph)
    assert [len(run) for run in folding.runs(lambda number: 0)] == [1, LAYERS - 1]
    short = folding.without(range(2, LAYERS - 1))
    assert short is not None
    with torch.device("meta"):
        model, ids = Deep(), torch.zeros(16, 256, dtype=torch.int64)
        model.layers = model.layers[:3]
    assert GraphForm.of(short).key == GraphForm.of(capture(model, (ids, ids)).graph).key
    assert folding.without(()) is graph


def test_what_is_read_from_afar_is_not_left_out() -> None:
    folding = Folding.of(graph_of(skips=True))
    assert folding.without([LAYERS // 2]) is None
    assert folding.without([2]) is not None, "others are"


def test_forms_tell_blocks_that_differ(graph: Graph) -> None:
    with torch.device("meta"):
        wide, ids = Deep(), torch.zeros(16, 256, dtype=torch.int64)
    wide.layers[4].norm.eps = 1e-3
    kinds = Folding.of(capture(wide, (ids, ids)).graph).kinds
    assert len(set(kinds[1:])) == 2
    assert kinds[4] != kinds[3] == kinds[5]
    frozen = Deep().to("meta")
    frozen.layers[6].up.weight.requires_grad_(False)
    kinds = Folding.of(capture(frozen, (ids, ids)).graph).kinds
    assert kinds[6] not in (*kinds[:6], *kinds[7:])


def test_runs_repeat_periods_of_several_blocks() -> None:
    folding = Folding(graph_of(), (), (0,) * 22, ())
    choices = "aab" + "cd" * 4 + "eeeef" * 2 + "g"
    runs = folding.runs(choices.__getitem__, least=4, longest_period=4)
    assert [choices[run.start : run.stop] for run in runs] == ["aa", "b", "cdcdcdcd", "eeee", "f", "eeee", "f", "g"]
    assert [run.step for run in runs] == [1, 1, 2, 1, 1, 1, 1, 1]


@pytest.mark.parametrize("differ", ["kinds", "policies", "few policies"])
def test_blocks_that_differ_in_turn_fold(differ: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As layers with local and global attention, or a plan that recomputes every other block. Runs of the same blocks
    need one longer program together, however many they are."""
    if differ == "few policies":
        monkeypatch.setattr(block_extrapolation, "MAX_FOLDED_SHARE", 1.0)
    with torch.device("meta"):
        model = Deep(layers=30 if differ == "few policies" else 13)
        ids = torch.zeros(16, 256, dtype=torch.int64)
    for layer in model.layers[::2] if differ == "kinds" else ():
        layer.norm.eps = 1e-3
    graph = capture(model, (ids, ids)).graph
    whole_policy = MemoryPolicy.of(graph, (), "full").segments
    segments = {
        "kinds": (),
        "policies": whole_policy[::2],
        "few policies": tuple(segment for number, segment in enumerate(whole_policy) if number % 10),
    }[differ]
    settings = SearchConfig(memory_policy=MemoryPolicy("full", segments=segments), bucket_bytes=0)
    planner = Planner.of(graph, (), sw.Cluster.load("h100-1x8"), (sw.Mesh(dp=8),), settings)
    searches, _ = planner.searches()
    candidate = candidates(searches, "dynamic_programming", planner.limit)[0]
    short, whole = planner._built(candidate), planner._built(candidate, whole=True)
    assert short.spmd is None, "it is folded"
    assert short.step is not None
    assert whole.step is not None
    assert short.step.seconds == pytest.approx(whole.step.seconds, rel=2e-3)
    assert short.num_bytes == pytest.approx(whole.num_bytes, rel=2e-3)
    assert short.step.kept_bytes == whole.step.kept_bytes


@pytest.mark.parametrize("how", ["cheap", "gathered again"])
def test_models_of_other_numbers_of_equal_blocks_share_the_steps_of_short_programs(how: str) -> None:
    cache, sizes = PlanningCache(), []
    for layers in (LAYERS, LAYERS + 3):
        graph = graph_of(layers=layers)
        settings = SearchConfig(memory_policy=memory_policy(graph, how), bucket_bytes=0)
        alone, sharing = (
            Planner.of(graph, (), sw.Cluster.load("h100-1x8"), (sw.Mesh(dp=8),), settings, used)
            for used in (PlanningCache(), cache)
        )
        searches, _ = alone.searches()
        candidate = candidates(searches, "dynamic_programming", alone.limit)[0]
        assert sharing._built(candidate).spmd is None, "it is folded"
        assert sharing._built(candidate).step == alone._built(candidate).step
        sizes.append(len(cache.table("steps")))
    assert sizes[0] == sizes[1], "nothing is simulated for the second model"
