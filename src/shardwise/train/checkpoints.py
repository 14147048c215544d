"""``sw.save_checkpoint``: save the state of a training run, for any plan and any number of ranks.

A checkpoint stores the elements of global tensors under their original names (``train.parts``), independent of the
sharding. The ranks agree on what each writes (``train.sharing``) and write it (``train.saving``); without ``blocking``
they copy it to a buffer first, and train on meanwhile.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import warnings
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch

from shardwise.errors import CheckpointError, PlanWarning, ShardwiseError
from shardwise.runtime.agree import (
    gather_values,
    patience_seconds,
    raise_first,
    rank_and_world_size,
    show_progress_once,
)
from shardwise.runtime.parallel_module import ParallelModule
from shardwise.train.files import StagedFile, StreamedFile
from shardwise.train.manifest import Manifest
from shardwise.train.parts import MODEL, Names, TensorPart, TrainingState, state_of
from shardwise.train.retention import Keep
from shardwise.train.saving import SaveJob, Saving, give_up, make_room, taken
from shardwise.train.sharing import PlannedFile, Writers, describe_parts
from shardwise.train.stores import Folder, Place, folder_of
from shardwise.train.values import encode
from shardwise.untrusted_text import check_texts


class Resumable(Protocol):
    """An object with a state to save and load: a scheduler, scaler or data loader."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state_dict: Any, /) -> Any: ...


Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None
Schedulers = Resumable | Sequence[Resumable]


@dataclass(frozen=True)
class Resumables:
    """The objects to save or resume besides the module. ``random``: whether to restore the random generators."""

    optimizers: list[torch.optim.Optimizer]
    schedulers: list[Resumable]
    scaler: Resumable | None
    data: Resumable | None
    random: bool = True

    @staticmethod
    def of(
        optimizers: Optimizers,
        schedulers: Schedulers,
        scaler: Resumable | None,
        data: Resumable | None,
        *,
        random: bool = True,
    ) -> Resumables:
        return Resumables(_as_list(optimizers), _as_list(schedulers), scaler, data, random)


def _as_list(value: Any) -> list[Any]:
    if value is None:
        return []
    return [value] if hasattr(value, "state_dict") else list(value)


@dataclass(frozen=True)
class Shares:
    """Which rank writes which elements, and what is common to all ranks."""

    writers: Writers = field(default_factory=lambda: Writers(()))
    tied: Mapping[str, str] = field(default_factory=dict)
    names: Names = ()

    def model_names(self) -> dict[str, str]:
        """Return the additional names of tied tensors of the model, mapped to their first names."""
        return {MODEL + name: MODEL + first for name, first in self.tied.items()}


@dataclass
class _Saver:
    """State kept between the saves of a module: assigned writers, staging buffers, and the save in progress."""

    structures: list[str] = field(default_factory=list)
    shares: Shares = field(default_factory=Shares)
    files: Sequence[PlannedFile] = ()
    staged: dict[str, StagedFile] = field(default_factory=dict)
    under_way: Saving | None = None


_savers: WeakKeyDictionary[torch.nn.Module, _Saver] = WeakKeyDictionary()


