"""Estimates of the settings of a joint search, from searches for a model with few of its equal blocks.

Time and memory of a stage grow linearly with its equal blocks. So the model is shortened to two blocks of each run, and
searched for the devices of a pipeline rank and the samples of a micro-batch. This is repeated for every memory policy,
and for several prices of a second of traffic and of a byte. Every result is a *point*: per block its seconds, the bytes
that stay, and those that are kept of a micro-batch. A stage takes the fastest point that fits for its blocks. Dynamic
programming cuts between blocks so that the slowest stage is as fast as possible.

The estimate only decides which settings are planned, and in which order. A plan itself is searched, built and simulated
as a whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import Literal

import numpy as np

from shardwise.costs.cluster import Cluster
from shardwise.errors import PlanError
from shardwise.graph.folding import Folding
from shardwise.graph.ir import Graph
from shardwise.graph.segments import How, Segment, block_of
from shardwise.layouts.mesh import Mesh
from shardwise.layouts.routes import Floats
from shardwise.plans.auto_stages import StageConfig
from shardwise.search.config import SearchConfig
from shardwise.search.constants import (
    ESTIMATED_BYTE_PRICES,
    ESTIMATED_MEMORY_SHARE,
    ESTIMATED_TRAFFIC_WEIGHTS,
    EVEN_STAGE_SLACK,
)
from shardwise.search.cost_graph import BYTES, COMPUTE, EXPOSED, TRAFFIC, CostGraph, CostWeights
from shardwise.search.elimination import Scope, TooWide
from shardwise.search.memory_policy import MemoryPolicy, blocks_of, ends_of
from shardwise.search.planner import Planner
from shardwise.search.recompute_spec import ReshardMode
from shardwise.search.solving import minimise
from shardwise.search.variables import StorageVariable

# What is recomputed, and the reshard mode of gathered parameters.
EstimatedPolicy = tuple[How | None, ReshardMode]
EstimatedPolicies = tuple[EstimatedPolicy, ...]
ESTIMATED_POLICIES: EstimatedPolicies = (
    (None, "held"),
    (None, "once"),
    ("gathers", "once"),
    ("cheap", "once"),
    ("cheap+gathers", "once"),
    (None, "again"),
    ("full", "once"),
    ("full", "again"),
)
STAYS, KEPT = 3, 4


@dataclass(frozen=True, eq=False)
class BlockSpans:
    """Time and memory of a stage with a range of the blocks, for every point. ``seconds``: [points, first block, last
    block], of a micro-batch; ``held``: the same, [..., 2], of bytes that stay and of bytes that are kept."""

    seconds: Floats
    held: Floats

    @staticmethod
    def of(points: Floats) -> BlockSpans:
        """Return the spans of points. ``points``: [points, 1 + blocks + 1, 5] of what is ahead of all blocks, of each,
        and of what is behind: seconds of a micro-batch by component, bytes that stay, and bytes kept per micro-batch.
        What is ahead belongs to the stage with the first block, what is behind to that with the last."""
        summed = np.cumsum(points, axis=1)
        starts = np.concatenate([np.zeros_like(summed[:, :1]), summed[:, 1:-2]], axis=1)
        ends = np.concatenate([summed[:, 1:-2], summed[:, -1:]], axis=1)
        added = ends[:, None, :, :] - starts[:, :, None, :]
        seconds = added[..., EXPOSED] + np.maximum(added[..., COMPUTE], added[..., TRAFFIC])
        count = starts.shape[1]
        has_some = np.triu(np.ones((count, count), dtype=np.bool_))
        return BlockSpans(np.where(has_some, seconds, inf), added[..., [STAYS, KEPT]])

    def fastest(self, limit: float, kept: float) -> Floats:
        """Return [first block, last block] the least seconds that fit, with ``kept`` micro-batches kept."""
        fits = self.held[..., 0] + kept * self.held[..., 1] <= limit
        fastest: Floats = np.where(fits, self.seconds, inf).min(axis=0)
        return fastest


@dataclass(eq=False)
class MeshOption:
    """A mesh of a pipeline rank under one memory policy. ``spans``: of the known points, at first those where bytes
    have no price; ``others``: computes those of all prices, which takes longer (None: they are known)."""

    spans: BlockSpans
    others: Callable[[], Floats] | None

    def price(self) -> None:
        """Compute all points."""
        if self.others is not None:
            self.spans, self.others = BlockSpans.of(self.others()), None


@dataclass(eq=False)
class ParetoFront:
    """Time / memory Pareto front of the stages of one device count and micro-batch size. ``ways``: the options so far;
    ``others``: lazily computes the rest, which are no faster if memory suffices (None: they are known)."""

    ways: list[MeshOption]
    others: Callable[[], list[MeshOption]] | None

    def least(self, places: int) -> float:
        """Return a lower bound of the seconds of a micro-batch on the slowest stage, whatever the memory."""
        return self._cut(inf, (0.0,) * places)[0].slowest

    def cut(self, limit: float, in_flight: Sequence[float]) -> StageCuts:
        """Return where the stages begin (``StageCuts.of``). ``limit``: bytes for a stage; ``in_flight``: for every
        stage the micro-batches that it keeps at once. The fastest point of an option whose points are not all known is
        assumed to fit. Options are priced until the slowest stage uses none of these."""
        while True:
            sure, hope, taken = self._cut(limit, in_flight)
            if hope.slowest >= sure.slowest:
                return sure
            if self.others is not None:
                self._make_others()
                continue
            for way in {way for way in taken if way.others is not None} or self.ways:
                way.price()

    def settled(self) -> ParetoFront:
        """Return the front with all points of all options."""
        self._make_others()
        for way in self.ways:
            way.price()
        return self

    def _make_others(self) -> None:
        if self.others is not None:
            self.ways, self.others = [*self.ways, *self.others()], None

    def _cut(self, limit: float, in_flight: Sequence[float]) -> tuple[StageCuts, StageCuts, set[MeshOption]]:
        """Return the cuts of the known points, the cuts if all that is not priced fits, and the options that the latter
        use."""
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
    """A cut between blocks. ``slowest``: seconds of a micro-batch on the slowest stage (infinite: nothing fits);
    ``starts``: the first block of every stage."""

    slowest: float
    starts: tuple[int, ...]

    @staticmethod
    def of(spans: Sequence[Floats]) -> StageCuts:
        """Return the cut whose slowest stage is as fast as possible; of those that come near, the one that divides the
        time most evenly. ``spans``: for every stage [first block, last block] its seconds."""
        slowest = np.array([0.0, *[inf] * len(spans[0])])
        for seconds_of_place in spans:
            slowest = np.concatenate([[inf], np.maximum(slowest[:-1, None], seconds_of_place).min(axis=0)])
        most = EVEN_STAGE_SLACK * slowest[-1]
        if most == inf:
            return StageCuts(inf, ())
        total, chosen = np.array([0.0, *[inf] * len(spans[0])]), []
        for seconds_of_place in spans:
            squares = total[:-1, None] + np.where(seconds_of_place <= most, seconds_of_place, inf) ** 2
            chosen.append(squares.argmin(axis=0))
            total = np.concatenate([[inf], squares.min(axis=0)])
        at, starts = len(spans[0]), []
        for back in reversed(chosen):
            at = int(back[at - 1])
            starts.append(at)
        return StageCuts(float(slowest[-1]), tuple(reversed(starts)))


@dataclass
class StageEstimator:
    """Estimator of steps. ``whole``: the training graph of a step; ``passes``: returns the micro-batch of so many
    samples of a shortened graph; ``meshes``: the candidates for a pipeline rank's devices; ``segments``: what the model
    asks to recompute; ``policies``: the memory policies to try."""

    whole: Graph
    passes: Callable[[Graph, int], Graph]
    meshes: Callable[[Cluster], tuple[Mesh, ...]]
    cluster: Cluster
    settings: SearchConfig
    segments: tuple[Segment, ...] = ()
    policies: EstimatedPolicies = ESTIMATED_POLICIES
    known: dict[tuple[int, ...], ParetoFront | None] = field(default_factory=dict)
    graphs: dict[int, Graph | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        folding = Folding.of(self.whole)
        self.blocks = folding.blocks
        runs = folding.runs(lambda number: 0)
        short = folding.without({number for run in runs for number in run[1:-1]})
        self.short = self.whole if short is None else short
        # For every block the blocks that represent it: the ends of its run.
        self.ends = [(self.blocks[run[0]].path, self.blocks[run[-1]].path) for run in runs for _ in run]
        if short is None:
            self.ends = [(block.path, block.path) for block in self.blocks]
        self.apart = ends_of(self.whole)
        ahead, behind = self.apart
        firsts = [*ahead[:1], *(block.ops[0] for block in self.blocks), *behind[:1]]
        self.starts = [op.name for op in firsts]  # operators that may begin a stage

    def least(self, setting: StageConfig) -> float:
        """Return a lower bound of ``seconds``, if nothing is faster than no recomputation. It takes less time."""
        front = self._front(setting)
        return inf if front is None else front.least(setting.stages) * _turns(setting)

    def seconds(self, setting: StageConfig) -> float:
        """Return the estimated seconds of a step; infinite if the model does not divide so, or if nothing fits."""
        front = self._front(setting)
        return inf if front is None else front.cut(self._limit(setting), in_flight(setting)).slowest * _turns(setting)

    def _limit(self, setting: StageConfig) -> float:
        """Return the bytes that a stage may take."""
        memory_bytes = self.settings.memory_bytes
        limit = ESTIMATED_MEMORY_SHARE * (self.cluster.device.usable_bytes if memory_bytes is None else memory_bytes)
        return limit * setting.places / setting.stages

    def parts(self, setting: StageConfig, flying: Sequence[float]) -> list[list[str]] | None:
        """Return the operators of every stage, each of which keeps so many micro-batches at once. None if there are too
        few blocks to cut between, or if nothing seems to fit."""
        if len(self.starts) < setting.stages:
            return None
        front = self._front(setting)
        cut = None if front is None else front.settled().cut(self._limit(setting), flying)
        if cut is None or not cut.starts:
            return None
        begins = {self.starts[start]: number for number, start in enumerate(cut.starts) if number}
        parts: list[list[str]] = [[] for _ in cut.starts]
        current = 0
        for op in self.whole.ops:
            current = begins.get(op.name, current)
            parts[current].append(op.name)
        return parts

    def _front(self, setting: StageConfig) -> ParetoFront | None:
        """Return the front of a setting, or None if the model is no sum over such micro-batches."""
        key = setting.places, setting.micro_batch, *([] if self.ends else [setting.stages])
        if key not in self.known:
            graph = self._graph(setting.micro_batch)
            self.known[key] = None if graph is None else self._front_of(graph, setting)
        return self.known[key]

    def _front_of(self, graph: Graph, setting: StageConfig) -> ParetoFront | None:
        stage_cluster = self.cluster.with_devices(self.cluster.num_devices // setting.places)
        meshes, settings = self.meshes(stage_cluster), replace(self.settings, passes=setting.passes)
        planner = Planner.of(graph, (), stage_cluster, meshes, settings)
        weakest, _ = self.policies[0]
        first = [policy for policy in self.policies if policy[0] == weakest and policy[1] != "again"]
        first = first or [self.policies[0]]
        others = [policy for policy in self.policies if policy not in first]
        ways = self._ways(planner, first, setting)
        return ParetoFront(ways, lambda: self._ways(planner, others, setting)) if ways else None

    def _ways(self, planner: Planner, policies: Sequence[EstimatedPolicy], setting: StageConfig) -> list[MeshOption]:
        """Return the options of every mesh under some of the policies."""
        graph, settings = planner.graph, planner.settings
        has_blocks = bool(blocks_of(graph))
        names = graph.op_by_name.keys()
        segments = [replace(segment, operators=segment.operators & names) for segment in self.segments]
        ways = []
        for how, reshard_mode in policies:
            if how not in (None, "none") and not has_blocks:
                continue
            if reshard_mode == "held" and setting.passes == 1 and (how, "once") in self.policies:  # the same
                continue
            memory_policy = MemoryPolicy.of(graph, segments, how, reshard_mode)
            with_policy = replace(planner, settings=replace(settings, memory_policy=memory_policy))
            ways += [self._way(with_policy.cost_graph(mesh), setting.stages) for mesh in planner.meshes]
        return [way for way in ways if way is not None]

    def _graph(self, size: int) -> Graph | None:
        if size not in self.graphs:
            try:
                self.graphs[size] = self.passes(self.short, size)
            except PlanError:
                self.graphs[size] = None
        return self.graphs[size]

    def _way(self, cost: CostGraph, stages: int) -> MeshOption | None:
        """Return the option of a cost graph, or None if a search takes too long."""
        try:
            free = [
                minimise(cost.weighted(CostWeights(1.0, 1.0 - share, share, 0.0))).assignment
                for share in ESTIMATED_TRAFFIC_WEIGHTS
            ]
        except TooWide:
            return None
        seconds = cost.components(free[0])  # a byte price of 1 is one step for all bytes of a device
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
        """Return points with what is ahead of all blocks, and behind them, as blocks of their own. Without blocks all
        work is divided into as many equal ones as there are stages."""
        nothing = np.zeros_like(points[:, :1])
        if not self.ends:  # no blocks to cut between
            total = points.sum(axis=1, keepdims=True)
            points = np.concatenate([nothing, *(total / stages for _ in range(stages)), nothing], axis=1)
        ahead, behind = map(bool, self.apart)
        return np.concatenate([*[nothing] * ahead, points, *[nothing] * behind], axis=1)

    def _parts_of(self, cost: CostGraph) -> list[str]:
        """Return, for every factor, the block that it belongs to, or whether it is ahead of the blocks or behind."""
        paths = [block_of(variable.name) for variable in cost.variables]
        first = next((number for number, path in enumerate(paths) if path), len(paths))
        return [paths[scope[-1]] or ("ahead" if scope[-1] < first else "behind") for scope, _ in cost.factors]

    def _added_up(self, cost: CostGraph, parts: Sequence[str], assignment: Sequence[int]) -> Floats:
        """Return the [parts, 5] sums of an assignment."""
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
    """Return whether bytes are of a step and not of a micro-batch: stored values, and what is made of these without a
    message that every micro-batch repeats."""
    is_stored = isinstance(cost.variables[scope[0]], StorageVariable)
    return is_stored and (len(scope) == 1 or not components[TRAFFIC])


def estimated_policies_of(
    recompute: How | Literal["auto"] | None, reshard_mode: ReshardMode | None
) -> EstimatedPolicies:
    """Return the memory policies to try. ``reshard_mode``: None if the user left it free; parameters are then held,
    unless ``recompute`` is free as well."""
    if recompute != "auto":
        return ((recompute, reshard_mode or "held"),)
    ways = dict.fromkeys(how for how, _ in ESTIMATED_POLICIES)
    return ESTIMATED_POLICIES if reshard_mode is None else tuple((how, reshard_mode) for how in ways)


def _turns(setting: StageConfig) -> int:
    """Return how many micro-batch times of a stage a step takes, including waiting."""
    places = setting.places
    return setting.stages // places * setting.passes + places - 1


def in_flight(setting: StageConfig) -> tuple[float, ...]:
    """Return how many micro-batches every stage keeps: a pipeline rank divides what it keeps at once among its stages
    (Narayanan et al. 2021, arXiv:2104.04473, section 2.2). The last stage runs the backward of each immediately."""
    places, passes = setting.places, setting.passes
    per_place = setting.stages // places
    if setting.schedule == "GPipe":
        return (float(passes),) * places
    if per_place == 1:
        return tuple(float(min(passes, places - place)) for place in range(places))
    most = (2 * (places - 1) + (per_place - 1) * places + 1) / per_place
    return (*(min(float(passes), most),) * (setting.stages - 1), 1.0)


__all__ = ["ESTIMATED_POLICIES", "ParetoFront", "StageEstimator", "estimated_policies_of", "in_flight"]
