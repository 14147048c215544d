"""Improving an assignment within bounded memory.

Cutset conditioning (Dechter, Constraint Processing, 2003, chapter 10): a few variables that make elimination wide are
fixed at a value, and the others are eliminated exactly. Every round fixes other variables, at the values of the best
assignment so far.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heapify, heappop, heappush
from math import log
from typing import Any

import numpy as np

from shardwise.search.constants import CONDITIONING_ROUNDS, MAX_CONDITIONED_COMBINATIONS
from shardwise.search.elimination import Interner, Problem, TooWide, elimination_of, fix_variables


def improve_by_conditioning(sums: Problem, assignment: list[int], cutsets: list[frozenset[int]]) -> list[int]:
    """Return the best assignment of a few rounds: none that differs outside of a cutset is better. ``cutsets``: those
    of an earlier problem with the same scopes and sizes, or none, which are added."""
    # Every table by itself, so that the order of elimination depends on scopes only: it is that of the cutset.
    factors = [(scope, i) for i, (scope, _) in enumerate(sums.factors)]
    tables = Interner([sums.interner.tables[number] for _, number in sums.factors])
    sums = Problem(sums.sizes, factors, tables, sums.known)
    for number in range(CONDITIONING_ROUNDS):
        if number == len(cutsets):
            cutsets.append(_cutset(sums, frozenset().union(*cutsets)))
        cutset = cutsets[number]
        fixed = fix_variables(sums, {variable: assignment[variable] for variable in cutset})
        elimination = elimination_of(fixed)
        assignment = min(elimination.assignment(elimination.tables(fixed)), assignment, key=sums.value)
    return assignment


def _cutset(sums: Problem, avoided: frozenset[int]) -> frozenset[int]:
    """Return variables without which elimination is narrow: always one of a joint table that would be too wide, of
    those in the most tables; ``avoided`` ones only if that has no other."""
    degrees = np.bincount([variable for scope, _ in sums.factors for variable in scope], minlength=len(sums.sizes))

    def order(variable: int) -> tuple[bool, int, int, int]:
        return variable not in avoided, int(degrees[variable]), sums.sizes[variable], variable

    cutset = _cutset_of_one_pass(sums, order)
    while True:  # the elimination joins tables in another order
        scopes = [tuple([v for v in scope if v not in cutset]) for scope, _ in sums.factors]
        shape = Problem(sums.sizes, [(scope, i) for i, scope in enumerate(scopes)], sums.interner)
        try:
            elimination_of(shape, max_joint=MAX_CONDITIONED_COMBINATIONS)
        except TooWide as error:
            cutset |= {max(error.scope, key=order)}
        else:
            return cutset


def _cutset_of_one_pass(sums: Problem, order: Callable[[int], Any]) -> frozenset[int]:
    """Eliminate the variable of the smallest joint table, again and again; where that is too wide, leave out one of its
    variables, the last in ``order``. Return what was left out."""
    beside: dict[int, set[int]] = {variable: set() for variable in range(len(sums.sizes))}
    for scope, _ in sums.factors:
        for variable in scope:
            beside[variable].update(scope)
    for variable, others in beside.items():
        others.discard(variable)

    def joint(variable: int) -> float:
        return sum(log(sums.sizes[v]) for v in (variable, *beside[variable]))

    cutset, most = set[int](), log(MAX_CONDITIONED_COMBINATIONS)
    heap = [(joint(variable), variable) for variable in beside]
    heapify(heap)
    while heap:
        size, variable = heappop(heap)
        if variable not in beside or size != joint(variable):
            continue  # it is gone, or stands in the heap again
        others = beside[variable]
        if size > most:
            variable = max((variable, *others), key=order)
            cutset.add(variable)
            others = beside[variable]
        else:
            for other in others:
                beside[other] |= others - {other}
        del beside[variable]
        for other in others:
            beside[other].discard(variable)
            heappush(heap, (joint(other), other))
    return frozenset(cutset)
