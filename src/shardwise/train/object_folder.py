"""A checkpoint in an object store: whatever fsspec names (``s3://``, ``gs://``, ``az://``, ``memory://``).

An object appears whole or not at all, but nothing can be renamed or locked. So the files of a save have its token in
their names, and no other save writes over them; the checkpoint exists with its manifest, which is created last and
never written over. The object ``owner`` has the token of the save: the last that began owns the name, and an
earlier one notices.

Every call is tried again, with growing pauses, unless the store refuses it for good. Where it refuses the credentials,
they are read anew once: they may have been renewed outside. Texts of errors lose whatever looks like a credential, and
the errors that they come from are not chained to them.
"""

from __future__ import annotations

import contextlib
import mmap
import random
import re
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar
from urllib.parse import urlsplit

import numpy as np
import torch

from shardwise.errors import CheckpointError, PlanWarning, ShardwiseError
from shardwise.train.names import DAMAGED, FILE, OWNER, is_kept, is_of_saves
from shardwise.untrusted_text import MAX_FILE

T = TypeVar("T")
_EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gs", "gcs": "gs", "az": "az", "abfs": "az", "abfss": "az"}
_ATTEMPTS, _FIRST_PAUSE_SECONDS = 6, 0.25
_PART_BYTES, _MAX_PARTS = 2**24, 9_000  # of a multipart upload; S3 takes 10,000 parts
_RANGE_BYTES, _AT_ONCE_BYTES = 2**23, 2**27  # of a read
_ABANDONED_NANOSECONDS = 24 * 3600 * 10**9  # no save takes as long
_FINAL = (FileNotFoundError, FileExistsError, IsADirectoryError, NotADirectoryError, NotImplementedError)
_BUCKETS = ("s3", "s3a", "gs", "gcs", "oss", "tos")  # what is ahead of an @ in their URLs is a credential
_NAMES = "secret|token|passw(?:or)?d|signature|credential|(?:access|account|api|shared|private)[-_ ]?key"
_KINDS = f"{_NAMES}|authorization|sig|key"
_VALUE = r"(?:\\?'[^']*'|\\?\"[^\"]*\"|\S+)"
_SECRETS = (
    (re.compile(r"(://)[^/@\s]+@"), r"\1...@"),
    (re.compile(r"(\b\w+://[^\s?]*)\?\S+"), r"\1?..."),
    (re.compile(r"\b(AKIA|ASIA)[A-Z0-9]{12,}"), r"\1..."),
    (re.compile(r"(?i)\b(bearer|basic|aws4-hmac-sha256|sharedkey(?:lite)?) +\S+"), r"\1 ..."),
    (re.compile(rf"(?i)(<[\w:-]*(?:{_NAMES})[\w:-]*(?:\s[^>]*)?>)[^<]*"), r"\1..."),
    (re.compile(rf"(?i)([\w-]*(?:{_KINDS})[\w-]*\\?['\"]?\s*=\s*){_VALUE}"), r"\1..."),
    (re.compile(rf"(?i)(['\"][\w-]*(?:{_KINDS})[\w-]*\\?['\"]\s*:\s*){_VALUE}"), r"\1..."),
    (
        re.compile(rf"(?i)([\w-]*(?:{_NAMES})[\w-]*\s*:\s*|\bx-[\w-]*(?:{_KINDS})\s*:\s*|\bsig\s*:\s*){_VALUE}"),
        r"\1...",
    ),
    (re.compile(r"(?i)(\bauthorization\s*:\s*)(?:[\w-]+ +)?\S+"), r"\1..."),
)


