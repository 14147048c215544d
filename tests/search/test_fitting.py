"""Where nothing fits, a plan makes again what lets it fit: under lower and lower limits, each plan verified."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import shardwise as sw
from shardwise.costs.collectives import Links
from shardwise.costs.prediction import Prediction
from shardwise.costs.prices import Prices
from shardwise.graph.capture import capture
from shardwise.layouts.routes import Axes
from shardwise.rules.atoms import factor_graph
from shardwise.search.again import Again
from shardwise.search.auto import cost_graph
from shardwise.search.cost_graph import BYTES
from shardwise.search.rules import rules_of

MESH = sw.Mesh(dp=2)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Stack(nn.Module):
    """Blocks that hold many activations for few weights."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(32) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def plan(limit: float | None) -> tuple[sw.Plan, Prediction]:
    module, x = Stack().double(), torch.randn(1024, 32, dtype=torch.float64)
    found = sw.plan(module, (x,), 2, mesh=MESH, search="dynamic_programming", memory_bytes=limit)
    assert sw.verify(module, (x,), found).ok
    return found, found.prediction


def test_plans_for_less_and_less_memory_make_more_again_and_state_a_gap_that_holds_for_all_settings() -> None:
    free, unlimited = plan(None)
    assert not any(op.again for stage in free.stages for op in stage.operators)
    simulated, again = unlimited.simulated_seconds, 0
    for share in (0.9, 0.7, 0.5):
        limit = share * unlimited.peak_bytes
        tight, own = plan(limit)
        assert own.peak_bytes <= limit
        repeated = sum(bool(op.again) for stage in tight.stages for op in stage.operators)
        assert repeated > again, share  # more than under a higher limit
        again = repeated
        assert own.simulated_seconds >= simulated
        simulated = own.simulated_seconds
        # The plan without a limit is one of those that the bound is for, and of the lowest price.
        assert own.bound <= unlimited.additive_price * (1 + 1e-9)
        assert own.additive_price >= own.bound
        assert own.additive_price >= own.pass_seconds * (1 - 1e-9)
        assert own.num_bytes <= own.peak_bytes


def test_what_no_setting_makes_fit_is_refused_with_the_least() -> None:
    with pytest.raises(sw.PlanError, match="least memory that was found"):
        plan(1e5)


def sums_of(*, trains: bool) -> float:
    """The most bytes that gathering a weight once a step takes beside those of gathering it in every pass."""
    module = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32, bias=False))
    module[1].requires_grad_(trains)
    graph = capture(module, (torch.randn(8, 32),), {}, loss=lambda y: y.square().mean()).graph
    prices = Prices(Links(sw.Cluster.local(2), MESH), "adamw", 4)
    factored = factor_graph(graph, rules_of(graph))
    held, once = (
        cost_graph(graph, factored, {}, Axes.of(MESH), prices, Again(gathered=way)) for way in ("held", "once")
    )
    weight = next(source.value for source in graph.sources if source.names == ("1.weight",))
    storage = held.number["storage", weight]
    most = 0.0
    for (scope, kind), (_, own) in zip(held.factors, once.factors, strict=True):
        if scope[0] == storage and len(scope) == 2:
            tables = [
                np.zeros(1) if table is None else table for table in (once.kinds[own][BYTES], held.kinds[kind][BYTES])
            ]
            most = max(most, float((tables[0] - tables[1]).max()))
    return most


def test_frozen_weights_have_no_sums_of_gradients() -> None:
    assert sums_of(trains=True) == 32 * 32 * 4
    assert sums_of(trains=False) == 0
