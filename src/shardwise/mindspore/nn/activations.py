"""Activations as cells, each wrapping a primitive, and by name: ``Dense(..., activation="relu")``."""

from __future__ import annotations

from inspect import signature
from typing import Any

from torch.nn import functional as F

from shardwise.errors import problem
from shardwise.mindspore.checks import closest
from shardwise.mindspore.common.initializer import initializer
from shardwise.mindspore.named import constructor
from shardwise.mindspore.nn.cell import Cell
from shardwise.mindspore.nn.simple import CLASSES as FURTHER
from shardwise.mindspore.ops import arithmetic, reductions
from shardwise.mindspore.ops.primitive import Inner, Primitive
from shardwise.mindspore.ops.simple import PRIMITIVES
from shardwise.mindspore.tensor import Parameter


class _Activation(Cell):
    """A cell that holds its operator under ``attribute``, where it may be given a strategy."""

    operator: type[Primitive]
    attribute: str

    def __init__(self, *settings: Any, **named: Any) -> None:
        super().__init__()
        setattr(self, self.attribute, self.operator(*settings, **named))

    def construct(self, x: Any) -> Any:
        return getattr(self, self.attribute)(x)


_OPERATORS: dict[str, tuple[str, type[Primitive]]] = {
    "ELU": ("elu", arithmetic.CLASSES["Elu"]), "FastGelu": ("fast_gelu", PRIMITIVES["FastGeLU"]),
    "LeakyReLU": ("leaky_relu", arithmetic.CLASSES["LeakyReLU"]),
    "LogSoftmax": ("log_softmax", reductions.CLASSES["LogSoftmax"]),
    "SiLU": ("silu", PRIMITIVES["SiLU"]), "Softmax": ("softmax", reductions.CLASSES["Softmax"]),
    **{name: (name.lower(), arithmetic.CLASSES[name]) for name in (
        "HSigmoid", "HSwish", "Mish", "ReLU", "ReLU6", "Sigmoid", "Tanh")},
}  # fmt: skip
CLASSES: dict[str, type[Cell]] = {
    name: type(name, (_Activation,), {
        "operator": operator, "attribute": attribute, "__module__": __name__, "__doc__": operator.__doc__,
        "__init__": constructor(_Activation.__init__, signature(operator))})
    for name, (attribute, operator) in _OPERATORS.items()
}  # fmt: skip
globals().update(CLASSES)


class GELU(Cell):
    """Gaussian error linear units, exact or with the tanh approximation (``approximate``)."""

    def __init__(self, approximate: bool = True) -> None:
        super().__init__()
        self.approximate = "tanh" if approximate else "none"
        self.gelu = Inner()

    def construct(self, x: Any) -> Any:
        return self.gelu(lambda x: F.gelu(x, approximate=self.approximate), x)


class PReLU(Cell):
    """x above 0, else w * x, with a learned w for all channels or per channel."""

    def __init__(self, channel: int = 1, w: Any = 0.25) -> None:
        super().__init__()
        self.w = Parameter(initializer(w, [channel]), "a")
        self.prelu = Inner("n c b..., c")

    def construct(self, x: Any) -> Any:
        return self.prelu(F.prelu, x, self.w)


def get_activation(name: str) -> Cell:
    """Return the activation of that name. Raises ValueError if there is none."""
    cells = {**CLASSES, "GELU": GELU, "PReLU": PReLU, **{n: FURTHER[n] for n in ("CELU", "LogSigmoid", "SeLU")}}
    classes_by_name: dict[str, type[Cell]] = {n.lower(): cell for n, cell in cells.items()}
    if name not in classes_by_name:
        raise ValueError(problem(f'there is no activation "{name}"', fix=closest(name, classes_by_name)))
    return classes_by_name[name]()


__all__ = [*CLASSES, "GELU", "PReLU", "get_activation"]
