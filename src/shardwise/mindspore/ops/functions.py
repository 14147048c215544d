"""Operators as functions: ``ops.matmul(x, y)``, one line each, over torch, with the reference's argument names.

They carry no strategy: ``ms.shard`` adds one. Argument names that differ between the reference's versions are all
accepted (``named.WORDS``).
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
from shardwise.mindspore.ops import indexing
from shardwise.mindspore.ops.clip import clip_by_norm
from shardwise.mindspore.ops.further import FURTHER, SCATTERS, distinct
from shardwise.mindspore.ops.images import interpolate
from shardwise.mindspore.ops.indexing import Gather, OneHot
from shardwise.mindspore.ops.networks import NETWORKS, as_int, sizes_of
from shardwise.mindspore.ops.of_torch import OF_TORCH
from shardwise.mindspore.ops.shape import Slice, StridedSlice
from shardwise.mindspore.tensor import as_torch
from shardwise.mindspore.tensor_methods import CALLED, TORCHS, dims_of, dtype_of, narrowed, number, of_kind, product

Tensor = torch.Tensor


def _type(dtype: Any) -> torch.dtype | None:
    return None if dtype is None else dtype_of(dtype)


def _extremum(x: Tensor, axis: int | None, keep: bool, function: Any) -> tuple[Tensor, Tensor]:
    """Return the value and its index; without an axis that of all elements, and 0."""
    if axis is None:
        return function(x), torch.zeros((), dtype=torch.int64)
    value, index = function(x, axis, keepdim=keep)
    return value, index


def _spread(function: Any) -> Function:
    return lambda input, axis=None, ddof=0, keepdims=False: function(
        input, dims_of(input, axis), correction=int(ddof), keepdim=keepdims
    )


def _squeezed(x: Tensor, axis: Any) -> Tensor:
    return torch.squeeze(x) if axis is None else torch.squeeze(x, dims_of(x, axis))


def _parts(x: Tensor, sizes: Any, axis: int, output_num: int | None) -> tuple[Tensor, ...]:
    """Split into parts of one size, of several sizes, or (the older form) into a number of parts."""
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


def _decomposed(x: Tensor, full_matrices: bool) -> tuple[Tensor, ...]:
    """Return singular values, u and v of x = u diag(values) v^H."""
    u, values, adjoint = torch.linalg.svd(x, full_matrices)
    return values, u, adjoint.mH


def _dense_or(dtype: Any) -> torch.dtype:
    return _type(dtype) or torch.float32


def _binary(function: Any) -> Function:
    """Return a function of two tensors, or of a tensor and a number on either side."""
    return lambda input, other: function(*(x if isinstance(x, Tensor) else torch.as_tensor(x) for x in (input, other)))


# Functions of one argument, input, and of two, input and other.
_UNARY = """
    abs acos acosh angle asin asinh atan atanh ceil cos cosh deg2rad det digamma erf erfc erfinv exp exp2 expm1 floor
    frac i0 inverse isfinite isinf isnan isneginf isposinf lgamma log log10 log1p log2 logical_not neg numel rad2deg
    reciprocal relu round rsqrt sigmoid sign sin sinc sinh sqrt square t tan tanh trunc conj real imag fliplr
    flipud nonzero atleast_1d atleast_2d atleast_3d signbit logdet view_as_real"""
_BINARY = """
    add atan2 bitwise_and bitwise_or bitwise_xor copysign dot eq fmax fmin fmod ge gt hypot inner kron le
    logaddexp logaddexp2 logical_and logical_or logical_xor lt matmul maximum minimum mul ne outer remainder sub
    true_divide xlogy gcd lcm heaviside float_power"""
_SAME = """
    absolute=abs arccos=acos arcsin=asin arctan=atan arccosh=acosh arcsinh=asinh arctanh=atanh arctan2=atan2
    negative=neg inv=reciprocal multiply=mul subtract=sub divide=div floor_div=floor_divide floor_mod=remainder
    mod=remainder equal=eq not_equal=ne greater=gt greater_equal=ge less=lt less_equal=le tensor_add=add tensor_sub=sub
    tensor_mul=mul tensor_div=div tensor_pow=pow tensor_gt=gt tensor_ge=ge tensor_lt=lt tensor_le=le
    tensor_floordiv=floor_divide tensor_mod=remainder scalar_add=add scalar_sub=sub scalar_mul=mul scalar_div=div
    swapdims=swapaxes movedim=moveaxis concat=cat clip=clamp batch_matmul=bmm gather_d=gather_elements unbind=unstack
    ger=outer reduce_mean=mean reduce_max=amax reduce_min=amin reduce_prod=prod reduce_all=all
    reduce_any=any"""


def _first_of_three(x: torch.Tensor) -> int:
    if 3 not in x.shape:
        raise ValueError(problem(f"cross: no dim of {list(x.shape)} has size 3", fix="vectors of three elements"))
    return list(x.shape).index(3)


FUNCTIONS: dict[str, Function] = {
    **{name: (lambda function: lambda input: function(input))(getattr(torch, name)) for name in _UNARY.split()},
    **{name: _binary(getattr(torch, name)) for name in _BINARY.split()},
    # -- elements
    "addcdiv": lambda input, tensor1, tensor2, value=1: input + value * (tensor1 / tensor2),
    "addcmul": lambda input, tensor1, tensor2, value=1: input + value * (tensor1 * tensor2),
    "addn": lambda x: torch.stack(tuple(x)).sum(0),
    "accumulate_n": lambda x: torch.stack(tuple(x)).sum(0),
    "approximate_equal": lambda x, y, tolerance=1e-5: torch.abs(x - y) < tolerance,
    "cast": lambda input, dtype: as_torch(input).to(dtype_of(dtype)),
    "masked_fill": lambda input, mask, value: torch.where(mask, torch.as_tensor(value).to(input), input),
    "xdivy": lambda x, y: torch.where(x == 0, 0, x / torch.where(x == 0, 1, y)),
    # -- activations
    "fast_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "gelu": lambda input, approximate="none": F.gelu(input, approximate=approximate),
    "gumbel_softmax": lambda logits, tau=1.0, hard=False, dim=-1: F.gumbel_softmax(logits, tau, hard, dim=dim),
    "softmax": lambda input, axis=-1, *, dtype=None: torch.softmax(input, axis, dtype=_type(dtype)),
    "softmin": lambda x, axis=-1, *, dtype=None: torch.softmax(-x, axis, dtype=_type(dtype)),
    "swiglu": lambda input, dim=-1: F.silu(input.chunk(2, dim)[0]) * input.chunk(2, dim)[1],
    # -- products
    "batch_dot": lambda x1, x2, axes=None: torch.einsum("b...i,bi...->b...", x1, x2) if axes is None
    else torch.stack([torch.tensordot(a, b, ([axes[0] - 1], [axes[1] - 1])) for a, b in zip(x1, x2, strict=True)]),
    "bias_add": lambda input_x, bias: input_x + bias.reshape(-1, *(1,) * (input_x.dim() - 2)),
    "chain_matmul": lambda input: torch.linalg.multi_dot(list(input)),
    "cross": lambda input, other, dim=None: torch.linalg.cross(
        input, other, dim=_first_of_three(input) if dim is None else dim),
    "einsum": lambda equation, *operands: torch.einsum(equation, *operands),
    "floor_divide": lambda input, other: torch.div(input, other, rounding_mode="floor"),
    "trace": lambda input: of_kind(input, torch.trace(input)),
    # -- reductions
    **{name: _spread(getattr(torch, name)) for name in ("std", "std_mean", "var", "var_mean")},
    "all": lambda input, axis=None, keep_dims=False: torch.all(input, dims_of(input, axis), keepdim=keep_dims),
    "amax": lambda input, axis=None, keepdims=False: torch.amax(input, dims_of(input, axis), keepdim=keepdims),
    "amin": lambda input, axis=None, keepdims=False: torch.amin(input, dims_of(input, axis), keepdim=keepdims),
    "any": lambda input, axis=None, keep_dims=False: torch.any(input, dims_of(input, axis), keepdim=keep_dims),
    "aminmax": lambda input, *, axis=0, keepdims=False: tuple(torch.aminmax(input, dim=axis, keepdim=keepdims)),
    "count_nonzero": lambda x, axis=(), keep_dims=False, dtype=torch.int32: torch.sum(
        x != 0, dims_of(x, axis), keepdim=keep_dims, dtype=_type(dtype)),
    "cumprod": lambda input, dim, dtype=None: torch.cumprod(input, dim, dtype=_type(dtype)),
    "cumsum": lambda x, axis, dtype=None: of_kind(x, torch.cumsum(x, axis, dtype=_type(dtype)), dtype),
    "max": lambda input, axis=None, keepdims=False: _extremum(input, axis, keepdims, torch.max),
    "mean": lambda x, axis=None, keep_dims=False: torch.mean(x, dims_of(x, axis), keepdim=keep_dims),
    "min": lambda input, axis=None, keepdims=False: _extremum(input, axis, keepdims, torch.min),
    "nansum": lambda input, axis=None, keepdims=False, *, dtype=None: of_kind(input, torch.nansum(
        input, dims_of(input, axis), keepdim=keepdims, dtype=_type(dtype)), dtype),
    "norm": lambda A, ord=None, dim=None, keepdim=False, *, dtype=None: torch.linalg.norm(
        A, ord, dim, keepdim, dtype=_type(dtype)),
    "prod": lambda input, axis=None, keep_dims=False: product(input, dims_of(input, axis), keep_dims),
    "sum": lambda input, dim=None, keepdim=False, *, dtype=None: torch.sum(
        input, dims_of(input, dim), keepdim=keepdim, dtype=_type(dtype)),
    "argmin": lambda input, axis=None, keepdims=False: torch.argmin(
        input, axis, keepdims and axis is not None).to(torch.int32),
    "argsort": lambda input, axis=-1, descending=False: torch.argsort(input, axis, descending).to(torch.int32),
    "cummin": lambda input, axis: narrowed(torch.cummin(input, axis)),
    "sort": lambda input_x, axis=-1, descending=False: narrowed(torch.sort(input_x, axis, descending)),
    "topk": lambda input, k, dim=-1, largest=True, sorted=True: narrowed(torch.topk(
        input, k, -1 if dim is None else dim, largest, sorted)),
    # -- shapes
    "broadcast_to": lambda input, shape: torch.broadcast_to(input, sizes_of(shape)),
    "cat": lambda tensors, axis=0: torch.cat(tuple(tensors), axis),
    "column_stack": lambda tensors: torch.column_stack(tuple(tensors)),
    "dstack": lambda inputs: torch.dstack(tuple(inputs)),
    "expand": lambda input_x, size: input_x.expand(sizes_of(size)),
    "flatten": lambda input, order="C", *, start_dim=1, end_dim=-1: torch.flatten(input, start_dim, end_dim),
    "flip": lambda input, dims: torch.flip(input, dims_of(input, dims)),
    "hstack": lambda tensors: torch.hstack(tuple(tensors)),
    "meshgrid": lambda *inputs, indexing="xy": tuple(torch.meshgrid(*inputs, indexing=indexing)),
    "pad": lambda input_x, padding, mode="constant", value=None: F.pad(input_x, sizes_of(padding), mode, value),
    "permute": lambda input, axis: torch.permute(input, tuple(axis)),
    "reshape": lambda input, shape: torch.reshape(input, sizes_of(shape)),
    "reverse": lambda x, axis: torch.flip(x, dims_of(x, axis)),
    "slice": lambda input_x, begin, size: Slice()(input_x, begin, size),
    "split": lambda tensor, split_size_or_sections=None, axis=0, output_num=None: _parts(
        tensor, split_size_or_sections, axis, output_num),
    "squeeze": lambda input, axis=None: _squeezed(input, axis),
    "stack": lambda tensors, axis=0: torch.stack(tuple(tensors), axis),
    "strided_slice": lambda input_x, begin, end, strides, **masks: StridedSlice(**masks)(input_x, begin, end, strides),
    "tile": lambda input, multiples: input.repeat(tuple(multiples)),
    "transpose": lambda input, input_perm: torch.permute(input, tuple(input_perm)),
    "vstack": lambda inputs: torch.vstack(tuple(inputs)),
    # -- indices
    "bucketize": lambda input, boundaries, *, right=False: torch.bucketize(
        input, torch.as_tensor(boundaries), right=right).to(torch.int32),
    "gather": lambda input_params, input_indices, axis, batch_dims=0: Gather(batch_dims)(
        input_params, input_indices, axis),
    "gather_elements": lambda input, dim, index: torch.gather(input, dim, as_int(index)),
    "gather_nd": lambda input_x, indices: indexing.gather_nd(input_x, indices),
    "index_add": lambda x, indices, y, axis: torch.index_add(x, axis, indices, y),
    "index_fill": lambda x, axis, index, value: torch.index_fill(x, axis, as_int(index), value),
    "intopk": lambda x1, x2, k: (torch.topk(x1, k).indices == x2.unsqueeze(-1)).any(-1),
    "one_hot": lambda indices, depth, on_value=1, off_value=0, axis=-1: OneHot(axis)(
        indices, depth, on_value, off_value),
    "scatter": lambda input, axis, index, src: torch.scatter(input, axis, as_int(index), src),
    "scatter_add": lambda input_x, indices, updates: _assigned(
        input_x, lambda tensor: tensor.index_put((as_int(indices),), updates, accumulate=True)),
    "scatter_nd": lambda indices, updates, shape: indexing.scatter_add(
        torch.zeros(sizes_of(shape), dtype=updates.dtype), as_int(indices), updates),
    "scatter_update": lambda input_x, indices, updates: _assigned(
        input_x, lambda tensor: tensor.index_put((as_int(indices),), updates)),
    "sequence_mask": lambda lengths, maxlen=None: torch.arange(
        int(lengths.max()) if maxlen is None else maxlen) < lengths.unsqueeze(-1),
    "scatter_nd_update": lambda input_x, indices, updates: _assigned(
        input_x, lambda tensor: indexing.scatter(tensor, as_int(indices), updates)),
    "tensor_scatter_add": lambda input_x, indices, updates: indexing.scatter_add(input_x, as_int(indices), updates),
    "tensor_scatter_elements": lambda input_x, indices, updates, axis=0: torch.scatter(
        input_x, axis, as_int(indices), updates),
    "tensor_scatter_update": lambda input_x, indices, updates: indexing.scatter(input_x, as_int(indices), updates),
    "unique": lambda input: distinct(input),
    "unsorted_segment_sum": lambda input_x, segment_ids, num_segments: indexing.segment_sum(
        input_x, segment_ids, num_segments),
    **FURTHER,
    **NETWORKS,
    # -- new tensors
    "arange": lambda start=0, end=None, step=1, *, dtype=None: torch.arange(
        0 if end is None else number(start), number(start if end is None else end), number(step), dtype=_type(dtype)),
    "eye": lambda n, m=None, dtype=None: torch.eye(n, n if m is None else m, dtype=_dense_or(dtype)),
    "fill": lambda type, shape, value: torch.full(sizes_of(shape), number(value), dtype=_type(type)),
    "full": lambda size, fill_value, *, dtype=None: torch.full(sizes_of(size), number(fill_value), dtype=_type(dtype)),
    "full_like": lambda input, fill_value, *, dtype=None: torch.full_like(input, number(fill_value),
                                                                         dtype=_type(dtype)),
    "interpolate": interpolate,
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
        input, num_samples, replacement, generator=drawn(seed)).to(torch.int32),
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
    "scalar_to_tensor": lambda input_x, dtype=torch.float32: torch.tensor(input_x, dtype=_type(dtype)),
    "shape": lambda input_x: tuple(input_x.shape),
    "size": lambda input_x: input_x.numel(),
    "svd": lambda input, full_matrices=False, compute_uv=True: _decomposed(input, full_matrices)
    if compute_uv else torch.linalg.svdvals(input),
}  # fmt: skip
FUNCTIONS |= OF_TORCH
FUNCTIONS["reduce_sum"] = lambda x, axis=None, keep_dims=False: of_kind(
    x, torch.sum(x, dims_of(x, axis), keepdim=keep_dims)
)
FUNCTIONS |= {name: FUNCTIONS[same] for name, _, same in (row.partition("=") for row in _SAME.split())}
FUNCTIONS |= {name: partial(_changed, change) for name, change in SCATTERS.items()}


def ours(name: str, function: Function) -> Function:
    """Wrap a function. If no cell is running, its results have the reference's methods."""
    call = translated(name, function)

    @wraps(call)
    def outside(*args: Any, **kwargs: Any) -> Any:
        return calls.outside(call(*args, **kwargs))

    return outside


FUNCTIONS = {name: ours(name, function) for name, function in FUNCTIONS.items()}
CALLED.update(FUNCTIONS)

__all__ = list(FUNCTIONS)


def __getattr__(name: str) -> Function:
    """Return a function. As module globals their names would hide Python's own in this file."""
    if name not in FUNCTIONS:
        raise AttributeError(name)
    return FUNCTIONS[name]
