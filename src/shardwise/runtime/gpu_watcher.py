"""Watch the collectives between GPUs, whose failure no call reports.

A call that starts a collective on a GPU returns at once, and the one that waits for it only orders kernels. If a rank
does not arrive, the host blocks later, where it first needs a number of the device (``loss.item()``), and NCCL ends the
process when the collective times out. Here an event marks the end of every collective of a program. A thread polls the
oldest one. If it stays open, the thread looks whether another rank has left the call and, shortly before NCCL would
time out, which ranks did not arrive. It then aborts the communicators, which releases the host, and raises the
CollectiveError in the thread that made the call. Whatever starts or waits for a collective afterwards raises it too:
the thread of autograd that runs backward, or another thread that makes a call.
"""

from __future__ import annotations

import concurrent.futures.thread
import ctypes
import sys
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
from shardwise.runtime.faults import failure_store
from shardwise.runtime.generation import process_state

_POLL_SECONDS = 1.0  # as long as a rank waits for gloo before it asks for failures
_SHARE_OF_TIMEOUT = 0.9  # NCCL's own watchdog ends the process at the timeout, without a word about the operator

_IDLE = concurrent.futures.thread._worker.__code__  # of a thread of a pool without work

# A network error of a collective -> its explanation (``messages.collective_failed``), if it is one.
Explain = Callable[[Exception], ShardwiseError | None]


@dataclass(frozen=True, slots=True)
class _Started:
    """A collective. ``done``: recorded where the kernels that read its result may begin; ``call``: of the module;
    ``caller``: the thread that made it."""

    done: torch.cuda.Event
    explain: Explain
    call: int
    caller: int
    since: float


class GpuWatcher:
    """The thread of this process, which starts with the first collective."""

    def __init__(self) -> None:
        self._open: deque[_Started] = deque()
        self._thread: threading.Thread | None = None
        self._ended_at = 0.0  # when a collective was last seen to have ended
        self._failed: _Abort | None = None
        self._lock = threading.Lock()  # to remove the oldest collective

    def started(self, explain: Explain) -> None:
        """Watch the collective for which the current stream waits from here on. Raises ShardwiseError as ``check``."""
        self.check()
        done = torch.cuda.Event()
        done.record()
        call, caller = failure_store.call, failure_store.caller
        self._open.append(_Started(done, explain, call, caller, time.monotonic()))
        if self._thread is None:
            device = torch.cuda.current_device()
            self._thread = threading.Thread(target=self._watch, args=(device,), daemon=True, name="shardwise-watcher")
            self._thread.start()

    def check(self) -> None:
        """Raise the error for which the communicators were aborted, if they were."""
        if self._failed is not None:
            self._failed.check()

    def explained(self, error: Exception) -> ShardwiseError | None:
        """Explain a network error of NCCL, which reports it in a later call: it is one of the oldest collective that
        has not ended. None if all have."""
        self.check()
        oldest = self._oldest()
        return None if oldest is None else oldest.explain(error)

    def _oldest(self) -> _Started | None:
        """Return the oldest collective that has not ended."""
        with self._lock:
            with suppress(RuntimeError):  # the device has failed: nothing on it ends
                while self._open and self._open[0].done.query():
                    self._open.popleft()
                    self._ended_at = time.monotonic()
            return self._open[0] if self._open else None

    def _watch(self, device: int) -> None:
        torch.cuda.set_device(device)  # of this thread
        try:
            while dist.is_initialized():
                time.sleep(_POLL_SECONDS)
                oldest = self._oldest()
                if oldest is not None and (error := self._failure(oldest)) is not None:
                    self._failed = failed = _Abort(error)  # before anything that the abort releases goes on
                    with self._lock:
                        self._open.clear()
                    abort_communicators()
                    failed.tell(oldest.caller)
                    return
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


class _Abort:
    """Why the communicators were aborted. It is raised once by itself, and by whatever asks."""

    def __init__(self, error: ShardwiseError) -> None:
        self.error, self._world = error, dist.group.WORLD
        self._lock, self._is_known, self._told = threading.Lock(), False, 0

    def check(self) -> None:
        """Raise the error, unless the script has created new communicators."""
        if self._world is not dist.group.WORLD:
            return
        with self._lock:
            self._is_known = True
            if self._told:  # and not yet raised there: it would come out of the handler of this one
                _set_exception(self._told, None)
                self._told = 0
        raise self.error

    def tell(self, caller: int) -> None:
        """Raise the error in the thread of the caller, once a call of C returns there; do nothing if somebody has heard
        of it. If the caller has ended or waits for another thread, one that does not reads the results: the main
        thread, or any that is no daemon."""
        error = self.error

        class Raised(type(error)):  # type: ignore[misc]  # the interpreter makes the exception, without arguments
            def __init__(self) -> None:
                Exception.__init__(self, *error.args)
                self.__dict__.update(error.__dict__)

            def __reduce__(self) -> Any:
                return error.__reduce__()

        Raised.__name__ = Raised.__qualname__ = type(error).__name__
        Raised.__module__ = type(error).__module__
        others = (threading.main_thread(), *(thread for thread in threading.enumerate() if not thread.daemon))
        with self._lock:
            if not self._is_known:
                threads = sorted((caller, *(other.ident or 0 for other in others)), key=_waits_for_threads)
                self._told = next((thread for thread in threads if _set_exception(thread, Raised)), 0)


def _waits_for_threads(thread: int) -> bool:
    """Return whether a thread has ended, or waits for another one rather than for the device."""
    frame = sys._current_frames().get(thread)
    return frame is None or frame.f_code.co_filename == threading.__file__ or frame.f_code is _IDLE


def _set_exception(thread: int, error: type[Exception] | None) -> bool:
    """Raise ``error`` in a thread (None: take it back); return whether the thread runs."""
    raised = None if error is None else ctypes.py_object(error)
    return bool(ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), raised))


# Not a cache: a process is one rank.
gpu_watcher = GpuWatcher()
process_state.at_end(gpu_watcher.__init__)  # type: ignore[misc]
