"""The searches by price on one mesh: what they know of a plan, and the choice that they make.

``dynamic_programming``     exact variable elimination (``elimination``)
``recursive_programming``   halving the devices again and again, heaviest operators first

All of them minimise the same cost graph and keep what the user fixed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf, log10
from typing import Literal, get_args

import numpy as np

from shardwise.costs.prediction import Prediction
from shardwise.graph.ir import Graph, Op, Ref
from shardwise.layouts.choice import (
    INVARIANT,
    AxisChoice,
    Choices,
    ShardPosition,
    ShardPositions,
    Split,
    Where,
    layout_of,
)
from shardwise.layouts.layout import Layout
from shardwise.layouts.mesh import Mesh
from shardwise.layouts.routes import Floats
from shardwise.layouts.strategy import Strategy
from shardwise.layouts.transfer import Renaming
from shardwise.programs.builder import Choice
from shardwise.rules.rule import OpRule
from shardwise.search.constants import NUM_TRANSIENT_CAPS
from shardwise.search.cost_graph import (
    BYTES,
    COMPUTE,
    EXPOSED,
    TRAFFIC,
    Components,
    CostGraph,
    CostWeights,
    OperatorVariable,
    ReceivedVariable,
    SharedVariable,
    StorageVariable,
)
from shardwise.search.dynamic_programming import LEAST_BYTES, SearchOutcome, step_seconds
from shardwise.search.dynamic_programming import search as solve_step
from shardwise.search.elimination import fix_variables
from shardwise.search.recursive_programming import recursive_search
from shardwise.search.solving import minimise

PricedSearch = Literal["dynamic_programming", "recursive_programming"]
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
        return MeshSearch(cost, recursive_search(cost, memory_bytes))
    return MeshSearch(cost, solve_step(cost, memory_bytes, cutoff))


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


def best_completion(cost: CostGraph, fixed: Mapping[int, int], multipliers: Sequence[float] = (0.0, 1.0)) -> list[int]:
    """Return the assignment of least step in which some variables have fixed values, of the least sums for some
    ``multipliers`` of traffic (``dynamic_programming``)."""
    solutions = [minimise(fix_variables(cost.weighted(CostWeights(1.0, 1.0 - m, m)), fixed)) for m in multipliers]
    return min((item.assignment for item in solutions), key=lambda values: step_seconds(cost.components(values)))


Demand = Callable[[str, str], ShardPosition | None]  # (value, axis) -> where all consumers want it; None: whole


def assign_input_only_ops(
    graph: Graph, rules: Mapping[str, OpRule], mesh: Mesh, decided: Mapping[str, Strategy]
) -> tuple[dict[str, Strategy], dict[str, dict[str, Where]]]:
    """Return the strategies of all operators (``decided`` and others), and where every input is delivered.

    The others depend on no parameter: masks, positions, rotary tables, labels. They have no price worth a choice,
    unless they are ``SearchSpace.heavy``. Each is made in the layout that its consumers want if these agree, and whole
    on every device otherwise. A consumer then needs a slice of what is there, and nothing is communicated.
    """
    choices: Choices = {name: strategy.choice_of for name, strategy in decided.items()}
    places = {op.name: ShardPositions.of(rules[op.name]) for op in graph.ops}
    whole = {out.name for out in graph.outputs if isinstance(out, Ref)} | {value for _, value in graph.mutations}
    if graph.loss is not None:
        whole.add(graph.loss)

    def demand(value: str, axis: str) -> ShardPosition | None:
        needs: set[ShardPosition | None] = {None} if value in whole else set()
        for op in graph.consumers[value]:
            choice = choices[op.name].get(axis, INVARIANT)
            for position, name in enumerate(op.operands):
                if name == value:
                    where = places[op.name].operand(position, choice)
                    needs.add(where if isinstance(where, ShardPosition) else None)
        return needs.pop() if len(needs) == 1 else None

    for op in reversed(graph.ops):
        if op.name not in choices:
            choices[op.name] = _choices_of(op, rules[op.name], mesh, places[op.name], demand)
    inputs: dict[str, dict[str, Where]] = {}
    for source in graph.sources:
        if source.kind == "input":
            inputs[source.value] = {axis: demand(source.value, axis) or "I" for axis in mesh.sub_axes}
    return {name: decided.get(name) or Strategy.of(by_axis) for name, by_axis in choices.items()}, inputs


def _choices_of(op: Op, rule: OpRule, mesh: Mesh, places: ShardPositions, demand: Demand) -> dict[str, AxisChoice]:
    """Return, per axis, the factor that all results are wanted split on, or none."""
    choices: dict[str, AxisChoice] = {}
    num_parts: dict[Split, int] = {}
    for axis in mesh.sub_axes:
        splits: set[Split | None] = set()
        for position, value in enumerate(op.results):
            place = demand(value, axis)
            splits.add(None if place is None else places.split_of_result(position, place))
        split = splits.pop() if len(splits) == 1 else None
        choices[axis] = INVARIANT
        if split is not None and rule.factor(split.factor).kind == "parallel":
            parts = num_parts.get(split, 1) * mesh.sizes[axis]
            if parts <= rule.factor(split.factor).size:
                choices[axis], num_parts[split] = split, parts
    return choices


def searches_within(search: MeshSearch, limit: float) -> list[MeshSearch]:
    """Return searches for plans whose transient bytes fit, too, the most promising first: those that should fit, by
    their seconds, then the others, by how much they hold.

    The bytes that a search adds up stay: parameters, gradients, states, saved values. A step also holds operands of the
    operator that runs, and the buffers of a message, of which the most counts. So the limit is split, ``limit = bytes
    that stay + tau``: choices with more transient bytes than tau are forbidden, and the search goes on under ``limit -
    tau``, for a few tau. If nothing fits so, it is the one of least memory. The transient bytes are estimates; what is
    found is judged by the true peak of its program.
    """
    cost, ordered = search.cost, []
    moments = {number: table() for number, table in cost.transients.items()}
    for cap in _caps(cost, moments, search.outcome.assignment):
        capped = _within(cost, moments, cap)
        least = minimise(capped.weighted(LEAST_BYTES))
        if not np.isfinite(least.value):
            break  # lower caps forbid as much
        outcome = SearchOutcome(least.assignment, cost.components(least.assignment), search.outcome.bound, 1)
        if outcome.components[BYTES] <= limit - cap:
            outcome = solve_step(capped, limit - cap)
        peak = float(outcome.components[BYTES]) + _most(cost, moments, outcome.assignment)
        ordered.append(((peak > limit, peak if peak > limit else outcome.seconds), MeshSearch(cost, outcome)))
    return [capped_search for _, capped_search in sorted(ordered, key=lambda pair: pair[0])]


def _most(cost: CostGraph, moments: dict[int, Floats], assignment: list[int]) -> float:
    num_bytes = (moments[kind][tuple(assignment[v] for v in scope)] for scope, kind in cost.factors if kind in moments)
    return float(max(num_bytes, default=0.0))


def _caps(cost: CostGraph, moments: dict[int, Floats], assignment: list[int]) -> Iterator[float]:
    """Return caps in even quotients, from what an assignment holds down to what some choice holds in any."""
    most = _most(cost, moments, assignment)
    least = float(max((table.min() for table in moments.values()), default=0.0))
    least = max(min(least, most), 1.0)
    for number in range(NUM_TRANSIENT_CAPS):
        yield most * (least / max(most, 1.0)) ** (number / (NUM_TRANSIENT_CAPS - 1))


def _within(cost: CostGraph, moments: dict[int, Floats], cap: float) -> CostGraph:
    """Return the cost graph with infinite seconds and bytes for choices with more transient bytes."""
    kinds: list[Components] = []
    for number, tables in enumerate(cost.kinds):
        if number not in moments or (moments[number] <= cap).all():
            kinds.append(tables)
            continue
        forbidden = np.where(moments[number] <= cap, 0.0, np.inf)
        changed = list(tables)
        for component in (EXPOSED, BYTES):
            prices = tables[component]
            changed[component] = forbidden if prices is None else prices + forbidden
        kinds.append(tuple(changed))
    return replace(cost, kinds=kinds)
