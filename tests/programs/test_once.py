"""What a step of several passes does once: gathers, casts and reductions of parameters
(``programs.grad_accum_program``)."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import shardwise as sw
from programs.without_reductions import without_reductions
from proving import prove
from raising import raises
from shardwise.costs.timeline import simulate
from shardwise.errors import PlanError
from shardwise.plans.bind import program_of
from shardwise.plans.micro_batch_search import Example, planned_graph
from shardwise.plans.price_scope import prices_of
from shardwise.programs.differentiate import differentiate
from shardwise.programs.grad_accum_program import GradAccumProgram, repeated
from shardwise.programs.instructions import sent_by
from shardwise.programs.invariants import check_program
from shardwise.programs.program import localize
from shardwise.programs.vjp import VjpCache
from shardwise.proof import ranks
from shardwise.runtime.cpu_embedding import place_on_cpu, with_copies

BATCH = 8
MIXED = sw.Precision(torch.bfloat16, torch.float32, torch.float32)
NARROW = sw.Precision(torch.bfloat16, torch.float32, torch.bfloat16)


class Net(nn.Module):
    """Layers of which two biases get one cotangent, a table, and a tied head."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.up = nn.Embedding(16, 8), nn.Linear(8, 32)
        self.extra, self.down = nn.Parameter(torch.randn(8)), nn.Linear(32, 8)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.table(ids)
        x = x + self.down(torch.tanh(self.up(x))) + self.extra
        return F.cross_entropy(F.linear(x, self.table.weight).flatten(0, 1), ids.flatten())


def inputs() -> torch.Tensor:
    return torch.randint(16, (BATCH, 4), generator=torch.Generator().manual_seed(0))


def net() -> Net:
    torch.manual_seed(0)
    return Net()


def planned(**settings: Any) -> sw.Plan:
    return sw.plan(net(), inputs(), 2, mode="data_parallel", global_batch=BATCH, micro_batch=2, **settings)


def parts_of(plan: sw.Plan) -> GradAccumProgram:
    call = Example(net(), ((inputs(),), {}), None, precision=plan.precision)
    spmd = program_of(plan, planned_graph(call, plan), training=True)
    return repeated(differentiate(localize(spmd, 0), VjpCache()))


def sent(parts: GradAccumProgram) -> dict[str, Counter[str]]:
    """Messages by kind: ahead of the passes, in forward and backward of each, behind them."""
    lists = {
        "ahead": parts.ahead.forward,
        "forward": parts.each.forward,
        "backward": parts.each.backward,
        "behind": parts.behind.backward,
    }
    return {
        name: Counter(message.kind for instruction in own for message in sent_by(instruction))
        for name, own in lists.items()
    }


@pytest.mark.parametrize("precision", [None, MIXED, NARROW], ids=["f32", "mixed", "reduced in bf16"])
@pytest.mark.parametrize(
    ("zero", "ahead", "backward", "behind"),
    [
        (None, set(), set(), {"all_reduce"}),
        (1, {"all_gather"}, set(), {"reduce_scatter"}),
        (2, set(), {"reduce_scatter"}, set()),
        (3, set(), {"all_gather", "reduce_scatter"}, set()),
    ],
)
@pytest.mark.sampled(3)
def test_a_step_sends_once_what_its_passes_can_add_up(zero, ahead, backward, behind, precision):
    plan = planned(zero=zero, precision=precision, bucket_bytes=0)
    found = sent(parts_of(plan))
    assert (found["ahead"].keys(), found["backward"].keys(), found["behind"].keys()) == (ahead, backward, behind)
    once = {entry.name for entry in plan.parameters if entry.once}
    assert once == ({entry.name for entry in plan.parameters} if zero in (None, 1) else set())
    prove(net(), inputs(), plan)


