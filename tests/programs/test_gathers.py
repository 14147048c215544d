"""What messages brought is let go after forward and brought again in backward: the same numbers, fewer bytes, every
message once more, on its way beside the backward that needs it."""

from __future__ import annotations

from collections import Counter
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import shardwise as sw
from shardwise.api import step_memory
from shardwise.costs.memory import busiest_program
from shardwise.graph.capture import capture
from shardwise.layouts.conversions import Collective
from shardwise.plans.bind import program_of
from shardwise.programs.instructions import Arrive, Compute, Depart
from shardwise.programs.lifetimes import backward_collectives
from shardwise.programs.rank_program import RankProgram
from shardwise.programs.vjp import VjpCache
from shardwise.search.memory_policy import MEMORY_POLICIES, REPEATS, MemoryPolicy

WIDTH, HEADS, TIME = 16, 4, 8
SPLITS = {"blocks.*.[qkv]": "n@tp", "blocks.*.out": "k@tp", "blocks.*.down": "k@tp"}


class Block(nn.Module):
    def __init__(self, gated: bool) -> None:
        super().__init__()
        norm = nn.RMSNorm if gated else nn.LayerNorm
        self.before, self.between = norm(WIDTH), norm(WIDTH)
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH, bias=not gated) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.gate = nn.Linear(WIDTH, 2 * WIDTH) if gated else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n = self.before(x)
        q, k, v = (own(n).unflatten(2, (HEADS, -1)).transpose(1, 2) for own in (self.q, self.k, self.v))
        found = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(found.transpose(1, 2).flatten(2))
        n = self.between(x)
        up = F.gelu(self.up(n)) if self.gate is None else F.silu(self.gate(n)) * self.up(n)
        return x + self.down(F.dropout(up, 0.2))


class Model(nn.Module):
    def __init__(self, *, gated: bool = False, layers: int = 3) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block(gated) for _ in range(layers))
        self.head = nn.Linear(WIDTH, 12)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def batch(rows: int = 8, time: int = TIME) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(rows, time, WIDTH, generator=generator), torch.randint(12, (rows, time), generator=generator)


def planned(model: nn.Module, how: Any, **choices: Any) -> sw.Plan:
    columns = {"blocks.*.[gu][ap]*": "n@tp"}  # gate and up
    fixed = {"mesh": sw.Mesh(tp=2), "strategies": SPLITS | columns, "search": "sharding_propagation"}
    return sw.plan(model, batch(), **{"cluster": 2, "recompute": how, **fixed, **choices})


def program(model: nn.Module, plan: sw.Plan) -> RankProgram:
    return busiest_program(program_of(plan, capture(model, batch(), {}).graph, training=True), VjpCache())


def sent(collectives: tuple[Collective, ...]) -> Counter[tuple[str, tuple[str, ...], int]]:
    return Counter((own.kind, own.axes, own.num_bytes) for own in collectives)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.sampled(1)
