"""What a joint search shares: one capture, one search of equal stages, and short models that stand for long ones."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, pairwise
from math import inf
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

import shardwise as sw
from search.deep_model import VOCABULARY, Deep
from shardwise.graph.capture import capture
from shardwise.layouts.routes import Floats
from shardwise.planning import execute
from shardwise.plans import auto_stages, stage_estimator, stage_planner
from shardwise.plans.auto_stages import AutoStagesReport, StageConfig
from shardwise.plans.micro_batch_search import Example
from shardwise.plans.request import PlanRequest
from shardwise.plans.stage_estimator import (
    ESTIMATED_POLICIES,
    KEPT,
    SECONDS,
    STAYS,
    TRANSIENT,
    BlockSpans,
    MeshOption,
    ParetoFront,
    StageEstimator,
    _seconds_of_blocks,
)
from shardwise.search import fit_memory
from shardwise.search.constants import ESTIMATED_MEMORY_SHARE
from shardwise.search.cost_graph import BYTES
from shardwise.search.memory_policy import MemoryPolicy
from shardwise.search.planner import Planner
from shardwise.search.planning_cache import PlanningCache
from shardwise.search.stored_program import SearchConfig

LAYERS, WIDTH = 8, 16
BLOCKS = 6
SIZES = (1, 1), (1, 2), (2, 2), (2, 4), (4, 4)  # numbers of stages and micro-batches


def small_batch(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(VOCABULARY, (size, 4), generator=generator)
    return ids, ids.roll(1)


def test_equal_stages_are_searched_once_and_have_the_plan_of_the_fullest() -> None:
    model, batch = Deep(LAYERS, WIDTH), small_batch(8)
    options: dict[str, Any] = {"stages": 4, "micro_batch": 1, "global_batch": 8, "mesh": sw.Mesh(dp=2)}
    with mock.patch.object(stage_planner, "choose_stage", wraps=stage_planner.choose_stage) as searches:
        plan = sw.plan(model, batch, 8, **options)
    middle = [call.args[2] for call in searches.call_args_list]
    assert searches.call_count < 4, "stages in the middle are equal"
    assert middle == sorted(middle, reverse=True), "each was searched for the first of its kind, which keeps most"
    second, third = plan.stages[1], plan.stages[2]
    assert [own.strategy for own in second.operators] == [own.strategy for own in third.operators]
    assert [own.layout for own in second.parameters] == [own.layout for own in third.parameters]
    assert second.operators[0].name != third.operators[0].name
    assert sw.verify(model, batch, plan).ok


def test_a_stage_of_another_cut_is_searched_again_only_if_its_plan_does_not_fit_there() -> None:
    model, batch = Deep(LAYERS, WIDTH), small_batch(8)
    options: dict[str, Any] = {"stages": 2, "micro_batch": 1, "global_batch": 8, "mesh": sw.Mesh(dp=1)}
    with mock.patch.object(stage_planner, "choose_stage", wraps=stage_planner.choose_stage) as searches:
        sw.plan(model, batch, 2, **options)
        config, part, _, cache = searches.call_args_list[-1].args
        limit = 1e12
        searches.reset_mock()
        planner = stage_planner.StagePlanner(config, PlanningCache(cache), {})
        alone = planner.of(part, 1, limit, None)
        assert planner.of(part, 5, limit, None) is alone
        assert searches.call_count == 1
        several = stage_planner.StagePlanner(config, PlanningCache(), {}).of(part, 5, limit, None)
        assert alone.ranking is not None
        assert several.ranking is not None
        room = alone.ranking.best.num_bytes + 4 * alone.ranking.best.kept_bytes
        assert several.choice.strategies == alone.choice.strategies
        assert several.ranking.best.num_bytes == room, "the same plan, with more in flight"
        assert alone.fits_with(4, room)
        assert not alone.fits_with(4, room - 1)
        count = searches.call_count
        first = planner.of(part, 1, room - 1, None)
        assert planner.of(part, 5, room - 1, None) is not first
        assert searches.call_count >= count + 2


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
    with mock.patch.object(execute, "capture", wraps=execute.capture) as captures:
        found = sw.plan(Deep(2, WIDTH), small_batch(4), 2, stages="auto", schedule="GPipe")
    said = found.report.explain("stages")
    assert isinstance(said, AutoStagesReport)
    assert len(said.considered) > 2
    assert captures.call_count == 1


def test_where_few_are_planned_the_promising_are_and_the_rest_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = Deep(LAYERS, WIDTH), small_batch(8)
    monkeypatch.setattr(auto_stages, "MAX_PLANNED_SETTINGS", 2)
    with (
        mock.patch.object(StageEstimator, "roughly", autospec=True, side_effect=StageEstimator.roughly) as bounds,
        mock.patch.object(StageEstimator, "seconds", autospec=True, side_effect=StageEstimator.seconds) as estimates,
    ):
        found = sw.plan(model, batch, 4, stages="auto")
    said = found.report.explain("stages")
    assert isinstance(said, AutoStagesReport)
    assert bounds.call_count >= estimates.call_count >= 2
    estimated = [call.args[1] for call in estimates.call_args_list]
    assert {one.setting for one in said.considered if one.step_seconds or one.refused} <= {*estimated}
    assert sum(bool(one.step_seconds or one.refused) for one in said.considered) == 2
    assert not said.is_complete
    assert sw.verify(model, batch, found).ok


def fronts_of(num_devices: int, settings: SearchConfig, **options: Any) -> StageEstimator:
    with torch.device("meta"):
        model, ids = Deep(12), torch.zeros(32, 256, dtype=torch.int64)
    graph = capture(model, (ids, ids)).graph
    cluster, mesh = sw.Cluster.load(f"h100-{num_devices // 8}x8"), sw.Mesh(dp=num_devices // 4, tp=4)
    request = PlanRequest.of(model, (ids, ids), cluster, **{"mesh": mesh, **options})
    return StageEstimator(graph, request, Example(model, (request.args, {})), settings)


@pytest.mark.parametrize("num_devices", [8, 32])
def test_a_short_model_stands_for_a_long_one(num_devices: int) -> None:
    fronts = fronts_of(num_devices, SearchConfig(memory_bytes=1e15))
    assert len(fronts.short.ops) < len(fronts.whole.ops) / 2
    (mesh,) = fronts.request.meshes(fronts.cluster, by_price=True)
    found = Planner.of(fronts.whole, (), fronts.cluster, (mesh,), fronts.settings).plan()
    assert found.ranking is not None
    step = found.ranking.best.step  # of 32 devices it is a fifth above the price: it waits for parameters
    assert step is not None
    assert fronts.seconds(StageConfig(1, "", 32, 1)) == pytest.approx(step.seconds, rel=0.05)


@pytest.mark.parametrize("share", [0.5, 0.7])
@pytest.mark.sampled(1)
def test_less_memory_takes_about_what_the_search_of_the_policies_takes(share: float) -> None:
    free = fronts_of(8, SearchConfig(memory_bytes=1e15))
    (mesh,) = free.request.meshes(free.cluster, by_price=True)
    (search,), _ = Planner.of(free.whole, (), free.cluster, (mesh,), free.settings).searches()
    limit = share * float(search.outcome.components[BYTES])
    planner = Planner.of(free.whole, (), free.cluster, (mesh,), SearchConfig(memory_bytes=limit))
    prices = []
    for policy in ESTIMATED_POLICIES:
        memory_policy = MemoryPolicy.of(free.whole, (), policy.recompute, policy.reshard_mode)
        searches, _ = replace(planner, settings=replace(planner.settings, memory_policy=memory_policy)).searches()
        prices += [own.outcome.seconds for own in searches]
    estimate = fronts_of(8, SearchConfig(memory_bytes=limit / ESTIMATED_MEMORY_SHARE)).seconds(
        StageConfig(1, "", 32, 1)
    )
    assert estimate >= min(prices) * 0.95, "the ends of the model weigh more in a short one"
    assert estimate <= min(prices) * 1.25, "points are few, and of one way for all blocks"


def test_what_is_far_too_large_comes_last() -> None:
    for memory_bytes, fits in ((1e12, True), (1e6, False)):
        assert (fronts_of(8, SearchConfig(memory_bytes=memory_bytes)).seconds(StageConfig(1, "", 32, 1)) < inf) is fits


def test_a_search_stands_for_others_of_about_as_many_samples() -> None:
    fronts = fronts_of(64, SearchConfig(memory_bytes=1e15), mesh=None)
    settings = [StageConfig(stages, "1F1B" if stages > 1 else "", 32 // passes, passes) for stages, passes in SIZES]
    first, *others = settings
    assert fronts.roughly(first) == fronts.seconds(first), "nothing is known yet"
    for setting in others:
        rough = fronts.roughly(setting)
        assert len(fronts.known) == 1, "nothing else was searched"
        alone = fronts_of(64, SearchConfig(memory_bytes=1e15), mesh=None).seconds(setting)
        assert 0.5 * alone <= rough <= 1.1 * alone


@pytest.mark.parametrize("offload", ["auto", "none"])
def test_what_waits_on_the_host_takes_no_memory(offload: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Values of blocks may be copied while a stage computes. This model keeps none if it recomputes all."""
    monkeypatch.setattr(stage_estimator, "MEMORY_POLICIES", (MemoryPolicy("cheap", "again", "all"),))
    fronts, setting = fronts_of(8, SearchConfig(memory_bytes=1e15), offload=offload), StageConfig(1, "", 32, 1)
    fronts.policies = (MemoryPolicy("cheap", "again"),)
    free = fronts.seconds(setting)
    (way,) = front.ways if (front := fronts.known[1, 32]) else []
    stays, kept, transient = way.spans.held[0, 0, -1]
    fronts.settings = SearchConfig(memory_bytes=(stays + transient + 0.5 * kept) / ESTIMATED_MEMORY_SHARE)
    assert free <= fronts.seconds(setting) < inf if offload == "auto" else fronts.seconds(setting) == inf


