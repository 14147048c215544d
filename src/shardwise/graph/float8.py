"""Products of linear layers in float8, with dynamic scales (``Precision(products=)``).

A tensor is divided by a scale that maps its largest number to the largest of the dtype, then rounded (Micikevicius et
al., "FP8 Formats for Deep Learning", 2022). ``torch._scaled_mm`` multiplies the rounded numbers and the scales.

    "float8"        one scale per tensor; y = x W^T, dx = dy W and dW = dy^T x; dy in e5m2, which has the wider range
    "float8 rows"   one scale per row of what is contracted (of x and dy per token, of W per output, and per input in
                    dx); dW as computed, since its rows would run over the tokens of all devices

Both are recipes of torchao ("tensorwise", "rowwise_with_gw_hp"). Scales are those of whole rows and tensors, however
they are split: in forward they are operators of the graph (``LARGEST``), whose results ranks combine by maximum. The
scale of dy is found in backward by the same kernel, and ``programs.differentiate`` combines it (``OpRule.largest``).
Parts of a contraction that are no multiples of 16 are filled up with zeros, which change no sum.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from typing import Any, Final

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from shardwise.errors import CaptureWarning, ShardwiseError, listed, warn_user
from shardwise.graph.emitter import Emitter, rewrite_graph
from shardwise.graph.ir import Arg, Graph, Op, Ref, Value
from shardwise.graph.operator_library import LIBRARY, composite

aten = torch.ops.aten
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
BY_ROWS: Final = "float8 rows"
PRODUCTS: Final = ("float8", BY_ROWS)
MULTIPLE: Final = 16  # of the sizes of a layer: what tensor cores of NVIDIA take
_SMALLEST = 1e-12  # of the largest number of a tensor: zeros stay zeros


def _largest(x: Tensor, dim: Sequence[int]) -> Tensor:
    wide = x.dtype if x.dtype == torch.float64 else torch.float32
    shape = [size for i, size in enumerate(x.shape) if i not in dim]
    if not x.numel():
        return x.new_zeros(shape, dtype=wide)
    largest: Tensor = torch.linalg.vector_norm(x, torch.inf, list(dim))
    return largest.to(wide)


def _without_gradient(x: Tensor, dim: Sequence[int]) -> Tensor:
    with torch._C._AutoDispatchBelowAutograd():
        result: Tensor = LARGEST(x, dim)
    return result


def _rounded(x: Tensor, largest: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return a matrix in float8 and its scale [1, 1] or [rows, 1]. ``x``: may be rounded already; ``largest``: of all
    of it, or of every row."""
    scale = largest.reshape(-1, 1).clamp_min(_SMALLEST) / torch.finfo(dtype).max
    return x if x.dtype == dtype else (x / scale).to(dtype), scale  # in float32, as the scale has dims


def _to_float8(x: Tensor, largest: Tensor) -> Tensor:
    return _rounded(x, largest, E4M3)[0]


def _product(left: tuple[Tensor, Tensor], right: tuple[Tensor, Tensor], dtype: torch.dtype) -> Tensor:
    """Return ``left @ right.T`` of two matrices in float8 with their scales."""
    (a, scale_a), (b, scale_b) = left, right
    rows, columns = a.shape[0], b.shape[0]
    if dtype == torch.float64:  # the same numbers, added without rounding: for proofs
        return (a.to(dtype) @ b.to(dtype).T) * scale_a * scale_b.t()
    if not (a.numel() and b.numel()):
        return torch.zeros((rows, columns), dtype=dtype, device=a.device)
    a, b = a.contiguous(), b.contiguous()  # tensor cores read rows; CUDA refuses others
    inner, more = -a.shape[1] % MULTIPLE, -columns % MULTIPLE
    a = torch.nn.functional.pad(a, (0, inner)) if inner else a
    b = torch.nn.functional.pad(b, (0, inner, 0, more)) if inner or more else b
    if more and len(scale_b) > 1:
        scale_b = torch.nn.functional.pad(scale_b, (0, 0, 0, more))
    result: Tensor = torch._scaled_mm(a, b.t(), scale_a=scale_a, scale_b=scale_b.t(), out_dtype=dtype)
    return result[:, :columns] if more else result


class _Linear(torch.autograd.Function):
    """``x [m, k], weight [n, k] -> [m, n]``. Backward rounds again what it reads: kept are the operands, which other
    layers and later micro-batches share."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        of_x: Tensor,
        of_weight: Tensor,
        of_columns: Tensor | None,
        rounded: Tensor | None,
    ) -> Tensor:
        weight = weight if rounded is None else rounded
        ctx.save_for_backward(x, weight, of_x, of_weight, of_columns)
        flat = x.reshape(_rows(x), x.shape[-1])
        result = _product(_rounded(flat, of_x, E4M3), _rounded(weight, of_weight, E4M3), x.dtype)
        return result.reshape(*x.shape[:-1], weight.shape[0])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, of_x, of_weight, of_columns = ctx.saved_tensors
        by_rows, last = of_columns is not None, gradient.dim() - 1
        of_gradient = LARGEST(gradient, [last] if by_rows else list(range(last + 1)))
        dy, flat = (tensor.reshape(_rows(tensor), tensor.shape[-1]) for tensor in (gradient, x))
        of_x_needed, of_weight_needed = ctx.needs_input_grad[:2]
        dx = dw = None
        if by_rows:
            if of_x_needed:
                rounded = _rounded(weight.t(), of_columns, E4M3)
                dx = _product(_rounded(dy, of_gradient, E4M3), rounded, x.dtype)
            dw = dy.t() @ flat if of_weight_needed else None
        else:
            rounded_dy, scale = _rounded(dy, of_gradient, E5M2)
            if of_x_needed:
                dx = _product((rounded_dy, scale), _turned(_rounded(weight, of_weight, E4M3)), x.dtype)
            if of_weight_needed:
                dw = _product(_turned((rounded_dy, scale)), _turned(_rounded(flat, of_x, E4M3)), x.dtype)
        return None if dx is None else dx.reshape(x.shape), dw, None, None, None, None


def _rows(x: Tensor) -> int:
    return prod(x.shape[:-1])


def _turned(rounded: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Return the transposed matrix in rows, as tensor cores read float8."""
    return rounded[0].t().contiguous(), rounded[1]


