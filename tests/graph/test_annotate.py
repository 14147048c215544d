"""shard and constrain: nothing outside capture; scopes and constraints in the graph."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from raising import raises
from shardwise.errors import ShardwiseError
from shardwise.graph.annotate import constrain, shard
from shardwise.graph.capture import capture


class Mlp(nn.Module):
    def __init__(self, annotated=False):
        super().__init__()
        self.up = nn.Linear(4, 8)
        self.down = nn.Linear(8, 4)
        if annotated:
            shard(self.down, "k@tp")

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))


class Model(nn.Module):
    def __init__(self, annotated=False):
        super().__init__()
        self.blocks = nn.ModuleList([Mlp(annotated), Mlp(annotated)])

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def scopes(captured):
    return {op.name: op.scope for op in captured.graph.ops}


def test_an_annotated_module_computes_the_same_and_covers_its_operators():
    torch.manual_seed(0)
    plain, annotated = Model(), Model(annotated=True)
    annotated.load_state_dict(plain.state_dict())
    x = torch.randn(2, 4)
    assert torch.equal(plain(x), annotated(x))
    captured = capture(annotated, (x,))
    own = scopes(captured)
    assert own["blocks.0.down/linear"] == own["blocks.0.down/add"] == "blocks.0.down"
    assert own["blocks.1.down/linear"] == "blocks.1.down"
    assert own["blocks.0.up/linear"] == "" == own["blocks.0/relu"]
    assert [(a.scope, a.strategy, a.out_strategy) for a in captured.annotations] == [
        ("blocks.0.down", "k@tp", None),
        ("blocks.1.down", "k@tp", None),
    ]
    assert captured.annotations[0].source.startswith("test_annotate.py:")
    plain_graph = capture(plain, (x,)).graph
    assert [op.name for op in plain_graph.ops] == [op.name for op in captured.graph.ops]


def test_the_innermost_annotation_wins():
    model = Model(annotated=True)
    shard(model.blocks[0], "m@dp")
    shard(model, ((2, 1), (1, 1)))
    own = scopes(capture(copy.deepcopy(model), (torch.ones(2, 4),)))
    assert own["blocks.0.up/linear"] == "blocks.0"
    assert own["blocks.0.down/linear"] == "blocks.0.down"
    assert own["blocks.1.up/linear"] == "/"


def test_strategies_by_pattern_are_like_shard_on_every_match():
    captured = capture(
        Model(), (torch.ones(2, 4),), strategies={"blocks.*.up": [[2, 1], [1, 4]], "blocks.1.down": "n@tp"}
    )
    own = scopes(captured)
    assert own["blocks.0.up/linear"] == "blocks.0.up"
    assert own["blocks.1.down/add"] == "blocks.1.down"
    assert {a.scope: a.strategy for a in captured.annotations} == {
        "blocks.0.up": ((2, 1), (1, 4)),
        "blocks.1.up": ((2, 1), (1, 4)),
        "blocks.1.down": "n@tp",
    }


def test_a_pattern_that_matches_nothing_lists_what_is_near():
    with raises(ShardwiseError, "'blocks.0.upp'", "blocks.0.up", section="strategy-names"):
        capture(Model(), (torch.ones(2, 4),), strategies={"blocks.0.upp": "m@dp", "blocks.*": "m@dp"})


class Products(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))

    def forward(self, x):
        matmul = shard(torch.matmul, ((2, 1), (1, 2)))
        first = matmul(x, self.weight)
        second = matmul(first, self.weight)

        def both(y):
            with torch.no_grad():
                return torch.relu(y.detach()) + y

        return shard(both, "d0@dp", "d0@dp")(second) + 1


def test_every_annotated_call_is_a_scope_of_its_own():
    module, x = Products(), torch.randn(3, 4)
    expected = module(x)
    captured = capture(module, (x,))
    own = scopes(captured)
    assert set(own.values()) == {"/matmul", "/matmul_1", "/both", ""}
    assert own["/matmul_1"] == "/matmul_1"
    assert own["/relu"] == own["/add"] == "/both"
    assert own["/add_1"] == ""
    assert [a.scope for a in captured.annotations] == ["/matmul", "/matmul_1", "/both"]
    assert captured.annotations[2].out_strategy == "d0@dp"
    assert torch.equal(module(x), expected)


def test_constrain_leaves_an_identity_that_carries_the_layout():
    class Constrains(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x):
            return constrain(self.fc(x), "[2@dp, 4]") * 2

    module, x = Constrains(), torch.ones(2, 4)
    assert torch.equal(module(x), module.fc(x) * 2)
    graph = capture(module, (x,)).graph
    ((value, text),) = graph.constraints
    assert text == "[2@dp, 4]"
    assert str(graph.producer[value].target) == "aten.alias.default"
    assert graph.by_name[value].requires_grad
    assert graph.consumers[value][0].name == "/mul"


def test_the_classic_wrong_nesting_is_explained():
    with raises(ShardwiseError, "shard(matmul, ((4, 1), (1, 1)))", op="matmul", source="test_annotate.py"):
        shard(torch.matmul, (4, 1), (1, 1))


@pytest.mark.parametrize(
    ("strategy", "message"),
    [
        (((2, 0), (0, 1)), (0, 1)),
        (((2, -1),), "-1"),
        (((2, 1.5),), "1.5"),
        (((2, True),), "True"),
        ((4, 1), "((4, 1),)"),
        ("", "empty"),
        (3, "3"),
        (((1, 2), "n@tp"), ("'n@tp'", 1)),
    ],
)
def test_a_wrong_strategy_is_refused_at_once(strategy, message):
    with raises(ShardwiseError, message, op="matmul", source="test_annotate.py"):
        shard(torch.matmul, strategy)


def test_a_flat_out_strategy_is_refused():
    with raises(ShardwiseError, "out_strategy", "((1, 1),)", op="matmul", source="test_annotate.py"):
        shard(torch.matmul, ((4, 1), (1, 1)), (1, 1))


def test_constrain_takes_text():
    with raises(ShardwiseError, 3, "constrain", source="test_annotate.py"):
        constrain(torch.ones(2), 3)
