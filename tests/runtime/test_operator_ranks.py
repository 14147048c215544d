"""Real gloo ranks, operators that the other tests of ranks do not have: ring attention, experts that are split, and
dropout. Losses, gradients and parameters are those of plain PyTorch, step by step."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import shardwise as sw
from launch.gloo_ranks import RunRanks
from runtime.training import Trained, check_ranks, train

Told = tuple[Tensor, ...]
STEPS = 3


class RingAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.queries, self.keys, self.values = nn.Linear(8, 16), nn.Linear(8, 8), nn.Linear(8, 8)
        self.out = nn.Linear(16, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        q, k, v = (part(x).unflatten(-1, (-1, 4)).transpose(1, 2) for part in (self.queries, self.keys, self.values))
        return ((self.out(self.attended(q, k, v).transpose(1, 2).flatten(2)) - x).square().mean(),)

    def attended(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return sw.shard(F.scaled_dot_product_attention, "ring@cp")(q, k, v, is_causal=True, enable_gqa=True)


class ZigzagAttention(RingAttention):
    def attended(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return sw.shard(F.scaled_dot_product_attention, "zigzag@cp")(q, k, v, is_causal=True, enable_gqa=True)


class WindowAttention(RingAttention):
    """Within three positions, both ways: keys come from both neighbours."""

    def attended(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        positions = torch.arange(q.shape[-2])
        mask = (positions[:, None] - positions[None]).abs() < 3
        return sw.shard(F.scaled_dot_product_attention, "ring@cp")(q, k, v, attn_mask=mask, enable_gqa=True)


class Experts(nn.Module):
    """Four experts; every row is computed by the two that it prefers, as a grouped product of sorted rows."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.router = nn.Linear(8, 4)
        self.up, self.down = (nn.Parameter(torch.randn(4, *shape) / 3) for shape in ((8, 12), (12, 8)))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        rows = x.flatten(0, 1)
        gates, chosen = self.router(rows).softmax(-1).topk(2)
        expert, order = chosen.flatten().sort(stable=True)
        ends = F.one_hot(expert, 4).sum(0).cumsum(0).to(torch.int32)
        hidden = F.gelu(grouped(rows[order // 2], self.up, ends))
        back = torch.empty_like(order).scatter_(0, order, torch.arange(len(order)))
        mixed = grouped(hidden, self.down, ends)[back].unflatten(0, (-1, 2))
        return (((mixed * gates.unsqueeze(-1)).sum(1) - rows).square().mean(),)


def grouped(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """torch's grouped product; where nothing is captured, of float64 too."""
    if torch.compiler.is_exporting():
        return sw.shard(F.grouped_mm, "e@ep")(rows, weight, offs=ends)
    bounds = [0, *ends.tolist()]
    return torch.cat([rows[a:b] @ w for a, b, w in zip(bounds[:-1], bounds[1:], weight, strict=True)])


class Dropped(nn.Module):
    """Tells the masks that it drew. ``given``: takes these instead."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)
        self.given: tuple[Tensor, ...] | None = None

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        hidden = F.gelu(self.up(x))
        first, second = self.given or (F.dropout(torch.ones_like(hidden), 0.4), F.dropout(torch.ones_like(x), 0.2))
        return (self.down(hidden * first) * second - x).square().mean(), first, second


# model, axes, strategies, whether it draws, collective that the plan must have
CASES: dict[str, tuple[type[nn.Module], dict[str, int], dict[str, str], bool, str]] = {
    "ring": (RingAttention, {"cp": 4}, {}, False, "halo_exchange"),
    "zigzag of two": (ZigzagAttention, {"dp": 2, "cp": 2}, {}, False, "halo_exchange"),
    "window": (WindowAttention, {"cp": 4}, {}, False, "halo_exchange"),
    "experts": (Experts, {"ep": 4}, {}, False, "row_exchange"),
    "experts and data": (Experts, {"dp": 2, "ep": 2}, {}, False, "row_exchange"),
    "dropout": (Dropped, {"dp": 2, "tp": 2}, {"up": "n@tp"}, True, "all_reduce"),
    "ring of two": (RingAttention, {"dp": 2, "cp": 2}, {}, False, "halo_exchange"),
    "zigzag": (ZigzagAttention, {"cp": 4}, {}, False, "halo_exchange"),
}  # fmt: skip
MORE = ("ring of two", "zigzag")
FIRST = tuple(name for name in CASES if name not in MORE)


def batch(step: int) -> Tensor:
    return torch.randn(4, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(step))


@cache
def planned(name: str) -> sw.Plan:
    make, axes, strategies, _, _ = CASES[name]
    mesh = sw.Mesh(axes)
    return sw.plan(make().double(), batch(0), 4, mesh=mesh, strategies=strategies, search="sharding_propagation")


def train_model(model: nn.Module, masks: Sequence[Told] | None = None) -> tuple[Trained, list[Told]]:
    """Train, and return what else the model tells in every step. ``masks``: what it takes instead of drawing."""
    told: list[Told] = []

    def differentiate(model: Any, x: Tensor) -> Tensor:
        if masks is not None:
            model.given = masks[len(told)]
        loss, *others = model(x)
        loss.backward()
        told.append(tuple(tensor.detach() for tensor in others))
        return loss.detach()

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return train(model, map(batch, range(STEPS)), optimizer, differentiate=differentiate), told


def train_on_rank(*names: str) -> dict[str, tuple[Trained, list[Told]]]:
    found = {}
    for name in names:
        plan = planned(name) if dist.get_rank() == 0 else None
        found[name] = train_model(sw.parallelize(CASES[name][0]().double(), plan, seed=5))
    dist.barrier()
    return found


@pytest.mark.parametrize("names", [FIRST, pytest.param(MORE, marks=pytest.mark.long)], ids=["first", "more"])
def test_ranks_train_as_one_process(names: tuple[str, ...], run_ranks: RunRanks) -> None:
    ranks = run_ranks(train_on_rank, 4, *names)
    for name in names:
        make, _, _, draws, _ = CASES[name]
        masks = ranks[0][name][1]
        alone, _ = train_model(make().double(), masks if draws else None)
        check_ranks([found[name][0] for found in ranks], alone, name, of_losses=1e-11)
        for rank, found in enumerate(ranks):
            for own, want in zip(found[name][1], masks, strict=True):
                assert all(map(torch.equal, own, want)), f"{name}, rank {rank} has other masks"


@pytest.mark.parametrize("name", [*FIRST, *(pytest.param(name, marks=pytest.mark.long) for name in MORE)])
def test_the_plans_divide_what_they_are_for(name: str) -> None:
    plan = planned(name)
    assert CASES[name][-1] in {c.kind for c in plan.collectives()}
    if "experts" in name:
        assert all(plan.layouts[weight].dims[0][0].axes for weight in ("up", "down")), plan
    else:
        strategies = plan.strategies.values()
        assert any(word in own for own in strategies for word in ("ring@cp", "zigzag@cp", "n@tp")), plan
