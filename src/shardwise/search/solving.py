"""How a sum of tables is minimised: by variable elimination, and where that is too wide as an integer program."""

from __future__ import annotations

import warnings
from collections.abc import Callable

from shardwise.search.elimination import MAX_JOINT, Elimination, Problem, Solution, TooWide, elimination_of, solve

Solver = Callable[[Problem], Solution]


class WideWarning(UserWarning):
    """Variable elimination would take too long on a densely connected graph."""


def minimise(problem: Problem) -> Solution:
    """By elimination; where that is too wide, as an integer program."""
    try:
        return solve(problem, max_joint=MAX_JOINT)
    except TooWide as error:
        from shardwise.search.ilp import solve_ilp

        warnings.warn(
            f"{error}, more than {MAX_JOINT}: solved as an integer program, whose bound is the plan's optimality gap",
            WideWarning,
            stacklevel=2,
        )
        return solve_ilp(problem)


def narrow_elimination(problem: Problem) -> Elimination:
    """How a problem is eliminated. Raises TooWide where it is not worth it."""
    return elimination_of(problem, max_joint=MAX_JOINT)


def solver_of(search: str) -> Solver:
    """How a search minimises a sum of tables."""
    if search == "ilp":
        from shardwise.search.ilp import solve_ilp

        return solve_ilp
    return minimise
