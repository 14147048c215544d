"""Plans other than the chosen one: the best plan with one choice changed, the k best plans, other pipelines, and
the plans of other searches."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from io import StringIO
from itertools import pairwise
from math import inf
from typing import NamedTuple

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from shardwise.costs.cluster import Cluster
from shardwise.costs.prediction import Prediction, between
from shardwise.costs.timeline import SimulatedStep
from shardwise.errors import PlanError
from shardwise.graph.cut import free_values
from shardwise.graph.grouped import grouped_mm
from shardwise.graph.ir import Graph, Op
from shardwise.graph.segments import block_of
from shardwise.layouts.choice import BY_KEY, AxisChoice, Split
from shardwise.plans.auto_stages import AutoStagesReport
from shardwise.plans.pipelines import PipelineResult
from shardwise.plans.plan import Plan
from shardwise.plans.price_scope import priced_cluster
from shardwise.plans.quantities import (
    format_bytes,
    format_bytes_interval,
    format_interval_seconds,
    format_seconds,
    format_seconds_interval,
)
from shardwise.plans.stage_planner import StagesDoNotFit
from shardwise.report.explain import find_variable, local_prices, step_bounds, text_of, variable_name
from shardwise.rules.rule import base_name
from shardwise.search.auto import MeshSearch, best_completion
from shardwise.search.constants import EXACT_GAP, MAX_CUT_MOVES, TOP_K_WIDENING
from shardwise.search.cost_graph import COMPUTE, EXPOSED, TRAFFIC, OperatorVariable
from shardwise.search.dynamic_programming import step_seconds
from shardwise.search.elimination import TooWide, k_best

WIDTH = 120
SHOWN = 3  # changes per plan that the table lists


class Change(NamedTuple):
    """A choice that differs between two plans. ``kind``: "operator", "storage", "shared" or "received"."""

    kind: str
    name: str
    before: str
    after: str


class WhatIf(NamedTuple):
    """A plan of the searched space. ``changed``: every choice that differs from the chosen plan."""

    prediction: Prediction
    changed: tuple[Change, ...]


@dataclass(frozen=True, slots=True)
class PlanRanking:
    """The chosen plan, then the others in the order of their additive price. ``exact``: they are proven to be the best
    of all plans; otherwise they are the best of those that were enumerated."""

    plans: tuple[WhatIf, ...]
    exact: bool

    def __str__(self) -> str:
        titles = ("", "additive price", "vs. chosen", "compute", "exposed", "traffic", "memory", "differs in")
        table = empty_table(titles, folded="differs in")
        first = self.plans[0].prediction
        for number, plan in enumerate(self.plans, 1):
            prediction = plan.prediction
            table.add_row(
                str(number),
                format_seconds(prediction.passes * prediction.additive_price),
                f"{prediction.additive_price / first.additive_price - 1:+.2%}" if plan.changed else "",
                *(
                    format_seconds(prediction.passes * seconds)
                    for seconds in (prediction.compute, prediction.exposed, prediction.traffic)
                ),
                format_bytes(prediction.num_bytes),
                _format_changes(plan.changed) if plan.changed else "the chosen plan",
            )
        what = "proven to be the best of all plans" if self.exact else "the best that were found, not proven"
        return f"{format_table(table, WIDTH)}\nby additive price after the chosen plan; {what}"


def empty_table(titles: Iterable[str], *, left: Collection[str] = (), folded: str = "") -> Table:
    """Return a table without rows. ``left``: titles of texts; ``folded``: that of texts that take several lines."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for title in titles:
        if title == folded:
            table.add_column(title, overflow="fold")
        else:
            table.add_column(title, justify="left" if title in left else "right", no_wrap=True)
    return table


def format_table(table: Table, width: int) -> str:
    console = Console(file=StringIO(), width=width, color_system=None)
    console.print(table)
    assert isinstance(console.file, StringIO)
    return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines() if line.strip())


