"""Captured functions: one that is element-wise, by an in-place kernel, and one that is not."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rules.samples.calls import call, x
from shardwise.graph.function_operator import FUNCTION


class Cubed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.save_for_backward(x)
        ctx.factor = factor
        return (x * x).mul_(x) * factor

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        return 9 * x.square() * cotangent * ctx.factor, None


def _named(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


FUNCTIONS = [
    call(FUNCTION, [x(4, 6)], _named(Cubed), "({'operand'}, 0.5)", torch.float32),
]
