"""Whether a rank's program has room on its GPU, before anything is put there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from shardwise.costs import probe
from shardwise.costs.units import format_quantity
from shardwise.errors import OutOfDeviceMemoryError, problem
from shardwise.plans.plan import Plan

# By which part a predicted peak may be too high (the page on clusters): a plan is refused for what is surely too much.
_TOO_HIGH = 0.05


def require_memory(plan: Plan, device: torch.device) -> None:
    """Raises OutOfDeviceMemoryError, on every rank, where a rank's GPU has less memory left than a step of the plan was
    predicted to take. Every rank calls it. Plans that nobody priced are not judged."""
    if device.type != "cuda" or plan.predicted is None:
        return
    rooms: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(rooms, memory_on(device))
    check_memory(plan, dict(enumerate(rooms)))


def memory_on(device: torch.device) -> tuple[int, int]:
    """Bytes of a GPU: that this process can get, and all."""
    return probe.room(torch.cuda.current_device() if device.index is None else device.index)


def check_memory(plan: Plan, rooms: Mapping[int, tuple[int, int]]) -> None:
    """Raises OutOfDeviceMemoryError where one of some ranks has less room than a step of the plan was predicted to
    take."""
    if plan.predicted is None:
        return
    needed = plan.predicted.memory_bytes / (1 + _TOO_HIGH)
    rank, (room, whole) = min(rooms.items(), key=lambda entry: entry[1][0])
    if needed <= room:
        return
    taken, free, total = (format_quantity(x, "B") for x in (plan.predicted.memory_bytes, room, whole))
    raise OutOfDeviceMemoryError(
        problem(
            f"a step of the plan takes {taken} of a device, and rank {rank} can get {free} of the {total} of its GPU",
            facts=[("peak", plan.predicted.peak_at)] if plan.predicted.peak_at else (),
            fix="end what else uses this GPU (nvidia-smi), plan with memory_bytes= of what is free or for more devices",
        )
    )


__all__ = ["check_memory", "memory_on", "require_memory"]
