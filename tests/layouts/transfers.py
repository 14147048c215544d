"""Values between stages on other devices: which rank sends which block of a tensor to which rank.

The two ends are layouts on meshes of their own, over ranks of their own (``shardwise.layouts.transfer``).
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from math import prod

from shardwise.errors import LayoutError, problem
from shardwise.graph.ir import Value
from shardwise.layouts.layout import Layout, Ranges, num_rows
from shardwise.layouts.placement import Placement
from shardwise.layouts.transfer import boundary_layout, tiles

Region = tuple[Ranges, ...]  # the rows [start, stop) of every dim, ascending


@dataclass(frozen=True, slots=True)
class TransferBlock:
    """A part of a tensor on its way from one global rank to another (to the same one: a copy). ``region``: its rows of
    the whole tensor; ``taken``: the same rows as the sender counts them in what it holds; ``placed``: as the receiver
    does."""

    sender: int
    receiver: int
    region: Region
    taken: Region
    placed: Region

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(map(num_rows, self.region))

    @property
    def numel(self) -> int:
        return prod(self.shape)


def transfer(
    value: Value, source: Layout, source_place: Placement, target: Layout, target_place: Placement
) -> tuple[TransferBlock, ...]:
    """The blocks that bring a value from its layout on one placement to its layout on another, every element to every
    rank that wants it once. A rank takes what it holds itself from itself; of several holders the one that has sent
    least so far sends.

    Raises LayoutError for layouts that are not of this value, of these meshes, or no boundary's.
    """
    for layout, place in ((source, source_place), (target, target_place)):
        _check_end(value, layout, place)
    holders: dict[Region, list[int]] = defaultdict(list)
    for rank in source_place.ranks:
        holders[_region_of(source, source_place.coordinates(rank))].append(rank)
    sent = dict.fromkeys(source_place.ranks, 0)
    blocks: list[TransferBlock] = []
    for receiver in target_place.ranks:
        wanted_region = _region_of(target, target_place.coordinates(receiver))
        for held_region, ranks in holders.items():
            region = tuple(map(_common, held_region, wanted_region))
            numel = prod(map(num_rows, region))
            if numel:
                sender = receiver if receiver in ranks else min(ranks, key=lambda rank: (sent[rank], rank))
                sent[sender] += numel if sender != receiver else 0
                taken, placed = (tuple(map(_within, region, whole)) for whole in (held_region, wanted_region))
                blocks.append(TransferBlock(sender, receiver, region, taken, placed))
    return tuple(blocks)


def _check_end(value: Value, layout: Layout, place: Placement) -> None:
    what = ""
    if layout.mesh != place.mesh:
        what, fix = f"a layout of {layout.mesh}, the placement has {place.mesh}", "use a layout of the placement's mesh"
    elif layout.shape != value.shape:
        what, fix = f"a layout of shape {list(layout.shape)}", f"use a layout of shape {list(value.shape)}"
    elif layout.states:
        axis, state = layout.states[0]
        word = "replicated" if state == "R" else "partial"
        what = f"{word} over {axis}; values cross a stage boundary sharded or whole on every axis"
        fix = f"convert it to {boundary_layout(layout)} inside the stage"
    elif not tiles(layout):
        what = "windows that overlap, wrap or leave rows out; values cross a stage boundary in parts that tile them"
        fix = f"convert it to {layout.without_windows} inside the stage"
    if what:
        raise LayoutError(problem(f"{value.name} as {layout}: {what}", fix=fix, facts=[("place", str(place))]))


def _region_of(layout: Layout, coordinates: dict[str, int]) -> Region:
    """Return the rows of every dim that a device holds."""
    return tuple(layout.held_ranges(dim, coordinates) for dim in range(len(layout.dims)))


def _common(first: Ranges, second: Ranges) -> Ranges:
    """Return the rows that are in both of two ascending lists of ranges."""
    common: list[tuple[int, int]] = []
    i = j = 0
    while i < len(first) and j < len(second):
        start, stop = max(first[i][0], second[j][0]), min(first[i][1], second[j][1])
        if start < stop:
            common.append((start, stop))
        if first[i][1] <= second[j][1]:
            i += 1
        else:
            j += 1
    return tuple(common)


def _within(part: Ranges, whole: Ranges) -> Ranges:
    """Return the positions of some rows among those that a device holds; adjacent ranges are merged."""
    positions: list[tuple[int, int]] = []
    offset, pending = 0, list(part)
    for start, stop in whole:
        while pending and pending[0][1] <= stop:
            first, last = pending.pop(0)
            begin, end = offset + first - start, offset + last - start
            if positions and positions[-1][1] == begin:
                begin = positions.pop()[0]
            positions.append((begin, end))
        offset += stop - start
    return tuple(positions)
