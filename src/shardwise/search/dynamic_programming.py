"""The exact search: the best strategies, layouts of parameters and shared layouts, by variable elimination.

A step takes ``exposed + max(compute, traffic)`` seconds. Collectives of values and operators wait for each other;
gathers of parameters and reductions of gradients overlap with operators, as far as there are any. A maximum does not
add up over choices, so it is replaced by ``(1 - m) compute + m traffic``. For every m between 0 and 1 the least sum is
a lower bound of the least step (Lagrange). If the two choices around a bound differ, mixtures of both (one up to some
operator, the other from there) come close to it. A limit on memory is a second multiplier, in seconds per byte. The gap
is the difference between the best choice found and the best bound.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from math import inf

import numpy as np

from shardwise.layouts.routes import Floats
from shardwise.progress import has_stopped
from shardwise.search.constants import (
    BOUND_TOLERANCE,
    BYTE_TIE_BREAK,
    EXACT_GAP,
    HIDDEN_WEIGHT,
    MAX_BRANCHES,
    MAX_BRANCHING_COMBINATIONS,
    MAX_SOLVES,
)
from shardwise.search.cost_graph import BYTES, COMPUTE, EXPOSED, TRAFFIC, CostGraph, CostWeights
from shardwise.search.elimination import Scope, fix_variables
from shardwise.search.solving import minimise


def step_seconds(components: Floats) -> float:
    """Return the seconds of a step from its components."""
    return float(components[EXPOSED] + max(components[COMPUTE], components[TRAFFIC]))


@dataclass
class SearchOutcome:
    """The best assignment found. ``bound``: no assignment (that fits) is faster (0: not known); ``solves``: problems
    solved for it; ``candidates``: the other assignments
    seen, fastest first. ``stopped``: at a cutoff below ``bound``, so that faster assignments may be left."""

    assignment: list[int]
    components: Floats
    bound: float
    solves: int
    candidates: list[list[int]] = field(default_factory=list)
    stopped: bool = False

    @property
    def seconds(self) -> float:
        return step_seconds(self.components)


class DoesNotFit(Exception):
    """Raised if every assignment needs more memory than allowed; ``assignment`` needs the least."""

    def __init__(self, assignment: list[int], num_bytes: float) -> None:
        super().__init__(f"no plan needs less than {num_bytes:.0f} bytes")
        self.assignment, self.num_bytes = assignment, num_bytes


def search(cost: CostGraph, memory_bytes: float | None = None, cutoff: float = inf) -> SearchOutcome:
    """Return the fastest assignment whose bytes are within ``memory_bytes``. ``cutoff``: seconds of a step that is
    known elsewhere (on another mesh); as soon as the bound is above it, the best assignment so far is returned
    (``stopped``). Raises DoesNotFit."""
    run = _ExactSearch(cost, memory_bytes, cutoff)
    if memory_bytes == 0:  # the least memory is asked for: nothing fits
        run.least_memory()
    bound = run.overlapped(BYTE_TIE_BREAK)
    if memory_bytes is not None and not run.fits(run.best_of_last):
        run.least_memory()
        bound = max(bound, run.within_memory() if bound <= cutoff else 0.0)
    if bound <= cutoff and not has_stopped():
        run.improve(bound)
    best = run.best
    assert best is not None, "a search that fits nothing raises"
    others = sorted((item for item in run.seen.values() if run.fits(item)), key=lambda item: item.seconds)
    return SearchOutcome(
        list(best.assignment),
        best.components,
        max(0.0, min(bound, best.seconds)),
        run.solves,
        [list(item.assignment) for item in others if item.assignment != best.assignment],
        bound > cutoff,
    )


def least_step(cost: CostGraph, cutoff: float = inf) -> float:
    """Return a bound of the step of all assignments, whatever their memory: that of ``search``, without looking for
    better assignments. ``cutoff``: a bound above it need not be tight."""
    run = _ExactSearch(cost, None, cutoff)
    bound = run.overlapped(BYTE_TIE_BREAK)
    assert run.best is not None, "without a limit every assignment fits"
    return max(0.0, min(bound, run.best.seconds))


@dataclass(frozen=True, eq=False)
class _VisitedAssignments:
    assignment: tuple[int, ...]
    components: Floats

    @property
    def seconds(self) -> float:
        return step_seconds(self.components)

    def at(self, weights: CostWeights) -> float:
        return float(self.components @ np.array(weights.vector))


class _ExactSearch:
    """One search: the assignments seen so far, and the best that fits. ``slack``: how much lower than the last solve's
    value its proven bound is; 0 where it is exact."""

    def __init__(self, cost: CostGraph, memory_bytes: float | None, cutoff: float) -> None:
        self.cost, self.memory_bytes, self.cutoff = cost, memory_bytes, cutoff
        self.seen: dict[tuple[int, ...], _VisitedAssignments] = {}
        self.best: _VisitedAssignments | None = None
        self.solves = self.largest_joint = 0
        self.slack, self.multiplier = 0.0, 0.5

    def fits(self, item: _VisitedAssignments) -> bool:
        return self.memory_bytes is None or item.components[BYTES] <= self.memory_bytes

    def add(self, assignment: list[int], components: Floats | None = None) -> _VisitedAssignments:
        key = tuple(assignment)
        item = self.seen.get(key)
        if item is None:
            item = _VisitedAssignments(key, self.cost.components(assignment) if components is None else components)
            self.seen[key] = item
        if self.fits(item) and (self.best is None or _order(item) < _order(self.best)):
            self.best = item
        return item

    def solved(self, weights: CostWeights) -> _VisitedAssignments:
        if weights not in self.cost.solutions:
            self.cost.solutions[weights] = minimise(self.cost.weighted(weights))
        solution = self.cost.solutions[weights]
        self.solves += 1
        self.largest_joint = max(self.largest_joint, solution.largest_joint)
        self.slack = solution.value - solution.lower
        return self.add(solution.assignment)

    def overlapped(self, per_byte: float) -> float:

        def weights(multiplier: float) -> CostWeights:
            return CostWeights(1.0, 1.0 - multiplier, multiplier, per_byte)

        # If all traffic hides behind compute, or all compute behind traffic, one solve settles it.
        # Hidden seconds get a small weight, so that there are no more of them than necessary.
        low = self.solved(weights(HIDDEN_WEIGHT))
        self.best_of_last, self.bracket = low, (low, low)
        bound = self._without_ties(low.at(weights(HIDDEN_WEIGHT)) - self.slack, low, per_byte)
        if low.components[TRAFFIC] <= low.components[COMPUTE] or self._is_beaten(bound, per_byte):
            return bound
        high = self.solved(weights(1.0 - HIDDEN_WEIGHT))
        self.bracket = (low, high)
        bound = max(bound, self._without_ties(high.at(weights(1.0 - HIDDEN_WEIGHT)) - self.slack, high, per_byte))
        if high.components[COMPUTE] <= high.components[TRAFFIC]:
            self.best_of_last = high
            return bound
        for _ in range(MAX_SOLVES):
            slopes = [item.components[TRAFFIC] - item.components[COMPUTE] for item in (low, high)]
            starts = [item.at(weights(0.0)) for item in (low, high)]
            multiplier = float((starts[0] - starts[1]) / (slopes[1] - slopes[0]))
            self.multiplier, meet = multiplier, low.at(weights(multiplier))
            middle = self.solved(weights(multiplier))
            value = middle.at(weights(multiplier))
            bound = max(bound, value - self.slack)
            if value >= meet * (1 - BOUND_TOLERANCE) or self._is_beaten(bound, per_byte):
                break
            if middle.components[TRAFFIC] > middle.components[COMPUTE]:
                low = middle
            else:
                high = middle
        self.bracket = (low, high)
        self.best_of_last = min((low, high), key=lambda item: item.seconds + per_byte * item.components[BYTES])
        return (
            bound
            if per_byte > BYTE_TIE_BREAK
            else bound - BYTE_TIE_BREAK * max(low.components[BYTES], high.components[BYTES])
        )

    def _is_beaten(self, bound: float, per_byte: float) -> bool:
        """Return whether a better step is known elsewhere, by more than the weight of the bytes that breaks ties (bytes
        that have a price are in the bound, too)."""
        return per_byte == BYTE_TIE_BREAK and bound > self.cutoff * (1 + EXACT_GAP)

    @staticmethod
    def _without_ties(value: float, item: _VisitedAssignments, per_byte: float) -> float:
        """Return a bound without the weight of the bytes that breaks ties."""
        return value if per_byte > BYTE_TIE_BREAK else value - float(item.components[BYTES]) * BYTE_TIE_BREAK

    def least_memory(self) -> None:
        """Solve for the least memory. Raises DoesNotFit."""
        small = self.solved(CostWeights(0.0, 0.0, 0.0, 1.0))
        if not self.fits(small):
            raise DoesNotFit(list(small.assignment), float(small.components[BYTES]))

    def within_memory(self) -> float:
        """Search under the limit, which something fits, and return a bound."""
        assert self.memory_bytes is not None, "no limit"
        large = self.best_of_last
        # The fastest of those with the least memory: seconds weigh less than the least difference of bytes.
        small = self.solved(CostWeights(1e-3, 1e-3, 1e-3, 1.0))
        bound = 0.0
        for _ in range(MAX_SOLVES):
            saved = float(large.components[BYTES] - small.components[BYTES])
            if saved <= 0:
                break
            per_byte = max((small.seconds - large.seconds) / saved, BYTE_TIE_BREAK)
            meet = large.seconds + per_byte * float(large.components[BYTES])
            value = self.overlapped(per_byte)
            bound = max(bound, value - per_byte * self.memory_bytes)
            middle = self.best_of_last
            reached = middle.seconds + per_byte * float(middle.components[BYTES])
            if reached >= meet * (1 - 1e-9) or middle in (large, small):
                self.mix(*self.bracket)
                break
            if self.fits(middle):
                small = middle
            else:
                large = middle
            self.mix(*self.bracket)
        self.mix(large, small)
        self.mix(small, large)
        return bound

    def improve(self, bound: float) -> None:
        """Close the gap by mixtures of the two assignments around the bound, then with the variables that decide most
        traffic held as either has them, then by changing single variables."""
        if self.best is None or self.best.seconds <= bound * (1 + EXACT_GAP):
            return
        low, high = self.bracket
        self.mix(low, high)
        self.mix(high, low)
        if self.best.seconds > bound * (1 + BOUND_TOLERANCE) and self.largest_joint <= MAX_BRANCHING_COMBINATIONS:
            deciding = self.deciding(low, high)
            for multiplier in (HIDDEN_WEIGHT, self.multiplier, 1.0 - HIDDEN_WEIGHT):
                weights = CostWeights(1.0, 1.0 - multiplier, multiplier, BYTE_TIE_BREAK)
                problem, known = self.cost.weighted(weights), self.cost.solutions.get(weights)
                known = None if known is None or known.bound is not None else known
                for variable in deciding:
                    for value in (low.assignment[variable], high.assignment[variable]):
                        solution = known
                        if solution is None or solution.assignment[variable] != value:
                            solution = minimise(fix_variables(problem, {variable: value}))
                            self.solves += 1
                        self.add(solution.assignment)
        self.descend()

    def deciding(self, low: _VisitedAssignments, high: _VisitedAssignments) -> list[int]:
        """Return the few variables whose values in two assignments differ most in traffic."""
        moved: dict[int, float] = {}
        for scope, kind in self.cost.factors:
            table = self.cost.kinds[kind][TRAFFIC]
            if table is not None:
                ends = [float(table[tuple(item.assignment[v] for v in scope)]) for item in (low, high)]
                for variable in scope:
                    if low.assignment[variable] != high.assignment[variable]:
                        moved[variable] = moved.get(variable, 0.0) + abs(ends[0] - ends[1])
        return sorted(moved, key=lambda variable: -moved[variable])[:MAX_BRANCHES]

    def mix(self, first: _VisitedAssignments, second: _VisitedAssignments) -> None:
        """Try all assignments that follow one up to some variable and the other from there, and keep the best that
        fits. The last column counts what is forbidden."""
        if first is second:
            return
        count = len(self.cost.variables)
        change = np.zeros((count + 2, 5))
        ends = [np.array(item.assignment, dtype=np.int64) for item in (first, second)]
        for tables, scopes in self.cost.by_kind:
            before, after = scopes[:, 0] + 1, scopes[:, -1] + 1
            indices = [tuple(values[scopes].T) for values in ends]
            pieces = [(after, np.full_like(after, count + 1), indices[0]), (np.zeros_like(before), before, indices[1])]
            if scopes.shape[1] == 2:
                pieces.append((before, after, (indices[0][0], indices[1][1])))
            for start, stop, at in pieces:
                for i, table in enumerate(tables):
                    if table is not None:
                        values = table[at]
                        forbidden = ~np.isfinite(values)
                        for column, added in ((i, np.where(forbidden, 0.0, values)), (4, forbidden * 1.0)):
                            np.add.at(change[:, column], start, added)
                            np.subtract.at(change[:, column], stop, added)
        totals = np.cumsum(change, axis=0)[: count + 1]
        seconds = totals[:, EXPOSED] + np.maximum(totals[:, COMPUTE], totals[:, TRAFFIC])
        seconds = np.where(totals[:, 4] < 0.5, seconds, np.inf)
        if self.memory_bytes is not None:
            seconds = np.where(totals[:, BYTES] <= self.memory_bytes, seconds, np.inf)
        cut = int(seconds.argmin())
        if np.isfinite(seconds[cut]):
            self.add([*first.assignment[:cut], *second.assignment[cut:]])

    def descend(self) -> None:
        assert self.best is not None, "nothing to improve"
        at: dict[int, list[tuple[Scope, int]]] = {}
        for number, (_, scopes) in enumerate(self.cost.by_kind):
            for scope in map(tuple, scopes.tolist()):
                for variable in scope:
                    at.setdefault(variable, []).append((scope, number))
        assignment, total = list(self.best.assignment), self.best.components.copy()
        components_of: dict[object, Floats] = {}  # tables and values of the neighbours -> components per value
        settled: set[object] = set()  # of these, with the variable's value: no better value is known
        improved = True
        while improved:
            improved = False
            for variable in sorted(at):
                beside = tuple(
                    [(number, *[-1 if v == variable else assignment[v] for v in over]) for over, number in at[variable]]
                )
                if (beside, assignment[variable]) in settled:
                    continue
                if beside not in components_of:
                    components_of[beside] = self._components_beside(beside, self.cost.variables[variable].size)
                there = total - components_of[beside][assignment[variable]] + components_of[beside]
                seconds = there[:, EXPOSED] + np.maximum(there[:, COMPUTE], there[:, TRAFFIC])
                if self.memory_bytes is not None:
                    seconds = np.where(there[:, BYTES] <= self.memory_bytes, seconds, np.inf)
                choice = int(seconds.argmin())
                if seconds[choice] < step_seconds(total) * (1 - EXACT_GAP):
                    total, assignment[variable], improved = there[choice], choice, True
                    settled.clear()
                else:
                    settled.add((beside, assignment[variable]))
        self.add(assignment)

    def _components_beside(self, beside: Iterable[tuple[int, ...]], size: int) -> Floats:
        """Return [values, components] of a variable: the sum over its tables (number, values of their variables; -1:
        its own)."""
        components = np.zeros((size, 4))
        for number, *values in beside:
            index = tuple(slice(None) if value < 0 else value for value in values)
            for i, table in enumerate(self.cost.by_kind[number][0]):
                if table is not None:
                    components[:, i] += table[index]
        return components


def _order(item: _VisitedAssignments) -> tuple[float, float]:
    return item.seconds, float(item.components[BYTES])
