"""The searches by price on one mesh: what they know of a plan, and the choice that they make.

``dynamic_programming``     exact variable elimination (``elimination``)
``ilp``                     the same cost graph as an integer program, solved by HiGHS
``recursive_programming``   halving the devices again and again, heaviest operators first

All of them minimise the same cost graph and keep what the user fixed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf, log10
from typing import Literal, get_args

import numpy as np

from shardwise.costs.prediction import Prediction
from shardwise.costs.prices import Prices
from shardwise.costs.routing import Router
from shardwise.graph.ir import Graph
from shardwise.layouts.choice import Choices, layout_of
from shardwise.layouts.layout import Layout
from shardwise.layouts.mesh import Mesh
from shardwise.layouts.renaming import Renaming
from shardwise.layouts.routes import Axes
from shardwise.layouts.strategy import Strategy
from shardwise.programs.spmd import Choice
from shardwise.rules.atoms import Factored
from shardwise.search.cost_graph import BYTES, COMPUTE, EXPOSED, TRAFFIC, CostGraph, CostWeights
from shardwise.search.cost_tables import build
from shardwise.search.domains import Domains, SearchSpace
from shardwise.search.dynamic_programming import SearchOutcome, step_seconds
from shardwise.search.dynamic_programming import search as solve_step
from shardwise.search.elimination import fix_variables
from shardwise.search.input_only import assign_input_only_ops
from shardwise.search.memory_policy import PricedPolicy
from shardwise.search.solving import minimise, solver_of
from shardwise.search.variables import OperatorVariable, ReceivedVariable, SharedVariable, StorageVariable

PricedSearch = Literal["dynamic_programming", "ilp", "recursive_programming"]
PRICED_SEARCHES: tuple[PricedSearch, ...] = get_args(PricedSearch)


@dataclass
class MeshSearch:
    """A finished search on one mesh. ``called``: the same mesh under the axis names of the plan, if these differ."""

    cost: CostGraph
    outcome: SearchOutcome
    called: Mesh | None = None

    @property
    def mesh(self) -> Mesh:
        return self.cost.domains.axes.mesh

    @property
    def names(self) -> Renaming:
        """Return the renaming to the axes of the plan."""
        return Renaming(self.mesh, self.called or self.mesh)

    @property
    def log10_plans(self) -> float:
        return sum(log10(variable.size) for variable in self.cost.variables)

    @property
    def bounding_weights(self) -> CostWeights:
        """Return the weights under which the least sum bounds the step: hidden seconds count nothing."""
        hidden = self.outcome.components[TRAFFIC] <= self.outcome.components[COMPUTE]
        return CostWeights(1.0, 1.0, 0.0) if hidden else CostWeights(1.0, 0.0, 1.0)

    def choice(self, assignment: list[int] | None = None) -> Choice:
        """Return an assignment (by default the best) as a choice for the whole graph."""
        return choice_of(self.cost, self.outcome.assignment if assignment is None else assignment)

    def prediction(self, assignment: list[int] | None = None) -> Prediction:
        best = assignment is None
        components = self.outcome.components if best else self.cost.components(assignment or [])
        return Prediction(
            float(components[EXPOSED]),
            float(components[COMPUTE]),
            float(components[TRAFFIC]),
            float(components[BYTES]),
            float(self.outcome.bound),
            self.log10_plans,
            passes=self.cost.domains.prices.passes,
            additive_price=step_seconds(components),
        )


def domains_of(choosing: SearchSpace, axes: Axes, prices: Prices) -> Domains:
    """Return the strategies of all operators of a model on one mesh."""
    return Domains(choosing, Router(axes, prices, choosing.atoms, choosing.parameters))


def cost_graph(
    graph: Graph,
    factored: Factored,
    fixed: Choices,
    axes: Axes,
    prices: Prices,
    again: PricedPolicy | None = None,
) -> CostGraph:
    """Return the cost graph of a model on one mesh. ``again``: what backward recomputes."""
    return build(domains_of(SearchSpace(graph, factored), axes, prices), fixed, again)


def separate_axes(fixed: Choices, mesh: Mesh) -> frozenset[str]:
    """Return the named axes whose parts the user treats differently."""
    separate = set()
    for name, _ in mesh.axes:
        parts = mesh.expand(name)
        for choices in fixed.values():
            chosen = {choices[part] for part in parts if part in choices}
            if len(chosen) > 1 or (chosen and not all(part in choices for part in parts)):
                separate.add(name)
    return frozenset(separate)


def run_search(cost: CostGraph, search: str, memory_bytes: float | None, cutoff: float = inf) -> MeshSearch:
    """Return the best assignment of a cost graph. ``cutoff``: seconds of a step; a search may stop once it proves that
    it exceeds these. Raises DoesNotFit."""
    if search == "recursive_programming":
        from shardwise.search.recursive_programming import recursive_search

        return MeshSearch(cost, recursive_search(cost, memory_bytes))
    return MeshSearch(cost, solve_step(cost, memory_bytes, solver_of(search), cutoff))


def choice_of(cost: CostGraph, assignment: list[int]) -> Choice:
    """Return an assignment as strategies, storage and shared layouts of the whole graph."""
    domains = cost.domains
    graph, mesh = domains.graph, domains.axes.mesh
    decided: dict[str, Strategy] = {}
    stored: dict[str, Layout] = {}
    shared: dict[str, Layout] = {}
    for variable, value in zip(cost.variables, assignment, strict=True):
        match variable:
            case OperatorVariable():
                decided[variable.name] = variable.choice(value)
            case StorageVariable() | ReceivedVariable():
                stored[variable.name] = variable.choice(value)
            case SharedVariable():
                shared[variable.name] = variable.choice(value)
    for view in cost.folded:
        node = int(view.nodes[assignment[view.home]])
        decided[view.op] = domains.strategy_at(graph.op_by_name[view.op], node)
    strategies, inputs = assign_input_only_ops(graph, domains.rules, mesh, decided)
    sources = {
        name: stored.get(name) or layout_of(inputs.get(name, {}), domains.atoms[name], mesh) for name in graph.source_of
    }
    sent = {
        name: domains.routes(name).layout(int(nodes[assignment[home]])) for name, (home, nodes) in cost.sent.items()
    }
    return Choice(strategies, sources, shared, sent, domains.router)


def assignment_of(cost: CostGraph, choice: Choice) -> list[int] | None:
    """Return the assignment of another search's choice in the cost graph, with the best shared layouts, or None if it
    is not in its space."""
    fixed: dict[int, int] = {}
    for number, variable in enumerate(cost.variables):
        if isinstance(variable, OperatorVariable):
            target = choice.strategies[variable.name].choice_of
            options = (variable.choice(value).choice_of for value in range(variable.size))
            at = [value for value, choices in enumerate(options) if choices == target]
        elif isinstance(variable, (StorageVariable, ReceivedVariable)):
            node = variable.routes.node_of(choice.sources[variable.name])
            at = np.flatnonzero(variable.nodes == node).tolist()
        else:
            continue
        if not at:
            return None
        fixed[number] = at[0]
    return best_completion(cost, fixed)


def best_completion(cost: CostGraph, fixed: Mapping[int, int]) -> list[int]:
    """Return the assignment of least step in which some variables have fixed values."""
    solutions = [minimise(fix_variables(cost.weighted(CostWeights(1.0, 1.0 - m, m)), fixed)) for m in (0.0, 1.0)]
    return min((item.assignment for item in solutions), key=lambda values: step_seconds(cost.components(values)))
