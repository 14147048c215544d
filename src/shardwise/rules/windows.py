"""Windows of operators along a dim: which rows of the operand a part of the result's rows needs.

Two kinds of map from result rows y to operand rows x:

* *sliding*: y reads the rows around a fixed multiple of y (convolution, pooling, ``unfold``);
* *runs*: y is a copy of x, row by row, made of a few arithmetic runs (``roll``, ``flip``, a shifted slice, padding with
  the tensor's own rows).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from shardwise.rules.arguments import block_offset, local_size
from shardwise.rules.rule import LocalContext, Ranges


def clip_rows(start: int, stop: int, size: int) -> Ranges:
    """Return the rows [start, stop) that exist."""
    start, stop = max(start, 0), min(stop, size)
    return ((start, stop),) if start < stop else ()


def part_of(context: LocalContext, factor: str) -> tuple[int, int]:
    """(offset, length) of the rank's part of a factor that windows belong to: it is contiguous."""
    offset = block_offset(context.pieces[factor])
    length = local_size(context, factor)
    assert offset is not None or not length, f"the part of {factor} is not contiguous: {context.pieces[factor]}"
    return offset or 0, length


def shift_rows(shift: int, size: int) -> Callable[[int, int], Ranges]:
    """Row y is row ``y + shift``, where there is one."""
    return lambda offset, length: clip_rows(offset + shift, offset + length + shift, size)


@dataclass(frozen=True, slots=True)
class RowRun:
    """``length`` rows of the result in a row: rows ``first``, ``first + step``, ... of the operand. Step 0 repeats."""

    length: int
    first: int
    step: int


def cut_runs(runs: Sequence[RowRun], offset: int, length: int) -> tuple[RowRun, ...]:
    """Return the runs of the result's rows [offset, offset + length)."""
    pieces, start = [], 0
    for run in runs:
        begin, end = max(offset, start), min(offset + length, start + run.length)
        if begin < end:
            pieces.append(RowRun(end - begin, run.first + (begin - start) * run.step, run.step))
        start += run.length
    return tuple(pieces)


def ranges_of_runs(runs: Sequence[RowRun]) -> Ranges:
    """Return the rows that runs read, as ranges in ascending order; those between two rows of a run count as read."""
    ranges: list[tuple[int, int]] = []
    for low, high in sorted(sorted((run.first, run.first + (run.length - 1) * run.step)) for run in runs if run.length):
        if ranges and low <= ranges[-1][1]:
            ranges[-1] = (ranges[-1][0], max(ranges[-1][1], high + 1))
        else:
            ranges.append((low, high + 1))
    return tuple(ranges)


def runs_within(runs: Sequence[RowRun], ranges: Ranges) -> tuple[RowRun, ...]:
    """Return the same runs over the rows of ``ranges`` alone, which hold all of theirs."""

    def local(row: int) -> int:
        position = 0
        for start, stop in ranges:
            if start <= row < stop:
                return position + row - start
            position += stop - start
        raise AssertionError(f"row {row} is not in {ranges}")

    return tuple(RowRun(run.length, local(run.first), run.step) for run in runs)


def windows_of_runs(runs: Sequence[RowRun]) -> Callable[[int, int], Ranges]:
    return lambda offset, length: ranges_of_runs(cut_runs(runs, offset, length))


@dataclass(frozen=True, slots=True)
class Sliding:
    """Windows along one dim: row y reads rows ``y * stride - before`` and on, ``count`` of them, ``dilation`` apart.

    ``size``: rows of the operand. ``before``, ``after``: rows of padding.
    """

    size: int
    count: int
    stride: int
    dilation: int = 1
    before: int = 0
    after: int = 0

    @property
    def span(self) -> int:
        """Rows from the first to the last that one window reads, both included."""
        return (self.count - 1) * self.dilation + 1

    def bounds(self, offset: int, length: int) -> tuple[int, int]:
        """Return the rows [start, stop) that rows [offset, offset + length) of the result read, padding included."""
        start = offset * self.stride - self.before
        return start, start + (length - 1) * self.stride + self.span

    def ranges(self, offset: int, length: int) -> Ranges:
        return clip_rows(*self.bounds(offset, length), self.size)

    def transposed_part(self, offset: int, length: int, *, is_split: bool) -> tuple[int, int, int]:
        """Return ``(start, stop, front)`` of a part of the transposed: the rows that it is made from, and its first row
        in what they make. Of a dim that is not split all rows are there, also those that only padding would read."""
        ranges = self.transposed(offset, length) if is_split else ((0, self.size),)
        start, stop = ranges[0] if ranges else (0, 0)
        return start, stop, offset + self.before - start * self.stride

    def padding(self, offset: int, length: int) -> tuple[int, int]:
        """Rows of padding that a part needs before and after the rows of its window."""
        start, stop = self.bounds(offset, length)
        before = min(max(-start, 0), stop - start)
        num_held = sum(high - low for low, high in self.ranges(offset, length))
        return before, stop - start - before - num_held

    def aligned(self, offset: int, length: int) -> Ranges:
        """The rows of a larger window, on which the operator with its own padding computes this part and a few rows
        more. It starts at a multiple of the stride, early enough that its padding does not reach the part. It has the
        rows of one window at least, as far as there are any (``avg_pool3d`` insists)."""
        start = self._aligned_start(offset, length)
        return clip_rows(start, max(self.bounds(offset, length)[1], start + self.span), self.size)

    def position_in_aligned(self, offset: int, length: int) -> int:
        """Return the row of that computation that is the first of the part."""
        return offset - self._aligned_start(offset, length) // self.stride

    def _aligned_start(self, offset: int, length: int) -> int:
        latest = min(offset - -(-self.before // self.stride), (self.size - self.span) // self.stride)
        return max(latest, 0) * self.stride

    def transposed(self, offset: int, length: int) -> Ranges:
        """Return the rows of the *smaller* side that rows [offset, offset + length) of the larger side come from, when
        the map is read backwards (transposed convolution)."""
        first = -(-(offset + self.before - self.span + 1) // self.stride)
        last = (offset + length - 1 + self.before) // self.stride
        return clip_rows(first, last + 1, self.size)