def _format_changes(changed: tuple[Change, ...]) -> str:
    words = [f"{change.name}: {change.before or 'whole'} -> {change.after or 'whole'}" for change in changed[:SHOWN]]
    more = len(changed) - SHOWN
    return "; ".join([*words, *([f"and {more} more"] if more > 0 else [])])


def what_if(search: MeshSearch, name: str, choice: str) -> WhatIf:
    """Return the best plan in which ``name`` has the strategy (or layout) ``choice``, written as ``explain`` prints it.
    Raises PlanError for an unknown name or choice."""
    cost = search.cost
    variable = find_variable(cost, name)
    texts = [text_of(search, variable, value) for value in range(cost.variables[variable].size)]
    ordered = " ".join(sorted(choice.split()))
    values = [i for i, text in enumerate(texts) if ordered in (text, " ".join(sorted(text.split())))]
    if not values:
        raise PlanError(f"{choice!r} is no alternative of {name}", fix=f"one of {', '.join(map(repr, texts[:12]))}")
    assignment = best_completion(cost, {variable: values[0]}, (0.0, 1.0, 0.5))
    return WhatIf(search.prediction(assignment), tuple(_differences(search, search.outcome.assignment, assignment)))


def top(search: MeshSearch, k: int) -> PlanRanking:
    """Return the ``k`` best plans, the chosen one first."""
    cost, chosen = search.cost, tuple(search.outcome.assignment)
    seen = [search.outcome.assignment, *search.outcome.candidates]
    price_of = {tuple(assignment): step_seconds(cost.components(assignment)) for assignment in seen}
    exact = False
    for factor in TOP_K_WIDENING:
        listed, bound = _enumerate_best(search, k, factor)
        price_of |= {tuple(assignment): step_seconds(cost.components(assignment)) for assignment in listed}
        exact = sorted(price_of.values())[:k][-1] <= bound * (1 + EXACT_GAP)
        if exact or not bound:
            break
    others = sorted((values for values in price_of if values != chosen), key=lambda values: price_of[values])
    return PlanRanking(
        tuple(
            WhatIf(search.prediction(list(values)), tuple(_differences(search, list(chosen), list(values))))
            for values in [chosen, *others][:k]
        ),
        exact,
    )


def _enumerate_best(search: MeshSearch, k: int, factor: int) -> tuple[list[list[int]], float]:
    """Return ``k * factor`` of the best assignments, and a lower bound on the steps of all others. If the graph is too
    densely connected, return the neighbours of the plan and the bound 0 (unknown)."""
    try:
        listed = k_best(search.cost.weighted(search.bounding_weights), k * factor)
    except TooWide:
        return list(_neighbours(search, k)), 0.0
    return [assignment for _, assignment in listed], listed[-1][0] if len(listed) == k * factor else inf


def _differences(search: MeshSearch, before: list[int], after: list[int]) -> Iterator[Change]:
    cost = search.cost
    for i, variable in enumerate(cost.variables):
        if before[i] != after[i]:
            texts = text_of(search, i, before[i]), text_of(search, i, after[i])
            yield Change(variable.kind, variable_name(cost, variable), *texts)


def _neighbours(search: MeshSearch, k: int) -> Iterator[list[int]]:
    cost, assignment = search.cost, search.outcome.assignment
    total = search.cost.components(assignment)
    priced: list[tuple[float, int, int]] = []
    for variable in range(len(cost.variables)):
        options = np.sum([prices for *_, prices in local_prices(cost, assignment, variable)], axis=0)
        there = total - options[assignment[variable]] + options
        seconds = there[:, EXPOSED] + np.maximum(there[:, COMPUTE], there[:, TRAFFIC])
        priced += [(float(s), variable, i) for i, s in enumerate(seconds) if i != assignment[variable]]
    for _, variable, value in sorted(priced)[:k]:
        yield [*assignment[:variable], value, *assignment[variable + 1 :]]


# ----------------------------------------------------------------------------------------------------------------------
# Alternatives to the chosen pipeline, planned and simulated like it: other cuts, micro-batches of other sizes, and the
# other settings of a joint search.