def test_what_nothing_hides_is_waited_for() -> None:
    """Gathers begin with the work ahead of theirs, reductions with the work behind."""
    forward, backward, sent = (np.array(parts)[:, None] for parts in ([1.0, 2.0], [3.0, 4.0], [0.0, 5.0]))
    # Forward gathers from 0 to 5, as 1 is worked, and works from 5 to 7. Backward works from 7 to 11, and reduces from
    # 11 to 16, as 3 is worked.
    assert _seconds_of_blocks(forward, backward, sent, 1, is_again=False) == 16.0
    # It gathers again from 7 to 12 and reduces from 16 to 21.
    assert _seconds_of_blocks(forward, backward, sent, 1, is_again=True) == 21.0
    # Of two blocks, forward works until 5 + 2 + max(1, 5) + 2 = 14, backward until 18, as the second block is reduced
    # from 18 to 23, and from 21 to 25, and the first from 25 to 30.
    assert _seconds_of_blocks(forward, backward, sent, 2, is_again=False) == 30.0
    nothing = np.zeros_like(sent)
    assert _seconds_of_blocks(forward, backward, nothing, 3, is_again=True) == 3 * 10.0


@pytest.mark.parametrize("how", [None, "none"])
def test_a_model_without_blocks_that_makes_nothing_again_is_estimated(how: Any) -> None:
    with torch.device("meta"):
        model, x = torch.nn.Linear(64, 64), torch.empty(32, 64)
    graph = capture(model, (x,), loss=lambda output: output.square().mean()).graph
    request = PlanRequest.of(model, (x,), "h100-1x8", mesh=sw.Mesh(dp=8))
    policies = (MemoryPolicy(how, "held"),)
    fronts = StageEstimator(graph, request, Example(model, (request.args, {})), SearchConfig(), policies=policies)
    assert not fronts.blocks
    assert fronts.seconds(StageConfig(1, "", 32, 1)) < inf


