"""The pictures of a plan as data for the page's script: the model as a map, the parts of tensors that devices hold, and
the time and memory of a step."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardwise.costs.ledger import Peak
from shardwise.costs.timeline import SimulatedStep
from shardwise.costs.trace import stream_name
from shardwise.layouts.mesh import Mesh
from shardwise.layouts.text import parse_layout
from shardwise.plans.entries import Stage
from shardwise.plans.plan import Plan
from shardwise.plans.price_scope import priced_cluster
from shardwise.plans.printing import owner_of
from shardwise.plans.quantities import format_ranges
from shardwise.report.charts import MOST_EVENTS, MOST_POINTS, memory_over, schedule_rows, timeline
from shardwise.report.device_grid import pieces_of
from shardwise.report.outline import Row, axes_in
from shardwise.report.stage_passes import simulated_order

MOST_DIFFERENCES = 12

OperatorLookup = Callable[[str], tuple[str, ...]]


@dataclass(frozen=True)
class StageFigures:
    """What the search knows about a stage in addition to its plan file. ``step``: a simulated pass; ``over``: its
    memory at every operator, with all micro-batches in flight. ``types``, ``reads`` and ``why`` map an operator to the
    types of its results, to the operators whose results it reads, and to its alternatives; ``levels`` maps the axes of
    a group to the links that it crosses."""

    step: SimulatedStep
    over: tuple[Peak, ...]
    types: OperatorLookup
    reads: OperatorLookup
    why: Callable[[str], Mapping[str, Any] | None]
    levels: Callable[[tuple[str, ...]], tuple[str, ...]]


def pictures_of(
    plan: Plan,
    figures: Sequence[StageFigures],
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


def _timeline(figures: StageFigures, mesh: Mesh, num_stages: int) -> dict[str, Any]:
    """Return the timeline of a pass. The stages of a page share its limit of boxes."""

    def title(stream: tuple[str, ...]) -> str:
        links = "+".join(figures.levels(stream)) if stream and not stream[0].startswith("copies ") else ""
        return stream_name(stream, mesh) + (f" ({links})" if links else "")

    step = figures.step
    return timeline(step.events, step.seconds, title, most=max(MOST_EVENTS // num_stages, 100))


def _memory(figures: StageFigures, num_stages: int) -> dict[str, Any]:
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
    plan: Plan, figures: Sequence[StageFigures], other: Plan, others: Sequence[StageFigures]
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


def _seconds_by_kind(plan: Plan, figures: Sequence[StageFigures]) -> Mapping[str, float]:
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


def _bytes_by_kind(plan: Plan, figures: Sequence[StageFigures]) -> Mapping[str, float]:
    return max((told.step.peak for told in figures), key=lambda peak: peak.num_bytes).parts
