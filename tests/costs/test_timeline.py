"""The timeline of a simulated step, on programs whose seconds can be added up by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import shardwise as sw
from search.small_models import Chain
from shardwise.costs.cluster import Cluster
from shardwise.costs.collectives import Links
from shardwise.costs.prices import Prices
from shardwise.costs.pricing import price_program
from shardwise.costs.timeline import SimulatedStep, simulate
from shardwise.graph.capture import capture
from shardwise.plans.bind import program_of
from shardwise.programs.spmd import SpmdProgram

LOCAL = Cluster.local(4)
CLUSTER = replace(LOCAL, device=replace(LOCAL.device, overlap=1.0))  # whose network moves bytes by itself


def program(bucket_bytes: int = 25 * 2**20, **options: Any) -> tuple[SpmdProgram, Prices]:
    with torch.device("meta"):
        model, inputs = Chain(), (torch.empty(64, 256),)
    plan = sw.plan(model, inputs, 4, bucket_bytes=bucket_bytes, **options)
    graph = capture(model, inputs, {}).graph
    return program_of(plan, graph, training=True), Prices(Links(CLUSTER, plan.mesh))


def test_on_one_device_the_step_is_its_operators() -> None:
    spmd, prices = program(mode="stand_alone")
    step, added = simulate(spmd, prices), price_program(spmd, prices)
    assert step.communication == 0
    # Prices of operators read whole cotangents; in the program that of the sum is one number, seen many times.
    saved = (64 * 256 - 1) * 4 / prices.device.bytes_per_second()
    assert step.seconds + saved == pytest.approx(added.compute + added.update)


def test_every_pass_but_the_first_adds_its_gradients_to_those_of_earlier_ones() -> None:
    spmd, prices = program(mode="stand_alone")
    four = replace(prices, passes=4)
    events = [event for event in simulate(spmd, four).events if "added up" in event.name]
    num_bytes = sum(value.numel * 4 for value in map(spmd.graph.by_name.__getitem__, spmd.graph.updated))
    added = 3 / 4 * 3 * num_bytes / prices.device.bytes_per_second()
    assert sum(event.seconds for event in events) == pytest.approx(added)
    assert len(events) == len(spmd.graph.updated)
    assert not [event for event in simulate(spmd, prices).events if "added up" in event.name]
    once, often = (price_program(spmd, own).update for own in (prices, four))
    assert often == pytest.approx(once / 4 + added)


def test_gradients_are_hidden_behind_the_operators_that_are_left() -> None:
    spmd, prices = program(mode="data_parallel", bucket_bytes=200_000)  # a bucket for each layer
    step = simulate(spmd, prices)
    assert len(spmd.backward_collectives()) >= 3
    assert 0 < step.exposed < step.communication
    assert step.seconds == pytest.approx(step.compute + step.exposed)


def test_messages_over_two_axes_run_beside_operators_in_the_order_of_the_program() -> None:
    hybrid = {"mesh": sw.Mesh(node=2, gpu=2), "zero": sw.Zero(2, over=("gpu",)), "mode": "data_parallel"}
    spmd, prices = program(bucket_bytes=200_000, **hybrid)
    step = simulate(spmd, prices)
    sent = [(c.kind, c.axes) for c in (*spmd.forward_collectives(), *spmd.backward_collectives())]
    messages = [(e.name, e.stream) for e in step.events if e.stream]
    assert [own for own in messages if own in sent] == [own for own in sent if own in messages]
    assert {axes for _, axes in sent} >= {("node",), ("gpu",)}

    def overlapping(own: SimulatedStep) -> int:
        """Pairs of messages inside of nodes and between them that run at once."""
        pairs = [(a, b) for a in own.events for b in own.events if (a.stream, b.stream) == (("gpu",), ("node",))]
        return sum(a.start < b.start + b.seconds and b.start < a.start + a.seconds for a, b in pairs)

    assert not overlapping(step), "one network carries both"
    two_nodes = Cluster.load("h100-2x8").with_nodes(2, 2)
    assert overlapping(simulate(spmd, Prices(Links(two_nodes, spmd.mesh)))), "links of their own"
    alone, prices = program(bucket_bytes=0, **hybrid)
    waited = simulate(alone, prices)
    assert waited.exposed == pytest.approx(waited.communication)
    assert 0 < step.exposed < step.communication


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


def test_operators_get_less_done_beside_messages() -> None:
    """Where the cores that compute move the bytes, nothing is hidden."""
    spmd, _ = program(mode="data_parallel", bucket_bytes=200_000)

    def step(overlap: float) -> SimulatedStep:
        cluster = replace(CLUSTER, device=replace(CLUSTER.device, overlap=overlap))
        return simulate(spmd, Prices(Links(cluster, spmd.mesh)))

    none, half, whole = step(0.0), step(0.5), step(1.0)
    assert none.exposed == pytest.approx(none.communication)
    assert none.compute == pytest.approx(half.compute) == pytest.approx(whole.compute)
    assert whole.exposed <= half.exposed < none.exposed


def test_messages_are_those_of_the_program() -> None:
    spmd, prices = program(mode="data_parallel")
    sent = [*spmd.forward_collectives(), *spmd.backward_collectives()]
    expected = sum(prices.links.seconds(c.kind, c.axes, c.num_bytes) for c in sent)
    assert simulate(spmd, prices).communication == pytest.approx(expected)
