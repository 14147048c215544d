"""Parameters that stages on several places of a pipeline have: each place has all shards, on the devices of the same
numbers."""

from __future__ import annotations

from typing import Any

from shardwise.plans.plan import Plan
from shardwise.runtime.torch_schedules import position_groups


def shared_places(plan: Plan) -> dict[str, tuple[tuple[int, ...], ...]]:
    """Parameter that several places have -> the ranks of each of them."""
    places: dict[str, dict[tuple[int, ...], None]] = {}
    for stage in plan.stages:
        for entry in stage.parameters:
            places.setdefault(entry.name, {})[stage.placement.ranks] = None
    return {name: tuple(ranks) for name, ranks in places.items() if len(ranks) > 1}


def shared_groups(plan: Plan, own: tuple[int, ...], position: int, host: frozenset[str]) -> dict[str, Any]:
    """Parameter that several places have, ``own`` among them -> the process group of the ranks with the shard of a
    position. ``host``: names of the tables on the CPU, whose groups are gloo's. All ranks make all groups."""
    groups: dict[tuple[tuple[tuple[int, ...], ...], bool], Any] = {}
    found: dict[str, Any] = {}
    for name, places in shared_places(plan).items():
        key = places, name in host
        if key not in groups:
            groups[key] = position_groups(places, "gloo" if name in host else None)[position]
        if own in places:
            found[name] = groups[key]
    return found


__all__ = ["shared_groups", "shared_places"]
