"""The cheapest moves between two layouts, as a shortest path over small tuples.

The search does not see devices or sizes but *units*: runs of sub-axes that come from the same place and go to the same
place. A state says which units shard every atom, and in which of the states I, R, P the others are; an edge is one
collective (or one local step) on any set of units. Where sizes divide evenly prices are proportional to the tensor, so
that the same problem arises again and again in a model and its solution is found in a cache.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import count, product
from math import prod
from operator import add, mul, sub

from shardwise.layouts.conversions import CELLS, COLLECTIVES, Primitive, num_sent
from shardwise.layouts.layout import PARTIAL_KINDS

Arrangement = tuple[tuple[int, ...], ...]  # per position the units that shard it, major first
State = tuple[Arrangement, tuple[str, ...]]  # and per unit its state
Cost = tuple[float, ...]

# What one direction of a move costs: (primitive, units, elements sent by the busiest rank) -> summed component-wise.
UnitPrice = Callable[[Primitive, tuple[int, ...], float], Cost]

CORNERS_ABOVE = 1024


@dataclass(frozen=True, slots=True)
class Space:
    """The states that a search walks through. ``sizes``: devices along every unit. ``dims``: per dim one or two ways to
    divide it into atoms, whose sizes are given; positions number the atoms of all ways of all dims in order, and units
    shard only one way of a dim at a time. ``others``: the states besides S that units may be in. ``allowed``: per
    position the units that may shard it."""

    sizes: tuple[int, ...]
    dims: tuple[tuple[tuple[int, ...], ...], ...]
    others: tuple[str, ...]
    allowed: Arrangement
    differentiable: bool


def sent_then_messages(primitive: Primitive, units: tuple[int, ...], elements: float) -> Cost:
    """Elements sent by the busiest rank, then the number of messages."""
    return (elements, 1.0) if primitive in COLLECTIVES else (0.0, 0.0)


def solve(space: Space, source: State, target: State, price: UnitPrice | None = None) -> tuple[State, ...]:
    """The states on a cheapest path, ends included. Equal prices are settled by the elements held after every step
    (slicing early), then by the number of steps. Empty where no path exists (a partial value of a kind other than sum
    would have to arise)."""
    if price is not None:
        return _Search(_Graph(space, price), source).path_to(target)
    return _search(space, source).path_to(target)


@lru_cache(maxsize=1024)
def _search(space: Space, source: State) -> _Search:
    return _Search(_graph(space), source)


@lru_cache(maxsize=32)
def _graph(space: Space) -> _Graph:
    return _Graph(space, sent_then_messages)


class _Search:
    """Dijkstra's algorithm from one state, which stops at each target asked for and goes on from there."""

    def __init__(self, graph: _Graph, source: State) -> None:
        self.graph = graph
        self.ticket = count()
        self.best: dict[State, Cost] = {source: (0.0,) * (len(graph.nothing))}
        self.parent: dict[State, State] = {}
        self.heap: list[tuple[Cost, int, State]] = [(self.best[source], next(self.ticket), source)]
        self.done: set[State] = set()

    def path_to(self, target: State) -> tuple[State, ...]:
        while target not in self.done:
            if not self.heap:
                return ()
            self._settle()
        path = [target]
        while path[-1] in self.parent:
            path.append(self.parent[path[-1]])
        return tuple(reversed(path))

    def _settle(self) -> None:
        cost, _, state = heapq.heappop(self.heap)
        if state in self.done:
            return
        self.done.add(state)
        best, done = self.best, self.done
        for after, step in self.graph.edges(state):
            if after in done:
                continue
            total = tuple(map(add, cost, step))
            known = best.get(after)
            if known is None or total < known:
                best[after] = total
                self.parent[after] = state
                heapq.heappush(self.heap, (total, next(self.ticket), after))


Edge = tuple[State, str, str, tuple[int, ...]]  # state afterwards, cell of the table, units
KEPT_EDGES = 300_000  # priced edges that a graph remembers


