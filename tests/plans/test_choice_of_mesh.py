"""How a planner chooses among searches on several meshes: made-up searches, whose seconds are given."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import shardwise as sw
from shardwise.layouts.mesh import Mesh
from shardwise.search import planner as planning
from shardwise.search.auto import MeshSearch
from shardwise.search.candidates import Candidate, CandidateRanking, SimulatedCandidate, rank_candidates
from shardwise.search.dynamic_programming import SearchOutcome
from shardwise.search.planner import Planner, with_bound_over_meshes
from shardwise.search.stored_program import SearchConfig

LIMIT = 1.0


def search_of(mesh: Mesh, seconds: float, bound: float, *, stopped: bool = False) -> MeshSearch:
    cost: Any = SimpleNamespace(
        domains=SimpleNamespace(axes=SimpleNamespace(mesh=mesh), prices=SimpleNamespace(passes=1)),
        variables=[SimpleNamespace(size=10)],
    )
    return MeshSearch(cost, SearchOutcome([0], np.array([seconds, 0.0, 0.0, 0.0]), bound, 1, stopped=stopped))


FIRST = search_of(Mesh(x=4), 10.0, 9.0)
NEXT = search_of(Mesh(z=2, w=2), 10.4, 9.2)
THIRD = search_of(Mesh(x=2, y=2), 11.0, 9.5)
STOPPED = search_of(Mesh(y=4), 12.0, 10.6, stopped=True)
PEAKS = {FIRST.mesh: 2.0, THIRD.mesh: 0.5, NEXT.mesh: 0.5, STOPPED.mesh: 0.5}


class Recorder(Planner):
    """A planner that builds no programs; the peak of a mesh is as ``PEAKS`` says, and lower limits help nothing."""

    def rank(self, searches: Sequence[MeshSearch]) -> CandidateRanking:
        ordered = sorted(searches, key=lambda search: search.outcome.seconds)
        return rank_candidates([self.simulated(search) for search in ordered], LIMIT)

    @staticmethod
    def simulated(search: MeshSearch) -> SimulatedCandidate:
        step: Any = SimpleNamespace(
            seconds=search.outcome.seconds, host_wait=0.0, exposed=0.0, copy_wait=0.0, cast_seconds=0.0
        )
        peak: Any = SimpleNamespace(num_bytes=PEAKS[search.mesh], where="")
        nothing: Any = None
        return SimulatedCandidate(Candidate(search, [0], search.outcome.components), nothing, nothing, peak, step)

    def within_moments(self, search: MeshSearch, known: CandidateRanking) -> CandidateRanking:
        return known


@pytest.fixture
def planner() -> Planner:
    nothing: Any = None
    settings = SearchConfig(memory_bytes=LIMIT)
    return Recorder(nothing, (), {}, nothing, nothing, sw.Cluster.local(4), (), settings)


@pytest.fixture
def completed(monkeypatch: pytest.MonkeyPatch) -> list[Mesh]:
    """The meshes on which searches went on; there the stopped one comes to 10.7 s."""
    meshes: list[Mesh] = []

    def go_on(cost: Any, name: str, limit: float) -> MeshSearch:
        mesh = cost.domains.axes.mesh
        meshes.append(mesh)
        return search_of(mesh, 10.7 if mesh == STOPPED.mesh else 20.0, 10.6)

    monkeypatch.setattr(planning, "run_search", go_on)
    return meshes


def test_a_search_that_stopped_goes_on_before_a_slower_one_is_taken(planner: Planner, completed: list[Mesh]) -> None:
    found = planner.fastest([FIRST, THIRD, STOPPED])
    assert found.search.mesh == STOPPED.mesh
    assert found.search.outcome.seconds == 10.7
    assert completed[-1] == STOPPED.mesh
    assert set(completed) == {FIRST.mesh, STOPPED.mesh}, "lower limits for the first, then the next in order"
    assert not found.excess


def test_what_is_fastest_and_fits_ends_the_choice(planner: Planner, completed: list[Mesh]) -> None:
    assert planner.fastest([STOPPED, NEXT, THIRD]).search.mesh == NEXT.mesh
    assert completed == []


def test_meshes_that_are_priced_nearly_alike_are_compared_by_simulation(
    planner: Planner, completed: list[Mesh], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first does not fit, the next is within five percent of it and does; the third is not looked at."""
    found = planner.fastest([FIRST, NEXT, THIRD])
    assert found.search.mesh == NEXT.mesh
    assert completed == []
    assert found.prediction.passed_over is not None
    assert found.prediction.passed_over.additive_price == FIRST.outcome.seconds
    assert not found.prediction.passed_over.fits


def test_what_is_slower_than_a_known_plan_is_not_tried_under_lower_limits(
    planner: Planner, completed: list[Mesh]
) -> None:
    assert planner.fastest([FIRST], known=9.9).excess
    assert completed == []
    assert planner.fastest([FIRST], known=10.1).excess, "lower limits help nothing here"
    assert set(completed) == {FIRST.mesh}


def test_the_bound_of_a_search_under_a_lower_limit_does_not_bound_the_plans_that_fit() -> None:
    under_less = replace(FIRST.prediction(), bound=10.0)
    found = with_bound_over_meshes(under_less, FIRST.mesh, [FIRST, THIRD])
    assert found.bound == 9.0
    assert found.log10_plans == pytest.approx(np.log10(20))
