"""Experts that a router names but a layer has not, and routers that differ among ranks: refused, with the layer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shardwise as sw
from launch.gloo_ranks import RunRanks
from models.expert_models import WIDTH, Loop
from raising import raises, refusal


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


def step_with_an_expert_that_there_is_not() -> tuple[str, str]:
    """On one of two ranks; the other one must not wait for ever."""
    module, x, chosen, plan = planned(Counted, "K@ep")
    par = sw.parallelize(module, plan)
    chosen[3, 2, 1] = 9  # of the second rank's samples
    try:
        par(x, chosen)
    except Exception as error:
        return type(error).__name__, "\n".join([str(error), *getattr(error, "__notes__", [])])
    return "", ""


def test_ranks_end_with_an_expert_that_there_is_not(run_ranks: RunRanks) -> None:
    first, second = run_ranks(step_with_an_expert_that_there_is_not, 2)
    assert second[0] == "IndexError"
    for part in ("expert 9", "/grouped_mm", "test_expert_keys.py"):
        assert part in second[1], second
    assert first[0] == "CollectiveError"
    assert "rank 1" in first[1], first


def steps_with_another_router() -> list[str]:
    """Rank 3, whose router is turned round, is one of two that have copies of it and of its tokens. Without and with
    ``check_replicas``."""
    found = []
    for check in (None, 1):
        module = Loop()
        x = torch.randn(4, 8, WIDTH, generator=torch.Generator().manual_seed(0))
        plan = sw.plan(module, (x,), 4, mesh=sw.Mesh(ep=2, tp=2), strategies={"": "e@ep n@tp"})
        assert any(collective.kind == "row_exchange" for collective in plan.collectives()), plan
        par = sw.parallelize(module, plan, check_replicas=check)
        if sw.rank() == 3:
            with torch.no_grad():
                par.router.weight.neg_()
        found.append(refusal(lambda par=par, x=x: [par(x).backward() for _ in range(2)]))
    return found


@pytest.mark.long
def test_routers_that_differ_hang_no_rank_and_are_named(run_ranks: RunRanks) -> None:
    for unchecked, checked in run_ranks(steps_with_another_router, 4):
        assert unchecked == "accepted", "every rank sends what it told the others"
        for part in ("ReplicaError", "router", "rank 3"):
            assert part in checked, checked
