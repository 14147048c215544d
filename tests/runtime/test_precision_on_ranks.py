"""A precision executed on real ranks: equal to one device that casts its parameters once per step; messages have the
dtypes that were asked for; everything else is as it was."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import shardwise as sw
from launch.gloo_ranks import RunRanks
from runtime.mixed_models import (
    BF16,
    FP16,
    FP32,
    FP64,
    MODELS,
    Trained,
    apart,
    made,
    optimizer_of,
    plan_of,
    trained_alone,
)  # fmt: skip
from shardwise.runtime import messages
from shardwise.runtime.local_shards import shard

TIGHT = sw.Precision(compute=FP32, parameter=FP64, reduce=FP64)
MIXED = sw.Precision(compute=BF16, parameter=FP32, reduce=FP32)


def train(name: str, precision: sw.Precision, way: str, compiled: bool = False) -> dict[str, Any]:
    """On a rank: three steps, with the dtype and the elements of every message of parameters."""
    plan = plan_of(name, dist.get_world_size(), precision, way) if dist.get_rank() == 0 else None
    par = sw.parallelize(made(name), plan, compile=compiled)
    optimizer = optimizer_of(list(par.parameters()))
    dtypes = {key: p.dtype for key, p in par.named_parameters()}
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
            losses.append(par.step(*MODELS[name][1](step)))
            optimizer.step()
    kinds = {p.grad.dtype for p in par.parameters() if p.grad is not None}
    states = {x.dtype for state in optimizer.state.values() for x in state.values() if isinstance(x, torch.Tensor)}
    return {
        "losses": losses,
        "gradients": {key: p.grad for key, p in par.named_parameters() if p.grad is not None},
        "state": {key: x.detach() for key, x in par.state_dict().items()},
        "dtypes": dtypes,
        "kinds": kinds | states,
        "sent": sent,
        "plan": par.plan.to_json(),
    }


def whole(results: list[dict[str, Any]], rank: int, alone: Trained) -> tuple[Trained, Trained]:
    """A rank's outcome, and what it should be of that of one device."""
    plan, found = sw.Plan.from_json(results[0]["plan"]), results[rank]
    coordinates = plan.mesh.coordinates(rank)

    def part(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {
            key: shard(tensor, plan.layouts[key], coordinates) if key in plan.layouts else tensor
            for key, tensor in tensors.items()
            if key in plan.layouts
        }

    own = Trained(found["losses"], part_of(found["gradients"], plan), part_of(found["state"], plan))
    return own, Trained(alone.losses, part(alone.gradients), part(alone.state))


def part_of(tensors: dict[str, torch.Tensor], plan: sw.Plan) -> dict[str, torch.Tensor]:
    return {key: tensor for key, tensor in tensors.items() if key in plan.layouts}


@pytest.mark.parametrize(
    ("name", "way", "ranks"),
    [
        ("gpt", "dp", 2),
        ("llama", "zero", 4),
        ("convolutions", "tp", 2),
        ("llama", "searched", 2),
        pytest.param("gpt", "zero", 2, marks=pytest.mark.long),
        pytest.param("gpt", "tp", 4, marks=pytest.mark.long),
        pytest.param("llama", "tp", 2, marks=pytest.mark.long),
        pytest.param("convolutions", "zero", 2, marks=pytest.mark.long),
    ],
)
@pytest.mark.sampled(2)
def test_ranks_train_as_one_device_that_casts_once_a_step(name: str, way: str, ranks: int, run_ranks: RunRanks) -> None:
    results = run_ranks(train, ranks, name, TIGHT, way)
    alone = trained_alone(name, TIGHT)
    for rank, found in enumerate(results):
        own, expected = whole(results, rank, alone)
        assert all(error < 1e-6 for error in apart(expected, own).values()), (rank, apart(expected, own))
        assert {dtype for dtype in found["dtypes"].values() if dtype.is_floating_point} == {FP64}
        assert found["kinds"] == {FP64}
        trained = [key for key in own.gradients if (own.gradients[key] != 0).any()]
        assert any(bool((own.state[key] != own.state[key].float()).any()) for key in trained)


@pytest.mark.parametrize(("name", "way", "ranks"), [("gpt", "zero", 2), ("llama", "dp", 2), ("gpt", "tp", 4)])
@pytest.mark.sampled(1)
def test_in_bfloat16_ranks_differ_by_its_rounding(name: str, way: str, ranks: int, run_ranks: RunRanks) -> None:
    """How far rounding moves one device is seen by changing what it computes with by a unit in the last place; a sum
    over devices is rounded once more for each of them."""
    results = run_ranks(train, ranks, name, MIXED, way)
    alone, unit = trained_alone(name, MIXED), torch.finfo(BF16).eps
    disturbed = [trained_alone(name, MIXED, off=unit, seed=seed) for seed in range(5)]
    for rank, found in enumerate(results):
        own, expected = whole(results, rank, alone)
        moved = [apart(expected, whole(results, rank, one)[1]) for one in disturbed]
        for key, error in apart(expected, own).items():
            assert error <= max(unit, (4 + ranks) * max(one[key] for one in moved)), (rank, key, error)
        assert found["kinds"] == {FP32}
        assert all(loss.dtype == expected.losses[0].dtype for loss in found["losses"])


def sent_in(runs: list[tuple[str, sw.Precision, str]]) -> list[Any]:
    return [train(*run)["sent"] for run in runs]


def test_parameters_are_gathered_as_computed_and_gradients_reduced_as_asked(run_ranks: RunRanks) -> None:
    wanted = {
        MIXED: (BF16, FP32),
        sw.Precision(compute=BF16, parameter=FP32): (BF16, BF16),
        sw.Precision(parameter=FP64): (FP32, FP32),
        sw.Precision(parameter=FP64, reduce=BF16): (FP32, BF16),
    }
    runs = [*(("llama", precision, "zero") for precision in wanted), ("gpt", MIXED, "dp")]
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
    half = sw.Precision(compute=FP16, parameter=FP32, reduce=FP32)
    par = sw.parallelize(made("llama"), plan_of("llama", 2, half, "zero"))
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
