"""What cells do beyond ``construct``: their own backward, constants, other precisions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import shardwise as sw
import shardwise.mindspore as ms
from mindspore.applied import equal_to_one_device
from raising import raises


def parameter(*shape: int) -> ms.Parameter:
    numbers = np.random.RandomState(len(shape))
    return ms.Parameter(ms.Tensor(numbers.normal(0, 0.5, shape)), "w")


# ------------------------------------------------------------------------------------------------ a backward of its own


class Clipped(ms.nn.Cell):
    """x * scale, whose gradient is cut to +-limit: no derivative of it."""

    def __init__(self, scale: float, limit: float) -> None:
        super().__init__()
        self.scale, self.limit, self.mul = scale, limit, ms.ops.Mul()

    def construct(self, x: Tensor) -> Tensor:
        return self.mul(x, self.scale).copy()  # type: ignore[operator]  # in the reference's words

    def bprop(self, x: Tensor, out: Tensor, dout: Tensor) -> tuple[Tensor]:
        return (dout.clamp(-self.limit, self.limit) + 0 * out.astype(x.dtype),)  # type: ignore[operator]


class Swapped(ms.nn.Cell):
    """(x + y, x - y), with gradients that name each other's cotangent."""

    def construct(self, x: Tensor, factor: float, y: Tensor) -> tuple[Tensor, Tensor]:
        return x + factor * y, x - y

    def bprop(self, x: Tensor, factor: float, y: Tensor, out: Any, dout: Any) -> tuple[Any, ...]:
        return dout[1] * y, None, dout[0] * out[0] * factor