def drawn_front(seed: int) -> tuple[ParetoFront, Floats]:
    """A front of four ways, two of which are made later, and the points of all. In each way what takes fewer bytes
    takes more seconds; what is made later is slower. The first two points are the fastest and the one of the fewest
    bytes."""
    rng = np.random.default_rng(seed)
    ways, all_points = [], []
    for number in range(4):
        free = rng.uniform(0.1, 2.0, (1, BLOCKS + 2, 4))
        free[..., SECONDS] += 0.5 * number
        leanest = free * [2.0, 0.3, 0.3, 0.3]
        cheaper = free * rng.uniform([1.0, 0.3, 0.3, 0.3], [2.0, 1.0, 1.0, 1.0], (2, BLOCKS + 2, 4))
        all_points.append(np.concatenate([free, leanest, cheaper]))
    for later in all_points[2:]:
        later[..., SECONDS] = np.maximum(later[..., SECONDS], np.concatenate(all_points[:2])[..., SECONDS].max(axis=0))
    for points in all_points:

        def spans_of(taken: Any, samples: float, places: float, points: Floats = points) -> BlockSpans:
            return BlockSpans.of(points[[number for (number,) in taken]])

        ways.append(MeshOption([[0], [1]], lambda: [[2], [3]], spans_of))
    return ParetoFront(ways[:2], lambda: ways[2:]), np.concatenate(all_points)


