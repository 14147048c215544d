"""Operators as functions: ``ops.matmul(x, y)``, with the reference's argument names. Those that are one function of
torch are rows of data (``of_torch``).

They carry no strategy: ``ms.shard`` adds one. Argument names that differ between the reference's versions are all
accepted (``named.WORDS``).
"""

from __future__ import annotations

import math
from functools import partial, wraps
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

from shardwise.errors import problem
from shardwise.mindspore import calls
from shardwise.mindspore.checks import one_of
from shardwise.mindspore.common.seed import drawn
from shardwise.mindspore.named import TABLES, Function, absent, translated
from shardwise.mindspore.ops import indexing
from shardwise.mindspore.ops.composite import clip_by_norm
from shardwise.mindspore.ops.dims import Slice, StridedSlice
from shardwise.mindspore.ops.images import interpolate
from shardwise.mindspore.ops.indexing import Gather, OneHot
from shardwise.mindspore.ops.networks import NETWORKS
from shardwise.mindspore.ops.of_torch import COMPUTED, as_int, of_torch, sizes_of, type_of
from shardwise.mindspore.tensor import as_torch
from shardwise.mindspore.tensor_methods import TORCHS, call_functions, dims_of, dtype_of, narrowed, number, product

Tensor = torch.Tensor


def _extremum(x: Tensor, axis: int | None, keep: bool, function: Any) -> tuple[Tensor, Tensor]:
    """Return the value and its index; without an axis that of all elements, and 0."""
    if axis is None:
        return function(x), torch.zeros((), dtype=torch.int64)
    value, index = function(x, axis, keepdim=keep)
    return value, index


def _parts(x: Tensor, sizes: Any, axis: int, output_num: int | None) -> tuple[Tensor, ...]:
    """Split into parts of one size, of several sizes, or (the older form) into a number of parts."""
    several = not isinstance(sizes, int) and np.ndim(sizes) > 0
    if output_num is not None and (several or sizes):
        what = f"split gets sizes {sizes} and output_num={output_num}"
        raise ValueError(problem(what, fix=f"the sizes, or split(axis=..., output_num={output_num})"))
    if output_num is not None or (not several and sizes == 0):
        along, count = (axis, output_num) if output_num is not None else (0, axis)
        if not count or x.shape[along] % count:
            raise ValueError(problem(f"{x.shape[along]} elements in {count} parts", fix="a number that divides them"))
        return x.tensor_split(count, along)
    return tuple(TORCHS["split"](x, list(sizes) if several else sizes, axis))


def _assigned(variable: Any, change: Any) -> Any:
    with torch.no_grad():
        variable.copy_(change(variable.detach()))
    return variable


def _changed(change: Any, input_x: Any, indices: Any, updates: Any) -> Any:
    return _assigned(input_x, lambda tensor: change(tensor, indices, updates))


def _normal(shape: Any, mean: Any = 0.0, stddev: Any = 1.0, seed: Any = None, dtype: Any = None) -> Any:
    numbers = torch.randn(sizes_of(shape), generator=drawn(seed), dtype=type_of(dtype) or torch.float32)
    return numbers * stddev + mean


def _uniform(shape: Any, minval: Any = 0.0, maxval: Any = 1.0, seed: Any = None, dtype: Any = None) -> Any:
    if type_of(dtype) in (torch.int32, torch.int64):
        return torch.randint(int(minval), int(maxval), sizes_of(shape), generator=drawn(seed), dtype=type_of(dtype))
    numbers = torch.rand(sizes_of(shape), generator=drawn(seed), dtype=type_of(dtype) or torch.float32)
    return numbers * (maxval - minval) + minval


def _decomposed(x: Tensor, full_matrices: bool) -> tuple[Tensor, ...]:
    """Return singular values, u and v of x = u diag(values) v^H."""
    u, values, adjoint = torch.linalg.svd(x, full_matrices)
    return values, u, adjoint.mH


def _first_of_three(x: torch.Tensor) -> int:
    if 3 not in x.shape:
        raise ValueError(problem(f"cross: no dim of {list(x.shape)} has size 3", fix="vectors of three elements"))
    return list(x.shape).index(3)


