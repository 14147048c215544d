"""``sw.Trainer``: a ready training loop around ``par.step``, built only on the public API."""

from __future__ import annotations

import json
import math
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

from shardwise.errors import PlanWarning, ShardwiseError, problem
from shardwise.graph.batch import num_samples
from shardwise.runtime.agree import gather_values, rank_and_world_size
from shardwise.runtime.parallel import Parallel
from shardwise.train.checkpoints import finish_saving, save_checkpoint
from shardwise.train.data import DataLoader, arguments_of
from shardwise.train.peers import PeerCopy
from shardwise.train.recovery import Recovery
from shardwise.train.retention import Keep

Evaluate = Callable[[Parallel], Mapping[str, float]]


class Trainer:
    """Trains a parallel module on the batches of a loader. All ranks create and use it together.

    Args:
        par: the parallel module.
        optimizer: the optimizer, created from ``par.parameters()``.
        loader: its batches are the arguments of ``par.step`` (a dict: by name).
        scheduler: a learning-rate scheduler, stepped after every optimizer step.
        scaler: a gradient scaler, as float16 needs.
        accumulate: number of batches whose mean gradient makes a step. (A plan with micro-batches does this within one
            batch, exactly.)
        clip_norm: maximum norm of the whole gradient.
        evaluate: returns metrics that are equal on all ranks. Called every ``evaluate_every`` steps and at the end, in
            eval mode and without gradients.
        evaluate_every: steps between evaluations.
        folder: folder for checkpoints (``step-N``, written in the background), and for ``log.jsonl``.
        save_every: steps between checkpoints; one is always saved at the end.
        keep: which checkpoints to keep.
        peer_copy: as for ``sw.Recovery``.
        log_every: steps between log lines (on rank 0: loss, learning rate, gradient norm, samples per second, metrics).
        tensorboard: whether to log for TensorBoard too.
        progress: whether to show a progress bar on rank 0's terminal.

    Attributes:
        step: number of finished optimizer steps.
        metrics: results of the latest evaluation.
        stopped: whether a signal ended training.

    Raises:
        ShardwiseError: an invalid number, or options that need ``folder``.
    """

    def __init__(
        self,
        par: Parallel,
        optimizer: torch.optim.Optimizer,
        loader: DataLoader,
        *,
        scheduler: Any = None,
        scaler: torch.amp.GradScaler | None = None,
        accumulate: int = 1,
        clip_norm: float | None = None,
        evaluate: Evaluate | None = None,
        evaluate_every: int | None = None,
        folder: str | Path | None = None,
        save_every: int | None = None,
        keep: Keep | None = None,
        peer_copy: PeerCopy | None = None,
        log_every: int = 10,
        tensorboard: bool = False,
        progress: bool = True,
    ) -> None:
        counts = {
            "accumulate": accumulate,
            "evaluate_every": evaluate_every,
            "save_every": save_every,
            "log_every": log_every,
        }
        for name, count in counts.items():
            if count is not None and (isinstance(count, bool) or not isinstance(count, int) or count < 1):
                raise ShardwiseError(f"{name} must be a number, 1 or more; got {count!r}")
        if folder is None and (save_every or keep or tensorboard):
            raise ShardwiseError("save_every=, keep= and tensorboard= need a folder", fix="give folder=")
        self.par, self.optimizer, self.loader, self.scheduler = par, optimizer, loader, scheduler
        self.scaler = torch.amp.GradScaler(par.device.type, enabled=False) if scaler is None else scaler
        self.accumulate, self.clip_norm = accumulate, clip_norm
        self.evaluate, self.evaluate_every = evaluate, evaluate_every
        self.folder, self.save_every, self.keep = None if folder is None else Path(folder), save_every, keep
        self.log_every, self.tensorboard, self.progress = log_every, tensorboard, progress
        self.step = 0
        self.metrics: dict[str, float] = {}
        self.stopped = False
        schedulers: Any = () if scheduler is None else scheduler
        self._resumables = {"schedulers": schedulers, "scaler": scaler, "data": loader}
        self._recovery = Recovery(par, optimizer, folder=self.folder, peer_copy=peer_copy, **self._resumables)
        self._saved: int | None = None
        self._signalled = False

    def fit(self, num_steps: int) -> None:
        """Train up to step ``num_steps``, from the newest checkpoint in the folder if there is one.

        Under ``shardwise run --elastic`` training continues from the last step after a loss. When any rank gets
        SIGTERM, all ranks finish their current step, save, and return with ``stopped`` set.

        Args:
            num_steps: total number of optimizer steps, including those of the checkpoint.
        """
        self._resume()
        if not self.par.training:  # else submodules that the user froze with eval() stay frozen
            self.par.train()
        with ExitStack() as stack:
            stack.enter_context(self._noticing_signals())
            log = stack.enter_context(_Log(self.folder, self.tensorboard, self.progress, num_steps))
            since, samples = time.perf_counter(), 0
            batches = self._batches()
            while self.step < num_steps and not self.stopped:
                loss, norm, count = self._train_step(batches)
                samples += count
                self.step += 1
                is_last = self.step == num_steps
                if self.evaluate is not None and (is_last or self._is_due(self.evaluate_every)):
                    self._evaluate()
                    log.write(self.step, self.metrics)
                if is_last or self._is_due(self.log_every):
                    seconds = time.perf_counter() - since
                    rate = self.optimizer.param_groups[0]["lr"]
                    line = {"loss": loss.item(), "lr": float(rate), "samples_per_second": samples / seconds}
                    log.write(self.step, line if norm is None else {**line, "grad_norm": norm.item()})
                    since, samples = time.perf_counter(), 0
                log.advance(self.step)
                self.stopped = self._recovery.keep(self.step, stopping=self._signalled)
                if self._is_due(self.save_every):
                    self.save()
            if self.folder is not None and self._saved != self.step:
                self.save()
            finish_saving(self.par)

    def save(self) -> None:
        """Save a checkpoint of the current state, in the background."""
        assert self.folder is not None, "a trainer without a folder does not save"
        save_checkpoint(
            self.folder / f"step-{self.step}",
            self.par,
            self.optimizer,
            step=self.step,
            **self._resumables,
            metrics={name: value for name, value in self.metrics.items() if math.isfinite(value)},
            keep=self.keep,
            blocking=False,
        )
        self._saved = self.step

    def _resume(self) -> None:
        if self.folder is not None:
            self.folder.mkdir(parents=True, exist_ok=True)
        self.step = self._recovery.resume()
        if self.folder is None or self.step == 0:
            return
        is_saved = gather_values((self.folder / f"step-{self.step}").exists())[0]
        if is_saved:
            self._saved = self.step
        elif self._is_due(self.save_every):  # ranks were lost during this save
            self.save()

    def _batches(self) -> Iterator[Any]:
        while True:
            had_one = self.loader.cursor > 0
            for batch in self.loader:
                had_one = True
                yield batch
            if not had_one:
                raise ShardwiseError(
                    "an epoch of the loader has no batch",
                    fix="a smaller batch_size, or drop_last=False; an iterable data set must restart each epoch",
                )

    def _train_step(self, batches: Iterator[Any]) -> tuple[torch.Tensor, torch.Tensor | None, int]:
        """Return (mean loss, gradient norm before clipping, number of samples)."""
        losses, samples = [], 0
        for _ in range(self.accumulate):
            args, kwargs = arguments_of(next(batches))
            samples += num_samples((args, kwargs)) or 0
            losses.append(self.par.step(*args, scaler=self.scaler, **kwargs))
        if self.accumulate > 1:
            for parameter in self.par.parameters():
                if parameter.grad is not None:
                    parameter.grad /= self.accumulate
        norm = None
        if self.clip_norm is not None:
            self.scaler.unscale_(self.optimizer)
            norm = torch.nn.utils.clip_grad_norm_(self.par.parameters(), self.clip_norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        if self.scheduler is not None:
            self.scheduler.step()
        return torch.stack(losses).mean(), norm, samples

    def _is_due(self, every: int | None) -> bool:
        return every is not None and self.step % every == 0

    def _evaluate(self) -> None:
        assert self.evaluate is not None
        modes = [(module, module.training) for module in self.par.modules()]
        self.par.eval()
        try:
            with torch.no_grad():
                self.metrics = {name: float(value) for name, value in self.evaluate(self.par).items()}
        finally:
            for module, training in modes:
                module.training = training

    @contextmanager
    def _noticing_signals(self) -> Iterator[None]:
        def notice(number: int, frame: object) -> None:
            self._signalled = True

        if threading.current_thread() is not threading.main_thread():
            what = "fit() runs in a thread, where signals cannot be caught: at SIGTERM this process ends without a save"
            warnings.warn(problem(what, fix="call fit() in the main thread"), PlanWarning, stacklevel=4)
            yield
            return
        before = signal.signal(signal.SIGTERM, notice)
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, before)


