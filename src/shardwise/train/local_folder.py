"""A checkpoint in a folder of a file system: written as ``NAME.incomplete``, and renamed when it is complete.

While rank 0 saves it holds a lock on the name, so another job cannot save under it. For file systems without locks the
folder also holds the token of its save: a save detects when another one has taken over its folder.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import os
import shutil
import socket
import stat
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch

from shardwise.errors import CheckpointError
from shardwise.runtime.generation import process_state
from shardwise.train.names import DAMAGED, DELETED, FILE, INCOMPLETE, OWNER, is_of_saves
from shardwise.untrusted_text import MAX_FILE, read_text

AT_ONCE_BYTES = 2**23  # per write, and the least for direct I/O
_DIRECT: int = getattr(os, "O_DIRECT", 0)  # 0 if the system does not have it
_kept: dict[Path, Lock] = {}  # folders in which this process deletes checkpoints, until it ends
_keeping = threading.Lock()  # of the former: several saves may end at once
os.register_at_fork(after_in_child=_kept.clear)
_begun: set[Path] = set()  # incomplete saves of this process: other ranks may still read the reason of a failure


@process_state.at_end
def _release_kept() -> None:
    for held in _kept.values():
        held.release()
        atexit.unregister(held.release)
    _kept.clear()
    _begun.clear()


@dataclass(frozen=True)
class MappedFile:
    """A file mapped to memory."""

    data: torch.Tensor

    def fetch(self, ranges: Sequence[tuple[int, int]]) -> None:
        """Do nothing: the kernel reads what is touched."""


@dataclass(frozen=True)
class LocalFolder:
    """A folder of a file system (``train.stores.Folder``)."""

    path: Path
    renames: ClassVar[bool] = True
    longest_poll_seconds: ClassVar[float] = 0.1

    def __str__(self) -> str:
        return str(self.path)

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def parent(self) -> LocalFolder:
        return LocalFolder(self.path.parent)

    def __truediv__(self, name: str) -> LocalFolder:
        return LocalFolder(self.path / name)

    # -- files ---------------------------------------------------------------------------------------------------------

    def names(self) -> set[str]:
        try:
            return {entry.name for entry in os.scandir(self.path)}
        except (FileNotFoundError, NotADirectoryError):
            return set()

    def read(self, name: str) -> str:
        return read_text(self.path / name, MAX_FILE)

    def read_all(self, names: Sequence[str]) -> list[str]:
        return [(self.path / name).read_text() for name in names]

    def put(self, name: str, text: str) -> None:
        part = self.path / f"{name}.part"
        with part.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.rename(part, self.path / name)
        _sync(self.path)

    def write(self, name: str, parts: Callable[[], Iterator[memoryview]], num_bytes: int) -> None:
        """Write a file and wait until it is on disk.

        All but the last part is written with O_DIRECT if the file system supports it. A copy to the page cache takes
        twice the CPU time of the checksums, and the file is not read soon.
        """
        with (self.path / name).open("xb", buffering=0) as target:
            for part in parts():
                _write_all(target.fileno(), part, direct=len(part) == AT_ONCE_BYTES)
            os.fsync(target.fileno())

    def content(self, name: str, num_bytes: int) -> MappedFile:
        path = self.path / name
        is_file, size = path.is_file(), path.stat().st_size
        if not is_file or size != num_bytes:
            what = f"{path} has {size:,} bytes, but {num_bytes:,} were written"
            raise CheckpointError(what, fix="load an older checkpoint, or copy this one again")
        return MappedFile(torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8))

    def remove(self, names: Iterable[str]) -> None:
        for name in names:
            with contextlib.suppress(OSError):
                (self.path / name).unlink()

    def has(self, name: str) -> bool:
        return os.path.exists(self.path / name)

    def written(self, name: str) -> int:
        with contextlib.suppress(OSError):
            return (self.path / name).stat().st_mtime_ns
        return 0

    # -- a checkpoint --------------------------------------------------------------------------------------------------

    def exists(self) -> bool:
        return self.path.exists()

    @property
    def staging(self) -> LocalFolder:
        return LocalFolder(self.path.with_name(self.path.name + INCOMPLETE))

    def begin(self, token: str) -> Callable[[], None]:
        folder = self.staging.path
        self.path.parent.mkdir(parents=True, exist_ok=True)
        held = lock(self.path)
        try:
            if self.path.exists():
                what = f"{self.path} exists already: a checkpoint is never overwritten"
                fix = "save under another name (the step in it), or delete that one first"
                raise CheckpointError(what, fix=fix)
            if folder.exists():
                shutil.rmtree(folder)
            _remove_leftovers(self.path.parent)
            folder.mkdir()
            (folder / OWNER).write_text(token)
            _begun.add(self.path.absolute())
        except BaseException:
            held.release()
            raise
        return held.release

    def reserve(self) -> None:
        parent = self.path.parent.absolute()
        with _keeping:
            if parent not in _kept:  # the file is not beside the folder, where one may not write
                _kept[parent] = held = lock(parent / "keep=", f"checkpoints in {parent} are deleted")
                atexit.register(held.release)  # else the file stays, which locks nothing

    def owner(self) -> str | None:
        try:
            return (self.path / OWNER).read_text()
        except OSError:
            return None

    def is_complete(self, token: str) -> bool:
        return self.owner() == token

    def commit(self, token: str, manifest: str) -> bool:
        folder = self.staging
        folder.put(FILE, manifest)
        if folder.owner() != token:
            return False
        os.rename(folder.path, self.path)
        if self.owner() != token:
            return False
        _begun.discard(self.path.absolute())
        _sync(self.path.parent)
        return True

    def abandon(self, token: str) -> None:
        shutil.rmtree(self.staging.path, ignore_errors=True)

    def delete(self) -> None:
        shutil.rmtree(self.path.rename(self.path.with_name(self.path.name + DELETED)))

    def set_aside(self) -> None:
        aside, turn = self.path.with_name(self.path.name + DAMAGED), 0
        while aside.exists():  # renamed by an earlier resume
            turn += 1
            aside = self.path.with_name(f"{self.path.name}.{turn}{DAMAGED}")
        self.path.rename(aside)


def _write_all(descriptor: int, content: memoryview, *, direct: bool = False) -> None:
    """Write all of ``content``. ``direct``: bypass the page cache if possible."""
    _set_direct(descriptor, direct)
    while content:
        try:
            content = content[os.write(descriptor, content) :]
        except OSError:
            if not direct:
                raise
            direct = False  # retry without O_DIRECT: only its failure is an error
            _set_direct(descriptor, direct)


def _set_direct(descriptor: int, direct: bool) -> None:
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    with contextlib.suppress(OSError):  # the file system does not support it
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | _DIRECT if direct else flags & ~_DIRECT)


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove_leftovers(parent: Path) -> None:
    """Remove what killed jobs left of saves and deletions, except folders that contain other files."""
    for folder in parent.iterdir():
        if folder.suffix not in (INCOMPLETE, DELETED) or folder.is_symlink() or not folder.is_dir():
            continue
        if not is_of_saves(LocalFolder(folder).names()):
            continue
        path = folder.with_suffix("")
        if folder.suffix == INCOMPLETE and path.absolute() in _begun:
            continue
        with contextlib.suppress(OSError, CheckpointError):  # a live process writes it
            folder_lock = lock(path)
            if folder_lock.is_certain:
                shutil.rmtree(folder, ignore_errors=True)
            folder_lock.release()


# ----------------------------------------------------------------------------------------------------------------------
# Locks of folders that a process writes to. The kernel holds them until the process ends, on one machine and over
# network file systems that support locks. A forked child, such as a data worker, may outlive it and holds none.

_MAX_TEXT = 1024
_held: set[int] = set()  # descriptors of this process's locks


@dataclass(frozen=True)
class Lock:
    """A held lock. ``is_certain``: whether the file system supports locks, so that no other process writes."""

    file: Path
    descriptor: int
    is_certain: bool

    def release(self) -> None:
        if self.descriptor not in _held:  # this is a child, and the lock its parent's
            return
        with contextlib.suppress(OSError):
            if _is_same(self.file, self.descriptor):
                self.file.unlink()
        _close(self.descriptor)


def lock(path: Path, what: str = "") -> Lock:
    """Lock a path for writing, whether it exists or not. ``what``: is done meanwhile, for the message. Raises OSError,
    and CheckpointError if a live process does it."""
    file = path.absolute().with_name(f".{path.absolute().name}.lock")
    while True:
        descriptor = _opened(file)
        _held.add(descriptor)
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise CheckpointError(f"{file} is no regular file", fix="delete it")
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not _is_same(file, descriptor):  # the last writer has just removed it
                _close(descriptor)
                continue
            with contextlib.suppress(OSError):  # the file may be another user's
                os.truncate(descriptor, 0)
                os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
            return Lock(file, descriptor, is_certain=True)
        except BlockingIOError:
            writer = os.pread(descriptor, _MAX_TEXT, 0).decode(errors="replace") or "another process"
            _close(descriptor)
            fix = "end one of the two jobs, or give each its own folder"
            raise CheckpointError(f"{what or f'{path} is being saved'} by {writer}", fix=fix) from None
        except OSError:  # a file system without locks
            return Lock(file, descriptor, is_certain=False)
        except BaseException:
            _close(descriptor)
            raise


def _close(descriptor: int) -> None:
    _held.discard(descriptor)
    os.close(descriptor)


def _close_all() -> None:
    for descriptor in list(_held):
        with contextlib.suppress(OSError):
            _close(descriptor)


os.register_at_fork(after_in_child=_close_all)


def _opened(file: Path) -> int:
    flags = os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        return os.open(file, flags | os.O_RDWR, 0o666)
    except PermissionError:  # another user's: a lock needs no right to write
        return os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)


def _is_same(file: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.stat(file, follow_symlinks=False), os.fstat(descriptor))
    except FileNotFoundError:
        return False
