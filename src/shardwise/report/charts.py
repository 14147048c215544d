"""The geometry of the page's charts: a timeline, memory over a step, and the schedule of a pipeline."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from shardwise.costs.ledger import CATEGORIES, Peak
from shardwise.costs.pipeline_simulation import Order, SimulatedPipeline, StageSeconds
from shardwise.costs.timeline import Event
from shardwise.costs.trace import stream_name
from shardwise.layouts.mesh import Mesh
from shardwise.plans.quantities import format_bytes, format_parts, format_seconds

MOST_EVENTS = 2000
MOST_POINTS = 300  # of the chart of memory over the step
MOST_ACTIONS = 4000
MOST_PLACES = 32
WIDTH = 1000  # of a chart, in SVG units
ROW = 22
HEIGHT = 240  # of the chart of memory over the step


def timeline(events: Sequence[Event], seconds: float, mesh: Mesh, *, most: int = MOST_EVENTS) -> dict[str, Any]:
    """Return one row of boxes per stream, with at most the ``most`` longest events."""
    longest = sorted(events, key=lambda event: -event.seconds)[:most]
    scale = WIDTH / seconds if seconds else 0.0
    rows = []
    for stream in sorted({event.stream for event in events}):
        on_stream = sorted((event for event in longest if event.stream == stream), key=lambda event: event.start)
        busy = sum(event.seconds for event in events if event.stream == stream)
        rows.append((stream_name(stream, mesh), format_seconds(busy), list(_boxes(on_stream, scale))))
    notes = [] if len(longest) == len(events) else [f"the longest {len(longest):,} of {len(events):,} events"]
    return _chart(rows, seconds, notes)


def _chart(rows: Sequence[tuple[str, str, list[dict[str, Any]]]], seconds: float, notes: list[str]) -> dict[str, Any]:
    """Return a chart of rows: (name, how long it is busy, boxes)."""
    return {
        "rows": [
            {"name": name, "busy": busy, "y": number * ROW, "boxes": boxes}
            for number, (name, busy, boxes) in enumerate(rows)
        ],
        "height": len(rows) * ROW,
        "width": WIDTH,
        "total": format_seconds(seconds),
        "shown": ", ".join(notes),
    }


def place_rows(places: Sequence[Sequence[Event]], seconds: float) -> dict[str, Any]:
    """Return a row of boxes per pipeline rank, one box per action. If there are too many actions, show the first."""
    scale, shown = WIDTH / seconds if seconds else 0.0, places[:MOST_PLACES]
    most = max(MOST_ACTIONS // max(len(shown), 1), 1)
    rows = []
    for place, events in enumerate(shown):
        busy = format_seconds(sum(event.seconds for event in events))
        rows.append((f"pipeline rank {place}", busy, list(_boxes(events[:most], scale))))
    notes = [f"the first {len(shown)} of {len(places)} pipeline ranks"] if len(shown) < len(places) else []
    notes += [f"the first {most:,} actions of each"] if any(len(events) > most for events in shown) else []
    return _chart(rows, seconds, notes)


def _boxes(events: Sequence[Event], scale: float) -> Iterator[dict[str, Any]]:
    for event in events:
        size = f", {format_bytes(event.num_bytes)}" if event.num_bytes else ""
        says = f"{event.part} of {event.name}: {format_seconds(event.seconds)}{size}"
        yield _box(event.start * scale, event.seconds * scale, event.part.partition(" ")[0], says)


def _box(x: float, width: float, part: str, says: str) -> dict[str, Any]:
    return {"x": f"{x:.2f}", "width": f"{max(width, 0.3):.2f}", "part": part, "says": says}


def memory_over(over: Sequence[Peak], peak: Peak, *, most: int = MOST_POINTS) -> dict[str, Any]:
    """Return the memory in use at every operator, stacked by kind. If there are more than ``most`` operators, every
    point is the maximum over a run of neighbours. ``peak``: the maximum, which scales the chart."""
    size = -(-len(over) // most)
    points = [max(over[i : i + size], key=lambda moment: moment.num_bytes) for i in range(0, len(over), size)]
    whole = peak.num_bytes or 1
    wide = WIDTH / max(len(points), 1)
    base = [0.0] * len(points)
    layers = []
    for name in CATEGORIES:
        if not any(moment.parts.get(name, 0) for moment in points):
            continue
        top = [low + moment.parts.get(name, 0) * HEIGHT / whole for low, moment in zip(base, points, strict=True)]
        layers.append({"name": name, "path": _area(base, top, wide)})
        base = top
    at = next((i for i, moment in enumerate(points) if moment.num_bytes == peak.num_bytes), len(points) - 1)
    backward = next((i for i, moment in enumerate(points) if moment.phase != "forward"), len(points))
    return {
        "layers": layers,
        "width": WIDTH,
        "height": HEIGHT,
        "most": format_bytes(peak.num_bytes),
        "at": f"{(at + 0.5) * wide:.2f}",
        "backward": f"{backward * wide:.2f}",
        "points": [
            {
                "x": f"{i * wide:.2f}",
                "width": f"{wide:.2f}",
                "says": f"{moment.where}: {format_bytes(moment.num_bytes)} ({format_parts(moment)})",
            }
            for i, moment in enumerate(points)
        ],
    }


def _area(low: Sequence[float], high: Sequence[float], wide: float) -> str:
    """Return a closed SVG path with steps (y runs down)."""
    up = [f"{x * wide:.1f},{HEIGHT - y:.1f}" for i, y in enumerate(high) for x in (i, i + 1)]
    down = [f"{x * wide:.1f},{HEIGHT - y:.1f}" for i, y in reversed([*enumerate(low)]) for x in (i + 1, i)]
    return "M" + "L".join([*up, *down]) + "Z"


def schedule_rows(order: Order, step: SimulatedPipeline, stages: Sequence[StageSeconds]) -> dict[str, Any]:
    """Return a row per pipeline rank: its actions, with their micro-batches and times."""
    scale = WIDTH / step.seconds if step.seconds else 0.0
    rows = []
    shown, count = min(len(order), MOST_PLACES), sum(map(len, order[:MOST_PLACES]))
    keep = 1.0 if count <= MOST_ACTIONS else MOST_ACTIONS / count
    for place, (actions, starts) in enumerate(zip(order[:shown], step.starts, strict=False)):
        boxes = []
        for action, start in [*zip(actions, starts, strict=True)][: int(len(actions) * keep)]:
            seconds = stages[action.stage].of(action.kind)
            says = f"stage {action.stage}: {action}, {format_seconds(seconds)} from {format_seconds(start)}"
            boxes.append(_box(start * scale, seconds * scale, action.kind, says))
        rows.append((f"pipeline rank {place}", f"idle {step.bubble(place):.1%}", boxes))
    notes = [f"the first {shown} of {len(order)} pipeline ranks"] if shown < len(order) else []
    notes += [f"the first {keep:.0%} of the actions of each"] if keep < 1 else []
    return _chart(rows, step.seconds, notes)
