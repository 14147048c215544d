"""Parts of a graph, executed one after another, are the graph: outputs, every gradient, buffers."""

from __future__ import annotations

import random
from collections import Counter

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from graph.against_eager import data_of
from graph.parts import carriers, check_parts, cut_graph, random_cut
from models import zoo_own, zoo_transformers
from models.tiny_models import TinyModel, bert, gpt2, llama, resnet
from programs.building import STEPS, WINDOWED, random_program
from raising import raises
from shardwise.errors import PlanError
from shardwise.graph.capture import Capture, capture
from shardwise.graph.cut import GraphCut, cut_apart
from shardwise.graph.ir import Graph
from shardwise.graph.to_float64 import to_float64

MODELS = {
    "gpt2": gpt2(),
    "llama": llama(),
    "bert": bert(),
    "resnet": resnet(),
    "t5": zoo_transformers.t5(),
    "dlrm": zoo_own.OWN["dlrm"],
    "unet": zoo_own.OWN["unet"],
}


def captured_model(tiny: TinyModel) -> tuple[Graph, dict[str, Tensor]]:
    """A model in train mode, with its dropout, in float64."""
    torch.manual_seed(0)
    module, inputs = tiny.build().train(), tiny.inputs(4)
    captured = capture(module, (), inputs)
    data = data_of(captured, module, (), inputs, seed=3)
    wide = {n: t.detach().double() if t.is_floating_point() else t.detach() for n, t in data.items()}
    return to_float64(captured.graph), wide


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.sampled(1)
def test_a_model_in_parts_is_the_model(name: str) -> None:
    graph, data = captured_model(MODELS[name])
    rng = random.Random(name)
    for num_parts in (1, 2, 3, 4, 7, 12):
        check_parts(random_cut(graph, rng, num_parts), graph, data)


@pytest.mark.parametrize("block", range(5))
def test_random_programs_in_random_parts_are_the_programs(block: int) -> None:
    features: Counter[str] = Counter()
    for seed in range(block * 60, (block + 1) * 60):
        program = random_program(seed, STEPS if seed % 2 else WINDOWED + STEPS)
        rng = random.Random(seed)
        found = random_cut(program.graph, rng, rng.randint(2, 6))
        check_parts(found, program.graph, program.sources)
        types = [program.graph.by_name[crossing.value] for crossing in found.crossings]
        features["several"] += any(len(found.sends(part)) > 1 for part in range(len(found.parts)))
        features["carried"] += any(map(carriers, found.crossings))
        features["shared"] += bool(found.shared)
        features["without gradient"] += any(not value.requires_grad for value in types)
        features["early output"] += any(part < len(found.parts) - 1 for _, part in found.output_parts)
    assert all(features[name] > 10 for name in ("several", "carried", "shared", "early output")), features


