"""The listed moves of a plan for the values of a program, as listed or for values of other sizes.

A plan is made for one batch size. For another one the same values take the same paths: every layout of a path gets the
sizes of the actual value, and the axes of its moves stay.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from shardwise.graph.ir import Graph, Value
from shardwise.graph.naming import value_name
from shardwise.layouts.conversions import Move
from shardwise.layouts.layout import Atom, Layout
from shardwise.layouts.text import format_layout, parse_layout, parse_move
from shardwise.plans.entries import Stage
from shardwise.programs.spmd import fewest_bytes


@dataclass(frozen=True)
class ListedPaths:
    """The route (``programs.spmd.Route``) of a stage for a lowered graph of its model. ``moves``: by the value's name
    and its layouts before and after; for other sizes (``sizes_match`` is false), by these layouts without sizes. What
    the stage does not list takes the path that sends the fewest bytes."""

    graph: Graph
    moves: dict[Hashable, tuple[Move, ...]]
    sizes_match: bool

    @staticmethod
    def of(stage: Stage, graph: Graph, *, sizes_match: bool) -> ListedPaths:
        moves: dict[Hashable, tuple[Move, ...]] = {}
        for entry in stage.conversions or ():
            if entry.path:
                ends = (parse_layout(text, stage.mesh) for text in (entry.source, entry.target))
                listed = tuple(parse_move(text, stage.mesh) for text in entry.path)
                moves.setdefault(_key(entry.value, *ends, sizes_match=sizes_match), listed)
        return ListedPaths(graph, moves, sizes_match)

    def __call__(self, value: Value, source: Layout, target: Layout) -> tuple[Move, ...]:
        """Return the moves that turn ``source`` into ``target``."""
        key = _key(value_name(value.name, self.graph), source, target, sizes_match=self.sizes_match)
        moves = self.moves.get(key)
        if moves is not None and not self.sizes_match:
            moves = resize_moves(moves, source, target)
        return fewest_bytes(value, source, target) if moves is None else moves


def _key(name: str, source: Layout, target: Layout, *, sizes_match: bool) -> Hashable:
    describe = format_layout if sizes_match else split_dims
    return name, describe(source), describe(target)


def split_dims(layout: Layout) -> Hashable:
    """Return a layout without sizes: the axes that split each dim, and the states of the others."""
    return tuple(tuple(axis for atom in dim for axis in atom.axes) for dim in layout.dims), layout.states


def resize_moves(moves: tuple[Move, ...], source: Layout, target: Layout) -> tuple[Move, ...] | None:
    """Return the moves between two layouts of a value of another size, or None. A dim of another size must be one atom
    all the way, and every device must have a share of what is split on the way. Splits by hand do not follow."""
    if source.shape == moves[0].source.shape:
        path = moves
    elif any(layout.windows for move in moves for layout in (move.source, move.target)):
        return None
    else:
        written = [_written(move, source.shape) for move in moves]
        path = tuple(move for move in written if move is not None)
        if len(path) < len(moves):
            return None
    stations = [source, *(end for move in path for end in (move.source, move.target)), target]
    meets = all(a.canonical() == b.canonical() for a, b in zip(stations[::2], stations[1::2], strict=True))
    return path if meets and all(_has_shares(move.target) for move in path[:-1]) else None


def _written(move: Move, shape: tuple[int, ...]) -> Move | None:
    """Return the move with the sizes of ``shape``, or None if a dim of another size has several atoms."""
    ends = []
    for layout in (move.source, move.target):
        if any(size != new and len(dim) > 1 for dim, size, new in zip(layout.dims, layout.shape, shape, strict=True)):
            return None
        dims = (
            dim if size == new else (Atom(new, dim[0].axes),)
            for dim, size, new in zip(layout.dims, layout.shape, shape, strict=True)
        )
        ends.append(Layout(layout.mesh, tuple(dims), layout.states))
    return Move(ends[0], ends[1], move.axes)


def _has_shares(layout: Layout) -> bool:
    return all(layout.mesh.size_of(atom.axes) <= atom.size for dim in layout.dims for atom in dim)
