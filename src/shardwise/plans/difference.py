"""Differences between two plans."""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.plans.plan_data import PlanData
from shardwise.plans.price_scope import format_step_interval
from shardwise.plans.printing import format_communication, format_precision


@dataclass(frozen=True, slots=True)
class PlanDifference:
    """Differences between two plans. Each entry is (name, in this plan, in the other); an entry that one plan lacks is
    "absent". ``cuts``: of two pipelines, the stages of operators."""

    settings: tuple[tuple[str, str, str], ...]
    layouts: tuple[tuple[str, str, str], ...]
    strategies: tuple[tuple[str, str, str], ...]
    cuts: tuple[tuple[str, str, str], ...]
    communication: tuple[tuple[str, str, str], ...]

    def __bool__(self) -> bool:
        return bool(self.settings or self.layouts or self.strategies or self.cuts or self.communication)

    def __str__(self) -> str:
        if not self:
            return "the plans are the same"
        lines = []
        for title in ("settings", "layouts", "strategies", "cuts", "communication"):
            entries = getattr(self, title)
            if entries:
                lines.append(f"{title}:")
                lines += [f"  {name}: {before} -> {after}" for name, before, after in entries]
        return "\n".join(lines)


def compare_plans(plan: PlanData, after: PlanData) -> PlanDifference:
    """Return what ``after`` does differently than ``plan``."""
    return PlanDifference(
        _changed(_settings(plan), _settings(after)),
        _changed(_layouts(plan), _layouts(after)),
        _changed(_strategies(plan), _strategies(after)),
        _changed(_stage_of(plan), _stage_of(after)) if plan.is_pipeline and after.is_pipeline else (),
        _changed(format_communication(plan), format_communication(after)),
    )


def _changed(before: dict[str, str], after: dict[str, str]) -> tuple[tuple[str, str, str], ...]:
    names = dict.fromkeys((*before, *after))
    pairs = ((name, before.get(name, "absent"), after.get(name, "absent")) for name in names)
    return tuple(entry for entry in pairs if entry[1] != entry[2])


def _settings(plan: PlanData) -> dict[str, str]:
    settings = {"mesh": ", ".join(str(stage.mesh) for stage in plan.stages)}
    settings |= {
        name: str(getattr(plan, name))
        for name in ("mode", "search", "optimizer", "bucket_bytes", "prefetch", "row_chunks")
    }
    settings["precision"] = format_precision(plan.precision)
    settings["micro_batches"] = str(plan.micro_batches)
    if plan.terms:
        settings["per_micro_batch"] = ", ".join(plan.terms)
    settings["imbalance"] = f"{plan.imbalance:g}"
    if step := format_step_interval(plan):
        settings["step"] = step
    if plan.is_pipeline:
        settings |= {"schedule": plan.schedule, "stages": str(len(plan.stages))}
        settings |= {f"order of place {place}": line for place, line in enumerate(plan.order)}
    if plan.pipeline is not None:
        settings["bubble"] = f"{plan.pipeline.bubble:.1%}"
    return settings


def _stage_of(plan: PlanData) -> dict[str, str]:
    if not plan.is_pipeline:
        return {}
    return {entry.name: str(number) for number, stage in enumerate(plan.stages) for entry in stage.operators}


def _layouts(plan: PlanData) -> dict[str, str]:
    return {entry.name: entry.layout for entry in (*plan.inputs, *plan.parameters, *plan.buffers)}


def _strategies(plan: PlanData) -> dict[str, str]:
    return {e.name: ", ".join(filter(None, (e.strategy or "whole", e.backward))) for e in plan.operators}
