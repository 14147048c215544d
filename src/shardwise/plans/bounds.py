"""Least sums of a finished search that bound a step."""

from __future__ import annotations

from shardwise.errors import PlanError, problem
from shardwise.layouts.routes import Floats
from shardwise.search.auto import MeshSearch
from shardwise.search.elimination import Problem, Solution, TooWide, solve


def step_bounds(search: MeshSearch, variable: int) -> Floats:
    """Per value of a variable, a bound of the step of every plan that has it (exact where the plan reaches it)."""
    marginal = minimum_by_value(search.cost.weighted(search.bounding_weights), variable).marginal
    assert marginal is not None, "the variable was eliminated last"
    return marginal


def minimum_by_value(table: Problem, last: int | None = None) -> Solution:
    """By elimination. Raises PlanError where that is too wide."""
    try:
        return solve(table, last=last)
    except TooWide as error:
        raise PlanError(
            problem(
                f"the plan cannot be explained: the model is too densely connected ({error})",
                fix="compare plans in which the operator has other strategies: sw.plan(..., strategies=...)",
            )
        ) from error
