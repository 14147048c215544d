"""The data of the page's charts: timelines, memory over a step, and the schedule of a pipeline.

A timeline is rows of boxes. A box is [row, start, seconds, part, name, bytes]: ``start`` counts parts of ``UNITS`` of
the whole width, ``part`` and ``name`` are numbers in lists of texts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any

from shardwise.costs.ledger import CATEGORIES, Peak
from shardwise.costs.pipeline_simulation import Order, SimulatedPipeline, StageSeconds
from shardwise.costs.timeline import Event
from shardwise.plans.quantities import format_seconds

MOST_EVENTS = 8000
MOST_POINTS = 300  # of the chart of memory over the step
MOST_ACTIONS = 4000
MOST_PLACES = 32
UNITS = 1_000_000
LEAST_WAIT = 1e-3  # of a step, for a box


def timeline(
    events: Sequence[Event], seconds: float, title: Callable[[tuple[str, ...]], str], *, most: int = MOST_EVENTS
) -> dict[str, Any]:
    """Return one row of boxes per stream, with the ``most`` longest events and the waits of operators."""
    longest = sorted(events, key=lambda event: -event.seconds)[:most]
    streams = sorted({event.stream for event in events})
    rows = []
    for stream in streams:
        busy = sum(event.seconds for event in events if event.stream == stream)
        rows.append((title(stream), format_seconds(busy)))
    placed = [*longest, *_waits(events, seconds, title)]
    boxes = [(streams.index(event.stream), event) for event in sorted(placed, key=lambda event: event.start)]
    notes = [] if len(longest) == len(events) else [f"the longest {len(longest):,} of {len(events):,} events"]
    return _chart(rows, boxes, seconds, notes)


def _waits(events: Sequence[Event], seconds: float, title: Callable[[tuple[str, ...]], str]) -> Iterable[Event]:
    """Yield the gaps between operators, named by the message or copy that ends with the gap."""
    operators = sorted((event for event in events if not event.stream), key=lambda event: event.start)
    others = [event for event in events if event.stream]
    for before, after in pairwise([Event("", "", (), 0.0, 0.0), *operators]):
        start = before.start + before.seconds
        if after.start - start < LEAST_WAIT * seconds:
            continue
        near = 0.1 * (after.start - start)
        awaited = [event for event in others if abs(event.start + event.seconds - after.start) < near]
        cause = f"{awaited[-1].name}, {title(awaited[-1].stream)}" if awaited else "a message, or the host"
        yield Event(f"operators wait for {cause}", "waits", (), start, after.start - start)


def _chart(
    rows: Iterable[tuple[str, str]], boxes: Sequence[tuple[int, Event]], seconds: float, notes: list[str]
) -> dict[str, Any]:
    """Return a chart of rows, (name, how long it is busy), with events as boxes in rows."""
    parts: dict[str, int] = {}
    names: dict[str, int] = {}
    scale = UNITS / seconds if seconds else 0.0
    return {
        "boxes": [
            (
                row,
                round(event.start * scale),
                float(f"{event.seconds:.4g}"),
                parts.setdefault(event.part, len(parts)),
                names.setdefault(event.name, len(names)),
                event.num_bytes,
            )
            for row, event in boxes
        ],
        "rows": list(rows),
        "parts": list(parts),
        "names": list(names),
        "seconds": seconds,
        "total": format_seconds(seconds),
        "shown": ", ".join(notes),
    }


def place_rows(places: Sequence[Sequence[Event]], seconds: float, busy: Sequence[str] = ()) -> dict[str, Any]:
    """Return a row of boxes per pipeline rank, one box per action. If there are too many actions, show the first.
    ``busy``: a text for every rank; left out: how long its actions take."""
    shown = places[:MOST_PLACES]
    most = max(MOST_ACTIONS // max(len(shown), 1), 1)
    texts = busy or [format_seconds(sum(event.seconds for event in events)) for events in shown]
    rows = [(f"pipeline rank {place}", texts[place]) for place in range(len(shown))]
    boxes = [(place, event) for place, events in enumerate(shown) for event in events[:most]]
    notes = [f"the first {len(shown)} of {len(places)} pipeline ranks"] if len(shown) < len(places) else []
    notes += [f"the first {most:,} actions of each"] if any(len(events) > most for events in shown) else []
    return _chart(rows, boxes, seconds, notes)


def schedule_rows(order: Order, step: SimulatedPipeline, stages: Sequence[StageSeconds]) -> dict[str, Any]:
    """Return a row per pipeline rank: its actions, with their micro-batches and times."""
    places = [
        [
            Event(f"stage {a.stage}, micro-batch {a.micro_batch}", a.kind, (), start, stages[a.stage].of(a.kind))
            for a, start in zip(actions, starts, strict=True)
        ]
        for actions, starts in zip(order, step.starts, strict=True)
    ]
    return place_rows(places, step.seconds, [f"idle {step.bubble(place):.1%}" for place in range(len(places))])


def memory_over(over: Sequence[Peak], peak: Peak, *, most: int = MOST_POINTS) -> dict[str, Any]:
    """Return the memory in use at every operator, by kind. If there are more than ``most`` operators, every point is
    the maximum over a run of neighbours. ``peak``: the maximum."""
    size = -(-len(over) // most) or 1
    points = [max(over[i : i + size], key=lambda moment: moment.num_bytes) for i in range(0, len(over), size)]
    kinds = [name for name in CATEGORIES if any(moment.parts.get(name, 0) for moment in (*points, peak))]
    return {
        "kinds": kinds,
        "points": [(moment.where, [moment.parts.get(name, 0) for name in kinds]) for moment in points],
        "peak": [peak.parts.get(name, 0) for name in kinds],
        "at": next((i for i, moment in enumerate(points) if moment.num_bytes == peak.num_bytes), len(points) - 1),
        "backward": next((i for i, moment in enumerate(points) if moment.phase != "forward"), len(points)),
        "where": peak.where,
    }
