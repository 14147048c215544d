"""Torch's optimizers under torch's own arguments, called with gradients (``mint.optim``, ``experimental.optim``)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from inspect import signature
from typing import Any

import torch

from shardwise.mindspore.mint import lr_scheduler
from shardwise.mindspore.named import TABLES, absent
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
        self.rates = [_rate_of(group) for group in self.param_groups]

    def build(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        now = [{**group, "lr": float(group["lr"])} for group in self.param_groups]
        return self.make(now, **self.settings)


def _rate_of(group: dict[str, Any]) -> Callable[[int], float]:
    return lambda step: float(group["lr"])


_BODY = {"__module__": __name__, "__doc__": "Torch's optimizer."}
CLASSES = {name: type(name, (OfTorch,), {**_BODY, "make": getattr(torch.optim, name)})
           for name in TABLES["mint"]["optimizers"].split()}  # fmt: skip
globals().update(CLASSES)
__all__ = [*CLASSES, "Optimizer", "lr_scheduler"]
__getattr__ = absent(__name__, lambda: __all__)
