"""Mixtures of experts: rows and columns are parallel; experts and the contraction are sums."""

from __future__ import annotations

from shardwise.graph.grouped import grouped_mm
from shardwise.graph.ir import Graph, Op
from shardwise.rules.binding import RuleTable, build, single
from shardwise.rules.calls import flat_pieces
from shardwise.rules.rule import Call, FactorKind, LocalContext, OpRule


def grouped_mm_rule(op: Op, graph: Graph) -> OpRule:
    """``s k, e k n, ends -> s n``: a part of the experts computes their rows and gives 0 for the others."""

    def localize(op: Op, context: LocalContext) -> Call:
        rows, experts = flat_pieces(context.pieces["s"]), flat_pieces(context.pieces["e"])
        return Call(op.target, (*op.args[:3], *rows, *experts))

    operands = [single(["s", "k"]), single(["e", "k", "n"]), single(["ends"])]
    kinds: dict[str, FactorKind] = {"k": "sum", "e": "sum", "ends": "whole"}
    return build(op, graph, operands, [single(["s", "n"])], kinds=kinds, linear=((0,), (1,)), localize=localize)


EXPERTS: RuleTable = {grouped_mm._opoverload: grouped_mm_rule}
