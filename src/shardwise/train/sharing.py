"""Assignment of the parts of a checkpoint to ranks: each element is written once, by a rank that holds it, in balance.

Ranks offer what they hold as layouts on placements, which are the same texts on all ranks of a stage. So the offers of
any number of ranks are as many as there are stages, and a rank computes its own share from them (``Writers``).
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from typing import Any

import torch

from shardwise.errors import ShardwiseError
from shardwise.layouts.boxes import boxes
from shardwise.layouts.layout import Layout
from shardwise.layouts.mesh import Mesh
from shardwise.layouts.placement import Placement
from shardwise.layouts.text import parse_layout
from shardwise.plans.quantities import format_ranges
from shardwise.train.local_folder import AT_ONCE_BYTES
from shardwise.train.manifest import Chunk, StoredTensor
from shardwise.train.names import RANDOM, with_token
from shardwise.train.parts import TensorPart
from shardwise.train.values import DTYPES, dtype_name

CUT_FROM_BYTES = 2**20  # the least that a rank writes of what several hold, if they hold as much
_ALIGNED = 16  # bytes: where the data of a file begins
_LINE_BYTES = 64  # a cache line: copies to unaligned addresses take 1.4 times as long
PAGE_BYTES = 2**12  # alignment for direct I/O
_SAFETENSORS = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "int64": "I64", "int32": "I32",
    "int16": "I16", "int8": "I8", "uint8": "U8", "uint16": "U16", "uint32": "U32", "uint64": "U64", "bool": "BOOL",
    "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "complex64": "C64",
}  # fmt: skip

# A rank's description of a tensor: name, dtype, global shape, and what each rank of a placement holds, as texts
# (layout, mesh, ranks), or () if the rank holds all of it. Offers of ranks that run the same stages are equal.
Rows = tuple[int, ...]
Offer = tuple[str, str, Rows, tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class WritePiece:
    """A box of a tensor that one rank writes."""

    name: str
    dtype: torch.dtype
    shape: Rows
    offsets: Rows
    sizes: Rows

    @property
    def num_bytes(self) -> int:
        return prod(self.sizes) * self.dtype.itemsize


@dataclass(frozen=True)
class PlannedFile:
    """A safetensors file: its ``header``, then ``num_bytes`` of pieces, each with its start."""

    name: str
    header: bytes
    pieces: tuple[tuple[int, WritePiece], ...]
    num_bytes: int


def describe_parts(parts: Mapping[str, TensorPart]) -> list[Offer]:
    """Return the offers of this rank's parts. Raises ShardwiseError for a dtype that safetensors does not support."""
    offers: list[Offer] = []
    texts: dict[int, tuple[str, str]] = {}  # of placements
    for name, part in sorted(parts.items()):
        dtype, held = dtype_name(part.tensor.dtype), tuple[str, ...]()
        if dtype not in _SAFETENSORS:
            raise ShardwiseError(f"{name} is {dtype}; safetensors files support only {', '.join(_SAFETENSORS)}")
        if part.held is not None:
            layout, place = part.held
            if id(place) not in texts:
                texts[id(place)] = (str(place.mesh), format_ranges(place.ranks))
            held = (str(layout), *texts[id(place)])
        # Generators are each rank's own: without its number the offers of many ranks are equal.
        offers.append((RANDOM if name.startswith(RANDOM) else name, dtype, part.shape, held))
    return offers


@dataclass(frozen=True)
class _Held:
    """How some ranks hold a tensor: each all of it, or (``layout``, ``place``) what the layout gives it."""

    ranks: tuple[int, ...]
    layout: Layout | None = None
    place: Placement | None = None

    def boxes(self, rank: int) -> list[tuple[Rows, Rows]] | None:
        """Return (offsets, sizes) of what a rank holds; None for all of the tensor."""
        if self.layout is None or self.place is None:
            return None
        return [(box.offsets, box.sizes) for box in boxes(self.layout, self.place.coordinates(rank))]

    def replicas(self, rank: int, groups: dict[tuple[int, tuple[str, ...]], tuple[int, ...]]) -> tuple[int, ...]:
        """Return the ranks that hold the same as a rank. ``groups``: those that were found before."""
        if self.layout is None or self.place is None:
            return self.ranks
        free = tuple(axis for axis in self.place.mesh.sub_axes if axis not in self.layout.positions)
        key = id(self.place), free
        if key not in groups:
            groups[key] = tuple(sorted(self.place.group(free, rank)))
        return groups[key]


