"""Extrema of activations that ranks hold in parts: NaN of any rank stays, as on one device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from launch.gloo_ranks import RunRanks


class Guarded(nn.Module):
    """Takes another way where its activations are not finite."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(8, 8, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.layer(x)
        seen = hidden.detach()
        top, least = seen.amax(), seen.amin(0)
        hidden = torch.nan_to_num(hidden) * torch.where(top.isnan(), 2.0, torch.nan_to_num(top))
        return (hidden * torch.where(least.isnan(), 3.0, torch.nan_to_num(least))).square().mean()


def batch(row: int, value: float) -> Tensor:
    x = torch.linspace(-1, 2, 64, dtype=torch.float64).view(8, 8)
    x[row, 3] = value
    return x


CASES = [(row, value) for row in (0, 7) for value in (float("nan"), float("inf"), 0.5)]


def losses() -> list[Any]:
    module = Guarded()
    plan = sw.plan(module, batch(0, 0.5), 2, mesh=sw.Mesh(dp=2), mode="data_parallel")
    assert "@dp" in plan.strategies["/amax"], "rows are split"
    assert "@dp" in plan.strategies["/amin"], "rows are split"
    parallel = sw.parallelize(module, plan)
    return [float(parallel(batch(*case)).detach()) for case in CASES]


def test_nan_of_any_rank_is_the_extremum(run_ranks: RunRanks) -> None:
    module = Guarded()
    expected = [float(module(batch(*case)).detach()) for case in CASES]
    for found in run_ranks(losses, 2):
        assert found == pytest.approx(expected, rel=1e-12, nan_ok=True)
