"""Rewrite of operators into forms all of whose factors can be split.

``linear`` with a bias hides a contraction behind an addition, and ``mean`` hides a global count. Written as
``linear + add`` and ``sum / n``, the contraction and the sum can be split like any other, and n is the global count.
The new operators keep the module, line and scope of the old one. ``NORMALIZATIONS`` has one line per operator.
"""

from __future__ import annotations

from functools import partial
from math import prod
from typing import Any

import torch
from torch._ops import OpOverload

from shardwise.errors import CaptureError
from shardwise.graph.attention_within import ATTENTION_WITHIN
from shardwise.graph.custom_operators import mark as mark_operator
from shardwise.graph.einsum import diagonals
from shardwise.graph.emitter import Emitter, Rewrite, rewrite_graph
from shardwise.graph.gathered_experts import by_expert, of_expert
from shardwise.graph.ir import Arg, Graph, Op, Ref
from shardwise.graph.normalize_layers import (
    LAYER_NORMALIZATIONS,
    LOSS_NORMALIZATIONS,
    batch_norm_with_statistics,
    foreign_normalizations,
)
from shardwise.graph.normalize_random import RANDOM_NORMALIZATIONS, attention
from shardwise.graph.schema import arguments, by_operator, draws_nothing, is_random, operator_name
from shardwise.graph.written_out import written_out

aten = torch.ops.aten
Results = tuple[Arg, ...] | None


def normalize(graph: Graph) -> Graph:
    """Return the graph in normal form.

    Raises CaptureError for an operator that draws random numbers in an unsupported way.
    """
    normal = rewrite_graph(graph, NORMALIZATIONS | foreign_normalizations())
    for op in normal.ops:
        if is_random(op.target) and not draws_nothing(op):
            raise CaptureError(
                f"{operator_name(op.target)} draws random numbers, which would differ with every plan",
                op=op.module,
                source=op.source,
                fix="pass the random tensor as an input, or use nn.Dropout",
            )
    return normal


# --------------------------------------------------------------------------------------------------- contractions


def _scaled(emitter: Emitter, ref: Ref, factor: Any) -> Ref:
    return ref if factor == 1 else emitter.emit(aten.mul.Tensor, ref, factor)


def _linear(op: Op, emitter: Emitter) -> Results:
    args = arguments(op)
    if args["bias"] is None:
        return None
    product = emitter.emit(aten.linear.default, args["input"], args["weight"])
    return (emitter.emit(aten.add.Tensor, product, args["bias"]),)


def _fused_add(product: OpOverload, left: str, right: str, op: Op, emitter: Emitter) -> Results:
    """Rewrite to ``beta * self + alpha * (left @ right)``; with beta = 0, self is not read."""
    args = arguments(op)
    result = emitter.emit(product, args[left], args[right])
    if op.target is aten.addbmm.default:
        result = emitter.emit(aten.sum.dim_IntList, result, (0,))
    result = _scaled(emitter, result, args["alpha"])
    if args["beta"] == 0:
        beside = (args["self"].name,) if emitter.value(args["self"]).requires_grad else ()
        return (emitter.with_zero_gradient(beside, result),)
    return (emitter.emit(aten.add.Tensor, result, _scaled(emitter, args["self"], args["beta"])),)


def _mm(op: Op, emitter: Emitter) -> Results | None:
    """Return a product with a transposed matrix as a linear layer, so that it reads the parameter itself."""
    left, right = op.args
    made = emitter.producer.get(right.name)
    if made is None or made.target is not aten.t.default or len(emitter.value(made.args[0]).shape) != 2:
        return None
    return (emitter.emit(aten.linear.default, left, made.args[0]),)


def _einsum(op: Op, emitter: Emitter) -> Results:
    return diagonals(op, emitter) or by_expert(op, emitter)


def _convolution(op: Op, emitter: Emitter) -> Results:
    """Rewrite to a convolution without bias, and add the bias per channel."""
    args = arguments(op)
    bias = args["bias"]
    if bias is None:
        return None
    args["bias"] = None
    names = [argument.name for argument in op.target._schema.arguments]
    result = emitter.emit(op.target, *(args[name] for name in names))
    weight = emitter.value(args["weight"])
    channels = emitter.value(bias).shape[0]
    column = emitter.emit(aten.reshape.default, bias, (channels, *[1] * (len(weight.shape) - 2)))
    return (emitter.emit(aten.add.Tensor, result, column),)


# ----------------------------------------------------------------------------------------------------- reductions


