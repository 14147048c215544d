"""A plan as one HTML file: its figures, where time and memory go, who holds what, and every operator.

No script and nothing from a network: parts open by native ``details``, so by mouse and by keyboard; kinds are told by
words and patterns, never by colour alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from shardwise.costs.timeline import Event, SimulatedStep
from shardwise.plans.entries import Stage
from shardwise.plans.plan import Plan
from shardwise.plans.printing import format_figures, format_totals, merged_operators, merged_tensors
from shardwise.plans.quantities import format_bytes, format_seconds

MOST_EVENTS = 2000
MOST_LISTED = 20
WIDTH = 1000  # of the timeline, in its own units
ROW = 22


@dataclass(frozen=True)
class Share:
    """A part of a whole. ``percent``: of it."""

    name: str
    text: str
    percent: float


def write_page(path: str | Path, plan: Plan, step: SimulatedStep | None = None) -> None:
    """Write the page. ``step``: a simulated pass, for the timeline and memory."""
    environment = Environment(
        loader=PackageLoader("shardwise.report"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    own = plan.predicted
    content = environment.get_template("page.html").render(
        plan=plan,
        figures=None if own is None else format_figures(plan, own),
        communication=[
            ("forward", format_totals(tuple(plan.collectives()))),
            ("backward", format_totals(tuple(plan.collectives(backward=True)))),
        ],
        passes=plan.micro_batches,
        time=_time(step),
        memory=_memory(step),
        peak=None if step is None else f"{format_bytes(step.peak_bytes)} in {step.peak.where}",
        timeline=None if step is None else _timeline(step, plan),
        stages=[_stage(stage) for stage in plan.stages],
    )
    Path(path).write_text(content, encoding="utf-8")


def _time(step: SimulatedStep | None) -> list[Share]:
    if step is None:
        return []
    parts = [("operators and update", step.compute), ("waiting for messages", step.exposed)]
    return [Share(name, format_seconds(s), 100 * s / step.seconds if step.seconds else 0.0) for name, s in parts]


def _memory(step: SimulatedStep | None) -> list[Share]:
    if step is None:
        return []
    total = step.peak.num_bytes or 1
    return [Share(name, format_bytes(size), 100 * size / total) for name, size in step.peak.parts.items() if size]


def _timeline(step: SimulatedStep, plan: Plan) -> dict[str, Any]:
    """Rows of rectangles; of very many events the longest."""
    longest = sorted(step.events, key=lambda event: -event.seconds)[:MOST_EVENTS]
    streams = sorted({event.stream for event in step.events})
    scale = WIDTH / step.seconds if step.seconds else 0.0
    rows = []
    for number, stream in enumerate(streams):
        name = f"messages over {plan.mesh.format_axes(stream)}" if stream else "operators"
        own = sorted((event for event in longest if event.stream == stream), key=lambda event: event.start)
        busy = sum(event.seconds for event in step.events if event.stream == stream)
        rows.append({"name": name, "busy": format_seconds(busy), "y": number * ROW, "boxes": list(_boxes(own, scale))})
    shown = "" if len(longest) == len(step.events) else f"the longest {len(longest):,} of {len(step.events):,} events"
    table = [
        (f"{event.part} of {event.name}", "messages" if event.stream else "operators", format_seconds(event.seconds))
        for event in longest[:MOST_LISTED]
    ]
    return {
        "longest": table,
        "rows": rows,
        "height": len(rows) * ROW,
        "width": WIDTH,
        "total": format_seconds(step.seconds),
        "shown": shown,
    }


def _boxes(events: Sequence[Event], scale: float) -> Iterator[dict[str, Any]]:
    for event in events:
        size = f", {format_bytes(event.num_bytes)}" if event.num_bytes else ""
        says = f"{event.part} of {event.name}: {format_seconds(event.seconds)}{size}"
        x, width = event.start * scale, max(event.seconds * scale, 0.3)
        yield {"x": f"{x:.2f}", "width": f"{width:.2f}", "part": event.part, "says": says}


def _stage(stage: Stage) -> dict[str, Any]:
    operators, delivered = merged_operators(stage)
    groups: dict[str, list[tuple[str, ...]]] = {}
    for row in operators:
        module = row[0].rpartition("/")[0]
        groups.setdefault(".".join(module.split(".")[:2]) or "the model itself", []).append(row)
    layouts = stage.layouts
    names = {entry.layout: entry.name for entry in (*stage.inputs, *stage.parameters, *stage.buffers)}
    tensors = [
        {"name": name, "layout": text, "held": _held(stage, layouts[names[text]])}
        for entries in (stage.inputs, stage.parameters, stage.buffers)
        for name, text in merged_tensors(entries)
    ]
    return {
        "mesh": str(stage.mesh),
        "ranks": len(stage.placement.ranks),
        "tensors": tensors,
        "groups": list(groups.items()),
        "delivered": delivered,
    }


def _held(stage: Stage, layout: Any) -> list[tuple[str, str, str]]:
    """(shape, how many ranks hold a part of it, the first of them), by shape."""
    ranks: dict[tuple[int, ...], list[int]] = {}
    for rank in range(stage.mesh.num_devices):
        ranks.setdefault(layout.local_shape(stage.mesh.coordinates(rank)), []).append(rank)
    return [
        (str(list(shape)), f"{len(own):,}", ", ".join(map(str, own[:16])) + (" ..." if len(own) > 16 else ""))
        for shape, own in ranks.items()
    ]
