"""Watch the collectives between GPUs, whose failure no call reports.

A call that starts a collective on a GPU returns at once, and the one that waits for it only orders kernels. If a rank
does not arrive, the host blocks later, where it first needs a number of the device (``loss.item()``), and NCCL ends the
process when the collective times out. Here an event marks the end of every collective of a program. A thread polls the
oldest one. If it stays open, the thread looks whether another rank has left the call and, shortly before NCCL would
time out, which ranks did not arrive. It then aborts the communicators, which releases the host, and raises the
CollectiveError in the main thread.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from shardwise.errors import ShardwiseError
from shardwise.runtime.communicator import backend_of, group_timeout
from shardwise.runtime.failure_store import failure_store

_POLL_SECONDS = 1.0  # as long as a rank waits for gloo before it asks for failures
_SHARE_OF_TIMEOUT = 0.9  # NCCL's own watchdog ends the process at the timeout, without a word about the operator

# A network error of a collective -> its explanation (``messages.collective_failed``).
Explain = Callable[[Exception], ShardwiseError | None]


@dataclass(frozen=True, slots=True)
class _Started:
    """A collective. ``done``: recorded where the kernels that read its result may begin; ``call``: of the module."""

    done: torch.cuda.Event
    explain: Explain
    call: int
    since: float


class GpuWatcher:
    """The thread of this process, which starts with the first collective."""

    def __init__(self) -> None:
        self._open: deque[_Started] = deque()
        self._thread: threading.Thread | None = None
        self._ended_at = 0.0  # when a collective was last seen to have ended

    def started(self, explain: Explain) -> None:
        """Watch the collective for which the current stream waits from here on."""
        done = torch.cuda.Event()
        done.record()
        self._open.append(_Started(done, explain, failure_store.call, time.monotonic()))
        if self._thread is None:
            device = torch.cuda.current_device()
            self._thread = threading.Thread(target=self._watch, args=(device,), daemon=True, name="shardwise-watcher")
            self._thread.start()

    def _watch(self, device: int) -> None:
        torch.cuda.set_device(device)  # of this thread
        try:
            while dist.is_initialized():
                time.sleep(_POLL_SECONDS)
                while self._open and self._open[0].done.query():
                    self._open.popleft()
                    self._ended_at = time.monotonic()
                if self._open and (error := self._failure(self._open[0])) is not None:
                    self._open.clear()
                    abort_communicators()
                    raise_in_main_thread(error)
        finally:
            self._thread = None

    def _failure(self, oldest: _Started) -> ShardwiseError | None:
        """Return why the oldest collective cannot end, if that is known or it has waited too long."""
        waited = time.monotonic() - max(oldest.since, self._ended_at)  # the device may be behind the host
        if waited < _POLL_SECONDS:
            return None
        if (left := failure_store.explained(oldest.call)) is not None:
            return left
        timeout = group_timeout()
        if timeout is None or waited < _SHARE_OF_TIMEOUT * timeout.total_seconds():
            return None
        return oldest.explain(TimeoutError(f"NCCL: the collective timed out after {waited:.0f} s"))


def abort_communicators() -> None:
    """End all of this rank's NCCL kernels; the process groups cannot be used any more."""
    for group in list(dist.distributed_c10d._world.pg_map):
        with suppress(RuntimeError):  # a group without GPUs, or one that is gone
            if backend_of(group) == "nccl":
                backend: Any = group._get_backend(torch.device("cuda"))
                backend.abort()


def raise_in_main_thread(error: ShardwiseError) -> None:
    """Raise ``error`` where the main thread is: in a call of C, once that returns. Backward starts its collectives in a
    thread of autograd, so that the one that trains is not known."""

    class Raised(type(error)):  # type: ignore[misc]  # the interpreter makes the exception, without arguments
        def __init__(self) -> None:
            Exception.__init__(self, *error.args)
            self.__dict__.update(error.__dict__)

    Raised.__name__ = Raised.__qualname__ = type(error).__name__
    Raised.__module__ = type(error).__module__
    main = threading.main_thread().ident
    assert main is not None
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(main), ctypes.py_object(Raised))


# Not a cache: a process is one rank.
gpu_watcher = GpuWatcher()