def _mean(op: Op, emitter: Emitter) -> Results:
    """Rewrite to sum / n with the global n.

    Half precision is summed in float32: the sum may overflow, or lose bits that the mean keeps.
    """
    args = arguments(op)
    shape = emitter.value(args["self"]).shape
    dims = tuple(range(len(shape))) if not args.get("dim") and args.get("dim") != 0 else args["dim"]
    dims = (dims,) if isinstance(dims, int) else dims
    count = prod(shape[d] for d in dims) if shape else 1
    dtype = args["dtype"] or emitter.value(args["self"]).dtype
    low_precision = dtype in (torch.float16, torch.bfloat16)
    sum_dtype = torch.float32 if low_precision else args["dtype"]
    kwargs = {} if sum_dtype is None else {"dtype": sum_dtype}
    if op.target is aten.mean.default:
        total = emitter.emit(aten.sum.default, args["self"], **kwargs)
    else:
        total = emitter.emit(aten.sum.dim_IntList, args["self"], dims, args["keepdim"], **kwargs)
    result = emitter.emit(aten.div.Tensor, total, count)
    return (emitter.emit(aten.to.dtype, result, dtype) if low_precision else result,)


def _aminmax(op: Op, emitter: Emitter) -> Results:
    """Rewrite to two reductions: the combined operator has no derivative in torch 2.11."""
    args = arguments(op)
    call = args["self"], () if args["dim"] is None else (args["dim"],), args["keepdim"]
    return emitter.emit(aten.amin.default, *call), emitter.emit(aten.amax.default, *call)


def _batch_norm(op: Op, emitter: Emitter) -> Results:
    """Rewrite batch norm in training mode; ``functionalize`` already made the running statistics mutations."""
    results = batch_norm_with_statistics(op, emitter) if arguments(op)["training"] else None
    return None if results is None else results[:1]


# ------------------------------------------------------------------------------------------------------ attention


_WIDEST_HEAD = 256  # of flash kernels on GPUs


def _of_equal_widths(op: Op, emitter: Emitter) -> Results:
    """Rewrite attention whose values have another head width than queries and keys (192 and 128 in DeepSeek-V3).

    Traced as it is, such attention has no fused operator, and all scores would be materialized. Zeros at the end of the
    heads change neither scores nor the other columns of the result, where the scale stays that of the original width.
    """
    args, emit = arguments(op), emitter.emit
    names = ("query", "key", "value")
    of_scores, of_values = (emitter.value(args[name]).shape[-1] for name in names[1:])
    mask = args.get("attn_mask")
    is_learned = isinstance(mask, Ref) and emitter.value(mask).requires_grad
    if of_scores == of_values or is_learned or any(len(emitter.value(args[name]).shape) != 4 for name in names):
        return None  # equal already, or there is no fused kernel
    width = max(of_scores, of_values)
    if width > _WIDEST_HEAD:
        return None
    for name in names:
        if missing := width - emitter.value(args[name]).shape[-1]:
            args[name] = emit(aten.constant_pad_nd.default, args[name], (0, missing))
    scale = of_scores**-0.5 if args["scale"] is None and of_scores < width else args["scale"]
    positional, named = [*(args | {"scale": scale}).values()][: len(op.args)], dict(op.kwargs)
    if op.target is not ATTENTION_WITHIN:
        named["scale"] = scale
    (result,) = emitter.emit_as_is(op.target, *positional, **named)
    return (result if of_values == width else emit(aten.slice.Tensor, result, -1, 0, of_values),)


def _attention(op: Op, emitter: Emitter) -> Results:
    return _of_equal_widths(op, emitter) if arguments(op)["dropout_p"] == 0 else _DROPPED_ATTENTION(op, emitter)


_DROPPED_ATTENTION = written_out(attention)


def _mark(op: Op, emitter: Emitter) -> Results:
    """Rewrite the marker of ``constrain`` to an identity operator, which can have its own strategy."""
    (result,) = emitter.emit_as_is(aten.alias.default, op.args[0])
    emitter.constraints.append((result.name, op.args[1]))
    return (result,)


NORMALIZATIONS: dict[OpOverload, Rewrite] = by_operator(
    {
        "linear": _linear,
        "mm": _mm,
        "addmm": partial(_fused_add, aten.mm.default, "mat1", "mat2"),
        "baddbmm": partial(_fused_add, aten.bmm.default, "batch1", "batch2"),
        "addbmm": partial(_fused_add, aten.bmm.default, "batch1", "batch2"),
        "addmv": partial(_fused_add, aten.mv.default, "mat", "vec"),
        "addr": partial(_fused_add, aten.outer.default, "vec1", "vec2"),
        "einsum": _einsum,
        "bmm matmul": by_expert,
        "index.Tensor": of_expert,
        "conv1d conv2d conv3d conv1d.padding conv2d.padding conv3d.padding convolution conv_transpose1d "
        "conv_transpose2d.input conv_transpose3d.input": _convolution,
        "mean mean.dim": _mean,
        "aminmax": _aminmax,
        "batch_norm": _batch_norm,
        "scaled_dot_product_attention": _attention,
    },
    {mark_operator._opoverload: _mark, ATTENTION_WITHIN: _of_equal_widths},
    LOSS_NORMALIZATIONS,
    RANDOM_NORMALIZATIONS,
    LAYER_NORMALIZATIONS,
)
