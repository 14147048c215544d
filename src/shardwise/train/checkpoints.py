"""``sw.save_checkpoint``: the state of a training run, for any plan and any number of ranks.

A checkpoint says where the elements of global tensors are, by the original names (``train.parts``); nothing in it
depends on who holds what. The ranks agree on what each writes (``train.sharing``), copy it to memory of their own, and
write it (``train.saving``) while they wait or train on.
"""

from __future__ import annotations

import hashlib
import json
import math
import shutil
import warnings
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch

from shardwise.errors import CheckpointError, PlanWarning, ShardwiseError, problem
from shardwise.runtime.agree import show_progress_once
from shardwise.runtime.parallel_module import ParallelModule
from shardwise.train.agreement import gather_values, patience_seconds, raise_first, rank_and_world_size
from shardwise.train.files import StagedFile, StreamedFile
from shardwise.train.manifest import BLOCK_BYTES, Chunk, Manifest, StoredTensor
from shardwise.train.parts import (
    MODEL,
    RANDOM,
    TensorPart,
    module_parts,
    optimizer_parts,
    random_part,
)
from shardwise.train.retention import Keep
from shardwise.train.saving import SaveJob, Saving, give_up, incomplete, make_room, release
from shardwise.train.sharing import Offer, PlannedFile, WritePiece, describe_parts, plan_files
from shardwise.train.values import encode
from shardwise.untrusted_text import check_texts


