"""Plans other than the chosen one: the best plan with one choice changed, and the k best plans."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from io import StringIO
from math import inf
from typing import NamedTuple

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from shardwise.costs.prediction import Prediction
from shardwise.errors import PlanError
from shardwise.plans.quantities import format_bytes, format_seconds
from shardwise.report.explain import find_variable, text_of, variable_name
from shardwise.search.auto import MeshSearch, best_completion
from shardwise.search.constants import EXACT_GAP, TOP_K_WIDENING
from shardwise.search.cost_graph import COMPONENTS, COMPUTE, EXPOSED, TRAFFIC
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
    at: dict[int, list[tuple[tuple[int, ...], int]]] = {}
    for scope, kind in cost.factors:
        for variable in scope:
            at.setdefault(variable, []).append((scope, kind))
    priced: list[tuple[float, int, int]] = []
    for variable, factors in at.items():
        options = np.zeros((cost.variables[variable].size, len(COMPONENTS)))
        for scope, kind in factors:
            index = tuple(slice(None) if v == variable else assignment[v] for v in scope)
            for i, table in enumerate(cost.kinds[kind]):
                if table is not None:
                    options[:, i] += table[index]
        there = total - options[assignment[variable]] + options
        seconds = there[:, EXPOSED] + np.maximum(there[:, COMPUTE], there[:, TRAFFIC])
        priced += [(float(s), variable, i) for i, s in enumerate(seconds) if i != assignment[variable]]
    for _, variable, value in sorted(priced)[:k]:
        yield [*assignment[:variable], value, *assignment[variable + 1 :]]
