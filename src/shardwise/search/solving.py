"""Minimisation of a sum of tables: by variable elimination, or, if that is wide, by message passing with a gap."""

from __future__ import annotations

import warnings
from contextlib import suppress

from shardwise.errors import ShardwiseError
from shardwise.progress import check_deadline
from shardwise.search.constants import FAST_JOINT_COMBINATIONS, MAX_JOINT_COMBINATIONS
from shardwise.search.elimination import Problem, Solution, TooWide, elimination_of, solve
from shardwise.search.message_passing import solve_wide


class WideWarning(UserWarning):
    """Warns that a densely connected graph was not solved exactly."""


def minimise(problem: Problem) -> Solution:
    """Return an assignment of least value; if it is not proven to be one, warn.

    Where elimination takes seconds, message passing is tried first: it often proves the same in milliseconds.

    Raises OutOfTime if the deadline of the work has passed.
    """
    check_deadline()
    try:
        elimination = elimination_of(problem, max_joint=MAX_JOINT_COMBINATIONS)
    except TooWide as error:
        solution = solve_wide(problem)
        if solution.bound is not None:
            text = f"{error}: solved by message passing, whose bound is the plan's optimality gap"
            warnings.warn(text, WideWarning, stacklevel=3)
        return solution
    if elimination.largest > FAST_JOINT_COMBINATIONS:
        with suppress(ShardwiseError):  # it found no allowed assignment; elimination does if there is one
            solution = solve_wide(problem)
            if solution.bound is None:
                return solution
    return solve(problem, max_joint=MAX_JOINT_COMBINATIONS)
