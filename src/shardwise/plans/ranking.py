"""The last word on a searched plan: its program is built and a step of it simulated, with overlap, buckets and peak
memory, which do not add up over choices.

The best few assignments that a search has seen are compared so, if the search prices them nearly alike, and data
parallelism; the fastest whose peak fits is taken. Bytes of the search leave out temporaries. Where these break the
limit, the search goes on under a limit that is lower by as much.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

from shardwise.search.auto import PassedOver, Prediction, Search, searched
from shardwise.search.dynamic_programming import DoesNotFit, step_seconds

MAX_CANDIDATES = 4
# Operators in all the programs that are built for one plan: about ten seconds. A model of more than this many operators
# gets no simulation, and its peak is not checked.
MAX_OPERATORS = 12_000
# Data parallelism is compared in models of at most this many operators: in larger ones the start of a message, which
# buckets save, is little beside the rest.
REFERENCE_OPERATORS = 1_000
# Assignments that the search prices higher than this times the best are not looked at.
NEAR = 1.05
# A simulated step must be faster than that of the search's best by this factor to be preferred.
CLEARLY = 0.999
RETRIES = 3


class Simulated(Protocol):
    """What a simulation says of a program: seconds of a step, and the most memory, where that is and what it is made
    of."""

    @property
    def seconds(self) -> float: ...

    @property
    def peak_bytes(self) -> int: ...

    @property
    def peak_at(self) -> str: ...

    @property
    def peak_parts(self) -> Mapping[str, int]: ...


# Simulates an assignment of a search (``partition`` knows programs).
Simulate = Callable[[Search, list[int]], Simulated]


@dataclass(frozen=True)
class Ranked:
    """A search whose assignment is the one to take, and what is predicted for it. ``excess``: bytes of its peak beyond
    the limit; ``parts``: what the peak is made of (empty where nothing was simulated)."""

    search: Search
    prediction: Prediction
    excess: float = 0.0
    parts: Mapping[str, int] = field(default_factory=dict)


def ranked(search: Search, limit: float, simulate: Simulate | None) -> Ranked:
    """The fastest simulated assignment that fits, or, if none does, the one of the lowest peak."""
    outcome, size = search.outcome, len(search.cost.domains.graph.ops)
    count = 0 if simulate is None else min(MAX_CANDIDATES, MAX_OPERATORS // max(size, 1))
    if count == 0 or simulate is None:
        prediction = search.prediction()
        return Ranked(search, prediction, max(0.0, prediction.num_bytes - limit))
    near = [own for own in outcome.candidates if step_seconds(search.cost.components(own)) <= NEAR * outcome.seconds]
    considered = [outcome.assignment, *near[: count - 1]]
    if search.reference is not None and search.reference not in considered:
        considered.append(search.reference)
    found = [(own, simulate(search, own)) for own in considered]
    fitting = [item for item in found if item[1].peak_bytes <= limit]
    if not fitting:
        best = min(found, key=lambda item: item[1].peak_bytes)
    else:
        best = fitting[0]
        for item in fitting[1:]:
            if item[1].seconds < CLEARLY * best[1].seconds:
                best = item
    assignment, simulated = best
    rest = [own for own in [outcome.assignment, *outcome.candidates] if own != assignment]
    passed_over = None
    if assignment != outcome.assignment:
        _, first = found[0]
        passed_over = PassedOver(outcome.seconds, first.seconds, float(first.peak_bytes))
    chosen = replace(outcome, assignment=assignment, components=search.cost.components(assignment), candidates=rest)
    search = replace(search, outcome=chosen)
    prediction = replace(
        search.prediction(),
        simulated_seconds=simulated.seconds,
        peak_bytes=float(simulated.peak_bytes),
        peak_at=simulated.peak_at,
        passed_over=passed_over,
    )
    return Ranked(search, prediction, max(0.0, simulated.peak_bytes - limit), simulated.peak_parts)


def fitted(search: Search, name: str, limit: float, simulate: Simulate | None) -> Ranked:
    """The ranked search; while its peak does not fit, what the search finds under lower limits, and in the end what
    needs the least. If all of them are too large (``excess``), the one of the lowest peak."""
    found, allowed = ranked(search, limit, simulate), limit
    for attempt in range(RETRIES + 1):
        if not found.excess:
            break
        allowed = min(allowed, found.prediction.num_bytes) - found.excess if attempt < RETRIES else 0.0
        again, is_least = _searched_below(search, name, allowed)
        found = min(found, ranked(again, limit, simulate), key=lambda own: own.excess)
        if is_least:
            break
    return found


def _searched_below(search: Search, name: str, allowed: float) -> tuple[Search, bool]:
    """The search under a limit, and whether that was too low and it is the one of least memory instead."""
    try:
        return replace(searched(search.cost, name, allowed), reference=search.reference), False
    except DoesNotFit as error:
        least = error.num_bytes
    return replace(searched(search.cost, name, least), reference=search.reference), True
