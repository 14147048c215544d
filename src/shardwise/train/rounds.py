"""After every step the ranks meet: in one small message each says what all must know, and how long it was busy.

Busy is what a rank does between two meetings without waiting for others. All wait for the slowest, so a rank that is
busy longer than the others costs all of them; after a while it is named. Compared are ranks with the same work: all,
or those of a stage; how unequal stages are is the plan's affair. Seconds are those of the host: where kernels
run on a GPU behind it, they say when the host queued them, and no rank is named.
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
from shardwise.runtime.agree import wire_device
from shardwise.runtime.collective_tracker import trail
from shardwise.train.agreement import rank_and_world_size

_WINDOW = 20  # steps that are looked at together
_SLOWER = 1.2  # times as long as the median of the other ranks
_SHARE = 0.8  # of the steps of a window, in which it is
_LEAST_SECONDS = 0.001  # per step; less is the noise of the system


class Rounds:
    """The meetings of a run. ``device``: of the module; ``places``: the ranks of each stage, where there are stages."""

    def __init__(self, device: torch.device, places: Sequence[Sequence[int]] = ()) -> None:
        self._places = places
        self._device, self._on_host = wire_device(device), device.type == "cpu"
        self._began, self._waited = time.perf_counter(), trail.waited_seconds
        self._busy: deque[list[float]] = deque(maxlen=_WINDOW)  # per step, of every rank
        self._named: set[int] = set()

    def meet(self, *said: bool) -> tuple[bool, ...]:
        """Which of some things any rank says. Every rank calls this after the same steps."""
        now, waited = time.perf_counter(), trail.waited_seconds
        busy = now - self._began - (waited - self._waited)
        rank, num_ranks = rank_and_world_size()
        if num_ranks > 1:
            row = torch.tensor([busy, *map(float, said)], dtype=torch.float64, device=self._device)
            rows = [torch.empty_like(row) for _ in range(num_ranks)]
            with trail.waiting(b"the ranks meet after a step"):
                dist.all_gather(rows, row)
            seconds, *flags = torch.stack(rows).t().tolist()
            said = tuple(any(flag) for flag in flags)
            self._busy.append(seconds)
            if rank == 0 and self._on_host:
                self._name_stragglers()
        self._began, self._waited = time.perf_counter(), trail.waited_seconds
        return said

    def skip(self) -> None:
        """What was done since the last meeting is no part of a step."""
        self._began, self._waited = time.perf_counter(), trail.waited_seconds

    def _name_stragglers(self) -> None:
        if len(self._busy) < _WINDOW:
            return
        slow: dict[int, tuple[float, float]] = {}
        for ranks in self._places or [range(len(self._busy[0]))]:
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
    """(seconds per step of a rank, median of the others' seconds), if it is a straggler. Given: per step the seconds
    of every rank."""
    if len(busy[0]) == 1:
        return None
    others = [median(seconds[:rank] + seconds[rank + 1 :]) for seconds in busy]
    rank_seconds = [seconds[rank] for seconds in busy]
    late = sum(mine > _SLOWER * theirs for mine, theirs in zip(rank_seconds, others, strict=True))
    average, usual = sum(rank_seconds) / len(rank_seconds), sum(others) / len(others)
    is_slow = average > _SLOWER * usual and average - usual > _LEAST_SECONDS and late >= _SHARE * len(busy)
    return (average, usual) if is_slow else None


__all__ = ["Rounds", "slowness"]
