"""Experts that a router names but a layer has not, and routers that differ among ranks: refused, with the layer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shardwise as sw
from raising import raises


class Counted(nn.Module):
    """Rows of the experts that a caller names, sorted and counted without a check, as transformers does."""

    def __init__(self, strategy: str) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.up, self.down = (nn.Parameter(torch.randn(4, *shape) / 3) for shape in ((8, 12), (12, 8)))
        self.mix, self.product = nn.Linear(8, 8), F.grouped_mm if not strategy else sw.shard(F.grouped_mm, strategy)

    def forward(self, x: Tensor, chosen: Tensor) -> Tensor:
        rows, experts = self.mix(x).flatten(0, 1), chosen.flatten()
        expert, order = experts.sort(stable=True)
        ends = torch.histc(expert.float(), bins=4, min=0, max=3).cumsum(0).to(torch.int32)
        hidden = self.result(self.product(rows[order // 2], self.up, offs=ends), expert)
        results = self.result(self.product(F.gelu(hidden), self.down, offs=ends), expert)
        back = torch.empty_like(order).scatter_(0, order, torch.arange(len(order)))
        return (results[back].unflatten(0, (-1, 2)).sum(1) - rows).square().mean()

    def result(self, rows: Tensor, expert: Tensor) -> Tensor:
        return rows


class Dropping(Counted):
    """Rows of expert 4 are dropped by the model itself."""

    def result(self, rows: Tensor, expert: Tensor) -> Tensor:
        return rows.masked_fill((expert >= 4).unsqueeze(1), 0.0)


def planned(kind: type[Counted], strategy: str) -> tuple[Counted, Tensor, Tensor, Any]:
    module = kind(strategy)
    x, chosen = torch.randn(4, 8, 8), torch.arange(64).view(4, 8, 2) % 4
    options = {} if strategy else {"search": "dynamic_programming"}
    return module, x, chosen, sw.plan(module, (x, chosen), 2, mesh=sw.Mesh(ep=2), **options)


@pytest.mark.parametrize("strategy", ["K@ep", "e@ep", "n@ep"])
def test_an_expert_that_there_is_not_is_refused_with_its_layer(strategy: str) -> None:
    module, x, chosen, plan = planned(Counted, strategy)
    for wrong in (-1, 4, 9):
        chosen[1, 2, 1] = wrong
        with raises(IndexError, wrong, "0 to 3") as caught:
            sw.verify(module, (x, chosen), plan)
        (note,) = caught.value.__notes__
        assert "/grouped_mm" in note, note


@pytest.mark.parametrize("strategy", ["K@ep", "e@ep"])
def test_rows_that_the_model_drops_by_itself_are_dropped(strategy: str) -> None:
    module, x, chosen, plan = planned(Dropping, strategy)
    chosen[1:3, 2:, 1] = 4
    assert sw.verify(module, (x, chosen), plan).is_equal
