"""The verifier finds every broken invariant."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from raising import raises
from shardwise.graph.capture import capture
from shardwise.graph.graph_invariants import verify_graph
from shardwise.graph.ir import Ref, Source, Value

aten = torch.ops.aten


@pytest.fixture
def graph():
    class Counts(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(3, 3)
            self.register_buffer("count", torch.zeros(()))

        def forward(self, x):
            self.count += 1
            return self.fc(x).sum()

    found = capture(Counts(), (torch.ones(2, 3),)).graph
    verify_graph(found)
    return found


def with_op(graph, index, **changes):
    ops = list(graph.ops)
    ops[index] = replace(ops[index], **changes)
    return replace(graph, ops=tuple(ops))


def with_source(graph, **changes):
    return replace(graph, sources=(*graph.sources[:-1], replace(graph.sources[-1], **changes)))


BROKEN = {
    "duplicate values": lambda g: replace(g, values=(*g.values, g.values[0])),
    "duplicate ops": lambda g: with_op(g, 1, name=g.ops[0].name),
    "before it is defined": lambda g: replace(g, ops=tuple(reversed(g.ops))),
    "not registered": lambda g: with_op(g, -1, results=("other",)),
    "produced twice": lambda g: with_op(g, -1, results=g.ops[0].results),
    "nothing produces": lambda g: replace(g, values=(*g.values, Value("extra", (), torch.float32))),
    "writes into self": lambda g: with_op(g, -1, target=aten.relu_.default),
    "output nowhere": lambda g: replace(g, outputs=(Ref("nowhere"),)),
    "the loss linear": lambda g: replace(g, loss="linear"),
    "loss nowhere": lambda g: replace(g, loss="nowhere"),
    "not a buffer": lambda g: replace(g, mutations=(("fc.bias", "fc.bias"),)),
    "mutation of count writes": lambda g: replace(g, mutations=(("count", "linear"),)),
    "mutated twice": lambda g: replace(g, mutations=g.mutations * 2),
    "loss sum is an activation": lambda g: replace(
        g, sources=(*g.sources, Source("sum", "activation", ("sum",))), ops=g.ops[:-1]
    ),
    "the activation": lambda g: with_source(g, kind="activation", names=("other",)),
    "is trainable": lambda g: with_source(g, kind="activation", trainable=True),
    "requires a gradient": lambda g: replace(
        g,
        values=tuple(replace(v, dtype=torch.int64, requires_grad=True) if v.name == "args[0]" else v for v in g.values),
    ),
    "which is not an output": lambda g: replace(g, cotangents=("linear",)),
    "needs no gradient": lambda g: replace(g, outputs=(*g.outputs, Ref("args[0]")), cotangents=("args[0]",)),
    "cotangent from outside": lambda g: replace(g, cotangents=(g.loss,)),
    "given twice": lambda g: replace(g, cotangents=("linear", "linear"), outputs=(*g.outputs, Ref("linear"))),
    "constraint on nowhere": lambda g: replace(g, constraints=(("nowhere", "[2]"),)),
}


@pytest.mark.parametrize("message", BROKEN)
def test_a_broken_graph_is_refused(graph, message):
    with raises(AssertionError, message):
        verify_graph(BROKEN[message](graph))