def test_what_is_reduced_once_in_two_messages_is_reduced_in_the_dtype_that_is_wanted():
    hybrid = {"mesh": sw.Mesh(node=2, gpu=2), "zero": sw.Zero(1, over=("gpu",)), "precision": NARROW}
    batches = {"global_batch": BATCH, "micro_batch": 4, "bucket_bytes": 300}
    plan = sw.plan(net(), inputs(), 4, mode="data_parallel", **hybrid, **batches)
    found = sent(parts_of(plan))
    assert found["behind"].keys() == {"reduce_scatter", "all_reduce"}
    assert found["behind"]["reduce_scatter"] == found["behind"]["all_reduce"] > 1
    assert not found["backward"].keys()
    prove(net(), inputs(), plan)


def test_sums_are_in_the_dtype_that_is_stored_and_cast_for_the_reduction_once():
    parts = parts_of(planned(precision=NARROW, bucket_bytes=0))
    assert parts.behind.saved, "something is reduced once"
    for name in parts.behind.saved:
        assert parts.behind.forms[name].dtype == torch.float32, name
    for instruction in parts.behind.backward:
        if sent_by(instruction):
            assert {parts.behind.forms[name].dtype for name in instruction.operands} == {torch.bfloat16}


def test_the_plan_says_what_is_done_once_and_its_file_says_it_again():
    plan = planned(zero=1)
    assert sw.Plan.from_json(plan.to_json()) == plan
    assert "once a step: " in str(plan)
    body = plan.to_json()
    assert body.count('"once": true') == sum(entry.once for entry in plan.parameters)
    older = planned(zero=2)
    assert '"once"' not in older.to_json()


def test_a_pass_is_priced_with_its_share_of_what_a_step_does_once():
    cluster = sw.Cluster.load("h100-1x8")
    whole = sw.plan(net(), inputs(), cluster, mesh=sw.Mesh(dp=8), mode="data_parallel", global_batch=64, micro_batch=8)
    call = Example(net(), ((torch.zeros(8, 4, dtype=torch.int64),), {}), None)
    spmd = program_of(whole, planned_graph(call, whole), training=True)
    prices = prices_of(sw.plan(net(), torch.zeros(8, 4, dtype=torch.int64), cluster, mesh=sw.Mesh(dp=8)))
    of_passes = {n: simulate(spmd, type(prices)(prices.links, prices.optimizer, n)) for n in (1, 2, 8)}
    in_all = {n: step.communication for n, step in of_passes.items()}
    loss = in_all[1] - (in_all[1] - in_all[8]) * 8 / 7  # the loss is summed in every pass
    for n in (2, 8):
        assert in_all[n] == pytest.approx(loss + (in_all[1] - loss) / n, rel=1e-9)


def test_a_reduction_that_is_left_out_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "repeated", without_reductions)
    monkeypatch.setattr(ranks, "check_program", lambda program: None)
    assert not sw.verify(net(), inputs(), planned()).ok


def test_what_a_plan_says_is_done_once_and_cannot_be_is_refused() -> None:
    plan = planned(zero=3)
    wrong = plan.revised(parameters=tuple(replace(entry, once=True) for entry in plan.parameters))
    with raises(PlanError, "down.bias", "down.weight", "converts", facts=["count"]):
        sw.verify(net(), inputs(), wrong)


class Lookup(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(16, 8), nn.Linear(8, 16)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(self.table(ids)).flatten(0, 1), ids.flatten())


def test_passes_with_a_table_on_the_host_are_sound():
    plan = sw.plan(Lookup(), inputs(), 2, mode="data_parallel", global_batch=BATCH, micro_batch=2)
    call = Example(Lookup(), ((inputs(),), {}), None)
    spmd = program_of(plan, planned_graph(call, plan), training=True)
    placed, values = place_on_cpu(localize(spmd, 0), frozenset({"table.weight"}))
    program, on_host = with_copies(differentiate(placed, VjpCache()), values)
    assert on_host
    parts = repeated(program)
    for part in (parts.ahead, parts.each, parts.behind):
        check_program(part)
