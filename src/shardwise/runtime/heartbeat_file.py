"""Heartbeat file: a small memory-mapped file in which a rank writes what it is doing, for the launcher to read.

It is readable even when the rank hangs or was killed. A write costs about a microsecond, so every collective is
recorded. Standard library only: the launcher does not load torch.

=======  =============================================================================
bytes    content
=======  =============================================================================
0-7      time of the rank's last beat (``time.monotonic``, per machine)
8-15     optimizer steps done, -1 before the first
16-23    collectives entered so far
24-31    time at which it entered or left the latest one
32-35    1 while it is in it, else 0
36-39    length of the description of the latest one
40-43    1 when the launcher has ended the generation: the rank leaves it at its next collective
44-47    what of the rank is left: 0 all of it, 1 a process for the next generation, 2 one that uses a GPU
64-...   description of the latest one
=======  =============================================================================
"""

from __future__ import annotations

import atexit
import mmap
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from shardwise.runtime.generation import GenerationEnded, process_state

PAGE = "SHARDWISE_PAGE"  # environment variable: the path of a rank's heartbeat file
NEXT_FILE = "{page}.next"  # the environment of the next generation, for a process that waits for it

_BYTES, _TEXT = 2048, 64
_ALL = struct.Struct("=dqqdiI")
_BEAT, _STEP, _COLLECTIVE = struct.Struct("=d"), struct.Struct("=q"), struct.Struct("=qdiI")
_IN_COLLECTIVE = struct.Struct("=di")
_ENDED, _LEFT = 40, 44
_FLAG = struct.Struct("=i")


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """The content of a heartbeat file. ``beat``, ``since``: monotonic seconds, 0 if never written."""

    beat: float
    step: int
    collective: int
    since: float
    waits: bool
    what: str


class HeartbeatFile:
    """A memory-mapped heartbeat file, opened by the rank that writes it or by the launcher."""

    def __init__(self, path: str | Path) -> None:
        self.path = path
        with open(path, "r+b") as file:
            self._memory = mmap.mmap(file.fileno(), _BYTES)

    @staticmethod
    def create(path: str | Path) -> HeartbeatFile:
        """Create an empty file. Raises OSError."""
        Path(path).write_bytes(_ALL.pack(0.0, -1, 0, 0.0, 0, 0).ljust(_BYTES, b"\0"))
        return HeartbeatFile(path)

    def beat(self, now: float) -> None:
        _BEAT.pack_into(self._memory, 0, now)

    def step(self, step: int) -> None:
        _STEP.pack_into(self._memory, 8, step)

    def enter(self, number: int, now: float, what: bytes) -> None:
        """Record that the rank enters its ``number``-th collective."""
        what = what[: _BYTES - _TEXT]
        self._memory[_TEXT : _TEXT + len(what)] = what
        _COLLECTIVE.pack_into(self._memory, 16, number, now, 1, len(what))

    def leave(self, now: float) -> None:
        _IN_COLLECTIVE.pack_into(self._memory, 24, now, 0)

    def end_generation(self) -> None:
        """Ask the rank to leave the generation."""
        _FLAG.pack_into(self._memory, _ENDED, 1)

    @property
    def has_ended(self) -> bool:
        return self._memory[_ENDED] != 0

    def leave_generation(self, *, uses_gpu: bool) -> None:
        """Record that the rank has left the generation, and waits for the next one."""
        _FLAG.pack_into(self._memory, _LEFT, 1 + uses_gpu)

    @property
    def is_ready(self) -> bool:
        return self._memory[_LEFT] != 0

    @property
    def uses_gpu(self) -> bool:
        return self._memory[_LEFT] == 2

    def read(self) -> Heartbeat:
        beat, step, number, since, waits, length = _ALL.unpack_from(self._memory, 0)
        text = self._memory[_TEXT : _TEXT + min(length, _BYTES - _TEXT)]
        return Heartbeat(beat, step, number, since, bool(waits), text.decode("utf-8", "replace"))

    def close(self) -> None:
        self._memory.close()


# ----------------------------------------------------------------------------------------------------------------------
# Track the collective that this rank is in, for the launcher to read, and sum up the time it has waited. Program
# collectives, agreement between ranks and messages between pipeline stages enter and leave here. Under ``shardwise
# run`` they are written to the rank's file. The time a rank is busy (``train.recovery``) follows from the waited time.

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