def _reversed(x: Tensor, seq_lengths: Tensor, seq_dim: int, batch_dim: int = 0) -> Tensor:
    along = x.movedim((batch_dim, seq_dim), (0, 1))
    places = torch.arange(along.shape[1], device=x.device)
    lengths = seq_lengths.unsqueeze(1)
    turned = torch.where(places < lengths, lengths - 1 - places, places)
    index = turned.reshape(*turned.shape, *(1,) * (along.dim() - 2)).expand(along.shape)
    return along.gather(1, index).movedim((0, 1), (batch_dim, seq_dim))


def distinct(input: Tensor) -> tuple[Tensor, Tensor]:
    """Return the distinct elements in the order in which they appear, and for each element the index of its value."""
    values, inverse = torch.unique(input.flatten(), return_inverse=True)
    places = torch.arange(input.numel(), device=input.device)
    first = places.new_full((len(values),), input.numel()).scatter_reduce(0, inverse, places, "amin")
    order = first.argsort()
    return values[order], order.argsort()[inverse].reshape(input.shape).to(torch.int32)


def _lrn(x: Tensor, depth_radius: int = 5, bias: float = 1.0, alpha: float = 1.0, beta: float = 0.5,
    norm_region: str = "ACROSS_CHANNELS",
) -> Tensor:  # fmt: skip
    """Return x / (bias + alpha * the sum of squares of the channels up to ``depth_radius`` away)**beta."""
    one_of("ACROSS_CHANNELS")("norm_region", norm_region)
    width = 2 * depth_radius + 1  # torch divides alpha by it
    return F.local_response_norm(x, width, alpha * width, beta, bias)


# Updates at indices that combine with the present values. ``tensor_scatter_*`` and ``scatter_nd_*`` address elements
# (or slices) by the last dim of ``indices``, ``scatter_*`` slices along dim 0. ``unsorted_segment_*`` reduce slices
# that share an id.
# Name -> torch's reduction, and the function applied to the updates.
_KINDS: dict[str, tuple[str, Function]] = {
    "add": ("sum", lambda x: x), "sub": ("sum", torch.neg), "mul": ("prod", lambda x: x),
    "div": ("prod", torch.reciprocal), "max": ("amax", lambda x: x), "min": ("amin", lambda x: x),
}  # fmt: skip


def _combined(rows: Tensor, numbers: Tensor, updates: Tensor, kind: str) -> Tensor:
    """Combine the rows ``numbers`` (m) of ``rows`` (n, ...) with ``updates`` (m, ...)."""
    reduction, change = _KINDS[kind]
    index = numbers.long().reshape(-1, *(1,) * (rows.dim() - 1)).expand(-1, *rows.shape[1:])
    return rows.scatter_reduce(0, index, change(updates).to(rows), reduction)


def _at_rows(input_x: Tensor, indices: Tensor, updates: Tensor, kind: str = "add") -> Tensor:
    return _combined(input_x, indices.reshape(-1), updates.reshape(-1, *input_x.shape[1:]), kind)


def _at_elements(input_x: Tensor, indices: Tensor, updates: Tensor, kind: str = "add") -> Tensor:
    depth = indices.shape[-1]
    sizes, rest = input_x.shape[:depth], input_x.shape[depth:]
    strides = torch.tensor([math.prod(sizes[place + 1 :]) for place in range(depth)])
    numbers = (indices.long() * strides).sum(-1).reshape(-1)
    rows = _combined(input_x.reshape(math.prod(sizes), -1), numbers, updates.reshape(len(numbers), -1), kind)
    return rows.reshape(*sizes, *rest)


def _segments(input_x: Tensor, segment_ids: Tensor, num_segments: Any, kind: str = "max") -> Tensor:
    """Reduce segments. Empty ones hold the least number of the dtype for "max", the largest for "min", 1 for "mul"."""
    slices = input_x.shape[segment_ids.dim() :]
    info = torch.finfo(input_x.dtype) if input_x.is_floating_point() else torch.iinfo(input_x.dtype)
    start = {"max": info.min, "min": info.max, "mul": 1}[kind]
    return _at_rows(input_x.new_full((int(num_segments), *slices), start), segment_ids, input_x, kind)


