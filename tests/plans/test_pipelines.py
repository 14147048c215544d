"""Plans of stages: where a model is cut, what is refused, what is printed and kept in the file; and that the proof sees
what a pipeline can do wrong."""

from __future__ import annotations

import gc
import json
import weakref
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import shardwise as sw
from proving import prove
from raising import raises
from runtime.staged_model import Staged, staged_batch
from shardwise.costs.pipeline_simulation import Action, StageSeconds, simulate_pipeline
from shardwise.graph.capture import capture
from shardwise.graph.cut import cut_apart
from shardwise.graph.stage_marks import with_stages
from shardwise.plans import pipelines
from shardwise.plans.schedule import SCHEDULES, order_of, schedule_of
from shardwise.plans.stage_planner import StageTiming
from shardwise.programs.spmd import SpmdProgram
from shardwise.proof.ranks import VirtualRanks, VirtualStep
from shardwise.runtime.local_shards import shard
from shardwise.search.stage_partition import StageCut, StagePartition

BATCH = staged_batch(8)


def plan(module: nn.Module | None = None, devices: int = 4, **options: Any) -> sw.Plan:
    options = {"stages": 2, "micro_batch": 2, "search": "sharding_propagation", **options}
    return sw.plan(module or Staged(), BATCH, devices, **options)


# ---------------------------------------------------------------------------------------------------------------- cuts


def test_balanced_stages_have_about_the_same_to_do() -> None:
    found = plan(Staged(layers=8, width=64), search="dynamic_programming")
    assert [stage.placement.ranks for stage in found.stages] == [(0, 1), (2, 3)]
    assert found.pipeline is not None
    times = [stage.forward + stage.backward for stage in found.pipeline.stages]
    assert max(times) < 1.5 * min(times), times
    names = [{entry.name for entry in stage.parameters} for stage in found.stages]
    assert names[0] & names[1] == {"tokens.weight"}, "tied, in both"
    layouts = [stage.layouts["tokens.weight"] for stage in found.stages]
    assert layouts[0].dims == layouts[1].dims
    assert {entry.dtype for entry in found.stages[0].sends} == {"bool", "f32"}
    assert [e.name for e in found.stages[0].sends] == [e.name for e in found.stages[1].receives]


def test_marked_stages_begin_where_they_are_marked() -> None:
    model = Staged()
    sw.stage(model.tokens, 0)
    sw.stage(model.norms[3], 1)
    found = plan(model, stages="marked")
    assert "blocks.3.weight" in {entry.name for entry in found.stages[1].parameters}
    assert "blocks.2.weight" in {entry.name for entry in found.stages[0].parameters}
    assert plan(model, stages=2) == found


def marked(**marks: int) -> Staged:
    model = Staged()
    for name, number in marks.items():
        sw.stage(model.get_submodule(name.replace("_", ".")), number)
    return model


@pytest.mark.parametrize("search", ["sharding_propagation", "dynamic_programming"])
def test_a_strategy_speaks_of_its_operator_where_a_cut_parts_it_from_its_bias(search: str) -> None:
    """Stage 1 begins with the bias of a linear layer whose strategy names factors of the matmul."""

    def before_bias(partition: StagePartition, _: StageCut) -> list[list[str]]:
        names = [op.name for op in partition.graph.ops]
        at = names.index("blocks.1/add")
        return [names[:at], names[at:]]

    strategies = {"blocks.*": "n@tp"}
    with mock.patch.object(StagePartition, "parts", before_bias):
        found = plan(mesh=sw.Mesh(tp=2), strategies=strategies, search=search)
    assert "blocks.1/linear" in found.stages[0].strategies
    assert "blocks.1/add" in found.stages[1].strategies
    assert {found.strategies[f"blocks.{i}/linear"] for i in range(4)} == {"n@tp"}
    assert sw.verify(Staged(), BATCH, found, steps=1).ok


def test_a_strategy_of_no_operator_is_refused_in_stages_too() -> None:
    model = Staged()
    sw.shard(model.norms, "n@tp")
    with raises(sw.errors.LayoutError, "'n@tp'", op="norms", source="test_pipelines.py"):
        plan(model, mesh=sw.Mesh(tp=2))


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) for _ in range(3))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return nn.functional.mse_loss(x, y)


