"""The choices of a cost graph as a reader knows them: names of variables, texts of their values."""

from __future__ import annotations

from difflib import get_close_matches

from shardwise.errors import PlanError, problem
from shardwise.layouts.text import format_layout
from shardwise.search.cost_graph import CostGraph, Variable


def find(cost: CostGraph, name: str) -> int:
    """The variable of an operator, or of the storage of a parameter (by its name)."""
    names = {(v.kind, shown(cost, v)): i for i, v in enumerate(cost.variables)}
    for kind in ("operator", "storage", "shared"):
        if (kind, name) in names:
            return names[kind, name]
    for view in cost.folded:
        if view.op == name:
            home = cost.variables[view.home]
            raise PlanError(
                problem(
                    f"{name} only renames dims: it runs in the layout that its operand has",
                    fix=f"explain {shown(cost, home)}",
                )
            )
    if name in cost.domains.graph.op_by_name:
        raise PlanError(f"{name} has no choice: it depends on no parameter and is made where it is needed")
    known = [own for _, own in names]
    near = get_close_matches(name, known, 3)
    raise PlanError(
        problem(f"the search has no choice for {name!r}", fix=f"one of {', '.join(near or known[:6])}, ...")
    )


def shown(cost: CostGraph, variable: Variable) -> str:
    """Parameters by their names in the module, values by the operator that computes them."""
    graph = cost.domains.graph
    if variable.kind == "operator":
        return variable.name
    source = graph.source_of.get(variable.name)
    if source is not None:
        return source.names[0] if variable.kind == "storage" else f"shared {source.names[0]}"
    return f"shared {graph.producer[variable.name].name}"


def text_of(cost: CostGraph, variable: int, value: int) -> str:
    own, domains = cost.variables[variable], cost.domains
    if own.kind == "operator":
        choices = domains.by_sub_axis(cost.domain_of[variable].choices[value])
        return domains.strategy_of(choices).format(domains.axes.mesh) or "whole"
    layout = domains.routes(own.name).layout(int(cost.nodes[variable][value]))
    return format_layout(layout, domains.graph.by_name[own.name].dtype)


def named(cost: CostGraph, variable: int) -> str:
    own = cost.variables[variable]
    return f"storage of {shown(cost, own)}" if own.kind == "storage" else shown(cost, own)
