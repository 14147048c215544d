"""Updates and lookups by index."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from math import prod

import torch
from torch import Tensor

from shardwise.rules.lowerings.contractions import scaled


def _added(self: Tensor, dim: int, index: Tensor, src: Tensor) -> Tensor:
    rows = self.shape[dim]
    total: Tensor = torch.ops.shardwise.scattered_sum(src, dim % self.dim(), index, [rows], [0], [rows])
    return self + total


def scatter_add(
    self: Tensor, dim: int, index: Tensor, src: Tensor, how: str = "sum", *, include_self: bool = True
) -> Tensor:
    """Also ``scatter_reduce`` with the reduction ``sum``."""
    assert (how, include_self) == ("sum", True), "only sums can be split by what is added"
    return _added(self, dim, index, src)


def index_add(self: Tensor, dim: int, index: Tensor, source: Tensor, *, alpha: float = 1) -> Tensor:
    return _added(self, dim, index, scaled(source, alpha))


def index_put(self: Tensor, indices: Sequence[Tensor | None], values: Tensor, accumulate: bool = False) -> Tensor:
    """Adjacent indexed dims as one, and their indices as one list."""
    assert accumulate, "only sums can be split by what is added"
    first = next(dim for dim, index in enumerate(indices) if index is not None)
    chosen = [index for index in indices if index is not None]
    sizes = self.shape[first : first + len(chosen)]
    counted = [torch.where(index < 0, index + size, index) for index, size in zip(chosen, sizes, strict=True)]
    within = [(index >= 0) & (index < size) for index, size in zip(counted, sizes, strict=True)]
    flat = sum(index * prod(sizes[i + 1 :]) for i, index in enumerate(counted))
    flat = torch.where(reduce(torch.logical_and, within), flat, prod(sizes))
    after = self.shape[first + len(chosen) :]
    addends = values.expand(*self.shape[:first], *flat.shape, *after).flatten(first, first + flat.dim() - 1)
    rows = self.flatten(first, first + len(chosen) - 1)
    return torch.unflatten(_added(rows, first, flat.flatten(), addends), first, sizes)


def masked_scatter(self: Tensor, mask: Tensor, source: Tensor) -> Tensor:
    place = (mask.expand(self.shape).flatten().cumsum(0) - 1).reshape(self.shape)
    return torch.where(mask, source.flatten()[place.clamp_min(0)], self)


def take(self: Tensor, index: Tensor) -> Tensor:
    return self.flatten()[index]
