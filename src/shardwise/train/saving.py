"""Writing of a checkpoint: every rank writes its files, and rank 0 completes the checkpoint.

Ranks synchronize through files in the folder, without collectives: the writing thread may run beside training steps,
whose collectives it must not disturb. The files go to ``NAME.incomplete``. A rank that has finished writes a note with
its checksums; a rank that failed writes the reason. When all notes exist, rank 0 writes the manifest and renames the
folder to ``NAME``, which does not exist before. Until then rank 0 holds a lock on the name, so another job cannot save
under it. For file systems without locks the folder also contains the token of its save: a save detects when another
one has taken over its folder.
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

from shardwise.errors import CheckpointError
from shardwise.train.files import StagedFile, StreamedFile, write
from shardwise.train.locks import Lock, lock
from shardwise.train.manifest import FILE, DataFile, Manifest
from shardwise.train.retention import DELETED, INCOMPLETE, Keep, prune

_NAMES = r"shard-\d+-[\w-]+\.safetensors|(written|failed)-\d+(-\w+\.json)?"  # of files in an incomplete folder
OWNER = "owner"  # the file with the token of the folder's save
_FIRST_POLL_SECONDS, _LONGEST_POLL_SECONDS = 0.002, 0.1
_LAST_SECONDS = 30.0  # how long a process whose script has ended waits for the other ranks' files


@dataclass(frozen=True)
class SaveJob:
    """One rank's part of a save. ``token``: of this save (``make_room``); ``manifest``: without files, as checksums are
    not known yet; ``abandoned``: set if the caller was interrupted, so that the data may change during the write."""

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
        return f"written-{rank}-{self.token}.json"

    def remove_files(self) -> None:
        for staged in self.files if _owner(self.folder) == self.token else ():
            with contextlib.suppress(OSError):
                (self.folder / staged.file.name).unlink()


class Saving:
    """A save in progress. ``wait()`` returns the folder when it is complete, or raises CheckpointError."""

    def __init__(self, job: SaveJob) -> None:
        self.path = job.path
        self._error: CheckpointError | None = None
        self._thread = threading.Thread(target=self._run, args=(job,), name=f"shardwise-saves-{job.path.name}")
        self._thread.start()

    @property
    def done(self) -> bool:
        return not self._thread.is_alive()

    @property
    def error(self) -> CheckpointError | None:
        """Return the error of a failed save; None if it succeeded or is in progress."""
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
        except Exception as error:  # a thread must not end without a reason
            self._error = _failed(job.path, f"{type(error).__name__}: {error}")
        finally:
            release(job.token)


def _save(job: SaveJob) -> None:
    """Write this rank's files and wait for completion. Raises CheckpointError on every rank if one fails."""
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
        _poll(job, lambda: _owner(job.path) == job.token, "rank 0 completes it")


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
        if _owner(job.path) != job.token:
            raise _taken(job)
        _begun.discard(job.path.absolute())
        _sync_folder(job.path.parent)
    except (OSError, CheckpointError) as error:
        if not isinstance(error, CheckpointError):
            give_up(job.path, job.token, 0, str(error))
            error = _failed(job.path, f"rank 0: {error}")
        # Delete all files, also those of ranks that hang. The folder and the reason stay, so that other ranks see them.
        for file in job.folder.glob("*.safetensors") if _owner(job.folder) == job.token else ():
            with contextlib.suppress(OSError):
                file.unlink()
        raise error from None
    if job.keep is not None:
        with contextlib.suppress(OSError):  # the checkpoint is complete; the next save deletes the rest
            prune(job.path, job.keep)


def _poll(job: SaveJob, is_done: Callable[[], bool], what: str) -> None:
    """Wait until ``is_done()``. Raises CheckpointError if a rank reports a failure, or after a timeout."""
    pause, until, waited = _FIRST_POLL_SECONDS, time.monotonic() + job.limit_seconds, 0.0
    while not is_done():
        _check_owner(job)
        for rank in range(job.num_ranks):
            failed = job.folder / f"failed-{rank}"
            with contextlib.suppress(OSError):
                reason = failed.read_text() or "no space left on the device, not even for the reason"
                job.remove_files()
                raise _failed(job.path, f"rank {rank}: {reason}")
        if not threading.main_thread().is_alive():  # the script has ended, and another rank may be gone
            until = min(until, time.monotonic() + max(0.0, _LAST_SECONDS - waited))
            waited += pause
        if time.monotonic() > until:
            raise _failed(job.path, f"rank {job.rank} waited for {job.limit_seconds:.0f} s until {what}")
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_POLL_SECONDS)


