"""Finite checks, and loss scales, which keep small gradients from underflowing.

A step scales the loss, unscales its gradients, updates if all of them are finite, and adjusts the scale.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from typing import Any, ClassVar

import torch
from torch import nn

from shardwise.errors import problem
from shardwise.mindspore import rank_groups
from shardwise.mindspore.checks import from_on, integer, number, numbers
from shardwise.mindspore.communication.management import find_group
from shardwise.mindspore.holding import as_gradient, parameter_of
from shardwise.mindspore.named import WithSettings
from shardwise.mindspore.tensor import Tensor as Number

Tensor = torch.Tensor
NUM_STATUS = 8  # elements of the overflow status of Ascend devices


def init_status() -> Tensor:
    """Return a cleared overflow status (``read_status``). ``all_finite`` needs none."""
    return torch.zeros(NUM_STATUS)


init_register = init_status  # its name in document 004


def all_finite(inputs: Any, status: Tensor | None = None, *, group: str | None = None) -> Tensor:
    """Return whether all elements of the tensors are finite, as a bool scalar.

    Without ``group`` this is this rank's answer, as in the reference. Gradients that a reducer has summed give the same
    answer on all ranks.

    Args:
        inputs: tensors, nested in tuples or lists.
        status: accepted and not needed.
        group: name of a group of ranks; the result is true if it is true on each of them (one small message).
    """
    tensors = [tensor for tensor in _tensors(inputs) if tensor.is_floating_point() or tensor.is_complex()]
    flags = [torch.isfinite(tensor).all() for tensor in tensors]
    device = flags[0].device if flags else None
    finite = torch.stack([flag.to(device) for flag in flags]).all() if flags else torch.tensor(True)
    if group is None:
        return finite
    return rank_groups.all_reduce(finite.to(torch.int32), "min", find_group(group)).bool()


_overflow = {"watched": False, "overflowed": False}  # of this process, like the register of a device


def clear_status(status: Tensor) -> Tensor:
    """Clear the overflow status and start recording whether a loss or a gradient is not finite. Each rank has its own,
    as each device has; programs sum them. The device checks every operator, so it also records an infinity that later
    operators hide; this status does not."""
    _overflow.update(watched=True, overflowed=False)
    with torch.no_grad():
        return status.zero_()


def read_status(status: Tensor) -> Tensor:
    """Write the overflow status: 1 in its first word after an overflow, else 0."""
    with torch.no_grad():
        status[0] = float(_overflow["overflowed"])
    return status


def note_overflow(tensors: Iterable[Tensor]) -> None:
    """Check every computed loss and gradient. Nothing is checked before a program has cleared a status, nor after the
    first overflow. A check costs one device synchronisation per step."""
    if _overflow["watched"] and not _overflow["overflowed"]:
        _overflow["overflowed"] = not all_finite(tensors)


def _tensors(inputs: Any) -> Iterator[Tensor]:
    """Yield the tensors of a nest. None, a parameter without a gradient, yields nothing."""
    if isinstance(inputs, Tensor):
        yield inputs
    elif isinstance(inputs, Iterable) and not isinstance(inputs, str):
        for item in inputs:
            yield from _tensors(item)
    elif inputs is not None:
        raise TypeError(problem(f"{inputs!r} is not a tensor", fix="give tensors, in tuples or lists"))


def scaled(inputs: Any, factor: Tensor) -> Any:
    """Multiply every tensor of a nest by ``factor`` and keep its dtype."""
    if isinstance(inputs, Tensor):
        return as_gradient((inputs * factor.to(inputs.device)).to(inputs.dtype), parameter_of(inputs))
    if isinstance(inputs, tuple | list):
        return type(inputs)(scaled(item, factor) for item in inputs)
    raise TypeError(problem(f"{inputs!r} is not a tensor", fix="give tensors, in tuples or lists"))


_at_least_one = numbers(
    lambda name, value: number(name, value) >= 1, "give 1 or more: a scale makes small gradients larger", float
)
_factor = numbers(
    lambda name, value: number(name, value) > 1, "give more than 1, usually 2: 1 would not change a scale", float
)


def _window(name: str, value: Any) -> int:
    fix = "give a number of steps"
    return from_on(name, integer(name, value, fix), 1, fix)


class _Scaling(WithSettings):
    """A loss scale, of whose settings the common ones are checked."""

    checks: ClassVar = {
        **dict.fromkeys(("loss_scale", "loss_scale_value", "init_loss_scale"), _at_least_one),
        "scale_value": lambda name, value: Number(_at_least_one(name, value)),
        "scale_factor": _factor, "scale_window": _window,
    }  # fmt: skip
    counter = 0  # consecutive finite steps since the scale last grew

    def _after(self, scale: float, finite: bool) -> float:
        """Return the scale of the next step and count finite steps. After ``scale_window`` of them in a row the scale
        is multiplied by the factor, if the result is a float32. A step that is not finite divides it, down to 1."""
        self.counter = self.counter + 1 if finite else 0
        if not finite:
            return max(float(scale / self.scale_factor), 1.0)
        if self.counter < self.scale_window:
            return scale
        self.counter, grown = 0, float(torch.tensor(scale * self.scale_factor))
        return grown if math.isfinite(grown) else scale


class LossScaler(_Scaling, ABC, scale_value=...):
    """Base of loss scales. ``scale_value``: the present scale, a float32 scalar."""

    scale_value: Tensor

    def scale(self, inputs: Any) -> Any:
        """Multiply tensors, nested in tuples or lists, by the scale."""
        return scaled(inputs, self.scale_value)

    def unscale(self, inputs: Any) -> Any:
        """Divide tensors, nested in tuples or lists, by the scale."""
        return scaled(inputs, 1 / self.scale_value)

    @abstractmethod
    def adjust(self, grads_finite: Tensor | bool) -> bool:
        """Choose the scale of the next step."""


class StaticLossScaler(LossScaler):
    """A constant loss scale."""

    def adjust(self, grads_finite: Tensor | bool) -> bool:
        return False


class DynamicLossScaler(LossScaler, scale_value=..., scale_factor=..., scale_window=...):
    """A loss scale that is multiplied by ``scale_factor`` after ``scale_window`` finite steps in a row. A step that is
    not finite divides it by the factor, down to 1."""

    def adjust(self, grads_finite: Tensor | bool) -> bool:
        """Choose the scale of the next step. Return True: the scale may have changed."""
        self.scale_value = Number(self._after(float(self.scale_value), bool(grads_finite)))
        return True


class LossScaleManager:
    """Base class of user-defined managers of the loss scale. A manager also decides whether a step that overflows is
    skipped."""

    def get_loss_scale(self) -> float:
        raise NotImplementedError(f"{type(self).__name__}.get_loss_scale")

    def get_drop_overflow_update(self) -> bool:
        return self.get_update_cell() is not None

    def update_loss_scale(self, overflow: bool) -> None:
        """Choose the scale of the next step. The default keeps it."""

    def get_update_cell(self) -> Any:
        """Return the argument of TrainOneStepWithLossScaleCell, or None where overflowing steps are not skipped."""
        return None


class _Managed(_Scaling, LossScaleManager):
    """A manager of the scale ``loss_scale``."""

    loss_scale: float

    def get_loss_scale(self) -> float:
        return self.loss_scale


class FixedLossScaleManager(_Managed, loss_scale=128.0, drop_overflow_update=True):
    """A constant loss scale. ``drop_overflow_update``: skip a step whose gradients are not all finite."""

    def get_update_cell(self) -> Any:
        return FixedLossScaleUpdateCell(self.loss_scale) if self.drop_overflow_update else None


class DynamicLossScaleManager(_Managed, init_loss_scale=2.0**24, scale_factor=2, scale_window=2000):
    """``DynamicLossScaler`` with a float as the scale; it is updated with ``overflow`` instead of ``grads_finite``."""

    def _settle(self, init_loss_scale: float) -> None:
        self.loss_scale = init_loss_scale

    def update_loss_scale(self, overflow: bool) -> None:
        """Choose the scale of the next step."""
        self.loss_scale = self._after(self.loss_scale, not overflow)

    def get_update_cell(self) -> Any:
        return DynamicLossScaleUpdateCell(self.loss_scale, self.scale_factor, self.scale_window)


class FixedLossScaleUpdateCell(FixedLossScaleManager, loss_scale_value=...):
    """The constant loss scale of a training cell, called with the scale and whether a step overflowed."""

    def _settle(self, loss_scale_value: float) -> None:
        self.loss_scale, self.drop_overflow_update = loss_scale_value, True

    def __call__(self, loss_scale: Any, overflow: Any) -> Any:
        return overflow


class DynamicLossScaleUpdateCell(DynamicLossScaleManager, loss_scale_value=..., scale_factor=..., scale_window=...):
    """The loss scale of a training cell. A call with the scale and whether a step overflowed adjusts it. A scale that
    is a parameter is overwritten, as in the reference."""

    def _settle(self, loss_scale_value: float) -> None:
        self.loss_scale = loss_scale_value

    def __call__(self, loss_scale: Any, overflow: Any) -> Any:
        self.update_loss_scale(bool(overflow))
        if isinstance(loss_scale, nn.Parameter):  # a user's training cell keeps the scale in it
            with torch.no_grad():
                loss_scale.fill_(self.loss_scale)
        return overflow


__all__ = [
    "DynamicLossScaleManager", "DynamicLossScaleUpdateCell", "DynamicLossScaler", "FixedLossScaleManager",
    "FixedLossScaleUpdateCell", "LossScaleManager", "LossScaler", "StaticLossScaler", "all_finite", "init_register",
    "init_status",
]  # fmt: skip
