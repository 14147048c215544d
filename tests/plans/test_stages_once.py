"""What the stages of a pipeline do once a step, and what waits on the host there."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from programs.without_reductions import without_reductions
from proving import prove
from raising import raises
from runtime.staged_model import Staged, staged_batch
from shardwise.plans.bind_stages import bound, step_graph
from shardwise.plans.micro_batch_search import Example
from shardwise.programs.differentiate import differentiate
from shardwise.programs.grad_accum_program import repeated
from shardwise.programs.instructions import sent_by
from shardwise.programs.micro_batches import Passes
from shardwise.programs.program import localize
from shardwise.programs.vjp import VjpCache
from shardwise.proof import ranks

MIXED = sw.Precision(torch.bfloat16, torch.float32, torch.float32)


def model() -> Staged:
    torch.manual_seed(0)
    return Staged()


def planned(**settings: Any) -> sw.Plan:
    """Two stages on two devices each, and four micro-batches of which the last is smaller."""
    how: dict[str, Any] = {"mode": "data_parallel", "mesh": sw.Mesh(dp=2), "bucket_bytes": 0, **settings}
    return sw.plan(model(), staged_batch(8), 4, **{"stages": 2, "micro_batch": 2, **how})


def messages(plan: sw.Plan) -> list[dict[str, Counter[str]]]:
    """Per stage what is sent ahead of the micro-batches, in each and behind them, by kind."""
    call = Example(model(), (staged_batch(8), {}), None, precision=plan.precision)
    passes = Passes.of(step_graph(call.graph(8)), 2, call.graph)
    found = []
    for spmd in bound(plan, passes.graphs[2], prelude=passes.prelude, training=True).spmds:
        parts = repeated(differentiate(localize(spmd, 0), VjpCache()))
        lists = {
            "ahead": parts.ahead.forward,
            "each": (*parts.each.forward, *parts.each.backward),
            "behind": parts.behind.backward,
        }
        found.append({k: Counter(c.kind for i in own for c in sent_by(i)) for k, own in lists.items()})
    return found


@pytest.mark.parametrize("precision", [None, MIXED], ids=["f32", "mixed"])
@pytest.mark.parametrize(
    ("zero", "ahead", "each", "behind"),
    [
        (None, set(), set(), {"all_reduce"}),
        (1, {"all_gather"}, set(), {"reduce_scatter"}),
        (2, set(), {"all_gather", "reduce_scatter"}, set()),
    ],
)
@pytest.mark.sampled(1)
def test_a_stage_sends_once_what_its_micro_batches_can_add_up(zero, ahead, each, behind, precision):
    plan = planned(zero=zero, precision=precision)
    for number, found in enumerate(messages(plan)):
        of_loss = {"all_reduce"} if number else set()  # the loss is summed in every micro-batch
        assert found["ahead"].keys() == ahead
        assert found["each"].keys() - of_loss == each
        assert found["behind"].keys() == behind
    assert sw.Plan.from_json(plan.to_json()) == plan
    report = sw.verify(model(), staged_batch(7), plan)  # of micro-batches the last is smaller
    assert report.ok, str(report)


def test_reductions_that_are_left_out_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "repeated", without_reductions)
    monkeypatch.setattr(ranks, "check_program", lambda _: None)
    assert not sw.verify(model(), staged_batch(8), planned()).ok


class Stack(nn.Module):
    """Blocks that keep values of 128 KiB."""

    def __init__(self) -> None:
        super().__init__()
        blocks = (nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64)) for _ in range(4))
        self.layers = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()


@pytest.mark.parametrize(("schedule", "stages"), [("1F1B", 2), ("InterleavedZeroBubble", 4)])
def test_values_of_a_stage_wait_on_the_host(schedule: str, stages: int) -> None:
    torch.manual_seed(0)
    module, x = Stack(), torch.randn(8, 512, 64)
    how: dict[str, Any] = {"mode": "data_parallel", "mesh": sw.Mesh(dp=2), "micro_batch": 2}
    made = sw.plan(module, x, 4, stages=stages, schedule=schedule, offload="all", **how)
    waiting = [[entry.name for entry in stage.operators if entry.offloaded] for stage in made.stages]
    assert all(waiting), waiting
    prove(module, x, made)


class Ends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(64, 64), nn.Linear(64, 64)
        self.layers = Stack().layers

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(x).square().mean()


def test_stages_without_blocks_keep_what_they_make() -> None:
    torch.manual_seed(0)
    module, x = Ends(), torch.randn(8, 16, 64)
    how: dict[str, Any] = {"mode": "data_parallel", "mesh": sw.Mesh(dp=1), "micro_batch": 2, "recompute": "full"}
    sw.stage(module.first, 0)
    sw.stage(module.layers, 1)
    sw.stage(module.head, 2)
    made = sw.plan(module, x, 3, stages=3, **how)
    again = [any(entry.again for entry in stage.operators) for stage in made.stages]
    assert again == [False, True, False]
    assert sw.verify(module, x, made).ok
    bare = nn.Sequential()
    bare.first, bare.second = nn.Linear(64, 64), nn.Linear(64, 64)
    with raises(sw.ShardwiseError, "recompute='full'"):
        sw.plan(bare, x, 2, loss=lambda y: y.sum(), stages=2, **how)