class RankedPipeline(NamedTuple):
    """A pipeline with its simulated figures and its difference from the chosen one (``changed``; empty: the chosen
    one). ``num_bytes``: of the device that holds most; ``bubble``: idle share of the time of all pipeline ranks;
    ``plan``: None if a joint search kept only figures, without ``bubble``."""

    step_seconds: float
    num_bytes: float
    changed: str
    bubble: float | None = None
    plan: Plan | None = None


def rank_pipelines(
    pipeline: PipelineResult, k: int, joint: AutoStagesReport | None = None
) -> tuple[tuple[RankedPipeline, ...], int, int]:
    """Return the chosen pipeline and the best ``k`` - 1 others, how many others were considered, and how many of these
    were impossible. Cuts are moved one by one, by one block (without blocks: one operator), then by two, until there
    are enough. Raises PlanError if nothing was chosen by price."""
    if pipeline.plan.pipeline is None:
        raise PlanError("no stage was chosen by price", fix='plan with search="dynamic_programming"')
    config = pipeline.planner.config  # plan slower ones to the end, too
    planner = replace(pipeline.planner, config=replace(config, settings=replace(config.settings, known=inf)))
    others = [_ranked(plan, _size(plan)) for plan in pipeline.others]
    refused = 0
    if joint is not None:
        planned = [t for t in joint.considered if t.setting != joint.taken]
        others += [RankedPipeline(t.step_seconds, t.num_bytes, str(t.setting)) for t in planned if t.step_seconds]
        refused += sum(bool(t.refused) for t in planned)
    for distance in range(1, MAX_CUT_MOVES + 1):
        if distance > 1 and len(others) >= k - 1:
            break
        for changed, parts in _moved(pipeline, distance):
            try:
                others.append(_ranked(planner.of_cut(parts)[0].plan, changed))
            except (PlanError, StagesDoNotFit):
                refused += 1
    best = sorted(others, key=lambda other: other.step_seconds)[: k - 1]
    return (_ranked(pipeline.plan, ""), *best), len(others) + refused, refused


def _ranked(plan: Plan, changed: str) -> RankedPipeline:
    assert plan.pipeline is not None, "it was chosen by price"
    return RankedPipeline(plan.pipeline.step_seconds, plan.pipeline.memory_bytes, changed, plan.pipeline.bubble, plan)


def _size(plan: Plan) -> str:
    return f"micro-batch {plan.micro_batch} ({plan.micro_batches} passes)"


def _moved(pipeline: PipelineResult, distance: int) -> Iterator[tuple[str, list[list[str]]]]:
    """Yield a text and the operators of every stage, with one cut moved by ``distance`` starts of blocks. Stages that
    the user marked are not changed."""
    if pipeline.planner.config.marks:
        return
    names = [op.name for op in pipeline.graph.ops]
    at = {name: i for i, name in enumerate(names)}
    starts = [at[part[0]] for part in pipeline.parts]
    places = _places(pipeline.graph)
    for number, start in enumerate(starts[1:], 1):
        earlier = [place for place in places if starts[number - 1] < place < start]
        after = starts[number + 1] if number + 1 < len(starts) else len(names)
        later = [place for place in places if start < place < after]
        for place in (*earlier[::-1][distance - 1 : distance], *later[distance - 1 : distance]):
            bounds = [*starts[:number], place, *starts[number + 1 :], len(names)]
            cut = [names[first:last] for first, last in pairwise(bounds)]
            yield f"stage {number} begins with {names[place]}, not with {names[start]}", cut


def _places(graph: Graph) -> list[int]:
    """Return where a stage may begin: at a repeated block or after the last one; without blocks, at any operator.
    Operators that every stage computes for itself do not count."""
    free = free_values(graph)
    positions = [i for i, op in enumerate(graph.ops) if not free.issuperset(op.results)]
    blocks = [block_of(graph.ops[i].name) for i in positions]
    block_starts = [i for i, before, block in zip(positions[1:], blocks, blocks[1:], strict=False) if block != before]
    return block_starts if any(blocks) else positions[1:]


