"""Attention that knows its mask, split every way: heads, groups, batch, queries, keys and rings. Every gradient equals
that of one device; and what a rank calls is what it should be."""

from __future__ import annotations

from math import prod
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

import shardwise as sw
from proving import prove
from shardwise.graph.capture import capture
from shardwise.graph.ir import Graph
from shardwise.plans.bind import program_of
from shardwise.programs.differentiate import differentiate
from shardwise.programs.instructions import Compute
from shardwise.programs.micro_batches import Passes
from shardwise.programs.program import localize
from shardwise.programs.rank_program import RankProgram
from shardwise.programs.vjp import VjpCache
from shardwise.rules.tables import rule_of


class Attention(nn.Module):
    """Grouped heads as transformers repeats them, under a causal mask (``window`` 0) or within a window."""

    def __init__(
        self, strategy: str, length: int, window: int = 0, repeats: int = 2, widths: tuple[int, int] = (4, 4)
    ) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        of_scores, of_values = widths
        shapes = (2, 2 * repeats, length, of_scores), (2, 2, length, of_scores), (2, 2, length, of_values)
        self.queries, self.keys, self.values = (
            nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes
        )
        self.attend: Any = sw.shard(F.scaled_dot_product_attention, strategy)
        self.window, self.repeats = window, repeats

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[-2]
        rows, columns = torch.arange(length)[:, None], torch.arange(length)[None]
        mask = columns <= rows
        if self.window:
            mask = mask & (columns > rows - self.window)

        def repeated(heads: Tensor) -> Tensor:
            batch, groups, length, width = heads.shape
            wide = heads[:, :, None].expand(batch, groups, self.repeats, length, width)
            return wide.reshape(batch, groups * self.repeats, length, width)

        keys, values = repeated(self.keys * x), repeated(self.values)
        seen: Tensor = self.attend(self.queries * x, keys, values, attn_mask=mask[None, None].expand(2, 1, -1, -1))
        return seen.square().mean()


STRATEGIES = ["b@dp h@tp", "t@tp", "t@(dp,tp)", "s@tp", "t@dp s@tp", "ring@tp", "b@dp ring@tp", "e@tp", "d@dp t@tp"]


def named(strategy: str, repeats: int) -> str:
    return strategy.replace("h@", "g@") if repeats > 1 else strategy


CASES = [(7, 0, 2), (8, 3, 1), (8, 0, 1), (8, 0, 3), (7, 3, 2)]  # length, window, query heads of a group


@pytest.mark.parametrize(
    ("length", "window", "repeats"), [*CASES[:2], *(pytest.param(*case, marks=pytest.mark.long) for case in CASES[2:])]
)
@pytest.mark.sampled(1)
def test_attention_that_knows_its_mask_equals_one_device_under_every_split(length: int, window: int, repeats: int):
    x = torch.randn(2, 1, length, 1)
    for strategy in STRATEGIES:
        model = Attention(named(strategy, repeats), length, window, repeats)
        plan = sw.plan(model, (x,), 4, mesh=sw.Mesh(dp=2, tp=2), search="sharding_propagation")
        report = sw.verify(model, (x,), plan, steps=1)
        assert report.ok, f"{strategy}: {report}"


@pytest.mark.parametrize("widths", [(6, 4), (4, 6)])
@pytest.mark.parametrize(("length", "window"), [(8, 0), (100, 7)])
@pytest.mark.sampled(1)
def test_heads_of_unequal_widths_are_one_fused_kernel_under_every_split(
    widths: tuple[int, int], length: int, window: int
):
    """DeepSeek's queries and keys are wider than its values."""
    x = torch.randn(2, 1, length, 1)
    for strategy in ["b@dp h@tp", "t@tp", "t@dp s@tp", "b@dp ring@tp", "e@tp"][: 5 if length == 8 else 4]:
        model = Attention(named(strategy, 2), length, window, widths=widths)
        plan = sw.plan(model, (x,), 4, mesh=sw.Mesh(dp=2, tp=2), search="sharding_propagation")
        report = sw.verify(model, (x,), plan, steps=1)
        assert report.is_equal, f"{strategy}: {report}"
        if strategy in ("b@dp h@tp", "t@tp"):
            kernels = {str(call.target).split(".")[1] for call in attended(program_on(3, model, plan, (x,)))}
            assert kernels == {"_scaled_dot_product_flash_attention_for_cpu"}, strategy


