"""``sw.Trainer``: a ready training loop around ``par.step``, built only on the public API."""

from __future__ import annotations

import json
import math
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from shardwise.costs.flops import training_flops
from shardwise.costs.kernels import peak_flops
from shardwise.errors import PlanWarning, ShardwiseError, problem
from shardwise.graph.batch import num_samples
from shardwise.graph.ir import Graph
from shardwise.plans.price_scope import priced_cluster
from shardwise.runtime.agree import from_rank_zero, rank_and_world_size
from shardwise.runtime.parallel import Parallel
from shardwise.train.checkpoints import finish_saving, save_checkpoint
from shardwise.train.data import DataLoader, arguments_of
from shardwise.train.local_folder import LocalFolder
from shardwise.train.peers import PeerCopy
from shardwise.train.recovery import Recovery
from shardwise.train.retention import Keep
from shardwise.train.stores import Folder, Place, answered, folder_of

Evaluate = Callable[[Parallel], Mapping[str, float]]
Callback = Callable[["Trainer", Mapping[str, float]], None]


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
        folder: folder or URL for checkpoints (``step-N``, written in the background), and for ``log.jsonl``. In a store
            the log is objects ``log/STEP.jsonl``, written with the checkpoints.
        save_every: steps between checkpoints; one is always saved at the end.
        keep: which checkpoints to keep.
        peer_copy: as for ``sw.Recovery``.
        log_every: steps between log lines (on rank 0: loss, learning rate, gradient norm, samples per second, metrics;
            ``mfu``, the part of the devices' peak that the model's FLOPs are; ``memory_bytes``, the peak of a GPU).
        callbacks: functions that every rank calls with the trainer and each log line, for W&B or early stopping. Loss,
            rate, norm and metrics are equal on all ranks, seconds and memory are those of the rank.
        tensorboard: whether to log for TensorBoard too.
        progress: whether rank 0 shows a progress bar, or where there is no terminal a line for every logged step.

    Attributes:
        step: number of finished optimizer steps.
        metrics: results of the latest evaluation.
        stopped: whether a signal or ``stop`` ended training.

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
        folder: Place | None = None,
        save_every: int | None = None,
        keep: Keep | None = None,
        peer_copy: PeerCopy | None = None,
        log_every: int = 10,
        callbacks: Sequence[Callback] = (),
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
        if tensorboard and not isinstance(folder_of(folder or ""), LocalFolder):
            raise ShardwiseError(f"tensorboard= needs a folder, and {folder} is in a store", fix="leave it out")
        self.par, self.optimizer, self.loader, self.scheduler = par, optimizer, loader, scheduler
        self.scaler = torch.amp.GradScaler(par.device.type, enabled=False) if scaler is None else scaler
        self.accumulate, self.clip_norm = accumulate, clip_norm
        self.evaluate, self.evaluate_every = evaluate, evaluate_every
        self.folder, self.save_every, self.keep = None if folder is None else folder_of(folder), save_every, keep
        self.log_every, self.tensorboard, self.progress = log_every, tensorboard, progress
        self.callbacks = tuple(callbacks)
        self._flops: dict[int, tuple[Graph, tuple[float, set[torch.dtype]]]] = {}  # id -> the graph, which keeps it
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
        self.stopped = self._signalled = False
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
                if is_last or self._is_due(self.log_every):
                    seconds = time.perf_counter() - since
                    line = {"loss": loss.item(), "lr": float(self.optimizer.param_groups[0]["lr"])}
                    line |= {} if norm is None else {"grad_norm": norm.item()}
                    self._tell(log, {**line, **self._speed(seconds, samples, count)})
                    since, samples = time.perf_counter(), 0
                if self.evaluate is not None and (is_last or self._is_due(self.evaluate_every)):
                    self._evaluate()
                    self._tell(log, self.metrics)
                log.advance(self.step)
                self.stopped = self._recovery.keep(self.step, stopping=self._signalled)
                if self._is_due(self.save_every):
                    self.save()
                    log.store(self.step)
            if self.folder is not None and self._saved != self.step:
                self.save()
            log.store(self.step)
            finish_saving(self.par)

    def stop(self) -> None:
        """End ``fit`` after the current step, on all ranks and with a checkpoint. Any rank may call it."""
        self._signalled = True

    def _tell(self, log: _Log, line: Mapping[str, float]) -> None:
        log.write(self.step, line)
        for callback in self.callbacks:
            callback(self, line)

    def _flops_of(self, graph: Graph) -> tuple[float, set[torch.dtype]]:
        """Return what ``training_flops`` does, which looks at every operator, counted once per graph."""
        if id(graph) not in self._flops:
            self._flops[id(graph)] = graph, training_flops(graph)
        return self._flops[id(graph)][1]

    def _speed(self, seconds: float, samples: int, last: int) -> dict[str, float]:
        """Return what is logged of speed and memory. ``last``: the samples of the last step, whose graphs are known."""
        line = {"samples_per_second": samples / seconds}
        counted = [(count, *self._flops_of(graph)) for graph, count in self.par.graphs]
        cluster = priced_cluster(self.par.plan)
        if cluster is not None and last:
            flops = self.accumulate * sum(count * flops for count, flops, _ in counted) * samples / last
            peak = peak_flops(cluster, {dtype for _, _, dtypes in counted for dtype in dtypes})
            line |= {"mfu": flops / (seconds * peak)} if peak else {}
        if self.par.device.type == "cuda":
            line["memory_bytes"] = torch.cuda.max_memory_allocated(self.par.device)
        return line

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
        if isinstance(self.folder, LocalFolder):
            self.folder.path.mkdir(parents=True, exist_ok=True)
        self.step = self._recovery.resume()
        if self.folder is None or self.step == 0:
            return
        if from_rank_zero(partial(_exists, self.folder / f"step-{self.step}")):
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
                what = "an epoch of the loader has no batch"
                fix = "a smaller batch_size, or drop_last=False; an iterable data set must restart each epoch"
                raise ShardwiseError(what, fix=fix)

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


