"""Lowerings: programs that replace an operator when one of its ``lowered`` factors is split.

A softmax over a split dim is not a softmax of each part. It is: the maximum (combined by maximum), subtract,
exponentiate, the sum (combined by addition), divide. Written as a plain function over whole tensors, every operator
in it has a rule in which the dim is parallel, or reduced with a stated kind; tracing the function and splitting its
operators is all that is needed. Each function is called like the operator it replaces and gives the same result and
gradients.

A maximum that is only subtracted for stability is taken of ``x.detach()``: no gradient flows through it, so
combining parts by maximum needs no backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from math import inf, prod, sqrt

import torch
from torch import Tensor

from shardwise.rules.calls import dims_of


def _wide(x: Tensor) -> Tensor:
    """float32 for the 16-bit types, in which PyTorch's kernels accumulate; other types as they are."""
    return x.to(torch.float32) if x.dtype in (torch.float16, torch.bfloat16) else x


def _cast(x: Tensor, dtype: torch.dtype | None) -> Tensor:
    return x if dtype is None or x.dtype == dtype else x.to(dtype)


def _count(x: Tensor, dims: Sequence[int]) -> int:
    return prod(x.shape[dim] for dim in dims)


# -- contractions whose added operand must not be added once per part --------------------------------------------------


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    product = torch.nn.functional.linear(input, weight)
    return product if bias is None else product + bias


