"""Steps as a trace file, in the format of Chrome's tracing that Perfetto reads."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shardwise.costs.timeline import Event
from shardwise.layouts.mesh import Mesh

OPERATORS = "operators"


def write_trace(path: str | Path, steps: Mapping[str, Sequence[Event]], mesh: Mesh) -> None:
    """Write steps by their titles, each with one row per stream: operators, and each group of devices that exchanges
    messages. Times are microseconds from the start of the pass, as the format has them."""
    entries: list[dict[str, Any]] = []
    for process, (title, events) in enumerate(steps.items()):
        rows: dict[str, int] = {}
        entries.append({"name": "process_name", "ph": "M", "pid": process, "args": {"name": title}})
        for event in events:
            stream = f"messages over {mesh.format_axes(event.stream)}" if event.stream else OPERATORS
            entries.append(
                {
                    "name": event.name,
                    "cat": event.part,
                    "ph": "X",
                    "ts": event.start * 1e6,
                    "dur": event.seconds * 1e6,
                    "pid": process,
                    "tid": rows.setdefault(stream, len(rows)),
                    "args": {"part": event.part} | ({"bytes": event.num_bytes} if event.stream else {}),
                }
            )
        entries += [
            {"name": "thread_name", "ph": "M", "pid": process, "tid": row, "args": {"name": stream}}
            for stream, row in rows.items()
        ]
    content = {"displayTimeUnit": "ms", "traceEvents": entries}
    Path(path).write_text(json.dumps(content) + "\n", encoding="utf-8")
