"""Exact minimisation of a sum of tables, by variable elimination.

A variable is a choice (the strategy of an operator, the layout of a parameter or of a shared value); a table prices
combinations of a few variables. Eliminating a variable adds up the tables that mention it, minimises over its values
and leaves one table over its neighbours. This is min-plus elimination, as in junction trees (Dechter, Bucket
elimination, Artificial Intelligence 113, 1999). The specification's op, edge, merge, triangle and star eliminations are
the cases of zero to three neighbours. Work is exponential in the treewidth of the graph only, which is 2 or 3 for
models.

The joins depend only on which tables are the same, not on prices (``Elimination``). The variables of identical layers
have equal *signatures*, and the result of eliminating one of them is computed once. Work then hardly grows with depth,
and problems that differ only in prices are eliminated in the same steps.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import inf, prod
from operator import attrgetter

import numpy as np
import torch
from numpy.typing import NDArray

from shardwise.search.constants import (
    CACHE_BLOCK_ELEMENTS,
    MAX_ELIMINATION_BYTES,
    MAX_JOINT_COMBINATIONS,
    MAX_NARROW_COMBINATIONS,
)

Table = NDArray[np.float64]
Scope = tuple[int, ...]
# Of a problem: the sizes of its variables, and its factors; whether only narrow joint tables are eliminated.
Shape = tuple[tuple[int, ...], tuple[tuple[Scope, int], ...], int | None]


class TooWide(Exception):
    """Raised if an elimination would take too long or too much memory; its largest joint table is over ``scope``."""

    def __init__(self, scope: Scope, cause: str) -> None:
        super().__init__(cause)
        self.scope = scope


class Interner:
    """Tables by number. Equal tables have equal numbers, except for ``tables``, which it begins with."""

    def __init__(self, tables: Sequence[Table] = ()) -> None:
        self.tables = list(tables)
        self._numbers: dict[tuple[tuple[int, ...], bytes], int] = {}

    def add(self, table: Table) -> int:
        table = np.asarray(table, dtype=np.float64, order="C")
        key = (table.shape, table.tobytes())
        number = self._numbers.get(key)
        if number is None:
            number = self._numbers[key] = len(self.tables)
            self.tables.append(table)
        return number


# Number of a table -> its places in a list of factors, and the scopes there, one a row.
Places = dict[int, tuple[NDArray[np.int64], NDArray[np.int64]]]


def places_of(factors: Sequence[tuple[Scope, int]]) -> Places:
    """Return where the tables of factors are."""
    places: dict[int, list[int]] = {}
    for place, (_, number) in enumerate(factors):
        places.setdefault(number, []).append(place)
    return {
        number: (np.array(group, dtype=np.int64), np.array([factors[place][0] for place in group], dtype=np.int64))
        for number, group in places.items()
    }


@dataclass
class Problem:
    """Variables 0, 1, ... with ``sizes`` values each, and tables over them.

    ``factors``: pairs of a scope (variables in ascending order: the axes of the table) and the number of a table in
    ``interner``. Infinite prices forbid a combination. ``known``: eliminations, by sizes and factors; problems may
    share them, whatever their tables.
    """

    sizes: Sequence[int]
    factors: Sequence[tuple[Scope, int]]
    interner: Interner
    known: dict[Shape, Elimination] = field(default_factory=dict)

    def value(self, assignment: Sequence[int]) -> float:
        """Return the price of a complete assignment, from the tables as they were given."""
        values, tables = np.array(assignment, dtype=np.int64), self.interner.tables
        prices = np.empty(len(self.factors))
        for number, (places, scopes) in self.places.items():
            prices[places] = tables[number][tuple(values[scopes].T)]
        return float(sum(prices.tolist()))  # in the order of the factors, so that equal sums round alike

    @cached_property
    def places(self) -> Places:
        return places_of(self.factors)


@dataclass
class Solution:
    """An assignment of least value. ``largest_joint``: combinations of the largest joint table; ``num_tables``:
    eliminations that were computed, the others were known from an equal one. ``marginal``: per value of the variable
    that was asked to be eliminated last, the least value of an assignment that gives it this value. ``bound``: where
    the assignment is not proven to be of least value (a solver stopped), no assignment has less than this."""

    assignment: list[int]
    value: float
    largest_joint: int = 0
    num_tables: int = 0
    marginal: Table | None = None
    bound: float | None = None

    @property
    def lower(self) -> float:
        return self.value if self.bound is None else self.bound


@dataclass(frozen=True, slots=True)
class _Least:
    """A minimisation over the values of a variable. ``size``: how many there are; ``shape``: the numbers of values of
    its neighbours; ``parts``: the tables that mention it, per axis the neighbour's place or OWN."""

    size: int
    shape: tuple[int, ...]
    parts: tuple[tuple[int, tuple[int, ...]], ...]


