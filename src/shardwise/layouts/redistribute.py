"""Redistribution: the cheapest list of moves from one layout of a tensor to another.

Cheapest means: fewest bytes that the busiest rank sends in forward and backward together, then fewest messages; or
whatever a price function says that is passed in. The list is a shortest path (``layouts.shortest_path``); here layouts
are translated to what the search sees and its answer back. Sub-axes that make the same way side by side are one *unit*
to it, so the search grows with the number of different ways, not with the number of devices.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise, takewhile
from typing import Literal

from shardwise.errors import LayoutError
from shardwise.layouts.conversions import Move, Primitive
from shardwise.layouts.layout import Atom, Layout, common_atoms
from shardwise.layouts.shortest_path import Cost, Space, State, communicates, moved_units, solve

# How sizes become proportions: not at all (prices that are not proportional to the tensor), those that divide evenly
# (exact, but each size is a search of its own: small tensors only), or all (as if all divided evenly).
Rounding = Literal["none", "even", "all"]

PROPORTIONAL = -1  # the size of an atom of which only proportions matter

EXACT_UP_TO = 3  # units; with more, the search sees only the states and atoms that the two ends use

# (primitive, sub-axes, elements that the busiest rank sends) -> what one direction of a move costs, summed over
# directions and moves component by component.
Price = Callable[[Primitive, tuple[str, ...], float], Cost]


def redistribute(
    source: Layout, target: Layout, *, differentiable: bool = True, price: Price | None = None
) -> tuple[Move, ...]:
    """The cheapest moves that turn ``source`` into ``target``.

    Both describe the same global tensor on the same mesh. ``differentiable``: whether backward is paid for as well.
    ``price``: by default elements sent by the busiest rank, then messages.

    By default the minimum over all lists of moves, for up to three units whose atoms divide evenly and for small uneven
    tensors (``_positions``); ``tests/layouts`` compares it with an independent search over all pairs, and measures what
    larger uneven ones lose, which are searched as if they were even. Lists are of moves: dims are divided into no finer
    atoms than the ends name, and backward mirrors forward. (Each direction alone, from dual to dual with
    ``differentiable=False``, may send less: ``make bench-redistribution``.)

    Memory: of the cheapest lists, one whose largest local tensor is smallest. That is the larger of both ends', or more
    where every list within that sends more bytes or messages, and the whole tensor at most; ``Move.peak_numel`` adds
    what a move holds beside it.

    Raises LayoutError when a partial value of another kind than sum would have to arise.
    """
    if source.shape != target.shape or source.mesh != target.mesh:
        raise LayoutError(f"no redistribution from {source} to {target}: not the same tensor on the same mesh")
    if target.windows:
        return _into_windows(source, target, differentiable, price)
    if target.windows:
        return _into_windows(source, target, differentiable, price)
    return _redistribute(source, target, differentiable, price)


@lru_cache(maxsize=100_000)
def _into_windows(source: Layout, target: Layout, differentiable: bool, price: Price | None) -> tuple[Move, ...]:
    """Into slices, and from there into windows, one atom after the other. What is whole on every device anyway, and
    whose cotangents may be summands, is cut on the spot."""
    whole = ("R",) if differentiable else ("R", "I")
    current = target.without_windows
    for own in target.windows:
        axes = current.dims[own.dim][own.atom].axes
        states = {source.state_of[axis] for axis in axes}
        if len(states) == 1 and states <= set(whole):
            current = current.moved(dict.fromkeys(axes, states.pop()))
    moves = list(_redistribute(source, current, differentiable, price))
    for i, own in enumerate(target.windows):
        axes = target.dims[own.dim][own.atom].axes
        after = current
        if not current.dims[own.dim][own.atom].axes:
            after = current.moved(dict.fromkeys(axes, (own.dim, own.atom)))
        after = replace(after, windows=target.windows[: i + 1])
        moves.append(Move(current, after, tuple(sorted(axes, key=source.mesh.order.__getitem__))))
        current = after
    return tuple(moves)


@lru_cache(maxsize=100_000)
def _into_windows(source: Layout, target: Layout, differentiable: bool, price: Price | None) -> tuple[Move, ...]:
    """Into slices, and from there into windows, one atom after the other. What is whole on every device anyway, and
    whose cotangents may be summands, is cut on the spot."""
    whole = ("R",) if differentiable else ("R", "I")
    current = target.without_windows
    for own in target.windows:
        axes = current.dims[own.dim][own.atom].axes
        states = {source.state_of[axis] for axis in axes}
        if len(states) == 1 and states <= set(whole):
            current = current.moved(dict.fromkeys(axes, states.pop()))
    moves = list(_redistribute(source, current, differentiable, price))
    for i, own in enumerate(target.windows):
        axes = target.dims[own.dim][own.atom].axes
        after = current
        if not current.dims[own.dim][own.atom].axes:
            after = current.moved(dict.fromkeys(axes, (own.dim, own.atom)))
        after = replace(after, windows=target.windows[: i + 1])
        moves.append(Move(current, after, tuple(sorted(axes, key=source.mesh.order.__getitem__))))
        current = after
    return tuple(moves)


@lru_cache(maxsize=100_000)
def _redistribute(source: Layout, target: Layout, differentiable: bool, price: Price | None) -> tuple[Move, ...]:
    source, target = source.canonical(), target.canonical()
    if source == target:
        return ()
    task = _Task.of(source, target, price is None)
    given, units = price, task.units

    def of_units(primitive: Primitive, chosen: tuple[int, ...], elements: float) -> Cost:
        assert given is not None
        axes = tuple(axis for unit in chosen for axis in units[unit])
        return given(primitive, axes, elements / task.num_devices)

    ends = task.state_of(task.source), task.state_of(task.target)
    exact = len(units) <= EXACT_UP_TO
    space = Space(
        tuple(source.mesh.size_of(unit) for unit in units),
        task.dims,
        tuple(
            letter
            for letter in ("I", "R", "P")
            if (exact and (letter != "R" or differentiable)) or any(letter in end[1] for end in ends)
        ),
        _allowed(ends, [size for ways in task.dims for way in ways for size in way], len(units), exact),
        differentiable,
    )
    states = solve(space, *ends, None if price is None else of_units)
    if not states:
        raise LayoutError(f"no redistribution from {source} to {target}")
    return task.moves(states)


def _allowed(ends: tuple[State, State], sizes: list[int], num_units: int, exact: bool) -> tuple[tuple[int, ...], ...]:
    """Per position the units that may shard it: an atom of a single row only those that do at one of the ends; with
    many units, a unit that shards at one of the ends only what it shards there."""
    (first, _), (second, _) = ends
    at_ends = [set(own) | set(other) for own, other in zip(first, second, strict=True)]
    settled = set() if exact else set().union(*at_ends)
    return tuple(
        tuple(u for u in range(num_units) if u in own or (size > 1 and u not in settled))
        for own, size in zip(at_ends, sizes, strict=True)
    )


@dataclass(frozen=True)
class _Task:
    """Two layouts as the search sees them. ``ways``: per dim the divisions into atoms: one where both layouts divide it
    in ways that nest, else the source's and the target's. ``positions``: those that the search uses, as (dim, way,
    atom); ``fixed``: the sub-axes that shard each of them first, before and after, which the search need not see.
    ``dims``: the sizes of the atoms as the search sees them (``shortest_path.Space``)."""

    source: Layout
    target: Layout
    units: tuple[tuple[str, ...], ...]
    ways: tuple[tuple[tuple[int, ...], ...], ...]
    positions: tuple[tuple[int, int, int], ...]
    fixed: tuple[tuple[str, ...], ...]
    dims: tuple[tuple[tuple[int, ...], ...], ...]

    @staticmethod
    def of(source: Layout, target: Layout, only_proportional: bool) -> _Task:
        ways: list[tuple[tuple[int, ...], ...]] = []
        dims: list[list[tuple[Atom, ...]]] = [[], []]
        for own, other in zip(source.dims, target.dims, strict=True):
            aligned = _align(source, own, other)
            ways.append(tuple(dict.fromkeys(tuple(a.size for a in dim) for dim in aligned)))
            for side, dim in zip(dims, aligned, strict=True):
                side.append(dim)
        source, target = (
            Layout(layout.mesh, tuple(side), layout.states) for layout, side in zip((source, target), dims, strict=True)
        )
        units = _units(source, target)
        num_atoms = sum(len(sizes) for divisions in ways for sizes in divisions)
        small = len(source.mesh.sub_axes) <= 3 and num_atoms <= 3 and len(source.mesh.sub_axes) + num_atoms <= 5
        rounding: Rounding = "none" if not only_proportional else "even" if small else "all"
        num_moving = len(units) if len(units) <= EXACT_UP_TO else 0
        positions, seen, is_even = _positions(source, target, tuple(ways), num_moving, rounding)
        if rounding == "even" and not is_even:
            units = tuple((axis,) for axis in source.mesh.sub_axes)
        fixed: list[tuple[str, ...]] = []
        for d, way, atom in positions:
            same: tuple[str, ...] = ()
            size = ways[d][way][atom]
            if len(ways[d]) == 1 and (
                rounding == "all" or (rounding == "even" and size % source.mesh.num_devices == 0)
            ):
                both = zip(source.dims[d][atom].axes, target.dims[d][atom].axes, strict=False)
                same = tuple(own for own, _ in takewhile(lambda pair: pair[0] == pair[1], both))
                same = tuple(axis for unit in units if set(unit) <= set(same) for axis in unit)
            fixed.append(same)
        constant = {axis for axes in fixed for axis in axes}
        # By size, so that meshes which differ in the order of their axes share a graph.
        units = tuple(
            sorted((unit for unit in units if unit[0] not in constant), key=lambda unit: source.mesh.size_of(unit))
        )
        number = source.mesh.size_of(axis for unit in units for axis in unit)
        dims_seen = tuple(tuple(tuple(number if s == PROPORTIONAL else s for s in w) for w in dim) for dim in seen)
        return _Task(source, target, units, tuple(ways), positions, tuple(fixed), dims_seen)

    @property
    def num_devices(self) -> int:
        return self.source.mesh.num_devices

    def state_of(self, layout: Layout) -> State:
        number = {unit[0]: i for i, unit in enumerate(self.units)}
        arrangement = tuple(
            tuple(number[axis] for axis in layout.dims[d][atom].axes if axis in number)
            if self.ways[d][way] == layout.atoms[d]
            else ()
            for d, way, atom in self.positions
        )
        return arrangement, tuple(layout.state_of[unit[0]] for unit in self.units)

    def layout_of(self, state: State) -> Layout:
        arrangement, states = state
        axes: dict[tuple[int, int, int], tuple[str, ...]] = {
            position: fixed + tuple(axis for unit in own for axis in self.units[unit])
            for position, fixed, own in zip(self.positions, self.fixed, arrangement, strict=True)
        }
        dims = []
        for d, ways in enumerate(self.ways):
            used = next(
                (way for way in range(len(ways)) if any(axes.get((d, way, i)) for i in range(len(ways[way])))), 0
            )
            dims.append(tuple(Atom(size, axes.get((d, used, i), ())) for i, size in enumerate(ways[used])))
        found = {
            axis: own for unit, own in zip(self.units, states, strict=True) if own not in ("S", "I") for axis in unit
        }
        mesh = self.source.mesh
        return Layout(mesh, tuple(dims), tuple((axis, found[axis]) for axis in mesh.sub_axes if axis in found))

    def moves(self, states: tuple[State, ...]) -> tuple[Move, ...]:
        """The path as moves; local steps of one kind are joined."""
        path: list[tuple[State, State, tuple[int, ...]]] = []
        for before, after in pairwise(states):
            units = tuple(u for u in range(len(self.units)) if before[1][u] != after[1][u])
            units = units or moved_units(before[0], after[0])
            cell = before[1][units[0]], after[1][units[0]]
            if path and not communicates(*cell):
                first, middle, others = path[-1]
                if cell == (first[1][others[0]], middle[1][others[0]]) and not set(units) & set(others):
                    path[-1] = (first, after, others + units)
                    continue
            path.append((before, after, units))
        order = self.source.mesh.order
        return tuple(
            Move(
                self.layout_of(before),
                self.layout_of(after),
                tuple(sorted((axis for unit in units for axis in self.units[unit]), key=order.__getitem__)),
            )
            for before, after, units in path
        )


def _align(layout: Layout, own: tuple[Atom, ...], other: tuple[Atom, ...]) -> tuple[tuple[Atom, ...], tuple[Atom, ...]]:
    """Two divisions of a dim over common atoms, or as they are where there are none."""
    common = common_atoms(tuple(atom.size for atom in own), tuple(atom.size for atom in other))
    if common is not None:
        try:
            first, second = (Layout(layout.mesh, (dim,)).refine((common,)).dims[0] for dim in (own, other))
            return first, second
        except LayoutError:
            pass
    return own, other


def _units(source: Layout, target: Layout) -> tuple[tuple[str, ...], ...]:
    """The sub-axes in runs that come from the same place and go to the same place, side by side in both. In the order
    in which they shard an atom at one of the ends."""

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
    return tuple(map(tuple, runs))


def _positions(
    source: Layout, target: Layout, ways: tuple[tuple[tuple[int, ...], ...], ...], num_moving: int, rounding: Rounding
) -> tuple[tuple[tuple[int, int, int], ...], tuple[tuple[tuple[int, ...], ...], ...], bool]:
    """The atoms that matter to the search, per dim and way their sizes as it sees them, and whether all divide evenly.

    An atom that the number of devices divides stands for all such atoms: its size is PROPORTIONAL, unless ``rounding``
    is "none"; where it is "all", so is that of atoms that do not divide evenly. To those that an end shards,
    others are added which may be sharded on the way, as many as help ``num_moving`` units (0: none): up to three in
    all, and one less than units in any case; even ones first, then the largest.
    """
    num_devices = source.mesh.num_devices

    def is_even(size: int) -> bool:
        return size % num_devices == 0

    candidates = [
        (d, way, i) for d, atoms in enumerate(ways) for way in range(len(atoms)) for i in range(len(atoms[way]))
    ]
    used = {
        (d, way, i)
        for d, way, i in candidates
        if any(layout.atoms[d] == ways[d][way] and layout.dims[d][i].axes for layout in (source, target))
    }
    free = [
        (d, way, i) for d, way, i in candidates if (d, way, i) not in used and len(ways[d]) == 1 and ways[d][way][i] > 1
    ]
    free.sort(key=lambda p: (not is_even(ways[p[0]][p[1]][p[2]]), -ways[p[0]][p[1]][p[2]]))
    num_free = max(3 - len(used), num_moving - 1) if num_moving else 0
    kept = used | set(free[:num_free]) | {(d, way, i) for d, way, i in candidates if len(ways[d]) > 1}
    positions = tuple(position for position in candidates if position in kept)
    sizes = {
        (d, way, i): PROPORTIONAL
        if len(ways[d]) == 1
        and ways[d][way][i] > 1
        and (rounding == "all" or (rounding == "even" and is_even(ways[d][way][i])))
        else ways[d][way][i]
        for d, way, i in positions
    }
    # Atoms of a dim that is divided in one way only are as good as dims of their own.
    dims: list[tuple[tuple[int, ...], ...]] = []
    for d, both in enumerate(ways):
        seen = tuple(tuple(sizes[d, w, i] for i in range(len(both[w])) if (d, w, i) in sizes) for w in range(len(both)))
        dims.extend([seen] if len(both) > 1 else [((size,),) for size in seen[0]])
    return positions, tuple(dims), all(is_even(ways[d][way][i]) and len(ways[d]) == 1 for d, way, i in positions)
