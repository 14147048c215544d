"""The manifest of a checkpoint: a JSON file that is written last, and parts of it.

``checkpoint.json`` lists every tensor with its dtype and its global shape, and the values that are not tensors. It also
lists the data files of the first eight ranks, with the CRC-32 of each block of their data, and the boxes of tensors in
them. The files of the next ranks are in parts (``part-8-...``), manifests of the same form, one for eight ranks. A
manifest names some parts, these name others, as in the tree in which ranks save (``train.saving``), each with a box
around what is below it of each tensor. So a reader finds the parts that it needs in a few steps, and needs no others.

Loading needs no layout, mesh or rank: the manifest only stores where the elements are. Reading it is safe for untrusted
files: it creates only numbers, texts and lists.
"""

from __future__ import annotations

import json
import re
import zlib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import torch

from shardwise.errors import CheckpointError, ShardwiseError
from shardwise.train.names import FILE, RANDOM
from shardwise.train.stores import Folder, is_unanswered, unanswered
from shardwise.train.values import DTYPES, dtype_name
from shardwise.untrusted_text import MAX_NUMBER, read_json, shorten_repr

FORMAT = "shardwise checkpoint"
_WHOLE, _IN_PARTS = 1, 2  # versions: a manifest without parts is as it was before there were any
BLOCK_BYTES = 2**18  # per checksum; reading a part reads all blocks that contain it
_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,200}\.safetensors")
_PART = re.compile(r"part-\d{1,7}-\w{1,64}\.json")


