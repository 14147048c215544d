"""Synchronization of the ranks after every step: each sends its flags, and how long it was busy.

Busy time is the time between two synchronizations without waiting for other ranks. All ranks wait for the slowest, so a
straggler costs all of them; it is named after a while. Only ranks with the same work are compared: all ranks, or those
of a stage (a plan may have unequal stages). Times are host times: with a GPU they only show when kernels were queued,
so no rank is named.
"""

from __future__ import annotations

import time
import warnings
from collections import deque
from collections.abc import Sequence
from statistics import median

import torch
import torch.distributed as dist

from shardwise.errors import StragglerWarning
from shardwise.runtime.agree import rank_and_world_size
from shardwise.runtime.collective_tracker import trail
from shardwise.runtime.communicator import new_group, rank_device
from shardwise.runtime.failure_store import failure_store

_WINDOW = 20  # steps that are compared together
_SLOWER = 1.2  # busy time of a straggler, relative to the median of the other ranks
_SHARE = 0.8  # fraction of the window's steps in which it must be slower
_LEAST_SECONDS = 0.001  # difference per step; less is noise


class Rounds:
    """Synchronizes the ranks of a run. ``stages``: the ranks of each stage, if any."""

    def __init__(self, stages: Sequence[Sequence[int]] = ()) -> None:
        self._stages = stages
        self._on_host = rank_device().type == "cpu"
        # Flags are the host's: a message through the GPU would wait for its kernels.
        has_group = not self._on_host and rank_and_world_size()[1] > 1
        self._group = new_group(range(dist.get_world_size()), "gloo") if has_group else None
        self.skip()
        self._busy: deque[list[float]] = deque(maxlen=_WINDOW)  # per step, of every rank
        self._named: set[int] = set()

    def meet(self, *flags: bool) -> tuple[bool, ...]:
        """Return, for each flag, whether any rank sets it. Collective, after every step."""
        now, waited = time.perf_counter(), trail.waited_seconds
        busy = now - self._began - (waited - self._waited)
        rank, num_ranks = rank_and_world_size()
        if num_ranks > 1:
            row = torch.tensor([busy, *map(float, flags)], dtype=torch.float64)
            rows = [torch.empty_like(row) for _ in range(num_ranks)]
            with trail.waiting(b"the ranks meet after a step"):
                failure_store.wait(dist.all_gather(rows, row, group=self._group, async_op=True))
            seconds, *columns = torch.stack(rows).t().tolist()
            flags = tuple(any(column) for column in columns)
            self._busy.append(seconds)
            if rank == 0 and self._on_host:
                self._name_stragglers()
        self.skip()
        return flags

    def skip(self) -> None:
        """Restart the busy time: the work since the last synchronization was not part of a step."""
        self._began, self._waited = time.perf_counter(), trail.waited_seconds

    def _name_stragglers(self) -> None:
        if len(self._busy) < _WINDOW:
            return
        slow: dict[int, tuple[float, float]] = {}
        for ranks in self._stages or [range(len(self._busy[0]))]:
            busy = [[seconds[rank] for rank in ranks] for seconds in self._busy]
            slow |= {rank: pace for at, rank in enumerate(ranks) if (pace := slowness(busy, at))}
        for rank in slow.keys() - self._named:
            seconds, others = slow[rank]
            warnings.warn(
                f"rank {rank} is {seconds / others - 1:.0%} slower than the others: in the last {_WINDOW} steps it was "
                f"busy for {seconds:.4f} s of each, the others for {others:.4f} s in the median: all wait for it",
                StragglerWarning,
                stacklevel=4,
            )
        self._named = set(slow)


def slowness(busy: list[list[float]], rank: int) -> tuple[float, float] | None:
    """Return (seconds per step of a rank, median of the others' seconds) if it is a straggler, else None. ``busy``: per
    step the seconds of every rank."""
    if len(busy[0]) == 1:
        return None
    others = [median(seconds[:rank] + seconds[rank + 1 :]) for seconds in busy]
    rank_seconds = [seconds[rank] for seconds in busy]
    late = sum(seconds > _SLOWER * usual for seconds, usual in zip(rank_seconds, others, strict=True))
    average, usual = sum(rank_seconds) / len(rank_seconds), sum(others) / len(others)
    is_slow = average > _SLOWER * usual and average - usual > _LEAST_SECONDS and late >= _SHARE * len(busy)
    return (average, usual) if is_slow else None
