"""Printed names of a cost graph's variables, and printed texts of their values."""

from __future__ import annotations

from difflib import get_close_matches

from shardwise.errors import PlanError
from shardwise.layouts.strategy import Strategy
from shardwise.layouts.text import format_layout
from shardwise.search.auto import MeshSearch
from shardwise.search.cost_graph import CostGraph
from shardwise.search.variables import OperatorVariable, StorageVariable, Variable


def find_variable(cost: CostGraph, name: str) -> int:
    """Return the variable of an operator, of the storage of a parameter, or of a value that a stage receives."""
    names = {(v.kind, variable_name(cost, v)): i for i, v in enumerate(cost.variables)}
    plain = ((kind, name) for kind in ("operator", "storage", "shared", "received"))
    for key in (*plain, ("received", f"received {name}")):
        if key in names:
            return names[key]
    for view in cost.folded:
        if view.op == name:
            home = cost.variables[view.home]
            raise PlanError(
                f"{name} only renames dims: it runs in the layout that its operand has",
                fix=f"explain {variable_name(cost, home)}",
            )
    if name in cost.domains.graph.op_by_name:
        raise PlanError(f"{name} has no alternatives: it depends on no parameter and is computed where it is needed")
    variables = [printed for _, printed in names]
    near = get_close_matches(name, variables, 3)
    raise PlanError(f"the search has no choice for {name!r}", fix=f"one of {', '.join(near or variables[:6])}, ...")


def variable_name(cost: CostGraph, variable: Variable) -> str:
    """Return the printed name of a variable: a parameter's name in the module, or the operator of a value."""
    graph = cost.domains.graph
    if isinstance(variable, OperatorVariable):
        return variable.name
    source = graph.source_of.get(variable.name)
    if source is not None:
        return source.names[0] if isinstance(variable, StorageVariable) else f"{variable.kind} {source.names[0]}"
    return f"shared {graph.producer[variable.name].name}"


def text_of(search: MeshSearch, number: int, value: int) -> str:
    """Return the strategy or layout that a value of a variable stands for, with the axis names of the plan."""
    cost, names = search.cost, search.names
    variable = cost.variables[number]
    choice = variable.choice(value)
    if isinstance(choice, Strategy):
        return names.strategy(choice).format(names.target) or "whole"
    return format_layout(names.layout(choice), cost.domains.graph.by_name[variable.name].dtype)


def variable_reference(cost: CostGraph, number: int) -> str:
    """Return the name of a variable, marked as storage where that is ambiguous among several kinds."""
    variable = cost.variables[number]
    name = variable_name(cost, variable)
    return f"storage of {name}" if isinstance(variable, StorageVariable) else name