def test_every_gather_is_sent_once_more_and_what_was_sent_is_kept(gated: bool) -> None:
    model = Model(gated=gated)
    plans = {how: planned(model, how) for how in ("none", "gathers", "cheap", "cheap+gathers")}
    programs = {how: program(model, plan) for how, plan in plans.items()}
    again = [own for own in plans["gathers"].conversions if own.again and own.forward]
    assert len(again) >= 2 * (len(model.blocks) - 1), "two sequences of every block are gathered"
    assert not any(own.again for own in plans["gathers"].operators), "nothing is computed again"
    assert not any(own.again and own.forward for own in plans["cheap"].conversions), "no message is sent again"
    repeated = sum(own.again for own in plans["gathers"].conversions)  # slices as well
    assert f"{repeated} of {len(plans['gathers'].conversions)} conversions" in str(plans["gathers"])
    for how, plain in (("gathers", "none"), ("cheap+gathers", "cheap")):
        more = sent(backward_collectives(programs[how])) - sent(backward_collectives(programs[plain]))
        listed = {own.result for own in programs[how].spmd.conversions} & programs[how].spmd.lifetimes.conversions
        messages = [own for own in programs[how].spmd.conversions if own.result in listed and own.collectives()]
        assert more == sum((sent(own.collectives()) for own in messages), Counter())
        assert len(messages) == len(again)
        gathered = sum(programs[how].forms[own.result].num_bytes for own in messages)
        memory = {key: step_memory(model, batch(), plans[key]) for key in (how, plain)}
        saved = memory[plain].kept_bytes - memory[how].kept_bytes
        assert saved == (gathered if how == "cheap+gathers" else gathered // 2), "of what is gathered its part is kept"
        assert memory[how].peak.num_bytes < memory[plain].peak.num_bytes
        assert sw.verify(model, batch(), plans[how], steps=2).ok


def test_a_message_travels_beside_the_backward_ahead_of_its_operator() -> None:
    model = Model()
    backward = program(model, planned(model, "gathers")).backward
    arrivals = {own.flight: i for i, own in enumerate(backward) if isinstance(own, Arrive)}
    departures = [(i, own) for i, own in enumerate(backward) if isinstance(own, Depart) and own.origin.again]
    assert departures
    for i, departure in departures:
        between = backward[i : arrivals[departure.flight]]
        assert any(isinstance(own, Compute) and own.target == torch.ops.aten.mm.default for own in between)


@pytest.mark.filterwarnings("ignore::shardwise.errors.PlanWarning")  # of ranks whose host is their device
@pytest.mark.parametrize("how", ["gathers", "cheap+gathers"])
@pytest.mark.parametrize(
    "choices",
    [
        {"zero": 1, "micro_batch": 4, "global_batch": 8},
        {"zero": 2, "precision": sw.Precision(torch.bfloat16, torch.float32)},
        {"zero": 3, "micro_batch": 4, "global_batch": 8},
        {"offload": "all", "micro_batch": 4, "global_batch": 8},
        {"stages": 2, "mesh": sw.Mesh(tp=2), "micro_batch": 2, "global_batch": 8, "zero": 2},
        {"stages": 4, "mesh": sw.Mesh(tp=2), "micro_batch": 2, "global_batch": 8, "schedule": "ZBVZeroBubble"},
    ],
    ids=["zero 1", "zero 2, bf16", "zero 3", "offload", "stages", "zero bubble"],
)
@pytest.mark.sampled(2)
def test_beside_every_other_lever(how: str, choices: dict[str, Any]) -> None:
    model = Model(layers=choices.get("stages", 2))
    choices = {"cluster": 4, "mesh": sw.Mesh(dp=2, tp=2), **choices}
    with mock.patch("shardwise.programs.activation_offload.SMALLEST_BYTES", 1):
        plan = planned(model, how, **choices)
        assert any(own.again and own.forward for stage in plan.stages for own in stage.conversions or ())
        assert sw.Plan.from_json(plan.to_json()) == plan
        report = sw.verify(model, batch(), plan, steps=2)
    assert report.ok, str(report)


class Views(nn.Module):
    """Layers whose weights are used through views, as experts' are, or as they are."""

    def __init__(self, *, through_views: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.through_views = through_views
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            weight = block.weight.view(1, WIDTH, WIDTH)[0].transpose(0, 1)
            x = x + torch.tanh(x @ weight if self.through_views else block(x))
        return F.cross_entropy(x.mean(1), labels[:, 0])


def test_views_of_parameters_are_not_kept_where_these_are_gathered_again() -> None:
    kept = {}
    for through_views in (True, False):
        model = Views(through_views=through_views)
        plan = sw.plan(model, batch(), 4, mode="data_parallel", zero=3)
        stepped = program(model, plan)
        made = {name for instruction in stepped.forward for name in instruction.results}
        kept[through_views] = sum(stepped.forms[name].num_bytes for name in made.intersection(stepped.saved))
        assert sw.verify(model, batch(), plan, steps=2).ok
    assert kept[True] == kept[False]


def test_a_module_says_it_for_itself() -> None:
    model = Model()
    sw.recompute(model.blocks[1], "gathers")
    plan = planned(model, None)
    again = [own for own in plan.conversions if own.again]
    assert len(again) == 2


def test_rungs_are_compared_by_what_they_make_again() -> None:
    assert REPEATS["cheap+gathers"].work > REPEATS["cheap"].work
    assert not MemoryPolicy("cheap").repeats_no_less(MemoryPolicy("gathers"))
    assert MemoryPolicy("cheap+gathers", "again").repeats_no_less(MemoryPolicy("gathers", "held"))
    assert not MemoryPolicy("cheap+gathers", "once").repeats_no_less(MemoryPolicy("gathers", "held"))
    assert {policy.recompute for policy in MEMORY_POLICIES} >= set(REPEATS)
