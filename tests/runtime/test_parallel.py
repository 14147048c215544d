"""Real gloo ranks: what they hold, compute and update is what one process holds, computes and updates."""

from __future__ import annotations

from itertools import cycle
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import shardwise as sw
from launch.gloo_ranks import RunRanks
from raising import raises, refusal
from runtime.small_gpt import batch, make_gpt, make_plan
from runtime.training import call_and_differentiate, check_ranks, state_of, step_or_differentiate, train
from shardwise.graph.capture import capture
from shardwise.layouts.choice import Split
from shardwise.programs.differentiate import differentiate
from shardwise.programs.program import localize
from shardwise.programs.spmd import build_spmd
from shardwise.programs.vjp import VjpCache
from shardwise.runtime.emit import emit
from shardwise.search.decide import decide
from shardwise.search.modes import choose

SIZES = [8, 8, 5, 1]  # the plan is for 8; the others are a last, smaller one, and a single sample
BATCHES = [batch(size, step) for step, size in enumerate(SIZES)]


def train_on_rank(name: str) -> dict[str, Any]:
    with sw.deferred(seed=0, values="cpu"):
        model = make_gpt()
    assert all(p.is_meta for p in model.parameters())
    par = sw.parallelize(model, make_plan(name) if dist.get_rank() == 0 else None)
    initial = state_of(par)
    ways = cycle((step_or_differentiate, call_and_differentiate))  # to a gradient
    trained = train(par, BATCHES, differentiate=lambda *given: next(ways)(*given))
    return {
        "initial": initial,
        "trained": trained,
        "logits": evaluate(par),
        "programs": len(par._compiled),
        "plan": par.plan.to_json(),
    }


def evaluate(model: torch.nn.Module) -> torch.Tensor:
    model.eval()
    with torch.no_grad():
        logits: torch.Tensor = model(batch(8, 99)[0])
    return logits


@pytest.mark.parametrize("name", ["auto", "tp"])
@pytest.mark.quick
def test_four_ranks_train_as_one_process(name: str, run_ranks: RunRanks) -> None:
    ranks = run_ranks(train_on_rank, 4, name)
    model = make_gpt()
    initial, alone = state_of(model), train(model, BATCHES)
    logits = evaluate(model)
    check_ranks([found["trained"] for found in ranks], alone, of_losses=1e-12)
    held = 0
    for rank, found in enumerate(ranks):
        torch.testing.assert_close(found["logits"], logits, rtol=1e-10, atol=1e-12)
        assert found["programs"] == 5  # losses of 8 and 5 samples, outputs of 8 and 1, evaluation
        for key, own in found["initial"].items():
            part = found["trained"].part_of(key, initial[key])
            assert torch.equal(own, part), f"{key} starts differently on rank {rank}"
        held = max(held, sum(x.numel() for x in found["initial"].values()))
    total = sum(x.numel() for x in initial.values())
    assert held == total if name == "auto" else held < 0.6 * total


def collectives_of_a_step() -> tuple[list[tuple[str, str, int]], list[tuple[str, str, int]], str]:
    """On a rank: what it takes part in during a forward and a backward pass, and the plan."""
    model = make_gpt()
    par = sw.parallelize(model, make_plan("tp") if dist.get_rank() == 0 else None)
    ids, labels = batch(8, 0)
    par(ids, labels)
    passes = []
    par._ranks.record = []
    loss = par(ids, labels)
    passes.append([(c.kind, par.plan.mesh.format_axes(c.axes), c.num_bytes) for c in par._ranks.record])
    par._ranks.record.clear()
    loss.backward()
    passes.append([(c.kind, par.plan.mesh.format_axes(c.axes), c.num_bytes) for c in par._ranks.record])
    return passes[0], passes[1], par.plan.to_json()


def test_ranks_perform_exactly_the_collectives_that_the_plan_lists(run_ranks: RunRanks) -> None:
    for forward, backward, text in run_ranks(collectives_of_a_step, 4):
        plan = sw.Plan.from_json(text)
        assert forward == [(c.kind, c.axes, c.num_bytes) for c in plan.collectives()]
        listed = [(c.kind, c.axes, c.num_bytes) for c in plan.collectives(backward=True)]
        assert sorted(backward) == sorted(listed)  # in another order: see programs.spmd.backward_order
        assert {"tp", "dp"} <= {axes for _, axes, _ in backward}


