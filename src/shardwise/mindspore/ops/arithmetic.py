"""Operators on elements: of one operand, or of operands that are broadcast to each other."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch.nn import functional as F

from shardwise.mindspore.ops.primitive import Names, Primitive, Strategy, counted


class Elementwise(Primitive):
    """``function`` of one operand or of several, broadcast."""

    function: ClassVar[Callable[..., Any]]

    def compute(self, *args: Any) -> Any:
        return type(self).function(*args)

    def led(self, strategy: Strategy, *args: Any) -> Any:
        """Where several operators do the work, the result is split by the counts of all operands, and they follow."""
        rank = max(map(len, strategy))
        padded = ((1,) * (rank - len(counts)) + counts for counts in strategy)
        return counted(self.compute(*args), tuple(map(max, zip(*padded, strict=True))))

    def followed(self, names: Names, args: tuple[Any, ...]) -> frozenset[str]:
        return frozenset(name for own in names for name in own)


def _elementwise(name: str, function: Callable[..., Any], doc: str, *, single: bool = True) -> type[Elementwise]:
    """A primitive; ``single``: one operator of torch does the work."""
    body = {"function": staticmethod(function), "__doc__": doc, "__module__": __name__, "lead": None if single else 0}
    return type(name, (Elementwise,), body)


def _maximum(x: Any, y: Any) -> torch.Tensor:
    if isinstance(x, torch.Tensor) and isinstance(y, torch.Tensor):
        return torch.maximum(x, y)
    return x.clamp(min=y) if isinstance(x, torch.Tensor) else y.clamp(min=x)


def _minimum(x: Any, y: Any) -> torch.Tensor:
    if isinstance(x, torch.Tensor) and isinstance(y, torch.Tensor):
        return torch.minimum(x, y)
    return x.clamp(max=y) if isinstance(x, torch.Tensor) else y.clamp(max=x)


def _floor_div(x: Any, y: Any) -> torch.Tensor:
    return torch.div(x, y, rounding_mode="floor")


Add = _elementwise("Add", operator.add, "x + y")
TensorAdd = _elementwise("TensorAdd", operator.add, "The old name of Add.")
Sub = _elementwise("Sub", operator.sub, "x - y")
Mul = _elementwise("Mul", operator.mul, "x * y")
Div = _elementwise("Div", operator.truediv, "x / y")
RealDiv = _elementwise("RealDiv", operator.truediv, "x / y")
FloorDiv = _elementwise("FloorDiv", _floor_div, "x / y, rounded down.")
Mod = _elementwise("Mod", operator.mod, "What x // y leaves of x, with the sign of y.")
FloorMod = _elementwise("FloorMod", operator.mod, "What x // y leaves of x, with the sign of y.")
Pow = _elementwise("Pow", operator.pow, "x to the power of y.")
DivNoNan = _elementwise(
    "DivNoNan",
    lambda x, y: torch.where(y == 0, 0, x / torch.where(y == 0, 1, y)),
    "x / y, and 0 where y is 0.",
    single=False,
)
SquaredDifference = _elementwise("SquaredDifference", lambda x, y: (x - y).square(), "(x - y) squared.", single=False)
Maximum = _elementwise("Maximum", _maximum, "The larger of x and y.")
Minimum = _elementwise("Minimum", _minimum, "The smaller of x and y.")
Atan2 = _elementwise("Atan2", torch.atan2, "The angle of the point (y, x).")
Equal = _elementwise("Equal", operator.eq, "x == y")
NotEqual = _elementwise("NotEqual", operator.ne, "x != y")
Greater = _elementwise("Greater", operator.gt, "x > y")
GreaterEqual = _elementwise("GreaterEqual", operator.ge, "x >= y")
Less = _elementwise("Less", operator.lt, "x < y")
LessEqual = _elementwise("LessEqual", operator.le, "x <= y")
LogicalAnd = _elementwise("LogicalAnd", torch.logical_and, "x and y.")
LogicalOr = _elementwise("LogicalOr", torch.logical_or, "x or y.")
LogicalNot = _elementwise("LogicalNot", torch.logical_not, "not x.")
Select = _elementwise("Select", torch.where, "x where the condition holds, else y.")

ReLU = _elementwise("ReLU", torch.relu, "max(x, 0)")
ReLU6 = _elementwise("ReLU6", F.relu6, "min(max(x, 0), 6)")
GeLU = _elementwise("GeLU", lambda x: F.gelu(x, approximate="tanh"), "Gaussian error linear units, by tanh.")
Sigmoid = _elementwise("Sigmoid", torch.sigmoid, "1 / (1 + exp(-x))")
Tanh = _elementwise("Tanh", torch.tanh, "The hyperbolic tangent.")
Softplus = _elementwise("Softplus", F.softplus, "log(1 + exp(x))")
Softsign = _elementwise("Softsign", lambda x: x / (1 + x.abs()), "x / (1 + |x|)", single=False)
HSwish = _elementwise("HSwish", F.hardswish, "x * relu6(x + 3) / 6")
HSigmoid = _elementwise("HSigmoid", F.hardsigmoid, "relu6(x + 3) / 6")
SeLU = _elementwise("SeLU", F.selu, "Scaled exponential linear units.")
Mish = _elementwise("Mish", F.mish, "x * tanh(softplus(x))")
Exp = _elementwise("Exp", torch.exp, "e to the power of x.")
Expm1 = _elementwise("Expm1", torch.expm1, "exp(x) - 1")
Log = _elementwise("Log", torch.log, "The natural logarithm.")
Log1p = _elementwise("Log1p", torch.log1p, "log(1 + x)")
Sqrt = _elementwise("Sqrt", torch.sqrt, "The square root.")
Rsqrt = _elementwise("Rsqrt", torch.rsqrt, "1 / sqrt(x)")
Square = _elementwise("Square", torch.square, "x * x")
Reciprocal = _elementwise("Reciprocal", torch.reciprocal, "1 / x")
Inv = _elementwise("Inv", torch.reciprocal, "1 / x")
Neg = _elementwise("Neg", torch.neg, "-x")
Abs = _elementwise("Abs", torch.abs, "|x|")
Sign = _elementwise("Sign", torch.sign, "-1, 0 or 1.")
Sin = _elementwise("Sin", torch.sin, "The sine.")
Cos = _elementwise("Cos", torch.cos, "The cosine.")
Tan = _elementwise("Tan", torch.tan, "The tangent.")
Asin = _elementwise("Asin", torch.asin, "The inverse of the sine.")
ACos = _elementwise("ACos", torch.acos, "The inverse of the cosine.")
Atan = _elementwise("Atan", torch.atan, "The inverse of the tangent.")
Sinh = _elementwise("Sinh", torch.sinh, "The hyperbolic sine.")
Cosh = _elementwise("Cosh", torch.cosh, "The hyperbolic cosine.")
Floor = _elementwise("Floor", torch.floor, "Rounded down.")
Ceil = _elementwise("Ceil", torch.ceil, "Rounded up.")
Round = _elementwise("Round", torch.round, "Rounded to the nearest integer, halves to even ones.")
Rint = _elementwise("Rint", torch.round, "Rounded to the nearest integer, halves to even ones.")
Erf = _elementwise("Erf", torch.erf, "The error function.")
Erfc = _elementwise("Erfc", torch.erfc, "1 - erf(x)")
IsNan = _elementwise("IsNan", torch.isnan, "Where x is no number.")
IsInf = _elementwise("IsInf", torch.isinf, "Where x is infinite.")
IsFinite = _elementwise("IsFinite", torch.isfinite, "Where x is a finite number.")
ZerosLike = _elementwise("ZerosLike", torch.zeros_like, "Zeros in the shape of x.")
OnesLike = _elementwise("OnesLike", torch.ones_like, "Ones in the shape of x.")
Identity = _elementwise("Identity", torch.clone, "x", single=False)


class Cast(Elementwise):
    """``Cast()(x, dtype)``. Its own strategy counts, which the reference ignores."""

    def compute(self, x: Any, dtype: torch.dtype) -> Any:
        return (x if isinstance(x, torch.Tensor) else torch.as_tensor(x)).to(dtype)


class Elu(Elementwise):
    """x above 0, else alpha * (exp(x) - 1)."""

    def __init__(self, alpha: float = 1.0) -> None:
        super().__init__(alpha=alpha)
        self.alpha = alpha

    def compute(self, x: Any) -> Any:
        return F.elu(x, self.alpha)


class LeakyReLU(Elementwise):
    """x above 0, else alpha * x."""

    def __init__(self, alpha: float = 0.2) -> None:
        super().__init__(alpha=alpha)
        self.alpha = alpha

    def compute(self, x: Any) -> Any:
        return F.leaky_relu(x, self.alpha)


class AddN(Elementwise):
    """The sum of a tuple of tensors of one shape."""

    lead = 0

    def compute(self, tensors: Any) -> Any:
        total = tensors[0]
        for tensor in tensors[1:]:
            total = total + tensor
        return total


__all__ = [
    "ACos", "Abs", "Add", "AddN", "Asin", "Atan", "Atan2", "Cast", "Ceil", "Cos", "Cosh", "Div", "DivNoNan",
    "Elu", "Equal", "Erf", "Erfc", "Exp", "Expm1", "Floor", "FloorDiv", "FloorMod", "GeLU", "Greater",
    "GreaterEqual", "HSigmoid", "HSwish", "Identity", "Inv", "IsFinite", "IsInf", "IsNan", "LeakyReLU", "Less",
    "LessEqual", "Log", "Log1p", "LogicalAnd", "LogicalNot", "LogicalOr", "Maximum", "Minimum", "Mish", "Mod",
    "Mul", "Neg", "NotEqual", "OnesLike", "Pow", "ReLU", "ReLU6", "RealDiv", "Reciprocal", "Rint", "Round",
    "Rsqrt", "SeLU", "Select", "Sigmoid", "Sign", "Sin", "Sinh", "Softplus", "Softsign", "Sqrt", "Square",
    "SquaredDifference", "Sub", "Tan", "Tanh", "TensorAdd", "ZerosLike",
]  # fmt: skip
