"""Operators as functions: ``ops.matmul(x, y)``, one line each, over torch, with the reference's argument names.

They carry no strategy: ``ms.shard`` gives them one. Names of arguments that differ between the reference's versions are
all taken (``named.WORDS``).
"""

from __future__ import annotations

from functools import partial, wraps
from typing import Any

import torch
from torch.nn import functional as F

from shardwise.errors import problem
from shardwise.mindspore import calls
from shardwise.mindspore.common.seed import drawn
from shardwise.mindspore.named import Function, translated
from shardwise.mindspore.ops.boxes import BOXES
from shardwise.mindspore.ops.clip import clip_by_norm
from shardwise.mindspore.ops.further import FURTHER
from shardwise.mindspore.ops.indexing import (
    Gather,
    GatherNd,
    OneHot,
    TensorScatterAdd,
    TensorScatterUpdate,
    UnsortedSegmentSum,
)
from shardwise.mindspore.ops.networks import NETWORKS, as_int, sizes_of
from shardwise.mindspore.ops.of_torch import OF_TORCH
from shardwise.mindspore.ops.scatters import SCATTERS, TENSOR_SCATTERS
from shardwise.mindspore.ops.shape import Slice, StridedSlice, Tile
from shardwise.mindspore.tensor import as_torch
from shardwise.mindspore.tensor_methods import TORCHS, dtype_of, number, product

Tensor = torch.Tensor


def _dims(x: Any, axis: Any) -> tuple[int, ...]:
    whole = axis is None or (not isinstance(axis, int) and not len(axis))
    return tuple(range(x.dim())) if whole else (axis,) if isinstance(axis, int) else tuple(axis)


def _type(dtype: Any) -> torch.dtype | None:
    return None if dtype is None else dtype_of(dtype)


def _extremum(x: Tensor, axis: int | None, keep: bool, function: Any) -> tuple[Tensor, Tensor]:
    """The value and where it is; without an axis of everything, and 0."""
    if axis is None:
        return function(x), torch.zeros((), dtype=torch.int32)
    value, index = function(x, axis, keepdim=keep)
    return value, index


def _squeezed(x: Tensor, axis: Any) -> Tensor:
    return torch.squeeze(x) if axis is None else torch.squeeze(x, _dims(x, axis))


def _parts(x: Tensor, sizes: Any, axis: int, output_num: int | None) -> tuple[Tensor, ...]:
    """Parts of so many elements, of several sizes, or (the older form) so many parts."""
    if output_num is not None or sizes == 0:
        along, count = (axis, output_num) if output_num is not None else (0, axis)
        if count is None or x.shape[along] % count:
            raise ValueError(problem(f"{x.shape[along]} elements in {count} parts", fix="a number that divides them"))
        return x.tensor_split(count, along)
    return tuple(TORCHS["split"](x, sizes if isinstance(sizes, int) else list(sizes), axis))


def _assigned(variable: Any, change: Any) -> Any:
    with torch.no_grad():
        variable.copy_(change(variable.detach()))
    return variable


def _changed(change: Any, input_x: Any, indices: Any, updates: Any) -> Any:
    return _assigned(input_x, lambda tensor: change(tensor, indices, updates))


def _normal(shape: Any, mean: Any = 0.0, stddev: Any = 1.0, seed: Any = None, dtype: Any = None) -> Any:
    numbers = torch.randn(sizes_of(shape), generator=drawn(seed), dtype=_type(dtype) or torch.float32)
    return numbers * stddev + mean


def _uniform(shape: Any, minval: Any = 0.0, maxval: Any = 1.0, seed: Any = None, dtype: Any = None) -> Any:
    if _type(dtype) in (torch.int32, torch.int64):
        return torch.randint(int(minval), int(maxval), sizes_of(shape), generator=drawn(seed), dtype=_type(dtype))
    numbers = torch.rand(sizes_of(shape), generator=drawn(seed), dtype=_type(dtype) or torch.float32)
    return numbers * (maxval - minval) + minval


def _dense_or(dtype: Any) -> torch.dtype:
    return _type(dtype) or torch.float32


def _binary(function: Any) -> Function:
    """Of two tensors, or of a tensor and a number on either side."""
    return lambda input, other: function(*(x if isinstance(x, Tensor) else torch.as_tensor(x) for x in (input, other)))


