"""A save on its way to the disk: every rank writes its files, rank 0 makes a checkpoint of them.

Ranks meet in the folder, not in a collective: the thread that writes may run beside steps whose collectives must not be
disturbed. ``NAME.incomplete`` fills; a rank that is done leaves a note with its checksums, one that failed says why.
When all notes are there, rank 0 writes the manifest and renames the folder. Whatever happens before, there is no
``NAME``. Rank 0 has a lock on the name until then: another job that saves under it is refused. The folder says which
save it is of, for file systems without locks: a save whose folder another one took over finds out before it calls
anything its own.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from uuid import uuid4

from shardwise.errors import CheckpointError, problem
from shardwise.train.files import StagedFile, StreamedFile, write
from shardwise.train.locks import Lock, lock
from shardwise.train.manifest import FILE, DataFile, Manifest
from shardwise.train.retention import DELETED, INCOMPLETE, Keep, prune

_NAMES = r"shard-\d+-[\w-]+\.safetensors|(written|failed)-\d+(-\w+\.json)?"  # of files in a folder that fills
OWNER = "owner"  # the file that says which save a folder is of
_FIRST_POLL_SECONDS, _LONGEST_POLL_SECONDS = 0.002, 0.1
_LAST_SECONDS = 30.0  # that a process whose script has ended waits for the other ranks' files


@dataclass(frozen=True)
class SaveJob:
    """What one rank has to do. ``token``: of this save (``make_room``); ``manifest``: without files, whose checksums
    are not known yet; ``abandoned``: whoever called does not wait for it any more, and may change what it reads."""

    path: Path
    token: str
    rank: int
    num_ranks: int
    files: Sequence[StagedFile | StreamedFile]
    manifest: Manifest
    keep: Keep | None
    limit_seconds: float
    abandoned: threading.Event = field(default_factory=threading.Event)

    @property
    def folder(self) -> Path:
        return incomplete(self.path)

    def note(self, rank: int) -> str:
        """The file in which a rank says what it has written."""
        return f"written-{rank}-{self.token}.json"

    def remove_files(self) -> None:
        """Give the space of this rank's files back: a rank has said that it failed, so nothing will come of them."""
        for staged in self.files if _belongs_to(self.folder, self.token) else ():
            with contextlib.suppress(OSError):
                (self.folder / staged.file.name).unlink()


class Saving:
    """A save that was started. ``wait()`` returns the folder when it is complete, or raises CheckpointError."""

    def __init__(self, job: SaveJob) -> None:
        self.path = job.path
        self._error: CheckpointError | None = None
        self._thread = threading.Thread(target=self._run, args=(job,), name=f"shardwise-saves-{job.path.name}")
        self._thread.start()

    @property
    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return not self._thread.is_alive()

    @property
    def error(self) -> CheckpointError | None:
        """Why it failed, once it is done."""
        return self._error if self.done else None

    def wait(self) -> Path:
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self.path

    def _run(self, job: SaveJob) -> None:
        try:
            _save(job)
        except CheckpointError as error:
            self._error = error
        except Exception as error:  # a thread must not end without saying why
            self._error = _failed(job.path, f"{type(error).__name__}: {error}")
        finally:
            release(job.token)


def _save(job: SaveJob) -> None:
    """Raises CheckpointError, on every rank, where one of them fails."""
    try:
        written = {staged.file.name: write(job.folder / staged.file.name, staged) for staged in job.files}
        if job.abandoned.is_set():
            raise InterruptedError("the call was interrupted")
        note = {name: [file.start, file.num_bytes, file.checksums] for name, file in written.items()}
        _place(job.folder, job.note(job.rank), json.dumps(note))
    except (OSError, RuntimeError, MemoryError) as error:  # no room on the disk, or in memory
        give_up(job.path, job.token, job.rank, str(error))
        job.remove_files()
        if job.rank:
            _check_owner(job)
            raise _failed(job.path, f"rank {job.rank}: {error}") from error
    if job.rank == 0:
        _finish(job)
    else:
        _poll(job, lambda: _belongs_to(job.path, job.token), "rank 0 completes it")


def _finish(job: SaveJob) -> None:
    notes = [job.folder / job.note(rank) for rank in range(job.num_ranks)]
    try:
        _poll(job, lambda: all(note.exists() for note in notes), "all ranks have written their files")
        files: dict[str, DataFile] = {}
        for note in notes:
            files |= {name: DataFile(*entry) for name, entry in json.loads(note.read_text()).items()}
        for note in notes:
            note.unlink()
        _place(job.folder, FILE, replace(job.manifest, files=files).to_text())
        _check_owner(job)
        os.rename(job.folder, job.path)
        if not _belongs_to(job.path, job.token):
            raise _taken(job)
        _begun.discard(job.path.absolute())
        _sync_folder(job.path.parent)
    except (OSError, CheckpointError) as error:
        if not isinstance(error, CheckpointError):
            give_up(job.path, job.token, 0, str(error))
            error = _failed(job.path, f"rank 0: {error}")
        # What was written gives its space back, that of ranks that hang, too; the folder and the reason stay, for the
        # other ranks to see.
        for file in job.folder.glob("*.safetensors") if _belongs_to(job.folder, job.token) else ():
            with contextlib.suppress(OSError):
                file.unlink()
        raise error from None
    if job.keep is not None:
        with contextlib.suppress(OSError):  # the checkpoint is there; the next one deletes what this one could not
            prune(job.path, job.keep)


