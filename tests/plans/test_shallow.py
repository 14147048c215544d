"""What a joint search shares: one capture, one search of equal stages, and short models that stand for long ones."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch

import shardwise as sw
from search.deep_model import VOCABULARY, Deep
from shardwise import api
from shardwise.graph.capture import capture
from shardwise.plans import chosen, joint
from shardwise.plans.joint import Joint, Setting
from shardwise.plans.shallow import Shallow
from shardwise.search.cost_graph import BYTES, COMPUTE
from shardwise.search.dynamic_programming import step_seconds
from shardwise.search.planner import Planner, Settings

LAYERS, WIDTH = 8, 16


def small_batch(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(VOCABULARY, (size, 4), generator=generator)
    return ids, ids.roll(1)


def test_equal_stages_are_searched_once_and_have_the_plan_of_the_fullest() -> None:
    model, batch = Deep(LAYERS, WIDTH), small_batch(8)
    options: dict[str, Any] = {"stages": 4, "micro_batch": 1, "global_batch": 8, "mesh": sw.Mesh(dp=2)}
    with mock.patch.object(chosen, "_choose", wraps=chosen._choose) as searches:
        plan = sw.plan(model, batch, 8, **options)
    middle = [call.args[2] for call in searches.call_args_list]
    assert searches.call_count < 4, "stages in the middle are equal"
    assert middle == sorted(middle, reverse=True), "each was searched for the first of its kind, which keeps most"
    second, third = plan.stages[1], plan.stages[2]
    assert [own.strategy for own in second.operators] == [own.strategy for own in third.operators]
    assert [own.layout for own in second.parameters] == [own.layout for own in third.parameters]
    assert second.operators[0].name != third.operators[0].name
    assert sw.verify(model, batch, plan).ok


@pytest.mark.parametrize("recompute", ["full", "cheap"])
def test_equal_stages_make_the_same_again(recompute: Any) -> None:
    model, batch = Deep(LAYERS, WIDTH), small_batch(8)
    plan = sw.plan(
        model, batch, 4, stages=4, micro_batch=1, global_batch=8, mesh=sw.Mesh(dp=1), recompute=recompute, zero=2
    )
    again = [[own.again for own in stage.operators] for stage in plan.stages]
    assert any(again[1]), "something is made again"
    assert again[1] == again[2]
    assert sw.verify(model, batch, plan).ok


def test_a_joint_search_captures_once_for_every_size() -> None:
    with mock.patch.object(api, "capture", wraps=api.capture) as captures:
        found = sw.plan(Deep(2, WIDTH), small_batch(4), 2, stages="auto", schedule="GPipe")
    said = found.explain("stages")
    assert isinstance(said, Joint)
    assert len(said.considered) > 2
    assert captures.call_count == 1


def test_where_few_are_planned_the_promising_are_and_the_rest_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = Deep(LAYERS, WIDTH), small_batch(8)
    monkeypatch.setattr(joint, "TRIES", 2)
    with mock.patch.object(Shallow, "seconds", autospec=True, side_effect=Shallow.seconds) as estimates:
        found = sw.plan(model, batch, 4, stages="auto")
    said = found.explain("stages")
    assert isinstance(said, Joint)
    assert estimates.call_count > 2
    assert sum(bool(one.step_seconds or one.refused) for one in said.considered) == 2
    assert not said.is_complete
    assert sw.verify(model, batch, found).ok


@pytest.mark.parametrize("num_devices", [8, 32])
def test_a_short_model_stands_for_a_long_one(num_devices: int) -> None:
    with torch.device("meta"):
        model, ids = Deep(12), torch.zeros(32, 256, dtype=torch.int64)
    graph = capture(model, (ids, ids)).graph
    cluster = sw.Cluster.load(f"h100-{num_devices // 8}x8")
    mesh = sw.Mesh(dp=num_devices // 4, tp=4)
    shallow = Shallow(graph, lambda short, size: short, lambda part: (mesh,), cluster, Settings())
    assert len(shallow.short.ops) < len(graph.ops) / 2
    totals = shallow._totals(num_devices, Setting(1, "", 32, 1))
    assert totals is not None
    (search,), _ = Planner.of(graph, (), cluster, (mesh,), Settings(memory_bytes=1e15))._searches()
    whole = search.outcome.components  # which choices are mixed to hide messages depends on the depth
    assert step_seconds(totals.seconds) == pytest.approx(step_seconds(whole), rel=0.05)
    assert totals.seconds[COMPUTE] == pytest.approx(whole[COMPUTE], rel=0.05)
    assert totals.stays + totals.kept == pytest.approx(whole[BYTES], rel=0.05)
    assert totals.stays == pytest.approx(16 * sum(p.numel() for p in model.parameters()) / num_devices, rel=0.05)


def test_what_is_far_too_large_comes_last() -> None:
    with torch.device("meta"):
        model, ids = Deep(12), torch.zeros(32, 256, dtype=torch.int64)
    graph, cluster = capture(model, (ids, ids)).graph, sw.Cluster.load("h100-1x8")
    for memory_bytes, fits in ((1e12, True), (1e6, False)):
        own = Shallow(
            graph, lambda s, size: s, lambda part: (sw.Mesh(dp=8),), cluster, Settings(memory_bytes=memory_bytes)
        )
        assert (own.seconds(Setting(1, "", 32, 1)) < float("inf")) is fits
