"""``inputs="local"`` under a plan of stages: every rank passes the part of its device, and losses and gradients are
those of one device with the whole batch."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import shardwise as sw
from launch.gloo_ranks import RunRanks
from raising import raises
from runtime.staged_model import Staged, staged_batch
from shardwise.errors import ShardwiseError
from shardwise.runtime.local_shards import shard

BY_COLUMNS = {"layers.*": "n@tp"}
TOLERANCE = 1e-12  # sums of some hundred terms of about 1 in another order, in float64


class Numbered(nn.Module):
    """Its loss weighs samples by their numbers in the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        weights = torch.arange(x.shape[0], dtype=x.dtype)
        return (weights * nn.functional.cross_entropy(x, y, reduction="none")).sum()


def far(par: sw.Parallel, reference: nn.Module, batch: tuple[Tensor, ...], parts: tuple[Tensor, ...]) -> float:
    """How far a step over this rank's parts of a batch is from one device: loss and every gradient."""
    par.zero_grad()
    reference.zero_grad()
    loss = par.step(*parts)
    wanted = reference(*batch)
    wanted = wanted[0] if isinstance(wanted, tuple) else wanted
    wanted.backward()
    assert loss is not None
    worst = abs(float(loss - wanted.detach()))
    gradients = {name: p.grad for name, p in reference.named_parameters()}
    stages = [stage for stage in par.plan.stages if dist.get_rank() in stage.placement.ranks]
    for name, parameter in par.named_parameters():
        stage = next(stage for stage in stages if name in stage.layouts)
        whole = gradients[name]
        assert whole is not None
        assert parameter.grad is not None
        want = shard(whole, stage.layouts[name], stage.placement.coordinates(dist.get_rank()))
        worst = max(worst, float((parameter.grad - want).abs().max()))
    return worst


def said_of(call: Callable[[], Any]) -> tuple[Any, list[str]]:
    with warnings.catch_warnings(record=True, action="always") as caught:
        found = call()
    return found, [str(w.message) for w in caught if "gathered" in str(w.message)]


def split(model: nn.Module, batch: tuple[Tensor, ...], **options: Any) -> sw.Parallel:
    plan = None
    if dist.get_rank() == 0:
        options = {"stages": 2, "micro_batch": 4, "mode": "data_parallel", "mesh": sw.Mesh(dp=2), **options}
        plan = sw.plan(model, batch, dist.get_world_size(), **options)
    par = sw.parallelize(copy.deepcopy(model), plan, inputs="local", check_replicas=2)
    return par


