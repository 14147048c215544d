"""Cost graphs of random programs and of models, and what the searches are compared with: all assignments, random ones,
and the price of the program that is emitted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from math import prod
from typing import Any

import numpy as np
from torch import nn

import shardwise as sw
from programs.building import STEPS, Builder, aten
from shardwise.costs.cluster import Cluster, Device, Level
from shardwise.costs.collectives import Links
from shardwise.costs.prices import Prices
from shardwise.costs.pricing import ProgramPrice, price_program
from shardwise.costs.units import Figures
from shardwise.graph.capture import capture
from shardwise.graph.ir import Graph
from shardwise.layouts.routes import Axes, Floats
from shardwise.programs.spmd import build_spmd
from shardwise.rules.atoms import factor_graph
from shardwise.search.auto import MeshSearch
from shardwise.search.cost_graph import BYTES, COMPUTE, EXPOSED, TRAFFIC, CostGraph, OperatorVariable, SharedVariable
from shardwise.search.cost_tables import Tables
from shardwise.search.domains import Domains, SearchSpace
from shardwise.search.elimination import Interner, Problem, Table
from shardwise.search.memory_policy import PricedPolicy
from shardwise.search.planning_cache import PlanningCache
from shardwise.search.user_choices import rules_of


def cost_of(graph: Graph, mesh: sw.Mesh, cluster: Cluster | None = None, fixed: Any = None) -> CostGraph:
    """The cost graph of a captured model, or of a random program."""
    factored = factor_graph(graph, rules_of(graph))
    links = Links(cluster or Cluster.local(mesh.num_devices), mesh)
    domains = Domains(SearchSpace(graph, factored), Axes.of(mesh), Prices(links), PlanningCache())
    return Tables(domains, fixed or {}).priced(PricedPolicy())


def cost_of_model(model: nn.Module, inputs: dict[str, Any], mesh: sw.Mesh, cluster: Cluster | None = None) -> CostGraph:
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


def emitted_price(search: MeshSearch, assignment: list[int] | None = None) -> ProgramPrice:
    """The price of the program that an assignment becomes, without buckets."""
    domains = search.cost.domains
    graph, choice = domains.graph, search.choice(assignment)
    spmd = build_spmd(graph, domains.rules, choice, domains.axes.mesh, bucket_bytes=0)
    free = {op.name for op in graph.ops} - {op.name for op in domains.operators}
    return price_program(spmd, domains.prices, free, domains.windows)


def priced_twice(cost: CostGraph, assignment: Sequence[int]) -> bool:
    """Whether operators take a value in the same layout, which is not the shared one: each of them is charged for the
    conversion, which the program makes once."""
    domains, folded = cost.domains, {view.op for view in cost.folded}
    for (kind, name), shared in cost.number.items():
        if kind != "shared":
            continue
        variable = cost.variables[shared]
        assert isinstance(variable, SharedVariable)
        seen = [int(variable.nodes[assignment[shared]])]
        for op in dict.fromkeys(domains.graph.consumers[name]):
            if op.name in folded or ("operator", op.name) not in cost.number:
                continue
            number = cost.number["operator", op.name]
            consumer = cost.variables[number]
            assert isinstance(consumer, OperatorVariable)
            operands = zip(consumer.domain.operands, op.operands, strict=True)
            nodes = {int(own[assignment[number]]) for own, operand in operands if operand == name and own is not None}
            if nodes & set(seen[1:]) - {seen[0]}:
                return True
            seen.extend(nodes)
    return False


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


def small_program(seed: int) -> Graph:
    """One to three random operators over one or two parameters, and a loss."""
    b = Builder(seed)
    x = b.parameter(*(b.rng.choice((2, 3, 4, 6)) for _ in range(b.rng.randint(1, 2))))
    pool = [x]
    for _ in range(b.rng.randint(1, 3)):
        made = [tensor for tensor in b.rng.choice(STEPS)(b, b.rng.choice(pool[-2:]), pool) if tensor.numel() <= 3000]
        pool.extend(tensor for tensor in made if all(tensor is not other for other in pool))
    loss = b.call(aten.sum.default, pool[-1])
    graph = b.finish((loss,), loss).graph
    used = tuple(source for source in graph.sources if graph.consumers[source.value])
    unused = {source.value for source in graph.sources} - {source.value for source in used}
    return replace(graph, sources=used, values=tuple(value for value in graph.values if value.name not in unused))


def small_cost(seed: int, most: int) -> CostGraph | None:
    """The cost graph of a small random program on the largest of some meshes on which it has at most ``most``
    assignments (and more than one), on devices that are slow or fast beside their links; None: there is none."""
    graph = small_program(seed)
    meshes = sw.Mesh(a=2, b=3), sw.Mesh(a=2, b=2), sw.Mesh(a=3), sw.Mesh(a=2)
    for mesh in meshes[0 if seed % 3 else 2 :]:  # building large ones in vain takes time
        cost = cost_of(graph, mesh, cluster_of(seed, mesh.num_devices))
        if 1 < num_assignments(cost) <= most:
            return cost
    return None


def cluster_of(seed: int, num_devices: int) -> Cluster:
    """A cluster whose latencies are small, so that bytes and FLOPs decide, and whose links are slower or faster."""
    device = Device("test", Figures({"f64": 1e9, "f32": 1e9}), 1e12, 1e7, 1e-7 if seed % 2 else 0.0)
    return Cluster("test", device, (Level("node", num_devices, (1e6, 1e7, 1e8)[seed % 3], 1e-7),))
