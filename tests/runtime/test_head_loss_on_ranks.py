"""A head fused with its cross entropy on ranks: losses and parameters of one device."""

from __future__ import annotations

from typing import Any

from torch import nn

import shardwise as sw
from launch.gloo_ranks import RunRanks
from programs.test_head_loss import Language, batch
from runtime.training import Trained, check_ranks, train
from shardwise.graph import head_loss, head_losses

SETTINGS: dict[str, dict[str, Any]] = {
    "classes, micro-batches": {"mesh": sw.Mesh(tp=2), "strategies": {"head": "n@tp"}, "micro_batch": 2},
    "ZeRO 3, recomputed": {"mesh": sw.Mesh(dp=2), "zero": 3, "recompute": "all"},
    "stages": {"mesh": sw.Mesh(dp=1), "stages": 2, "micro_batch": 4},
}


def model() -> nn.Module:
    return Language(tied=True, shifts=True, label_smoothing=0.1).double()


def on_a_rank() -> dict[str, Trained]:
    head_losses.FEWEST_LOGITS, head_loss.BLOCK = 1, 7
    found = {}
    for name, settings in SETTINGS.items():
        plan = sw.plan(model(), batch(), 2, search="sharding_propagation", **settings)
        found[name] = train(sw.parallelize(model(), plan), [batch()] * 3)
    return found


def test_ranks_train_as_one_device(run_ranks: RunRanks) -> None:
    alone = train(model(), [batch()] * 3)
    ranks = run_ranks(on_a_rank, 2)
    for name in SETTINGS:
        check_ranks([found[name] for found in ranks], alone, name, rtol=0.0, atol=1e-9)
