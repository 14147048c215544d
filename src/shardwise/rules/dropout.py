"""Dropout and random numbers that depend on the seed and the element's global position: the same under every split."""

from __future__ import annotations

from collections.abc import Sequence

from shardwise.graph.ir import Graph, Op
from shardwise.graph.operators import dropout, uniform
from shardwise.rules.binding import RuleTable, build, dim_names, single
from shardwise.rules.calls import flat_pieces, replaced
from shardwise.rules.rule import Call, LocalContext, OpRule


def dropout_rule(op: Op, graph: Graph) -> OpRule:
    """Parallel in every dim. The local call says where the shard lies, atom by atom, so it need not be one block."""
    names = dim_names(len(graph.by_name[op.operands[0]].shape))
    dims = single(names)

    def localize(op: Op, context: LocalContext) -> Call:
        sizes, offsets, lengths = _place(names, context)
        return replaced(op, sizes=sizes, offsets=offsets, lengths=lengths)

    return build(op, graph, [dims, ()], [dims], linear=((0,),), localize=localize)


def uniform_rule(op: Op, graph: Graph) -> OpRule:
    """The seed is everywhere, every dim of the result is parallel."""
    names = dim_names(len(graph.by_name[op.results[0]].shape))

    def localize(op: Op, context: LocalContext) -> Call:
        sizes, offsets, lengths = _place(names, context)
        return replaced(op, sizes=sizes, offsets=offsets, lengths=lengths, shape=context.result_shapes[0])

    return build(op, graph, [()], [single(names)], localize=localize)


def _place(names: Sequence[str], context: LocalContext) -> tuple[tuple[int, ...], ...]:
    """Sizes, offsets and lengths of the shard, atom by atom."""
    return flat_pieces([piece for name in names for piece in context.pieces[name]])


DROPOUT: RuleTable = {dropout._opoverload: dropout_rule, uniform._opoverload: uniform_rule}
