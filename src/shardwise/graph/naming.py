"""Assignment of final names: to ops by module and operator, to values by operator, to parameters by their own name."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from shardwise.graph.ir import Arg, Graph, Ref, map_operands, map_refs
from shardwise.graph.schema import operator_name


def assign_names(graph: Graph) -> Graph:
    """Name ops ``"<module path>/<operator>"`` and results ``"<operator>"``, repetitions with ``_1``, ``_2``, ....

    Sources keep their names. Results of an op with several get ``"split.0"``, ``"split.1"``, .... Values are sorted in
    order of definition: sources, then results.
    """
    taken = {source.value for source in graph.sources}
    op_counts: Counter[str] = Counter()
    value_counts: Counter[str] = Counter()
    new_names = {name: name for name in taken}
    ops = []
    for op in graph.ops:
        operator = operator_name(op.target)
        stem = f"{op.module}/{operator}"
        op_name = _numbered(stem, op_counts[stem])
        op_counts[stem] += 1
        while (value_name := _numbered(operator, value_counts[operator])) in taken:
            value_counts[operator] += 1
        value_counts[operator] += 1
        several = len(op.results) > 1
        results = tuple(f"{value_name}.{i}" if several else value_name for i in range(len(op.results)))
        new_names.update(zip(op.results, results, strict=True))

        def renamed(name: str) -> Arg:
            return Ref(new_names[name])

        ops.append(replace(map_operands(op, renamed), name=op_name, results=results))
    order = [source.value for source in graph.sources] + [name for op in graph.ops for name in op.results]
    return replace(
        graph,
        values=tuple(replace(graph.by_name[name], name=new_names[name]) for name in order),
        ops=tuple(ops),
        outputs=tuple(map_refs(output, lambda name: Ref(new_names[name])) for output in graph.outputs),
        loss=None if graph.loss is None else new_names[graph.loss],
        mutations=tuple((buffer, new_names[name]) for buffer, name in graph.mutations),
        constraints=tuple((new_names[name], text) for name, text in graph.constraints),
    )


def _numbered(stem: str, count: int) -> str:
    return stem if count == 0 else f"{stem}_{count}"


def value_name(value: str, graph: Graph) -> str:
    """Describe a value for a reader: the parameter or input, or the operator that computes it (which result, if
    several)."""
    producer = graph.producer.get(value)
    if producer is None:
        return graph.source_of[value].names[0]
    return producer.name if len(producer.results) == 1 else f"{producer.name}[{producer.results.index(value)}]"
