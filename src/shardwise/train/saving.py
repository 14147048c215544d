"""Writing of a checkpoint: every rank writes its files, and rank 0 completes the checkpoint.

Ranks synchronize through files in the folder, without collectives: the writing thread may run beside training steps,
whose collectives it must not disturb. A rank that has finished writes a note, a manifest of its files with checksums; a
rank that failed writes the reason. Notes go up a tree. Ranks 8, 16, ... write what the seven ranks behind them note
into their own notes, which stay as parts of the manifest; ranks 64, 128, ... name the parts of 8, 16, ... in theirs,
and so on. Rank 0 completes the checkpoint (``Folder.commit``), or writes why not. The others look at rank 0's word
only. So a save costs each rank a few operations, and no file grows with the number of ranks.
"""

from __future__ import annotations

import contextlib
import threading
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from uuid import uuid4

from shardwise.errors import CheckpointError, PlanWarning, ShardwiseError
from shardwise.runtime.generation import current
from shardwise.runtime.heartbeat_file import trail
from shardwise.train.files import StagedFile, StreamedFile, write
from shardwise.train.manifest import Manifest, parse_manifest
from shardwise.train.names import with_token
from shardwise.train.retention import Keep, prune
from shardwise.train.sharing import stored_in
from shardwise.train.stores import Folder

_FIRST_POLL_SECONDS = 0.002
_LOOK_SECONDS = 0.1  # between looks whether the generation has ended
_FANOUT = 8  # of the tree of notes
_NO_ROOM = "no space left on the device, not even for the reason"
_LAST_SECONDS = 30.0  # how long a process whose script has ended waits for the other ranks' files


@dataclass(frozen=True)
class SaveJob:
    """One rank's part of a save. ``token``, ``room``: of this save (``make_room``); ``manifest``: without files, as
    checksums are not known yet; ``abandoned``: set if the caller was interrupted, so that the data may change during
    the write."""

    folder: Folder
    token: str
    rank: int
    num_ranks: int
    files: Sequence[StagedFile | StreamedFile]
    manifest: Manifest
    keep: Keep | None
    limit_seconds: float
    room: ExitStack = field(default_factory=ExitStack)
    abandoned: threading.Event = field(default_factory=threading.Event)

    @property
    def staging(self) -> Folder:
        return self.folder.staging

    @property
    def suffix(self) -> str:
        """Return what the names of this save's data files have in addition (``with_token``)."""
        return _suffix(self.folder, self.token)

    def note(self, rank: int) -> str:
        return f"{'written' if rank % _FANOUT else 'part'}-{rank}-{self.token}.json"

    def remove_files(self) -> None:
        if self.suffix or self.staging.owner() == self.token:
            self.staging.remove(with_token(staged.file.name, self.suffix) for staged in self.files)


class Saving:
    """A save in progress. ``wait()`` returns the folder when it is complete, or raises CheckpointError. It warns
    of what the save of a complete checkpoint could not do beside."""

    def __init__(self, job: SaveJob) -> None:
        self.path = job.folder.path
        self._error: CheckpointError | None = None
        self._undone = ""
        self._thread = threading.Thread(target=self._run, args=(job,), name=f"shardwise-saves-{job.folder.name}")
        self._thread.start()

    @property
    def done(self) -> bool:
        return not self._thread.is_alive()

    @property
    def error(self) -> CheckpointError | None:
        """Return the error of a failed save; None if it succeeded or is in progress."""
        return self._error if self.done else None

    def wait(self) -> Path | str:
        while self._thread.is_alive():
            trail.check()
            self._thread.join(_LOOK_SECONDS)
        if self._error is not None:
            raise self._error
        undone, self._undone = self._undone, ""
        if undone:  # said here, and not by the thread: a filter may make an error of a warning
            warnings.warn(undone, PlanWarning, stacklevel=3)
        return self.path

    def _run(self, job: SaveJob) -> None:
        try:
            self._undone = _save(job)
        except CheckpointError as error:
            self._error = error
        except BaseException as error:  # a thread must not end without a reason
            self._error = _failed(job.folder, f"{type(error).__name__}: {error}")
        finally:
            job.room.close()


