"""Initial values of parameters, by the name of a distribution or by an object of it.

All of them come from one generator (``common.seed``): as long as every rank makes the same parameters in the same
order, they are equal everywhere.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch

from shardwise.errors import problem
from shardwise.mindspore.checks import closest
from shardwise.mindspore.common.seed import generator

Tensor = torch.Tensor


class Initializer(ABC):
    """A distribution of initial values."""

    @abstractmethod
    def fill(self, tensor: Tensor, random: torch.Generator) -> Tensor:
        """Write values into ``tensor``, a new one, and return it."""


class Constant(Initializer):
    """The same value everywhere."""

    def __init__(self, value: float) -> None:
        self.value = value

    def fill(self, tensor: Tensor, random: torch.Generator) -> Tensor:
        return tensor.fill_(self.value)


class Zero(Constant):
    """Zeros."""

    def __init__(self) -> None:
        super().__init__(0)


class One(Constant):
    """Ones."""

    def __init__(self) -> None:
        super().__init__(1)


class Normal(Initializer):
    """N(mean, sigma**2)."""

    def __init__(self, sigma: float = 0.01, mean: float = 0.0) -> None:
        self.sigma, self.mean = sigma, mean

    def fill(self, tensor: Tensor, random: torch.Generator) -> Tensor:
        return tensor.normal_(self.mean, self.sigma, generator=random)


class TruncatedNormal(Initializer):
    """N(mean, sigma**2) within ``a`` to ``b`` standard deviations of the mean."""

    def __init__(self, sigma: float = 0.01, mean: float = 0.0, a: float = -2.0, b: float = 2.0) -> None:
        self.sigma, self.mean, self.a, self.b = sigma, mean, a, b

    def fill(self, tensor: Tensor, random: torch.Generator) -> Tensor:
        low, high = (self.mean + self.sigma * bound for bound in (self.a, self.b))
        return torch.nn.init.trunc_normal_(tensor, self.mean, self.sigma, low, high, generator=random)


class Uniform(Initializer):
    """U(-scale, scale)."""

    def __init__(self, scale: float = 0.07) -> None:
        self.scale = scale

    def fill(self, tensor: Tensor, random: torch.Generator) -> Tensor:
        return tensor.uniform_(-self.scale, self.scale, generator=random)


class XavierUniform(Initializer):
    """Uniform with the variance ``gain**2 * 2 / (fan_in + fan_out)`` (Glorot and Bengio, AISTATS 2010)."""

    def __init__(self, gain: float = 1) -> None:
        self.gain = gain

    def fill(self, tensor: Tensor, random: torch.Generator) -> Tensor:
        bound = self.gain * math.sqrt(6 / sum(_fans(tensor)))
        return tensor.uniform_(-bound, bound, generator=random)


class XavierNormal(XavierUniform):
    """Normal with the variance of ``XavierUniform``."""

    def fill(self, tensor: Tensor, random: torch.Generator) -> Tensor:
        return tensor.normal_(0, self.gain * math.sqrt(2 / sum(_fans(tensor))), generator=random)


class HeUniform(Initializer):
    """Uniform with the variance ``gain**2 / fan`` (He et al., ICCV 2015).

    ``gain`` is that of ``nonlinearity`` ("relu", "leaky_relu" with ``negative_slope``, "tanh", "sigmoid"); ``mode``
    chooses "fan_in" or "fan_out".
    """

    def __init__(self, negative_slope: float = 0, mode: str = "fan_in", nonlinearity: str = "leaky_relu") -> None:
        if mode not in ("fan_in", "fan_out"):
            raise ValueError(problem(f'there is no mode "{mode}"', fix='choose "fan_in" or "fan_out"'))
        self.gain = torch.nn.init.calculate_gain(cast(Any, nonlinearity), negative_slope)
        self.mode = mode

    def fill(self, tensor: Tensor, random: torch.Generator) -> Tensor:
        bound = math.sqrt(3) * self._sigma(tensor)
        return tensor.uniform_(-bound, bound, generator=random)

    def _sigma(self, tensor: Tensor) -> float:
        fan_in, fan_out = _fans(tensor)
        return self.gain / math.sqrt(fan_in if self.mode == "fan_in" else fan_out)


class HeNormal(HeUniform):
    """Normal with the variance of ``HeUniform``."""

    def fill(self, tensor: Tensor, random: torch.Generator) -> Tensor:
        return tensor.normal_(0, self._sigma(tensor), generator=random)


_NAMED: dict[str, Callable[[], Initializer]] = {
    "zeros": Zero,
    "zero": Zero,
    "ones": One,
    "one": One,
    "normal": Normal,
    "truncatednormal": TruncatedNormal,
    "uniform": Uniform,
    "xavieruniform": XavierUniform,
    "xaviernormal": XavierNormal,
    "heuniform": HeUniform,
    "henormal": HeNormal,
}


def initializer(
    init: Tensor | str | Initializer | float,
    shape: Sequence[int] | int | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """A new tensor of initial values.

    ``init``: "normal" (N(0, 0.01**2)), "zeros", "ones", "uniform", "xavier_uniform", "he_normal" and so on, in any
    case; an ``Initializer``; a number; or a tensor, whose shape must be ``shape`` if that is given. Values are drawn
    in float32, or float64 for that dtype, on the CPU.
    """
    if isinstance(init, Tensor):
        if shape is not None and tuple(init.shape) != _shape(shape):
            what = f"initializer is given a tensor of shape {list(init.shape)} and the shape {list(_shape(shape))}"
            raise ValueError(problem(what, fix="leave the shape out, or make them equal"))
        return init.detach().clone().to(dtype)
    if shape is None:
        raise ValueError(problem(f"initializer({init!r}) has no shape", fix="give one: initializer(init, [32, 16])"))
    drawn = torch.empty(_shape(shape), dtype=torch.float64 if dtype == torch.float64 else torch.float32)
    with torch.no_grad():
        return _found(init).fill(drawn, generator()).to(dtype)


def _found(init: str | Initializer | float) -> Initializer:
    if isinstance(init, Initializer):
        return init
    if isinstance(init, str):
        name = init.lower().replace("_", "")
        if name not in _NAMED:
            raise ValueError(problem(f'there is no initializer "{init}"', fix=closest(name, _NAMED)))
        return _NAMED[name]()
    if isinstance(init, int | float) and not isinstance(init, bool):
        return Constant(init)
    what = f"init is {init!r}, of type {type(init).__name__}"
    raise TypeError(problem(what, fix='give a name ("normal"), an Initializer (Normal(0.02)), a number or a tensor'))


def _shape(shape: Any) -> tuple[int, ...]:
    sizes = (shape,) if isinstance(shape, int) else tuple(shape) if isinstance(shape, Sequence) else None
    if sizes is None or any(isinstance(size, bool) or not isinstance(size, int) for size in sizes):
        raise TypeError(problem(f"the shape is {shape!r}", fix="give integers: [32, 16]"))
    if any(size <= 0 for size in sizes):
        raise ValueError(problem(f"the shape is {list(sizes)}", fix="give sizes from 1 on"))
    return sizes


def _fans(tensor: Tensor) -> tuple[int, int]:
    """(inputs of an output element, outputs of an input element) of a weight (out, in, *kernel)."""
    if tensor.ndim == 0:
        raise ValueError(problem("a scalar has no fan_in", fix="give a shape of at least one dim, or Normal(sigma)"))
    if tensor.ndim == 1:
        return tensor.shape[0], tensor.shape[0]
    kernel = math.prod(tensor.shape[2:])
    return tensor.shape[1] * kernel, tensor.shape[0] * kernel


__all__ = [
    "Constant",
    "HeNormal",
    "HeUniform",
    "Initializer",
    "Normal",
    "One",
    "TruncatedNormal",
    "Uniform",
    "XavierNormal",
    "XavierUniform",
    "Zero",
    "initializer",
]
