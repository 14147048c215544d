"""Plans whose transient bytes fit, too: a search that forbids choices with too many of them.

The bytes that a search adds up stay: parameters, gradients, states, saved values. A step also holds operands of the
operator that runs, and the buffers of a message, which do not add up: the most of them counts. So a limit on memory is
split, ``limit = bytes that stay + tau``. Choices with more transient bytes than tau are forbidden, the search goes on
under ``limit - tau``, and a few tau are tried. The transient bytes are estimates; what is found is judged by the true
peak of its program.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from shardwise.layouts.routes import Floats
from shardwise.search.auto import MeshSearch
from shardwise.search.constants import NUM_TRANSIENT_CAPS
from shardwise.search.cost_graph import BYTES, EXPOSED, Components, CostGraph, CostWeights
from shardwise.search.dynamic_programming import DoesNotFit
from shardwise.search.dynamic_programming import search as solve_step
from shardwise.search.solving import solver_of


def searches_within(search: MeshSearch, name: str, limit: float) -> list[MeshSearch]:
    """Return the searches with capped transients, the most promising first: those that should fit, by their seconds,
    then the others, by how much they hold. ``name``: of the search. Every one is the fastest under its cap, or, if
    nothing fits so, the one of least memory."""
    cost, ordered = search.cost, []
    moments = {number: table() for number, table in cost.transients.items()}
    for cap in _caps(cost, moments, search.outcome.assignment):
        capped = _within(cost, moments, cap)
        least = solver_of(name)(capped.weighted(CostWeights(0.0, 0.0, 0.0, 1.0)))
        if not np.isfinite(least.value):
            break  # lower caps forbid as much
        try:
            outcome = solve_step(capped, max(limit - cap, 0.0), solver_of(name))
        except DoesNotFit as error:
            outcome = solve_step(capped, error.num_bytes, solver_of(name))
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
