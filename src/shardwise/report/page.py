"""Write a plan as one HTML file: figures, time, memory, shards, and every operator with its alternatives; optionally
with a measured profile or another plan for comparison.

The page loads nothing from a network. It can be read without its script, which finds operators, moves through charts
by keyboard and shows shards on the device grid. Words, numbers and patterns distinguish kinds, not colour alone.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from shardwise.costs.cluster import Cluster
from shardwise.costs.ledger import Peak
from shardwise.costs.prediction import EXACT, between
from shardwise.costs.timeline import SimulatedStep
from shardwise.costs.trace import stream_name
from shardwise.errors import PlanError
from shardwise.layouts.mesh import Mesh
from shardwise.plans.entries import Stage
from shardwise.plans.plan import Plan
from shardwise.plans.price_scope import priced_cluster
from shardwise.plans.printing import advice, format_communication, format_figures, of_outputs, owner_of, plan_figures
from shardwise.plans.quantities import format_bytes, format_bytes_interval, format_interval_seconds, format_seconds
from shardwise.report.outline import mark_axes, rows_of, tree_of
from shardwise.report.pictures import device_grid, differences, pictures_of, place_rows, timeline
from shardwise.report.stage_passes import StagePass
from shardwise.runtime.step_profile import PipelineProfile, StepProfile

MOST_LISTED = 20
MOST_CHANGES = 200


@dataclass(frozen=True)
class Share:
    """A part of a total, with its percentage."""

    name: str
    text: str
    percent: float


def write_page(
    path: str | Path,
    plan: Plan,
    figures: Sequence[StagePass] = (),
    *,
    profile: StepProfile | PipelineProfile | None = None,
    other: Plan | None = None,
    other_figures: Sequence[StagePass] = (),
) -> None:
    """Write the page.

    Args:
        path: The HTML file to write.
        plan: The plan to show.
        figures: The figures of every stage from the search, for charts, types and alternatives; or empty.
        profile: A measured step (``par.profile``) to compare with the prediction.
        other: Another plan to compare with.
        other_figures: The figures of the stages of ``other``.

    Raises:
        PlanError: A plan has no prediction, or the profile is of a plan with other stages.
    """
    for shown_plan in (plan, other):
        if shown_plan is not None and shown_plan.pipeline is None and shown_plan.predicted is None:
            raise PlanError(
                "the other plan has no prediction" if shown_plan is other else "the plan has no prediction",
                fix="plan again with sw.plan(...), which prices plans; print(plan) lists what the plan does",
            )
    profiled = len(profile.stages) if isinstance(profile, PipelineProfile) else 1
    if profile is not None and profiled != len(plan.stages):
        what = f"the profile has {profiled} stages, the plan has {len(plan.stages)}"
        raise PlanError(what, fix="give the result of par.profile(...) under this plan")
    meshes = [stage.mesh for shown_plan in (plan, other) if shown_plan is not None for stage in shown_plan.stages]
    environment = Environment(
        loader=PackageLoader("shardwise.report"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    environment.filters["breakable"] = lambda name: Markup("<wbr>").join(re.split(r"(?<=[./])(?=[^\W\d])", name))
    environment.filters["typed"] = partial(mark_axes, meshes=meshes)
    loader = environment.loader
    assert loader is not None, "it is set above"
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":")}
    axis_names = list(dict.fromkeys(name for mesh in meshes for name, _ in mesh.axes))
    plans = {"own": _plan_data(plan, figures, other)}
    if other is not None:
        plans["other"] = _plan_data(other, other_figures, plan)
    changed = [] if other is None else differences(plan, figures, other, other_figures)
    measured = _measured(profile) if isinstance(profile, StepProfile) else None
    staged = _measured_stages(profile) if isinstance(profile, PipelineProfile) else None
    timelines, ratios = _profile_pictures(measured, staged)
    content = environment.get_template("page.html").render(
        css=loader.get_source(environment, "page.css")[0],
        js=loader.get_source(environment, "page.js")[0],
        library=loader.get_source(environment, "echarts.min.js")[0],
        meshes=list(dict.fromkeys(str(stage.mesh) for stage in plan.stages)),
        axes=list(dict.fromkeys(f"{name} of {size}" for mesh in meshes for name, size in mesh.axes)),
        axis_names=axis_names,
        own=plans["own"],
        other=plans.get("other"),
        beside=None if other is None else _comparison(plan, other),
        differences=changed,
        measured=measured,
        staged=staged,
        data={
            "axes": axis_names,
            "plans": {name: shown["pictures"] for name, shown in plans.items()},
            "timelines": timelines,
            "bars": {**ratios, **{f"difference-{i}": bars for i, bars in enumerate(changed) if bars["bars"]}},
        },
    )
    Path(path).write_text(content, encoding="utf-8")


def _plan_data(plan: Plan, figures: Sequence[StagePass], beside: Plan | None) -> dict[str, Any]:
    passes_or_none: Sequence[StagePass | None] = figures or (None,) * len(plan.stages)
    stages = [_stage(stage, of_stage) for stage, of_stage in zip(plan.stages, passes_or_none, strict=True)]
    cluster = priced_cluster(plan)
    passes = [
        _pass(of_stage, stage.mesh, cluster) for stage, of_stage in zip(plan.stages, figures, strict=bool(figures))
    ]
    rows = [(number, row) for number, stage in enumerate(stages) for row in stage["rows"] if row.seconds]
    return {
        "plan": plan,
        "figures": format_figures(plan),
        "advice": advice(plan),
        "communication": list(format_communication(plan).items()),
        "of_outputs": of_outputs(plan),
        "time": _pipeline_time(plan),
        "passes": passes,
        "longest": sorted(rows, key=lambda row: -(row[1].seconds or 0.0))[:MOST_LISTED],
        "pictures": pictures_of(
            plan,
            figures,
            [stage["rows"] for stage in stages],
            [stage["holdings"]["tensors"] for stage in stages],
            {} if beside is None else {entry.name: entry.strategy or "whole" for entry in beside.operators},
        ),
        "pipeline": _pipeline(plan),
        "stages": stages,
    }


def _pipeline_time(plan: Plan) -> list[Share]:
    if plan.pipeline is None:
        return []
    waits, whole = plan.pipeline.bubble, plan.pipeline.step_seconds
    parts = [("pipeline ranks busy", 1 - waits), ("pipeline ranks idle (bubbles)", waits)]
    return [Share(name, format_seconds(share * whole), 100 * share) for name, share in parts]


def _pass(figures: StagePass, mesh: Mesh, cluster: Cluster | None) -> dict[str, Any]:
    """Return the tables of a simulated pass."""
    step = figures.step
    takes = format_seconds(step.seconds)
    return {
        "seconds": takes if cluster is None else format_interval_seconds(between(step.seconds, step.compute, cluster)),
        "time": _time(step),
        "messages": _messages(step, mesh),
        "memory": _memory(step.peak),
        "peak": f"{format_bytes_interval(step.peak_bytes, cluster)} in {step.peak.where}",
    }


def _time(step: SimulatedStep) -> list[Share]:
    seconds = [("operators and update", step.compute), ("waiting for messages (exposed)", step.exposed)]
    seconds += [("waiting for the host to start kernels", step.host_wait)]
    seconds += [("waiting for copies from and to the host", step.copy_wait)] * bool(step.copy_wait)
    seconds = [(name, value if value > EXACT * step.seconds else 0.0) for name, value in seconds]
    return [Share(name, format_seconds(s), 100 * s / step.seconds if step.seconds else 0.0) for name, s in seconds]


def _messages(step: SimulatedStep, mesh: Mesh) -> list[tuple[str, str, str, str, str]]:
    """Return (kind, axes, count, bytes, seconds) for the messages of a pass, the most expensive first."""
    count: defaultdict[tuple[str, str], list[float]] = defaultdict(lambda: [0, 0, 0.0])
    for event in step.events:
        if event.stream:
            sums = count[event.name, stream_name(event.stream, mesh)]
            sums[0] += 1
            sums[1] += event.num_bytes
            sums[2] += event.seconds
    return [
        (kind, over, f"{n:,.0f}", format_bytes(size), format_seconds(seconds))
        for (kind, over), (n, size, seconds) in sorted(count.items(), key=lambda item: -item[1][2])
    ]


def _memory(peak: Peak) -> list[Share]:
    total = peak.num_bytes or 1
    return [Share(name, format_bytes(size), 100 * size / total) for name, size in peak.parts.items() if size]


def _pipeline(plan: Plan) -> list[tuple[str, ...]]:
    if plan.pipeline is None:
        return []
    return [
        (
            str(number),
            f"{min(stage.placement.ranks)}-{max(stage.placement.ranks)}",
            str(stage.mesh),
            f"{len(stage.operators):,}",
            format_seconds(figures.forward),
            format_seconds(figures.backward),
            format_bytes_interval(figures.peak_bytes, priced_cluster(plan)),
            format_bytes(figures.sent_bytes),
            f"{figures.bubble:.1%}",
        )
        for number, (stage, figures) in enumerate(zip(plan.stages, plan.pipeline.stages, strict=True))
    ]


def _stage(stage: Stage, figures: StagePass | None) -> dict[str, Any]:
    names = {operator.name for operator in stage.operators}
    seconds: defaultdict[str, float] | None = None
    if figures is not None:
        seconds = defaultdict(float)
        for event in figures.step.events:
            if not event.stream and event.part != "update":
                seconds[owner_of(event.name, names)] += event.seconds
    rows, delivered = rows_of(stage, seconds, figures)
    return {
        "mesh": str(stage.mesh),
        "ranks": len(stage.placement.ranks),
        "holdings": device_grid(stage),
        "rows": rows,
        "tree": tree_of(rows),
        "delivered": delivered,
    }


def _comparison(plan: Plan, other: Plan) -> dict[str, Any]:
    figures, others = dict(plan_figures(plan)), dict(plan_figures(other))
    difference = plan.diff(other)
    changes = {
        title: getattr(difference, title) for title in ("settings", "layouts", "strategies", "cuts", "communication")
    }
    return {
        "figures": [
            (name, figures.get(name, "not known"), others.get(name, "not known")) for name in {**figures, **others}
        ],
        "changes": [(title, entries[:MOST_CHANGES], len(entries)) for title, entries in changes.items() if entries],
    }


def _profile_pictures(
    measured: dict[str, Any] | None, staged: dict[str, Any] | None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the timelines of a profile and its bars of predicted over measured seconds, by figure."""
    whole = measured or staged
    steps: dict[str, dict[str, Any]] = {"measured": whole} if whole else {}
    if staged:
        steps |= {f"measured-stage-{number}": step for number, step in staged["stages"]}
    timelines = {f"{id}-{i}": chart for id, step in steps.items() for i, (_, chart) in enumerate(step["charts"])}
    return timelines, {
        f"{id}-ratios": {"unit": "ratio", "bars": step["ratios"]} for id, step in steps.items() if step["ratios"]
    }


