"""Ranks for code that talks to ``torch.distributed`` itself: all of them as threads of this process.

Other tools' plans are executed by the tools' own code: DTensor, ``fully_shard``, the layers of transformers. Each rank
is a thread with a default process group of its own; a collective waits for its members, checks that they came to the
same one, and is then computed on their tensors (PyTorch's own tests run DTensor and FSDP2 on these groups). Nothing is
left behind: the process group of the caller, if there is one, is back afterwards, and a thread that did not end in time
(of ranks that were interrupted, say) takes part in nothing that comes later.
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

from shardwise.errors import ShardwiseError, problem
from shardwise.layouts.mesh import Mesh

WAITING_SECONDS = 1.0  # of all that are left, in collectives, once a rank has come to its end or failed
STALLED_SECONDS = 30.0  # the same, where one of them is somewhere else

# What the classes of PyTorch's threaded groups do -> the name of the collective.
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
    """What a rank's thread is given and leaves behind."""

    rank: int
    mesh: DeviceMesh | None = None
    messages: list[ObservedMessage] = field(default_factory=list)
    arrivals: int = 0  # at collectives, and departures from them: odd while it waits in one
    result: Any = None
    error: BaseException | None = None


class DifferentExchangesError(RuntimeError):
    """Ranks came to different collectives, or one of them to none."""


_HERE = threading.local()
_ONE_AT_A_TIME = threading.Lock()


# What these say of a plan is said by the answer.
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
    """While it lasts, PyTorch's threaded groups compare the collectives that ``ranks`` come to, and note them."""
    start: Callable[..., Any] = threaded.ProcessLocalGroup._start_coll
    end: Callable[..., None] = threaded.ProcessLocalGroup._end_coll

    def started(collective: Any, group: Any) -> _PendingCollective:
        if _HERE.rank not in ranks:  # its groups have the names of these
            raise SystemExit
        found = start(collective, group)
        kind, first = (type(one).__name__ for one in (collective, found._collective))
        if kind != first:
            raise DifferentExchangesError(f"one rank comes to {first}, another to {kind}")
        return _PendingCollective(found, _KINDS.get(kind, ""), group)

    def ended(noted: _PendingCollective, group: Any) -> None:
        end(noted.exchange, group)

    with (
        patch.object(threaded.ProcessLocalGroup, "_start_coll", started),
        patch.object(threaded.ProcessLocalGroup, "_end_coll", ended),
    ):
        yield


@dataclass
class _PendingCollective:
    """A collective on its way. ``join`` notes what this rank brings."""

    exchange: Any
    kind: str
    group: Any

    def join(self, rank: int, data: Any) -> Any:
        own: RankThread = _HERE.rank
        if self.kind:
            sides = data if self.kind in ("all_gather", "reduce_scatter", "all_to_all") else (data,)
            counted = max((_counted(side) for side in sides), key=lambda pairs: sum(n for _, n in pairs))
            own.messages.append(ObservedMessage(self.kind, tuple(dist.get_process_group_ranks(self.group)), counted))
        own.arrivals += 1
        joined = self.exchange.join(rank, data)
        own.arrivals += 1
        return joined


def _counted(side: Any) -> tuple[tuple[torch.dtype, int], ...]:
    total: dict[torch.dtype, int] = {}
    for leaf in pytree.tree_leaves(side):
        if isinstance(leaf, torch.Tensor):
            total[leaf.dtype] = total.get(leaf.dtype, 0) + leaf.numel()
    return tuple(total.items())


def on_ranks(mesh: Mesh, body: Callable[[RankThread], Any]) -> list[RankThread]:
    """Run ``body`` on every rank of a mesh, each in a thread of its own, with a device mesh of the same axes.

    An error of a rank is in its ``RankThread.error``; the others go on as far as they can without it. Where some wait
    for one that is done, one of them gets a DifferentExchangesError.
    """
    names, sizes = tuple(name for name, _ in mesh.axes), tuple(size for _, size in mesh.axes)
    store, found = HashStore(), [RankThread(rank) for rank in range(mesh.num_devices)]
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
            own.error = error  # the others go on as far as they can without it

    with _ONE_AT_A_TIME, _noting(found), _quiet():
        threaded.ProcessLocalGroup.reset()  # of what a thread that was left behind came to since
        threaded._install_threaded_pg()
        isolate: Callable[[bool], None] = vars(torch._C._distributed_c10d)["_set_thread_isolation_mode"]
        isolate(True)
        try:
            threads = [threading.Thread(target=context.copy().run, args=(run, own), daemon=True) for own in found]
            for thread in threads:
                thread.start()
            try:
                _wait(threads, found)
            except BaseException:  # an interrupt
                _end(threads)
                raise
        finally:
            threaded.ProcessLocalGroup.reset()
            isolate(False)
            threaded._uninstall_threaded_pg()
    return found


def _wait(threads: list[threading.Thread], ranks: list[RankThread]) -> None:
    """Until all are done. Ranks that wait for one that has failed, or that is done, are ended."""
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
    """End ranks at the collectives where they are, or come to."""
    threaded.ProcessLocalGroup.exception_handle(SystemExit())
    for thread in threads:
        if thread.is_alive():
            thread.join(STALLED_SECONDS)


def axes_of(mesh: Mesh, ranks: tuple[int, ...]) -> tuple[str, ...]:
    """The sub-axes along which the members of a group differ. Raises ShardwiseError for a group of no axes."""
    first = mesh.coordinates(ranks[0])
    axes = tuple(axis for axis in mesh.sub_axes if any(mesh.coordinates(rank)[axis] != first[axis] for rank in ranks))
    if mesh.size_of(axes) != len(ranks):
        raise ShardwiseError(
            problem(f"ranks {list(ranks)} are no group of {mesh}", fix="give mesh= with the axes that the plan uses")
        )
    return axes