def _exists(folder: Folder) -> bool:
    with answered(folder):
        return folder.exists()


class _Log:
    """Logs and progress bar of rank 0; does nothing on other ranks."""

    def __init__(self, folder: Folder | None, tensorboard: bool, progress: bool, num_steps: int) -> None:
        self._stack = ExitStack()
        self._file: Any = None
        self._folder, self._lines = folder, list[str]()  # in a store, which appends to nothing
        self._board: Any = None
        self._bar: Any = None
        if rank_and_world_size()[0] != 0:
            return
        if isinstance(folder, LocalFolder):
            self._file = self._stack.enter_context((folder.path / "log.jsonl").open("a", encoding="utf-8"))
            if tensorboard:
                self._board = self._stack.enter_context(_board(folder.path))
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
        line = json.dumps({"step": step, **finite}) + "\n"
        if self._file is not None:
            self._file.write(line)
            self._file.flush()
        elif self._folder is not None:
            self._lines.append(line)
        for name, value in values.items() if self._board is not None else ():
            self._board.add_scalar(name, value, step)
        if self._bar is not None and not self._bar.console.is_terminal:
            print(f"step {step}: {', '.join(f'{name} {value:.4g}' for name, value in values.items())}", flush=True)

    def store(self, step: int) -> None:
        """Write the lines since the last call to a store, as one object. What it refuses waits for the next call."""
        if not self._lines or self._folder is None or rank_and_world_size()[0]:
            return
        try:
            (self._folder / "log").put(f"{step:08}.jsonl", "".join(self._lines))
            self._lines.clear()
        except OSError as error:
            warnings.warn(f"the log of step {step} was not stored: {error}", PlanWarning, stacklevel=3)

    def advance(self, step: int) -> None:
        if self._bar is not None:
            self._bar.update(self._task, completed=step)


def _board(folder: Path) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ShardwiseError("tensorboard is not installed", fix="pip install tensorboard") from error
    return SummaryWriter(str(folder))
