"""Data files of a checkpoint: staged in memory, written in blocks with checksums, and read by boxes of tensors."""

from __future__ import annotations

import contextlib
import mmap
import zlib
from bisect import bisect, bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

import numpy as np
import torch

from shardwise.errors import CheckpointError, ShardwiseError
from shardwise.layouts.boxes import Box
from shardwise.train.local_folder import AT_ONCE_BYTES
from shardwise.train.manifest import BLOCK_BYTES, Cover, Covers, DataFile, Manifest, StoredTensor, read_manifest
from shardwise.train.names import RANDOM, with_token
from shardwise.train.parts import TensorPart
from shardwise.train.sharing import PAGE_BYTES, PlannedFile, WritePiece
from shardwise.train.stores import Folder, StoredBytes, is_unanswered, unanswered


@dataclass(frozen=True)
class StagedFile:
    """A file of a checkpoint in memory. ``buffer``: its data, as bytes."""

    file: PlannedFile
    buffer: torch.Tensor

    @staticmethod
    def empty(file: PlannedFile, *, pinned: bool) -> StagedFile:
        return StagedFile(file, _room(file.num_bytes, pinned=pinned))

    def part(self, start: int, stop: int) -> memoryview:
        return memoryview(self.buffer[start:stop].numpy().data)

    @cached_property
    def _places(self) -> list[torch.Tensor]:
        return [
            self.buffer[start : start + piece.num_bytes].view(piece.dtype).view(piece.sizes)
            for start, piece in self.file.pieces
        ]

    def fill(self, parts: Mapping[str, TensorPart]) -> None:
        """Copy this rank's pieces of the file to the buffer."""
        pinned = self.buffer.is_pinned()
        with torch.no_grad():
            for place, (_, piece) in zip(self._places, self.file.pieces, strict=True):
                place.copy_(_source(parts[piece.name], piece), non_blocking=pinned)


@dataclass(frozen=True)
class StreamedFile:
    """A file that is written from a rank's ``parts``, which must not change meanwhile, through a small ``window``."""

    file: PlannedFile
    parts: Mapping[str, TensorPart]
    window: torch.Tensor

    @staticmethod
    def of(file: PlannedFile, parts: Mapping[str, TensorPart], *, pinned: bool) -> StreamedFile:
        return StreamedFile(file, parts, _room(min(file.num_bytes, AT_ONCE_BYTES), pinned=pinned))

    def part(self, start: int, stop: int) -> memoryview:
        """Return data bytes, at most the window's size. They are valid until the next call."""
        with torch.no_grad():
            for at in range(bisect(self._starts, start) - 1, bisect_left(self._starts, stop)):
                begin, piece = self.file.pieces[at]
                first, last = max(start, begin), min(stop, begin + piece.num_bytes)
                if first < last:
                    target = self.window[first - start : last - start].view(piece.dtype)
                    _copy_elements(
                        target, _source(self.parts[piece.name], piece), (first - begin) // piece.dtype.itemsize
                    )
        return memoryview(self.window[: stop - start].numpy().data)

    @cached_property
    def _starts(self) -> list[int]:
        return [start for start, _ in self.file.pieces]


def _copy_elements(target: torch.Tensor, source: torch.Tensor, first: int) -> None:
    """Fill a flat ``target`` with elements of ``source`` in row-major order, starting at ``first``."""
    if source.is_contiguous():
        target.copy_(source.reshape(-1)[first : first + len(target)])
        return
    row, done = prod(source.shape[1:]), 0
    while done < len(target):
        number, offset = divmod(first + done, row)
        left = len(target) - done
        if offset or left < row:  # a part of one row
            count = min(row - offset, left)
            _copy_elements(target[done : done + count], source[number], offset)
        else:
            rows = left // row
            count = rows * row
            target[done : done + count].view(rows, *source.shape[1:]).copy_(source[number : number + rows])
        done += count


