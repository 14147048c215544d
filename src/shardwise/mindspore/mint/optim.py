"""Torch's optimizers under torch's own arguments, called with gradients, and their schedules (``mint.optim``,
``experimental.optim``)."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from functools import partial
from inspect import signature
from typing import Any, ClassVar

import torch

from shardwise.mindspore.named import TABLES, absent, module_of
from shardwise.mindspore.nn.optimizer import Optimizer
from shardwise.mindspore.tensor import Parameter


class OfTorch(Optimizer):
    """A torch optimizer, called as ``optimizer(gradients)``. ``param_groups``: the settings of each group; its ``lr``
    is a parameter that may be assigned to. Every parameter decays, whatever its name."""

    make: type[torch.optim.Optimizer]

    def __init__(self, params: Iterable[Any], *args: Any, **kwargs: Any) -> None:
        bound = signature(self.make).bind(params, *args, **kwargs)
        bound.apply_defaults()
        self.settings = {name: value for name, value in bound.arguments.items() if name not in ("params", "lr")}
        listed = list(params)
        groups = listed if listed and isinstance(listed[0], dict) else [{"params": listed}] if listed else []
        super().__init__(bound.arguments["lr"], groups, self.settings.get("weight_decay", 0.0))
        self.param_groups = [
            {**self.settings, **group, "lr": Parameter(torch.tensor(rate(0), dtype=torch.float64), "lr", False)}
            for group, rate in zip(groups, self.rates, strict=True)
        ]
        self.rates = [partial(lambda group, step: float(group["lr"]), group) for group in self.param_groups]

    def build(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        now = [{**group, "lr": float(group["lr"])} for group in self.param_groups]
        return self.make(now, **self.settings)


_SHADOWS: weakref.WeakKeyDictionary[Any, torch.optim.Optimizer] = weakref.WeakKeyDictionary()


class LRScheduler:
    """A torch schedule: ``step()`` after every step, or epoch, of the optimizer sets the next rates of its groups.

    Torch's schedule updates a shadow optimizer without parameters, from which the rates are copied.
    """

    make: Any
    settings: ClassVar[dict[str, Any]] = {}

    def __init__(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        self.optimizer = optimizer
        if optimizer not in _SHADOWS:
            groups = [{"params": [torch.zeros(1)], "lr": float(group["lr"])} for group in optimizer.param_groups]
            _SHADOWS[optimizer] = torch.optim.SGD(groups)
        settings = {word: _torchs(x) for word, x in kwargs.items()} | self.settings
        self.torchs = self.make(_SHADOWS[optimizer], *map(_torchs, args), **settings)
        self._copy(_SHADOWS[optimizer].param_groups, optimizer.param_groups)

    def step(self, *args: Any) -> None:
        """Set the next rates. ReduceLROnPlateau takes a metric."""
        shadow = _SHADOWS[self.optimizer]
        self._copy(self.optimizer.param_groups, shadow.param_groups)
        shadow.step()
        self.torchs.step(*(float(x) if isinstance(x, torch.Tensor) else x for x in args))
        self._copy(shadow.param_groups, self.optimizer.param_groups)

    def get_last_lr(self) -> list[float]:
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    @property
    def last_epoch(self) -> int:
        return int(self.torchs.last_epoch)

    @staticmethod
    def _copy(source: list[dict[str, Any]], target: list[dict[str, Any]]) -> None:
        for source_group, target_group in zip(source, target, strict=True):
            if isinstance(target_group["lr"], torch.Tensor):
                target_group["lr"].data.fill_(float(source_group["lr"]))
            else:
                target_group["lr"] = float(source_group["lr"])


def _torchs(x: Any) -> Any:
    """Return torch's schedules in place of a list of ours."""
    return [getattr(part, "torchs", part) for part in x] if isinstance(x, (list, tuple)) else x


SCHEDULES = {
    name: type(name, (LRScheduler,), {
        "make": getattr(torch.optim.lr_scheduler, name), "__module__": f"{__package__}.lr_scheduler",
        "__doc__": "Torch's schedule.", "settings": {"cycle_momentum": False} if name == "CyclicLR" else {},
    })
    for name in TABLES["mint"]["schedules"].split()
}  # fmt: skip


_BODY = {"__module__": __name__, "__doc__": "Torch's optimizer."}
CLASSES = {name: type(name, (OfTorch,), {**_BODY, "make": getattr(torch.optim, name)})
           for name in TABLES["mint"]["optimizers"].split()}  # fmt: skip
globals().update(CLASSES)
lr_scheduler = module_of(f"{__package__}.lr_scheduler", {**SCHEDULES, "LRScheduler": LRScheduler})
__all__ = [*CLASSES, "Optimizer", "lr_scheduler"]
__getattr__ = absent(__name__, lambda: __all__)
