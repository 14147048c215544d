"""Synchronization of the ranks after every step: they agree on flags, and rank 0 learns how long each was busy.

Busy time is the time between two synchronizations without waiting for other ranks. All ranks wait for the slowest, so a
straggler costs all of them; it is named after a while. Only ranks with the same work are compared: all ranks, or those
of a stage (a plan may have unequal stages). Times are host times: with a GPU they only show when kernels were queued,
so no rank is named.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Sequence
from statistics import median

import torch

from shardwise.errors import StragglerWarning
from shardwise.runtime.agree import rank_and_world_size, rank_tree
from shardwise.runtime.collective_tracker import trail
from shardwise.runtime.communicator import rank_device
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
        # Of gloo: flags are the host's, and a message through the GPU would wait for its kernels.
        self._tree = rank_tree() if rank_and_world_size()[1] > 1 else None
        self.skip()
        self._seconds: list[float] = []  # busy time of this rank, per step
        self._busy: list[list[float]] = []  # on rank 0: per step of the last window, of every rank
        self._named: set[int] = set()

    def meet(self, *flags: bool) -> tuple[bool, ...]:
        """Return, for each flag, whether any rank sets it. Collective, after every step."""
        now, waited = time.perf_counter(), trail.waited_seconds
        busy = now - self._began - (waited - self._waited)
        if self._tree is not None:
            row = torch.tensor([0, *flags], dtype=torch.int8)  # a message even without flags
            if self._on_host:
                self._seconds.append(busy)
            with trail.waiting(b"the ranks meet after a step"):
                _, *columns = self._tree.largest(row, failure_store.wait).tolist()
                flags = tuple(map(bool, columns))
                if len(self._seconds) == _WINDOW:
                    everywhere, self._seconds = self._tree.gather(self._seconds, to_all=False), []
                    if rank_and_world_size()[0] == 0:
                        self._busy = [list(step) for step in zip(*everywhere, strict=True)]
                        self._name_stragglers()
        self.skip()
        return flags

    def skip(self) -> None:
        """Restart the busy time: the work since the last synchronization was not part of a step."""
        self._began, self._waited = time.perf_counter(), trail.waited_seconds

    def _name_stragglers(self) -> None:
        slow: dict[int, tuple[float, float]] = {}
        for ranks in self._stages or [range(len(self._busy[0]))]:
            busy = [[seconds[rank] for rank in ranks] for seconds in self._busy]
            least = sum(sorted(seconds)[max(0, len(ranks) // 2 - 1)] for seconds in busy)  # at most the others' medians
            late = [at for at in range(len(ranks)) if sum(seconds[at] for seconds in busy) > _SLOWER * least]
            slow |= {ranks[at]: pace for at in late if (pace := slowness(busy, at))}
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