class Writers:
    """Which rank writes which elements, from the ``offers`` of all ranks.

    The ranks that hold the same boxes divide the bytes of these, in the order of their names, into equal ranges of
    rows, of a MiB or more. So each rank finds what it writes from what it holds itself, without looking at others.

    Raises ShardwiseError if ranks disagree on a tensor's dtype or shape, or if no rank holds some of its elements.
    """

    def __init__(self, offers: Sequence[Sequence[Offer]]) -> None:
        self.offers = offers
        self.kinds: dict[str, tuple[str, Rows]] = {}
        self._held: dict[str, dict[tuple[str, ...], _Held]] = defaultdict(dict)
        ranks_of: dict[int, list[int]] = defaultdict(list)  # equal offers are one object (``RankTree.gather``)
        for rank, offered in enumerate(offers):
            ranks_of[id(offered)].append(rank)
        for ranks in map(tuple, ranks_of.values()):
            for name, dtype, shape, held in offers[ranks[0]]:
                if name == RANDOM:
                    continue
                if self.kinds.setdefault(name, (dtype, shape)) != (dtype, shape):
                    what = f"{name} is {self.kinds[name]} on one rank and {(dtype, shape)} on rank {ranks[0]}"
                    raise ShardwiseError(what)
                before = self._held[name].get(held)
                all_ranks = ranks if before is None else tuple(sorted((*before.ranks, *ranks)))
                self._held[name][held] = _Held(all_ranks, *_parsed(*held)) if held else _Held(all_ranks)
        self._check()

    def _check(self) -> None:
        for name, every in self._held.items():
            (first, *others), (_, shape) = every.values(), self.kinds[name]
            if not others and (first.place is None or first.place.ranks == first.ranks):
                continue  # a layout leaves no element out
            distinct = {box for held in every.values() for rank in held.ranks for box in self._boxes(name, held, rank)}
            if (numel := sum(prod(sizes) for _, sizes in distinct)) != prod(shape):
                raise ShardwiseError(f"the ranks hold {numel:,} of the {prod(shape):,} elements of {name}")

    def _boxes(self, name: str, held: _Held, rank: int) -> list[tuple[Rows, Rows]]:
        (_, shape), found = self.kinds[name], held.boxes(rank)
        return [((0,) * len(shape), shape)] if found is None else found

    def tensors(self) -> dict[str, StoredTensor]:
        """Return all tensors, without where they are. Generators are in the parts of their ranks only."""
        return {name: StoredTensor(DTYPES[dtype], shape, ()) for name, (dtype, shape) in self.kinds.items()}

    def files_of(self, rank: int) -> list[PlannedFile]:
        """Return the files that a rank writes."""
        return _files(rank, len(self.offers), [piece for piece, _ in self.pieces_of(rank)])

    def pieces_of(self, rank: int) -> list[tuple[WritePiece, tuple[int, ...]]]:
        """Return what a rank writes, each piece with the ranks that hold it."""
        return [
            (piece, ranks)
            for ranks, pieces in self.held_by(rank).items()
            for piece in _share_of(pieces, ranks.index(rank), len(ranks))
        ]

    def held_by(self, rank: int) -> dict[tuple[int, ...], list[WritePiece]]:
        """Return what a rank holds, by the ranks that hold the same. Its generators are its own."""
        shared: dict[tuple[int, ...], list[WritePiece]] = defaultdict(list)
        groups: dict[tuple[int, tuple[str, ...]], tuple[int, ...]] = {}
        for name, dtype, shape, key in self.offers[rank]:
            if name == RANDOM:
                piece = WritePiece(f"{RANDOM}{rank}", DTYPES[dtype], shape, (0,) * len(shape), shape)
                shared[rank,].append(piece)
                continue
            held = self._held[name][key]
            for offsets, sizes in self._boxes(name, held, rank):
                ranks = self._holders(name, held, rank, (offsets, sizes), groups)
                shared[ranks].append(WritePiece(name, DTYPES[dtype], shape, offsets, sizes))
        return shared

    def _holders(
        self, name: str, held: _Held, rank: int, box: tuple[Rows, Rows], groups: dict[Any, tuple[int, ...]]
    ) -> tuple[int, ...]:
        """Return the ranks that hold a box of a tensor, of which ``rank`` is one."""
        if len(self._held[name]) == 1 and (held.place is None or held.place.ranks == held.ranks):
            return held.replicas(rank, groups)
        # Several stages have it, several modules, or only some ranks of a stage: few tensors are so.
        every = self._held[name].values()
        return tuple(sorted({q for other in every for q in other.ranks if box in self._boxes(name, other, q)}))


def _parsed(layout: str, mesh: str, ranks: str) -> tuple[Layout, Placement]:
    place = _placement(mesh, ranks)
    return parse_layout(layout, place.mesh), place