class Resumable(Protocol):
    """What can be saved and goes on from there: schedulers, scalers, loaders."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state_dict: Any, /) -> Any: ...


Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None
Schedulers = Resumable | Sequence[Resumable]


Names = Sequence[Sequence[Sequence[str]]]  # of the parameters in every group of every optimizer


@dataclass(frozen=True)
class TrainingState:
    """What this rank has to save. ``values`` are equal on all ranks."""

    parts: Mapping[str, TensorPart]
    tied: Mapping[str, str]
    names: Names
    plain: Mapping[str, Mapping[str, Any]]
    values: dict[str, Any]


@dataclass(frozen=True)
class Shares:
    """Who writes what: the ``files`` of every rank, what each ``offers``, and what is the same for all of them."""

    files: Sequence[Sequence[PlannedFile]] = ()
    offers: Sequence[Sequence[Offer]] = ()
    tied: Mapping[str, str] = field(default_factory=dict)
    names: Names = ()

    @cached_property
    def stored(self) -> dict[str, StoredTensor]:
        """Where the elements of every tensor are."""
        pieces: dict[str, WritePiece] = {}
        chunks: dict[str, list[Chunk]] = defaultdict(list)
        for file in (file for rank_files in self.files for file in rank_files):
            for piece, chunk in file.chunks():
                pieces[piece.name] = piece
                chunks[piece.name].append(chunk)
        return {name: StoredTensor(piece.dtype, piece.shape, tuple(chunks[name])) for name, piece in pieces.items()}

    def model_names(self) -> dict[str, str]:
        """Further names of tensors of the model -> their first."""
        return {MODEL + name: MODEL + first for name, first in self.tied.items()}


@dataclass
class _Saver:
    """What is kept between the saves of a module: who writes what, the memory it is staged in, the save under way."""

    structures: list[str] = field(default_factory=list)
    shares: Shares = field(default_factory=Shares)
    staged: dict[str, StagedFile] = field(default_factory=dict)
    under_way: Saving | None = None


_savers: WeakKeyDictionary[torch.nn.Module, _Saver] = WeakKeyDictionary()


def save_checkpoint(
    path: str | Path,
    par: torch.nn.Module,
    optimizer: Optimizers = None,
    *,
    step: int,
    schedulers: Schedulers = (),
    scaler: Resumable | None = None,
    data: Resumable | None = None,
    extra: Any = None,
    metrics: Mapping[str, float] | None = None,
    keep: Keep | None = None,
    blocking: bool = True,
) -> Saving:
    """Write a checkpoint to the folder ``path``, which appears when it is complete; called on every rank alike.

    It holds the parameters and persistent buffers of ``par`` (a parallel module, one with such modules in it, or any
    module that every rank holds whole), the states and settings of ``optimizer`` (one or several), of schedulers,
    scaler and data loader (``state_dict()``, equal on all ranks), the states of the ranks' random generators, ``step``
    and ``extra`` (numbers, texts, tensors, and lists and dicts of these). ``metrics`` are for ``keep``, which says
    which older checkpoints beside this one are deleted once it is complete. With ``blocking=False`` it returns when all
    is copied to memory of its own, which takes as much as this rank's share of the checkpoint; the files are written
    while training goes on. A second save waits for the first. ``wait()`` of what is returned says whether it succeeded.

    Raises CheckpointError, on all ranks, where it cannot be written (with ``blocking=False`` that is a warning at the
    next save, and raised by ``wait()``), and where there is a checkpoint of that name; ShardwiseError for values that
    no file brings back, and where ranks differ in what must be equal. Earlier checkpoints stay as they are.
    """
    finish_saving(par)
    saver = _savers.setdefault(par, _Saver())
    rank, num_ranks = rank_and_world_size()
    path = Path(path)
    state: TrainingState | None = None
    fault: ShardwiseError | None = None
    token = ""
    try:
        state = state_of(par, as_list(optimizer), rank)
        state.values.update(values_of(step, as_list(schedulers), scaler, data, extra, metrics))
        if rank == 0:
            token = make_room(path)
    except ShardwiseError as error:
        fault = error
    try:
        raise_first(CheckpointError, fault)
        assert state is not None, "without a fault there is a state"
        plain, token = _agree(saver, path, state, token)
    except BaseException:
        if token:
            shutil.rmtree(incomplete(path), ignore_errors=True)
            release(token)
        raise
    try:
        files = _files(saver, state.parts, saver.shares.files[rank], blocking)
    except BaseException as error:  # no memory, above all
        failed = give_up(path, token, rank, str(error))
        release(token)
        if isinstance(error, (RuntimeError, MemoryError)):
            raise failed from error
        raise
    manifest = Manifest(
        step=step,
        num_ranks=num_ranks,
        plan=par.plan.digest if isinstance(par, ParallelModule) else "",
        metrics={name: float(value) for name, value in (metrics or {}).items()},
        block_bytes=BLOCK_BYTES,
        files={},
        tensors=saver.shares.stored,
        tied=saver.shares.model_names(),
        values={**state.values, "names": saver.shares.names, "plain": plain},
    )
    job = SaveJob(path, token, rank, num_ranks, files, manifest, keep, patience_seconds())
    try:
        saving = Saving(job)
        if blocking:
            with show_progress_once("saving a checkpoint"):
                saving.wait()
    except BaseException:  # an interruption, too
        job.abandoned.set()
        raise
    if blocking:
        saver.staged.clear()
    else:
        saver.under_way = saving
    return saving


def _files(
    saver: _Saver, parts: Mapping[str, TensorPart], planned: Sequence[PlannedFile], blocking: bool
) -> list[StagedFile | StreamedFile]:
    """This rank's files: from its parts as they are, or from a copy of them, whose memory later saves use again."""
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
    """Wait for a save of a module that is under way. On rank 0, a warning where it failed."""
    saver = _savers.get(par)
    if saver is None or saver.under_way is None:
        return
    try:
        saver.under_way.wait()
    except CheckpointError as error:
        if rank_and_world_size()[0] == 0:
            warnings.warn(f"the save before failed: {error}", PlanWarning, stacklevel=3)
    saver.under_way = None


def as_list(value: Any) -> list[Any]:
    """One, several or none of something, as a list."""
    if value is None:
        return []
    return [value] if hasattr(value, "state_dict") else list(value)


def state_of(par: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer], rank: int) -> TrainingState:
    module = module_parts(par)
    kept = optimizer_parts(optimizers, module)
    parts = {MODEL + name: part for name, part in module.parts.items()}
    parts |= {**kept.parts, f"{RANDOM}{rank}": random_part()}
    return TrainingState(
        parts, module.tied, kept.names, kept.plain, {"kinds": list(kept.kinds), "settings": kept.settings}
    )


