"""How ``plans.decide`` chooses among searches on several meshes: made-up searches, whose seconds are given."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from shardwise.layouts.mesh import Mesh
from shardwise.plans import decide
from shardwise.plans.ranking import Ranked
from shardwise.search.auto import Search
from shardwise.search.dynamic_programming import Outcome


def search_of(mesh: Mesh, seconds: float, bound: float, *, stopped: bool = False) -> Search:
    cost: Any = SimpleNamespace(
        domains=SimpleNamespace(axes=SimpleNamespace(mesh=mesh), prices=SimpleNamespace(passes=1)),
        variables=[SimpleNamespace(size=10)],
    )
    outcome = Outcome([0], np.array([seconds, 0.0, 0.0, 0.0]), bound, 1, 1, stopped=stopped)
    return Search(cost, outcome, reference=[7])


FIRST = search_of(Mesh(x=4), 10.0, 9.0)
THIRD = search_of(Mesh(x=2, y=2), 11.0, 9.5)
STOPPED = search_of(Mesh(y=4), 12.0, 10.2, stopped=True)


@pytest.fixture
def completed(monkeypatch: pytest.MonkeyPatch) -> list[Mesh]:
    """The meshes on which searches went on; there the stopped one comes to 10.5 s. The peak of FIRST does not fit."""
    meshes: list[Mesh] = []

    def go_on(cost: Any, name: str, limit: float) -> Search:
        meshes.append(cost.domains.axes.mesh)
        return Search(cost, replace(STOPPED.outcome, components=np.array([10.5, 0, 0, 0]), stopped=False))

    def fit(search: Search, name: str, limit: float, simulate: Any) -> Ranked:
        return Ranked(search, search.prediction(), excess=1.0 if search is FIRST else 0.0)

    monkeypatch.setattr(decide, "searched", go_on)
    monkeypatch.setattr(decide, "fitted", fit)
    return meshes


def test_a_search_that_stopped_goes_on_before_a_slower_one_is_taken(completed: list[Mesh]) -> None:
    found = decide._first_that_fits([FIRST, THIRD, STOPPED], "dynamic_programming", 1.0, None)
    assert found is not None
    assert found.search.mesh == STOPPED.mesh
    assert found.search.outcome.seconds == 10.5
    assert not found.search.outcome.stopped
    assert found.search.reference == STOPPED.reference
    assert completed == [STOPPED.mesh]


def test_what_is_fastest_and_fits_ends_the_choice(completed: list[Mesh]) -> None:
    found = decide._first_that_fits([STOPPED, THIRD], "dynamic_programming", 1.0, None)
    assert found is not None
    assert found.search.mesh == STOPPED.mesh
    fast = search_of(Mesh(z=4), 10.0, 10.0)
    completed.clear()
    found = decide._first_that_fits([STOPPED, THIRD, fast], "dynamic_programming", 1.0, None)
    assert found is not None
    assert found.search is fast
    assert completed == []


def test_the_bound_of_a_search_under_a_lower_limit_does_not_bound_the_plans_that_fit() -> None:
    under_less = replace(FIRST.prediction(), bound=10.0)
    found = decide._over_all_meshes(under_less, FIRST.mesh, [FIRST, THIRD])
    assert found.bound == 9.0
    assert found.log10_plans == pytest.approx(np.log10(20))
