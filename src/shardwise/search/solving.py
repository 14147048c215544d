"""Minimisation of a sum of tables: by variable elimination, if that is too wide as an integer program, and if that is
too large by conditioning."""

from __future__ import annotations

import warnings
from collections.abc import Callable

from shardwise.search.conditioning import solve_conditioned
from shardwise.search.constants import MAX_JOINT_COMBINATIONS
from shardwise.search.elimination import Problem, Solution, TooWide, solve

Solver = Callable[[Problem], Solution]


class WideWarning(UserWarning):
    """Warns that variable elimination would take too long on a densely connected graph."""


def minimise(problem: Problem) -> Solution:
    try:
        return solve(problem, max_joint=MAX_JOINT_COMBINATIONS)
    except TooWide as error:
        return _bounded(problem, f"{error}")


def _bounded(problem: Problem, cause: str = "") -> Solution:
    """Solve as an integer program; if that is too large, by conditioning. ``cause``: why, if it was not asked for."""
    from shardwise.search.ilp import TooLarge, solve_ilp

    how = "as an integer program"
    try:
        solution = solve_ilp(problem)
    except TooLarge as error:
        solution, how = solve_conditioned(problem), "with some choices fixed in turns"
        cause = f"{cause}; {error}" if cause else f"{error}"
    if cause:
        text = f"{cause}: solved {how}, whose bound is the plan's optimality gap"
        warnings.warn(text, WideWarning, stacklevel=3)
    return solution


def solver_of(search: str) -> Solver:
    return _bounded if search == "ilp" else minimise
