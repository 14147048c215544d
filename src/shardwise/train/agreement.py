"""Exchange of values between ranks around a checkpoint. Without a process group there is one rank."""

from __future__ import annotations

from typing import Any, TypeVar

import torch.distributed as dist

from shardwise.errors import ShardwiseError
from shardwise.runtime.communicator import group_timeout

T = TypeVar("T")
_HALF_AN_HOUR = 1800.0


def rank_and_world_size() -> tuple[int, int]:
    """Return (rank, number of ranks)."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def gather_values(value: T) -> list[T]:
    """Return the values of all ranks, by rank. Collective."""
    _, count = rank_and_world_size()
    values: list[Any] = [value]
    if count > 1:
        values = [None] * count
        dist.all_gather_object(values, value)
    return values


def raise_first(kind: type[ShardwiseError], fault: ShardwiseError | None) -> None:
    """Raise on every rank if any rank has a fault: this rank's own, else that of the first such rank. Collective."""
    faults = gather_values(None if fault is None else str(fault))
    if fault is not None:
        raise fault
    failed = next(((rank, text) for rank, text in enumerate(faults) if text is not None), None)
    if failed is not None:
        raise kind(f"rank {failed[0]}: {failed[1]}")


def patience_seconds() -> float:
    """Return the timeout in seconds when waiting for other ranks."""
    timeout = group_timeout() if rank_and_world_size()[1] > 1 else None
    return _HALF_AN_HOUR if timeout is None else timeout.total_seconds()
