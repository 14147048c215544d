"""``par.profile`` under a plan of stages: every action and every operator is measured, beside what was simulated."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import shardwise as sw
from launch.gloo_ranks import RunRanks
from raising import raises
from runtime.staged_model import Staged, staged_batch
from shardwise.costs.pipeline_simulation import simulate_pipeline
from shardwise.plans.quantities import format_seconds
from shardwise.plans.schedule import SCHEDULES, order_of


def profiled(path: str, num_ranks: int, schedule: str, stages: int, how: dict[str, str]) -> dict[str, Any]:
    torch.manual_seed(0)
    model, batch = Staged(width=32, dropout=0.2), staged_batch(8)
    plan = None
    if dist.get_rank() == 0:
        size = num_ranks // 2
        asked: dict[str, Any] = {"stages": stages, "schedule": schedule, "micro_batch": 2, **how}
        plan = sw.plan(model, batch, num_ranks, mesh=sw.Mesh(dp=size), zero=1, **asked)
    par, other = (sw.parallelize(copy.deepcopy(model), plan) for _ in range(2))
    par.step(*batch)
    gradients = {name: p.grad.clone() for name, p in par.named_parameters() if p.grad is not None}
    profile = par.profile(*batch, steps=2)
    kept = {name: p.grad for name, p in par.named_parameters() if p.grad is not None}
    assert kept.keys() == gradients.keys()
    assert all(torch.equal(kept[name], gradients[name]) for name in kept)
    other.step(*batch)
    loss, wanted = par.step(*batch), other.step(*batch)  # random numbers go on as if nothing had been measured
    assert loss is not None
    assert wanted is not None
    assert torch.equal(loss, wanted)
    with raises(sw.ShardwiseError, "steps", "from 1"):
        par.profile(*batch, steps=0)
    if dist.get_rank() == 0:
        profile.trace(path)
        if plan is not None and plan.pipeline is not None:
            plan.report.write(f"{path}.html", profile=profile)
    order = order_of(SCHEDULES[schedule], 2, 4)
    assert profile.order_bubble == pytest.approx(simulate_pipeline(order, profile.measured).bubbles)
    return {
        "text": str(profile),
        "stages": {number: len(own.rows) for number, own in profile.stages.items()},
        "operators": {
            number: {e.name for e in own.events[0] if not e.stream} for number, own in profile.stages.items()
        },
        "planned": {number: {op.name for op in stage.operators} for number, stage in enumerate(par.plan.stages)},
        "bubbles": profile.bubbles,
        "seconds": profile.step_seconds,
        "busy": [sum(event.seconds for event in events) for events in profile.events[0]],
        "actions": [sorted(event.name for event in events) for events in profile.events[0]],
        "simulated": [sorted(event.name for event in events) for events in profile.events[1]],
        "messages": {number: {e.name for e in own.events[0] if e.stream} for number, own in profile.stages.items()},
    }


@pytest.mark.parametrize(
    ("num_ranks", "schedule", "stages", "how"),
    [(4, "1F1B", 2, {"mode": "data_parallel"}), (2, "ZBVZeroBubble", 4, {"search": "dynamic_programming"})],
)
@pytest.mark.sampled(1)
def test_actions_and_operators_are_measured(
    num_ranks: int, schedule: str, stages: int, how: dict[str, str], run_ranks: RunRanks, tmp_path: Path
) -> None:
    path = str(tmp_path / "trace.json")
    answers = run_ranks(profiled, num_ranks, path, num_ranks, schedule, stages, how)
    for found in answers:
        assert found == answers[0], "all ranks have the same"
        assert f"in {stages} stages, {schedule}" in found["text"]
        assert f"stage {stages - 1} by itself" in found["text"]
        assert found["stages"].keys() == set(range(stages))
        assert all(found["stages"].values())
        for number, planned in found["planned"].items():
            assert len(found["operators"][number] & planned) > len(planned) / 2, "those of the plan, by their names"
        assert found["actions"] == found["simulated"], "every action of every place"
        assert all(0 < share < 1 for share in found["bubbles"])
        measured, predicted = found["seconds"]
        assert max(found["busy"]) > 0
        assert measured > 0
        assert predicted > 0
        assert any(found["messages"].values()) == (num_ranks > 2), "those inside of a stage"
    if "search" in how:
        page = Path(f"{path}.html").read_text()
        (measured, _), (waits, _) = answers[0]["seconds"], answers[0]["bubbles"]
        assert f'step without its optimizer</th><td class="number">{format_seconds(measured)}</td>' in page
        assert f'pipeline ranks idle (bubbles)</th><td class="number">{waits:.1%}</td>' in page
        for chart in ("measured-0", "measured-1"):
            boxes = page.partition(f'id="{chart}"')[2].partition("</svg>")[0].count('<rect class="box')
            assert boxes == sum(map(len, answers[0]["actions"]))
        assert all(f"Stage {number} alone, operator by operator" in page for number in range(stages))
    trace = json.loads(Path(path).read_text())["traceEvents"]
    titles = {e["args"]["name"] for e in trace if e["name"] == "process_name"}
    assert titles == {f"place {place}, {which}" for place in range(2) for which in ("measured", "predicted")}
