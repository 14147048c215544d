"""Activations as cells, each around a primitive, and by name: ``Dense(..., activation="relu")``."""

from __future__ import annotations

from typing import Any

from torch.nn import functional as F

from shardwise.errors import problem
from shardwise.mindspore.checks import closest
from shardwise.mindspore.common.initializer import initializer
from shardwise.mindspore.nn.cell import Cell
from shardwise.mindspore.ops import arithmetic
from shardwise.mindspore.ops.normalization import LogSoftmax as LogSoftmaxOperator
from shardwise.mindspore.ops.normalization import Softmax as SoftmaxOperator
from shardwise.mindspore.ops.primitive import Primitive
from shardwise.mindspore.tensor import Parameter


class _Activation(Cell):
    operator: type[Primitive]

    def __init__(self) -> None:
        super().__init__()
        self.primitive = self.operator()

    def construct(self, x: Any) -> Any:
        return self.primitive(x)


_OPERATORS = (arithmetic.ReLU, arithmetic.ReLU6, arithmetic.Sigmoid, arithmetic.Tanh, arithmetic.HSwish,
              arithmetic.HSigmoid, arithmetic.Mish)  # fmt: skip
ReLU, ReLU6, Sigmoid, Tanh, HSwish, HSigmoid, Mish = (
    type(own.__name__, (_Activation,), {"operator": own, "__module__": __name__, "__doc__": own.__doc__})
    for own in _OPERATORS
)


class GELU(Cell):
    """Gaussian error linear units: by tanh (``approximate``), or exact."""

    def __init__(self, approximate: bool = True) -> None:
        super().__init__()
        self.approximate = "tanh" if approximate else "none"

    def construct(self, x: Any) -> Any:
        return F.gelu(x, approximate=self.approximate)


class ELU(Cell):
    """x above 0, else alpha * (exp(x) - 1)."""

    def __init__(self, alpha: float = 1.0) -> None:
        super().__init__()
        self.elu = arithmetic.Elu(alpha)

    def construct(self, x: Any) -> Any:
        return self.elu(x)


class LeakyReLU(Cell):
    """x above 0, else alpha * x."""

    def __init__(self, alpha: float = 0.2) -> None:
        super().__init__()
        self.leaky_relu = arithmetic.LeakyReLU(alpha)

    def construct(self, x: Any) -> Any:
        return self.leaky_relu(x)


class PReLU(Cell):
    """x above 0, else w * x, where w is learned, for all channels or for each."""

    def __init__(self, channel: int = 1, w: Any = 0.25) -> None:
        super().__init__()
        self.w = Parameter(initializer(w, [channel]), "a")

    def construct(self, x: Any) -> Any:
        return F.prelu(x, self.w)


class Softmax(Cell):
    """exp(x) over its sum along ``axis``."""

    def __init__(self, axis: int = -1) -> None:
        super().__init__()
        self.softmax = SoftmaxOperator(axis)

    def construct(self, x: Any) -> Any:
        return self.softmax(x)


class LogSoftmax(Cell):
    """The logarithm of Softmax."""

    def __init__(self, axis: int = -1) -> None:
        super().__init__()
        self.log_softmax = LogSoftmaxOperator(axis)

    def construct(self, x: Any) -> Any:
        return self.log_softmax(x)


_NAMED: dict[str, type[Cell]] = {
    "elu": ELU, "gelu": GELU, "hsigmoid": HSigmoid, "hswish": HSwish, "leakyrelu": LeakyReLU, "logsoftmax": LogSoftmax,
    "mish": Mish, "prelu": PReLU, "relu": ReLU, "relu6": ReLU6, "sigmoid": Sigmoid, "softmax": Softmax, "tanh": Tanh,
}  # fmt: skip


def get_activation(name: str) -> Cell:
    """The activation of that name. Raises ValueError for another."""
    from shardwise.mindspore.nn.simple import CLASSES

    known = _NAMED | {own.lower(): CLASSES[own] for own in ("CELU", "FastGelu", "LogSigmoid", "SiLU", "SeLU")}
    if name not in known:
        raise ValueError(problem(f'there is no activation "{name}"', fix=closest(name, known)))
    return known[name]()


__all__ = [
    "ELU", "GELU", "HSigmoid", "HSwish", "LeakyReLU", "LogSoftmax", "Mish", "PReLU", "ReLU", "ReLU6", "Sigmoid",
    "Softmax", "Tanh", "get_activation",
]  # fmt: skip