@dataclass(frozen=True, slots=True)
class Chunk:
    """A box of a tensor, stored row-major from byte ``start`` of a file's data."""

    file: str
    start: int
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of a checkpoint, by its global shape."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True, slots=True)
class Cover:
    """A box around what a part of the manifest, and those that it names, have of a tensor: ``numel`` elements."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    numel: int

    @staticmethod
    def of(covers: Sequence[Cover]) -> Cover:
        """Return a cover of several."""
        starts = tuple(map(min, zip(*(cover.offsets for cover in covers), strict=True)))
        ends = ([a + n for a, n in zip(cover.offsets, cover.sizes, strict=True)] for cover in covers)
        stops = map(max, zip(*ends, strict=True))
        sizes = tuple(stop - start for start, stop in zip(starts, stops, strict=True))
        return Cover(starts, sizes, sum(cover.numel for cover in covers))

    def meets(self, other: Cover) -> bool:
        rows = zip(self.offsets, self.sizes, other.offsets, other.sizes, strict=True)
        return all(max(a, b) < min(a + n, b + m) for a, n, b, m in rows)


Covers = Mapping[str, Cover]  # by tensor; one of RANDOM stands for those of a range of ranks


def united(pairs: Iterable[tuple[str, Cover]]) -> dict[str, Cover]:
    """Return a cover of all those of each tensor."""
    found: dict[str, list[Cover]] = defaultdict(list)
    for name, cover in pairs:
        found[name].append(cover)
    return {name: Cover.of(covers) for name, covers in found.items()}


@dataclass(frozen=True, slots=True)
class DataFile:
    """A data file. ``start``: byte where the data begins; ``checksums``: 8 hexadecimal digits per block."""

    start: int
    num_bytes: int
    checksums: str

    def checksum(self, block: int) -> int:
        return int(self.checksums[8 * block : 8 * block + 8], 16)


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The content of ``checkpoint.json``, or of a part of it. ``tied``: additional names of tensors; ``plan``: digest
    of the plan that was in use, "" without one; ``values``: encoded (``train.values``); ``parts``: files that list the
    rest."""

    step: int = 0
    num_ranks: int
    plan: str = ""
    metrics: Mapping[str, float] = field(default_factory=dict)
    block_bytes: int = BLOCK_BYTES
    files: Mapping[str, DataFile] = field(default_factory=dict)
    tensors: Mapping[str, StoredTensor]
    tied: Mapping[str, str] = field(default_factory=dict)
    values: Mapping[str, Any] = field(default_factory=dict)
    parts: Mapping[str, Covers] = field(default_factory=dict)

    def with_parts(self, added: Mapping[str, Manifest]) -> Manifest:
        """Return the manifest with what parts list, in place of those parts. ``added``: by their names. Raises
        ShardwiseError if they contradict each other."""
        files, tensors = dict(self.files), dict(self.tensors)
        parts = {name: covers for name, covers in self.parts.items() if name not in added}
        chunks = defaultdict[str, list[Chunk]](list)
        for name, part in added.items():
            for tensor, stored in part.tensors.items():
                here = tensors.setdefault(tensor, replace(stored, chunks=()))
                same = (here.dtype, here.shape) == (stored.dtype, stored.shape)
                _require(same, f"{shorten_repr(tensor)} in {name}")
                chunks[tensor] += stored.chunks
            fits = part.block_bytes == self.block_bytes and not part.files.keys() & files.keys()
            _require(fits, f"files in {name}")
            files |= part.files
            parts |= part.parts
        for tensor, more in chunks.items():
            tensors[tensor] = replace(tensors[tensor], chunks=(*tensors[tensor].chunks, *more))
        for covers in parts.values():
            for tensor, cover in covers.items():
                known = tensor not in tensors or len(cover.offsets) == len(tensors[tensor].shape)
                _require(known, f"where parts have {shorten_repr(tensor)}")
        return replace(self, files=files, tensors=tensors, parts=parts)

    def covers(self) -> dict[str, Cover]:
        """Return a box around what it lists, and its parts, of every tensor."""
        found = [pair for covers in self.parts.values() for pair in covers.items()]
        for name, stored in self.tensors.items():
            if name.startswith(RANDOM):
                found += [(RANDOM, Cover((int(name.removeprefix(RANDOM)),), (1,), 1)) for _ in stored.chunks]
            else:
                found += [(name, Cover(chunk.offsets, chunk.sizes, prod(chunk.sizes))) for chunk in stored.chunks]
        return united(found)

    def check_whole(self) -> None:
        """Raise ShardwiseError if files and parts do not have as many elements of each tensor as it has."""
        covers = self.covers()
        for name, stored in self.tensors.items():
            numel = covers[name].numel if name in covers else 0
            if not name.startswith(RANDOM) and numel != prod(stored.shape):
                raise ShardwiseError(f"the ranks have written {numel:,} of {prod(stored.shape):,} elements of {name}")

    def find(self, name: str) -> str | None:
        """Return the name under which a tensor is stored, or None."""
        other = self.tied.get(name, name)
        return name if name in self.tensors else other if other in self.tensors else None

    def to_text(self) -> str:
        """Return the content of the file."""
        order = {name: position for position, name in enumerate(self.files)}
        content = {
            "step": self.step,
            "num_ranks": self.num_ranks,
            "plan": self.plan,
            "metrics": dict(self.metrics),
            "block_bytes": self.block_bytes,
            "files": [[name, file.start, file.num_bytes, file.checksums] for name, file in self.files.items()],
            "tensors": {
                name: [
                    dtype_name(stored.dtype),
                    stored.shape,
                    [[order[chunk.file], chunk.start, chunk.offsets, chunk.sizes] for chunk in stored.chunks],
                ]
                for name, stored in self.tensors.items()
            },
            "tied": dict(self.tied),
            "values": dict(self.values),
        }
        if self.parts:
            content["parts"] = {
                name: {tensor: [cover.offsets, cover.sizes, cover.numel] for tensor, cover in covers.items()}
                for name, covers in self.parts.items()
            }
        version = _IN_PARTS if self.parts else _WHOLE
        return json.dumps({"format": FORMAT, "version": version, "crc32": _crc(content), "content": content})


def _crc(content: Any) -> int:
    return zlib.crc32(json.dumps(content, sort_keys=True, separators=(",", ":")).encode())


def read_manifest(folder: Folder, name: str = FILE) -> Manifest:
    """Read the manifest of a checkpoint, without its parts; or the part ``name``. Raises CheckpointError if it is
    missing or damaged, and ShardwiseError if a store does not answer."""
    try:
        text = folder.read(name)
    except (OSError, UnicodeDecodeError, ShardwiseError) as error:
        if not folder.renames and is_unanswered(error):
            raise unanswered(folder / name, error) from error
        why = f"{name} cannot be read ({shorten_repr(str(error), 200)})"
        what, fix = f"{folder} lacks a part: {why}", "copy all files of the folder, or load an older one"
        if name == FILE:
            what = f"{folder} is no checkpoint: {why}"
            fix = "give the folder of a complete checkpoint, or the folder that contains several"
        raise CheckpointError(what, fix=fix) from error
    try:
        return parse_manifest(text)
    except ShardwiseError as error:
        fix = "load an older checkpoint; this one was changed after it was written"
        raise CheckpointError(f"{folder / name} is damaged: {error}", fix=fix) from error