def save_checkpoint(
    path: Place,
    par: torch.nn.Module,
    optimizer: Optimizers = None,
    schedulers: Schedulers = (),
    *,
    step: int | None = None,
    scaler: Resumable | None = None,
    data: Resumable | None = None,
    extra: Any = None,
    metrics: Mapping[str, float] | None = None,
    keep: Keep | None = None,
    blocking: bool = True,
) -> Saving:
    """Write a checkpoint to ``path``, which appears when it is complete. Call it on every rank.

    The checkpoint also holds the states of the ranks' random generators. A second save waits for the first. Earlier
    checkpoints are not changed.

    Args:
        path: folder of the checkpoint, on a file system that all ranks share; or a URL that fsspec knows
            (``"s3://bucket/run/step-8"``).
        par: a parallel module, a module that contains some, or any module that every rank holds whole. Its parameters
            and persistent buffers are saved.
        optimizer: one or several optimizers, whose states and settings are saved.
        schedulers: one or several schedulers; like ``scaler`` and ``data`` they have a ``state_dict()`` that is equal
            on all ranks.
        step: number of finished optimizer steps. By default the number at the end of the folder's name
            (``"run/step-200"``), else the one that the optimizer's states count.
        scaler: a gradient scaler.
        data: the data loader, usually a ``sw.DataLoader``.
        extra: other values to save: numbers, texts, tensors, and lists and dicts of these; equal on all ranks.
        metrics: values by which ``keep`` compares checkpoints.
        keep: which older checkpoints in the same parent folder to delete once this one is complete.
        blocking: if False, return after copying this rank's share to a buffer of the same size; the files are written
            while training continues.

    Returns:
        A handle; its ``wait()`` returns once the save is complete, and raises CheckpointError if it failed.

    Raises:
        CheckpointError: on all ranks, if the checkpoint cannot be written or exists already. With ``blocking=False``
            write errors are raised by ``wait()``, and are a warning at the next save.
        ShardwiseError: a value cannot be stored, ranks differ where they must be equal, or ``step`` is not known.
    """
    finish_saving(par)
    if step is None:
        step = _counted_steps(folder_of(path).name, _as_list(optimizer))
    saver = _savers.setdefault(par, _Saver())
    rank, num_ranks = rank_and_world_size()
    folder, resumables = folder_of(path), Resumables.of(optimizer, schedulers, scaler, data)
    state: TrainingState | None = None
    fault: ShardwiseError | None = None
    token, room = "", ExitStack()
    try:
        state = state_of(par, resumables.optimizers, rank)
        state.values.update(values_of(step, resumables, extra, metrics))
        if rank == 0:
            token = make_room(folder, room)
    except ShardwiseError as error:
        fault = error
    job: SaveJob | None = None
    agreed = False
    try:
        raise_first(CheckpointError, fault)
        assert state is not None, "without a fault there is a state"
        plain, token = _agree(saver, folder, state, token)
        agreed = True
        files = _files(saver, state.parts, saver.files, blocking)
        manifest = Manifest(
            step=step,
            num_ranks=num_ranks,
            plan=par.plan.digest if isinstance(par, ParallelModule) else "",
            metrics={name: float(value) for name, value in (metrics or {}).items()},
            tensors=saver.shares.writers.tensors(),
            tied=saver.shares.model_names(),
            values={**state.values, "names": saver.shares.names, "plain": plain},
        )
        job = SaveJob(folder, token, rank, num_ranks, files, manifest, keep, patience_seconds(), room)
        saving = Saving(job)
    except BaseException as error:  # mostly out of memory
        if job is not None:
            job.abandoned.set()
        failed = None
        with room:  # released whatever happens
            if agreed:
                failed = give_up(folder, token, rank, str(error))
            elif token:
                folder.abandon(token)
        if failed is not None and isinstance(error, (RuntimeError, MemoryError)):
            raise failed from error
        raise
    try:
        if blocking:
            with show_progress_once("saving a checkpoint"):
                saving.wait()
    except BaseException:  # includes KeyboardInterrupt
        job.abandoned.set()
        raise
    if blocking:
        saver.staged.clear()
    else:
        saver.under_way = saving
    return saving


def _counted_steps(name: str, optimizers: Sequence[torch.optim.Optimizer]) -> int:
    """Return the number of finished steps, from the name of a checkpoint or the states of its optimizers. Collective:
    a rank may hold no state."""
    if number := re.search(r"\d+$", name):
        return int(number[0])
    states = [state for optimizer in optimizers for state in optimizer.state.values()]
    steps = max(gather_values(max((int(state["step"]) for state in states if "step" in state), default=0)))
    if not steps:
        what = f"how many steps are finished is neither in the name {name!r} nor in the optimizer's states"
        raise ShardwiseError(what, fix="give step=, or a name that ends with the number")
    return steps


def _files(
    saver: _Saver, parts: Mapping[str, TensorPart], planned: Sequence[PlannedFile], blocking: bool
) -> list[StagedFile | StreamedFile]:
    """Return this rank's files, from its parts directly, or from a staged copy whose buffers later saves reuse."""
    pinned = any(part.tensor.is_cuda for part in parts.values())
    files: list[StagedFile | StreamedFile] = []
    for file in planned:
        if blocking:
            files.append(StreamedFile.of(file, parts, pinned=pinned))
            continue
        if file.name not in saver.staged:
            saver.staged[file.name] = StagedFile.empty(file, pinned=pinned)
        saver.staged[file.name].fill(parts)
        files.append(saver.staged[file.name])
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return files


def finish_saving(par: torch.nn.Module) -> None:
    """Wait for a module's save in progress. Rank 0 warns if it failed."""
    saver = _savers.get(par)
    if saver is None or saver.under_way is None:
        return
    try:
        saver.under_way.wait()
    except CheckpointError as error:
        if rank_and_world_size()[0] == 0:
            warnings.warn(f"the previous save failed: {error}", PlanWarning, stacklevel=3)
    saver.under_way = None


