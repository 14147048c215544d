"""What a search does once, and what it leaves out because a bound says so: with the result of doing it all."""

from __future__ import annotations

import re
from dataclasses import replace
from math import inf
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

import shardwise as sw
from search.cost_graphs import small_cost
from search.deep_model import VOCABULARY, Deep
from shardwise.costs.collectives import Links
from shardwise.costs.prices import Prices
from shardwise.costs.pricing import overlap_windows
from shardwise.graph.capture import capture
from shardwise.graph.ir import Graph
from shardwise.plans import micro_batch_search
from shardwise.search import domains, dynamic_programming, fit_memory
from shardwise.search.constants import NUM_LEAST_POLICIES
from shardwise.search.cost_graph import BYTES
from shardwise.search.memory_policy import MEMORY_POLICIES, MemoryPolicy
from shardwise.search.planner import Planner
from shardwise.search.planning_cache import PlanningCache
from shardwise.search.solving import minimise
from shardwise.search.stored_program import SearchConfig

CLUSTER = sw.Cluster.load("h100-1x8")
MESHES = (sw.Mesh(dp=8), sw.Mesh(dp=4, tp=2), sw.Mesh(dp=2, tp=4))


def graph_of(layers: int = 6) -> Graph:
    with torch.device("meta"):
        model, ids = Deep(layers, 64), torch.zeros(32, 16, dtype=torch.int64)
    return capture(model, (ids, ids)).graph


def test_operators_that_take_the_same_are_priced_once_for_the_windows() -> None:
    graph, prices = graph_of(), Prices(Links(CLUSTER, MESHES[0]))
    with mock.patch.object(Prices, "operator", autospec=True, side_effect=Prices.operator) as priced:
        found = overlap_windows(graph, prices)
    assert priced.call_count < len(graph.ops) / 2, "blocks are equal"
    seconds, first = 0.0, {}
    for op in graph.ops:
        for name in op.operands:
            if name in found:
                first.setdefault(name, seconds)
        operands, results = ([graph.by_name[name] for name in names] for names in (op.operands, op.results))
        seconds += prices.operator(op, operands, results, ([v.shape for v in operands], [v.shape for v in results]))
    assert found == first


def test_meshes_share_what_depends_on_none_of_them() -> None:
    graph = graph_of()
    planner = Planner.of(graph, (), CLUSTER, MESHES, SearchConfig())
    with (
        mock.patch.object(domains, "num_blockers", wraps=domains.num_blockers) as blockers,
        mock.patch.object(domains, "overlap_windows", wraps=domains.overlap_windows) as windows,
    ):
        shared = [planner.cost_graph(mesh) for mesh in MESHES]
    assert (blockers.call_count, windows.call_count) == (1, 1)
    for mesh, cost in zip(MESHES, shared, strict=True):
        alone = Planner.of(graph, (), CLUSTER, (mesh,), SearchConfig()).cost_graph(mesh)
        assert cost.factors == alone.factors
        for one, other in zip(cost.kinds, alone.kinds, strict=True):
            assert all(np.array_equal(*own) for own in zip(one, other, strict=True) if own[0] is not None)


def test_bounds_of_policies_that_repeat_more_are_those_of_solves_on_every_mesh() -> None:
    planner = Planner.of(graph_of(), (), CLUSTER, MESHES, SearchConfig(passes=2))
    num_solved = 0
    for policy in fit_memory.memory_policies(planner, None):
        with mock.patch.object(Planner, "cost_graph", autospec=True, side_effect=Planner.cost_graph) as built:
            bounds = policy.bounds
            num_solved += built.call_count
        alone = policy.planner.least_seconds({})
        assert policy.least == min(alone.values())
        assert all(bounds[mesh] <= alone[mesh] * (1 + 1e-9) for mesh in MESHES)
    assert num_solved < len(MEMORY_POLICIES) * len(MESHES)


def test_parts_share_the_domains_of_equal_operators() -> None:
    cache = PlanningCache()
    with mock.patch.object(domains.Domains, "_build", autospec=True, side_effect=domains.Domains._build) as built:
        counts = []
        for layers in (6, 4):
            planner = Planner.of(graph_of(layers), (), CLUSTER, MESHES, SearchConfig(bucket_bytes=0), cache)
            costs = [planner.cost_graph(mesh) for mesh in MESHES]
            counts.append(built.call_count)
    assert counts[0] == counts[1], "the second part has no other operators"
    for mesh, cost in zip(MESHES, costs, strict=True):
        alone = Planner.of(planner.graph, (), CLUSTER, (mesh,), SearchConfig(bucket_bytes=0)).cost_graph(mesh)
        assert cost.factors == alone.factors
        for one, other in zip(cost.kinds, alone.kinds, strict=True):
            assert all(np.array_equal(*own) for own in zip(one, other, strict=True) if own[0] is not None)


