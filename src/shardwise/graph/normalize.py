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
from shardwise.graph.normalize_random import RANDOM_NORMALIZATIONS, drop
from shardwise.graph.schema import arguments, by_operator, draws_nothing, is_random, operator_name

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
    return (batch_norm_with_statistics(op, emitter)[0],) if arguments(op)["training"] else None


# ----------------------------------------------------------------------------------------------------- randomness


def _dropout(op: Op, emitter: Emitter) -> Results:
    args = arguments(op)
    if not args["train"] or args["p"] == 0:
        return (args["input"],)
    return (drop(emitter, args["input"], args["p"]),)


def _ones(emitter: Emitter, shape: tuple[int, ...], dtype: torch.dtype) -> Ref:
    return emitter.emit(aten.full.default, shape, 1.0, dtype=dtype)


def _feature_dropout(op: Op, emitter: Emitter) -> Results:
    """Drop whole channels: multiply by a dropout of ones of shape (n, c, 1, ...)."""
    args = arguments(op)
    if not args["train"] or args["p"] == 0:
        return (args["input"],)
    value = emitter.value(args["input"])
    noise = drop(emitter, _ones(emitter, (*value.shape[:2], *[1] * (len(value.shape) - 2)), value.dtype), args["p"])
    return (emitter.emit(aten.mul.Tensor, args["input"], noise),)


def _native_dropout(op: Op, emitter: Emitter) -> Results:
    args = arguments(op)
    value = emitter.value(args["input"])
    if not args["train"] and args["train"] is not None:
        return args["input"], emitter.emit(aten.full.default, value.shape, True, dtype=torch.bool)
    noise = drop(emitter, _ones(emitter, value.shape, value.dtype), args["p"])
    return emitter.emit(aten.mul.Tensor, args["input"], noise), emitter.emit(aten.ne.Scalar, noise, 0)


def _bernoulli(op: Op, emitter: Emitter) -> Results:
    """Emit ones with probability p: the kept elements of a dropout of ones with probability 1 - p."""
    args = arguments(op)
    value = emitter.value(args["self"])
    dtype = value.dtype if value.dtype.is_floating_point else torch.float32
    noise = drop(emitter, _ones(emitter, value.shape, dtype), 1.0 - args["p"])
    return (emitter.emit(aten.to.dtype, emitter.emit(aten.ne.Scalar, noise, 0), value.dtype),)


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
    """Rewrite attention with dropout: softmax(q k^T * scale + mask), dropped, times v (Vaswani et al. 2017, 3.2.1)."""
    args = arguments(op)
    if args["dropout_p"] == 0:
        return _of_equal_widths(op, emitter)
    emit = emitter.emit
    query, key, value, mask = args["query"], args["key"], args["value"], args["attn_mask"]
    shape = emitter.value(query).shape
    length, key_length = shape[-2], emitter.value(key).shape[-2]
    if args["enable_gqa"]:
        groups = shape[-3] // emitter.value(key).shape[-3]
        if groups > 1:
            key = emit(aten.repeat_interleave.self_int, key, groups, -3)
            value = emit(aten.repeat_interleave.self_int, value, groups, -3)
    scale = shape[-1] ** -0.5 if args["scale"] is None else args["scale"]
    scores = emit(aten.matmul.default, emit(aten.mul.Tensor, query, scale), emit(aten.transpose.int, key, -2, -1))
    if args["is_causal"]:
        rows = emit(aten.unsqueeze.default, emit(aten.arange.default, length), 1)
        later = emit(aten.gt.Tensor, emit(aten.arange.default, key_length), rows)
        scores = emit(aten.masked_fill.Scalar, scores, later, float("-inf"))
    if mask is not None and emitter.value(mask).dtype == torch.bool:
        scores = emit(aten.masked_fill.Scalar, scores, emit(aten.logical_not.default, mask), float("-inf"))
    elif mask is not None:
        scores = emit(aten.add.Tensor, scores, mask)
    softmax = aten.softmax.int if mask is None else aten._safe_softmax.default
    weights = drop(emitter, emit(softmax, scores, -1), args["dropout_p"])
    return (emit(aten.matmul.default, weights, value),)


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
        "dropout": _dropout,
        "feature_dropout": _feature_dropout,
        "native_dropout": _native_dropout,
        "bernoulli.p": _bernoulli,
        "scaled_dot_product_attention": _attention,
    },
    {mark_operator._opoverload: _mark, ATTENTION_WITHIN: _of_equal_widths},
    LOSS_NORMALIZATIONS,
    RANDOM_NORMALIZATIONS,
    LAYER_NORMALIZATIONS,
)
