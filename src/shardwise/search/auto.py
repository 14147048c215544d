"""The searches that choose by price: mesh shapes around them, and the choice that comes out.

``dynamic_programming``     exact variable elimination (``elimination``)
``ilp``                     the same cost graph as an integer program, solved by HiGHS
``recursive_programming``   halving the devices again and again, heaviest operators first

All of them minimise the same cost graph and keep what the user fixed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import inf, log10

import numpy as np

from shardwise.costs.cluster import Cluster
from shardwise.costs.mesh_shapes import mesh_shapes
from shardwise.costs.prices import Prices
from shardwise.graph.ir import Graph
from shardwise.layouts.layout import Layout
from shardwise.layouts.mesh import Mesh
from shardwise.layouts.routes import Axes
from shardwise.rules.atoms import Factored
from shardwise.search.cost_graph import BYTES, COMPUTE, EXPOSED, TRAFFIC, CostGraph, Weights, build
from shardwise.search.domains import Domains, PriceFragment
from shardwise.search.dynamic_programming import Outcome, step_seconds
from shardwise.search.dynamic_programming import search as solve_step
from shardwise.search.elimination import restricted
from shardwise.search.free import settle
from shardwise.search.modes import Choice, Choices, layout_of
from shardwise.search.routing import Router
from shardwise.search.solving import minimise, solver_of

PRICED_SEARCHES = ("dynamic_programming", "ilp", "recursive_programming")


@dataclass(frozen=True, slots=True)
class PassedOver:
    """The plan of the lowest objective, where a simulation preferred another: its objective, and what the simulation
    says of the seconds of a pass and of its peak."""

    objective: float
    simulated_seconds: float
    peak_bytes: float


@dataclass(frozen=True, slots=True)
class Prediction:
    """What a plan is expected to take, per pass (forward and backward of one batch).

    Seconds of collectives that nothing hides (``exposed``), of operators (``compute``), of gathers of parameters and
    reductions of gradients (``traffic``, hidden behind operators as far as these last); ``num_bytes`` per device of
    parameters, gradients, optimizer states and values kept for backward. ``passes``: to a step of the optimizer.

    ``objective``: the seconds that the search minimised, those of the emitted program or more: a conversion that
    several consumers share counts for each of them unless it leads to the layout they all convert from; where the user
    keeps tensors in layouts of his own, those of the emitted program if they are more (0: not known).
    ``bound``: no plan of the searched space has a lower one (0: not known); ``log10_plans``: how many plans that are,
    as a power of ten.

    ``simulated_seconds``: of a simulated pass with overlap and buckets; ``peak_bytes``: the most memory of a device,
    ``peak_at`` which operator's forward or backward (0 and empty where nothing was simulated). ``passed_over``: the
    plan of the lowest objective, if this is another.
    """

    exposed: float
    compute: float
    traffic: float
    num_bytes: float
    bound: float = 0.0
    log10_plans: float = 0.0
    simulated_seconds: float = 0.0
    peak_bytes: float = 0.0
    peak_at: str = ""
    passes: int = 1
    objective: float = 0.0
    passed_over: PassedOver | None = None

    @property
    def pass_seconds(self) -> float:
        return self.exposed + max(self.compute, self.traffic)

    @property
    def step_seconds(self) -> float:
        return self.passes * self.pass_seconds

    @property
    def optimality_gap(self) -> float | None:
        """By which share of the bound the objective is higher; 0: proven to be the lowest; None: not known."""
        if not self.bound:
            return None
        gap = self.objective / self.bound - 1
        return gap if gap > 1e-9 else 0.0


@dataclass
class Search:
    """One finished search on one mesh. ``reference``: an assignment to compare with whatever its price (data
    parallelism, whose many small messages travel together), if there is one."""

    cost: CostGraph
    outcome: Outcome
    reference: list[int] | None = None

    @property
    def mesh(self) -> Mesh:
        return self.cost.domains.axes.mesh

    @property
    def log10_plans(self) -> float:
        return sum(log10(variable.size) for variable in self.cost.variables)

    def choice(self, assignment: list[int] | None = None) -> Choice:
        """An assignment (by default the best) as a choice for the whole graph."""
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
            objective=step_seconds(components),
        )


def cost_graph(
    graph: Graph,
    factored: Factored,
    fixed: Choices,
    axes: Axes,
    prices: Prices,
    fragments: Callable[[Graph, Router], PriceFragment],
) -> CostGraph:
    """The cost graph of a model on one mesh."""
    parameters = frozenset(source.value for source in graph.sources if source.kind == "parameter")
    router = Router(axes, prices, factored.atoms, parameters)
    domains = Domains(graph, factored.rules, factored.atoms, router, fragments(graph, router))
    return build(domains, fixed)


def separate_axes(fixed: Choices, mesh: Mesh) -> frozenset[str]:
    """The named axes whose parts the user treats differently."""
    found = set()
    for name, _ in mesh.axes:
        parts = mesh.expand(name)
        for choices in fixed.values():
            own = {choices[part] for part in parts if part in choices}
            if len(own) > 1 or (own and not all(part in choices for part in parts)):
                found.add(name)
    return frozenset(found)


def searched(cost: CostGraph, search: str, memory_bytes: float | None, cutoff: float = inf) -> Search:
    """The best assignment of a cost graph; ``cutoff``: seconds of a step on another mesh, so that a search which proves
    that it comes to more than that may stop there. Raises DoesNotFit."""
    if search == "recursive_programming":
        from shardwise.search.recursive_programming import halve

        return Search(cost, halve(cost, memory_bytes))
    return Search(cost, solve_step(cost, memory_bytes, solver_of(search), cutoff))


def candidate_meshes(cluster: Cluster, max_axes: int) -> tuple[Mesh, ...]:
    """The meshes that a search tries where the user names none: axes are called after the level that they lie in."""
    found = []
    for shape in mesh_shapes(cluster, max_axes):
        names = [level.name for level in cluster.levels]
        left = [level.size for level in cluster.levels]
        axes: list[tuple[str, int]] = []
        for size in reversed(shape):
            level = next((i for i, room in enumerate(left) if room > 1), len(left) - 1)
            axes.append((names[level], size))
            while size > 1 and level < len(left):
                taken = min(size, left[level])
                left[level] //= taken
                size //= taken
                level += 1
        named: list[tuple[str, int]] = []
        for name, size in reversed(axes):
            same = sum(other == name for other, _ in axes)
            number = sum(own.rstrip("0123456789") == name for own, _ in named) + 1
            named.append((f"{name}{number}" if same > 1 else name, size))
        found.append(Mesh(named))
    return tuple(found) or (Mesh({cluster.levels[0].name: cluster.num_devices}),)


def choice_of(cost: CostGraph, assignment: list[int]) -> Choice:
    """An assignment as strategies, storage and shared layouts of the whole graph."""
    domains = cost.domains
    graph, mesh = domains.graph, domains.axes.mesh
    decided: Choices = {}
    stored: dict[str, Layout] = {}
    shared: dict[str, Layout] = {}
    for number, variable in enumerate(cost.variables):
        value = assignment[number]
        if variable.kind == "operator":
            decided[variable.name] = domains.by_sub_axis(cost.domain_of[number].choices[value])
        else:
            layout = domains.routes(variable.name).layout(int(cost.nodes[number][value]))
            (stored if variable.kind == "storage" else shared)[variable.name] = layout
    for view in cost.folded:
        node = int(view.nodes[assignment[view.home]])
        decided[view.op] = domains.choices_at(graph.op_by_name[view.op], node)
    choices, inputs = settle(graph, domains.rules, mesh, decided)
    sources: dict[str, Layout] = {}
    for source in graph.sources:
        name = source.value
        if name in stored:
            sources[name] = stored[name]
        else:
            sources[name] = layout_of(inputs.get(name, {}), domains.atoms[name], mesh)
    strategies = {name: domains.strategy_of(own) for name, own in choices.items()}
    return Choice(strategies, sources, shared, domains.router)


def assignment_of(cost: CostGraph, choice: Choice) -> list[int] | None:
    """The assignment that a choice (of another search) is in the cost graph, with the best shared layouts; None if it
    is not in its space."""
    domains = cost.domains
    fixed: dict[int, int] = {}
    for number, variable in enumerate(cost.variables):
        if variable.kind == "operator":
            own = choice.strategies[variable.name].choice_of
            wanted = {part: own.get(part, "I") for part in domains.axes.mesh.sub_axes}
            options = cost.domain_of[number].choices
            at = [i for i, choices in enumerate(options) if domains.by_sub_axis(choices) == wanted]
        elif variable.kind == "storage":
            node = domains.routes(variable.name).node_of(choice.sources[variable.name])
            at = np.flatnonzero(cost.nodes[number] == node).tolist()
        else:
            continue
        if not at:
            return None
        fixed[number] = at[0]
    return best_completion(cost, fixed)


def best_completion(cost: CostGraph, fixed: Mapping[int, int]) -> list[int]:
    """The assignment of least step in which some variables have given values."""
    found = [minimise(restricted(cost.weighted(Weights(1.0, 1.0 - m, m)), fixed)) for m in (0.0, 1.0)]
    return min((item.assignment for item in found), key=lambda own: step_seconds(cost.components(own)))
