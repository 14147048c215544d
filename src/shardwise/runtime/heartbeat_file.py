"""A rank's page: a small mapped file where it writes what it is doing, and from which the launcher reads.

A rank that hangs cannot be asked, and one that was killed leaves nothing; what stands on the page stays. Writing costs
about a microsecond, so every collective is written down. Standard library only: the launcher does not load torch.

=======  =============================================================================
bytes    content
=======  =============================================================================
0-7      when the rank last gave a sign of life (``time.monotonic``, of the machine)
8-15     optimizer steps that are done, -1 before the first is
16-23    collectives entered so far
24-31    when it entered or left the latest one
32-35    whether it is in it
36-39    length of what the latest one is, in words
64-...   what the latest one is, in words
=======  =============================================================================
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path

PAGE = "SHARDWISE_PAGE"  # the environment variable in which the launcher says where a rank's page is

_BYTES, _TEXT = 2048, 64
_ALL = struct.Struct("=dqqdiI")
_BEAT, _STEP, _COLLECTIVE = struct.Struct("=d"), struct.Struct("=q"), struct.Struct("=qdiI")
_IN_COLLECTIVE = struct.Struct("=di")


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """What stands on a page. ``beat``, ``since``: monotonic seconds, 0 where it was never written."""

    beat: float
    step: int
    collective: int
    since: float
    waits: bool
    what: str


class HeartbeatFile:
    """A page that is mapped, by the rank that writes it or by the launcher."""

    def __init__(self, path: str | Path) -> None:
        with open(path, "r+b") as file:
            self._memory = mmap.mmap(file.fileno(), _BYTES)

    @staticmethod
    def create(path: str | Path) -> HeartbeatFile:
        """A new page, empty. Raises OSError."""
        Path(path).write_bytes(_ALL.pack(0.0, -1, 0, 0.0, 0, 0).ljust(_BYTES, b"\0"))
        return HeartbeatFile(path)

    def beat(self, now: float) -> None:
        _BEAT.pack_into(self._memory, 0, now)

    def step(self, step: int) -> None:
        _STEP.pack_into(self._memory, 8, step)

    def enter(self, number: int, now: float, what: bytes) -> None:
        """The rank enters its ``number``-th collective."""
        what = what[: _BYTES - _TEXT]
        self._memory[_TEXT : _TEXT + len(what)] = what
        _COLLECTIVE.pack_into(self._memory, 16, number, now, 1, len(what))

    def leave(self, now: float) -> None:
        _IN_COLLECTIVE.pack_into(self._memory, 24, now, 0)

    def read(self) -> Heartbeat:
        beat, step, number, since, waits, length = _ALL.unpack_from(self._memory, 0)
        text = self._memory[_TEXT : _TEXT + min(length, _BYTES - _TEXT)]
        return Heartbeat(beat, step, number, since, bool(waits), text.decode("utf-8", "replace"))

    def close(self) -> None:
        self._memory.close()


__all__ = ["PAGE", "Heartbeat", "HeartbeatFile"]
