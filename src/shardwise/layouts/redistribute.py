"""Redistribution: the cheapest list of moves from one layout of a tensor to another.

Layouts are the nodes of a graph whose edges are single moves; the list is a shortest path under a price function that
is passed in (by default the bytes that the busiest rank sends in forward and backward, then the number of messages).
Only layouts over positions that the two ends use are visited, and sub-axes that make the same way together move
together: the search grows with the number of different ways, not with the number of devices.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from functools import lru_cache
from itertools import count

from shardwise.errors import LayoutError
from shardwise.layouts.conversions import COLLECTIVES, Move
from shardwise.layouts.layout import PARTIAL_KINDS, Atom, Layout, common_atoms

Price = Callable[[Move, bool], tuple[float, ...]]


def bytes_then_messages(move: Move, differentiable: bool) -> tuple[float, ...]:
    """Elements sent by the busiest rank in forward and backward, the number of messages, then the elements held
    afterwards (which prefers slicing early), then the number of moves."""
    sent = move.num_sent() + (move.num_sent(backward=True) if differentiable else 0.0)
    messages = (move.entry.forward in COLLECTIVES) + (differentiable and move.entry.backward in COLLECTIVES)
    return sent, float(messages), float(move.target.max_local_numel), 1.0


def redistribute(
    source: Layout, target: Layout, *, differentiable: bool = True, price: Price = bytes_then_messages
) -> tuple[Move, ...]:
    """The cheapest moves that turn ``source`` into ``target``.

    Both describe the same global tensor on the same mesh. ``differentiable``: whether backward is paid for as well.
    Raises LayoutError when a partial value of another kind than sum would have to arise.
    """
    if source.shape != target.shape or source.mesh != target.mesh:
        raise LayoutError(f"no redistribution from {source} to {target}: not the same tensor on the same mesh")
    return _redistribute(source, target, differentiable, price)


@lru_cache(maxsize=100_000)
def _redistribute(source: Layout, target: Layout, differentiable: bool, price: Price) -> tuple[Move, ...]:
    if source.canonical() == target.canonical():
        return ()
    aligned = _align(source, target)
    if aligned is not None:
        return _shortest(*aligned, differentiable, price)
    # Some dims divide in ways that do not nest: make them whole first, the rest of the way is over the target's atoms.
    between_source, between_target = _unsplit(source, target)
    return _redistribute(source, between_source, differentiable, price) + _redistribute(
        between_target, target, differentiable, price
    )


def _align(source: Layout, target: Layout) -> tuple[Layout, Layout] | None:
    """Both layouts over common atoms, or None where there are none."""
    atoms: list[tuple[int, ...]] = []
    for own, other in zip(source.canonical().atoms, target.canonical().atoms, strict=True):
        common = common_atoms(own, other)
        if common is None:
            return None
        atoms.append(common)
    try:
        return source.canonical().refine(tuple(atoms)), target.canonical().refine(tuple(atoms))
    except LayoutError:
        return None


def _unsplit(source: Layout, target: Layout) -> tuple[Layout, Layout]:
    """The source with the disagreeing dims made whole, written over its own atoms and over the target's."""
    own, other = source.canonical(), target.canonical()
    clash = [
        d
        for d, (mine, theirs) in enumerate(zip(own.dims, other.dims, strict=True))
        if _align(Layout(own.mesh, (mine,)), Layout(own.mesh, (theirs,))) is None
    ]
    freed = [axis for d in clash for atom in own.dims[d] for axis in atom.axes]
    assert freed, f"nothing to make whole between {source} and {target}"
    whole = own.moved({axis: "R" if target.state_of[axis] in ("R", "P") else "I" for axis in freed})
    dims = list(whole.dims)
    for d in clash:
        dims[d] = tuple(Atom(atom.size) for atom in other.dims[d])
    return whole, Layout(own.mesh, tuple(dims), whole.states)


def _shortest(source: Layout, target: Layout, differentiable: bool, price: Price) -> tuple[Move, ...]:
    """Dijkstra over layouts."""
    positions = tuple(sorted(set(source.positions.values()) | set(target.positions.values())))
    units = _units(source, target)
    ticket = count()
    best: dict[Layout, tuple[float, ...]] = {source: (0.0,)}
    parent: dict[Layout, tuple[Layout, Move]] = {}
    heap: list[tuple[tuple[float, ...], int, Layout]] = [((0.0,), next(ticket), source)]
    done: set[Layout] = set()
    while heap:
        cost, _, layout = heapq.heappop(heap)
        if layout in done:
            continue
        done.add(layout)
        if layout == target:
            break
        for move in _moves(layout, target, positions, units):
            if move.target in done:
                continue
            step = price(move, differentiable)
            total = tuple(a + b for a, b in zip(cost + (0.0,) * (len(step) - len(cost)), step, strict=True))
            if move.target not in best or total < best[move.target]:
                best[move.target] = total
                parent[move.target] = (layout, move)
                heapq.heappush(heap, (total, next(ticket), move.target))
    if target not in done:
        raise LayoutError(f"no redistribution from {source} to {target}")
    path: list[Move] = []
    layout = target
    while layout != source:
        layout, move = parent[layout]
        path.append(move)
    return _fuse(path[::-1])


