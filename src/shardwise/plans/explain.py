"""Why a plan is what it is: the alternatives of one choice with their prices, term by term, what-if, and the whole cost
graph as JSON or DOT. All of it is read off the finished search.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import numpy as np

from shardwise.errors import PlanError, problem
from shardwise.layouts.conversions import collective_of
from shardwise.layouts.routes import Floats
from shardwise.layouts.text import format_layout
from shardwise.plans.printing import format_bytes, format_seconds
from shardwise.search.auto import Prediction, Search
from shardwise.search.cost_graph import BYTES, COMPONENTS, COMPUTE, EXPOSED, TRAFFIC, CostGraph, Variable, Weights
from shardwise.search.dynamic_programming import step_seconds
from shardwise.search.elimination import Problem, Solution, TooWide, restricted, solve
from shardwise.search.k_best import k_best

# ``top`` is exact while it needs no more eliminations of single variables than this: about ten seconds.
EXACT_WORK = 300_000


@dataclass(frozen=True, slots=True)
class Message:
    """A collective of a conversion, in ``direction`` "forward" or "backward"; ``levels``: the links it crosses."""

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
    """A part of the price of an alternative: its own (``neighbour`` empty) or that of the way from or to a neighbour as
    that is chosen. Seconds as in ``Prediction``."""

    neighbour: str
    exposed: float
    compute: float
    traffic: float
    num_bytes: float
    messages: tuple[Message, ...] = ()

    @property
    def seconds(self) -> float:
        return self.exposed + self.compute + self.traffic


@dataclass(frozen=True, slots=True)
class Alternative:
    """A strategy (or layout) that could have been chosen. ``step_seconds``: no plan of the searched space that has it
    is faster than this; ``terms``: its price beside its neighbours as they are chosen."""

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
    """Of one choice. ``alternatives``: best first. ``alone``: what is cheapest without neighbours. ``decided_by``:
    the neighbour that holds the choice where it is, and ``favour`` the seconds by which it favours it over ``alone``;
    empty where the choice is as cheap alone."""

    name: str
    kind: str
    alternatives: tuple[Alternative, ...]
    alone: str
    decided_by: str
    favour: float

    @property
    def chosen(self) -> Alternative:
        return next(own for own in self.alternatives if own.chosen)

    def __str__(self) -> str:
        lines = [f"{self.kind} {self.name}: {self.chosen.choice}"]
        if self.decided_by:
            lines.append(
                f"  {self.decided_by} made the choice: {format_seconds(self.favour)} in favour of it over "
                f"{self.alone}, the cheapest alone"
            )
        else:
            lines.append("  cheapest alone: no neighbour had to decide")
        shown = [own for i, own in enumerate(self.alternatives) if i < 6 or own.chosen]
        for own in shown:
            mark = "*" if own.chosen else " "
            lines.append(
                f"  {mark} {own.choice}    step at least {format_seconds(own.step_seconds)}; here "
                f"{format_seconds(own.seconds)}, {format_bytes(own.num_bytes)}"
            )
            for term in own.terms:
                if term.seconds or term.num_bytes:
                    lines.append(f"      {_described(term)}")
                    lines.extend(f"        {message}" for message in term.messages)
        hidden = len(self.alternatives) - len(shown)
        return "\n".join(lines + ([f"    and {hidden} more"] if hidden else []))


def _described(term: Term) -> str:
    parts = [(name, getattr(term, name)) for name in ("compute", "exposed", "traffic")]
    seconds = ", ".join(f"{name} {format_seconds(value)}" for name, value in parts if value)
    held = f"holds {format_bytes(term.num_bytes)}" if term.num_bytes else ""
    where = f"with {term.neighbour}" if term.neighbour else "itself"
    return f"{where}: " + "; ".join(filter(None, (seconds, held)))


@dataclass(frozen=True, slots=True)
class WhatIf:
    """The best plan in which one choice is another. ``changed``: (kind, name, before, after) of all that differs."""

    prediction: Prediction
    changed: tuple[tuple[str, str, str, str], ...]


@dataclass(frozen=True, slots=True)
class Ranking:
    """Plans, fastest first, as choices per (kind, name) that differ from the first. ``exact``: whether these are the
    best of all plans (by the additive price); otherwise of those that differ from the first in one choice, and those
    that the search has seen."""

    plans: tuple[tuple[Prediction, tuple[tuple[str, str, str, str], ...]], ...]
    exact: bool


def explain(search: Search, name: str) -> Explanation:
    """Why an operator (or the storage of a parameter) is as it is. Raises PlanError for an unknown name."""
    cost, assignment = search.cost, search.outcome.assignment
    variable = _find(cost, name)
    local = _local(cost, assignment, variable)
    bounds = _bounds(search, variable)
    alternatives = []
    for value in range(cost.variables[variable].size):
        terms = tuple(
            _term(neighbour, components[value], _messages(search, variable, value, other))
            for other, neighbour, components in local
        )
        alternatives.append(
            Alternative(_text(cost, variable, value), value == assignment[variable], float(bounds[value]), terms)
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
    ordered = sorted(alternatives, key=lambda own: (own.step_seconds, not own.chosen, own.seconds))
    kind = cost.variables[variable].kind
    return Explanation(name, kind, tuple(ordered), _text(cost, variable, alone), decided_by, favour)


def _term(neighbour: str, components: Floats, messages: tuple[Message, ...]) -> Term:
    exposed, compute, traffic, num_bytes = map(float, components)
    return Term(neighbour, exposed, compute, traffic, num_bytes, messages)


def what_if(search: Search, name: str, choice: str) -> WhatIf:
    """The best plan in which ``name`` has the strategy (or layout) ``choice``, as ``explain`` prints it. Raises
    PlanError for one that there is not."""
    cost = search.cost
    variable = _find(cost, name)
    texts = [_text(cost, variable, value) for value in range(cost.variables[variable].size)]
    wanted = " ".join(sorted(choice.split()))
    values = [i for i, text in enumerate(texts) if wanted in (text, " ".join(sorted(text.split())))]
    if not values:
        raise PlanError(
            problem(f"{choice!r} is no alternative of {name}", fix=f"one of {', '.join(map(repr, texts[:12]))}")
        )
    found = _completed(search, {variable: values[0]})
    return WhatIf(_predicted(search, found), tuple(_differences(cost, search.outcome.assignment, found)))


def top(search: Search, k: int) -> Ranking:
    """The ``k`` best plans."""
    cost, best = search.cost, search.outcome
    count = len(cost.variables)
    exact = k * count * count <= EXACT_WORK
    candidates = [best.assignment, *best.candidates]
    if exact:
        candidates += [own for _, own in k_best(cost.weighted(_weights(search)), k)]
    else:
        candidates += list(_neighbours(search, k))
    known = {tuple(own): step_seconds(cost.components(own)) for own in candidates}
    first = known[tuple(best.assignment)]
    ordered = sorted(known, key=lambda own: (known[own], own != tuple(best.assignment)))[:k]
    if known[ordered[0]] < first:  # another is better on paper; a simulation preferred the plan
        ordered = [tuple(best.assignment), *[own for own in ordered if own != tuple(best.assignment)]][:k]
    return Ranking(
        tuple(
            (_predicted(search, list(own)), tuple(_differences(cost, best.assignment, list(own)))) for own in ordered
        ),
        exact,
    )


def write_cost_graph(search: Search, path: str | Path) -> None:
    """The cost graph as JSON, or as DOT if the path ends in ``.dot``."""
    path = Path(path)
    text = _dot(search) if path.suffix == ".dot" else json.dumps(_as_data(search), indent=1)
    path.write_text(text + "\n", encoding="utf-8")


# ------------------------------------------------------------------------------------------------------------ variables


def _find(cost: CostGraph, name: str) -> int:
    """The variable of an operator, or of the storage of a parameter (by its name)."""
    names = {(v.kind, _shown(cost, v)): i for i, v in enumerate(cost.variables)}
    for kind in ("operator", "storage", "shared"):
        if (kind, name) in names:
            return names[kind, name]
    for view in cost.folded:
        if view.op == name:
            home = cost.variables[view.home]
            raise PlanError(
                problem(
                    f"{name} only renames dims: it runs in the layout that its operand has",
                    fix=f"explain {_shown(cost, home)}",
                )
            )
    if name in cost.domains.graph.op_by_name:
        raise PlanError(f"{name} has no choice: it depends on no parameter and is made where it is needed")
    known = [own for _, own in names]
    near = get_close_matches(name, known, 3)
    raise PlanError(
        problem(f"the search has no choice for {name!r}", fix=f"one of {', '.join(near or known[:6])}, ...")
    )


def _shown(cost: CostGraph, variable: Variable) -> str:
    """Parameters by their names in the module, values by the operator that computes them."""
    graph = cost.domains.graph
    if variable.kind == "operator":
        return variable.name
    source = graph.source_of.get(variable.name)
    if source is not None:
        return source.names[0] if variable.kind == "storage" else f"shared {source.names[0]}"
    return f"shared {graph.producer[variable.name].name}"


def _text(cost: CostGraph, variable: int, value: int) -> str:
    own, domains = cost.variables[variable], cost.domains
    if own.kind == "operator":
        choices = domains.by_sub_axis(cost.domain_of[variable].choices[value])
        return domains.strategy_of(choices).format(domains.axes.mesh) or "whole"
    layout = domains.routes(own.name).layout(int(cost.nodes[variable][value]))
    return format_layout(layout, domains.graph.by_name[own.name].dtype)


def _differences(cost: CostGraph, before: list[int], after: list[int]) -> Iterator[tuple[str, str, str, str]]:
    for i, variable in enumerate(cost.variables):
        if before[i] != after[i]:
            yield variable.kind, _shown(cost, variable), _text(cost, i, before[i]), _text(cost, i, after[i])


# --------------------------------------------------------------------------------------------------------------- prices


def _weights(search: Search) -> Weights:
    """Those under which the least sum is a bound of the step: what hides behind the other counts nothing."""
    hidden = search.outcome.components[TRAFFIC] <= search.outcome.components[COMPUTE]
    return Weights(1.0, 1.0, 0.0) if hidden else Weights(1.0, 0.0, 1.0)


def _bounds(search: Search, variable: int) -> Floats:
    """Per value of a variable, a bound of the step of every plan that has it (exact where the plan reaches it)."""
    marginal = _solved(search.cost.weighted(_weights(search)), variable).marginal
    assert marginal is not None, "the variable was eliminated last"
    return marginal


def _solved(table: Problem, last: int | None = None) -> Solution:
    """By elimination. Raises PlanError where that is too wide."""
    try:
        return solve(table, last=last)
    except TooWide as error:
        raise PlanError(
            problem(
                f"the plan cannot be explained: the model is too densely connected ({error})",
                fix="compare plans in which the operator has other strategies: sw.plan(..., strategies=...)",
            )
        ) from error


def _completed(search: Search, fixed: dict[int, int]) -> list[int]:
    """The best assignment found that has some values."""
    cost = search.cost
    weights = (Weights(1.0, 1.0, 0.0), Weights(1.0, 0.0, 1.0), Weights(1.0, 0.5, 0.5))
    found = [_solved(restricted(cost.weighted(own), fixed)).assignment for own in weights]
    return min(found, key=lambda own: step_seconds(cost.components(own)))


def _predicted(search: Search, assignment: list[int]) -> Prediction:
    return search.prediction(assignment)


def _local(cost: CostGraph, assignment: list[int], variable: int) -> list[tuple[int | None, str, Floats]]:
    """(neighbour, its name, [values, components]) of all tables of a variable, its own first."""
    size = cost.variables[variable].size
    own = np.zeros((size, len(COMPONENTS)))
    found: dict[int, Floats] = {}
    for scope, kind in cost.factors:
        if variable not in scope:
            continue
        other = next((v for v in scope if v != variable), None)
        total = own if other is None else found.setdefault(other, np.zeros_like(own))
        index = tuple(slice(None) if v == variable else assignment[v] for v in scope)
        for i, table in enumerate(cost.kinds[kind]):
            if table is not None:
                total[:, i] += table[index]
    named = [(other, _named(cost, other), table) for other, table in found.items()]
    return [(None, "", own), *named]


def _named(cost: CostGraph, variable: int) -> str:
    own = cost.variables[variable]
    return f"storage of {_shown(cost, own)}" if own.kind == "storage" else _shown(cost, own)


def _messages(search: Search, variable: int, value: int, other: int | None) -> tuple[Message, ...]:
    """What is communicated between a variable at a value and a neighbour as it is chosen."""
    if other is None:
        return ()
    cost, assignment = search.cost, list(search.outcome.assignment)
    assignment[variable] = value
    maker, taker = min(variable, other), max(variable, other)
    found: list[Message] = []
    for name, source, target in _ways(cost, maker, taker, assignment):
        found.extend(_collectives(cost, name, source, target))
    return tuple(found)


def _ways(cost: CostGraph, maker: int, taker: int, assignment: list[int]) -> Iterator[tuple[str, int, int]]:
    """(value, node it is in, node it is needed in) of the conversions between two variables, each once."""
    own = cost.variables[taker]
    if own.kind == "shared":
        made_by, made = cost.made[own.name]
        if made_by == maker:
            yield own.name, int(made[assignment[maker]]), int(cost.nodes[taker][assignment[taker]])
        return
    if own.kind != "operator":
        return
    domain, op = cost.domain_of[taker], cost.domains.graph.op_by_name[own.name]
    seen = set()
    for position, name in enumerate(op.operands):
        nodes = domain.operands[position]
        if nodes is None or name not in cost.home or cost.home[name][0] != maker:
            continue
        way = name, int(cost.home[name][1][assignment[maker]]), int(nodes[assignment[taker]])
        if way not in seen:
            seen.add(way)
            yield way


def _collectives(cost: CostGraph, name: str, source: int, target: int) -> Iterator[Message]:
    if source == target:
        return
    domains = cost.domains
    routes, prices, mesh = domains.routes(name), domains.prices, domains.axes.mesh
    moves = routes.moves(source, target)
    for backward in (False, True) if routes.tensor.differentiable else (False,):
        itemsize = routes.tensor.grad_itemsize if backward else routes.tensor.itemsize
        for move in reversed(moves) if backward else moves:
            collective = collective_of(move, itemsize, backward=backward)
            if collective is not None:
                yield Message(
                    collective.kind,
                    mesh.format_axes(collective.axes),
                    collective.num_bytes,
                    "+".join(prices.links.level_names(collective.axes)),
                    "backward" if backward else "forward",
                    prices.links.seconds(collective.kind, collective.axes, collective.num_bytes),
                )


def _neighbours(search: Search, k: int) -> Iterator[list[int]]:
    """The k best assignments that differ from the plan in one choice."""
    cost, assignment = search.cost, search.outcome.assignment
    total = search.cost.components(assignment)
    at: dict[int, list[tuple[tuple[int, ...], int]]] = {}
    for scope, kind in cost.factors:
        for variable in scope:
            at.setdefault(variable, []).append((scope, kind))
    found: list[tuple[float, int, int]] = []
    for variable, factors in at.items():
        options = np.zeros((cost.variables[variable].size, len(COMPONENTS)))
        for scope, kind in factors:
            index = tuple(slice(None) if v == variable else assignment[v] for v in scope)
            for i, table in enumerate(cost.kinds[kind]):
                if table is not None:
                    options[:, i] += table[index]
        there = total - options[assignment[variable]] + options
        seconds = there[:, EXPOSED] + np.maximum(there[:, COMPUTE], there[:, TRAFFIC])
        found += [(float(s), variable, i) for i, s in enumerate(seconds) if i != assignment[variable]]
    for _, variable, value in sorted(found)[:k]:
        yield [*assignment[:variable], value, *assignment[variable + 1 :]]


# ------------------------------------------------------------------------------------------------------------- the file


def _as_data(search: Search) -> dict[str, Any]:
    """Variables with their values and own prices, and edges with the numbers of their tables."""
    cost, assignment = search.cost, search.outcome.assignment
    own: dict[int, list[int]] = {}
    edges = []
    for scope, kind in cost.factors:
        if len(scope) == 1:
            own.setdefault(scope[0], []).append(kind)
        else:
            edges.append(
                {
                    "from": _label(cost, scope[0]),
                    "to": _label(cost, scope[1]),
                    "prices": kind,
                    **_at(search, scope, kind),
                }
            )
    variables = [
        {
            "name": _label(cost, i),
            "kind": variable.kind,
            "alternatives": [_text(cost, i, value) for value in range(variable.size)],
            "prices": own.get(i, []),
            "chosen": assignment[i],
        }
        for i, variable in enumerate(cost.variables)
    ]
    tables = [
        {name: table.tolist() for name, table in zip(COMPONENTS, kind, strict=True) if table is not None}
        for kind in cost.kinds
    ]
    return {
        "mesh": dict(search.mesh.axes),
        "units": {"exposed": "s", "compute": "s", "traffic": "s", "bytes": "B"},
        "step_seconds": search.outcome.seconds,
        "bound": search.outcome.bound,
        "variables": variables,
        "edges": edges,
        "views": [{"operator": view.op, "follows": _label(cost, view.home)} for view in cost.folded],
        "tables": tables,
    }


def _at(search: Search, scope: tuple[int, ...], kind: int) -> dict[str, float]:
    """The chosen entry of a table, component by component."""
    at = tuple(search.outcome.assignment[v] for v in scope)
    tables = zip(COMPONENTS, search.cost.kinds[kind], strict=True)
    return {name: float(table[at]) for name, table in tables if table is not None and table[at]}


def _label(cost: CostGraph, variable: int) -> str:
    return _named(cost, variable)


def _dot(search: Search) -> str:
    """Chosen strategies as nodes, chosen conversions as edges (bold where they take time)."""
    cost, assignment = search.cost, search.outcome.assignment
    shapes = {"operator": "box", "storage": "cylinder", "shared": "ellipse"}
    lines = ["digraph cost {", "  node [fontname=monospace];"]
    own: dict[int, float] = {}
    for scope, kind in cost.factors:
        if len(scope) == 1:
            entry = _at(search, scope, kind)
            own[scope[0]] = own.get(scope[0], 0.0) + sum(v for name, v in entry.items() if name != "bytes")
    for i, variable in enumerate(cost.variables):
        label = json.dumps(
            f"{_label(cost, i)}\n{_text(cost, i, assignment[i])}\n"
            f"1 of {variable.size}, {format_seconds(own.get(i, 0.0))}"
        )
        lines.append(f"  v{i} [shape={shapes[variable.kind]}, label={label}];")
    for scope, kind in cost.factors:
        if len(scope) == 2:
            seconds = sum(v for name, v in _at(search, scope, kind).items() if name != "bytes")
            style = f' [label="{format_seconds(seconds)}", style=bold]' if seconds else ""
            lines.append(f"  v{scope[0]} -> v{scope[1]}{style};")
    return "\n".join([*lines, "}"])
