"""The final choice among searched plans: programs are built and their steps simulated, with overlap, buckets and peak
memory, which do not add up over choices. The fastest candidate that fits is taken."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from shardwise.costs.ledger import Peak
from shardwise.costs.prediction import PassedOver, Prediction
from shardwise.costs.timeline import SimulatedStep
from shardwise.programs.spmd import Choice, SpmdProgram
from shardwise.search.auto import MeshSearch
from shardwise.search.candidates import Candidate
from shardwise.search.constants import CLEARLY_FASTER


@dataclass(frozen=True, eq=False)
class SimulatedCandidate:
    """A candidate with its program. ``peak``: the most that a device holds in a step of it; ``step``: None if the model
    is too large to be simulated; ``others``: bytes kept of other micro-batches in flight. ``spmd``: None if both come
    from programs of fewer blocks (``search.block_extrapolation``)."""

    candidate: Candidate
    choice: Choice
    spmd: SpmdProgram | None
    peak: Peak
    step: SimulatedStep | None
    others: int = 0

    @property
    def num_bytes(self) -> float:
        return float(self.peak.num_bytes + self.others)


@dataclass(frozen=True, eq=False)
class CandidateRanking:
    """Ranked candidates. ``best``: the one to take; ``cheapest``: that of the least additive price; ``limit``: the
    bytes of a device that they were ranked for."""

    best: SimulatedCandidate
    cheapest: SimulatedCandidate
    limit: float

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
            simulated_seconds=0.0 if best.step is None else best.step.seconds,
            peak_bytes=best.num_bytes,
            peak_at=best.peak.where,
            passed_over=self._passed_over(),
        )

    def _passed_over(self) -> PassedOver | None:
        cheapest, best = self.cheapest.candidate, self.best.candidate
        same = cheapest.search.mesh == best.search.mesh and cheapest.assignment == best.assignment
        if same or self.cheapest.step is None:
            return None
        seconds, num_bytes = self.cheapest.step.seconds, self.cheapest.num_bytes
        return PassedOver(cheapest.additive_price, seconds, num_bytes, num_bytes <= self.limit)


def rank_candidates(simulated: Sequence[SimulatedCandidate], limit: float) -> CandidateRanking:
    """Return the fastest of the simulated candidates (the cheapest first) that fits, or, if none does, that of the
    lowest peak."""
    fitting = [candidate for candidate in simulated if candidate.num_bytes <= limit]
    if not fitting:
        return CandidateRanking(min(simulated, key=lambda candidate: candidate.num_bytes), simulated[0], limit)
    best = fitting[0]
    for candidate in fitting[1:]:
        assert candidate.step is not None, "several candidates are simulated"
        assert best.step is not None, "several candidates are simulated"
        if candidate.step.seconds < CLEARLY_FASTER * best.step.seconds:
            best = candidate
    return CandidateRanking(best, simulated[0], limit)