def give_up(path: Path, token: str, rank: int, reason: str) -> CheckpointError:
    """Report to the other ranks that this one cannot save, and return the error to raise here."""
    folder = incomplete(path)
    if _owner(folder) == token:
        with contextlib.suppress(OSError):
            (folder / f"failed-{rank}").write_text(reason)
    return _failed(path, f"rank {rank}: {reason}")


def _owner(folder: Path) -> str | None:
    """Return the token of the save that writes a folder; None if there is none."""
    try:
        return (folder / OWNER).read_text()
    except OSError:
        return None


def _check_owner(job: SaveJob) -> None:
    """Raise CheckpointError if another save has taken over the folder, or it is gone. On ranks other than 0 the folder
    may also be gone because the save is complete."""
    owner = _owner(job.folder)
    if owner is None and job.rank:
        owner = _owner(job.path)
    if owner != job.token and (owner is not None or job.rank == 0):
        raise _taken(job)


def _taken(job: SaveJob) -> CheckpointError:
    return CheckpointError(
        f"{job.path} was not saved: another job began to save it, or removed what this one had written",
        fix="end one of the two jobs, or give each its own folder; earlier checkpoints are unchanged, and training "
        "can go on",
    )


def _failed(path: Path, reason: str) -> CheckpointError:
    return CheckpointError(
        f"{path} was not saved: {reason}",
        fix="free space, or check that all ranks see the same folder; earlier checkpoints are unchanged, and "
        "training can go on",
    )


def _place(folder: Path, name: str, text: str) -> None:
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
    """Return the folder that is renamed to ``path`` when it is complete."""
    return path.with_name(path.name + INCOMPLETE)


_locks: dict[str, Lock] = {}  # of this process's saves in progress, by token
_begun: set[Path] = set()  # incomplete saves of this process: other ranks may still read the reason of a failure


def make_room(path: Path) -> str:
    """Create an empty folder for a save, on rank 0, and return the save's token. Leftovers of earlier attempts and of
    killed jobs are removed. Raises CheckpointError if the checkpoint exists, another process saves it, or the folder
    cannot be created."""
    token = uuid4().hex
    try:
        folder = incomplete(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        _locks[token] = lock(path)
        if path.exists():
            what = f"{path} exists already: a checkpoint is never overwritten"
            fix = "save under another name (the step in it), or delete that one first"
            raise CheckpointError(what, fix=fix)
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
        what = f"the folder {str(path)!r} cannot be created: {error}"
        raise CheckpointError(what, fix="give a folder that all ranks can write to") from error
    return token


def release(token: str) -> None:
    """Release the lock of a save that has ended; does nothing on ranks other than 0."""
    folder_lock = _locks.pop(token, None)
    if folder_lock is not None:
        folder_lock.release()


def _remove_leftovers(parent: Path) -> None:
    """Remove what killed jobs left of saves and deletions, except folders that contain other files."""
    for folder in parent.iterdir():
        if folder.suffix not in (INCOMPLETE, DELETED) or not _is_of_saves(folder):
            continue
        path = folder.with_suffix("")
        if folder.suffix == INCOMPLETE and path.absolute() in _begun:
            continue
        with contextlib.suppress(OSError, CheckpointError):  # a live process writes it
            folder_lock = lock(path)
            if folder_lock.is_certain:
                shutil.rmtree(folder, ignore_errors=True)
            folder_lock.release()


def _is_of_saves(folder: Path) -> bool:
    if folder.is_symlink() or not folder.is_dir():
        return False
    names = [entry.name.removesuffix(".part") for entry in folder.iterdir()]
    return all(name in (FILE, OWNER) or re.fullmatch(_NAMES, name) for name in names)