class Clipping(ms.nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.w, self.matmul = parameter(8, 4), ms.ops.MatMul().shard(((2, 2), (2, 1)))
        self.clipped, self.twice = Clipped(3.0, 0.25), Clipped(2.0, 0.5)

    def construct(self, x: Tensor) -> Tensor:
        return self.twice(self.clipped(self.matmul(x, self.w))).square().sum()


def by_formula(net: Clipping, x: Tensor) -> tuple[float, Tensor]:
    y = x @ net.w.detach()
    top = (2 * 6 * y).clamp(-0.5, 0.5)
    return float((6 * y).square().sum()), x.T @ top.clamp(-0.25, 0.25)


def test_a_bprop_is_the_backward_of_its_cell() -> None:
    net, x = Clipping(), torch.randn(6, 8, dtype=torch.float64)
    loss, (gradient,) = ms.value_and_grad(net, None, net.trainable_params())(x)
    want, want_gradient = by_formula(net, x)
    assert loss.item() == pytest.approx(want, rel=1e-12)
    torch.testing.assert_close(gradient.as_subclass(Tensor), want_gradient, rtol=1e-12, atol=1e-12)
    x, y = torch.randn(2, 3, dtype=torch.float64).unbind()
    swapped = Swapped()

    def both(x: Tensor, y: Tensor) -> Tensor:
        plus, minus = swapped(x, 2.0, y)
        return 3 * plus.sum() + 5 * minus.sum()

    dx, dy = ms.grad(both, (0, 1))(x, y)
    torch.testing.assert_close(dx.as_subclass(Tensor), 5 * y)
    torch.testing.assert_close(dy.as_subclass(Tensor), 3 * (x + 2 * y) * 2)
    torch.testing.assert_close(ms.grad(Clipped(1.0, 0.5))(torch.ones(3)).as_subclass(Tensor), torch.full((3,), 0.5))


def test_a_bprop_is_the_backward_on_splits_too() -> None:
    pytest.importorskip("shardwise.graph.function_operator", reason="functions are not captured as operators yet")
    net, x = Clipping(), torch.randn(4, 8, dtype=torch.float64)
    plan = equal_to_one_device(net, (x,), 4)
    assert "m@data.0 k@data.1" in plan.strategies["/matmul"]


class WithParameter(Clipped):
    def __init__(self) -> None:
        super().__init__(1.0, 1.0)
        self.w = parameter(3)


def test_a_bprop_that_could_not_be_honoured_is_refused() -> None:
    with raises(TypeError, "the parameter w, whose gradient bprop cannot return", op="WithParameter"):
        WithParameter()(torch.ones(3))
    with raises(TypeError, "has a bprop and a forward"):
        type("Both", (ms.nn.Cell,), {"forward": lambda self, x: x, "bprop": lambda self, x, out, dout: dout})
    with raises(TypeError, "bprop is assigned to a SequentialCell", fix="define it in the class"):
        ms.nn.SequentialCell().bprop = lambda x, out, dout: dout
    short = type("Short", (Swapped,), {"bprop": lambda self, x, factor, y, out, dout: (dout[0],)})
    with raises(ValueError, "1 gradients for 3 inputs", op="Short"):
        ms.grad(lambda x: short()(x, 1.0, x)[0])(torch.ones(3))
    flat = type("Flat", (Clipped,), {"bprop": lambda self, x, out, dout: dout.sum()})
    with raises(ValueError, "returned [] as the gradient of input 0", "[3]", op="Flat"):
        ms.grad(flat(1.0, 1.0))(torch.ones(3))


# ----------------------------------------------------------------------------------------------------------- constants


class Constants(ms.nn.Cell):
    """Tensors as attributes, in a list, and made in ``construct``."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.matmul = parameter(8, 4), ms.ops.MatMul().shard(((2, 2), (2, 1)))
        self.k, self.rows = ms.Tensor(2.0), [ms.Tensor(np.arange(4.0)), ms.Tensor(np.ones(4))]

    def construct(self, x: Tensor) -> Tensor:
        y = self.matmul(x * self.k, self.w) * self.rows[0] + self.rows[1]
        return (y * ms.Tensor(3.0) + ms.Tensor(np.array([1.0, 2, 3, 4]))).square().sum()


@pytest.mark.parametrize("mode", ["semi_auto", "auto"])
def test_constants_of_a_cell_are_those_of_one_device(mode: str) -> None:
    net, x = Constants(), torch.randn(4, 8, dtype=torch.float64)
    want = (((x * 2) @ net.w.detach() * torch.arange(4) + 1) * 3 + torch.arange(1.0, 5)).square().sum()
    assert net(x).item() == pytest.approx(want.item(), rel=1e-12)
    if mode == "semi_auto":
        equal_to_one_device(net, (x,), 4)
        return
    net.matmul.in_strategy = None
    ms.set_auto_parallel_context(parallel_mode="auto_parallel", device_num=4)
    plan = sw.plan(net, (x,), 4)
    assert sw.verify(net, (x,), plan, steps=1).ok


# ---------------------------------------------------------------------------------------------------------- precisions


class Mixed(ms.nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.dense, self.norm = ms.nn.Dense(8, 4), ms.nn.BatchNorm1d(4)
        self.inner = torch.nn.Linear(4, 4)

    def construct(self, x: Tensor) -> Tensor:
        self.seen = [self.dense(x)]
        self.seen += [self.norm(self.seen[-1])]
        self.seen += [self.inner(self.seen[-1])]
        return self.seen[-1]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_to_float_casts_where_values_are_used_and_keeps_the_parameters(dtype: torch.dtype) -> None:
    net, x = Mixed().to_float(dtype).set_train(), torch.randn(16, 8)
    masters = [p.detach().clone() for p in net.get_parameters()]
    step = ms.value_and_grad(lambda x: net(x).float().square().mean(), None, net.trainable_params())
    _, gradients = step(x)
    assert [own.dtype for own in net.seen] == [dtype] * 3
    assert {p.dtype for p in net.get_parameters()} == {own.dtype for own in gradients} == {torch.float32}
    assert all(isinstance(p, torch.nn.Parameter) for p in net.get_parameters())  # not the casts
    wide = Mixed().set_train()
    wide.load_state_dict(net.state_dict())
    _, want = ms.value_and_grad(lambda x: wide(x).square().mean(), None, wide.trainable_params())(x)
    for own, other in zip(gradients, want, strict=True):
        error = (own - other).abs().max() / want[0].abs().max()
        assert error < 32 * torch.finfo(dtype).eps  # a few roundings of the narrow dtype
    optimizer = ms.nn.Momentum(net.trainable_params(), 1e-5, 0.9)  # a float16 weight of 0.3 would not change
    optimizer(gradients)
    assert any(not torch.equal(p, before) for p, before in zip(net.get_parameters(), masters, strict=True))
    net.dense.to_float(torch.float32)
    net(x)
    assert [own.dtype for own in net.seen] == [torch.float32, dtype, dtype]
    with raises(ValueError, "to_float(torch.float64)", "net.to(dtype)", op="Mixed"):
        net.to_float(torch.float64)


def test_a_split_cell_computes_in_the_precision_of_to_float() -> None:
    net, x = ms.nn.Dense(8, 4).to_float(torch.float16), torch.randn(8, 8)
    plan = equal_to_one_device(net, (x,), 4)
    assert "f16[" in str(plan)


def test_stages_are_whole_numbers_that_cells_keep() -> None:
    net = Mixed()
    net.dense.pipeline_stage = 0
    assert (net.dense.pipeline_stage, net.inner is net.inner, net.pipeline_stage) == (0, True, None)
    for wrong in (-1, 1.0, True):
        with raises(ValueError, f"pipeline_stage is {wrong}", "a whole number from 0"):
            net.pipeline_stage = wrong


def test_a_hook_of_backward_is_given_the_gradients_of_inputs_and_outputs() -> None:
    dense, seen = ms.nn.Dense(2, 3), []

    def doubled(cell: Any, of_inputs: tuple[Tensor, ...], of_outputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        seen.append(([tuple(own.shape) for own in of_inputs], [tuple(own.shape) for own in of_outputs]))
        return (of_inputs[0] * 2,)

    handle, x = dense.register_backward_hook(doubled), ms.Tensor(np.ones((1, 2), np.float32))
    hooked = ms.grad(lambda own: dense(own).sum())(x)
    handle.remove()
    plain = ms.grad(lambda own: dense(own).sum())(x)
    assert seen == [([(1, 2)], [(1, 3)])]
    assert torch.equal(hooked, 2 * plain)