@lru_cache(maxsize=256)
def _placement(mesh: str, ranks: str) -> Placement:
    ends = (part.split("-") for part in ranks.split(","))
    numbers = (number for first, *last in ends for number in range(int(first), int((last or [first])[0]) + 1))
    return Placement(Mesh.parse(mesh), tuple(numbers))


def _share_of(pieces: Sequence[WritePiece], index: int, count: int) -> list[WritePiece]:
    """Return what the rank at ``index`` of ``count`` writes of the boxes that all of them hold: the rows that begin in
    its range of their bytes."""
    total = sum(piece.num_bytes for piece in pieces)
    writers = min(count, max(1, total // CUT_FROM_BYTES))
    writer = -(-index * writers // count)
    if writer * count // writers != index:
        return []  # others write all
    start, stop = writer * total // writers, (writer + 1) * total // writers
    start, stop = (0 if writer == 0 else start), (total + 1 if writer + 1 == writers else stop)
    share: list[WritePiece] = []
    at = 0
    for piece in sorted(pieces, key=lambda piece: (piece.name, piece.offsets)):
        rows = piece.sizes[0] if piece.sizes and piece.num_bytes else 1
        row = max(1, piece.num_bytes // rows)
        first, last = (min(max(-(-(end - at) // row), 0), rows) for end in (start, stop))
        share += [cut_rows(piece, first, last)] if first < last else []
        at += piece.num_bytes
    return share


def cut_rows(piece: WritePiece, first: int, last: int) -> WritePiece:
    """Return rows ``[first, last)`` of a piece, which is a whole row if it has no dims or elements."""
    if not piece.sizes or not piece.num_bytes:
        return piece
    offsets, sizes = (piece.offsets[0] + first, *piece.offsets[1:]), (last - first, *piece.sizes[1:])
    return replace(piece, offsets=offsets, sizes=sizes)


def stored_in(files: Iterable[PlannedFile], token: str = "") -> dict[str, StoredTensor]:
    """Return where files have the elements of tensors. ``token``: of the files' names (``with_token``)."""
    pieces: dict[str, WritePiece] = {}
    chunks: dict[str, list[Chunk]] = defaultdict(list)
    for file in files:
        for start, piece in file.pieces:
            pieces[piece.name] = piece
            chunks[piece.name].append(Chunk(with_token(file.name, token), start, piece.offsets, piece.sizes))
    return {name: StoredTensor(piece.dtype, piece.shape, tuple(chunks[name])) for name, piece in pieces.items()}


def _files(rank: int, num_ranks: int, pieces: Sequence[WritePiece]) -> list[PlannedFile]:
    """Return a rank's files. A file has each name once, so several boxes of one tensor go to different files."""
    by_file: list[list[WritePiece]] = []
    count: dict[str, int] = defaultdict(int)
    for piece in pieces:
        if count[piece.name] == len(by_file):
            by_file.append([])
        by_file[count[piece.name]].append(piece)
        count[piece.name] += 1
    name = f"shard-{rank:05}-of-{num_ranks:05}"
    return [
        file_of(f"{name}{f'-{position}' if position else ''}.safetensors", part)
        for position, part in enumerate(by_file)
    ]


def file_of(name: str, pieces: Sequence[WritePiece]) -> PlannedFile:
    """Lay out a file, with the header of torch's Hugging Face checkpoints (the offsets of each part in its tensor). The
    data has no gaps, as safetensors requires. Pieces of whole cache lines come first: a smaller piece would misalign
    all that follow."""
    placed: list[tuple[int, WritePiece]] = []
    start = 0
    for piece in sorted(pieces, key=lambda item: (item.num_bytes % _LINE_BYTES > 0, -item.dtype.itemsize, item.name)):
        placed.append((start, piece))
        start += piece.num_bytes
    offsets = {piece.name: {"saved_offsets": piece.offsets} for piece in pieces}
    header: dict[str, object] = {
        "__metadata__": {"format": "pt", "DCP_VERSION": "1.0", "DCP_SHARDING_INFO": json.dumps(offsets)}
    }
    aligned = PAGE_BYTES if start >= AT_ONCE_BYTES else _ALIGNED
    return PlannedFile(name, safetensors_header(header, placed, aligned), tuple(placed), start)


def safetensors_header(
    header: dict[str, object], placed: Sequence[tuple[int, WritePiece]], aligned: int = _ALIGNED
) -> bytes:
    """Return the header of a safetensors file (https://huggingface.co/docs/safetensors/index#format)."""
    for start, piece in placed:
        kind = _SAFETENSORS[dtype_name(piece.dtype)]
        header[piece.name] = {"dtype": kind, "shape": piece.sizes, "data_offsets": [start, start + piece.num_bytes]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text = text.ljust(-(-(len(text) + 8) // aligned) * aligned - 8)
    return len(text).to_bytes(8, "little") + text