def _save(job: SaveJob) -> str:
    """Write this rank's files and wait for completion. Return what ``_prune`` returns. Raises CheckpointError on every
    rank if one fails."""
    failed: CheckpointError | None = None
    note = Manifest(num_ranks=job.num_ranks, tensors={})
    try:
        files = {
            with_token(staged.file.name, job.suffix): write(job.staging, staged, job.suffix) for staged in job.files
        }
        if job.abandoned.is_set():
            raise InterruptedError("the call was interrupted")
        note = replace(note, files=files, tensors=stored_in((staged.file for staged in job.files), job.suffix))
    except (OSError, RuntimeError, MemoryError) as error:  # no room on the disk, or in memory
        failed = _fail(job, error)
    until = time.monotonic() + job.limit_seconds
    if job.rank == 0:
        _finish(job, failed, note, until)
        return _prune(job)
    try:
        job.staging.put(job.note(job.rank), _with_notes_below(job, note, until).to_text())
    except CheckpointError:
        pass  # rank 0 learns of it too, and says so
    except (OSError, ShardwiseError) as error:
        _fail(job, error)
    _wait_for_rank_zero(job, until)
    return ""


def _fail(job: SaveJob, error: Exception) -> CheckpointError:
    """Tell the other ranks that this one could not write. Raises CheckpointError on ranks other than 0."""
    failed = give_up(job.folder, job.token, job.rank, str(error))
    with contextlib.suppress(OSError):
        job.remove_files()
    if job.rank:
        _check_owner(job)
        raise failed from error
    return failed


def _finish(job: SaveJob, failed: CheckpointError | None, note: Manifest, until: float) -> None:
    """Complete the checkpoint when all ranks have written, or tell them why not. ``failed``: why rank 0 itself could
    not write; ``note``: what it wrote."""
    try:
        _check_owner(job)
        if failed is not None:
            raise failed
        whole = job.manifest.with_parts({"": _with_notes_below(job, note, until)})
        whole.check_whole()
        if not job.folder.commit(job.token, whole.to_text()):
            raise taken(job.folder)
    except (OSError, ShardwiseError) as error:
        if not isinstance(error, CheckpointError):
            error = give_up(job.folder, job.token, 0, str(error))
        # Delete all files, also those of ranks that hang. The folder and the reason stay, so that other ranks see them.
        with contextlib.suppress(OSError):
            if not job.folder.exists() and (job.suffix or job.staging.owner() == job.token):
                names = (name for name in job.staging.names() if name.endswith(".safetensors"))
                job.staging.remove(name for name in names if job.suffix in name)
        raise error from None


def _prune(job: SaveJob) -> str:
    """Delete what ``keep`` gives up, and return why that was not possible: the checkpoint is complete whatever happens
    here, and the next save deletes the rest."""
    if job.keep is None:
        return ""
    try:
        job.folder.reserve()  # two jobs in one folder would delete each other's checkpoints
        prune(job.folder, job.keep)
    except Exception as error:
        why = str(error).split("\n", 1)[0] or type(error).__name__
        why += f"; {error.fix}" if isinstance(error, ShardwiseError) and error.fix else ""
        return f"{job.folder} is saved, but keep= has not removed older checkpoints, which the next save tries: {why}"
    return ""


def _with_notes_below(job: SaveJob, note: Manifest, until: float) -> Manifest:
    """Wait for the notes of the ranks below this one in the tree, and return its own ``note`` with them. Raises
    CheckpointError, and tells the rank above, if one of them failed, or is late."""
    waited_for = _ranks_below(job.rank, job.num_ranks)
    left = list(waited_for)
    for _ in _polls(job, until, "all ranks have written their files"):
        while left and job.staging.has(job.note(left[-1])):
            left.pop()
        if not left:
            break
        _check_owner(job)
        for rank in left:
            if job.staging.has(_failure(job, rank)):
                raise _told(job, job.staging.read(_failure(job, rank)) or f"rank {rank}: {_NO_ROOM}")
    names = [job.note(rank) for rank in waited_for]
    below = dict(zip(names, map(parse_manifest, job.staging.read_all(names)), strict=True))
    added = [name for rank, name in zip(waited_for, names, strict=True) if rank % _FANOUT]
    note = note.with_parts({name: below.pop(name) for name in added})
    if job.folder.renames:
        job.staging.remove(added)
    return replace(note, parts={**note.parts, **{name: part.covers() for name, part in below.items()}})


