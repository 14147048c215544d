"""The pictures of a plan as data for the page's script: the model as a map, the parts of tensors that devices hold, and
the time and memory of a step."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from math import ceil
from typing import Any

from shardwise.costs.ledger import CATEGORIES, Peak
from shardwise.costs.pipeline_simulation import Order, SimulatedPipeline, StageSeconds
from shardwise.costs.timeline import Event
from shardwise.costs.trace import stream_name
from shardwise.layouts.layout import Layout, Ranges
from shardwise.layouts.mesh import Mesh
from shardwise.layouts.text import parse_layout
from shardwise.plans.entries import Stage
from shardwise.plans.plan import Plan
from shardwise.plans.price_scope import priced_cluster
from shardwise.plans.printing import merged_tensors, owner_of
from shardwise.plans.quantities import format_ranges, format_seconds
from shardwise.report.outline import Row, axes_in
from shardwise.report.stage_passes import StagePass, simulated_order

MOST_DIFFERENCES = 12


def pictures_of(
    plan: Plan,
    figures: Sequence[StagePass],
    rows: Sequence[Sequence[Row]],
    tensors: Sequence[Any],
    others: Mapping[str, str],
) -> dict[str, Any]:
    """Return the data of a plan's pictures. ``rows``, ``tensors``: those of every stage, as its tables list them;
    ``others``: the strategies of operators in the plan beside it."""
    cluster = priced_cluster(plan)
    stages: list[dict[str, Any]] = []
    first_of: dict[str, int] = {}
    for number, stage in enumerate(plan.stages):
        differs = [_differs(row, others) for row in rows[number]]
        like = first_of.setdefault(f"{stage.mesh} {differs} {_shape(rows[number], tensors[number])}", number)
        told = figures[number] if figures else None
        stages.append(
            {
                "like": like,
                "ranks": [text.split("-") for text in format_ranges(stage.placement.ranks).split(",")],
                "time": None if told is None else _timeline(told, stage.mesh, len(figures)),
                "memory": None if told is None else _memory(told, len(figures)),
                **(_held(stage, rows[number], tensors[number], differs) if like == number else {}),
            }
        )
    return {
        "devices": plan.num_ranks,
        "machine": cluster.levels[0].size if cluster is not None and len(cluster.levels) > 1 else plan.num_ranks,
        "stages": stages,
        "schedule": _schedule(plan),
    }


def _shape(rows: Sequence[Row], tensors: Sequence[Mapping[str, Any]]) -> str:
    """Return what stages have in common that differ in their numbers of layers only."""
    sent = [[(_starred(value), *rest[1:]) for value, *rest in row.messages] for row in rows]
    operators = [(_starred(row.name), row.strategy, row.rule, row.types, row.count) for row in rows]
    return repr((operators, sent, [(_starred(one["name"]), one["kind"], one["layout"]) for one in tensors]))


def _differs(row: Row, others: Mapping[str, str]) -> str:
    """Return the other strategies of a row's operators in the plan beside it."""
    found = (others.get(name, row.strategy) for name in row.members)
    return ", ".join(dict.fromkeys(strategy for strategy in found if strategy != row.strategy))


def _starred(name: str) -> str:
    """Return a name without its numbers of layers: ``blocks.*.up/linear`` for ``blocks.0-3.up/linear``."""
    return re.sub(r"(?<![^./])\d[\d,-]*(?![^./])", "*", name)


