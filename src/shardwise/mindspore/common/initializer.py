"""Initial values of parameters, by the name of a distribution or by an ``Initializer``.

All values come from one generator (``common.seed``). They are equal on all ranks as long as every rank makes the same
parameters in the same order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch.nn import init as torchs

from shardwise.errors import problem
from shardwise.mindspore.checks import closest, one_of
from shardwise.mindspore.common.seed import generator
from shardwise.mindspore.named import Function, WithSettings, classes_of
from shardwise.mindspore.tensor import Tensor as DialectTensor
from shardwise.mindspore.tensor_methods import CALLED

Tensor = torch.Tensor


class Initializer:
    """A distribution of initial values. Subclasses override ``fill``, or ``_initialize(self, array)``, which writes
    into a numpy array."""

    def __init__(self, **settings: Any) -> None:
        self.settings = settings

    def fill(self, tensor: Tensor, random: torch.Generator) -> Tensor:
        """Write values into ``tensor``, a new one, and return it."""
        self._initialize(tensor.numpy())
        return tensor

    def _initialize(self, arr: np.ndarray[Any, Any]) -> None:
        raise NotImplementedError(problem(f"{type(self).__name__} has no fill", fix="write one, or _initialize"))


class _Known(WithSettings, Initializer):
    """An initializer of this module: ``function(tensor, random, **settings)``."""

    function: Function

    def fill(self, tensor: Tensor, random: torch.Generator) -> Tensor:
        filled: Tensor = type(self).function(tensor, random, **self._chosen())
        return filled


def _drawn(tensor: Tensor, random: Any, scale: float, mode: str, distribution: str) -> Tensor:
    """Draw values of the variance ``scale / fan``; a truncated normal is cut at two deviations."""
    fan_in, fan_out = _fans(tensor)
    fan = {"fan_in": fan_in, "fan_out": fan_out, "fan_avg": (fan_in + fan_out) / 2}[mode]
    sigma = math.sqrt(scale / max(1.0, fan))
    if distribution == "uniform":
        return tensor.uniform_(-math.sqrt(3) * sigma, math.sqrt(3) * sigma, generator=random)
    if distribution == "untruncated_normal":
        return tensor.normal_(0, sigma, generator=random)
    wide = sigma / 0.87962566103423978  # standard deviation of a standard normal truncated at two deviations
    return torchs.trunc_normal_(tensor, 0, wide, -2 * wide, 2 * wide, generator=random)


def _he(distribution: str) -> Function:
    return lambda tensor, random, *, negative_slope=0, mode="fan_in", nonlinearity="leaky_relu": _drawn(
        tensor, random, torchs.calculate_gain(nonlinearity, negative_slope) ** 2, mode, distribution)  # fmt: skip


_CHECKS = {
    "mode": one_of("fan_in", "fan_out", "fan_avg"),
    "nonlinearity": lambda _, word: (word, torchs.calculate_gain(word))[0],  # which raises ValueError for others
    "distribution": one_of("truncated_normal", "untruncated_normal", "uniform"),
}  # fmt: skip
_HE = {"checks": _CHECKS | {"mode": one_of("fan_in", "fan_out")}}
CLASSES = classes_of({
    "Constant": lambda tensor, random, *, value: tensor.fill_(value),
    "Dirac": lambda tensor, random, *, groups=1: torchs.dirac_(tensor, groups),
    "HeNormal": (None, _he("untruncated_normal"), _HE),
    "HeUniform": (None, _he("uniform"), _HE),
    "Identity": lambda tensor, random: torchs.eye_(tensor),
    "Normal": lambda tensor, random, *, sigma=0.01, mean=0.0: tensor.normal_(mean, sigma, generator=random),
    "One": lambda tensor, random: tensor.fill_(1),
    "Orthogonal": lambda tensor, random, *, gain=1.0: torchs.orthogonal_(tensor, gain, generator=random),
    "Sparse": lambda tensor, random, *, sparsity, sigma=0.01: torchs.sparse_(tensor, sparsity, sigma, generator=random),
    "TruncatedNormal": lambda tensor, random, *, sigma=0.01, mean=0.0, a=-2.0, b=2.0: torchs.trunc_normal_(
        tensor, mean, sigma, mean + sigma * a, mean + sigma * b, generator=random),
    "Uniform": lambda tensor, random, *, scale=0.07: tensor.uniform_(-scale, scale, generator=random),
    "VarianceScaling": lambda tensor, random, *, scale=1.0, mode="fan_in", distribution="truncated_normal": _drawn(
            tensor, random, scale, mode, distribution),
    "XavierNormal": lambda tensor, random, *, gain=1: _drawn(
            tensor, random, gain**2, "fan_avg", "untruncated_normal"),
    "XavierUniform": lambda tensor, random, *, gain=1: _drawn(tensor, random, gain**2, "fan_avg", "uniform"),
    "Zero": lambda tensor, random: tensor.fill_(0),
}, _Known, __name__, checks=_CHECKS)  # fmt: skip
globals().update(CLASSES)
_NAMED: dict[str, Callable[[], Initializer]] = {
    **{name.lower(): kind for name, kind in CLASSES.items() if name not in ("Constant", "Sparse")},
    "zeros": CLASSES["Zero"], "ones": CLASSES["One"],
}  # fmt: skip


def initializer(init: Tensor | str | Initializer | float, shape: Sequence[int] | int | None = None,
    dtype: torch.dtype | None = torch.float32,
) -> Tensor:  # fmt: skip
    """Return a new tensor of initial values.

    Values are drawn on the CPU in float32, or in float64 for that dtype.

    Args:
        init: "normal" (N(0, 0.01**2)), "zeros", "ones", "uniform", "xavier_uniform", "he_normal" and so on, in any
            case; an ``Initializer``; a number; or a tensor.
        shape: sizes of the dims; it must equal the shape of a tensor ``init``.
        dtype: dtype of the result; None: float32.
    """
    dtype = dtype or torch.float32
    if isinstance(init, Tensor):
        if shape is not None and tuple(init.shape) != _shape(shape):
            what = f"initializer is given a tensor of shape {list(init.shape)} and the shape {list(_shape(shape))}"
            raise ValueError(problem(what, fix="leave the shape out, or make them equal"))
        return init.detach().clone().to(dtype).as_subclass(DialectTensor)
    if shape is None:
        raise ValueError(problem(f"initializer({init!r}) has no shape", fix="give one: initializer(init, [32, 16])"))
    drawn = torch.empty(_shape(shape), dtype=torch.float64 if dtype == torch.float64 else torch.float32)
    with torch.no_grad():
        return _initializer_of(init).fill(drawn, generator()).to(dtype).as_subclass(DialectTensor)


def _initializer_of(init: str | Initializer | float) -> Initializer:
    if isinstance(init, Initializer):
        return init
    if isinstance(init, str):
        name = init.lower().replace("_", "")
        if name not in _NAMED:
            raise ValueError(problem(f'there is no initializer "{init}"', fix=closest(name, _NAMED)))
        return _NAMED[name]()
    if isinstance(init, int | float) and not isinstance(init, bool):
        constant: Initializer = CLASSES["Constant"](init)
        return constant
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
    """Return (fan_in, fan_out) of a weight (out, in, *kernel)."""
    if tensor.ndim == 0:
        raise ValueError(problem("a scalar has no fan_in", fix="give a shape of at least one dim, or Normal(sigma)"))
    return torchs._calculate_fan_in_and_fan_out(tensor if tensor.ndim > 1 else tensor.expand(*tensor.shape * 2))


CALLED["initializer"] = initializer
__all__ = ["Initializer", "initializer", *CLASSES]