class _Graph:
    def __init__(self, space: Space, unit_price: UnitPrice) -> None:
        self.space, self.unit_price = space, unit_price
        self.is_default = unit_price is sent_then_messages  # which does not ask for the units
        self.sizes = space.sizes
        self.atoms: list[int] = []  # per position: its size
        self.spans: list[tuple[range, ...]] = []  # per dim and way its positions
        self.rival: dict[int, range] = {}  # position -> positions of the other way of its dim
        for ways in space.dims:
            own = []
            for way in ways:
                own.append(range(len(self.atoms), len(self.atoms) + len(way)))
                self.atoms.extend(way)
            self.spans.append(tuple(own))
            for mine, theirs in (own, own[::-1]) if len(own) == 2 else ():
                self.rival.update(dict.fromkeys(mine, theirs))
        # Multiplying by the number of devices keeps all prices whole numbers.
        self.scale = prod(space.sizes)
        self.nothing = (*unit_price("none", (), 0.0), 0.0, 0.0)
        self._numel: dict[Arrangement, int] = {}
        self._placed: dict[tuple[Arrangement, tuple[int, ...]], list[Arrangement]] = {}
        self.is_alike = len(set(self.atoms)) <= 1 and not self.rival
        self._sent: dict[tuple[object, ...], tuple[int, int]] = {}
        self._rows_of: dict[tuple[int, tuple[int, ...]], int] = {}
        self._counted: dict[tuple[object, ...], tuple[Iterable[int], Iterable[int], Iterable[int]]] = {}
        self._edges: dict[State, list[tuple[State, Cost]]] = {}
        self._num_edges = 0

    def edges(self, state: State) -> list[tuple[State, Cost]]:
        """Where one step leads, and its price."""
        found = self._edges.get(state)
        if found is None:
            cheapest: dict[State, Cost] = {}
            for after, source, target, units in self._all_edges(state):
                cost = self.price(state, after, source, target, units)
                if after not in cheapest or cost < cheapest[after]:
                    cheapest[after] = cost
            found = list(cheapest.items())
            if self._num_edges < KEPT_EDGES:
                self._num_edges += len(found)
                self._edges[state] = found
        return found

    # ------------------------------------------------------------------------------------------------------- edges

    def _all_edges(self, state: State) -> Iterator[Edge]:
        arrangement, states = state
        yield from self._leave(arrangement, states)
        yield from self._shuffle(arrangement, states)
        groups: dict[str, list[int]] = {}
        for unit, own in enumerate(states):
            if own != "S":
                groups.setdefault(own, []).append(unit)
        for own, units in groups.items():
            if own in PARTIAL_KINDS and own != "P":
                yield from self._change(arrangement, states, own, "I", _subsets(units))
                continue
            alone: list[tuple[int, ...]] = [(unit,) for unit in units]
            for other in self.space.others:
                if other != own and other in ("I", "R", "P"):
                    chosen = _subsets(units) if communicates(own, other) else alone
                    yield from self._change(arrangement, states, own, other, chosen)
            for together in _subsets(units) if communicates(own, "S") else alone:
                new = _with(states, together, "S")
                for placed in self._placements(arrangement, together):
                    yield (placed, new), own, "S", together

    def _change(
        self, arrangement: Arrangement, states: tuple[str, ...], own: str, other: str, sets: list[tuple[int, ...]]
    ) -> Iterator[Edge]:
        for chosen in sets:
            yield (arrangement, _with(states, chosen, other)), own, other, chosen

    def _leave(self, arrangement: Arrangement, states: tuple[str, ...]) -> Iterator[Edge]:
        """Units that end their atoms leave, from one or several atoms at once."""
        for kept in product(*(range(len(units) + 1) for units in arrangement)):
            dropped = tuple(sorted(unit for units, n in zip(arrangement, kept, strict=True) for unit in units[n:]))
            if not dropped:
                continue
            rest = tuple(units[:n] for units, n in zip(arrangement, kept, strict=True))
            for other in self.space.others:
                if other in ("I", "R", "P"):
                    yield (rest, _with(states, dropped, other)), "S", other, dropped

    def _shuffle(self, arrangement: Arrangement, states: tuple[str, ...]) -> Iterator[Edge]:
        """Any other arrangement of the sharding units."""
        units = tuple(sorted(unit for own in arrangement for unit in own))
        if not units:
            return
        empty = ((),) * len(arrangement)
        for placed in self._placements(empty, units):
            if placed != arrangement:
                yield (placed, states), "S", "S", () if self.is_default else moved_units(arrangement, placed)

    def _placements(self, arrangement: Arrangement, units: tuple[int, ...]) -> list[Arrangement]:
        """All ways to let units shard atoms in addition, as the minor ones."""
        found = self._placed.get((arrangement, units))
        if found is None:
            fixed = tuple(len(own) for own in arrangement)
            found = [arrangement]
            for unit in units:
                found = [
                    (*placed[:p], (*placed[p][:slot], unit, *placed[p][slot:]), *placed[p + 1 :])
                    for placed in found
                    for p in range(len(placed))
                    if unit in self.space.allowed[p]
                    if not any(placed[other] for other in self.rival.get(p, ()))
                    for slot in range(fixed[p], len(placed[p]) + 1)
                ]
            self._placed[arrangement, units] = found
        return found

    # ------------------------------------------------------------------------------------------------------ prices

    def price(self, before: State, after: State, source: str, target: str, units: tuple[int, ...]) -> Cost:
        """Of both directions of an edge, and its tie-breakers."""
        entry = CELLS["P" if source in PARTIAL_KINDS else source, target]
        forward: float
        backward: float
        if entry.forward == "all_to_all":
            forward, backward = self._exchanged(before[0], after[0])
        else:
            n = prod(self.sizes[unit] for unit in units)
            small, large = self.numel(before[0]) * self.scale, self.numel(after[0]) * self.scale
            forward = num_sent(entry.forward, n, small, large)
            backward = num_sent(entry.backward, n, large, small)
        cost = self.unit_price(entry.forward, units, forward)
        if self.space.differentiable:
            cost = tuple(map(add, cost, self.unit_price(entry.backward, units, backward)))
        return (*cost, self.numel(after[0]), 1)

    def numel(self, arrangement: Arrangement) -> int:
        """Elements on the device that holds most."""
        if arrangement not in self._numel:
            result = 1
            for spans in self.spans:
                used = next((span for span in spans if any(arrangement[p] for p in span)), spans[0])
                for p in used:
                    result *= self._largest(p, arrangement[p])
            self._numel[arrangement] = result
        return self._numel[arrangement]

    def _exchanged(self, before: Arrangement, after: Arrangement) -> tuple[int, int]:
        """Elements that the busiest rank sends from one arrangement to another and back, scaled."""
        # Where all atoms are alike, only what happens to them counts and not to which.
        key = tuple(sorted(zip(before, after, strict=True))) if self.is_alike else (before, after)
        found = self._sent.get(key)
        if found is None:
            forward, backward = self._most_sent(before, after)
            found = self._sent[key] = forward * self.scale, backward * self.scale
        return found

    def _most_sent(self, before: Arrangement, after: Arrangement) -> tuple[int, int]:
        rest, changed = 1, []
        for spans in self.spans:
            old = new = spans[0]
            if len(spans) > 1:
                first, second = (next((s for s in spans if any(side[p] for p in s)), None) for side in (before, after))
                old, new = first or second or old, second or first or old
            if old is not new:
                changed.append((old, new))
                continue
            for p in old:
                if before[p] == after[p]:
                    rest *= self._largest(p, before[p])
                else:
                    changed.append((range(p, p + 1), range(p, p + 1)))
        units = tuple(range(len(self.sizes)))
        if self.scale > CORNERS_ABOVE:
            sides = [(before, old) for old, _ in changed] + [(after, new) for _, new in changed]
            units = tuple(sorted({unit for side, span in sides for p in span for unit in side[p]}))
        (held, wanted, both), *more = (self._numbers_of_rows(units, before, old, after, new) for old, new in changed)
        for one, other, common in more:
            held, wanted, both = map(mul, held, one), map(mul, wanted, other), map(mul, both, common)
        kept = tuple(both)
        return max(map(sub, held, kept)) * rest, max(map(sub, wanted, kept)) * rest

    def _largest(self, p: int, units: tuple[int, ...]) -> int:
        """Rows of an atom on the device that holds most."""
        found = self._rows_of.get((p, units))
        if found is None:
            found = self._rows_of[p, units] = -(-self.atoms[p] // prod(self.sizes[unit] for unit in units))
        return found

    def _numbers_of_rows(
        self, units: tuple[int, ...], before: Arrangement, old: range, after: Arrangement, new: range
    ) -> tuple[Iterable[int], Iterable[int], Iterable[int]]:
        """How many rows of a dim, divided into the atoms ``old`` and then ``new``, every device along ``units`` holds
        before, after and both times."""
        key = units, old.start, before[old.start : old.stop], new.start, after[new.start : new.stop]
        found = self._counted.get(key)
        if found is None:
            sides = (tuple((self.atoms[p], side[p]) for p in span) for side, span in ((before, old), (after, new)))
            found = self._counted[key] = _numbers_of_rows(tuple((unit, self.sizes[unit]) for unit in units), *sides)
        return found


Sharded = tuple[tuple[int, tuple[int, ...]], ...]  # a dim or a part of it: the size of every atom, and what shards it


@lru_cache(maxsize=5000)
def _numbers_of_rows(
    grid: tuple[tuple[int, int], ...], before: Sharded, after: Sharded
) -> tuple[Iterable[int], Iterable[int], Iterable[int]]:
    """How many rows every device of the grid (units, sizes) holds before, after and both times."""
    ranges: list[Sequence[int]] = [range(size) for _, size in grid]
    if prod(map(len, ranges)) > CORNERS_ABOVE:
        ranges = [sorted({0, 1, size - 1}) for _, size in grid]
    sizes, found = dict(grid), []
    for values in product(*ranges):
        coordinates = dict(zip(sizes, values, strict=True))
        own, new = (_rows(side, sizes, coordinates) for side in (before, after))
        if isinstance(own, range) and isinstance(new, range):
            common = max(0, min(own.stop, new.stop) - max(own.start, new.start))
        else:
            common = len(set(own) & set(new))
        found.append((len(own), len(new), common))
    first, second, both = zip(*found, strict=True)
    return first, second, both


def _rows(sharded: Sharded, sizes: dict[int, int], coordinates: dict[int, int]) -> range | list[int]:
    """The rows of a dim that a device holds."""
    found: range | list[int] = range(1)
    for size, units in sharded:
        n, index = 1, 0
        for unit in units:
            n *= sizes[unit]
            index = index * sizes[unit] + coordinates[unit]
        own = range(index * size // n, (index + 1) * size // n)
        found = own if len(sharded) == 1 else [row * size + i for row in found for i in own]
    return found


def moved_units(before: Arrangement, after: Arrangement) -> tuple[int, ...]:
    """The units along which devices exchange anything: all behind what both arrangements of an atom begin with."""
    moved: set[int] = set()
    for own, new in zip(before, after, strict=True):
        same = 0
        while same < min(len(own), len(new)) and own[same] == new[same]:
            same += 1
        moved.update(own[same:], new[same:])
    return tuple(sorted(moved))


def communicates(source: str, target: str) -> bool:
    """Whether a move of this cell sends anything, in forward or in backward."""
    entry = CELLS["P" if source in PARTIAL_KINDS else source, target]
    return entry.forward in COLLECTIVES or entry.backward in COLLECTIVES


def _subsets(units: list[int]) -> list[tuple[int, ...]]:
    found: list[tuple[int, ...]] = [()]
    for unit in units:
        found += [(*chosen, unit) for chosen in found]
    return found[1:]


def _with(states: tuple[str, ...], units: tuple[int, ...], state: str) -> tuple[str, ...]:
    changed = list(states)
    for unit in units:
        changed[unit] = state
    return tuple(changed)
