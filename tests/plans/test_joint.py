"""The joint search over stages, schedules and micro-batches: it finds what planning every setting finds, its bounds
hold, and what it says of itself is true."""

from __future__ import annotations

import copy
import re
from math import inf
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from scipy.optimize import linprog
from torch import nn
from torch.nn import functional as F

import shardwise as sw
from raising import raises
from runtime.staged_model import Staged, staged_batch
from shardwise import progress
from shardwise.costs.pipeline_simulation import StageSeconds, simulate_pipeline
from shardwise.graph.capture import capture
from shardwise.plans import auto_stages, stage_planner
from shardwise.plans.auto_stages import AutoStagesReport, LowerBound, StageConfig, least_share
from shardwise.plans.schedule import order_of, schedule_of
from shardwise.rules.attention_bands import Band
from shardwise.search.fit_memory import fit_memory

BATCH = staged_batch(8)


def planned_alone(model: nn.Module, setting: StageConfig, devices: int, **options: Any) -> float:
    """Seconds of a step of one setting, planned by itself."""
    staged = {"stages": setting.stages, "schedule": setting.schedule} if setting.stages > 1 else {}
    found = sw.plan(model, BATCH, devices, global_batch=8, micro_batch=setting.micro_batch, **staged, **options)
    if found.pipeline is not None:
        return found.pipeline.step_seconds
    return found.prediction.planned_seconds


def test_it_finds_what_planning_every_setting_finds() -> None:
    model = Staged(layers=2)
    found = sw.plan(model, BATCH, 2, stages="auto")
    said = found.report.explain("stages")
    assert isinstance(said, AutoStagesReport)
    assert said.is_complete
    assert len(said.considered) >= 6
    possible = [one for one in said.considered if not one.refused or "is known" in one.refused]
    alone = {one.setting: planned_alone(model, one.setting, 2) for one in possible}
    assert min(alone.values()) == pytest.approx(alone[said.taken])
    for one in possible:
        assert one.bound <= alone[one.setting], "a bound holds for what is planned, and for what is not"
        if one.step_seconds:
            assert one.step_seconds == pytest.approx(alone[one.setting])
    assert said.bound <= alone[said.taken]
    assert f"of {len(said.considered)} settings" in str(said)
    planned = [line for line in str(said).splitlines() if ": step " in line]
    interval = re.compile(r"step [\d.]+ \S+ \([\d.]+-[\d.]+\), memory [\d.]+ \S+ \([\d.]+-[\d.]+\)$")
    assert planned, "something was planned"
    assert all(interval.search(line) for line in planned), "every step and peak has its interval"
    assert sw.verify(model, BATCH, found).ok


def test_where_no_device_holds_the_model_it_takes_stages_that_bind_and_verify() -> None:
    model = Staged(layers=4, width=64)
    options: dict[str, Any] = {"mesh": sw.Mesh(dp=1), "schedule": "1F1B", "micro_batch": 2}
    found = sw.plan(model, BATCH, 2, stages="auto", **options)
    assert len(found.stages) == 2, "a mesh of one device leaves as many stages as devices"
    assert found.schedule == "1F1B"
    assert found.pipeline is not None
    said = found.report.explain("stages")
    assert isinstance(said, AutoStagesReport)
    assert said.taken == StageConfig(2, "1F1B", 2, 4)
    again = sw.plan(model, BATCH, 2, stages=2, global_batch=8, **options)
    assert found.digest == again.digest, "it is an ordinary plan"
    assert copy.deepcopy(found) == again
    assert sw.verify(model, BATCH, found).ok
    with raises(sw.PlanError, "no stage", "has 'x'"):
        found.report.explain("x")


@pytest.mark.parametrize(("devices", "size"), [(1, 8), (3, 7)])
def test_one_device_and_primes_have_few_settings_and_all_are_planned(devices: int, size: int) -> None:
    model, batch = Staged(layers=4), staged_batch(size)
    found = sw.plan(model, batch, devices, stages="auto")
    said = found.report.explain("stages")
    assert isinstance(said, AutoStagesReport)
    assert said.is_complete
    assert {one.setting.stages for one in said.considered} == ({1} if devices == 1 else {1, 3, 6, 9})
    assert {one.setting.micro_batch for one in said.considered} == ({1, 2, 4, 8} if devices == 1 else {1, 7})
    assert all(one.bound <= one.step_seconds for one in said.considered if one.step_seconds)
    assert min(said.considered, key=lambda one: one.step_seconds or float("inf")).setting == said.taken


