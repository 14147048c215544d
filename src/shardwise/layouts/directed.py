"""Few steps instead of all: those that bring a state nearer to a target, for searches over many units.

Units that go from the same state to the same state go together, or all that are in one state; those that will shard in
the end begin to at their places; and the units that shard change places all at once. So a state has a few dozen steps
at most, and not factorially many. The direct route makes one choice after the other:

1. Units that shard in the end begin to. So do those that lose nothing by sharding in between: from R to anything, from
   P to R. Slices come before reduce-scatters. From here to step 4 the tensor is smallest.
2. Other units change between I, R and P: all-reduces and local steps.
3. One exchange, if the units that stay are not in their order, or those that leave do not stand behind them.
4. Units that do not shard in the end leave: to R first, then to I, then to P (zero-padding sends nothing).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from shardwise.layouts.layout import PARTIAL_KINDS
from shardwise.layouts.redistribution_steps import (
    Arrangement,
    RedistributionStep,
    RedistributionSteps,
    State,
    with_state,
)

LEAVING = "RIP"  # the order in which units leave, by where they go


class Directed:
    """The steps within a space that lead towards ``target``."""

    def __init__(self, steps: RedistributionSteps, target: State) -> None:
        self.all, self.target = steps, target
        self.places, self.letters = target
        self.largest = sorted(range(len(steps.atoms)), key=lambda p: -steps.atoms[p])

    def steps(self, state: State) -> list[RedistributionStep]:
        """Return a few steps from a state: at least those of the direct route, wherever one is on it."""
        arrangement, states = state
        return [
            *self._begin(arrangement, states),
            *(step for letter in LEAVING for step in self._leave(arrangement, states, letter)),
            *self._exchange(arrangement, states),
        ]

    def route(self, state: State) -> tuple[RedistributionStep, ...]:
        """Return the direct route from a state to the target."""
        path: list[RedistributionStep] = []
        while state != self.target:
            path.append(self._next(state))
            state = path[-1].after
        return tuple(path)

    def _next(self, state: State) -> RedistributionStep:
        arrangement, states = state
        groups: dict[tuple[str, str], tuple[int, ...]] = {}
        for unit, (current, letter) in enumerate(zip(states, self.letters, strict=True)):
            if current not in ("S", letter):
                groups[current, letter] = (*groups.get((current, letter), ()), unit)
        for current, letter in groups:
            if current in PARTIAL_KINDS and current != "P":
                return self._change(arrangement, states, current, "I", groups[current, letter])
        for current, letters in (("R", "SIP"), ("I", "S"), ("P", "SR")) if self.largest else ():
            units = tuple(sorted(unit for letter in letters for unit in groups.get((current, letter), ())))
            if units:
                return self._enter(arrangement, states, current, units, self.largest[0])
        for (current, letter), units in groups.items():
            return self._change(arrangement, states, current, letter, units)
        leaving = {*self.letters} - {"S"}
        if tuple(self._without_last(sharding, leaving) for sharding in arrangement) != self.places:
            return next(self._exchange(arrangement, states))
        return next(step for letter in LEAVING for step in self._leave(arrangement, states, letter))

    # ------------------------------------------------------------------------------------------------- kinds of steps

    def _begin(self, arrangement: Arrangement, states: tuple[str, ...]) -> Iterator[RedistributionStep]:
        """Units that do not shard begin to, or change to another state."""
        groups: dict[str, dict[str, tuple[int, ...]]] = {}  # own state -> final state -> units
        for unit, (current, letter) in enumerate(zip(states, self.letters, strict=True)):
            parts = groups.setdefault(current, {})
            parts[letter] = (*parts.get(letter, ()), unit)
        groups.pop("S", None)
        for current, parts in groups.items():
            units = tuple(sorted(unit for part in parts.values() for unit in part))
            if current in PARTIAL_KINDS and current != "P":
                yield self._change(arrangement, states, current, "I", units)
                continue
            for letter, part in parts.items():
                if letter == "S":
                    yield self._enter(arrangement, states, current, part)
                    fitting = tuple(unit for unit in part if self._fits(arrangement, unit, part))
                    if fitting and fitting != part:
                        yield self._enter(arrangement, states, current, fitting)
                elif letter != current:
                    yield self._change(arrangement, states, current, letter, part)
            for group in dict.fromkeys((*parts.values(), units)):
                if any(self.letters[unit] != "S" for unit in group):
                    for p in self.largest:
                        if self.all.is_free(arrangement, p):
                            yield self._enter(arrangement, states, current, group, p)

    def _change(
        self, arrangement: Arrangement, states: tuple[str, ...], current: str, letter: str, units: tuple[int, ...]
    ) -> RedistributionStep:
        return self.all.step(
            (arrangement, states), (arrangement, with_state(states, units, letter)), current, letter, units
        )

    def _enter(
        self, arrangement: Arrangement, states: tuple[str, ...], current: str, units: tuple[int, ...], where: int = 0
    ) -> RedistributionStep:
        """Units begin to shard where they will in the end; those that will not, at position ``where``."""
        placed = [list(old) for old in arrangement]
        for p, new in enumerate(self.places):
            for unit in new:
                if unit in units:
                    placed[self._room(placed, p)].append(unit)
        for unit in units:
            if self.letters[unit] != "S":
                placed[self._room(placed, where)].append(unit)
        after = tuple(map(tuple, placed)), with_state(states, units, "S")
        return self.all.step((arrangement, states), after, current, "S", units)

    def _leave(self, arrangement: Arrangement, states: tuple[str, ...], letter: str) -> Iterator[RedistributionStep]:
        """Yield the step in which all units that end their atoms go to one state."""
        rest = tuple(self._without_last(sharding, (letter,)) for sharding in arrangement)
        units = tuple(
            sorted(u for sharding, kept in zip(arrangement, rest, strict=True) for u in sharding[len(kept) :])
        )
        if units:
            yield self.all.step((arrangement, states), (rest, with_state(states, units, letter)), "S", letter, units)

    def _exchange(self, arrangement: Arrangement, states: tuple[str, ...]) -> Iterator[RedistributionStep]:
        """Units that stay go to their places, those that leave behind them; or the latter only."""
        placed = [[unit for unit in new if states[unit] == "S"] for new in self.places]
        only = [[unit for unit in sharding if self.letters[unit] == "S"] for sharding in arrangement]
        for letter in reversed(LEAVING):
            for p, sharding in enumerate(arrangement):
                leaving = [unit for unit in sharding if self.letters[unit] == letter]
                only[p] += leaving
                if leaving:
                    placed[self._room(placed, p)] += leaving
        for after in dict.fromkeys(tuple(map(tuple, sides)) for sides in (placed, only)):
            if after != arrangement:
                yield self.all.step((arrangement, states), (after, states), "S", "S", ())

    # -------------------------------------------------------------------------------------------------------- places

    def _room(self, placed: list[list[int]], p: int) -> int:
        """Position ``p``, or where units shard the other division of its dim, the largest atom of that."""
        return p if self.all.is_free(placed, p) else max(self.all.rival[p], key=self.all.atoms.__getitem__)

    def _fits(self, arrangement: Arrangement, unit: int, units: tuple[int, ...]) -> bool:
        """Return whether a unit, beginning to shard together with others, is at once in its final place."""
        p = next(p for p, sharding in enumerate(self.places) if unit in sharding)
        before = self.places[p][: self.places[p].index(unit)]
        return self.all.is_free(arrangement, p) and before == (
            *arrangement[p],
            *(other for other in before if other in units),
        )

    def _without_last(self, sharding: tuple[int, ...], letters: Collection[str]) -> tuple[int, ...]:
        """Return what shards an atom without the units at its end that go to one of these states."""
        kept = len(sharding)
        while kept and self.letters[sharding[kept - 1]] in letters:
            kept -= 1
        return sharding[:kept]
