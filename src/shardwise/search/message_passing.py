"""A bound on a sum of tables, by sequential tree-reweighted message passing, and assignments that come close to it.

Every table sends each of its variables a message: per value, the least it can be. The sum of tables is rewritten so
that messages move from the tables to the variables and between them; whatever the messages are, the least values of
all rewritten tables and variables together are a bound. A sweep visits the variables in order, collects what their
tables send and gives every table that leads on an equal share of it, which never lowers the bound (Kolmogorov,
Convergent tree-reweighted message passing, IEEE PAMI 28(10), 2006; for tables over more than two variables: A new look
at reweighted message passing, IEEE PAMI 37(5), 2015). It converges to the bound of the linear relaxation or a little
below, and needs memory for messages only.

A value whose own bound is above a known assignment is in no better one. Without these values the rest is often narrow
enough to be eliminated exactly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shardwise.errors import ShardwiseError
from shardwise.search.conditioning import improve_by_conditioning
from shardwise.search.constants import (
    EXACT_GAP,
    FORBIDDEN_FACTOR,
    MAX_CONDITIONED_COMBINATIONS,
    MAX_JOINT_COMBINATIONS,
    MAX_MESSAGE_BYTES,
    MAX_SWEEPS,
    SETTLED_GAP_SHARE,
    WIDE_GAP,
)
from shardwise.search.elimination import Interner, Problem, Scope, Solution, Table, TooWide, elimination_of, solve


def solve_wide(problem: Problem) -> Solution:
    """Return a good assignment with a bound (none where it is proven to be of least value). Memory is bounded by a few
    times that of the problem's tables. Raises ShardwiseError if no allowed assignment was found, though there may be
    one."""
    elimination = elimination_of(problem, narrow=True)
    tables = elimination.tables(problem)
    left = elimination.left()
    variables = sorted({variable for scope, _ in left for variable in scope})
    place = {variable: i for i, variable in enumerate(variables)}
    factors = [(tuple([place[v] for v in scope]), number) for scope, number in left]
    core = Problem([problem.sizes[v] for v in variables], factors, Interner(tables), elimination.of_core)
    found, bound = _solve_core(core, elimination.cutsets)
    assignment = elimination.assignment(tables, dict(zip(variables, found, strict=True)))
    value = problem.value(assignment)
    if not np.isfinite(value) and bound < np.inf:
        raise ShardwiseError("no plan was found in bounded memory", fix="fewer mesh axes")
    proven = value <= bound + EXACT_GAP * abs(value)
    largest = max(elimination.largest, MAX_JOINT_COMBINATIONS)  # that of all variables, which was too wide
    return Solution(assignment, value, largest, bound=None if proven else bound)


def _solve_core(core: Problem, cutsets: list[frozenset[int]]) -> tuple[list[int], float]:
    """Return the best assignment found, and the bound: infinite if no assignment is allowed. ``cutsets``: of problems
    with the same scopes."""
    messages = Messages(core)
    best, least = messages.rounded(), np.inf
    done, sweeps, before = 0, 1, -np.inf
    while done < MAX_SWEEPS:
        for _ in range(sweeps):
            messages.sweep()
            messages.sweep(backward=True)
        done += sweeps
        bound = messages.update_bound()
        if bound > messages.most:
            return best, np.inf
        rounded = messages.rounded()
        value = core.value(rounded)
        if value < least:
            best, least = rounded, value
        if least <= bound + EXACT_GAP * abs(least):
            return best, bound
        if np.isfinite(least) and messages.prune(least):
            exact = messages.solved_exactly()
            if exact is not None:
                return exact, core.value(exact)
        if least <= bound + WIDE_GAP * abs(least):
            return best, bound
        if np.isfinite(least) and bound - before < SETTLED_GAP_SHARE * (least - bound):
            break
        before, sweeps = bound, 2 * sweeps
    improved = improve_by_conditioning(core, best, cutsets)
    if core.value(improved) < least and messages.prune(core.value(improved)):
        exact = messages.solved_exactly()
        if exact is not None:
            return exact, core.value(exact)
    return improved, messages.bound


@dataclass
class _FactorTable:
    """A table over several variables; ``messages``: what it sends each of them."""

    scope: Scope
    table: Table
    messages: list[Table]

    def less(self, position: int = -1) -> Table:
        """Return the table without its messages to all variables but that at ``position``."""
        rest = self.table
        for axis, message in enumerate(self.messages):
            if axis != position:
                rest = rest - message.reshape([-1 if i == axis else 1 for i in range(rest.ndim)])
        return rest

    def least(self, position: int) -> Table:
        """Return, per value of one variable, the least of the table without its messages to the others."""
        least: Table = self.less(position).min(axis=tuple(i for i in range(self.table.ndim) if i != position))
        return least


class Messages:
    """The messages of a problem. ``values``: per variable those that may be in a best assignment; ``bound``: no
    assignment has less; ``most``: no allowed assignment has more."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.values = [np.arange(size) for size in problem.sizes]
        merged: dict[Scope, Table] = {}
        for scope, number in problem.factors:
            table = problem.interner.tables[number]
            merged[scope] = merged[scope] + table if scope in merged else table
        self.constant = float(merged.pop((), np.zeros(())))
        self.bound = -np.inf
        self._given = merged
        self._allow()
        self._set_up()

    def _allow(self) -> None:
        """Leave out values that some table forbids beside all values that are left."""
        changed = True
        while changed:
            changed = False
            for scope, table in self._given.items():
                finite = np.isfinite(table[np.ix_(*(self.values[v] for v in scope))])
                for axis, variable in enumerate(scope):
                    allowed = finite.any(axis=tuple(i for i in range(finite.ndim) if i != axis))
                    if not allowed.all() and allowed.any():
                        self.values[variable] = self.values[variable][allowed]
                        finite = np.compress(allowed, finite, axis=axis)
                        changed = True

    def _set_up(self) -> None:
        count = len(self.values)
        self.unary = [np.zeros(len(values)) for values in self.values]
        tables = {s: self._allowed(s) for s in self._given}
        # A forbidden combination costs more than all others can differ; its bound still is one.
        spread = sum(float(np.ptp(t[np.isfinite(t)])) if np.isfinite(t).any() else 0.0 for t in tables.values())
        largest = max((float(np.abs(t[np.isfinite(t)]).max(initial=0.0)) for t in tables.values()), default=0.0)
        self.forbidden = FORBIDDEN_FACTOR * (spread + largest)
        self.most = self.constant + sum(float(t[np.isfinite(t)].max(initial=-np.inf)) for t in tables.values())
        self.factors: list[_FactorTable] = []
        self.at: list[list[tuple[_FactorTable, int]]] = [[] for _ in range(count)]
        finite: dict[object, Table] = {}  # equal steps share their tables
        for scope, table in tables.items():
            key = id(self._given[scope]), *(self.values[v].tobytes() for v in scope)
            if key not in finite:
                finite[key] = np.where(np.isfinite(table), table, self.forbidden)
            table = finite[key]
            if len(scope) == 1:
                self.unary[scope[0]] += table
                continue
            factor = _FactorTable(scope, table, [np.zeros(size) for size in table.shape])
            self.factors.append(factor)
            for position, variable in enumerate(scope):
                self.at[variable].append((factor, position))
        self.received = [unary.copy() for unary in self.unary]

    def _allowed(self, scope: Scope) -> Table:
        """Return a table over the values that are left; the table itself, if these are all."""
        table = self._given[scope]
        if all(len(self.values[v]) == size for v, size in zip(scope, table.shape, strict=True)):
            return table
        return table[np.ix_(*(self.values[v] for v in scope))]

    # -- the bound -----------------------------------------------------------------------------------------------------

    def sweep(self, *, backward: bool = False) -> None:
        """Pass messages in the order of variables, or backward."""
        order = range(len(self.values))
        for variable in reversed(order) if backward else order:
            factors = self.at[variable]
            if not factors:
                continue
            total = self.unary[variable].copy()
            for factor, position in factors:
                message = factor.messages[position] = factor.least(position)
                total += message
            ahead = [factor.scope[0] < variable if backward else factor.scope[-1] > variable for factor, _ in factors]
            behind = [factor.scope[-1] > variable if backward else factor.scope[0] < variable for factor, _ in factors]
            share = total / max(sum(ahead), sum(behind))
            for (factor, position), leads_on in zip(factors, ahead, strict=True):
                if leads_on:
                    factor.messages[position] = factor.messages[position] - share

    def update_bound(self) -> float:
        """Compute the bound of the messages, and keep the best."""
        bound = self.constant
        for variable, unary in enumerate(self.unary):
            total = unary.copy()
            for factor, position in self.at[variable]:
                total += factor.messages[position]
            self.received[variable] = total
            bound += float(total.min())
        bound += sum(float(factor.less().min()) for factor in self.factors)
        self.bound = max(self.bound, bound)
        return bound

    # -- assignments ---------------------------------------------------------------------------------------------------

    def rounded(self) -> list[int]:
        """Return an assignment (of the problem's values): each variable in order takes the value that is best beside
        those before it and the messages of those after it."""
        chosen = [-1] * len(self.values)
        for variable, unary in enumerate(self.unary):
            total = unary.copy()
            for factor, position in self.at[variable]:
                rest, axis = factor.table, 0
                for place, other in enumerate(factor.scope):
                    if place == position:
                        axis += 1
                    elif chosen[other] >= 0:
                        rest = np.take(rest, chosen[other], axis=axis)
                    else:
                        message = factor.messages[place]
                        rest = rest - message.reshape([-1 if i == axis else 1 for i in range(rest.ndim)])
                        axis += 1
                own = sum(1 for other in factor.scope[:position] if chosen[other] < 0)
                total += rest.min(axis=tuple(i for i in range(rest.ndim) if i != own))
            chosen[variable] = int(total.argmin())
        return self._named(chosen)

    def prune(self, best: float) -> bool:
        """Leave out values that are in no assignment of less than ``best``; return whether there were any. Tables from
        which values go are copies: where these may take too much, at least half of the values must go."""
        slack = best - self.update_bound() + 1e-12 * abs(best) + 1e-14 * self.forbidden
        is_small = self._num_bytes <= MAX_MESSAGE_BYTES
        least = [float(total.min()) for total in self.received]
        pruned = False
        for variable, total in enumerate(self.received):
            extra = total - least[variable]
            for factor, position in self.at[variable]:
                rest = factor.least(position) - factor.messages[position]
                extra = extra + (rest - rest.min())
            kept = extra <= max(slack, float(extra.min()))
            if not kept.all() and (is_small or 2 * kept.sum() <= len(kept)):
                pruned = True
                self._keep(variable, kept)
        return pruned

    @property
    def _num_bytes(self) -> int:
        """The bytes of all tables if none were shared."""
        return sum(factor.table.nbytes for factor in self.factors)

    def _keep(self, variable: int, kept: NDArray[np.bool_]) -> None:
        self.values[variable] = self.values[variable][kept]
        self.unary[variable] = self.unary[variable][kept]
        self.received[variable] = self.received[variable][kept]
        for factor, position in self.at[variable]:
            factor.table = np.compress(kept, factor.table, axis=position)
            factor.messages[position] = factor.messages[position][kept]

    def _rest(self) -> Problem:
        """Return the problem over the values that are left."""
        tables = Interner()
        factors = [(scope, tables.add(self._allowed(scope))) for scope in self._given]
        return Problem([len(values) for values in self.values], factors, tables)

    def solved_exactly(self) -> list[int] | None:
        """Return the best assignment of the values that are left, if elimination is narrow enough for that."""
        if self._num_bytes > MAX_MESSAGE_BYTES:
            return None
        try:
            solution = solve(self._rest(), max_joint=MAX_CONDITIONED_COMBINATIONS)
        except TooWide:
            return None
        return self._named(solution.assignment)

    def _named(self, chosen: Sequence[int]) -> list[int]:
        """Return positions among the values that are left as values of the problem."""
        return [int(values[i]) for values, i in zip(self.values, chosen, strict=True)]
