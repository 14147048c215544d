"""Notes: printed once, on rank 0, on the error stream."""

from __future__ import annotations

import sys

from shardwise import rank

_told: set[str] = set()  # texts and topics printed by this process


def note(text: str, topic: str = "") -> None:
    """Print ``text`` on rank 0, unless it, or a note on the same ``topic``, was printed before."""
    if (topic or text) not in _told:
        _told.add(topic or text)
        if rank() == 0:
            print(f"shardwise.mindspore: {text}", file=sys.stderr)
