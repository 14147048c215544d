"""Random numbers that depend on position: any part of a draw, without the rest of it.

A draw of a tensor consists of *tiles* of at most 128 by 256 elements of its last two dims. Each tile has its own
generator, seeded from the draw's key and the tile's number. To get a box of the tensor, a rank draws only the tiles
that the box touches, and gets the same numbers as every other rank. The key identifies the draw: the seed of its
generator, and the count of draws since. It depends neither on ranks nor on plans.

torch's CPU generator takes 32-bit seeds. Tiles of one draw have different seeds; two tiles of different draws share a
seed with odds of 1 in 4 thousand million (in a model of 70 G parameters about one tile in four thousand has a twin).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from typing import TypeVar

import torch

from shardwise.layouts.boxes import Box, index_of

T = TypeVar("T")

# (tensor, generator) -> fills the tensor, all elements from the same distribution.
Fill = Callable[[torch.Tensor, torch.Generator], object]

_TILE, _LAST = 128, 256  # elements of a dim, and of the last one
_MOST = _TILE * _LAST
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
