"""Lower bounds of a step, from the least sums of a finished search."""

from __future__ import annotations

from shardwise.errors import PlanError
from shardwise.layouts.routes import Floats
from shardwise.search.auto import MeshSearch
from shardwise.search.elimination import Problem, Solution, TooWide, solve


def step_bounds(search: MeshSearch, variable: int) -> Floats:
    """Return, per value of a variable, a lower bound of the step of all plans with it (exact if the plan reaches
    it)."""
    marginal = minimum_by_value(search.cost.weighted(search.bounding_weights), variable).marginal
    assert marginal is not None, "the variable was eliminated last"
    return marginal


def minimum_by_value(table: Problem, last: int | None = None) -> Solution:
    """Minimise by elimination. Raises PlanError if that is too wide."""
    try:
        return solve(table, last=last)
    except TooWide as error:
        raise PlanError(
            f"the plan cannot be explained: the model is too densely connected ({error})",
            fix="compare plans in which the operator has other strategies: sw.plan(..., strategies=...)",
        ) from error
