"""Check whether each rank's GPU has room for its program before anything is placed on it."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from shardwise.costs import probe
from shardwise.costs.units import format_quantity
from shardwise.errors import OutOfDeviceMemoryError
from shardwise.plans.plan import Plan
from shardwise.runtime.agree import gather_values

# Relative error by which a predicted peak may be too high (see the page on clusters); refuse only beyond it.
_TOO_HIGH = 0.05


def require_memory(plan: Plan, device: torch.device) -> None:
    """Raise OutOfDeviceMemoryError on every rank if any rank's GPU has less free memory than the predicted peak of a
    step. Every rank calls it. Plans without a prediction are not checked."""
    if device.type != "cuda" or plan.predicted is None:
        return
    check_memory(plan, dict(enumerate(gather_values(memory_on(device)))))


def memory_on(device: torch.device) -> tuple[int, int]:
    """Return (bytes this process can allocate, total bytes) of a GPU."""
    return probe.room(torch.cuda.current_device() if device.index is None else device.index)


def check_memory(plan: Plan, rooms: Mapping[int, tuple[int, int]]) -> None:
    """Raise OutOfDeviceMemoryError if one of the given ranks has less room than the predicted peak of a step. ``rooms``
    maps a rank to (free bytes, total bytes)."""
    if plan.predicted is None:
        return
    needed = plan.predicted.memory_bytes / (1 + _TOO_HIGH)
    rank, (room, whole) = min(rooms.items(), key=lambda entry: entry[1][0])
    if needed <= room:
        return
    taken, free, total = (format_quantity(x, "B") for x in (plan.predicted.memory_bytes, room, whole))
    raise OutOfDeviceMemoryError(
        f"a step of the plan needs {taken} per device, but rank {rank} has {free} free of the {total} of its GPU",
        facts=[("peak", plan.predicted.peak_at)] if plan.predicted.peak_at else (),
        fix="end other processes on this GPU (nvidia-smi), plan with less memory_bytes= or more devices",
    )
