"""What is checked of the search on small random graphs, in the suite and, on more of them, in ``make sweep-search``."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import pytest
import torch

import shardwise as sw
from models.tiny_models import MODELS, resnet
from proving import prove
from search.cost_graphs import (
    cluster_of,
    cost_of_model,
    emitted_price,
    every_assignment,
    priced_twice,
    random_assignments,
    seconds_of,
    small_cost,
)
from shardwise.costs.collectives import Links
from shardwise.costs.prices import Prices
from shardwise.costs.pricing import collective_seconds
from shardwise.graph.capture import capture
from shardwise.graph.ir import Graph
from shardwise.graph.naming import value_name
from shardwise.layouts.conversions import Collective
from shardwise.search.auto import MeshSearch, run_search
from shardwise.search.constants import EXACT_GAP
from shardwise.search.cost_graph import BYTES, COMPUTE, EXPOSED, TRAFFIC, CostGraph
from shardwise.search.dynamic_programming import DoesNotFit, SearchOutcome

TINY = {**MODELS, "resnet": resnet()}
MESHES = (sw.Mesh(x=8), sw.Mesh(x=4, y=2), sw.Mesh(x=2, y=2, z=2), sw.Mesh(x=2, y=3))
# Shares of the way from the least memory of any assignment to the most.
LIMITS = (0.0, 0.03, 0.1, 0.3)


def gap_of(outcome: SearchOutcome) -> float:
    """By which share a step is above the bound; 0: proven optimal; infinite: not known."""
    if outcome.bound <= 0:
        return float("inf") if outcome.seconds > 0 else 0.0
    gap = outcome.seconds / outcome.bound - 1
    return gap if gap > EXACT_GAP else 0.0


@dataclass
class Tally:
    """Graphs that were searched; of the searches, without and with limits on memory, how many proved the optimum, how
    many found the optimum, and by which share the others are slower."""

    graphs: int = 0
    searches: int = 0
    proven: int = 0
    optimal: int = 0
    worst: float = 0.0
    worst_gap: float = 0.0

    def __str__(self) -> str:
        return (
            f"{self.graphs} graphs, {self.searches} searches: {self.optimal} found the optimum, {self.proven} proved "
            f"it; the worst is {self.worst:.3%} slower than the optimum, the largest gap said {self.worst_gap:.3%}"
        )


def check_search(seed: int, most: int, tally: Tally) -> None:
    """The search against all assignments: bound, gap, memory and the price of what is emitted."""
    cost = small_cost(seed, most)
    if cost is None:
        return
    tally.graphs += 1
    components = every_assignment(cost)
    seconds, num_bytes = seconds_of(components), components[:, BYTES]
    found = run_search(cost, "dynamic_programming", None)
    _compare(found, None, float(seconds.min()), seed, tally)
    assert check_emitted(found, found.outcome.assignment, seed), f"seed {seed}: the optimum is emitted as it is priced"
    for assignment in random_assignments(cost, 2, seed):
        check_emitted(found, assignment, seed)
    least, largest = float(num_bytes.min()), float(num_bytes[np.isfinite(seconds)].max())
    for share in LIMITS:
        limit = least + share * (largest - least)
        best = float(seconds[num_bytes <= limit].min())
        _compare(run_search(cost, "dynamic_programming", limit), limit, best, seed, tally)
    with pytest.raises(DoesNotFit) as caught:
        run_search(cost, "dynamic_programming", least - 1)
    assert caught.value.num_bytes == pytest.approx(least), seed


def _compare(found: MeshSearch, limit: float | None, best: float, seed: int, tally: Tally) -> None:
    outcome = found.outcome
    components = found.cost.components(outcome.assignment)
    assert outcome.components == pytest.approx(components, rel=1e-12), seed
    assert outcome.seconds == pytest.approx(float(seconds_of(components)), rel=1e-12), seed
    assert limit is None or components[BYTES] <= limit, f"seed {seed} does not fit {limit}"
    assert outcome.bound <= best * (1 + 1e-9), f"seed {seed}, limit {limit}: bound {outcome.bound} above {best}"
    assert outcome.seconds >= best * (1 - 1e-9), f"seed {seed}, limit {limit}: faster than all assignments"
    off = outcome.seconds / best - 1
    gap = gap_of(outcome)
    assert gap >= off - 1e-9, f"seed {seed}, limit {limit}: gap {gap}, but {off} from the optimum"
    tally.searches += 1
    tally.proven += gap == 0
    tally.optimal += off <= 1e-9
    tally.worst, tally.worst_gap = max(tally.worst, off), max(tally.worst_gap, gap)


def check_emitted(found: MeshSearch, assignment: list[int], seed: object) -> bool:
    """The claimed components are the price of the program that is emitted; never less, and more only where consumers of
    a value share a conversion. Returns whether they are equal."""
    cost = found.cost
    claimed = cost.components(assignment)
    if not np.isfinite(claimed).all():
        return True
    emitted = emitted_price(found, assignment)
    pairs = {
        "exposed": (claimed[EXPOSED], emitted.exposed + emitted.update),
        "compute": (claimed[COMPUTE], emitted.compute),
        "traffic": (claimed[TRAFFIC], emitted.traffic),
    }
    text = f"seed {seed}: claimed and emitted {pairs}"
    equal = all(own == pytest.approx(real, rel=1e-9, abs=1e-13) for own, real in pairs.values())
    assert sum(own for own, _ in pairs.values()) >= sum(real for _, real in pairs.values()) * (1 - 1e-9), text
    assert equal or priced_twice(cost, assignment), text
    return equal


@cache
def tiny_cost(name: str, mesh: sw.Mesh, seed: int = 1) -> CostGraph:
    """The cost graph of a tiny model on the cluster ``cluster_of(seed)``."""
    torch.manual_seed(0)
    inputs = TINY[name].inputs(12)
    return cost_of_model(TINY[name].build(), inputs, mesh, cluster_of(seed, mesh.num_devices))


def check_plan(name: str, search: str, mesh: sw.Mesh) -> None:
    """A plan of a tiny model equals one device, performs what it lists, and that costs what was claimed."""
    torch.manual_seed(0)
    model, inputs = TINY[name].build().double(), TINY[name].inputs(8)
    inputs = {key: value.double() if value.is_floating_point() else value for key, value in inputs.items()}
    cluster = cluster_of(1, mesh.num_devices)
    plan = sw.plan(model, (), cluster, kwargs=inputs, search=search, mesh=mesh, bucket_bytes=0)
    report = prove(model, (), plan, kwargs=inputs, steps=1)
    assert any(plan.collectives()) or any(plan.collectives(backward=True)), "nothing was split"
    _check_claimed(plan, report, capture(model, (), inputs).graph, Prices(Links(cluster, mesh)))


def _check_claimed(plan: sw.Plan, report: sw.results.Report, graph: Graph, prices: Prices) -> None:
    """An independent counter: the collectives that the virtual cluster recorded, priced, are the seconds that the
    search claimed, without those of the optimizer and with those that deliver outputs (training steps do not)."""
    recorded = []
    for record, backward in ((report.forward, False), (report.backward, True)):
        for own, listed in zip(record, plan.collectives(backward=backward), strict=True):
            # The model is in float64 but for a few casts to float32, which verify widens.
            assert own.num_bytes in (listed.num_bytes, 2 * listed.num_bytes), (own, listed)
            recorded.append(replace(own, num_bytes=listed.num_bytes))
    same = sum(a == b for a, b in zip(recorded, (*report.forward, *report.backward), strict=True))
    assert same >= 0.8 * len(recorded)
    priced = {value_name(name, graph) for name in (graph.loss, *(value for _, value in graph.mutations)) if name}
    delivered = [
        Collective(c.kind, plan.mesh.parse_axes(c.axes), c.num_bytes)
        for entry in plan.conversions
        if not entry.op and entry.value not in priced
        for c in (*entry.forward, *entry.backward)
    ]
    updates = 0.0
    for source in graph.sources:
        if source.value in graph.updated:
            local = plan.layouts[source.names[0]].max_local_numel
            updates += prices.update(graph.by_name[source.value], local)
    claimed = plan.prediction
    assert claimed is not None
    communication = claimed.exposed + claimed.traffic - updates + collective_seconds(delivered, prices)
    assert communication == pytest.approx(collective_seconds(recorded, prices), rel=1e-9)
