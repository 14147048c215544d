"""Runs ranks as threads of this process, for code that calls ``torch.distributed`` itself.

Other tools' plans are executed by the tools' own code: DTensor, ``fully_shard``, the layers of transformers. Each rank
is a thread with its own default process group. A collective waits for its members, checks that they reached the same
one, and is then computed on their tensors (PyTorch's own tests run DTensor and FSDP2 on these groups). Afterwards the
caller's process group, if any, is restored. A thread that did not end in time, for example after an interrupt, is
excluded from later collectives.
"""

from __future__ import annotations

import contextvars
import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed import multi_threaded_pg as threaded
from torch.utils import _pytree as pytree

from shardwise.errors import ShardwiseError
from shardwise.layouts.mesh import Mesh

WAITING_SECONDS = 1.0  # limit once a rank has ended or failed and all others wait in collectives
STALLED_SECONDS = 30.0  # the same, if one of the others is not in a collective

# Class of PyTorch's threaded groups -> the name of the collective.
_KINDS = {
    "AllReduce": "all_reduce",
    "AllGather": "all_gather",
    "ReduceScatter": "reduce_scatter",
    "AllToAll": "all_to_all",
    "AllToAllBase": "all_to_all",
    "Broadcast": "broadcast",
    "Scatter": "scatter",
    "Gather": "gather",
}


@dataclass(frozen=True, slots=True)
class ObservedMessage:
    """A collective that a rank took part in. ``num_elements`` per dtype: of the whole message (the gathered tensor of
    an all_gather, the input of the others)."""

    kind: str
    ranks: tuple[int, ...]
    num_elements: tuple[tuple[torch.dtype, int], ...]


@dataclass(eq=False)
class RankThread:
    """Arguments, state and result of a rank's thread."""

    rank: int
    mesh: DeviceMesh | None = None
    messages: list[ObservedMessage] = field(default_factory=list)
    arrivals: int = 0  # entries and exits of collectives: odd while it waits in one
    result: Any = None
    error: BaseException | None = None


class DifferentExchangesError(RuntimeError):
    """Raised when ranks reach different collectives, or one of them reaches none."""


_HERE = threading.local()
_ONE_AT_A_TIME = threading.Lock()


# Loggers to silence: the result of the check already reports their warnings.
_LOUD = ("torch._subclasses.fake_tensor", "torch.distributed.tensor._redistribute")


@contextmanager
def _quiet() -> Iterator[None]:
    loggers = [logging.getLogger(name) for name in _LOUD]
    before = [logger.disabled for logger in loggers]
    for logger in loggers:
        logger.disabled = True
    try:
        yield
    finally:
        for logger, disabled in zip(loggers, before, strict=True):
            logger.disabled = disabled


@contextmanager
def _noting(ranks: list[RankThread]) -> Iterator[None]:
    """Let PyTorch's threaded groups compare and record the collectives of ``ranks`` inside this context."""
    start: Callable[..., Any] = threaded.ProcessLocalGroup._start_coll
    end: Callable[..., None] = threaded.ProcessLocalGroup._end_coll

    def started(collective: Any, group: Any) -> _PendingCollective:
        if _HERE.rank not in ranks:  # a leftover thread: its groups have the same names
            raise SystemExit
        work = start(collective, group)
        kind, first = (type(one).__name__ for one in (collective, work._collective))
        if kind != first:
            raise DifferentExchangesError(f"one rank calls {first}, another {kind}")
        return _PendingCollective(work, _KINDS.get(kind, ""), group)

    def ended(noted: _PendingCollective, group: Any) -> None:
        end(noted.exchange, group)

    with (
        patch.object(threaded.ProcessLocalGroup, "_start_coll", started),
        patch.object(threaded.ProcessLocalGroup, "_end_coll", ended),
    ):
        yield


@dataclass
class _PendingCollective:
    """A collective in progress. ``join`` records this rank's operands."""

    exchange: Any
    kind: str
    group: Any

    def join(self, rank: int, data: Any) -> Any:
        thread: RankThread = _HERE.rank
        if self.kind:
            sides = data if self.kind in ("all_gather", "reduce_scatter", "all_to_all") else (data,)
            counted = max((_counted(side) for side in sides), key=lambda pairs: sum(n for _, n in pairs))
            thread.messages.append(ObservedMessage(self.kind, tuple(dist.get_process_group_ranks(self.group)), counted))
        thread.arrivals += 1
        joined = self.exchange.join(rank, data)
        thread.arrivals += 1
        return joined