def train_on_local_inputs() -> list[float]:
    """On a rank: every rank passes its own part of the batch."""
    with sw.deferred(seed=0, values="cpu"):
        model = make_gpt()
    par = sw.parallelize(model, make_plan("tp") if dist.get_rank() == 0 else None, inputs="local")
    part = dist.get_rank() // 2  # data-parallel coordinate on Mesh(dp=2, tp=2)
    losses = []
    for size in (8, 4):
        ids, labels = batch(size, size)
        rows = slice(part * size // 2, (part + 1) * size // 2)
        losses.append(par.step(ids[rows], labels[rows]).item())
    return losses


def test_ranks_may_pass_only_their_part_of_the_batch(run_ranks: RunRanks) -> None:
    model = make_gpt()
    want = [model(*batch(size, size)).item() for size in (8, 4)]
    for losses in run_ranks(train_on_local_inputs, 4):
        assert losses == pytest.approx(want, rel=1e-12)


def try_bad_input() -> list[str]:
    """On a rank: everything that parallelize and calls refuse; each message."""
    model, plan = make_gpt(), make_plan("tp", 2 * 2)
    rank = dist.get_rank()
    pair = sw.plan(model, batch(8, 0), sw.Cluster.local(2), search="sharding_propagation")
    other = sw.plan(model, batch(8, 0), sw.Cluster.local(2), mode="stand_alone")
    messages = [
        refusal(lambda: sw.parallelize(model, plan)),  # four devices, two ranks
        refusal(lambda: sw.parallelize(model, pair if rank == 0 else other)),
        refusal(lambda: sw.parallelize(model, None)),
        refusal(lambda: sw.parallelize(torch.nn.Linear(3, 4), pair)),
        refusal(lambda: sw.parallelize(model, "/nowhere/plan.json" if rank == 1 else pair)),
        refusal(lambda: sw.parallelize(model, pair, inputs="whole")),
    ]
    par = sw.parallelize(model, pair)
    ids, labels = batch(8, 0)
    for inputs in ((ids.float(), labels), (ids[0], labels), (ids,)):
        messages.append(refusal(lambda inputs=inputs: par.step(*inputs)))
    return messages


def test_what_ranks_refuse(run_ranks: RunRanks) -> None:
    first, second = run_ranks(try_bad_input, 2)
    for messages in (first, second):
        assert "the plan is for 4 devices (Mesh(dp=2, tp=2)); 2 ranks are running" in messages[0]
        assert "ranks disagree on the plan: rank 0 has" in messages[1]
        assert "rank 0 has no plan" in messages[2]
        assert "the plan is for another model" in messages[3]
        assert "blocks.0.attention.out.bias is in the plan but not in the module" in messages[3]
        assert "not 'whole'" in messages[5]
        assert "dtype f32" in messages[6]
        assert "made for i64" in messages[6]
        assert "has 1 dims [8]; the plan was made for [8, 8]" in messages[7]
        assert "returns no loss" in messages[8]
    assert "rank 1: cannot read the plan" in first[4]
    assert "cannot read the plan /nowhere/plan.json" in second[4]


def test_parallelize_needs_a_process_group() -> None:
    with raises(sw.errors.LaunchError, "torch.distributed", "shardwise run -n 8"):
        sw.parallelize(make_gpt(), None)


class MakesPositions(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ self.weight * torch.arange(8) + torch.eye(8)).sum()


@pytest.mark.parametrize("strategy", ["d1@tp", "d0@tp"])
def test_constructors_make_their_tensors_on_the_device_of_the_rank(strategy: str) -> None:
    """Shown on the meta device: arange and eye, whole and in parts, follow the device of the program."""
    captured = capture(MakesPositions(), (torch.ones(8, 8),))
    mesh = sw.Mesh(tp=2)
    factored, _ = decide(captured.graph, (), mesh, "auto")
    pointwise = [op.name for op in captured.graph.ops if str(op.target) in ("aten.mul.Tensor", "aten.add.Tensor")]
    fixed = {name: {"tp": Split(strategy[:2])} for name in pointwise}
    choice = choose(captured.graph, factored, mesh, "auto", fixed)
    spmd = build_spmd(captured.graph, factored.rules, choice, mesh, bucket_bytes=0)
    program = differentiate(localize(spmd, 1), VjpCache(), loss_only=False, overlap=False)
    no_ranks: Any = None
    with mock.patch("shardwise.runtime.transit.stages", return_value=[]):
        module = emit(program, no_ranks, device=torch.device("meta")).forward
    made = [node for node in module.graph.nodes if node.op == "call_function" and not node.all_input_nodes]
    assert made
    for node in made:
        assert node.target(*node.args, **node.kwargs).device.type == "meta"
