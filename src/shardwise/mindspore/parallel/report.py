"""Readable reports on the copies and redistributions in a split cell's plan."""

from __future__ import annotations

from math import prod
from typing import Any

import shardwise as sw
from shardwise.mindspore import engine
from shardwise.mindspore.library import format_bytes, parse_dtype, parse_layout

# How the reference makes each collective of a redistribution: collectives, splits and concatenations.
PARTS = {
    "all_gather": "AllGather, with Split and Concat if it is not dim 0",
    "all_to_all": "AlltoAll",
    "all_reduce": "AllReduce",
    "reduce_scatter": "ReduceScatter",
    "collective_permute": "Send and Receive",
    "slice": "StridedSlice",
}


def _plan_of(network: Any) -> sw.Plan:
    if isinstance(network, sw.Plan):
        return network
    return engine.plan_of(network)


def copies_report(network: Any) -> str:
    """Report the copies of each parameter and their total size, for a cell that has run split or for a plan."""
    plan = _plan_of(network)
    devices, lines, whole, stored = plan.mesh.num_devices, [], 0, 0
    for entry in plan.parameters:
        layout = parse_layout(entry.layout, plan.mesh)
        num_bytes = prod(entry.shape) * parse_dtype(entry.dtype).itemsize
        parts = prod(plan.mesh.sizes[axis] for axis in layout.positions)
        whole, stored = whole + num_bytes, stored + num_bytes * devices // parts
        lines.append(f"{entry.name}: {format_bytes(num_bytes)}, {devices // parts} copies, {layout}")
    redundant = f"{stored / whole - 1:.3g} times the parameters" if whole else "nothing"
    total = f"{devices} devices hold {format_bytes(stored)} of {format_bytes(whole)}: redundancy: {redundant}"
    return "\n".join((*lines, total))


def redistribution_report(network: Any) -> str:
    """Report every redistribution between operators with its collectives and slices, and the reference's names for
    them, for a cell that has run split or for a plan."""
    plan, lines = _plan_of(network), []
    for entry in plan.conversions:
        moves = [move.split("(")[0].split("@")[0].strip() for move in entry.path] or [c.kind for c in entry.forward]
        names = "; ".join(f"{PARTS[word]}" for word in (c.kind for c in entry.forward) if word in PARTS)
        lines.append(f"{entry} [{', '.join(moves)}]" + (f" ({names})" if names else ""))
    return "\n".join(lines) or "no redistribution"
