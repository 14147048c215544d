"""Redistribution: the cheapest list of moves from one layout of a tensor to another.

Cheapest means: fewest bytes that the busiest rank sends in forward and backward together, then fewest messages; or
whatever a price function says that is passed in. The list is a shortest path (``layouts.shortest_path``); here layouts
are translated to what the search sees and its answer back. Sub-axes that go from the same place to the same place side
by side are one *unit* to it, so the search grows with the number of different moves, not with the number of devices.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import pairwise, takewhile
from math import prod

from shardwise.errors import LayoutError
from shardwise.layouts.conversions import Move, Primitive
from shardwise.layouts.layout import Atom, Layout, common_atoms
from shardwise.layouts.redistribution_steps import EXACT_UP_TO, Arrangement, Space, State, communicates, moved_units
from shardwise.layouts.shortest_path import Cost, Path, solve

PROPORTIONAL = -1  # the size of an atom of which only proportions matter

# (primitive, sub-axes, elements that the busiest rank sends) -> what one direction of a move costs (not less than
# nothing), summed over directions and moves component by component. Compared by value: answers are remembered.
Price = Callable[[Primitive, tuple[str, ...], float], Cost]


def redistribute(
    source: Layout, target: Layout, *, differentiable: bool = True, price: Price | None = None
) -> tuple[Move, ...]:
    """Return the cheapest moves that turn ``source`` into ``target``.

    Both describe the same global tensor on the same mesh. ``differentiable``: whether backward is paid for as well.
    ``price``: by default elements sent by the busiest rank, then messages.

    By default the minimum over all lists of moves, for up to three units whose atoms divide evenly and for small uneven
    tensors (``_positions``); ``tests/layouts`` compares it with an independent search over all pairs, and measures what
    larger uneven ones lose, which are searched as if they were even. Over more units the search takes few of the steps
    (``layouts.directed``) and looks at SETTLED_UP_TO states: never dearer than the direct route, and on random pairs
    as near to the minimum as decision 8 lists. Lists are of moves: dims are divided into no finer atoms than the ends
    name, and backward mirrors forward. (Each direction alone, from dual to dual with ``differentiable=False``, may send
    less: ``make bench-redistribution``.)

    Memory: of the cheapest lists, one whose largest local tensor is smallest. That is the larger of both ends', or more
    where every list within that sends more bytes or messages, and the whole tensor at most.

    Raises LayoutError when a partial value of another kind than sum would have to arise.
    """
    if source.windows or target.windows:
        return _through_windows(source, target, differentiable, price)
    return _redistribute(source, target, differentiable, price)


@lru_cache(maxsize=100_000)
def _through_windows(source: Layout, target: Layout, differentiable: bool, price: Price | None) -> tuple[Move, ...]:
    def route(before: Layout, after: Layout) -> tuple[Move, ...]:
        return _redistribute(before, after, differentiable, price)

    return through_windows(source, target, differentiable, route)


def through_windows(
    source: Layout, target: Layout, differentiable: bool, route: Callable[[Layout, Layout], tuple[Move, ...]]
) -> tuple[Move, ...]:
    """The moves where an end has windows: from windows into slices, by ``route`` to other slices, from there into
    windows. Windows that both ends have stay, unless a move touches their dim. Raises LayoutError where the windows of
    the source overlap or leave rows out."""
    if source.canonical() == target.canonical():
        return ()
    if source.windows == target.windows:
        moves = route(source.without_windows, target.without_windows)
        kept = {window.dim: source.dims[window.dim] for window in source.windows}
        if all(end.dims[d] == dim for move in moves for end in (move.source, move.target) for d, dim in kept.items()):
            ends = [
                (replace(m.source, windows=source.windows), replace(m.target, windows=source.windows)) for m in moves
            ]
            return tuple(Move(before, after, m.axes) for (before, after), m in zip(ends, moves, strict=True))
    slices = source.without_windows
    for window in source.windows:
        if not window.tile(source.dims[window.dim][window.atom].size):
            raise LayoutError(f"no redistribution from {source} to {target}: its windows overlap or leave rows out")
    closing = tuple(Move(m.target, m.source, m.axes) for m in reversed(window_moves(slices, source)))
    current = before_windows(slices, target, differentiable)
    return closing + route(slices, current) + window_moves(current, target)


def before_windows(source: Layout, target: Layout, differentiable: bool) -> Layout:
    """Return the layout from which the windows of ``target`` are cut: slices, or what is whole on every device anyway
    and whose cotangents may be summands."""
    whole = ("R",) if differentiable else ("R", "I")
    current = target.without_windows
    for window in target.windows:
        axes = current.dims[window.dim][window.atom].axes
        states = {source.state_of[axis] for axis in axes}
        if len(states) == 1 and states <= set(whole):
            current = current.moved(dict.fromkeys(axes, states.pop()))
    return current


def window_moves(current: Layout, target: Layout) -> tuple[Move, ...]:
    """From ``before_windows`` into the windows, one atom after the other."""
    moves = []
    for i, window in enumerate(target.windows):
        axes = target.dims[window.dim][window.atom].axes
        after = current
        if not current.dims[window.dim][window.atom].axes:
            after = current.moved(dict.fromkeys(axes, (window.dim, window.atom)))
        after = replace(after, windows=target.windows[: i + 1])
        moves.append(Move(current, after, tuple(sorted(axes, key=current.mesh.order.__getitem__))))
        current = after
    return tuple(moves)


@lru_cache(maxsize=100_000)
def _redistribute(source: Layout, target: Layout, differentiable: bool, price: Price | None) -> tuple[Move, ...]:
    task, path, _ = _search(source, target, differentiable, price)
    return task.moves(path.states) if task and path else ()


@lru_cache(maxsize=200_000)
def _search(
    source: Layout, target: Layout, differentiable: bool, price: Price | None
) -> tuple[_Task | None, Path | None, Cost]:
    """Return the problem as the search saw it, its solution and the cost of that."""
    if source.shape != target.shape or source.mesh != target.mesh:
        raise LayoutError(f"no redistribution from {source} to {target}: not the same tensor on the same mesh")
    source, target = source.canonical(), target.canonical()
    if source == target:
        return None, None, ()
    task = _Task.of(source, target)
    ends = task.state_of(task.source), task.state_of(task.target)
    exact = len(task.units) <= EXACT_UP_TO
    sizes = tuple(source.mesh.size_of(unit) for unit in task.units)
    others: tuple[str, ...] = ()
    allowed: Arrangement = ()
    if exact:
        others = ("I", "R", "P") if differentiable or any("R" in states for _, states in ends) else ("I", "P")
        atoms = [size for divisions in task.dims for division in divisions for size in division]
        # An atom of a single row may be sharded by those units only that do at one of the ends.
        (first, _), (second, _) = ends
        allowed = tuple(
            tuple(u for u in range(len(task.units)) if u in old or u in new or size > 1)
            for old, new, size in zip(first, second, atoms, strict=True)
        )
    space = Space(sizes, task.dims, others, allowed, differentiable)
    path = solve(space, *ends, None if price is None else _UnitPrice(price, task.units, task.elements))
    if path is None:
        raise LayoutError(f"no redistribution from {source} to {target}")
    elements, messages, *_ = path.cost
    return task, path, path.cost[:-2] if price is not None else (elements * task.elements, messages)


@dataclass(frozen=True)
class _UnitPrice:
    """A price, for the search: of its units, and of elements in proportion."""

    price: Price
    units: tuple[tuple[str, ...], ...]
    elements: float

    def __call__(self, primitive: Primitive, units: tuple[int, ...], elements: float) -> Cost:
        key = primitive, units, elements
        cost = self._costs.get(key)
        if cost is None:
            axes = tuple(axis for unit in units for axis in self.units[unit])
            cost = self._costs[key] = self.price(primitive, axes, elements * self.elements)
        return cost

    @cached_property
    def _costs(self) -> dict[tuple[Primitive, tuple[int, ...], float], Cost]:
        return {}


@dataclass(frozen=True)
class _Task:
    """Two layouts as the search sees them. ``divisions``: per dim into atoms: one where those of both
    layouts nest, else the source's and the target's. ``positions``: those that the search uses, as (dim, division,
    atom); ``fixed``: the sub-axes that shard each of them first, before and after, which the search need not see.
    ``dims``: the sizes of the atoms as the search sees them (``steps.Space``)."""

    source: Layout
    target: Layout
    units: tuple[tuple[str, ...], ...]
    divisions: tuple[tuple[tuple[int, ...], ...], ...]
    positions: tuple[tuple[int, int, int], ...]
    fixed: tuple[tuple[str, ...], ...]
    dims: tuple[tuple[tuple[int, ...], ...], ...]

    @staticmethod
    def of(source: Layout, target: Layout) -> _Task:
        divisions_of: list[tuple[tuple[int, ...], ...]] = []
        dims: list[list[tuple[Atom, ...]]] = [[], []]
        for dim_before, dim_after in zip(source.dims, target.dims, strict=True):
            aligned = _align(source, dim_before, dim_after)
            divisions_of.append(tuple(dict.fromkeys(tuple(a.size for a in dim) for dim in aligned)))
            for side, dim in zip(dims, aligned, strict=True):
                side.append(dim)
        source, target = (
            Layout(layout.mesh, tuple(side), layout.states) for layout, side in zip((source, target), dims, strict=True)
        )
        units = _units(source, target)
        num_atoms = sum(len(sizes) for divisions in divisions_of for sizes in divisions)
        small = len(source.mesh.sub_axes) <= 3 and num_atoms <= 3 and len(source.mesh.sub_axes) + num_atoms <= 5
        num_moving = len(units) if len(units) <= EXACT_UP_TO else 0
        positions, seen, is_even = _positions(source, target, tuple(divisions_of), num_moving, exactly=small)
        if small and not is_even:
            units = tuple((axis,) for axis in source.mesh.sub_axes)
        fixed: list[tuple[str, ...]] = []
        for d, division, atom in positions:
            same: tuple[str, ...] = ()
            size = divisions_of[d][division][atom]
            if len(divisions_of[d]) == 1 and (not small or size % source.mesh.num_devices == 0):
                both = zip(source.dims[d][atom].axes, target.dims[d][atom].axes, strict=False)
                same = tuple(axis for axis, _ in takewhile(lambda pair: pair[0] == pair[1], both))
                same = tuple(axis for unit in units if set(unit) <= set(same) for axis in unit)
            fixed.append(same)
        constant = {axis for axes in fixed for axis in axes}
        # By size, so that meshes which differ in the order of their axes share a graph.
        units = tuple(
            sorted((unit for unit in units if unit[0] not in constant), key=lambda unit: source.mesh.size_of(unit))
        )
        number = source.mesh.size_of(axis for unit in units for axis in unit)
        dims_seen = tuple(tuple(tuple(number if s == PROPORTIONAL else s for s in w) for w in dim) for dim in seen)
        return _Task(source, target, units, tuple(divisions_of), positions, tuple(fixed), dims_seen)

    @property
    def elements(self) -> float:
        """Elements of the tensor per element that the search counts (which it multiplies by the devices along its
        units). Sub-axes that shard all the time, and atoms that it does not see, leave it only a part."""
        fixed = self.source.mesh.size_of(axis for axes in self.fixed for axis in axes)
        seen = prod(size for divisions in self.dims for size in divisions[0])
        devices = self.source.mesh.size_of(axis for unit in self.units for axis in unit)
        return prod(self.source.shape) / max(fixed * seen * devices, 1)  # (nothing, of a tensor without elements)

    def state_of(self, layout: Layout) -> State:
        number = {unit[0]: i for i, unit in enumerate(self.units)}
        arrangement = tuple(
            tuple(number[axis] for axis in layout.dims[d][atom].axes if axis in number)
            if self.divisions[d][division] == layout.atoms[d]
            else ()
            for d, division, atom in self.positions
        )
        return arrangement, tuple(layout.state_of[unit[0]] for unit in self.units)

    def layout_of(self, node: State) -> Layout:
        arrangement, states = node
        axes: dict[tuple[int, int, int], tuple[str, ...]] = {
            position: fixed + tuple(axis for unit in numbers for axis in self.units[unit])
            for position, fixed, numbers in zip(self.positions, self.fixed, arrangement, strict=True)
        }
        dims = []
        for d, divisions in enumerate(self.divisions):
            used = next((n for n, s in enumerate(divisions) if any(axes.get((d, n, i)) for i in range(len(s)))), 0)
            dims.append(tuple(Atom(size, axes.get((d, used, i), ())) for i, size in enumerate(divisions[used])))
        mesh = self.source.mesh
        state_of = {axis: state for unit, state in zip(self.units, states, strict=True) for axis in unit}
        others = tuple((axis, state_of[axis]) for axis in mesh.sub_axes if state_of.get(axis, "I") not in ("S", "I"))
        return Layout(mesh, tuple(dims), others)

    def moves(self, states: tuple[State, ...]) -> tuple[Move, ...]:
        """Return the path as moves; local steps of one kind are joined."""
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


def _align(
    layout: Layout, first_dim: tuple[Atom, ...], second_dim: tuple[Atom, ...]
) -> tuple[tuple[Atom, ...], tuple[Atom, ...]]:
    """Two divisions of a dim over common atoms, or as they are where there are none."""
    common = common_atoms(tuple(atom.size for atom in first_dim), tuple(atom.size for atom in second_dim))
    if common is not None:
        try:
            first, second = (Layout(layout.mesh, (dim,)).refine((common,)).dims[0] for dim in (first_dim, second_dim))
            return first, second
        except LayoutError:
            pass
    return first_dim, second_dim


def _units(source: Layout, target: Layout) -> tuple[tuple[str, ...], ...]:
    """Return the sub-axes in runs that come from the same place and go to the same place, side by side in both. In the
    order in which they shard an atom at one of the ends."""

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
    source: Layout,
    target: Layout,
    divisions: tuple[tuple[tuple[int, ...], ...], ...],
    num_moving: int,
    *,
    exactly: bool,
) -> tuple[tuple[tuple[int, int, int], ...], tuple[tuple[tuple[int, ...], ...], ...], bool]:
    """Return the atoms that matter to the search, their sizes as it sees them (per dim and division), and whether all
    divide evenly.

    An atom that the number of devices divides stands for all such atoms: its size is PROPORTIONAL. So is the size of
    one that does not divide evenly, unless ``exactly``, where each uneven size is a search of its own. First come the
    atoms that an end shards. Then others, which may be sharded in between: even ones first, then the largest. They make
    three in all, or one less than ``num_moving``, the units, if that is more (0, many units: one, where no end shards
    any).
    """
    num_devices = source.mesh.num_devices

    def is_even(size: int) -> bool:
        return size % num_devices == 0

    every = {  # (dim, division, atom) -> its size
        (d, n, i): size
        for d, atoms in enumerate(divisions)
        for n, division in enumerate(atoms)
        for i, size in enumerate(division)
    }
    used = {
        (d, n, i)
        for d, n, i in every
        if any(layout.atoms[d] == divisions[d][n] and layout.dims[d][i].axes for layout in (source, target))
    }
    free = [p for p, size in every.items() if p not in used and len(divisions[p[0]]) == 1 and size > 1]
    free.sort(key=lambda p: (not is_even(every[p]), -every[p]))
    num_free = max(3 - len(used), num_moving - 1)
    kept = used | set(free[:num_free]) | {p for p in every if len(divisions[p[0]]) > 1}
    positions = tuple(position for position in every if position in kept)
    sizes = {p: every[p] for p in positions}
    for p, size in sizes.items():
        if len(divisions[p[0]]) == 1 and size > 1 and (not exactly or is_even(size)):
            sizes[p] = PROPORTIONAL
    # Atoms of a dim with one division are as good as dims of their own.
    dims: list[tuple[tuple[int, ...], ...]] = []
    for d, both in enumerate(divisions):
        seen = tuple(tuple(sizes[d, w, i] for i in range(len(both[w])) if (d, w, i) in sizes) for w in range(len(both)))
        dims.extend([seen] if len(both) > 1 else [((size,),) for size in seen[0]])
    return positions, tuple(dims), all(is_even(every[p]) and len(divisions[p[0]]) == 1 for p in positions)
