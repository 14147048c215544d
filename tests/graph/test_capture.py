"""What a graph says about a module: sources, names, lines, gradients, losses, outputs."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

import shardwise as sw
from graph.against_eager import check_against_eager, operators
from proving import prove
from shardwise.graph.capture import capture, capture_function


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(4, 8)
        self.down = nn.Linear(8, 4, bias=False)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(x)))


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(10, 4)
        self.blocks = nn.Sequential(Block(), Block())
        self.head = nn.Linear(4, 10, bias=False)
        self.head.weight = self.embed.weight
        self.unused = nn.Parameter(torch.ones(3))
        self.frozen = nn.Parameter(torch.ones(4), requires_grad=False)
        self.register_buffer("scale", torch.full((4,), 0.5), persistent=False)

    def forward(self, ids, shift=0):
        return self.head(self.blocks(self.embed(ids) + shift) * self.scale * self.frozen)


def test_sources_follow_the_module_and_tied_weights_are_one():
    captured = check_against_eager(Tied(), torch.tensor([[1, 2, 3]]))
    sources = {source.value: source for source in captured.graph.sources}
    assert sources["embed.weight"].names == ("embed.weight", "head.weight")
    assert "head.weight" not in sources
    assert sources["unused"].trainable
    assert "unused" not in {n for op in captured.graph.ops for n in op.operands}
    assert not sources["frozen"].trainable
    assert sources["scale"].kind == "buffer"
    assert [s.names for s in captured.graph.sources if s.kind == "input"] == [("args[0]",)]


def test_operators_are_named_after_their_module_and_line():
    captured = capture(Tied(), (torch.tensor([[1, 2, 3]]),))
    ops = captured.graph.op_by_name
    assert {
        "blocks.0.up/linear",
        "blocks.0.up/add",
        "blocks.1/gelu",
        "blocks.1/add",
        "/mul",
        "/mul_1",
        "head/linear",
    } <= set(ops)
    assert ops["blocks.0/gelu"].module == "blocks.0"
    assert ops["blocks.0/gelu"].source.startswith("test_capture.py:")
    assert ops["blocks.0.up/linear"].source == ops["blocks.0.up/add"].source == ops["blocks.0/gelu"].source


def test_the_line_is_the_innermost_of_the_user_also_outside_forward():
    def inner(x):
        return torch.relu(x)

    class Outer(nn.Module):
        def forward(self, x):
            return inner(x)

    (op,) = capture(Outer(), (torch.ones(2),)).graph.ops
    assert op.source == f"test_capture.py:{inner.__code__.co_firstlineno + 1}"


def test_non_tensor_arguments_are_baked():
    captured = check_against_eager(Tied(), torch.tensor([[1]]), shift=2)
    assert [s.names for s in captured.graph.sources if s.kind == "input"] == [("args[0]",)]
    assert "add.Tensor" in operators(captured)
    assert any(op.args[1] == 2 for op in captured.graph.ops if len(op.args) > 1)


def test_nested_inputs_and_outputs_keep_their_structure():
    class Nested(nn.Module):
        def forward(self, pair, extra=None):
            return {"sum": pair[0] + extra["b"], "count": 3, "none": None, "both": [pair[1], pair[1]]}

    captured = check_against_eager(Nested(), (torch.ones(2), torch.zeros(2)), extra={"b": torch.ones(2)})
    names = [s.names[0] for s in captured.graph.sources]
    assert names == ["args[0][0]", "args[0][1]", "kwargs['extra']['b']"]
    assert captured.graph.outputs[1:3] == (3, captured.graph.outputs[2])


def test_the_loss_is_the_output_its_loss_or_its_first_leaf():
    class Returns(nn.Module):
        def __init__(self, make):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))
            self.make = make

        def forward(self, x):
            return self.make((x * self.weight).sum(), x)

    x = torch.ones(3)
    for make in (lambda s, x: s, lambda s, x: (s, x), lambda s, x: {"logits": x, "loss": s}):
        graph = check_against_eager(Returns(make), x.double()).graph
        assert graph.by_name[graph.loss].shape == ()
    assert capture(Returns(lambda s, x: x * s), (x,)).graph.loss is None


def test_a_loss_function_takes_the_last_examples():
    model = nn.Linear(4, 3)
    x, labels = torch.randn(5, 4, dtype=torch.float64), torch.tensor([0, 1, 2, 0, 1])
    graph = check_against_eager(model, x, labels, loss=lambda out, target: F.cross_entropy(out, target)).graph
    assert graph.loss is not None
    weights = torch.rand(5, dtype=torch.float64)

    def weighted(out, target, weights):
        return (F.cross_entropy(out, target, reduction="none") * weights).sum() / weights.sum()

    named = check_against_eager(model, x, loss=weighted, target=labels, weights=weights).graph
    assert [s.names[0] for s in named.sources if s.kind == "input"] == [
        "args[0]",
        "kwargs['target']",
        "kwargs['weights']",
    ]


def test_a_module_is_a_loss_function_too():
    x, y = torch.randn(5, 4, dtype=torch.float64), torch.randn(5, 3, dtype=torch.float64)
    check_against_eager(nn.Linear(4, 3), x, y, loss=nn.MSELoss())


def test_meta_fake_and_real_examples_give_the_same_graph():
    module = Tied()
    real = torch.tensor([[1, 2, 3]])
    with FakeTensorMode():
        fake = torch.empty(1, 3, dtype=torch.long)
    graphs = [capture(module, (example,)).graph for example in (real, real.to("meta"), fake)]
    assert graphs[0] == graphs[1] == graphs[2]
    with torch.device("meta"):
        assert capture(Tied(), (real,)).graph == graphs[0]


def test_the_module_is_left_as_it_was():
    class Counts(nn.Module):
        def __init__(self):
            super().__init__()
            self.calls, self.last = 0, None
            self.register_buffer("total", torch.zeros(2))

        def forward(self, x):
            self.calls, self.last = 1, x
            self.total = self.total + x
            return x * self.calls

    module = Counts()
    before = module.total
    capture(module, (torch.ones(2),))
    assert module.calls == 0
    assert module.last is None
    assert module.total is before
    assert "forward" not in vars(module)


def test_gradients_are_known_by_propagation():
    class Paths(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))

        def forward(self, x):
            y = x * self.weight
            with torch.no_grad():
                z = y * 2
                w = self.weight + z
            return y.sum() + (y.detach() * z).sum() + (y > 0).sum() + w.sum() + y.argmax()

    captured = check_against_eager(Paths(), torch.randn(4, dtype=torch.float64))
    grads = {op.name: captured.graph.by_name[op.results[0]].requires_grad for op in captured.graph.ops}
    assert grads["/mul"]
    assert not grads["/mul_1"]
    assert not grads["/gt"]
    assert not grads["/argmax"]
    assert grads["/sum"]


def test_gradients_may_be_enabled_again_inside_no_grad():
    class Nested(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.tensor([2.0, 3.0]))

        def forward(self, x):
            with torch.no_grad():
                a = self.weight * 2
                with torch.enable_grad():
                    b = self.weight * a
                c = b * 3
            return (b + c).sum()

    check_against_eager(Nested(), torch.ones(2, dtype=torch.float64))


def test_tensors_made_from_numbers_keep_their_data():
    outside = torch.tensor([5.0, 6.0])

    class Constants(nn.Module):
        def __init__(self):
            super().__init__()
            self.plain = torch.tensor([1.0, -1.0])

        def forward(self, x):
            table = torch.tensor([1.5, 2.5])
            table += 1
            return x * table + outside.to(x.dtype) + self.plain + x.new_tensor([7.0, 8.0])

    captured = check_against_eager(Constants(), torch.ones(2, dtype=torch.float64))
    assert sorted(data.tolist() for data in captured.constants.values()) == [
        [1.0, -1.0],
        [1.5, 2.5],
        [5.0, 6.0],
        [7.0, 8.0],
    ]
    on_meta = capture(Constants(), (torch.ones(2, device="meta"),))
    assert len(on_meta.constants) == 4


def test_devices_are_forgotten():
    class OnDevice(nn.Module):
        def forward(self, x):
            return x.to(x.device) + torch.arange(3, device=x.device, dtype=x.dtype)

    for example in (torch.ones(3), torch.ones(3, device="meta")):
        graph = capture(OnDevice(), (example,)).graph
        assert not any(
            isinstance(arg, torch.device) for op in graph.ops for arg in (*op.args, *dict(op.kwargs).values())
        )


def test_no_size_stays_minus_one():
    class Views(nn.Module):
        def forward(self, x):
            return x.view(2, -1).unflatten(1, (-1, 2)).expand(-1, -1, -1).reshape(-1), x.unsqueeze(0).expand(3, -1, -1)

    graph = check_against_eager(Views(), torch.arange(8.0, dtype=torch.float64).reshape(4, 2)).graph
    sizes = [arg for op in graph.ops for arg in op.args if isinstance(arg, tuple)]
    assert sizes
    assert all(-1 not in size for size in sizes)


def test_unused_results_stay_listed_and_dead_code_goes():
    class Splits(nn.Module):
        def forward(self, x):
            first, _, _ = x.split(2)
            torch.exp(x)
            return first

    (op,) = check_against_eager(Splits(), torch.arange(6.0, dtype=torch.float64)).graph.ops
    assert str(op.target) == "aten.split.Tensor"
    assert op.results == ("split.0", "split.1", "split.2")


def test_activation_checkpointing_leaves_no_trace():
    class Saves(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(3, 3)

        def forward(self, x):
            return checkpoint(lambda y: torch.sin(self.fc(y)), x, use_reentrant=False)

    check_against_eager(Saves(), torch.randn(2, 3, dtype=torch.float64))


def test_a_module_called_twice_has_numbered_operators():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(3, 3)

        def forward(self, x):
            return self.fc(self.fc(x))

    captured = check_against_eager(Twice(), torch.randn(2, 3, dtype=torch.float64))
    assert list(captured.graph.op_by_name) == ["fc/linear", "fc/add", "fc/linear_1", "fc/add_1"]


def test_views_of_copies_that_were_dropped_still_run():
    class Heads(nn.Module):
        def forward(self, x):
            y = x.transpose(0, 1).contiguous().view(-1)
            return torch.view_as_complex(x.reshape(2, 2, 2).transpose(0, 2).contiguous()).abs(), y

    check_against_eager(Heads(), torch.arange(8.0, dtype=torch.float64).reshape(4, 2))


def test_a_function_is_captured_with_every_example_as_a_source():
    x = torch.empty(4, 3, device="meta", requires_grad=True)
    y = torch.empty(3, device="meta")

    def call(a, unused, b):
        return torch.softmax(a, -1) + b, a.mean()

    graph = capture_function(call, (x, torch.empty(2, device="meta"), y))
    assert [source.names for source in graph.sources] == [("args[0]",), ("args[1]",), ("args[2]",)]
    assert [graph.by_name[s.value].requires_grad for s in graph.sources] == [True, False, False]
    assert [op.module for op in graph.ops] == [""] * len(graph.ops)
    assert len(graph.outputs) == 2
    assert graph.by_name[graph.outputs[0].name].requires_grad


@pytest.mark.parametrize("once", [True, False])
def test_initial_values_of_layers_built_inside_a_call_are_no_random_calls(once: bool) -> None:
    class Rebuilds(nn.Module):
        """Like BigBird, which changes its attention at the first short text."""

        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(6, 6)
            self.rebuilt = False

        def forward(self, x):
            if not (once and self.rebuilt):
                fresh = nn.Linear(6, 6)
                fresh.weight, fresh.bias = self.layer.weight, self.layer.bias
                self.layer, self.rebuilt = fresh, True
            torch.rand(3)  # counts, whether it is used or not
            return F.dropout(self.layer(x), 0.4).square().mean()

    x = torch.randn(8, 6)
    plan = sw.plan(Rebuilds(), x, 2, mesh=sw.Mesh(dp=2))
    prove(Rebuilds(), x, plan)
