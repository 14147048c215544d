"""A model with awkward parameters, split over real gloo ranks, for the tests of what torch does with shards."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import shardwise as sw

Ranks = Callable[[str], list[Any]]
FIELDS: dict[str, tuple[dict[str, int], dict[str, str]]] = {
    "dp": ({"dp": 4}, {}),
    "tp, uneven": ({"tp": 3}, {"up": "n@tp", "narrow": "n@tp", "tokens": "v@tp"}),
    "dp x tp": ({"dp": 2, "tp": 2}, {"up": "n@tp", "tokens": "v@tp"}),
}


class Net(nn.Module):
    """Tied, frozen and unused parameters, and one with fewer rows than ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(14, 6)
        self.up, self.down = nn.Linear(6, 10), nn.Linear(10, 6)
        self.narrow, self.wide = nn.Linear(6, 2, bias=False), nn.Linear(2, 6, bias=False)
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, 14, bias=False)
        self.head.weight = self.tokens.weight
        self.unused = nn.Parameter(torch.ones(4))
        self.norm.bias.requires_grad_(False)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids)
        x = self.down(torch.tanh(self.up(x)))
        x = self.wide(self.narrow(x))
        return nn.functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())


def make(dtype: torch.dtype = torch.float64) -> Net:
    torch.manual_seed(0)
    return Net().to(dtype)


def batch(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(0, 14, (2, 4, 3), generator=torch.Generator().manual_seed(seed))
    return ids[0], ids[1]


def split(kind: str, dtype: torch.dtype = torch.float64) -> sw.Parallel:
    sizes, strategies = FIELDS[kind]
    model = make(dtype)
    plan = sw.plan(
        model,
        batch(),
        math.prod(sizes.values()),
        mesh=sw.Mesh(sizes),
        strategies=strategies,
        search="sharding_propagation",
    )
    return sw.parallelize(model, plan)


class Counted:
    def __enter__(self) -> Counted:
        self.count, self._real = 0, dist.all_reduce
        dist.all_reduce = self._call
        return self

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        self.count += 1
        return self._real(*args, **kwargs)

    def __exit__(self, *_: object) -> None:
        dist.all_reduce = self._real


def gradients(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}


def restore(module: nn.Module, saved: dict[str, torch.Tensor]) -> None:
    for name, p in module.named_parameters():
        if name in saved:
            p.grad = saved[name].clone()
