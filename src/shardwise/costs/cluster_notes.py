"""Notes on the figures of a cluster, printed on stderr."""

from __future__ import annotations

import sys
from functools import cache

MEASURE = "shardwise calibrate -o my.toml measures this machine"


@cache
def print_note_once(text: str) -> None:
    """Once for each text: on every rank that asks."""
    print(f"shardwise: {text}", file=sys.stderr)


__all__ = ["MEASURE", "print_note_once"]
