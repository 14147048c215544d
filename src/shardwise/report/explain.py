"""Explain a choice of a plan: its alternatives with their prices, term by term, read from the finished search."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from difflib import get_close_matches

import numpy as np

from shardwise.errors import PlanError
from shardwise.layouts.conversions import collective_of
from shardwise.layouts.routes import Floats
from shardwise.layouts.strategy import Strategy
from shardwise.layouts.text import format_layout
from shardwise.plans.quantities import format_bytes, format_seconds
from shardwise.search.auto import MeshSearch
from shardwise.search.cost_graph import (
    BYTES,
    COMPONENTS,
    CostGraph,
    OperatorVariable,
    SharedVariable,
    StorageVariable,
    Variable,
)
from shardwise.search.elimination import TooWide, solve

MOST_ALTERNATIVES = 6  # listed


@dataclass(frozen=True, slots=True)
class ExplainedMessage:
    """A collective of a conversion. ``direction``: "forward" or "backward"; ``levels``: the links that it crosses."""

    kind: str
    axes: str
    num_bytes: int
    levels: str
    direction: str
    seconds: float

    def __str__(self) -> str:
        return (
            f"{self.direction} {self.kind}({self.axes.strip('()')}, {format_bytes(self.num_bytes)}, {self.levels}) "
            f"{format_seconds(self.seconds)}"
        )


@dataclass(frozen=True, slots=True)
class Term:
    """A part of the price of an alternative: its own price (``neighbour`` is empty), or the conversions between it and
    a neighbour's chosen strategy. Seconds are as in ``Prediction``."""

    neighbour: str
    exposed: float
    compute: float
    traffic: float
    num_bytes: float
    messages: tuple[ExplainedMessage, ...] = ()

    @property
    def seconds(self) -> float:
        return self.exposed + self.compute + self.traffic


@dataclass(frozen=True, slots=True)
class Alternative:
    """A strategy (or layout) that could have been chosen. ``step_seconds``: a lower bound on the step of any plan in
    the search space with this choice; ``terms``: its price with the neighbours as they are chosen."""

    choice: str
    chosen: bool
    step_seconds: float
    terms: tuple[Term, ...]

    @property
    def seconds(self) -> float:
        return sum(term.seconds for term in self.terms)

    @property
    def num_bytes(self) -> float:
        return sum(term.num_bytes for term in self.terms)


@dataclass(frozen=True, slots=True)
class Explanation:
    """The alternatives of one choice, best first. ``alone``: the cheapest one without neighbours. ``decided_by``: the
    neighbour that made the choice, by ``favour`` seconds over ``alone``; empty if the choice is as cheap alone.
    ``tie``: what the plan is slower than, if it was taken for being plainer."""

    name: str
    kind: str
    alternatives: tuple[Alternative, ...]
    alone: str
    decided_by: str
    favour: float
    tie: str = ""

    @property
    def chosen(self) -> Alternative:
        return next(alternative for alternative in self.alternatives if alternative.chosen)

    @property
    def reason(self) -> str:
        if not self.decided_by:
            return "the cheapest alone; no neighbour changed the choice"
        favour = f"{format_seconds(self.favour)} in favour of it over {self.alone}, the cheapest alone"
        return f"{self.decided_by} made the choice: {favour}"

    @property
    def shown(self) -> list[Alternative]:
        """Return the best few alternatives and the chosen one."""
        return [one for i, one in enumerate(self.alternatives) if i < MOST_ALTERNATIVES or one.chosen]

    def __str__(self) -> str:
        lines = [f"{self.kind} {self.name}: {self.chosen.choice}", f"  {self.reason}"]
        lines += [f"  the plan is {self.tie}"] * bool(self.tie)
        for alternative in self.shown:
            mark = "*" if alternative.chosen else " "
            lines.append(
                f"  {mark} {alternative.choice}    step at least {format_seconds(alternative.step_seconds)}; here "
                f"{format_seconds(alternative.seconds)}, {format_bytes(alternative.num_bytes)}"
            )
            for term in alternative.terms:
                if term.seconds or term.num_bytes:
                    lines.append(f"      {_described(term)}")
                    lines.extend(f"        {message}" for message in term.messages)
        hidden = len(self.alternatives) - len(self.shown)
        return "\n".join(lines + ([f"    and {hidden} more"] if hidden else []))


def _described(term: Term) -> str:
    parts = [(name, getattr(term, name)) for name in ("compute", "exposed", "traffic")]
    seconds = ", ".join(f"{name} {format_seconds(value)}" for name, value in parts if value)
    num_bytes = f"holds {format_bytes(term.num_bytes)}" if term.num_bytes else ""
    where = f"with {term.neighbour}" if term.neighbour else "itself"
    return f"{where}: " + "; ".join(filter(None, (seconds, num_bytes)))


def _term(neighbour: str, components: Iterable[float], messages: tuple[ExplainedMessage, ...]) -> Term:
    exposed, compute, traffic, num_bytes = map(float, components)
    return Term(neighbour, exposed, compute, traffic, num_bytes, messages)


