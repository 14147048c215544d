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

The cut makes the slowest stage as fast as possible (``StageCuts.of``). Let T(s, j) be the slowest of the first s
stages, which together have the first j blocks::

    T(s, j) = min over i of max(T(s - 1, i), stage(s, i, j - 1))

Estimates choose which settings are planned, and in which order (``plans.auto_stages``), and nothing else. Where the
stages of a setting begin is decided in ``search.stage_partition``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import Literal

import numpy as np

from shardwise.errors import PlanError
from shardwise.graph.folding import Folding
from shardwise.graph.ir import Graph
from shardwise.graph.segments import How, Segment, block_of
from shardwise.layouts.routes import Floats
from shardwise.plans.auto_stages import StageConfig
from shardwise.plans.micro_batch_search import Example
from shardwise.plans.request import PlanRequest
from shardwise.programs.micro_batches import Passes
from shardwise.search.constants import (
    ESTIMATED_BYTE_PRICES,
    ESTIMATED_MEMORY_SHARE,
    ESTIMATED_TRAFFIC_WEIGHTS,
)
from shardwise.search.cost_graph import BYTES, COMPUTE, EXPOSED, TRAFFIC, CostGraph, CostWeights, StorageVariable
from shardwise.search.elimination import Scope, TooWide
from shardwise.search.memory_policy import MEMORY_POLICIES, MemoryPolicy, ReshardMode, blocks_of, ends_of
from shardwise.search.planner import Planner
from shardwise.search.solving import minimise
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
        seconds: [points, first block, last block] seconds of a micro-batch; infinite if last is before first.
        held: [points, first block, last block, 2] bytes that stay, and bytes kept per micro-batch.
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
        return BlockSpans(np.where(has_some, seconds, inf), added[..., [STAYS, KEPT]])

    def fastest(self, limit: float, kept: float) -> Floats:
        """Return [first block, last block] the least seconds of the points that fit; infinite if none does.

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
        return self._cut(inf, (0.0,) * places)[0].slowest

    def cut(self, limit: float, in_flight: Sequence[float]) -> StageCuts:
        """Return where the stages begin (``StageCuts.of``), computing only the points that may matter.

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
            if hope.slowest >= sure.slowest:
                return sure
            if self.others is not None:
                self.ways, self.others = [*self.ways, *self.others()], None
                continue
            for way in {way for way in taken if way.others is not None} or self.ways:
                way.price()

    def _cut(self, limit: float, in_flight: Sequence[float]) -> tuple[StageCuts, StageCuts, set[MeshOption]]:
        """Return the cuts ``sure`` and ``hope`` of ``cut``, and the options that ``hope`` uses."""
        sure, hopes = {}, {}
        for kept in dict.fromkeys(in_flight):
            sure[kept] = np.min([way.spans.fastest(limit, kept) for way in self.ways], axis=0)
            limits = [(way, limit if way.others is None else inf) for way in self.ways]
            hopes[kept] = np.stack([way.spans.fastest(num_bytes, kept) for way, num_bytes in limits])
        hope = StageCuts.of([hopes[kept].min(axis=0) for kept in in_flight])
        ends = [*hope.starts[1:], hopes[in_flight[0]].shape[1]]
        taken = {
            self.ways[int(hopes[kept][:, start, end - 1].argmin())]
            for kept, start, end in zip(in_flight, hope.starts, ends, strict=False)
        }
        return StageCuts.of([sure[kept] for kept in in_flight]), hope, taken


@dataclass(frozen=True)
class StageCuts:
    """A division of the blocks into stages.

    Attributes:
        slowest: Seconds of a micro-batch on the slowest stage; infinite if nothing fits.
        starts: The first block of every stage; empty if nothing fits.
    """

    slowest: float
    starts: tuple[int, ...]

    @staticmethod
    def of(spans: Sequence[Floats]) -> StageCuts:
        """Return the cut whose slowest stage is as fast as possible: T above.

        Args:
            spans: For every stage, [first block, last block] its seconds.
        """
        slowest, chosen = np.array([0.0, *[inf] * len(spans[0])]), []
        for seconds_of_stage in spans:
            ends = np.maximum(slowest[:-1, None], seconds_of_stage)
            chosen.append(ends.argmin(axis=0))
            slowest = np.concatenate([[inf], ends.min(axis=0)])
        if slowest[-1] == inf:
            return StageCuts(inf, ())
        at, starts = len(spans[0]), []
        for back in reversed(chosen):
            at = int(back[at - 1])
            starts.append(at)
        return StageCuts(float(slowest[-1]), tuple(reversed(starts)))


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
        return inf if front is None else front.cut(self._limit(setting), in_flight(setting)).slowest * _turns(setting)

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
        planner = Planner.of(graph, (), stage_cluster, meshes, settings)
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
            different = dict.fromkeys(map(tuple, assignments))
            return self._divided(np.stack([self._added_up(cost, parts, each) for each in different]), stages)

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

    def _parts_of(self, cost: CostGraph) -> list[str]:
        """Return, for every factor of a cost graph, its block, "ahead" or "behind".

        The last variable of the factor decides. Outside of blocks it is ahead of the first block or else behind.
        """
        paths = [block_of(variable.name) for variable in cost.variables]
        first = next((number for number, path in enumerate(paths) if path), len(paths))
        return [paths[scope[-1]] or ("ahead" if scope[-1] < first else "behind") for scope, _ in cost.factors]

    def _added_up(self, cost: CostGraph, parts: Sequence[str], assignment: Sequence[int]) -> Floats:
        """Return the [1 + blocks + 1, 5] costs of an assignment: ahead of all blocks, of each block, and behind.

        ``parts``: the part of every factor. A block costs the mean of the two blocks that represent its run.
        """
        sums: dict[str, Floats] = {}
        for (scope, kind), part in zip(cost.factors, parts, strict=True):
            at = tuple(assignment[v] for v in scope)
            figures = np.array([0.0 if table is None else float(table[at]) for table in cost.kinds[kind]])
            stored = [figures[BYTES], 0.0] if _stays(cost, scope, figures) else [0.0, figures[BYTES]]
            sums[part] = sums.get(part, np.zeros(5)) + np.array([*figures[:BYTES], *stored])
        nothing = np.zeros(5)
        blocks = [(sums.get(head, nothing) + sums.get(tail, nothing)) / 2 for head, tail in self.ends]
        return np.stack([sums.get("ahead", nothing), *blocks, sums.get("behind", nothing)])


def _stays(cost: CostGraph, scope: Scope, components: Floats) -> bool:
    """Return whether the bytes of a factor stay for the whole step.

    They do if they belong to a stored value, or to a copy of it that micro-batches do not gather again. All other bytes
    are kept per micro-batch.
    """
    is_stored = isinstance(cost.variables[scope[0]], StorageVariable)
    return is_stored and (len(scope) == 1 or not components[TRAFFIC])


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
