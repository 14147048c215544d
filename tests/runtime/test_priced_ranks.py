"""Plans that were chosen by price, on real gloo ranks: the training of one process, step by step."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch.distributed as dist

import shardwise as sw
from launch.gloo_ranks import RunRanks
from runtime.small_gpt import batch, make_gpt
from runtime.training import Trained, check_ranks, train
from shardwise.costs.units import Figures

BATCHES = [batch(8, step) for step in range(4)]


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


def rank_trains(text: str) -> Trained:
    par = sw.parallelize(make_gpt(), sw.Plan.from_json(text))
    found = train(par, BATCHES)
    dist.barrier()
    return found


@pytest.mark.parametrize("balance", [1e-2, 1e-5])
@pytest.mark.sampled(1)
def test_training_under_a_priced_plan_is_that_of_one_process(run_ranks: RunRanks, balance: float) -> None:
    plan = priced_plan(balance)
    assert plan.optimality_gap is not None
    assert plan.shared, "values with several consumers have a layout that they share"
    split = [entry for entry in plan.operators if "@" in entry.strategy]
    assert len(split) > len(plan.operators) / 2, "the work is divided"
    ranks = run_ranks(rank_trains, 4, plan.to_json())
    # Both are float64 and differ by the order of sums; AdamW amplifies that where gradients are near zero.
    check_ranks(ranks, train(make_gpt(), BATCHES), of_losses=1e-12)


def test_the_plan_depends_on_the_links() -> None:
    fast, slow = priced_plan(1e-2), priced_plan(1e-5)
    assert [e.strategy for e in fast.operators] != [e.strategy for e in slow.operators]
