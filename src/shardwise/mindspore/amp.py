"""Mixed precision by hand: the finite check of gradients, and the scale of the loss that keeps small ones from
vanishing.

A step scales the loss, unscales its gradients, updates if all of them are finite, and adjusts the scale.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from shardwise.errors import problem
from shardwise.launch import rank_groups
from shardwise.mindspore.communication.management import find_group

Tensor = torch.Tensor
NUM_STATUS = 8  # elements of the status that Ascend devices keep


def init_status() -> Tensor:
    """The overflow status of an Ascend device, which document 004 clears before a step: zeros here, and not needed."""
    return torch.zeros(NUM_STATUS)


init_register = init_status  # as document 004 calls it


def all_finite(inputs: Any, status: Tensor | None = None, *, group: str | None = None) -> Tensor:
    """Whether no element of tensors, nested in tuples or lists, is infinite or not a number: a bool scalar.

    It is this rank's answer, as in the reference: gradients that a reducer has summed give the same on all ranks.
    ``group``: the name of a group of ranks that agree (true if it is true on each); one small message. ``status`` is
    taken and not needed.
    """
    tensors = [tensor for tensor in _tensors(inputs) if tensor.is_floating_point() or tensor.is_complex()]
    flags = [torch.isfinite(tensor).all() for tensor in tensors]
    device = flags[0].device if flags else None
    finite = torch.stack([flag.to(device) for flag in flags]).all() if flags else torch.tensor(True)
    if group is None:
        return finite
    return rank_groups.all_reduce(finite.to(torch.int32), "min", find_group(group)).bool()


def _tensors(inputs: Any) -> Iterator[Tensor]:
    """The tensors of a nest; nothing for None, a parameter without a gradient."""
    if isinstance(inputs, Tensor):
        yield inputs
    elif isinstance(inputs, Iterable) and not isinstance(inputs, str):
        for each in inputs:
            yield from _tensors(each)
    elif inputs is not None:
        raise TypeError(problem(f"{inputs!r} is not a tensor", fix="give tensors, in tuples or lists"))


def _scaled(inputs: Any, factor: Tensor) -> Any:
    """The same nest with every tensor multiplied, its dtype kept."""
    if isinstance(inputs, Tensor):
        return (inputs * factor.to(inputs.device)).to(inputs.dtype)
    if isinstance(inputs, tuple | list):
        return type(inputs)(_scaled(each, factor) for each in inputs)
    raise TypeError(problem(f"{inputs!r} is not a tensor", fix="give tensors, in tuples or lists"))


class LossScaler(ABC):
    """Scales a loss before it is differentiated. ``scale_value``: the present scale, a float32 scalar."""

    def __init__(self, scale_value: float) -> None:
        self.scale_value = torch.tensor(_at_least_one("scale_value", scale_value, strictly=False))

    def scale(self, inputs: Any) -> Any:
        """Tensors, nested in tuples or lists, times the scale."""
        return _scaled(inputs, self.scale_value)

    def unscale(self, inputs: Any) -> Any:
        """Tensors, nested in tuples or lists, divided by the scale."""
        return _scaled(inputs, 1 / self.scale_value)

    @abstractmethod
    def adjust(self, grads_finite: Tensor | bool) -> bool:
        """Choose the scale of the next step."""


class StaticLossScaler(LossScaler):
    """Always the same scale."""

    def adjust(self, grads_finite: Tensor | bool) -> bool:
        return False


class DynamicLossScaler(LossScaler):
    """The largest scale that works: ``scale_factor`` times larger after ``scale_window`` finite steps in a row, as much
    smaller, but at least 1, after a step that is not finite."""

    def __init__(self, scale_value: float, scale_factor: float, scale_window: int) -> None:
        super().__init__(scale_value)
        self.scale_factor = _at_least_one("scale_factor", scale_factor)
        self.scale_window = _window(scale_window)
        self.counter = 0  # finite steps in a row, since the scale has last grown

    def adjust(self, grads_finite: Tensor | bool) -> bool:
        """True, as the scale may have changed."""
        value = _next_scale(
            float(self.scale_value), self.scale_factor, bool(grads_finite), self.counter + 1 == self.scale_window
        )
        self.counter = (self.counter + 1) % self.scale_window if grads_finite else 0
        self.scale_value = torch.tensor(value)
        return True


def _next_scale(scale: float, factor: float, finite: bool, is_time: bool) -> float:
    """Grown by the factor if it is time to and the result is a float32; shrunk, not below 1, if a step failed."""
    if not finite:
        return max(scale / factor, 1.0)
    grown = float(torch.tensor(scale * factor)) if is_time else scale
    return grown if math.isfinite(grown) else scale


class FixedLossScaleManager:
    """Always the same scale. ``drop_overflow_update``: whether a step changes nothing if a gradient is not finite."""

    def __init__(self, loss_scale: float = 128.0, drop_overflow_update: bool = True) -> None:
        self._scale, self._drop = _at_least_one("loss_scale", loss_scale, strictly=False), drop_overflow_update

    def get_loss_scale(self) -> float:
        return self._scale

    def get_drop_overflow_update(self) -> bool:
        return self._drop

    def update_loss_scale(self, overflow: bool) -> None:
        """Nothing changes."""

    def get_update_cell(self) -> None:
        """None: there is nothing to update."""


class DynamicLossScaleManager:
    """As ``DynamicLossScaler``, told of the overflow instead of its absence, with a float as the scale."""

    def __init__(self, init_loss_scale: float = 2.0**24, scale_factor: float = 2, scale_window: int = 2000) -> None:
        self.loss_scale = _at_least_one("init_loss_scale", init_loss_scale, strictly=False)
        self.scale_factor = _at_least_one("scale_factor", scale_factor)
        self.scale_window = _window(scale_window)
        self.cur_iter = 0  # finite steps in a row, since the scale has last grown

    def get_loss_scale(self) -> float:
        return self.loss_scale

    def get_drop_overflow_update(self) -> bool:
        """True: a step whose gradients are not finite changes nothing."""
        return True

    def update_loss_scale(self, overflow: bool) -> None:
        """Choose the scale of the next step."""
        is_time = self.cur_iter + 1 == self.scale_window
        self.loss_scale = _next_scale(self.loss_scale, self.scale_factor, not overflow, is_time)
        self.cur_iter = 0 if overflow else (self.cur_iter + 1) % self.scale_window


def _at_least_one(name: str, value: float, *, strictly: bool = True) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(problem(f"{name} is {value!r}, of type {type(value).__name__}", fix="give a number"))
    if strictly and value <= 1:
        raise ValueError(
            problem(f"{name} is {value}, which would not change a scale", fix="give more than 1, usually 2")
        )
    if value < 1:
        raise ValueError(problem(f"{name} is {value}", fix="give 1 or more: a scale makes small gradients larger"))
    return float(value)


def _window(value: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(problem(f"scale_window is {value!r}", fix="give a number of steps"))
    if value < 1:
        raise ValueError(problem(f"scale_window is {value}", fix="give a number of steps from 1 on"))
    return value
