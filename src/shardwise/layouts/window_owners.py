"""Windows: who holds the rows that a device's part of a result needs.

A convolution whose output rows are split reads, on every device, the rows of its input that lie under them and a margin
(the *halo*) that mostly its neighbours hold. The input is first brought into slices over the same axes; then the rows
are exchanged. A window may be wider than the neighbours' slices, and consist of several ranges (``roll`` wraps).
"""

from __future__ import annotations

from functools import lru_cache

from shardwise.layouts.layout import Layout, Ranges, Windows

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
