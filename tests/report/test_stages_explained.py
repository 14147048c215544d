"""A plan of stages explains operators and parameters by the search of their stage, equal ones by that of the first."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from raising import raises
from shardwise.report.search_reports import StageExplanation


class Stack(nn.Module):
    """Four equal blocks; stages 1 and 2 of four are equal."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 1024)
        self.blocks = nn.ModuleList(nn.Linear(1024, 1024) for _ in range(6))
        self.head = nn.Linear(1024, 64)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.head(x).square().mean()


@pytest.fixture(scope="module")
def plan() -> sw.Plan:
    model = Stack()
    for i, block in enumerate(model.blocks):
        sw.stage(block, i // 2 + 1)
    sw.stage(model.first, 0)
    sw.stage(model.head, 4)
    cluster = sw.Cluster.load("h100-2x5")
    return sw.plan(model, torch.zeros(160 * 64, 64), cluster, stages="marked", micro_batch=32 * 64, mesh=sw.Mesh(x=2))


def test_what_is_explained_is_what_the_stage_has(plan: sw.Plan) -> None:
    explained, alike = 0, set()
    for number, stage in enumerate(plan.stages):
        for entry in stage.operators:
            if not entry.name.endswith("linear"):
                continue
            found = plan.report.explain(entry.name)
            assert isinstance(found, StageExplanation)
            assert found.stage == number
            (chosen,) = (own for own in found.explanation.alternatives if own.chosen)
            assert chosen.choice == (entry.strategy or "whole")
            alike.add((number, bool(found.alike)))
            assert (f"in stage {number}, planned as an equal stage" in str(found)) == bool(found.alike)
            explained += 1
    assert explained == 8
    assert any(entry.strategy for stage in plan.stages for entry in stage.operators), "something is split"
    assert alike >= {(3, False), (2, True), (1, True)}, "stages are searched from the last one on"
    parameter = plan.report.explain("blocks.3.weight")
    assert parameter.alike == "blocks.5.weight"


def test_what_a_stage_receives_is_explained_by_its_name(plan: sw.Plan) -> None:
    for number, stage in enumerate(plan.stages[1:], 1):
        (received,) = stage.receives
        found = plan.report.explain(received.name)
        assert isinstance(found, StageExplanation)
        assert (found.stage, found.explanation.kind) == (number, "received")
        assert found.explanation.chosen.choice == received.layout


def test_what_is_not_known_is_refused(plan: sw.Plan) -> None:
    with raises(sw.PlanError, "'blocks.3.wieght'", "blocks.3.weight"):
        plan.report.explain("blocks.3.wieght")
    with raises(sw.PlanError, "another process"):
        pickle.loads(pickle.dumps(plan)).report.explain("blocks.3.weight")
    propagated = sw.plan(Stack(), torch.zeros(8, 64), 4, stages=2, micro_batch=2, search="sharding_propagation")
    with raises(sw.PlanError, "no stage", "by price"):
        propagated.report.explain("blocks.3.weight")


def test_what_another_choice_would_do_is_said_of_its_stage(plan: sw.Plan) -> None:
    for number, name in ((1, "blocks.0/linear"), (2, "blocks.2/linear")):
        found = plan.report.explain(name)
        chosen = next(own for own in found.explanation.alternatives if own.chosen)
        other = next(own for own in found.explanation.alternatives if not own.chosen)
        same = plan.report.what_if(name, chosen.choice)
        assert same.stage == number
        assert name not in {change.name for change in same.found.changed}, "it has this choice already"
        asked = plan.report.what_if(name, other.choice)
        assert asked.stage == number
        assert any(change.name == name and change.before == chosen.choice for change in asked.found.changed)
        stage = plan.stages[number]
        names = {entry.name for entry in (*stage.operators, *stage.parameters)}
        names |= {f"received {entry.name}" for entry in stage.receives}
        assert {change.name for change in asked.found.changed if change.kind != "shared"} <= names
    with raises(sw.PlanError, "'nothing@x'", "blocks.4/linear"):
        plan.report.what_if("blocks.2/linear", "nothing@x")
    with raises(sw.PlanError, "'blocks.9/linear'"):
        plan.report.what_if("blocks.9/linear", "n@x")


@pytest.fixture(scope="module")
def balanced() -> sw.Plan:
    cluster = sw.Cluster.load("h100-1x4")
    return sw.plan(Stack(), torch.zeros(1024, 64), cluster, stages=4, global_batch=1024, mesh=sw.Mesh(x=1))


def test_the_best_pipelines_have_their_cuts_elsewhere(balanced: sw.Plan) -> None:
    found = balanced.report.top(6)
    first, *others = found.pipelines
    assert first.plan is not None
    assert first.plan.digest == balanced.digest
    assert first.step_seconds == balanced.pipeline.step_seconds
    assert len(others) == 5
    assert others == sorted(others, key=lambda own: own.step_seconds)
    moved = [own for own in others if "begins with" in own.changed]
    assert moved
    for own in moved:
        assert own.plan is not None
        assert own.plan.pipeline is not None
        assert (own.step_seconds, own.bubble) == (own.plan.pipeline.step_seconds, own.plan.pipeline.bubble)
        number, name = int(own.changed.split()[1]), own.changed.split()[4].rstrip(",")
        assert own.plan.stages[number].operators[0].name == name
        assert balanced.stages[number].operators[0].name != name
        differing = [i for i, pair in enumerate(zip(own.plan.stages, balanced.stages, strict=True)) if _cut(*pair)]
        assert differing == [number - 1, number], "one cut is elsewhere"
    assert "the chosen pipeline" in str(found)
    assert f"the best of {found.looked_at} others" in str(found)


def _cut(one: Any, other: Any) -> bool:
    return [entry.name for entry in one.operators] != [entry.name for entry in other.operators]


def test_a_pipeline_of_the_ranking_is_a_plan(balanced: sw.Plan) -> None:
    model, x = Stack(), torch.randn(1024, 64)
    own = balanced.report.top(3).pipelines[1]
    assert own.plan is not None
    assert sw.verify(model, x, own.plan, steps=1).ok


def test_micro_batches_that_were_looked_at_are_ranked(balanced: sw.Plan) -> None:
    sizes = {own.plan.micro_batch for own in balanced.report.top(1000).pipelines if "micro-batch" in own.changed}
    assert sizes
    assert balanced.micro_batch not in sizes


def test_marked_stages_stay_where_they_are(plan: sw.Plan) -> None:
    found = plan.report.top()
    assert [own.changed for own in found.pipelines] == [""], "cuts are the user's, and so is the micro-batch"
    assert found.looked_at == 0


def test_a_joint_search_ranks_its_settings_too() -> None:
    chosen = sw.plan(
        Stack(), torch.zeros(1024, 64), sw.Cluster.load("h100-1x4"), stages="auto", mesh=sw.Mesh(x=1), global_batch=1024
    )
    assert chosen.is_pipeline, "a mesh of one device leaves nothing else"
    joint = chosen.report.explain("stages")
    others = [str(one.setting) for one in joint.considered if one.step_seconds and one.setting != joint.taken]
    assert others
    assert set(others) <= {own.changed for own in chosen.report.top(1000).pipelines}


def test_what_no_price_chose_has_no_best(plan: sw.Plan) -> None:
    propagated = sw.plan(Stack(), torch.zeros(8, 64), 4, stages=2, micro_batch=2, search="sharding_propagation")
    with raises(sw.PlanError, "no stage", "by price"):
        propagated.report.top()
    with raises(sw.PlanError, "k is 0"):
        plan.report.top(0)
    with raises(sw.PlanError, "another process"):
        pickle.loads(pickle.dumps(plan)).report.top()
