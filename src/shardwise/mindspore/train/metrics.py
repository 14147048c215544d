"""Metrics of ``Model.eval``. They see (loss, output, label) of every batch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

from shardwise.errors import problem


class Metric:
    """Base: ``clear``, ``update(output, label)`` and ``eval``."""

    wants_loss = False

    def clear(self) -> None:
        raise NotImplementedError

    def update(self, *inputs: Any) -> None:
        raise NotImplementedError

    def eval(self) -> Any:
        raise NotImplementedError

    def update_from(self, outputs: tuple[Any, ...]) -> None:
        arrays = [
            output.detach().cpu().numpy() if isinstance(output, torch.Tensor) else np.asarray(output)
            for output in outputs
        ]
        self.update(*(arrays[:1] if self.wants_loss else arrays[1:] or arrays))


class _Mean(Metric):
    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self.total, self.count = 0.0, 0

    def eval(self) -> float:
        if not self.count:
            raise RuntimeError(f"{type(self).__name__} has seen no batch")
        return self.total / self.count


class Loss(_Mean):
    """The mean of the losses of the batches."""

    wants_loss = True

    def update(self, *inputs: Any) -> None:
        self.total += float(np.mean(inputs[0]))
        self.count += 1


class Accuracy(_Mean):
    """How many of the rows whose largest output is at the label (a class number, or one-hot)."""

    def __init__(self, eval_type: str = "classification") -> None:
        if eval_type != "classification":
            raise NotImplementedError(f"Accuracy(eval_type={eval_type!r}): classification only")
        super().__init__()

    def update(self, *inputs: Any) -> None:
        output, label = inputs
        label = label.argmax(-1) if label.ndim == output.ndim else label
        self.total += float((output.argmax(-1) == label).sum())
        self.count += label.size


class MAE(_Mean):
    """The mean absolute difference."""

    def update(self, *inputs: Any) -> None:
        output, label = inputs
        self.total += float(np.abs(output.reshape(label.shape) - label).sum())
        self.count += label.size


class MSE(_Mean):
    """The mean squared difference."""

    def update(self, *inputs: Any) -> None:
        output, label = inputs
        self.total += float(np.square(output.reshape(label.shape) - label).sum())
        self.count += label.size


NAMES = {"loss": Loss, "accuracy": Accuracy, "acc": Accuracy, "mae": MAE, "mse": MSE}


def metrics_of(argument: Any) -> dict[str, Metric]:
    """From a name, several, or a dict of name -> Metric."""
    if argument is None:
        return {}
    if isinstance(argument, dict):
        return dict(argument)
    names: Iterable[str] = [argument] if isinstance(argument, str) else argument
    metrics: dict[str, Metric] = {}
    for name in names:
        if name not in NAMES:
            raise ValueError(
                problem(f"there is no metric {name!r}", fix=f"one of {', '.join(NAMES)}, or {{name: Metric}}")
            )
        metrics[name] = NAMES[name]()
    return metrics