def test_equal_stages_of_a_place_count_together_against_a_known_step() -> None:
    asked: list[tuple[float, int]] = []

    def planned(planner: Any, *args: Any) -> Any:
        asked.append((planner.settings.known, planner.settings.together))
        return fit_memory(planner, *args)

    with mock.patch.object(stage_planner, "fit_memory", planned):
        found = sw.plan(Staged(layers=6), BATCH, 2, stages="auto", schedule="Interleaved1F1B:4", mesh=sw.Mesh(dp=1))
    said = found.report.explain("stages")
    assert isinstance(said, AutoStagesReport)
    steps = [one.step_seconds for one in said.considered if one.step_seconds]
    known = {(step, together) for step, together in asked if step < inf}
    assert {step for step, _ in known} <= set(steps), "of a whole step"
    assert max(together for _, together in known) == 2, "a place has two equal stages"


def test_the_memory_of_a_device_is_that_of_all_its_stages() -> None:
    found = sw.plan(
        Staged(layers=4), BATCH, 2, stages="auto", schedule="ZBVZeroBubble", micro_batch=2, mesh=sw.Mesh(dp=1)
    )
    said = found.report.explain("stages")
    assert isinstance(said, AutoStagesReport)
    (one,) = said.considered
    assert found.pipeline is not None
    first, second, third, fourth = (stage.peak_bytes for stage in found.pipeline.stages)
    assert one.num_bytes == found.pipeline.memory_bytes
    # Its stages take turns: what one holds for a moment is there once.
    assert max(first, second, third, fourth) < one.num_bytes < max(first + fourth, second + third)


def test_what_is_left_out_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto_stages, "MAX_PLANNED_SETTINGS", 1)
    found = sw.plan(Staged(layers=3), BATCH, 2, stages="auto", schedule="GPipe")
    said = found.report.explain("stages")
    assert isinstance(said, AutoStagesReport)
    assert not said.is_complete
    assert "left out: no step below" in str(said)
    assert "plans of what was left out may be faster" in str(said)


def test_settings_of_large_models_are_planned_while_their_estimates_are_below_the_best_step() -> None:
    """One that is estimated to be slower than the plan is left out, though there are tries left, and its estimate is
    printed."""
    cluster, planned = sw.Cluster.load("h100-1x8"), list[int]()
    settings = [StageConfig(stages, "1F1B", 1, 64) for stages in (2, 4, 8)]
    plan = sw.plan(Staged(layers=2), BATCH, 2).plan
    step = auto_stages.figures(plan)
    assert step is not None

    def plan_setting(setting: StageConfig, known: float) -> sw.Plan:
        planned.append(setting.stages)
        return plan

    def estimate(setting: StageConfig) -> float:
        return {2: 0.5, 4: 0.9, 8: 1.01}[setting.stages] * step[0]

    floor = LowerBound(1e-12, 0, 1e-3)
    _, said = auto_stages.joint_search(settings, floor, cluster, plan_setting, tries=2, estimates=(estimate,))
    assert planned == [2, 4]
    assert not said.is_complete
    assert "8 stages, 1F1B, micro-batch 1 (64 passes): left out: about" in str(said)
    planned.clear()
    with mock.patch.object(auto_stages, "MAX_REFINED_ESTIMATES", 2):
        auto_stages.joint_search(
            settings, floor, cluster, plan_setting, tries=2, estimates=(lambda one: one.stages * step[0],)
        )
    assert len(planned) == 2, "what was too much to be estimated comes last, and may be the fastest"
    planned.clear()
    _, said = auto_stages.joint_search(settings, floor, cluster, plan_setting, tries=3, estimates=(estimate,))
    assert len(planned) == 3, "where there are tries for all, estimates decide nothing"


