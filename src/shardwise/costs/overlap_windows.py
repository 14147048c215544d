"""What the messages of a parameter can hide behind.

A parameter is gathered before its first use, and its gradient is reduced after the last kernel of backward that adds to
it, which is that of the same use. So of its messages no more is hidden than what is computed before that use in forward
and after it in backward: nothing, for the first operator of a model; and little, for a wide head on a narrow body.
"""

from __future__ import annotations

from collections.abc import Hashable
from itertools import count

from shardwise.costs.prices import Prices
from shardwise.graph.ir import Graph, Op, Ref, map_refs


def overlap_windows(graph: Graph, prices: Prices) -> dict[str, float]:
    """Parameter -> seconds of the operators, forward and backward, before the first that uses it. On whole values: no
    plan has more to compute there, so that what does not fit is waited for in every plan."""
    parameters = {source.value for source in graph.sources if source.kind == "parameter"}
    windows: dict[str, float] = {}
    seconds_of: dict[Hashable, float] = {}  # what decides the price of an operator -> its seconds
    seconds = 0.0
    for op in graph.ops:
        for name in op.operands:
            if name in parameters:
                windows.setdefault(name, seconds)
        operands, results = [graph.by_name[name] for name in op.operands], [graph.by_name[name] for name in op.results]
        tensors = tuple((value.shape, value.dtype, value.requires_grad) for value in (*operands, *results))
        key = _call(op), len(operands), tensors
        if key not in seconds_of:
            shapes = [value.shape for value in operands], [value.shape for value in results]
            seconds_of[key] = prices.operator(op, operands, results, shapes)
        seconds += seconds_of[key]
    return windows


def _call(op: Op) -> Hashable:
    """Return a call without the names of its operands. ``repr`` tells numbers apart that are equal: 1, 1.0 and True."""
    number = count()

    def plain(arg: object) -> object:
        return map_refs(arg, lambda _: Ref(str(next(number))))

    return op.target, repr(tuple(map(plain, op.args))), repr([(key, plain(arg)) for key, arg in op.kwargs])