@pytest.mark.parametrize("limit", [7.0, 10.0, 100.0])
@pytest.mark.parametrize("seed", range(4))
def test_a_cut_is_the_best_of_all(seed: int, limit: float) -> None:
    front, points = drawn_front(seed)
    places, flying, turns = 3, (3.0, 2.0, 1.0), 2

    def taken(first: int, last: int, kept: float) -> float:
        """The fastest point of a place with blocks from one to another, the outer places with what is outside."""
        parts = points[:, 0 if first == 0 else first + 1 : BLOCKS + 2 if last == BLOCKS else last + 1]
        own = parts.sum(axis=1)
        held = own[:, STAYS] + kept * own[:, KEPT] + parts[..., TRANSIENT].max(axis=1) / turns
        return float(np.where(held <= limit, own[:, SECONDS], inf).min())

    best = inf
    for second, third in combinations(range(1, BLOCKS), 2):
        ends = pairwise((0, second, third, BLOCKS))
        best = min(best, max(taken(*own, kept) for own, kept in zip(ends, flying, strict=True)))
    found = front.cut(limit, flying, turns)
    assert found.value == pytest.approx(best)
    assert (front.others is None) is (limit < 100.0), "where all fits, nothing else is looked at"
    if best < inf:
        spans = pairwise(found.starts)
        slowest = max(taken(*own, kept) for own, kept in zip(spans, flying, strict=True))
        assert slowest == pytest.approx(best)
        assert found.starts[0] == 0
        assert len(found.starts) == places + 1


@pytest.mark.parametrize("share", [0.9, 0.7])
@pytest.mark.sampled(1)
def test_stages_that_keep_too_much_are_cut_by_what_recomputation_costs_and_verify(share: float) -> None:
    """Each stage fits with one micro-batch, and the first not with the four that it has in flight."""
    model, batch = Deep(LAYERS, 64), small_batch(256)
    options: dict[str, Any] = {"micro_batch": 32, "global_batch": 256, "mesh": sw.Mesh(dp=1)}
    free = sw.plan(model, batch, 4, stages=4, **options)
    assert free.pipeline is not None
    limit = share * max(own.peak_bytes for own in free.pipeline.stages)
    tight = sw.plan(model, batch, 4, stages=4, memory_bytes=limit, **options)
    assert tight.pipeline is not None
    assert all(own.peak_bytes <= limit for own in tight.pipeline.stages)
    assert any(op.again for stage in tight.stages for op in stage.operators)
    assert sw.verify(model, batch, tight).ok