def _ranks_below(rank: int, num_ranks: int) -> list[int]:
    """Return the ranks whose notes a rank reads.

    >>> _ranks_below(0, 70), _ranks_below(8, 70), _ranks_below(64, 70)
    ([1, 2, 3, 4, 5, 6, 7, 8, 16, 24, 32, 40, 48, 56, 64], [9, 10, 11, 12, 13, 14, 15], [65, 66, 67, 68, 69])
    """
    below: list[int] = []
    stride = 1
    while rank % (stride * _FANOUT) == 0 and stride < num_ranks:
        below += range(rank + stride, min(rank + stride * _FANOUT, num_ranks), stride)
        stride *= _FANOUT
    return below


def _wait_for_rank_zero(job: SaveJob, until: float) -> None:
    """Wait until rank 0 completes the checkpoint, or says why not. Raises CheckpointError."""
    for _ in _polls(job, until, "rank 0 completes it"):
        if job.folder.is_complete(job.token):
            return
        _check_owner(job)
        with contextlib.suppress(FileNotFoundError):
            reason = job.staging.read(_failure(job, 0)) or f"rank 0: {_NO_ROOM}"
            with contextlib.suppress(OSError):
                job.remove_files()
            raise _failed(job.folder, reason)


def _polls(job: SaveJob, until: float, what: str) -> Iterator[None]:
    """Yield again and again, with growing pauses. Raises CheckpointError after ``until``, and once this process has
    left its generation."""
    pause, waited, generation = _FIRST_POLL_SECONDS, 0.0, current.generation
    while True:
        yield
        if not threading.main_thread().is_alive():  # the script has ended, and another rank may be gone
            until = min(until, time.monotonic() + max(0.0, _LAST_SECONDS - waited))
            waited += pause
        if current.generation is not generation:
            raise _failed(job.folder, "a rank was lost")
        if time.monotonic() > until:
            raise _told(job, f"rank {job.rank} waited for {job.limit_seconds:.0f} s until {what}")
        time.sleep(pause)
        pause = min(2 * pause, job.folder.longest_poll_seconds)


def give_up(folder: Folder, token: str, rank: int, reason: str) -> CheckpointError:
    """Report to the other ranks that this one cannot save, and return the error to raise here."""
    text = reason if reason.startswith("rank ") else f"rank {rank}: {reason}"
    with contextlib.suppress(OSError):
        if folder.staging.owner() == token:
            name = f"failed-{rank}{_suffix(folder, f'-{token}')}"
            try:
                folder.staging.put(name, text)
            except OSError:
                folder.staging.put(name, "")  # a full disk has room for a name
    return _failed(folder, text)


def _told(job: SaveJob, reason: str) -> CheckpointError:
    """Return the error of a save that failed elsewhere. A rank that others report to tells it on."""
    if job.rank and not _ranks_below(job.rank, job.num_ranks):
        return _failed(job.folder, reason)
    return give_up(job.folder, job.token, job.rank, reason)


def _failure(job: SaveJob, rank: int) -> str:
    return f"failed-{rank}{_suffix(job.folder, f'-{job.token}')}"


def _suffix(folder: Folder, token: str) -> str:
    return "" if folder.renames else token


def _check_owner(job: SaveJob) -> None:
    """Raise CheckpointError if another save has taken over the folder, or it is gone. On ranks other than 0 the folder
    may also be gone because the save is complete."""
    owner = job.staging.owner()
    if owner is None and job.rank:
        owner = job.folder.owner()
    if owner != job.token and (owner is not None or job.rank == 0):
        raise taken(job.folder)


def taken(folder: Folder) -> CheckpointError:
    """Return the error of a save whose name another one has taken."""
    return CheckpointError(
        f"{folder} was not saved: another job began to save it, or removed what this one had written",
        fix="end one of the two jobs, or give each its own folder; earlier checkpoints are unchanged, and training "
        "can go on",
    )


def _failed(folder: Folder, reason: str) -> CheckpointError:
    return CheckpointError(
        f"{folder} was not saved: {reason}",
        fix="free space, or check that all ranks see the same folder; earlier checkpoints are unchanged, and "
        "training can go on",
    )


def make_room(folder: Folder, room: ExitStack) -> str:
    """Make room for a save, on rank 0, and return the save's token. ``room`` releases it when closed. Raises
    CheckpointError if the checkpoint exists, another process saves it, or it cannot be written."""
    token = uuid4().hex
    try:
        room.callback(folder.begin(token))
    except (OSError, ValueError) as error:
        if isinstance(error, CheckpointError):
            raise
        what = f"the folder {str(folder)!r} cannot be created: {error}"
        raise CheckpointError(what, fix="give a folder that all ranks can write to") from error
    return token
