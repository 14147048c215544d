"""The choice of a plan by propagation of what the user fixed; ``search.planner`` chooses by price.

Uneven splits by hand: ``"v@tp{10,20,30,4}"`` gives the first device along tp ten rows, the second twenty. The axes that
split a factor are decided as if all splits were even. The number of indices of each device is added to that decision,
and parameters are then stored as the operators that split them by hand need them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from shardwise.errors import LayoutError, problem
from shardwise.graph.annotate import Annotation
from shardwise.graph.ir import Graph
from shardwise.layouts.mesh import Mesh
from shardwise.layouts.strategy import apply_strategy, check_strategy, parse_cuts
from shardwise.programs.spmd import Choice
from shardwise.rules.atoms import Factored
from shardwise.rules.rule import OpRule
from shardwise.search.modes import choose
from shardwise.search.user_choices import annotated_ops, annotated_rules, fixed_choices
from shardwise.search.user_layouts import sum_whole
from shardwise.search.user_strategies import splittable

# Operator -> factor -> its indices on each device.
Cuts = Mapping[str, Mapping[str, tuple[int, ...]]]


def decide(graph: Graph, annotations: Iterable[Annotation], mesh: Mesh, mode: str) -> tuple[Factored, Choice]:
    """Complete what the user annotated, in the given mode."""
    rules, factored = annotated_rules(graph, annotations := tuple(annotations))
    fixed = fixed_choices(graph, rules, factored, annotations, mesh)
    choice = sum_whole(choose(graph, factored, mesh, mode, fixed), graph, factored, mesh)
    cuts = {
        op.name: parse_cuts(annotation.strategy)
        for annotation in annotations
        if isinstance(annotation.strategy, str) and parse_cuts(annotation.strategy)
        for op in annotated_ops(graph, factored, annotation)
    }
    return factored, stored_as_cut(with_cuts(choice, cuts, graph, factored.rules, mesh), graph, factored.rules, mesh)


def with_cuts(choice: Choice, cuts: Cuts, graph: Graph, rules: Mapping[str, OpRule], mesh: Mesh) -> Choice:
    """Return the choice with factors split by hand. Raises LayoutError naming the operator if that is not possible."""
    strategies = dict(choice.strategies)
    for name, counts in cuts.items():
        strategies[name] = replace(strategies[name], cuts=tuple(sorted(counts.items())))
        try:
            check_strategy(rules[name], strategies[name], mesh)
        except LayoutError as error:
            op = graph.op_by_name[name]
            text = problem(str(error), op=name, source=op.source, fix=splittable(rules[name]))
            raise LayoutError(text) from error
    return replace(choice, strategies=strategies)


def stored_as_cut(choice: Choice, graph: Graph, rules: Mapping[str, OpRule], mesh: Mesh) -> Choice:
    """Return the choice with parameters stored as their first consumer with a split by hand needs them, over the axes
    that they are stored over anyway."""
    sources = dict(choice.sources)
    for op in graph.ops:
        strategy = choice.strategies[op.name]
        if not strategy.cuts:
            continue
        for value, need in zip(op.operands, apply_strategy(rules[op.name], strategy, mesh).operands, strict=True):
            source = graph.source_of.get(value)
            if source is not None and source.kind == "parameter" and not sources[value].windows:
                layout = sources[value]
                windows = tuple(cut for cut in need.windows if layout.dims[cut.dim] == need.dims[cut.dim])
                sources[value] = replace(layout, windows=windows)
    return replace(choice, sources=sources)