@dataclass(frozen=True, slots=True)
class PipelineRanking:
    """The chosen pipeline, then the others in the order of their simulated step. ``looked_at``: the number of others
    that were tried. ``refused`` of them could not be planned: a stage has no parameters, or does not fit."""

    pipelines: tuple[RankedPipeline, ...]
    looked_at: int
    refused: int

    def __str__(self) -> str:
        table = empty_table(("", "step", "vs. chosen", "bubble", "memory", "differs in"), folded="differs in")
        first = self.pipelines[0]
        cluster = None if first.plan is None else priced_cluster(first.plan)
        for number, pipeline in enumerate(self.pipelines, 1):
            table.add_row(
                str(number),
                format_seconds_interval(pipeline.step_seconds, cluster),
                f"{pipeline.step_seconds / first.step_seconds - 1:+.2%}" if pipeline.changed else "",
                "" if pipeline.bubble is None else f"{pipeline.bubble:.1%}",
                format_bytes_interval(pipeline.num_bytes, cluster),
                pipeline.changed or "the chosen pipeline",
            )
        refused = f" ({self.refused} of them could not be planned)" if self.refused else ""
        what = f"the best of {self.looked_at} others that were tried{refused}, not of all pipelines"
        return f"{format_table(table, WIDTH)}\nby simulated step after the chosen pipeline; {what}"


# ----------------------------------------------------------------------------------------------------------------------
# The table of ``sw.compare``: the plans of several searches for one model.

_COMPARED_WIDTH = 240


@dataclass(frozen=True, slots=True)
class ComparedPlan:
    """The plan of one search, or the error that it raised. ``planning_seconds``: the time of ``sw.plan``, capture
    included; ``step``: a simulated step of its program, at the same prices for every search."""

    search: str
    planning_seconds: float
    plan: Plan | None = None
    step: SimulatedStep | None = None
    error: str = ""

    @property
    def num_bytes(self) -> int:
        return (
            0
            if self.plan is None
            else sum(
                entry.num_bytes for backward in (False, True) for entry in self.plan.collectives(backward=backward)
            )
        )


@dataclass(frozen=True)
class Comparison:
    """The compared plans, in the order of ``searches``, on one cluster."""

    rows: tuple[ComparedPlan, ...]
    cluster: Cluster

    def __iter__(self) -> Iterator[ComparedPlan]:
        return iter(self.rows)

    def __getitem__(self, search: str) -> ComparedPlan:
        return next(row for row in self.rows if row.search == search)

    @property
    def best(self) -> ComparedPlan | None:
        """Return the row with the fastest simulated step; None if no search found a plan."""
        planned = [row for row in self.rows if row.step is not None]
        return min(planned, key=lambda row: row.step.seconds if row.step else 0.0, default=None)

    def __str__(self) -> str:
        titles = ("search", "planned in", "mesh", "simulated step", "compute", "exposed", "communication", "peak")
        table = empty_table((*titles, "price gap"), left=("search", "mesh"))
        faults = []
        for row in self.rows:
            if row.plan is None or row.step is None:
                table.add_row(row.search, format_seconds(row.planning_seconds), "no plan")
                faults.append(f"{row.search}: {row.error}")
                continue
            step, gap = row.step, row.plan.optimality_gap
            table.add_row(
                row.search,
                format_seconds(row.planning_seconds),
                ", ".join(f"{name}={size}" for name, size in row.plan.mesh.axes),
                format_interval_seconds(between(step.seconds, step.compute, self.cluster)),
                format_seconds(step.compute),
                format_seconds(step.exposed),
                f"{format_seconds(step.communication)}, {format_bytes(row.num_bytes)}",
                format_bytes_interval(step.peak_bytes, self.cluster),
                "" if gap is None else f"{gap:.2%}",
            )
        return "\n".join([format_table(table, _COMPARED_WIDTH), *faults])


# ----------------------------------------------------------------------------------------------------------------------
# The ways in which rows come to their experts, per layer, as one table: ``plan.report.explain("experts")``.

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
