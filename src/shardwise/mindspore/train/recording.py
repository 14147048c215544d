"""Callbacks that record a run (curves for TensorBoard), or watch a value and act on it: stop, or reduce the learning
rate."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import nn

from shardwise import rank
from shardwise.errors import problem
from shardwise.mindspore.checks import closest, from_on, note, one_of, within
from shardwise.mindspore.named import SETTINGS, WithSettings
from shardwise.mindspore.tensor_methods import asnumpy
from shardwise.mindspore.train.callback import Callback, RunContext, loss_value
from shardwise.mindspore.train.model import size_of, steps_of

KINDS = {"scalar": "add_scalar", "tensor": "add_histogram", "histogram": "add_histogram", "image": "add_images"}
TENSORBOARD = "pip install tensorboard, which torch.utils.tensorboard writes with"


class SummaryRecord:
    """A TensorBoard log folder; as a context it closes its file. ``add_value("scalar", "loss", value)`` adds to the
    present step, ``record(step)`` writes it. Raises ImportError if tensorboard is not installed."""

    def __init__(self, log_dir: str, *, network: nn.Module | None = None, **settings: Any) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ImportError(problem("summaries need tensorboard, which is not installed", fix=TENSORBOARD)) from error
        self.log_dir = str(Path(log_dir).resolve())
        self._writer: Any = SummaryWriter(self.log_dir)
        self._values: list[tuple[str, str, Any]] = []
        self.flush, self.close = self._writer.flush, self._writer.close

    def add_value(self, plugin: str, name: str, value: Any) -> None:
        """Add a value to the present step. ``plugin``: "scalar", "tensor", "histogram" or "image" (batch, channels,
        height, width)."""
        if plugin not in KINDS:
            raise ValueError(problem(f"there is no summary {plugin!r}", fix=closest(plugin, KINDS)))
        self._values.append((plugin, name, asnumpy(value) if isinstance(value, torch.Tensor) else np.asarray(value)))

    def record(self, step: int, train_network: Any = None, plugin_filter: Any = None) -> bool:
        """Write the added values under a step."""
        for plugin, name, value in self._values:
            if plugin_filter is None or plugin_filter(plugin):
                single = float(value.reshape(-1)[0]) if plugin == "scalar" else value
                getattr(self._writer, KINDS[plugin])(name, single, step)
        self._values = []
        return True

    def __enter__(self) -> SummaryRecord:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class SummaryCollector(Callback):
    """Recorder of the loss, the learning rate, metrics and histograms of parameters, every ``collect_freq`` steps. Rank
    0 writes to ``summary_dir``, any other rank r to its folder ``rank_r``.

    ``collect_specified_data``: switches by name (``collect_metric``, ``histogram_regular``, a pattern of names of
    parameters). Graphs, landscapes and lineage are not written; a request for graphs or landscapes prints a note.
    """

    def __init__(
        self, summary_dir: str, collect_freq: int = 10, num_process: int = 32,
        collect_specified_data: dict[str, Any] | None = None, keep_default_action: bool = True,
        custom_lineage_data: dict[str, Any] | None = None, **settings: Any,
    ) -> None:  # fmt: skip
        self._every, self._wanted = from_on("collect_freq", collect_freq, 1), collect_specified_data or {}
        self._default = keep_default_action
        self._folder = Path(summary_dir) if rank() == 0 else Path(summary_dir) / f"rank_{rank()}"
        self._record: SummaryRecord | None = None
        for name in ("collect_landscape", "collect_graph", "collect_input_data"):
            if self._wanted.get(name):
                note(f"SummaryCollector writes no {name.removeprefix('collect_')}: curves and histograms only")

    def begin(self, run_context: RunContext) -> None:
        self._record = self._record or SummaryRecord(str(self._folder))

    def step_end(self, run_context: RunContext) -> None:
        params = run_context.original_args()
        due = params.cur_step_num == 1 or params.cur_step_num % self._every == 0
        if params.mode != "train" or not due or self._record is None:
            return
        if self._wanted.get("collect_metric", self._default):
            self._record.add_value("scalar", "loss", loss_value(params.net_outputs))
            if params.optimizer is not None:
                self._record.add_value("scalar", "learning_rate", params.optimizer.rate_now())
        pattern = self._wanted.get("histogram_regular", "" if self._default else None)
        for name, parameter in params.network.named_parameters() if pattern is not None else ():
            if parameter.numel() and re.search(str(pattern), name):
                self._record.add_value("histogram", f"{name}/auto", parameter.detach())
        self._record.record(params.cur_step_num)

    def epoch_end(self, run_context: RunContext) -> None:
        params = run_context.original_args()
        if self._record is not None and params.mode == "train" and params.eval_results:
            for name, value in params.eval_results.items():
                self._record.add_value("scalar", f"eval_{name}", np.mean(value))
            self._record.record(params.cur_step_num)

    def end(self, run_context: RunContext) -> None:
        if run_context.original_args().mode == "train":
            self.__exit__()

    def __exit__(self, *error: object) -> None:
        if self._record is not None:
            self._record.close()
            self._record = None


class DatasetHelper:
    """An iterator over the rows of a dataset, as tuples. ``sink_size``: rows per epoch."""

    def __init__(self, dataset: Any, dataset_sink_mode: bool = True, sink_size: int = -1, epoch_num: int = 1) -> None:
        self.dataset, self._size = dataset, sink_size

    def __iter__(self) -> Any:
        return steps_of(self.dataset, self._size)

    def sink_size(self) -> int:
        """Return the rows per epoch."""
        return size_of(self.dataset, self._size)


GROWS = ("acc", "precision", "recall", "f1", "auc")  # parts of names of metrics that should grow


class _Watching(WithSettings, Callback):
    """Base of watching callbacks. ``monitor``: "loss", or "eval_" and a metric; ``min_delta``: least improvement."""

    checks: ClassVar = {
        "mode": one_of("auto", "min", "max"), "factor": within(0, 1, "a number between 0 and 1"),
        "patience": lambda name, value: from_on(name, value, 0, "a number of epochs"),
    }  # fmt: skip

    def _settle(self) -> None:
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


class EarlyStopping(_Watching, **SETTINGS["train.EarlyStopping"]):
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


class ReduceLROnPlateau(_Watching, **SETTINGS["train.ReduceLROnPlateau"]):
    """Reduction of the learning rate by ``factor``, down to ``min_lr``, if a value has not improved for ``patience``
    epochs. Then wait ``cooldown`` epochs."""

    def _settle(self) -> None:
        super()._settle()
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


__all__ = [
    "DatasetHelper", "EarlyStopping", "History", "LearningRateScheduler", "ReduceLROnPlateau", "SummaryCollector",
    "SummaryRecord",
]  # fmt: skip