def _room(num_bytes: int, *, pinned: bool) -> torch.Tensor:
    """Allocate page-aligned memory, as direct I/O needs it."""
    whole = num_bytes + PAGE_BYTES
    if pinned:
        room = torch.empty(whole, dtype=torch.uint8, pin_memory=True)
    else:  # huge pages, if the system has them: copies and direct I/O need fewer page-table lookups
        memory = mmap.mmap(-1, whole, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(AttributeError, OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
        room = torch.frombuffer(memory, dtype=torch.uint8)
    first = -room.data_ptr() % PAGE_BYTES
    return room[first : first + num_bytes]


def _source(part: TensorPart, piece: WritePiece) -> torch.Tensor:
    for box in part.boxes:
        if (box.offsets, box.sizes) == (piece.offsets, piece.sizes):
            return part.at(box)
        common = box.common(piece.offsets, piece.sizes)
        if common is not None and common.sizes == piece.sizes:
            return part.at(common)
    raise AssertionError(f"a rank writes {piece.sizes} at {piece.offsets} of {piece.name}, which it does not hold")


def write(folder: Folder, source: StagedFile | StreamedFile, token: str = "") -> DataFile:
    """Write a file to a folder and wait until it is stored. ``token``: of its name (``with_token``). Raises OSError."""
    file = source.file
    checksums: list[str] = []

    def parts() -> Iterator[memoryview]:
        checksums.clear()
        yield memoryview(file.header)
        for start in range(0, file.num_bytes, AT_ONCE_BYTES):
            part = source.part(start, min(start + AT_ONCE_BYTES, file.num_bytes))
            checksums.extend(
                f"{zlib.crc32(part[at : at + BLOCK_BYTES]):08x}" for at in range(0, len(part), BLOCK_BYTES)
            )
            yield part

    folder.write(with_token(file.name, token), parts, len(file.header) + file.num_bytes)
    return DataFile(len(file.header), file.num_bytes, "".join(checksums))


class CheckpointReader:
    """Reads boxes of tensors from a checkpoint's files, of which only the blocks that contain them are read."""

    def __init__(self, folder: Folder, manifest: Manifest) -> None:
        self.folder, self.manifest = folder, manifest
        self.num_bytes_read = 0
        self._contents: dict[str, StoredBytes] = {}
        self._verified: dict[str, np.ndarray] = {}
        self._parts_read: set[str] = set()

    def file_name(self, file: str) -> str:
        """Return the name under which a file lies in the folder."""
        return file

    def verify(self, parts: Iterable[tuple[str, Iterable[Box]]]) -> None:
        """Read the blocks that contain boxes of tensors, and verify the checksum of each, once. ``parts``: (tensor, its
        boxes). Raises CheckpointError if a block is missing or differs, or if elements of the boxes are in no file or
        in several."""
        blocks: dict[str, np.ndarray] = {}
        wanted = [(name, list(boxes)) for name, boxes in parts]
        self._read_parts(wanted)
        for name, boxes in wanted:
            stored = self.manifest.tensors[name]
            for box in boxes:
                chunks = self._chunks(stored, box)
                overlap = any(
                    first.common(second.offsets, second.sizes)
                    for i, (first, _) in enumerate(chunks)
                    for second, _ in chunks[:i]
                )
                if sum(common.numel for common, _ in chunks) != box.numel or overlap:
                    what = f"{self.folder} does not have every element of {name} exactly once"
                    raise CheckpointError(what, fix="load an older checkpoint")
                for common, position in chunks:
                    file, size = stored.chunks[position].file, self.manifest.block_bytes
                    count = -(-self._data(file).num_bytes // size)
                    touched = _blocks(stored, common, position, size, count)
                    blocks[file] = blocks[file] | touched if file in blocks else touched
        for file, touched in blocks.items():
            self._verify_blocks(file, touched)

    def random_of(self, rank: int) -> StoredTensor | None:
        """Return the states of a saved rank's generators, or None."""
        self._read_parts([(RANDOM, [Box((rank,), (1,), (0,))])])
        return self.manifest.tensors.get(f"{RANDOM}{rank}")

    def _read_parts(self, wanted: Sequence[tuple[str, Sequence[Box]]]) -> None:
        """Read the parts of the manifest that have elements of these boxes, and those that they name. Raises
        CheckpointError if one is missing or damaged."""

        around = [(name, Cover(box.offsets, box.sizes, box.numel)) for name, boxes in wanted for box in boxes]

        def has_some(covers: Covers) -> bool:
            return any(name in covers and covers[name].meets(cover) for name, cover in around)

        fresh = self.manifest.parts
        while names := [part for part, covers in fresh.items() if has_some(covers)]:
            if again := self._parts_read.intersection(names):
                what = f"{self.folder / min(again)} is a part of the manifest that other parts name again"
                raise CheckpointError(what, fix="load an older checkpoint")
            try:
                found = {name: read_manifest(self.folder, name) for name in names}
                self.manifest = self.manifest.with_parts(found)
            except CheckpointError:
                raise
            except ShardwiseError as error:
                if is_unanswered(error.__cause__):
                    raise
                what = f"a part of the manifest of {self.folder} does not fit the rest: {error}"
                raise CheckpointError(what, fix="load an older checkpoint") from error
            self._parts_read.update(names)
            fresh = {name: covers for part in found.values() for name, covers in part.parts.items()}

    def prepare(self) -> None:
        """Prepare for ``read``, after the last ``verify``. Collective."""

    def read(self, name: str, part: TensorPart) -> None:
        """Fill a rank's part of a tensor, converting to the part's dtype."""
        stored = self.manifest.tensors[name]
        with torch.no_grad():
            for box in part.boxes:
                for common, position in self._chunks(stored, box):
                    chunk = stored.chunks[position]
                    first = chunk.start + self._data(chunk.file).start
                    num_bytes = prod(chunk.sizes) * stored.dtype.itemsize
                    whole = (
                        self._content(chunk.file).data[first : first + num_bytes].view(stored.dtype).view(chunk.sizes)
                    )
                    for dim, (start, size) in enumerate(zip(common.offsets, common.sizes, strict=True)):
                        whole = whole.narrow(dim, start - chunk.offsets[dim], size)
                    part.at(common).copy_(whole)

    @staticmethod
    def _chunks(stored: StoredTensor, box: Box) -> list[tuple[Box, int]]:
        """Return the overlaps of a box with the tensor's chunks: (overlap, index of the chunk)."""
        common_boxes = ((box.common(chunk.offsets, chunk.sizes), at) for at, chunk in enumerate(stored.chunks))
        return [(common, at) for common, at in common_boxes if common is not None]

    def _data(self, file: str) -> DataFile:
        return self.manifest.files[file]

    def _content(self, file: str) -> StoredBytes:
        """Return a file's bytes. Raises CheckpointError if it is missing or has another length."""
        if file not in self._contents:
            expected = self._data(file).start + self._data(file).num_bytes
            name = self.file_name(file)
            try:
                self._contents[file] = self.folder.content(name, expected)
            except (OSError, RuntimeError) as error:
                self._check_answer(name, error)
                what = f"{self.folder / name} is a part of the checkpoint and cannot be read: {error}"
                raise CheckpointError(what, fix="copy all files of the folder, or load an older one") from error
        return self._contents[file]

    def _check_answer(self, name: str, error: Exception) -> None:
        """Raise ShardwiseError if a store does not answer: then an older checkpoint is no way out."""
        if not self.folder.renames and is_unanswered(error):
            raise unanswered(self.folder / name, error) from error

    def _verify_blocks(self, file: str, touched: np.ndarray) -> None:
        size, data, content = self.manifest.block_bytes, self._data(file), self._content(file)
        done = self._verified.setdefault(file, np.zeros(len(touched), dtype=bool))
        new = touched & ~done
        try:
            content.fetch([
                (data.start + first * size, data.start + min(last * size, data.num_bytes)) for first, last in _runs(new)
            ])  # fmt: skip
        except OSError as error:
            self._check_answer(self.file_name(file), error)
            what = f"{self.folder / self.file_name(file)} cannot be read: {error}"
            raise CheckpointError(what, fix="load an older checkpoint") from error
        for block in np.flatnonzero(new).tolist():
            start, stop = block * size, min((block + 1) * size, data.num_bytes)
            self.num_bytes_read += stop - start
            if zlib.crc32(content.data[data.start + start : data.start + stop].numpy().data) != data.checksum(block):
                what = f"{self.folder / file} is damaged: wrong checksum of data bytes {start:,} to {stop:,}"
                raise CheckpointError(what, fix="load an older checkpoint")
        done |= new


def _runs(blocks: np.ndarray) -> list[tuple[int, int]]:
    """Return the (first, last + 1) of each run of set blocks."""
    edges = np.flatnonzero(np.diff(np.concatenate(([0], blocks.astype(np.int8), [0]))))
    return list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))


def _blocks(stored: StoredTensor, common: Box, position: int, size: int, count: int) -> np.ndarray:
    """Return a mask of the file's blocks that contain elements of a box."""
    chunk, itemsize = stored.chunks[position], stored.dtype.itemsize
    inner = len(chunk.sizes)  # dims from here on are contiguous
    while inner and common.sizes[inner - 1 :] == chunk.sizes[inner - 1 :]:
        inner -= 1
    outer = max(inner - 1, 0)
    starts = np.zeros(1, dtype=np.int64)
    for dim in range(outer):
        rows = np.arange(common.sizes[dim]) + common.offsets[dim] - chunk.offsets[dim]
        starts = (starts[:, None] + rows * prod(chunk.sizes[dim + 1 :])).reshape(-1)
    if inner:
        starts = starts + (common.offsets[outer] - chunk.offsets[outer]) * prod(chunk.sizes[inner:])
    length = prod(common.sizes[outer:])
    first = (chunk.start + starts * itemsize) // size
    last = (chunk.start + (starts + length) * itemsize - 1) // size
    steps = np.zeros(count + 1, dtype=np.int64)
    np.add.at(steps, first, 1)
    np.add.at(steps, last + 1, -1)
    is_touched: np.ndarray = np.cumsum(steps)[:count] > 0
    return is_touched
