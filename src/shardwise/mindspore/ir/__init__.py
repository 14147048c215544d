"""Programs of a split cell as text in the reference's format: ``set_context(save_graphs=1)``.

Two files per program and rank are written to ``<save_graphs_path>/rank_<rank>/``. ``step_parallel_begin_<number>.ir``
is the whole graph with the strategy of every operator. ``18_execute_<number>.ir`` is the program of this rank, with its
local shapes and its collectives. ``save_graphs=3`` also writes the plan as JSON.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from math import prod
from pathlib import Path

import torch.distributed as dist
from torch import nn

import shardwise as sw
from shardwise.mindspore import context
from shardwise.mindspore.ir.execute import Execution
from shardwise.mindspore.ir.page import Origins, Page, Strategy
from shardwise.mindspore.library import Graph, Layout, apply_strategy, bind, localize
from shardwise.mindspore.named import TABLES

EXECUTE = 18  # the reference's number of the phase that prints it
WITH_PLAN = 3  # the level of save_graphs from which the plan is also written

HEADER = TABLES["ir"]["header"]
_numbers = count()  # of this process's files


def save(cell: nn.Module, par: sw.Parallel) -> None:
    """Write the program that was compiled last, as ``set_context(save_graphs=...)`` specifies."""
    settings, rank = context.settings(), dist.get_rank()
    folder = Path(settings.save_graphs_path) / f"rank_{rank}"
    folder.mkdir(parents=True, exist_ok=True)
    compiled = par.compiled[-1]
    graph = compiled.captured.graph
    origins = Origins(cell, graph)
    strategies_of = strategies(graph, par.plan, par.training)
    execution = Execution(localize(compiled.spmd, rank), strategies_of, origins)
    text = begin(graph, strategies_of, origins).text(graph.outputs)
    _write(folder / f"step_parallel_begin_{next(_numbers):04}.ir", text)
    _write(folder / f"{EXECUTE}_execute_{next(_numbers):04}.ir", execution.text())
    if settings.save_graphs >= WITH_PLAN:
        par.plan.save(folder / f"plan_{next(_numbers):04}.json")


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
    page = Page(graph, lambda name: graph.by_name[name].shape, strategies_of, origins)
    for op in graph.ops:
        args = (*op.args, *(arg for _, arg in op.kwargs if arg is not None))
        page.call(op, args, tuple(graph.by_name[name].shape for name in op.results))
    return page


def _write(path: Path, lines: Iterator[str]) -> None:
    path.write_text(HEADER + "\n".join(lines) + "\n", encoding="utf-8")
