"""A model whose whole state is more than a rank may hold trains within that."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import shardwise as sw
from costs.live_bytes import LiveBytes
from launch.gloo_ranks import RunRanks
from runtime.training import train
from shardwise.runtime.initial.materialize import full_tensors

WIDTH, LAYERS, BATCH, STEPS = 256, 12, 16, 3
LIMIT = 9e6  # bytes of a rank; parameters, gradients and both states of AdamW take 12.6e6
SEED = 5


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + F.gelu(block(x))
        return x.square().mean()


def batch(step: int) -> torch.Tensor:
    return torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(step))


def on_rank(text: str) -> tuple[list[float], int]:
    """Losses, and the most bytes of tensors that were live at once in the steps after the first, which is traced."""
    with sw.deferred(seed=SEED):
        module = Deep()
    par = sw.parallelize(module, sw.Plan.from_json(text))
    optimizer = torch.optim.AdamW(par.parameters(), foreach=False)
    losses = []

    def step(number: int) -> None:
        losses.append(par.step(batch(number)).item())
        optimizer.step()
        optimizer.zero_grad()

    step(0)
    states = [state for own in optimizer.state.values() for state in own.values()]
    held = sum(tensor.untyped_storage().nbytes() for tensor in (*par.parameters(), *states))
    with LiveBytes() as live:
        for number in range(1, STEPS):
            step(number)
    return losses, held + live.peak


def alone() -> tuple[list[float], int]:
    with sw.deferred(seed=SEED):
        empty = Deep()
    module = Deep()
    module.load_state_dict(dict(full_tensors(empty)))
    losses = train(module, ((batch(step),) for step in range(STEPS)), torch.optim.AdamW(module.parameters())).losses
    return losses, 4 * sum(p.nbytes for p in module.parameters())


@pytest.mark.parametrize("way", [{}, {"mode": "data_parallel", "zero": 3}])
@pytest.mark.sampled(1)
def test_a_model_that_no_rank_could_hold_trains_within_its_memory(way: dict[str, Any], run_ranks: RunRanks) -> None:
    expected, state = alone()
    assert state > 1.3 * LIMIT
    with sw.deferred(seed=SEED):
        module = Deep()
    plan = sw.plan(module, (batch(0),), 2, memory_bytes=LIMIT, **way)
    for losses, peak in run_ranks(on_rank, 2, plan.to_json()):
        assert peak < LIMIT
        assert losses == [pytest.approx(loss, rel=1e-5) for loss in expected]
