"""What depends on no input is made once: which calls are left in a step, what is kept, and what its memory is."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import shardwise as sw
from models import tiny_models
from models.tiny_models import TinyModel, token_inputs
from runtime.constant_models import batch, turning
from shardwise.costs.memory import memory_of_program
from shardwise.graph.capture import capture
from shardwise.graph.written_out import SEED
from shardwise.plans.bind import program_of
from shardwise.plans.price_scope import prices_of
from shardwise.programs import hoist_constants
from shardwise.programs.differentiate import differentiate
from shardwise.programs.hoist_constants import HoistedProgram, constant_values, with_constants_apart
from shardwise.programs.instructions import sent_by
from shardwise.programs.invariants import check_program
from shardwise.programs.program import localize
from shardwise.programs.rank_program import RankProgram
from shardwise.programs.vjp import VjpCache
from shardwise.runtime.emit import emit

pytestmark = pytest.mark.filterwarnings("ignore")  # what transformers prints on the way


def bloom() -> nn.Module:
    from transformers import BloomConfig, BloomForCausalLM

    return BloomForCausalLM(BloomConfig(vocab_size=50, hidden_size=32, n_layer=3, n_head=4, use_cache=False))


def t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"vocab_size": 50, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
    return T5ForConditionalGeneration(T5Config(**sizes, use_cache=False, decoder_start_token_id=0, pad_token_id=0))


# Name -> (model, the constants that a step is given).
MODELS: dict[str, tuple[Callable[[], TinyModel], int]] = {
    "gpt2": (tiny_models.gpt2, 2),  # positions and, since there is dropout, a mask
    "llama": (tiny_models.llama, 2),  # cosines and sines
    "bert": (tiny_models.bert, 2),  # positions, types of tokens
    "bloom": (lambda: TinyModel(bloom, token_inputs, {}), 2),  # ALiBi and a mask
    "t5": (lambda: TinyModel(t5, token_inputs, {}), 6),  # two tables of distances, two masks, start tokens, zeros
}


def programs(
    model: nn.Module, args: Any, inputs: dict[str, Any], num_ranks: int = 2, **choices: Any
) -> list[RankProgram]:
    with warnings.catch_warnings(action="ignore"):
        plan = sw.plan(model, args, num_ranks, kwargs=inputs, **choices)
    spmd, vjp_cache = program_of(plan, capture(model, args, inputs).graph), VjpCache()
    return [differentiate(localize(spmd, rank), vjp_cache) for rank in range(num_ranks)]


@cache
def of_tiny(name: str) -> list[RankProgram]:
    tiny = MODELS[name][0]()
    torch.manual_seed(0)
    return programs(tiny.build(), (), tiny.inputs(8), mesh=sw.Mesh(dp=2), mode="data_parallel")


def left(program: RankProgram) -> list[str]:
    """The instructions of forward that read nothing but what is the same in every step."""
    fixed = {*hoist_constants.fixed_sources(program.spmd), *program.given}
    found = []
    for one in program.forward:
        if fixed.issuperset(one.operands) and not sent_by(one):
            fixed.update(one.results)
            found.append(one.origin.op)
    return found


def checked(program: RankProgram) -> HoistedProgram:
    divided = with_constants_apart(program)
    check_program(divided.constants), check_program(divided.step)
    assert set(divided.constants.delivered) == set(divided.step.given)
    return divided


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.sampled(1)
def test_no_chain_of_constants_is_left_in_a_step_which_is_equal_bit_for_bit(name: str) -> None:
    tiny = MODELS[name][0]()
    torch.manual_seed(0)
    model, inputs = tiny.build(), tiny.inputs(4)
    (program,) = programs(model, (), inputs, 1, mesh=sw.Mesh(dp=1))
    divided = checked(program)
    assert len(left(program)) >= 3, "there was something to make once"
    assert left(divided.step) == []
    assert len(divided.step.given) == MODELS[name][1], divided.step.given
    assert len(divided.step.forward) == len(program.forward) - len(left(program))
    assert len(divided.step.backward) == len(program.backward)

    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    made = capture(model, (), inputs).constants
    tensors = []
    for source in program.spmd.graph.sources:
        key = source.names[0]
        held = inputs[key.split("'")[1]] if source.kind == "input" else state.get(key, made.get(source.value))
        tensors.append(torch.tensor(5) if held is None else held.detach())  # the seed
    whole, given = run(program, tensors), run(divided.constants, tensors)
    step = run(divided.step, [*tensors, *given])
    assert len(whole) > 20
    assert all(torch.equal(a, b) for a, b in zip(whole, step, strict=True))
    again = run(divided.step, [*tensors, *given])
    assert all(torch.equal(a, b) for a, b in zip(whole, again, strict=True)), "a step changed what is kept"


def run(program: RankProgram, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """What a program of one device delivers, and its gradients."""
    nowhere: Any = None
    emitted = emit(program, nowhere, device=torch.device("cpu"))
    with torch.no_grad():
        delivered, _, saved = emitted.forward.forward(*tensors)
        ones = [torch.ones_like(x) for x, name in zip(delivered, program.cotangents, strict=True) if name]
        return [*delivered, *emitted.backward.forward(list(saved), *ones)]


def test_what_is_larger_than_its_share_is_made_in_every_step() -> None:
    (program, _) = of_tiny("llama")
    tables = checked(program).step
    with mock.patch.object(hoist_constants, "SHARE", 0.0):
        assert checked(program).step is program
    whole = sum(program.forms[source].num_bytes for source in program.spmd.graph.source_of)
    with mock.patch.object(hoist_constants, "SHARE", 1.5 * tables.forms[tables.given[0]].num_bytes / whole):
        one = checked(program).step  # there is room for one of the two tables, and less than for both
    assert len(one.given) < len(tables.given) or set(one.given) != set(tables.given)
    assert left(one), "the other one is made in the step"


def test_a_second_layer_keeps_nothing_more() -> None:
    """Every layer of this model makes tables of its own."""
    few, many = (
        checked(programs(turning(layers=n), (batch(),), {}, mesh=sw.Mesh(dp=2), mode="data_parallel")[0])
        for n in (2, 6)
    )
    assert len(few.step.given) == len(many.step.given)
    assert len(few.constants.forward) == len(many.constants.forward)


def test_what_is_written_random_or_returned_is_no_constant() -> None:
    (program, _) = programs(turning(dropout=0.25), (batch(),), {}, mesh=sw.Mesh(dp=2), mode="data_parallel")
    graph = program.spmd.graph
    values = constant_values(program.spmd)
    written = {buffer for buffer, _ in program.spmd.mutations}
    assert [graph.source_of[name].names for name in written] == [("calls",)]
    made = [op for op in graph.ops if (written | {SEED}).intersection(op.operands)]
    assert len(made) >= 3, "a counter, and dropout in two layers"
    assert not values.intersection(name for op in made for name in op.results)
    whole = differentiate(localize(program.spmd, 0), VjpCache(), loss_only=False)
    divided = checked(whole)
    returned = set(whole.delivered)
    assert returned & values, "positions and a table are returned"
    assert not returned.intersection(divided.step.given)


class Returning(nn.Module):
    """Returns what operators make of positions whose schemas do not say that their results may be views."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("room", torch.zeros(10_000))

    def forward(self, x: torch.Tensor) -> Any:
        a, b, c, d = (torch.arange(8) * n for n in (2.0, 3.0, 5.0, 7.0))
        returned = torch.atleast_1d(a), torch.cartesian_prod(b), torch.einsum("i->i", c)
        return (self.linear(x) * a + x * b + x / c + d.sin()).mean(), *returned


