"""Steps as a trace file, in the format of Chrome's tracing that Perfetto reads."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shardwise.costs.ledger import Peak
from shardwise.costs.timeline import Event
from shardwise.layouts.mesh import Mesh

Held = tuple[float, Mapping[str, int]]  # from this second on a device holds so many bytes, by category


@dataclass(frozen=True)
class Track:
    """What a trace shows of one rank. ``rows``: title -> events, one below the other; ``lines``: operator -> the line
    of the model that it comes from; ``memory``: over the step."""

    title: str
    rows: Mapping[str, Sequence[Event]]
    lines: Mapping[str, str] = field(default_factory=dict)
    memory: Sequence[Held] = ()

    @staticmethod
    def of(
        title: str,
        events: Sequence[Event],
        mesh: Mesh,
        lines: Mapping[str, str] | None = None,
        over: Sequence[Peak] = (),
    ) -> Track:
        """Return a step with one row per stream: operators, and each group of devices that exchanges messages.
        ``over``: the most that is held at every operator, in turn (``Memory.over``)."""
        return Track(title, by_stream(events, mesh), lines or {}, peak_times(events, over))


def stream_name(stream: tuple[str, ...], mesh: Mesh) -> str:
    """Return the title of a stream: operators, copies, or the messages over some axes."""
    if not stream:
        return "operators"
    return stream[0] if stream[0].startswith("copies ") else f"messages over {mesh.format_axes(stream)}"


def by_stream(events: Sequence[Event], mesh: Mesh) -> dict[str, list[Event]]:
    """Return the events of every stream."""
    rows: dict[str, list[Event]] = {}
    for event in events:
        rows.setdefault(stream_name(event.stream, mesh), []).append(event)
    return rows


def peak_times(events: Sequence[Event], over: Sequence[Peak]) -> list[Held]:
    """When the kernels of the operators begin whose peaks these are; of operators without kernels, when the one before
    them does."""
    starts: dict[tuple[str, str], list[float]] = {}
    for event in events:
        if not event.stream:
            starts.setdefault((event.part, event.name), []).append(event.start)
    now, held = 0.0, []
    for peak in over:
        now = next((start for start in starts.get((peak.phase, peak.op), ()) if start >= now), now)
        held.append((now, peak.parts))
    return held


def write_trace(path: str | Path, tracks: Sequence[Track]) -> None:
    """Write the tracks, one below the other. Times are microseconds from the start of the pass, as the format has
    them."""
    entries = [entry for number, track in enumerate(tracks) for entry in _entries(number, track)]
    content = {"displayTimeUnit": "ms", "traceEvents": entries}
    Path(path).write_text(json.dumps(content) + "\n", encoding="utf-8")


def _entries(number: int, track: Track) -> Iterator[dict[str, Any]]:
    yield {"name": "process_name", "ph": "M", "pid": number, "args": {"name": track.title}}
    for row, (title, events) in enumerate(track.rows.items()):
        yield {"name": "thread_name", "ph": "M", "pid": number, "tid": row, "args": {"name": title}}
        for event in events:
            about: dict[str, Any] = {"part": event.part}
            about |= {"bytes": event.num_bytes} if event.stream else {}
            about |= {"line": track.lines[event.name]} if track.lines.get(event.name) else {}
            yield {
                "name": event.name,
                "cat": event.part,
                "ph": "X",
                "ts": event.start * 1e6,
                "dur": event.seconds * 1e6,
                "pid": number,
                "tid": row,
                "args": about,
            }
    for second, parts in track.memory:
        yield {"name": "memory, bytes", "ph": "C", "ts": second * 1e6, "pid": number, "args": dict(parts)}
