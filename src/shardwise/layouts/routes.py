"""Cheapest routes between all layouts of a tensor, in seconds, on a mesh whose named axes move as wholes.

The exact search prices every pair of layouts that a value's producer and its consumers may use. A *node* is a layout
over the value's atoms in which each mesh axis is in one state: ``I``, ``R``, ``P`` or sharding one atom, axes of one
atom in device order. An edge is one collective (or one step without communication) on any set of axes that make the
same change. Prices of all pairs follow from relaxing all edges at once, in numpy; the program that is emitted takes the
same routes (``Routes.moves``), so what the search claims is what runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations, product
from math import prod

import numpy as np
from numpy.typing import NDArray

from shardwise.errors import LayoutError
from shardwise.layouts.choice import ShardPosition, Where, layout_of, where_of
from shardwise.layouts.conversions import CELLS, COLLECTIVES, KEYED_CELL, Move
from shardwise.layouts.layout import PARTIAL_KINDS, Layout, expected_rows
from shardwise.layouts.mesh import Mesh
from shardwise.rules.keyed_rows import copies_of

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

# Seconds of a collective of a kind over sub-axes (in device order), per message size in bytes (``Collective``).
Seconds = Callable[[str, tuple[str, ...], Floats], Floats]

STATES = ("I", "R", "P")
SHARDED = len(STATES)  # codes from here on: the atom that the axis shards
# Seconds added to every step of a route, so that of equally dear routes the one of fewest steps is taken. Too small to
# be seen in a price: the shortest message takes about 1e-6 s.
STEP = 1e-15
NEVER = 1e9  # seconds of a step that no route may take; finite, as prices are multiplied by weights that may be 0
FEW = 8
COLUMNS = 128  # targets that are relaxed together: a block of prices that stays in the cache


@dataclass(frozen=True)
class Axes:
    """The axes of a mesh that layouts of a search treat as wholes: ``groups`` are runs of its sub-axes in device
    order."""

    mesh: Mesh
    groups: tuple[tuple[str, ...], ...]

    @staticmethod
    def of(mesh: Mesh, separate: frozenset[str] = frozenset()) -> Axes:
        """Return the named axes with more than one device; those in ``separate`` as their prime sub-axes."""
        groups: list[tuple[str, ...]] = []
        for name, _ in mesh.axes:
            parts = mesh.expand(name)
            groups.extend([(part,) for part in parts] if name in separate else [parts] if parts else [])
        return Axes(mesh, tuple(groups))

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        return tuple(self.mesh.size_of(group) for group in self.groups)

    @cached_property
    def steps(self) -> dict[object, tuple[_AxisSteps, ...]]:
        """Steps between layouts, by the layouts that there are (``Routes._steps``)."""
        return {}


@dataclass(frozen=True)
class RouteTensor:
    """What prices of conversions depend on: the atoms of a value per dim, bytes per element, and whether a cotangent
    comes back (whose elements have ``grad_itemsize`` bytes). ``keyed``: the keyed state in which operators may take it,
    if there is one. ``partial``: its state where devices hold parts that are combined."""

    atoms: tuple[tuple[int, ...], ...]
    itemsize: int
    differentiable: bool
    grad_itemsize: int
    keyed: str = ""
    partial: str = "P"


class Routes:
    """All layouts of one kind of tensor, and the cheapest routes between them.

    ``codes``: [nodes, axes] the state of every axis; ``numel``: elements on the device that holds most.
    """

    def __init__(self, axes: Axes, tensor: RouteTensor, seconds: Seconds) -> None:
        self.axes, self.tensor, self.seconds = axes, tensor, seconds
        self.positions = [(d, i) for d, atoms in enumerate(tensor.atoms) for i, size in enumerate(atoms) if size > 1]
        self.sizes = [tensor.atoms[d][i] for d, i in self.positions]
        self.place = {position: SHARDED + i for i, position in enumerate(self.positions)}
        self.by_key = SHARDED + len(self.positions) if tensor.keyed else -1
        self.base = SHARDED + len(self.positions) + bool(tensor.keyed)
        allowed = [[code for code in range(self.base) if self._allows(code, axis)] for axis in range(len(axes.groups))]
        every = list(product(*allowed))
        codes = np.array(every, dtype=np.int64).reshape(len(every), len(axes.groups))
        split = self._split(codes)
        fits = (split <= np.array(self.sizes, dtype=np.int64)).all(axis=1)
        self.codes: Ints = codes[fits]
        self.numel: Ints = self._numel(split[fits], self._owners(self.codes))
        weights = self.base ** np.arange(len(axes.groups), dtype=np.int64)
        self._weights = weights
        keys: Ints = self.codes @ weights
        self._node_of = np.full(self.base ** len(axes.groups), -1, dtype=np.int64)
        self._node_of[keys] = np.arange(len(keys))
        self._prices: dict[int, Floats] = {}
        self._moves: dict[tuple[int, int], tuple[Move, ...]] = {}
        self._nodes: dict[Layout, int | None] = {}
        self._layouts: dict[int, Layout] = {}  # the same object every time: a layout computes its properties once

    def _allows(self, code: int, axis: int) -> bool:
        if code == self.by_key:
            return True
        if code >= SHARDED:
            return self.sizes[code - SHARDED] >= self.axes.sizes[axis]
        return code != STATES.index("R") or self.tensor.differentiable

    def _split(self, codes: Ints) -> Ints:
        """[nodes, positions]: the number of parts of every atom."""
        split = np.ones((len(codes), len(self.positions)), dtype=np.int64)
        for axis, size in enumerate(self.axes.sizes):
            for p in range(len(self.positions)):
                split[:, p] *= np.where(codes[:, axis] == SHARDED + p, size, 1)
        return split

    def _owners(self, codes: Ints) -> Ints:
        """[nodes]: the number of devices that own keys, 1 where rows follow none."""
        sizes = np.array(self.axes.sizes, dtype=np.int64)
        owners: Ints = np.where(codes == self.by_key, sizes, 1).prod(axis=1, dtype=np.int64)
        return owners

    def _numel(self, split: Ints, owners: Ints) -> Ints:
        whole = prod(size for atoms in self.tensor.atoms for size in atoms)
        if not self.positions:
            return np.full(len(split), whole, dtype=np.int64)
        sizes = np.array(self.sizes, dtype=np.int64)
        parts: Ints = -(-sizes // split)
        rest = whole // prod(self.sizes)  # atoms of one row
        numel: Ints = parts.prod(axis=1) * rest
        if not self.tensor.keyed:
            return numel
        of_rows = np.array([dim == 0 for dim, _ in self.positions])
        rows, columns = parts[:, of_rows].prod(axis=1), parts[:, ~of_rows].prod(axis=1) * rest
        copies = copies_of(self.tensor.keyed)
        held = [
            expected_rows(r * copies, n, self.tensor.keyed) if n > 1 else r
            for r, n in zip(rows.tolist(), owners.tolist(), strict=True)
        ]
        numel = columns * np.array(held, dtype=np.int64)
        return numel

    # -- nodes ---------------------------------------------------------------------------------------------------------

    def node(self, codes: Ints) -> Ints:
        """[n, axes] codes -> [n] nodes; -1 where a layout is not one."""
        keys: Ints = codes @ self._weights
        nodes: Ints = self._node_of[keys]
        return nodes

    @cached_property
    def whole(self) -> int:
        """The node that is invariant on every axis."""
        return int(self._node_of[0])

    def code_of(self, where: Where, size: int = 1) -> int:
        """The code of where the tensor is on an axis of ``size`` devices; -1: none. A place is the same atom, or where
        the tensor is divided further the major-most part of it, if the axis divides that. Without gradient, replicated
        and invariant are the same."""
        if not isinstance(where, ShardPosition):
            if copies_of(where):
                return self.by_key if where == self.tensor.keyed else -1
            if where in PARTIAL_KINDS:
                return STATES.index("P") if where == self.tensor.partial else -1
            free = where == "R" and not self.tensor.differentiable
            return STATES.index("I" if free else where)
        atoms = self.tensor.atoms[where.dim]
        for i in range(len(atoms)):
            part = ShardPosition.of(where.dim, atoms, i)
            if part.stride * part.size == where.stride * where.size and part.size > 1:
                divides = part.stride > where.stride and part.size % size == 0
                return self.place[where.dim, i] if part.stride == where.stride or divides else -1
        return -1

    def where(self, code: int) -> Where:
        """Return the placement of the tensor that an axis code stands for."""
        if code < SHARDED:
            return self.tensor.partial if STATES[code] == "P" else STATES[code]
        if code == self.by_key:
            return self.tensor.keyed
        dim, atom = self.positions[code - SHARDED]
        return ShardPosition.of(dim, self.tensor.atoms[dim], atom)

    def node_of(self, layout: Layout) -> int | None:
        """Return the node of a layout, or None where an axis does not move as a whole or the atoms do not nest."""
        if layout not in self._nodes:
            self._nodes[layout] = self._find(layout)
        return self._nodes[layout]

    def _find(self, layout: Layout) -> int | None:
        try:
            layout = layout.canonical().refine(self.tensor.atoms)
        except LayoutError:
            return None
        where, codes = where_of(layout), []
        for group in self.axes.groups:
            at = {where[axis] for axis in group}
            code = self.code_of(at.pop()) if len(at) == 1 else -1
            if code < 0:
                return None
            codes.append(code)
        node = int(self._node_of[int(np.array(codes, dtype=np.int64) @ self._weights)])
        if not self.tensor.differentiable:
            layout = layout.moved({axis: "I" for axis, state in layout.states if state == "R"})
        return None if node < 0 or self.layout(node).canonical() != layout.canonical() else node

    def layout(self, node: int) -> Layout:
        if node not in self._layouts:
            self._layouts[node] = self._layout_of(node)
        return self._layouts[node]

    def _layout_of(self, node: int) -> Layout:
        codes = zip(self.axes.groups, self.codes[node].tolist(), strict=True)
        where = {axis: self.where(code) for group, code in codes for axis in group}
        return layout_of(where, self.tensor.atoms, self.axes.mesh)

    # -- prices --------------------------------------------------------------------------------------------------------

    def prices(self, targets: Ints) -> Floats:
        """[nodes, targets]: seconds, forward and backward together, of the cheapest route from every node."""
        missing = [int(node) for node in dict.fromkeys(targets.tolist()) if node not in self._prices]
        if missing:
            self._relax(missing)
        return np.stack([self._prices[int(node)] for node in targets.tolist()], axis=1)

    def _relax(self, targets: list[int]) -> None:
        """Bellman and Ford's relaxation of all edges, towards many targets at once; towards a few one by one."""
        edges = self._edges
        if len(targets) <= FEW:
            for target in targets:
                self._prices[target] = self._towards(target)
            return
        for start in range(0, len(targets), COLUMNS):
            columns = targets[start : start + COLUMNS]
            best = np.full((len(self.codes), len(columns)), np.inf)
            best[edges.rank[columns], np.arange(len(columns))] = 0.0
            through = np.empty_like(best)
            while True:
                previous = best.copy()
                for after, price in edges.by_rank:
                    candidates = np.take(best, after, axis=0, out=through[: len(after)], mode="clip")
                    candidates += price[:, None]
                    np.minimum(best[: len(after)], candidates, out=best[: len(after)])
                if np.array_equal(previous, best):
                    break
            best = best[edges.rank]
            for i, target in enumerate(columns):
                self._prices[target] = best[:, i]

    def _towards(self, target: int) -> Floats:
        """Seconds of the cheapest route from every node to one."""
        edges = self._edges
        best = np.full(len(self.codes), np.inf)
        best[target] = 0.0
        while len(edges.price):
            through = np.minimum.reduceat(best[edges.targets] + edges.price, edges.starts)
            improved = through < best[edges.sources]
            if not improved.any():
                break
            best[edges.sources[improved]] = through[improved]
        return best

    @cached_property
    def _edges(self) -> _Edges:
        groups = self._steps()
        if not groups:
            none = np.zeros(0, dtype=np.int64)
            return _Edges(len(self.codes), none, none, none, np.zeros(0), none, ())
        source, target = (np.concatenate([getattr(group, end) for group in groups]) for end in ("sources", "targets"))
        price = np.concatenate([self._step_price(group) + STEP for group in groups])
        changes = tuple(dict.fromkeys(group.chosen for group in groups))
        numbers = np.repeat([changes.index(group.chosen) for group in groups], [len(group.sources) for group in groups])
        order = np.argsort(source, kind="stable")
        sources, starts = np.unique(source[order], return_index=True)
        return _Edges(len(self.codes), sources, starts, target[order], price[order], numbers[order], changes)

    def _steps(self) -> tuple[_AxisSteps, ...]:
        """Return the single steps between the layouts, which tensors of other sizes share."""
        key = self.base, self.codes.tobytes(), (self.tensor.atoms[0], tuple(self.sizes)) if self.tensor.keyed else ()
        cached = self.axes.steps.get(key)
        if cached is None:
            cached = self.axes.steps[key] = tuple(self._make_steps())
        return cached

    def _make_steps(self) -> Iterator[_AxisSteps]:
        num_axes = len(self.axes.groups)
        for count in range(1, num_axes + 1):
            for chosen in combinations(range(num_axes), count):
                mine = self.codes[:, chosen]
                if self.tensor.keyed:
                    yield from self._keyed_steps(chosen)
                mine = np.where(mine == self.by_key, -1, mine)
                for before in (*range(SHARDED), SHARDED):
                    matches = (mine == before).all(axis=1) if before < SHARDED else (mine >= SHARDED).all(axis=1)
                    sources = np.flatnonzero(matches)
                    if not len(sources):
                        continue
                    ends = [[(after,) * count] for after in range(SHARDED) if after != before]
                    if before < SHARDED or count == 1:
                        ends.append(list(product(range(SHARDED, SHARDED + len(self.positions)), repeat=count)))
                    for same in filter(None, ends):  # to one state, or to any atoms
                        pairs = zip(*(self._steps_to(sources, chosen, end) for end in same), strict=True)
                        begins, targets = (np.concatenate(arrays) for arrays in pairs)
                        if len(begins):
                            yield _AxisSteps(chosen, begins, targets)

    def _keyed_steps(self, chosen: tuple[int, ...]) -> Iterator[_AxisSteps]:
        """Yield the steps between keyed rows and the slices from which they come (``programs.builder``), with all
        keyed axes at once."""
        keyed = self.codes == self.by_key
        wanted = np.isin(np.arange(len(self.axes.groups)), chosen)
        nodes = np.flatnonzero((keyed == wanted).all(axis=1))
        slices = np.array([self._slices(int(node), chosen) for node in nodes], dtype=np.int64)
        if (slices >= 0).any():
            pair = slices[slices >= 0], nodes[slices >= 0]
            yield _AxisSteps(chosen, *pair)
            yield _AxisSteps(chosen, *pair[::-1])

    def _slices(self, node: int, chosen: tuple[int, ...]) -> int:
        """Return the node of the slices of keyed rows: every axis splits the first atom that it divides evenly, else
        the largest; -1 if there is no such layout."""
        codes, sizes = self.codes[node].copy(), self.axes.sizes
        rows: dict[int, float] = {SHARDED + i: self.sizes[i] for i, (dim, _) in enumerate(self.positions) if dim == 0}
        if not rows:
            return -1
        before = codes[None].copy()
        codes[list(chosen)] = -1
        left = {code: size / prod(np.array(sizes)[codes == code]) for code, size in rows.items()}
        for name, _ in self.axes.mesh.axes:
            parts = self.axes.mesh.expand(name)
            of_name = [axis for axis in chosen if self.axes.groups[axis][0] in parts]
            devices = prod(sizes[axis] for axis in of_name)
            even = (code for code, size in left.items() if size % devices == 0)
            split = next(even, max(left, key=left.__getitem__))
            codes[of_name] = split
            left[split] /= devices
        fits = self._is_prefix(before, codes[None], chosen).all()
        return int(self.node(codes[None])[0]) if fits else -1

    def _steps_to(self, sources: Ints, chosen: tuple[int, ...], after: tuple[int, ...]) -> tuple[Ints, Ints]:
        """Return the steps that bring ``chosen`` axes to ``after``, from those of ``sources`` where that is one."""
        codes = self.codes[sources].copy()
        codes[:, chosen] = after
        targets = self.node(codes)
        kept = (targets >= 0) & (targets != sources)
        kept &= self._is_prefix(self.codes[sources], codes, chosen)
        return sources[kept], targets[kept]

    def _is_prefix(self, before: Ints, after: Ints, chosen: tuple[int, ...]) -> NDArray[np.bool_]:
        """Return whether on every atom the axes that stay are major to those that come or go."""
        good = np.ones(len(before), dtype=np.bool_)
        for axis in chosen:
            for other in range(axis + 1, len(self.axes.groups)):
                if other in chosen:
                    continue
                for side in (before, after):
                    good &= ~((side[:, axis] >= SHARDED) & (side[:, axis] == side[:, other]))
        return good

    def _step_price(self, steps: _AxisSteps) -> Floats:
        chosen, sources, targets = steps.chosen, steps.sources, steps.targets
        ends = self._state(int(sources[0]), chosen), self._state(int(targets[0]), chosen)
        cell = KEYED_CELL if any(map(copies_of, ends)) else CELLS[ends]
        axes = tuple(part for axis in chosen for part in self.axes.groups[axis])
        if "P" in ends and self.tensor.partial != "P" and ends[1] != "I":  # the other primitives are those of sums
            return np.full(len(sources), NEVER)
        price = np.zeros(len(sources))
        sides = [(cell.forward, sources, targets, self.tensor.itemsize)]
        if self.tensor.differentiable:
            sides.append((cell.backward, targets, sources, self.tensor.grad_itemsize))
        for primitive, before, after, itemsize in sides:
            if primitive in COLLECTIVES:
                whole = after if primitive == "all_gather" else before
                if cell is KEYED_CELL:  # the rows at their owners, in both directions
                    whole = sources if copies_of(ends[0]) else targets
                price += self.seconds(primitive, axes, self.numel[whole].astype(np.float64) * itemsize)
        return price

    def _state(self, node: int, chosen: tuple[int, ...]) -> str:
        code = int(self.codes[node, chosen[0]])
        if code == self.by_key:
            return self.tensor.keyed
        return "S" if code >= SHARDED else STATES[code]

    # -- routes --------------------------------------------------------------------------------------------------------

    def moves(self, source: int, target: int) -> tuple[Move, ...]:
        """Return the cheapest route as moves. Raises LayoutError where there is none."""
        cached = self._moves.get((source, target))
        if cached is None:
            cached = self._moves[source, target] = self._route(source, target)
        return cached

    def _route(self, source: int, target: int) -> tuple[Move, ...]:
        left = self.prices(np.array([target]))[:, 0]
        if not np.isfinite(left[source]):
            raise LayoutError(f"no redistribution from {self.layout(source)} to {self.layout(target)}")
        path: list[Move] = []
        edges, node = self._edges, source
        while node != target:
            at = int(np.searchsorted(edges.sources, node))
            end = edges.starts[at + 1] if at + 1 < len(edges.starts) else len(edges.price)
            leaving = slice(edges.starts[at], end)
            step = int(edges.starts[at] + (edges.price[leaving] + left[edges.targets[leaving]]).argmin())
            after = int(edges.targets[step])
            axes = tuple(part for axis in edges.changes[edges.numbers[step]] for part in self.axes.groups[axis])
            path.append(Move(self.layout(node), self.layout(after), axes))
            node = after
        return tuple(path)


