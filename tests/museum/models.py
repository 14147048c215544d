"""Small models and plans that really split them, in which the exhibits' mistakes are made."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shardwise as sw

VOCABULARY, WIDTH, HEADS, TIME, BATCH, WINDOW = 30, 16, 4, 8, 8, 3


class Attention(nn.Module):
    """A fused projection, and a mask that lets every position see the last few only."""

    def __init__(self, call: str) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.attend = sw.shard(F.scaled_dot_product_attention, call) if call else F.scaled_dot_product_attention

    def forward(self, x: Tensor) -> Tensor:
        batch, time, width = x.shape
        q, k, v = (t.view(batch, time, HEADS, -1).transpose(1, 2) for t in self.qkv(x).chunk(3, dim=-1))
        place = torch.arange(time)
        behind = place[:, None] - place[None, :]
        mixed = self.attend(q, k, v, attn_mask=(behind >= 0) & (behind < WINDOW))
        return self.out(mixed.transpose(1, 2).reshape(batch, time, width))


class Block(nn.Module):
    def __init__(self, call: str) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = Attention(call)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.25)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.before(x))
        return x + self.dropout(self.down(F.gelu(self.up(self.between(x)))))


class Language(nn.Module):
    """A language model with positions; its table is its head, where ``tied``; some labels do not count."""

    def __init__(self, *, layers: int = 1, tied: bool = False, call: str = "") -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(TIME, WIDTH)
        self.blocks = nn.ModuleList(Block(call) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())


class Experts(nn.Module):
    """Every token through all experts, weighed: the products of a mixture of experts without its routing."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 4)
        self.up, self.down = nn.Parameter(torch.randn(4, WIDTH, 8)), nn.Parameter(torch.randn(4, 8, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        product = sw.shard(torch.einsum, "e@ep")
        hidden = torch.relu(product("bd,edh->ebh", x, self.up))
        mixed = product("ebh,ehd->ebd", hidden, self.down)
        return (mixed * self.router(x).softmax(-1).T[:, :, None]).sum(0).square().mean()


class Normalized(nn.Module):
    """A batch norm between two layers, whose batch does not divide."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.relu(self.norm(self.first(x)))).square().mean()


class Scaled(nn.Module):
    """A vector over its length, kept from zero by a small number."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.last = nn.Linear(6, WIDTH), nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        return self.last(h / (h.square().sum(1, keepdim=True) + 1e-2).sqrt()).square().mean()


@dataclass(frozen=True)
class Case:
    model: nn.Module
    inputs: tuple[Tensor, ...]
    plan: sw.Plan


def text() -> tuple[Tensor, Tensor]:
    """Tokens, the last of the vocabulary among them, and labels of which the first half of the batch lacks many."""
    generator = torch.Generator().manual_seed(0)
    ids, labels = torch.randint(VOCABULARY, (2, BATCH, TIME), generator=generator)
    ids[:, 0] = VOCABULARY - 1
    labels[: BATCH // 2, 2:] = -100
    return ids, labels


def case(model: Callable[[], nn.Module], inputs: tuple[Tensor, ...], mesh: sw.Mesh, **options: Any) -> Case:
    torch.manual_seed(0)
    module = model()
    return Case(module, inputs, sw.plan(module, inputs, mesh.num_devices, mesh=mesh, bucket_bytes=0, **options))


ROWS = torch.randn(7, 6, generator=torch.Generator().manual_seed(1))


@cache
def tensor_parallel() -> Case:
    strategies = {"*.qkv": "n@tp", "*.up": "n@tp", "tokens": "v@tp", "head": "n@tp"}
    return case(Language, text(), sw.Mesh(tp=4), strategies=strategies)


@cache
def two_layers() -> Case:
    return case(lambda: Language(layers=2), text(), sw.Mesh(dp=2), mode="data_parallel")


@cache
def data_parallel() -> Case:
    return case(Language, text(), sw.Mesh(dp=2), mode="data_parallel")


@cache
def tied() -> Case:
    return case(lambda: Language(tied=True), text(), sw.Mesh(dp=2), mode="data_parallel")


@cache
def context_parallel() -> Case:
    norms = {"*.before": "b1@cp", "*.between": "b1@cp", "norm": "b1@cp"}
    strategies = {**norms, "*.qkv": "m@cp", "*.up": "m@cp", "tokens": "b1@cp", "positions": "b@cp"}
    return case(lambda: Language(call="t@cp"), text(), sw.Mesh(cp=2), strategies=strategies)


@cache
def sequence_parallel() -> Case:
    strategies = {"*.qkv": "n@tp", "*.up": "n@tp", "*.before": "b1@tp", "*.between": "b1@tp", "norm": "b1@tp"}
    return case(Language, text(), sw.Mesh(tp=2), strategies=strategies)


@cache
def expert_parallel() -> Case:
    x = torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(2))
    return case(Experts, (x,), sw.Mesh(ep=4), layouts={"up": "[4@ep, 16, 8]", "down": "[4@ep, 8, 16]"})


@cache
def batch_norm() -> Case:
    return case(Normalized, (ROWS,), sw.Mesh(dp=2), mode="data_parallel")


@cache
def scaled() -> Case:
    return case(Scaled, (ROWS,), sw.Mesh(tp=2), strategies={"up": "n@tp"})
