"""Learning rate schedules: lists with one number per step (lower-case names), and functions of the step."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from shardwise.errors import problem
from shardwise.mindspore.checks import from_on
from shardwise.mindspore.named import WithSettings
from shardwise.mindspore.tensor import Tensor


def _steps(total_step: int, step_per_epoch: int, epochs: int) -> list[int]:
    for name, value in (("total_step", total_step), ("step_per_epoch", step_per_epoch), ("epochs", epochs)):
        from_on(name, value, 1)
    return [step // step_per_epoch for step in range(total_step)]


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


class ExponentialDecayLR(
    WithSettings, LearningRateSchedule, learning_rate=..., decay_rate=..., decay_steps=..., is_stair=False
):
    """learning_rate * decay_rate^(step / decay_steps), with the exponent rounded down if ``is_stair``."""

    def share(self, step: int) -> float:
        return float(step // self.decay_steps if self.is_stair else step / self.decay_steps)

    def construct(self, global_step: int) -> float:
        return float(self.learning_rate * self.decay_rate ** self.share(global_step))


class NaturalExpDecayLR(ExponentialDecayLR):
    """learning_rate * exp(-decay_rate * step / decay_steps), with the quotient rounded down if ``is_stair``."""

    def construct(self, global_step: int) -> float:
        return float(self.learning_rate * math.exp(-self.decay_rate * self.share(global_step)))


class InverseDecayLR(ExponentialDecayLR):
    """learning_rate / (1 + decay_rate * step / decay_steps), with the quotient rounded down if ``is_stair``."""

    def construct(self, global_step: int) -> float:
        return float(self.learning_rate / (1 + self.decay_rate * self.share(global_step)))


class CosineDecayLR(WithSettings, LearningRateSchedule, min_lr=..., max_lr=..., decay_steps=...):
    """Half a cosine from ``max_lr`` to ``min_lr`` over ``decay_steps`` steps."""

    def _settle(self) -> None:
        if not 0 <= self.min_lr < self.max_lr:
            raise ValueError(problem(f"min_lr is {self.min_lr}, max_lr {self.max_lr}", fix="0 <= min_lr < max_lr"))

    def construct(self, global_step: int) -> float:
        share = min(global_step, self.decay_steps) / self.decay_steps
        return float(self.min_lr + 0.5 * (self.max_lr - self.min_lr) * (1 + math.cos(math.pi * share)))


class PolynomialDecayLR(
    WithSettings, LearningRateSchedule, learning_rate=..., end_learning_rate=..., decay_steps=..., power=...
):
    """Decay from ``learning_rate`` to ``end_learning_rate`` as (1 - step / decay_steps)^power."""

    def construct(self, global_step: int) -> float:
        left = 1 - min(global_step, self.decay_steps) / self.decay_steps
        return float((self.learning_rate - self.end_learning_rate) * left**self.power + self.end_learning_rate)


class WarmUpLR(WithSettings, LearningRateSchedule, learning_rate=..., warmup_steps=...):
    """Linear warm-up from 0 to ``learning_rate`` over ``warmup_steps`` steps."""

    def construct(self, global_step: int) -> float:
        return float(self.learning_rate * min(global_step, self.warmup_steps) / self.warmup_steps)


def _of_epochs(schedule: Any, total_step: int, step_per_epoch: int, decay_epoch: int) -> list[float]:
    """Return the rates of a schedule, or of a function of the epoch, for every step."""
    rate = getattr(schedule, "construct", schedule)
    return [rate(epoch) for epoch in _steps(total_step, step_per_epoch, decay_epoch)]


def _next_multiple(epoch: int, of: int) -> int:
    return of * max(math.ceil(epoch / of), 1)


# The schedules of these names over epochs instead of steps.
LISTS: dict[str, Callable[..., list[float]]] = {
    "cosine_decay_lr": lambda min_lr, max_lr, total_step, step_per_epoch, decay_epoch: _of_epochs(
        CosineDecayLR(min_lr, max_lr, decay_epoch), total_step, step_per_epoch, decay_epoch),
    "exponential_decay_lr": lambda learning_rate, decay_rate, total_step, step_per_epoch, decay_epoch, is_stair=False:
    _of_epochs(ExponentialDecayLR(learning_rate, decay_rate, decay_epoch, is_stair), total_step, step_per_epoch,
               decay_epoch),
    "inverse_decay_lr": lambda learning_rate, decay_rate, total_step, step_per_epoch, decay_epoch, is_stair=False:
    _of_epochs(InverseDecayLR(learning_rate, decay_rate, decay_epoch, is_stair), total_step, step_per_epoch,
               decay_epoch),
    # decays by epoch; decay_epoch is only the width of the stairs
    "natural_exp_decay_lr": lambda learning_rate, decay_rate, total_step, step_per_epoch, decay_epoch, is_stair=False:
    _of_epochs(
        lambda epoch: learning_rate * math.exp(-decay_rate * (epoch - (epoch % decay_epoch if is_stair else 0))),
        total_step, step_per_epoch, decay_epoch),
    "polynomial_decay_lr": lambda learning_rate, end_learning_rate, total_step, step_per_epoch, decay_epoch, power,
    update_decay_epoch=False: _of_epochs(
        lambda epoch: PolynomialDecayLR(
            learning_rate, end_learning_rate, _next_multiple(epoch, decay_epoch) if update_decay_epoch else decay_epoch,
            power).construct(epoch),
        total_step, step_per_epoch, decay_epoch),
    "warmup_lr": lambda learning_rate, total_step, step_per_epoch, warmup_epoch: _of_epochs(
        WarmUpLR(learning_rate, warmup_epoch), total_step, step_per_epoch, warmup_epoch),
}  # fmt: skip
for _name, _list in LISTS.items():
    _list.__name__ = _list.__qualname__ = _name  # shown in errors about arguments
globals().update(LISTS)

__all__ = [
    "CosineDecayLR", "ExponentialDecayLR", "InverseDecayLR", "LearningRateSchedule", "NaturalExpDecayLR",
    "PolynomialDecayLR", "WarmUpLR", "piecewise_constant_lr", *LISTS,
]  # fmt: skip
