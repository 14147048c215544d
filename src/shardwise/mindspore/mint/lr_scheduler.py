"""Torch's learning rate schedules for ``mint.optim``'s optimizers."""

from __future__ import annotations

import weakref
from typing import Any, ClassVar

import torch

from shardwise.mindspore.named import TABLES, absent

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
        args = tuple([part.torchs for part in x] if _of_schedules(x) else x for x in args)
        kwargs = {word: [part.torchs for part in x] if _of_schedules(x) else x for word, x in kwargs.items()}
        self.torchs = self.make(_SHADOWS[optimizer], *args, **kwargs, **self.settings)
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


def _of_schedules(x: Any) -> bool:
    return isinstance(x, (list, tuple)) and bool(x) and isinstance(x[0], LRScheduler)


CLASSES = {
    name: type(name, (LRScheduler,), {
        "make": getattr(torch.optim.lr_scheduler, name), "__module__": __name__, "__doc__": "Torch's schedule.",
        "settings": {"cycle_momentum": False} if name == "CyclicLR" else {},
    })
    for name in TABLES["mint"]["schedules"].split()
}  # fmt: skip
globals().update(CLASSES)
__all__ = [*CLASSES, "LRScheduler"]
__getattr__ = absent(__name__, lambda: __all__)