def explain(search: MeshSearch, name: str) -> Explanation:
    """Explain the choice of an operator or of a parameter's storage. Raises PlanError for an unknown name."""
    cost, assignment = search.cost, search.outcome.assignment
    variable = find_variable(cost, name)
    local = local_prices(cost, assignment, variable)
    least_steps = step_bounds(search, variable)
    alternatives = []
    for value in range(cost.variables[variable].size):
        terms = tuple(
            _term(neighbour, components[value], _messages(search, variable, value, other))
            for other, neighbour, components in local
        )
        alternatives.append(
            Alternative(
                text_of(search, variable, value), value == assignment[variable], float(least_steps[value]), terms
            )
        )
    totals = {i: components[:, :BYTES].sum(axis=1) for i, (_, _, components) in enumerate(local)}
    chosen = assignment[variable]
    least = np.flatnonzero(totals[0] <= totals[0].min())
    together = np.sum(list(totals.values()), axis=0)
    alone = chosen if chosen in least else int(least[together[least].argmin()])
    decided_by, favour = "", 0.0
    for i, (_, neighbour, _) in enumerate(local):
        gain = float(totals[i][alone] - totals[i][chosen])
        if i and alone != chosen and gain > favour:
            decided_by, favour = neighbour, gain
    ordered = sorted(
        alternatives, key=lambda alternative: (alternative.step_seconds, not alternative.chosen, alternative.seconds)
    )
    kind = cost.variables[variable].kind
    return Explanation(name, kind, tuple(ordered), text_of(search, variable, alone), decided_by, favour)


def local_prices(cost: CostGraph, assignment: list[int], variable: int) -> list[tuple[int | None, str, Floats]]:
    """Return (neighbour, its name, prices of shape [values, components]) for a variable; its own prices are first."""
    size = cost.variables[variable].size
    itself = np.zeros((size, len(COMPONENTS)))
    near: dict[int, Floats] = {}
    for scope, kind in cost.factors:
        if variable not in scope:
            continue
        other = next((v for v in scope if v != variable), None)
        total = itself if other is None else near.setdefault(other, np.zeros_like(itself))
        index = tuple(slice(None) if v == variable else assignment[v] for v in scope)
        for i, table in enumerate(cost.kinds[kind]):
            if table is not None:
                total[:, i] += table[index]
    return [(None, "", itself), *((other, variable_reference(cost, other), table) for other, table in near.items())]


def _messages(search: MeshSearch, variable: int, value: int, other: int | None) -> tuple[ExplainedMessage, ...]:
    if other is None:
        return ()
    cost, assignment = search.cost, list(search.outcome.assignment)
    assignment[variable] = value
    maker, taker = min(variable, other), max(variable, other)
    messages: list[ExplainedMessage] = []
    for name, source, target in _conversions(cost, maker, taker, assignment):
        messages.extend(_collectives(search, name, source, target))
    return tuple(messages)


def _conversions(cost: CostGraph, maker: int, taker: int, assignment: list[int]) -> Iterator[tuple[str, int, int]]:
    """Yield (value, source node, target node) for each distinct conversion between two variables."""
    variable, taken = cost.variables[taker], assignment[taker]
    if isinstance(variable, SharedVariable):
        made_by, starts = cost.maker[variable.name]
        if made_by == maker:
            yield variable.name, int(starts[assignment[maker]]), int(variable.nodes[taken])
        return
    if not isinstance(variable, OperatorVariable):
        return
    domain, op = variable.domain, cost.domains.graph.op_by_name[variable.name]
    seen = set()
    for position, name in enumerate(op.operands):
        nodes = domain.operands[position]
        if nodes is None or name not in cost.home or cost.home[name][0] != maker:
            continue
        conversion = name, int(cost.home[name][1][assignment[maker]]), int(nodes[taken])
        if conversion not in seen:
            seen.add(conversion)
            yield conversion


def _collectives(search: MeshSearch, name: str, source: int, target: int) -> Iterator[ExplainedMessage]:
    if source == target:
        return
    domains, names = search.cost.domains, search.names
    routes, prices = domains.routes(name), domains.prices
    moves = routes.moves(source, target)
    for backward in (False, True) if routes.tensor.differentiable else (False,):
        itemsize = routes.tensor.grad_itemsize if backward else routes.tensor.itemsize
        for move in reversed(moves) if backward else moves:
            collective = collective_of(move, itemsize, backward=backward)
            if collective is not None:
                seconds = routes.seconds(collective.kind, collective.axes, np.array([float(collective.num_bytes)]))
                yield ExplainedMessage(
                    collective.kind,
                    names.target.format_axes(names.axes(collective.axes)),
                    collective.num_bytes,
                    "+".join(prices.links.level_names(collective.axes)),
                    "backward" if backward else "forward",
                    float(seconds[0]),
                )


def step_bounds(search: MeshSearch, variable: int) -> Floats:
    """Return, per value of a variable, a lower bound of the step of all plans with it (exact if the plan reaches
    it). Raises PlanError if elimination is too wide."""
    try:
        marginal = solve(search.cost.weighted(search.bounding_weights), last=variable).marginal
    except TooWide as error:
        raise PlanError(
            f"the plan cannot be explained: the model is too densely connected ({error})",
            fix="compare plans in which the operator has other strategies: sw.plan(..., strategies=...)",
        ) from error
    assert marginal is not None, "the variable was eliminated last"
    return marginal


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