def _poll(job: SaveJob, is_done: Callable[[], bool], what: str) -> None:
    """Wait until something is done. Raises CheckpointError when a rank says that it failed, or time runs out."""
    pause, until, waited = _FIRST_POLL_SECONDS, time.monotonic() + job.limit_seconds, 0.0
    while not is_done():
        _check_owner(job)
        for rank in range(job.num_ranks):
            failed = job.folder / f"failed-{rank}"
            with contextlib.suppress(OSError):
                reason = failed.read_text() or "no space is left even for the reason"
                job.remove_files()
                raise _failed(job.path, f"rank {rank}: {reason}")
        if not threading.main_thread().is_alive():  # the process wants to end, and another rank may be gone
            until = min(until, time.monotonic() + max(0.0, _LAST_SECONDS - waited))
            waited += pause
        if time.monotonic() > until:
            raise _failed(job.path, f"rank {job.rank} waited for {job.limit_seconds:.0f} s until {what}")
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_POLL_SECONDS)


def give_up(path: Path, token: str, rank: int, reason: str) -> CheckpointError:
    """Tell the other ranks that this one cannot save; the error to raise here."""
    folder = incomplete(path)
    if _belongs_to(folder, token):
        with contextlib.suppress(OSError):
            (folder / f"failed-{rank}").write_text(reason)
    return _failed(path, f"rank {rank}: {reason}")


def _belongs_to(folder: Path, token: str) -> bool:
    """Whether a folder that fills is that of a save."""
    return _owner(folder) == token


def _owner(folder: Path) -> str | None:
    """Which save a folder that fills is of; None where there is none."""
    try:
        return (folder / OWNER).read_text()
    except OSError:
        return None


def _check_owner(job: SaveJob) -> None:
    """Raise CheckpointError where another save has begun in the folder of this one, or it is gone; for other ranks than
    0 it may just be complete."""
    owner = _owner(job.folder)
    if owner is None and job.rank:
        owner = _owner(job.path)
    if owner != job.token and (owner is not None or job.rank == 0):
        raise _taken(job)


def _taken(job: SaveJob) -> CheckpointError:
    return CheckpointError(
        problem(
            f"{job.path} was not saved: another job began to save it, or removed what this one had written",
            fix="end one of the two jobs, or give each a folder of its own; earlier checkpoints are as they were, "
            "and training can go on",
        )
    )


def _failed(path: Path, reason: str) -> CheckpointError:
    return CheckpointError(
        problem(
            f"{path} was not saved: {reason}",
            fix="make room, or see that all ranks see the same folder; earlier checkpoints are as they were, and "
            "training can go on",
        )
    )


def _place(folder: Path, name: str, text: str) -> None:
    """A file that is there whole or not at all."""
    with (folder / f"{name}.part").open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.rename(folder / f"{name}.part", folder / name)
    _sync_folder(folder)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def incomplete(path: Path) -> Path:
    """The folder that becomes a checkpoint."""
    return path.with_name(path.name + INCOMPLETE)


_locks: dict[str, Lock] = {}  # of the saves of this process that are under way, by their token
_begun: set[Path] = set()  # by this process, and not complete: other ranks may still look for the reason


def make_room(path: Path) -> str:
    """An empty folder to fill, on rank 0, in place of what an earlier attempt left; what tells this save from others.
    What killed jobs left of other saves is removed. Raises CheckpointError where a checkpoint of that name is complete,
    or another process saves it, or the folder cannot be made."""
    token = uuid4().hex
    try:
        folder = incomplete(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        _locks[token] = lock(path)
        if path.exists():
            what = f"{path} exists already: a checkpoint is never overwritten"
            fix = "save under another name (the step in it), or delete that one first"
            raise CheckpointError(problem(what, fix=fix))
        if folder.exists():
            shutil.rmtree(folder)
        _remove_leftovers(path.parent)
        folder.mkdir()
        (folder / OWNER).write_text(token)
        _begun.add(path.absolute())
    except (OSError, ValueError) as error:
        release(token)
        if isinstance(error, CheckpointError):
            raise
        what = f"the folder {str(path)!r} cannot be made: {error}"
        raise CheckpointError(problem(what, fix="give a folder that all ranks can write to")) from error
    return token


def release(token: str) -> None:
    """Let others save under the name of a save that has ended; nothing on other ranks than 0."""
    held = _locks.pop(token, None)
    if held is not None:
        held.release()


def _remove_leftovers(parent: Path) -> None:
    """Remove what killed jobs left of saves and deletions; what others have put into such a folder stays."""
    for folder in parent.iterdir():
        if folder.suffix not in (INCOMPLETE, DELETED) or not _is_of_saves(folder):
            continue
        path = folder.with_suffix("")
        if folder.suffix == INCOMPLETE and path.absolute() in _begun:
            continue
        with contextlib.suppress(OSError, CheckpointError):  # a live process writes it
            held = lock(path)
            if held.is_certain:
                shutil.rmtree(folder, ignore_errors=True)
            held.release()


def _is_of_saves(folder: Path) -> bool:
    if folder.is_symlink() or not folder.is_dir():
        return False
    names = [entry.name.removesuffix(".part") for entry in folder.iterdir()]
    return all(name in (FILE, OWNER) or re.fullmatch(_NAMES, name) for name in names)


__all__ = ["SaveJob", "Saving", "give_up", "incomplete", "make_room", "release"]