# One argument, called input; and two, called input and other.
_UNARY = [
    "abs", "acos", "acosh", "angle", "asin", "asinh", "atan", "atanh", "ceil", "cos", "cosh", "deg2rad", "det",
    "digamma", "erf", "erfc", "erfinv", "exp", "exp2", "expm1", "floor", "frac", "i0", "inverse", "isfinite",
    "isinf", "isnan", "isneginf", "isposinf", "lgamma", "log", "log10", "log1p", "log2", "logical_not", "neg",
    "numel", "rad2deg", "reciprocal", "relu", "round", "rsqrt", "sigmoid", "sign", "sin", "sinc", "sinh", "sqrt",
    "square", "t", "tan", "tanh", "trace", "trunc", "conj", "real", "imag", "fliplr", "flipud", "nonzero",
    "atleast_1d", "atleast_2d", "atleast_3d", "signbit", "logdet", "view_as_real",
]  # fmt: skip
_BINARY = [
    "add", "atan2", "bitwise_and", "bitwise_or", "bitwise_xor", "copysign", "dot", "eq", "floor_divide", "fmax",
    "fmin", "fmod", "ge", "gt", "hypot", "inner", "kron", "le", "logaddexp", "logaddexp2", "logical_and",
    "logical_or", "logical_xor", "lt", "matmul", "maximum", "minimum", "mul", "ne", "outer", "remainder", "sub",
    "true_divide", "xlogy", "gcd", "lcm", "heaviside", "float_power",
]  # fmt: skip
_SAME = {
    "absolute": "abs", "arccos": "acos", "arcsin": "asin", "arctan": "atan", "arccosh": "acosh", "arcsinh": "asinh",
    "arctanh": "atanh", "arctan2": "atan2", "negative": "neg", "inv": "reciprocal", "multiply": "mul",
    "subtract": "sub", "divide": "div", "floor_div": "floor_divide", "floor_mod": "remainder", "mod": "remainder",
    "equal": "eq", "not_equal": "ne", "greater": "gt", "greater_equal": "ge", "less": "lt", "less_equal": "le",
    "tensor_add": "add", "tensor_sub": "sub", "tensor_mul": "mul", "tensor_div": "div", "tensor_pow": "pow",
    "tensor_gt": "gt", "tensor_ge": "ge", "tensor_lt": "lt", "tensor_le": "le", "tensor_floordiv": "floor_divide",
    "tensor_mod": "remainder", "scalar_add": "add", "scalar_sub": "sub", "scalar_mul": "mul", "scalar_div": "div",
    "swapdims": "swapaxes", "movedim": "moveaxis", "concat": "cat", "clip": "clamp", "batch_matmul": "bmm",
    "gather_d": "gather_elements", "unbind": "unstack", "ger": "outer", "reduce_sum": "sum",
    "reduce_mean": "mean", "reduce_max": "amax", "reduce_min": "amin", "reduce_prod": "prod", "reduce_all": "all",
    "reduce_any": "any",
}  # fmt: skip