def values_of(
    step: int, resumables: Resumables, extra: Any, metrics: Mapping[str, float] | None = None
) -> dict[str, Any]:
    """Encode the values that are not tensors and equal on all ranks. Raises ShardwiseError if that is impossible."""
    if isinstance(step, bool) or not isinstance(step, int) or step < 0:
        raise ShardwiseError(f"step must be a number of optimizer steps, 0 or more; got {step!r}")
    for name, metric in (metrics or {}).items():
        if not math.isfinite(float(metric)):
            raise ShardwiseError(f"the metric {name} is {metric}: checkpoints can only be compared by finite numbers")
    values = {
        "step": step,
        "schedulers": [_encoded(scheduler, f"scheduler {at}") for at, scheduler in enumerate(resumables.schedulers)],
        "scaler": _encoded(resumables.scaler, "scaler"),
        "data": _encoded(resumables.data, "data"),
        "extra": encode(extra, "extra"),
    }
    check_texts([[values]])  # nested as deep as in the manifest
    return values


def _encoded(resumable: Resumable | None, what: str) -> Any:
    if resumable is None:
        return None
    if not hasattr(resumable, "state_dict"):
        fault = f"{what} is a {type(resumable).__name__}, which has no state_dict() to save"
        raise ShardwiseError(fault, fix="leave it out, or for data use sw.DataLoader")
    return encode(resumable.state_dict(), what)


def _agree(saver: _Saver, folder: Folder, state: TrainingState, token: str) -> tuple[dict[str, Any], str]:
    """Update the saver to what all ranks hold. Return the optimizers' states that are not tensors, and rank 0's
    ``token``. Takes one exchange if nothing has changed since the last save."""
    offers = describe_parts(state.parts)
    structure = _digest([offers, dict(state.tied), state.names])
    common = {name: _digest(value) for name, value in {**state.values, "path": str(folder)}.items()}
    everywhere = gather_values((structure, common, state.plain, token))
    for rank, (_, other, *_) in enumerate(everywhere):
        differing = [name for name, digest in other.items() if digest != everywhere[0][1].get(name)]
        if differing:
            what = f"{differing[0]} differs between rank {rank} and rank 0, and a checkpoint has one for all ranks"
            fix = "pass the same value on every rank, or gather the values of all ranks into one first"
            raise ShardwiseError(what, fix=fix)
    structures = [structure for structure, *_ in everywhere]
    if structures != saver.structures:
        raise_first(CheckpointError, _blindness(folder, everywhere[0][3]))
        saver.shares = assign_writers(state)
        saver.files = saver.shares.writers.files_of(rank_and_world_size()[0])
        saver.staged.clear()
        saver.structures = structures
    distinct = {id(one): one for one in everywhere}.values()
    plain = {name: dict(kept) for _, _, states, _ in distinct for name, kept in states.items()}
    return plain, everywhere[0][3]


def _blindness(folder: Folder, token: str) -> CheckpointError | None:
    """Return an error if this rank does not see what rank 0 wrote to the folder of a save."""
    what = ""
    try:
        if (owner := folder.staging.owner()) is not None:
            return None if owner == token else taken(folder)
    except OSError as error:
        what = f": {error}"
    what = f"rank {rank_and_world_size()[0]} does not see {folder.staging}, which rank 0 created{what}"
    return CheckpointError(what, fix="give a folder or a store that all machines share")


def assign_writers(state: TrainingState) -> Shares:
    """Assign the pieces of all ranks' states to writers. Collective. What ranks hold is equal on those of a stage."""
    offered = gather_values((describe_parts(state.parts), dict(state.tied), state.names))
    distinct = [*{id(one): one for one in offered}.values()]
    tied = {name: first for _, some, _ in distinct for name, first in some.items()}
    return Shares(Writers([offers for offers, *_ in offered]), tied, _merged([names for *_, names in distinct]))


def _merged(names: Sequence[Names]) -> list[list[list[str]]]:
    """Merge the parameter names of every group of every optimizer over all ranks: a rank may hold part of the model."""
    return [
        [list(dict.fromkeys(name for rank in names for name in rank[o][g])) for g in range(len(names[0][o]))]
        for o in range(len(names[0]))
    ]


def _digest(value: Any) -> str:
    return hashlib.blake2b(json.dumps(value).encode(), digest_size=12).hexdigest()