def test_statistics_of_micro_batches_are_announced() -> None:
    batch = torch.randn(8, 4), torch.randn(8, 4)
    with pytest.warns(sw.errors.PlanWarning, match=r"layers\.0\.1.*every micro-batch"):
        found = sw.plan(Normed(), batch, 2, stages=2, micro_batch=4, search="sharding_propagation")
    assert found.micro_batches == 2
    assert sw.verify(Normed(), batch, found, steps=2).ok


class NormedInOneOperator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(self.first(x))).square().mean()


def test_a_call_goes_where_its_parameters_are_where_a_cut_parts_what_it_is_one_operator_of() -> None:
    model, x = NormedInOneOperator(), torch.randn(8, 4)
    trained = capture(model, (x,)).graph
    names = [op.name for op in trained.ops]
    at = names.index("norm/sum_1")  # the sum is in stage 0, all of the rest in stage 1
    parts = cut_apart(trained, [names[:at], names[at:]]).parts
    held = [{name for source in part.sources for name in source.names} for part in parts]
    assert "norm.weight" not in held[0]
    evaluated = capture(model.eval(), (x,)).graph
    found = with_stages(evaluated, [names[:at], names[at:]], held)
    assert found[0] == [op.name for op in evaluated.ops if op.name.startswith("first")]
    assert "norm/batch_norm" in found[1]
    cut = cut_apart(evaluated, found)
    assert {name for source in cut.parts[0].sources for name in source.names} <= held[0]