FUNCTIONS: dict[str, Function] = {
    **{name: (lambda function: lambda input: function(input))(getattr(torch, name)) for name in _UNARY},
    **{name: _binary(getattr(torch, name)) for name in _BINARY},
    # -- elements
    "addcdiv": lambda input, tensor1, tensor2, value=1: input + value * (tensor1 / tensor2),
    "addcmul": lambda input, tensor1, tensor2, value=1: input + value * (tensor1 * tensor2),
    "addn": lambda x: torch.stack(tuple(x)).sum(0),
    "accumulate_n": lambda x: torch.stack(tuple(x)).sum(0),
    "approximate_equal": lambda x, y, tolerance=1e-5: torch.abs(x - y) < tolerance,
    "cast": lambda input, dtype: as_torch(input).to(dtype_of(dtype)),
    "clamp": lambda input, min=None, max=None: torch.clamp(input, min, max),
    "div": lambda input, other, *, rounding_mode=None: torch.div(input, other, rounding_mode=rounding_mode),
    "isclose": lambda input, other, rtol=1e-5, atol=1e-8, equal_nan=False: torch.isclose(input, other, rtol, atol,
                                                                                        equal_nan),
    "lerp": lambda input, end, weight: torch.lerp(input, end, weight),
    "logit": lambda input, eps=None: torch.logit(input, eps),
    "masked_fill": lambda input, mask, value: torch.where(mask, torch.as_tensor(value).to(input), input),
    "nan_to_num": lambda input, nan=0.0, posinf=None, neginf=None: torch.nan_to_num(input, nan, posinf, neginf),
    "pow": lambda input, exponent: torch.pow(input, exponent),
    "select": lambda condition, input, other: torch.where(condition, input, other),
    "where": lambda condition, input, other: torch.where(condition, input, other),
    "xdivy": lambda x, y: torch.where(x == 0, 0, x / torch.where(x == 0, 1, y)),
    # -- activations
    "celu": lambda x, alpha=1.0: F.celu(x, alpha),
    "elu": lambda input_x, alpha=1.0: F.elu(input_x, alpha),
    "fast_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "gelu": lambda input, approximate="none": F.gelu(input, approximate=approximate),
    "glu": lambda x, axis=-1: F.glu(x, axis),
    "gumbel_softmax": lambda logits, tau=1.0, hard=False, dim=-1: F.gumbel_softmax(logits, tau, hard, dim=dim),
    "hardshrink": lambda x, lambd=0.5: F.hardshrink(x, lambd),
    "hardsigmoid": lambda input: F.hardsigmoid(input),
    "hardswish": lambda x: F.hardswish(x),
    "hardtanh": lambda input, min_val=-1.0, max_val=1.0: F.hardtanh(input, min_val, max_val),
    "leaky_relu": lambda input, alpha=0.2: F.leaky_relu(input, alpha),
    "log_softmax": lambda logits, axis=-1: torch.log_softmax(logits, axis),
    "logsigmoid": lambda x: F.logsigmoid(x),
    "mish": lambda x: F.mish(x),
    "prelu": lambda x, weight: F.prelu(x, weight),
    "relu6": lambda x: F.relu6(x),
    "rrelu": lambda input, lower=1 / 8, upper=1 / 3: F.rrelu(input, lower, upper),
    "selu": lambda input_x: F.selu(input_x),
    "silu": lambda x: F.silu(x),
    "softmax": lambda input, axis=-1, *, dtype=None: torch.softmax(input, axis, dtype=_type(dtype)),
    "softmin": lambda x, axis=-1, *, dtype=None: torch.softmax(-x, axis, dtype=_type(dtype)),
    "softplus": lambda input, beta=1, threshold=20: F.softplus(input, beta, threshold),
    "softshrink": lambda x, lambd=0.5: F.softshrink(x, lambd),
    "softsign": lambda x: F.softsign(x),
    "swiglu": lambda input, dim=-1: F.silu(input.chunk(2, dim)[0]) * input.chunk(2, dim)[1],
    "tanhshrink": lambda input: F.tanhshrink(input),
    "threshold": lambda input, thr, value: F.threshold(input, thr, value),
    # -- products
    "addbmm": lambda input, batch1, batch2, *, beta=1, alpha=1: torch.addbmm(input, batch1, batch2, beta=beta,
                                                                             alpha=alpha),
    "addmm": lambda input, mat1, mat2, *, beta=1, alpha=1: torch.addmm(input, mat1, mat2, beta=beta, alpha=alpha),
    "addmv": lambda input, mat, vec, *, beta=1, alpha=1: torch.addmv(input, mat, vec, beta=beta, alpha=alpha),
    "addr": lambda x, vec1, vec2, *, beta=1, alpha=1: torch.addr(x, vec1, vec2, beta=beta, alpha=alpha),
    "baddbmm": lambda input, batch1, batch2, *, beta=1, alpha=1: torch.baddbmm(input, batch1, batch2, beta=beta,
                                                                               alpha=alpha),
    "batch_dot": lambda x1, x2, axes=None: torch.einsum("b...i,bi...->b...", x1, x2) if axes is None
    else torch.stack([torch.tensordot(a, b, ([axes[0] - 1], [axes[1] - 1])) for a, b in zip(x1, x2, strict=True)]),
    "bias_add": lambda input_x, bias: input_x + bias.reshape(-1, *(1,) * (input_x.dim() - 2)),
    "bmm": lambda input_x, mat2: torch.matmul(input_x, mat2),
    "chain_matmul": lambda input: torch.linalg.multi_dot(list(input)),
    "cross": lambda input, other, dim=-1: torch.linalg.cross(input, other, dim=dim),
    "dense": lambda input, weight, bias=None: F.linear(input, weight, bias),
    "einsum": lambda equation, *operands: torch.einsum(equation, *operands),
    "mm": lambda input, mat2: torch.mm(input, mat2),
    "mv": lambda mat, vec: torch.mv(mat, vec),
    "scaled_dot_product_attention": lambda query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False:
    F.scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, is_causal),
    "tensor_dot": lambda x1, x2, axes: torch.tensordot(x1, x2, axes),
    # -- reductions
    "all": lambda input, axis=None, keep_dims=False: torch.all(input, _dims(input, axis), keepdim=keep_dims),
    "amax": lambda input, axis=None, keepdims=False: torch.amax(input, _dims(input, axis), keepdim=keepdims),
    "amin": lambda input, axis=None, keepdims=False: torch.amin(input, _dims(input, axis), keepdim=keepdims),
    "any": lambda input, axis=None, keep_dims=False: torch.any(input, _dims(input, axis), keepdim=keep_dims),
    "argmax": lambda input, dim=None, keepdim=False: torch.argmax(input, dim, keepdim),
    "argmin": lambda input, axis=None, keepdims=False: torch.argmin(input, axis, keepdims),
    "bincount": lambda input, weights=None, minlength=0: torch.bincount(input, weights, minlength),
    "count_nonzero": lambda x, axis=(), keep_dims=False, dtype=torch.int32: torch.sum(
        (x != 0).to(_type(dtype)), _dims(x, axis), keepdim=keep_dims),
    "cummax": lambda input, axis: tuple(torch.cummax(input, axis)),
    "cummin": lambda input, axis: tuple(torch.cummin(input, axis)),
    "cumprod": lambda input, dim, dtype=None: torch.cumprod(input, dim, dtype=_type(dtype)),
    "cumsum": lambda x, axis, dtype=None: torch.cumsum(x, axis, dtype=_type(dtype)),
    "dist": lambda input, other, p=2: torch.dist(input, other, p),
    "logsumexp": lambda input, axis, keep_dims=False: torch.logsumexp(input, axis, keepdim=keep_dims),
    "max": lambda input, axis=None, keepdims=False: _extremum(input, axis, keepdims, torch.max),
    "mean": lambda x, axis=None, keep_dims=False: torch.mean(x, _dims(x, axis), keepdim=keep_dims),
    "median": lambda input, axis=-1, keepdims=False: tuple(torch.median(input, axis, keepdim=keepdims)),
    "min": lambda input, axis=None, keepdims=False: _extremum(input, axis, keepdims, torch.min),
    "nansum": lambda input, axis=None, keepdims=False, *, dtype=None: torch.nansum(
        input, _dims(input, axis), keepdim=keepdims, dtype=_type(dtype)),
    "norm": lambda A, ord=None, dim=None, keepdim=False, *, dtype=None: torch.linalg.norm(
        A, ord, dim, keepdim, dtype=_type(dtype)),
    "prod": lambda input, axis=None, keep_dims=False: product(input, _dims(input, axis), keep_dims),
    "std": lambda input, axis=None, ddof=0, keepdims=False: torch.std(
        input, _dims(input, axis), correction=int(ddof), keepdim=keepdims),
    "sum": lambda input, dim=None, keepdim=False, *, dtype=None: torch.sum(
        input, _dims(input, dim), keepdim=keepdim, dtype=_type(dtype)),
    "topk": lambda input, k, dim=-1, largest=True, sorted=True: tuple(torch.topk(
        input, k, -1 if dim is None else dim, largest, sorted)),
    "var": lambda input, axis=None, ddof=0, keepdims=False: torch.var(
        input, _dims(input, axis), correction=int(ddof), keepdim=keepdims),
    "var_mean": lambda input, axis=None, ddof=0, keepdims=False: torch.var_mean(
        input, _dims(input, axis), correction=int(ddof), keepdim=keepdims),
    # -- shapes
    "broadcast_to": lambda input, shape: torch.broadcast_to(input, sizes_of(shape)),
    "cat": lambda tensors, axis=0: torch.cat(tuple(tensors), axis),
    "channel_shuffle": lambda x, groups: F.channel_shuffle(x, groups),
    "chunk": lambda input, chunks, axis=0: tuple(torch.chunk(input, chunks, axis)),
    "column_stack": lambda tensors: torch.column_stack(tuple(tensors)),
    "diag": lambda input: torch.diag(input),
    "diagonal": lambda input, offset=0, dim1=0, dim2=1: torch.diagonal(input, offset, dim1, dim2),
    "diff": lambda x, n=1, axis=-1: torch.diff(x, n, axis),
    "dsplit": lambda input, indices_or_sections: torch.dsplit(input, indices_or_sections),
    "dstack": lambda inputs: torch.dstack(tuple(inputs)),
    "expand": lambda input_x, size: input_x.expand(sizes_of(size)),
    "expand_dims": lambda input_x, axis: torch.unsqueeze(input_x, axis),
    "flatten": lambda input, order="C", *, start_dim=1, end_dim=-1: torch.flatten(input, start_dim, end_dim),
    "flip": lambda input, dims: torch.flip(input, _dims(input, dims)),
    "hsplit": lambda input, indices_or_sections: torch.hsplit(input, indices_or_sections),
    "hstack": lambda tensors: torch.hstack(tuple(tensors)),
    "meshgrid": lambda *inputs, indexing="xy": tuple(torch.meshgrid(*inputs, indexing=indexing)),
    "moveaxis": lambda x, source, destination: torch.movedim(x, source, destination),
    "narrow": lambda input, axis, start, length: torch.narrow(input, axis, start, length),
    "pad": lambda input_x, padding, mode="constant", value=None: F.pad(input_x, sizes_of(padding), mode, value),
    "permute": lambda input, axis: torch.permute(input, tuple(axis)),
    "pixel_shuffle": lambda input, upscale_factor: F.pixel_shuffle(input, upscale_factor),
    "pixel_unshuffle": lambda input, downscale_factor: F.pixel_unshuffle(input, downscale_factor),
    "ravel": lambda input: torch.ravel(input),
    "repeat_elements": lambda x, rep, axis=0: torch.repeat_interleave(x, rep, axis),
    "repeat_interleave": lambda input, repeats, axis=None: torch.repeat_interleave(input, repeats, axis),
    "reshape": lambda input, shape: torch.reshape(input, sizes_of(shape)),
    "reverse": lambda x, axis: torch.flip(x, _dims(x, axis)),
    "roll": lambda input, shifts, dims=None: torch.roll(input, shifts, dims),
    "rot90": lambda input, k, dims: torch.rot90(input, k, dims),
    "slice": lambda input_x, begin, size: Slice()(input_x, begin, size),
    "split": lambda tensor, split_size_or_sections=None, axis=0, output_num=None: _parts(
        tensor, split_size_or_sections, axis, output_num),
    "squeeze": lambda input, axis=None: _squeezed(input, axis),
    "stack": lambda tensors, axis=0: torch.stack(tuple(tensors), axis),
    "strided_slice": lambda input_x, begin, end, strides, **masks: StridedSlice(**masks)(input_x, begin, end, strides),
    "swapaxes": lambda input, axis0, axis1: torch.swapaxes(input, axis0, axis1),
    "tensor_split": lambda input, indices_or_sections, axis=0: torch.tensor_split(input, indices_or_sections, axis),
    "tile": lambda input, multiples: Tile()(input, multiples),
    "transpose": lambda input, input_perm: torch.permute(input, tuple(input_perm)),
    "tril": lambda input, diagonal=0: torch.tril(input, diagonal),
    "triu": lambda input, diagonal=0: torch.triu(input, diagonal),
    "unfold": lambda input, kernel_size, dilation=1, padding=0, stride=1: F.unfold(
        input, kernel_size, dilation, padding, stride),
    "unsqueeze": lambda input, dim: torch.unsqueeze(input, dim),
    "unstack": lambda input_x, axis=0: torch.unbind(input_x, axis),
    "vsplit": lambda input, indices_or_sections: torch.vsplit(input, indices_or_sections),
    "vstack": lambda inputs: torch.vstack(tuple(inputs)),
    # -- indices
    "argsort": lambda input, axis=-1, descending=False: torch.argsort(input, axis, descending),
    "bucketize": lambda input, boundaries, *, right=False: torch.bucketize(
        input, torch.as_tensor(boundaries), right=right),
    "gather": lambda input_params, input_indices, axis, batch_dims=0: Gather(batch_dims)(
        input_params, input_indices, axis),
    "gather_elements": lambda input, dim, index: torch.gather(input, dim, as_int(index)),
    "gather_nd": lambda input_x, indices: GatherNd()(input_x, indices),
    "index_add": lambda x, indices, y, axis: torch.index_add(x, axis, indices, y),
    "index_fill": lambda x, axis, index, value: torch.index_fill(x, axis, as_int(index), value),
    "index_select": lambda input, axis, index: torch.index_select(input, axis, index),
    "intopk": lambda x1, x2, k: (torch.topk(x1, k).indices == x2.unsqueeze(-1)).any(-1),
    "masked_select": lambda input, mask: torch.masked_select(input, mask),
    "one_hot": lambda indices, depth, on_value=1, off_value=0, axis=-1: OneHot(axis)(
        indices, depth, on_value, off_value),
    "scatter": lambda input, axis, index, src: torch.scatter(input, axis, as_int(index), src),
    "scatter_add": lambda input_x, indices, updates: _assigned(
        input_x, lambda tensor: tensor.index_put((as_int(indices),), updates, accumulate=True)),
    "scatter_nd": lambda indices, updates, shape: TensorScatterAdd()(
        torch.zeros(sizes_of(shape), dtype=updates.dtype), as_int(indices), updates),
    "scatter_update": lambda input_x, indices, updates: _assigned(
        input_x, lambda tensor: tensor.index_put((as_int(indices),), updates)),
    "searchsorted": lambda sorted_sequence, values, *, right=False: torch.searchsorted(
        sorted_sequence, values, right=right),
    "sequence_mask": lambda lengths, maxlen=None: torch.arange(
        int(lengths.max()) if maxlen is None else maxlen) < lengths.unsqueeze(-1),
    "sort": lambda input_x, axis=-1, descending=False: tuple(torch.sort(input_x, axis, descending)),
    "scatter_nd_update": lambda input_x, indices, updates: _assigned(
        input_x, lambda tensor: TensorScatterUpdate()(tensor, as_int(indices), updates)),
    "tensor_scatter_add": lambda input_x, indices, updates: TensorScatterAdd()(input_x, as_int(indices), updates),
    "tensor_scatter_elements": lambda input_x, indices, updates, axis=0: torch.scatter(
        input_x, axis, as_int(indices), updates),
    "tensor_scatter_update": lambda input_x, indices, updates: TensorScatterUpdate()(
        input_x, as_int(indices), updates),
    "unique": lambda input: torch.unique(input, return_inverse=True),
    "unique_consecutive": lambda input, return_idx=False, return_counts=False, axis=None: torch.unique_consecutive(
        input, return_idx, return_counts, axis),
    "unsorted_segment_sum": lambda input_x, segment_ids, num_segments: UnsortedSegmentSum()(
        input_x, segment_ids, num_segments),
    **BOXES,
    **FURTHER,
    **NETWORKS,
    **TENSOR_SCATTERS,
    # -- new tensors
    "arange": lambda start=0, end=None, step=1, *, dtype=None: torch.arange(
        0 if end is None else number(start), number(start if end is None else end), number(step), dtype=_type(dtype)),
    "eye": lambda n, m=None, dtype=None: torch.eye(n, n if m is None else m, dtype=_dense_or(dtype)),
    "fill": lambda type, shape, value: torch.full(sizes_of(shape), number(value), dtype=_type(type)),
    "full": lambda size, fill_value, *, dtype=None: torch.full(sizes_of(size), number(fill_value), dtype=_type(dtype)),
    "full_like": lambda input, fill_value, *, dtype=None: torch.full_like(input, number(fill_value),
                                                                         dtype=_type(dtype)),
    "linspace": lambda start, end, steps: torch.linspace(number(start), number(end), steps),
    "logspace": lambda start, end, steps, base=10, *, dtype=None: torch.logspace(
        number(start), number(end), steps, base, dtype=_type(dtype)),
    "ones": lambda shape, dtype=None: torch.ones(sizes_of(shape), dtype=_dense_or(dtype)),
    "ones_like": lambda input, *, dtype=None: torch.ones_like(input, dtype=_type(dtype)),
    "range": lambda start, end, step=1: torch.arange(number(start), number(end), number(step)),
    "zeros": lambda size, dtype=None: torch.zeros(sizes_of(size), dtype=_dense_or(dtype)),
    "zeros_like": lambda input, *, dtype=None: torch.zeros_like(input, dtype=_type(dtype)),
    # -- random numbers
    "bernoulli": lambda input, p=0.5, seed=None: torch.bernoulli(
        torch.broadcast_to(torch.as_tensor(p, dtype=torch.float32), input.shape), generator=drawn(seed)),
    "multinomial": lambda input, num_samples, replacement=True, seed=None: torch.multinomial(
        input, num_samples, replacement, generator=drawn(seed)),
    "normal": _normal,
    "rand": lambda *size, dtype=None, seed=None: torch.rand(*size, generator=drawn(seed), dtype=_type(dtype)),
    "rand_like": lambda input, seed=None, *, dtype=None: torch.rand_like(input, dtype=_type(dtype)),
    "randint": lambda low, high, size, seed=None, *, dtype=None: torch.randint(
        low, high, sizes_of(size), generator=drawn(seed), dtype=_type(dtype)),
    "randn": lambda *size, dtype=None, seed=None: torch.randn(*size, generator=drawn(seed), dtype=_type(dtype)),
    "randn_like": lambda input, seed=None, *, dtype=None: torch.randn_like(input, dtype=_type(dtype)),
    "randperm": lambda n, seed=None, *, dtype=torch.int64: torch.randperm(n, generator=drawn(seed), dtype=_type(dtype)),
    "shuffle": lambda x, seed=None: x[torch.randperm(x.shape[0], generator=drawn(seed))],
    "standard_normal": lambda shape, seed=None: _normal(shape, seed=seed),
    "uniform": _uniform,
    # -- others
    "assign": lambda variable, value: _assigned(variable, lambda tensor: torch.as_tensor(value).to(tensor)),
    "assign_add": lambda variable, value: _assigned(variable, lambda tensor: tensor + value),
    "assign_sub": lambda variable, value: _assigned(variable, lambda tensor: tensor - value),
    "clip_by_norm": clip_by_norm,
    "recompute": lambda block, *args: calls.again(block, args),
    "identity": lambda x: x,
    "dtype": lambda input_x: input_x.dtype,
    "is_tensor": lambda obj: isinstance(obj, Tensor),
    "rank": lambda input_x: input_x.dim(),
    "scalar_to_array": lambda input_x: torch.tensor(input_x),
    "scalar_to_tensor": lambda input_x, dtype=torch.float32: torch.tensor(input_x, dtype=_type(dtype)),
    "shape": lambda input_x: tuple(input_x.shape),
    "size": lambda input_x: input_x.numel(),
    "svd": lambda input, full_matrices=False, compute_uv=True: torch.linalg.svd(input, full_matrices)
    if compute_uv else torch.linalg.svdvals(input),
    "tuple_to_array": lambda input_x: torch.tensor(input_x),
}  # fmt: skip
FUNCTIONS |= {name: FUNCTIONS[same] for name, same in _SAME.items()} | OF_TORCH
FUNCTIONS |= {name: partial(_changed, change) for name, change in SCATTERS.items()}


def ours(name: str, function: Function) -> Function:
    """The function; where no cell runs, what it returns has the reference's methods."""
    call = translated(name, function)

    @wraps(call)
    def outside(*args: Any, **kwargs: Any) -> Any:
        return calls.outside(call(*args, **kwargs))

    return outside


FUNCTIONS = {name: ours(name, function) for name, function in FUNCTIONS.items()}

__all__ = list(FUNCTIONS)


def __getattr__(name: str) -> Function:
    """The functions, whose names would hide Python's own in this file."""
    if name not in FUNCTIONS:
        raise AttributeError(name)
    return FUNCTIONS[name]
