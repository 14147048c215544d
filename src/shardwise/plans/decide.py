"""From a graph to the choice of a plan: by propagation of what the user fixed, or by price."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from math import inf, log10

from shardwise.costs.cluster import Cluster
from shardwise.costs.cluster_file import format_cluster
from shardwise.costs.collectives import Links
from shardwise.costs.prices import Precision, Prices
from shardwise.errors import LayoutError, problem
from shardwise.graph.annotate import Annotation
from shardwise.graph.ir import Graph
from shardwise.layouts.mesh import Mesh
from shardwise.layouts.routes import Axes
from shardwise.layouts.strategy import parse_cuts
from shardwise.layouts.text import format_dtype
from shardwise.plans.fixed import annotated_rules, fixed_choices, subjects
from shardwise.plans.kept import sum_whole
from shardwise.plans.plan import PricingEntry
from shardwise.plans.ranking import REFERENCE_OPERATORS, Ranked, Simulate, fitted, ranked
from shardwise.plans.refusal import nothing_fits
from shardwise.rules.atoms import Factored
from shardwise.search.auto import Prediction, Search, assignment_of, cost_graph, searched, separate_axes
from shardwise.search.cost_graph import CostGraph
from shardwise.search.cuts import stored_as_cut, with_cuts
from shardwise.search.domains import PriceFragment
from shardwise.search.dynamic_programming import DoesNotFit
from shardwise.search.modes import Choice, choose
from shardwise.search.routing import Router


def decide(graph: Graph, annotations: Iterable[Annotation], mesh: Mesh, mode: str) -> tuple[Factored, Choice]:
    """Complete what the user annotated, in the given mode."""
    rules, factored = annotated_rules(graph, annotations := tuple(annotations))
    fixed = fixed_choices(graph, rules, factored, annotations, mesh)
    choice = sum_whole(choose(graph, factored, mesh, mode, fixed), graph, factored, mesh)
    cuts = {
        op.name: parse_cuts(annotation.strategy)
        for annotation in annotations
        if isinstance(annotation.strategy, str) and parse_cuts(annotation.strategy)
        for op in subjects(graph, factored, annotation)
    }
    return factored, stored_as_cut(with_cuts(choice, cuts, graph, factored.rules, mesh), graph, factored.rules, mesh)


@dataclass(frozen=True)
class Decided:
    """What a search by price decided."""

    mesh: Mesh
    factored: Factored
    choice: Choice
    pricing: PricingEntry
    prediction: Prediction
    search: Search


def decide_by_price(
    graph: Graph,
    annotations: Iterable[Annotation],
    cluster: Cluster,
    meshes: Iterable[Mesh],
    search: str,
    optimizer: str,
    precision: Precision,
    passes: int,
    memory_bytes: float | None,
    fragments: Callable[[Graph, Router], PriceFragment],
    simulate: Simulate | None = None,
) -> Decided:
    """The fastest choice over some meshes that keeps what the user annotated and fits into ``memory_bytes`` (None: what
    a device has). ``simulate``: settles what does not add up (``plans.ranking``). Raises PlanError when nothing
    fits."""
    rules, factored = annotated_rules(graph, annotations := tuple(annotations))
    _refuse_cuts(annotations, search)
    limit = cluster.device.memory_bytes if memory_bytes is None else memory_bytes
    searches: list[Search] = []
    least: tuple[CostGraph, float] | None = None
    for mesh in meshes:
        fixed = fixed_choices(graph, rules, factored, annotations, mesh)
        axes = Axes.of(mesh, separate_axes(fixed, mesh))
        cost = cost_graph(
            graph, factored, fixed, axes, Prices(Links(cluster, mesh), optimizer, precision, passes), fragments
        )
        try:
            found = searched(cost, search, limit, min((own.outcome.seconds for own in searches), default=inf))
            searches.append(found)
            if simulate is not None and not fixed and len(graph.ops) <= REFERENCE_OPERATORS:
                found.reference = assignment_of(cost, choose(graph, factored, mesh, "data_parallel", {}))
        except DoesNotFit as error:
            if least is None or error.num_bytes < least[1]:
                least = cost, error.num_bytes
    chosen = _first_that_fits(searches, search, limit, simulate)
    if chosen is None:
        assert least is not None, "there is a mesh"
        cost, num_bytes = least
        chosen = ranked(searched(cost, search, num_bytes), limit, simulate)
    if chosen.excess:
        raise nothing_fits(limit, chosen)
    best = chosen.search
    groups = best.cost.domains.axes.groups
    separate = tuple(
        name for name, _ in best.mesh.axes if len(best.mesh.expand(name)) > 1 and best.mesh.expand(name) not in groups
    )
    compute, parameter, reduce = (
        "" if own is None else format_dtype(own) for own in (precision.compute, precision.parameter, precision.reduce)
    )
    pricing = PricingEntry(format_cluster(cluster), compute, parameter, reduce, separate)
    prediction = _over_all_meshes(chosen.prediction, best.mesh, searches)
    return Decided(best.mesh, factored, best.choice(), pricing, prediction, best)


def _over_all_meshes(prediction: Prediction, mesh: Mesh, searches: Sequence[Search]) -> Prediction:
    """The prediction for ``mesh`` with a bound that holds for the plans on the meshes of all searches, under the limit
    that these had (it may come from one under a lower limit)."""
    others = [search for search in searches if search.mesh != mesh]
    counts = [prediction.log10_plans, *(search.log10_plans for search in others)]
    most = max(counts)
    return replace(
        prediction,
        bound=min([prediction.bound, *(float(search.outcome.bound) for search in searches)]),
        log10_plans=most + log10(sum(10.0 ** (count - most) for count in counts)),
    )


def _refuse_cuts(annotations: Iterable[Annotation], search: str) -> None:
    for annotation in annotations:
        if isinstance(annotation.strategy, str) and parse_cuts(annotation.strategy):
            raise LayoutError(
                problem(
                    f"search={search!r} prices even splits only, and {annotation.strategy!r} says how many indices "
                    "each device has",
                    op=annotation.scope,
                    source=annotation.source,
                    fix='plan with search="sharding_propagation", or leave out the braces',
                )
            )


def _first_that_fits(searches: list[Search], name: str, limit: float, simulate: Simulate | None) -> Ranked | None:
    """Of searches on several meshes the fastest whose peak fits; if none does, the one of the lowest peak; None where
    there are none. A search that stopped when it could not be the fastest goes on where its turn comes."""
    lowest: Ranked | None = None
    left = list(searches)
    while left:
        at = min(range(len(left)), key=lambda i: _least_seconds(left[i]))
        if left[at].outcome.stopped:
            left[at] = replace(searched(left[at].cost, name, limit), reference=left[at].reference)
            continue
        found = fitted(left.pop(at), name, limit, simulate)
        if lowest is None or found.excess < lowest.excess:
            lowest = found
        if not found.excess:
            break
    return lowest


def _least_seconds(search: Search) -> float:
    """The seconds that a search comes to, or a bound of them where it stopped."""
    return search.outcome.bound if search.outcome.stopped else search.outcome.seconds
