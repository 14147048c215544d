"""Rows in chunks: the messages of one travel beside the products of another, forward and backward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shardwise as sw
from launch.gloo_ranks import RunRanks
from models.test_expert_exchange import EP, planned
from models.test_models_on_ranks import MODELS, check_training, plan_of, train_on_rank
from programs.building import random_program
from programs.running import run
from raising import raises
from shardwise.graph.capture import capture
from shardwise.plans.bind import program_of
from shardwise.programs import overlap_messages, row_chunks
from shardwise.programs.differentiate import differentiate
from shardwise.programs.instructions import Arrive, Compute, Depart, Instruction
from shardwise.programs.lower import PlacedOp
from shardwise.programs.program import localize
from shardwise.programs.spmd_steps import OpStep, chunk_of
from shardwise.programs.vjp import VjpCache
from shardwise.rules.rule import LocalOpCall

TP = dict.fromkeys(("*.q", "*.k", "*.v", "*.up", "*.gate", "head"), "n@tp")
TP |= {"*.o": "k@tp", "*.down": "k@tp", "tokens": "v@tp"}
SEQUENCES = TP | {"*.first": "b1@tp", "*.second": "b1@tp"}


class Layer(nn.Module):
    def __init__(self, width: int, inner: int, heads: int) -> None:
        super().__init__()
        self.heads, self.first, self.second = heads, nn.RMSNorm(width), nn.RMSNorm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(width, inner, bias=False) for _ in range(2))
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        q, k, v = (each(y).unflatten(-1, (self.heads, -1)).transpose(1, 2) for each in (self.q, self.k, self.v))
        x = x + self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        y = self.second(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    def __init__(self, words: int = 32, width: int = 16, inner: int = 24, heads: int = 4, layers: int = 2) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(words, width), nn.Linear(width, words, bias=False)
        self.layers = nn.Sequential(*(Layer(width, inner, heads) for _ in range(layers)))

    def forward(self, tokens: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.layers(self.tokens(tokens))).flatten(0, 1), tokens.flatten())


def in_chunks(plan: Any) -> list[Any]:
    return [entry for stage in plan.stages for entry in stage.conversions if chunk_of(entry.value)]


CASES: dict[str, dict[str, Any]] = {
    "all-reduces": {"mesh": sw.Mesh(tp=4)},
    "sequences": {"mesh": sw.Mesh(tp=2), "strategies": SEQUENCES},
    "four chunks": {"mesh": sw.Mesh(tp=2), "strategies": SEQUENCES, "row_chunks": 4},
    "micro-batches": {"mesh": sw.Mesh(dp=2, tp=2), "micro_batch": 2},
    "ZeRO 3, recomputed": {"mesh": sw.Mesh(dp=2, tp=2), "strategies": SEQUENCES, "zero": 3, "recompute": "full"},
    "gathered again": {"mesh": sw.Mesh(tp=2), "strategies": SEQUENCES, "recompute": "cheap+gathers"},
    "stages": {"mesh": sw.Mesh(tp=2), "stages": 2, "micro_batch": 2},
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.sampled(2)
def test_every_number_is_that_of_one_device(case: str) -> None:
    torch.manual_seed(0)
    options: dict[str, Any] = {"strategies": TP, "row_chunks": 2} | CASES[case]
    module, batch = Llama(), torch.randint(0, 32, (4, 8))
    plan = sw.plan(module, batch, options["mesh"].num_devices * options.get("stages", 1), **options)
    assert len(in_chunks(plan)) >= 8 * options["row_chunks"], plan
    assert f"rows in {options['row_chunks']} chunks" in str(plan)
    report = sw.verify(module, batch, plan)
    assert report.is_equal, report
    assert report.ok, report
    assert sw.Plan.from_json(plan.to_json()) == plan.plan


@pytest.mark.parametrize(("name", "layers"), [("qwen3_moe", 2), pytest.param("deepseek_v3", 1, marks=pytest.mark.long)])
def test_half_of_the_tokens_travels_beside_the_experts_of_the_other_half(name: str, layers: int) -> None:
    module, batch, plan = planned(name, EP, row_chunks=2)
    report = sw.verify(module, batch, plan)
    assert report.is_equal, report
    program = rank_program(module, batch, plan)
    products = {
        step.placed.op.name
        for step in program.spmd.steps
        if isinstance(step, OpStep) and "grouped" in str(step.placed.op.target)
    }
    for half in (program.forward, program.backward):
        beside = [names & products for names in beside_messages(half, "K")]
        assert len(beside) == 4 * layers, "the way out and back of two halves in each layer of experts"
        assert sum(map(bool, beside)) >= 2 * layers, beside


def rank_program(module: nn.Module, batch: Any, plan: Any) -> Any:
    kwargs = batch if isinstance(batch, dict) else {}
    graph = capture(module, () if kwargs else (batch,), kwargs).graph
    return differentiate(localize(program_of(plan.plan, graph), 0), VjpCache())


def beside_messages(instructions: Sequence[Instruction], kind: str = "") -> list[set[str]]:
    """The operators that compute while each message of a chunk travels. ``kind``: "K": of rows that follow keys."""
    beside: dict[str, set[str]] = {}
    travelling: set[str] = set()
    for instruction in instructions:
        if isinstance(instruction, Depart) and chunk_of(instruction.conversions[0].origin):
            if not kind or instruction.conversions[0].ways:
                travelling.add(instruction.flight)
                beside[instruction.flight] = set()
        elif isinstance(instruction, Arrive):
            travelling.discard(instruction.flight)
        elif isinstance(instruction, Compute) and not instruction.is_view:
            for flight in travelling:
                beside[flight].add(instruction.origin.op)
    return list(beside.values())


def test_messages_of_a_chunk_travel_beside_products_of_another() -> None:
    module, batch = Llama(), torch.randint(0, 32, (1, 8))
    plan = sw.plan(module, batch, 2, mesh=sw.Mesh(tp=2), strategies=TP, row_chunks=2)
    program = rank_program(module, batch, plan)
    for half in (program.forward, program.backward):
        messages = beside_messages(half)
        hidden = [names for names in messages if any("/linear" in name for name in names)]
        assert 2 * len(hidden) >= len(messages) > 8, messages


RANDOM = range(8)


def test_random_programs_in_chunks_equal_one_device() -> None:
    messages = 0
    for seed in RANDOM:
        outcome = run(random_program(seed), seed, row_chunks=2)
        assert outcome.ok, f"seed {seed}: {outcome.error:.3g} at {outcome.where}"
        messages += outcome.features["messages of chunks"]
    assert messages > 50, messages


def reads_the_first_chunk(self: Any, item: PlacedOp, number: int, chunk: int) -> PlacedOp:
    right = CHUNK(self, item, number, chunk)
    first = CHUNK(self, item, number, 0)
    return replace(right, op=replace(right.op, args=first.op.args))


def joins_in_another_order(self: Any, number: int, name: str, maker: Any, position: int) -> None:
    names = self.names[number, name]
    self.names[number, name] = names[::-1]
    JOIN(self, number, name, maker, position)
    self.names[number, name] = names


def arrives_at_the_end(instructions: Sequence[Instruction]) -> tuple[Instruction, ...]:
    spread = SPREAD(instructions)
    late = {id(i) for i in spread if isinstance(i, Arrive) and chunk_of(i.conversions[0].origin)}
    return (*(i for i in spread if id(i) not in late), *(i for i in spread if id(i) in late))


CHUNK, JOIN, SPREAD = row_chunks._Writer._chunk, row_chunks._Writer._join, overlap_messages._spread
FAULTS: dict[str, tuple[Any, str, Any]] = {
    "another chunk's operands": (row_chunks._Writer, "_chunk", reads_the_first_chunk),
    "chunks in another order": (row_chunks._Writer, "_join", joins_in_another_order),
    "blocks of all devices": (row_chunks, "_local_blocks", lambda op, context: LocalOpCall(op.target, op.args)),
    "a message that is read before it arrives": (overlap_messages, "_spread", arrives_at_the_end),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_chunks_is_caught(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*FAULTS[fault])
    for seed in RANDOM:
        try:
            if not run(random_program(seed), seed, row_chunks=2).ok:
                return
        except (AssertionError, RuntimeError, KeyError):
            return
    raise AssertionError(f"nobody notices {fault}")


def test_the_search_divides_rows_where_the_step_is_shorter_and_fits() -> None:
    with torch.device("meta"):
        module = Llama(32000, 4096, 14336, 32).to(torch.bfloat16)
        batch = torch.zeros(1, 8192, dtype=torch.int64)
    settings: dict[str, Any] = {"mesh": sw.Mesh(tp=8), "strategies": TP, "search": "dynamic_programming"}
    whole, free = (sw.plan(module, batch, "h100-1x8", **settings, **more).plan for more in ({"row_chunks": 1}, {}))
    assert (whole.row_chunks, free.row_chunks) == (1, 2)
    assert '"row_chunks"' not in whole.to_json()
    seconds = [plan.predicted.simulated_seconds for plan in (whole, free) if plan.predicted is not None]
    assert seconds[1] < 0.96 * seconds[0]
    assert whole.predicted is not None
    limit = int(whole.predicted.peak_bytes)
    bounded = sw.plan(module, batch, "h100-1x8", **settings, memory_bytes=limit).plan
    assert bounded.predicted is not None
    assert bounded.predicted.peak_bytes <= limit


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.long)])
def test_models_train_in_chunks_as_plain_pytorch_trains_them(ranks: int, run_ranks: RunRanks) -> None:
    mesh = sw.Mesh(tp=2) if ranks == 2 else sw.Mesh(dp=2, tp=2)
    choices = {"cluster": ranks, "mesh": mesh, "row_chunks": 2}
    plans = {("llama", ""): plan_of("llama", "", strategies=MODELS["llama"].strategies, **choices)}
    experts = {"cluster": ranks, "mesh": sw.Mesh(ep=ranks), "strategies": {"model.layers.*.mlp.experts": "e@ep"}}
    plans["mixtral", ""] = plan_of("mixtral", "", row_chunks=2, **experts)
    assert all(map(in_chunks, plans.values()))
    check_training(run_ranks, plans, train_on_rank)


def test_what_cannot_be_divided_stays_whole() -> None:
    module, batch = Llama(), torch.randint(0, 32, (4, 8))
    plan = sw.plan(module, batch, 2, mesh=sw.Mesh(tp=2), strategies=TP, row_chunks=5)
    assert not in_chunks(plan)
    assert "row_chunks=5 divides nothing" in str(plan)
    assert sw.verify(module, batch, plan).is_equal
    with raises(sw.ShardwiseError, "row_chunks is 0"):
        sw.plan(module, batch, 2, row_chunks=0)


class Shared(nn.Module):
    """A sum whose two addends have one cotangent, made by a product; ``a`` is read again."""

    def __init__(self) -> None:
        super().__init__()
        self.p, self.q = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        a = self.p(x)
        return ((x @ (a + self.q(x))) * torch.sin(a)).square().mean()


@pytest.mark.parametrize("row_chunks", [1, 2])
def test_a_cotangent_of_two_values_keeps_its_name(row_chunks: int) -> None:
    settings = {"mesh": sw.Mesh(tp=2), "strategies": {"p": "n@tp", "q": "n@tp"}, "row_chunks": row_chunks}
    plan = sw.plan(Shared(), torch.randn(8, 8), 2, **settings)
    assert sw.verify(Shared(), torch.randn(8, 8), plan).is_equal
