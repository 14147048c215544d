"""Assignment of the parts of a checkpoint to ranks: each element is written once, by a rank that holds it, in balance.

All ranks compute the same assignment from the offers of all ranks, without more communication. A box that several ranks
hold, and that is large compared with a rank's fair share, is cut into pieces of rows. Then the pieces are assigned
greedily: the largest goes to the rank that has least to write so far.
"""

from __future__ import annotations

import itertools
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch

from shardwise.errors import ShardwiseError
from shardwise.train.local_folder import AT_ONCE_BYTES
from shardwise.train.manifest import Chunk
from shardwise.train.parts import TensorPart
from shardwise.train.values import DTYPES, dtype_name

CUT_FROM_BYTES = 2**20
PIECES_OF_A_SHARE = 4  # boxes are cut only if they are larger than this part (1/4) of a fair share
_ALIGNED = 16  # bytes: where the data of a file begins
_LINE_BYTES = 64  # a cache line: copies to unaligned addresses take 1.4 times as long
PAGE_BYTES = 2**12  # alignment for direct I/O
_SAFETENSORS = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "int64": "I64", "int32": "I32",
    "int16": "I16", "int8": "I8", "uint8": "U8", "uint16": "U16", "uint32": "U32", "uint64": "U64", "bool": "BOOL",
    "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "complex64": "C64",
}  # fmt: skip

# A rank's description of a tensor: name, dtype, global shape, (offsets, sizes) of its boxes.
Rows = tuple[int, ...]
Offer = tuple[str, str, Rows, tuple[tuple[Rows, Rows], ...]]


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

    def chunks(self) -> list[tuple[WritePiece, Chunk]]:
        return [(piece, Chunk(self.name, start, piece.offsets, piece.sizes)) for start, piece in self.pieces]


def describe_parts(parts: Mapping[str, TensorPart]) -> list[Offer]:
    """Return the offers of this rank's parts. Raises ShardwiseError for a dtype that safetensors does not support."""
    offers: list[Offer] = []
    for name, part in sorted(parts.items()):
        dtype = dtype_name(part.tensor.dtype)
        if dtype not in _SAFETENSORS:
            raise ShardwiseError(f"{name} is {dtype}; safetensors files support only {', '.join(_SAFETENSORS)}")
        offers.append((name, dtype, part.shape, tuple((box.offsets, box.sizes) for box in part.boxes)))
    return offers


def plan_files(offers: Sequence[Sequence[Offer]]) -> list[list[PlannedFile]]:
    """Return the files of every rank, from the offers of every rank. Raises ShardwiseError if ranks disagree on a
    tensor's dtype or shape, or if no rank holds some of its elements."""
    holders: dict[tuple[str, Rows, Rows], list[int]] = defaultdict(list)
    kinds: dict[str, tuple[str, Rows]] = {}
    for rank, rank_offers in enumerate(offers):
        for name, dtype, shape, boxes in rank_offers:
            if kinds.setdefault(name, (dtype, shape)) != (dtype, shape):
                raise ShardwiseError(f"{name} is {kinds[name]} on one rank and {(dtype, shape)} on rank {rank}")
            for offsets, sizes in boxes:
                holders[name, offsets, sizes].append(rank)
    numel_held: dict[str, int] = dict.fromkeys(kinds, 0)
    for name, _, sizes in holders:
        numel_held[name] += prod(sizes)
    wrong = [name for name, (_, shape) in kinds.items() if numel_held[name] != prod(shape)]
    if wrong:
        raise ShardwiseError(
            f"the ranks hold {numel_held[wrong[0]]:,} of the {prod(kinds[wrong[0]][1]):,} elements of {wrong[0]}"
        )
    total = sum(prod(shape) * DTYPES[dtype].itemsize for dtype, shape in kinds.values())
    largest = max(CUT_FROM_BYTES, total // (PIECES_OF_A_SHARE * len(offers)))
    to_write: list[tuple[WritePiece, list[int]]] = []
    for (name, offsets, sizes), ranks in holders.items():
        dtype, shape = kinds[name]
        piece = WritePiece(name, DTYPES[dtype], shape, offsets, sizes)
        to_write += [(part, ranks) for part in split_piece(piece, min(len(ranks), -(-piece.num_bytes // largest)))]
    load = [0] * len(offers)
    written: list[list[WritePiece]] = [[] for _ in offers]
    for piece, ranks in sorted(to_write, key=lambda item: (-item[0].num_bytes, item[0].name, item[0].offsets)):
        writer = min(ranks, key=load.__getitem__)
        load[writer] += piece.num_bytes
        written[writer].append(piece)
    return [_files(rank, len(offers), pieces) for rank, pieces in enumerate(written)]


def split_piece(piece: WritePiece, count: int) -> list[WritePiece]:
    """Split a piece into at most ``count`` pieces of rows."""
    count = min(count, piece.sizes[0] if piece.sizes else 1)
    if count <= 1:
        return [piece]
    cuts = [index * piece.sizes[0] // count for index in range(count + 1)]
    return [
        WritePiece(
            piece.name,
            piece.dtype,
            piece.shape,
            (piece.offsets[0] + start, *piece.offsets[1:]),
            (stop - start, *piece.sizes[1:]),
        )
        for start, stop in itertools.pairwise(cuts)
    ]


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
