"""A plan as one HTML file: its figures, where time and memory go, who holds what, every operator with its alternatives;
beside a measured profile, or beside another plan.

Nothing comes from a network. The page reads without its script, which finds operators, walks through charts by keyboard
and shows shards on the device grid. Kinds are told by words, numbers and patterns, never by colour alone.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from shardwise.costs.ledger import Peak
from shardwise.costs.pipeline import simulate_pipeline
from shardwise.costs.timeline import SimulatedStep
from shardwise.errors import PlanError, problem
from shardwise.plans.entries import Stage
from shardwise.plans.plan import Plan
from shardwise.plans.printing import format_figures, format_totals, of_outputs, owner_of, plan_figures
from shardwise.plans.quantities import format_bytes, format_seconds
from shardwise.plans.schedule import schedule_of
from shardwise.report.charts import memory_over, row_name, schedule_rows, timeline
from shardwise.report.holdings import holdings
from shardwise.report.outline import rows_of, tree_of, typed
from shardwise.runtime.step_profile import StepProfile
from shardwise.runtime.torch_schedules import order_of

MOST_LISTED = 20
MOST_CHANGES = 200


def _nothing(name: str) -> tuple[str, ...]:
    return ()


@dataclass(frozen=True)
class Pass:
    """What is known of a plan beside its file, from the search that chose it. ``step``: a simulated pass (None: of
    stages); ``over``: its memory, operator after operator; ``types`` and ``reads``: of the results of an operator, and
    the operators whose results it reads; ``why``: its alternatives."""

    step: SimulatedStep | None = None
    over: tuple[Peak, ...] = ()
    types: Callable[[str], tuple[str, ...]] = _nothing
    reads: Callable[[str], tuple[str, ...]] = _nothing
    why: Callable[[str], Mapping[str, Any] | None] = field(default=lambda name: None)


@dataclass(frozen=True)
class Share:
    """A part of a whole. ``percent``: of it."""

    name: str
    text: str
    percent: float


def write_page(
    path: str | Path,
    plan: Plan,
    known: Pass | None = None,
    *,
    profile: StepProfile | None = None,
    other: Plan | None = None,
    other_known: Pass | None = None,
) -> None:
    """Write the page. ``known``: what the search says, for charts, types and alternatives; ``profile``: a measured step
    (``par.profile``) to lay over the prediction; ``other``: a plan to set beside this one. Raises PlanError for a plan
    without a prediction, and for a profile of a pipeline."""
    for one in (plan, other):
        if one is not None and one.predicted is None and one.pipeline is None:
            raise PlanError(
                problem(
                    "the plan has no prediction, so there is nothing to look at: it was not chosen by price",
                    fix='plan again with sw.plan(..., search="dynamic_programming"); print(plan) lists what it does',
                )
            )
    if profile is not None and plan.is_pipeline:
        raise PlanError(
            problem(
                "the page of a plan of stages has no place for a measured step",
                fix="print(profile) has its figures, profile.trace(path) both timelines",
            )
        )
    meshes = [stage.mesh for one in (plan, other) if one is not None for stage in one.stages]
    environment = Environment(
        loader=PackageLoader("shardwise.report"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    environment.filters["typed"] = partial(typed, meshes=meshes)
    loader = environment.loader
    assert loader is not None, "it was just given"
    content = environment.get_template("page.html").render(
        css=loader.get_source(environment, "page.css")[0],
        js=loader.get_source(environment, "page.js")[0],
        meshes=list(dict.fromkeys(map(str, meshes))),
        axes=list(dict.fromkeys(f"{name} of {size}" for mesh in meshes for name, size in mesh.axes)),
        axis_names=list(dict.fromkeys(name for mesh in meshes for name, _ in mesh.axes)),
        own=_looked_at(plan, known),
        other=None if other is None else _looked_at(other, other_known),
        beside=None if other is None else _beside(plan, other),
        measured=None if profile is None else _measured(profile),
    )
    Path(path).write_text(content, encoding="utf-8")


def _looked_at(plan: Plan, known: Pass | None) -> dict[str, Any]:
    """A plan for the template."""
    step = None if known is None else known.step
    stages = [_stage(stage, known) for stage in plan.stages]
    rows = [row for stage in stages for row in stage["rows"] if row.seconds]
    return {
        "plan": plan,
        "figures": format_figures(plan),
        "communication": [(name, text) for name, text in _communication(plan).items()],
        "of_outputs": of_outputs(plan),
        "time": _time(plan, step),
        "messages": [] if step is None else _messages(step, plan),
        "longest": sorted(rows, key=lambda row: -(row.seconds or 0.0))[:MOST_LISTED],
        "memory": [] if step is None else _memory(step.peak),
        "over": None if step is None or known is None or not known.over else memory_over(known.over, step.peak),
        "peak": None if step is None else f"{format_bytes(step.peak_bytes)} in {step.peak.where}",
        "timeline": None if step is None else timeline(step.events, step.seconds, plan.mesh),
        "schedule": _schedule(plan),
        "pipeline": _pipeline(plan),
        "stages": stages,
    }


def _communication(plan: Plan) -> dict[str, str]:
    return {
        name: format_totals(tuple(plan.collectives(backward=backward)))
        for name, backward in (("forward", False), ("backward", True))
    }


def _time(plan: Plan, step: SimulatedStep | None) -> list[Share]:
    """Of a pass; of a pipeline of the step: all places together."""
    if plan.pipeline is not None:
        waits = plan.pipeline.bubble
        parts = [("places at work", 1 - waits), ("places that wait (bubbles)", waits)]
        whole = plan.pipeline.step_seconds
        return [Share(name, format_seconds(share * whole), 100 * share) for name, share in parts]
    if step is None:
        return []
    waits = max(step.seconds - step.compute - step.exposed, 0.0)
    seconds = [("operators and update", step.compute), ("waiting for messages (exposed)", step.exposed)]
    seconds += [("waiting for the host to start kernels", waits)]
    return [Share(name, format_seconds(s), 100 * s / step.seconds if step.seconds else 0.0) for name, s in seconds]


def _messages(step: SimulatedStep, plan: Plan) -> list[tuple[str, str, str, str, str]]:
    """(kind, over which axes, how many, bytes, seconds) of the messages of a pass."""
    count: defaultdict[tuple[str, str], list[float]] = defaultdict(lambda: [0, 0, 0.0])
    for event in step.events:
        if event.stream:
            own = count[event.name, row_name(event.stream, plan.mesh)]
            own[0] += 1
            own[1] += event.num_bytes
            own[2] += event.seconds
    return [
        (kind, over, f"{n:,.0f}", format_bytes(size), format_seconds(seconds))
        for (kind, over), (n, size, seconds) in sorted(count.items(), key=lambda item: -item[1][2])
    ]


def _memory(peak: Peak) -> list[Share]:
    total = peak.num_bytes or 1
    return [Share(name, format_bytes(size), 100 * size / total) for name, size in peak.parts.items() if size]


def _pipeline(plan: Plan) -> list[tuple[str, ...]]:
    """A row per stage: its number, ranks, seconds forward and backward, peak, what it sends, and its bubble."""
    if plan.pipeline is None:
        return []
    return [
        (
            str(number),
            f"{min(stage.placement.ranks)}-{max(stage.placement.ranks)}",
            str(stage.mesh),
            f"{len(stage.operators):,}",
            format_seconds(own.forward),
            format_seconds(own.backward),
            format_bytes(own.peak_bytes),
            format_bytes(own.sent_bytes),
            f"{own.bubble:.1%}",
        )
        for number, (stage, own) in enumerate(zip(plan.stages, plan.pipeline.stages, strict=True))
    ]


def _schedule(plan: Plan) -> dict[str, Any] | None:
    """What every place does when; None for a plan without stages, and one of a file that lacks their seconds."""
    if plan.pipeline is None:
        return None
    schedule = schedule_of(plan.schedule, plan.order)
    places = len({stage.placement.ranks for stage in plan.stages})
    order = order_of(schedule, places, plan.micro_batches)
    seconds = [own.seconds for own in plan.pipeline.stages]
    step = simulate_pipeline(order, seconds)
    if abs(step.seconds - plan.pipeline.step_seconds) > 1e-9 * step.seconds:
        return None
    return schedule_rows(order, step, seconds)


def _stage(stage: Stage, known: Pass | None) -> dict[str, Any]:
    names = {operator.name for operator in stage.operators}
    seconds: defaultdict[str, float] | None = None
    if known is not None and known.step is not None:
        seconds = defaultdict(float)
        for event in known.step.events:
            if not event.stream and event.part != "update":
                seconds[owner_of(event.name, names)] += event.seconds
    kinds = (_nothing, _nothing, lambda name: None) if known is None else (known.types, known.reads, known.why)
    rows, delivered = rows_of(stage, seconds, *kinds)
    return {
        "mesh": str(stage.mesh),
        "ranks": len(stage.placement.ranks),
        "holdings": holdings(stage),
        "rows": rows,
        "tree": tree_of(rows),
        "delivered": delivered,
    }


def _beside(plan: Plan, other: Plan) -> dict[str, Any]:
    """Figures of two plans, and what differs."""
    own, others = dict(plan_figures(plan)), dict(plan_figures(other))
    found = plan.diff(other)
    changes = {title: getattr(found, title) for title in ("settings", "layouts", "strategies", "cuts", "communication")}
    return {
        "figures": [(name, own.get(name, "not known"), others.get(name, "not known")) for name in {**own, **others}],
        "changes": [(title, entries[:MOST_CHANGES], len(entries)) for title, entries in changes.items() if entries],
    }


def _measured(profile: StepProfile) -> dict[str, Any]:
    """A profile for the template: figures, rows, and both timelines on one scale."""

    def ratio(measured: float, predicted: float) -> str:
        return f"{predicted / measured:.2f}" if measured else "not measured"

    (seconds, expected), (peak, foreseen) = profile.step_seconds, profile.peak_bytes
    ends = [max((e.start + e.seconds for e in events), default=0.0) for events in profile.events]
    titles = ("measured, one by one", "predicted")
    return {
        "cluster": profile.cluster,
        "compiled": profile.compiled,
        "figures": [
            ("forward and backward", format_seconds(seconds), format_seconds(expected), ratio(seconds, expected)),
            ("peak memory", format_bytes(peak), format_bytes(foreseen), ratio(peak, foreseen)),
        ],
        "rows": [
            (
                f"{row.part} of {row.name}",
                format_seconds(row.measured),
                format_seconds(row.predicted),
                ratio(row.measured, row.predicted),
                row.figure,
            )
            for row in profile.rows[:MOST_LISTED]
        ],
        "more": max(len(profile.rows) - MOST_LISTED, 0),
        "charts": [
            (title, timeline(events, max(ends), profile.mesh))
            for title, events in zip(titles, profile.events, strict=True)
        ],
    }


__all__ = ["Pass", "Share", "write_page"]
