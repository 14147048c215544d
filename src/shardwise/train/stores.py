"""Where checkpoints lie: in folders of a file system that all ranks share, or under the URL of an object store.

The writer (``train.saving``) and the reader (``train.files``) know this interface only. Both kinds of places are
*complete or absent*: a folder is renamed when it is complete, an object store has no rename, and a checkpoint there
exists with its manifest, which is written last.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar, Protocol, TypeAlias

import torch

from shardwise.errors import CheckpointError, ShardwiseError
from shardwise.train.local_folder import LocalFolder
from shardwise.train.object_folder import ObjectFolder

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*(::|://)")
_NO_PLACE = errno.ENAMETOOLONG, errno.ENOTDIR, errno.ELOOP  # of a path that no file can have
_WITHOUT_SLASH = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/(?!/)")


class StoredBytes(Protocol):
    """The bytes of a stored file. ``data`` holds those that were fetched."""

    @property
    def data(self) -> torch.Tensor: ...

    def fetch(self, ranges: Sequence[tuple[int, int]]) -> None: ...


class Folder(Protocol):
    """A folder of files: a checkpoint, or a folder of several. Its calls raise OSError.

    Attributes:
        renames: whether a complete checkpoint is renamed to its name. Otherwise it is written in place, and its data
            files have names that no other save gives.
        longest_poll_seconds: how often to ask for the files of other ranks.
    """

    renames: ClassVar[bool]
    longest_poll_seconds: ClassVar[float]

    @property
    def path(self) -> Path | str: ...

    @property
    def name(self) -> str: ...

    @property
    def parent(self) -> Folder: ...

    def __truediv__(self, name: str) -> Folder: ...

    # -- files -------------------------------------------------------------------------------------------------------

    def names(self) -> set[str]:
        """Return the names of the files and folders in it; none if it does not exist."""

    def read(self, name: str) -> str:
        """Return a text. Raises ShardwiseError if it is too large."""

    def read_all(self, names: Sequence[str]) -> list[str]:
        """Return several texts."""

    def put(self, name: str, text: str) -> None:
        """Write a text, which readers see wholly or not at all."""

    def write(self, name: str, parts: Callable[[], Iterator[memoryview]], num_bytes: int) -> None:
        """Write a large file, and return when it is stored. ``parts`` is called again for another attempt."""

    def content(self, name: str, num_bytes: int) -> StoredBytes:
        """Return the bytes of a file. Raises CheckpointError if it has another length."""

    def remove(self, names: Iterable[str]) -> None:
        """Remove files, if possible."""

    def has(self, name: str) -> bool:
        """Return whether there is a file of this name."""

    def written(self, name: str) -> int:
        """Return when a file was written, in nanoseconds by the store's clock; 0 if it is gone."""

    # -- a checkpoint --------------------------------------------------------------------------------------------------

    def exists(self) -> bool: ...

    def begin(self, token: str) -> Callable[[], None]:
        """Make room for a save, on rank 0, and return a function that releases it. Removes what killed jobs left.
        Raises CheckpointError if the checkpoint exists or another process is known to save it."""

    def reserve(self) -> None:
        """Let no other process delete checkpoints beside this one, where there are locks. Raises CheckpointError if a
        live process does."""

    @property
    def staging(self) -> Folder:
        """Return the folder to which a save writes."""

    def owner(self) -> str | None:
        """Return the token of the save that writes here, or that completed this; None if there is none."""

    def is_complete(self, token: str) -> bool:
        """Return whether the save with this token has completed the checkpoint."""

    def commit(self, token: str, manifest: str) -> bool:
        """Complete a save, on rank 0. Return False if another save has taken the name."""

    def abandon(self, token: str) -> None:
        """Remove what a save that has not begun to write left."""

    def delete(self) -> None:
        """Delete a checkpoint, which is not one any more from the first moment."""

    def set_aside(self) -> None:
        """Free the name of a checkpoint, and keep what it holds under another one."""


Place: TypeAlias = str | Path | Folder


def folder_of(place: Place) -> Folder:
    """Return the folder at a path or URL. Raises CheckpointError for a URL that cannot be used."""
    if not isinstance(place, (str, Path)):
        return place
    if (found := _WITHOUT_SLASH.match(str(place))) and found[1] in _known_protocols():
        what = f"{place} is a URL that went through pathlib, which removes one of its slashes"
        raise CheckpointError(what, fix="give it as text, with / between its parts")
    if isinstance(place, str) and place.startswith(("file://", "local://")):
        return LocalFolder(Path(place.partition("://")[2]))
    return ObjectFolder.at(place) if isinstance(place, str) and _URL.match(place) else LocalFolder(Path(place))


def is_unanswered(error: BaseException | None) -> bool:
    """Return whether an error of a store says nothing about what it holds: a later call may be answered."""
    return isinstance(error, OSError) and not isinstance(error, FileNotFoundError) and error.errno not in _NO_PLACE


def unanswered(what: object, error: BaseException) -> ShardwiseError:
    """Return the error of a read that was not answered. No CheckpointError: neither a start from the beginning nor
    an older checkpoint is a way out."""
    return ShardwiseError(f"{what} cannot be read now: {error}", fix="load again later, or let this job read it")


@contextmanager
def answered(folder: Folder) -> Iterator[None]:
    """Raise ShardwiseError where a question about what a folder holds is not answered."""
    try:
        yield
    except OSError as error:
        if error.errno in _NO_PLACE:
            raise
        raise unanswered(folder, error) from error


def _known_protocols() -> list[str]:
    import fsspec

    return list(fsspec.available_protocols())
