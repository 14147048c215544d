"""The graph before the split: every operator with its strategy and its whole shapes."""

from __future__ import annotations

from math import prod

import shardwise as sw
from shardwise.mindspore.ir.lines import Strategy
from shardwise.mindspore.ir.origins import Origins
from shardwise.mindspore.ir.page import Page
from shardwise.mindspore.library import Graph, Layout, apply_strategy, bind


def strategies(graph: Graph, plan: sw.Plan, training: bool) -> dict[str, Strategy]:
    """Return for each operator the split counts of its tensors per dim, set by the user or found by the search."""
    factored, choice = bind(plan, graph, training=training)
    applied = {
        op.name: apply_strategy(factored.rules[op.name], choice.strategies[op.name], plan.mesh) for op in graph.ops
    }
    return {name: tuple(map(counts, layouts_of_op.operands)) for name, layouts_of_op in applied.items()}


def counts(layout: Layout) -> tuple[int, ...]:
    """Return the number of parts into which a layout splits each dim."""
    return tuple(prod(layout.mesh.size_of(atom.axes) for atom in dim) for dim in layout.dims)


def begin(graph: Graph, strategies_of: dict[str, Strategy], origins: Origins) -> Page:
    """Print the operators of a graph."""
    page = Page(
        graph, {source.value: graph.by_name[source.value].shape for source in graph.sources}, strategies_of, origins
    )
    for op in graph.ops:
        args = (*op.args, *(arg for _, arg in op.kwargs if arg is not None))
        page.call(op, args, tuple(graph.by_name[name].shape for name in op.results))
    return page