def test_programs_are_built_for_few_policies_where_no_additive_bytes_fit() -> None:
    planner = Planner.of(graph_of(), (), CLUSTER, MESHES[:1], SearchConfig(memory_bytes=1e5))
    with mock.patch.object(Planner, "ranking_of", autospec=True, side_effect=Planner.ranking_of) as ranked:
        few = fit_memory.fit_memory(planner)
        least = sorted(policy.least_bytes for policy in fit_memory.memory_policies(planner, None))
        num_few = sum(num_bytes <= least[NUM_LEAST_POLICIES - 1] for num_bytes in least)  # some need equally few
        assert ranked.call_count == num_few
        with mock.patch.object(fit_memory, "CLEARLY_OVER_LIMIT", inf):
            every = fit_memory.fit_memory(planner)
        assert ranked.call_count > 2 * num_few
    assert few.ranking.excess > 0
    assert few.ranking.best.num_bytes == every.ranking.best.num_bytes


def test_policies_share_what_tables_are_and_have_those_of_a_graph_by_itself() -> None:
    graph, mesh = graph_of(), MESHES[1]
    planner = Planner.of(graph, (), CLUSTER, (mesh,), SearchConfig(passes=2, in_flight=3))
    known, different = planner, set()
    for policy in MEMORY_POLICIES:
        memory_policy = MemoryPolicy.of(graph, (), policy.recompute, policy.reshard_mode)
        settings = replace(planner.settings, memory_policy=memory_policy)
        cost = replace(known, settings=settings).cost_graph(mesh)
        alone = Planner.of(graph, (), CLUSTER, (mesh,), settings).cost_graph(mesh)
        assert cost.factors == alone.factors
        assert [variable.size for variable in cost.variables] == [variable.size for variable in alone.variables]
        for one, other in zip(cost.kinds, alone.kinds, strict=True):
            for table, by_itself in zip(one, other, strict=True):
                assert (table is None) == (by_itself is None)
                assert table is None or np.array_equal(table, by_itself)
        assert cost.transients.keys() == alone.transients.keys()
        different.add(tuple(float(table.sum()) for kind in cost.kinds for table in kind if table is not None))
    assert len(different) > len(MEMORY_POLICIES) / 2, "the policies differ in their tables"
    assert len(known.graph_cache.table("tables")) == 1


@pytest.mark.parametrize("seed", range(1, 7))
def test_searches_under_several_limits_solve_what_they_share_once(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    cost = small_cost(seed, 400)
    assert cost is not None
    solved = mock.Mock(side_effect=minimise)
    monkeypatch.setattr(dynamic_programming, "minimise", solved)
    free = dynamic_programming.search(cost)
    before, limit = solved.call_count, 0.9 * float(free.components[BYTES])

    def found(own: Any) -> Any:
        try:
            return dynamic_programming.search(own, limit)
        except dynamic_programming.DoesNotFit as error:
            return error

    again = found(cost)
    shared, alone = solved.call_count - before, found(replace(cost))
    assert shared < solved.call_count - before - shared
    assert type(again) is type(alone)
    assert again.assignment == alone.assignment


@pytest.mark.parametrize("share", [0.8, 0.6, 0.3])
@pytest.mark.long
def test_rungs_that_a_bound_rules_out_are_not_searched_and_the_plan_is_the_same(share: float) -> None:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(VOCABULARY, (64, 16), generator=generator)
    model, options = Deep(6, 64), {"mesh": sw.Mesh(dp=2), "search": "dynamic_programming", "micro_batch": 64}
    limit = share * sw.plan(model, (ids, ids), 2, **options).prediction.memory_bytes

    def planned() -> tuple[sw.Plan | str, int]:
        with mock.patch.object(Planner, "searches", autospec=True, side_effect=Planner.searches) as searches:
            try:
                return sw.plan(model, (ids, ids), 2, memory_bytes=limit, **options), searches.call_count
            except sw.PlanError as error:
                return re.sub(r"took \d+ s", "took some s", str(error)), searches.call_count

    found, few = planned()
    with mock.patch.object(Planner, "least_seconds", lambda planner, known: dict.fromkeys(planner.meshes, 0.0)):
        every, many = planned()
    assert found == every
    assert few < many or isinstance(found, str)


def test_a_joint_search_looks_once_at_what_passes_of_every_size_do() -> None:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(VOCABULARY, (8, 4), generator=generator)
    with mock.patch.object(micro_batch_search, "split_in_time", wraps=micro_batch_search.split_in_time) as splits:
        found = sw.plan(Deep(2, 16), (ids, ids), 2, stages="auto", schedule="GPipe")
    sizes = {one.setting.micro_batch for one in found.report.explain("stages").considered}
    assert splits.call_count <= 2 < len(sizes), "for a pipeline, and without one"