class _Log:
    """Logs and progress bar of rank 0; does nothing on other ranks."""

    def __init__(self, folder: Path | None, tensorboard: bool, progress: bool, num_steps: int) -> None:
        self._stack = ExitStack()
        self._file: Any = None
        self._board: Any = None
        self._bar: Any = None
        if rank_and_world_size()[0] != 0:
            return
        if folder is not None:
            self._file = self._stack.enter_context((folder / "log.jsonl").open("a", encoding="utf-8"))
        if tensorboard:
            self._board = self._stack.enter_context(_board(folder))
        if progress:
            from rich.progress import Progress

            self._bar = self._stack.enter_context(Progress(transient=True))
            self._task = self._bar.add_task("training", total=num_steps)

    def __enter__(self) -> _Log:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def write(self, step: int, values: Mapping[str, float]) -> None:
        finite = {
            name: value if math.isfinite(value) else str(value) for name, value in values.items()
        }  # JSON has no NaN
        if self._file is not None:
            self._file.write(json.dumps({"step": step, **finite}) + "\n")
            self._file.flush()
        for name, value in values.items() if self._board is not None else ():
            self._board.add_scalar(name, value, step)

    def advance(self, step: int) -> None:
        if self._bar is not None:
            self._bar.update(self._task, completed=step)


def _board(folder: Path | None) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ShardwiseError("tensorboard is not installed", fix="pip install tensorboard") from error
    return SummaryWriter(str(folder))
