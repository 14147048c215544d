"""torch.autograd.Function: captured as one operator with its own backward, or refused by the name of the class."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import shardwise as sw
from raising import raises
from shardwise.errors import CaptureError
from shardwise.graph.capture import capture
from shardwise.rules.tables import rule_of


class Scaled(torch.autograd.Function):
    """Its backward is not that of its forward: only the class itself knows it."""

    @staticmethod
    def forward(ctx, x, factor, y=None):
        ctx.save_for_backward(x)
        ctx.factor = factor
        return x * x * factor

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return 7 * gradient * x * ctx.factor, None, None


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(x):
        return x

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.shape = inputs[0].shape

    @staticmethod
    def backward(ctx, gradient):
        return -0.5 * gradient


class Normalized(torch.autograd.Function):
    """Not element-wise, with two results of which one has no gradient."""

    @staticmethod
    def forward(ctx, x, weight):
        norm = x.norm(dim=-1, keepdim=True)
        ctx.save_for_backward(x, weight, norm)
        ctx.mark_non_differentiable(norm)
        return weight * x / norm, norm

    @staticmethod
    def backward(ctx, gradient, _):
        x, weight, norm = ctx.saved_tensors
        return 3 * gradient * weight / norm, (gradient * x).sum(0)


class Clipped(torch.autograd.Function):
    """Nothing in forward, clipped in backward; in low precision on the way."""

    @staticmethod
    def forward(ctx, x, low, high):
        ctx.bounds = low, high
        return x.to(torch.float32).to(x.dtype).view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient.clamp(*ctx.bounds), None, None


class Centered(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.count = x.shape[0]
        return x / x.shape[0]

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.count


class Inner(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return Scaled.apply(x, 2.0)

    @staticmethod
    def backward(ctx, gradient):
        return gradient.sign()


bound_long_ago = Scaled.apply


class Net(nn.Module):
    def __init__(self, function, double=False):
        super().__init__()
        self.function = function
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)
        self.weight = nn.Parameter(torch.randn(8))

    def forward(self, x):
        return self.down(self.function(self, self.up(x))).square().mean()


FUNCTIONS = {
    "scaled": lambda net, x: Scaled.apply(x, 0.5),
    "bound": lambda net, x: bound_long_ago(x, 2, None),
    "reversed": lambda net, x: Reversed.apply(x),
    "normalized": lambda net, x: torch.mul(*Normalized.apply(x, net.weight)),
    "clipped": lambda net, x: Clipped.apply(x, -1e-2, math.inf),
    "centered": lambda net, x: Centered.apply(x),
    "inner": lambda net, x: Inner.apply(Reversed.apply(x)),
    "no gradient": lambda net, x: x + Scaled.apply(x.detach(), 1.0),
}
ELEMENTWISE = {"scaled", "bound", "reversed", "clipped", "inner", "no gradient"}


@pytest.mark.filterwarnings("ignore::shardwise.errors.UnsplitWarning")
@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.sampled(2)
def test_a_function_is_one_operator_with_its_own_backward_under_every_plan(name):
    net, x = Net(FUNCTIONS[name]), torch.randn(8, 4)
    graph = capture(net, (x,)).graph
    functions = [op for op in graph.ops if str(op.target) == "shardwise.function.default"]
    assert len(functions) == (2 if name == "inner" else 1)
    assert functions[0].source.startswith("test_functions.py")
    assert (rule_of(functions[0], graph) is not None) == (name in ELEMENTWISE)
    for options in ({"mode": "data_parallel", "mesh": sw.Mesh(dp=2)}, {"strategies": {"up": "m@dp n@tp"}}, {}):
        plan = sw.plan(net, x, options.get("mesh", sw.Mesh(dp=2, tp=2)).num_devices, **{
            **({"mesh": sw.Mesh(dp=2, tp=2)} if "strategies" in options else {}), **options})  # fmt: skip
        report = sw.verify(net, x, plan)
        assert report.ok, (options, report)
    if name in ELEMENTWISE:
        plan = sw.plan(net, x, 4, mesh=sw.Mesh(dp=2, tp=2), strategies={"up": "m@dp n@tp"})
        assert plan.strategies[functions[0].name] == "d0@dp d1@tp"


def test_outside_of_capture_classes_are_what_they_were():
    before = dict(vars(Scaled)), dict(vars(Reversed))
    capture(Net(FUNCTIONS["inner"]), (torch.randn(8, 4),))
    assert (dict(vars(Scaled)), dict(vars(Reversed))) == before


def made(factor):
    class Made(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * factor

        @staticmethod
        def backward(ctx, gradient):
            return gradient * factor

    return Made


class Reads(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient if gradient.sum() > 0 else 0 * gradient


class Writes(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class Drops(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * torch.rand_like(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class Takes(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, options):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


REFUSED = {
    "data in backward": (lambda net, x: Reads.apply(x), "Reads"),
    "in place": (lambda net, x: Writes.apply(x * 1), "Writes"),
    "random": (lambda net, x: Drops.apply(x), ("Drops", "random")),
    "object": (lambda net, x: Takes.apply(x, nn.Linear(1, 1)), ("Takes", "Linear")),
    "tensors inside": (lambda net, x: Takes.apply(x, [x]), ("Takes", "FakeTensor")),
    "one name": (lambda net, x: made(2.0).apply(made(3.0).apply(x)), ("made.<locals>.Made", "several")),
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_functions_are_refused_by_name_and_line(name):
    function, message = REFUSED[name]
    with raises(CaptureError, message, source="test_functions.py"):
        capture(Net(function), (torch.randn(8, 4),))
