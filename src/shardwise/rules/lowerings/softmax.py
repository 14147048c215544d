"""Softmax and its logarithms over a split dim."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

import torch
from torch import Tensor

from shardwise.graph.precision import cast, wide
from shardwise.rules.arguments import dims_of


def _exponentials(x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """``x - max`` and the sum of its exponentials along ``dim`` (kept)."""
    shifted = x - x.detach().amax(dim, keepdim=True)
    return shifted, shifted.exp().sum(dim, keepdim=True)


def softmax(self: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    shifted, total = _exponentials(wide(cast(self, dtype)), dim)
    return cast(shifted.exp() / total, dtype or self.dtype)


def log_softmax(self: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    shifted, total = _exponentials(wide(cast(self, dtype)), dim)
    return cast(shifted - total.log(), dtype or self.dtype)


def internal_softmax(self: Tensor, dim: int, half_to_float: bool) -> Tensor:
    return softmax(self, dim, torch.float32 if half_to_float else None)


def internal_log_softmax(self: Tensor, dim: int, half_to_float: bool) -> Tensor:
    return log_softmax(self, dim, torch.float32 if half_to_float else None)


def safe_softmax(self: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    """Rows that are -inf everywhere give 0 instead of nan."""
    x = wide(cast(self, dtype))
    maximum = x.detach().amax(dim, keepdim=True)
    exponentials = (x - maximum.masked_fill(maximum == -inf, 0)).exp()
    total = exponentials.sum(dim, keepdim=True)
    return cast(exponentials / total.masked_fill(total == 0, 1), dtype or self.dtype)


def logsumexp(self: Tensor, dim: int | Sequence[int], keepdim: bool = False) -> Tensor:
    dims = dims_of(dim, self.dim())
    maximum = self.detach().amax(dims, keepdim=True)
    maximum = maximum.masked_fill(maximum.abs() == inf, 0)
    result = (self - maximum).exp().sum(dims, keepdim=True).log() + maximum
    return result if keepdim else result.squeeze(dims)
