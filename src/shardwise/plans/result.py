"""The result of planning: a plan, and the report of the search that chose it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from shardwise.errors import PlanError
from shardwise.plans.plan import Plan


class PlanReport(Protocol):
    """Answers of the search that chose a plan (``report.search_reports``)."""

    def explain(self, name: str) -> Any:
        """Return why an operator is split, or a parameter is stored, as it is. ``"micro_batch"``, ``"stages"``: the
        sizes and the pipelines that were compared."""

    def what_if(self, name: str, choice: str) -> Any:
        """Return the best plan in which an operator has the strategy, or a parameter the layout, ``choice``."""

    def top(self, k: int = 5) -> Any:
        """Return the best ``k`` plans of the search."""

    def cost_graph(self, path: str | Path) -> None:
        """Write the cost graph that the search minimised."""

    def trace(self, path: str | Path) -> None:
        """Write a simulated step as a trace for Perfetto."""

    def write(self, path: str | Path, *, other: Any = None, profile: Any = None) -> None:
        """Write the plan and the report as an HTML page."""


@dataclass(frozen=True, eq=False)
class PlanningResult:
    """What ``sw.plan`` returns: a plan, which is data, and the report of the search that chose it.

    A result is taken wherever a plan is, and has the plan's attributes. A copy for another process has no report.
    """

    plan: Plan
    search_report: PlanReport | None = None
    search_again: Callable[[], PlanReport | None] | None = None  # of a plan that a cache remembered

    @property
    def report(self) -> PlanReport:
        """The report of the search. Raises PlanError if the plan was not chosen by price."""
        if self.search_report is None and self.search_again is not None:
            object.__setattr__(self, "search_report", self.search_again())
        if self.search_report is None:
            was_searched = self.plan.is_searched or self.plan.pipeline is not None
            why = "it comes from another process" if was_searched else "it was not chosen by price"
            fix = 'plan here with sw.plan(..., search="dynamic_programming")'
            raise PlanError(f"the plan cannot be explained: {why}", fix=fix)
        return self.search_report

    def __getattr__(self, name: str) -> Any:
        if name == "plan" or name.startswith("__"):  # a copy under construction has no plan yet
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.plan, name)

    def __str__(self) -> str:
        return str(self.plan)

    def __eq__(self, other: object) -> bool:
        return bool(self.plan == plan_of(other))

    def __hash__(self) -> int:
        return hash(self.plan)

    def __reduce__(self) -> tuple[Any, ...]:
        return PlanningResult, (self.plan,)


def plan_of(given: Any) -> Any:
    """Return the plan of a result; anything else as it is."""
    return given.plan if isinstance(given, PlanningResult) else given