def _timeline(figures: StagePass, mesh: Mesh, num_stages: int) -> dict[str, Any]:
    """Return the timeline of a pass. The stages of a page share its limit of boxes."""

    def title(stream: tuple[str, ...]) -> str:
        links = (
            "+".join(figures.prices.links.level_names(stream)) if stream and not stream[0].startswith("copies ") else ""
        )
        return stream_name(stream, mesh) + (f" ({links})" if links else "")

    step = figures.step
    return timeline(step.events, step.seconds, title, most=max(MOST_EVENTS // num_stages, 100))


def _memory(figures: StagePass, num_stages: int) -> dict[str, Any]:
    return memory_over(figures.over, figures.step.peak, most=max(MOST_POINTS // num_stages, 40))


def _schedule(plan: Plan) -> dict[str, Any] | None:
    """Return the schedule chart; None for a plan without stages, and for a plan file without their seconds."""
    simulated = simulated_order(plan)
    if simulated is None or plan.pipeline is None:
        return None
    return schedule_rows(*simulated, [stage.seconds for stage in plan.pipeline.stages])


def _held(
    stage: Stage, rows: Sequence[Row], tensors: Sequence[Mapping[str, Any]], differs: Sequence[str]
) -> dict[str, Any]:
    """Return the operators of a stage's map, its tensors, and the pieces of every layout."""
    numbers: dict[str, int] = {}
    place = {row.name: i for i, row in enumerate(rows)}
    operators = [
        {
            "name": row.name,
            "count": row.count,
            "strategy": row.strategy,
            "differs": other,
            "axes": axes_in(row.strategy),
            "types": row.types,
            "layout": numbers.setdefault(row.types[0], len(numbers)) if row.types else -1,
            "seconds": row.seconds,
            "source": row.source,
            "reads": [place[name] for name in row.reads],
            "messages": [(place.get(value, -1), value, *rest) for value, *rest in row.messages],
        }
        for row, other in zip(rows, differs, strict=True)
    ]
    held = [(one["name"], one["kind"], numbers.setdefault(one["layout"], len(numbers))) for one in tensors]
    layouts = [(text, pieces_of(parse_layout(text, stage.mesh))) for text in numbers]
    return {"operators": operators, "tensors": held, "layouts": layouts}


def differences(
    plan: Plan, figures: Sequence[StagePass], other: Plan, others: Sequence[StagePass]
) -> list[dict[str, Any]]:
    """Return bars, (name, in this plan, in the other), for what differs most in seconds of a step and in bytes of the
    fullest device; none without the searches of both."""
    if not figures or not others:
        return []
    kinds = (
        ("seconds of a step, all stages", "seconds", _seconds_by_kind),
        ("peak of the fullest device", "bytes", _bytes_by_kind),
    )
    return [
        {"title": title, "unit": unit, "bars": _largest(form(plan, figures), form(other, others))}
        for title, unit, form in kinds
    ]


def _largest(first: Mapping[str, float], second: Mapping[str, float]) -> list[tuple[str, float, float]]:
    bars = [(name, first.get(name, 0.0), second.get(name, 0.0)) for name in {**first, **second}]
    changed = sorted((bar for bar in bars if bar[1] != bar[2]), key=lambda bar: -abs(bar[1] - bar[2]))
    return changed[:MOST_DIFFERENCES]


def _seconds_by_kind(plan: Plan, figures: Sequence[StagePass]) -> Mapping[str, float]:
    """Return the seconds of operators, equal layers together, and of messages by kind and axes, as groups of devices
    execute them in a step."""
    found: defaultdict[str, float] = defaultdict(float)
    for stage, told in zip(plan.stages, figures, strict=True):
        names = {operator.name for operator in stage.operators}
        for event in told.step.events:
            over = stream_name(event.stream, stage.mesh).removeprefix("messages ")
            name = f"{event.name} {over}" if event.stream else _starred(owner_of(event.name, names) or event.name)
            found[name] += plan.micro_batches * event.seconds
        found["waits of operators"] += plan.micro_batches * (told.step.seconds - told.step.compute)
    return found


def _bytes_by_kind(plan: Plan, figures: Sequence[StagePass]) -> Mapping[str, float]:
    return max((told.step.peak for told in figures), key=lambda peak: peak.num_bytes).parts


# ----------------------------------------------------------------------------------------------------------------------
# Which device holds which part of a tensor, for the page.

MOST_LISTED = 16  # ranks listed in a table row
MOST_UNEVEN = 4096  # devices whose shard sizes are computed one by one, if layouts are uneven

Piece = tuple[int, list[tuple[int, int]], list[str]]


def device_grid(stage: Stage) -> dict[str, Any]:
    """Return the tensors of a stage, and for every layout how many ranks hold shards of which shape."""
    names = {entry.layout: entry.name for entry in (*stage.inputs, *stage.parameters, *stage.buffers)}
    layouts = list(names)
    tensors = [
        {"kind": kind, "name": name, "layout": text, "key": layouts.index(text)}
        for kind, entries in (("input", stage.inputs), ("parameter", stage.parameters), ("buffer", stage.buffers))
        for name, text in merged_tensors(entries)
    ]
    parsed = [stage.layouts[name] for name in names.values()]
    return {"tensors": tensors, "held": [_ranks_by_shape(layout, stage.placement.ranks) for layout in parsed]}


def pieces_of(layout: Layout) -> list[list[Piece]]:
    """Return for every atom of every dim its size, the (stride, size) of the sub-axes that split it, and, if its
    parts are uneven windows, their indices as texts. The device at position ``p`` of the mesh holds part ``i`` of the
    atom, where ``i = i * size + p // stride % size`` over the sub-axes: elements ``i * size // count`` up to those of
    the next part."""
    strides: dict[str, tuple[int, int]] = {}
    stride = 1
    for axis in reversed(layout.mesh.sub_axes):
        strides[axis] = stride, layout.mesh.sizes[axis]
        stride *= layout.mesh.sizes[axis]
    windows = {(window.dim, window.atom): [*map(_ranges, window.ranges)] for window in layout.windows}
    return [
        [(atom.size, [strides[axis] for axis in atom.axes], windows.get((d, i), [])) for i, atom in enumerate(dim)]
        for d, dim in enumerate(layout.dims)
    ]


def _ranges(ranges: Ranges) -> str:
    return "+".join(f"{start}:{stop}" for start, stop in ranges) or "nothing"


def _ranks_by_shape(layout: Layout, placed: tuple[int, ...]) -> list[tuple[str, str, str]]:
    """Return (local shape, number of ranks with a shard of it, the first of these ranks) for every local shape."""
    mesh = layout.mesh
    step = 1 if layout.is_even else ceil(mesh.num_devices / MOST_UNEVEN)
    ranks: dict[tuple[int, ...], list[int]] = {}
    if layout.is_even:
        ranks[layout.local_shape(mesh.coordinates(0))] = [*placed]
    else:
        for rank in range(0, mesh.num_devices, step):
            ranks.setdefault(layout.local_shape(mesh.coordinates(rank)), []).append(placed[rank])
    return [
        (
            str(list(shape)),
            f"{len(holders):,}" if step == 1 else f"{len(holders):,} of {MOST_UNEVEN:,} looked at",
            ", ".join(map(str, holders[:MOST_LISTED])) + (" ..." if len(holders) > MOST_LISTED else ""),
        )
        for shape, holders in ranks.items()
    ]


# ----------------------------------------------------------------------------------------------------------------------
# The data of the page's charts: timelines, memory over a step, and the schedule of a pipeline. A timeline is rows of
# boxes. A box is [row, start, seconds, part, name, bytes]: ``start`` counts parts of ``UNITS`` of the whole width,
# ``part`` and ``name`` are numbers in lists of texts.

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