def addmm(self: Tensor, mat1: Tensor, mat2: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    return _scaled(self, beta) + _scaled(torch.mm(mat1, mat2), alpha)


def addmv(self: Tensor, mat: Tensor, vec: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    return _scaled(self, beta) + _scaled(torch.mv(mat, vec), alpha)


def baddbmm(self: Tensor, batch1: Tensor, batch2: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    return _scaled(self, beta) + _scaled(torch.bmm(batch1, batch2), alpha)


def addbmm(self: Tensor, batch1: Tensor, batch2: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    return _scaled(self, beta) + _scaled(torch.bmm(batch1, batch2).sum(0), alpha)


def _scaled(x: Tensor, factor: float) -> Tensor:
    return x if factor == 1 else x * factor


# -- softmax -----------------------------------------------------------------------------------------------------------


def _exponentials(x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """``x - max`` and the sum of its exponentials along ``dim`` (kept)."""
    shifted = x - x.detach().amax(dim, keepdim=True)
    return shifted, shifted.exp().sum(dim, keepdim=True)


def softmax(self: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    shifted, total = _exponentials(_wide(_cast(self, dtype)), dim)
    return _cast(shifted.exp() / total, dtype or self.dtype)


def log_softmax(self: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    shifted, total = _exponentials(_wide(_cast(self, dtype)), dim)
    return _cast(shifted - total.log(), dtype or self.dtype)


def internal_softmax(self: Tensor, dim: int, half_to_float: bool) -> Tensor:
    return softmax(self, dim, torch.float32 if half_to_float else None)


def internal_log_softmax(self: Tensor, dim: int, half_to_float: bool) -> Tensor:
    return log_softmax(self, dim, torch.float32 if half_to_float else None)


def safe_softmax(self: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    """Rows that are -inf everywhere give 0 instead of nan."""
    x = _wide(_cast(self, dtype))
    maximum = x.detach().amax(dim, keepdim=True)
    exponentials = (x - maximum.masked_fill(maximum == -inf, 0)).exp()
    total = exponentials.sum(dim, keepdim=True)
    return _cast(exponentials / total.masked_fill(total == 0, 1), dtype or self.dtype)


def logsumexp(self: Tensor, dim: int | Sequence[int], keepdim: bool = False) -> Tensor:
    dims = dims_of(dim, self.dim())
    maximum = self.detach().amax(dims, keepdim=True)
    maximum = maximum.masked_fill(maximum.abs() == inf, 0)
    result = (self - maximum).exp().sum(dims, keepdim=True).log() + maximum
    return result if keepdim else result.squeeze(dims)


# -- reductions --------------------------------------------------------------------------------------------------------


def mean(
    self: Tensor, dim: int | Sequence[int] | None = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Tensor:
    dims = dims_of(dim, self.dim())
    return torch.sum(self, dims, keepdim, dtype=dtype) / _count(self, dims)


def var(
    self: Tensor,
    dim: int | Sequence[int] | None = None,
    correction: float | None = None,
    keepdim: bool = False,
) -> Tensor:
    return _moments(self, dim, correction, keepdim)[0]


def _moments(
    x: Tensor, dim: int | Sequence[int] | None, correction: float | None, keepdim: bool
) -> tuple[Tensor, Tensor]:
    """Variance and mean. ``correction`` None: 1, as in PyTorch."""
    dims = dims_of(dim, x.dim())
    count = _count(x, dims)
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


def var_unbiased(self: Tensor, unbiased: bool = True) -> Tensor:
    return var(self, None, int(unbiased))


def var_dim(self: Tensor, dim: int | Sequence[int] | None, unbiased: bool = True, keepdim: bool = False) -> Tensor:
    return var(self, dim, int(unbiased), keepdim)


def std(
    self: Tensor,
    dim: int | Sequence[int] | None = None,
    correction: float | None = None,
    keepdim: bool = False,
) -> Tensor:
    return _root(var(self, dim, correction, keepdim))


def std_unbiased(self: Tensor, unbiased: bool = True) -> Tensor:
    return _root(var_unbiased(self, unbiased))


def std_dim(self: Tensor, dim: int | Sequence[int] | None, unbiased: bool = True, keepdim: bool = False) -> Tensor:
    return _root(var_dim(self, dim, unbiased, keepdim))


def var_mean(
    self: Tensor,
    dim: int | Sequence[int] | None = None,
    correction: float | None = None,
    keepdim: bool = False,
) -> tuple[Tensor, Tensor]:
    return _moments(self, dim, correction, keepdim)


def var_mean_unbiased(self: Tensor, unbiased: bool = True) -> tuple[Tensor, Tensor]:
    return _moments(self, None, int(unbiased), False)


def var_mean_dim(
    self: Tensor, dim: int | Sequence[int] | None, unbiased: bool = True, keepdim: bool = False
) -> tuple[Tensor, Tensor]:
    return _moments(self, dim, int(unbiased), keepdim)


def std_mean(
    self: Tensor,
    dim: int | Sequence[int] | None = None,
    correction: float | None = None,
    keepdim: bool = False,
) -> tuple[Tensor, Tensor]:
    variance, average = _moments(self, dim, correction, keepdim)
    return _root(variance), average


def std_mean_unbiased(self: Tensor, unbiased: bool = True) -> tuple[Tensor, Tensor]:
    return std_mean(self, None, int(unbiased))


def std_mean_dim(
    self: Tensor, dim: int | Sequence[int] | None, unbiased: bool = True, keepdim: bool = False
) -> tuple[Tensor, Tensor]:
    return std_mean(self, dim, int(unbiased), keepdim)


def nanmean(
    self: Tensor, dim: int | Sequence[int] | None = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Tensor:
    dims = dims_of(dim, self.dim())
    return torch.nansum(self, dims, keepdim, dtype=dtype) / self.isnan().logical_not().sum(dims, keepdim)


def vector_norm(
    self: Tensor,
    ord: float = 2,
    dim: int | Sequence[int] | None = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Tensor:
    x, dims = _cast(self, dtype), dims_of(dim, self.dim())
    if ord == 0:
        sizes = x.abs()
        return torch.where(sizes != 0, 1, sizes * 0).sum(dims, keepdim)  # (has a gradient, which is 0)
    if ord in (inf, -inf):
        return (amax if ord > 0 else amin)(x.abs(), dims, keepdim)
    if ord == 2:
        return _root(_squared(x).sum(dims, keepdim))
    if ord == 1:
        return x.abs().sum(dims, keepdim)
    total = x.abs().pow(ord).sum(dims, keepdim)
    zero = total == 0
    return total.masked_fill(zero, 1).pow(1 / ord).masked_fill(zero, 0)


def norm(
    self: Tensor,
    p: float | None = 2,
    dim: int | Sequence[int] | None = None,
    keepdim: bool = False,
    dtype: torch.dtype | None = None,
) -> Tensor:
    return vector_norm(self, 2 if p is None else p, dim, keepdim, dtype=dtype)


def linalg_norm(
    self: Tensor,
    ord: float | None = None,
    dim: int | Sequence[int] | None = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Of vectors, or without an order."""
    return vector_norm(self, 2 if ord is None else ord, dim, keepdim, dtype=dtype)


def matrix_norm(
    self: Tensor,
    ord: str = "fro",
    dim: Sequence[int] = (-2, -1),
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Tensor:
    assert ord == "fro", "other matrix norms are decompositions"
    return vector_norm(self, 2, dim, keepdim, dtype=dtype)


def frobenius_norm(self: Tensor, dim: int | Sequence[int], keepdim: bool = False) -> Tensor:
    return vector_norm(self, 2, dim, keepdim)


def amax(self: Tensor, dim: int | Sequence[int] = (), keepdim: bool = False) -> Tensor:
    return _extreme(self, self.detach().amax(dims_of(dim, self.dim()), keepdim=True), dim, keepdim)


def amin(self: Tensor, dim: int | Sequence[int] = (), keepdim: bool = False) -> Tensor:
    return _extreme(self, self.detach().amin(dims_of(dim, self.dim()), keepdim=True), dim, keepdim)


def aminmax(self: Tensor, *, dim: int | None = None, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    dims = () if dim is None else (dim,)
    return amin(self, dims, keepdim), amax(self, dims, keepdim)


def _extreme(x: Tensor, extreme: Tensor, dim: int | Sequence[int], keepdim: bool) -> Tensor:
    """An extreme whose gradient is shared evenly by the elements that attain it, as in PyTorch."""
    dims = dims_of(dim, x.dim())
    attained = x == extreme
    shares = attained.sum(dims, keepdim=True)
    return torch.where(attained, x / shares, 0).sum(dims, keepdim)


def max_dim(self: Tensor, dim: int, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    return _chosen(self, argmax(self, dim, True), dim, keepdim)


def min_dim(self: Tensor, dim: int, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    return _chosen(self, argmin(self, dim, True), dim, keepdim)


def argmax(self: Tensor, dim: int | None = None, keepdim: bool = False) -> Tensor:
    return _first(self.detach(), True, dim, keepdim)


def argmin(self: Tensor, dim: int | None = None, keepdim: bool = False) -> Tensor:
    return _first(self.detach(), False, dim, keepdim)


def _positions(x: Tensor, dim: int) -> Tensor:
    """Indices along ``dim``, to be compared with ``x``."""
    return torch.arange(x.shape[dim], device=x.device).reshape(
        [-1 if d == dim % x.dim() else 1 for d in range(x.dim())]
    )


def _first(x: Tensor, largest: bool, dim: int | None, keepdim: bool) -> Tensor:
    """The first index of the extreme; of the first nan if there is one, as in PyTorch."""
    if dim is None:
        found = _first(x.flatten(), largest, 0, False)
        return found.reshape([1] * x.dim()) if keepdim else found
    extreme = x.amax(dim, keepdim=True) if largest else x.amin(dim, keepdim=True)
    attained = (x == extreme) | x.isnan() if x.is_floating_point() else x == extreme
    return torch.where(attained, _positions(x, dim), x.shape[dim]).amin(dim, keepdim)


def _chosen(x: Tensor, index: Tensor, dim: int, keepdim: bool) -> tuple[Tensor, Tensor]:
    """The values at ``index``, which alone gets their gradient, and the index."""
    values = torch.where(_positions(x, dim) == index, x, 0).sum(dim, keepdim)
    return _cast(values, x.dtype), index if keepdim else index.squeeze(dim)


def cosine_similarity(x1: Tensor, x2: Tensor, dim: int = 1, eps: float = 1e-8) -> Tensor:
    product = (x1 * x2).sum(dim)
    return product / (vector_norm(x1, 2, dim).clamp_min(eps) * vector_norm(x2, 2, dim).clamp_min(eps))


# -- products, scans and choices by runs: within what a rank holds, then over what the ranks found ---------------------


def _by_runs(x: Tensor, dim: int, runs: Sequence[int]) -> tuple[int, Tensor | None]:
    """``dim`` counted from the front, and ``x`` with that dim as (number of runs, run); None if it is not split."""
    dim = dim % max(x.dim(), 1)
    split = len(runs) > dim and 0 < runs[dim] < x.shape[dim]
    return dim, torch.unflatten(x, dim, (x.shape[dim] // runs[dim], runs[dim])) if split else None


def _starts(x: Tensor, dim: int) -> Tensor:
    """Where the runs of ``x`` begin, to be added to indices within them."""
    return _positions(x, dim) * x.shape[dim + 1]


def _before(totals: Tensor, dim: int, neutral: float) -> Tensor:
    """What precedes every run, given the totals up to its end: ``neutral`` for the first; with a dim for the run."""
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
    """Of equal values the later one counts, and nan beats numbers, as in PyTorch."""
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
    better = better & (_positions(before, dim) > 0)
    result = torch.where(better, before, values), torch.where(better, before_index, index)
    return result[0].flatten(dim, dim + 1), result[1].flatten(dim, dim + 1)


def topk(
    self: Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True, *, runs: Sequence[int] = ()
) -> tuple[Tensor, Tensor]:
    """The best of the best k of every run. Runs of no more than k elements offer all they have."""
    dim, parts = _by_runs(self, dim, runs)
    if parts is None or parts.shape[dim + 1] <= k:
        values, index = torch.topk(self, k, dim, largest, sorted)
        return values, index
    values, index = torch.topk(parts, k, dim + 1, largest, sorted)
    offered = (index + _starts(parts, dim)).flatten(dim, dim + 1)
    values, chosen = torch.topk(values.flatten(dim, dim + 1), k, dim, largest, sorted)
    return values, offered.gather(dim, chosen)


# -- updates and lookups by index --------------------------------------------------------------------------------------


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
    return _added(self, dim, index, _scaled(source, alpha))


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


# -- normalisation -----------------------------------------------------------------------------------------------------


def layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> Tensor:
    del cudnn_enable
    dims = tuple(range(input.dim() - len(normalized_shape), input.dim()))
    result = _cast(_standardised(_wide(input), dims, eps), input.dtype)
    result = result if weight is None else result * weight
    return result if bias is None else result + bias


def _standardised(x: Tensor, dims: tuple[int, ...], eps: float) -> Tensor:
    count = _count(x, dims)
    centred = x - x.sum(dims, keepdim=True) / count
    return centred * (centred.square().sum(dims, keepdim=True) / count + eps).rsqrt()


def rms_norm(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    dims = tuple(range(input.dim() - len(normalized_shape), input.dim()))
    x = _wide(input)
    small = torch.finfo(x.dtype).eps if eps is None else eps
    scale = (x.square().sum(dims, keepdim=True) / _count(x, dims) + small).rsqrt()
    result = x * scale
    return _cast(result if weight is None else result * weight, input.dtype)


def group_norm(
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> Tensor:
    del cudnn_enabled
    grouped = torch.unflatten(_wide(input), 1, (num_groups, input.shape[1] // num_groups))
    result = _standardised(grouped, tuple(range(2, grouped.dim())), eps).flatten(1, 2)
    return _cast(_affine(result, weight, bias), input.dtype)


def batch_norm(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool,
) -> Tensor:
    """Batch statistics; updating the running ones is not an operator's business (the capture makes it visible)."""
    del running_mean, running_var, training, momentum, cudnn_enabled
    result = _standardised(_wide(input), tuple(dim for dim in range(input.dim()) if dim != 1), eps)
    return _cast(_affine(result, weight, bias), input.dtype)


def instance_norm(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    use_input_stats: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool,
) -> Tensor:
    del running_mean, running_var, use_input_stats, momentum, cudnn_enabled
    result = _standardised(_wide(input), tuple(range(2, input.dim())), eps)
    return _cast(_affine(result, weight, bias), input.dtype)


def _affine(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """Per-channel scale and shift; channels are dim 1."""
    shape = (-1, *(1,) * (x.dim() - 2))
    x = x if weight is None else x * weight.reshape(shape)
    return x if bias is None else x + bias.reshape(shape)


# -- attention ---------------------------------------------------------------------------------------------------------


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Attention as matrix products and a softmax, so that queries, keys and head width can be split.

    The causal mask compares positions, which are generated per part; grouped queries get a dim of their own.
    """
    assert dropout_p == 0.0, "attention dropout is separated by the graph's normalisation"
    grouped = enable_gqa and query.shape[-3] != key.shape[-3]
    q, k, v = _wide(query), _wide(key), _wide(value)
    if grouped:
        kv_heads = key.shape[-3]
        shape = (kv_heads, query.shape[-3] // kv_heads)
        q, k, v = torch.unflatten(q, -3, shape), k.unsqueeze(-3), v.unsqueeze(-3)
        if attn_mask is not None and attn_mask.dim() > 2:
            one = attn_mask.shape[-3] == 1
            attn_mask = attn_mask.unsqueeze(-3) if one else torch.unflatten(attn_mask, -3, shape)
    factor = 1 / sqrt(query.shape[-1]) if scale is None else scale
    scores = torch.matmul(q * factor, k.transpose(-2, -1))
    if is_causal:
        rows = torch.arange(query.shape[-2], device=query.device).unsqueeze(-1)
        columns = torch.arange(key.shape[-2], device=query.device)
        scores = scores.masked_fill(columns > rows, -inf)
    if attn_mask is not None:
        boolean = attn_mask.dtype == torch.bool
        scores = scores.masked_fill(attn_mask.logical_not(), -inf) if boolean else scores + attn_mask
    result = torch.matmul(safe_softmax(scores, -1), v)
    return _cast(result.flatten(-4, -3) if grouped else result, query.dtype)


# -- losses ------------------------------------------------------------------------------------------------------------

NONE, MEAN, SUM = 0, 1, 2  # at::Reduction


def cross_entropy_loss(
    self: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    reduction: int = MEAN,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Tensor:
    """Cross entropy over split classes: log-softmax in parts, and the label's entry found by the part that holds it."""
    class_dim = 0 if self.dim() == 1 else 1
    is_soft = target.shape == self.shape and target.dtype.is_floating_point
    if not is_soft and not label_smoothing:  # the other probabilities are never needed as such
        scores, valid = _wide(self), target != ignore_index
        maximum, label = scores.detach().amax(class_dim, keepdim=True), torch.where(valid, target, 0)
        whole = [[scores.shape[class_dim]], [0], [scores.shape[class_dim]]]
        total, picked = torch.ops.shardwise.label_terms(scores, maximum, label, class_dim, *whole)
        losses = torch.where(valid, total.log() - picked, 0)
        counts = valid if weight is None else torch.where(valid, weight[label], 0)
        return _cast(_reduced(losses if weight is None else losses * counts, counts, reduction), self.dtype)
    log_probabilities = log_softmax(self, class_dim)
    if is_soft:
        return _soft_label_loss(log_probabilities, target, weight, reduction, label_smoothing)
    losses, counts = _label_losses(log_probabilities, target, weight, ignore_index)
    if label_smoothing:
        weighted = log_probabilities if weight is None else log_probabilities * _per_class(weight, self.dim())
        smooth = -weighted.sum(class_dim).masked_fill(target == ignore_index, 0)
        share = label_smoothing / self.shape[class_dim]
        losses = losses * (1 - label_smoothing) + smooth * share
    return _reduced(losses, counts, reduction)


def nll_loss(
    self: Tensor, target: Tensor, weight: Tensor | None = None, reduction: int = MEAN, ignore_index: int = -100
) -> Tensor:
    losses, counts = _label_losses(self, target, weight, ignore_index)
    return _reduced(losses, counts, reduction)


def _label_losses(scores: Tensor, target: Tensor, weight: Tensor | None, ignore_index: int) -> tuple[Tensor, Tensor]:
    """Per label: minus its entry of ``scores`` times its class weight, and what it counts in a mean."""
    class_dim = 0 if scores.dim() == 1 else 1
    valid = target != ignore_index
    safe = torch.where(valid, target, 0)
    picked = scores.gather(class_dim, safe.unsqueeze(class_dim)).squeeze(class_dim)
    losses = torch.where(valid, -picked, 0)
    if weight is None:
        return losses, valid
    counts = torch.where(valid, weight[safe], 0)
    return losses * counts, counts


def _reduced(losses: Tensor, counts: Tensor, reduction: int) -> Tensor:
    if reduction == NONE:
        return losses
    return losses.sum() if reduction == SUM else losses.sum() / counts.sum()


def _per_class(weight: Tensor, rank: int) -> Tensor:
    return weight if rank == 1 else weight.reshape((-1, *(1,) * (rank - 2)))


def _soft_label_loss(
    log_probabilities: Tensor, target: Tensor, weight: Tensor | None, reduction: int, label_smoothing: float
) -> Tensor:
    rank = log_probabilities.dim()
    class_dim = 0 if rank == 1 else 1
    num_classes = log_probabilities.shape[class_dim]
    if label_smoothing:
        target = target * (1 - label_smoothing) + label_smoothing / num_classes
    products = log_probabilities * target
    losses = -(products if weight is None else products * _per_class(weight, rank)).sum(class_dim)
    if reduction == NONE:
        return losses
    return losses.sum() if reduction == SUM else losses.sum() / max(log_probabilities.numel() // num_classes, 1)


def _over_samples(losses: Tensor, reduction: int) -> Tensor:
    """Losses of samples, all of which count."""
    if reduction == NONE:
        return losses
    return losses.sum() if reduction == SUM else losses.sum() / losses.numel()


def cosine_embedding_loss(
    input1: Tensor, input2: Tensor, target: Tensor, margin: float = 0.0, reduction: int = MEAN
) -> Tensor:
    small = 1e-12  # PyTorch's own
    sizes = (input1.square().sum(-1) + small) * (input2.square().sum(-1) + small)
    cosine = (input1 * input2).sum(-1) / sizes.sqrt()
    apart = torch.where(target == -1, (cosine - margin).clamp_min(0), 0)
    return _over_samples(torch.where(target == 1, 1 - cosine, apart), reduction)


def pairwise_distance(x1: Tensor, x2: Tensor, p: float = 2, eps: float = 1e-6, keepdim: bool = False) -> Tensor:
    return vector_norm(x1 - x2 + eps, p, -1, keepdim)


def triplet_margin_loss(
    anchor: Tensor,
    positive: Tensor,
    negative: Tensor,
    margin: float = 1.0,
    p: float = 2,
    eps: float = 1e-6,
    swap: bool = False,
    reduction: int = MEAN,
) -> Tensor:
    near = pairwise_distance(anchor, positive, p, eps)
    far = pairwise_distance(anchor, negative, p, eps)
    if swap:
        far = torch.minimum(far, pairwise_distance(positive, negative, p, eps))
    return _over_samples((margin + near - far).clamp_min(0), reduction)


def multi_margin_loss(
    self: Tensor,
    target: Tensor,
    p: float = 1,
    margin: float = 1,
    weight: Tensor | None = None,
    reduction: int = MEAN,
) -> Tensor:
    """Over split samples: the classes of one stay together."""
    total: Tensor = torch.ops.aten.multi_margin_loss.default(self, target, p, margin, weight, SUM)
    return total / target.numel()


def multilabel_margin_loss(self: Tensor, target: Tensor, reduction: int = MEAN) -> Tensor:
    """Over split samples: the classes of one stay together."""
    total: Tensor = torch.ops.aten.multilabel_margin_loss.default(self, target, SUM)
    return total / self.shape[0]