LARGEST_JOINT = 10**300  # that a float holds
OWN = -1  # the place of the variable itself


@dataclass
class _Class:
    """Variables whose tables are the same, in the same places: the elimination of one gives that of the others.
    ``joint``: combinations of the joint table; ``rank``: its ``work`` when the members last changed."""

    step: _Least
    joint: int
    members: dict[int, None] = field(default_factory=dict)
    rank: tuple[float, int] = (0.0, 0)

    @property
    def is_narrow(self) -> bool:
        return len(self.step.shape) <= 2 and self.joint <= MAX_NARROW_COMBINATIONS

    def work(self, *, shared: bool) -> tuple[float, int]:
        """Return the key by which classes are ordered. ``shared``: by the work of each member."""
        return min(self.joint, LARGEST_JOINT) / (len(self.members) if shared else 1), next(iter(self.members))


class Elimination:
    """The order in which the variables of a problem are eliminated, and the tables that are computed for that. The next
    variables are always those with the smallest joint table per variable of the same signature, or (not ``shares``)
    with the smallest joint table.

    ``last``: a variable that is left; ``narrow``: leave all variables whose joint table has over three variables or
    ``MAX_NARROW_COMBINATIONS``, and all once the tables take half of ``MAX_ELIMINATION_BYTES``. ``widest``,
    ``largest``: the variables of the largest joint table, and its combinations; ``work``: those of all that are
    computed, infinite if one is too large; ``num_bytes``: of all tables that are computed. ``cutsets``, ``of_core``:
    what leaves the rest of a narrow one narrow (``search.conditioning``), and its eliminations, for all problems with
    this order.
    """

    def __init__(self, problem: Problem, last: int | None = None, *, narrow: bool = False, shares: bool = True) -> None:
        self.sizes, self.last, self.narrow, self.shares = problem.sizes, last, narrow, shares
        self.work = 0.0
        self.num_tables = 1 + max((number for _, number in problem.factors), default=-1)
        # What is computed, in order: sums of two tables and minima; results are numbered from ``num_tables``.
        self.steps: list[tuple[int, int] | _Least] = []
        self.constants: list[int] = []
        self.order: list[tuple[int, int, _Least, Scope]] = []  # variable, number of its minimum, tables, neighbours
        self.widest: Scope = ()
        self.largest = self.num_minima = self.num_bytes = 0
        self._at: list[dict[Scope, int]] = [{} for _ in problem.sizes]
        self._known: dict[object, int] = {}
        self.cutsets: list[frozenset[int]] = []
        self.of_core: dict[Shape, Elimination] = {}
        for scope, number in problem.factors:
            # Variables of one value are left out: a joint table of numpy has at most 64 axes.
            self._insert(tuple([v for v in scope if problem.sizes[v] > 1]), number)
        self._eliminate_all()

    def _computed(self, step: tuple[int, int] | _Least, scope: Scope) -> int:
        """Return the number of what a step gives, a table over ``scope``; equal steps are done once."""
        number = self._known.get(step)
        if number is None:
            self.num_bytes += 8 * prod(self.sizes[v] for v in scope)
            number = self._known[step] = self.num_tables + len(self.steps)
            self.steps.append(step)
            if isinstance(step, _Least):
                self.num_minima += 1
                self.work += step.size * prod(step.shape)
        return number

    def _insert(self, scope: Scope, number: int) -> None:
        """Add a table; one over the same variables is joined with it."""
        if not scope:
            self.constants.append(number)
            return
        other = self._at[scope[0]].get(scope)
        if other is not None:
            number = self._computed((min(other, number), max(other, number)), scope)
        for variable in scope:
            self._at[variable][scope] = number

    def _signed(self, variable: int) -> tuple[_Least, Scope]:
        tables = self._at[variable]
        neighbours = tuple(sorted({v for scope in tables for v in scope} - {variable}))
        place = {v: i for i, v in enumerate(neighbours)}
        place[variable] = OWN
        parts = sorted([(number, tuple([place[v] for v in scope])) for scope, number in tables.items()])
        return _Least(self.sizes[variable], tuple([self.sizes[v] for v in neighbours]), tuple(parts)), neighbours

    def _eliminate(self, variable: int, step: _Least, neighbours: Scope) -> Scope:
        number = self._computed(step, neighbours)
        self.order.append((variable, number, step, neighbours))
        for scope in self._at[variable]:
            for v in scope:
                if v != variable:
                    del self._at[v][scope]
        self._at[variable] = {}
        self._insert(neighbours, number)
        return neighbours

    def _eliminate_all(self) -> None:
        classes: dict[_Least, _Class] = {}
        class_of: dict[int, tuple[_Class, Scope]] = {}
        changed: dict[int, _Class] = {}  # by identity

        def sign(variable: int) -> None:
            step, neighbours = self._signed(variable)
            group = classes.get(step)
            if group is None:
                group = classes[step] = _Class(step, prod(step.shape) * step.size)
            group.members[variable] = None
            changed[id(group)] = group
            class_of[variable] = group, neighbours

        for variable in range(len(self.sizes)):
            if variable != self.last:
                sign(variable)
        while class_of:
            for group in changed.values():
                if group.members:
                    group.rank = group.work(shared=self.shares)
            changed.clear()
            allowed = [group for group in classes.values() if group.is_narrow] if self.narrow else [*classes.values()]
            if not allowed or (self.narrow and self.num_bytes > MAX_ELIMINATION_BYTES // 2):
                break
            best = min(allowed, key=attrgetter("rank"))
            changed[id(best)] = best
            if best.joint > self.largest:
                variable = next(iter(best.members))
                self.widest, self.largest = (variable, *class_of[variable][1]), best.joint
                if self.largest > MAX_JOINT_COMBINATIONS:  # it is refused: what follows takes longer and longer
                    self.work = inf
                    break
            dirty: set[int] = set()
            for variable in sorted(best.members):
                if variable not in dirty:
                    del best.members[variable]
                    group, neighbours = class_of.pop(variable)
                    dirty.update(self._eliminate(variable, group.step, neighbours))
            for variable in sorted(dirty & class_of.keys()):
                group, _ = class_of[variable]
                del group.members[variable]
                changed[id(group)] = group
                if not group.members:
                    del classes[group.step]
                sign(variable)
            if not best.members and classes.get(best.step) is best:
                del classes[best.step]

    def tables(self, problem: Problem) -> list[Table]:
        """Return the tables of a problem, and all that are computed from them."""
        tables = [table.squeeze() for table in problem.interner.tables[: self.num_tables]]
        for step in self.steps:
            tables.append(_minimum(step, tables) if isinstance(step, _Least) else tables[step[0]] + tables[step[1]])
        return tables

    def marginal(self, tables: Sequence[Table]) -> Table:
        """Return, per value of the last variable, the least value of an assignment that has it."""
        assert self.last is not None, "no variable was left"
        least = np.full(self.sizes[self.last], float(sum(float(tables[number]) for number in self.constants)))
        for number in self._at[self.last].values():
            least = least + tables[number]
        return least

    def left(self) -> list[tuple[Scope, int]]:
        """Return the scopes and numbers of the tables that are left."""
        tables = {scope: number for at in self._at for scope, number in at.items()}
        return [*tables.items(), *(((), number) for number in self.constants)]

    def assignment(self, tables: Sequence[Table], left: Mapping[int, int] | None = None) -> list[int]:
        """Return an assignment of least value; ``left``: the values of the variables that are left (by default the
        best of ``last``). No arg-min is kept: tables are minimised again on the way back, once for equal values of
        equal neighbours."""
        assignment = [0] * len(self.sizes)
        if left is None and self.last is not None:
            left = {self.last: int(self.marginal(tables).argmin())}
        for variable, value in (left or {}).items():
            assignment[variable] = value
        cached: dict[tuple[int, tuple[int, ...]], int] = {}
        for variable, number, step, neighbours in reversed(self.order):
            key = number, tuple([assignment[v] for v in neighbours])
            if key not in cached:
                cached[key] = int(eliminated_minimum(step, tables, key[1]).argmin())
            assignment[variable] = cached[key]
        return assignment


def eliminated_minimum(step: _Least, tables: Sequence[Table], neighbours: Sequence[int]) -> Table:
    """Return, per value of an eliminated variable, the least sum of its tables and of all eliminated before it, with
    its neighbours at fixed values."""
    total = np.zeros(step.size)
    for part, places in step.parts:
        total = total + tables[part][tuple(slice(None) if p == OWN else neighbours[p] for p in places)]
    return total


def elimination_of(
    problem: Problem, last: int | None = None, max_joint: int = MAX_JOINT_COMBINATIONS, *, narrow: bool = False
) -> Elimination:
    """Return the elimination of a problem; those without ``last`` are cached. Raises TooWide when a joint table would
    have more than ``max_joint`` combinations, or all tables more than ``MAX_ELIMINATION_BYTES``."""
    key = tuple(problem.sizes), tuple(problem.factors), None if narrow else max_joint
    elimination = problem.known.get(key) if last is None else None
    if elimination is None:
        elimination = Elimination(problem, last, narrow=narrow)
        # Where equal layers hang on a chain that sums terms of all of them (the router loss of experts), eliminating
        # equal variables first may join several layers: 4.1e9 combinations of 16 layers of Mixtral, 8e7 in this order.
        if not narrow and elimination.work > MAX_NARROW_COMBINATIONS:
            elimination = min(
                elimination,
                Elimination(problem, last, shares=False),
                key=lambda found: (found.largest > max_joint or found.num_bytes > MAX_ELIMINATION_BYTES, found.work),
            )
        if last is None:
            problem.known[key] = elimination
    largest, scope, num_bytes = elimination.largest, elimination.widest, elimination.num_bytes
    if largest > max_joint:
        joined = f"eliminating a variable joins {largest} combinations over {len(scope)} variables"
        raise TooWide(scope, f"{joined}, more than {max_joint}")
    if num_bytes > MAX_ELIMINATION_BYTES and not narrow:
        raise TooWide(
            scope, f"eliminating the variables makes tables of {num_bytes} bytes, more than {MAX_ELIMINATION_BYTES}"
        )
    return elimination


def solve(problem: Problem, *, last: int | None = None, max_joint: int = MAX_JOINT_COMBINATIONS) -> Solution:
    """Return an assignment of least value; exact.

    ``last``: a variable to eliminate last, whose marginal is then returned. Raises TooWide when a joint table would
    have more than ``max_joint`` combinations.
    """
    elimination = elimination_of(problem, last, max_joint)
    tables = elimination.tables(problem)
    assignment = elimination.assignment(tables)
    return Solution(
        assignment,
        problem.value(assignment),
        elimination.largest,
        elimination.num_minima,
        None if last is None else elimination.marginal(tables),
    )


def _minimum(step: _Least, tables: Sequence[Table]) -> Table:
    # Per table: the variable first, then one axis per neighbour (of size 1 where the table lacks it).
    none = (1,) * len(step.shape)
    parts: dict[tuple[int, ...], Table] = {none: np.zeros((step.size, *none))}
    for number, places in step.parts:
        table = tables[number].transpose([places.index(OWN), *(i for i, p in enumerate(places) if p != OWN)])
        covered = tuple(size if place in places else 1 for place, size in enumerate(step.shape))
        table = table.reshape(step.size, *covered)
        parts[covered] = parts[covered] + table if covered in parts else table
    small = sorted(parts.values(), key=lambda table: table.size)
    while len(small) > 1 and small[0].ndim and _within(small[0].shape, small[1].shape):
        small[1] = small[0] + small[1]
        small.pop(0)
    least: Table
    if len(small) == 1:
        least = small[0].min(axis=0)
        return least
    if step.size * prod(step.shape) <= CACHE_BLOCK_ELEMENTS:  # a loop over values takes up to twenty times as long
        joint = small[0] + small[1]
        for further in small[2:]:
            joint = joint + further
        least = joint.min(axis=0)
        return least
    out = np.full(step.shape, np.inf)
    for rows in _blocks(step.shape):
        block = out[rows]
        cut = [np.ascontiguousarray(_at(table, rows)) for table in small]
        buffer = np.empty_like(block)
        # torch adds tables of different shapes three times as fast as numpy (2.13 and 2.3, x86, 2026).
        total, (first, second, *others) = (
            torch.from_numpy(buffer),
            [torch.from_numpy(part).expand(step.size, *block.shape).unbind() for part in cut],
        )
        for value in range(step.size):
            torch.add(first[value], second[value], out=total)
            for part in others:
                torch.add(total, part[value], out=total)
            np.minimum(block, buffer, out=block)
    return out


def _blocks(shape: Sequence[int]) -> Iterator[tuple[slice, ...]]:
    """Cut a table into blocks of at most ``CACHE_BLOCK_ELEMENTS``, which are ranges of its first axes."""
    rows = CACHE_BLOCK_ELEMENTS // max(1, prod(shape[1:]))
    if rows:
        yield from ((slice(start, start + rows),) for start in range(0, shape[0], rows))
    else:
        yield from ((slice(row, row + 1), *rest) for row in range(shape[0]) for rest in _blocks(shape[1:]))


def _at(table: Table, rows: Sequence[slice]) -> Table:
    """Return, of all values of the variable, the block that ``rows`` cuts out."""
    return table[:, *(part if size > 1 else slice(None) for part, size in zip(rows, table.shape[1:], strict=False))]


def _within(inner: Sequence[int], outer: Sequence[int]) -> bool:
    return all(a in (1, b) for a, b in zip(inner, outer, strict=True))


def fix_variables(problem: Problem, fixed: Mapping[int, int]) -> Problem:
    """Return the problem with some variables held at a value: the others' tables are read there, and no variable has a
    held one for a neighbour."""
    tables: list[Table] = []
    factors: list[tuple[Scope, int]] = []
    for variable, value in fixed.items():
        only = np.full(problem.sizes[variable], np.inf)
        only[value] = 0.0
        factors.append(((variable,), len(tables)))
        tables.append(only)
    numbers: dict[tuple[int, tuple[int, ...]], int] = {}
    for scope, number in problem.factors:
        is_free = fixed.keys().isdisjoint(scope)
        values = () if is_free else tuple([fixed.get(v, -1) for v in scope])  # -1: free
        if (number, values) not in numbers:
            at = tuple(slice(None) if value < 0 else value for value in values)
            numbers[number, values] = len(tables)
            tables.append(np.asarray(problem.interner.tables[number][at]))
        factors.append((scope if is_free else tuple([v for v in scope if v not in fixed]), numbers[number, values]))
    return Problem(problem.sizes, factors, Interner(tables), problem.known)


def k_best(problem: Problem, k: int) -> list[tuple[float, list[int]]]:
    """Return the ``k`` best (value, assignment), in order; fewer where there are no more. Exact. Raises TooWide.

    An elimination is decoded from its last variable to its first. With the values of its neighbours fixed, every value
    of a variable has a known least sum of all that is left. So the extra cost of an assignment over the best is the sum
    of the extra costs of its values over the least ones. The assignments are taken in order of that sum. The children
    of an assignment are those that leave its path at one later variable (Lawler, A procedure for computing the K best
    solutions to discrete optimization problems, Management Science 18(7), 1972). Each costs one decoding, and all of
    them one elimination.
    """
    elimination = elimination_of(problem)
    decoder = _AssignmentDecoder(elimination, elimination.tables(problem))
    # (value over the least one, order of arrival, the assignment whose way it leaves, position, value there)
    heap: list[tuple[float, int, list[int], int, int]] = [(0.0, 0, [0] * len(problem.sizes), -1, 0)]
    best: list[tuple[float, list[int]]] = []
    arrived = 0
    while heap and len(best) < k:
        more, _, parent, position, value = heapq.heappop(heap)
        assignment, offers = decoder.completed(parent, position, value, k - len(best))
        total = problem.value(assignment)
        if not np.isfinite(total):
            break
        best.append((total, assignment))
        for extra, at, other in offers:
            arrived += 1
            heapq.heappush(heap, (more + extra, arrived, assignment, at, other))
    return best


@dataclass
class _AssignmentDecoder:
    """Decoder of variables from the last eliminated to the first, with a cache of sums beside neighbours."""

    elimination: Elimination
    tables: list[Table]

    def __post_init__(self) -> None:
        self.order = self.elimination.order[::-1]
        self._known: dict[tuple[int, tuple[int, ...]], Table] = {}
        self._nearest: dict[tuple[int, tuple[int, ...], int], tuple[int, list[tuple[float, int]]]] = {}

    def completed(
        self, parent: list[int], position: int, value: int, count: int
    ) -> tuple[list[int], list[tuple[float, int, int]]]:
        """Return the least assignment that agrees with ``parent`` before a position of the order and has ``value``
        there, and the ``count`` cheapest ways to leave it later: (extra cost, position, value)."""
        assignment = list(parent)
        if position >= 0:
            assignment[self.order[position][0]] = value
        offers: list[tuple[float, int, int]] = []
        most = inf  # extra cost of the dearest of ``count`` offers
        for at in range(position + 1, len(self.order)):
            variable, number, step, neighbours = self.order[at]
            key = number, tuple([assignment[v] for v in neighbours]), count
            chosen_and_others = self._nearest.get(key)
            if chosen_and_others is None:
                chosen_and_others = self._nearest[key] = self._values(step, key)
            assignment[variable], others = chosen_and_others
            for extra, i in others:
                if extra >= most:
                    break
                offers.append((extra, at, i))
            if len(offers) > 4 * count:
                offers = heapq.nsmallest(count, offers)
                most = offers[-1][0]
        return assignment, heapq.nsmallest(count, offers)

    def _values(self, step: _Least, key: tuple[int, tuple[int, ...], int]) -> tuple[int, list[tuple[float, int]]]:
        """Return the best value of an eliminated variable, and the extra costs of up to ``count`` others, in order.

        ``key``: the number of its minimum, the values of its neighbours, and the count."""
        number, beside, count = key
        more = self._known.get((number, beside))
        if more is None:
            total = eliminated_minimum(step, self.tables, beside)
            least = total.min()
            more = self._known[number, beside] = total - least if np.isfinite(least) else np.zeros_like(total)
        chosen = int(more.argmin())
        nearest = range(len(more)) if len(more) <= count else np.argpartition(more, count)[: count + 1].tolist()
        return chosen, sorted((float(more[i]), i) for i in nearest if i != chosen and np.isfinite(more[i]))
