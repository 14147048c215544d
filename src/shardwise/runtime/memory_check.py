"""Check whether each rank's GPU, and its machine, have room for its program before anything is placed there; say what a
GPU held if it had none."""

from __future__ import annotations

import platform
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from math import prod
from pathlib import Path

import torch
import torch.distributed as dist

from shardwise.costs import probe
from shardwise.costs.memory import pinned_bytes
from shardwise.costs.optimizers import is_on_host, states_of
from shardwise.costs.units import format_quantity
from shardwise.errors import OutOfDeviceMemoryError
from shardwise.layouts.text import parse_dtype
from shardwise.plans.plan import Plan
from shardwise.programs.state_groups import is_offloaded
from shardwise.runtime.agree import gather_values

# Relative error by which a predicted peak may be too high (see the page on clusters); refuse only beyond it.
_TOO_HIGH = 0.05


def require_memory(plan: Plan, device: torch.device, trainable: Collection[str] = ()) -> None:
    """Raise OutOfDeviceMemoryError on every rank if any rank's GPU has less free memory than the predicted peak of a
    step, or a machine less than the states that the optimizer keeps there. Every rank calls it. Plans without a
    prediction are not checked for the first. ``trainable``: names of the parameters that the optimizer updates."""
    if device.type != "cuda":
        return
    if plan.predicted is not None:
        room, needed = memory_on(device), plan.predicted.memory_bytes / (1 + _TOO_HIGH)
        short = gather_values(room if room[0] < needed else None)  # most ranks have nothing to tell
        check_memory(plan, {rank: room for rank, room in enumerate(short) if room is not None})
    if is_on_host(plan.optimizer):
        _check_host(gather_values((platform.node(), probe.memory_bytes(), _states_on_host(plan, trainable))))


def _states_on_host(plan: Plan, trainable: Collection[str]) -> int:
    """Return the bytes that this rank pins for the states of its parameters."""
    rank = dist.get_rank()
    sizes: dict[str, int] = {}
    for stage in plan.stages:
        for entry in stage.parameters if rank in stage.placement.ranks else ():
            shape = stage.layouts[entry.name].local_shape(stage.placement.coordinates(rank))
            sizes[entry.name] = prod(shape) * parse_dtype(entry.dtype).itemsize
    pinned = (pinned_bytes(size) for name, size in sizes.items() if name in trainable and is_offloaded(size))
    return states_of(plan.optimizer) * sum(pinned)


def _check_host(ranks: Sequence[tuple[str, int, int]]) -> None:
    """``ranks``: (machine, bytes that it has, bytes of states there) of every rank."""
    by_machine: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for machine, room, size in ranks:
        by_machine[machine].append((room, size))
    for machine, here in by_machine.items():
        room, needed = min(room for room, _ in here), sum(size for _, size in here)
        if needed > room:
            what = (
                f"the states of the optimizer need {format_quantity(needed, 'B')} of pinned memory for {len(here)} "
                f"ranks on {machine}, which has {format_quantity(room, 'B')}"
            )
            facts = [("pinned", "each tensor takes the next power of two")]
            fix = "plan with zero=1 or more, over more machines, or without 'on host'"
            raise OutOfDeviceMemoryError(what, facts=facts, fix=fix)


def memory_on(device: torch.device) -> tuple[int, int]:
    """Return (bytes this process can allocate, total bytes) of a GPU."""
    return probe.room(torch.cuda.current_device() if device.index is None else device.index)


def check_memory(plan: Plan, rooms: Mapping[int, tuple[int, int]]) -> None:
    """Raise OutOfDeviceMemoryError if one of the given ranks has less room than the predicted peak of a step. ``rooms``
    maps a rank to (free bytes, total bytes)."""
    if plan.predicted is None or not rooms:
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


def note_memory(error: BaseException, device: torch.device) -> None:
    """Add to an out-of-memory error of a GPU what its allocator holds. If torch records the history of the memory, also
    write a snapshot to the working directory."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    taken, reserved = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
    of_reserved = f"{format_quantity(taken, 'B')} of the {format_quantity(reserved, 'B')} that torch has reserved"
    fix = "PYTORCH_ALLOC_CONF=expandable_segments:True lets tensors of any size use the rest"
    error.add_note(f"on rank {rank}: tensors take {of_reserved}; {fix}")
    if torch._C._cuda_isHistoryEnabled():
        path = Path(f"memory-of-rank-{rank}.pickle").absolute()
        torch.cuda.memory._dump_snapshot(str(path))
        error.add_note(f"a snapshot of the memory is in {path}: open it at https://docs.pytorch.org/memory_viz")
    else:
        error.add_note("torch.cuda.memory._record_memory_history() ahead of the step has a snapshot of it written")
