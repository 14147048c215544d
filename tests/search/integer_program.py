"""The same sums of tables as a 0/1 program, solved by HiGHS.

A column ``x[v, i]`` says that variable ``v`` has value ``i``; a table gets one column per combination, which must agree
with the ``x`` of its variables (their marginals). Elimination avoids this local polytope, which is larger and slower;
it is an independent check of the optimum.

Tables are kept small. Values that are equal in all tables over several variables are one value (the cheapest of them),
and equal rows of one table share their columns.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array

from shardwise.search.elimination import Problem, Scope, Solution, Table

Ints = NDArray[np.int64]

# Status codes of scipy.optimize.milp.
FINISHED, INFEASIBLE = 0, 2
# The largest price is scaled to this, so that the absolute tolerances of HiGHS (1e-6 and 1e-7) are small beside it.
PRICE_SCALE = 1e6


def solve_ilp(sums: Problem) -> Solution:
    """Return an assignment of least value, to the tolerances of HiGHS."""
    best = IntegerProgram(sums).solve()
    return Solution(best, sums.value(best))


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

    def __post_init__(self) -> None:
        self.unary = [np.zeros(size) for size in self.problem.sizes]
        merged: dict[Scope, Table] = {}
        for scope, number in self.problem.factors:
            table = self.problem.interner.tables[number]
            if len(scope) == 1:
                self.unary[scope[0]] = self.unary[scope[0]] + table
            elif scope:
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

    def solve(self) -> list[int]:
        """Return the assignment that HiGHS proves to be the best; any, where all are infinite."""
        if not all(map(len, self.values)):
            return [0] * len(self.values)
        prices, starts, matrix, right = self._matrix()
        scale = PRICE_SCALE / max(float(np.abs(prices).max(initial=0.0)), np.finfo(np.float64).tiny * PRICE_SCALE)
        result: Any = milp(
            prices * scale,
            integrality=(np.arange(len(prices)) < starts[-1]).astype(np.int64),
            bounds=Bounds(0, 1),
            constraints=LinearConstraint(matrix, right, right),
            options={"mip_rel_gap": 0.0},
        )
        assert result.status in (FINISHED, INFEASIBLE), f"HiGHS: {result.message}"
        if result.x is None:
            return [0] * len(self.values)
        return [
            int(values[result.x[start:stop].argmax()])
            for values, start, stop in zip(self.values, starts[:-1], starts[1:], strict=True)
        ]

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
