"""Rows that are sorted by expert and put back, on split batches and over micro-batches, and what only looks like it."""

from __future__ import annotations

from collections.abc import Callable
from math import prod

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shardwise as sw
from models.zoo import ZOO
from proving import prove
from raising import raises
from shardwise.graph.capture import capture
from shardwise.graph.grouped import grouped_mm
from shardwise.graph.ir import Graph

TOP, EXPERTS, WIDTH, TIME = 2, 4, 8, 3
Back = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


class Mixture(nn.Module):
    """``back``: (results in the sorted order, the order, the tokens in it, the input) -> rows of the tokens."""

    def __init__(
        self,
        back: Back,
        ends: Callable[[Tensor, Tensor], Tensor] | None = None,
        product: Callable[..., Tensor] = F.grouped_mm,
    ) -> None:
        super().__init__()
        self.product = product
        self.back, self.gate = back, nn.Linear(WIDTH, EXPERTS)
        self.ends = ends or by_histogram
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, 16) / 4)
        self.down = nn.Parameter(torch.randn(EXPERTS, 16, WIDTH) / 4)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        weights, chosen = self.gate(rows).softmax(-1).topk(TOP, dim=-1)
        experts, order = chosen.flatten().sort()
        tokens = order // TOP
        ends = self.ends(experts, chosen)
        hidden = F.gelu(self.product(rows[tokens], self.up, offs=ends))
        results = F.grouped_mm(hidden, self.down, offs=ends) * weights.flatten()[order, None]
        return self.back(results, order, tokens, rows).square().mean()


def by_histogram(experts: Tensor, chosen: Tensor) -> Tensor:
    return torch.histc(experts.float(), EXPERTS, 0, EXPERTS - 1).cumsum(0).to(torch.int32)


def of_all_choices(experts: Tensor, chosen: Tensor) -> Tensor:
    return torch.histc(chosen.view(-1).float(), EXPERTS, 0, EXPERTS - 1).to(torch.int32).cumsum(0, dtype=torch.int32)


def by_flags(experts: Tensor, chosen: Tensor) -> Tensor:
    return F.one_hot(experts, EXPERTS).sum(0).cumsum(0).to(torch.int32)


def by_argsort(results: Tensor, order: Tensor, tokens: Tensor, rows: Tensor) -> Tensor:
    return results[order.argsort()].unflatten(0, (-1, TOP)).sum(1)


def by_inverse(results: Tensor, order: Tensor, tokens: Tensor, rows: Tensor) -> Tensor:
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(order.shape[0])
    return results.index_select(0, inverse).unflatten(0, (-1, TOP)).sum(1)


def by_adding(results: Tensor, order: Tensor, tokens: Tensor, rows: Tensor) -> Tensor:
    return torch.zeros_like(rows).index_add(0, tokens, results)


def by_scattering(results: Tensor, order: Tensor, tokens: Tensor, rows: Tensor) -> Tensor:
    index = tokens.reshape(-1, 1).expand(-1, WIDTH)
    return torch.zeros_like(rows).scatter_add(0, index, results)


def by_putting(results: Tensor, order: Tensor, tokens: Tensor, rows: Tensor) -> Tensor:
    back = torch.empty_like(results)
    back[order] = F.layer_norm(results, (WIDTH,)) * results.mean(-1, keepdim=True)
    return back.unflatten(0, (-1, TOP)).sum(1)


def by_scattering_numbers(results: Tensor, order: Tensor, tokens: Tensor, rows: Tensor) -> Tensor:
    inverse = torch.zeros_like(order).scatter(0, order, torch.arange(order.shape[0]))
    return results[inverse].unflatten(0, (-1, TOP)).sum(1)


def with_their_tokens(results: Tensor, order: Tensor, tokens: Tensor, rows: Tensor) -> Tensor:
    left, right = torch.cat([results, rows.gather(0, tokens[:, None].expand(-1, WIDTH))], dim=1).softmax(-1).chunk(2, 1)
    return by_argsort(left * right + results.sum(1, keepdim=True), order, tokens, rows)