class Stages(nn.Module):
    """What parts have to do with one another, in one model."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("scale", torch.ones(6))

    def forward(self, x: Tensor, keep: Tensor) -> tuple[Tensor, ...]:
        self.calls += 1
        positions = torch.arange(6) * self.scale
        h = self.first(x + positions)
        chosen = h > 0
        ranks = h.argsort(-1)
        old = self.mean.clone()
        self.mean.mul_(0.9).add_(0.1 * h.detach().mean(0))
        h = F.dropout(torch.tanh(h), 0.5)
        middle = self.second(h) + positions
        other = self.first(middle).gather(-1, ranks)
        last = torch.where(chosen & keep, middle, other) + old + self.calls
        return (last * h).sum(), h, chosen


def stages() -> tuple[Capture, dict[str, Tensor]]:
    torch.manual_seed(0)
    module = Stages().double()
    x = torch.randn(4, 6, dtype=torch.float64), torch.rand(4, 6) < 0.7
    captured = capture(module, x)
    return captured, data_of(captured, module, x, {}, seed=1)


def named(graph: Graph, target: str, index: int = 0) -> str:
    return [op.name for op in graph.ops if str(op.target).startswith(target)][index]


def test_what_parts_receive_repeat_share_and_rewrite() -> None:
    captured, data = stages()
    graph = captured.graph
    found = cut_graph(graph, [named(graph, "aten.linear", 1), named(graph, "aten.linear", 2)])
    check_parts(found, graph, data)
    first, second, third = found.parts
    kinds = {s.value: graph.by_name[s.value].dtype for s in third.sources if s.kind == "activation"}
    assert {torch.bool, torch.int64, torch.float64} == set(kinds.values())  # the mask, the order of ranks, values
    skipping = {crossing.value for crossing in found.crossings if carriers(crossing)}
    assert {graph.by_name[name].dtype for name in skipping} == {torch.bool, torch.int64, torch.float64}
    assert skipping <= set(found.sends(0)) & set(found.sends(1))
    # Old running means are sent to the part that reads them; the part that computes the new ones keeps the buffer.
    assert first.source_of["mean"].kind == "buffer"
    assert third.source_of["mean"].kind == "activation"
    assert [buffer for buffer, _ in first.mutations if buffer == "mean"] == ["mean"]
    assert "mean" not in dict(second.mutations) | dict(third.mutations)
    # Counters and positions are repeated where they are used, and a repeated counter counts wherever it is held.
    assert "calls" in dict(third.mutations)
    assert third.source_of["calls"].kind == "buffer"
    assert {str(graph.op_by_name[name].target) for name in found.repeated} >= {
        "aten.arange.start_step"
    } or found.repeated
    assert found.shared["first.weight"] == (0, 2)
    assert dict(found.output_parts)[graph.loss or ""] == 2
    assert (first.loss, second.loss, third.loss) == (None, None, graph.loss)
    assert third.cotangents == ()
    assert first.updated == {"first.weight", "first.bias"}
    assert second.updated == {"second.weight", "second.bias"}


def test_the_seed_is_a_source_of_every_part_that_draws() -> None:
    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            noise = torch.rand(4)
            for layer in self.layers:
                x = F.dropout(layer(x) + noise, 0.5)
            return x.square().mean()

    module, x = Noisy().double(), torch.randn(3, 4, dtype=torch.float64)
    captured = capture(module, (x,))
    graph = captured.graph
    found = cut_graph(graph, ["layers.1/linear", "layers.2/linear"])
    check_parts(found, graph, data_of(captured, module, (x,), {}, seed=5))
    assert [part.source_of["_shardwise_seed"].kind for part in found.parts] == ["buffer"] * 3
    assert any("uniform" in str(graph.op_by_name[name].target) for name in found.repeated)
    assert all(graph.by_name[crossing.value].requires_grad for crossing in found.crossings)  # no noise is sent


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(3, 3), nn.Linear(3, 3)
        self.register_buffer("mean", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        y = self.down(torch.tanh(self.up(x - self.mean)))
        self.mean.mul_(0.9).add_(0.1 * y.detach().mean(0))
        return y.sum()


def test_errors_name_operators_parts_and_the_mend() -> None:
    graph = capture(Counts(), (torch.ones(2, 3),)).graph
    names = [op.name for op in graph.ops]
    with raises(PlanError, "'down/linea'", "down/linear"):
        cut_apart(graph, [["down/linea"]])
    with raises(PlanError, "part 1 of 3", "no operators"):
        cut_graph(graph, ["up/linear", "up/linear"])
    with raises(PlanError, "part 0 of 2", "no operators"):
        cut_graph(graph, names[:1])
    with raises(PlanError, 0, 1, op="/sub", source="test_cut.py"):
        cut_graph(graph, ["down/linear"])
    with raises(PlanError, "down/linear", "parts 0 and 1"):
        cut_apart(graph, [names, ["down/linear"]])
    with raises(PlanError, "down/linear", "part 0", "named twice"):
        cut_apart(graph, [[*names, "down/linear"]])
    with raises(PlanError, f"2 of {len(names)}", f"{names[-2]}, {names[-1]}"):
        cut_apart(graph, [names[:-2]])


def test_parts_out_of_order_name_both_operators() -> None:
    layers = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Tanh(), nn.Linear(3, 3, bias=False))
    graph = capture(layers, (torch.ones(2, 3),)).graph
    with raises(PlanError, 0, "tanh", "1/tanh", 1, op="2/linear"):
        cut_apart(graph, [["0/linear", "2/linear"], ["1/tanh"]])


def test_a_part_is_not_cut_again() -> None:
    graph = captured_model(gpt2())[0]
    part = random_cut(graph, random.Random(0), 2).parts[1]
    with raises(PlanError, "add_9", "activation"):
        cut_graph(part, [])


def test_a_part_of_repeated_operators_only_is_refused() -> None:
    class Positions(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x + torch.arange(3) * 2).sum()

    graph = capture(Positions(), (torch.ones(3, requires_grad=True),)).graph
    add = named(graph, "aten.add")
    with raises(PlanError, "part 0 of 2", "/arange, /mul", "no parameter"):
        cut_graph(graph, [add])


def test_parts_of_modules_that_do_not_follow_one_another() -> None:
    """Both towers before what joins them: parts are sets of operators, not ranges."""

    class Towers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right, self.top = (nn.Linear(3, n, bias=False) for n in (3, 3, 1))

        def forward(self, x: Tensor) -> Tensor:
            left, right = self.left(x), self.right(x)
            left, right = torch.tanh(left), torch.sigmoid(right)
            return self.top(left * right).sum()

    module, x = Towers().double(), torch.randn(4, 3, dtype=torch.float64)
    captured = capture(module, (x,))
    left = ["left/linear", "/tanh"]
    right = ["right/linear", "/sigmoid"]
    rest = [op.name for op in captured.graph.ops if op.name not in (*left, *right)]
    found: GraphCut = cut_apart(captured.graph, [left, right, rest])
    check_parts(found, captured.graph, data_of(captured, module, (x,), {}))
    (carried,) = [crossing for crossing in found.crossings if carriers(crossing)]
    assert (carried.value, carried.maker, carried.users, carriers(carried)) == ("tanh", 0, (2,), (1,))
