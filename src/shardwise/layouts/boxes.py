"""The boxes of a global tensor that a device holds: what files, and torch's distributed checkpoints, know of a layout.

A box is contiguous in every dim. A device that holds slices of dims has one; a fused projection (``(3 16@tp)``) gives
each device one per part.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from math import prod

from shardwise.layouts.holdings import held_rows
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
        starts = tuple(map(max, self.offsets, offsets))
        stops = tuple(min(a + n, b + m) for a, n, b, m in zip(self.offsets, self.sizes, offsets, sizes, strict=True))
        if any(start >= stop for start, stop in zip(starts, stops, strict=True)):
            return None
        at = tuple(at + start - offset for at, start, offset in zip(self.at, starts, self.offsets, strict=True))
        return Box(starts, tuple(stop - start for start, stop in zip(starts, stops, strict=True)), at)


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
    runs = [_runs(layout, dim, coordinates) for dim in range(len(layout.dims))]
    return tuple(
        Box(
            tuple(start for start, _, _ in chosen), tuple(size for _, size, _ in chosen), tuple(at for *_, at in chosen)
        )
        for chosen in product(*runs)
    )


def _runs(layout: Layout, dim: int, coordinates: Mapping[str, int]) -> list[tuple[int, int, int]]:
    """(first global row, number of rows, first local row) of the contiguous stretches of a dim."""
    if len(layout.dims[dim]) == 1:
        start, length = layout.atom_pieces(dim, 0, coordinates)
        return [(start, length, 0)] if length else []
    runs: list[tuple[int, int, int]] = []
    for at, row in enumerate(held_rows(layout, dim, coordinates)):
        if runs and row == runs[-1][0] + runs[-1][1]:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1, runs[-1][2])
        else:
            runs.append((row, 1, at))
    return runs


__all__ = ["Box", "boxes", "index_of"]
