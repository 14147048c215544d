"""What a plan says about itself: the seconds of the program that it is, how far the search's objective is from its
bound, and why a simulation preferred another plan."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from search.cost_graphs import cluster_of
from shardwise.costs.collectives import Links
from shardwise.costs.prices import Prices
from shardwise.graph.capture import capture
from shardwise.partition.pricing import collective_seconds
from shardwise.search.auto import PassedOver, candidate_meshes


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


def test_a_shared_conversion_is_predicted_once_whatever_the_objective_counts() -> None:
    """Two layouts are each taken by two consumers, and at most one can be the shared one."""
    plan, model, inputs = planned(strategies=SPLIT)
    predicted = plan.prediction
    assert predicted is not None
    assert predicted.objective > predicted.pass_seconds * 1.001, "the objective charges a conversion twice"
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


def test_the_gap_is_that_of_the_objective() -> None:
    plan, _, _ = planned()
    own = plan.prediction
    assert own is not None
    assert own.bound > 0
    assert own.objective >= own.pass_seconds * (1 - 1e-9)
    assert own.objective >= own.bound * (1 - 1e-9)
    dearer = replace(own, objective=1.25 * own.bound)
    assert dearer.optimality_gap == pytest.approx(0.25)
    assert replace(own, objective=own.bound).optimality_gap == 0


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


def test_a_plan_chosen_by_simulation_says_what_that_says_of_both() -> None:
    plan, _, _ = planned()
    assert plan.prediction is not None
    assert "chosen by simulation" not in str(plan)
    own = replace(
        plan.prediction,
        passes=2,
        objective=1.43 * plan.prediction.bound,
        simulated_seconds=0.010,
        passed_over=PassedOver(objective=0.004, simulated_seconds=0.0125, peak_bytes=2048.0),
    )
    chosen = replace(plan, prediction=own)
    text = " ".join(str(chosen).split())
    assert "simulated step 20 ms" in text
    assert "chosen by simulation: the plan of the least additive price, 8 ms, takes 25 ms simulated, peak 2 KiB" in text
    assert "optimality gap 43.00%" in text
    assert sw.Plan.from_json(chosen.to_json()).prediction == own
