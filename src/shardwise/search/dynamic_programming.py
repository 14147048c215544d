"""The exact search: the best strategies, layouts of parameters and shared layouts, by variable elimination.

A step takes ``exposed + max(compute, traffic)`` seconds. Collectives of values and operators wait for each other;
gathers of parameters and reductions of gradients overlap with operators, as far as there are any. A maximum does not
add up over choices, so it is replaced by ``(1 - m) compute + m traffic``. For every m between 0 and 1 the least sum is
a lower bound of the least step (Lagrange). If the two choices around a bound differ, mixtures of both (one up to some
operator, the other from there) come close to it. A limit on memory is a second multiplier, in seconds per byte. The gap
is the difference between the best choice found and the best bound.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import permutations
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
    MAX_BYTE_PRICE,
    MAX_SOLVES,
)
from shardwise.search.cost_graph import BYTES, COMPUTE, EXPOSED, TRAFFIC, CostGraph, CostWeights
from shardwise.search.elimination import Scope, fix_variables
from shardwise.search.solving import minimise

# The fastest of the least memory: seconds weigh less than the least difference of bytes.
LEAST_BYTES = CostWeights(1e-3, 1e-3, 1e-3, 1.0)


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
    bound = run.bounded()
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


def least_step(
    cost: CostGraph, cutoff: float = inf, memory_bytes: float | None = None, known: Iterable[Sequence[int]] = ()
) -> float:
    """Return a bound of the step of all assignments whose bytes are within ``memory_bytes``: that of ``search``,
    without looking for better assignments. ``cutoff``: a bound above it need not be tight; ``known``: assignments near
    which the bound may be. Raises DoesNotFit."""
    run = _ExactSearch(cost, memory_bytes, cutoff)
    for assignment in known:
        run.add(list(assignment))
    bound = run.bounded()
    return max(0.0, bound if run.best is None else min(bound, run.best.seconds))


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
    value its proven bound is; 0 where it is exact; ``weights``: those of the best bound; ``around``: the assignments
    that are the least sums there, those with the least traffic first."""

    def __init__(self, cost: CostGraph, memory_bytes: float | None, cutoff: float) -> None:
        self.cost, self.cutoff = cost, cutoff
        self.memory_bytes = None if memory_bytes == inf else memory_bytes
        self.seen: dict[tuple[int, ...], _VisitedAssignments] = {}
        self.best: _VisitedAssignments | None = None
        self.solves = self.largest_joint = 0
        self.slack, self.weights = 0.0, _weights(0.0, 0.0)
        self.around: list[_VisitedAssignments] = []

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

    def bounded(self) -> float:
        """Return a bound of the step of all assignments that fit: the highest over both multipliers (Kelley's cutting
        planes). Raises DoesNotFit.

        Under some multipliers the sum of an assignment is linear in them. So the least sum is at most the least of
        these planes over the assignments seen. Its highest point is where the next solve is, until the solve reaches
        it. Where all traffic hides behind compute, or all compute behind traffic, the first or second settles it.
        """
        bound, weights = 0.0, self._highest()[1] if self.seen else _weights(0.0, 0.0)
        for _ in range(MAX_SOLVES):
            item = self.solved(weights)
            # Bytes without a price only break ties, so their weight is no part of the bound.
            free = self.memory_bytes is None or weights.bytes <= BYTE_TIE_BREAK
            num_bytes = float(item.components[BYTES]) if free else self.memory_bytes
            value = item.at(weights) - self.slack - weights.bytes * (num_bytes or 0.0)
            if value > bound or not self.around:
                bound, self.weights = max(bound, value), weights
            if self.best is None:
                self.least_memory()
            if bound > self.cutoff * (1 + EXACT_GAP):
                break
            highest, weights, self.around = self._highest()
            if bound >= highest * (1 - BOUND_TOLERANCE):
                break
        return bound

    def _highest(self) -> tuple[float, CostWeights, list[_VisitedAssignments]]:
        """Return the highest point of the least of all planes, its weights, and the assignments whose planes meet."""
        from scipy.optimize import linprog  # takes a quarter of a second

        items, limit = list(self.seen.values()), self.memory_bytes
        components = np.array([item.components for item in items])
        unit = float(components[:, [EXPOSED, COMPUTE, TRAFFIC]].max()) or 1.0
        starts = (components[:, EXPOSED] + components[:, COMPUTE]) / unit
        scale = max(limit or 0.0, 1.0)
        over = np.zeros(len(items)) if limit is None else (components[:, BYTES] - limit) / scale
        slopes = np.stack([(components[:, TRAFFIC] - components[:, COMPUTE]) / unit, over], axis=1)
        found = linprog(
            [-1, 0, 0],
            A_ub=np.concatenate([np.ones((len(items), 1)), -slopes], axis=1),
            b_ub=starts,
            bounds=[(None, None), (0, 1), (0, MAX_BYTE_PRICE)],
        )
        at = np.zeros(2) if found.x is None else found.x[1:]
        heights = starts + slopes @ at
        meeting = [items[i] for i in np.argsort(heights, kind="stable")[:3] if heights[i] <= heights.min() + 1e-6]
        meeting.sort(key=lambda item: float(item.components[TRAFFIC] - item.components[COMPUTE]))
        per_byte = 0.0 if limit is None else float(at[1]) * unit / scale
        return float(heights.min()) * unit, _weights(float(at[0]), per_byte), meeting

    def least_memory(self) -> None:
        """Solve for the fastest of the least memory. Raises DoesNotFit."""
        small = self.solved(LEAST_BYTES)
        if not self.fits(small):
            raise DoesNotFit(list(small.assignment), float(small.components[BYTES]))

    def improve(self, bound: float) -> None:
        """Close the gap by mixtures of the two assignments around the bound, then with the variables that decide most
        traffic held as either has them, then by changing single variables."""
        if self.best is None or self.best.seconds <= bound * (1 + EXACT_GAP):
            return
        for first, second in permutations(self.around, 2):
            self.mix(first, second)
        low, high = self.around[0], self.around[-1]
        is_cheap = self.largest_joint <= MAX_BRANCHING_COMBINATIONS and self.weights.bytes <= BYTE_TIE_BREAK
        if self.best.seconds > bound * (1 + BOUND_TOLERANCE) and is_cheap:
            deciding = self.deciding(low, high)
            for multiplier in (0.0, self.weights.traffic, 1.0):
                weights = _weights(multiplier, self.weights.bytes)
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


def _weights(multiplier: float, per_byte: float) -> CostWeights:
    """Return the weights of a sum. Hidden seconds get a small one, so that there are no more of them than necessary,
    and so do bytes, to break ties."""
    multiplier = min(max(multiplier, HIDDEN_WEIGHT), 1.0 - HIDDEN_WEIGHT)
    return CostWeights(1.0, 1.0 - multiplier, multiplier, max(per_byte, BYTE_TIE_BREAK))


def _order(item: _VisitedAssignments) -> tuple[float, float]:
    return item.seconds, float(item.components[BYTES])
