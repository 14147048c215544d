"""Elementwise operators of one operand, or of operands that are broadcast to each other."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.nn import functional as F

from shardwise.mindspore.named import classes_of
from shardwise.mindspore.ops.primitive import Names, Simple, counted
from shardwise.mindspore.strict import Strategy


class Elementwise(Simple):
    """An elementwise operator: ``function`` of one or several operands, broadcast."""

    lead = None

    def led(self, strategy: Strategy, *args: Any) -> Any:
        """Split the result by the counts of all operands. The operators inside follow it."""
        rank = max(map(len, strategy))
        padded = ((1,) * (rank - len(counts)) + counts for counts in strategy)
        return counted(self.compute(*args), tuple(map(max, zip(*padded, strict=True))))

    def followed(self, names: Names, args: tuple[Any, ...]) -> frozenset[str]:
        return frozenset(name for operand_names in names for name in operand_names)


def _maximum(x: Any, y: Any) -> torch.Tensor:
    if isinstance(x, torch.Tensor) and isinstance(y, torch.Tensor):
        return torch.maximum(x, y)
    return x.clamp(min=y) if isinstance(x, torch.Tensor) else y.clamp(min=x)


def _minimum(x: Any, y: Any) -> torch.Tensor:
    if isinstance(x, torch.Tensor) and isinstance(y, torch.Tensor):
        return torch.minimum(x, y)
    return x.clamp(max=y) if isinstance(x, torch.Tensor) else y.clamp(max=x)


def _truncated(x: Any, y: Any) -> torch.Tensor:
    """Return the remainder with the sign of ``x``, as in C."""
    return torch.fmod(*(v if isinstance(v, torch.Tensor) else torch.as_tensor(v) for v in (x, y)))


ELEMENTS: dict[str, Any] = {
    **{name: getattr(torch, name.lower()) for name in (
        "ACos", "Abs", "Asin", "Atan", "Atan2", "Ceil", "Cos", "Cosh", "Erf", "Erfc", "Exp", "Expm1", "Floor",
        "IsFinite", "IsInf", "IsNan", "Log", "Log1p", "Neg", "ReLU", "Reciprocal", "Round", "Rsqrt", "Sigmoid", "Sign",
        "Sin", "Sinh", "Sqrt", "Square", "Tan", "Tanh")},
    "Inv": torch.reciprocal, "LogicalAnd": torch.logical_and, "LogicalNot": torch.logical_not,
    "LogicalOr": torch.logical_or, "OnesLike": torch.ones_like, "Rint": torch.round, "Select": torch.where,
    "ZerosLike": torch.zeros_like,
    "GeLU": lambda x: F.gelu(x, approximate="tanh"), "HSigmoid": F.hardsigmoid, "HSwish": F.hardswish, "Mish": F.mish,
    "ReLU6": F.relu6, "SeLU": F.selu, "Softplus": F.softplus,
    "Add": operator.add, "TensorAdd": operator.add, "Sub": operator.sub, "Mul": operator.mul, "Div": operator.truediv,
    "RealDiv": operator.truediv, "Mod": _truncated, "FloorMod": operator.mod, "Pow": operator.pow,
    "FloorDiv": lambda x, y: torch.div(x, y, rounding_mode="floor"), "Maximum": _maximum, "Minimum": _minimum,
    "Equal": operator.eq, "NotEqual": operator.ne, "Greater": operator.gt, "GreaterEqual": operator.ge,
    "Less": operator.lt, "LessEqual": operator.le,
    "Cast": ("A cast: ``Cast()(x, dtype)``. Its own strategy has an effect; the reference ignores it.",
             lambda x, dtype: (x if isinstance(x, torch.Tensor) else torch.as_tensor(x)).to(dtype)),
    "Elu": ("x above 0, else alpha * (exp(x) - 1).", lambda x, *, alpha=1.0: F.elu(x, alpha)),
    "LeakyReLU": ("x above 0, else alpha * x.", lambda x, *, alpha=0.2: F.leaky_relu(x, alpha)),
}  # fmt: skip
COMPOSED: dict[str, Any] = {  # made of several torch operators
    "AddN": ("The sum of a tuple of tensors of one shape.", lambda tensors: sum(tensors[1:], tensors[0])),
    "DivNoNan": lambda x, y: torch.where(y == 0, 0, x / torch.where(y == 0, 1, y)),
    "Identity": torch.clone,
    "Softsign": lambda x: x / (1 + x.abs()),
    "SquaredDifference": lambda x, y: (x - y).square(),
}
CLASSES = classes_of(ELEMENTS, Elementwise, __name__) | classes_of(COMPOSED, Elementwise, __name__, lead=0)
globals().update(CLASSES)

__all__ = list(CLASSES)
