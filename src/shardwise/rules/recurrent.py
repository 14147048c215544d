"""LSTM, GRU and RNN layers: samples are parallel; steps and features, each of which needs all others, are whole."""

from __future__ import annotations

import torch

from shardwise.graph.ir import Graph, Op
from shardwise.graph.schema import arguments, by_operator
from shardwise.rules.arguments import operand_positions
from shardwise.rules.binding import RuleTable, build, single
from shardwise.rules.rule import Dims, FactorKind, OpRule

aten = torch.ops.aten


def recurrent_rule(op: Op, graph: Graph) -> OpRule:
    """``t b x, l b h... -> t b y, l b h...``, or ``b t x`` with batch_first; parameters are whole."""
    args, positions = arguments(op), operand_positions(op)

    def sequence(features: str) -> Dims:
        return single(["b", "t", features] if args["batch_first"] else ["t", "b", features])

    states = [single(["l", "b", f"h{i}"]) for i in range(len(positions["hx"]))]
    params = [
        single([f"p{i}_{d}" for d in range(len(graph.by_name[op.operands[i]].shape))]) for i in positions["params"]
    ]
    operands = [sequence("x"), *states, *params]
    results = [sequence("y"), *states]
    kinds: dict[str, FactorKind] = {
        name: "whole" for dims in (*operands, *results) for dim in dims for name in dim if name != "b"
    }
    return build(op, graph, operands, results, kinds=kinds)


RECURRENT: RuleTable = by_operator({"lstm.input gru.input rnn_tanh.input rnn_relu.input": recurrent_rule})