_NAMES = TABLES["ops"]
FUNCTIONS: dict[str, Function] = {
    **of_torch({
        "torch": "; ".join([f"{name} input" for name in _NAMES["unary"].split()]
                           + [f"{name} input:tensor other:tensor" for name in _NAMES["binary"].split()])}),
    **of_torch(_NAMES["of_torch"]),
    # -- elements
    "mul_no_nan": lambda x, y: torch.where(y == 0, 0, x * y),
    "truncate_div": lambda x, y: torch.div(x, y, rounding_mode="trunc"),
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
    "softmin": lambda x, axis=-1, *, dtype=None: torch.softmax(-x, axis, dtype=type_of(dtype)),
    "swiglu": lambda input, dim=-1: F.silu(input.chunk(2, dim)[0]) * input.chunk(2, dim)[1],
    # -- products
    "matrix_diag_part": lambda x: torch.diagonal(x, dim1=-2, dim2=-1),
    "batch_dot": lambda x1, x2, axes=None: torch.einsum("b...i,bi...->b...", x1, x2) if axes is None
    else torch.stack([torch.tensordot(a, b, ([axes[0] - 1], [axes[1] - 1])) for a, b in zip(x1, x2, strict=True)]),
    "bias_add": lambda input_x, bias: input_x + bias.reshape(-1, *(1,) * (input_x.dim() - 2)),
    "cross": lambda input, other, dim=None: torch.linalg.cross(
        input, other, dim=_first_of_three(input) if dim is None else dim),
    "einsum": lambda equation, *operands: torch.einsum(equation, *operands),
    "floor_divide": lambda input, other: torch.div(input, other, rounding_mode="floor"),
    # -- reductions
    "lp_norm": lambda input, axis, p=2, keep_dims=False, epsilon=1e-12: torch.linalg.vector_norm(
        input, p, axis, keepdim=keep_dims).clamp(min=epsilon),
    "lrn": _lrn,
    "count_nonzero": lambda x, axis=(), keep_dims=False, dtype=torch.int32: torch.sum(
        x != 0, dims_of(x, axis), keepdim=keep_dims, dtype=type_of(dtype)),
    "max": lambda input, axis=None, keepdims=False: _extremum(input, axis, keepdims, torch.max),
    "min": lambda input, axis=None, keepdims=False: _extremum(input, axis, keepdims, torch.min),
    "prod": lambda input, axis=None, keep_dims=False: product(input, dims_of(input, axis), keep_dims),
    "argmin": lambda input, axis=None, keepdims=False: torch.argmin(
        input, axis, keepdims and axis is not None).to(torch.int32),
    "topk": lambda input, k, dim=-1, largest=True, sorted=True: narrowed(torch.topk(
        input, k, -1 if dim is None else dim, largest, sorted)),
    # -- shapes
    "dyn_shape": lambda input_x: torch.tensor(input_x.shape),
    "reverse_sequence": _reversed,
    "meshgrid": lambda *inputs, indexing="xy": tuple(torch.meshgrid(*inputs, indexing=indexing)),
    "slice": lambda input_x, begin, size: Slice()(input_x, begin, size),
    "split": lambda tensor, split_size_or_sections=None, axis=0, output_num=None: _parts(
        tensor, split_size_or_sections, axis, output_num),
    "squeeze": lambda input, axis=None: torch.squeeze(input) if axis is None else torch.squeeze(
        input, dims_of(input, axis)),
    "strided_slice": lambda input_x, begin, end, strides, **masks: StridedSlice(**masks)(input_x, begin, end, strides),
    # -- indices
    **{f"tensor_scatter_{kind}": partial(_at_elements, kind=kind) for kind in _KINDS if kind != "add"},
    "unsorted_segment_max": partial(_segments, kind="max"),
    "unsorted_segment_min": partial(_segments, kind="min"),
    "unsorted_segment_prod": partial(_segments, kind="mul"),
    "gather": lambda input_params, input_indices, axis, batch_dims=0: Gather(batch_dims)(
        input_params, input_indices, axis),
    "gather_nd": indexing.gather_nd,
    "intopk": lambda x1, x2, k: (torch.topk(x1, k).indices == x2.unsqueeze(-1)).any(-1),
    "one_hot": lambda indices, depth, on_value=1, off_value=0, axis=-1: OneHot(axis)(
        indices, depth, on_value, off_value),
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
    "unique": distinct,
    "unsorted_segment_sum": indexing.segment_sum,
    **NETWORKS,
    # -- new tensors
    "truncated_normal": lambda shape, seed=None: torch.nn.init.trunc_normal_(
        torch.empty(sizes_of(shape)), generator=drawn(seed)),
    "arange": lambda start=0, end=None, step=1, *, dtype=None: torch.arange(
        0 if end is None else number(start), number(start if end is None else end), number(step), dtype=type_of(dtype)),
    "eye": lambda n, m=None, dtype=None: torch.eye(n, n if m is None else m, dtype=type_of(dtype) or torch.float32),
    "interpolate": interpolate,
    "make_range": lambda *ends: tuple(range(*map(int, ends))),
    # -- random numbers
    "bernoulli": lambda input, p=0.5, seed=None: torch.bernoulli(
        torch.broadcast_to(torch.as_tensor(p, dtype=torch.float32), input.shape), generator=drawn(seed)),
    "normal": _normal,
    "rand": lambda *size, dtype=None, seed=None: torch.rand(*size, generator=drawn(seed), dtype=type_of(dtype)),
    "randn": lambda *size, dtype=None, seed=None: torch.randn(*size, generator=drawn(seed), dtype=type_of(dtype)),
    "randperm": lambda n, seed=None, *, dtype=torch.int64: torch.randperm(
        n, generator=drawn(seed), dtype=type_of(dtype)),
    "shuffle": lambda x, seed=None: x[torch.randperm(x.shape[0], generator=drawn(seed))],
    "standard_normal": lambda shape, seed=None: _normal(shape, seed=seed),
    "uniform": _uniform,
    # -- others
    "depend": lambda value, expr: value,  # eager and captured code run in order anyway
    "stop_gradient": lambda value: value.detach(),
    "type_as": lambda input, other: input.to(other.dtype),
    "typeof": lambda x: x.dtype,
    "assign": lambda variable, value: _assigned(variable, lambda tensor: torch.as_tensor(value).to(tensor)),
    "assign_add": lambda variable, value: _assigned(variable, lambda tensor: tensor + value),
    "assign_sub": lambda variable, value: _assigned(variable, lambda tensor: tensor - value),
    "clip_by_norm": clip_by_norm,
    "recompute": lambda block, *args: calls.again(block, args),
    "identity": lambda x: x,
    "dtype": lambda input_x: input_x.dtype,
    "is_tensor": lambda obj: isinstance(obj, Tensor),
    "rank": lambda input_x: input_x.dim(),
    "scalar_to_tensor": lambda input_x, dtype=torch.float32: torch.tensor(input_x, dtype=type_of(dtype)),
    "shape": lambda input_x: tuple(input_x.shape),
    "size": lambda input_x: input_x.numel(),
    "svd": lambda input, full_matrices=False, compute_uv=True: _decomposed(input, full_matrices)
    if compute_uv else torch.linalg.svdvals(input),
}  # fmt: skip
FUNCTIONS |= {name: FUNCTIONS[same] for name, _, same in (row.partition("=") for row in _NAMES["same"].split())}
FUNCTIONS |= {
    **{f"scatter_{kind}": partial(_changed, partial(_at_rows, kind=kind)) for kind in _KINDS if kind != "add"},
    **{f"scatter_nd_{kind}": partial(_changed, partial(_at_elements, kind=kind)) for kind in _KINDS},
}


def ours(name: str, function: Function, home: str = __name__) -> Function:
    """Wrap a function. If no cell is running, its results have the reference's methods. ``home``: the module where
    pickle finds it."""
    call = translated(name, function)

    @wraps(call)
    def outside(*args: Any, **kwargs: Any) -> Any:
        return calls.outside(call(*args, **kwargs))

    outside.__module__ = home
    return outside


COMPUTED.update({name: translated(name, function) for name, function in FUNCTIONS.items()})
FUNCTIONS = {name: ours(name, function) for name, function in FUNCTIONS.items()}
call_functions(FUNCTIONS)

__all__ = list(FUNCTIONS)
__getattr__ = absent(__name__, lambda: __all__, FUNCTIONS)
