"""Minimisation of a sum of tables: by variable elimination, or, if that is too wide, by message passing with a gap."""

from __future__ import annotations

import warnings
from collections.abc import Callable

from shardwise.search.constants import MAX_JOINT_COMBINATIONS
from shardwise.search.elimination import Problem, Solution, TooWide, solve
from shardwise.search.message_passing import solve_wide

Solver = Callable[[Problem], Solution]


class WideWarning(UserWarning):
    """Warns that a densely connected graph was not solved exactly."""


def minimise(problem: Problem) -> Solution:
    try:
        return solve(problem, max_joint=MAX_JOINT_COMBINATIONS)
    except TooWide as error:
        return _wide(problem, f"{error}")


def _ilp(problem: Problem) -> Solution:
    from shardwise.search.ilp import TooLarge, solve_ilp

    try:
        return solve_ilp(problem)
    except TooLarge as error:
        return _wide(problem, f"{error}")


def _wide(problem: Problem, cause: str) -> Solution:
    """Solve by message passing, and warn where the solution is not proven to be of least value."""
    solution = solve_wide(problem)
    if solution.bound is not None:
        text = f"{cause}: solved by message passing, whose bound is the plan's optimality gap"
        warnings.warn(text, WideWarning, stacklevel=4)
    return solution


def solver_of(search: str) -> Solver:
    return _ilp if search == "ilp" else minimise
