"""Mixtures of experts: tokens, the rows of a token and columns are parallel; experts and the contraction are sums."""

from __future__ import annotations

from shardwise.graph.grouped import grouped_mm
from shardwise.graph.ir import Graph, Op
from shardwise.rules.arguments import flat_pieces
from shardwise.rules.binding import RuleTable, build, single
from shardwise.rules.rule import Dims, FactorKind, LocalContext, LocalOpCall, OpRule


def grouped_mm_rule(op: Op, graph: Graph) -> OpRule:
    """``s k, e k n, (s r) -> (s r) n``: a part of the experts computes their rows and gives 0 for the others."""

    def localize(op: Op, context: LocalContext) -> LocalOpCall:
        return LocalOpCall(op.target, (*op.args[:3], *flat_pieces(context.pieces["e"])))

    (tokens, _), (rows,) = (graph.by_name[op.operands[i]].shape for i in (0, 2))
    of_rows = ("s", "r") if rows != tokens else ("s",)
    operands: list[Dims] = [single(["s", "k"]), single(["e", "k", "n"]), (of_rows,)]
    kinds: dict[str, FactorKind] = {"k": "sum", "e": "sum"}
    return build(op, graph, operands, [(of_rows, ("n",))], kinds=kinds, linear=((0,), (1,)), localize=localize)


EXPERTS: RuleTable = {grouped_mm._opoverload: grouped_mm_rule}
