"""What a plan survives, against marks that are counted: every element says who holds it."""

from __future__ import annotations

import itertools
import math
import warnings
from typing import Any

import pytest
import torch

import shardwise as sw
from raising import raises
from shardwise.errors import PlanError
from shardwise.plans.plan import Plan
from shardwise.plans.survival import survival
from shardwise.runtime.local_shards import shard
from train.runs import batch, make


def plan_of(mesh: sw.Mesh, **how: Any) -> Plan:
    with warnings.catch_warnings(action="ignore"):
        return sw.plan(make(), batch(0), mesh.num_devices, mesh=mesh, search="sharding_propagation", **how)


TENSORS = {"qkv": "n@tp", "up": "n@tp", "tokens": "v@tp", "head": "n@tp"}
PLANS: dict[str, tuple[sw.Mesh, dict[str, Any]]] = {
    "copies everywhere": (sw.Mesh(dp=4), {}),
    "zero": (sw.Mesh(dp=4), {"zero": 3}),
    "two of each": (sw.Mesh(dp=2, tp=2), {"strategies": TENSORS}),
    "some of each": (sw.Mesh(tp=4), {"strategies": {"qkv": "n@tp", "head": "n@tp"}}),
}


def lost_bytes(plan: Plan, lost: tuple[int, ...]) -> tuple[int, set[str]]:
    """By counting: the elements that no other rank holds, of float64 parameters with two states, and of buffers."""
    found, names = 0, set()
    for entry in (*plan.parameters, *plan.buffers):
        count = 1
        for size in entry.shape:
            count *= size
        elements = torch.arange(count).view(entry.shape)
        held = set()
        for rank in set(range(plan.num_ranks)) - set(lost):
            held |= set(shard(elements, plan.layouts[entry.name], plan.mesh.coordinates(rank)).flatten().tolist())
        if len(held) < count:
            names.add(entry.name)
            itemsize = 8 if entry.dtype in ("f64", "i64") else 4
            found += (count - len(held)) * itemsize * (3 if entry in plan.parameters else 1)
    return found, names


@pytest.mark.parametrize("kind", PLANS)
def test_every_loss_is_that_of_the_elements_that_nobody_else_holds(kind: str) -> None:
    mesh, how = PLANS[kind]
    plan = plan_of(mesh, **how)
    found = plan.survives()
    fatal = []
    for count in range(1, mesh.num_devices + 1):
        for lost in itertools.combinations(range(mesh.num_devices), count):
            loss = found.loss_of(lost)
            assert (loss.num_bytes, set(loss.names)) == lost_bytes(plan, lost)
            assert loss.costs_nothing == (loss.num_bytes == 0)
            fatal += [] if loss.costs_nothing else [count]
    assert found.tolerated == min(fatal) - 1


@pytest.mark.parametrize("kind", PLANS)
@pytest.mark.parametrize("size", [1, 2])
def test_the_extra_copies_are_all_that_any_one_loss_needs_and_no_more(kind: str, size: int) -> None:
    mesh, how = PLANS[kind]
    found = plan_of(mesh, **how).survives(size)
    for machine, loss in zip(found.machines, found.losses, strict=True):
        kept = [copy for copy in found.extra_copies if set(copy.holders) <= set(machine)]
        assert sum(copy.num_bytes for copy in kept) == loss.num_bytes
        assert not any(copy.keeper in machine for copy in kept)


def test_it_reads_as_one_would_say_it() -> None:
    text = str(plan_of(sw.Mesh(dp=4), zero=3).survives())
    assert "held nowhere else: back to the last checkpoint" in text
    assert "cheapest extra copies for any one rank: 25 KiB in all, 6.26 KiB on a rank" in text
    text = str(plan_of(sw.Mesh(dp=4)).survives(2))
    assert text.splitlines() == [
        "loss of one machine of 2, with the states of adamw:",
        "  ranks 0-3: nothing, others hold all of it",
        "nothing is lost with any one machine; with 2 something may be",
    ]
    assert "there is no other machine to keep a copy" in str(plan_of(sw.Mesh(dp=2)).survives(2))


def test_stages_hold_what_is_theirs() -> None:
    layers = [torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU()) for _ in range(4)]
    model, inputs = torch.nn.Sequential(*layers), (torch.zeros(8, 8), torch.zeros(8, 8))
    plan = sw.plan(model, inputs, 4, stages=2, global_batch=8, micro_batch=4, loss=torch.nn.functional.mse_loss)
    found = plan.survives()
    assert {rank for machine in found.machines for rank in machine} == {0, 1, 2, 3}
    place = plan.stages[0].placement.ranks
    expected = {entry.name for entry in plan.stages[0].parameters}
    assert set(found.loss_of(place).names) == expected
    elements = sum(math.prod(entry.shape) for entry in plan.stages[0].parameters)
    assert found.loss_of(place).num_bytes == elements * 4 * 3


def test_machines_and_ranks_that_do_not_exist_are_refused() -> None:
    plan = plan_of(sw.Mesh(dp=4))
    for size in (0, 3, 8):
        with raises(PlanError, "4 ranks", f"of {size}"):
            survival(plan, size)
    with raises(PlanError, "rank 7", "plan's 4", fix="0 to 3"):
        plan.survives().loss_of([1, 7])


@pytest.mark.parametrize("size", [1, 2])
def test_with_peer_copies_any_one_machine_may_be_lost(size: int) -> None:
    plan = plan_of(sw.Mesh(dp=4), zero=3)
    plain, copied = plan.survives(size), plan.survives(size, peer_copies=True)
    assert not any(loss.costs_nothing for loss in plain.losses)
    assert all(loss.costs_nothing for loss in copied.losses)
    assert (plain.tolerated, copied.tolerated) == (0, 1)
    assert copied.made == plain.extra_copies
    assert copied.extra_copies == ()
    assert sum(sum(tensors.values()) for tensors in copied.held.values()) == sum(
        sum(tensors.values()) for tensors in plain.held.values()
    ), "the same bytes, held by more"
    assert not copied.loss_of(range(4)).costs_nothing
    assert f"copies are made for any one {'rank' if size == 1 else 'machine'}" in str(copied)


def test_seconds_of_copies_are_bytes_by_the_link_between_machines() -> None:
    with warnings.catch_warnings(action="ignore"):
        cluster = sw.Cluster.load("h100-2x8").with_nodes(2, 2)
        plan = sw.plan(make(), batch(0), cluster, mesh=sw.Mesh(dp=4), search="dynamic_programming", zero=3)
    found = plan.survives(2)
    assert found.send_rate == cluster.levels[-1].bandwidth / cluster.levels[-1].shared_by
    assert ("sent in" in str(found)) == bool(found.extra_copies)
