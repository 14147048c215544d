"""Where this rank is: the collective that it is in, for the launcher to read, and how long it has waited in all.

A collective of a program, what the ranks of a job tell each other, and the messages between the stages of a pipeline
are entered and left here. Under ``shardwise run`` it is written on the rank's page (``runtime.heartbeat_file``);
everywhere the time is summed up, from which the time that a rank is busy follows (``train.rounds``).
"""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from shardwise.runtime.heartbeat_file import HeartbeatFile

_BEAT_SECONDS = 0.5


class CollectiveTracker:
    """``waited_seconds``: in collectives, so far."""

    def __init__(self) -> None:
        self.waited_seconds = 0.0
        self._number, self._began = 0, 0.0
        self._page: HeartbeatFile | None = None

    def write_to(self, path: str | Path) -> None:
        """From now on write to a page, and give signs of life there as long as the process runs."""
        if self._page is not None:
            return
        self._page = page = HeartbeatFile(path)

        ends = threading.Event()

        def beat() -> None:
            while not ends.is_set():
                page.beat(time.monotonic())
                ends.wait(_BEAT_SECONDS)

        def end() -> None:  # what the interpreter still does is not to be watched
            ends.set()
            thread.join()
            page.beat(0.0)

        thread = threading.Thread(target=beat, daemon=True, name="shardwise-beats")
        thread.start()
        atexit.register(end)

    def step_done(self, step: int) -> None:
        if self._page is not None:
            self._page.step(step)

    @contextmanager
    def waiting(self, what: bytes) -> Iterator[None]:
        """Around a collective that this rank waits for. ``what`` it is, in words. One that fails is not left."""
        self.enter(what)
        yield
        self.leave()

    def enter(self, what: bytes) -> None:
        """This rank begins to wait for ``what``."""
        self._number += 1
        self._began = time.monotonic()
        if self._page is not None:
            self._page.enter(self._number, self._began, what)

    def leave(self) -> None:
        """What it waited for last has come."""
        ended = time.monotonic()
        self.waited_seconds += ended - self._began
        if self._page is not None:
            self._page.leave(ended)


# Not a cache: a process is one rank, and its launcher has one page for it.
trail = CollectiveTracker()

__all__ = ["CollectiveTracker", "trail"]