@dataclass
class ObjectStore:
    """Calls of an fsspec file system, tried again, with errors that are OSErrors without credentials."""

    url: str
    fs: Any = None
    is_exclusive: bool = False  # whether it refuses to create what exists; found out by each save

    def __post_init__(self) -> None:
        self.connect()

    def connect(self) -> None:
        """Make a file system that reads endpoint and credentials anew, where fsspec would return an older one.

        Raises CheckpointError if its library is missing.
        """
        import fsspec

        protocol = self.url.partition("://")[0]
        try:
            self.fs, _ = fsspec.url_to_fs(self.url, skip_instance_cache=True)
        except (ImportError, ValueError) as error:
            extra = _EXTRAS.get(protocol)
            fix = f'pip install "shardwise[{extra}]"' if extra else "install the fsspec package of this kind of store"
            raise CheckpointError(f"{protocol}:// cannot be used: {without_secrets(str(error))}", fix=fix) from None

    def call(self, act: Callable[[Any], T]) -> T:
        """Return ``act(file system)``. Raises OSError."""
        renewed = False
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                return act(self.fs)
            except (ShardwiseError, TypeError, AttributeError, NameError, AssertionError):  # of programs, not of stores
                raise
            except _FINAL as error:
                kind: type[Exception] = type(error) if isinstance(error, OSError) else OSError
                raise kind(without_secrets(str(error), self.fs)) from None
            except PermissionError as error:
                if renewed:
                    what = f"the store refuses the credentials: {without_secrets(str(error), self.fs)}"
                    raise PermissionError(f"{what} (renew them, or give them rights to this folder)") from None
                self.connect()
                renewed = True
                continue
            except Exception as error:  # libraries of stores have errors of their own
                text = without_secrets(f"{type(error).__name__}: {error}", self.fs)
                if attempt == _ATTEMPTS:
                    raise OSError(f"{text} ({_ATTEMPTS} attempts)") from None
            time.sleep(_FIRST_PAUSE_SECONDS * 2 ** (attempt - 1) * random.uniform(0.5, 1.0))
        raise PermissionError("the store refuses the credentials")


def without_secrets(text: str, fs: Any = None) -> str:
    """Return an error's text without credentials: those of the file system, and whatever looks like one."""
    for secret in _values(getattr(fs, "storage_options", {})):
        text = text.replace(secret, "...")
    for pattern, replacement in _SECRETS:
        text = pattern.sub(replacement, text)
    return text


def _values(options: Any) -> Iterator[str]:
    if isinstance(options, dict):
        for value in options.values():
            yield from _values(value)
    elif isinstance(options, str) and len(options) >= 8 and "://" not in options:
        yield options


@dataclass(frozen=True)
class FetchedFile:
    """A file of a store, in memory that has the ranges that were fetched."""

    folder: ObjectFolder
    name: str
    data: torch.Tensor

    def fetch(self, ranges: Sequence[tuple[int, int]]) -> None:
        """Fetch byte ranges, several at a time. Raises OSError."""
        cut = [
            (start, min(start + _RANGE_BYTES, stop))
            for first, stop in ranges
            for start in range(first, stop, _RANGE_BYTES)
        ]
        per_call = _AT_ONCE_BYTES // _RANGE_BYTES
        path = self.folder.key(self.name)
        for at in range(0, len(cut), per_call):
            some = cut[at : at + per_call]

            def read(fs: Any, some: Sequence[tuple[int, int]] = some) -> list[bytes]:
                starts, stops = zip(*some, strict=True)
                contents = fs.cat_ranges([path] * len(some), list(starts), list(stops), on_error="raise")
                for (start, stop), content in zip(some, contents, strict=True):
                    if len(content) != stop - start:
                        raise OSError(f"{len(content):,} of {stop - start:,} bytes of {self.name} came")
                return list(contents)

            for (start, stop), content in zip(some, self.folder.store.call(read), strict=True):
                self.data[start:stop].numpy()[:] = np.frombuffer(content, dtype=np.uint8)


