"""The last word on a searched plan: its program is built and a step of it simulated, with overlap, buckets and peak
memory, which do not add up over choices.

The best few assignments that a search has seen are compared so, if the search prices them nearly alike, and data
parallelism; the fastest whose peak fits is taken. Bytes of the search leave out temporaries. Where these break the
limit, the search goes on under a limit that is lower by as much.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

from shardwise.search.auto import Prediction, Search, searched
from shardwise.search.dynamic_programming import step_seconds

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
    """What a simulation says of a program: seconds of a step, and the most memory with its position."""

    @property
    def seconds(self) -> float: ...

    @property
    def peak_bytes(self) -> int: ...

    @property
    def peak_at(self) -> str: ...


# Simulates an assignment of a search (``partition`` knows programs).
Simulate = Callable[[Search, list[int]], Simulated]


@dataclass(frozen=True)
class Ranked:
    """A search whose assignment is the one to take, and what is predicted for it. ``excess``: bytes of its peak beyond
    the limit."""

    search: Search
    prediction: Prediction
    excess: float


def ranked(search: Search, limit: float, simulate: Simulate | None) -> Ranked:
    """The fastest simulated assignment that fits, or, if none does, the one of the lowest peak."""
    outcome, size = search.outcome, len(search.cost.domains.graph.ops)
    count = 0 if simulate is None else min(MAX_CANDIDATES, MAX_OPERATORS // max(size, 1))
    if count == 0 or simulate is None:
        return Ranked(search, search.prediction(), 0.0)
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
    chosen = replace(outcome, assignment=assignment, components=search.cost.components(assignment), candidates=rest)
    search = replace(search, outcome=chosen)
    prediction = replace(
        search.prediction(),
        simulated_seconds=simulated.seconds,
        peak_bytes=float(simulated.peak_bytes),
        peak_at=simulated.peak_at,
    )
    return Ranked(search, prediction, max(0.0, simulated.peak_bytes - limit))


def fitted(search: Search, name: str, limit: float, simulate: Simulate | None) -> Ranked:
    """The ranked search, searched again under lower limits while its peak does not fit. Raises DoesNotFit when the
    search finds nothing under such a limit; the result may still be too large (``excess``)."""
    found, allowed = ranked(search, limit, simulate), limit
    for _ in range(RETRIES):
        if not found.excess:
            break
        allowed = min(allowed, found.prediction.num_bytes) - found.excess
        again = ranked(replace(searched(search.cost, name, allowed), reference=search.reference), limit, simulate)
        found = min(found, again, key=lambda own: own.excess)
    return found
