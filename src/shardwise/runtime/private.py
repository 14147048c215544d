"""Files and folders where other users can put some as well: nothing of theirs is opened, and no open waits.

Standard library only: the launcher does not load torch.
"""

from __future__ import annotations

import errno
import os
import stat


def open_own(path: str | os.PathLike[str], flags: int = os.O_RDONLY) -> int:
    """Open a regular file of this user and return its descriptor: no link is followed, no FIFO is waited for. Raises
    OSError."""
    descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
    about = os.fstat(descriptor)
    if stat.S_ISREG(about.st_mode) and about.st_uid == os.geteuid():
        return descriptor
    os.close(descriptor)
    raise PermissionError(errno.EPERM, "not a regular file of this user", os.fspath(path))


def check_own_folder(path: str | os.PathLike[str]) -> None:
    """Raise OSError unless a path is a folder of this user, no link to one, in which no other user can put files."""
    about = os.lstat(path)
    if not stat.S_ISDIR(about.st_mode) or about.st_uid != os.geteuid() or about.st_mode & 0o022:
        raise PermissionError(errno.EPERM, "not a folder that only this user writes to", os.fspath(path))


__all__ = ["check_own_folder", "open_own"]
