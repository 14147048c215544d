"""Estimates of the step of pipeline settings, from searches over a model shortened to two blocks of each run.

Time and memory of a stage are linear in the number of its equal blocks. So the model is shortened to the first and the
last block of each run of equal blocks. This short model is searched on the devices of one pipeline rank, with the
micro-batch of the setting. There is one search per mesh, memory policy, price of a second of traffic and price of a
byte.

The result of a search is a *point*. Per block it has the seconds by component, the bytes that stay for the whole step,
and the bytes that a micro-batch keeps for backward. For a stage with blocks i to j, sums over these blocks give::

    seconds(point, i, j) = exposed + max(compute, traffic)
    bytes(point, i, j)   = stays + kept * (micro-batches that the stage keeps at once)
    stage(s, i, j)       = least seconds of the points whose bytes fit stage s

The cut makes the slowest stage as fast as possible (``search.stage_partition.StageCut.of``).

Estimates choose which settings are planned, and in which order (``plans.auto_stages``), and nothing else. Where the
stages of a setting begin is decided in ``search.stage_partition``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from math import inf
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from shardwise.errors import PlanError
from shardwise.graph.folding import Folding
from shardwise.graph.ir import Graph
from shardwise.graph.segments import How, Segment, block_of
from shardwise.layouts.routes import Floats, Ints
from shardwise.plans.auto_stages import StageConfig
from shardwise.plans.micro_batch_search import Example
from shardwise.plans.request import PlanRequest
from shardwise.programs.micro_batches import Passes
from shardwise.search.constants import ESTIMATED_BYTE_PRICES, ESTIMATED_MEMORY_SHARE, ESTIMATED_TRAFFIC_WEIGHTS
from shardwise.search.cost_graph import BYTES, COMPUTE, EXPOSED, TRAFFIC, CostGraph, CostWeights, StorageVariable
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
# Columns of a point, after EXPOSED, COMPUTE and TRAFFIC. They divide the component BYTES.
STAYS, KEPT = 3, 4


@dataclass(frozen=True, eq=False)
class BlockSpans:
    """Time and memory of a stage with a range of the blocks, for every point.

    Attributes:
        seconds: [points, first block, block behind] seconds of a micro-batch; infinite if there is no block.
        held: [points, first block, block behind, 2] bytes that stay, and bytes kept per micro-batch.
    """

    seconds: Floats
    held: Floats

    @staticmethod
    def of(points: Floats) -> BlockSpans:
        """Return the spans of points.

        The stage with the first block also gets what is ahead of it. The stage with the last block also gets what is
        behind it.

        Args:
            points: [points, 1 + blocks + 1, 5] costs of what is ahead of all blocks, of each block, and of what is
                behind. The columns are EXPOSED, COMPUTE, TRAFFIC (seconds of a micro-batch), STAYS and KEPT (bytes).
        """
        summed = np.cumsum(points, axis=1)
        starts = np.concatenate([np.zeros_like(summed[:, :1]), summed[:, 1:-2]], axis=1)
        ends = np.concatenate([summed[:, 1:-2], summed[:, -1:]], axis=1)
        added = ends[:, None, :, :] - starts[:, :, None, :]
        seconds = added[..., EXPOSED] + np.maximum(added[..., COMPUTE], added[..., TRAFFIC])
        count = starts.shape[1]
        has_some = np.triu(np.ones((count, count), dtype=np.bool_))
        margins = (0, 0), (0, 1), (1, 0)  # the last block is given by the one behind it
        seconds = np.pad(np.where(has_some, seconds, inf), margins, constant_values=inf)
        return BlockSpans(seconds, np.pad(added[..., [STAYS, KEPT]], (*margins, (0, 0))))

    def fastest(self, limit: float, kept: float) -> Floats:
        """Return [first block, block behind] the least seconds of the points that fit; infinite if none does.

        Args:
            limit: Bytes of a stage.
            kept: Number of micro-batches that the stage keeps for backward at once.
        """
        fits = self.held[..., 0] + kept * self.held[..., 1] <= limit
        fastest: Floats = np.where(fits, self.seconds, inf).min(axis=0)
        return fastest


@dataclass(eq=False)
class MeshOption:
    """A mesh of a pipeline rank under one memory policy.

    Attributes:
        spans: The spans of the known points. At first these are the points where bytes have no price, the fastest ones.
        others: Computes the points of all prices, which takes longer. None: ``spans`` has them.
    """

    spans: BlockSpans
    others: Callable[[], Floats] | None

    def price(self) -> None:
        """Compute the points of all prices, if they are not known yet."""
        if self.others is not None:
            self.spans, self.others = BlockSpans.of(self.others()), None


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

    def least(self, places: int) -> float:
        """Return a lower bound of the seconds of a micro-batch on the slowest stage, without a memory limit.

        ``places``: the number of stages.
        """
        return self._cut(inf, (0.0,) * places)[0].value

    def cut(self, limit: float, in_flight: Sequence[float]) -> StageCut:
        """Return where the stages begin, computing only the points that may matter.

        Invariant: ``hope`` is no slower than the best cut over all points, and ``sure`` no faster. ``sure`` uses known
        points that fit. ``hope`` also assumes that the fastest points of an option fit until the option is priced. If
        ``hope`` is no faster than ``sure``, then ``sure`` is the best cut. Otherwise the options that ``hope`` uses are
        priced, after the other policies have been added.

        Args:
            limit: Bytes of a stage.
            in_flight: For every stage, the number of micro-batches that it keeps at once.
        """
        while True:
            sure, hope, taken = self._cut(limit, in_flight)
            if hope.value >= sure.value:
                return sure
            if self.others is not None:
                self.ways, self.others = [*self.ways, *self.others()], None
                continue
            for way in {way for way in taken if way.others is not None} or self.ways:
                way.price()

    def _cut(self, limit: float, in_flight: Sequence[float]) -> tuple[StageCut, StageCut, set[MeshOption]]:
        """Return the cuts ``sure`` and ``hope`` of ``cut``, and the options that ``hope`` uses."""
        sure, hopes = {}, {}
        for kept in dict.fromkeys(in_flight):
            sure[kept] = np.min([way.spans.fastest(limit, kept) for way in self.ways], axis=0)
            limits = [(way, limit if way.others is None else inf) for way in self.ways]
            hopes[kept] = np.stack([way.spans.fastest(num_bytes, kept) for way, num_bytes in limits])
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
        graphs: Cache of shortened micro-batches, by samples.
    """

    whole: Graph
    request: PlanRequest
    call: Example
    settings: SearchConfig
    segments: tuple[Segment, ...] = ()
    policies: tuple[MemoryPolicy, ...] = ESTIMATED_POLICIES
    known: dict[tuple[int, ...], ParetoFront | None] = field(default_factory=dict)
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

    def least(self, setting: StageConfig) -> float:
        """Return a lower bound of ``seconds``, faster to compute: it searches only the weakest memory policies.

        It is a bound as long as no stronger policy is faster.
        """
        front = self._front(setting)
        return inf if front is None else front.least(setting.stages) * _turns(setting)

    def seconds(self, setting: StageConfig) -> float:
        """Return the estimated seconds of a step; infinite if the model cannot be divided so, or if nothing fits."""
        front = self._front(setting)
        return inf if front is None else front.cut(self._limit(setting), in_flight(setting)).value * _turns(setting)

    def _limit(self, setting: StageConfig) -> float:
        """Return the bytes of a stage: an equal part of what its pipeline rank has for additive bytes."""
        memory_bytes = self.settings.memory_bytes
        limit = ESTIMATED_MEMORY_SHARE * (self.cluster.device.usable_bytes if memory_bytes is None else memory_bytes)
        return limit * setting.places / setting.stages

    def _front(self, setting: StageConfig) -> ParetoFront | None:
        """Return the front of a setting, or None if the loss is no sum over such micro-batches.

        It is also None if every search is too large (``_way``).
        """
        key = setting.places, setting.micro_batch, *([] if self.ends else [setting.stages])
        if key not in self.known:
            graph = self._graph(setting.micro_batch)
            self.known[key] = None if graph is None else self._front_of(graph, setting)
        return self.known[key]

    def _front_of(self, graph: Graph, setting: StageConfig) -> ParetoFront | None:
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
            ways += [self._way(with_policy.cost_graph(mesh), setting.stages) for mesh in planner.meshes]
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

    def _way(self, cost: CostGraph, stages: int) -> MeshOption | None:
        """Return the option of a cost graph, or None if its elimination needs too large a table (``TooWide``)."""
        try:
            free = [
                minimise(cost.weighted(CostWeights(1.0, 1.0 - share, share, 0.0))).assignment
                for share in ESTIMATED_TRAFFIC_WEIGHTS
            ]
        except TooWide:
            return None
        # With a byte price of 1, all bytes of a device together cost as much as one step.
        seconds = cost.components(free[0])
        scale = float(seconds[[EXPOSED, COMPUTE]].sum()) / self.cluster.device.usable_bytes
        parts = self._parts_of(cost)

        def points(assignments: Iterable[Sequence[int]]) -> Floats:
            different = np.array(list(dict.fromkeys(map(tuple, assignments))), dtype=np.int64)
            return self._divided(self._added_up(cost, parts, different), stages)

        def all_points() -> Floats:
            priced = [
                CostWeights(1.0, 1.0 - share, share, price * scale)
                for price in ESTIMATED_BYTE_PRICES
                for share in ESTIMATED_TRAFFIC_WEIGHTS
            ]
            return points([*free, *(minimise(cost.weighted(weights)).assignment for weights in priced)])

        return MeshOption(BlockSpans.of(points(free)), all_points)

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

    def _parts_of(self, cost: CostGraph) -> list[Ints]:
        """Return, for the tables of every kind, the rows of ``_added_up`` that they belong to.

        Row 0 is ahead of all blocks, the last one behind them; the others are the blocks of the short model. The last
        variable of a table decides.
        """
        paths = [block_of(variable.name) for variable in cost.variables]
        first = next((number for number, path in enumerate(paths) if path), len(paths))
        row_of = self._row_of
        rows = np.array(
            [row_of[path] if path else 0 if i < first else len(row_of) + 1 for i, path in enumerate(paths)],
            dtype=np.int64,
        )
        return [rows[scopes[:, -1]] for _, scopes in cost.by_kind]

    @cached_property
    def _row_of(self) -> Mapping[str, int]:
        names = (*(op.name for op in self.short.ops), *(value.name for value in self.short.values))
        paths = dict.fromkeys(map(block_of, names))
        return {path: row for row, path in enumerate(filter(None, paths), 1)}

    def _added_up(self, cost: CostGraph, parts: Sequence[Ints], assignments: Ints) -> Floats:
        """Return the [assignments, 1 + blocks + 1, 5] costs: ahead of all blocks, of each block, and behind.

        ``parts``: the rows of ``_parts_of``. A block costs the mean of the two blocks that represent its run.
        """
        sums = np.zeros((len(assignments), len(self._row_of) + 2, 5))
        for (tables, scopes), rows in zip(cost.by_kind, parts, strict=True):
            at = tuple(assignments[:, scopes[:, axis]] for axis in range(scopes.shape[1]))
            costs = np.zeros((*at[0].shape, 5))
            for component, table in enumerate(tables):
                if table is not None:
                    costs[..., component] = table[at]
            stays = _stays(cost, scopes, costs)
            costs[..., KEPT] = np.where(stays, 0.0, costs[..., BYTES])
            costs[..., STAYS] = np.where(stays, costs[..., BYTES], 0.0)
            place: Any = (slice(None), rows)
            np.add.at(sums, place, costs)
        heads, tails = ([self._row_of[end[i]] for end in self.ends] for i in range(2))
        blocks = (sums[:, heads] + sums[:, tails]) / 2
        return np.concatenate([sums[:, :1], blocks, sums[:, -1:]], axis=1)


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