BACK = [by_argsort, by_inverse, by_adding, by_scattering, by_putting, by_scattering_numbers, with_their_tokens]
ENDS = [by_histogram, of_all_choices, by_flags]


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


def targets(graph: Graph) -> set[str]:
    return {str(op.target) for op in graph.ops}


@pytest.mark.parametrize("back", BACK)
@pytest.mark.parametrize("ends", ENDS)
@pytest.mark.sampled(4)
def test_the_rows_of_a_split_batch_stay_where_they_are(back: Back, ends: Callable[[Tensor, Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    module = Mixture(back, ends)
    graph = capture(module, (batch(8),)).graph
    assert not any("sort" in target for target in targets(graph))
    plan = sw.plan(module, (batch(8),), 4, mesh=sw.Mesh(dp=4), mode="data_parallel")
    assert "gather" not in str(plan)
    prove(module, (batch(8),), plan, steps=2)


@pytest.mark.parametrize("strategy", ["e@ep", "n@ep", "k@ep", "r@ep", "s@ep"])
@pytest.mark.sampled(3)
def test_a_product_by_expert_is_split_beside_a_split_batch(strategy: str) -> None:
    torch.manual_seed(0)
    module = Mixture(by_inverse, product=sw.shard(F.grouped_mm, strategy))
    plan = sw.plan(module, (batch(6),), 4, mesh=sw.Mesh(dp=2, ep=2), layouts={"args[0]": "[6@dp, 3, 8]"})
    prove(module, (batch(6),), plan, steps=2)


def test_tokens_are_not_repeated_for_each_of_their_experts() -> None:
    graph = capture(Mixture(by_inverse), (batch(8),)).graph
    first, second = (op for op in graph.ops if op.target is grouped_mm._opoverload)
    sizes = [[prod(graph.by_name[name].shape) for name in op.operands[:1]] for op in (first, second)]
    assert sizes == [[8 * TIME * WIDTH], [8 * TIME * TOP * 16]]


def test_a_negative_expert_is_named() -> None:
    experts = torch.tensor([1, -1, 0])
    with raises(IndexError, "grouped_mm", -1):
        grouped_mm(torch.ones(3, 2), torch.ones(2, 2, 2), experts, [2], [0], [2])


@pytest.mark.parametrize("back", BACK)
@pytest.mark.parametrize(("samples", "micro_batch"), [(8, 2), (8, 4), (7, 2)])
@pytest.mark.sampled(4)
def test_a_pass_takes_the_rows_of_its_own_samples(back: Back, samples: int, micro_batch: int) -> None:
    torch.manual_seed(0)
    module = Mixture(back)
    plan = sw.plan(module, (batch(8),), 2, mode="data_parallel", global_batch=8, micro_batch=micro_batch)
    prove(module, (batch(samples),), plan, steps=2)


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
    with raises(sw.PlanError, "/argmax", op="/sort", source="test_unsort.py"):
        sw.plan(OtherCounts(descends), (batch(8),), 2, mode="data_parallel", global_batch=8, micro_batch=4)


class LooksLikeExperts(Mixture):
    """Sorts experts, some of which may be no expert's number, and groups rows by something else."""

    def __init__(self, look: Callable[[LooksLikeExperts, Tensor, Tensor], Tensor]) -> None:
        super().__init__(never)
        self.look, self.bias = look, nn.Parameter(torch.randn(EXPERTS + 2, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        return self.look(self, rows, self.gate(rows).argmax(-1)).square().mean()


def found(chosen: Tensor) -> Tensor:
    ends = torch.histc(chosen.float(), EXPERTS, 0, EXPERTS - 1).cumsum(0).to(torch.int64)
    return torch.searchsorted(ends, torch.arange(chosen.shape[0]), right=True)


def grouped_by_a_flag(module: LooksLikeExperts, rows: Tensor, chosen: Tensor) -> Tensor:
    ends = torch.histc(chosen.bool().float(), 2, 0, 1).cumsum(0).to(torch.int32)
    order = chosen.argsort()
    return F.grouped_mm(rows[order], module.up[:2], offs=ends)[order.argsort()]


def grouped_by_the_last_bits(module: LooksLikeExperts, rows: Tensor, chosen: Tensor) -> Tensor:
    ends = by_histogram((chosen * 128).to(torch.uint8), chosen)
    order = (chosen * 128).argsort()
    return F.grouped_mm(rows[order], module.up, offs=ends)[order.argsort()]


def found_past_the_last(module: LooksLikeExperts, rows: Tensor, chosen: Tensor) -> Tensor:
    chosen = torch.where(rows[:, 0] > 0.5, chosen + 5, chosen)
    order = chosen.argsort()
    return (rows[order] + module.bias[found(chosen)])[order.argsort()]


def found_for_negative_numbers(module: LooksLikeExperts, rows: Tensor, chosen: Tensor) -> Tensor:
    chosen = torch.where(rows[:, 0] > 0.5, -1, chosen)
    order = chosen.argsort()
    return (rows[order] * module.bias[found(chosen)])[order.argsort()]


def found_with_a_sorter(module: LooksLikeExperts, rows: Tensor, chosen: Tensor) -> Tensor:
    order, bounds = chosen.argsort(), torch.arange(EXPERTS).flip(0)
    at = torch.searchsorted(bounds, chosen, right=True, sorter=bounds.argsort())
    return (rows[order] * module.bias[at])[order.argsort()]


def with_a_row_of_padding(module: LooksLikeExperts, rows: Tensor, chosen: Tensor) -> Tensor:
    order = chosen.argsort()
    return F.embedding(order, module.gate(rows) @ module.bias[:EXPERTS], padding_idx=3)[order.argsort()]


LOOKS = [
    grouped_by_a_flag,
    grouped_by_the_last_bits,
    found_past_the_last,
    found_for_negative_numbers,
    pytest.param(found_with_a_sorter, marks=pytest.mark.filterwarnings("ignore:no rule for aten.searchsorted")),
    with_a_row_of_padding,
]


@pytest.mark.parametrize("look", LOOKS)
@pytest.mark.sampled(3)
def test_what_only_looks_like_a_mixture_stays_sorted(
    look: Callable[[LooksLikeExperts, Tensor, Tensor], Tensor],
) -> None:
    torch.manual_seed(0)
    module = LooksLikeExperts(look)
    assert any("sort" in target for target in targets(capture(module, (batch(8),)).graph))
    plan = sw.plan(module, (batch(8),), 2, mesh=sw.Mesh(dp=2), mode="data_parallel")
    prove(module, (batch(8),), plan, steps=1)


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
@pytest.mark.sampled(2)
def test_what_mixes_the_rows_is_refused_by_name(back: Back) -> None:
    assert any("sort" in target for target in targets(capture(Mixture(back), (batch(8),)).graph))
    plan = sw.plan(Mixture(back), (batch(8),), 2, mesh=sw.Mesh(dp=2), mode="data_parallel")
    assert sw.verify(Mixture(back), (batch(8),), plan, steps=2).ok
    with raises(sw.PlanError, "/flatten_1", op="/sort", source="test_unsort.py"):
        sw.plan(Mixture(back), (batch(8),), 2, mode="data_parallel", global_batch=8, micro_batch=4)


@pytest.mark.long
def test_mixtral_runs_in_passes_without_its_auxiliary_loss_which_is_no_sum() -> None:
    torch.manual_seed(0)
    module, inputs = ZOO["mixtral"].build(), ZOO["mixtral"].inputs(8)
    with raises(sw.PlanError, "/div_1", op="/mul", source="modeling_mixtral.py"):
        sw.plan(module, (), 2, kwargs=inputs, mode="data_parallel", global_batch=8, micro_batch=4)
    module.config.output_router_logits = False
    plan = sw.plan(module, (), 2, kwargs=inputs, mode="data_parallel", global_batch=8, micro_batch=2)
    assert sw.verify(module, (), plan, kwargs=inputs, steps=2).ok
