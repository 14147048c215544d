"""Why nothing fits: the least memory that was found, added up, and the tensors that make most of it."""

from __future__ import annotations

from math import ceil

from shardwise.errors import PlanError, problem
from shardwise.graph.ir import Graph
from shardwise.graph.naming import value_name
from shardwise.plans.printing import format_bytes
from shardwise.search.cost_graph import CostGraph, bytes_of_variables
from shardwise.search.ranking import Ranked

NUM_LARGEST = 5


def nothing_fits(least: Ranked) -> PlanError:
    """The refusal, where ``least`` needs the least memory of all plans looked at."""
    cost, assignment, parts = least.search.cost, least.search.outcome.assignment, least.peak_parts
    if parts:
        where = f"at the peak of the plan that keeps least, {least.prediction.peak_at}"
    else:  # a graph too large to simulate
        parts, where = _kept(cost, assignment), "without temporaries and messages"
    total = sum(parts.values())
    added = " + ".join(f"{name} {size:,}" for name, size in parts.items() if size)
    return PlanError(
        problem(
            f"no plan fits: the least memory that any plan needs is {format_bytes(total)} a device, "
            f"{format_bytes(int(least.limit))} are allowed",
            facts=[("needed", f"{added} = {total:,} bytes, {where}"), ("largest", _largest(cost, assignment))],
            fix="use more devices or devices with more memory, a smaller batch, or an optimizer with fewer states",
        )
    )


def _kept(cost: CostGraph, assignment: list[int]) -> dict[str, int]:
    """What adds up over choices."""
    num_bytes = bytes_of_variables(cost, assignment)
    stored = sum(size for (kind, _), size in num_bytes.items() if kind == "storage")
    kept = sum(size for (kind, _), size in num_bytes.items() if kind != "storage")
    return {"parameters with gradients and optimizer states": ceil(stored), "values kept for backward": ceil(kept)}


def _largest(cost: CostGraph, assignment: list[int]) -> str:
    """The tensors that hold most, with all that belongs to them, and how much the others are together."""
    num_bytes = sorted(bytes_of_variables(cost, assignment).items(), key=lambda item: -item[1])
    graph, others = cost.domains.graph, [size for _, size in num_bytes[NUM_LARGEST:] if size]
    shown = [
        f"{kind} {_shown(graph, kind, name)} {format_bytes(size)}" for (kind, name), size in num_bytes[:NUM_LARGEST]
    ]
    rest = [f"{len(others)} others {format_bytes(sum(others))}"] if others else []
    return ", ".join(shown + rest)


def _shown(graph: Graph, kind: str, name: str) -> str:
    return name if kind == "operator" else value_name(name, graph)