def test_what_is_returned_has_no_memory_that_is_kept() -> None:
    model, x = Returning(), torch.ones(4, 8)
    (of_loss,) = programs(model, (x,), {}, 1, mesh=sw.Mesh(dp=1))
    program = differentiate(localize(of_loss.spmd, 0), VjpCache(), loss_only=False)
    divided = checked(program)
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    tensors = [state.get(source.names[0], x).detach() for source in program.spmd.graph.sources]
    given = run(divided.constants, tensors)
    assert given, "the sine is kept"
    first = run(divided.step, [*tensors, *given])
    again = [value.clone() for value in first]
    for returned in first[: len(divided.step.delivered)]:
        returned.zero_()  # who called may do that
    assert len(divided.step.delivered) == 4
    assert all(torch.equal(a, b) for a, b in zip(again, run(divided.step, [*tensors, *given]), strict=True))


def test_constants_that_are_made_again_in_backward_are_kept() -> None:
    (program, _) = of_tiny("llama")
    ops = frozenset(op.name for op in program.spmd.graph.ops)
    lifetimes = replace(program.spmd.lifetimes, operators=ops)
    again = differentiate(localize(replace(program.spmd, lifetimes=lifetimes), 0), VjpCache())
    divided = checked(again)
    names = {name for one in divided.step.backward if one.origin.again for name in one.results}
    assert len([n for one in again.backward if one.origin.again for n in one.results]) > len(names)
    assert not {f"{name}^" for name in divided.constants.delivered} & names


def test_kept_values_are_counted_once_and_for_good() -> None:
    tiny = tiny_models.llama()
    model, inputs = tiny.build(), tiny.inputs(8)
    plan = sw.plan(model, (), 2, kwargs=inputs, mesh=sw.Mesh(dp=2), mode="data_parallel")
    spmd = program_of(plan, capture(model, (), inputs).graph)
    program = differentiate(localize(spmd, 1), VjpCache())
    divided = checked(program)
    own = sum(divided.step.forms[name].num_bytes for name in divided.step.given)
    memory = memory_of_program(program, prices_of(plan))
    sources = sum(program.forms[s.value].num_bytes for s in spmd.graph.sources if s.kind != "parameter")
    assert own > 0
    assert memory.peak_of["update"].parts["inputs"] == sources + own
