"""Estimates of the step of pipeline settings, from searches over a model shortened to two blocks of each run.

Time and memory of a stage are linear in the number of its equal blocks. So the model is shortened to the first and the
last block of each run of equal blocks. This short model is searched on the devices of one pipeline rank, with the
micro-batch of the setting. There is one search per mesh, memory policy, price of a second of traffic and price of a
byte.

The result of a search is a *point*. Of every block it has the seconds that one more of it takes in a stage
(``_seconds_of_blocks``), the bytes that stay for the whole step, those that a micro-batch keeps for backward, and the
most transient bytes of an operator or a message. For a stage with blocks i to j, the sums over these blocks, and the
most transient bytes, give::

    seconds(point, i, j) = seconds
    bytes(point, i, j)   = stays + kept * (micro-batches that the stage keeps at once) + transient / (stages of a rank)
    stage(s, i, j)       = least seconds of the points whose bytes fit stage s

Where all is recomputed, a second point has kept values wait on the host. The cut makes the slowest stage as fast as
possible (``search.stage_partition.StageCut.of``).

The points of one search also stand for others, with as many more samples of a device (``BlockCosts.scaled``).

Estimates choose which settings are planned, and in which order (``plans.auto_stages``), and nothing else. Where the
stages of a setting begin is decided in ``search.stage_partition``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from itertools import pairwise
from math import inf
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from shardwise.costs.flops import FLOPS
from shardwise.errors import PlanError
from shardwise.graph.folding import Folding
from shardwise.graph.ir import Graph
from shardwise.graph.segments import How, Segment, block_of
from shardwise.layouts.routes import Floats, Ints
from shardwise.plans.auto_stages import StageConfig
from shardwise.plans.micro_batch_search import Example
from shardwise.plans.request import PlanRequest
from shardwise.programs.micro_batches import Passes
from shardwise.search.constants import (
    ESTIMATED_BYTE_PRICES,
    ESTIMATED_MEMORY_SHARE,
    ESTIMATED_TRAFFIC_WEIGHTS,
    SCALED_ESTIMATE_SHARE,
)
from shardwise.search.cost_graph import (
    BYTES,
    COMPUTE,
    EXPOSED,
    TRAFFIC,
    CostGraph,
    CostWeights,
    OperatorVariable,
    StorageVariable,
)
from shardwise.search.elimination import TooWide
from shardwise.search.memory_policy import MEMORY_POLICIES, MemoryPolicy, ReshardMode, blocks_of, ends_of
from shardwise.search.planner import Planner
from shardwise.search.planning_cache import PlanningCache
from shardwise.search.solving import minimise
from shardwise.search.stage_partition import StageCut
from shardwise.search.stored_program import SearchConfig

# In a stage "once" stands for "held" too, and the last blocks decide nothing.
ESTIMATED_POLICIES = tuple(
    policy
    for policy in MEMORY_POLICIES
    if policy in (MemoryPolicy(None, "held"), MemoryPolicy(None, "again"), MemoryPolicy("full", "again"))
    or (policy.reshard_mode == "once" and policy.recompute != "offload")
)
# Columns of a point.
SECONDS, STAYS, KEPT, TRANSIENT = range(4)


@dataclass(frozen=True, eq=False)
class BlockSpans:
    """Time and memory of a stage with a range of the blocks, for every point.

    Attributes:
        seconds: [points, first block, block behind] seconds of a micro-batch; infinite if there is no block.
        held: [points, first block, block behind, 3] bytes that stay, bytes kept per micro-batch, and transient bytes.
    """

    seconds: Floats
    held: Floats

    @staticmethod
    def of(points: Floats) -> BlockSpans:
        """Return the spans of points.

        The stage with the first block also gets what is ahead of it. The stage with the last block also gets what is
        behind it.

        Args:
            points: [points, 1 + blocks + 1, 4] costs of what is ahead of all blocks, of each block, and of what is
                behind. The columns are SECONDS (of a micro-batch), STAYS, KEPT and TRANSIENT (bytes).
        """
        summed = np.cumsum(points, axis=1)
        starts = np.concatenate([np.zeros_like(summed[:, :1]), summed[:, 1:-2]], axis=1)
        ends = np.concatenate([summed[:, 1:-2], summed[:, -1:]], axis=1)
        added = ends[:, None, :, :] - starts[:, :, None, :]
        count = starts.shape[1]
        has_some = np.triu(np.ones((count, count), dtype=np.bool_))
        transient = points[:, 1:-1, TRANSIENT].copy()
        for inner, outer in ((0, 0), (-1, -1)):
            transient[:, inner] = np.maximum(transient[:, inner], points[:, outer, TRANSIENT])
        added[..., TRANSIENT] = np.maximum.accumulate(np.where(has_some, transient[:, None, :], 0.0), axis=2)
        margins = (0, 0), (0, 1), (1, 0)  # the last block is given by the one behind it
        seconds = np.pad(np.where(has_some, added[..., SECONDS], inf), margins, constant_values=inf)
        return BlockSpans(seconds, np.pad(added[..., STAYS:], (*margins, (0, 0))))

    def fastest(self, limit: float, kept: float, turns: int, *, hopes: bool = False) -> Floats:
        """Return [first block, block behind] the least seconds of the points that fit; infinite if none does.

        With ``hopes`` a point fits where the least bytes of each kind do, whichever points have them.

        Args:
            limit: Bytes of a stage.
            kept: Number of micro-batches that the stage keeps for backward at once.
            turns: Stages of a pipeline rank, which have transient bytes one after the other.
        """
        held = self.held.min(axis=0) if hopes else self.held
        fits = held @ np.array([1.0, kept, 1 / turns]) <= limit
        fastest: Floats = np.where(fits, self.seconds, inf).min(axis=0)
        return fastest


@dataclass(eq=False)
class MeshOption:
    """A mesh of a pipeline rank under one memory policy.

    Attributes:
        assignments: Those of the known points. At first these are the points where bytes have no price, the fastest
            ones, and the one of about the fewest bytes.
        others: Computes the assignments of all other prices, which takes longer. None: ``assignments`` has them.
        spans_of: Computes the spans of assignments, for so many times the samples of a device, and the pipeline ranks.
    """

    assignments: Sequence[Sequence[int]]
    others: Callable[[], Sequence[Sequence[int]]] | None
    spans_of: Callable[[Sequence[Sequence[int]], float, float], BlockSpans]

    def __post_init__(self) -> None:
        self.spans = self.spans_of(self.assignments, 1.0, 1.0)

    def price(self) -> None:
        """Compute the points of all prices, if they are not known yet."""
        if self.others is not None:
            self.assignments, self.others = [*self.assignments, *self.others()], None
            self.spans = self.spans_of(self.assignments, 1.0, 1.0)


@dataclass(eq=False)
class ParetoFront:
    """Time / memory Pareto front of the stages of one device count and micro-batch size, computed lazily.

    Attributes:
        ways: The options so far: those of the memory policies that recompute least.
        others: Computes the options of the other policies. They are no faster if memory suffices. None: ``ways`` has
            them.
    """

    ways: list[MeshOption]
    others: Callable[[], list[MeshOption]] | None

    def scaled(self, samples: float, places: float) -> ParetoFront:
        """Return the known points for so many times the samples of a device, and the pipeline ranks."""

        def spans_of(way: MeshOption) -> Callable[[Sequence[Sequence[int]], float, float], BlockSpans]:
            return lambda assignments, *_: way.spans_of(assignments, samples, places)

        return ParetoFront([MeshOption(way.assignments, None, spans_of(way)) for way in self.ways], None)

    def cut(self, limit: float, in_flight: Sequence[float], turns: int = 1) -> StageCut:
        """Return where the stages begin, computing only the points that may matter.

        Invariant: ``hope`` is no slower than the best cut over all points, and ``sure`` no faster. ``sure`` uses known
        points that fit. ``hope`` also assumes that all fit until the other policies have been added, and then that the
        fastest points of an option fit, if any may, until the option is priced. If ``hope`` is no faster than ``sure``,
        then ``sure`` is the best cut. Otherwise the options that ``hope`` uses are priced.

        Args:
            limit: Bytes of a stage.
            in_flight: For every stage, the number of micro-batches that it keeps at once.
            turns: Stages of a pipeline rank.
        """
        while True:
            sure, hope, taken = self._cut(limit, in_flight, turns)
            if hope.value >= sure.value:
                return sure
            if self.others is not None:
                self.ways, self.others = [*self.ways, *self.others()], None
                continue
            for way in {way for way in taken if way.others is not None} or self.ways:
                way.price()

    def _cut(self, limit: float, in_flight: Sequence[float], turns: int) -> tuple[StageCut, StageCut, set[MeshOption]]:
        """Return the cuts ``sure`` and ``hope`` of ``cut``, and the options that ``hope`` uses."""
        sure, hopes = {}, {}
        for kept in dict.fromkeys(in_flight):
            sure[kept] = np.min([way.spans.fastest(limit, kept, turns) for way in self.ways], axis=0)
            most = limit if self.others is None else inf
            hopes[kept] = np.stack(
                [way.spans.fastest(most, kept, turns, hopes=way.others is not None) for way in self.ways]
            )
        hope = StageCut.of([hopes[kept].min(axis=0) for kept in in_flight])
        taken = {
            self.ways[int(hopes[kept][:, start, end].argmin())]
            for kept, (start, end) in zip(in_flight, pairwise(hope.starts), strict=False)
        }
        return StageCut.of([sure[kept] for kept in in_flight]), hope, taken


@dataclass
class StageEstimator:
    """Estimates the steps of settings.

    Attributes:
        whole: The training graph of a step.
        request: What is planned.
        call: The call, whose batches of other sizes can be captured.
        settings: The settings of the searches.
        segments: Parts that the model itself asks to recompute or offload.
        policies: The memory policies to try, those that recompute least first.
        known: Cache of fronts, by pipeline ranks and samples of a micro-batch. Without blocks also by stages.
        scaled: Cache of fronts that are computed from those of ``known``, by the same.
        graphs: Cache of shortened micro-batches, by samples.
    """

    whole: Graph
    request: PlanRequest
    call: Example
    settings: SearchConfig
    segments: tuple[Segment, ...] = ()
    policies: tuple[MemoryPolicy, ...] = ESTIMATED_POLICIES
    known: dict[tuple[int, ...], ParetoFront | None] = field(default_factory=dict)
    scaled: dict[tuple[int, ...], ParetoFront] = field(default_factory=dict)
    graphs: dict[int, Graph | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.cluster = self.request.cluster
        folding = Folding.of(self.whole)
        self.blocks = folding.blocks
        runs = folding.runs(lambda number: 0)
        short = folding.without({number for run in runs for number in run[1:-1]})
        self.short = self.whole if short is None else short
        # For every block, the two blocks of the short model that represent it: the first and the last of its run.
        self.ends = [(self.blocks[run[0]].path, self.blocks[run[-1]].path) for run in runs for _ in run]
        if short is None:
            self.ends = [(block.path, block.path) for block in self.blocks]
        self.apart = ends_of(self.whole)

    def roughly(self, setting: StageConfig) -> float:
        """Return less than about ``seconds``, without searches if a front is known for about as many pipeline ranks and
        samples of a device: both factors together are at most four."""
        key, size = self._key(setting), np.array([setting.places, setting.places * setting.micro_batch])
        ratios = {
            known: size / [known[0], known[0] * known[1]] for known, front in self.known.items() if front and self.ends
        }
        apart = {known: float(np.abs(np.log2(ratio)).sum()) for known, ratio in ratios.items()}
        nearest = min(apart, key=apart.__getitem__, default=None)
        if key in self.known or nearest is None or apart[nearest] > 2.0:
            return self.seconds(setting)
        front = self.known[nearest]
        assert front is not None, "its points are scaled"
        if key not in self.scaled:
            places, samples = ratios[nearest].tolist()
            self.scaled[key] = front.scaled(samples, places)
        return SCALED_ESTIMATE_SHARE * self._seconds(self.scaled[key], setting)

    def seconds(self, setting: StageConfig) -> float:
        """Return the estimated seconds of a step; infinite if the model cannot be divided so, or if nothing fits."""
        key = self._key(setting)
        if key not in self.known:
            graph = self._graph(setting.micro_batch)
            self.known[key] = None if graph is None else self._front_of(graph, setting)
        front = self.known[key]
        return inf if front is None else self._seconds(front, setting)

    def _seconds(self, front: ParetoFront, setting: StageConfig) -> float:
        turns = setting.stages // setting.places
        return front.cut(self._limit(setting), in_flight(setting), turns).value * _turns(setting)

    def _key(self, setting: StageConfig) -> tuple[int, ...]:
        return setting.places, setting.micro_batch, *([] if self.ends else [setting.stages])

    def _limit(self, setting: StageConfig) -> float:
        """Return the bytes of a stage: an equal part of what its pipeline rank has for additive bytes."""
        memory_bytes = self.settings.memory_bytes
        limit = ESTIMATED_MEMORY_SHARE * (self.cluster.device.usable_bytes if memory_bytes is None else memory_bytes)
        return limit * setting.places / setting.stages

    def _front_of(self, graph: Graph, setting: StageConfig) -> ParetoFront | None:
        """Return the front of a setting, or None if every search is too large (``_way``)."""
        stage_cluster = self.cluster.with_devices(self.cluster.num_devices // setting.places)
        meshes, settings = (
            self.request.meshes(stage_cluster, by_price=True),
            replace(self.settings, passes=setting.passes),
        )
        planner = Planner.of(graph, (), stage_cluster, meshes, settings, PlanningCache(self.call.cache))
        weakest = self.policies[0].recompute
        first = [policy for policy in self.policies if policy.recompute == weakest and policy.reshard_mode != "again"]
        first = first or [self.policies[0]]
        others = [policy for policy in self.policies if policy not in first]
        ways = self._ways(planner, first, setting)
        return ParetoFront(ways, lambda: self._ways(planner, others, setting)) if ways else None

    def _ways(self, planner: Planner, policies: Sequence[MemoryPolicy], setting: StageConfig) -> list[MeshOption]:
        graph = planner.graph
        has_blocks = bool(blocks_of(graph))
        names = graph.op_by_name.keys()
        segments = [replace(segment, operators=segment.operators & names) for segment in self.segments]
        ways = []
        for policy in policies:
            how, reshard_mode = policy.recompute, policy.reshard_mode
            if how not in (None, "none") and not has_blocks:
                continue
            if (
                reshard_mode == "held" and setting.passes == 1 and MemoryPolicy(how, "once") in self.policies
            ):  # same as "once"
                continue
            with_policy = planner.under(MemoryPolicy.of(graph, segments, how, reshard_mode))
            ways += [self._way(with_policy.cost_graph(mesh), policy, setting.stages) for mesh in planner.meshes]
        return [way for way in ways if way is not None]

    def _graph(self, size: int) -> Graph | None:
        """Return a micro-batch of the shortened graph, or None if the loss is no sum over such micro-batches."""
        if size == self.request.step_samples:
            return self.short
        if size not in self.graphs:
            try:
                passes = Passes.over(self.call.module, self.short, size, self.call.graph)
                self.graphs[size] = passes.graphs[size]
            except PlanError:
                self.graphs[size] = None
        return self.graphs[size]

    def _way(self, cost: CostGraph, policy: MemoryPolicy, stages: int) -> MeshOption | None:
        """Return the option of a cost graph, or None if its elimination needs too large a table (``TooWide``)."""

        def solved(*prices: float) -> list[list[int]]:
            weights = [CostWeights(1.0, 1.0 - w, w, price) for price in prices for w in ESTIMATED_TRAFFIC_WEIGHTS]
            return [minimise(cost.weighted(weight)).assignment for weight in weights]

        try:
            free = solved(0.0)
        except TooWide:
            return None
        # With a byte price of 1, all bytes of a device together cost as much as one step.
        seconds = cost.components(free[0])
        scale = float(seconds[[EXPOSED, COMPUTE]].sum()) / self.cluster.device.usable_bytes
        *prices, highest = (price * scale for price in ESTIMATED_BYTE_PRICES)
        parallel = self.request.parallel
        is_again = policy.reshard_mode == "again"
        is_free = parallel.recompute == parallel.offload == "auto"
        rate = self.cluster.device.host_bandwidth if is_free else 0.0  # of copies of kept values to the host
        costs_of = cache(partial(self._costs_of, cost, is_again=is_again))

        def spans_of(assignments: Sequence[Sequence[int]], samples: float, places: float) -> BlockSpans:
            rows = costs_of(tuple(dict.fromkeys(map(tuple, assignments))))
            points = self._added_up([row.scaled(samples, places, is_again=is_again) for row in rows])
            if rate and replace(policy, offload="all") in MEMORY_POLICIES:
                away = points.copy()
                away[:, 1:-1, SECONDS] = np.maximum(points[:, 1:-1, SECONDS], 2 * points[:, 1:-1, KEPT] / rate)
                away[:, 1:-1, KEPT] = 0.0
                points = np.concatenate([points, away])
            return BlockSpans.of(self._divided(points, stages))

        return MeshOption([*free, *solved(highest)], lambda: solved(*prices), spans_of)

    def _divided(self, points: Floats, stages: int) -> Floats:
        """Return points in which the ends of the model that can be stages are blocks of their own.

        The first and the last entry are then zero. Without repeated blocks, all work is divided equally into as many
        blocks as there are stages.
        """
        nothing = np.zeros_like(points[:, :1])
        if not self.ends:  # there are no blocks
            total = points.sum(axis=1, keepdims=True)
            points = np.concatenate([nothing, *(total / stages for _ in range(stages)), nothing], axis=1)
        ahead, behind = map(bool, self.apart)
        return np.concatenate([*[nothing] * ahead, points, *[nothing] * behind], axis=1)

    @cached_property
    def _row_of(self) -> Mapping[str, int]:
        names = (*(op.name for op in self.short.ops), *(value.name for value in self.short.values))
        paths = dict.fromkeys(map(block_of, names))
        return {path: row for row, path in enumerate(filter(None, paths), 1)}

    def _added_up(self, rows: Sequence[Floats]) -> Floats:
        """Return the [points, 1 + blocks + 1, 4] costs: ahead of all blocks, of each block, and behind.

        A block costs the mean of the two blocks that represent its run. ``rows``: of the short model.
        """
        sums = np.stack(rows, axis=1)
        heads, tails = ([self._row_of[end[i]] for end in self.ends] for i in range(2))
        return np.concatenate([sums[:, :1], (sums[:, heads] + sums[:, tails]) / 2, sums[:, -1:]], axis=1)

    def _costs_of(self, cost: CostGraph, points: tuple[tuple[int, ...], ...], *, is_again: bool) -> list[BlockCosts]:
        """Return the costs of what is ahead of all blocks of the short model, of each of them, and of what is behind.

        The last variable of a table decides where it belongs. ``is_again``: whether backward gathers parameters again.
        """
        assignments = np.array(points, dtype=np.int64)
        components = np.zeros((*assignments.shape, 3))
        num_bytes, once = np.zeros((*assignments.shape, 4)), np.zeros((*assignments.shape, 4))

        def chosen(scopes: Ints) -> tuple[Ints, ...]:
            return tuple(assignments[:, scopes[:, axis]] for axis in range(scopes.shape[1]))

        for tables, scopes in cost.by_kind:
            at = chosen(scopes)
            costs = np.zeros((*at[0].shape, 4))
            for component, table in enumerate(tables):
                if table is not None:
                    costs[..., component] = table[at]
            stays = _stays(cost, scopes, costs)
            place: Any = (slice(None), scopes[:, -1])
            if scopes.shape[1] > 1:  # a message of parameters that a step sends once
                is_once = stays & (costs[..., EXPOSED] > 0)
                np.add.at(once, (*place, SECONDS), np.where(is_once, costs[..., EXPOSED], 0.0))
                np.add.at(once, (*place, STAYS), np.where(is_once, costs[..., BYTES], 0.0))
                costs[is_once] = 0.0
            np.add.at(components, place, costs[..., :BYTES])
            np.add.at(num_bytes, (*place, KEPT), np.where(stays, 0.0, costs[..., BYTES]))
            np.add.at(num_bytes, (*place, STAYS), np.where(stays, costs[..., BYTES], 0.0))
        for kind, scopes in cost.scopes_of_transients.items():
            place = (slice(None), scopes[:, -1], TRANSIENT)
            np.maximum.at(num_bytes, place, cost.transients[kind]()[chosen(scopes)])
        forward = components[..., EXPOSED] / 2
        for number, variable in enumerate(cost.variables):
            if isinstance(variable, OperatorVariable):
                forward[:, number] += variable.domain.forward[assignments[:, number]]
        backward = components[..., EXPOSED] + components[..., COMPUTE] - forward
        sent = components[..., TRAFFIC] / (3 if is_again else 2)
        paths = [block_of(variable.name) for variable in cost.variables]
        first = next((number for number, path in enumerate(paths) if path), len(paths))
        last = len(self._row_of) + 1
        row_of = np.array([self._row_of[p] if p else 0 if i < first else last for i, p in enumerate(paths)])
        op_by_name = cost.domains.graph.op_by_name
        products = [v.kind == "operator" and op_by_name[v.name].target in FLOPS for v in cost.variables]
        place = np.cumsum(products) - products  # the number of products before a variable
        rows = []
        for row in range(last + 1):
            own = np.flatnonzero(row_of == row)
            begins = np.searchsorted(place[own], place[own][sent[:, own].any(axis=0)])
            begins = np.unique([0, *begins.tolist()])
            ahead, behind, messages = (
                (np.add.reduceat(each[:, own], begins, axis=1) if len(own) else np.zeros_like(each[:, :1])).T
                for each in (forward, backward, sent)
            )
            held = num_bytes[:, own].sum(axis=1)
            held[:, TRANSIENT] = num_bytes[:, own, TRANSIENT].max(axis=1, initial=0.0)
            rows.append(BlockCosts(ahead, behind, messages, held, once[:, own].sum(axis=1)))
        return rows


@dataclass(frozen=True, eq=False)
class BlockCosts:
    """Costs of a block, or of what is outside of all, for several points.

    A part of a block begins with products that wait for parameters.

    Attributes:
        forward: [parts, points] seconds of forward.
        backward: The same of backward.
        sent: The seconds of one gather, or one reduction, of the parameters of a part.
        held: [points, 4] costs without SECONDS.
        once: [points, 4] SECONDS of messages of parameters that a step sends once, and STAYS of what they bring.
    """

    forward: Floats
    backward: Floats
    sent: Floats
    held: Floats
    once: Floats

    def scaled(self, samples: float, places: float, *, is_again: bool) -> Floats:
        """Return the [points, 4] costs for so many times the samples of a device, and the pipeline ranks.

        Seconds of operators, and bytes of their values, grow with the samples. Messages of parameters do not. A
        micro-batch has a share of those that a step sends once. The bytes that stay grow with the pipeline ranks, if no
        message brings them. ``is_again``: whether backward gathers parameters again.
        """
        parts = samples * self.forward, samples * self.backward, self.sent
        one, two = (_seconds_of_blocks(*parts, count, is_again=is_again) for count in (1, 2))
        costs: Floats = self.held * [1.0, places, samples, 1.0] + self.once * [samples / places, 1.0, 1.0, 1.0]
        costs[:, SECONDS] += two - one
        return costs


def _seconds_of_blocks(forward: Floats, backward: Floats, sent: Floats, count: int, *, is_again: bool) -> Floats:
    """Return [points] the seconds of a micro-batch in a stage of ``count`` equal blocks. Arguments as ``BlockCosts``.

    Parameters are gathered while the part ahead is worked on, and no earlier; gradients are reduced while the parts
    behind are (``programs.comm_schedule``). Nothing hides what takes longer.
    """
    now, link, asked = np.zeros((3, sent.shape[1]))
    for work, seconds in [*zip(forward, sent, strict=True)] * count:
        link = np.where(seconds > 0, np.maximum(asked, link) + seconds, link)
        asked, now = now, np.maximum(now, link) + work
    gathers = [*sent[::-1] * is_again] * count
    link = arrives = now + gathers[0]
    behind = zip([*backward[::-1]] * count, [*sent[::-1]] * count, [*gathers[1:], np.zeros_like(now)], strict=True)
    for work, seconds, gather in behind:
        link = np.where(gather > 0, np.maximum(now, link) + gather, link)
        now, arrives = np.maximum(now, arrives) + work, np.where(gather > 0, link, 0.0)
        link = np.where(seconds > 0, np.maximum(now, link) + seconds, link)
    end: Floats = np.maximum(now, link)
    return end


def _stays(cost: CostGraph, scopes: Ints, costs: Floats) -> NDArray[np.bool_]:
    """Return which bytes of the tables of a kind stay for the whole step. ``costs``: of each, by component.

    They do if they belong to a stored value, or to a copy of it that micro-batches do not gather again. All other bytes
    are kept per micro-batch.
    """
    is_stored = np.array([isinstance(cost.variables[v], StorageVariable) for v in scopes[:, 0].tolist()])
    stays: NDArray[np.bool_] = is_stored & ((scopes.shape[1] == 1) | (costs[..., TRAFFIC] == 0.0))
    return stays


def estimated_policies_of(
    recompute: How | Literal["auto"] | None, reshard_mode: ReshardMode | None
) -> tuple[MemoryPolicy, ...]:
    """Return the memory policies to try: all of ESTIMATED_POLICIES, except where the user has chosen.

    ``recompute``: "auto" if the user left it free. ``reshard_mode``: None if the user left it free. If only
    ``recompute`` was chosen, gathered parameters are held.
    """
    if recompute != "auto":
        return (MemoryPolicy(recompute, reshard_mode or "held"),)
    ways = dict.fromkeys(policy.recompute for policy in ESTIMATED_POLICIES)
    return ESTIMATED_POLICIES if reshard_mode is None else tuple(MemoryPolicy(how, reshard_mode) for how in ways)


def _turns(setting: StageConfig) -> int:
    """Return the length of a step in micro-batch times of one stage.

    A pipeline rank runs all micro-batches through each of its stages, and waits ``places - 1`` times to fill and drain.
    """
    places = setting.places
    return setting.stages // places * setting.passes + places - 1


def in_flight(setting: StageConfig) -> tuple[float, ...]:
    """Return how many micro-batches every stage keeps for backward at once.

    With p pipeline ranks of v stages each, the first rank keeps 2 (p - 1) + (v - 1) p + 1 (Narayanan et al. 2021,
    arXiv:2104.04473, section 2.2). Every stage but the last counts as a v-th of that. The last keeps one, because it
    runs each backward immediately. With v = 1 (1F1B), rank r keeps p - r. GPipe keeps all. No stage keeps more than the
    micro-batches of a step.
    """
    places, passes = setting.places, setting.passes
    per_place = setting.stages // places
    if setting.schedule == "GPipe":
        return (float(passes),) * places
    if per_place == 1:
        return tuple(float(min(passes, places - place)) for place in range(places))
    most = (2 * (places - 1) + (per_place - 1) * places + 1) / per_place
    return (*(min(float(passes), most),) * (setting.stages - 1), 1.0)
