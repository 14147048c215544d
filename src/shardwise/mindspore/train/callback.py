"""Callbacks of ``Model.train``."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch

from shardwise.errors import problem
from shardwise.mindspore import staged
from shardwise.mindspore.checks import from_on
from shardwise.mindspore.named import WithSettings, absent
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


# Programs import all callbacks from here.
_ELSEWHERE = (
    "DatasetHelper", "EarlyStopping", "History", "LearningRateScheduler", "ReduceLROnPlateau", "SummaryCollector",
)  # fmt: skip
__all__ = ["Callback", "CheckpointConfig", "LambdaCallback", "LossMonitor", "ModelCheckpoint", "RunContext",
           "TimeMonitor", *_ELSEWHERE]  # fmt: skip


_missing = absent(__name__, lambda: __all__)


def __getattr__(name: str) -> Any:
    return getattr(import_module("shardwise.mindspore.train.recording"), name) if name in _ELSEWHERE else _missing(name)
