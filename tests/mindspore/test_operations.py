"""Every primitive against the formula, eagerly; and split by its strategy against one device, forward and gradients."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

import shardwise.mindspore as ms
from mindspore.applied import Applied, equal_to_one_device
from mindspore.operator_samples import IDS, ROW, SAMPLES, TABLE, X, Y, i, r
from raising import raises
from shardwise.mindspore.ops import operations as P

SPLIT = [(name, *split) for name, sample in SAMPLES.items() for split in sample.splits]
ELSEWHERE = {"Dropout", "Shape"}  # below
OTHERS = ("communication", "simple")  # test_communication, test_names
NUMPYS = {own for own in vars(np).values() if isinstance(own, np.ufunc)} | {np.round}


def test_every_primitive_has_a_sample() -> None:
    found = [getattr(P, name) for name in P.__all__]
    primitives = {
        own.__name__
        for own in found
        if isinstance(own, type) and issubclass(own, P.Primitive) and not own.__module__.endswith(OTHERS)
    }
    assert primitives - {"Primitive"} == {sample.operator.name for sample in SAMPLES.values()} | ELSEWHERE


@pytest.mark.parametrize("name", SAMPLES)
def test_a_primitive_computes_its_formula(name: str) -> None:
    sample = SAMPLES[name]
    found = pytree.tree_leaves(sample.operator(*sample.args))
    args = [own.numpy() if isinstance(own, Tensor) and sample.formula in NUMPYS else own for own in sample.args]
    want = [
        own.as_subclass(Tensor) if isinstance(own, Tensor) else torch.from_numpy(np.array(own))
        for own in pytree.tree_leaves(sample.formula(*args))
    ]
    assert len(found) == len(want)
    for own, other in zip(found, want, strict=True):
        torch.testing.assert_close(own.as_subclass(Tensor), other, rtol=1e-9, atol=1e-8 if "L2N" in name else 1e-11)


@pytest.mark.parametrize(("name", "devices", "strategy", "strict"), SPLIT, ids=[f"{s[0]} {s[2]}" for s in SPLIT])
@pytest.mark.sampled(60)
def test_a_split_primitive_equals_one_device(name: str, devices: int, strategy: Any, strict: bool) -> None:
    sample = SAMPLES[name]
    sample.operator.shard(strategy)
    try:
        equal_to_one_device(Applied(sample.operator, sample.args), (), devices, strict=strict)
    finally:
        sample.operator.in_strategy = None


def test_dropout_keeps_the_share_and_scales_it() -> None:
    x = torch.ones(100, 100)
    y, kept = P.Dropout(keep_prob=0.8)(x)
    assert 0.75 < kept.double().mean() < 0.85
    assert torch.equal(y, torch.where(kept.bool(), 1 / 0.8, 0.0))
    equal_to_one_device(Applied(P.Dropout(0.7).shard(((2, 2),)), (r(8, 12),)), (), 4)
    with raises(ValueError, "keep_prob is 0"):
        P.Dropout(keep_prob=0)


def test_the_batch_norm_of_training_mixes_its_statistics_into_the_moving_ones() -> None:
    x, mean, variance = r(8, 4, 6), torch.zeros(4, dtype=torch.float64), torch.ones(4, dtype=torch.float64)
    y, *_ = P.BatchNorm(is_training=True, momentum=0.3)(
        x, torch.ones(4).double(), torch.zeros(4).double(), mean, variance
    )
    own = x.transpose(0, 1).flatten(1)
    centred = (x - own.mean(1)[:, None]) / (own.var(1, correction=0)[:, None] + 1e-5).sqrt()
    torch.testing.assert_close(y, centred)
    torch.testing.assert_close(mean, 0.3 * own.mean(1))
    torch.testing.assert_close(variance, 0.7 + 0.3 * own.var(1))


def test_shape_is_a_tuple() -> None:
    assert P.Shape()(X) == (8, 12)


def test_lower_case_functions_are_those_of_the_primitives() -> None:
    pairs = {
        "add": ((X, Y), P.Add()), "div": ((X, Y), P.Div()), "mul": ((X, Y), P.Mul()),
        "matmul": ((X, r(12, 8)), P.MatMul()), "batch_matmul": ((r(2, 3, 4), r(2, 4, 3)), P.BatchMatMul()),
        "softmax": ((X, 0), lambda x, axis: P.Softmax(axis)(x)),
        "log_softmax": ((X,), P.LogSoftmax()), "cast": ((X, torch.float32), P.Cast()),
        "squeeze": ((r(8, 1),), P.Squeeze()),
        "broadcast_to": ((X, (2, 8, 12)), lambda x, shape: P.BroadcastTo(shape)(x)), "concat": (((X, Y),), P.Concat()),
        "stack": (((X, Y),), P.Stack()), "unstack": ((X,), P.Unstack()),
        "split": ((X, 6, 1), lambda x, size, axis: P.Split(axis, 12 // size)(x)),
        "strided_slice": ((X, (0, 0), (4, 4), (1, 2)), P.StridedSlice()), "reduce_sum": ((X, 1), P.ReduceSum()),
        "reduce_mean": ((X,), P.ReduceMean()), "mean": ((X, 0), P.ReduceMean()), "sum": ((X,), P.ReduceSum()),
        "reduce_max": ((X, 1, True), lambda x, axis, keep: P.ReduceMax(keep)(x, axis)),
        "reduce_min": ((X, 1), P.ReduceMin()),
        "argmax": ((X, -1), lambda x, axis: P.Argmax(axis, torch.int64)(x)),
        "topk": ((X, 2), P.TopK()), "cumsum": ((X, 1), P.CumSum()),
        "gather": ((TABLE, IDS, 0), P.Gather()), "one_hot": ((i(4, 6), 4, 1.0, 0.0), P.OneHot()),
        "maximum": ((X, Y), P.Maximum()),
        "layer_norm": ((X, ROW, ROW), P.LayerNorm()),
        "identity": ((X,), P.Identity()),
        "full": (((2, 3), 1.5), lambda shape, value: P.Fill()(torch.float32, shape, value)),
        "gelu": ((X, "tanh"), lambda x, _: P.GeLU()(x)),
    }  # fmt: skip
    for name, (args, primitive) in pairs.items():
        for own, other in zip(
            pytree.tree_leaves(getattr(ms.ops, name)(*args)), pytree.tree_leaves(primitive(*args)), strict=True
        ):
            torch.testing.assert_close(own, other, msg=name)
    assert torch.equal(ms.ops.dropout(X, 0.5, training=False), X)


def test_wrong_arguments_of_operators_are_refused_with_the_numbers() -> None:
    with raises(ValueError, "12 in 5 parts: 12 % 5 = 2"):
        P.Split(1, 5)(X)
    with raises(ValueError, "dim 0, which has size 8"):
        P.Squeeze(0)(X)
    with raises(ValueError, 'pad_mode is "full"', "pad, same, valid"):
        P.Conv2D(8, 3, pad_mode="full")
    assert P.Conv2D(8, 3, stride=(1, 1, 2, 3)).stride == (2, 3)
    for stride, words in (((2, 2, 1, 1), ("first two are not 1", "(1, 1, 1, 1)")), ((1, 2, 2), ("(1, 2, 2)", "or two")),
                          (0, "whole numbers from 1"), ((1, True), "whole numbers from 1")):  # fmt: skip
        with raises(ValueError, f"stride is {stride}", words):
            P.Conv2D(8, 3, stride=stride)
    with raises(ValueError, "pad is 1 with pad_mode 'valid'"):
        P.Conv2D(8, 3, pad=1)
    with raises(ValueError, 'reduction is "max"'):
        P.BinaryCrossEntropy("max")
    for operator in (lambda: P.Conv2D(8, 3, data_format="NHWC"), lambda: P.MaxPool(data_format="NHWC"),
                     lambda: P.BatchNorm(data_format="NHWC")):  # fmt: skip
        with raises(NotImplementedError, "NHWC"):
            operator()
    with raises(TypeError, "True or False"):
        P.ReLU().recompute("yes")


# ----------------------------------------------------------------------------------------------- functions of functions


def test_maps_overloads_and_gradient_operations() -> None:
    scale = ms.ops.MultitypeFuncGraph("scale")

    @scale.register("Tensor", "Number")
    def _tensor(x: Tensor, factor: float) -> Tensor:
        return x * factor

    @scale.register("Tuple", "Number")
    def _tuple(own: tuple[Tensor, ...], factor: float) -> Any:
        return tuple(x * factor for x in own)

    assert torch.equal(ms.ops.HyperMap()(scale, [X, Y], [2.0, 3.0])[1], 3 * Y)
    nested = ms.ops.HyperMap()(lambda x: x + 1, [(X, Y), X])
    assert torch.equal(nested[0][1], Y + 1)
    assert torch.equal(ms.ops.Map(lambda x, y: x - y)([X], [Y])[0], X - Y)
    assert torch.equal(scale((X, Y), 2)[1], 2 * Y)
    with raises(TypeError, "scale has no body for (str, int)"):
        scale("x", 1)
    weight = ms.Parameter(r(12, 3), "w")
    net = Product(weight)
    (found,) = ms.ops.GradOperation(get_by_list=True)(net, [weight])(X)
    torch.testing.assert_close(found, X.sum(0)[:, None].expand(12, 3), check_dtype=True)
    own = ms.ops.GradOperation()(net)(X)
    torch.testing.assert_close(own.as_subclass(Tensor), weight.detach().sum(1).expand(8, 12))
    scaled = ms.ops.GradOperation(get_all=True, sens_param=True)(net)(X, 2.0)
    torch.testing.assert_close(scaled[0].as_subclass(Tensor), 2 * weight.detach().sum(1).expand(8, 12))
    both = ms.ops.GradOperation(sens_param=True)(lambda x: (x * x, 3 * x))(X, (Y, 2.0))  # a sensitivity per output
    torch.testing.assert_close(both.as_subclass(Tensor), 2 * X * Y + 6)
    with raises(ValueError, "GradOperation(get_by_list=True)", "has no weights"):
        ms.ops.GradOperation(get_by_list=True)(net)


class Product(ms.nn.Cell):
    def __init__(self, weight: Any) -> None:
        super().__init__()
        self.weight, self.matmul = weight, P.MatMul()

    def construct(self, x: Tensor) -> Tensor:
        return self.matmul(x, self.weight)