def _counted(side: Any) -> tuple[tuple[torch.dtype, int], ...]:
    total: dict[torch.dtype, int] = {}
    for leaf in pytree.tree_leaves(side):
        if isinstance(leaf, torch.Tensor):
            total[leaf.dtype] = total.get(leaf.dtype, 0) + leaf.numel()
    return tuple(total.items())


def on_ranks(mesh: Mesh, body: Callable[[RankThread], Any]) -> list[RankThread]:
    """Run ``body`` on every rank of a mesh, each in its own thread, with a device mesh of the same axes.

    An error of a rank is stored in its ``RankThread.error``; the others continue as far as they can without it. If some
    wait for a rank that has finished, one of them gets a DifferentExchangesError.
    """
    names, sizes = tuple(name for name, _ in mesh.axes), tuple(size for _, size in mesh.axes)
    store, ranks = HashStore(), [RankThread(rank) for rank in range(mesh.num_devices)]
    context = contextvars.copy_context()

    def run(own: RankThread) -> None:
        _HERE.rank = own
        try:
            with torch.autograd.set_multithreading_enabled(False):
                dist.init_process_group("threaded", rank=own.rank, world_size=mesh.num_devices, store=store)
                own.mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
                own.messages.clear()
                own.result = body(own)
        except SystemExit:  # another rank has failed
            pass
        except BaseException as error:
            own.error = error  # the others continue as far as they can without it

    with _ONE_AT_A_TIME, _noting(ranks), _quiet():
        threaded.ProcessLocalGroup.reset()  # discard the collectives of leftover threads
        threaded._install_threaded_pg()
        isolate: Callable[[bool], None] = vars(torch._C._distributed_c10d)["_set_thread_isolation_mode"]
        isolate(True)
        try:
            threads = [threading.Thread(target=context.copy().run, args=(run, own), daemon=True) for own in ranks]
            for thread in threads:
                thread.start()
            try:
                _wait(threads, ranks)
            except BaseException:  # an interrupt
                _end(threads)
                raise
        finally:
            threaded.ProcessLocalGroup.reset()
            isolate(False)
            threaded._uninstall_threaded_pg()
    return ranks


def _wait(threads: list[threading.Thread], ranks: list[RankThread]) -> None:
    """Wait until all threads have ended. End ranks that wait for a rank that has failed or finished."""
    arrivals, since = -1, time.monotonic()
    while any(thread.is_alive() for thread in threads):
        next(thread for thread in threads if thread.is_alive()).join(0.02)
        alive = [rank for rank, thread in zip(ranks, threads, strict=True) if thread.is_alive()]
        now = sum(rank.arrivals for rank in ranks)
        if now != arrivals or len(alive) == len(ranks):
            arrivals, since = now, time.monotonic()
            continue
        limit = WAITING_SECONDS if all(rank.arrivals % 2 for rank in alive) else STALLED_SECONDS
        if alive and time.monotonic() - since > limit:
            if all(rank.error is None for rank in ranks):
                done = next(rank for rank in ranks if rank not in alive)
                what = f"rank {alive[0].rank} waits in a collective, rank {done.rank} is done"
                alive[0].error = DifferentExchangesError(what)
            _end(threads)
            return


def _end(threads: list[threading.Thread]) -> None:
    """End ranks at their current or next collective."""
    threaded.ProcessLocalGroup.exception_handle(SystemExit())
    for thread in threads:
        if thread.is_alive():
            thread.join(STALLED_SECONDS)


def axes_of(mesh: Mesh, ranks: tuple[int, ...]) -> tuple[str, ...]:
    """Return the sub-axes along which the members of a group differ. Raises ShardwiseError if these do not span it."""
    first = mesh.coordinates(ranks[0])
    axes = tuple(axis for axis in mesh.sub_axes if any(mesh.coordinates(rank)[axis] != first[axis] for rank in ranks))
    if mesh.size_of(axes) != len(ranks):
        raise ShardwiseError(
            f"ranks {list(ranks)} are not a group of {mesh}", fix="pass mesh= with the axes that the plan uses"
        )
    return axes