def parse_manifest(text: str) -> Manifest:
    """Parse a text of ``Manifest.to_text``. Raises ShardwiseError for any other text."""
    value = read_json(text)
    if not isinstance(value, dict) or value.get("format") != FORMAT:
        raise ShardwiseError(f'it does not have "format": "{FORMAT}"')
    if value.get("version") not in (_WHOLE, _IN_PARTS):
        version = shorten_repr(value.get("version"))
        raise ShardwiseError(f"it has version {version}, and this shardwise reads {_WHOLE} and {_IN_PARTS}")
    content = value.get("content")
    if not isinstance(content, dict) or value.get("crc32") != _crc(content):
        raise ShardwiseError("its checksum does not match its content")
    try:
        return _manifest(content)
    except (TypeError, ValueError, LookupError, ArithmeticError, AttributeError) as error:
        raise ShardwiseError(f"its content is malformed ({shorten_repr(str(error), 200)})") from error


def _manifest(content: dict[str, Any]) -> Manifest:
    block = _count(content["block_bytes"])
    _require(2**9 <= block <= 2**30, f"blocks of {block:,} bytes")
    files: dict[str, DataFile] = {}
    for name, start, num_bytes, checksums in content["files"]:
        _require(isinstance(name, str) and _NAME.fullmatch(name) is not None, f"a file called {shorten_repr(name)}")
        files[name] = DataFile(_count(start), _count(num_bytes), checksums)
        blocks = -(-num_bytes // block)
        _require(re.fullmatch(r"[0-9a-f]*", checksums) is not None and len(checksums) == 8 * blocks, "checksums")
    names = list(files)
    tensors = {name: _stored(name, entry, names, files) for name, entry in content["tensors"].items()}
    tied = content["tied"]
    _require(all(isinstance(name, str) for name in tied.values()), "tied names")
    _require(all(isinstance(value, (int, float)) for value in content["metrics"].values()), "metrics")
    _require(isinstance(content["plan"], str) and isinstance(content["values"], dict), "plan or values")
    fields = {name: content[name] for name in ("plan", "metrics", "tied", "values")}
    fields |= {name: _count(content[name]) for name in ("step", "num_ranks", "block_bytes")}
    parts: dict[str, dict[str, Cover]] = {}
    for name, covers in content.get("parts", {}).items():
        _require(_PART.fullmatch(name) is not None, f"a part called {shorten_repr(name)}")
        parts[name] = {tensor: _cover(tensor, entry, tensors) for tensor, entry in covers.items()}
    return Manifest(files=files, tensors=tensors, parts=parts, **fields)


def _cover(name: str, entry: Any, tensors: Mapping[str, StoredTensor]) -> Cover:
    (offsets, sizes), numel = (tuple(map(_count, rows)) for rows in entry[:2]), _count(entry[2])
    dims = 1 if name == RANDOM else len(tensors[name].shape) if name in tensors else len(offsets)
    _require(len(offsets) == len(sizes) == dims, f"where parts have {shorten_repr(name)}")
    return Cover(offsets, sizes, numel)


def _stored(name: str, entry: Any, names: list[str], files: Mapping[str, DataFile]) -> StoredTensor:
    dtype, shape, chunks = DTYPES[entry[0]], tuple(map(_count, entry[1])), []
    _require(prod(shape) * dtype.itemsize <= MAX_NUMBER, f"the size of {shorten_repr(name)}")
    for position, start, offsets, sizes in entry[2]:
        file = names[_count(position)]
        chunk = Chunk(file, _count(start), tuple(map(_count, offsets)), tuple(map(_count, sizes)))
        inside = all(a + n <= size for a, n, size in zip(chunk.offsets, chunk.sizes, shape, strict=True))
        fits = start + prod(chunk.sizes) * dtype.itemsize <= files[file].num_bytes and start % dtype.itemsize == 0
        _require(inside and fits and files[file].start % dtype.itemsize == 0, f"where {shorten_repr(name)} lies")
        chunks.append(chunk)
    return StoredTensor(dtype, shape, tuple(chunks))


def _count(value: Any) -> int:
    _require(isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_NUMBER, shorten_repr(value))
    number: int = value
    return number


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise ShardwiseError(f"invalid value: {what}")
