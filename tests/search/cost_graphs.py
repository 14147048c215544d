"""Cost graphs of random programs and of models, and what the searches are compared with: all assignments, random ones,
and the price of the program that is emitted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from math import prod
from typing import Any

import numpy as np
from torch import nn

import shardwise as sw
from shardwise.costs.cluster import Cluster
from shardwise.costs.collectives import Links
from shardwise.costs.prices import Prices
from shardwise.graph.capture import capture
from shardwise.graph.ir import Graph
from shardwise.layouts.routes import Axes, Floats
from shardwise.partition.pricing import Fragments, ProgramPrice, price_program
from shardwise.partition.spmd import build_spmd
from shardwise.plans.decide import rules_of
from shardwise.rules.atoms import factor_graph
from shardwise.search.auto import Search, cost_graph
from shardwise.search.cost_graph import BYTES, COMPUTE, EXPOSED, TRAFFIC, CostGraph
from shardwise.search.elimination import Interner, Problem, Table


def cost_of(graph: Graph, mesh: sw.Mesh, cluster: Cluster | None = None, fixed: Any = None) -> CostGraph:
    """The cost graph of a captured model, or of a random program."""
    factored = factor_graph(graph, rules_of(graph))
    links = Links(cluster or Cluster.local(mesh.num_devices), mesh)
    return cost_graph(graph, factored, fixed or {}, Axes.of(mesh), Prices(links), Fragments)


def cost_of_model(
    model: nn.Module, inputs: dict[str, Any], mesh: sw.Mesh, cluster: Cluster | None = None
) -> CostGraph:
    return cost_of(capture(model, (), inputs).graph, mesh, cluster)


def seconds_of(components: Floats) -> Floats:
    """[..., 4] components -> seconds of the step, overlap included."""
    seconds: Floats = components[..., EXPOSED] + np.maximum(components[..., COMPUTE], components[..., TRAFFIC])
    return seconds


def num_assignments(cost: CostGraph) -> int:
    return prod(variable.size for variable in cost.variables)


def every_assignment(cost: CostGraph) -> Floats:
    """[assignments, 4]: the components of all assignments, the last variable fastest: independent of elimination and of
    every bound."""
    sizes = [variable.size for variable in cost.variables]
    total = np.zeros((prod(sizes), 4))
    for component in range(4):
        joint = np.zeros(sizes)
        for scope, kind in cost.factors:
            table = cost.kinds[kind][component]
            if table is not None:
                joint += table.reshape([size if v in scope else 1 for v, size in enumerate(sizes)])
        total[:, component] = joint.reshape(-1)
    return total


def least_bytes(components: Floats) -> float:
    return float(components[:, BYTES].min())


def random_assignments(cost: CostGraph, count: int, seed: int) -> Iterator[list[int]]:
    rng = np.random.default_rng(seed)
    for _ in range(count):
        yield [int(rng.integers(variable.size)) for variable in cost.variables]


def climbed(cost: CostGraph, assignment: Sequence[int]) -> float:
    """The step after single variables are changed for the better until none is left: recomputed from the tables of
    that variable alone."""
    at: list[list[tuple[tuple[int, ...], int]]] = [[] for _ in cost.variables]
    for scope, kind in cost.factors:
        for v in scope:
            at[v].append((scope, kind))
    current = list(assignment)
    total = cost.components(current)
    better = True
    while better:
        better = False
        for v, factors in enumerate(at):
            options = np.zeros((cost.variables[v].size, 4))
            for scope, kind in factors:
                index = tuple(slice(None) if u == v else current[u] for u in scope)
                for i, table in enumerate(cost.kinds[kind]):
                    if table is not None:
                        options[:, i] += table[index]
            there = total - options[current[v]] + options
            best = int(seconds_of(there).argmin())
            if seconds_of(there)[best] < seconds_of(total) * (1 - 1e-9):
                total, current[v], better = there[best], best, True
    return float(seconds_of(cost.components(current)))


def emitted_price(search: Search, assignment: list[int] | None = None) -> ProgramPrice:
    """The price of the program that an assignment becomes, without buckets."""
    domains = search.cost.domains
    graph, choice = domains.graph, search.choice(assignment)
    spmd = build_spmd(
        graph,
        domains.rules,
        choice.strategies,
        choice.sources,
        domains.axes.mesh,
        bucket_bytes=0,
        route=choice.router,
        shared=choice.shared,
    )
    free = {op.name for op in graph.ops} - {op.name for op in domains.operators}
    return price_program(spmd, domains.prices, free)


def random_problem(seed: int, *, widest: int = 3) -> Problem:
    """One to six variables of one to four values, tables over up to ``widest`` of them, some entries infinite."""
    rng = np.random.default_rng(seed)
    sizes = [int(rng.integers(1, 5)) for _ in range(rng.integers(1, 7))]
    interner, factors = Interner(), []
    for _ in range(rng.integers(1, 10)):
        count = min(len(sizes), int(rng.integers(1, widest + 1)))
        scope = tuple(sorted(rng.choice(len(sizes), count, replace=False).tolist()))
        table: Table = rng.integers(0, 20, [sizes[v] for v in scope]).astype(np.float64)
        table[rng.random(table.shape) < rng.choice((0.0, 0.15))] = np.inf
        factors.append((scope, interner.add(table)))
    return Problem(sizes, factors, interner)


def all_values(problem: Problem) -> Table:
    """The value of every assignment, one axis per variable: by brute force."""
    found = np.empty(tuple(problem.sizes))
    for assignment in product(*map(range, problem.sizes)):
        found[assignment] = problem.value(assignment)
    return found
