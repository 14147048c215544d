"""Safe access to files in folders where other users can create files: open none of theirs, and never block.

Uses the standard library only, since the launcher does not load torch.
"""

from __future__ import annotations

import errno
import os
import stat


def open_own(path: str | os.PathLike[str], flags: int = os.O_RDONLY) -> int:
    """Open a regular file of this user and return its descriptor. Does not follow links or wait for FIFOs. Raises
    OSError."""
    descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
    about = os.fstat(descriptor)
    if stat.S_ISREG(about.st_mode) and about.st_uid == os.geteuid():
        return descriptor
    os.close(descriptor)
    raise PermissionError(errno.EPERM, "not a regular file of this user", os.fspath(path))


def check_own_folder(path: str | os.PathLike[str]) -> None:
    """Raise OSError unless the path is a folder (not a link) owned by this user and writable by no other user."""
    about = os.lstat(path)
    if not stat.S_ISDIR(about.st_mode) or about.st_uid != os.geteuid() or about.st_mode & 0o022:
        raise PermissionError(errno.EPERM, "not a folder that only this user writes to", os.fspath(path))
