"""Values on the host between forward and backward: equal to one device, off the device's memory, on time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import shardwise as sw
from proving import prove
from raising import raises
from search.small_models import Stack
from shardwise.api import step_memory
from shardwise.plans.bind import program_of as bound
from shardwise.plans.micro_batch_search import Example, planned_graph
from shardwise.programs.activation_offload import offloaded_operators
from shardwise.programs.differentiate import differentiate
from shardwise.programs.instructions import Copy, Land
from shardwise.programs.invariants import BrokenProgram, check_program
from shardwise.programs.program import localize
from shardwise.programs.rank_program import RankProgram
from shardwise.programs.vjp import VjpCache

MESH = sw.Mesh(dp=2)
TOLERANCE = 1e-12  # float64: sums of at most 512 terms of size 1, in another order on two ranks


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.unflatten(0, (-1, 2)).transpose(0, 1)  # views of what was kept
        turned = (rows.tanh() * rows.exp()).transpose(0, 1).flatten(0, 1)
        return x + F.dropout(self.down(F.gelu(self.up(self.norm(turned)))), 0.1, self.training)


def stack(depth: int = 3) -> Stack:
    return Stack(*(Block(32) for _ in range(depth)))


def cluster() -> sw.Cluster:
    return sw.Cluster.load("h100").with_nodes(1, 2)


def planned(module: nn.Module, x: torch.Tensor, **settings: Any) -> sw.Plan:
    return sw.plan(module, (x,), cluster(), **{"mesh": MESH, "mode": "data_parallel", "recompute": None, **settings})


def batch() -> torch.Tensor:
    return torch.randn(1024, 32, dtype=torch.float64)


def program_of(plan: sw.Plan, module: nn.Module, x: torch.Tensor) -> RankProgram:
    spmd = bound(plan, planned_graph(Example(module, ((x,), {})), plan), training=module.training)
    return differentiate(localize(spmd, 0), VjpCache())


def marked(mark: Callable[[Stack], object]) -> Stack:
    module = stack().double()
    mark(module)
    return module


@pytest.mark.parametrize(
    ("mark", "settings"),
    [
        (lambda module: sw.offload(module.blocks[1]), {}),
        (lambda module: sw.offload(module.blocks), {}),
        (lambda module: None, {"offload": "all"}),
        (lambda module: None, {"offload": "all", "recompute": "full"}),
        (lambda module: None, {"offload": "all", "recompute": "cheap", "zero": 3}),
        (lambda module: sw.offload(sw.recompute(module).blocks[0]), {"micro_batch": 512, "global_batch": 1024}),
    ],
    ids=["one", "all", "blocks", "with full", "with cheap and zero", "inside recomputed"],
)
@pytest.mark.sampled(2)
def test_what_waits_on_the_host_is_equal_to_one_device(mark: Callable[[Stack], object], settings: Any) -> None:
    module, x = marked(mark), batch()
    plan = planned(module, x, **settings)
    assert any(op.offloaded for op in plan.operators)
    assert "on the host until backward" in str(plan)
    prove(module, (x,), plan)
    assert sw.Plan.from_json(plan.to_json()).digest == plan.digest


def test_the_device_holds_less_and_the_host_what_is_missing() -> None:
    module, x = stack(6).double(), batch()
    kept, moved = (
        sw.plan(module, (x,), cluster(), mesh=MESH, search="dynamic_programming", recompute=None, offload=offload)
        for offload in ("none", "all")
    )
    before, after = (step_memory(module, (x,), plan) for plan in (kept, moved))
    assert before.host_bytes == 0
    assert after.host_bytes > 0
    assert after.peak.num_bytes < 0.6 * before.peak.num_bytes
    assert before.kept_bytes == after.kept_bytes + after.host_bytes, "the rest are the same values"
    assert after.kept_bytes < 0.1 * before.kept_bytes  # rows of the norms, and what was not made in a block


def test_a_program_moves_what_its_plan_says() -> None:
    """Also where backward reads a view of what an operator made: its kernel's memory is what waits."""
    module, x = stack(), batch()
    plan = planned(module.double(), x, offload="all")
    said = {op.name for op in plan.operators if op.offloaded}
    assert said == offloaded_operators(program_of(plan, module, x))
    assert "blocks.1/mul" in said


def test_where_the_host_is_the_device_offloading_is_announced_and_counted() -> None:
    module, x = stack().double(), batch()
    with pytest.warns(sw.errors.PlanWarning, match="shares its memory with the host"):
        moved = sw.plan(module, (x,), 2, mesh=MESH, mode="data_parallel", recompute=None, offload="all")
    assert step_memory(module, (x,), moved).host_bytes == 0


def test_copies_are_few_at_a_time_and_none_is_read_before_it_has_landed() -> None:
    module, x = stack().double(), batch()
    program = program_of(planned(module, x, offload="all"), module, x)
    for part in (program.forward, program.backward):
        on_their_way, most = 0, 0
        for instruction in part:
            on_their_way += isinstance(instruction, Copy) - isinstance(instruction, Land)
            most = max(most, on_their_way)
        assert on_their_way == 0
        assert most == 2
    for name in ("forward", "backward"):
        part = getattr(program, name)
        landings = [i for i, instruction in enumerate(part) if isinstance(instruction, Land)]
        for i in landings:
            with pytest.raises(BrokenProgram, match=r"waits|copied"):
                check_program(replace(program, **{name: (*part[:i], *part[i + 1 :])}))
    last = max(i for i, instruction in enumerate(program.backward) if isinstance(instruction, Land))
    late = (*program.backward[:last], *program.backward[last + 1 :], program.backward[last])
    with raises(BrokenProgram, "flatten@back", "copied"):
        check_program(replace(program, backward=late))


def test_a_copy_takes_its_time_in_the_simulation() -> None:
    module, x = stack().double(), batch()

    def seconds(host_bandwidth: float) -> float:
        device = replace(cluster().device, host_bandwidth=host_bandwidth)
        plan = sw.plan(
            module, (x,), replace(cluster(), device=device), mesh=MESH, recompute=None, offload="all",
            search="dynamic_programming",
        )  # fmt: skip
        moved = step_memory(module, (x,), plan).host_bytes
        assert moved > 0
        assert plan.prediction.simulated_seconds >= moved / host_bandwidth  # out and back beside each other at best
        return plan.prediction.simulated_seconds

    assert seconds(1e9) > 3 * seconds(55e9)


def test_where_nothing_fits_values_may_wait_on_the_host() -> None:
    module, x = stack(6).double(), batch()

    def plan(limit: float | None, **settings: Any) -> sw.Plan:
        return sw.plan(module, (x,), cluster(), mesh=MESH, search="dynamic_programming", memory_bytes=limit, **settings)

    free = plan(None)
    tight = plan(0.6 * free.prediction.peak_bytes, recompute="none", offload="all")
    assert tight.prediction.peak_bytes <= 0.6 * free.prediction.peak_bytes
    assert sw.verify(module, (x,), tight).ok
    with raises(sw.ShardwiseError, "offload='most'"):
        plan(None, offload="most")
    with raises(sw.ShardwiseError, "offload='all'"):
        sw.plan(nn.Linear(4, 4), (torch.ones(4, 4),), cluster(), offload="all", recompute="none")
    with pytest.warns(sw.errors.PlanWarning, match="nothing is offloaded to the host"):
        sw.plan(sw.offload(nn.Linear(4, 4)), (torch.ones(4, 4),), cluster(), mode="data_parallel")
    with raises(sw.ShardwiseError, "offload", "Tensor"):
        sw.offload(torch.zeros(3))  # type: ignore[type-var]
