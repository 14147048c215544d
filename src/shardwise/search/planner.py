"""The planner of one model on one cluster, from the meshes that are tried to the program that is taken.

Every mesh has a cost graph and a search. The candidates of all meshes that are nearly as cheap as the cheapest
(``search.candidates``) become programs; a step of each is simulated, and the fastest that fits is taken.
Bytes of the search leave out temporaries and messages. If these break the limit, the search
continues under a limit that is lower by as much, then without the choices that hold the most transient bytes
(``searches_within``). The peak of the program decides what fits, and is printed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from math import ceil, inf, log10
from typing import Any

from shardwise.costs.cluster import Cluster
from shardwise.costs.collectives import Links
from shardwise.costs.ledger import Peak, static_bytes
from shardwise.costs.memory import memory_of_program
from shardwise.costs.prediction import Prediction
from shardwise.costs.prices import Prices, gradient_bytes
from shardwise.costs.pricing import price_program
from shardwise.costs.timeline import SimulatedStep, simulate_program
from shardwise.errors import LayoutError
from shardwise.graph.annotate import Annotation
from shardwise.graph.ir import Graph
from shardwise.layouts.layout import Layout
from shardwise.layouts.mesh import Mesh
from shardwise.layouts.routes import Axes
from shardwise.layouts.strategy import parse_cuts
from shardwise.layouts.transfer import on_mesh
from shardwise.programs.buckets import BUCKET_BYTES
from shardwise.programs.builder import Choice, RowChunks
from shardwise.programs.spmd import SpmdProgram
from shardwise.progress import STOPPED, check_deadline, each, finishing, has_stopped, stop_with
from shardwise.rules.atoms import Factored
from shardwise.rules.rule import OpRule
from shardwise.search.auto import MeshSearch, run_search, searches_within, separate_axes
from shardwise.search.axis_names import AxisUsage, mesh_by_roles
from shardwise.search.block_extrapolation import FoldedSteps, shared_step
from shardwise.search.candidates import (
    BOUNDED_SEARCH,
    Candidate,
    CandidateRanking,
    SimulatedCandidate,
    candidates,
    rank_candidates,
)
from shardwise.search.constants import (
    BUCKET_GAIN,
    CANDIDATE_PRICE_RATIO,
    CANDIDATE_PRICE_RATIO_RECOMPUTED,
    EXACT_GAP,
    FOLDED_STEP_ERROR,
    MAX_CAP_PROGRAMS,
    MAX_LIMIT_HALVINGS,
    MAX_LIMIT_RETRIES,
    MAX_OPERATORS_TO_COMPARE,
    MAX_SIMULATED_OPERATORS,
    PREFETCH_DEPTHS,
    ROW_CHUNKS,
)
from shardwise.search.cost_graph import CostGraph
from shardwise.search.cost_tables import Tables
from shardwise.search.decide import apply_layouts
from shardwise.search.domains import Domains, SearchSpace
from shardwise.search.dynamic_programming import DoesNotFit, least_step
from shardwise.search.memory_policy import GraphValues, MemoryPolicy, PricedPolicy
from shardwise.search.planning_cache import PlanningCache
from shardwise.search.stored_program import ProgramWithPolicy, SearchConfig, build_stored_program
from shardwise.search.user_choices import annotated_rules, fixed_choices


@dataclass(frozen=True, eq=False)
class StageSearchResult:
    """The search for a part, or for an equal part. ``names``: operator or parameter of the part -> its name in the
    search."""

    search: MeshSearch
    names: Mapping[str, str]


@dataclass(frozen=True)
class StagePlan:
    """The choice for a part by itself or for a whole model, its program and memory policy. ``prediction``: for a whole
    model; ``ranking``: the candidates that were compared; if it has an ``excess``, nothing fits and this needs least;
    ``searched``, ``ranking``: None if nothing was searched."""

    factored: Factored
    choice: Choice
    spmd: SpmdProgram
    memory_policy: MemoryPolicy
    prediction: Prediction | None = None
    searched: StageSearchResult | None = None
    ranking: CandidateRanking | None = None
    bucket_bytes: int = BUCKET_BYTES

    @property
    def mesh(self) -> Mesh:
        return self.spmd.mesh

    def excess(self, limit: float) -> float:
        return 0.0 if self.ranking is None else max(0.0, self.ranking.best.num_bytes - limit)

    def fits_with(self, more: int, limit: float) -> bool:
        """Return whether the plan fits if it keeps so many micro-batches more than it was searched for."""
        if self.ranking is None:
            return not more
        return self.ranking.best.num_bytes + more * self.ranking.best.kept_bytes <= limit

    def with_bound(self, bound: float) -> StagePlan:
        """Return the plan with another bound of the additive price."""
        assert self.prediction is not None, "it was chosen by price"
        return replace(self, prediction=replace(self.prediction, bound=bound))


@dataclass(frozen=True, eq=False)
class Planner:
    """Plans of one model on the meshes of one cluster. ``rules``: in the variants that the user's annotations name;
    ``factored``: the same, divided; ``choosing``: the search space; ``folded``: estimates for models of many equal
    blocks (None: every candidate is built as a whole); ``cache``: shared with the planners of other stages;
    ``graph_cache``: results with names of this graph, shared with planners of other policies, limits and messages."""

    graph: Graph
    annotations: tuple[Annotation, ...]
    rules: Mapping[str, OpRule]
    factored: Factored
    choosing: SearchSpace
    cluster: Cluster
    meshes: tuple[Mesh, ...]
    settings: SearchConfig
    cache: PlanningCache = field(default_factory=PlanningCache)
    folded: FoldedSteps | None = None
    graph_cache: PlanningCache = field(default_factory=PlanningCache)

    @staticmethod
    def of(
        graph: Graph,
        annotations: Iterable[Annotation],
        cluster: Cluster,
        meshes: Iterable[Mesh],
        settings: SearchConfig,
        cache: PlanningCache | None = None,
    ) -> Planner:
        """Return the planner for a captured model. Raises LayoutError for splits by hand, which have no price."""
        annotations = tuple(annotations)
        rules, factored = annotated_rules(graph, annotations, settings.imbalance)
        _refuse_cuts(annotations, settings.search)
        choosing, meshes = SearchSpace(graph, factored), tuple(meshes)
        cache = cache or PlanningCache()
        return Planner(
            graph, annotations, rules, factored, choosing, cluster, meshes, settings, cache, FoldedSteps(graph)
        )

    def under(self, memory_policy: MemoryPolicy) -> Planner:
        return replace(self, settings=replace(self.settings, memory_policy=memory_policy))

    @property
    def limit(self) -> float:
        """Return the bytes that the tensors of a device may take."""
        memory_bytes = self.settings.memory_bytes
        return self.cluster.device.usable_bytes if memory_bytes is None else memory_bytes

    def plan(self) -> StagePlan:
        """Return the fastest plan over all meshes that keeps the user's choices and fits; if none does
        (``ranking.excess``) the one that needs least memory."""
        ranking = self.ranking_of(*self.searches())
        planned = self.planned(ranking)
        if self.folded is not None and planned.excess(self.limit) and not ranking.excess:
            return replace(self, folded=None).plan()  # the estimate was too low
        return planned

    def ranking_of(
        self, searches: Sequence[MeshSearch], refused: Sequence[tuple[float, CostGraph]], known: float = inf
    ) -> CandidateRanking:
        """Return the best candidate of ``searches``; without any, the plan of the fewest additive bytes. ``known``: as
        of ``fastest``."""
        if searches:
            return replace(self.fastest(searches, known), searches=tuple(searches))
        num_bytes, cost = min(refused, key=lambda pair: pair[0])
        least = run_search(cost, self.settings.search, num_bytes)
        return self.within_moments(least, self.rank([least]))

    def searches(
        self, bounds: Mapping[Mesh, float] | None = None
    ) -> tuple[list[MeshSearch], list[tuple[float, CostGraph]]]:
        """Return the searches of the meshes on which something fits, and for the others the least bytes. ``bounds``:
        of the price, by mesh. What may be the best is searched first: the other searches end when they are above it."""
        searches: list[MeshSearch] = []
        refused: list[tuple[float, CostGraph]] = []
        meshes = sorted(self.meshes, key=lambda mesh: (bounds or {}).get(mesh, 0.0))
        for mesh in each(meshes, lambda mesh: f"prices and search on {mesh.format_sizes()} devices"):
            cost = self.cost_graph(mesh)
            cutoff = CANDIDATE_PRICE_RATIO * min((search.outcome.seconds for search in searches), default=inf)
            try:
                searches.append(run_search(cost, self.settings.search, self.limit, cutoff))
            except DoesNotFit as error:
                refused.append((error.num_bytes, cost))
        return searches, refused

    # -- prices --------------------------------------------------------------------------------------------------------

    def cost_graph(self, mesh: Mesh) -> CostGraph:
        """Return the choices on a mesh and their prices."""
        if mesh not in self._cost_graphs:
            self._cost_graphs[mesh] = self._priced(mesh)
        return self._cost_graphs[mesh]

    @cached_property
    def _cost_graphs(self) -> dict[Mesh, CostGraph]:
        return {}

    def _priced(self, mesh: Mesh) -> CostGraph:
        return self.tables(mesh).priced(self._priced_policy)

    @cached_property
    def _priced_policy(self) -> PricedPolicy:
        return self.settings.memory_policy.priced(self.values, self.settings.in_flight)

    @property
    def values(self) -> GraphValues:
        return self.graph_cache.get("values", None, lambda: GraphValues(self.graph))

    def tables(self, mesh: Mesh) -> Tables:
        """Return the cost graphs on a mesh under all memory policies."""
        return self.graph_cache.get("tables", mesh, lambda: self._tables(mesh))

    def _tables(self, mesh: Mesh) -> Tables:
        fixed = fixed_choices(self.graph, self.rules, self.factored, self.annotations, mesh)
        axes = Axes.of(mesh, separate_axes(fixed, mesh))
        domains = Domains(self.choosing, axes, self.prices(mesh), self.cache)
        taken = {
            name: on_mesh(layout, mesh) or Layout.whole(mesh, layout.shape)
            for name, layout in self.settings.taken.items()
        }
        return Tables(domains, fixed, taken)

    def prices(self, mesh: Mesh) -> Prices:
        """Return the prices on a mesh of the cluster."""
        settings = self.settings
        prices = Prices(Links(self.cluster, mesh), settings.optimizer, settings.passes)
        return prices.with_buckets(self.graph, settings.bucket_bytes)

    # -- ranking -------------------------------------------------------------------------------------------------------

    def fastest(self, searches: Sequence[MeshSearch], known: float = inf) -> CandidateRanking:
        """Return the fastest candidate of the meshes that are nearly as cheap as the cheapest. If none of them fits,
        the meshes are tried in the order of their price, each under lower limits. A search that stopped continues when
        its turn comes. ``known``: seconds of a step that fits. Slower candidates that do not fit are not tried under
        lower limits, where they cost no less."""
        left = sorted(searches, key=_least_seconds)
        most = CANDIDATE_PRICE_RATIO * left[0].outcome.seconds
        near = [search for search in left if not search.outcome.stopped and search.outcome.seconds <= most]
        pooled = self.rank(near)
        lowest, cheapest = pooled, pooled.cheapest
        while left and lowest.excess and _least_seconds(left[0]) < known:
            search = left.pop(0)
            if search.outcome.stopped:
                left = sorted([run_search(search.cost, self.settings.search, self.limit), *left], key=_least_seconds)
                continue
            start = pooled if near == [search] else self.rank([search])
            if _seconds(start.cheapest) < known:
                lowest = min(lowest, self.fitted(search, start), key=lambda ranking: ranking.excess)
        return replace(lowest, cheapest=cheapest)

    def fitted(self, search: MeshSearch, start: CandidateRanking) -> CandidateRanking:
        """Return the ranking of a search. While its peak does not fit, try the search under lower limits, then the
        policy that keeps least, and in the end the search under caps on transient bytes. If all are too large, return
        the one of the lowest peak."""
        lowest, allowed, too_much = start, self.limit, self.limit
        for attempt in range(MAX_LIMIT_RETRIES + 1):
            if not lowest.excess:
                break
            num_bytes = lowest.best.candidate.num_bytes
            too_much = min(allowed, num_bytes)
            allowed = too_much - lowest.excess if attempt < MAX_LIMIT_RETRIES else 0.0
            below, is_least = self._searched_below(search, allowed)
            # There is only one candidate that keeps least.
            below_limit = self._rank_alone(below) if is_least else self.rank([below])
            lowest = min(lowest, below_limit, key=lambda ranking: ranking.excess)
            if is_least:
                break
        if not lowest.excess and allowed < self.limit and len(self.graph.ops) <= MAX_OPERATORS_TO_COMPARE:
            return self._between(search, lowest, allowed, too_much)
        return self.within_moments(search, lowest)

    def _between(
        self, search: MeshSearch, fitting: CandidateRanking, allowed: float, too_much: float
    ) -> CandidateRanking:
        """Return the fastest of a ranking that fits under a lower limit and of the searches between that limit and one
        that was too high."""
        for _ in range(MAX_LIMIT_HALVINGS):
            middle = (allowed + too_much) / 2
            try:
                ranking = self._rank_alone(self._searched_below(search, middle)[0])
            except STOPPED:
                stop_with(True)
                return fitting
            if ranking.excess:
                too_much = middle
                continue
            allowed = middle
            fitting = min(fitting, ranking, key=lambda result: result.prediction.step_seconds)
        return fitting

    def within_moments(self, search: MeshSearch, known: CandidateRanking) -> CandidateRanking:
        """Return a ranking. If it does not fit, return the first search that fits under caps on transient bytes, else
        the one of the lowest peak."""
        lowest = known
        if lowest.excess:
            for capped in searches_within(search, self.limit)[:MAX_CAP_PROGRAMS]:
                lowest = min(lowest, self._rank_alone(capped), key=lambda ranking: ranking.excess)
                if not lowest.excess:
                    break
        return lowest

    def _rank_alone(self, search: MeshSearch) -> CandidateRanking:
        alone = Candidate(search, search.outcome.assignment, search.outcome.components)
        return rank_candidates(
            [self._built(alone, simulated=len(self.graph.ops) <= MAX_SIMULATED_OPERATORS)], self.limit
        )

    def _searched_below(self, search: MeshSearch, allowed: float) -> tuple[MeshSearch, bool]:
        try:
            return run_search(search.cost, self.settings.search, allowed), False
        except DoesNotFit as error:
            return run_search(search.cost, self.settings.search, error.num_bytes), True

    def rank(self, searches: Sequence[MeshSearch]) -> CandidateRanking:
        """Return the best candidate of searches; at a deadline, of those that were simulated, and after it the
        cheapest."""
        if len(self.graph.ops) > MAX_SIMULATED_OPERATORS or has_stopped():
            with finishing() if has_stopped() else nullcontext():
                return self._rank_alone(min(searches, key=lambda search: search.outcome.seconds))
        share = CANDIDATE_PRICE_RATIO_RECOMPUTED if self.settings.memory_policy else CANDIDATE_PRICE_RATIO
        near = candidates(searches, self.settings.search, self.limit, share)
        built: list[SimulatedCandidate] = []
        try:
            for candidate in each(near, lambda candidate: "simulating candidates"):
                built.append(self._built(candidate))
        except STOPPED:
            stop_with(bool(built))
        return rank_candidates(built, self.limit)

    def _built(self, candidate: Candidate, *, simulated: bool = True, whole: bool = False) -> SimulatedCandidate:
        """Return a candidate with its program, its peak and a simulated step. If the model has many equal blocks, these
        are estimated, unless the ``whole`` program is asked for."""
        memory_policy, mesh = self.settings.memory_policy, candidate.search.mesh
        is_folded = self.folded is not None and not whole
        size, assignment = self._messages, tuple(candidate.assignment)
        key = memory_policy.key, size, mesh, assignment, simulated, is_folded
        built = self.graph_cache.get("programs", key, lambda: self._build(candidate, simulated=simulated, whole=whole))
        return replace(built, candidate=candidate)

    def _build(self, candidate: Candidate, *, simulated: bool, whole: bool) -> SimulatedCandidate:
        check_deadline()
        search, settings = candidate.search, self.settings
        choice = self._choice(search, candidate.assignment)
        choice = apply_layouts(choice, settings.layouts, self.graph, self.factored, search.mesh)
        rules, prices = self.factored.rules, search.cost.domains.prices

        def program_of(graph: Graph, memory_policy: MemoryPolicy) -> ProgramWithPolicy:
            with_policy = replace(settings, memory_policy=memory_policy)
            names = tuple(op.name for op in graph.ops)
            by_block, assignment = memory_policy.reshard_mode == "again", tuple(candidate.assignment)
            stored = self.graph_cache.get(
                "stored programs",
                (search.mesh, assignment, self._messages, by_block, names),
                lambda: build_stored_program(graph, rules, choice, search.mesh, with_policy, self.cache.vjp_cache),
            )
            return stored.with_lifetimes(graph, with_policy)

        def simulate_short(graph: Graph, memory_policy: MemoryPolicy) -> SimulatedStep:
            return simulate_program(program_of(graph, memory_policy).busiest, prices)

        def short(graph: Graph, memory_policy: MemoryPolicy) -> SimulatedStep:
            if self.annotations or settings.layouts:  # which have names
                return simulate_short(graph, memory_policy)
            rest = prices, self._messages, settings.zero
            simulate = partial(simulate_short, graph, memory_policy)
            return shared_step(self.cache, graph, self.factored, choice, memory_policy, rest, simulate)

        step, spmd = None, None
        if self.folded is not None and not whole:
            step = self.folded.step(choice, settings.memory_policy, (search.mesh, self._messages), short)
        if step is None:
            program = program_of(self.graph, settings.memory_policy)
            choice, spmd, busiest = program.choice, program.spmd, program.busiest
            step = simulate_program(busiest, prices) if simulated else None
        memory = memory_of_program(busiest, prices) if step is None else step
        others = self._others(memory.peak, memory.kept_bytes)
        called, num_roles = mesh_by_roles(search.mesh, [AxisUsage(self.graph, rules, choice.strategies)])
        return SimulatedCandidate(
            candidate, choice, spmd, memory.peak, step, others, memory.kept_bytes, called, num_roles
        )

    @property
    def _messages(self) -> tuple[int, int, RowChunks]:
        """Return the settings of messages on which a program depends."""
        return self.settings.bucket_bytes, self.settings.prefetch, self.settings.row_chunks or 1

    def _choice(self, search: MeshSearch, assignment: list[int]) -> Choice:
        return self.graph_cache.get("choices", (search.mesh, tuple(assignment)), lambda: search.choice(assignment))

    def _others(self, peak: Peak, kept_bytes: int) -> int:
        """Return the bytes kept for the other passes in flight, less the transient bytes that the stages of a rank
        share."""
        moment = max(0, peak.num_bytes - static_bytes(peak) - kept_bytes) if peak.parts else 0
        return (self.settings.in_flight - 1) * kept_bytes - moment + moment // self.settings.turns

    # -- the answer ----------------------------------------------------------------------------------------------------

    def eased(
        self, ranking: CandidateRanking, weaker: MemoryPolicy, fastest: float = inf
    ) -> tuple[Planner, CandidateRanking]:
        """Return a ranking that fits with some of its segments as ``weaker`` has them (the same segments in the same
        order), as many from the last as the limit allows, and the planner with these. Memory decides, as all
        recomputation costs time. If not even all of them make a micro-batch ``fastest``, none is changed; nor where
        that takes longer, as more values are copied to the host."""
        strong = self.settings.memory_policy.segments
        tried: dict[int, tuple[Planner, SimulatedCandidate]] = {len(strong): (self, ranking.best)}

        def bytes_of(count: int) -> float:
            if count not in tried:
                mixed = replace(self.settings.memory_policy, segments=strong[:count] + weaker.segments[count:])
                planner = self.under(mixed)
                tried[count] = planner, planner._built(ranking.best.candidate)
            return tried[count][1].num_bytes

        bytes_of(0)
        step = tried[0][1].step
        if step is not None and step.seconds >= fastest:
            return self, ranking
        planner, best = tried[least_that_fits(bytes_of, len(strong), self.limit)]
        if _seconds(best) > _seconds(ranking.best):
            return self, ranking
        if planner is not self:
            found = best.candidate  # its choices stay, at their price under the mixed policy
            cost = planner.cost_graph(found.search.mesh)
            search = replace(found.search, cost=cost)
            best = replace(best, candidate=Candidate(search, found.assignment, cost.components(found.assignment)))
        return planner, replace(ranking, best=best, faster=None)  # which was simulated under the other policy

    def bound_without_limit(self) -> float:
        """Return a bound of the additive price of all plans, if the memory policy recomputes nothing: whatever the
        memory of a plan, and whatever it recomputes."""
        bound = inf if self.settings.search == BOUNDED_SEARCH else 0.0
        for mesh in self.meshes if bound else ():
            bound = min(bound, least_step(self.cost_graph(mesh), bound))
        return bound

    def least_seconds(self, known: Mapping[Mesh, float]) -> dict[Mesh, float]:
        """Return, for every mesh, a bound of the additive price of its plans, whatever their memory, by one solve.

        ``known``: bounds that hold already; they are kept where they are not below the least of the others."""
        if self.settings.search != BOUNDED_SEARCH:
            return dict.fromkeys(self.meshes, 0.0)
        bounds, least = dict(known), inf
        for mesh in sorted(self.meshes, key=lambda mesh: known.get(mesh, 0.0)):
            if known.get(mesh, 0.0) >= least:
                break
            bounds[mesh] = least_step(self.cost_graph(mesh), 0.0) * (1 - EXACT_GAP)
            least = min(least, bounds[mesh])
        return bounds

    def planned(self, ranking: CandidateRanking) -> StagePlan:
        """Return the plan of a ranking's best candidate; its program is built if it was only estimated. Its messages
        get the size, and its rows the chunks, that are predicted to be the fastest, where the settings leave that
        free and there is time."""
        try:
            for vary in () if has_stopped() else (self._sized, self._in_chunks):
                varied = vary(ranking.best)
                if varied is self:
                    continue
                other = varied._whole(varied._built(ranking.best.candidate))
                is_sure = FOLDED_STEP_ERROR * _seconds(other) < _seconds(ranking.best)
                if other.num_bytes <= self.limit and (is_sure or _seconds(other) < _seconds(self._whole(ranking.best))):
                    return varied.planned(replace(ranking, best=other))
        except STOPPED:
            stop_with(True)
        with finishing():
            return self._finished(ranking)

    def _finished(self, ranking: CandidateRanking) -> StagePlan:
        best = self._whole(ranking.best)
        ranking = replace(ranking, best=best)
        assert best.spmd is not None, "a whole program was built"
        search = ranking.search
        prediction = with_bound_over_meshes(ranking.prediction, search.mesh, ranking.searches)
        prediction = _as_emitted(prediction, best.spmd, search)
        if self.settings.layouts or self.settings.zero is not None or self.settings.memory_policy:
            prediction = _as_stored(prediction, best, search, self._choice(search, best.candidate.assignment))
        names = (*(op.name for op in self.graph.ops), *(source.names[0] for source in self.graph.sources))
        searched = StageSearchResult(search, {name: name for name in names})
        return StagePlan(
            self.factored, best.choice, best.spmd, self.settings.memory_policy, prediction, searched, ranking,
            self.settings.bucket_bytes,
        )  # fmt: skip

    def _whole(self, built: SimulatedCandidate) -> SimulatedCandidate:
        if built.spmd is not None:
            return built
        return self._built(built.candidate, simulated=len(self.graph.ops) <= MAX_SIMULATED_OPERATORS, whole=True)

    def _sized(self, best: SimulatedCandidate) -> Planner:
        """Return the planner with the size of messages and the prefetch depth of gathers that make a candidate's step
        the shortest, of those that fit. Others than those of the settings have to be clearly faster.

        A size is fast where the time to send it is that of the layers behind which it travels, so it is chosen at a
        depth of 2. Small messages are tried only where large ones are slower."""
        sizes, usual = self.settings.message_sizes, (self.settings.bucket_bytes, self.settings.prefetch)
        if sizes is None or not _waits(best) or best.num_bytes > self.limit:
            return self
        tried: dict[tuple[int, int], tuple[Planner, float]] = {usual: (self, _seconds(best))}

        def seconds(size: int, depth: int) -> float:
            if (size, depth) not in tried:
                tried[size, depth] = self._varied(best.candidate, bucket_bytes=size, prefetch=depth)
            return tried[size, depth][1]

        size, depths = usual[0], (usual[1], *PREFETCH_DEPTHS)
        depth = next((depth for depth in depths[1:2] if seconds(size, depth) < inf), usual[1])
        total = gradient_bytes(self.graph)  # which travel together in any larger message
        for larger in [s for s in sizes if s > size]:
            if size >= total or seconds(larger, depth) >= seconds(size, depth):
                break
            size = larger
        for smaller in [s for s in sizes[::-1] if s < size == usual[0]]:
            if smaller < total and seconds(smaller, depth) < seconds(size, depth):
                size = smaller
        for depth in depths:
            seconds(size, depth)
        fastest = min(found for _, found in tried.values())
        if fastest >= (1 - BUCKET_GAIN) * tried[usual][1]:
            return self
        near = [one for one, (_, found) in tried.items() if found <= fastest * (1 + BUCKET_GAIN) and one[0] == size]
        return tried[min(near, key=lambda one: one[1])][0]

    def _in_chunks(self, best: SimulatedCandidate) -> Planner:
        """Return the planner with the chunks of rows, or the messages within products, that make a candidate's step
        clearly the shortest, of those that fit. They are tried where the step waits for messages, more chunks only if
        few gain."""
        if self.settings.row_chunks is not None or not _waits(best):
            return self
        links = best.candidate.search.cost.domains.prices.links
        planner, fastest = self, _seconds(best)
        for way in (*ROW_CHUNKS, *(("fused",) if links.cluster.levels[0].symmetric_memory else ())):
            if planner is self and way == ROW_CHUNKS[-1]:
                continue
            varied, seconds = self._varied(best.candidate, row_chunks=way)
            planner, fastest = (varied, seconds) if seconds < fastest else (planner, fastest)
        return planner if fastest < (1 - BUCKET_GAIN) * _seconds(best) else self

    def _varied(self, candidate: Candidate, **settings: Any) -> tuple[Planner, float]:
        """Return the planner with other settings of messages, and the seconds of a candidate's step with them; infinite
        if it does not fit."""
        other = replace(self, settings=replace(self.settings, message_sizes=None, **settings))
        built = other._built(candidate)
        return other, _seconds(built) if built.num_bytes <= self.limit else inf


def _seconds(built: SimulatedCandidate) -> float:
    return 0.0 if built.step is None else built.step.seconds


def _waits(built: SimulatedCandidate) -> bool:
    """Return whether a step waits long enough for messages that sending them otherwise could make it clearly faster."""
    return built.step is not None and built.step.exposed > BUCKET_GAIN * built.step.seconds


def least_that_fits(bytes_of: Callable[[int], float], most: int, limit: float) -> int:
    """Return the least count up to ``most``, which fits, whose bytes are within the limit. Bytes fall about evenly with
    the count. So the point where a straight line meets the limit is tried after 0, then points further and further on
    from there, and halves of what is left once both sides are known."""
    if (of_none := bytes_of(0)) <= limit:
        return 0
    below, guess, step = 0, ceil(most * (of_none - limit) / (of_none - bytes_of(most))), 1
    seen: set[bool] = set()
    while most - below > 1:
        guess = min(max(guess, below + 1), most - 1)
        seen.add(fits := bytes_of(guess) <= limit)
        below, most = (below, guess) if fits else (guess, most)
        guess = (below + most) // 2 if len(seen) == 2 else most - step if fits else below + step
        step *= 2
    return most


def with_bound_over_meshes(prediction: Prediction, mesh: Mesh, searches: Sequence[MeshSearch]) -> Prediction:
    """Return the prediction for ``mesh`` with a bound that holds for the plans on the meshes of all searches, under the
    limit that these had (it may come from one under a lower limit)."""
    others = [search for search in searches if search.mesh != mesh]
    counts = [prediction.log10_plans, *(search.log10_plans for search in others)]
    most = max(counts)
    return replace(
        prediction,
        bound=min([prediction.bound, *(float(search.outcome.bound) for search in searches)]),
        log10_plans=most + log10(sum(10.0 ** (count - most) for count in counts)),
    )


def _as_emitted(prediction: Prediction, spmd: SpmdProgram, search: MeshSearch) -> Prediction:
    domains = search.cost.domains
    free = {op.name for op in domains.graph.ops} - {op.name for op in domains.operators}
    price = price_program(spmd, domains.prices, free, domains.windows)
    return replace(prediction, exposed=price.exposed + price.update, compute=price.compute, traffic=price.traffic)


def _as_stored(prediction: Prediction, best: SimulatedCandidate, search: MeshSearch, choice: Choice) -> Prediction:
    """Return the prediction with the bytes of parameters that are stored otherwise than in ``choice``, that of the
    search: as the user keeps them, or in parts. The searched plans have no conversions from there, so the bound is
    compared with the step that has them."""
    graph, prices = search.cost.domains.graph, search.cost.domains.prices
    sources, more = choice.sources, 0.0
    for source in graph.sources:
        if source.kind == "parameter":
            numel = best.choice.sources[source.value].max_local_numel - sources[source.value].max_local_numel
            updated = source.value in graph.updated
            more += numel * prices.resident_bytes_per_element(graph.by_name[source.value], updated)
    price = max(prediction.additive_price, prediction.pass_seconds)
    return replace(prediction, num_bytes=prediction.num_bytes + more, additive_price=price)


def _refuse_cuts(annotations: Iterable[Annotation], search: str) -> None:
    for annotation in annotations:
        if isinstance(annotation.strategy, str) and parse_cuts(annotation.strategy):
            what = f"search={search!r} prices even splits only, and {annotation.strategy!r} says how many indices each"
            fix = 'plan with search="sharding_propagation", or leave out the braces'
            raise LayoutError(f"{what} device has", op=annotation.scope, source=annotation.source, fix=fix)


def _least_seconds(search: MeshSearch) -> float:
    """Return the seconds of a search's result, or a bound of them if it stopped."""
    return search.outcome.bound if search.outcome.stopped else search.outcome.seconds