LONG = ["b@dp h@tp", "t@tp", "t@(dp,tp)", "t@dp s@tp", "b@dp ring@tp"]


@pytest.mark.parametrize("strategy", LONG)
@pytest.mark.sampled(1)
def test_long_attention_in_blocks_equals_one_device_under_every_split(strategy: str):
    """Its mask would take more memory than the queries and keys of a sample: 6 heads of 4 numbers of 4 bytes."""
    length, window = 100, 7
    model, x = Attention(named(strategy, 2), length, window), torch.randn(2, 1, length, 1)
    plan = sw.plan(model, (x,), 4, mesh=sw.Mesh(dp=2, tp=2), search="sharding_propagation")
    assert set(named(strategy, 2).split()) <= set(plan.strategies["/attention_within"].split())
    prove(model, (x,), plan, steps=1)
    if "ring" in strategy:  # the window reaches into one block of keys before its own
        assert [c.kind for c in plan.collectives()].count("halo_exchange") == 2


def program_on(rank: int, model: nn.Module, plan: sw.Plan, inputs: tuple[Any, ...], **kwargs: Any) -> RankProgram:
    spmd = program_of(plan, capture(model, inputs, kwargs).graph)
    return differentiate(localize(spmd, rank), VjpCache())


def attended(program: RankProgram) -> list[Compute]:
    return [i for i in program.forward if isinstance(i, Compute) and "attention" in str(i.target)]


def test_parts_of_the_queries_see_the_keys_before_them_and_are_causal_in_their_own() -> None:
    model, x = Attention("t@tp", 8), torch.randn(2, 1, 8, 1)
    plan = sw.plan(model, (x,), 2, mesh=sw.Mesh(tp=2), search="sharding_propagation")
    first, last = (program_on(rank, model, plan, (x,)) for rank in range(2))
    for program, causal in ((first, [True]), (last, [False, True])):
        calls = attended(program)
        assert {str(call.target) for call in calls} == {"aten._scaled_dot_product_flash_attention_for_cpu.default"}
        assert [call.args[4:] == (True,) for call in calls] == causal
        assert not [call for call in calls if dict(call.kwargs).get("attn_mask") is not None]
        assert {program.forms[call.operands[1]].shape[-2] for call in calls} == {4}
        assert not [name for name, form in program.forms.items() if form.shape[-2:] == (4, 8)]


