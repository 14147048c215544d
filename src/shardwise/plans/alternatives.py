"""Other plans than the chosen one: what if one choice is another, and the next best."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from shardwise.errors import PlanError, problem
from shardwise.plans.bounds import bounding_weights, solved
from shardwise.plans.choice_names import find, shown, text_of
from shardwise.search.auto import Prediction, Search
from shardwise.search.cost_graph import COMPONENTS, COMPUTE, EXPOSED, TRAFFIC, CostGraph, Weights
from shardwise.search.dynamic_programming import step_seconds
from shardwise.search.elimination import restricted
from shardwise.search.k_best import k_best

# ``top`` is exact while it needs no more eliminations of single variables than this: about ten seconds.
EXACT_WORK = 300_000


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


def what_if(search: Search, name: str, choice: str) -> WhatIf:
    """The best plan in which ``name`` has the strategy (or layout) ``choice``, as ``explain`` prints it. Raises
    PlanError for one that there is not."""
    cost = search.cost
    variable = find(cost, name)
    texts = [text_of(cost, variable, value) for value in range(cost.variables[variable].size)]
    wanted = " ".join(sorted(choice.split()))
    values = [i for i, text in enumerate(texts) if wanted in (text, " ".join(sorted(text.split())))]
    if not values:
        raise PlanError(
            problem(f"{choice!r} is no alternative of {name}", fix=f"one of {', '.join(map(repr, texts[:12]))}")
        )
    found = _completed(search, {variable: values[0]})
    return WhatIf(search.prediction(found), tuple(_differences(cost, search.outcome.assignment, found)))


def top(search: Search, k: int) -> Ranking:
    """The ``k`` best plans."""
    cost, best = search.cost, search.outcome
    count = len(cost.variables)
    exact = k * count * count <= EXACT_WORK
    candidates = [best.assignment, *best.candidates]
    if exact:
        candidates += [own for _, own in k_best(cost.weighted(bounding_weights(search)), k)]
    else:
        candidates += list(_neighbours(search, k))
    known = {tuple(own): step_seconds(cost.components(own)) for own in candidates}
    first = known[tuple(best.assignment)]
    ordered = sorted(known, key=lambda own: (known[own], own != tuple(best.assignment)))[:k]
    if known[ordered[0]] < first:  # another is better on paper; a simulation preferred the plan
        ordered = [tuple(best.assignment), *[own for own in ordered if own != tuple(best.assignment)]][:k]
    return Ranking(
        tuple((search.prediction(list(own)), tuple(_differences(cost, best.assignment, list(own)))) for own in ordered),
        exact,
    )


def _differences(cost: CostGraph, before: list[int], after: list[int]) -> Iterator[tuple[str, str, str, str]]:
    for i, variable in enumerate(cost.variables):
        if before[i] != after[i]:
            yield variable.kind, shown(cost, variable), text_of(cost, i, before[i]), text_of(cost, i, after[i])


def _completed(search: Search, fixed: dict[int, int]) -> list[int]:
    """The best assignment found that has some values."""
    cost = search.cost
    weights = (Weights(1.0, 1.0, 0.0), Weights(1.0, 0.0, 1.0), Weights(1.0, 0.5, 0.5))
    found = [solved(restricted(cost.weighted(own), fixed)).assignment for own in weights]
    return min(found, key=lambda own: step_seconds(cost.components(own)))


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
