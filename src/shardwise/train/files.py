"""Data files of a checkpoint: staged in memory, written in blocks with checksums, and read by boxes of tensors."""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import zlib
from bisect import bisect, bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path

import numpy as np
import torch

from shardwise.errors import CheckpointError
from shardwise.layouts.boxes import Box
from shardwise.train.manifest import BLOCK_BYTES, DataFile, Manifest, StoredTensor
from shardwise.train.parts import TensorPart
from shardwise.train.sharing import AT_ONCE_BYTES, PAGE_BYTES, PlannedFile, WritePiece

_DIRECT: int = getattr(os, "O_DIRECT", 0)  # 0 if the system does not have it


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


def write(path: Path, source: StagedFile | StreamedFile) -> DataFile:
    """Write a file and wait until it is on disk. Raises OSError.

    All but the last part is written with O_DIRECT if the file system supports it. A copy to the page cache takes twice
    the CPU time of the checksums, and the file is not read soon.
    """
    file = source.file
    checksums: list[str] = []
    with path.open("xb", buffering=0) as target:
        _write_all(target.fileno(), memoryview(file.header))
        for start in range(0, file.num_bytes, AT_ONCE_BYTES):
            part = source.part(start, min(start + AT_ONCE_BYTES, file.num_bytes))
            checksums += [f"{zlib.crc32(part[at : at + BLOCK_BYTES]):08x}" for at in range(0, len(part), BLOCK_BYTES)]
            _write_all(target.fileno(), part, direct=len(part) == AT_ONCE_BYTES)
        os.fsync(target.fileno())
    return DataFile(len(file.header), file.num_bytes, "".join(checksums))


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


class CheckpointReader:
    """Reads boxes of tensors from a checkpoint's memory-mapped files."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.folder, self.manifest = folder, manifest
        self.num_bytes_read = 0
        self._mapped: dict[str, torch.Tensor] = {}
        self._verified: dict[str, np.ndarray] = {}

    def path(self, file: str) -> Path:
        return self.folder / file

    def verify(self, name: str, boxes: Iterable[Box]) -> None:
        """Verify the checksums of all blocks that contain boxes of a tensor, each block once. Raises CheckpointError if
        a block is missing or differs, or if elements of the boxes are in no file or in several."""
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
                self._verify_blocks(stored, common, position)

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
                    whole = self._map(chunk.file)[first : first + num_bytes].view(stored.dtype).view(chunk.sizes)
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

    def _map(self, file: str) -> torch.Tensor:
        """Map a file and return its bytes. Raises CheckpointError if it is missing or has another length."""
        if file not in self._mapped:
            path, expected = self.path(file), self._data(file).start + self._data(file).num_bytes
            try:
                is_file, size = path.is_file(), path.stat().st_size
                if not is_file or size != expected:
                    what = f"{path} has {size:,} bytes, but {expected:,} were written"
                    raise CheckpointError(what, fix="load an older checkpoint, or copy this one again")
                self._mapped[file] = torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8)
            except (OSError, RuntimeError) as error:
                what = f"{path} is a part of the checkpoint and cannot be read: {error}"
                raise CheckpointError(what, fix="copy all files of the folder, or load an older one") from error
        return self._mapped[file]

    def _verify_blocks(self, stored: StoredTensor, common: Box, position: int) -> None:
        chunk = stored.chunks[position]
        size, data = self.manifest.block_bytes, self._data(chunk.file)
        content = self._map(chunk.file)
        done = self._verified.setdefault(chunk.file, np.zeros(-(-data.num_bytes // size), dtype=bool))
        new = _blocks(stored, common, position, size, len(done)) & ~done
        for block in np.flatnonzero(new).tolist():
            start, stop = block * size, min((block + 1) * size, data.num_bytes)
            self.num_bytes_read += stop - start
            if zlib.crc32(content[data.start + start : data.start + stop].numpy().data) != data.checksum(block):
                what = f"{self.folder / chunk.file} is damaged: wrong checksum of data bytes {start:,} to {stop:,}"
                raise CheckpointError(what, fix="load an older checkpoint")
        done |= new


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
