"""Where nothing fits, a plan makes again what lets it fit: under lower and lower limits, each plan verified."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import shardwise as sw
from shardwise.costs.prediction import Prediction

MESH = sw.Mesh(dp=2)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Stack(nn.Module):
    """Blocks that hold many activations for few weights."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(32) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def plan(limit: float | None) -> tuple[sw.Plan, Prediction]:
    module, x = Stack().double(), torch.randn(1024, 32, dtype=torch.float64)
    found = sw.plan(module, (x,), 2, mesh=MESH, search="dynamic_programming", memory_bytes=limit)
    assert sw.verify(module, (x,), found).ok
    return found, found.prediction


def test_plans_for_less_and_less_memory_make_more_again_and_state_a_gap_that_holds_for_all_settings() -> None:
    free, unlimited = plan(None)
    assert not any(op.again for stage in free.stages for op in stage.operators)
    simulated, again = unlimited.simulated_seconds, 0
    for share in (0.9, 0.7, 0.5):
        limit = share * unlimited.peak_bytes
        tight, own = plan(limit)
        assert own.peak_bytes <= limit
        repeated = sum(bool(op.again) for stage in tight.stages for op in stage.operators)
        assert repeated > again, share  # more than under a higher limit
        again = repeated
        assert own.simulated_seconds >= simulated
        simulated = own.simulated_seconds
        # The plan without a limit is one of those that the bound is for, and of the lowest price.
        assert own.bound <= unlimited.additive_price * (1 + 1e-9)
        assert own.additive_price >= own.bound
        assert own.additive_price >= own.pass_seconds * (1 - 1e-9)
        assert own.num_bytes <= own.peak_bytes


def test_what_no_setting_makes_fit_is_refused_with_the_least() -> None:
    with pytest.raises(sw.PlanError, match="least memory that was found"):
        plan(1e5)
