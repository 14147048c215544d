"""Callbacks of ``Model.train``: they print, save checkpoints, record curves for TensorBoard, or watch a value and act
on it: stop, or reduce the learning rate."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import nn

from shardwise import rank
from shardwise.errors import problem
from shardwise.mindspore import staged
from shardwise.mindspore.checks import closest, from_on, note, one_of, within
from shardwise.mindspore.named import SETTINGS, WithSettings
from shardwise.mindspore.tensor_methods import asnumpy
from shardwise.mindspore.train.serialization import save_checkpoint


class CallbackParams(dict[str, Any]):
    """State of training that callbacks may read: ``run_context.original_args()``. Entries are attributes, too. Numbers
    count from 1; ``cur_step_num`` continues over epochs; ``begin_epoch``: epochs already done when a run resumes."""

    def __init__(self, **entries: Any) -> None:
        names = ("network train_network optimizer loss_fn train_dataset valid_dataset net_outputs eval_network "
                 "train_dataset_element list_callback")  # fmt: skip
        numbers = "epoch_num batch_num cur_epoch_num begin_epoch cur_step_num"
        super().__init__({**dict.fromkeys(names.split()), **dict.fromkeys(numbers.split(), 0)}, mode="train",
                         dataset_sink_mode=False, parallel_mode="stand_alone", device_number=1, eval_results={},
                         metrics={})  # fmt: skip
        self.update(entries)

    def __missing__(self, name: str) -> Any:
        if name != "step_in_epoch":
            raise KeyError(name)
        return (self.cur_step_num - 1) % max(1, self.batch_num) + 1

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value

    def get(self, name: str, default: Any = None) -> Any:
        return getattr(self, name, default)


class RunContext:
    """The argument of callbacks: the parameters, and a way to stop."""

    def __init__(self, params: CallbackParams) -> None:
        self._params, self._stop = params, False

    def original_args(self) -> CallbackParams:
        return self._params

    def request_stop(self) -> None:
        self._stop = True

    def get_stop_requested(self) -> bool:
        return self._stop


def _old_name(name: str) -> Callable[[Any, RunContext], None]:
    """Return a method that calls the method with this name."""
    return lambda self, run_context: getattr(self, name)(run_context)


class Callback:
    """Base of callbacks: override methods as needed. The new methods call those with old names (``begin``,
    ``epoch_end``). Training and evaluation run inside ``with callback:``, however they end."""

    def begin(self, run_context: RunContext) -> None: ...
    def epoch_begin(self, run_context: RunContext) -> None: ...
    def step_begin(self, run_context: RunContext) -> None: ...
    def step_end(self, run_context: RunContext) -> None: ...
    def epoch_end(self, run_context: RunContext) -> None: ...
    def end(self, run_context: RunContext) -> None: ...

    on_train_begin, on_train_end = _old_name("begin"), _old_name("end")
    on_train_epoch_begin, on_train_epoch_end = _old_name("epoch_begin"), _old_name("epoch_end")
    on_train_step_begin, on_train_step_end = _old_name("step_begin"), _old_name("step_end")
    on_eval_begin, on_eval_end = on_train_begin, on_train_end
    on_eval_step_begin, on_eval_step_end = on_train_step_begin, on_train_step_end

    def __enter__(self) -> Callback:
        return self

    def __exit__(self, *error: object) -> None: ...


def notify(callbacks: Iterable[Callback], moment: str, run_context: RunContext) -> None:
    """Call a method of all callbacks."""
    for callback in callbacks:
        getattr(callback, moment)(run_context)


class WhileTraining(Callback):
    """A wrapper that passes evaluation events of ``Model.fit`` to the ``on_eval_*`` methods of a callback."""

    def __init__(self, callback: Callback) -> None:
        for moment in ("on_eval_begin", "on_eval_step_begin", "on_eval_step_end", "on_eval_end"):
            method = getattr(callback, moment)
            if getattr(method, "__func__", method) is not getattr(Callback, moment):
                setattr(self, moment, method)


def callbacks_of(argument: Any) -> list[Callback]:
    """Return one callback, several or none as a list. Raises TypeError for other objects."""
    listed = [] if argument is None else list(argument) if isinstance(argument, Iterable) else [argument]
    for entry in listed:
        if not isinstance(entry, Callback):
            raise TypeError(problem(f"{entry!r} is not a callback", fix="instances of subclasses of train.Callback"))
    return listed


class LossMonitor(WithSettings, Callback, per_print_times=1):
    """Printer of ``epoch: 3 step: 2, loss is 0.367389976978302`` on every rank, every ``per_print_times`` steps. A loss
    vector is averaged over this rank's part. In a pipeline the ranks of the last stage print (with
    ``pipeline_result_broadcast`` all). Raises ValueError when the loss is not finite."""

    def _settle(self, per_print_times: int) -> None:
        self._every = from_on("per_print_times", per_print_times, 0)

    def step_end(self, run_context: RunContext) -> None:
        params = run_context.original_args()
        if params.mode != "train":
            return
        value = loss_value(params.net_outputs)
        where = f"epoch: {params.cur_epoch_num} step: {params.step_in_epoch}"
        if not np.isfinite(value):
            raise ValueError(f"{where}. Invalid loss, terminating training.")
        if self._every and params.cur_step_num % self._every == 0 and staged.shows_loss():
            print_line(f"{where}, loss is {value}")

    def on_train_epoch_end(self, run_context: RunContext) -> None:
        params = run_context.original_args()
        if params.eval_results:
            print_line(f"Eval result: epoch {params.cur_epoch_num}, metrics: {params.eval_results}")


def print_line(text: str) -> None:
    """Print a line with one write, so that lines of ranks that share a log stay whole. (Unbuffered, ``print`` writes a
    line and its end separately.)"""
    print(f"{text}\n", end="", flush=True)


def loss_value(outputs: Any) -> float:
    """Return the loss (the first output) as a number; for a vector, the mean."""
    loss = outputs[0] if isinstance(outputs, (tuple, list)) else outputs
    if isinstance(loss, torch.Tensor):
        loss = loss.detach().as_subclass(torch.Tensor).cpu().numpy()
    return float(np.mean(loss))


class TimeMonitor(WithSettings, Callback, data_size=None, data_time=False):
    """Printer of the time of an epoch and its steps. ``data_size``: steps of an epoch."""

    _began = 0.0

    def epoch_begin(self, run_context: RunContext) -> None:
        self._began = time.perf_counter()

    def epoch_end(self, run_context: RunContext) -> None:
        milliseconds = 1000 * (time.perf_counter() - self._began)
        steps = self.data_size or run_context.original_args().batch_num or 1
        print_line(f"Train epoch time: {milliseconds:5.3f} ms, per step time: {milliseconds / steps:5.3f} ms")


class LambdaCallback(Callback):
    """A callback of functions: ``LambdaCallback(on_train_step_end=lambda run_context: ...)``."""

    def __init__(self, **functions: Any) -> None:
        for name, function in functions.items():
            if not hasattr(Callback, name):
                raise ValueError(problem(f"callbacks have no method {name!r}", fix="such as on_train_step_end"))
            if function is not None:
                setattr(self, name, function)


@dataclass
class CheckpointConfig:
    """Settings of checkpoints. Files are written before training goes on, and are not encrypted: ValueError for a key.

    Attributes:
        save_checkpoint_steps: steps between checkpoints; 0: none.
        save_checkpoint_seconds: seconds between checkpoints; 0: none.
        keep_checkpoint_max: the largest number of files.
        integrated_save: save whole tensors, which all ranks gather; else each rank saves its own parts.
        async_save: accepted without effect.
        append_info: ``"epoch_num"``, ``"step_num"`` or a dict.
        exception_save: save also when training ends with an error.
    """

    save_checkpoint_steps: int = 1
    save_checkpoint_seconds: int = 0
    keep_checkpoint_max: int = 5
    keep_checkpoint_per_n_minutes: int = 0
    integrated_save: bool = False
    async_save: bool = False
    saved_network: Any = None
    append_info: list[Any] = field(default_factory=list)
    enc_key: Any = None
    enc_mode: str = "AES-GCM"
    exception_save: bool = False
    crc_check: bool = False

    def __post_init__(self) -> None:
        if self.enc_key is not None:
            raise ValueError(problem("enc_key is given, and checkpoints are not encrypted here", fix="leave it out"))
        if self.keep_checkpoint_per_n_minutes and not self.keep_checkpoint_max:
            what = f"keep_checkpoint_per_n_minutes is {self.keep_checkpoint_per_n_minutes}"
            raise NotImplementedError(problem(what, fix="save_checkpoint_seconds, and keep_checkpoint_max"))
        for name in ("save_checkpoint_steps", "save_checkpoint_seconds", "keep_checkpoint_max"):
            from_on(name, getattr(self, name), 0)


class ModelCheckpoint(Callback):
    """Writer of ``<directory>/<prefix>-<epoch>_<step>.ckpt`` with this rank's tensors. Give each rank a directory of
    its own, as the documents do: ``ModelCheckpoint(directory=f"{rank_id}")``. If the directory has files of another
    run, the prefix gets ``_1``."""

    def __init__(
        self, prefix: str = "CKP", directory: str | None = None, config: CheckpointConfig | None = None
    ) -> None:
        if not isinstance(prefix, str) or "/" in prefix or not prefix:
            raise ValueError(problem(f"prefix is {prefix!r}", fix="the beginning of a file name, such as 'CKP'"))
        self._prefix, self._directory = prefix, Path(directory or os.getcwd())
        self._config = config or CheckpointConfig()
        self._files: list[Path] = []
        self._last_step, self._last_seconds = 0, time.monotonic()
        self._params: CallbackParams | None = None  # of the current training

    latest_ckpt_file_name = property(lambda self: str(self._files[-1]) if self._files else "")

    def begin(self, run_context: RunContext) -> None:
        params = run_context.original_args()
        self._params = params if params.mode == "train" else None
        self._directory.mkdir(parents=True, exist_ok=True)
        taken = {file.name for file in self._directory.glob("*.ckpt")} - {file.name for file in self._files}
        root, number = re.sub(r"_\d+$", "", self._prefix), 0
        while any(re.fullmatch(re.escape(self._prefix) + r"-\d+_\d+\.ckpt", name) for name in taken):
            number += 1
            self._prefix = f"{root}_{number}"

    def step_end(self, run_context: RunContext) -> None:
        params, config = run_context.original_args(), self._config
        if params.mode != "train":
            return
        steps, seconds = params.cur_step_num - self._last_step, time.monotonic() - self._last_seconds
        if 0 < config.save_checkpoint_steps <= steps or 0 < config.save_checkpoint_seconds <= seconds:
            self._save(params)

    def end(self, run_context: RunContext) -> None:
        params = run_context.original_args()
        if params.mode == "train" and params.cur_step_num > self._last_step:
            self._save(params)

    def __exit__(self, *error: object) -> None:
        params = self._params
        if self._config.exception_save and error[0] is not None and params and params.cur_step_num > self._last_step:
            self._save(params, integrated=False)  # other ranks may not come to a collective

    def _save(self, params: CallbackParams, integrated: bool | None = None) -> None:
        path = self._directory / f"{self._prefix}-{params.cur_epoch_num}_{params.step_in_epoch}.ckpt"
        info: dict[str, Any] = {}
        for entry in self._config.append_info:
            if isinstance(entry, dict):
                info |= entry
            elif entry in ("epoch_num", "step_num"):
                info[entry] = getattr(params, f"cur_{entry}")
            else:
                raise ValueError(problem(f"append_info has {entry!r}", fix="'epoch_num', 'step_num' or a dict"))
        saved = self._config.saved_network or params.network
        whole = self._config.integrated_save if integrated is None else integrated
        save_checkpoint(saved, str(path), whole, append_dict=info, optimizer=params.optimizer)
        self._files.append(path)
        self._last_step, self._last_seconds = params.cur_step_num, time.monotonic()
        while len(self._files) > max(1, self._config.keep_checkpoint_max) and self._config.keep_checkpoint_max:
            self._files.pop(0).unlink(missing_ok=True)


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


GROWS = ("acc", "precision", "recall", "f1", "auc")  # parts of names of metrics that should grow


class _Watching(WithSettings, Callback):
    """Base of callbacks that act on a value after an epoch. ``monitor``: "loss", or "eval_" and a metric;
    ``min_delta``: least improvement; ``act`` is told whether the value is the best so far."""

    checks: ClassVar = {
        "mode": one_of("auto", "min", "max"), "factor": within(0, 1, "a number between 0 and 1"),
        "patience": lambda name, value: from_on(name, value, 0, "a number of epochs"),
    }  # fmt: skip

    def _settle(self) -> None:
        grows = self.mode == "max" or (self.mode == "auto" and any(word in self.monitor.lower() for word in GROWS))
        self.sign, self.best, self.wait = 1.0 if grows else -1.0, -np.inf, 0

    def on_train_begin(self, run_context: RunContext) -> None:
        self.best, self.wait = -np.inf, 0

    def on_train_epoch_end(self, run_context: RunContext) -> None:
        value = self.value(run_context)
        if value is not None:
            is_better = self.sign * value - abs(self.min_delta) > self.best
            self.best = self.sign * value if is_better else self.best
            self.act(value, is_better, run_context)

    def act(self, value: float, is_better: bool, run_context: RunContext) -> None:
        raise NotImplementedError

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


class EarlyStopping(_Watching, **SETTINGS["train.EarlyStopping"]):
    """Stop of training if a value has not improved for ``patience`` epochs, or is not better than ``baseline``.
    ``restore_best_weights``: restore the weights of the best epoch at the end."""

    def _settle(self) -> None:
        super()._settle()
        self.stopped_epoch = 0
        self._weights: dict[str, torch.Tensor] = {}

    def act(self, value: float, is_better: bool, run_context: RunContext) -> None:
        params = run_context.original_args()
        self.wait += 1
        if is_better and self.restore_best_weights:
            self._weights = {name: p.detach().clone() for name, p in params.network.named_parameters()}
        if is_better and (self.baseline is None or self.sign * value > self.sign * self.baseline):
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

    resting = 0

    def act(self, value: float, is_better: bool, run_context: RunContext) -> None:
        params = run_context.original_args()
        if is_better or self.resting:
            self.wait = 0
        self.resting = max(self.resting - 1, 0)
        if is_better or self.resting:
            return
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
    "Callback", "CheckpointConfig", "EarlyStopping", "History", "LambdaCallback", "LearningRateScheduler",
    "LossMonitor", "ModelCheckpoint", "ReduceLROnPlateau", "RunContext", "SummaryCollector", "SummaryRecord",
    "TimeMonitor",
]  # fmt: skip
