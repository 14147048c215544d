"""Means, moments, norms, extremes and positions of extremes, softmax and its logarithms over split dims; products and
scans by runs: within what a rank holds, then over what the ranks found."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf, prod
from typing import Any

import torch
from torch import Tensor

from shardwise.graph.precision import cast, wide
from shardwise.rules.arguments import dims_of

Dims = int | Sequence[int] | None


def count_of(x: Tensor, dims: Sequence[int]) -> int:
    """Return the number of elements of ``dims`` together."""
    return prod(x.shape[dim] for dim in dims)


def _moments(x: Tensor, dim: Dims, correction: float | None, keepdim: bool) -> tuple[Tensor, Tensor]:
    """Variance and mean. ``correction`` None: 1, as in PyTorch."""
    dims = dims_of(dim, x.dim())
    count = count_of(x, dims)
    average = x.sum(dims, keepdim=True) / count
    squares = _squared(x - average).sum(dims, keepdim)
    free = max(count - (1 if correction is None else correction), 0)
    return squares / free, average if keepdim else average.squeeze(dims)


def _squared(x: Tensor) -> Tensor:
    """Squared magnitudes, real for complex numbers."""
    return torch.view_as_real(torch.resolve_conj(x)).square().sum(-1) if x.is_complex() else x.square()


def _root(x: Tensor) -> Tensor:
    """The square root with gradient 0 at 0, as PyTorch's norms and standard deviations have it."""
    zero = x == 0
    return x.masked_fill(zero, 1).sqrt().masked_fill(zero, 0)


def _of_moments(results: Callable[[Tensor, Tensor], Any]) -> Callable[..., Any]:
    """Return a lowering. ``results``: what the operator returns, of the variance and the mean."""

    def of_moments(self: Tensor, dim: Dims = None, correction: float | None = None, keepdim: bool = False) -> Any:
        return results(*_moments(self, dim, correction, keepdim))

    return of_moments


MOMENTS = {
    "var": _of_moments(lambda variance, average: variance),
    "std": _of_moments(lambda variance, average: _root(variance)),
    "var_mean": _of_moments(lambda variance, average: (variance, average)),
    "std_mean": _of_moments(lambda variance, average: (_root(variance), average)),
}


def vector_norm(
    self: Tensor, ord: float = 2, dim: Dims = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Tensor:
    x, dims = cast(self, dtype), dims_of(dim, self.dim())
    if ord == 0:
        sizes = x.abs()
        return torch.where(sizes != 0, 1, sizes * 0).sum(dims, keepdim)  # (has a gradient, which is 0)
    if ord in (inf, -inf):
        sizes = x.abs()
        extreme = (torch.amax if ord > 0 else torch.amin)(sizes.detach(), dims, keepdim=True)
        return _extreme(sizes, extreme, dims, keepdim, nan_attains=True)
    if ord == 2:
        return _root(_squared(x).sum(dims, keepdim))
    if ord == 1:
        return x.abs().sum(dims, keepdim)
    total = x.abs().pow(ord).sum(dims, keepdim)
    zero = total == 0
    return total.masked_fill(zero, 1).pow(1 / ord).masked_fill(zero, 0)


def norm(
    self: Tensor, p: float | None = 2, dim: Dims = None, keepdim: bool = False, dtype: torch.dtype | None = None
) -> Tensor:
    return vector_norm(self, 2 if p is None else p, dim, keepdim, dtype=dtype)


def amax(self: Tensor, dim: int | Sequence[int] = (), keepdim: bool = False) -> Tensor:
    return _extreme(self, self.detach().amax(dims_of(dim, self.dim()), keepdim=True), dim, keepdim)


def amin(self: Tensor, dim: int | Sequence[int] = (), keepdim: bool = False) -> Tensor:
    return _extreme(self, self.detach().amin(dims_of(dim, self.dim()), keepdim=True), dim, keepdim)


def max_all(self: Tensor) -> Tensor:
    return _extreme(self, self.detach().amax(dims_of(None, self.dim()), keepdim=True), None, False, nan_attains=True)


def min_all(self: Tensor) -> Tensor:
    return _extreme(self, self.detach().amin(dims_of(None, self.dim()), keepdim=True), None, False, nan_attains=True)


def _extreme(x: Tensor, extreme: Tensor, dim: Dims, keepdim: bool, *, nan_attains: bool = False) -> Tensor:
    """An extreme whose gradient is shared evenly by the elements that attain it, as in PyTorch: of nan by all elements
    that are nan, or by none (``amax``, ``amin``: every gradient is nan then)."""
    dims = dims_of(dim, x.dim())
    attained = (x == extreme) | x.isnan() if nan_attains else x == extreme
    shares = attained.sum(dims, keepdim=True)
    return torch.where(attained, x / shares, torch.where(extreme.isnan(), extreme, 0)).sum(dims, keepdim)


def max_dim(self: Tensor, dim: int, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    return _chosen(self, argmax(self, dim, True), dim, keepdim)


def min_dim(self: Tensor, dim: int, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    return _chosen(self, argmin(self, dim, True), dim, keepdim)


def argmax(self: Tensor, dim: int | None = None, keepdim: bool = False) -> Tensor:
    return _first(self.detach(), True, dim, keepdim)


def argmin(self: Tensor, dim: int | None = None, keepdim: bool = False) -> Tensor:
    return _first(self.detach(), False, dim, keepdim)


def dim_indices(x: Tensor, dim: int) -> Tensor:
    """Indices along ``dim``, to be compared with ``x``."""
    return torch.arange(x.shape[dim], device=x.device).reshape(
        [-1 if d == dim % x.dim() else 1 for d in range(x.dim())]
    )


def _first(x: Tensor, largest: bool, dim: int | None, keepdim: bool) -> Tensor:
    """The first index of the extreme; of the first nan if there is one, as in PyTorch."""
    if dim is None:
        position = _first(x.flatten(), largest, 0, False)
        return position.reshape([1] * x.dim()) if keepdim else position
    extreme = x.amax(dim, keepdim=True) if largest else x.amin(dim, keepdim=True)
    attained = (x == extreme) | x.isnan() if x.is_floating_point() else x == extreme
    return torch.where(attained, dim_indices(x, dim), x.shape[dim]).amin(dim, keepdim)


def _chosen(x: Tensor, index: Tensor, dim: int, keepdim: bool) -> tuple[Tensor, Tensor]:
    """The values at ``index``, which alone gets their gradient, and the index."""
    values = torch.where(dim_indices(x, dim) == index, x, 0).sum(dim, keepdim)
    return cast(values, x.dtype), index if keepdim else index.squeeze(dim)


def cosine_similarity(x1: Tensor, x2: Tensor, dim: int = 1, eps: float = 1e-8) -> Tensor:
    product = (x1 * x2).sum(dim)
    return product / (vector_norm(x1, 2, dim).clamp_min(eps) * vector_norm(x2, 2, dim).clamp_min(eps))


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
