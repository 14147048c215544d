"""Products and scans by runs: within what a rank holds, then over what the ranks found."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

import torch
from torch import Tensor

from shardwise.rules.lowerings.reductions import dim_indices


def _by_runs(x: Tensor, dim: int, runs: Sequence[int]) -> tuple[int, Tensor | None]:
    """``dim`` counted from the front, and ``x`` with that dim as (number of runs, run); None if it is not split."""
    dim = dim % max(x.dim(), 1)
    split = len(runs) > dim and 0 < runs[dim] < x.shape[dim]
    return dim, torch.unflatten(x, dim, (x.shape[dim] // runs[dim], runs[dim])) if split else None


def _starts(x: Tensor, dim: int) -> Tensor:
    """Return the starts of the runs of ``x``, to be added to indices within them."""
    return dim_indices(x, dim) * x.shape[dim + 1]


def _before(totals: Tensor, dim: int, neutral: float) -> Tensor:
    """Return the total before every run from those up to its end: ``neutral`` for the first; with a run dim."""
    first = torch.full_like(totals.narrow(dim, 0, 1), neutral)
    return torch.cat([first, totals.narrow(dim, 0, totals.shape[dim] - 1)], dim).unsqueeze(dim + 1)


def prod_dim(
    self: Tensor, dim: int, keepdim: bool = False, *, dtype: torch.dtype | None = None, runs: Sequence[int] = ()
) -> Tensor:
    dim, parts = _by_runs(self, dim, runs)
    if parts is None:
        return torch.prod(self, dim, keepdim, dtype=dtype)
    return torch.prod(torch.prod(parts, dim + 1, dtype=dtype), dim, keepdim, dtype=dtype)


def prod_all(self: Tensor, *, dtype: torch.dtype | None = None, runs: Sequence[int] = ()) -> Tensor:
    for dim in reversed(range(self.dim())):
        self = prod_dim(self, dim, dtype=dtype, runs=runs)
    return self


def cumprod(self: Tensor, dim: int, *, dtype: torch.dtype | None = None, runs: Sequence[int] = ()) -> Tensor:
    dim, parts = _by_runs(self, dim, runs)
    if parts is None:
        return torch.cumprod(self, dim, dtype=dtype)
    within = torch.cumprod(parts, dim + 1, dtype=dtype)
    totals = torch.cumprod(within.select(dim + 1, -1), dim, dtype=dtype)
    return (within * _before(totals, dim, 1)).flatten(dim, dim + 1)


def logcumsumexp(self: Tensor, dim: int, *, runs: Sequence[int] = ()) -> Tensor:
    dim, parts = _by_runs(self, dim, runs)
    if parts is None:
        return torch.logcumsumexp(self, dim)
    within = torch.logcumsumexp(parts, dim + 1)
    before = _before(torch.logcumsumexp(within.select(dim + 1, -1), dim), dim, -inf)
    none = before == -inf  # nothing to add; its derivative would be nan beside another -inf
    both = torch.where(none, within, torch.logaddexp(within, before.masked_fill(none, 0)))
    return both.flatten(dim, dim + 1)


def cummax(self: Tensor, dim: int, *, runs: Sequence[int] = ()) -> tuple[Tensor, Tensor]:
    return _cumulative_extreme(self, True, dim, runs)


def cummin(self: Tensor, dim: int, *, runs: Sequence[int] = ()) -> tuple[Tensor, Tensor]:
    return _cumulative_extreme(self, False, dim, runs)


def _cumulative_extreme(x: Tensor, largest: bool, dim: int, runs: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Compute cummax or cummin over runs; the later of equal values counts, and nan beats numbers, as in PyTorch."""
    scan = torch.cummax if largest else torch.cummin
    dim, parts = _by_runs(x, dim, runs)
    if parts is None:
        values, index = scan(x, dim)
        return values, index
    values, index = scan(parts, dim + 1)
    index = index + _starts(parts, dim)
    totals, winner = scan(values.select(dim + 1, -1), dim)
    before = _before(totals, dim, 0)
    ends = index.select(dim + 1, -1).gather(dim, winner)
    before_index = _before(ends.clamp_min(0), dim, 0)  # not linear: partial sums are added here, where they are few
    better = before > values if largest else before < values
    if x.is_floating_point():
        better = better | (before.isnan() & ~values.isnan())
    better = better & (dim_indices(before, dim) > 0)
    result = torch.where(better, before, values), torch.where(better, before_index, index)
    return result[0].flatten(dim, dim + 1), result[1].flatten(dim, dim + 1)
