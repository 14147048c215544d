"""Compiled programs: equal layers are compiled once, what is kept for backward, and results on one rank and on two.

No code is generated here, which takes long (``compiled.interpreted``); ``test_transit`` has a case with Inductor.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

import shardwise as sw
from launch.gloo_ranks import RunRanks
from raising import raises
from runtime.interpreted import interpret_section
from runtime.small_gpt import example_module
from runtime.training import Trained, check_close, train
from shardwise.graph.capture import capture
from shardwise.plans.bind import program_of
from shardwise.programs.compile_regions import SectionIndex, divide, kind_of
from shardwise.programs.differentiate import differentiate
from shardwise.programs.instructions import sent_by
from shardwise.programs.program import localize
from shardwise.programs.rank_program import RankProgram
from shardwise.programs.vjp import VjpCache
from shardwise.runtime import compiled
from shardwise.runtime.compiled import CompiledVariant, compiled_program, with_every_cotangent
from shardwise.runtime.emit import emit
from shardwise.runtime.step import CallableStep

CPU = torch.device("cpu")
IDS, LABELS = torch.randint(0, 50, (2, 4, 8), generator=torch.Generator().manual_seed(1))


def make_gpt(layers: int) -> nn.Module:
    gpt = example_module("gpt")
    torch.manual_seed(0)
    model: nn.Module = gpt.GPT(gpt.GPTConfig(vocab=50, layers=layers, heads=2, width=24, context=8, tied=True)).double()
    return model


class Masked(nn.Module):
    """Layers that each make the same mask, a tied table, two outputs, one of which is a view of what backward needs,
    and a running mean."""

    def __init__(self, layers: int = 4, width: int = 16) -> None:
        super().__init__()
        self.table = nn.Embedding(50, width)
        self.first, self.second = (nn.ModuleList(nn.Linear(width, width) for _ in range(layers)) for _ in range(2))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(layers))
        self.last = nn.BatchNorm1d(8)

    def forward(self, ids: Tensor, keep: Tensor) -> tuple[Tensor, Tensor]:
        x = self.table(ids)
        for norm, first, second in zip(self.norms, self.first, self.second, strict=True):
            h = norm(x)
            scores = first(h) @ h.transpose(1, 2)
            mask = torch.zeros(keep.shape, dtype=x.dtype).masked_fill(~keep, -1e9)[:, None, :] * 0.5
            x = x + torch.tanh(second(F.softmax(scores + mask, -1) @ h))
        x = self.last(x)
        return (x @ self.table.weight.t()).square().mean(), x.flatten(0, 1)


def written(model: nn.Module, args: Sequence[Tensor], loss: Any = None) -> tuple[RankProgram, list[Tensor]]:
    """The step on one device, and the tensors of its sources."""
    plan = sw.plan(model, tuple(args), 1, mesh=sw.Mesh(dp=1), search="sharding_propagation", loss=loss)
    captured = capture(model, tuple(args), {}, loss=loss)
    program = differentiate(localize(program_of(plan, captured.graph), rank=0), VjpCache(), loss_only=False)
    inputs = iter(args)
    tensors = []
    for source in captured.graph.sources:
        if source.kind == "constant":
            tensors.append(captured.constants[source.value])
        elif source.kind == "input":
            tensors.append(next(inputs))
        else:
            owner, _, leaf = source.names[0].rpartition(".")
            tensors.append(getattr(model.get_submodule(owner), leaf))
    return program, tensors


def step_of(program: RankProgram, *, compile: bool) -> CallableStep:
    nowhere: Any = None  # one device sends nothing
    if compile:
        program = compiled_program(program, nowhere, CPU, generate=interpret_section)
    emitted = emit(program, nowhere, device=CPU)
    variant = lambda given: emit(with_every_cotangent(program, given, program.gradients), nowhere, device=CPU)  # noqa: E731
    return CallableStep(emitted, variant, lambda: emitted)


def gradients(outputs: Sequence[Tensor], tensors: Sequence[Tensor]) -> list[Tensor | None]:
    wanted = [t for t in tensors if t.requires_grad]
    return list(torch.autograd.grad(outputs, wanted, [torch.ones_like(o) for o in outputs], allow_unused=True))


@contextmanager
def keeping(known: Sequence[Tensor]) -> Iterator[dict[int, int]]:
    """Bytes that autograd keeps, by their place in memory; those of ``known`` tensors are not counted."""
    places = {tensor.untyped_storage().data_ptr() for tensor in known}
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in places:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield kept


def inside(_: Any) -> bool:
    return True


def test_equal_layers_are_one_kind_and_are_found_where_one_value_is_alive() -> None:
    layers = 5
    program, _ = written(make_gpt(layers), (IDS, LABELS))
    divided = divide(program, inside)
    kinds = [kind_of(region, divided.program) for region in divided.regions]
    assert len(divided.regions) == layers + 2
    assert len(set(kinds)) == 3, "ahead of the layers, a layer, behind them"
    for region in divided.regions[1:-1]:
        assert len(region.outputs) == 1
    assert all(isinstance(item, SectionIndex) for item in (*divided.forward, *divided.backward))


def test_two_layers_are_not_divided_and_different_ones_are_not_mixed_up() -> None:
    program, _ = written(make_gpt(2), (IDS, LABELS))
    assert len(divide(program, inside).regions) == 1
    model = make_gpt(4)
    blocks: Any = model.blocks
    for norm in (m for m in blocks[2].modules() if isinstance(m, nn.LayerNorm)):
        norm.eps = 1e-3
    divided = divide(written(model, (IDS, LABELS))[0], inside)
    kinds = [kind_of(region, divided.program) for region in divided.regions]
    assert len(divided.regions) == 1 or len(set(kinds)) > 3


@pytest.mark.parametrize("model", ["gpt", "masked"])
@pytest.mark.sampled(1)
def test_a_compiled_step_computes_what_the_program_computes(model: str) -> None:
    """The same kernels of float64 with sums in another order: 1e-12 of the largest."""
    torch.manual_seed(0)
    if model == "gpt":
        net, args = make_gpt(4), (IDS, LABELS)
    else:
        net, args = Masked().double(), (IDS, torch.arange(8).expand(4, 8) < torch.tensor([[3], [8], [5], [7]]))
    program, tensors = written(net, args)
    plain, made = step_of(program, compile=False), step_of(program, compile=True)
    (want, want_written), (found, found_written) = plain(tensors), made(tensors)
    torch.testing.assert_close(found, want, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(found_written, want_written, rtol=1e-12, atol=1e-13)
    for chosen in ([0], [1], [0, 1]):
        if max(chosen) < len(want):  # a cotangent that is not given counts as zeros
            pairs = zip(
                gradients([made(tensors)[0][i] for i in chosen], tensors),
                gradients([plain(tensors)[0][i] for i in chosen], tensors),
                strict=True,
            )
            for have, expected in pairs:
                assert have is not None
                expected = torch.zeros_like(have) if expected is None else expected
                torch.testing.assert_close(have, expected, rtol=1e-11, atol=1e-12)
    loss = made(tensors)[0][0]
    first = gradients_twice(loss, tensors)
    torch.testing.assert_close(first[0], first[1], rtol=0, atol=0)
    with raises(sw.ShardwiseError, "differentiated already"):
        loss.backward()


def gradients_twice(loss: Tensor, tensors: Sequence[Tensor]) -> list[list[Tensor | None]]:
    wanted = [t for t in tensors if t.requires_grad]
    return [list(torch.autograd.grad(loss, wanted, retain_graph=i == 0, allow_unused=True)) for i in range(2)]


def test_a_mask_that_every_layer_makes_is_kept_once() -> None:
    keep = torch.arange(8).expand(4, 8) < torch.tensor([[3], [8], [5], [7]])
    program, _ = written(Masked().double(), (IDS, keep))
    divided = divide(program, inside)
    fills = [i for i in divided.program.forward if "masked_fill" in str(getattr(i, "target", ""))]
    assert len([i for i in program.forward if "masked_fill" in str(getattr(i, "target", ""))]) == 4
    assert len(fills) == 1


def test_a_compiled_step_keeps_no_more_than_torch_compile_of_the_model() -> None:
    """Kept between forward and backward, parameters, buffers and inputs aside: 0.2 % are for what is kept at the edge
    of the layers, where the whole graph has none."""
    model = make_gpt(3)
    program, tensors = written(model, (IDS, LABELS))
    step = step_of(program, compile=True)
    known = [*tensors, IDS, LABELS]
    with keeping(known) as ours:
        step(tensors)
    torch._dynamo.reset()
    reference = torch.compile(model, backend="aot_eager_decomp_partition")
    reference(IDS, LABELS)
    with keeping(known) as theirs:
        reference(IDS, LABELS)
    assert 0 < sum(ours.values()) <= 1.002 * sum(theirs.values())


def test_operands_are_let_go_while_a_section_runs() -> None:
    """A section gets a list and nobody else holds what is in it."""
    program, tensors = written(make_gpt(3), (IDS, LABELS))
    counts: list[int] = []

    def watching(module: fx.GraphModule, operands: Sequence[Tensor], fixed: Sequence[int]) -> Any:
        function, strides = interpret_section(module, operands, fixed)

        def run(given: list[Tensor]) -> Any:
            counts.append(min(sys.getrefcount(tensor) for tensor in given))
            return function(given)

        return run, strides

    nowhere: Any = None
    made = compiled_program(program, nowhere, CPU, generate=watching)
    emitted = emit(made, nowhere, device=CPU)
    results = CallableStep(emitted, lambda given: emitted, lambda: emitted)(tensors)
    counts.clear()
    results[0][0].backward()
    # The list, the loop variable, the argument of getrefcount; autograd holds the first section's cotangent.
    assert max(counts[1:-1]) <= 3, counts


ON_TWO_RANKS: dict[str, dict[str, Any]] = {
    "data parallel": {"mesh": sw.Mesh(dp=2)},
    "tensor parallel": {
        "mesh": sw.Mesh(tp=2),
        "strategies": {"blocks.*.attention.qkv": "n@tp", "blocks.*.mlp.up": "n@tp"},
    },
}


def on_two_ranks(name: str) -> tuple[list[Trained], list[list[str]], int, int]:
    """(eager and compiled training, the messages of both, the functions of a compiled program, its sections)"""
    compiled.compile_with_inductor = interpret_section
    plan = sw.plan(make_gpt(3), (IDS, LABELS), 2, search="sharding_propagation", **ON_TWO_RANKS[name])
    results = []
    for choice in (False, True):
        par = sw.parallelize(make_gpt(3), plan, compile=choice)
        results.append(train(par, [(IDS, LABELS)] * 2, torch.optim.SGD(par.parameters(), lr=0.1)))
        if name == "data parallel":
            with torch.no_grad():
                results[-1].losses.append(par(IDS, LABELS).item())
        step = par.compiled[0].step  # the one that trained
    assert step.compiling is not None
    assert step.compiling.variant is not None
    program = step.compiling.variant.emitted.program
    lists = [
        [str(sent_by(i)) for i in (*one.forward, *one.backward) if sent_by(i)]
        for one in (par.compiled[0].step.emitted.program, program)
    ]
    functions = {id(i.target) for i in (*program.forward, *program.backward) if hasattr(i, "target")}
    sections = sum(hasattr(i, "target") for i in (*program.forward, *program.backward))
    return results, lists, len(functions), sections


@pytest.mark.parametrize("name", ON_TWO_RANKS)
@pytest.mark.sampled(1)
def test_messages_keep_their_order_and_results_on_two_ranks(name: str, run_ranks: RunRanks) -> None:
    for (eager, compiled_ones), (listed, made), functions, sections in run_ranks(on_two_ranks, 2, name):
        assert compiled_ones.losses == pytest.approx(eager.losses, rel=1e-12)
        check_close(compiled_ones.state, eager.state, rtol=1e-11, atol=1e-13, what="compiled")
        assert made == listed
        assert functions < sections, "layers share their sections"


def where_rank_1_cannot_compile() -> list[tuple[bool, int, float]]:
    """Per way to train: whether steps were compiled, the warnings, the largest difference to an eager module."""
    rank, found = torch.distributed.get_rank(), []

    def fails(*_: Any) -> Any:
        raise RuntimeError("no compiler\nat all")

    sections: list[fx.GraphModule] = []

    def interpreted(module: fx.GraphModule, operands: Sequence[Tensor], fixed: Sequence[int]) -> Any:
        sections.append(module)
        return interpret_section(module, operands, fixed)

    compiled.compile_with_inductor = fails if rank == 1 else interpreted
    sizes: dict[str, Any] = {"mode": "data_parallel", "global_batch": 4, "micro_batch": 2}
    split = {"strategies": {"blocks.*.mlp.up": "n@tp"}, "mesh": sw.Mesh(tp=2)}
    for options in (split, sizes | {"mesh": sw.Mesh(dp=2)}):
        plan = sw.plan(make_gpt(1), (IDS, LABELS), 2, **options)
        pair = [sw.parallelize(make_gpt(1), plan, compile=choice) for choice in ("auto", False)]
        with warnings.catch_warnings(record=True, action="always") as caught:
            results, of_steps = [], 0
            for par in pair:
                sections.clear()
                losses = [par.step(IDS, LABELS), par.step(IDS, LABELS)]
                of_steps += len(sections)
                with torch.no_grad():
                    losses.append(par.eval()(IDS, LABELS))
                results.append([*losses, *(p.grad for p in par.parameters())])
        what = "runs eager on rank 1, since it does not compile: RuntimeError: no compiler; "
        says = sum(what in str(w.message) for w in caught)
        worst = max(float((a - b).detach().abs().max()) for a, b in zip(*results, strict=True))
        found.append((of_steps > 0, says, worst))
    with raises(sw.ShardwiseError, "False", '"auto"'):
        sw.parallelize(make_gpt(1), plan, compile="always")  # type: ignore[arg-type]
    with raises(RuntimeError, "at all"):
        CompiledVariant(fails, falls_back=False, ranks=pair[0]._ranks).get()
    return found


def test_a_rank_on_which_a_step_does_not_compile_runs_it_eager_and_says_why(run_ranks: RunRanks) -> None:
    for rank, found in enumerate(run_ranks(where_rank_1_cannot_compile, 2)):
        for is_compiled, says, worst in found:
            assert is_compiled == (rank == 0)
            assert (says > 0) == (rank == 1)
            assert worst < 1e-11


def within_torch_compile() -> list[float]:
    """On a rank: a torch.compile of the user's own around the module, and around a step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)).double()
    x = torch.randn(4, 8, dtype=torch.float64)
    strategies = {"0": "n@tp", "2": "k@tp"}
    plan = sw.plan(model, (x,), 2, mesh=sw.Mesh(tp=2), strategies=strategies, loss=lambda y: y.square().mean())
    par = sw.parallelize(model, plan, loss=lambda y: y.square().mean())
    around = torch.compile(par, backend="aot_eager")
    step = torch.compile(lambda x: par.step(x) * 2, backend="aot_eager")
    around(x).backward()
    want = model(x).square().mean()
    want.backward()
    assert model[0].weight.grad is not None
    own = model[0].weight.grad.chunk(2)[torch.distributed.get_rank()]
    errors = [float((par.get_submodule("0").weight.grad - own).abs().max())]  # type: ignore[union-attr, operator]
    errors.append(abs(float(step(x)) - 2 * want.item()))
    errors.append(float((torch.compile(par.predict, backend="aot_eager")(x) - model(x)).detach().abs().max()))
    return errors


def test_a_torch_compile_around_the_module_leaves_its_programs_alone(run_ranks: RunRanks) -> None:
    for errors in run_ranks(within_torch_compile, 2):
        assert max(errors) < 1e-13  # sums of 16 float64 in another order


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what Inductor imports
def test_sections_are_no_cuda_graphs_even_where_the_user_has_them_on() -> None:
    """A graph replays the addresses it was recorded with; the operands of a section have new ones in every step."""
    from torch._inductor import compile_fx
    from torch._inductor import config as inductor_config

    with FakeTensorMode():
        operand = torch.ones(3)
    graph = fx.Graph()
    graph.output((graph.call_function(torch.ops.aten.relu.default, (graph.placeholder("x"),)),))
    with inductor_config.patch("triton.cudagraphs", True), mock.patch.object(compile_fx, "compile_fx_inner") as inner:
        compiled.compile_with_inductor(fx.GraphModule(nn.Module(), graph), [operand], [0])
    assert not inner.call_args.kwargs["cudagraphs"]
