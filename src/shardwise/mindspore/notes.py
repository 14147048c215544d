"""Notes: what a program ought to be told once, on rank 0, on the error stream."""

from __future__ import annotations

import sys

from shardwise.runtime.ranks import rank

_told: set[str] = set()  # of this process


def note(text: str) -> None:
    """Print ``text``, the first time and on rank 0 only."""
    if text not in _told:
        _told.add(text)
        if rank() == 0:
            print(f"shardwise.mindspore: {text}", file=sys.stderr)
