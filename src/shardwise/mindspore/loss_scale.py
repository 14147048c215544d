"""Finite checks, and loss scales, which keep small gradients from underflowing.

A step scales the loss, unscales its gradients, updates if all of them are finite, and adjusts the scale.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from shardwise.errors import problem
from shardwise.mindspore import rank_groups
from shardwise.mindspore.checks import from_on, integer, number
from shardwise.mindspore.communication.management import find_group
from shardwise.mindspore.holding import as_gradient, parameter_of
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


def _scaled(inputs: Any, factor: Tensor) -> Any:
    """Multiply every tensor of a nest by ``factor`` and keep its dtype."""
    if isinstance(inputs, Tensor):
        return as_gradient((inputs * factor.to(inputs.device)).to(inputs.dtype), parameter_of(inputs))
    if isinstance(inputs, tuple | list):
        return type(inputs)(_scaled(item, factor) for item in inputs)
    raise TypeError(problem(f"{inputs!r} is not a tensor", fix="give tensors, in tuples or lists"))


class LossScaler(ABC):
    """Base of loss scales. ``scale_value``: the present scale, a float32 scalar."""

    def __init__(self, scale_value: float) -> None:
        self.scale_value: Tensor = Number(_at_least_one("scale_value", scale_value, strictly=False))

    def scale(self, inputs: Any) -> Any:
        """Multiply tensors, nested in tuples or lists, by the scale."""
        return _scaled(inputs, self.scale_value)

    def unscale(self, inputs: Any) -> Any:
        """Divide tensors, nested in tuples or lists, by the scale."""
        return _scaled(inputs, 1 / self.scale_value)

    @abstractmethod
    def adjust(self, grads_finite: Tensor | bool) -> bool:
        """Choose the scale of the next step."""


class StaticLossScaler(LossScaler):
    """A constant loss scale."""

    def adjust(self, grads_finite: Tensor | bool) -> bool:
        return False


class DynamicLossScaler(LossScaler):
    """A loss scale that is multiplied by ``scale_factor`` after ``scale_window`` finite steps in a row. A step that is
    not finite divides it by the factor, down to 1."""

    def __init__(self, scale_value: float, scale_factor: float, scale_window: int) -> None:
        super().__init__(scale_value)
        self.scale_factor = _at_least_one("scale_factor", scale_factor)
        self.scale_window = _window(scale_window)
        self.counter = 0  # consecutive finite steps since the scale last grew

    def adjust(self, grads_finite: Tensor | bool) -> bool:
        """Choose the scale of the next step. Return True: the scale may have changed."""
        is_time = self.counter + 1 == self.scale_window
        value = _next_scale(float(self.scale_value), self.scale_factor, bool(grads_finite), is_time)
        self.counter = (self.counter + 1) % self.scale_window if grads_finite else 0
        self.scale_value = Number(value)
        return True


def _next_scale(scale: float, factor: float, finite: bool, is_time: bool) -> float:
    """Multiply by the factor if it is time and the result is a float32. Divide by it, down to 1, if a step failed."""
    if not finite:
        return max(scale / factor, 1.0)
    grown = float(torch.tensor(scale * factor)) if is_time else scale
    return grown if math.isfinite(grown) else scale


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


class FixedLossScaleManager(LossScaleManager):
    """A constant loss scale. ``drop_overflow_update``: skip a step whose gradients are not all finite."""

    def __init__(self, loss_scale: float = 128.0, drop_overflow_update: bool = True) -> None:
        self._scale, self._drop = _at_least_one("loss_scale", loss_scale, strictly=False), drop_overflow_update

    def get_loss_scale(self) -> float:
        return self._scale

    def get_drop_overflow_update(self) -> bool:
        return self._drop

    def get_update_cell(self) -> FixedLossScaleUpdateCell | None:
        return FixedLossScaleUpdateCell(self._scale) if self._drop else None


class DynamicLossScaleManager(LossScaleManager):
    """``DynamicLossScaler`` with a float as the scale; it is updated with ``overflow`` instead of ``grads_finite``."""

    def __init__(self, init_loss_scale: float = 2.0**24, scale_factor: float = 2, scale_window: int = 2000) -> None:
        self.loss_scale = _at_least_one("init_loss_scale", init_loss_scale, strictly=False)
        self.scale_factor = _at_least_one("scale_factor", scale_factor)
        self.scale_window = _window(scale_window)
        self.cur_iter = 0  # consecutive finite steps since the scale last grew

    def get_loss_scale(self) -> float:
        return self.loss_scale

    def get_drop_overflow_update(self) -> bool:
        return True

    def update_loss_scale(self, overflow: bool) -> None:
        """Choose the scale of the next step."""
        is_time = self.cur_iter + 1 == self.scale_window
        self.loss_scale = _next_scale(self.loss_scale, self.scale_factor, not overflow, is_time)
        self.cur_iter = 0 if overflow else (self.cur_iter + 1) % self.scale_window

    def get_update_cell(self) -> DynamicLossScaleUpdateCell:
        return DynamicLossScaleUpdateCell(self.loss_scale, self.scale_factor, self.scale_window)


class FixedLossScaleUpdateCell(FixedLossScaleManager):
    """The constant loss scale of a training cell, called with the scale and whether a step overflowed."""

    def __init__(self, loss_scale_value: float) -> None:
        super().__init__(loss_scale_value)

    def __call__(self, loss_scale: Any, overflow: Any) -> Any:
        return overflow


class DynamicLossScaleUpdateCell(DynamicLossScaleManager):
    """The loss scale of a training cell. A call with the scale and whether a step overflowed adjusts it. A scale that
    is a parameter is overwritten, as in the reference."""

    def __init__(self, loss_scale_value: float, scale_factor: float, scale_window: int) -> None:
        super().__init__(loss_scale_value, scale_factor, scale_window)

    def __call__(self, loss_scale: Any, overflow: Any) -> Any:
        self.update_loss_scale(bool(overflow))
        if isinstance(loss_scale, nn.Parameter):  # a user's training cell keeps the scale in it
            with torch.no_grad():
                loss_scale.fill_(self.get_loss_scale())
        return overflow


def _at_least_one(name: str, value: float, *, strictly: bool = True) -> float:
    if strictly and number(name, value) <= 1:
        what = f"{name} is {value}, which would not change a scale"
        raise ValueError(problem(what, fix="give more than 1, usually 2"))
    if number(name, value) < 1:
        raise ValueError(problem(f"{name} is {value}", fix="give 1 or more: a scale makes small gradients larger"))
    return float(value)


def _window(value: int) -> int:
    fix = "give a number of steps"
    return from_on("scale_window", integer("scale_window", value, fix), 1, fix)
