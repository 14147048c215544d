"""The same sums of tables as a 0/1 program, solved by HiGHS.

A column ``x[v, i]`` says that variable ``v`` has value ``i``; a table gets one column per combination, which must agree
with the ``x`` of its variables (their marginals). Elimination avoids this local polytope, which is larger and slower;
it is an independent check of the optimum.

Tables are kept small. Values that are equal in all tables over several variables are one value (the cheapest of them),
and equal rows of one table share their columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array

from shardwise.search.elimination import Problem, Scope, Solution, Table

Ints = NDArray[np.int64]

# Status codes of scipy.optimize.milp.
FINISHED, STOPPED, INFEASIBLE = 0, 1, 2
# The largest price is scaled to this, so that the absolute tolerances of HiGHS (1e-6 and 1e-7) are small beside it.
PRICE_SCALE = 1e6


def solve_ilp(sums: Problem, *, time_limit: float = 60.0) -> Solution:
    """Return an assignment of least value, to the tolerances of HiGHS; after ``time_limit`` seconds the best found,
    with the proven bound."""
    assignment, bound = IntegerProgram(sums).solve(time_limit)
    if bound is None:
        best = greedy(sums) if assignment is None else assignment  # infeasible: all assignments are infinite
        return Solution(best, sums.value(best))
    best = min([candidate for candidate in (assignment, greedy(sums)) if candidate is not None], key=sums.value)
    value = sums.value(best)
    return Solution(best, value, bound=min(bound, value))


@dataclass
class _JointTable:
    """A table over several variables; ``classes``: per variable the row of ``table`` that each of its values has."""

    scope: Scope
    table: Table
    classes: tuple[Ints, ...]


@dataclass
class IntegerProgram:
    """The columns and rows of the integer program. ``values``: per variable those that need a column of their own."""

    problem: Problem
    unary: list[Table] = field(default_factory=list)
    joints: list[_JointTable] = field(default_factory=list)
    values: list[Ints] = field(default_factory=list)
    constant: float = 0.0

    def __post_init__(self) -> None:
        self.unary = [np.zeros(size) for size in self.problem.sizes]
        merged: dict[Scope, Table] = {}
        for scope, number in self.problem.factors:
            table = self.problem.interner.tables[number]
            if not scope:
                self.constant += float(table)
            elif len(scope) == 1:
                self.unary[scope[0]] = self.unary[scope[0]] + table
            else:
                merged[scope] = merged[scope] + table if scope in merged else table
        collapsed: dict[int, tuple[Table, tuple[Ints, ...]]] = {}
        for scope, table in merged.items():
            if id(table) not in collapsed:
                collapsed[id(table)] = _collapsed(table)
            self.joints.append(_JointTable(scope, *collapsed[id(table)]))
        self.values = self._distinct()

    def _distinct(self) -> list[Ints]:
        """Keep the cheapest of the values that are in the same classes everywhere, and none that is forbidden."""
        seen: list[list[Ints]] = [[] for _ in self.problem.sizes]
        for joint in self.joints:
            for variable, classes in zip(joint.scope, joint.classes, strict=True):
                seen[variable].append(classes)
        distinct = []
        for price, classes_of in zip(self.unary, seen, strict=True):
            order = np.argsort(price, kind="stable")
            order = order[np.isfinite(price[order])]
            keys = np.stack([classes[order] for classes in classes_of]) if classes_of else np.zeros((1, len(order)))
            _, first = np.unique(keys, axis=1, return_index=True)
            distinct.append(np.sort(order[first]).astype(np.int64))
        return distinct

    def solve(self, time_limit: float) -> tuple[list[int] | None, float | None]:
        """Return the assignment that HiGHS found, if any, and the bound that it proved. The bound is None if HiGHS
        finished: the assignment is then optimal, and without one there is none."""
        if not all(map(len, self.values)):
            return None, None
        prices, starts, matrix, right = self._matrix()
        scale = PRICE_SCALE / max(float(np.abs(prices).max(initial=0.0)), np.finfo(np.float64).tiny * PRICE_SCALE)
        result: Any = milp(
            prices * scale,
            integrality=(np.arange(len(prices)) < starts[-1]).astype(np.int64),
            bounds=Bounds(0, 1),
            constraints=LinearConstraint(matrix, right, right),
            options={"time_limit": time_limit, "mip_rel_gap": 0.0},
        )
        assert result.status in (FINISHED, STOPPED, INFEASIBLE), f"HiGHS: {result.message}"
        assignment = None
        if result.x is not None:
            assignment = [
                int(values[result.x[start:stop].argmax()])
                for values, start, stop in zip(self.values, starts[:-1], starts[1:], strict=True)
            ]
        if result.status != STOPPED:
            return assignment, None
        proven = -np.inf if result.mip_dual_bound is None else float(result.mip_dual_bound)
        return assignment, self.constant + proven / scale

    def _matrix(self) -> tuple[Table, list[int], csr_array, Table]:
        starts = np.cumsum([0, *(len(values) for values in self.values)]).tolist()
        prices = [price[values] for price, values in zip(self.unary, self.values, strict=True)]
        rows, columns, signs = [], [], []
        count, width = len(self.values), starts[-1]
        for variable, values in enumerate(self.values):  # every variable has one value
            rows.append(np.full(len(values), variable))
            columns.append(np.arange(starts[variable], starts[variable + 1]))
            signs.append(np.ones(len(values)))
        for joint in self.joints:
            allowed = np.argwhere(np.isfinite(joint.table))
            prices.append(joint.table[tuple(allowed.T)])
            own_columns = width + np.arange(len(allowed))
            for place, variable in enumerate(joint.scope):
                # The combinations of a class together are as much as the values of that class.
                classes = joint.classes[place][self.values[variable]]
                rows += [count + allowed[:, place], count + classes]
                columns += [own_columns, np.arange(starts[variable], starts[variable + 1])]
                signs += [np.ones(len(allowed)), -np.ones(len(classes))]
                count += joint.table.shape[place]
            width += len(allowed)
        entries = (np.concatenate(signs), (np.concatenate(rows), np.concatenate(columns)))
        right = np.zeros(count)
        right[: len(self.values)] = 1.0
        return np.concatenate(prices), starts, csr_array(entries, shape=(count, width)), right


def _collapsed(table: Table) -> tuple[Table, tuple[Ints, ...]]:
    """Return the table with equal slices along every axis once, and the slice of each value."""
    classes = []
    for axis in range(table.ndim):
        slices = np.moveaxis(table, axis, 0)
        _, first, back = np.unique(slices.reshape(len(slices), -1), axis=0, return_index=True, return_inverse=True)
        table = np.take(table, first, axis=axis)
        classes.append(back.reshape(-1).astype(np.int64))
    return table, tuple(classes)


def greedy(sums: Problem) -> list[int]:
    """Return a greedy assignment: each variable takes its best value beside those before, then beside all."""
    at: list[list[tuple[Scope, Table]]] = [[] for _ in sums.sizes]
    for scope, number in sums.factors:
        for variable in scope:
            at[variable].append((scope, sums.interner.tables[number]))
    assignment = [-1] * len(sums.sizes)
    for _, variable in product(range(3), range(len(assignment))):
        total = np.zeros(sums.sizes[variable])
        for scope, table in at[variable]:
            total = total + _seen_by(variable, scope, table, assignment)
        assignment[variable] = int(total.argmin())
    return assignment


def _seen_by(variable: int, scope: Scope, table: Table, assignment: Sequence[int]) -> Table:
    """Return [values] the table at the values of the other variables; the least over those without one."""
    index = tuple(slice(None) if v == variable or assignment[v] < 0 else assignment[v] for v in scope)
    left = [v for v in scope if v == variable or assignment[v] < 0]
    open_axes = tuple(i for i, v in enumerate(left) if v != variable)
    seen: Table = np.asarray(table[index]).min(axis=open_axes)
    return seen
