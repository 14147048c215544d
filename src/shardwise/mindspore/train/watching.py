"""Callbacks that watch a value and act on it: stop, reduce the learning rate, or record it."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from shardwise.errors import problem
from shardwise.mindspore.checks import from_on
from shardwise.mindspore.named import WithSettings
from shardwise.mindspore.notes import note
from shardwise.mindspore.train.callback import Callback, RunContext, loss_value

MODES = ("auto", "min", "max")
GROWS = ("acc", "precision", "recall", "f1", "auc")  # parts of names of metrics that should grow


class _Watching(WithSettings, Callback):
    """Base of watching callbacks. ``monitor``: "loss", or "eval_" and a metric; ``min_delta``: least improvement."""

    def _settle(self) -> None:
        if self.mode not in MODES:
            raise ValueError(problem(f"mode is {self.mode!r}", fix=f"one of {', '.join(MODES)}"))
        from_on("patience", self.patience, 0, "a number of epochs")
        grows = self.mode == "max" or (self.mode == "auto" and any(word in self.monitor.lower() for word in GROWS))
        self.sign, self.best, self.wait = 1.0 if grows else -1.0, -np.inf, 0

    def on_train_begin(self, run_context: RunContext) -> None:
        self.best, self.wait = -np.inf, 0

    def value(self, run_context: RunContext) -> float | None:
        """Return the watched value; None, with a note, if there is no such value."""
        params = run_context.original_args()
        if self.monitor == "loss":
            return loss_value(params.net_outputs)
        results = {f"eval_{name}": value for name, value in params.eval_results.items()}
        if self.monitor in results:
            return float(np.mean(results[self.monitor]))
        if params.eval_results or params.mode == "train":
            choices = ", ".join(("loss", *results))
            note(f"{type(self).__name__} watches {self.monitor!r}, which is not among {choices}")
        return None

    def is_better(self, value: float) -> bool:
        """Return whether a value is the best so far, and store it in that case."""
        if self.sign * value - abs(self.min_delta) <= self.best:
            return False
        self.best = self.sign * value
        return True


class EarlyStopping(
    _Watching, monitor="eval_loss", min_delta=0, patience=0, verbose=False, mode="auto", baseline=None,
    restore_best_weights=False,
):  # fmt: skip
    """Stop of training if a value has not improved for ``patience`` epochs, or is not better than ``baseline``.
    ``restore_best_weights``: restore the weights of the best epoch at the end."""

    def _settle(self) -> None:
        super()._settle()
        self.stopped_epoch = 0
        self._weights: dict[str, torch.Tensor] = {}

    def on_train_epoch_end(self, run_context: RunContext) -> None:
        value, params = self.value(run_context), run_context.original_args()
        if value is None:
            return
        self.wait += 1
        if self.is_better(value):
            if self.restore_best_weights:
                self._weights = {name: p.detach().clone() for name, p in params.network.named_parameters()}
            if self.baseline is None or self.sign * value > self.sign * self.baseline:
                self.wait = 0
        if self.wait >= self.patience and (self.wait or self.patience):
            self.stopped_epoch = params.cur_epoch_num
            run_context.request_stop()

    def on_train_end(self, run_context: RunContext) -> None:
        if self.stopped_epoch and self.verbose:
            print(f"Epoch {self.stopped_epoch:05d}: early stopping")
        with torch.no_grad():
            for name, weight in self._weights.items():
                run_context.original_args().network.get_parameter(name).copy_(weight)


class ReduceLROnPlateau(
    _Watching, monitor="eval_loss", factor=0.1, patience=10, verbose=False, mode="auto", min_delta=1e-4, cooldown=0,
    min_lr=0,
):  # fmt: skip
    """Reduction of the learning rate by ``factor``, down to ``min_lr``, if a value has not improved for ``patience``
    epochs. Then wait ``cooldown`` epochs."""

    def _settle(self) -> None:
        super()._settle()
        if not 0 < self.factor < 1:
            raise ValueError(problem(f"factor is {self.factor}", fix="a number between 0 and 1"))
        self.resting = 0

    def on_train_epoch_end(self, run_context: RunContext) -> None:
        value, params = self.value(run_context), run_context.original_args()
        if value is None:
            return
        if self.resting:
            self.resting, self.wait = self.resting - 1, 0
        if self.is_better(value):
            self.wait = 0
        elif not self.resting:
            self.wait += 1
            rate = params.optimizer.rate_now()
            if self.wait >= self.patience and rate > self.min_lr:
                params.optimizer.learning_rate = max(rate * self.factor, self.min_lr)
                self.resting, self.wait = self.cooldown, 0
                if self.verbose:
                    now = params.optimizer.rate_now()
                    print(f"Epoch {params.cur_epoch_num:05d}: ReduceLROnPlateau reducing learning rate to {now}.")


class LearningRateScheduler(WithSettings, Callback, learning_rate_function=...):
    """Schedule that sets the learning rate to ``function(present rate, step number)`` after every step."""

    def _settle(self) -> None:
        if not callable(self.learning_rate_function):
            what = f"LearningRateScheduler({self.learning_rate_function!r})"
            raise TypeError(problem(what, fix="a function of the rate and the step"))

    def step_end(self, run_context: RunContext) -> None:
        params = run_context.original_args()
        if params.mode == "train":
            rate = self.learning_rate_function(params.optimizer.rate_now(), params.cur_step_num)
            params.optimizer.learning_rate = float(rate)


class History(Callback):
    """Record of training. ``epoch``: epoch numbers; ``history``: losses at their ends, and metrics."""

    def __init__(self) -> None:
        self.history: dict[str, list[Any]] = {}
        self.epoch: dict[str, list[int]] = {}

    def begin(self, run_context: RunContext) -> None:
        if run_context.original_args().mode == "train":
            self.history, self.epoch = {}, {"epoch": []}

    def epoch_end(self, run_context: RunContext) -> None:
        params = run_context.original_args()
        self.epoch["epoch"].append(params.cur_epoch_num)
        self.history.setdefault("net_output", []).append(loss_value(params.net_outputs))
        for name, value in params.eval_results.items():
            self.history.setdefault(f"eval_{name}", []).append(value)
