"""The ways in which rows come to their experts, per layer, as one table: ``plan.report.explain("experts")``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from shardwise.errors import PlanError
from shardwise.graph.grouped import grouped_mm
from shardwise.graph.ir import Op
from shardwise.layouts.choice import BY_KEY, AxisChoice, Split
from shardwise.plans.quantities import format_bytes, format_seconds
from shardwise.report.alternatives import WIDTH, empty_table, format_table
from shardwise.report.explain import find_variable, step_bounds, text_of
from shardwise.rules.rule import base_name
from shardwise.search.auto import MeshSearch, best_completion
from shardwise.search.cost_graph import OperatorVariable

# Operator of a search -> its names in the plan: equal stages share a search.
Names = Mapping[str, Sequence[str]]

WAYS = ("exchange", "gather", "columns", "whole")
EXCHANGE, GATHER, COLUMNS, WHOLE = WAYS
MULTIPLIERS = (0.0, 1.0, 0.5)  # of traffic, as what_if has them


@dataclass(frozen=True, slots=True)
class ExpertWay:
    """A way in which a layer's rows come to its experts.

    Attributes:
        way: ``"exchange"``: rows travel to the owners of their experts. ``"gather"``: owners of experts have all rows.
            ``"columns"``: every device has a part of all experts. ``"whole"``: every device has all experts whole.
        strategy: Of the layer's first product, the cheapest that goes this way.
        chosen: Whether the plan goes this way.
        price: Seconds: the additive price of the best plan of the space that goes this way in this layer.
        compute, exposed, traffic: The parts of that price (``Prediction``).
        num_bytes: Parameters, gradients, optimizer states and saved values of a device under that plan.
    """

    way: str
    strategy: str
    chosen: bool
    price: float
    compute: float
    exposed: float
    traffic: float
    num_bytes: float


@dataclass(frozen=True, slots=True)
class ExpertLayer:
    """Equal layers of experts with the same choice. ``names``: the first product of each; ``ways``: those that the
    search has, the cheapest first; ``rows_follow``: whether rows may travel there; ``mixed_by``: the operators between
    products that take several rows together, for which rows return from their experts."""

    names: tuple[str, ...]
    ways: tuple[ExpertWay, ...]
    rows_follow: bool
    mixed_by: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ExpertWays:
    """The layers of experts of a plan. ``imbalance``: the rows planned for on the busiest owner, over the mean."""

    layers: tuple[ExpertLayer, ...]
    imbalance: float

    def __str__(self) -> str:
        first, texts = "first product of the experts", ("", "way", "strategy")
        titles = (first, *texts, "price", "compute", "exposed", "traffic", "memory")
        table = empty_table(titles, left=texts, folded=first)
        for layer in self.layers:
            more = len(layer.names) - 1
            name = layer.names[0] + (f" and {more} more like it" if more else "")
            for way in layer.ways:
                seconds = (way.price, way.compute, way.exposed, way.traffic)
                cells = map(format_seconds, seconds)
                mark = "*" if way.chosen else ""
                table.add_row(name, mark, way.way, way.strategy, *cells, format_bytes(int(way.num_bytes)))
                name = ""
            if not layer.rows_follow:
                table.add_row(name, "", EXCHANGE, "no: rows follow no keys here")
            for mixing in layer.mixed_by:
                table.add_row(f"  rows return for {mixing}, which mixes them")
        rows = f"{self.imbalance:g} times the mean of rows on the busiest owner (imbalance=)"
        return f"{format_table(table, WIDTH)}\nadditive price of the best plan with one layer that way; {rows}"


def expert_ways(searches: Iterable[tuple[MeshSearch, Names]], imbalance: float) -> ExpertWays:
    """Return the ways of all layers of experts, by each search for a part of the model. Raises PlanError if there are
    none, or if a search is too densely connected."""
    layers = tuple(layer for search, names in searches for layer in _layers(search, names))
    if not layers:
        raise PlanError("the model has no experts whose product was chosen by price", fix="explain an operator's name")
    return ExpertWays(layers, imbalance)


def _layers(search: MeshSearch, names: Names) -> list[ExpertLayer]:
    domains = search.cost.domains
    products = [op for op in domains.operators if op.target == grouped_mm._opoverload]
    first = {op.operands[2]: op for op in reversed(products)}  # keys -> the product to which their tokens come
    alike: dict[tuple[int, int], list[Op]] = {}
    for op in reversed(first.values()):
        value = search.outcome.assignment[find_variable(search.cost, op.name)]
        alike.setdefault((domains.choosing.kind(op), value), []).append(op)
    return [_layer(search, ops, names) for ops in alike.values()]


def _layer(search: MeshSearch, ops: Sequence[Op], names: Names) -> ExpertLayer:
    cost, number = search.cost, find_variable(search.cost, ops[0].name)
    variable = cost.variables[number]
    assert isinstance(variable, OperatorVariable), "the strategy of a product"
    chosen = search.outcome.assignment[number]
    least = step_bounds(search, number)
    of_way: dict[str, int] = {}
    ways_of = [way_of(choices) for choices in variable.domain.choices]
    for value in np.argsort(least, kind="stable").tolist():
        of_way.setdefault(ways_of[value], value)
    of_way[ways_of[chosen]] = chosen
    found = []
    for way, value in of_way.items():
        best = search.outcome.assignment if value == chosen else best_completion(cost, {number: value}, MULTIPLIERS)
        prediction = search.prediction(best)
        prices = (prediction.additive_price, prediction.compute, prediction.exposed, prediction.traffic)
        price, compute, exposed, traffic = (prediction.passes * price for price in prices)
        text, is_chosen = text_of(search, number, value), value == chosen
        found.append(ExpertWay(way, text, is_chosen, price, compute, exposed, traffic, prediction.num_bytes))
    shown = tuple(name for op in ops for name in names.get(op.name, (op.name,)))
    rules, graph, keys = cost.domains.choosing.rules, cost.domains.graph, {op.operands[2] for op in ops}
    follow = (rules[op.name].keyed for op in graph.ops if op.target == ops[0].target and op.operands[2] in keys)
    mixing = dict.fromkeys(keyed.behind for keyed in follow if keyed is not None and keyed.behind)
    mixed_by = tuple(names.get(name, (name,))[0] for name in mixing)
    return ExpertLayer(shown, tuple(sorted(found, key=lambda way: way.price)), EXCHANGE in ways_of, mixed_by)


def way_of(choices: Sequence[AxisChoice]) -> str:
    """Return the way in which rows come to experts under a strategy of a product by expert."""
    factors = {base_name(choice.factor) for choice in choices if isinstance(choice, Split)}
    if BY_KEY in choices:
        return EXCHANGE
    return GATHER if "e" in factors else COLUMNS if factors & {"n", "k"} else WHOLE
