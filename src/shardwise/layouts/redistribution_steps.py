"""The steps that a redistribution may take, over small tuples: where each leads, which collective it is, what it sends.

No devices and no tensors but *units*: runs of sub-axes that come from the same place and go to the same place. A state
says which units shard every atom, and in which of the states I, R, P the others are; a step is one collective (or one
local operation) on any set of units. Where sizes divide evenly everything sent is proportional to the tensor, so that
the same problem arises again and again in a model and ``RedistributionSteps`` answers from what it has worked out
before.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from math import prod
from operator import mul, sub
from typing import NamedTuple

from shardwise.layouts.conversions import CELLS, COLLECTIVES, Primitive, num_sent
from shardwise.layouts.layout import PARTIAL_KINDS

Arrangement = tuple[tuple[int, ...], ...]  # per position the units that shard it, major first
State = tuple[Arrangement, tuple[str, ...]]  # and per unit its state

EXACT_UP_TO = 3  # units; with more, steps are those of ``RedistributionSteps.towards`` instead of all
COUNTED_UP_TO = 100_000  # rows times devices; beyond, what an uneven exchange keeps is bounded instead of counted


@dataclass(frozen=True, slots=True)
class Space:
    """The states that a search walks through. ``sizes``: devices along every unit. ``dims``: per dim one or two
    divisions into atoms, by their sizes; positions number the atoms of all divisions of all dims in order, and units
    shard only one division of a dim at a time. ``others``: the states besides S that units may be in. ``allowed``: per
    position the units that may shard it."""

    sizes: tuple[int, ...]
    dims: tuple[tuple[tuple[int, ...], ...], ...]
    others: tuple[str, ...]
    allowed: Arrangement
    differentiable: bool


class RedistributionStep(NamedTuple):
    """One collective or local operation. ``sent_forward``, ``sent_backward``: elements that the busiest rank sends,
    times the devices along all units (so that they are whole numbers). ``largest_local``: elements of the largest local
    tensor afterwards. ``units`` is empty where sharding units change places (``moved_units`` tells)."""

    after: State
    forward: Primitive
    backward: Primitive
    units: tuple[int, ...]
    sent_forward: float
    sent_backward: float
    largest_local: int

    @property
    def num_messages(self) -> int:
        return (self.forward in COLLECTIVES) + (self.backward in COLLECTIVES)


class RedistributionSteps:
    """All steps within a space."""

    def __init__(self, space: Space) -> None:
        self.space = space
        self.sizes = space.sizes
        self.atoms: list[int] = []  # per position: its size
        self.spans: list[tuple[range, ...]] = []  # per dim and division its positions
        self.rival: dict[int, range] = {}  # position -> positions of the other division of its dim
        for divisions in space.dims:
            spans_of_dim = []
            for division in divisions:
                spans_of_dim.append(range(len(self.atoms), len(self.atoms) + len(division)))
                self.atoms.extend(division)
            self.spans.append(tuple(spans_of_dim))
            for mine, theirs in (spans_of_dim, spans_of_dim[::-1]) if len(spans_of_dim) == 2 else ():
                self.rival.update(dict.fromkeys(mine, theirs))
        self.scale = prod(space.sizes)  # devices
        self.is_even = not self.rival and all(size % self.scale == 0 for size in self.atoms)
        self._numel: dict[Arrangement, int] = {}
        self._placed: dict[tuple[Arrangement, tuple[int, ...]], list[Arrangement]] = {}
        self._sent: dict[tuple[Arrangement, Arrangement], tuple[int, int]] = {}
        self._steps_of: dict[State, list[RedistributionStep]] = {}
        self._exchanges_of: dict[Arrangement, list[tuple[Arrangement, int, int]]] = {}

    def everywhere(self, state: State, exchanged: bool) -> list[RedistributionStep]:
        """Return all steps from a state. ``exchanged``: it was reached by an exchange, which another one need not
        follow (one exchange does what both do, and no rank sends more)."""
        return self._others(state) if exchanged else [*self._exchanges(state), *self._others(state)]

    def step(self, before: State, after: State, source: str, target: str, units: tuple[int, ...]) -> RedistributionStep:
        """Return the step from ``before`` to ``after``, in which ``units`` go from one state to another."""
        entry = CELLS["P" if source in PARTIAL_KINDS else source, target]
        largest = self.numel(after[0])
        if entry.forward == "all_to_all":
            return RedistributionStep(
                after, entry.forward, entry.backward, (), *self._exchanged(before[0], after[0]), largest
            )
        n = prod(self.sizes[unit] for unit in units)
        small, large = self.numel(before[0]) * self.scale, largest * self.scale
        forward, backward = num_sent(entry.forward, n, small, large), num_sent(entry.backward, n, large, small)
        return RedistributionStep(after, entry.forward, entry.backward, units, forward, backward, largest)

    # -------------------------------------------------------------------------------------------------- all of them

    def _exchanges(self, state: State) -> list[RedistributionStep]:
        exchanges = self._exchanges_of.get(state[0])
        if exchanges is None:
            sharding = tuple(sorted(unit for units in state[0] for unit in units))
            exchanges = self._exchanges_of[state[0]] = [
                (placed, *self._exchanged(state[0], placed))
                for placed in self._placements(((),) * len(state[0]), sharding)
                if placed != state[0]
            ]
        entry, states = CELLS["S", "S"], state[1]
        return [
            RedistributionStep(
                (placed, states), entry.forward, entry.backward, (), forward, backward, self.numel(placed)
            )
            for placed, forward, backward in exchanges
        ]

    def _others(self, state: State) -> list[RedistributionStep]:
        steps = self._steps_of.get(state)
        if steps is None:
            steps = self._steps_of[state] = [self.step(state, *rest) for rest in self._all_others(state)]
        return steps

    def _all_others(self, state: State) -> Iterator[tuple[State, str, str, tuple[int, ...]]]:
        arrangement, states = state
        yield from self._leave(arrangement, states)
        groups: dict[str, list[int]] = {}
        for unit, letter in enumerate(states):
            if letter != "S":
                groups.setdefault(letter, []).append(unit)
        for letter, units in groups.items():
            if letter in PARTIAL_KINDS and letter != "P":
                for chosen in _subsets(units):
                    yield (arrangement, with_state(states, chosen, "I")), letter, "I", chosen
                continue
            alone: list[tuple[int, ...]] = [(unit,) for unit in units]
            for other in self.space.others:
                if other != letter and other in ("I", "R", "P"):
                    for chosen in _subsets(units) if communicates(letter, other) else alone:
                        yield (arrangement, with_state(states, chosen, other)), letter, other, chosen
            for together in _subsets(units) if communicates(letter, "S") else alone:
                new = with_state(states, together, "S")
                for placed in self._placements(arrangement, together):
                    yield (placed, new), letter, "S", together

    def _leave(
        self, arrangement: Arrangement, states: tuple[str, ...]
    ) -> Iterator[tuple[State, str, str, tuple[int, ...]]]:
        """Units that end their atoms leave, from one or several atoms at once."""
        for kept in product(*(range(len(units) + 1) for units in arrangement)):
            dropped = tuple(sorted(unit for units, n in zip(arrangement, kept, strict=True) for unit in units[n:]))
            if not dropped:
                continue
            rest = tuple(units[:n] for units, n in zip(arrangement, kept, strict=True))
            for other in self.space.others:
                if other in ("I", "R", "P"):
                    yield (rest, with_state(states, dropped, other)), "S", other, dropped

    def _placements(self, arrangement: Arrangement, units: tuple[int, ...]) -> list[Arrangement]:
        """Return all ways to let units shard atoms in addition, as the minor ones."""
        placements = self._placed.get((arrangement, units))
        if placements is None:
            fixed = tuple(len(sharding) for sharding in arrangement)
            placements = [arrangement]
            for unit in units:
                placements = [
                    (*placed[:p], (*placed[p][:slot], unit, *placed[p][slot:]), *placed[p + 1 :])
                    for placed in placements
                    for p in range(len(placed))
                    if unit in self.space.allowed[p] and self.is_free(placed, p)
                    for slot in range(fixed[p], len(placed[p]) + 1)
                ]
            self._placed[arrangement, units] = placements
        return placements

    def is_free(self, arrangement: Sequence[Sequence[int]], p: int) -> bool:
        """Return whether no unit shards the other division of the dim of position ``p``."""
        return not any(arrangement[other] for other in self.rival.get(p, ()))

    # ------------------------------------------------------------------------------------------------ what they send

    def numel(self, arrangement: Arrangement) -> int:
        """Elements on the device that holds most."""
        cached = self._numel.get(arrangement)
        if cached is None:
            used = (_used(spans, arrangement) or spans[0] for spans in self.spans)
            cached = self._numel[arrangement] = prod(self._largest(p, arrangement[p]) for span in used for p in span)
        return cached

    def _largest(self, p: int, units: tuple[int, ...]) -> int:
        return -(-self.atoms[p] // prod(self.sizes[unit] for unit in units))

    def _exchanged(self, before: Arrangement, after: Arrangement) -> tuple[int, int]:
        """Elements that the busiest rank sends from one arrangement to another and back, scaled."""
        sent = self._sent.get((before, after))
        if sent is None:
            sent = None if self.is_even else self._counted(before, after)
            if sent is None:
                kept = self._num_kept(before, after)
                sent = self.numel(before) - kept, self.numel(after) - kept
            sent = self._sent[before, after] = sent[0] * self.scale, sent[1] * self.scale
        return sent

    def _num_kept(self, before: Arrangement, after: Arrangement) -> int:
        """Elements that a device has both before and after, on the device where these are fewest. Exact where all
        divides evenly, else a lower bound. An atom whose units differ otherwise than in number leaves some device
        nothing: one that is first along the units before and last along those after."""
        for old, new in zip(before, after, strict=True):
            if old != new and old[: len(new)] != new[: len(old)]:
                return 0
        kept = 1
        for spans in self.spans:
            first, second = _used(spans, before), _used(spans, after)
            if first and second and first != second:
                return 0
            for p in first or second or spans[0]:
                kept *= self.atoms[p] // prod(self.sizes[unit] for unit in max(before[p], after[p], key=len))
        return kept

    def _counted(self, before: Arrangement, after: Arrangement) -> tuple[int, int] | None:
        """Return the same, not scaled, device by device. None where that takes too long."""
        rest, changed = 1, []
        for spans in self.spans:
            old = new = spans[0]
            if len(spans) > 1:
                first, second = _used(spans, before), _used(spans, after)
                old, new = first or second or old, second or first or old
            if old is not new:
                changed.append((old, new))
                continue
            for p in old:
                if before[p] == after[p]:
                    rest *= self._largest(p, before[p])
                else:
                    changed.append((range(p, p + 1), range(p, p + 1)))
        if max(prod(self.atoms[p] for p in old) for old, _ in changed) * self.scale > COUNTED_UP_TO:
            return None
        grid = tuple(enumerate(self.sizes))
        (rows_old, rows_new, both), *more = (
            _numbers_of_rows(grid, *(tuple((self.atoms[p], side[p]) for p in span) for side, span in sides))
            for sides in (((before, old), (after, new)) for old, new in changed)
        )
        for have, want, common in more:
            rows_old, rows_new, both = map(mul, rows_old, have), map(mul, rows_new, want), map(mul, both, common)
        kept = tuple(both)
        return max(map(sub, rows_old, kept)) * rest, max(map(sub, rows_new, kept)) * rest


Sharded = tuple[tuple[int, tuple[int, ...]], ...]  # a dim or a part of it: the size of every atom, and what shards it


@lru_cache(maxsize=5000)
def _numbers_of_rows(
    grid: tuple[tuple[int, int], ...], before: Sharded, after: Sharded
) -> tuple[Iterable[int], Iterable[int], Iterable[int]]:
    """Return how many rows each device of the grid (units, sizes) holds before, after and both times."""
    sizes, counts = dict(grid), []
    for values in product(*(range(size) for _, size in grid)):
        coordinates = dict(zip(sizes, values, strict=True))
        old, new = (_rows(side, sizes, coordinates) for side in (before, after))
        if isinstance(old, range) and isinstance(new, range):
            common = max(0, min(old.stop, new.stop) - max(old.start, new.start))
        else:
            common = len(set(old) & set(new))
        counts.append((len(old), len(new), common))
    first, second, both = zip(*counts, strict=True)
    return first, second, both


def _rows(sharded: Sharded, sizes: dict[int, int], coordinates: dict[int, int]) -> range | list[int]:
    rows: range | list[int] = range(1)
    for size, units in sharded:
        n, index = 1, 0
        for unit in units:
            n *= sizes[unit]
            index = index * sizes[unit] + coordinates[unit]
        piece = range(index * size // n, (index + 1) * size // n)
        rows = piece if len(sharded) == 1 else [row * size + i for row in rows for i in piece]
    return rows


def _used(spans: tuple[range, ...], arrangement: Arrangement) -> range | None:
    """Return the division of a dim that units shard, if any do."""
    return next((span for span in spans if any(arrangement[p] for p in span)), None)


def moved_units(before: Arrangement, after: Arrangement) -> tuple[int, ...]:
    """The units along which devices exchange anything: all behind what both arrangements of an atom begin with."""
    moved: set[int] = set()
    for old, new in zip(before, after, strict=True):
        same = 0
        while same < min(len(old), len(new)) and old[same] == new[same]:
            same += 1
        moved.update(old[same:], new[same:])
    return tuple(sorted(moved))


@lru_cache(maxsize=64)
def communicates(source: str, target: str) -> bool:
    """Return whether a move of this cell sends anything, in forward or in backward."""
    entry = CELLS["P" if source in PARTIAL_KINDS else source, target]
    return entry.forward in COLLECTIVES or entry.backward in COLLECTIVES


def _subsets(units: Sequence[int]) -> list[tuple[int, ...]]:
    subsets: list[tuple[int, ...]] = [()]
    for unit in units:
        subsets += [(*chosen, unit) for chosen in subsets]
    return subsets[1:]


def with_state(states: tuple[str, ...], units: Iterable[int], state: str) -> tuple[str, ...]:
    """Return the states with some units in another one."""
    changed = list(states)
    for unit in units:
        changed[unit] = state
    return tuple(changed)
