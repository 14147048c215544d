"""The table of ``sw.compare``: the plans of several searches for one model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from shardwise.costs.cluster import Cluster
from shardwise.costs.prediction import between
from shardwise.costs.timeline import SimulatedStep
from shardwise.plans.plan import Plan
from shardwise.plans.quantities import format_bytes, format_bytes_interval, format_interval_seconds, format_seconds
from shardwise.report.alternatives import empty_table, format_table

WIDTH = 240


@dataclass(frozen=True, slots=True)
class ComparedPlan:
    """The plan of one search, or the error that it raised. ``planning_seconds``: the time of ``sw.plan``, capture
    included; ``step``: a simulated step of its program, at the same prices for every search."""

    search: str
    planning_seconds: float
    plan: Plan | None = None
    step: SimulatedStep | None = None
    error: str = ""

    @property
    def num_bytes(self) -> int:
        return (
            0
            if self.plan is None
            else sum(
                entry.num_bytes for backward in (False, True) for entry in self.plan.collectives(backward=backward)
            )
        )


@dataclass(frozen=True)
class Comparison:
    """The compared plans, in the order of ``searches``, on one cluster."""

    rows: tuple[ComparedPlan, ...]
    cluster: Cluster

    def __iter__(self) -> Iterator[ComparedPlan]:
        return iter(self.rows)

    def __getitem__(self, search: str) -> ComparedPlan:
        return next(row for row in self.rows if row.search == search)

    @property
    def best(self) -> ComparedPlan | None:
        """Return the row with the fastest simulated step; None if no search found a plan."""
        planned = [row for row in self.rows if row.step is not None]
        return min(planned, key=lambda row: row.step.seconds if row.step else 0.0, default=None)

    def __str__(self) -> str:
        titles = ("search", "planned in", "mesh", "simulated step", "compute", "exposed", "communication", "peak")
        table = empty_table((*titles, "price gap"), left=("search", "mesh"))
        faults = []
        for row in self.rows:
            if row.plan is None or row.step is None:
                table.add_row(row.search, format_seconds(row.planning_seconds), "no plan")
                faults.append(f"{row.search}: {row.error}")
                continue
            step, gap = row.step, row.plan.optimality_gap
            table.add_row(
                row.search,
                format_seconds(row.planning_seconds),
                ", ".join(f"{name}={size}" for name, size in row.plan.mesh.axes),
                format_interval_seconds(between(step.seconds, step.compute, self.cluster)),
                format_seconds(step.compute),
                format_seconds(step.exposed),
                f"{format_seconds(step.communication)}, {format_bytes(row.num_bytes)}",
                format_bytes_interval(step.peak_bytes, self.cluster),
                "" if gap is None else f"{gap:.2%}",
            )
        return "\n".join([format_table(table, WIDTH), *faults])