def _units(source: Layout, target: Layout) -> dict[str, tuple[str, ...]]:
    """Sub-axis -> the sub-axes that come from the same place and go to the same place, side by side in both: one axis
    to the search. In the order in which they shard an atom at one of the ends."""

    def neighbours(first: str, second: str) -> bool:
        for layout in (source, target):
            place = layout.positions.get(first)
            if place != layout.positions.get(second) or layout.state_of[first] != layout.state_of[second]:
                return False
            if place is not None:
                axes = layout.dims[place[0]][place[1]].axes
                if axes.index(second) != axes.index(first) + 1:
                    return False
        return True

    ordered = [a for layout in (source, target) for dim in layout.dims for atom in dim for a in atom.axes]
    runs: list[list[str]] = []
    for axis in dict.fromkeys((*ordered, *source.mesh.sub_axes)):
        joined = next((run for run in runs if neighbours(run[-1], axis)), None)
        if joined is None:
            runs.append([axis])
        else:
            joined.append(axis)
    return {axis: tuple(run) for run in runs for axis in run}


def _moves(
    layout: Layout, target: Layout, positions: tuple[tuple[int, int], ...], units: dict[str, tuple[str, ...]]
) -> Iterator[Move]:
    """All single moves from a layout; runs of units that leave one atom together move as one."""
    for d, dim in enumerate(layout.dims):
        for i, atom in enumerate(dim):
            for start, axis in enumerate(atom.axes):
                if units[axis][0] != axis:
                    continue
                elsewhere: tuple[str | tuple[int, int], ...] = ("I", "R", "P", *positions)
                for where in elsewhere:
                    if where != (d, i):
                        yield _move(layout, atom.axes[start:], where)
    by_state: dict[str, list[str]] = {}
    for axis in layout.mesh.sub_axes:
        state = layout.state_of[axis]
        if state != "S":
            by_state.setdefault(state, []).append(axis)
    for state, axes in by_state.items():
        wheres: tuple[str | tuple[int, int], ...] = (
            ("I",) if state in PARTIAL_KINDS and state != "P" else ("I", "R", "P", *positions)
        )
        for where in wheres:
            if where == state:
                continue
            wanted = (
                [a for a in axes if target.positions.get(a) == where]
                if isinstance(where, tuple)
                else [a for a in axes if target.state_of[a] == where]
            )
            own_units = dict.fromkeys(units[axis] for axis in axes)
            for unit in own_units:
                yield _move(layout, unit, where)
            if len(wanted) > 1:
                if isinstance(where, tuple):
                    order = target.dims[where[0]][where[1]].axes
                    wanted.sort(key=order.index)
                yield _move(layout, tuple(wanted), where)
            if len(own_units) > 1 and len(wanted) != len(axes) and not isinstance(where, tuple):
                yield _move(layout, tuple(axes), where)


def _move(layout: Layout, axes: tuple[str, ...], where: str | tuple[int, int]) -> Move:
    return Move(layout, layout.moved(dict.fromkeys(axes, where)), axes)


def _fuse(path: list[Move]) -> tuple[Move, ...]:
    """Join neighbouring moves that one collective over the product of their axes performs."""
    fused: list[Move] = []
    for move in path:
        last = fused[-1] if fused else None
        joined = _join(last, move) if last is not None else None
        if joined is not None:
            fused[-1] = joined
        else:
            fused.append(move)
    return tuple(fused)


def _join(first: Move, second: Move) -> Move | None:
    if first.cell != second.cell or set(first.axes) & set(second.axes):
        return None
    source, target = first.cell
    if source == "S" and target == "S":
        return None
    if source == "S":  # leaving the minor axes first
        if first.source.positions[first.axes[0]] != second.source.positions[second.axes[0]]:
            return None
        return Move(first.source, second.target, second.axes + first.axes)
    if target == "S" and second.target.positions[second.axes[0]] != first.target.positions[first.axes[0]]:
        return None
    return Move(first.source, second.target, first.axes + second.axes)
