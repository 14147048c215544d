"""Track the collective that this rank is in, for the launcher to read, and sum up the time it has waited.

Program collectives, agreement between ranks and messages between pipeline stages enter and leave here. Under
``shardwise run`` they are written to the rank's heartbeat file (``runtime.heartbeat_file``). The time a rank is busy
(``train.rounds``) follows from the waited time.
"""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from shardwise.runtime.generation import GenerationEnded, process_state
from shardwise.runtime.heartbeat_file import HeartbeatFile

_BEAT_SECONDS = 0.5


class CollectiveTracker:
    """The current collective of this rank. ``waited_seconds``: total time in collectives so far."""

    def __init__(self) -> None:
        self.waited_seconds = 0.0
        self._number, self._began = 0, 0.0
        self._page: HeartbeatFile | None = None
        self._end: Callable[[], None] | None = None  # of the thread that beats

    def write_to(self, path: str | Path) -> None:
        """Write to a heartbeat file from now on, and beat there as long as the process runs."""
        if self._page is not None:
            return
        self._page = page = HeartbeatFile(path)

        ends = threading.Event()

        def beat() -> None:
            while not ends.is_set():
                page.beat(time.monotonic())
                ends.wait(_BEAT_SECONDS)

        def end() -> None:  # do not monitor interpreter shutdown
            ends.set()
            thread.join()
            page.beat(0.0)

        thread = threading.Thread(target=beat, daemon=True, name="shardwise-beats")
        thread.start()
        atexit.register(end)
        self._end = end

    def check(self) -> None:
        """Raise GenerationEnded if the launcher has ended this rank's generation. Called before and in all waits."""
        if self._page is not None and self._page.has_ended:
            raise GenerationEnded

    def step_done(self, step: int) -> None:
        if self._page is not None:
            self._page.step(step)

    @contextmanager
    def waiting(self, what: bytes) -> Iterator[None]:
        """Track a collective that this rank waits for, described by ``what``. One that fails is never left."""
        self.enter(what)
        yield
        self.leave()

    def enter(self, what: bytes) -> None:
        """Record that this rank begins to wait for ``what``. Raises GenerationEnded."""
        self.check()
        self._number += 1
        self._began = time.monotonic()
        if self._page is not None:
            self._page.enter(self._number, self._began, what)

    def leave(self) -> None:
        """Record that the latest wait has ended."""
        ended = time.monotonic()
        self.waited_seconds += ended - self._began
        if self._page is not None:
            self._page.leave(ended)

    def reset(self) -> None:
        """Write to no heartbeat file any more."""
        if self._end is not None:
            atexit.unregister(self._end)
            self._end()
        self.__init__()  # type: ignore[misc]


# Not a cache: a process is one rank with one heartbeat file.
trail = CollectiveTracker()
process_state.at_end(trail.reset)
