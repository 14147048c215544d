"""Means, moments, norms, extremes and positions of extremes over split dims."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf, prod
from typing import Any

import torch
from torch import Tensor

from shardwise.graph.precision import cast
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
