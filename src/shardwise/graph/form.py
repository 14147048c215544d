"""Canonical form of a graph without the names of operators and values: equal graphs have equal forms."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, replace

from shardwise.graph.ir import Graph, Ref, map_refs
from shardwise.graph.segments import block_of


@dataclass(frozen=True, eq=False)
class GraphForm:
    """``key``: equal for graphs that differ only in names, if their operators are in blocks and annotated calls of the
    same extent; ``ops``, ``values``: the names, in the order of the graph."""

    key: Hashable
    ops: tuple[str, ...]
    values: tuple[str, ...]

    @staticmethod
    def of(graph: Graph) -> GraphForm:
        names = [*(source.value for source in graph.sources), *(name for op in graph.ops for name in op.results)]
        place = {name: number for number, name in enumerate(names)}
        blocks, scopes = {"": 0}, {"": 0}

        def renamed(name: str) -> Ref:
            return Ref(str(place[name]))

        ops = tuple(
            (
                op.target,
                map_refs(op.args, renamed),
                map_refs(op.kwargs, renamed),
                len(op.results),
                scopes.setdefault(op.scope, len(scopes)),
                blocks.setdefault(block_of(op.name), len(blocks)),
            )
            for op in graph.ops
        )
        key = (
            tuple((source.kind, source.trainable) for source in graph.sources),
            tuple(replace(graph.by_name[name], name="") for name in names),
            ops,
            map_refs(graph.outputs, renamed),
            None if graph.loss is None else place[graph.loss],
            tuple((place[buffer], place[value]) for buffer, value in graph.mutations),
            tuple((place[name], text) for name, text in graph.constraints),
            None if graph.cotangents is None else tuple(place[name] for name in graph.cotangents),
        )
        return GraphForm(key, tuple(op.name for op in graph.ops), tuple(names))

    def renaming(self, other: GraphForm) -> tuple[Mapping[str, str], Mapping[str, str]]:
        """Return maps from names of operators, and of values, of this graph to those of an equal one."""
        assert self.key == other.key, "the graphs differ"
        return dict(zip(self.ops, other.ops, strict=True)), dict(zip(self.values, other.values, strict=True))
