"""Learning rate schedules: lists with one number per step (lower-case names), and functions of the step."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from shardwise.errors import problem
from shardwise.mindspore.checks import from_on
from shardwise.mindspore.named import Function, WithSettings, bound_to, classes_of, signature_of
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
    "ExponentialDecayLR": lambda step, *, learning_rate, decay_rate, decay_steps, is_stair=False: (
        learning_rate * decay_rate ** _share(step, decay_steps, is_stair)),
    "InverseDecayLR": lambda step, *, learning_rate, decay_rate, decay_steps, is_stair=False: (
        learning_rate / (1 + decay_rate * _share(step, decay_steps, is_stair))),
    "NaturalExpDecayLR": lambda step, *, learning_rate, decay_rate, decay_steps, is_stair=False: (
        learning_rate * math.exp(-decay_rate * (step - (step % decay_steps if is_stair else 0)))),
    "PolynomialDecayLR": lambda step, *, learning_rate, end_learning_rate, decay_steps, power,
    update_decay_steps=False: (learning_rate - end_learning_rate) * (1 - min(step / (
        decay_steps * (max(math.ceil(step / decay_steps), 1) if update_decay_steps else 1)), 1.0)) ** power + (
        end_learning_rate),
    "WarmUpLR": lambda step, *, learning_rate, warmup_steps: learning_rate * min(step, warmup_steps) / warmup_steps,
}, _Formula, __name__) | classes_of({
    "CosineDecayLR": lambda step, *, min_lr, max_lr, decay_steps: min_lr + 0.5 * (max_lr - min_lr) * (
        1 + math.cos(math.pi * (min(step, decay_steps) / decay_steps))),
}, _Cosine, __name__)  # fmt: skip


def _by_epoch(name: str, kind: type[Any]) -> Callable[..., list[float]]:
    """Return a schedule over epochs in place of steps, as a function that returns the rates of all steps."""
    names = [setting.replace("_steps", "_epoch") for setting in kind.settings]
    place = next(place for place, setting in enumerate(names) if setting in ("decay_epoch", "warmup_epoch"))
    settings = dict(zip(names, kind.settings.values(), strict=True))
    order = signature_of({**dict.fromkeys((*names[:place], "total_step", "step_per_epoch"), ...), **settings})

    def rates(*args: Any, **kwargs: Any) -> list[float]:
        chosen = bound_to(name, order, args, kwargs)
        for word, value in (("total_step", chosen["total_step"]), ("step_per_epoch", chosen["step_per_epoch"]),
                            ("epochs", chosen[names[place]])):  # fmt: skip
            from_on(word, value, 1)
        rate = kind(*(chosen[setting] for setting in names)).construct
        return [rate(step // chosen["step_per_epoch"]) for step in range(chosen["total_step"])]

    rates.__name__ = rates.__qualname__ = name
    vars(rates)["__signature__"] = order
    return rates


_OF = "cosine=Cosine exponential=Exponential inverse=Inverse natural_exp=NaturalExp polynomial=Polynomial"
LISTS = {f"{name}_decay_lr": _by_epoch(f"{name}_decay_lr", CLASSES[f"{kind}DecayLR"])
         for name, kind in (row.split("=") for row in _OF.split())} | {
             "warmup_lr": _by_epoch("warmup_lr", CLASSES["WarmUpLR"])}  # fmt: skip
globals().update(CLASSES | LISTS)

__all__ = ["LearningRateSchedule", "piecewise_constant_lr", *CLASSES, *LISTS]