def _ratio(measured: float, predicted: float) -> str:
    return f"{predicted / measured:.2f}" if measured else "not measured"


def _in_seconds(name: str, measured: float, predicted: float) -> tuple[str, ...]:
    return name, format_seconds(measured), format_seconds(predicted), _ratio(measured, predicted)


def _with_ratio(seconds: Iterable[tuple[str, float, float]]) -> list[tuple[str, float, float]]:
    return [row for row in seconds if row[1] > 0 and row[2] > 0]


def _measured_stages(profile: PipelineProfile) -> dict[str, Any]:
    """Return what the template shows of a pipeline's profile: figures of the step and of every stage, and the measured
    and predicted schedules on one scale."""
    waits, foreseen = profile.bubbles
    seconds = [
        pair
        for number, (measured, predicted) in enumerate(zip(profile.measured, profile.predicted, strict=True))
        for pair in (
            (f"stage {number}, forward", measured.forward, predicted.forward),
            (f"stage {number}, backward", measured.input + measured.weight, predicted.input + predicted.weight),
        )
    ]
    ends = [event.start + event.seconds for places in profile.events for place in places for event in place]
    titles = ("measured", "predicted")
    return {
        "title": profile.title,
        "cluster": next(iter(profile.stages.values())).cluster,
        "order_bubble": f"{profile.order_bubble:.1%}",
        "figures": [
            _in_seconds("step without its optimizer", *profile.step_seconds),
            ("pipeline ranks idle (bubbles)", f"{waits:.1%}", f"{foreseen:.1%}", _ratio(waits, foreseen)),
        ],
        "rows": [_in_seconds(*pair) for pair in seconds],
        "ratios": _with_ratio(seconds),
        "charts": [
            (f"Schedule of a step, {title}", place_rows(places, max(ends, default=0.0)))
            for title, places in zip(titles, profile.events, strict=True)
        ],
        "stages": [(number, _measured(measured)) for number, measured in sorted(profile.stages.items())],
    }


def _measured(profile: StepProfile) -> dict[str, Any]:
    (seconds, expected), (peak, foreseen) = profile.step_seconds, profile.peak_bytes
    ends = [max((e.start + e.seconds for e in events), default=0.0) for events in profile.events]
    titles, listed = ("measured, one by one", "predicted"), profile.rows[:MOST_LISTED]
    return {
        "cluster": profile.cluster,
        "compiled": profile.compiled,
        "figures": [
            _in_seconds("forward and backward", seconds, expected),
            ("peak memory", format_bytes(peak), format_bytes(foreseen), _ratio(peak, foreseen)),
        ],
        "rows": [
            (*_in_seconds(f"{row.part} of {row.name}", row.measured, row.predicted), row.figure) for row in listed
        ],
        "ratios": _with_ratio((f"{row.part} of {row.name}", row.measured, row.predicted) for row in listed),
        "more": max(len(profile.rows) - MOST_LISTED, 0),
        "charts": [
            (title, timeline(events, max(ends), partial(stream_name, mesh=profile.mesh)))
            for title, events in zip(titles, profile.events, strict=True)
        ],
    }