def test_what_a_stage_receives_is_split_where_it_is_worked_on_in_parts() -> None:
    """A stage asks for no more than its devices use: each is sent its samples, not those of all."""
    with torch.device("meta"):
        model, ids = Deep(8, 512), torch.zeros(128, 256, dtype=torch.int64)
    cluster = sw.Cluster.load("h100-2x8")
    plan = sw.plan(model, (ids, ids), cluster, stages=2, micro_batch=32, mesh=sw.Mesh(dp=8), schedule="1F1B")
    (received,) = plan.stages[1].receives
    assert "32@dp" in received.layout, received.layout
    assert plan.pipeline is not None
    assert plan.pipeline.stages[0].sent_bytes == 32 * 256 * 512 * 4 / 8


def test_stages_that_are_asked_to_make_all_again_are_cut_by_what_that_keeps() -> None:
    model, batch = Deep(LAYERS, 64), small_batch(256)
    options: dict[str, Any] = {"stages": 4, "micro_batch": 32, "global_batch": 256, "mesh": sw.Mesh(dp=1)}
    free = sw.plan(model, batch, 4, recompute="full", **options)
    assert free.pipeline is not None
    limit = max(own.peak_bytes for own in free.pipeline.stages)
    found = sw.plan(model, batch, 4, recompute="full", memory_bytes=limit, **options)
    assert found.pipeline is not None
    assert found.pipeline.step_seconds <= free.pipeline.step_seconds * 1.05
    assert sw.verify(model, batch, found).ok


@pytest.mark.parametrize("schedule", ["1F1B", "Interleaved1F1B"])
def test_stages_that_differ_in_names_are_timed_once(schedule: str) -> None:
    model, batch = Deep(LAYERS, WIDTH), small_batch(8)
    options: dict[str, Any] = {"micro_batch": 1, "global_batch": 8, "mesh": sw.Mesh(dp=1), "schedule": schedule}
    with mock.patch.object(stage_planner, "_timed", wraps=stage_planner._timed) as calls:
        plan = sw.plan(model, batch, 4, stages=4 if schedule == "1F1B" else 8, **options)
    assert plan.pipeline is not None
    assert calls.call_count < len(plan.stages)
    with mock.patch.object(stage_planner, "_without_names", side_effect=lambda part, choice, spmd: object()):
        apart = sw.plan(model, batch, 4, stages=len(plan.stages), **options)
    assert apart.pipeline == plan.pipeline


@pytest.mark.long
def test_parameters_are_gathered_once_a_step_where_that_is_faster() -> None:
    """A limit below what whole states take, and above what whole gradients do: in every pass is slower."""
    model, batch = Deep(LAYERS, 128), small_batch(64)
    options: dict[str, Any] = {"micro_batch": 8, "global_batch": 64, "mesh": sw.Mesh(dp=4), "recompute": "auto"}
    free = sw.plan(model, batch, 4, **options)
    limit = 0.75 * free.prediction.memory_bytes
    found = sw.plan(model, batch, 4, memory_bytes=limit, **options)
    parts = [own for own in found.parameters if own.once and "@" in own.layout]
    assert parts, "something is stored in parts and gathered once"
    without = tuple(policy for policy in fit_memory.MEMORY_POLICIES if policy.reshard_mode != "once")
    with mock.patch.object(fit_memory, "MEMORY_POLICIES", without):
        each = sw.plan(model, batch, 4, memory_bytes=limit, **options)
    assert found.prediction.planned_seconds < each.prediction.planned_seconds
    assert found.prediction.bound <= found.prediction.planned_seconds
    assert sw.verify(model, batch, found).ok
