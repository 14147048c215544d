"""The k assignments of least value, exactly: Lawler's partition of what is left (A procedure for computing the K best
solutions to discrete optimization problems, Management Science 18(7), 1972).

The assignments other than the best fall into as many cells as there are variables: those that agree with it before some
variable and differ there. The best of a cell is one elimination; every assignment that is taken divides its cell again.
"""

from __future__ import annotations

import heapq

import numpy as np

from shardwise.search.elimination import Problem, restricted
from shardwise.search.solving import minimise

# What an assignment may not be: variable -> values; and what it must be: variable -> value.
Cell = tuple[dict[int, int], dict[int, frozenset[int]]]


def k_best(problem: Problem, k: int) -> list[tuple[float, list[int]]]:
    """The ``k`` best (value, assignment), in order; fewer where there are no more. About k times as many eliminations
    as there are variables."""
    first = minimise(problem)
    heap: list[tuple[float, int, list[int], Cell]] = []
    count = 0
    if np.isfinite(first.value):
        heap.append((first.value, count, first.assignment, ({}, {})))
    found: list[tuple[float, list[int]]] = []
    while heap and len(found) < k:
        value, _, assignment, (fixed, banned) = heapq.heappop(heap)
        found.append((value, assignment))
        if len(found) == k:
            break
        held = dict(fixed)
        for variable, own in enumerate(assignment):
            if variable in fixed:
                continue
            without = banned | {variable: banned.get(variable, frozenset()) | {own}}
            if len(without[variable]) < problem.sizes[variable]:
                best = minimise(_within(problem, held, without))
                if np.isfinite(best.value):
                    count += 1
                    heapq.heappush(heap, (best.value, count, best.assignment, (dict(held), without)))
            held[variable] = own
    return found


def _within(problem: Problem, fixed: dict[int, int], banned: dict[int, frozenset[int]]) -> Problem:
    """The problem in one cell."""
    factors = list(problem.factors)
    for variable, values in banned.items():
        allowed = np.zeros(problem.sizes[variable])
        allowed[list(values)] = np.inf
        factors.append(((variable,), problem.interner.add(allowed)))
    return restricted(Problem(problem.sizes, factors, problem.interner), fixed)