def _float8_linear(
    x: Tensor,
    weight: Tensor,
    of_x: Tensor,
    of_weight: Tensor,
    of_columns: Tensor | None = None,
    rounded: Tensor | None = None,
) -> Tensor:
    result: Tensor = _Linear.apply(x, weight, of_x, of_weight, of_columns, rounded)  # type: ignore[no-untyped-call]
    return result


LARGEST: Final = composite(_largest, key="CompositeExplicitAutograd")
LIBRARY.impl("largest", _without_gradient, "Autograd")
TO_FLOAT8: Final = composite(_to_float8, key="CompositeExplicitAutograd")
# ``rounded``: the weight in float8, where it arrives so; then only the cotangent of ``weight`` is computed.
FLOAT8_LINEAR: Final = composite(_float8_linear)


def scales(x: Any, weight: Any, rank: int, by_rows: bool, largest: Callable[[Any, tuple[int, ...]], Any]) -> list[Any]:
    """Return the last operands of ``FLOAT8_LINEAR``. ``rank``: number of dims of ``x``; ``largest``: makes one of a
    tensor and dims."""
    if by_rows:
        return [largest(x, (rank - 1,)), largest(weight, (1,)), largest(weight, (0,))]
    return [largest(x, tuple(range(rank))), largest(weight, (0, 1))]


def linear(x: Tensor, weight: Tensor, by_rows: bool) -> Tensor:
    """Return ``x @ weight.T`` with both rounded to float8, and in backward the same of gradients."""
    result: Tensor = FLOAT8_LINEAR(x, weight, *scales(x, weight, x.dim(), by_rows, LARGEST))
    return result


def round_products(graph: Graph, products: str | None) -> Graph:
    """Return the graph with products of parameters in float8: those in bfloat16 whose sizes are multiples of 16, but
    for heads that are fused with their loss. Warn about linear layers that stay as they are. ``products``: as in
    ``Precision``. Raises ShardwiseError if none is left."""
    if products is None:
        return graph
    weights = {op.name: op.operands[1] for op in graph.ops if op.target == aten.linear.default}
    parameters = {source.value for source in graph.sources if source.kind == "parameter"}
    why = {name: _unfit(graph.by_name[weight]) for name, weight in weights.items() if weight in parameters}
    stays = [*dict.fromkeys(f"{graph.op_by_name[name].module} ({text})" for name, text in why.items() if text)]
    shown = listed(stays, "; ")
    if all(why.values()):
        what = f"products={products!r} changes nothing: {shown or 'the model has no linear layer'}"
        raise ShardwiseError(what, fix=f"compute=torch.bfloat16, and sizes that are multiples of {MULTIPLE}")
    if stays:
        warn_user(f"products={products!r} leaves linear layers as they are: {shown}", CaptureWarning)
    rounded = {name for name, text in why.items() if not text}
    rewrite = partial(_rounded_linear, rounded, {}, products == BY_ROWS)
    return rewrite_graph(graph, {aten.linear.default: rewrite})


def _unfit(weight: Value) -> str:
    """Return why the product with a weight is not computed in float8, or ""."""
    if weight.dtype != torch.bfloat16:
        return f"{str(weight.dtype).removeprefix('torch.')}, not bfloat16"
    if len(weight.shape) != 2:
        return "its weight is a vector"
    odd = " and ".join(str(size) for size in weight.shape if size % MULTIPLE)
    return f"{odd} of {list(weight.shape)} no multiple of {MULTIPLE}" if odd else ""


def _rounded_linear(
    names: set[str], known: dict[tuple[Arg, tuple[int, ...]], Ref], by_rows: bool, op: Op, emitter: Emitter
) -> tuple[Arg, ...] | None:
    if emitter.origin.name not in names:
        return None

    def largest(x: Arg, dim: tuple[int, ...]) -> Ref:
        if (x, dim) not in known:  # queries, keys and values read one tensor
            known[x, dim] = emitter.emit(LARGEST, x, dim)
        return known[x, dim]

    x, weight = op.args[:2]
    of = scales(x, weight, len(emitter.value(x).shape), by_rows, largest)
    return (emitter.emit(FLOAT8_LINEAR, x, weight, *of),)


def rounded_weights(graph: Graph) -> dict[str, bool]:
    """Return the first name of every parameter whose products are in float8, and whether by rows."""
    products = [op for op in graph.ops if op.target == FLOAT8_LINEAR]
    return {graph.source_of[op.operands[1]].names[0]: len(op.operands) == 5 for op in products}
