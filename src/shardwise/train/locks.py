"""Locks of folders that a process writes to. The kernel holds them until the process ends, on one machine and over
network file systems that support locks. A forked child, such as a data worker, may outlive it and holds none."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import stat
from dataclasses import dataclass
from pathlib import Path

from shardwise.errors import CheckpointError

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
