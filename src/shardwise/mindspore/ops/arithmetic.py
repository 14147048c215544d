"""Elementwise operators of one operand, or of operands that are broadcast to each other."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F

from shardwise.mindspore.named import classes_of
from shardwise.mindspore.ops.primitive import Names, OfSettings, Plain, Strategy, counted


class Elementwise(Plain):
    """An elementwise operator: ``function`` of one or several operands, broadcast."""

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


ELEMENTS: dict[str, Callable[..., Any]] = {
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
    "RealDiv": operator.truediv, "Mod": operator.mod, "FloorMod": operator.mod, "Pow": operator.pow,
    "FloorDiv": lambda x, y: torch.div(x, y, rounding_mode="floor"), "Maximum": _maximum, "Minimum": _minimum,
    "Equal": operator.eq, "NotEqual": operator.ne, "Greater": operator.gt, "GreaterEqual": operator.ge,
    "Less": operator.lt, "LessEqual": operator.le,
}  # fmt: skip
COMPOSED: dict[str, Callable[..., Any]] = {  # made of several torch operators
    "DivNoNan": lambda x, y: torch.where(y == 0, 0, x / torch.where(y == 0, 1, y)),
    "Identity": torch.clone,
    "Softsign": lambda x: x / (1 + x.abs()),
    "SquaredDifference": lambda x, y: (x - y).square(),
}


def _elementwise(name: str, function: Callable[..., Any]) -> type[Elementwise]:
    doc = f"The reference's ``{name}``, elementwise."
    body = {"function": staticmethod(function), "lead": 0 if name in COMPOSED else None}
    return type(name, (Elementwise,), {**body, "__doc__": doc, "__module__": __name__})


PRIMITIVES = {name: _elementwise(name, function) for name, function in (ELEMENTS | COMPOSED).items()}
globals().update(PRIMITIVES)


class Cast(Elementwise):
    """A cast: ``Cast()(x, dtype)``. Its own strategy has an effect; the reference ignores it."""

    def compute(self, x: Any, dtype: torch.dtype) -> Any:
        return (x if isinstance(x, torch.Tensor) else torch.as_tensor(x)).to(dtype)


class _WithAlpha(OfSettings, Elementwise):
    """An elementwise operator with settings."""

    def compute(self, *args: Any) -> Any:
        return type(self).function(*args, **self._chosen())


ACTIVATIONS = classes_of({
    "Elu": ("x above 0, else alpha * (exp(x) - 1).", lambda x, *, alpha=1.0: F.elu(x, alpha)),
    "LeakyReLU": ("x above 0, else alpha * x.", lambda x, *, alpha=0.2: F.leaky_relu(x, alpha)),
}, _WithAlpha, __name__)  # fmt: skip
globals().update(ACTIVATIONS)


class AddN(Elementwise):
    """The sum of a tuple of tensors of one shape."""

    lead = 0

    def compute(self, tensors: Any) -> Any:
        total = tensors[0]
        for tensor in tensors[1:]:
            total = total + tensor
        return total


__all__ = ["AddN", "Cast", *ACTIVATIONS, *PRIMITIVES]
