"""The output of ``--json``: one document on standard output. Keys name their units (schemas: the page on commands)."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict
from math import isfinite
from typing import TYPE_CHECKING, Any

from shardwise.commands.command import as_options

if TYPE_CHECKING:
    from shardwise.costs.cluster import Cluster
    from shardwise.plans.auto_stages import AutoStagesReport, SettingOutcome
    from shardwise.plans.micro_batch_search import MicroBatchOutcome
    from shardwise.plans.plan import Plan
    from shardwise.report.alternatives import ExpertWays, PipelineRanking, PlanRanking
    from shardwise.report.explain import Explanation
    from shardwise.report.search_reports import MicroBatches, StageExplanation


def show(text: Any, chosen: argparse.Namespace, data: Callable[[], Any]) -> None:
    print(json.dumps(_plain(data()), indent=1, allow_nan=False) if chosen.json else as_options(str(text), chosen))


def _plain(data: Any) -> Any:
    """Convert data for JSON: floats that are not finite become null, tuples become lists."""
    if isinstance(data, float):
        return data if isfinite(data) else None
    if isinstance(data, Mapping):
        return {str(key): _plain(value) for key, value in data.items()}
    return [_plain(value) for value in data] if isinstance(data, (list, tuple)) else data


def totals(plan: Plan) -> list[dict[str, Any]]:
    """Return the collectives of a pass, summed by direction, kind and axes."""
    from shardwise.plans.printing import totals_of

    return [
        {"direction": direction, "kind": kind, "axes": axes, "count": count, "bytes": size}
        for direction in ("forward", "backward")
        for (kind, axes), (count, size) in totals_of(plan, backward=direction == "backward").items()
    ]


def entry_data(plan: Plan, name: str) -> dict[str, Any]:
    """Return the entry of an operator or a tensor in a plan file. The plan must have it."""
    for number, stage in enumerate(plan.stages):
        uses = [asdict(entry) for entry in stage.conversions or () if name in (entry.value, entry.op)]
        for tensor in (*stage.parameters, *stage.buffers, *stage.inputs):
            if tensor.name == name:
                return {**asdict(tensor), "stage": number, "conversions": uses}
        for operator in stage.operators:
            if operator.name == name:
                return {**asdict(operator), "stage": number, "conversions": uses}
    raise AssertionError(f"{name} was found before")


def explanation_data(
    answer: Explanation | StageExplanation | ExpertWays | MicroBatches | AutoStagesReport,
) -> dict[str, Any]:
    """Return the data of an explanation: of a choice (in a stage), of micro-batches, or of stages."""
    from shardwise.report.alternatives import ExpertWays
    from shardwise.report.explain import Explanation
    from shardwise.report.search_reports import MicroBatches, StageExplanation

    if isinstance(answer, StageExplanation):
        return {**explanation_data(answer.explanation), "stage": answer.stage, "alike": answer.alike or None}
    if isinstance(answer, ExpertWays):
        return asdict(answer)
    if isinstance(answer, MicroBatches):
        return {
            "taken": answer.taken,
            "tried": [
                {"micro_batch": trial.micro_batch, "passes": trial.passes, **_planned(trial)} for trial in answer.tried
            ],
        }
    if not isinstance(answer, Explanation):
        return {
            "taken": asdict(answer.taken),
            "considered": [
                {
                    **asdict(trial.setting),
                    "bound_seconds": trial.bound,
                    **_planned(trial),
                    "faster_seconds": trial.pruned or None,
                }
                for trial in answer.considered
            ],
        }
    data: dict[str, Any] = _renamed(asdict(answer))
    for entry, alternative in zip(data["alternatives"], answer.alternatives, strict=True):
        entry |= {"here_seconds": alternative.seconds, "bytes": alternative.num_bytes}
    return data


_NAMES = {"step_seconds": "step_at_least_seconds", "favour": "favour_seconds", "num_bytes": "bytes"}
_PRICES = ("exposed", "compute", "traffic")


def _renamed(data: Any) -> Any:
    """Return the fields of an explanation under the names of the schema; empty texts become null."""
    if isinstance(data, dict):
        names = _NAMES | {name: f"{name}_seconds" for name in _PRICES}
        return {names.get(name, name): _renamed(value) for name, value in data.items()}
    return [_renamed(item) for item in data] if isinstance(data, (list, tuple)) else None if data == "" else data


def _planned(trial: MicroBatchOutcome | SettingOutcome) -> dict[str, Any]:
    return {
        "step_seconds": trial.step_seconds or None,
        "bytes": trial.num_bytes or None,
        "refused": trial.refused or None,
    }


def ranking_data(ranking: PlanRanking | PipelineRanking) -> dict[str, Any]:
    from shardwise.report.alternatives import PipelineRanking

    if isinstance(ranking, PipelineRanking):
        names = ("step_seconds", "bubble", "num_bytes", "changed")
        pipelines = [
            {name.replace("num_bytes", "bytes"): getattr(pipeline, name) for name in names}
            for pipeline in ranking.pipelines
        ]
        return {"looked_at": ranking.looked_at, "refused": ranking.refused, "pipelines": pipelines}
    return {
        "exact": ranking.exact,
        "plans": [
            {
                **{
                    f"{name}_seconds": plan.prediction.passes * getattr(plan.prediction, name)
                    for name in ("additive_price", *_PRICES)
                },
                "bytes": plan.prediction.num_bytes,
                "changes": [change._asdict() for change in plan.changed],
            }
            for plan in ranking.plans
        ],
    }


def cluster_data(cluster: Cluster) -> dict[str, Any]:
    return {"num_devices": cluster.num_devices, **asdict(cluster)}
