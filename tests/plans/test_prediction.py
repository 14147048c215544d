"""What a plan says about itself: the seconds of the program that it is, how far its additive price is from the
bound, and why a simulation preferred another plan."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from raising import raises
from search.cost_graphs import cluster_of
from shardwise.api import step_memory
from shardwise.costs.collectives import Links
from shardwise.costs.prediction import PassedOver
from shardwise.costs.prices import Prices
from shardwise.costs.pricing import collective_seconds
from shardwise.graph.capture import capture
from shardwise.plans.quantities import format_bytes, format_seconds
from shardwise.search.mesh_shapes import candidate_meshes


class FourConsumers(nn.Module):
    """Two layers split the batch, two the features of the same value."""

    def __init__(self) -> None:
        super().__init__()
        self.maker = nn.Linear(16, 16, bias=False)
        self.a, self.b, self.c, self.d = (nn.Linear(16, 16, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.maker(x))
        return (self.a(y) * self.b(y) + self.c(y) * self.d(y)).square().mean()


def planned(**options: object) -> tuple[sw.Plan, nn.Module, tuple[Tensor, ...]]:
    torch.manual_seed(0)
    model, inputs = FourConsumers(), (torch.randn(8, 16),)
    given = {"mesh": sw.Mesh(x=2), "search": "dynamic_programming", "bucket_bytes": 0} | options
    return sw.plan(model, inputs, cluster_of(1, 2), **given), model, inputs  # type: ignore[arg-type]


SPLIT = {"a": "m@x", "b": "m@x", "c": "k@x", "d": "k@x"}


def test_a_shared_conversion_is_predicted_once_whatever_the_additive_price_counts() -> None:
    """Two layouts are each taken by two consumers, and at most one can be the shared one."""
    plan, model, inputs = planned(strategies=SPLIT)
    predicted = plan.prediction
    assert predicted is not None
    assert predicted.additive_price > predicted.pass_seconds * 1.001, "the additive price charges a conversion twice"
    report = sw.verify(model, inputs, plan, steps=1)
    assert report.ok
    graph, prices = capture(model, inputs, {}).graph, Prices(Links(cluster_of(1, 2), plan.mesh))
    updates = sum(
        prices.update(graph.by_name[source.value], plan.layouts[source.names[0]].max_local_numel)
        for source in graph.sources
        if source.kind == "parameter"
    )
    # The virtual cluster computes in float64.
    recorded = [replace(own, num_bytes=own.num_bytes // 2) for own in (*report.forward, *report.backward)]
    claimed = predicted.exposed + predicted.traffic - updates
    assert claimed == pytest.approx(collective_seconds(recorded, prices), rel=1e-9)


def test_the_gap_is_that_of_the_additive_price() -> None:
    plan, _, _ = planned()
    own = plan.prediction
    assert own is not None
    assert own.bound > 0
    assert own.additive_price >= own.pass_seconds * (1 - 1e-9)
    assert own.additive_price >= own.bound * (1 - 1e-9)
    dearer = replace(own, additive_price=1.25 * own.bound)
    assert dearer.optimality_gap == pytest.approx(0.25)
    assert replace(own, additive_price=own.bound).optimality_gap == 0


def test_the_bound_holds_for_every_mesh_that_was_searched() -> None:
    model, inputs = FourConsumers(), (torch.randn(8, 16),)
    cluster = sw.Cluster.load("h100-4x8")
    meshes = candidate_meshes(cluster, 3)
    assert len(meshes) > 1
    every = sw.plan(model, inputs, cluster, search="dynamic_programming", max_mesh_axes=3).prediction
    each = [sw.plan(model, inputs, cluster, search="dynamic_programming", mesh=mesh).prediction for mesh in meshes]
    assert every is not None
    assert every.bound == pytest.approx(min(own.bound for own in each if own is not None), rel=1e-9)
    assert 10**every.log10_plans == pytest.approx(sum(10**own.log10_plans for own in each if own is not None))


def test_a_plan_chosen_by_simulation_names_price_bound_and_simulated_step_apart() -> None:
    plan, _, _ = planned(strategies=SPLIT)
    assert "given away" not in str(plan), "the cheapest itself"
    bound = plan.prediction.bound
    own = replace(
        plan.prediction,
        passes=2,
        additive_price=1.03 * 1.4 * bound,
        simulated_seconds=0.010,
        passed_over=PassedOver(1.4 * bound, simulated_seconds=0.0125, peak_bytes=2048.0),
    )
    assert own.optimality_gap == pytest.approx(1.03 * 1.4 - 1)
    assert own.given_away == pytest.approx(0.03), "beside the cheapest plan, whatever that is above the bound"
    chosen = replace(plan.plan, predicted=own)
    text = " ".join(str(chosen).split())
    price, least, cheapest = (format_seconds(2 * seconds) for seconds in (own.additive_price, bound, 1.4 * bound))
    assert f"additive price {price}, which the search minimised: optimality gap 44.20%" in text
    assert f"bound {least}: no plan of 10^{own.log10_plans:.0f} has a lower price" in text
    assert "simulated step 20 ms, with overlap and buckets; peak memory" in text
    assert f"given away for the simulation 3.00%: the cheapest plan, of additive price {cheapest}, takes 25 ms" in text
    assert "does not fit" not in text
    assert sw.Plan.from_json(chosen.to_json()).prediction == own
    assert own.passed_over is not None
    larger = replace(own, passed_over=replace(own.passed_over, fits=False))
    text = str(replace(plan.plan, predicted=larger))
    assert "given away for the memory limit 3.00%" in text
    assert "peak 2 KiB, which does not fit" in text


def test_a_plan_must_fit_beside_the_reserve_of_its_devices_and_says_so() -> None:
    free, model, inputs = planned()
    peak, cluster = free.prediction.peak_bytes, cluster_of(1, 2)
    assert "reserve" not in str(free)

    def on(memory: float, reserve: float, **options: float) -> sw.Plan:
        device = replace(cluster.device, memory_bytes=memory, reserve_bytes=reserve)
        return sw.plan(
            model, inputs, replace(cluster, device=device), mesh=sw.Mesh(x=2), search="dynamic_programming",
            bucket_bytes=0, **options,
        )  # fmt: skip

    held, reserve, whole = map(format_bytes, (peak, 2 * peak, 4 * peak))
    assert f"peak memory {held} + reserve {reserve} of {whole} in " in str(on(4 * peak, 2 * peak))
    with raises(sw.errors.NothingFits, "reserve", section="nothing-fits", facts=["needed", "largest", "least"]):
        on(2 * peak, 1.9 * peak)
    given = on(2 * peak, 1.9 * peak, memory_bytes=2 * peak)
    assert given.prediction.peak_bytes <= 2 * peak, "what is given is clear of any reserve"


@pytest.mark.parametrize(
    "settings",
    [
        {"mode": "data_parallel"},
        {"mode": "data_parallel", "zero": 1},
        {"mode": "data_parallel", "zero": 3},
        {"mode": "data_parallel", "global_batch": 8, "micro_batch": 4},
        {"mode": "stand_alone"},
        {"mode": "semi_auto"},
        {"search": "sharding_propagation"},
        {"strategies": {"maker": "n@dp"}, "mesh": sw.Mesh(dp=2)},
    ],
    ids=str,
)
@pytest.mark.sampled(2)
def test_a_plan_that_was_not_searched_is_predicted_as_its_program_is(settings: dict[str, Any]) -> None:
    model, inputs = FourConsumers(), (torch.randn(8, 16),)
    cluster = sw.Cluster.load("h100-1x2")
    plan = sw.plan(model, inputs, cluster, **settings)
    cost = plan.prediction
    step = step_memory(model, inputs, plan)
    assert cost.peak_bytes == step.peak.num_bytes
    assert cost.passes == plan.micro_batches
    assert 0 < cost.simulated_seconds < 2 * cost.pass_seconds
    assert cost.optimality_gap is None
    assert not plan.is_searched
    assert sw.Plan.from_json(plan.to_json()) == plan
    assert replace(plan.plan, predicted=None, pricing=None) == plan, "ranks on other hosts have this plan, too"
    assert "simulated step" in str(plan)
    assert "additive price" not in str(plan)
    searched = sw.plan(model, inputs, cluster, search="dynamic_programming", mesh=settings.get("mesh"))
    named = [name for name, *_ in plan.diff(searched).settings]
    assert "step" in named or plan.strategies == searched.strategies or "data_parallel" not in settings.values()
    answer = sw.fits(model, inputs, cluster, seconds=0, **settings)
    assert answer.ok
    assert answer.step_seconds == cost.default_seconds
    assert answer.step is not None
    assert answer.step.peak.num_bytes == cost.peak_bytes
    assert answer.utilisation > 0
    tight = sw.fits(model, inputs, cluster, seconds=0, memory_bytes=cost.peak_bytes - 1, **settings)
    assert not tight.ok
    assert "the peak is" in str(tight)


def test_the_prediction_of_stages_that_were_not_priced_is_refused_with_the_mend() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Flatten(0))
    inputs = (torch.randn(8, 4),)
    plan = sw.plan(
        model, inputs, 2, mode="data_parallel", stages=2, micro_batch=4, loss=lambda output: output.square().sum()
    )
    with raises(sw.PlanError, "dynamic_programming", "prediction"):
        _ = plan.prediction
    assert "predicted" not in sw.Plan.from_json(plan.to_json()).to_json(), "files keep their names"
