"""A precision executed on real ranks, with stages and without: equal to one device that casts its parameters once per
step and takes the same micro-batches; messages have the dtypes that were asked for; everything else is as it was."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import shardwise as sw
from launch.gloo_ranks import RunRanks
from runtime.mixed_models import BF16, FP16, FP32, FP64, MODELS, Trained, apart, made, optimizer_of, plan_of
from runtime.mixed_models import trained_alone as trained_on_one_device
from shardwise.runtime import messages
from shardwise.runtime.local_shards import shard

PASSES = 4
TIGHT = sw.Precision(compute=FP32, parameter=FP64, reduce=FP64)
MIXED = sw.Precision(compute=BF16, parameter=FP32, reduce=FP32)
HALF = sw.Precision(compute=FP16, parameter=FP32, reduce=FP32)
NAMES = {FP32: "f32", BF16: "bf16", FP16: "f16"}


@dataclass(frozen=True)
class Run:
    """``way``: as of ``plan_of``, or the schedule of stages. In float16 the loss of stages is scaled."""

    name: str
    way: str
    ranks: int
    stages: int = 0
    precision: sw.Precision = TIGHT

    @property
    def passes(self) -> int:
        return PASSES if self.stages else 1

    @property
    def scale(self) -> float:
        return 2.0**8 if self.precision == HALF else 1.0  # an equal one, on ranks

    def plan(self) -> sw.Plan:
        if not self.stages:
            return plan_of(self.name, self.ranks, self.precision, self.way)
        options: dict[str, Any] = {"mode": "data_parallel", "mesh": sw.Mesh(dp=self.ranks // 2), "optimizer": "sgd"}
        asked = {"stages": self.stages, "schedule": self.way, "micro_batch": 8 // PASSES, "precision": self.precision}
        zero = 1 if self.ranks > 2 else None
        return sw.plan(made(self.name), MODELS[self.name][1](0), self.ranks, zero=zero, **asked, **options)

    def alone(self, **disturbed: Any) -> Trained:
        return trained_on_one_device(self.name, self.precision, passes=self.passes, scale=self.scale, **disturbed)


@dataclass(frozen=True)
class Found:
    """What a rank has after its steps. ``kinds``: the dtypes of gradients, states and floating parameters; ``sent``:
    the kind and the dtype of the messages of a step; ``places``: the layout and the coordinates of every tensor."""

    trained: Trained
    kinds: set[torch.dtype]
    sent: list[tuple[str, torch.dtype]]
    places: dict[str, Any]

    def part(self, alone: Trained) -> Trained:
        """Return what one device has of this rank."""

        def part(tensors: dict[str, torch.Tensor], names: Any) -> dict[str, torch.Tensor]:
            return {n: shard(tensors[n], *self.places[n]) for n in names}

        own = self.trained
        return Trained(alone.losses, part(alone.gradients, own.gradients), part(alone.state, own.state))


def train(run: Run, compiled: bool = False) -> Found:
    """Train three steps on a rank."""
    plan = run.plan() if dist.get_rank() == 0 else None
    par = sw.parallelize(made(run.name), plan, compile=compiled)
    if run.stages:
        crossing = {entry.dtype for stage in par.plan.stages for entry in stage.sends}
        assert NAMES[run.precision.compute or FP32] in crossing
    optimizer = optimizer_of(list(par.parameters()))
    scaler = torch.amp.GradScaler("cpu", init_scale=run.scale, enabled=run.scale != 1.0)
    losses, sent = [], list[tuple[str, torch.dtype]]()

    def seen(kind: str, call: Callable[..., Any], position: int) -> Callable[..., Any]:
        def watched(*args: Any, **kwargs: Any) -> Any:
            sent.append((kind, args[position].dtype))
            return call(*args, **kwargs)

        return watched

    with (
        mock.patch.object(messages, "gather_rows", seen("all_gather", messages.gather_rows, 1)),
        # Among gloo ranks a reduce-scatter is an exchange whose rows are added up.
        mock.patch.object(messages, "exchange_rows", seen("reduce_scatter", messages.exchange_rows, 0)),
        mock.patch.object(dist, "all_reduce", seen("all_reduce", dist.all_reduce, 0)),
    ):
        for step in range(3):
            sent.clear()
            optimizer.zero_grad()
            losses.append(par.step(*MODELS[run.name][1](step), scaler=scaler))
            scaler.step(optimizer)  # which unscales
            scaler.update()
    gradients = {key: p.grad for key, p in par.named_parameters() if p.grad is not None}
    kinds = {p.dtype for p in (*gradients.values(), *par.parameters()) if p.is_floating_point()}
    kinds |= {x.dtype for state in optimizer.state.values() for x in state.values() if isinstance(x, torch.Tensor)}
    rank = dist.get_rank()
    own = [stage for stage in par.plan.stages if rank in stage.placement.ranks]
    places = {n: (s.layouts[n], s.placement.coordinates(rank)) for s in reversed(own) for n in s.layouts}
    state = {key: x.detach() for key, x in par.state_dict().items() if key in places}
    trained = Trained(losses, {key: x for key, x in gradients.items() if key in places}, state)
    return Found(trained, kinds, sent, places)


RUNS = [
    Run("gpt", "dp", 2),
    Run("llama", "zero", 4),
    Run("convolutions", "tp", 2),
    Run("llama", "searched", 2),
    pytest.param(Run("gpt", "zero", 2), marks=pytest.mark.long),
    pytest.param(Run("gpt", "tp", 4), marks=pytest.mark.long),
    pytest.param(Run("llama", "tp", 2), marks=pytest.mark.long),
    pytest.param(Run("convolutions", "zero", 2), marks=pytest.mark.long),
]
STAGED = [("gpt", "1F1B", 4, 2), ("llama", "1F1B", 2, 2), ("gpt", "ZBVZeroBubble", 2, 4)]


def check_tight(run: Run, run_ranks: RunRanks) -> None:
    """Stored in float64, computed in float32: differences are of the order of its rounding."""
    alone, names = run.alone(), set[str]()
    for rank, found in enumerate(run_ranks(train, run.ranks, run)):
        own = found.trained
        assert own.gradients
        worst = apart(found.part(alone), own)
        assert max(worst.values()) < 1e-6, (rank, worst)
        assert found.kinds == {FP64}
        trained = [key for key, gradient in own.gradients.items() if (gradient != 0).any()]
        assert any(bool((own.state[key] != own.state[key].float()).any()) for key in trained)
        names |= own.state.keys()
    assert len(names & {*dict(made(run.name).named_parameters())}) == len([*made(run.name).parameters()])


@pytest.mark.parametrize("run", RUNS, ids=str)
@pytest.mark.sampled(2)
def test_ranks_train_as_one_device_that_casts_once_a_step(run: Run, run_ranks: RunRanks) -> None:
    check_tight(run, run_ranks)


@pytest.mark.parametrize("run", [Run(*staged) for staged in STAGED], ids=str)
@pytest.mark.sampled(1)
def test_stages_train_as_one_device_that_casts_once_a_step(run: Run, run_ranks: RunRanks) -> None:
    check_tight(run, run_ranks)


def check_rounding(run: Run, run_ranks: RunRanks) -> None:
    """How far rounding moves one device is seen by changing what it computes with by a unit in the last place; a sum
    over devices or micro-batches is rounded once more for each of them."""
    assert run.precision.compute is not None
    alone, unit = run.alone(), torch.finfo(run.precision.compute).eps
    disturbed = [run.alone(off=unit, seed=seed) for seed in range(5)]
    times = 4 + run.ranks + (PASSES if run.stages else 0)
    for rank, found in enumerate(run_ranks(train, run.ranks, run)):
        expected = found.part(alone)
        moved = [apart(expected, found.part(one)) for one in disturbed]
        for key, error in apart(expected, found.trained).items():
            bound = max(unit, times * max(one[key] for one in moved))
            assert error <= bound, (rank, key, error)
            assert bound < 1 or not run.stages, (rank, key, bound)  # a micro-batch that is lost or doubled is off by 1
        assert found.kinds == {FP32}
        assert all(loss.dtype == expected.losses[0].dtype for loss in found.trained.losses)


@pytest.mark.parametrize("run", [("gpt", "zero", 2), ("llama", "dp", 2), ("gpt", "tp", 4)], ids=str)
@pytest.mark.sampled(1)
def test_in_bfloat16_ranks_differ_by_its_rounding(run: tuple[str, str, int], run_ranks: RunRanks) -> None:
    check_rounding(Run(*run, precision=MIXED), run_ranks)


@pytest.mark.parametrize("precision", [MIXED, HALF], ids=str)
@pytest.mark.parametrize("run", STAGED, ids=str)
@pytest.mark.sampled(1)
def test_in_half_the_bits_stages_differ_by_their_rounding(
    run: tuple[str, str, int, int], precision: sw.Precision, run_ranks: RunRanks
) -> None:
    check_rounding(Run(*run, precision), run_ranks)


def sent_in(runs: list[Run]) -> list[Any]:
    return [train(run).sent for run in runs]


def test_parameters_are_gathered_as_computed_and_gradients_reduced_as_asked(run_ranks: RunRanks) -> None:
    wanted = {
        MIXED: (BF16, FP32),
        sw.Precision(compute=BF16, parameter=FP32): (BF16, BF16),
        sw.Precision(parameter=FP64): (FP32, FP32),
        sw.Precision(parameter=FP64, reduce=BF16): (FP32, BF16),
    }
    runs = [*(Run("llama", "zero", 2, precision=one) for one in wanted), Run("gpt", "dp", 2, precision=MIXED)]
    for *parted, replicated in run_ranks(sent_in, 2, runs):
        for sent, (gathered, reduced) in zip(parted, wanted.values(), strict=True):
            kinds = {kind: {dtype for one, dtype in sent if one == kind} for kind, _ in sent}
            assert kinds["all_gather"] == {gathered}
            assert kinds["reduce_scatter"] == {reduced}
        assert {dtype for kind, dtype in replicated if kind == "all_reduce"} <= {FP32, torch.int64}


def converted() -> dict[str, Any]:
    """Models that were loaded in another dtype than they are stored in; checkpoints; a frozen and an integer one."""
    found: dict[str, Any] = {}
    model = made("llama").to(BF16)
    plan = plan_of("llama", 2, MIXED, "zero")
    par = sw.parallelize(model, plan)
    kept = {
        key: shard(p.detach().float(), plan.layouts[key], par._ranks.coordinates) for key, p in model.named_parameters()
    }
    found["kept"] = all(torch.equal(p, kept[key]) for key, p in par.named_parameters())
    par.step(*MODELS["llama"][1](0))
    again = sw.parallelize(made("llama"), plan)
    again.load_state_dict(par.state_dict())
    found["loaded"] = all(torch.equal(a, b) for a, b in zip(par.parameters(), again.parameters(), strict=True))
    convolutions = sw.parallelize(made("convolutions"), plan_of("convolutions", 2, sw.Precision(parameter=FP64), "dp"))
    convolutions.step(*MODELS["convolutions"][1](0))
    found["dtypes"] = {key: x.dtype for key, x in convolutions.state_dict().items()}
    found["frozen"] = convolutions.get_parameter("scale").grad
    outputs = sw.parallelize(Twice(), sw.plan(Twice(), torch.ones(4, 2), 2, precision=sw.Precision(compute=BF16)))
    found["outputs"] = [x.dtype for x in outputs(torch.ones(4, 2))]
    return found


class Twice(torch.nn.Module):
    """Returns a parameter and an input beside what it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((2,), 1 / 3))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return (x * self.weight).sum(), self.weight, x


