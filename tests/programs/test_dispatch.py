"""Mixtures of experts one micro-batch after another: rows that are sorted and put back, and what only looks like it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shardwise as sw
from models.zoo import ZOO

TOP, EXPERTS, WIDTH, TIME = 2, 4, 8, 3
Back = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


class Mixture(nn.Module):
    """``back``: (results in the sorted order, the order, the tokens in it, the input) -> rows of the tokens."""

    def __init__(self, back: Back) -> None:
        super().__init__()
        self.back, self.gate = back, nn.Linear(WIDTH, EXPERTS)
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, 16) / 4)
        self.down = nn.Parameter(torch.randn(EXPERTS, 16, WIDTH) / 4)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        weights, chosen = self.gate(rows).softmax(-1).topk(TOP, dim=-1)
        experts, order = chosen.flatten().sort()
        tokens = order // TOP
        ends = torch.histc(experts.float(), EXPERTS, 0, EXPERTS - 1).cumsum(0).to(torch.int32)
        hidden = F.gelu(F.grouped_mm(rows[tokens], self.up, offs=ends))
        results = F.grouped_mm(hidden, self.down, offs=ends) * weights.flatten()[order, None]
        return self.back(results, order, tokens, rows).square().mean()


def by_argsort(results: Tensor, order: Tensor, tokens: Tensor, rows: Tensor) -> Tensor:
    return results[order.argsort()].unflatten(0, (-1, TOP)).sum(1)


def by_inverse(results: Tensor, order: Tensor, tokens: Tensor, rows: Tensor) -> Tensor:
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(order.shape[0])
    return results.index_select(0, inverse).unflatten(0, (-1, TOP)).sum(1)


def by_adding(results: Tensor, order: Tensor, tokens: Tensor, rows: Tensor) -> Tensor:
    return torch.zeros_like(rows).index_add(0, tokens, results)


def by_the_order_itself(results: Tensor, order: Tensor, tokens: Tensor, rows: Tensor) -> Tensor:
    return results[order].unflatten(0, (-1, TOP)).sum(1)


def never(results: Tensor, order: Tensor, tokens: Tensor, rows: Tensor) -> Tensor:
    return results.unflatten(0, (-1, TOP)).sum(1)


def mixed(results: Tensor, order: Tensor, tokens: Tensor, rows: Tensor) -> Tensor:
    return by_argsort(results.cumsum(0), order, tokens, rows)


def with_a_capacity(results: Tensor, order: Tensor, tokens: Tensor, rows: Tensor) -> Tensor:
    kept = (torch.arange(order.shape[0]) < 10).unsqueeze(1)
    return by_argsort(results * kept, order, tokens, rows)


def of_their_norm(results: Tensor, order: Tensor, tokens: Tensor, rows: Tensor) -> Tensor:
    return by_argsort(results / results.norm(dim=0), order, tokens, rows)


def with_dropout(results: Tensor, order: Tensor, tokens: Tensor, rows: Tensor) -> Tensor:
    return by_argsort(F.dropout(results, 0.5), order, tokens, rows)


def backwards(results: Tensor, order: Tensor, tokens: Tensor, rows: Tensor) -> Tensor:
    return results[order.argsort(descending=True)].unflatten(0, (-1, TOP)).sum(1)


def by_another_sort(results: Tensor, order: Tensor, tokens: Tensor, rows: Tensor) -> Tensor:
    return results[rows.sum(1).repeat_interleave(TOP).argsort().argsort()].unflatten(0, (-1, TOP)).sum(1)


def batch(samples: int) -> Tensor:
    return torch.randn(samples, TIME, WIDTH)


@pytest.mark.parametrize("back", [by_argsort, by_inverse, by_adding])
@pytest.mark.parametrize(("samples", "micro_batch"), [(8, 2), (8, 4), (7, 2)])
def test_a_pass_sorts_its_own_rows(back: Back, samples: int, micro_batch: int) -> None:
    torch.manual_seed(0)
    module = Mixture(back)
    plan = sw.plan(module, (batch(8),), 2, mode="data_parallel", global_batch=8, micro_batch=micro_batch)
    report = sw.verify(module, (batch(samples),), plan, steps=2)
    assert report.ok, str(report)


class OtherCounts(Mixture):
    """Bounds of groups that are not those of the sorted rows."""

    def __init__(self, descends: bool) -> None:
        super().__init__(by_argsort)
        self.descends = descends

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        chosen = self.gate(rows).argmax(-1)
        experts, order = chosen.sort(descending=self.descends)
        counted = experts if self.descends else rows.sum(1).argmax(0) + chosen.flip(0)[order]
        ends = torch.histc(counted.float(), EXPERTS, 0, EXPERTS - 1).cumsum(0).to(torch.int32)
        return (F.grouped_mm(rows[order], self.up, offs=ends)[order.argsort()]).square().mean()


@pytest.mark.parametrize("descends", [True, False])
def test_counts_of_something_else_are_refused(descends: bool) -> None:
    with pytest.raises(sw.PlanError, match=r"no sum over micro-batches"):
        sw.plan(OtherCounts(descends), (batch(8),), 2, mode="data_parallel", global_batch=8, micro_batch=4)


WRONG = [
    by_the_order_itself,
    never,
    mixed,
    with_a_capacity,
    of_their_norm,
    with_dropout,
    backwards,
    by_another_sort,
]


@pytest.mark.parametrize("back", WRONG)
def test_what_mixes_the_rows_is_refused_by_name(back: Back) -> None:
    with pytest.raises(sw.PlanError, match=r"no sum over micro-batches: .*mixes rows that were sorted"):
        sw.plan(Mixture(back), (batch(8),), 2, mode="data_parallel", global_batch=8, micro_batch=4)


def test_mixtral_runs_in_passes_without_its_auxiliary_loss_which_is_no_sum() -> None:
    torch.manual_seed(0)
    module, inputs = ZOO["mixtral"].build(), ZOO["mixtral"].inputs(8)
    with pytest.raises(sw.PlanError, match="a sum over all samples"):
        sw.plan(module, (), 2, kwargs=inputs, mode="data_parallel", global_batch=8, micro_batch=4)
    module.config.output_router_logits = False
    plan = sw.plan(module, (), 2, kwargs=inputs, mode="data_parallel", global_batch=8, micro_batch=2)
    assert sw.verify(module, (), plan, kwargs=inputs, steps=2).ok
