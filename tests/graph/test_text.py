"""Graphs as text."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from graph.graph_text import format_graph, parse_graph
from raising import raises
from shardwise.errors import NotationError
from shardwise.graph.capture import capture
from shardwise.graph.ir import Graph, Op, Ref, Source, Value

aten = torch.ops.aten

EXAMPLE = """\
%fc.weight: f32[3, 4] grad = parameter(fc.weight, tied) trainable
%args[0]: f32[2, 4] = input(args[0])
%kwargs['a']: i64[] = input(kwargs['a'])
%linear: f32[2, 3] grad = aten.linear.default(%args[0], %fc.weight)  # fc/linear model.py:41
%split.0: f32[2, 2] grad, %split.1: f32[2, 1] grad = aten.split.Tensor(%linear, 2, dim=-1)  # /split "a b.py:3" "a b"
%sum: f32[] grad = aten.sum.default(%split.0, dtype=torch.float32)  # /sum
return %sum, [%split.1, None], 3, -inf, "text"
loss %sum
constrain %linear "[2@dp, 3]"
"""


def test_an_example_reads_as_one_would_write_it():
    graph = parse_graph(EXAMPLE)
    assert format_graph(graph) == EXAMPLE
    assert graph.ops[0] == Op(
        "fc/linear", aten.linear.default, (Ref("args[0]"), Ref("fc.weight")), (), ("linear",), "model.py:41"
    )
    assert graph.sources[0] == Source("fc.weight", "parameter", ("fc.weight", "tied"), True)
    assert graph.outputs == (Ref("sum"), (Ref("split.1"), None), 3, float("-inf"), "text")


def test_mutations_are_lines():
    class Counts(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("count", torch.zeros((), dtype=torch.int64))

        def forward(self, x):
            self.count += 1
            return x * 2

    graph = capture(Counts(), (torch.ones(2),)).graph
    assert "mutate %count = %add" in format_graph(graph)
    assert parse_graph(format_graph(graph)) == graph


names = st.text(
    st.characters(codec="utf-8", exclude_categories=("C", "Z")) | st.sampled_from(" .\"'[]%:,#\\"),
    min_size=1,
    max_size=12,
)
constants = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5).filter(str.isprintable)
    | st.complex_numbers(allow_nan=False)
    | st.sampled_from([torch.float32, torch.bool, torch.strided, torch.channels_last, torch.device("cuda", 1)])
)  # fmt: skip


@st.composite
def graphs(draw):
    unique = draw(st.lists(names, min_size=3, max_size=5, unique=True))
    dtype = st.sampled_from([torch.float64, torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn])
    shape = st.lists(st.integers(0, 9), max_size=3).map(tuple)
    values = tuple(Value(name, draw(shape), draw(dtype), draw(st.booleans())) for name in unique)
    sources = tuple(
        Source(
            v.name, draw(st.sampled_from(["input", "buffer", "constant", "parameter", "activation"])), (draw(names),)
        )
        for v in values[:2]
    )
    args = st.recursive(
        constants | st.sampled_from(unique).map(Ref), lambda inner: st.lists(inner, max_size=3).map(tuple), max_leaves=6
    )
    op = Op(
        draw(names), aten.stack.default, draw(st.lists(args, max_size=3).map(tuple)), (("dim", draw(args)),),
        tuple(unique[2:]), draw(names | st.just("")), draw(names | st.just("")),
    )  # fmt: skip
    outputs = draw(st.lists(args, max_size=3).map(tuple))
    loss = draw(st.none() | st.sampled_from(unique))
    cotangents = draw(st.none() | st.lists(st.sampled_from(unique), max_size=2).map(tuple))
    return Graph(values, sources, (op,), outputs, loss, (), ((unique[0], draw(names)),), cotangents)


@given(graphs())
def test_every_graph_survives_a_round_trip(graph):
    assert parse_graph(format_graph(graph)) == graph


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("%x: f32[2] = aten.nothing.default()", "aten.nothing.default is not an operator"),
        ("%x: f99[2] = input(x)", "dtype"),
        ("%x: f32[2] = input(x", "expected"),
        ("%x f32[2] = input(x)", "':'"),
        ("loss x", "'%'"),
        ("return %x %y", "end of the line"),
        ("%x: f32[2] = aten.relu.default(torch.relu)", "torch.relu is not a dtype"),
    ],
)
def test_an_error_points_at_the_column(line, message):
    with raises(NotationError, message, "^"):
        parse_graph(line)