@dataclass(frozen=True, eq=False)
class _AxisSteps:
    """Steps from one state to another on the ``chosen`` axes."""

    chosen: tuple[int, ...]
    sources: Ints
    targets: Ints


@dataclass(frozen=True, eq=False)
class _Edges:
    """Steps sorted by source: those of ``sources[i]`` begin at ``starts[i]``. Per step its target, its price in seconds
    and the number, in ``changes``, of the axes that it changes. ``num_nodes``: layouts that there are."""

    num_nodes: int
    sources: Ints
    starts: Ints
    targets: Ints
    price: Floats
    numbers: Ints
    changes: tuple[tuple[int, ...], ...]

    @cached_property
    def counts(self) -> Ints:
        """Steps per node."""
        num_edges = np.zeros(self.num_nodes, dtype=np.int64)
        num_edges[self.sources] = np.diff(np.append(self.starts, len(self.price)))
        return num_edges

    @cached_property
    def rank(self) -> Ints:
        """Node -> its place where those of most steps are first."""
        ranks = np.empty(self.num_nodes, dtype=np.int64)
        ranks[np.argsort(-self.counts, kind="stable")] = np.arange(self.num_nodes)
        return ranks

    @cached_property
    def by_rank(self) -> tuple[tuple[Ints, Floats], ...]:
        """The first step of every node, the second of those that have two, ...: targets (by rank) and prices. Nodes in
        the order of their ranks, so that those which have a step are the first."""
        counts = self.counts[self.sources]
        order = np.argsort(self.rank[self.sources])
        layers = []
        for number in range(int(counts.max(initial=0))):
            steps = (self.starts + number)[order[: int((counts > number).sum())]]
            layers.append((self.rank[self.targets[steps]], self.price[steps]))
        return tuple(layers)
