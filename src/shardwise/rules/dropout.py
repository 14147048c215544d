"""Dropout and random numbers that depend on the seed and the element's global position: the same under every split."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from math import prod

from shardwise.graph.custom_operators import dropout, uniform
from shardwise.graph.ir import Graph, Op
from shardwise.graph.schema import arguments
from shardwise.rules.arguments import with_pieces
from shardwise.rules.binding import RuleTable, build, dim_names, single
from shardwise.rules.rule import LocalContext, LocalOpCall, OpRule, Piece


def _random_rule(op: Op, graph: Graph, *, drops: bool) -> OpRule:
    """Parallel in every dim, the seed is everywhere. The local call says where the shard lies, atom by atom, so it need
    not be one block. ``drops``: the first operand is like the result."""
    names = dim_names(len(graph.by_name[op.results[0]].shape))
    dims = single(names)

    def localize(op: Op, context: LocalContext) -> LocalOpCall:
        shape = {} if drops else {"shape": context.result_shapes[0]}
        return with_pieces(op, _place(op, names, context), **shape)

    operands = [dims if drops and i == 0 else () for i in range(len(op.operands))]
    return build(op, graph, operands, [dims], linear=((0,),) if drops else (), localize=localize)


def _place(op: Op, names: Sequence[str], context: LocalContext) -> list[Piece]:
    """The shard, atom by atom. In a pass over a part of the batch a dim is a part of the
    one that is numbered: its major atom counts the elements of that."""
    pieces: list[Piece] = []
    for name, size in zip(names, arguments(op)["sizes"], strict=True):
        major, *minor = context.pieces[name]
        inner = prod(piece.size for piece in minor)
        assert size % max(inner, 1) == 0, f"{op.name}: {size} elements of {name} are not rows of {inner}"
        pieces += [replace(major, size=size // inner if inner else major.size), *minor]
    return pieces


DROPOUT: RuleTable = {
    dropout._opoverload: partial(_random_rule, drops=True),
    uniform._opoverload: partial(_random_rule, drops=False),
}