GPT2 = GPT2Config(n_layer=3, n_embd=32, n_head=4, vocab_size=50, n_positions=16, bos_token_id=0, eos_token_id=0)
SIZES: dict[str, Any] = {
    "num_hidden_layers": 3, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 50, "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip
LLAMA = LlamaConfig(**SIZES)
MIXTRAL = MixtralConfig(**SIZES, num_local_experts=2)
T5 = T5Config(num_layers=1, d_model=32, d_kv=8, num_heads=4, d_ff=48, vocab_size=50, decoder_start_token_id=0)


@pytest.mark.parametrize(("build", "config"), [(GPT2LMHeadModel, GPT2), (LlamaForCausalLM, LLAMA)])
def test_a_model_of_transformers_calls_attention_once_a_layer_causal_grouped_and_without_a_mask(
    build: Any, config: Any
):
    model = build(config).eval()  # without dropout
    ids = torch.randint(0, 50, (2, 8))
    call = {"input_ids": ids, "labels": ids, "use_cache": False}
    plan = sw.plan(model, (), 2, kwargs=call, mesh=sw.Mesh(dp=2), search="sharding_propagation")
    program = program_on(1, model, plan, (), **call)
    calls = attended(program)
    assert len(calls) == 3
    for each in calls:
        query, key = (program.forms[name].shape for name in each.operands[:2])
        assert (each.args[3:5], dict(each.kwargs).get("attn_mask")) == ((0.0, True), None)
        assert query == (1, 4, 8, 8)
        assert key == (1, 2 if isinstance(model, LlamaForCausalLM) else 4, 8, 8)
    booleans = [name for name, form in program.forms.items() if form.dtype == torch.bool and len(form.shape) > 1]
    assert not [name for name in booleans if program.forms[name].shape[-2:] == (8, 8)]


LENGTH = 131_072


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.sampled(1)
def test_a_step_over_131072_positions_holds_nothing_of_their_square(padded: bool):
    """A window, of which a mask would take 16 GiB; or a padded batch under a causal mask, 32 GiB, and as much as 64
    when it is added to scores of bfloat16."""
    sizes = SIZES | {"num_hidden_layers": 2, "hidden_size": 512, "num_attention_heads": 4, "head_dim": 128}
    with torch.device("meta"):
        config = MistralConfig(**sizes, sliding_window=None if padded else 4096, max_position_embeddings=LENGTH)
        model = MistralForCausalLM(config).bfloat16()
        ids = torch.zeros(2, LENGTH, dtype=torch.int64)
    call: dict[str, Any] = {"input_ids": ids, "labels": ids, "use_cache": False}
    call |= {"attention_mask": torch.ones_like(ids)} if padded else {}
    plan = sw.plan(model, (), 2, kwargs=call, mesh=sw.Mesh(dp=2), search="sharding_propagation")
    program = program_on(1, model, plan, (), **call)
    calls = attended(program)
    assert len(calls) == 2 * 32
    keys = [program.forms[each.operands[1]].shape for each in calls]
    assert {(batch, heads, width) for batch, heads, _, width in keys} == {(1, 2, 128)}
    assert max(length for *_, length, _ in keys) == (LENGTH if padded else 8191)
    assert max(prod(form.shape) for form in program.forms.values()) <= LENGTH * (4096 if padded else 512)
    kept = [program.forms[name].shape for name in program.saved]
    assert not [shape for shape in kept if len(shape) > 1 and min(shape[-2:]) >= 4096], "masks are made again"


BATCH, PASS = 4, 2


@pytest.mark.filterwarnings("error::shardwise.errors.UnsplitWarning")
@pytest.mark.parametrize(
    ("build", "config", "split"),
    [
        (LlamaForCausalLM, LLAMA, "b@dp g@tp"),
        pytest.param(MixtralForCausalLM, MIXTRAL, "b@dp g@tp", marks=pytest.mark.long),
        pytest.param(GPT2LMHeadModel, GPT2, "b@dp h@tp", marks=pytest.mark.long),
        pytest.param(T5ForConditionalGeneration, T5, "b@dp h@tp", marks=pytest.mark.long),
    ],
)
def test_a_pass_has_the_attention_of_the_model_and_splits_it_by_batch_and_heads(
    monkeypatch: pytest.MonkeyPatch, build: Any, config: Any, split: str
):
    monkeypatch.setattr(F, "scaled_dot_product_attention", sw.shard(F.scaled_dot_product_attention, split))
    torch.manual_seed(0)
    model = build(config).eval()
    ids = torch.randint(0, 50, (BATCH, 8))
    call: dict[str, Any] = {"input_ids": ids, "labels": ids, "use_cache": False}
    if isinstance(model, T5ForConditionalGeneration):
        call["decoder_input_ids"] = ids.roll(1, 1)  # the model's own shift of labels needs them all at once

    def captured(size: int) -> Graph:
        of_pass = {name: given[:size] if isinstance(given, Tensor) else given for name, given in call.items()}
        return capture(model, (), of_pass).graph

    whole = captured(BATCH)
    of_pass = Passes.of(whole, PASS, captured).graphs[PASS]
    expected, found = ([op for op in graph.ops if "attention" in str(op.target)] for graph in (whole, of_pass))
    assert [(op.name, op.target) for op in found] == [(op.name, op.target) for op in expected]
    assert all(rule_of(op, of_pass) for op in found)
    plan = sw.plan(
        model, (), 4, kwargs=call, mesh=sw.Mesh(dp=2, tp=2), search="sharding_propagation", global_batch=BATCH,
        micro_batch=PASS,
    )  # fmt: skip
    assert plan.micro_batches == BATCH // PASS
    assert {str(plan.strategies[op.name]) for op in found} == {split}
    prove(model, (), plan, kwargs=call, steps=1)
