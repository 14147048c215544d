"""Mixed precision and loss scaling. The loss scale keeps small gradients from underflowing.

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
from shardwise.mindspore.communication.management import find_group
from shardwise.mindspore.holding import as_gradient, parameter_of
from shardwise.mindspore.library import rank_groups
from shardwise.mindspore.named import bound_to
from shardwise.mindspore.notes import note
from shardwise.mindspore.tensor import Tensor as Number

Tensor = torch.Tensor
NUM_STATUS = 8  # elements of the overflow status of Ascend devices


def init_status() -> Tensor:
    """Return a cleared overflow status (``overflow``). ``all_finite`` needs none."""
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
        value = _next_scale(
            float(self.scale_value), self.scale_factor, bool(grads_finite), self.counter + 1 == self.scale_window
        )
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
        super().__init__(loss_scale_value, True)

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


# -- mixed precision ---------------------------------------------------------------------------------------------------

LEVELS = ("O0", "O1", "O2", "O3", "auto")
WHITE = ("Conv1d", "Conv2d", "Conv3d", "Conv2dTranspose", "Dense")  # cells that O1 computes in half precision
BLACK = ("BatchNorm1d", "BatchNorm2d", "BatchNorm3d", "SyncBatchNorm", "LayerNorm")  # and O2 in float32


def get_white_list() -> list[Any]:
    """Return the cells that O1 computes in half precision."""
    return _cells(WHITE)


def get_black_list() -> list[Any]:
    """Return the cells that O2 computes in float32."""
    return _cells(BLACK)


def _cells(names: Iterable[str]) -> list[Any]:
    from shardwise.mindspore import nn

    return [getattr(nn, name) for name in names]


def auto_mixed_precision(network: Any, amp_level: str = "O0", dtype: torch.dtype = torch.float16) -> Any:
    """Let a network compute in half precision and return it.

    Parameters and their updates keep their precision. Under O2 and O3 the network returns float32.

    Args:
        amp_level: O0: nothing. O1 and auto: convolutions and dense layers, whose results are cast back to float32. O2:
            everything but batch and layer norms. O3: everything.
    """
    if amp_level not in LEVELS:
        raise ValueError(problem(f"amp_level is {amp_level!r}", fix=f"one of {', '.join(LEVELS)}"))
    if amp_level in ("O1", "auto"):
        return custom_mixed_precision(network, white_list=get_white_list(), dtype=dtype)
    if amp_level == "O2":
        return custom_mixed_precision(network, black_list=get_black_list(), dtype=dtype)
    if amp_level == "O3":
        network.to_float(dtype)._returns = torch.float32
    return network


def custom_mixed_precision(
    network: Any, *, white_list: Any = None, black_list: Any = None, dtype: torch.dtype = torch.float16
) -> Any:
    """Let the cells of ``white_list``'s classes, or all but those of ``black_list``, compute in half precision."""
    if (white_list is None) == (black_list is None):
        what = "custom_mixed_precision takes a white_list or a black_list"
        raise ValueError(problem(what, fix="one of them: white_list=amp.get_white_list()"))
    listed: tuple[Any, ...] = tuple(kind for kind in white_list or black_list or () if isinstance(kind, type))
    if black_list is not None:
        network.to_float(dtype)
    for cell in network.modules():
        if isinstance(cell, listed):
            cell.to_float(torch.float32 if black_list is not None else dtype)
            cell._returns = dtype if black_list is not None else torch.float32
    if black_list is not None:
        network._returns = torch.float32
    return network


def at_level(title: str, network: Any, level: str, settings: dict[str, Any]) -> Any:
    """Apply ``auto_mixed_precision`` with the settings of ``Model`` and ``build_train_network`` beside a level. Under
    O0, O2 and O3 ``cast_model_type`` is the compute dtype, and ``keep_batchnorm_fp32`` keeps batch and layer norms in
    float32. ``boost_level`` is accepted, with a note. Raises TypeError for other settings."""
    defaults = {"keep_batchnorm_fp32": None, "cast_model_type": None, "boost_level": "O0"}
    options = bound_to(title, defaults, (), settings)
    if options["boost_level"] != "O0":
        note(f"{title}(boost_level={options['boost_level']!r}) has no effect here: every step is computed in full")
    dtype, keeps = options["cast_model_type"], options["keep_batchnorm_fp32"]
    if level in ("O0", "O2", "O3"):
        dtype = dtype or (torch.float32 if level == "O0" else torch.float16)
        keeps = level == "O2" if keeps is None else keeps
        level = "O0" if dtype == torch.float32 else "O2" if keeps else "O3"
    elif dtype is not None or keeps is not None:
        what = f"{title}(level {level!r}) with cast_model_type or keep_batchnorm_fp32"
        raise ValueError(problem(what, fix=f"neither: {level} lists the cells that compute in half precision"))
    return auto_mixed_precision(network, level, dtype or torch.float16)


def build_train_network(
    network: Any, optimizer: Any, loss_fn: Any = None, level: str = "O0", boost_level: str = "O0", **settings: Any
) -> Any:
    """Return the training cell of a network in mixed precision. ``loss_scale_manager`` defaults to that of the level;
    the other settings are those of ``at_level``."""
    from shardwise.mindspore.nn.wrap import WithLossCell
    from shardwise.mindspore.train.model import training_cell

    manager = settings.pop("loss_scale_manager", DynamicLossScaleManager() if level == "O2" else None)
    network = at_level("build_train_network", network, level, {"boost_level": boost_level, **settings})
    network = network if loss_fn is None else WithLossCell(network, loss_fn)
    return training_cell(network, optimizer, manager).set_train()


def _at_least_one(name: str, value: float, *, strictly: bool = True) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(problem(f"{name} is {value!r}, of type {type(value).__name__}", fix="give a number"))
    if strictly and value <= 1:
        what = f"{name} is {value}, which would not change a scale"
        raise ValueError(problem(what, fix="give more than 1, usually 2"))
    if value < 1:
        raise ValueError(problem(f"{name} is {value}", fix="give 1 or more: a scale makes small gradients larger"))
    return float(value)


def _window(value: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(problem(f"scale_window is {value!r}", fix="give a number of steps"))
    if value < 1:
        raise ValueError(problem(f"scale_window is {value}", fix="give a number of steps from 1 on"))
    return value