def test_a_module_in_another_dtype_is_converted_and_keeps_its_values(run_ranks: RunRanks) -> None:
    for found in run_ranks(converted, 2):
        assert found["kept"]
        assert found["loaded"]
        dtypes = found["dtypes"]
        assert (dtypes["order"], dtypes["scale"], dtypes["conv.weight"]) == (torch.int64, FP64, FP64)
        assert (dtypes["shift"], dtypes["norm.running_mean"]) == (FP32, FP32)
        assert found["frozen"] is None
        assert found["outputs"] == [BF16, BF16, BF16]


def scaled() -> list[tuple[float, bool, bool]]:
    """Steps in float16 with a GradScaler. In the second, one rank's shard gets an infinity that the others do not
    see."""
    par = sw.parallelize(made("llama"), plan_of("llama", 2, HALF, "zero"))
    optimizer, scaler = optimizer_of(list(par.parameters())), torch.amp.GradScaler("cpu", init_scale=1024.0)
    seen = []
    for step in range(3):
        before = [p.detach().clone() for p in par.parameters()]
        optimizer.zero_grad()
        scaler.scale(par(*MODELS["llama"][1](step))).backward()
        finite = all(bool(p.grad.isfinite().all()) for p in par.parameters())
        if step == 1 and dist.get_rank() == 1:
            next(par.parameters()).grad.view(-1)[0] = float("inf")
        scaler.step(optimizer)
        scaler.update()
        moved = any(not torch.equal(a, b) for a, b in zip(before, par.parameters(), strict=True))
        seen.append((scaler.get_scale(), finite, moved))
    return seen


def test_ranks_agree_that_a_step_is_skipped(run_ranks: RunRanks) -> None:
    for found in run_ranks(scaled, 2):
        assert found == [(1024.0, True, True), (512.0, True, False), (512.0, True, True)]
