"""Values whose bits do not depend on what else is computed: any part of a draw, without the rest of it.

A draw of a tensor consists of *tiles* of at most 128 by 256 elements of its last two dims. Each tile has its own
generator, seeded from the draw's key and the tile's number. To get a box of the tensor, a rank draws only the tiles
that the box touches, and gets the same numbers as every other rank. The key identifies the draw: the seed of its
generator, and the count of draws since. It depends neither on ranks nor on plans.

torch's CPU generator takes 32-bit seeds. Tiles of one draw have different seeds; two tiles of different draws share a
seed with odds of 1 in 4 thousand million (in a model of 70 G parameters about one tile in four thousand has a twin).

Elementwise operators (``apply_elementwise``) do not depend on position either. torch's CPU kernels process contiguous
elements as vectors. They process the rest (at the end, of strided operands, and of each thread's part) one by one, with
other functions (``pow``, ``sigmoid``, ``exp2``, sums in bfloat16). Here all elements are processed as vectors: operands
are contiguous, padded to whole vectors, and too short for several threads.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from math import prod
from typing import Any, TypeVar

import torch
from torch._ops import OpOverload

from shardwise.layouts.boxes import Box, index_of

T = TypeVar("T")

# (tensor, generator) -> fills the tensor, all elements from the same distribution.
Fill = Callable[[torch.Tensor, torch.Generator], object]

_TILE, _LAST = 128, 256  # elements of a dim, and of the last one
_MOST = _TILE * _LAST
_VECTORS = 128  # elements of the two AVX-512 vectors that a kernel processes at once, for the smallest dtype
_GRAIN = 2**15 - _VECTORS  # elements; from 2**15 on torch's kernels use several threads
_IN_FLOAT = (torch.bfloat16, torch.float16)  # drawn as float32, which torch's kernels support best, and rounded


def draw_box(
    key: str, fill: Fill, shape: Sequence[int], start: Sequence[int], sizes: Sequence[int], dtype: torch.dtype
) -> torch.Tensor:
    """Return rows ``[start, start + size)`` of every dim of a drawn tensor of the given shape."""
    drawn = torch.empty(tuple(sizes), dtype=dtype)
    if not drawn.numel():
        return drawn
    tile = _tile_of(shape)
    first_seed = int.from_bytes(hashlib.blake2b(key.encode(), digest_size=4).digest(), "little")
    tiles = list(_tiles(shape, tile, start, sizes))

    def draw(some: Sequence[tuple[int, tuple[int, ...], tuple[int, ...]]]) -> None:
        generator = torch.Generator()
        with torch.no_grad():
            for number, offsets, tile_sizes in some:
                generator.manual_seed((first_seed + number) % 2**32)
                numbers = torch.empty(tile_sizes, dtype=torch.float32 if dtype in _IN_FLOAT else dtype)
                fill(numbers, generator)
                common = Box(offsets, tile_sizes, (0,) * len(offsets)).common(start, sizes)
                assert common is not None, "the box touches the tile"
                target = index_of([low - begin for low, begin in zip(common.offsets, start, strict=True)], common.sizes)
                drawn[target].copy_(numbers[common.local_rows])

    in_threads(draw, tiles)
    return drawn


def in_threads(work: Callable[[Sequence[T]], object], items: Sequence[T]) -> None:
    """Call ``work`` with a part of the items in each of as many threads as torch has."""
    threads = min(torch.get_num_threads(), len(items))
    if threads <= 1:
        work(items)
    else:
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(work, [items[i::threads] for i in range(threads)]))


def _tile_of(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the sizes of a tile: small dims whole, from the last one on, as long as there is room. For a tensor with
    only one dim larger than 1, up to 32,768 elements of it."""
    is_line = sum(size > 1 for size in shape) <= 1
    room, tile = _MOST, []
    for place, size in enumerate(reversed(shape)):
        most = _MOST if is_line else _LAST if place == 0 else _TILE
        tile.append(max(1, min(size, most, room)))
        room //= tile[-1]
    return tuple(reversed(tile))


def _tiles(
    shape: Sequence[int], tile: Sequence[int], start: Sequence[int], sizes: Sequence[int]
) -> Iterator[tuple[int, tuple[int, ...], tuple[int, ...]]]:
    """Yield (number, offsets, sizes) of the tiles that a box touches. Numbers count row by row over the tensor."""
    grid = [-(-size // step) for size, step in zip(shape, tile, strict=True)]
    touched = [
        range(begin // step, (begin + count - 1) // step + 1)
        for begin, count, step in zip(start, sizes, tile, strict=True)
    ]
    for place in product(*touched):
        number = 0
        for index, count in zip(place, grid, strict=True):
            number = number * count + index
        offsets = tuple(index * step for index, step in zip(place, tile, strict=True))
        yield number, offsets, tuple(map(min, tile, (s - at for s, at in zip(shape, offsets, strict=True))))


def apply_elementwise(
    target: OpOverload, operands: Sequence[Any], named: Mapping[str, Any], sizes: Sequence[int]
) -> torch.Tensor:
    """Return the result in contiguous memory of its own, of the given sizes. ``operands``: tensors among them are
    broadcast; an operand that the operator changes must belong to this function."""
    count = prod(sizes)
    if not sizes or not count:
        result: torch.Tensor = target(*operands, **named)
        return result.expand(tuple(sizes)).contiguous()
    pieces = [_pieces(x, sizes) if isinstance(x, torch.Tensor) and x.dim() else None for x in operands]
    results: dict[int, torch.Tensor] = {}

    def run(places: Sequence[int]) -> None:
        with torch.no_grad():
            for place in places:
                pieces_here = (x if cut is None else cut[place] for x, cut in zip(operands, pieces, strict=True))
                results[place] = target(*pieces_here, **named)

    num_pieces = next((len(cut) for cut in pieces if cut is not None), 0)
    if not num_pieces:  # no tensors
        result = target(*operands, **named)
        return result.expand(tuple(sizes)).contiguous()
    in_threads(run, range(num_pieces))
    return torch.cat([results[place] for place in range(num_pieces)])[:count].reshape(tuple(sizes))


def _pieces(operand: torch.Tensor, sizes: Sequence[int]) -> Sequence[torch.Tensor]:
    flat = operand.expand(tuple(sizes)).reshape(-1)
    missing = -flat.numel() % _VECTORS
    filled = torch.cat([flat, flat[:1].expand(missing)]) if missing else flat.contiguous()
    pieces: Sequence[torch.Tensor] = torch.split(filled, _GRAIN)
    return pieces
