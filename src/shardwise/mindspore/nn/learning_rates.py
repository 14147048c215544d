"""Learning rate schedules: lists with one number per step (lower-case names), and functions of the step."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from shardwise.errors import problem
from shardwise.mindspore.checks import from_on
from shardwise.mindspore.named import Function, WithSettings, classes_of
from shardwise.mindspore.tensor import Tensor


def piecewise_constant_lr(milestone: Sequence[int], learning_rates: Sequence[float]) -> list[float]:
    """Return a list with ``learning_rates[i]`` up to step ``milestone[i]``."""
    if len(milestone) != len(learning_rates):
        what = f"{len(milestone)} milestones for {len(learning_rates)} learning rates"
        raise ValueError(problem(what, fix="one for each"))
    per_step: list[float] = []
    for end, rate in zip(milestone, learning_rates, strict=True):
        if end < len(per_step) or end < 1:
            raise ValueError(problem(f"milestone {end} is not above {len(per_step)}", fix="ascending numbers of steps"))
        per_step += [float(rate)] * (end - len(per_step))
    return per_step


class LearningRateSchedule:
    """Base of learning rates as functions of the step, from 0. Subclasses override ``construct``, which takes a tensor
    (those of this module take a number). A call returns a tensor."""

    def construct(self, global_step: Any) -> Any:
        raise NotImplementedError(f"{type(self).__name__} does not define construct")

    def __call__(self, global_step: Any) -> Any:
        if type(self).__module__ == __name__:
            return Tensor(self.construct(int(global_step)), torch.float32)
        return self.construct(Tensor(int(global_step), torch.int32))


class _Formula(WithSettings, LearningRateSchedule):
    """The schedule ``function(step, **settings)``."""

    function: Function

    def construct(self, global_step: Any) -> float:
        return float(type(self).function(global_step, **self._chosen()))


class _Cosine(_Formula):
    def _settle(self) -> None:
        if not 0 <= self.min_lr < self.max_lr:
            raise ValueError(problem(f"min_lr is {self.min_lr}, max_lr {self.max_lr}", fix="0 <= min_lr < max_lr"))


def _share(step: int, decay_steps: int, is_stair: bool) -> float:
    return float(step // decay_steps if is_stair else step / decay_steps)


CLASSES = classes_of({
    "ExponentialDecayLR": (
        "learning_rate * decay_rate^(step / decay_steps), with the exponent rounded down if ``is_stair``.",
        lambda step, *, learning_rate, decay_rate, decay_steps, is_stair=False: (
            learning_rate * decay_rate ** _share(step, decay_steps, is_stair))),
    "InverseDecayLR": (
        "learning_rate / (1 + decay_rate * step / decay_steps), with the quotient rounded down if ``is_stair``.",
        lambda step, *, learning_rate, decay_rate, decay_steps, is_stair=False: (
            learning_rate / (1 + decay_rate * _share(step, decay_steps, is_stair)))),
    "NaturalExpDecayLR": (
        "learning_rate * exp(-decay_rate * step); with ``is_stair`` step is rounded down to whole ``decay_steps``.",
        lambda step, *, learning_rate, decay_rate, decay_steps, is_stair=False: (
            learning_rate * math.exp(-decay_rate * (step - (step % decay_steps if is_stair else 0))))),
    "PolynomialDecayLR": (
        "Decay from ``learning_rate`` to ``end_learning_rate`` as (1 - step / decay_steps)^power. With "
        "``update_decay_steps``, decay_steps is its next multiple once it is over.",
        lambda step, *, learning_rate, end_learning_rate, decay_steps, power, update_decay_steps=False: (
            (learning_rate - end_learning_rate) * (1 - min(step / (
                decay_steps * (max(math.ceil(step / decay_steps), 1) if update_decay_steps else 1)), 1.0)) ** power
            + end_learning_rate)),
    "WarmUpLR": (
        "Linear warm-up from 0 to ``learning_rate`` over ``warmup_steps`` steps.",
        lambda step, *, learning_rate, warmup_steps: learning_rate * min(step, warmup_steps) / warmup_steps),
}, _Formula, __name__) | classes_of({
    "CosineDecayLR": (
        "Half a cosine from ``max_lr`` to ``min_lr`` over ``decay_steps`` steps.",
        lambda step, *, min_lr, max_lr, decay_steps: min_lr + 0.5 * (max_lr - min_lr) * (
            1 + math.cos(math.pi * (min(step, decay_steps) / decay_steps)))),
}, _Cosine, __name__)  # fmt: skip


def _of_epochs(schedule: Any, total_step: int, step_per_epoch: int, decay_epoch: int, *settings: Any) -> list[float]:
    """Return the rates of a schedule by its name and settings, or of a function of the epoch, for every step."""
    for name, value in (("total_step", total_step), ("step_per_epoch", step_per_epoch), ("epochs", decay_epoch)):
        from_on(name, value, 1)
    rate = CLASSES[schedule](*settings).construct if isinstance(schedule, str) else schedule
    return [rate(step // step_per_epoch) for step in range(total_step)]


# The schedules of these names over epochs instead of steps.
LISTS: dict[str, Callable[..., list[float]]] = {
    "cosine_decay_lr": lambda min_lr, max_lr, total_step, step_per_epoch, decay_epoch: _of_epochs(
        "CosineDecayLR", total_step, step_per_epoch, decay_epoch, min_lr, max_lr, decay_epoch),
    "exponential_decay_lr": lambda learning_rate, decay_rate, total_step, step_per_epoch, decay_epoch, is_stair=False:
    _of_epochs("ExponentialDecayLR", total_step, step_per_epoch, decay_epoch, learning_rate, decay_rate, decay_epoch,
               is_stair),
    "inverse_decay_lr": lambda learning_rate, decay_rate, total_step, step_per_epoch, decay_epoch, is_stair=False:
    _of_epochs("InverseDecayLR", total_step, step_per_epoch, decay_epoch, learning_rate, decay_rate, decay_epoch,
               is_stair),
    "natural_exp_decay_lr": lambda learning_rate, decay_rate, total_step, step_per_epoch, decay_epoch, is_stair=False:
    _of_epochs("NaturalExpDecayLR", total_step, step_per_epoch, decay_epoch, learning_rate, decay_rate, decay_epoch,
               is_stair),
    "polynomial_decay_lr": lambda learning_rate, end_learning_rate, total_step, step_per_epoch, decay_epoch, power,
    update_decay_epoch=False: _of_epochs(
        "PolynomialDecayLR", total_step, step_per_epoch, decay_epoch, learning_rate, end_learning_rate, decay_epoch,
        power, update_decay_epoch),
    "warmup_lr": lambda learning_rate, total_step, step_per_epoch, warmup_epoch: _of_epochs(
        "WarmUpLR", total_step, step_per_epoch, warmup_epoch, learning_rate, warmup_epoch),
}  # fmt: skip
for _name, _list in LISTS.items():
    _list.__name__ = _list.__qualname__ = _name  # shown in errors about arguments
globals().update(CLASSES | LISTS)

__all__ = ["LearningRateSchedule", "piecewise_constant_lr", *CLASSES, *LISTS]
