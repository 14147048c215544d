"""Rewrite of mean losses to a sum over the global count.

The mean of the shards' means is not the mean: a shard may have more ignored labels than another. The sum of the shards'
sums over the global count is exact. Half-precision losses are summed in float32, because the sum may overflow where the
mean does not.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch._ops import OpOverload

from shardwise.graph.emitter import Emitter, Rewrite
from shardwise.graph.ir import Arg, Op, Ref
from shardwise.graph.schema import arguments, by_operator

aten = torch.ops.aten
NONE, MEAN, SUM = 0, 1, 2
_LOW_PRECISION = (torch.float16, torch.bfloat16)


def _total(op: Op, args: dict[str, Any], scores: Ref, emitter: Emitter) -> Ref:
    """Emit the summed loss, in float32 if the scores have half precision."""
    low_precision = emitter.value(scores).dtype in _LOW_PRECISION
    args = args | {"reduction": NONE if low_precision else SUM}
    schema = op.target._schema.arguments
    positional = [args[argument.name] for argument in schema if not argument.kwarg_only]
    keywords = {argument.name: args[argument.name] for argument in schema if argument.kwarg_only}
    loss = emitter.emit(op.target, *positional, **keywords)
    if low_precision:
        loss = emitter.emit(aten.sum.default, loss, dtype=torch.float32)
    return loss


def _divided(op: Op, total: Ref, count: Arg, scores: Ref, emitter: Emitter) -> tuple[Arg, ...]:
    mean = emitter.emit(aten.div.Tensor, total, count)
    dtype = emitter.value(scores).dtype
    return (emitter.emit(aten.to.dtype, mean, dtype) if dtype in _LOW_PRECISION else mean,)


def _class_loss(op: Op, emitter: Emitter) -> tuple[Arg, ...] | None:
    """Rewrite cross_entropy_loss and nll_loss: divide by the number of labels not ignored, or their classes' weights.

    With probabilities as targets (floating ``target``), divide by the number of samples.
    """
    args = arguments(op)
    if args["reduction"] != MEAN:
        return None
    scores, target = args["self"], args["target"]
    total = _total(op, args, scores, emitter)
    if emitter.value(target).dtype.is_floating_point:
        shape = emitter.value(scores).shape
        classes = shape[1] if len(shape) > 1 else shape[0]
        return _divided(op, total, prod(shape) // classes, scores, emitter)
    valid = emitter.emit(aten.ne.Scalar, target, args["ignore_index"])
    dtype = emitter.value(total).dtype
    count = emitter.emit(aten.to.dtype, valid, dtype)
    if args["weight"] is not None:
        labels = emitter.emit(aten.masked_fill.Scalar, target, emitter.emit(aten.logical_not.default, valid), 0)
        label_weight = emitter.emit(aten.index.Tensor, args["weight"], (labels,))
        count = emitter.emit(aten.mul.Tensor, label_weight, count)
    return _divided(op, total, emitter.emit(aten.sum.default, count), scores, emitter)


def _element_loss(op: Op, emitter: Emitter) -> tuple[Arg, ...] | None:
    """Rewrite element-wise losses: divide by the number of elements after broadcasting."""
    call_args = arguments(op)
    if call_args["reduction"] != MEAN:
        return None
    scores: Ref = op.args[0]
    shapes = [
        emitter.value(call_args[name]).shape
        for name in ("self", "input", "input1", "input2", "target", "weight")
        if call_args.get(name) is not None
    ]
    count = prod(torch.broadcast_shapes(*shapes))
    return _divided(op, _total(op, call_args, scores, emitter), count, scores, emitter)


LOSS_NORMALIZATIONS: dict[OpOverload, Rewrite] = by_operator(
    {
        "cross_entropy_loss nll_loss nll_loss_nd nll_loss2d": _class_loss,
        "mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy binary_cross_entropy_with_logits "
        "kl_div soft_margin_loss poisson_nll_loss hinge_embedding_loss margin_ranking_loss": _element_loss,
    }
)