def test_settings_are_estimated_as_far_as_they_may_be_the_least() -> None:
    floor, cluster = LowerBound(1.0, 300, 1e9, blocks=80), sw.Cluster.load("h100-32x8")
    found = [
        StageConfig(stages, "1F1B" if stages > 1 else "", size, 256 // size)
        for stages in (1, 2, 64)
        for size in (16, 64)
    ]
    asked: list[tuple[str, StageConfig]] = []

    def estimate(setting: StageConfig, more: float, name: str) -> float:
        """Half as much again as the rough one for a whole sample of a device, and the more the less of it there is."""
        asked.append((name, setting))
        shared = max(1.0, 256 / setting.places / setting.micro_batch) ** 0.2
        return 1.5 * more * shared * floor.estimate(setting, cluster)

    queue = auto_stages._Queue(
        found, floor, cluster, (lambda one: estimate(one, 1.0, "first"), lambda one: estimate(one, 1.02, "last"))
    )
    assert all(rough >= floor.bound(queue.settings[number]) for _, rough, number, _ in queue.heap)
    order = [queue.pop(refines=True, first=True)]
    assert ("last", order[0][0]) in asked
    assert not any(name == "last" and one.stages == 64 for name, one in asked), "none of 64 stages may be the least"
    order += [queue.pop(refines=True, first=False) for _ in found[1:]]
    assert {setting for setting, _ in order} == set(found)
    last = dict(order)
    assert list(last.values()) == sorted(last.values())
    asked.clear()
    queue = auto_stages._Queue(found, floor, cluster, (lambda one: estimate(one, 1.0, "first"), queue.estimates[1]))
    with progress.until_deadline(10.0, lambda: 6.0 * (len(asked) > 1)):
        assert queue.pop(refines=True, first=True)[0] in [one for _, one in asked], "there is no time for others"
    assert len(asked) == 2


def test_blocks_that_stages_can_not_have_evenly_are_waited_for() -> None:
    cluster, setting = sw.Cluster.load("h100-32x8"), StageConfig(64, "1F1B", 1, 256)
    even, uneven = (LowerBound(1.0, 0, 0.0, blocks=blocks).estimate(setting, cluster) for blocks in (64, 80))
    assert uneven / even == pytest.approx(2 / (80 / 64)), "some stage has two blocks of 80"
    assert LowerBound(1.0, 0, 0.0).estimate(setting, cluster) == pytest.approx(even), "no blocks: cut anywhere"
    full = StageConfig(32, "Interleaved1F1B:8", 256, 1)
    assert LowerBound(1.0, 0, 0.0, blocks=80).estimate(full, cluster) >= LowerBound(1.0, 0, 0.0).bound(full)


@pytest.mark.parametrize("passes", [1, 2, 4, 7])
@pytest.mark.parametrize("stages", [2, 3, 4])
def test_no_order_of_stages_is_below_the_bound(stages: int, passes: int) -> None:
    """However the work of a step is divided among the stages: the simulated order takes the bound at least."""
    generator = torch.Generator().manual_seed(stages * 10 + passes)
    name = "1F1B" if passes >= stages else "GPipe"
    bound = LowerBound(1.0, 0, 0.0).bound(StageConfig(stages, name, 1, passes))
    order = order_of(schedule_of(name), stages, passes)
    for trial in range(30):
        work = torch.rand(stages, generator=generator).double() ** (1 + trial % 3) + 1e-6
        shares = (work / work.sum() * stages / passes).tolist()  # of a micro-batch, one second a place on average
        parts = [StageSeconds(own / 3, own / 3, own / 3, 0.0, 0.0) for own in shares]
        assert simulate_pipeline(order, parts).seconds >= bound * (1 - 1e-12)


@pytest.mark.parametrize("passes", [2, 4, 8])
@pytest.mark.parametrize("places", [2, 4])
@pytest.mark.parametrize("name", ["Interleaved1F1B", "Interleaved1F1B:3", "LoopedBFS"])
def test_no_order_of_several_stages_on_a_place_is_below_the_bound(name: str, places: int, passes: int) -> None:
    """Whatever the shares are: at random, and with nearly nothing to do in the first round."""
    generator = torch.Generator().manual_seed(places * 10 + passes)
    schedule = schedule_of(name)
    stages = places * schedule.stages_per_place
    bound = LowerBound(1.0, 0, 0.0).bound(StageConfig(stages, schedule.name, 1, passes))
    assert bound > 1.0, "there is a wait"
    order = order_of(schedule, places, passes)
    for trial in range(30):
        work = torch.rand(stages, generator=generator).double() ** (1 + trial % 3) + 1e-6
        work[:places] *= 10.0 ** -(trial % 4)
        shares = (work / work.sum() * places / passes).tolist()
        parts = [StageSeconds(own / 3, own / 3, own / 3, 0.0, 0.0) for own in shares]
        assert simulate_pipeline(order, parts).seconds >= bound * (1 - 1e-12)


@pytest.mark.parametrize(("places", "rounds", "passes"), [(2, 1, 4), (4, 2, 4), (3, 3, 9), (8, 2, 8), (4, 2, 1)])
def test_the_bound_is_the_least_of_all_divisions(places: int, rounds: int, passes: int) -> None:
    """The same as a linear program: the seconds of all stages, and a step that is as long as every sum."""
    stages = places * rounds
    sums = np.zeros((stages, stages + 1))
    for stage in range(stages):
        sums[stage, :stage] = 1
        sums[stage, stage:stages:places] += passes
    sums[:, -1] = -1
    found = linprog(
        [*[0.0] * stages, 1.0], sums, np.zeros(stages), [[*[1.0] * stages, 0.0]], [1.0], [(0, None)] * (stages + 1)
    )
    assert least_share(places, stages, passes) == pytest.approx(found.fun, rel=1e-9)


class Windowed(nn.Module):
    """Attention of a ring to the nearest tokens before each."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.project, self.length = nn.Linear(64, 64), length

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        place = torch.arange(self.length)
        distance = place[:, None] - place
        seen = (distance >= 0) & (distance < 64)
        heads = self.project(x).unflatten(-1, (1, 64)).transpose(1, 2)
        attend = sw.shard(F.scaled_dot_product_attention, "ring@cp")
        return attend(heads, heads, heads, attn_mask=seen).square().mean()


@pytest.mark.long
def test_the_bound_holds_where_a_ring_leaves_out_what_a_mask_hides() -> None:
    with torch.device("meta"):
        model, x = Windowed(1 << 16), torch.empty(1, 1 << 16, 64)
    cluster = sw.Cluster.load("h100-1x8")
    plan = sw.plan(model, (x,), cluster, mesh=sw.Mesh(cp=8), search="dynamic_programming", recompute="none")
    assert "ring@cp" in [op.strategy for op in plan.operators]
    floor = LowerBound.of(capture(model, (x,)).graph, 1.0, cluster)
    assert 0 < floor.bound(StageConfig(1, "", 1, 1)) <= plan.prediction.planned_seconds


def test_pairs_at_the_distances_of_a_band_are_counted() -> None:
    for queries, keys, band in ((5, 5, Band(-2, 1)), (3, 7, Band(most=0)), (4, 6, Band()), (4, 4, Band(9, 12))):
        pairs = [band.least <= k - q <= band.most for q in range(queries) for k in range(keys)]
        assert band.share(queries, keys) == pytest.approx(sum(pairs) / len(pairs))


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "without prices": ({"mode": "data_parallel"}, "compares plans by price"),
    "propagation": ({"search": "sharding_propagation"}, "compares plans by price"),
    "a mesh of three": ({"mesh": sw.Mesh(dp=3)}, "no setting"),
    "a schedule of none": ({"schedule": "2F2B"}, "'2F2B'"),
    "too little memory": (
        {"memory_bytes": 1000.0, "micro_batch": 8, "schedule": "GPipe"},
        "docs/errors.md#nothing-fits",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_leaves_no_choice_is_refused(case: str) -> None:
    options, message = REFUSED[case]
    error = sw.errors.NothingFits if "memory_bytes" in options else sw.PlanError
    with raises(error, message):
        sw.plan(Staged(), BATCH, 2, stages="auto", **options)


def test_marked_modules_are_refused() -> None:
    model = Staged()
    sw.stage(model.norms[1], 1)
    with raises(sw.PlanError, "norms.1", "modules"):
        sw.plan(model, BATCH, 2, stages="auto")


class Products(nn.Module):
    """A product, attention and a convolution, each large beside its latency."""

    def __init__(self) -> None:
        super().__init__()
        self.project, self.convolve = nn.Linear(1024, 1024, bias=False), nn.Conv2d(64, 64, 3, padding=1, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.project(x).unflatten(-1, (8, 128)).transpose(1, 2)
        attended = F.scaled_dot_product_attention(heads, heads, heads)
        return self.convolve(attended.transpose(1, 2).reshape(x.shape[0], 64, -1, 1024)).square().mean()


@pytest.mark.parametrize("products", ["", "f8"])
def test_the_bound_has_the_rates_that_kernels_reach(products: str) -> None:
    """It is near the step of a model of large products and not above, though f8 is faster than the peak of bf16."""
    cluster = sw.Cluster.load("h100-1x2").with_products(products) if products else sw.Cluster.load("h100-1x2")
    with torch.device("meta"):
        model, x = Products().to(torch.bfloat16), torch.empty(16, 4096, 1024, dtype=torch.bfloat16)
    plan = sw.plan(model, (x,), cluster, mesh=sw.Mesh(dp=2), recompute="none").plan
    assert plan.predicted is not None
    floor = LowerBound.of(capture(model, (x,)).graph, 1.0, cluster)
    assert 0.2 * plan.predicted.planned_seconds < floor.seconds <= plan.predicted.planned_seconds
    if not products:
        assert floor.at_peak < 0.8 * floor.seconds, "nothing runs at the peak"
