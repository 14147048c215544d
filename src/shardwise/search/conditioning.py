"""Minimising a sum of tables within bounded memory: a good assignment, and a bound that it may not reach.

Cutset conditioning (Dechter, Constraint Processing, 2003, chapter 10): a few variables that make elimination wide are
fixed at a value, and the others are eliminated exactly. Every round fixes other variables, at the values of the best
assignment so far. The bound is that of mini-buckets (Dechter and Rish, Journal of the ACM 50, 2003): in a relaxed
problem every table chooses the values of the cutset for itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import numpy as np

from shardwise.errors import ShardwiseError
from shardwise.search.constants import CONDITIONING_ROUNDS, MAX_CONDITIONED_COMBINATIONS
from shardwise.search.elimination import (
    Interner,
    Problem,
    Scope,
    Solution,
    Table,
    TooWide,
    elimination_of,
    fix_variables,
)


def solve_conditioned(sums: Problem) -> Solution:
    """Return an assignment that no change outside of a cutset improves, and a bound. Raises ShardwiseError if it finds
    no allowed one, though there may be one."""
    # Every table by itself, so that the order of elimination depends on scopes only: it is that of the relaxed problem.
    factors = [(scope, i) for i, (scope, _) in enumerate(sums.factors)]
    tables = Interner([sums.interner.tables[number] for _, number in sums.factors])
    sums = Problem(sums.sizes, factors, tables, sums.known)
    assignment, avoided, bound = greedy(sums), frozenset[int](), -np.inf
    for _ in range(CONDITIONING_ROUNDS):
        cutset = _cutset(sums, avoided)
        others = _eliminated(fix_variables(sums, {variable: assignment[variable] for variable in cutset}))
        assignment = min(others, assignment, key=sums.value)
        relaxed = _relaxed(sums, cutset)
        bound = max(bound, relaxed.value(_eliminated(relaxed)))
        avoided |= cutset
    value = sums.value(assignment)
    if bound < np.inf == value:
        raise ShardwiseError("no plan was found in bounded memory", fix="fewer mesh axes")
    return Solution(assignment, value, MAX_CONDITIONED_COMBINATIONS, bound=min(bound, value))


def _eliminated(sums: Problem) -> list[int]:
    elimination = elimination_of(sums)
    return elimination.assignment(elimination.tables(sums))


def _cutset(sums: Problem, avoided: frozenset[int]) -> frozenset[int]:
    """Return variables without which elimination is narrow: always one of the widest joint table, of those in the most
    tables; ``avoided`` ones only if that has no other."""
    degrees = np.bincount([variable for scope, _ in sums.factors for variable in scope])
    cutset: frozenset[int] = frozenset()
    while True:
        scopes = [tuple([v for v in scope if v not in cutset]) for scope, _ in sums.factors]
        shape = Problem(sums.sizes, [(scope, i) for i, scope in enumerate(scopes)], sums.interner, sums.known)
        try:
            elimination_of(shape, max_joint=MAX_CONDITIONED_COMBINATIONS)
        except TooWide as error:
            cutset |= {max(error.scope, key=lambda v: (v not in avoided, degrees[v], sums.sizes[v], v))}
        else:
            return cutset


def _relaxed(sums: Problem, cutset: frozenset[int]) -> Problem:
    """Return the problem without the cutset: tables choose the values of its variables for themselves. Before that, the
    least cost of a value is moved between the tables of a variable until it is the same in all of them, which raises
    the bound."""
    scopes = [scope for scope, _ in sums.factors]
    tables = [sums.interner.tables[number] for _, number in sums.factors]
    for variable in sorted(cutset):
        at = [i for i, scope in enumerate(scopes) if variable in scope]
        axis = {i: scopes[i].index(variable) for i in at}
        least = {i: np.moveaxis(tables[i], axis[i], 0).reshape(sums.sizes[variable], -1).min(axis=1) for i in at}
        total = np.sum(list(least.values()), axis=0)
        for i in at:
            moved = np.where(np.isfinite(total), total / len(at) - np.where(np.isfinite(least[i]), least[i], 0), np.inf)
            tables[i] = tables[i] + moved.reshape([-1 if k == axis[i] else 1 for k in range(tables[i].ndim)])
    left = [tuple([v for v in scope if v not in cutset]) for scope in scopes]
    for i, scope in enumerate(scopes):
        if chosen := tuple(k for k, v in enumerate(scope) if v in cutset):
            tables[i] = np.asarray(tables[i].min(axis=chosen))
    return Problem(sums.sizes, [(scope, i) for i, scope in enumerate(left)], Interner(tables), sums.known)


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
