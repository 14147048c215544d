"""The boxes of a global tensor that a device holds: what files, and torch's distributed checkpoints, know of a layout.

A box is contiguous in every dim. A device that holds slices of dims has one; a fused projection (``(3 16@tp)``) gives
each device one per part.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, product
from math import prod

from shardwise.layouts.layout import Layout


@dataclass(frozen=True, slots=True)
class Box:
    """Rows ``[offset, offset + size)`` of every dim of a global tensor. ``at``: where they begin in the local one."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    at: tuple[int, ...]

    @property
    def numel(self) -> int:
        return prod(self.sizes)

    @property
    def rows(self) -> tuple[slice, ...]:
        """Return the index of its elements in the global tensor."""
        return index_of(self.offsets, self.sizes)

    @property
    def local_rows(self) -> tuple[slice, ...]:
        """Return the index of its elements in the local tensor."""
        return index_of(self.at, self.sizes)

    @staticmethod
    def whole(shape: Sequence[int]) -> Box:
        origin = (0,) * len(shape)
        return Box(origin, tuple(shape), origin)

    def common(self, offsets: Sequence[int], sizes: Sequence[int]) -> Box | None:
        """Return the intersection with other rows of the tensor; None if empty."""
        rows: list[tuple[int, int, int]] = []
        for a, n, at, b, m in zip(self.offsets, self.sizes, self.at, offsets, sizes, strict=True):
            start, stop = max(a, b), min(a + n, b + m)
            if start >= stop:
                return None
            rows.append((start, stop - start, at + start - a))
        return Box(*zip(*rows, strict=True)) if rows else self


def index_of(starts: Sequence[int], sizes: Sequence[int]) -> tuple[slice, ...]:
    """Return the index of rows ``[start, start + size)`` of every dim."""
    return tuple(slice(start, start + size) for start, size in zip(starts, sizes, strict=True))


def boxes(layout: Layout, coordinates: Mapping[str, int]) -> tuple[Box, ...]:
    """Return the boxes of the device at ``coordinates`` in a layout without partial states, in storage order; none
    where it holds nothing."""
    return _boxes(layout.canonical(), tuple(coordinates[axis] for axis in layout.mesh.sub_axes))


@lru_cache(maxsize=10_000)
def _boxes(layout: Layout, place: tuple[int, ...]) -> tuple[Box, ...]:
    coordinates = dict(zip(layout.mesh.sub_axes, place, strict=True))
    runs: list[list[tuple[int, int, int]]] = []  # per dim: first global row, number of rows, first local row
    for dim in range(len(layout.dims)):
        ranges = layout.held_ranges(dim, coordinates)
        sizes = [stop - start for start, stop in ranges]
        starts = (start for start, _ in ranges)
        runs.append(list(zip(starts, sizes, accumulate(sizes, initial=0), strict=False)))
    return tuple(Box(*zip(*chosen, strict=True)) if chosen else Box((), (), ()) for chosen in product(*runs))
