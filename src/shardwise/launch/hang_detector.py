"""Hang detection from the ranks' heartbeat pages, and the report of where ranks were and what they waited for."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

from shardwise.errors import name_ranks
from shardwise.runtime.heartbeat_file import Heartbeat

_LATE_SECONDS = 1.0  # two signs of life


@dataclass(slots=True)
class HangDetector:
    """Finds a rank that hangs. ``silent_seconds``: limit without a heartbeat after the first one (a stopped process, a
    call that never releases the GIL); ``idle_seconds``: limit outside a collective while all others wait in one.

    If all ranks stop, no rank is at fault: the machine or the job was suspended. So the clock restarts when the
    detector itself did not run for long, or no rank sent a heartbeat."""

    silent_seconds: float
    idle_seconds: float | None = None
    _looked: float = math.inf  # time of the last call
    _since: float = 0.0  # earlier times do not count

    def __call__(self, pages: dict[int, Heartbeat]) -> tuple[int, str] | None:
        """Return (the rank that hangs, how), or None."""
        now = time.monotonic()
        heard = max((seen.beat for seen in pages.values() if seen.beat), default=now)
        # A pause longer than a usual delay of heartbeats, and shorter than either limit.
        shorter = self.silent_seconds if self.idle_seconds is None else min(self.silent_seconds, self.idle_seconds)
        if now - min(self._looked, max(heard, self._since)) > max(_LATE_SECONDS, shorter / 2):
            self._since = now
        self._looked = now
        return self._find_silent(pages, now) or self._find_idle(pages, now)

    def _find_silent(self, pages: dict[int, Heartbeat], now: float) -> tuple[int, str] | None:
        silent = {number: now - max(seen.beat, self._since) for number, seen in pages.items() if seen.beat}
        number = max(silent, key=silent.__getitem__, default=None)
        if number is None or silent[number] <= self.silent_seconds:
            return None
        return number, f"gave no sign of life for {silent[number]:.0f} seconds"

    def _find_idle(self, pages: dict[int, Heartbeat], now: float) -> tuple[int, str] | None:
        busy = [number for number, seen in pages.items() if not seen.waits]
        if self.idle_seconds is None or len(busy) != 1 or len(pages) < 2:
            return None
        (number,) = busy
        changed = max(seen.since for seen in pages.values())  # when a rank last entered or left a collective
        longest = now - max(changed, self._since)
        if pages[number].since and longest > self.idle_seconds:
            return number, f"came to no collective for {longest:.0f} seconds, in which all others waited"
        return None


def format_positions(stopped: Sequence[tuple[int, str]]) -> list[str]:
    """Return one line per code position with the ranks that were there before they were stopped. ``stopped``: (rank,
    function of the user's code or "" if unknown)."""
    ranks: dict[str, list[int]] = {}
    for number, place in stopped:
        if place:
            ranks.setdefault(place, []).append(number)
    return [
        f"  where:  {name_all_ranks(numbers)} {'were' if len(numbers) > 1 else 'was'} {place}"
        for place, numbers in ranks.items()
    ]


def format_waits(pages: Sequence[tuple[int, Heartbeat]]) -> list[str]:
    """Return one line per collective: which ranks waited in it, and which had left it last."""
    lines: dict[str, list[int]] = {}
    for number, seen in pages:
        if seen.collective:
            step = f"after step {seen.step}: " if seen.step >= 0 else ""
            what = f"collective {seen.collective}, {step}{seen.what}"
            lines.setdefault(f"waited in {what}" if seen.waits else f"had left {what}", []).append(number)
    if all(line.startswith("had left") for line in lines):
        return []
    return [f"  waits:  {name_all_ranks(numbers)} {text}" for text, numbers in lines.items()]


def name_all_ranks(ranks: Sequence[int]) -> str:
    return name_ranks(ranks, limit=None)


def count_ranks(count: int) -> str:
    """Return ``1 rank`` or ``4 ranks``."""
    return f"{count} rank{'s' * (count != 1)}"
