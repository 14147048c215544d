"""Batch norm in training mode, written with sums: exact under every split, because the sums become global sums.

    mean = sum(x) / n        var = sum((x - mean)^2) / n        y = (x - mean) * rsqrt(var + eps) * weight + bias

The running variance is the unbiased one, ``sum((x - mean)^2) / (n - 1)``, with the global count n (Ioffe and Szegedy
2015, algorithm 2).
"""

from __future__ import annotations

from math import prod

import torch

from shardwise.graph.emitter import Emitter
from shardwise.graph.ir import Op, Ref
from shardwise.graph.schema import arguments

aten = torch.ops.aten


def batch_norm_with_statistics(op: Op, emitter: Emitter) -> tuple[Ref, Ref, Ref]:
    """Emit a training-mode ``aten.batch_norm``.

    Return its result, and the batch's mean and unbiased variance, detached, of shape (channels,).
    """
    args = arguments(op)
    x: Ref = args["input"]
    value = emitter.value(x)
    channels = value.shape[1]
    per_channel = (1, channels, *[1] * (len(value.shape) - 2))
    dims = tuple(d for d in range(len(value.shape)) if d != 1)
    count = prod(value.shape[d] for d in dims)
    emit = emitter.emit
    low_precision = value.dtype in (torch.float16, torch.bfloat16)
    if low_precision:
        x = emit(aten.to.dtype, x, torch.float32)
    mean = emit(aten.div.Tensor, emit(aten.sum.dim_IntList, x, dims, True), count)
    centered = emit(aten.sub.Tensor, x, mean)
    squares = emit(aten.sum.dim_IntList, emit(aten.mul.Tensor, centered, centered), dims, True)
    variance = emit(aten.div.Tensor, squares, count)
    scale = emit(aten.rsqrt.default, emit(aten.add.Tensor, variance, args["eps"]))
    result = emit(aten.mul.Tensor, centered, scale)
    for name, target in (("weight", aten.mul.Tensor), ("bias", aten.add.Tensor)):
        if args[name] is not None:
            result = emit(target, result, emit(aten.reshape.default, args[name], per_channel))
    if low_precision:
        result = emit(aten.to.dtype, result, value.dtype)
    unbiased = emit(aten.div.Tensor, squares, max(count - 1, 1))

    def statistic(ref: Ref) -> Ref:
        flat = emit(aten.reshape.default, ref, (channels,))
        return emit(aten.detach.default, flat) if emitter.value(flat).requires_grad else flat

    return result, statistic(mean), statistic(unbiased)
