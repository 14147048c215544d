"""What the messages of a parameter can hide behind.

A parameter is gathered before its first use, and its gradient is reduced after the last kernel of backward that adds to
it, which is that of the same use. So of its messages no more is hidden than what is computed before that use in forward
and after it in backward: nothing, for the first operator of a model; and little, for a wide head on a narrow body.
"""

from __future__ import annotations

from shardwise.costs.prices import Prices
from shardwise.graph.ir import Graph


def windows_of(graph: Graph, prices: Prices) -> dict[str, float]:
    """Parameter -> seconds of the operators, forward and backward, before the first that uses it. On whole values: no
    plan has more to compute there, so that what does not fit is waited for in every plan."""
    parameters = {source.value for source in graph.sources if source.kind == "parameter"}
    found: dict[str, float] = {}
    seconds = 0.0
    for op in graph.ops:
        for name in op.operands:
            if name in parameters:
                found.setdefault(name, seconds)
        operands, results = [graph.by_name[name] for name in op.operands], [graph.by_name[name] for name in op.results]
        shapes = [value.shape for value in operands], [value.shape for value in results]
        seconds += prices.operator(op, operands, results, shapes)
    return found