def values_of(
    step: int,
    schedulers: Sequence[Resumable],
    scaler: Resumable | None,
    data: Resumable | None,
    extra: Any,
    metrics: Mapping[str, float] | None,
) -> dict[str, Any]:
    """What is no tensor and equal on all ranks, encoded. Raises ShardwiseError for what cannot be."""
    if isinstance(step, bool) or not isinstance(step, int) or step < 0:
        raise ShardwiseError(f"step is a number of optimizer steps from 0, not {step!r}")
    for name, metric in (metrics or {}).items():
        if not math.isfinite(float(metric)):
            raise ShardwiseError(f"the metric {name} is {metric}: no file says which checkpoint is better by it")
    values = {
        "step": step,
        "schedulers": [_encoded(scheduler, f"scheduler {at}") for at, scheduler in enumerate(schedulers)],
        "scaler": None if scaler is None else _encoded(scaler, "scaler"),
        "data": None if data is None else _encoded(data, "data"),
        "extra": encode(extra, "extra"),
    }
    check_texts([[values]])  # as deep as they lie in the manifest
    return values


def _encoded(resumable: Resumable, what: str) -> Any:
    if not hasattr(resumable, "state_dict"):
        fault = f"{what} is a {type(resumable).__name__}, which has no state_dict(): nothing says where it is"
        raise ShardwiseError(problem(fault, fix="leave it out; for data sw.DataLoader has one"))
    return encode(resumable.state_dict(), what)


def _agree(saver: _Saver, path: Path, state: TrainingState, token: str) -> tuple[dict[str, Any], str]:
    """Brings the saver up to date with what all ranks hold; returns the optimizers' states that are no tensors, and
    rank 0's ``token``. One exchange where nothing has changed since the last save."""
    offers = describe_parts(state.parts)
    structure = _digest([offers, dict(state.tied), state.names])
    common = {name: _digest(value) for name, value in {**state.values, "path": str(path)}.items()}
    everywhere = gather_values((structure, common, state.plain, token))
    for rank, (_, other, *_) in enumerate(everywhere):
        differing = [name for name, digest in other.items() if digest != everywhere[0][1].get(name)]
        if differing:
            raise ShardwiseError(
                problem(
                    f"{differing[0]} of rank {rank} is not that of rank 0, and a checkpoint has one for all",
                    fix="give the same on every rank; what differs between ranks can be gathered into one value first",
                )
            )
    structures = [structure for structure, *_ in everywhere]
    if structures != saver.structures:
        blind = [rank for rank, sees in enumerate(gather_values(incomplete(path).is_dir())) if not sees]
        if blind:
            what = f"rank {blind[0]} does not see {incomplete(path)}, which rank 0 made"
            raise CheckpointError(problem(what, fix="give a folder on a file system that all machines share"))
        saver.shares = assign_writers(state)
        saver.staged.clear()
        saver.structures = structures
    plain = {name: dict(kept) for _, _, states, _ in everywhere for name, kept in states.items()}
    return plain, everywhere[0][3]


def assign_writers(state: TrainingState) -> Shares:
    """Who writes what of the states of all ranks. Every rank calls this."""
    offered = gather_values((describe_parts(state.parts), dict(state.tied), state.names))
    tied = {name: first for _, some, _ in offered for name, first in some.items()}
    offers = [offer for offer, *_ in offered]
    return Shares(plan_files(offers), offers, tied, _merged([names for *_, names in offered]))


def _merged(names: Sequence[Names]) -> list[list[list[str]]]:
    """The parameters in every group of every optimizer, over all ranks: a rank may hold a part of the model only."""
    return [
        [list(dict.fromkeys(name for rank in names for name in rank[o][g])) for g in range(len(names[0][o]))]
        for o in range(len(names[0]))
    ]


def _digest(value: Any) -> str:
    return hashlib.blake2b(json.dumps(value).encode(), digest_size=12).hexdigest()


__all__ = [
    "Optimizers",
    "Resumable",
    "Schedulers",
    "Shares",
    "TrainingState",
    "as_list",
    "assign_writers",
    "finish_saving",
    "save_checkpoint",
    "state_of",
    "values_of",
]
