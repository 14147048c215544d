"""What devices hold under a layout, as sets of rows, and what two devices have in common under two layouts.

A convolution whose output rows are split reads, on every device, the rows of its input that lie under them and a margin
(the *halo*) that mostly its neighbours hold. The input is first brought into slices over the same axes; then the rows
are exchanged. A window may be wider than the neighbours' slices, and consist of several ranges (``roll`` wraps).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache
from itertools import product
from math import prod

from shardwise.layouts.layout import Layout, Ranges, Windows

COUNTED_UP_TO = 1024  # devices that are looked at one by one, where sizes do not divide evenly


def held_rows(layout: Layout, dim: int, coordinates: Mapping[str, int]) -> list[int]:
    """Return the global rows of a dim that a device holds, in the order in which it holds them."""
    return [row for start, stop in layout.held_ranges(dim, coordinates) for row in range(start, stop)]


def _common(have: Layout, holder: Mapping[str, int], other: Layout, member: Mapping[str, int], dim: int) -> int:
    if have.atoms[dim] != other.atoms[dim]:
        return len(set(held_rows(have, dim, holder)) & set(held_rows(other, dim, member)))
    count = 1
    for atom in range(len(have.dims[dim])):
        start, length = have.atom_pieces(dim, atom, holder)
        begin, size = other.atom_pieces(dim, atom, member)
        count *= max(0, min(start + length, begin + size) - max(start, begin))
    return count


@lru_cache(maxsize=100_000)
def num_exchanged(before: Layout, after: Layout) -> tuple[int, bool]:
    """Between two layouts that differ in how they shard: (elements that the busiest rank sends when every rank sends
    what others need and it does not, whether every rank sends to one other rank at most). Of uneven layouts over very
    many devices: at most so many elements, and False."""
    is_even = before.is_even and after.is_even and before.atoms == after.atoms
    changed = [d for d, (old, new) in enumerate(zip(before.dims, after.dims, strict=True)) if old != new]
    axes = [
        axis
        for axis in before.mesh.sub_axes
        if any(axis in atom.axes for layout in (before, after) for d in changed for atom in layout.dims[d])
    ]
    if is_even or before.mesh.size_of(axes) > COUNTED_UP_TO:
        return before.max_local_numel - _least_kept(before, after), is_even and _same_counts(before, after)
    # Dims that stay as they are count with their largest shard.
    rest = prod(before.max_rows(d, i) for d, dim in enumerate(before.dims) if d not in changed for i in range(len(dim)))
    places = list(_places(before, axes))
    worst, single = 0, True
    for holder in places:
        num_held = prod(prod(before.local_atoms(holder)[d]) for d in changed)
        kept = prod(_common(before, holder, after, holder, d) for d in changed)
        worst = max(worst, num_held - kept)
        if single and num_held > kept:
            sent = (prod(_common(before, holder, after, member, d) for d in changed) for member in places)
            single = kept == 0 and num_held in sent
    return worst * rest, single


def _least_kept(before: Layout, after: Layout) -> int:
    """Elements that the device which keeps fewest holds under both layouts; at most that, where they are uneven. Where
    the axes of an atom differ, and not only in number, the device at the first coordinate along one and at the last
    along the other holds none."""
    if before.atoms != after.atoms:
        return 0
    kept = 1
    for dim, other in zip(before.dims, after.dims, strict=True):
        for old, new in zip(dim, other, strict=True):
            if old.axes[: len(new.axes)] != new.axes[: len(old.axes)]:
                return 0
            kept *= old.size // max(before.mesh.size_of(old.axes), before.mesh.size_of(new.axes))
    return kept


def _same_counts(before: Layout, after: Layout) -> bool:
    """Return whether both divide every atom into as many parts, so that what one device wants, one device has."""
    return all(
        before.mesh.size_of(old.axes) == before.mesh.size_of(new.axes)
        for dim, other in zip(before.dims, after.dims, strict=True)
        for old, new in zip(dim, other, strict=True)
    )


def _places(layout: Layout, axes: list[str]) -> Iterator[dict[str, int]]:
    """Yield all coordinates along some axes, 0 along the others."""
    for values in product(*(range(layout.mesh.sizes[axis]) for axis in axes)):
        yield {**dict.fromkeys(layout.mesh.sub_axes, 0), **dict(zip(axes, values, strict=True))}


# (device that holds them, first row, one after the last row), in the order of the window.
Segments = tuple[tuple[int, int, int], ...]


@lru_cache(maxsize=100_000)
def segments(ranges: Ranges, size: int, count: int) -> Segments:
    """Return the ranges of a window, cut where the slices of ``size`` rows over ``count`` devices end."""
    result = []
    for start, stop in ranges:
        while start < stop:
            # The device whose slice [i n / N, (i+1) n / N) a row is in.
            owner = ((start + 1) * count - 1) // size
            end = min(stop, (owner + 1) * size // count)
            result.append((owner, start, end))
            start = end
    return tuple(result)


def num_halo_rows(source: Layout, windows: Windows) -> tuple[int, int]:
    """Rows that the busiest device sends when windows are cut from ``source``, and when they are added back: nothing
    where the atom is whole on every device."""
    atom = source.dims[windows.dim][windows.atom]
    return _num_halo_rows(atom.size, windows) if atom.axes else (0, 0)


@lru_cache(maxsize=10_000)
def _num_halo_rows(size: int, windows: Windows) -> tuple[int, int]:
    count = len(windows.ranges)
    sent, received = [0] * count, [0] * count
    for device, ranges in enumerate(windows.ranges):
        for owner, start, stop in segments(ranges, size, count):
            if owner != device:
                sent[owner] += stop - start
                received[device] += stop - start
    return max(sent), max(received)