@dataclass(frozen=True)
class ObjectFolder:
    """A prefix of an object store (``train.stores.Folder``)."""

    path: str
    store: ObjectStore = field(compare=False, repr=False)
    renames: ClassVar[bool] = False
    longest_poll_seconds: ClassVar[float] = 2.0

    @staticmethod
    def at(url: str) -> ObjectFolder:
        """Return the folder at a URL. Raises CheckpointError if it holds credentials, or its library is missing."""
        parts = urlsplit(url)
        if re.search(r"[*?\[\]]", url.partition("://")[2].partition("?")[0]):
            raise CheckpointError(f"{without_secrets(url)} is a pattern", fix="give one folder, without *, ?, [ and ]")
        if (
            parts.password
            or "?" in url
            or "::" in url
            or (parts.scheme in _BUCKETS and re.search("[@:]", parts.netloc))
        ):
            what = f"the {parts.scheme}:// URL holds a user, a password or a query"
            if "::" in url:
                what = f"the URL chains file systems: {without_secrets(url)}"
            fix = "give the plain URL; credentials belong in the environment, or in files of the store's library"
            raise CheckpointError(what, fix=fix)
        return ObjectFolder(url.rstrip("/"), ObjectStore(url))

    def __str__(self) -> str:
        return self.path

    @property
    def name(self) -> str:
        return self.path.rpartition("/")[2]

    @property
    def parent(self) -> ObjectFolder:
        return ObjectFolder(self.path.rpartition("/")[0], self.store)

    def __truediv__(self, name: str) -> ObjectFolder:
        return ObjectFolder(f"{self.path}/{name}", self.store)

    def key(self, name: str = "") -> str:
        """Return the file system's name of an object."""
        return str(self.store.fs._strip_protocol(f"{self.path}/{name}".rstrip("/")))

    # -- files ---------------------------------------------------------------------------------------------------------

    def names(self) -> set[str]:
        return set(self._sizes())

    def _sizes(self) -> dict[str, int]:
        """Return the size of each object, and 0 for a folder. Lists are never taken from a cache."""

        def listed(fs: Any) -> dict[str, int]:
            fs.invalidate_cache()
            base = self.key()
            entries = {entry["name"]: entry.get("size") or 0 for entry in fs.ls(base, detail=True)}
            return {
                key.rstrip("/").rpartition("/")[2]: size
                for key, size in entries.items()
                if key.strip("/") != base.strip("/")  # a marker of the folder itself
            }

        try:
            return self.store.call(listed)
        except FileNotFoundError:
            return {}

    def read(self, name: str) -> str:
        content = self.store.call(lambda fs: fs.cat_file(self.key(name), start=0, end=MAX_FILE + 1))
        if len(content) > MAX_FILE:
            raise ShardwiseError(f"{self / name} has more than {MAX_FILE:,} bytes, the limit for such files")
        return str(content.decode("utf-8"))

    def read_all(self, names: Sequence[str]) -> list[str]:
        keys = [self.key(name) for name in names]
        nones = [None] * len(keys)
        contents = self.store.call(lambda fs: fs.cat_ranges(keys, nones, nones, on_error="raise"))
        return [content.decode("utf-8") for content in contents]

    def put(self, name: str, text: str) -> None:
        self.store.call(lambda fs: fs.pipe_file(self.key(name), text.encode()))

    def write(self, name: str, parts: Callable[[], Iterator[memoryview]], num_bytes: int) -> None:
        """Write an object in parts, and compare its size. An attempt that fails leaves nothing."""
        block = max(_PART_BYTES, -(-num_bytes // _MAX_PARTS))

        def attempt(fs: Any) -> None:
            file = fs.open(self.key(name), "wb", block_size=block)
            try:
                for part in parts():
                    file.write(part)
                file.close()
            except BaseException:
                with contextlib.suppress(Exception):  # the first error counts
                    file.discard()
                with contextlib.suppress(AttributeError):
                    file.closed = True  # else the garbage collector uploads the rest
                raise
            if (size := self._size(fs, name)) != num_bytes:
                raise OSError(f"the store has {size:,} bytes of {self / name}, but {num_bytes:,} were written")

        self.store.call(attempt)

    def content(self, name: str, num_bytes: int) -> FetchedFile:
        if (size := self.store.call(lambda fs: self._size(fs, name))) != num_bytes:
            what = f"{self / name} has {size:,} bytes, but {num_bytes:,} were written"
            raise CheckpointError(what, fix="load an older checkpoint, or copy this one again")
        memory = mmap.mmap(-1, max(size, 1))  # takes memory only where something is fetched
        return FetchedFile(self, name, torch.frombuffer(memory, dtype=torch.uint8)[:size])

    def _size(self, fs: Any, name: str) -> int:
        fs.invalidate_cache()
        return int(fs.info(self.key(name))["size"])

    def remove(self, names: Iterable[str]) -> None:
        for name in names:
            with contextlib.suppress(OSError):
                self.store.call(lambda fs, name=name: fs.rm_file(self.key(name)))  # type: ignore[misc]

    def has(self, name: str) -> bool:
        try:
            self.store.call(lambda fs: self._size(fs, name))
        except FileNotFoundError:
            return False
        return True

    def written(self, name: str) -> int:
        def modified(fs: Any) -> int:
            fs.invalidate_cache()
            return int(fs.modified(self.key(name)).timestamp() * 10**9)

        with contextlib.suppress(OSError):
            return self.store.call(modified)
        return 0

    # -- a checkpoint --------------------------------------------------------------------------------------------------

    def exists(self) -> bool:
        return self.has(FILE)

    @property
    def staging(self) -> ObjectFolder:
        return self

    def begin(self, token: str) -> Callable[[], None]:
        if not self.name or "://" not in self.parent.path:
            raise CheckpointError(f"{self} has no name for a checkpoint in it", fix="give URL/NAME")
        if self.exists():
            what = f"{self} exists already: a checkpoint is never overwritten"
            fix = "save under another name (the step in it), or delete that one first"
            raise CheckpointError(what, fix=fix)
        self.put(OWNER, token)
        if (owner := self.owner()) not in (None, token):
            what = f"{self} was not saved: another job began to save it at this moment"
            raise CheckpointError(what, fix="end one of the two jobs, or give each its own folder")
        if owner is None or OWNER not in self.names():
            what = f"{self} does not show what was just written to it"
            raise CheckpointError(what, fix="give a store whose reads and lists see earlier writes, without a cache")
        self.store.is_exclusive = not self._create(OWNER, token)
        if not self.store.is_exclusive:
            what = f"{self}: the store writes over objects that it is told to create"
            warnings.warn(f"{what}, so let no two jobs save under one name at once", PlanWarning, stacklevel=6)
        self._remove_leftovers()
        return lambda: None

    def reserve(self) -> None:
        """Do nothing: a store has no locks."""

    def _create(self, name: str, text: str) -> bool:
        """Write an object that does not exist. Return False if it does."""
        try:
            self.store.call(lambda fs: fs.pipe_file(self.key(name), text.encode(), mode="create"))
        except FileExistsError:
            return False
        return True

    def _remove_leftovers(self) -> None:
        """Remove what killed jobs left beside this checkpoint a day ago or earlier, by the store's clock."""
        now = self.written(OWNER)
        for name in self.parent.names() - {self.name}:
            folder = self.parent / name
            files = folder.names()
            if not files or FILE in files or not is_of_saves(files):
                continue
            with contextlib.suppress(OSError):
                if now - folder.written(OWNER if OWNER in files else min(files)) > _ABANDONED_NANOSECONDS:
                    folder.delete()

    def owner(self) -> str | None:
        try:
            return self.read(OWNER)
        except FileNotFoundError:
            return None

    def is_complete(self, token: str) -> bool:
        return self.exists() and self.owner() == token

    def commit(self, token: str, manifest: str) -> bool:
        if self.owner() != token:
            return False
        error: OSError | None = None
        try:
            self._create(FILE, manifest)
        except OSError as caught:  # it may exist all the same: an answer was lost
            error = caught
        try:
            is_ours = self.read(FILE) == manifest
        except FileNotFoundError:
            is_ours = False
        if error is not None and not is_ours:
            raise error
        if is_ours and self.store.is_exclusive:  # so nobody else can complete a save here
            with contextlib.suppress(OSError):
                names = self.names() - {FILE, OWNER}
                self.remove(name for name in names if not is_kept(name, token))
        return is_ours

    def abandon(self, token: str) -> None:
        with contextlib.suppress(OSError):
            if self.owner() == token:
                self.remove([OWNER])

    def delete(self) -> None:
        for name in (FILE, OWNER):  # first, so that nobody takes the rest for a checkpoint
            with contextlib.suppress(FileNotFoundError):
                self.store.call(lambda fs, name=name: fs.rm_file(self.key(name)))  # type: ignore[misc]
        with contextlib.suppress(FileNotFoundError):
            self.store.call(lambda fs: fs.rm(self.key(), recursive=True))

    def set_aside(self) -> None:
        taken, aside, turn = self.parent.names(), self.name + DAMAGED, 0
        while aside in taken:
            turn += 1
            aside = f"{self.name}.{turn}{DAMAGED}"
        target = self.parent / aside
        for name in sorted(self.names(), key=lambda name: name == FILE):  # copied by the store; the manifest last
            self.store.call(lambda fs, name=name: fs.cp_file(self.key(name), target.key(name)))  # type: ignore[misc]
        self.delete()
