"""Operators as functions: ``ops.matmul(x, y)``. They carry no strategy: ``ms.shard`` gives them one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import (
    abs,
    add,
    cos,
    div,
    eq,
    erf,
    exp,
    floor,
    floor_divide,
    log,
    logical_and,
    logical_not,
    logical_or,
    matmul,
    maximum,
    minimum,
    mul,
    neg,
    ones_like,
    pow,
    relu,
    rsqrt,
    sigmoid,
    sin,
    sqrt,
    square,
    sub,
    tanh,
    zeros_like,
)
from torch import bmm as batch_matmul
from torch import where as select
from torch.nn.functional import relu6

from shardwise.mindspore.ops.indexing import Gather, OneHot
from shardwise.mindspore.ops.normalization import LayerNorm
from shardwise.mindspore.ops.reductions import ReduceMax, ReduceMean, ReduceMin, ReduceSum, TopK
from shardwise.mindspore.ops.shape import Split, StridedSlice, Tile

Tensor = torch.Tensor
Axes = int | Sequence[int]


def gelu(x: Tensor, approximate: str = "none") -> Tensor:
    return torch.nn.functional.gelu(x, approximate=approximate)


def softmax(x: Tensor, axis: int = -1) -> Tensor:
    return torch.softmax(x, axis)


def log_softmax(logits: Tensor, axis: int = -1) -> Tensor:
    return torch.log_softmax(logits, axis)


def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.to(dtype)


def reshape(x: Tensor, shape: Sequence[int]) -> Tensor:
    return x.reshape(tuple(shape))


def transpose(x: Tensor, input_perm: Sequence[int]) -> Tensor:
    return x.permute(tuple(input_perm))


def expand_dims(x: Tensor, axis: int) -> Tensor:
    return x.unsqueeze(axis)


def squeeze(x: Tensor, axis: Axes | None = None) -> Tensor:
    return x.squeeze() if axis is None else x.squeeze((axis,) if isinstance(axis, int) else tuple(axis))


def tile(x: Tensor, multiples: Sequence[int]) -> Tensor:
    result: Tensor = Tile()(x, multiples)
    return result


def broadcast_to(x: Tensor, shape: Sequence[int]) -> Tensor:
    return x.expand(tuple(shape))


def concat(tensors: Sequence[Tensor], axis: int = 0) -> Tensor:
    return torch.cat(tuple(tensors), axis)


def stack(tensors: Sequence[Tensor], axis: int = 0) -> Tensor:
    return torch.stack(tuple(tensors), axis)


def unstack(x: Tensor, axis: int = 0) -> tuple[Tensor, ...]:
    return x.unbind(axis)


def split(x: Tensor, axis: int = 0, output_num: int = 1) -> tuple[Tensor, ...]:
    parts: tuple[Tensor, ...] = Split(axis, output_num)(x)
    return parts


def strided_slice(x: Tensor, begin: Sequence[int], end: Sequence[int], strides: Sequence[int]) -> Tensor:
    result: Tensor = StridedSlice()(x, begin, end, strides)
    return result


def reduce_sum(x: Tensor, axis: Axes = (), keep_dims: bool = False) -> Tensor:
    result: Tensor = ReduceSum(keep_dims)(x, axis)
    return result


def reduce_mean(x: Tensor, axis: Axes = (), keep_dims: bool = False) -> Tensor:
    result: Tensor = ReduceMean(keep_dims)(x, axis)
    return result


def reduce_max(x: Tensor, axis: Axes = (), keep_dims: bool = False) -> Tensor:
    result: Tensor = ReduceMax(keep_dims)(x, axis)
    return result


def reduce_min(x: Tensor, axis: Axes = (), keep_dims: bool = False) -> Tensor:
    result: Tensor = ReduceMin(keep_dims)(x, axis)
    return result


def mean(x: Tensor, axis: Axes = (), keep_dims: bool = False) -> Tensor:
    return reduce_mean(x, axis, keep_dims)


def sum(x: Tensor, axis: Axes = (), keep_dims: bool = False) -> Tensor:
    return reduce_sum(x, axis, keep_dims)


def argmax(x: Tensor, axis: int = -1) -> Tensor:
    return x.argmax(axis)


def topk(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    result: tuple[Tensor, Tensor] = TopK()(x, k)
    return result


def cumsum(x: Tensor, axis: int) -> Tensor:
    return x.cumsum(axis)


def gather(params: Tensor, indices: Tensor, axis: int, batch_dims: int = 0) -> Tensor:
    result: Tensor = Gather(batch_dims)(params, indices, axis)
    return result


def one_hot(indices: Tensor, depth: int, on_value: Any = 1.0, off_value: Any = 0.0, axis: int = -1) -> Tensor:
    result: Tensor = OneHot(axis)(indices, depth, on_value, off_value)
    return result


def layer_norm(
    x: Tensor, gamma: Tensor, beta: Tensor, begin_norm_axis: int = 1, begin_params_axis: int = 1, epsilon: float = 1e-7
) -> tuple[Tensor, Tensor, Tensor]:
    result: tuple[Tensor, Tensor, Tensor] = LayerNorm(begin_norm_axis, begin_params_axis, epsilon)(x, gamma, beta)
    return result


def dropout(x: Tensor, p: float = 0.5, training: bool = True) -> Tensor:
    return torch.nn.functional.dropout(x, p, training)


def identity(x: Tensor) -> Tensor:
    return x


def zeros(shape: Any, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


def ones(shape: Any, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.ones(shape, dtype=dtype)


def full(shape: Any, value: float, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.full(shape, value, dtype=dtype)


__all__ = [
    "abs", "add", "argmax", "batch_matmul", "broadcast_to", "cast", "concat", "cos", "cumsum", "div", "dropout",
    "eq", "erf", "exp", "expand_dims", "floor", "floor_divide", "full", "gather", "gelu", "identity",
    "layer_norm", "log", "log_softmax", "logical_and", "logical_not", "logical_or", "matmul", "maximum", "mean",
    "minimum", "mul", "neg", "one_hot", "ones", "ones_like", "pow", "reduce_max", "reduce_mean", "reduce_min",
    "reduce_sum", "relu", "relu6", "reshape", "rsqrt", "select", "sigmoid", "sin", "softmax", "split", "sqrt",
    "square", "squeeze", "stack", "strided_slice", "sub", "sum", "tanh", "tile", "topk", "transpose", "unstack",
    "zeros", "zeros_like",
]  # fmt: skip
