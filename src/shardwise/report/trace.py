"""A simulated step as a trace file, in the format of Chrome's tracing that Perfetto reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from shardwise.costs.timeline import SimulatedStep
from shardwise.layouts.mesh import Mesh

OPERATORS = "operators"


def write_trace(path: str | Path, step: SimulatedStep, mesh: Mesh) -> None:
    """Write one row per stream: operators, and each group of devices that exchanges messages. Times are microseconds
    from the start of the pass, as the format has them."""
    rows: dict[str, int] = {}
    events: list[dict[str, Any]] = []
    for event in step.events:
        stream = f"messages over {mesh.format_axes(event.stream)}" if event.stream else OPERATORS
        row = rows.setdefault(stream, len(rows))
        events.append(
            {
                "name": event.name,
                "cat": event.part,
                "ph": "X",
                "ts": event.start * 1e6,
                "dur": event.seconds * 1e6,
                "pid": 0,
                "tid": row,
                "args": {"part": event.part} | ({"bytes": event.num_bytes} if event.stream else {}),
            }
        )
    named = [
        {"name": "thread_name", "ph": "M", "pid": 0, "tid": row, "args": {"name": stream}}
        for stream, row in rows.items()
    ]
    process = {"name": "process_name", "ph": "M", "pid": 0, "args": {"name": f"a rank of {mesh}, simulated"}}
    content = {"displayTimeUnit": "ms", "traceEvents": [process, *named, *events]}
    Path(path).write_text(json.dumps(content) + "\n", encoding="utf-8")
