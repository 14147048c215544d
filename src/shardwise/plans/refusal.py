"""The error if nothing fits: the least memory that was found, its sum, and the tensors that take most of it."""

from __future__ import annotations

from shardwise.errors import NothingFits
from shardwise.graph.ir import Graph
from shardwise.graph.naming import value_name
from shardwise.plans.printing import format_bytes
from shardwise.search.cost_graph import CostGraph, bytes_of_variables
from shardwise.search.ranking import CandidateRanking

NUM_LARGEST = 5


def nothing_fits(least: CandidateRanking) -> NothingFits:
    """Return the error. ``least``: the plan that needs the least memory of all considered. Its peak is an upper bound
    of the least that any plan needs."""
    cost, assignment, peak = least.search.cost, least.search.outcome.assignment, least.best.peak
    total = int(least.best.num_bytes)
    parts = {**peak.parts, "kept of other micro-batches in flight": least.best.others}
    added = " + ".join(f"{name} {size:,}" for name, size in parts.items() if size)
    return NothingFits(
        f"no plan fits: the least memory that was found is {format_bytes(total)} a device, "
        f"{format_bytes(int(least.limit))} are allowed{_reserved(cost, least.limit)}",
        [
            ("needed", f"{added} = {total:,} bytes, at the peak of the plan that needs least, {peak.where}"),
            ("largest", _largest(cost, assignment)),
            ("least", "is what that plan takes; messages and temporaries do not add up, so another may take less"),
        ],
        "use more devices or devices with more memory, a smaller micro_batch=, an optimizer with fewer states or with "
        'its states on the host ("adamw on host"), or recompute="auto" (the default); sw.fits plans such fixes and '
        "names the three cheapest",
    )


def _reserved(cost: CostGraph, limit: float) -> str:
    """Return how the limit is computed, if it is what the devices have."""
    device = cost.domains.prices.device
    if not device.reserve_bytes or limit != device.usable_bytes:
        return ""
    return f" ({format_bytes(device.memory_bytes)} less a reserve of {format_bytes(device.reserve_bytes)})"


def _largest(cost: CostGraph, assignment: list[int]) -> str:
    """Return the tensors that hold most, with all that belongs to them, and the total of the others."""
    num_bytes = sorted(bytes_of_variables(cost, assignment).items(), key=lambda item: -item[1])
    graph, others = cost.domains.graph, [size for _, size in num_bytes[NUM_LARGEST:] if size]
    shown = [
        f"{kind} {_shown(graph, kind, name)} {format_bytes(size)}" for (kind, name), size in num_bytes[:NUM_LARGEST]
    ]
    rest = [f"{len(others)} others {format_bytes(sum(others))}"] if others else []
    return ", ".join(shown + rest)


def _shown(graph: Graph, kind: str, name: str) -> str:
    return name if kind == "operator" else value_name(name, graph)
