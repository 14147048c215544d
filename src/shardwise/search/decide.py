"""The choice of a plan by propagation of what the user fixed; ``search.planner`` chooses by price."""

from __future__ import annotations

from collections.abc import Iterable

from shardwise.graph.annotate import Annotation
from shardwise.graph.ir import Graph
from shardwise.layouts.mesh import Mesh
from shardwise.layouts.strategy import parse_cuts
from shardwise.programs.spmd import Choice
from shardwise.rules.atoms import Factored
from shardwise.search.modes import choose
from shardwise.search.uneven_splits import stored_as_cut, with_cuts
from shardwise.search.user_choices import annotated_ops, annotated_rules, fixed_choices
from shardwise.search.user_layouts import sum_whole


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
