"""Assignments of a search that are worth a simulation: their additive price is within a stated share of the least.

An additive price knows no order. Plans of equal price can differ much on a timeline, where traffic is hidden only by
the operators that run beside it. So the results of other searches are also considered: the least sum if nothing hides,
the greedy search, the next best, and data parallelism, whatever its price.

The planner builds their programs and simulates a step of each, with overlap, buckets and peak memory, which do not add
up over choices. ``rank_candidates`` takes the fastest that fits; of those that take about as long the plainest.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np

from shardwise.costs.ledger import Peak
from shardwise.costs.prediction import FasterPlan, PassedOver, Prediction
from shardwise.costs.timeline import SimulatedStep, figures_of
from shardwise.layouts.mesh import Mesh
from shardwise.layouts.routes import Floats
from shardwise.programs.builder import Choice
from shardwise.programs.spmd import SpmdProgram
from shardwise.search.auto import MeshSearch, assignment_of
from shardwise.search.constants import (
    CANDIDATE_PRICE_RATIO,
    CLEARLY_FASTER,
    MAX_CANDIDATES,
    MAX_CANDIDATES_PER_MESH,
    MAX_LISTED_VARIABLES,
    MAX_OPERATORS_FOR_GREEDY,
    MAX_OPERATORS_TO_COMPARE,
    MAX_SIMULATED_OPERATORS,
    NUM_LISTED_ASSIGNMENTS,
    TIED_SHARE,
)
from shardwise.search.cost_graph import BYTES, COMPUTE, EXPOSED, TRAFFIC, CostWeights
from shardwise.search.dynamic_programming import DoesNotFit, step_seconds
from shardwise.search.elimination import TooWide, k_best
from shardwise.search.recursive_programming import recursive_search

BOUNDED_SEARCH = "dynamic_programming"  # it knows how far the least price may be from what it found
NOTHING_HIDES = CostWeights(1.0, 1.0, 1.0)


@dataclass(frozen=True, eq=False)
class Candidate:
    """An assignment of a search, with its components."""

    search: MeshSearch
    assignment: list[int]
    components: Floats

    @property
    def additive_price(self) -> float:
        return step_seconds(self.components)

    @property
    def num_bytes(self) -> float:
        return float(self.components[BYTES])


def candidates(
    searches: Sequence[MeshSearch], name: str, limit: float, share: float = CANDIDATE_PRICE_RATIO
) -> list[Candidate]:
    """Return candidates of searches on several meshes, the cheapest first. Their prices are within ``share`` of its,
    their bytes within ``limit``; ``name``: of the search."""
    ordered = sorted(searches, key=lambda search: search.outcome.seconds)
    most = share * ordered[0].outcome.seconds
    size = max(len(ordered[0].cost.domains.graph.ops), 1)
    per_mesh = [list(_of_mesh(search, name, limit, most)) for search in ordered]
    turns = [
        of_one_mesh[turn]
        for turn in range(MAX_CANDIDATES_PER_MESH)
        for of_one_mesh in per_mesh
        if turn < len(of_one_mesh)
    ]
    return turns[: min(MAX_CANDIDATES, max(1, MAX_SIMULATED_OPERATORS // size) * len(per_mesh))]


def _of_mesh(search: MeshSearch, name: str, limit: float, most: float) -> Iterator[Candidate]:
    """Yield the search's own first, then those of other searches, then the next best by their unhidden seconds. Of
    those with the same components only one is yielded: they are the same plan up to symmetry."""
    outcome = search.outcome
    first = Candidate(search, outcome.assignment, outcome.components)
    yield first
    if name != BOUNDED_SEARCH:
        return
    count = min(NUM_LISTED_ASSIGNMENTS, MAX_LISTED_VARIABLES // max(len(search.cost.variables), 1))
    unhidden = _least(search, NOTHING_HIDES, max(count, 1))
    listed = [*_least(search, search.bounding_weights, count), *unhidden[:count]]
    others = [_candidate(search, assignment) for assignment in (*unhidden[:1], *_greedy(search, limit))]
    usual = [_candidate(search, assignment) for assignment in _data_parallel(search)]
    next_best = [_candidate(search, assignment) for assignment in chain(outcome.candidates, listed)]
    next_best.sort(key=lambda candidate: float(candidate.components[[EXPOSED, COMPUTE, TRAFFIC]].sum()))
    taken = [first]
    for candidate in (*others, *usual, *next_best):
        fits = (candidate.additive_price <= most or candidate in usual) and candidate.num_bytes <= limit
        if fits and not any(np.allclose(candidate.components, other.components, rtol=1e-9, atol=0) for other in taken):
            taken.append(candidate)
            yield candidate


def _candidate(search: MeshSearch, assignment: list[int]) -> Candidate:
    return Candidate(search, assignment, search.cost.components(assignment))


def _greedy(search: MeshSearch, limit: float) -> Iterator[list[int]]:
    """Yield the result of the greedy search, if it is found fast and fits."""
    if len(search.cost.domains.graph.ops) <= MAX_OPERATORS_FOR_GREEDY:
        with suppress(DoesNotFit):
            yield recursive_search(search.cost, limit).assignment


def _data_parallel(search: MeshSearch) -> Iterator[list[int]]:
    """Yield data parallelism, if it is in the space (the user's choices may leave it out)."""
    domains = search.cost.domains
    if len(domains.graph.ops) > MAX_OPERATORS_TO_COMPARE:
        return
    data_parallel = assignment_of(search.cost, domains.data_parallel)
    if data_parallel is not None:
        yield data_parallel


def _least(search: MeshSearch, weights: CostWeights, count: int) -> list[list[int]]:
    """Return the assignments of the least weighted sums."""
    try:
        return [assignment for _, assignment in k_best(search.cost.weighted(weights), count)]
    except TooWide:
        return []


@dataclass(frozen=True, eq=False)
class SimulatedCandidate:
    """A candidate with its program. ``peak``: the most that a device holds in a step of it; ``step``: None if the model
    is too large to be simulated; ``others``: bytes kept of other micro-batches in flight, ``kept_bytes`` of each.
    ``spmd``: None if both come from programs of fewer blocks (``search.block_extrapolation``). ``called``: the mesh
    with its axes named by role; ``num_roles``: how many different roles they have (``search.axis_names``)."""

    candidate: Candidate
    choice: Choice
    spmd: SpmdProgram | None
    peak: Peak
    step: SimulatedStep | None
    others: int = 0
    kept_bytes: int = 0
    called: Mesh | None = None
    num_roles: int = 0

    @property
    def num_bytes(self) -> float:
        return float(self.peak.num_bytes + self.others)

    @property
    def plainness(self) -> tuple[int, int]:
        """Return what makes a plan hard to read, less is plainer: its axes, and kinds of splits."""
        return 0 if self.called is None else len(self.called.axes), self.num_roles


@dataclass(frozen=True, eq=False)
class CandidateRanking:
    """Ranked candidates. ``best``: the one to take; ``cheapest``: that of the least additive price; ``limit``: the
    bytes of a device that they were ranked for; ``searches``: of all meshes (none: nothing of them fits); ``faster``:
    the fastest that fits, if ``best`` is a plainer one, which was ``plainer`` then."""

    best: SimulatedCandidate
    cheapest: SimulatedCandidate
    limit: float
    searches: tuple[MeshSearch, ...] = ()
    faster: SimulatedCandidate | None = None
    plainer: SimulatedCandidate | None = None

    @property
    def excess(self) -> float:
        return max(0.0, self.best.num_bytes - self.limit)

    @property
    def search(self) -> MeshSearch:
        """Return the search, with the best candidate as its outcome."""
        search, assignment = self.best.candidate.search, self.best.candidate.assignment
        seen = [search.outcome.assignment, *search.outcome.candidates]
        outcome = replace(
            search.outcome,
            assignment=assignment,
            components=self.best.candidate.components,
            candidates=[other for other in seen if other != assignment],
        )
        return replace(search, outcome=outcome)

    @property
    def prediction(self) -> Prediction:
        """Return the prediction for the best candidate."""
        best = self.best
        return replace(
            self.search.prediction(),
            faster=self._faster(),
            peak_bytes=best.num_bytes,
            peak_at=best.peak.where,
            passed_over=self._passed_over(),
            **figures_of(best.step),
        )

    def _faster(self) -> FasterPlan | None:
        faster, plainer = self.faster, self.plainer
        if faster is None or faster.step is None or plainer is None or plainer.step is None:
            return None
        if plainer.step.seconds <= faster.step.seconds:
            return None
        return FasterPlan(str(faster.called), faster.num_roles, faster.step.seconds, plainer.step.seconds)

    def _passed_over(self) -> PassedOver | None:
        cheapest, best = self.cheapest.candidate, self.best.candidate
        same = cheapest.search.mesh == best.search.mesh and cheapest.assignment == best.assignment
        if same or self.cheapest.step is None:
            return None
        seconds, num_bytes = self.cheapest.step.seconds, self.cheapest.num_bytes
        return PassedOver(cheapest.additive_price, seconds, num_bytes, num_bytes <= self.limit)


def rank_candidates(simulated: Sequence[SimulatedCandidate], limit: float) -> CandidateRanking:
    """Return the fastest of the simulated candidates (the cheapest first) that fits, the plainest of those that tie
    with it (TIED_SHARE), or, if none fits, that of the lowest peak."""
    fitting = [candidate for candidate in simulated if candidate.num_bytes <= limit]
    if not fitting:
        return CandidateRanking(min(simulated, key=lambda candidate: candidate.num_bytes), simulated[0], limit)
    best = fitting[0]
    for candidate in fitting[1:]:
        assert candidate.step is not None, "several candidates are simulated"
        assert best.step is not None, "several candidates are simulated"
        if candidate.step.seconds < CLEARLY_FASTER * best.step.seconds:
            best = candidate
    fastest = min(fitting, key=lambda candidate: 0.0 if candidate.step is None else candidate.step.seconds)
    if best.step is None or fastest.step is None:
        return CandidateRanking(best, simulated[0], limit)
    most, most_bytes = TIED_SHARE * fastest.step.seconds, TIED_SHARE * fastest.num_bytes
    tied = [
        candidate
        for candidate in fitting
        if candidate.step is not None and candidate.step.seconds <= most and candidate.num_bytes <= most_bytes
    ]
    plainest = min(candidate.plainness for candidate in tied)
    if best.plainness == plainest:
        return CandidateRanking(best, simulated[0], limit)
    plain = [candidate for candidate in tied if candidate.plainness == plainest]
    ranking = rank_candidates(plain, limit)
    return replace(ranking, cheapest=simulated[0], faster=best, plainer=ranking.best)
