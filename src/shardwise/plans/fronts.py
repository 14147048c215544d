"""What the settings of a joint search come to, from searches for a model with few of its equal blocks.

Time and memory of a place grow evenly with its equal blocks. So the model is shortened to two of each run, and searched
for the devices of a place and the samples of a pass: under every way of making values again, and at several prices of a
second of traffic and of a byte. Every answer is a *point*: per block its seconds, the bytes that stay, and those that
are kept of a micro-batch. A place that has some of the blocks takes the fastest point that it can hold. Where places
begin is chosen between blocks, by dynamic programming: so that the slowest is as fast as can be.

What comes out is an estimate of a step. It decides which settings are planned, and in which order, and nothing else: a
plan is searched, built and simulated as a whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
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
from shardwise.plans.joint import Setting
from shardwise.search.again import Gathered
from shardwise.search.cost_graph import BYTES, COMPUTE, EXPOSED, TRAFFIC, CostGraph, Weights
from shardwise.search.dynamic_programming import HIDDEN
from shardwise.search.elimination import Scope, TooWide
from shardwise.search.levers import Levers, blocks_of, ends_of
from shardwise.search.planner import Planner
from shardwise.search.settings import Settings
from shardwise.search.solving import minimise
from shardwise.search.variables import StorageVariable

ROOM = 0.93  # of a device, for what adds up; the rest is held for moments
# What is made again, and whether gathered parameters are.
Rungs = tuple[tuple[How | None, Gathered], ...]
RUNGS: Rungs = (
    (None, "held"),
    (None, "once"),
    ("gathers", "once"),
    ("cheap", "once"),
    ("cheap+gathers", "once"),
    (None, "again"),
    ("full", "once"),
    ("full", "again"),
)
TRAFFICS = (HIDDEN, 0.5, 1.0 - HIDDEN)  # weights of traffic, the others being those of compute
PRICES = (0.0, 0.03, 0.3, 3.0, 30.0)  # of all bytes of a device, in steps
STAYS, KEPT = 3, 4
SLACK = 1.01  # of the seconds of the slowest place, where that divides the time more evenly


@dataclass(frozen=True, eq=False)
class Front:
    """``points``: [points, 1 + blocks + 1, 5] of what is ahead of all blocks, of each, and of what is behind: seconds
    of a pass by component, bytes that stay, and bytes kept per micro-batch."""

    points: Floats

    def divided(self, count: int) -> Front:
        """All work in so many equal blocks."""
        total = self.points.sum(axis=1, keepdims=True)
        nothing = np.zeros_like(total)
        return Front(np.concatenate([nothing, *(total / count for _ in range(count)), nothing], axis=1))

    def with_ends_apart(self, ahead: bool, behind: bool) -> Front:
        """The same, with what is ahead of all blocks, or behind them, as a block of its own."""
        nothing = np.zeros_like(self.points[:, :1])
        return Front(np.concatenate([*[nothing] * ahead, self.points, *[nothing] * behind], axis=1))

    @cached_property
    def _spans(self) -> tuple[Floats, Floats]:
        """[points, first block, last block] seconds of a pass of a place that has them; and the same of bytes that stay
        and of bytes that are kept, [..., 2]."""
        summed = np.cumsum(self.points, axis=1)
        starts = np.concatenate([np.zeros_like(summed[:, :1]), summed[:, 1:-2]], axis=1)
        ends = np.concatenate([summed[:, 1:-2], summed[:, -1:]], axis=1)
        figures = ends[:, None, :, :] - starts[:, :, None, :]
        seconds = figures[..., EXPOSED] + np.maximum(figures[..., COMPUTE], figures[..., TRAFFIC])
        count = starts.shape[1]
        has_some = np.triu(np.ones((count, count), dtype=np.bool_))
        return np.where(has_some, seconds, inf), figures[..., [STAYS, KEPT]]

    def cut(self, limit: float, in_flight: Sequence[float]) -> Cuts:
        """The cut whose slowest place is as fast as can be; of those that come near the one that divides the time most
        evenly. ``limit``: bytes of a device; ``in_flight``: of every place the micro-batches that it keeps at once."""
        seconds, num_bytes = self._spans
        known = {
            kept: np.where(num_bytes[..., 0] + kept * num_bytes[..., 1] <= limit, seconds, inf).min(axis=0)
            for kept in dict.fromkeys(in_flight)
        }
        spans = [known[kept] for kept in in_flight]
        slowest = np.array([0.0, *[inf] * len(spans[0])])
        for seconds_of_place in spans:
            slowest = np.concatenate([[inf], np.maximum(slowest[:-1, None], seconds_of_place).min(axis=0)])
        most = SLACK * slowest[-1]
        if most == inf:
            return Cuts(inf, ())
        total, chosen = np.array([0.0, *[inf] * len(spans[0])]), []
        for seconds_of_place in spans:
            squares = total[:-1, None] + np.where(seconds_of_place <= most, seconds_of_place, inf) ** 2
            chosen.append(squares.argmin(axis=0))
            total = np.concatenate([[inf], squares.min(axis=0)])
        at, starts = len(spans[0]), []
        for back in reversed(chosen):
            at = int(back[at - 1])
            starts.append(at)
        return Cuts(float(slowest[-1]), tuple(reversed(starts)))


@dataclass(frozen=True)
class Cuts:
    """``slowest``: seconds of a pass on the slowest place (infinite: nothing fits); ``starts``: the first block of
    every place."""

    slowest: float
    starts: tuple[int, ...]


@dataclass
class Fronts:
    """``whole``: the training graph of a step; ``passes``: the graph of a pass over so many of its samples, of a
    shortened one; ``meshes``: those that a place of so many devices may have. ``segments``: what the model asks to make
    again; ``rungs``: what may be made again besides."""

    whole: Graph
    passes: Callable[[Graph, int], Graph]
    meshes: Callable[[Cluster], tuple[Mesh, ...]]
    cluster: Cluster
    settings: Settings
    segments: tuple[Segment, ...] = ()
    rungs: Rungs = RUNGS
    known: dict[tuple[int, int], Front | None] = field(default_factory=dict)
    graphs: dict[int, Graph | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        folding = Folding.of(self.whole)
        self.blocks = folding.blocks
        runs = folding.runs(lambda number: 0)
        short = folding.without({number for run in runs for number in run[1:-1]})
        self.short = self.whole if short is None else short
        # Of every block, those that stand for it: the ends of its run.
        self.ends = [(self.blocks[run[0]].path, self.blocks[run[-1]].path) for run in runs for _ in run]
        if short is None:
            self.ends = [(block.path, block.path) for block in self.blocks]
        self.apart = ends_of(self.whole)
        ahead, behind = self.apart
        firsts = [*ahead[:1], *(block.ops[0] for block in self.blocks), *behind[:1]]
        self.starts = [op.name for op in firsts]  # before which a stage may begin

    def seconds(self, setting: Setting) -> float:
        """About the seconds of a step; infinite where the model is no sum over such micro-batches, or nothing fits."""
        cut = self.cut(setting, in_flight(setting))
        if cut is None:
            return inf
        places = setting.places
        per_place = setting.stages // places
        return cut.slowest * (per_place * setting.passes + places - 1)

    def cut(self, setting: Setting, flying: Sequence[float]) -> Cuts | None:
        """Between which blocks the stages of a setting begin; None where the model is no sum over such micro-batches.
        ``flying``: of every stage the micro-batches that it keeps at once."""
        front = self._front(setting)
        if front is None:
            return None
        memory_bytes = self.settings.memory_bytes
        limit = ROOM * (self.cluster.device.usable_bytes if memory_bytes is None else memory_bytes)
        if not self.ends:  # no blocks to cut between: as if the work could be divided evenly
            front = front.divided(setting.stages)
        front = front.with_ends_apart(*map(bool, self.apart))
        return front.cut(limit * setting.places / setting.stages, flying)

    def parts(self, setting: Setting, flying: Sequence[float]) -> list[list[str]] | None:
        """The operators of every stage, each of which keeps so many micro-batches at once; None where there are too few
        blocks to cut between, and where nothing seems to fit."""
        if len(self.starts) < setting.stages:
            return None
        cut = self.cut(setting, flying)
        if cut is None or not cut.starts:
            return None
        begins = {self.starts[start]: number for number, start in enumerate(cut.starts) if number}
        parts: list[list[str]] = [[] for _ in cut.starts]
        current = 0
        for op in self.whole.ops:
            current = begins.get(op.name, current)
            parts[current].append(op.name)
        return parts

    def _front(self, setting: Setting) -> Front | None:
        key = setting.places, setting.micro_batch
        if key not in self.known:
            points = list(self._points(setting))
            self.known[key] = Front(np.stack(points)) if points else None
        return self.known[key]

    def _points(self, setting: Setting) -> Iterator[Floats]:
        graph = self._graph(setting.micro_batch)
        if graph is None:
            return
        part = self.cluster.with_devices(self.cluster.num_devices // setting.places)
        settings = replace(self.settings, passes=setting.passes)
        planner = Planner.of(graph, (), part, self.meshes(part), settings)
        has_blocks = bool(blocks_of(graph))
        names = graph.op_by_name.keys()
        segments = [replace(segment, operators=segment.operators & names) for segment in self.segments]
        for how, gathered in self.rungs:
            if how not in (None, "none") and not has_blocks:
                continue
            if gathered == "held" and setting.passes == 1 and (how, "once") in self.rungs:  # the same
                continue
            levers = Levers.of(graph, segments, how, gathered)
            with_levers = replace(planner, settings=replace(settings, levers=levers))
            for mesh in planner.meshes:
                yield from self._answers(with_levers.cost_graph(mesh))

    def _graph(self, size: int) -> Graph | None:
        if size not in self.graphs:
            try:
                self.graphs[size] = self.passes(self.short, size)
            except PlanError:
                self.graphs[size] = None
        return self.graphs[size]

    def _answers(self, cost: CostGraph) -> Iterator[Floats]:
        """The points of a mesh."""
        seen: set[tuple[int, ...]] = set()
        scale = 0.0  # seconds of a step per byte of a device
        for price in PRICES:
            for traffic in TRAFFICS:
                weights = Weights(1.0, 1.0 - traffic, traffic, price * scale)
                try:
                    assignment = minimise(cost.weighted(weights)).assignment
                except TooWide:
                    return
                if tuple(assignment) not in seen:
                    seen.add(tuple(assignment))
                    yield self._added_up(cost, assignment)
                if not scale:
                    seconds = cost.components(assignment)
                    scale = float(seconds[[EXPOSED, COMPUTE]].sum()) / self.cluster.device.usable_bytes

    def _added_up(self, cost: CostGraph, assignment: list[int]) -> Floats:
        """[parts, 5] of an assignment."""
        paths = [block_of(variable.name) for variable in cost.variables]
        first = next((number for number, path in enumerate(paths) if path), len(paths))
        sums: dict[str, Floats] = {}
        for scope, kind in cost.factors:
            at = tuple(assignment[v] for v in scope)
            figures = np.array([0.0 if table is None else float(table[at]) for table in cost.kinds[kind]])
            stored = [figures[BYTES], 0.0] if _stays(cost, scope, figures) else [0.0, figures[BYTES]]
            name = paths[scope[-1]] or ("ahead" if scope[-1] < first else "behind")
            sums[name] = sums.get(name, np.zeros(5)) + np.array([*figures[:BYTES], *stored])
        nothing = np.zeros(5)
        blocks = [(sums.get(head, nothing) + sums.get(tail, nothing)) / 2 for head, tail in self.ends]
        return np.stack([sums.get("ahead", nothing), *blocks, sums.get("behind", nothing)])


def _stays(cost: CostGraph, scope: Scope, components: Floats) -> bool:
    """Whether bytes are of a step and not of a micro-batch: what is stored, and what is made of that without a message
    that every pass repeats."""
    is_stored = isinstance(cost.variables[scope[0]], StorageVariable)
    return is_stored and (len(scope) == 1 or not components[TRAFFIC])


def rungs_of(recompute: How | Literal["auto"] | None, gathered: Gathered | None) -> Rungs:
    """What may be made again. ``gathered``: None where that is free, and then as parameters are held if something is
    asked to be made again."""
    if recompute != "auto":
        return ((recompute, gathered or "held"),)
    ways = dict.fromkeys(how for how, _ in RUNGS)
    return RUNGS if gathered is None else tuple((how, gathered) for how in ways)


def in_flight(setting: Setting) -> tuple[float, ...]:
    """How many micro-batches every stage keeps, as its place divides what it keeps at once among its stages (Narayanan
    et al. 2021, arXiv:2104.04473, section 2.2); the last stage does the backward of each at once."""
    places, passes = setting.places, setting.passes
    per_place = setting.stages // places
    if setting.schedule == "GPipe":
        return (float(passes),) * places
    if per_place == 1:
        return tuple(float(min(passes, places - place)) for place in range(places))
    most = (2 * (places - 1) + (per_place - 1) * places + 1) / per_place
    return (*(min(float(passes), most),) * (setting.stages - 1), 1.0)


__all__ = ["RUNGS", "Front", "Fronts", "in_flight", "rungs_of"]
