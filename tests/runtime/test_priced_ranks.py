"""Plans that were chosen by price, on real gloo ranks: the training of one process, step by step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import shardwise as sw
from runtime.small_gpt import batch, make_gpt
from shardwise.costs.units import Figures
from shardwise.runtime.local_shards import shard

RunRanks = Callable[..., list[Any]]
STEPS = 4
# Both sides are float64 and differ by the order of sums; AdamW amplifies that where gradients are near zero.
TOLERANCE = 1e-9


def described_cluster(balance: float) -> sw.Cluster:
    """Four devices in two nodes, so slow at computing that dividing the work pays even for a tiny model. ``balance``:
    how fast the links are beside that."""
    base = sw.Cluster.load("h100-2x2")
    device = replace(
        base.device,
        kernel_latency=0.0,
        matmul_half_flops=0.0,
        flops=Figures({dtype: flops * 1e-6 for dtype, flops in base.device.flops.items()}),
        memory_bandwidth=base.device.memory_bandwidth * 1e-4,
    )
    levels = tuple(
        replace(level, latency=0.0, launch=0.0, bandwidth=level.bandwidth * balance) for level in base.levels
    )
    return replace(base, device=device, levels=levels)


def priced_plan(balance: float) -> sw.Plan:
    with sw.deferred(seed=0):
        model = make_gpt()
    return sw.plan(model, batch(8, 0), described_cluster(balance), search="dynamic_programming")


def one_process() -> tuple[list[float], dict[str, torch.Tensor]]:
    model = make_gpt()
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    for step in range(STEPS):
        loss = model(*batch(8, step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, {name: p.detach().clone() for name, p in model.named_parameters()}


def rank_trains(text: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    plan = sw.Plan.from_json(text)
    par = sw.parallelize(make_gpt(), plan)
    optimizer, losses = torch.optim.AdamW(par.parameters(), lr=1e-2), []
    for step in range(STEPS):
        loss = par.step(*batch(8, step))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    found = {name: p.detach().clone() for name, p in par.named_parameters()}
    dist.barrier()
    return losses, found


@pytest.mark.parametrize("balance", [1e-2, 1e-5])
@pytest.mark.sampled(1)
def test_training_under_a_priced_plan_is_that_of_one_process(run_ranks: RunRanks, balance: float) -> None:
    plan = priced_plan(balance)
    assert plan.optimality_gap is not None
    assert plan.shared, "values with several consumers have a layout that they share"
    split = [entry for entry in plan.operators if "@" in entry.strategy]
    assert len(split) > len(plan.operators) / 2, "the work is divided"
    losses, parameters = one_process()
    for rank, (own, shards) in enumerate(run_ranks(rank_trains, 4, plan.to_json())):
        assert own == pytest.approx(losses, rel=1e-12)
        for name, value in parameters.items():
            layout = plan.layouts[name]
            want = shard(value, layout, plan.mesh.coordinates(rank))
            assert (shards[name] - want).abs().max() <= TOLERANCE * value.abs().max(), (rank, name, str(layout))


def test_the_plan_depends_on_the_links() -> None:
    fast, slow = priced_plan(1e-2), priced_plan(1e-5)
    assert [e.strategy for e in fast.operators] != [e.strategy for e in slow.operators]
