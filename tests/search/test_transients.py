"""Searches that forbid choices which hold too much for a moment."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import shardwise as sw
from raising import raises
from search.cost_graphs import small_cost
from shardwise.search import planner
from shardwise.search.auto import MeshSearch, searches_within
from shardwise.search.cost_graph import BYTES, CostGraph
from shardwise.search.dynamic_programming import search


def moment(cost: CostGraph, assignment: list[int]) -> float:
    """The most that a choice of an assignment holds for a moment."""
    held = (
        cost.transients[kind]()[tuple(assignment[v] for v in scope)]
        for scope, kind in cost.factors
        if kind in cost.transients
    )
    return max(map(float, held))


@pytest.mark.parametrize("start", range(0, 60, 20))
@pytest.mark.sampled(1)
def test_of_all_assignments_that_fit_with_their_moments_the_fastest_is_near_and_the_least_is_found(start: int) -> None:
    """Against all assignments. Where one fits that a cap and a limit both allow, one that fits is found; where none
    fits, what is found holds no more than the least by the quotient of two caps."""
    for seed in range(start, start + 20):
        cost = small_cost(seed, 400)
        if cost is None:
            continue
        every = [list(own) for own in product(*(range(variable.size) for variable in cost.variables))]
        parts = np.array([cost.components(own) for own in every])
        moments = np.array([moment(cost, own) for own in every])
        held = np.where(np.isfinite(parts).all(axis=1), parts[:, BYTES] + moments, np.inf)
        free = search(cost)
        for limit in (held.min() * 0.5, held.min(), (held.min() + np.median(held[np.isfinite(held)])) / 2):
            found = searches_within(MeshSearch(cost, free), float(limit))
            assert found, seed
            best = found[0].outcome
            total = best.components[BYTES] + moment(cost, best.assignment)
            assert total >= held.min() * (1 - 1e-9), seed
            within = [own.outcome.components[BYTES] + moment(cost, own.outcome.assignment) for own in found]
            assert total <= min(within) * (1 + 1e-9) or total <= limit, seed


class Wide(nn.Module):
    """Few weights, and scores of many classes that only a split of the classes makes small."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(64, 64, bias=False), nn.Linear(64, classes, bias=False)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(F.relu(self.body(x))), labels)


def plan_of_wide(limit: float) -> sw.Plan:
    with torch.device("meta"):
        model, inputs = Wide(4096), (torch.empty(64, 64), torch.empty(64, dtype=torch.int64))
    return sw.plan(model, inputs, 4, mesh=sw.Mesh(gpu=4), search="dynamic_programming", memory_bytes=limit)


def least_of_wide() -> int:
    """A quarter of weights, gradients and states is below the limit, what comes on top is not."""
    with raises(sw.errors.NothingFits, section="nothing-fits", facts=["needed", "largest", "least", "fixes"]) as caught:
        plan_of_wide(1.01 * 16 * 64 * (64 + 4096) / 4)
    needed = next(line for line in str(caught.value).splitlines() if line.startswith("  needed:"))
    return int(needed.partition(" = ")[2].partition(" bytes")[0].replace(",", ""))


def test_the_least_memory_of_a_refusal_is_a_peak_that_a_plan_has() -> None:
    """And where that much is allowed there is a plan."""
    least = least_of_wide()
    found = plan_of_wide(float(least))
    assert found.prediction.peak_bytes <= least


def test_what_keeps_least_is_not_what_needs_least(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan of the least sum of bytes gathers scores; caps on moments find one that does not."""
    least = least_of_wide()
    monkeypatch.setattr(planner, "MAX_CAP_PROGRAMS", 0)
    assert least < 0.8 * least_of_wide()