def part_of(par: sw.Parallel, batch: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(x.chunk(2)[par.device_number] for x in batch)


def steps_over_parts(schedule: str, stages: int) -> dict[str, Any]:
    torch.manual_seed(0)
    model, found = Staged().double(), {}
    par = split(model, staged_batch(8), schedule=schedule, stages=stages)
    assert par.plan.input_layouts.keys() == {"args[0]", "args[1]"}
    for seed in range(4):  # the third takes for granted what the others pass
        batch = staged_batch(8, seed)
        found[f"step {seed}"], said = said_of(lambda batch=batch: far(par, model, batch, part_of(par, batch)))
        assert not said, "nothing is gathered"
    batch = staged_batch(16, 5)
    found["another size"] = far(par, model, batch, part_of(par, batch))
    uneven = slice(0, 3) if par.device_number == 0 else slice(3, 8)
    batch = staged_batch(8, 6)
    found["uneven"], said = said_of(lambda: far(par, model, batch, tuple(x[uneven] for x in batch)))
    assert bool(said) == (dist.get_rank() == 0)
    assert all("do not divide into micro-batches of 4" in text for text in said)
    found["whole again"] = far(par, model, staged_batch(8), part_of(par, staged_batch(8)))
    par.eval()
    with torch.no_grad():
        for size, own in (
            (8, slice(4 * par.device_number, 4 * par.device_number + 4)),
            (5, slice(0, 2) if par.device_number == 0 else slice(2, 5)),
        ):
            ids, labels = staged_batch(size, 7)
            loss, logits = par(ids[own], labels[own])
            wanted, wanted_logits = model(ids, labels)
            found[f"evaluated {size}"] = max(abs(float(loss - wanted)), float((logits - wanted_logits).abs().max()))
    par.train()
    data = TensorDataset(*staged_batch(16, 8))
    for ids, labels in sw.DataLoader(data, par, 8):
        assert len(ids) == 4
        assert par.step(ids, labels) is not None
    return found


@pytest.mark.parametrize(("schedule", "stages"), [("1F1B", 2), ("ZBVZeroBubble", 4)])
@pytest.mark.sampled(1)
def test_steps_over_parts_are_those_of_one_device(schedule: str, stages: int, run_ranks: RunRanks) -> None:
    for found in run_ranks(steps_over_parts, 4, schedule, stages):
        assert len(found) == 9
        assert max(found.values()) < TOLERANCE, found


def odd_calls() -> dict[str, Any]:
    """Parts that are not cut alike, or that no batch has."""
    torch.manual_seed(0)
    rank, found = dist.get_rank(), {}
    model = Numbered().double()
    batch = (torch.randn(8, 4).double(), torch.randint(0, 4, (8,)))
    par = split(model, batch)
    found["numbered"], said = said_of(lambda: far(par, model, batch, part_of(par, batch)))
    assert [text.partition(" samples")[0] for text in said] == (
        ["the model uses the positions of 8"] if rank == 0 else []
    )
    with raises(ShardwiseError, 'inputs="local"', "args[1]"):
        split(model, batch, mode="auto", search="sharding_propagation", mesh=sw.Mesh(tp=2), strategies=BY_COLUMNS)
    smaller = tuple(x[:3] for x in part_of(par, batch))
    with pytest.raises(ShardwiseError) as error:
        par.step(*(x.flip(0) if rank == 3 else x for x in smaller))
    found["said"] = str(error.value)
    alone = sw.parallelize(
        copy.deepcopy(model), sw.plan(model, batch, 4, mode="data_parallel", micro_batch=4), inputs="local"
    )
    loss = alone.step(*(x.chunk(4)[rank] for x in batch))
    assert loss is not None
    found["in one stage"] = float((loss - model(*batch).detach()).abs())
    found["after it"] = far(par, model, batch, part_of(par, batch))
    return found


def test_parts_of_other_stages_are_the_same_parts(run_ranks: RunRanks) -> None:
    """Every stage passes the batch, and reads what it needs."""
    for found in run_ranks(odd_calls, 4):
        text = found.pop("said")
        assert "ranks 1 and 3 pass different" in text, text
        assert max(found.values()) < TOLERANCE, found


def planned_part(par: Any, name: str, x: Tensor) -> Tensor:
    """The samples of an input that this rank's device has."""
    layout, position, count = par.plan.input_layouts[name], 0, 1
    for atom in layout.dims[0]:
        for axis in atom.axes:
            size = layout.mesh.size_of((axis,))
            position, count = position * size + layout.mesh.coordinates(par.device_number)[axis], count * size
    return x.chunk(count)[position]


def different_parts(stages: int) -> dict[str, Any]:
    """Labels are passed whole, ids in parts; or both in halves, along different axes."""
    torch.manual_seed(0)
    model, found = Staged().double(), {}
    for name, layouts, mesh in (
        ("whole labels", {"args[0]": "[4@dp, 5]", "args[1]": "[4, 5]"}, {"dp": 4 // stages}),
        ("other halves", {"args[0]": "[4@dp, 5]", "args[1]": "[4@tp, 5]"}, {"dp": 2, "tp": 2}),
    ):
        if stages > 1 and "tp" in mesh:
            continue  # a stage has two devices
        plan = None
        if dist.get_rank() == 0:
            asked: dict[str, Any] = {"stages": stages} if stages > 1 else {}
            asked |= {"micro_batch": 4, "mesh": sw.Mesh(**mesh), "search": "sharding_propagation", "layouts": layouts}
            plan = sw.plan(model, staged_batch(8), 4, **asked)
        par = sw.parallelize(copy.deepcopy(model), plan, inputs="local")
        for seed in range(3):
            batch = staged_batch(8, seed)
            parts = [planned_part(par, f"args[{i}]", x) for i, x in enumerate(batch)]
            assert (len(parts[0]) < 8, len(parts[1]) < 8) == (True, name == "other halves")
            loss, said = said_of(lambda par=par, parts=parts: par.step(*parts))
            found[f"{name} {seed}"] = abs(float(loss - model(*batch)[0].detach()))
            is_said = dist.get_rank() == 0 and seed == 0 and name == "whole labels"
            assert [text.partition(" 8")[0] for text in said] == ["micro-batches cannot split"] * is_said
    return found


@pytest.mark.parametrize("stages", [1, 2])
def test_inputs_in_different_parts_are_the_same_samples(stages: int, run_ranks: RunRanks) -> None:
    for found in run_ranks(different_parts, 4, stages):
        assert len(found) == (6 if stages == 1 else 3)
        assert max(found.values()) < TOLERANCE, found