def test_what_is_sent_is_compared_with_what_is_listed() -> None:
    found = plan(mode="data_parallel")
    first, second = found.stages
    assert sw.verify(Staged(), BATCH, found, steps=1).ok
    for wrong in (first.sends[1:], (replace(first.sends[0], layout="bool[2, 5]"), *first.sends[1:])):
        with raises(sw.PlanError, "stage 0 sends", "ne [2@dp, 5]", "and lists", fix="edited=True"):
            sw.verify(Staged(), BATCH, replace(found.plan, stages=(replace(first, sends=wrong), second)), steps=1)


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "decreasing": (lambda: plan(marked(norms_1=2, blocks_1=1), stages="marked", devices=3), "blocks.1 is marked with"),
    "missing": (lambda: plan(marked(norms_1=2), stages="marked"), "no module is marked with stage 1"),
    "beyond": (lambda: plan(marked(norms_1=2), stages=2), "out of range: norms.1 in stage 2"),
    "unmarked": (lambda: plan(stages="marked"), 'stages="marked", but no module is marked'),
    "one stage": (lambda: plan(stages=1), "stages is 1"),
    "only the first": (lambda: plan(marked(tokens=0), stages="marked"), "which makes no pipeline"),
    "not a stage": (lambda: sw.stage(Staged(), -1), "stage -1 of a module"),
    "no module": (lambda: sw.stage(torch.tanh, 1), ("stage takes a module", "builtin_function_or_method")),  # type: ignore[type-var]
    "too many": (lambda: plan(stages=50, devices=50), "50 stages needs 50 micro-batches, and there are 4"),
    "devices that do not divide": (lambda: plan(stages=3), "4 / 3 = 1.333"),
    "too few micro-batches": (lambda: plan(stages=4, micro_batch=4), "4 stages needs 4 micro-batches, and there are 2"),
    "an unknown schedule": (lambda: plan(schedule="2F2B"), ("'2F2B'", "one of GPipe, 1F1B, LoopedBFS")),
    "a number for a schedule of one stage": (
        lambda: plan(schedule="1F1B:2"),
        ("1F1B has 1 stages", "no other number of them", "leave out :'2'"),
    ),
    "a number for a fold": (
        lambda: plan(stages=6, schedule="ZBVZeroBubble:3"),
        ("ZBVZeroBubble", "LoopedBFS, Interleaved1F1B"),
    ),
    "no number": (lambda: plan(stages=4, schedule="LoopedBFS:"), "does not say how many stages a place has"),
    "one stage of a loop": (lambda: plan(schedule="LoopedBFS:1"), "a whole number from 2: LoopedBFS:4"),
    "stages that fill no loop": (lambda: plan(stages=4, schedule="LoopedBFS:3"), "4 stages are 1.33333 places"),
    "a schedule without stages": (
        lambda: plan(stages=None, schedule="GPipe"),
        "a schedule orders stages, and there are none",
    ),
    "an odd number for a loop": (lambda: plan(stages=3, schedule="LoopedBFS"), "3 stages are 1.5 places"),
    "a mesh of all devices": (lambda: plan(mesh=sw.Mesh(dp=4)), ("Mesh(dp=4)", "a stage has 2")),
    "no loss": (lambda: sw.plan(Staged(), BATCH[:1], 4, stages=2), "stages need a loss"),
    "a stage without parameters": (
        lambda: sw.plan(
            nn.Sequential(nn.Linear(4, 4), sw.stage(nn.Tanh(), 1)),
            (torch.zeros(8, 4), torch.zeros(8, 4)),
            4,
            loss=nn.functional.mse_loss,
            stages="marked",
            micro_batch=2,
        ),
        "stage 1 has no parameters",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_can_not_be_is_refused(case: str) -> None:
    make, text = REFUSED[case]
    with raises(sw.ShardwiseError, text):
        make()


# ------------------------------------------------------------------------------------------------------ file and print


def test_the_file_holds_stages_and_the_printed_plan_shows_them() -> None:
    found = plan(search="dynamic_programming")
    assert sw.Plan.from_json(found.to_json()) == found
    text = str(found)
    assert "pipeline of 2 stages on 2 places, 1F1B" in text
    assert "bubble" in text
    assert "stage 1: Mesh" in text
    with raises(sw.PlanError, "2 stages", "0-1", "2-3", "plan.stages"):
        _ = found.mesh


@pytest.fixture(scope="module")
def solved() -> sw.Plan:
    return plan(schedule="solved", stages=4, search="dynamic_programming")


def test_a_solved_order_is_in_the_file_and_proven(solved: sw.Plan) -> None:
    assert solved.schedule == "Solved"
    assert len(solved.order) == 2
    assert sw.Plan.from_json(solved.to_json()) == solved
    usual = plan(schedule="ZBVZeroBubble", stages=4, search="dynamic_programming")
    assert solved.pipeline is not None
    assert usual.pipeline is not None
    assert usual.pipeline.bound_seconds == pytest.approx(solved.pipeline.bound_seconds)
    assert solved.pipeline.bound_seconds <= solved.pipeline.step_seconds <= usual.pipeline.step_seconds
    assert "no order of these stages takes less than" in str(solved)
    prove(Staged(), BATCH, solved)


def test_pipelines_are_compared(solved: sw.Plan) -> None:
    usual = plan(schedule="ZBVZeroBubble", stages=4, search="dynamic_programming")
    found = usual.diff(solved)
    assert ("schedule", "ZBVZeroBubble", "Solved") in found.settings
    assert ("order of place 0", "absent", solved.order[0]) in found.settings
    assert not found.cuts
    model = Staged()
    sw.stage(model.norms[1], 1)
    moved = plan(search="dynamic_programming").diff(plan(model, stages="marked", search="dynamic_programming"))
    assert {(own, other) for _, own, other in moved.cuts} <= {("0", "1"), ("1", "0")}
    assert moved.cuts
    assert "cuts:" in str(moved)


WRONG_ORDERS: dict[str, tuple[Callable[[list[str]], Any], str]] = {
    "one is lost": (
        lambda lines: [lines[0].rpartition(" ")[0], lines[1]],
        "order has 47 actions; 4 micro-batches in 2 places have 48, each once: 0W3 on place 0",
    ),
    "one is twice": (
        lambda lines: [lines[0] + " " + lines[0].split()[0], lines[1]],
        "order has 49 actions; 4 micro-batches in 2 places have 48",
    ),
    "on another place": (lambda lines: lines[::-1], "each once: 0F0 on place 0"),
    "a deadlock": (
        lambda lines: [" ".join(reversed(lines[0].split())), lines[1]],
        "deadlocks: ranks wait for each other",
    ),
    "no action": (lambda lines: ["0X0", lines[1]], "'0X0', which is no action"),
    "no text": (lambda lines: [3, lines[1]], "order[0] is 3"),
    "none": (lambda lines: [], "order has 0 actions"),
}


@pytest.mark.parametrize("case", WRONG_ORDERS)
def test_a_wrong_order_in_a_file_is_refused(case: str, solved: sw.Plan) -> None:
    broken, text = WRONG_ORDERS[case]
    data = json.loads(solved.to_json())
    data["order"] = broken(data["order"])
    with raises(sw.PlanError, text):
        sw.Plan.from_json(json.dumps(data), edited=True)


def test_an_order_belongs_to_a_solved_schedule(solved: sw.Plan) -> None:
    data = json.loads(solved.to_json())
    for changed, text in (
        ({"schedule": "ZBVZeroBubble"}, "order is for a solved schedule, and the plan has ZBVZeroBubble"),
        ({"order": 3}, "order is 3, not a list"),
    ):
        with raises(sw.PlanError, text):
            sw.Plan.from_json(json.dumps({**data, **changed}), edited=True)


def test_micro_batches_are_chosen_by_price() -> None:
    found = sw.plan(Staged(), BATCH, 4, stages=2)
    assert found.micro_batches >= 2


@pytest.mark.parametrize("stages", [None, 2, "auto"])
@pytest.mark.sampled(1)
def test_a_result_keeps_neither_the_module_nor_its_inputs(stages: Any) -> None:
    module, batch = Staged(), staged_batch(8)
    kept = [weakref.ref(module), *map(weakref.ref, batch)]
    found = sw.plan(module, batch, 4, stages=stages)
    del module, batch
    gc.collect()
    assert [entry() for entry in kept] == [None] * len(kept)
    assert str(found.report.top(2)), "the report still plans others"


def held(found: sw.Plan) -> float:
    assert found.pipeline is not None
    return max(stage.peak_bytes for stage in found.pipeline.stages)


@pytest.mark.parametrize(("name", "stages"), [("1F1B", 2), ("Interleaved1F1B", 4), ("Interleaved1F1B:3", 6)])
def test_a_place_is_said_to_hold_what_its_stages_hold_as_they_take_turns(name: str, stages: int) -> None:
    """Walked action by action: what all stages of a place keep, and what the one that works has besides."""
    generator = torch.Generator().manual_seed(stages)
    schedule, places, passes = schedule_of(name), 2, 4
    order = order_of(schedule, places, passes)
    for _ in range(20):
        stays, kept, moment = (torch.rand(3, stages, generator=generator).double() * 1000).tolist()
        seconds = StageSeconds(1.0, 1.0, 1.0, 0.0, 0.0)
        timed = [StageTiming(seconds, s + k + m, k, s + k, 0.0) for s, k, m in zip(stays, kept, moment, strict=True)]
        place_of = tuple(schedule.place_of(stage, places) for stage in range(stages))
        settings = SimpleNamespace(passes=passes)
        how: Any = SimpleNamespace(num_places=places, place_of=place_of, settings=settings, limit=1e9)
        said = pipelines._predicted(how, timed, order).memory_bytes
        most = 0.0
        for place, actions in enumerate(order):
            own = [stage for stage in range(stages) if schedule.place_of(stage, places) == place]
            flying = dict.fromkeys(own, 0)
            for action in actions:
                flying[action.stage] += action.kind == "forward"
                held = sum(stays[stage] + kept[stage] * flying[stage] for stage in own)
                most = max(most, held + moment[action.stage])
                flying[action.stage] -= action.kind == "backward"
        assert most <= said * (1 + 1e-12)
        assert said <= most + max(moment), "at another time, but no more than once"


@pytest.mark.long
def test_stages_fit_with_the_layouts_in_which_they_meet() -> None:
    """The first stage fits by itself, and holds more of the tied table when it has it as the last one does."""
    options: dict[str, Any] = {"search": "dynamic_programming"}
    model, limit = Staged(width=64), 220_000.0
    assert held(plan(model, **options)) > limit, "what is asked for is not free"
    assert held(plan(model, memory_bytes=limit, **options)) <= limit
    with (
        mock.patch.object(pipelines, "_excess", return_value={0: 10_240.0}),
        raises(
            sw.errors.NothingFits, "stage 0", "225 KiB", "2 micro-batches", "(limit 215 KiB)", section="nothing-fits"
        ),
    ):
        plan(model, memory_bytes=limit, recompute="full", **options)


# -------------------------------------------------------------------------------------------------------------- orders


def test_two_stages_on_a_place_are_what_a_loop_has() -> None:
    assert schedule_of("interleaved1f1b:2") == schedule_of("Interleaved1F1B")


@pytest.mark.parametrize("name", [*SCHEDULES, "LoopedBFS:3", "Interleaved1F1B:4", "InterleavedZeroBubble:3"])
def test_torchs_orders_do_everything_once(name: str) -> None:
    schedule = schedule_of(name.upper())
    order = order_of(schedule, 3, 9)
    stages = 3 * schedule.stages_per_place
    done = [action for actions in order for action in actions]
    assert len(done) == len(set(done))
    kinds = {"forward", "input", "weight", "backward"}
    for stage in range(stages):
        for micro_batch in range(9):
            own = {k for k in kinds if Action(stage, k, micro_batch) in done}  # type: ignore[arg-type]
            assert own in ({"forward", "backward"}, {"forward", "input", "weight"})
    for place, actions in enumerate(order):
        assert {schedule.place_of(action.stage, 3) for action in actions} == {place}
    simulated = simulate_pipeline(order, [StageSeconds(1.0, 1.0, 1.0, 0.0, 0.0)] * stages)
    assert simulated.seconds >= 27 * schedule.stages_per_place
    assert 0 < simulated.bubbles < 0.3


def test_bubbles_are_those_of_the_literature() -> None:
    """1F1B and GPipe: (p - 1) / (m + p - 1); 1F1B keeps as many micro-batches as there are stages behind."""
    for name in ("GPipe", "1F1B"):
        step = simulate_pipeline(order_of(SCHEDULES[name], 4, 16), [StageSeconds(1.0, 1.0, 1.0, 0.0, 0.0)] * 4)
        assert step.bubbles == pytest.approx(3 / 19)
        assert step.in_flight == ((16,) * 4 if name == "GPipe" else (4, 3, 2, 1))


@pytest.mark.parametrize("count", [2, 4, 8])
def test_more_stages_on_a_place_leave_smaller_bubbles(count: int) -> None:
    """(p - 1) / (v m + p - 1): Narayanan et al. 2021 (arXiv:2104.04473), section 2.2, as a share of the step."""
    order = order_of(schedule_of(f"Interleaved1F1B:{count}"), 4, 16)
    step = simulate_pipeline(order, [StageSeconds(1.0, 1.0, 1.0, 0.0, 0.0)] * 4 * count)
    assert step.bubbles == pytest.approx(3 / (16 * count + 3))


# --------------------------------------------------------------------------------------------------------------- proof


@pytest.fixture(scope="module")
def dropped() -> tuple[Staged, sw.Plan]:
    torch.manual_seed(0)
    model = Staged(dropout=0.2)
    return model, plan(model, schedule="ZBVZeroBubble", stages=4, zero=1)


def test_a_pipeline_is_proven(dropped: tuple[Staged, sw.Plan]) -> None:
    """Dropout, a mean over labels that count, tied parameters and a mask; backward in halves, on a folded schedule."""
    report = prove(dropped[0], BATCH, dropped[1])
    kinds = {difference.kind for difference in report.differences}
    assert kinds == {"loss", "gradient", "parameter"}
    assert {d.name for d in report.differences if d.kind == "parameter"} == set(dict(dropped[0].named_parameters()))


def test_more_than_two_stages_on_a_place_are_proven_and_kept_in_the_file() -> None:
    torch.manual_seed(0)
    model = Staged(dropout=0.2)
    found = plan(model, schedule="interleaved1f1b:3", stages=6, search="dynamic_programming")
    assert found.schedule == "Interleaved1F1B:3"
    assert [stage.placement.ranks[0] for stage in found.stages] == [0, 2, 0, 2, 0, 2]
    assert sw.Plan.from_json(found.to_json()) == found
    prove(model, BATCH, found)


class Pooled(nn.Module):
    """Its pooling fills a buffer in place in backward, on the way to what the stage before waits for."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.head = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        pooled = nn.functional.adaptive_avg_pool1d(x.transpose(1, 2), 1).flatten(1)
        return nn.functional.cross_entropy(self.head(pooled), labels)


@pytest.mark.parametrize("schedule", ["ZBVZeroBubble", "InterleavedZeroBubble"])
def test_what_backward_writes_in_place_is_in_the_first_half(schedule: str) -> None:
    model, batch = Pooled(), (torch.randn(8, 4, 8), torch.randint(3, (8,)))
    found = sw.plan(model, batch, 2, stages=4, schedule=schedule, micro_batch=2, mode="data_parallel", optimizer="sgd")
    prove(model, batch, found, steps=1)


def lost(self: Any, stage: int, micro_batch: int, *args: Any, **kwargs: Any) -> None:
    if not (micro_batch == 2 and stage == 1 and kwargs.get("is_weight")):
        BACKWARD(self, stage, micro_batch, *args, **kwargs)


def scaled(self: Any) -> None:
    for rank in self.ranks:
        rank.gradients = {name: gradient / len(self.passes.sizes) for name, gradient in rank.gradients.items()}
    ADD_SHARED(self)


def swapped(self: Any, stage: int, micro_batch: int) -> None:
    FORWARD(self, stage, micro_batch)
    self.sent[stage, micro_batch].reverse()


def mixed_up(self: Any, stage: int, micro_batch: int) -> None:
    FORWARD(self, stage, micro_batch)
    if micro_batch == 1 and stage == 0:
        self.sent[stage, 0], self.sent[stage, 1] = self.sent[stage, 1], self.sent[stage, 0]


def stale(self: Any, stage: int, spmd: SpmdProgram, *args: Any) -> Any:
    """A stage runs on the weights with which it began, whatever its optimizer made of them."""
    bindings = BINDINGS(self, stage, spmd, *args)
    for source in spmd.graph.sources:
        if source.names[0] == "blocks.2.weight":
            layout = spmd.layouts[source.value]
            for device, binding in enumerate(bindings):
                binding[source.value] = shard(self.ranks.full[source.names[0]], layout, spmd.mesh.coordinates(device))
    return bindings


BACKWARD, FORWARD, ADD_SHARED = (
    VirtualStep._backward,
    VirtualStep._forward,
    VirtualRanks._add_shared,
)
BINDINGS = VirtualStep.bindings
MUTATIONS: dict[str, Any] = {
    "a micro-batch whose weights are lost": (VirtualStep, "_backward", lost),
    "gradients divided by the micro-batches": (VirtualRanks, "_add_shared", scaled),
    "tied gradients that are not added": (VirtualRanks, "_add_shared", lambda self: None),
    "devices that are exchanged at a boundary": (VirtualStep, "_forward", swapped),
    "micro-batches that are exchanged at a boundary": (VirtualStep, "_forward", mixed_up),
    "a stage with stale weights": (VirtualStep, "bindings", stale),
}


@pytest.mark.parametrize("case", MUTATIONS)
def test_the_proof_sees_it(case: str, dropped: tuple[Staged, sw.Plan]) -> None:
    owner, name, broken = MUTATIONS[case]
    model, found = dropped
    if "tied" in case:  # a folded schedule has the first and the last stage on one place
        found = plan(model)
        assert sw.verify(model, BATCH, found, steps=1).ok
    with mock.patch.object(owner, name, broken):
        assert not sw.verify(model, BATCH, found, steps=2 if "stale" in case else 1).ok
