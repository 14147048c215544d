"""Improving an assignment within bounded memory.

Cutset conditioning (Dechter, Constraint Processing, 2003, chapter 10): a few variables that make elimination wide are
fixed at a value, and the others are eliminated exactly. Every round fixes other variables, at the values of the best
assignment so far.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import numpy as np

from shardwise.search.constants import CONDITIONING_ROUNDS, MAX_CONDITIONED_COMBINATIONS
from shardwise.search.elimination import Interner, Problem, Scope, Table, TooWide, elimination_of, fix_variables


def improve_by_conditioning(sums: Problem, assignment: list[int]) -> list[int]:
    """Return the best assignment of a few rounds: none that differs outside of a cutset is better."""
    # Every table by itself, so that the order of elimination depends on scopes only: it is that of the cutset.
    factors = [(scope, i) for i, (scope, _) in enumerate(sums.factors)]
    tables = Interner([sums.interner.tables[number] for _, number in sums.factors])
    sums = Problem(sums.sizes, factors, tables, sums.known)
    avoided = frozenset[int]()
    for _ in range(CONDITIONING_ROUNDS):
        cutset = _cutset(sums, avoided)
        fixed = fix_variables(sums, {variable: assignment[variable] for variable in cutset})
        elimination = elimination_of(fixed)
        assignment = min(elimination.assignment(elimination.tables(fixed)), assignment, key=sums.value)
        avoided |= cutset
    return assignment


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
