"""Dead code elimination."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from shardwise.graph.ir import Graph, needed_for, refs


def eliminate_dead_code(graph: Graph, *, keep: Collection[str] = ()) -> Graph:
    """Drop operators without used results, unused constants, and values that nothing produces.

    Parameters, buffers and inputs stay even if unused: they belong to the module and to its call. Unused results of an
    operator that stays are kept as well. ``keep``: names of operators that stay in any case.
    """
    live = set(refs(graph.outputs)) | {name for _, name in graph.mutations}
    if graph.loss is not None:
        live.add(graph.loss)
    live.update(name for op in graph.ops if op.name in keep for name in op.results)
    kept, live = needed_for(live, graph.ops)
    sources = tuple(source for source in graph.sources if source.kind != "constant" or source.value in live)
    exists = {source.value for source in sources} | {name for op in kept for name in op.results}
    return replace(
        graph,
        values=tuple(value for value in graph.values if value.name in exists),
        sources=sources,
        ops=tuple(kept),
        constraints=tuple((name, text) for name, text in graph.constraints if name in exists),
        terms=tuple((name, given) for name, given in graph.terms if name in exists),
    )
