"""A call of every primitive, its formula and how it is split."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from mindspore.applied import Fixed
from shardwise.mindspore.ops import operations as P

Formula = Callable[..., Any]


def r(*shape: int) -> Tensor:
    """Normal numbers in float64, others for other shapes."""
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(prod(shape) + len(shape)))


def positive(*shape: int) -> Tensor:
    return r(*shape).abs() + 0.5


def fixed(*shape: int) -> Tensor:
    return positive(*shape).as_subclass(Fixed)


def i(high: int, *shape: int) -> Tensor:
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(high + len(shape)))


def number(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64).as_subclass(Fixed)


@dataclass(frozen=True)
class Sample:
    """A call, its formula, and strategies: (devices, counts, whether strict mode takes them)."""

    operator: P.Primitive
    args: tuple[Any, ...]
    formula: Formula
    splits: tuple[tuple[int, Any, bool], ...] = ()


def batched_gather(x: Tensor, ids: Tensor, axis: int) -> Tensor:
    return torch.stack([own.index_select(axis - 1, rows) for own, rows in zip(x, ids, strict=True)])


def manual(operator: P.Gather, lengths: Any) -> P.Gather:
    return operator.add_prim_attr("manual_split", lengths)


def scattered(x: Tensor, ids: Tensor, values: Tensor, *, add: bool) -> Tensor:
    y = x.clone()
    for row, own in zip(ids[:, 0].tolist(), values, strict=True):
        y[row] = y[row] + own if add else own
    return y


def segments(x: Tensor, ids: Tensor, count: int) -> Tensor:
    return torch.stack([x[ids == segment].sum(0) for segment in range(count)])


def one_hot(ids: Tensor, depth: int, on: float, off: float) -> Tensor:
    return torch.where(F.one_hot(ids, depth) == 1, on, off)


def conv(x: Tensor, w: Tensor, pad: tuple[int, int, int, int] = (0, 0, 0, 0), **settings: Any) -> Tensor:
    return F.conv2d(F.pad(x, pad), w, **settings)


def average_inside(x: Tensor, kernel: int, stride: int, pad: tuple[int, int, int, int]) -> Tensor:
    sums, ones = F.avg_pool2d(F.pad(x, pad), kernel, stride), F.pad(torch.ones_like(x), pad)
    return sums / F.avg_pool2d(ones, kernel, stride)


def transposed(y: Tensor, w: Tensor, size: Any) -> Tensor:
    """The gradient of a convolution of mode "same" by its input."""
    x = torch.zeros(size, dtype=y.dtype, requires_grad=True)
    (found,) = torch.autograd.grad(F.conv2d(F.pad(x, (0, 1, 0, 1)), w, stride=2), x, y)
    return found


X, Y, ROW, CUBE = r(8, 12), r(8, 12).flip(0), r(12), r(8, 4, 12)
IMAGES, KERNEL, TABLE, IDS = r(8, 8, 8, 8), r(8, 8, 3, 3) / 5, r(16, 4), i(16, 8, 8)
TWO = ((2, 2), (2, 2))
NORM = (CUBE, r(12), r(12).flip(0))
LOGITS, LABELS = r(8, 6), r(8, 6).softmax(1)

SAMPLES: dict[str, Sample] = {
    # linear
    "MatMul": Sample(P.MatMul(), (X, r(12, 8)), torch.matmul, (
        (8, ((2, 4), (4, 1)), True), (16, ((2, 4), (4, 2)), True), (8, ((2, 4), ()), True),
        (6, ((3, 1), (1, 2)), False),
    )),
    "MatMul, transpose_a": Sample(P.MatMul(True), (X, r(8, 4)), lambda x, y: x.T @ y, ((8, ((4, 2), (4, 1)), True),)),
    "MatMul, transpose_b": Sample(
        P.MatMul(transpose_b=True), (X, r(8, 12)), lambda x, y: x @ y.T, ((8, ((2, 2), (2, 2)), True),),
    ),
    "MatMul, broadcast": Sample(
        P.MatMul(transpose_b=True), (r(8, 16), r(2, 4, 8, 16)), lambda x, y: torch.einsum("mk,abnk->abmn", x, y),
        ((8, ((2, 2), (2, 1, 1, 2)), True),),
    ),
    "BatchMatMul": Sample(P.BatchMatMul(), (r(4, 8, 12), r(4, 12, 8)), torch.bmm, (
        (8, ((2, 2, 2), (2, 2, 1)), True), (6, ((1, 3, 2), (1, 2, 1)), False),
    )),
    "BiasAdd": Sample(
        P.BiasAdd(), (IMAGES, r(8)), lambda x, b: x + b[:, None, None], ((8, ((2, 2, 2, 1), (2,)), True),),
    ),
    "BiasAdd, rows": Sample(P.BiasAdd(), (X, ROW), torch.add, ((8, ((2, 4), (4,)), True),)),
    # arithmetic
    "Add": Sample(P.Add(), (X, ROW), torch.add, ((8, ((2, 4), (4,)), True), (8, ((2, 4), ()), True))),
    "Add, both": Sample(P.Add(), (r(8, 1, 4), r(1, 4, 4)), torch.add, ((8, ((4, 1, 1), (1, 2, 1)), True),)),
    "Add, number": Sample(P.Add(), (2.0, X), lambda x, y: x + y, ((4, ((2, 2),), True),)),
    "TensorAdd": Sample(P.TensorAdd(), (X, Y), torch.add, ((6, ((2, 3), (2, 3)), False),)),
    "Sub": Sample(P.Sub(), (X, Y), torch.sub), "Mul": Sample(P.Mul(), (X, Y), torch.mul),
    "Div": Sample(P.Div(), (X, Y), torch.div), "RealDiv": Sample(P.RealDiv(), (X, Y), torch.div),
    "FloorDiv": Sample(P.FloorDiv(), (X, Y), lambda x, y: (x / y).floor(), ((4, TWO, True),)),
    "Mod": Sample(P.Mod(), (X, Y), lambda x, y: x - (x / y).trunc() * y),
    "FloorMod": Sample(P.FloorMod(), (X, 2.0), lambda x, y: x - (x / y).floor() * y),
    "Pow": Sample(P.Pow(), (X.abs(), 3.0), lambda x, y: x * x * x),
    "DivNoNan": Sample(
        P.DivNoNan(), (X, fixed(8, 12)), lambda x, y: x / y, ((4, TWO, True), (4, ((2, 2), ()), True)),
    ),
    "SquaredDifference, number": Sample(
        P.SquaredDifference(), (X, number(2.0)), lambda x, y: (x - y) ** 2, ((4, ((2, 2), ()), True),),
    ),
    "SquaredDifference": Sample(
        P.SquaredDifference(), (X, ROW), lambda x, y: (x - y) ** 2, ((8, ((2, 4), (4,)), True),),
    ),
    "Maximum": Sample(P.Maximum(), (X, Y), torch.maximum, ((4, TWO, True),)),
    "Maximum, number": Sample(P.Maximum(), (X, 0.3), lambda x, y: x.clamp(min=y), ((4, ((2, 2),), True),)),
    "Minimum": Sample(P.Minimum(), (X, Y), torch.minimum),
    "Minimum, number": Sample(P.Minimum(), (0.3, X), lambda x, y: y.clamp(max=x)),
    "Atan2": Sample(P.Atan2(), (X, Y), torch.atan2),
    "Equal": Sample(P.Equal(), (i(3, 8, 4), i(3, 8, 4).flip(0)), torch.eq, ((4, TWO, True),)),
    "NotEqual": Sample(P.NotEqual(), (i(3, 8), 1), torch.ne), "Greater": Sample(P.Greater(), (X, Y), torch.gt),
    "GreaterEqual": Sample(P.GreaterEqual(), (X, Y), torch.ge), "Less": Sample(P.Less(), (X, Y), torch.lt),
    "LessEqual": Sample(P.LessEqual(), (X, 0.0), torch.le),
    "LogicalAnd": Sample(P.LogicalAnd(), (X > 0, Y > 0), lambda x, y: x & y),
    "LogicalOr": Sample(P.LogicalOr(), (X > 0, Y > 0), lambda x, y: x | y),
    "LogicalNot": Sample(P.LogicalNot(), (X > 0,), lambda x: ~x),
    "Select": Sample(P.Select(), (X > 0, X, Y), torch.where, ((4, ((2, 2),) * 3, True),)),
    "AddN": Sample(P.AddN(), ((X, Y, X.flip(1)),), lambda own: own[0] + own[1] + own[2], ((4, ((2, 2),) * 3, True),)),
    "Cast": Sample(P.Cast(), (X, torch.float32), lambda x, dtype: x.to(dtype), ((4, ((2, 2),), True),)),
    # one operand
    "ReLU": Sample(P.ReLU(), (X,), lambda x: x.clamp(min=0), ((4, ((2, 2),), True),)),
    "ReLU6": Sample(P.ReLU6(), (9 * X,), lambda x: x.clamp(0, 6), ((4, ((2, 2),), True),)),
    "GeLU": Sample(P.GeLU(), (X,), lambda x: x / 2 * (1 + torch.tanh((2 / np.pi) ** 0.5 * (x + 0.044715 * x**3)))),
    "Sigmoid": Sample(P.Sigmoid(), (X,), lambda x: 1 / (1 + torch.exp(-x))), "Tanh": Sample(P.Tanh(), (X,), np.tanh),
    "Softplus": Sample(P.Softplus(), (X,), lambda x: torch.log(1 + torch.exp(x))),
    "Softsign": Sample(P.Softsign(), (X,), lambda x: x / (1 + abs(x)), ((4, ((2, 2),), True),)),
    "HSwish": Sample(P.HSwish(), (3 * X,), lambda x: x * (x + 3).clamp(0, 6) / 6),
    "HSigmoid": Sample(P.HSigmoid(), (3 * X,), lambda x: (x + 3).clamp(0, 6) / 6),
    "SeLU": Sample(
        P.SeLU(), (X,), lambda x: 1.0507009873554805 * torch.where(x > 0, x, 1.6732632423543772 * (x.exp() - 1)),
    ),
    "Mish": Sample(P.Mish(), (X,), lambda x: x * torch.tanh(torch.log(1 + torch.exp(x)))),
    "Elu": Sample(P.Elu(0.7), (X,), lambda x: torch.where(x > 0, x, 0.7 * (x.exp() - 1)), ((4, ((2, 2),), True),)),
    "LeakyReLU": Sample(P.LeakyReLU(0.3), (X,), lambda x: torch.where(x > 0, x, 0.3 * x)),
    "Exp": Sample(P.Exp(), (X,), np.exp), "Expm1": Sample(P.Expm1(), (X,), np.expm1),
    "Log": Sample(P.Log(), (X.abs(),), np.log), "Log1p": Sample(P.Log1p(), (X.abs(),), np.log1p),
    "Sqrt": Sample(P.Sqrt(), (X.abs(),), np.sqrt), "Rsqrt": Sample(P.Rsqrt(), (X.abs(),), lambda x: 1 / torch.sqrt(x)),
    "Square": Sample(P.Square(), (X,), lambda x: x * x), "Reciprocal": Sample(P.Reciprocal(), (X,), lambda x: 1 / x),
    "Inv": Sample(P.Inv(), (X,), lambda x: 1 / x), "Neg": Sample(P.Neg(), (X,), np.negative),
    "Abs": Sample(P.Abs(), (X,), np.abs), "Sign": Sample(P.Sign(), (X,), np.sign), "Sin": Sample(P.Sin(), (X,), np.sin),
    "Cos": Sample(P.Cos(), (X,), np.cos), "Tan": Sample(P.Tan(), (X,), np.tan),
    "Asin": Sample(P.Asin(), (X.sin(),), np.arcsin), "ACos": Sample(P.ACos(), (X.sin(),), np.arccos),
    "Atan": Sample(P.Atan(), (X,), np.arctan), "Sinh": Sample(P.Sinh(), (X,), np.sinh),
    "Cosh": Sample(P.Cosh(), (X,), np.cosh), "Floor": Sample(P.Floor(), (3 * X,), np.floor),
    "Ceil": Sample(P.Ceil(), (3 * X,), np.ceil), "Round": Sample(P.Round(), (3 * X,), np.round),
    "Rint": Sample(P.Rint(), (3 * X,), np.rint),
    "Erf": Sample(P.Erf(), (X,), lambda x: 1 - torch.special.erfc(x)),
    "Erfc": Sample(P.Erfc(), (X,), lambda x: 1 - torch.special.erf(x)),
    "IsNan": Sample(P.IsNan(), (X.log(),), np.isnan), "IsInf": Sample(P.IsInf(), (1 / (X * 0),), np.isinf),
    "IsFinite": Sample(P.IsFinite(), (X.log(),), np.isfinite),
    "ZerosLike": Sample(P.ZerosLike(), (X,), lambda x: x * 0, ((4, ((2, 2),), True),)),
    "OnesLike": Sample(P.OnesLike(), (X,), lambda x: x * 0 + 1),
    "Identity": Sample(P.Identity(), (X,), lambda x: x, ((4, ((2, 2),), True),)),
    # shapes
    "Reshape": Sample(P.Reshape(), (X, (4, -1)), lambda x, shape: x.numpy().reshape(shape)),
    "Flatten": Sample(P.Flatten(), (CUBE,), lambda x: x.numpy().reshape(8, 48)),
    "Transpose": Sample(P.Transpose(), (X, (1, 0)), lambda x, perm: x.T, ((4, ((2, 2),), True),)),
    "ExpandDims": Sample(P.ExpandDims(), (X, 1), lambda x, axis: x[:, None], ((4, ((2, 2),), True),)),
    "Squeeze": Sample(P.Squeeze(1), (r(8, 1, 12),), lambda x: x[:, 0], ((4, ((2, 1, 2),), True),)),
    "Squeeze, all": Sample(P.Squeeze(), (r(1, 8, 1),), lambda x: x.flatten()),
    "Tile": Sample(P.Tile(), (X, (2, 3)), lambda x, m: np.tile(x.numpy(), m), ((4, ((2, 2),), True),)),
    "BroadcastTo": Sample(P.BroadcastTo((5, -1, 12)), (X,), lambda x: torch.stack([x] * 5), ((4, ((2, 2),), True),)),
    "Concat": Sample(P.Concat(1), ((X, r(8, 4)),), lambda own: torch.cat(own, 1), (
        (4, ((4, 1), (4, 1)), True),
    )),
    "Stack": Sample(P.Stack(1), ((X, Y),), lambda own: torch.stack(own, 1), ((4, TWO, True),)),
    "Pack": Sample(P.Pack(1), ((X, Y),), lambda own: torch.stack(own, 1), ((4, TWO, True),)),
    "Unstack": Sample(P.Unstack(1), (r(8, 3),), lambda x: tuple(x.T), ((4, ((4, 1),), True),)),
    "Split": Sample(P.Split(1, 2), (X,), lambda x: (x[:, :6], x[:, 6:]), ((4, ((4, 1),), True),)),
    "StridedSlice": Sample(
        P.StridedSlice(), (X, (0, 2), (8, 10), (1, 2)), lambda x, *own: x[:, 2:10:2],
        ((4, ((4, 1),), True), (4, ((2, 2),), False)),
    ),
    "StridedSlice, masks": Sample(
        P.StridedSlice(begin_mask=2, end_mask=2, new_axis_mask=1, shrink_axis_mask=4),
        (X, (0, 3, 3), (0, 5, 4), (1, 1, 1)), lambda x, *own: x[None, :, 3], ((4, ((4, 1),), False),),
    ),
    "StridedSlice, ellipsis": Sample(
        P.StridedSlice(ellipsis_mask=1), (CUBE, (0, 2), (0, 5), (1, 1)), lambda x, *own: x[..., 2:5],
    ),
    "Slice": Sample(P.Slice(), (X, (0, 2), (-1, 5)), lambda x, *own: x[:, 2:7], ((4, ((4, 1),), True),)),
    "Fill": Sample(P.Fill(), (torch.float32, (2, 3), 1.5), lambda *own: np.full((2, 3), 1.5, np.float32)),
    "Zeros": Sample(P.Zeros(), ((2, 3), torch.float64), lambda *own: np.zeros((2, 3))),
    "Ones": Sample(P.Ones(), ((2, 3), torch.float64), lambda *own: np.ones((2, 3))),
    "Eye": Sample(P.Eye(), (2, 3, torch.float64), lambda *own: np.eye(2, 3)),
    "Range": Sample(P.Range(), (1, 9, 2), lambda *own: np.arange(1, 9, 2)),
    "Depend": Sample(P.Depend(), (X, Y), lambda x, y: x),
    # reductions
    "ReduceSum": Sample(P.ReduceSum(), (X, 1), lambda x, axis: np.sum(x.numpy(), axis), ((4, ((2, 2),), True),)),
    "ReduceSum, all": Sample(P.ReduceSum(), (X,), lambda x: np.sum(x.numpy()), ((4, ((2, 2),), True),)),
    "ReduceMean": Sample(P.ReduceMean(True), (CUBE, (0, 2)), lambda x, axis: np.mean(x.numpy(), axis, keepdims=True), (
        (8, ((2, 2, 2),), True), (3, ((1, 1, 3),), False),
    )),
    "ReduceMax": Sample(P.ReduceMax(), (X, 1), lambda x, axis: np.max(x.numpy(), axis), ((4, ((2, 2),), True),)),
    "ReduceMin": Sample(P.ReduceMin(True), (X, 0), lambda x, axis: np.min(x.numpy(), axis, keepdims=True)),
    "ReduceProd": Sample(P.ReduceProd(), (X, (0, 1)), lambda x, axis: np.prod(x.numpy()), ((4, ((2, 2),), True),)),
    "ReduceAll": Sample(P.ReduceAll(), (X > -1, 1), lambda x, axis: np.all(x.numpy(), axis), ((4, ((2, 2),), True),)),
    "ReduceAny": Sample(P.ReduceAny(), (X > 1, 1), lambda x, axis: np.any(x.numpy(), axis)),
    "ArgMaxWithValue": Sample(
        P.ArgMaxWithValue(1), (X,), lambda x: (np.argmax(x.numpy(), 1), np.max(x.numpy(), 1)), ((4, ((2, 2),), True),),
    ),
    "ArgMinWithValue": Sample(
        P.ArgMinWithValue(1, True), (X,),
        lambda x: (np.argmin(x.numpy(), 1, keepdims=True), np.min(x.numpy(), 1, keepdims=True)),
    ),
    "Argmax": Sample(P.Argmax(1), (X,), lambda x: np.argmax(x.numpy(), 1).astype(np.int32), ((4, ((2, 2),), True),)),
    "Argmin": Sample(P.Argmin(0, torch.int64), (X,), lambda x: np.argmin(x.numpy(), 0)),
    "CumSum": Sample(P.CumSum(), (X, 1), lambda x, axis: np.cumsum(x.numpy(), axis), (
        (4, ((4, 1),), True), (4, ((2, 2),), False),
    )),
    "CumSum, exclusive, reverse": Sample(
        P.CumSum(True, True), (X, 1), lambda x, axis: np.cumsum(x.numpy()[:, ::-1], 1)[:, ::-1] - x.numpy(),
        ((4, ((4, 1),), True),),
    ),
    "CumProd": Sample(P.CumProd(), (X, 0), lambda x, axis: np.cumprod(x.numpy(), axis)),
    "CumProd, exclusive, reverse": Sample(
        P.CumProd(True, True), (X, 1), lambda x, axis: np.cumprod(x.numpy()[:, ::-1], 1)[:, ::-1] / x.numpy(),
        ((4, ((4, 1),), True),),
    ),
    "TopK": Sample(P.TopK(), (X, 3), lambda x, k: (
        -np.sort(-x.numpy())[:, :3], np.argsort(-x.numpy())[:, :3].astype(np.int32),
    ), (
        (4, ((4, 1),), True),
    )),
    "Sort": Sample(
        P.Sort(0), (X,), lambda x: (np.sort(x.numpy(), 0), np.argsort(x.numpy(), 0).astype(np.int32)),
        ((4, ((1, 4),), True),),
    ),
    # softmax, norms
    "Softmax": Sample(P.Softmax(), (X,), lambda x: torch.exp(x) / torch.exp(x).sum(1, keepdims=True), (
        (4, ((4, 1),), True), (4, ((2, 2),), False), (3, ((1, 3),), False),
    )),
    "Softmax, two dims": Sample(
        P.Softmax((0, 1)), (CUBE,), lambda x: torch.exp(x) / torch.exp(x).sum((0, 1)),
        ((4, ((1, 1, 4),), True), (4, ((2, 1, 2),), False)),
    ),
    "LogSoftmax": Sample(P.LogSoftmax(0), (X,), lambda x: x - torch.log(torch.exp(x).sum(0)), (
        (4, ((1, 4),), True), (4, ((2, 2),), False),
    )),
    "L2Normalize": Sample(P.L2Normalize(1), (X,), lambda x: x / torch.sqrt((x * x).sum(1, keepdims=True)), (
        (4, ((4, 1),), True), (4, ((2, 2),), False),
    )),
    "LayerNorm": Sample(P.LayerNorm(2, 2, 1e-5), NORM, lambda x, g, b: (
        (x - x.mean(2, True)) / (x.var(2, correction=0, keepdim=True) + 1e-5).sqrt() * g + b,
        x.mean(2, True), x.var(2, correction=0, keepdim=True),
    ), ((8, ((2, 4, 1), (1,), (1,)), True), (8, ((2, 2, 2), (2,), (2,)), False), (4, ((), (4,), ()), False))),
    "LayerNorm, parameters of more dims": Sample(
        P.LayerNorm(3, 1, 1e-5), (r(8, 4, 4, 6), r(4, 4, 6), r(4, 4, 6).flip(0)), lambda x, g, b: (
            (x - x.mean(3, True)) / (x.var(3, correction=0, keepdim=True) + 1e-5).sqrt() * g + b,
            x.mean(3, True), x.var(3, correction=0, keepdim=True),
        ), (
            (8, ((2, 2, 2, 1), (2, 2, 1), (2, 2, 1)), True), (8, ((2, 2, 2, 1), (), ()), True),
            (8, ((), (2, 4, 1), ()), True),
        ),
    ),
    "BatchNorm": Sample(
        P.BatchNorm(), (r(8, 4, 6), r(4), r(4).flip(0), fixed(4), fixed(4).flip(0)), lambda x, s, b, m, v: (
            (x - m[:, None]) / (v[:, None] + 1e-5).sqrt() * s[:, None] + b[:, None], m, v, m, v,
        ), ((4, ((2, 2, 1), (2,), (2,), (2,), (2,)), True), (4, ((), (4,), (), (), ()), True)),
    ),
    # lookups
    "Gather": Sample(P.Gather(), (TABLE, IDS, 0), lambda x, ids, axis: x[ids], (
        (8, ((1, 1), (8, 1)), True), (8, ((1, 2), (2, 2)), True),  # NORMAL
        (8, ((8, 1), (1, 1)), True), (8, ((4, 2), (1, 1)), True),  # SHARD_AXIS_0
        (8, ((4, 1), (2, 1)), True),  # SHARD_BATCH_AND_AXIS
        (8, ((2, 1), (1, 4)), False), (5, ((5, 1), (1, 1)), False),
    )),
    "Gather, three ids": Sample(P.Gather(), (TABLE, i(16, 3, 8), 0), lambda x, ids, axis: x[ids], (
        (8, ((8, 1), (1, 1)), True),
    )),
    "Gather, numbers": Sample(
        P.Gather(), (r(16), i(16, 8), 0), lambda x, ids, axis: x[ids], ((8, ((8,), (1,)), True),),
    ),
    "Gather, axis 1": Sample(P.Gather(), (r(16, 8), i(8, 4, 2), 1), lambda x, ids, axis: x[:, ids], (
        (8, ((2, 4), (1, 1)), True), (8, ((2, 1), (2, 2)), True),  # SHARD_AXIS_1, NORMAL
    )),
    "Gather, batch": Sample(P.Gather(1), (r(8, 6, 4), i(6, 8, 5), 1), batched_gather, (
        (8, ((2, 1, 2), (2, 1)), True), (8, ((4, 1, 1), (4, 1)), True), (4, ((), (2, 2)), False),
    )),
    "Gather, manual": Sample(
        manual(P.Gather(), (10, 20, 30, 4)), (r(64, 8), i(64, 8, 8), 0), lambda x, ids, axis: x[ids],
        ((4, ((4, 1), (1, 4)), True), (8, ((4, 2), (1, 4)), True)),
    ),
    "Gather, manual, repeated": Sample(
        manual(P.Gather(), (1, 7)), (r(8, 8), i(8, 8, 8), 0), lambda x, ids, axis: x[ids],
        ((8, ((2, 1), (1, 2)), False),),
    ),
    "Gather, manual, axis 1": Sample(
        manual(P.Gather(), (1, 7)), (r(8, 8), i(8, 8), 1), lambda x, ids, axis: x[:, ids],
        ((2, ((1, 2), (1,)), False),),
    ),
    "GatherV2": Sample(P.GatherV2(), (TABLE, IDS, 0), lambda x, ids, axis: x[ids]),
    "SparseGatherV2": Sample(P.SparseGatherV2(), (TABLE, IDS, 0), lambda x, ids, axis: x[ids]),
    "EmbeddingLookup": Sample(
        P.EmbeddingLookup(), (TABLE, i(20, 8, 8), 2),
        lambda x, ids, offset: torch.where(((ids >= 2) & (ids < 18))[..., None], x[(ids - 2).clamp(0, 15)], 0),
        ((8, ((8, 1), (1, 1)), True), (8, ((1, 1), (8, 1)), True)),
    ),
    "GatherD": Sample(
        P.GatherD(), (X, 1, i(12, 8, 4)), lambda x, dim, ids: np.take_along_axis(x.numpy(), ids.numpy(), 1),
        ((4, ((4, 1), (4, 1)), True),),
    ),
    "GatherNd": Sample(
        P.GatherNd(), (r(8, 12, 3), i(8, 4, 6, 2)), lambda x, ids: x[ids[..., 0], ids[..., 1]],
        ((4, ((1, 1, 1), (2, 2, 1)), True),),
    ),
    "OneHot": Sample(P.OneHot(), (i(10, 64), 10, number(2.0), number(-1.0)), one_hot, (
        (8, ((8, 1), (), ()), True), (8, ((4, 2), (), ()), True), (8, ((4, 1), (), ()), True),
        (8, ((8,), (), ()), True),
    )),
    "OneHot, axis 0": Sample(
        P.OneHot(0), (i(10, 64), 10, number(2.0), number(-1.0)), lambda *own: one_hot(*own).T,
        ((8, ((4,), (), ()), True),),
    ),
    "UnsortedSegmentSum": Sample(P.UnsortedSegmentSum(), (r(8, 6), i(5, 8), 5), segments, ((4, ((2, 2), (2,)), True),)),
    "TensorScatterUpdate": Sample(
        P.TensorScatterUpdate(), (r(8, 6), torch.tensor([[1], [5]]), r(2, 6)), lambda *own: scattered(*own, add=False),
        ((2, ((1, 2), (1, 1), (1, 2)), True),),
    ),
    "TensorScatterAdd": Sample(
        P.TensorScatterAdd(), (r(8, 6), torch.tensor([[1], [1]]), r(2, 6)), lambda *own: scattered(*own, add=True),
        ((2, ((1, 2), (1, 1), (1, 2)), True),),
    ),
    # losses
    "SoftmaxCrossEntropyWithLogits": Sample(P.SoftmaxCrossEntropyWithLogits(), (LOGITS, LABELS), lambda x, y: (
        -(y * x.softmax(1).log()).sum(1), x.softmax(1) - y,
    ), ((8, ((8, 1), (8, 1)), True), (8, ((4, 2), (4, 2)), False))),
    "SparseSoftmaxCrossEntropyWithLogits": Sample(
        P.SparseSoftmaxCrossEntropyWithLogits(), (LOGITS, i(6, 8)),
        lambda x, y: -x.softmax(1).log()[torch.arange(8), y].mean(),
        ((8, ((8, 1), (8,)), True), (8, ((4, 2), (4,)), False)),
    ),
    "SparseSoftmaxCrossEntropyWithLogits, gradient": Sample(
        P.SparseSoftmaxCrossEntropyWithLogits(True), (LOGITS, i(6, 8)),
        lambda x, y: (x.softmax(1) - F.one_hot(y, 6)) / 8, ((8, ((8, 1), (8,)), True),),
    ),
    "SigmoidCrossEntropyWithLogits": Sample(
        P.SigmoidCrossEntropyWithLogits(), (LOGITS, LABELS),
        lambda x, y: -y * x.sigmoid().log() - (1 - y) * (1 - x.sigmoid()).log(), ((4, TWO, True),),
    ),
    "BinaryCrossEntropy": Sample(
        P.BinaryCrossEntropy(), (LOGITS.sigmoid(), LABELS),
        lambda x, y: (-y * x.log() - (1 - y) * (1 - x).log()).mean(), ((4, TWO, True),),
    ),
    "BinaryCrossEntropy, weights": Sample(
        P.BinaryCrossEntropy("none"), (LOGITS.sigmoid(), LABELS, fixed(8, 6)),
        lambda x, y, w: w * (-y * x.log() - (1 - y) * (1 - x).log()), ((4, ((2, 2),) * 3, True),),
    ),
    "L2Loss": Sample(P.L2Loss(), (X,), lambda x: (x * x).sum() / 2, ((4, ((2, 2),), True),)),
    # images
    "Conv2D, valid": Sample(P.Conv2D(8, 3), (IMAGES, KERNEL), conv, (
        (8, ((2, 2, 1, 1), (2, 2, 1, 1)), True), (8, ((2, 1, 1, 2), (2, 1, 1, 1)), False),
    )),
    "Conv2D, same": Sample(P.Conv2D(8, 3, pad_mode="same"), (IMAGES, KERNEL), lambda x, w: conv(x, w, (1, 1, 1, 1)), (
        (16, ((2, 2, 2, 1), (2, 2, 1, 1)), True),
    )),
    "Conv2D, same, even kernel": Sample(
        P.Conv2D(8, 2, pad_mode="same"), (IMAGES, KERNEL[..., 1:, 1:]), lambda x, w: conv(x, w, (0, 1, 0, 1)),
        ((8, ((8, 1, 1, 1), (1, 1, 1, 1)), True),),
    ),
    "Conv2D, same, stride 2": Sample(
        P.Conv2D(8, 3, pad_mode="same", stride=2), (IMAGES, KERNEL), lambda x, w: conv(x, w, (0, 1, 0, 1), stride=2),
        ((8, ((2, 2, 1, 1), (2, 2, 1, 1)), True), (8, ((2, 1, 2, 1), (2, 1, 1, 1)), True)),
    ),
    "Conv2D, pad, dilation": Sample(
        P.Conv2D(8, 3, pad_mode="pad", pad=(1, 2, 0, 1), dilation=2), (IMAGES, KERNEL),
        lambda x, w: conv(x, w, (0, 1, 1, 2), dilation=2), ((4, ((2, 1, 1, 1), (2, 1, 1, 1)), True),),
    ),
    "Conv2D, group": Sample(
        P.Conv2D(8, 3, pad_mode="same", group=2), (IMAGES, KERNEL[:, :4]),
        lambda x, w: conv(x, w, (1, 1, 1, 1), groups=2),
        ((8, ((2, 1, 2, 2), (1, 1, 1, 1)), True),),
    ),
    "Conv2DTranspose": Sample(
        P.Conv2DTranspose(8, 3, "same", stride=2), (IMAGES[..., :4, :4], KERNEL, (8, 8, 8, 8)), transposed,
        ((4, ((4, 1, 1, 1), (1, 1, 1, 1)), True),),
    ),
    "Conv2DBackpropInput": Sample(
        P.Conv2DBackpropInput(8, 3, "same", stride=2), (IMAGES[..., :4, :4], KERNEL, (8, 8, 8, 8)), transposed,
        ((4, ((4, 1, 1, 1), (1, 1, 1, 1)), True),),
    ),
    "MaxPool": Sample(
        P.MaxPool(3, 2, "same"), (IMAGES,), lambda x: F.max_pool2d(F.pad(x, (0, 1, 0, 1), value=-1e9), 3, 2),
        ((4, ((2, 2, 1, 1),), True),),
    ),
    "MaxPool, valid": Sample(P.MaxPool(2, 2), (IMAGES,), lambda x: x.reshape(8, 8, 4, 2, 4, 2).amax((3, 5)), (
        (8, ((2, 2, 2, 1),), True),
    )),
    "AvgPool": Sample(P.AvgPool(3, 2, "same"), (IMAGES,), lambda x: average_inside(x, 3, 2, (0, 1, 0, 1)), (
        (4, ((2, 2, 1, 1),), True),
    )),
    "AvgPool, valid": Sample(P.AvgPool(2, 2), (IMAGES,), lambda x: x.reshape(8, 8, 4, 2, 4, 2).mean((3, 5)), (
        (8, ((2, 2, 2, 1),), True),
    )),
}  # fmt: skip
