"""Where a model is cut into stages: the best cut of all, with and without a memory limit, and what a refusal names."""

from __future__ import annotations

from itertools import combinations, pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import shardwise as sw
from search.deep_model import Deep
from shardwise.costs.collectives import Links
from shardwise.costs.prices import Prices
from shardwise.graph.capture import capture
from shardwise.search.constants import OVER_LIMIT_PENALTY, PARTITION_TOLERANCE, SLOWEST_STAGE_SLACK
from shardwise.search.stage_partition import StageCut, StagePartition

MIB = 2**20
SAMPLES = 16_384
MARKED = (3, 7, 11)


def deep_mlp() -> nn.Sequential:
    with torch.device("meta"):
        blocks = (nn.Sequential(nn.Linear(512, 2048), nn.ReLU(), nn.Linear(2048, 512)) for _ in range(12))
        return nn.Sequential(*blocks, nn.Linear(512, 8192))


def planned(limit: float | None, marks: tuple[int, ...] = (), **options: Any) -> sw.Plan:
    model = deep_mlp()
    for number, layer in enumerate(marks, 1):
        sw.stage(model[layer], number)
    with torch.device("meta"):
        batch = torch.empty(SAMPLES, 512), torch.empty(SAMPLES, dtype=torch.int64)
    options = {"micro_batch": 1024, **options, "stages": "marked" if marks else 4}
    found = sw.plan(model, batch, "h100-1x4", loss=nn.functional.cross_entropy, memory_bytes=limit, **options)
    return found.plan


def step(plan: sw.Plan) -> float:
    assert plan.pipeline is not None
    return plan.pipeline.step_seconds


def test_a_pipeline_that_fits_is_found_where_the_first_cut_does_not_fit() -> None:
    limit = 205.0 * MIB
    marked, found = planned(limit, MARKED), planned(limit)
    assert found.pipeline is not None
    assert found.pipeline.memory_bytes <= limit
    assert step(found) <= step(marked) * (1 + 1e-9)
    free = planned(limit, micro_batch=None, global_batch=SAMPLES)
    assert step(free) <= step(found) * (1 + 1e-9)


def refused(limit: float) -> float | None:
    """Return the least memory that a refusal names; None if there is a plan."""
    try:
        planned(limit)
    except sw.errors.NothingFits as error:
        return float(str(error).partition("the least memory that was found is ")[2].partition(" MiB")[0])
    return None


@pytest.mark.long
def test_a_refusal_names_the_same_least_memory_whatever_the_limit() -> None:
    figures = [refused(limit * MIB) for limit in (135.0, 162.0, 180.0)]
    assert len({*figures}) == 1, figures
    assert figures[0] is not None
    assert refused((figures[0] + 1) * MIB) is None, "what is named fits"


def drawn_partition(seed: int, num_stages: int) -> tuple[StagePartition, list[Any], list[Any]]:
    """Return a partition of a small model, and for every stage the planned seconds and needs of all its spans.

    Both are no less than the estimates, and grow with the span and with the micro-batches in flight.
    """
    rng = np.random.default_rng(seed)
    graph = capture(Deep(3, 16), (torch.zeros(8, 4, dtype=torch.int64),) * 2).graph
    prices = Prices(Links(sw.Cluster.load("h100-1x4").with_devices(1), sw.Mesh(dp=1)), "adamw", 8)
    in_flight = tuple(range(num_stages, 0, -1))
    partition = StagePartition.of(graph, prices, 1e18, in_flight)
    costs = rng.uniform(0.1, 1.0, (2, len(partition.names)))
    added = [np.concatenate([[0.0], np.cumsum(cost)]) for cost in costs]
    seconds, needs = (np.maximum(total[None, :] - total[:, None], 0.0) for total in added)
    partition.seconds = np.where(partition.seconds < np.inf, seconds, np.inf)
    partition.is_whole = np.ones_like(partition.is_whole)
    partition.limit = rng.uniform(0.2, 1.2) * 2 * needs[0, -1] / num_stages
    partition.needs = [0.5 * needs for _ in in_flight]
    partition.held = [np.zeros_like(needs) for _ in in_flight]
    slower = [seconds * (1 + 0.1 * count) * 1.2 for count in in_flight]
    larger = [needs * (0.5 + 0.2 * count) for count in in_flight]
    return partition, slower, larger


@pytest.mark.parametrize("num_stages", [3, 4])
@pytest.mark.parametrize("seed", range(20))
@pytest.mark.sampled(6)
def test_the_settled_cut_is_the_best_of_all(seed: int, num_stages: int) -> None:
    partition, seconds, needs = drawn_partition(seed, num_stages)
    ends = len(partition.names)

    def outcome(starts: tuple[int, ...]) -> tuple[float, float]:
        """Return the seconds of the slowest stage, and the largest need; infinite where there is no stage."""
        spans = list(enumerate(pairwise(starts)))
        if any(partition.seconds[span] == np.inf for _, span in spans):
            return np.inf, np.inf
        return max(seconds[s][span] for s, span in spans), max(needs[s][span] for s, span in spans)

    outcomes = [outcome((0, *inner, ends)) for inner in combinations(range(1, ends), num_stages - 1)]
    fastest = min((taken for taken, need in outcomes if need <= partition.limit), default=np.inf)
    least = min(need for _, need in outcomes)
    best, value, tried = np.inf, np.inf, 0
    while not partition.is_settled(cut := partition.next_cut(), value):
        tried += 1
        assert tried < len(outcomes), "no cut is planned twice"
        taken, need = outcome(cut.starts)
        if need > partition.limit:
            too_large = {s: needs[s][span] for s, span in enumerate(pairwise(cut.starts))}
            partition.refuse(cut, {s: size for s, size in too_large.items() if size > partition.limit})
            if best == np.inf:
                value = min(value, OVER_LIMIT_PENALTY * need / partition.limit)
        else:
            best = min(best, taken)
            value = min(value, partition.learn(cut, [seconds[s][span] for s, span in enumerate(pairwise(cut.starts))]))
    if fastest < np.inf:
        assert fastest <= best <= fastest * SLOWEST_STAGE_SLACK / (1 - PARTITION_TOLERANCE)
    else:
        assert best == np.inf
        assert value * partition.limit / OVER_LIMIT_PENALTY <= least / (1 - PARTITION_TOLERANCE)


def test_what_is_ahead_of_all_blocks_and_behind_them_can_be_stages() -> None:
    graph = capture(Deep(8, 16), (torch.zeros(8, 4, dtype=torch.int64),) * 2).graph
    prices = Prices(Links(sw.Cluster.load("h100-1x4").with_devices(1), sw.Mesh(dp=1)), "adamw", 16)
    partition = StagePartition.of(graph, prices, 1e18, (1,) * 10)
    cut = partition.next_cut()
    assert isinstance(cut, StageCut)
    parts = partition.parts(cut)
    assert [name for part in parts for name in part] == [op.name for op in graph.ops]
    parameters = {source.value for source in graph.sources if source.kind == "parameter"}
    readers = {op.name for op in graph.ops if parameters.intersection(op.operands)}
    assert all(readers.intersection(part) for part in parts)
