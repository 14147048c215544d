"""The bound over plans whose blocks have memory policies of their own: its tables are those of such plans, and no plan
is below it."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch
from scipy.optimize import linprog
from torch import nn
from torch.nn import functional as F

import shardwise as sw
from search.cost_graphs import every_assignment, seconds_of
from search.small_models import PreNorm, Stack
from search.test_fitting import Layer
from shardwise.costs.cluster import Cluster
from shardwise.graph.capture import capture
from shardwise.graph.segments import How
from shardwise.search.constants import BOUND_TOLERANCE
from shardwise.search.cost_graph import BYTES, COMPUTE, EXPOSED, TRAFFIC
from shardwise.search.memory_policy import MemoryPolicy
from shardwise.search.mixed_policies import cost_graph_by_block, least_of_mixtures
from shardwise.search.planner import Planner
from shardwise.search.stored_program import SearchConfig

HOWS: tuple[How | None, ...] = (None, "gathers", "cheap", "cheap+gathers", "full")


def planner_of(module: nn.Module, x: torch.Tensor, mesh: sw.Mesh) -> Planner:
    graph = capture(module, (x,), {}).graph
    return Planner.of(graph, (), Cluster.local(mesh.num_devices), [mesh], SearchConfig())


def with_policies(planner: Planner, *hows: How | None) -> Planner:
    """The planner with one policy for all blocks, or one for each."""
    blocks = [MemoryPolicy.of(planner.graph, (), how).segments for how in hows]
    if len(hows) == 1:
        return planner.under(MemoryPolicy.of(planner.graph, (), hows[0]))
    segments = tuple(part[i] for i, part in enumerate(blocks) if part)
    return planner.under(MemoryPolicy(segments=segments))


@pytest.mark.parametrize("block", [lambda: Layer(32), lambda: PreNorm(16, 32)], ids=["attention", "norms"])
@pytest.mark.parametrize("sizes", [{"x": 2, "y": 2}, {"x": 4}], ids=str)
def test_tables_by_block_are_those_of_a_plan_whose_blocks_have_these_policies(block, sizes) -> None:
    mesh, rng = sw.Mesh(**sizes), np.random.default_rng(0)
    width = 32 if isinstance(block(), Layer) else 16
    planner = planner_of(Stack(*(block() for _ in range(3))), torch.randn(4, 8, width), mesh)
    pure = [with_policies(planner, how) for how in HOWS]
    cost = cost_graph_by_block(pure, mesh)
    assert cost is not None
    for _ in range(40):
        choice = rng.integers(len(HOWS), size=3).tolist()
        own = with_policies(planner, *(HOWS[number] for number in choice)).cost_graph(mesh)
        assignment = [int(rng.integers(variable.size)) for variable in own.variables]
        expected, found = own.components(assignment), cost.components([*assignment, *choice])
        np.testing.assert_allclose(found, expected, rtol=1e-12, err_msg=str(choice))


class Pair(nn.Module):
    """Blocks of few choices."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(64, 64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.gelu(x @ self.w)


def test_no_plan_is_below_the_bound_which_is_the_highest_of_its_kind() -> None:
    """Over all assignments under all policies of all blocks, and by a linear program of all their planes."""
    mesh = sw.Mesh(x=2)
    planner = planner_of(Stack(Pair(), Pair()), torch.randn(32, 64), mesh)
    hows = (None, "cheap", "full")
    mixed = [with_policies(planner, *choice).cost_graph(mesh) for choice in product(hows, repeat=2)]
    every = np.concatenate([every_assignment(cost) for cost in mixed])
    every = every[np.isfinite(every).all(axis=1)]
    num_bytes, unit = every[:, BYTES], float(seconds_of(every).min())
    pure = [with_policies(planner, how) for how in hows]
    for share in (0.05, 0.2, 0.4, 0.6, 0.8, 1.0):
        limit = float(num_bytes.min() + share * (num_bytes.max() - num_bytes.min()))
        slopes = np.stack([every[:, TRAFFIC] - every[:, COMPUTE], (num_bytes / limit - 1) * unit], axis=1)
        dual = linprog(
            [-1, 0, 0], A_ub=np.concatenate([np.ones((len(every), 1)), -slopes], axis=1) / unit,
            b_ub=(every[:, EXPOSED] + every[:, COMPUTE]) / unit, bounds=[(None, None), (0, 1), (0, None)],
        )  # fmt: skip
        bound = least_of_mixtures(pure, mesh, limit, np.inf)
        assert bound <= float(seconds_of(every[num_bytes <= limit]).min()) * (1 + 1e-9), share
        assert bound >= float(dual.x[0]) * (1 - BOUND_TOLERANCE) - 1e-6 * unit, share
    assert least_of_mixtures(pure, mesh, 0.9 * float(num_bytes.min()), np.inf) == np.inf


def test_a_table_of_three_blocks_has_no_bound_by_block() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            first = F.gelu(self.blocks[0](x))
            return (self.blocks[1](first) * self.blocks[2](first) * self.blocks[3](first)).square().mean()

    mesh = sw.Mesh(x=2)
    planner = planner_of(Shared(), torch.randn(8, 16), mesh)
    pure = [with_policies(planner, how) for how in HOWS]
    assert least_of_mixtures(pure, mesh, np.inf, np.inf) == 0.0
