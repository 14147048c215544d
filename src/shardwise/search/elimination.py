"""Exact minimisation of a sum of tables, by variable elimination.

A variable is a choice (the strategy of an operator, the layout of a parameter or of a shared value); a table prices
combinations of a few variables. Eliminating a variable adds up the tables that mention it, minimises over its values
and leaves one table over its neighbours: min-plus elimination, as in junction trees (Dechter, Bucket elimination,
Artificial Intelligence 113, 1999). The specification's op, edge, merge, triangle and star eliminations are the cases of
zero to three neighbours. Work is exponential in the treewidth of the graph only, which is 2 or 3 for models.

Tables are *interned*: tables of equal content have one number, so that the variables of identical layers have equal
signatures, and what eliminating one of them gives is computed once. Work then hardly grows with depth.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

import numpy as np
from numpy.typing import NDArray

Table = NDArray[np.float64]
Scope = tuple[int, ...]
Signature = tuple[object, ...]

# Elements of a block that stays in the second-level cache of today's processors (256 KiB of float64).
BLOCK = 32_768
# Joint tables beyond this many combinations are refused: 2 billion additions take about a second.
MAX_JOINT = 4_000_000_000


class TooWide(Exception):
    """An elimination would need a joint table of ``joint`` combinations over ``scope``."""

    def __init__(self, scope: Scope, joint: int) -> None:
        super().__init__(f"eliminating a variable joins {joint} combinations over {len(scope)} variables")
        self.scope, self.joint = scope, joint


class Interner:
    """Tables by number; equal tables have equal numbers."""

    def __init__(self) -> None:
        self.tables: list[Table] = []
        self._numbers: dict[tuple[tuple[int, ...], bytes], int] = {}

    def add(self, table: Table) -> int:
        table = np.asarray(table, dtype=np.float64, order="C")
        key = (table.shape, table.tobytes())
        number = self._numbers.get(key)
        if number is None:
            number = self._numbers[key] = len(self.tables)
            self.tables.append(table)
        return number


@dataclass
class Problem:
    """Variables 0, 1, ... with ``sizes`` values each, and tables over them.

    ``factors``: pairs of a scope (variables in ascending order: the axes of the table) and the number of a table in
    ``interner``. Infinite prices forbid a combination.
    """

    sizes: Sequence[int]
    factors: Sequence[tuple[Scope, int]]
    interner: Interner

    def value(self, assignment: Sequence[int]) -> float:
        """The price of a complete assignment, from the tables as they were given."""
        tables = self.interner.tables
        return float(sum(tables[number][tuple(assignment[v] for v in scope)] for scope, number in self.factors))


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
        """No assignment has a lower value."""
        return self.value if self.bound is None else self.bound


@dataclass
class _State:
    """The tables during an elimination. ``at``: per variable its scopes -> table number."""

    problem: Problem
    at: list[dict[Scope, int]] = field(default_factory=list)
    constant: float = 0.0

    def __post_init__(self) -> None:
        self.sums: dict[tuple[int, int], int] = {}
        self.at = [{} for _ in self.problem.sizes]
        for scope, number in self.problem.factors:
            self.insert(scope, number)

    def insert(self, scope: Scope, number: int) -> None:
        """Add a table; one over the same variables is joined with it."""
        if not scope:
            self.constant += float(self.problem.interner.tables[number])
            return
        own = self.at[scope[0]].get(scope)
        if own is not None:
            key = (own, number) if own <= number else (number, own)
            joined = self.sums.get(key)
            if joined is None:
                tables = self.problem.interner.tables
                joined = self.sums[key] = self.problem.interner.add(tables[own] + tables[number])
            number = joined
        for variable in scope:
            self.at[variable][scope] = number

    def signature(self, variable: int) -> tuple[Signature, Scope]:
        """What eliminating the variable depends on, and its neighbours."""
        found = self.at[variable]
        neighbours = tuple(sorted({v for scope in found for v in scope if v != variable}))
        place = {v: i for i, v in enumerate(neighbours)}
        place[variable] = -1
        tables = sorted((number, tuple(place[v] for v in scope)) for scope, number in found.items())
        return (self.problem.sizes[variable], len(neighbours), *tables), neighbours


@dataclass
class _Class:
    """Variables whose tables are the same, in the same places: eliminating one tells what the others give.
    ``joint``: combinations of the joint table."""

    signature: Signature
    joint: int
    members: dict[int, None] = field(default_factory=dict)

    def work_per_member(self) -> tuple[float, int]:
        return self.joint / len(self.members), next(iter(self.members))


def solve(problem: Problem, *, last: int | None = None, max_joint: int = MAX_JOINT) -> Solution:
    """An assignment of least value; exact.

    ``last``: a variable to eliminate last, whose marginal is then returned. Raises TooWide when a joint table would
    have more than ``max_joint`` combinations.
    """
    state = _State(problem)
    sizes, tables = problem.sizes, problem.interner.tables
    known: dict[Signature, int] = {}
    order: list[tuple[int, tuple[tuple[Scope, int], ...]]] = []
    classes: dict[Signature, _Class] = {}
    class_of: dict[int, tuple[_Class, Scope]] = {}
    largest = 0

    def sign(variable: int) -> None:
        signature, neighbours = state.signature(variable)
        own = classes.get(signature)
        if own is None:
            own = classes[signature] = _Class(signature, prod(sizes[v] for v in neighbours) * sizes[variable])
        own.members[variable] = None
        class_of[variable] = own, neighbours

    def eliminate(variable: int, own: _Class, neighbours: Scope) -> set[int]:
        """Replace the tables of a variable by one over its neighbours, which are returned."""
        factors = tuple(state.at[variable].items())
        number = known.get(own.signature, -1)
        if number < 0:
            message = _minimum(variable, neighbours, factors, sizes, tables)
            number = known[own.signature] = problem.interner.add(message)
        order.append((variable, factors))
        for scope, _ in factors:
            for v in scope:
                if v != variable:
                    del state.at[v][scope]
        state.at[variable] = {}
        state.insert(neighbours, number)
        return set(neighbours)

    for variable in range(len(sizes)):
        if variable != last:
            sign(variable)
    while class_of:
        best = min(classes.values(), key=_Class.work_per_member)
        if best.joint > max_joint:
            variable = next(iter(best.members))
            raise TooWide((variable, *class_of[variable][1]), best.joint)
        largest = max(largest, best.joint)
        dirty: set[int] = set()
        for variable in sorted(best.members):
            if variable not in dirty:
                del best.members[variable]
                dirty |= eliminate(variable, *class_of.pop(variable))
        for variable in sorted(dirty & class_of.keys()):
            own, _ = class_of[variable]
            del own.members[variable]
            if not own.members:
                del classes[own.signature]
            sign(variable)
        if not best.members and classes.get(best.signature) is best:
            del classes[best.signature]
    marginal: Table | None = None
    if last is not None:
        factors = tuple(state.at[last].items())
        marginal = state.constant + sum((tables[number] for _, number in factors), np.zeros(sizes[last]))
        order.append((last, factors))
    assignment = [0] * len(sizes)
    for variable, factors in reversed(order):
        total = np.zeros(sizes[variable])
        for scope, number in factors:
            total = total + tables[number][tuple(slice(None) if v == variable else assignment[v] for v in scope)]
        assignment[variable] = int(total.argmin())
    return Solution(assignment, problem.value(assignment), largest, len(known), marginal)


def _minimum(
    variable: int,
    neighbours: Scope,
    factors: Iterable[tuple[Scope, int]],
    sizes: Sequence[int],
    tables: Sequence[Table],
) -> Table:
    """The sum of the tables of one variable, minimised over its values: a table over its neighbours."""
    shape = tuple(sizes[v] for v in neighbours)
    # Per table: the variable first, then one axis per neighbour (of size 1 where the table lacks it).
    place = {v: i for i, v in enumerate(neighbours)}
    parts: dict[Scope, Table] = {(1,) * len(neighbours): np.zeros((sizes[variable],) + (1,) * len(neighbours))}
    for scope, number in factors:
        axes = [scope.index(variable), *(i for i, v in enumerate(scope) if v != variable)]
        table = tables[number].transpose(axes)
        full = [1] * len(neighbours)
        for v in scope:
            if v != variable:
                full[place[v]] = sizes[v]
        table = table.reshape(sizes[variable], *full)
        covered = tuple(full)
        parts[covered] = parts[covered] + table if covered in parts else table
    small = sorted(parts.values(), key=lambda table: table.size)
    while len(small) > 1 and small[0].ndim and _within(small[0].shape, small[1].shape):
        small[1] = small[0] + small[1]
        small.pop(0)
    if len(small) == 1:
        least: Table = small[0].min(axis=0)
        return least
    out = np.full(shape, np.inf)
    rows = max(1, BLOCK // max(1, prod(shape[1:])))
    for start in range(0, shape[0], rows):
        block = out[start : start + rows]
        cut = [np.ascontiguousarray(t if t.shape[1] == 1 else t[:, start : start + rows]) for t in small]
        buffer = np.empty_like(block)
        for value in range(sizes[variable]):
            np.add(cut[0][value], cut[1][value], out=buffer)
            for part in cut[2:]:
                np.add(buffer, part[value], out=buffer)
            np.minimum(block, buffer, out=block)
    return out


def _within(inner: Sequence[int], outer: Sequence[int]) -> bool:
    return all(a in (1, b) for a, b in zip(inner, outer, strict=True))


def restricted(problem: Problem, fixed: Mapping[int, int]) -> Problem:
    """The problem with some variables held at a value: the others' tables are read there, and no variable has a held
    one for a neighbour."""
    interner = problem.interner
    factors: list[tuple[Scope, int]] = []
    for variable, value in fixed.items():
        only = np.full(problem.sizes[variable], np.inf)
        only[value] = 0.0
        factors.append(((variable,), interner.add(only)))
    known: dict[tuple[int, tuple[int, ...]], int] = {}
    for scope, number in problem.factors:
        held = tuple(fixed.get(v, -1) for v in scope)  # -1: free
        if (number, held) not in known:
            at = tuple(slice(None) if value < 0 else value for value in held)
            known[number, held] = interner.add(interner.tables[number][at])
        factors.append((tuple(v for v in scope if v not in fixed), known[number, held]))
    return Problem(problem.sizes, factors, interner)
