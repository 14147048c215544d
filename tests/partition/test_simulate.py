"""The timeline of a simulated step, on programs whose seconds can be added up by hand."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import shardwise as sw
from shardwise.costs.cluster import Cluster
from shardwise.costs.collectives import Links
from shardwise.costs.prices import Prices
from shardwise.graph.capture import capture
from shardwise.partition.memory import memory_of
from shardwise.partition.pricing import price_program
from shardwise.partition.simulate import simulate
from shardwise.partition.spmd import Spmd, build_spmd
from shardwise.plans.bind import bind
from shardwise.plans.printing import format_bytes
from shardwise.plans.ranking import CLEARLY, MAX_OPERATORS, ranked
from shardwise.search.auto import Search

CLUSTER = Cluster.local(4)


class Mlp(nn.Module):
    def __init__(self, layers: int = 3, width: int = 256) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = F.relu(layer(x))
        return x.square().mean()


def program(bucket_bytes: int = 25 * 2**20, **options: Any) -> tuple[Spmd, Prices]:
    """The program of a plan, and prices."""
    with torch.device("meta"):
        model, inputs = Mlp(), (torch.empty(64, 256),)
    plan = sw.plan(model, inputs, 4, bucket_bytes=bucket_bytes, **options)
    graph = capture(model, inputs, {}).graph
    factored, choice = bind(plan, graph, training=True)
    spmd = build_spmd(
        graph,
        factored.rules,
        choice.strategies,
        choice.sources,
        plan.mesh,
        bucket_bytes=bucket_bytes,
        route=choice.router,
        shared=choice.shared,
    )
    return spmd, Prices(Links(CLUSTER, plan.mesh))


def test_on_one_device_the_step_is_its_operators() -> None:
    spmd, prices = program(mode="stand_alone")
    step, added = simulate(spmd, prices), price_program(spmd, prices)
    assert step.communication == 0
    assert step.seconds == pytest.approx(added.compute + added.update)


def test_gradients_are_hidden_behind_the_operators_that_are_left() -> None:
    spmd, prices = program(mode="data_parallel", bucket_bytes=200_000)  # a bucket for each layer
    step = simulate(spmd, prices)
    assert len(spmd.backward_collectives()) >= 3
    assert 0 < step.exposed < step.communication
    assert step.seconds == pytest.approx(step.compute + step.exposed)


def test_one_bucket_of_everything_hides_nothing() -> None:
    spmd, prices = program(mode="data_parallel", bucket_bytes=200_000)
    small = simulate(spmd, prices)
    # Without buckets every gradient is waited for on the spot.
    alone, prices = program(mode="data_parallel", bucket_bytes=0)
    waited = simulate(alone, prices)
    assert waited.exposed == pytest.approx(waited.communication)
    assert small.exposed < waited.exposed


def test_a_step_is_no_faster_than_its_operators_or_the_busiest_link() -> None:
    for options in (
        {"mode": "data_parallel"},
        {"mesh": sw.Mesh(tp=4), "strategies": {"layers.*": "k@tp"}, "search": "sharding_propagation"},
    ):
        spmd, prices = program(**options)
        step = simulate(spmd, prices)
        assert step.seconds >= step.compute
        assert step.seconds >= step.communication
        assert step.seconds <= step.compute + step.communication + 1e-12


def test_messages_are_those_of_the_program() -> None:
    spmd, prices = program(mode="data_parallel")
    sent = [*spmd.forward_collectives(), *spmd.backward_collectives()]
    expected = sum(prices.links.seconds(c.kind, c.axes, c.num_bytes) for c in sent)
    assert simulate(spmd, prices).communication == pytest.approx(expected)


def test_the_peak_is_that_of_the_walk() -> None:
    spmd, prices = program(mode="data_parallel")
    assert simulate(spmd, prices).peak == memory_of(spmd, prices).peak


# ------------------------------------------------------------------------------------------------------------- ranking


@dataclass(frozen=True)
class Verdict:
    seconds: float
    peak_bytes: int
    peak_at: str = "forward of /x"

    @property
    def peak_parts(self) -> Mapping[str, int]:
        return {"parameters": self.peak_bytes}


def searched_plan() -> Search:
    with torch.device("meta"):
        model, inputs = Mlp(), (torch.empty(64, 256),)
    found = sw.plan(model, inputs, 4, mesh=sw.Mesh(dp=4), search="dynamic_programming").found
    assert found is not None
    return found


def with_candidate(search: Search) -> tuple[Search, list[int]]:
    """A search that has seen another assignment of the same price."""
    other = [own for _, own in k_best(search)][1]
    search.outcome.candidates[:] = [other]
    return search, other


def k_best(search: Search) -> list[tuple[float, list[int]]]:
    from shardwise.search.cost_graph import Weights
    from shardwise.search.k_best import k_best as best

    return best(search.cost.weighted(Weights(1.0, 1.0, 0.0)), 2)


def verdicts(search: Search, other: list[int], own: Verdict, its: Verdict) -> Any:
    def simulated(_: Search, assignment: list[int]) -> Verdict:
        return its if assignment == other else own

    return simulated


@pytest.mark.parametrize(
    ("own", "its", "taken"),
    [
        (Verdict(1.0, 10), Verdict(0.9, 10), "other"),
        (Verdict(1.0, 10), Verdict(CLEARLY + 1e-6, 10), "first"),  # not clearly faster
        (Verdict(1.0, 10), Verdict(0.9, 200), "first"),  # the other does not fit
        (Verdict(1.0, 200), Verdict(2.0, 10), "other"),  # the first does not fit
    ],
)
def test_the_fastest_simulated_plan_that_fits_is_taken(own: Verdict, its: Verdict, taken: str) -> None:
    search, other = with_candidate(searched_plan())
    first = search.outcome.assignment
    search.cost.components(other)
    found = ranked(search, 100.0, verdicts(search, other, own, its))
    close = search.cost.components(other)[:3].sum() <= 1.05 * search.cost.components(first)[:3].sum()
    assert close, "the second best of this model is within the margin"
    assert found.search.outcome.assignment == (other if taken == "other" else first)
    assert found.excess == 0
    expected: Mapping[str, Verdict] = {"other": its, "first": own}
    assert found.prediction.simulated_seconds == expected[taken].seconds
    passed_over = found.prediction.passed_over
    if taken == "first":
        assert passed_over is None
    else:
        assert passed_over is not None
        assert (passed_over.simulated_seconds, passed_over.peak_bytes) == (own.seconds, own.peak_bytes)
        assert passed_over.objective == search.outcome.seconds


def test_a_peak_beyond_the_limit_is_told() -> None:
    search, other = with_candidate(searched_plan())
    found = ranked(search, 100.0, verdicts(search, other, Verdict(1.0, 150), Verdict(1.0, 130)))
    assert found.excess == 30


def test_very_large_graphs_are_not_simulated() -> None:
    search = searched_plan()
    assert len(search.cost.domains.graph.ops) < MAX_OPERATORS
    assert ranked(search, 1.0, None).prediction.simulated_seconds == 0


def test_a_plan_whose_peak_does_not_fit_is_refused_with_the_peak() -> None:
    with torch.device("meta"):
        model, inputs = Mlp(), (torch.empty(64, 256),)
    free = sw.plan(model, inputs, 4, mesh=sw.Mesh(dp=4), search="dynamic_programming")
    assert free.prediction is not None
    assert free.prediction.peak_bytes > 0
    with pytest.raises(sw.PlanError, match="no plan fits"):
        sw.plan(model, inputs, 4, mesh=sw.Mesh(dp=4), search="dynamic_programming", memory_bytes=1e5)


# From far too little to a little less than the least: the search refuses the first limits, the simulated peak the last.
@pytest.mark.parametrize("share", [0.1, 0.5, 0.9, 0.99])
@pytest.mark.parametrize("search", ["dynamic_programming", "recursive_programming"])
def test_a_refusal_adds_up_the_least_memory_and_names_the_limit_that_was_asked_for(share: float, search: str) -> None:
    with torch.device("meta"):
        model, inputs = Mlp(), (torch.empty(64, 256),)

    def plan(limit: float) -> sw.Plan:
        return sw.plan(model, inputs, 4, mesh=sw.Mesh(dp=4), search=search, memory_bytes=limit)

    limit = share * least_peak(model, inputs, search)
    with pytest.raises(sw.PlanError, match="no plan fits") as caught:
        plan(limit)
    text = str(caught.value)
    assert f"{format_bytes(int(limit))} are allowed" in text
    needed = next(line for line in text.splitlines() if line.startswith("  needed:")).partition(":")[2]
    parts, _, total = needed.partition(" = ")
    size = int(total.partition(" bytes")[0].replace(",", ""))
    assert sum(int(part.rpartition(" ")[2].replace(",", "")) for part in parts.split(" + ")) == size
    assert f"needs is {format_bytes(size)} a device" in text
    assert size > limit
    assert "storage layers." in text


def least_peak(model: nn.Module, inputs: tuple[torch.Tensor, ...], search: str) -> float:
    """The least limit under which a plan is found, to a thousandth."""
    low, high = 0.0, 1e7
    while high - low > 1e-3 * high:
        middle = (low + high) / 2
        try:
            sw.plan(model, inputs, 4, mesh=sw.Mesh(dp=4), search=search, memory_bytes=middle)
        except sw.PlanError:
            low = middle
        else:
            high = middle
    return high


def test_a_plan_keeps_its_peak_within_the_limit() -> None:
    with torch.device("meta"):
        model, inputs = Mlp(), (torch.empty(64, 256),)
    free = sw.plan(model, inputs, 4, mesh=sw.Mesh(dp=4), search="dynamic_programming")
    assert free.prediction is not None
    limit = 0.8 * free.prediction.peak_bytes
    tight = sw.plan(model, inputs, 4, mesh=sw.Mesh(dp=4), search="dynamic_programming", memory_bytes=limit)
    assert tight.prediction is not None
    assert tight.prediction.peak_bytes <= limit
