"""The partition of a model into pipeline stages: a dynamic program over cuts whose estimates are replaced by plans.

A cut may be before any operator. A stage that only fits with recomputation begins and ends with repeated blocks, since
whole blocks are recomputed. Let T(s, j) be the least seconds of the slowest of the first s stages, which end before
position j::

    T(s, j) = min over i < j of max(T(s - 1, i), stage(s, i, j))

Before it is planned, a stage has an estimate of its time / memory front: the seconds of its operators on all devices of
a stage, longer by up to RECOMPUTED_SHARE where the values of its micro-batches do not fit. ``next_cut`` is the best cut
by these values. After it is planned (``plans.pipelines``), its stages have their planned values. What was planned also
bounds other stages: a stage with more operators, and no fewer micro-batches, is assumed to be no faster and to need no
less memory (unless it has whole blocks to recompute, and the planned one does not). The partition is settled when the
best cut was planned, or is no better than a planned one by more than PARTITION_TOLERANCE.

A stage that does not fit counts OVER_LIMIT_PENALTY and more, by the bytes that it needs. So if no cut fits, the settled
cut is the one whose largest need is least.

A second pass minimises the bytes that cross, over cuts within SLOWEST_STAGE_SLACK of T. Up to MAX_CUT_POSITIONS
positions are considered; of more, only those that the fewest bytes cross.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import inf

import numpy as np
from numpy.typing import NDArray

from shardwise.costs.pipeline_simulation import send_seconds
from shardwise.costs.prices import Prices
from shardwise.errors import PlanError
from shardwise.graph.cut import free_values
from shardwise.graph.ir import Graph, Op
from shardwise.graph.segments import block_of
from shardwise.layouts.routes import Floats
from shardwise.search.constants import (
    MAX_CUT_POSITIONS,
    OVER_LIMIT_PENALTY,
    PARTITION_TOLERANCE,
    RECOMPUTED_SHARE,
    SLOWEST_STAGE_SLACK,
)


@dataclass(frozen=True)
class StageCut:
    """A cut. ``starts``: the position of every stage's begin, and the end (empty if there is no cut); ``value``:
    seconds of a micro-batch on the slowest stage, by what was known when it was found."""

    starts: tuple[int, ...]
    value: float

    @staticmethod
    def of(values: Sequence[Floats]) -> StageCut:
        """Return the cut whose slowest stage is as fast as possible: T above. ``values``: for every stage,
        [begin, end] its seconds; infinite where there can be no stage."""
        slowest, chosen = np.array([0.0, *[inf] * (len(values[0]) - 1)]), []
        for value in values:
            ends = np.maximum(slowest[:, None], value)
            chosen.append(ends.argmin(axis=0))
            slowest = ends.min(axis=0)
        least = float(slowest[-1])
        return StageCut(() if least == inf else _starts(chosen), least)


def _starts(chosen: Sequence[NDArray[np.intp]]) -> tuple[int, ...]:
    """Return the begin of every stage, and the end. ``chosen``: for every stage, [end] its begin."""
    starts = [len(chosen[0]) - 1]
    for back in reversed(chosen):
        starts.insert(0, int(back[starts[0]]))
    return tuple(starts)


@dataclass(eq=False)
class StagePartition:
    """The cuts of a graph, with what is known of every stage. All arrays are [begin, end] over positions.

    Attributes:
        graph: The graph of a micro-batch.
        names: The operators at the positions (without the end).
        sent: [begin] bytes that cross a cut there.
        seconds: Estimated seconds of a micro-batch; infinite where there can be no stage.
        held: For every stage, its bytes on all devices if nothing is recomputed.
        needs: For every stage, a lower bound of its bytes on all devices.
        is_whole: Whether the stage begins and ends with repeated blocks.
        limit: Bytes of a stage on all its devices.
        in_flight: For every stage, the number of micro-batches that it keeps for backward at once.
        planned: (stage, begin, end) -> the seconds of its plan; 0 if it was only found to fit, or not to.
        cuts: The starts of the cuts that were planned.
        values: Stage -> its values, until something is learned.
    """

    graph: Graph
    names: tuple[str, ...]
    sent: Floats
    seconds: Floats
    held: list[Floats]
    needs: list[Floats]
    is_whole: NDArray[np.bool_]
    limit: float
    in_flight: Sequence[int]
    planned: dict[tuple[int, int, int], float] = field(default_factory=dict)
    cuts: set[tuple[int, ...]] = field(default_factory=set)
    values: dict[int, Floats] = field(default_factory=dict)

    @staticmethod
    def of(graph: Graph, prices: Prices, limit: float, in_flight: Sequence[int]) -> StagePartition:
        """Return the partition of a graph, with estimates only.

        Args:
            graph: The graph of a micro-batch.
            prices: Prices on the devices of a stage.
            limit: Bytes of a device for a stage.
            in_flight: For every stage, the number of micro-batches whose values it keeps at once.

        Raises:
            PlanError: There are fewer operators, or fewer that read parameters, than stages.
        """
        free, devices, num_stages = free_values(graph), prices.links.mesh.num_devices, len(in_flight)
        ops = [op for op in graph.ops if not free.issuperset(op.results)]
        if len(ops) < num_stages:
            raise PlanError(
                f"{num_stages} stages need {num_stages - 1} cuts, and the model has {len(ops)} operators that can "
                "be divided among them",
                fix=f"ask for at most {len(ops)} stages",
            )
        costs = _costs(graph, ops, prices)
        crossing = costs.pop("sent")
        for first, last in _rewritten(graph, ops, free):
            crossing[first + 1 : last + 1] = inf
        at = _positions(crossing, num_stages)
        sent = np.array([crossing[p] if 0 < p < len(ops) else 0.0 for p in at])
        summed = {name: np.concatenate([[0.0], np.cumsum(cost)])[at] for name, cost in costs.items()}
        between = {name: total[None, :] - total[:, None] for name, total in summed.items()}
        is_stage = between["reads"] > 0
        if summed["reads"][-1] < num_stages:
            raise PlanError(
                f"{num_stages} stages need parameters each, and {int(summed['reads'][-1])} operators read some",
                fix="ask for fewer stages",
            )
        latency = send_seconds(prices, devices, 0.0)  # left out: micro-batches follow each other at the bandwidth
        sends = np.array([send_seconds(prices, devices, float(num_bytes) / devices) - latency for num_bytes in sent])
        sends[-1] = 0.0
        span = np.maximum(between["seconds"], sends[None, :])  # sends overlap with work
        working = np.zeros_like(span)
        most = np.array([costs["working"][a:b].max() for a, b in pairwise(at)])
        for begin in range(len(most)):
            working[begin, begin + 1 :] = np.maximum.accumulate(most[begin:])
        least = between["parameters"] + np.maximum(sent[:, None], working)
        held = [np.maximum(between["parameters"] + count * between["values"], least) for count in in_flight]
        begins = _block_starts(ops, at)
        return StagePartition(
            graph,
            tuple(ops[p].name for p in at[:-1]),
            sent,
            np.where(is_stage, span, inf),
            held,
            [least.copy() for _ in in_flight],
            begins[:, None] & begins[None, :],
            limit * devices,
            in_flight,
        )

    def memory_binds(self, cut: StageCut) -> bool:
        return any(self.held[stage][ends] > self.limit for stage, ends in enumerate(pairwise(cut.starts)))

    def next_cut(self) -> StageCut:
        """Return the best cut by what is known."""
        values = [self._values(stage) for stage in range(len(self.in_flight))]
        slowest = StageCut.of(values).value
        if slowest == inf:
            raise PlanError(
                f"{len(values)} stages need parameters each, and no cut gives all some (none is possible between "
                "operators that read and write one buffer)",
                fix="ask for fewer stages",
            )
        most = SLOWEST_STAGE_SLACK * slowest if slowest < OVER_LIMIT_PENALTY else slowest
        total, chosen = np.concatenate([[0.0], np.full(len(self.sent) - 1, inf)]), []
        for value in values:
            crossing = np.where(value <= most, total[:, None] + self.sent[None, :], inf)
            chosen.append(crossing.argmin(axis=0))
            total = crossing.min(axis=0)
        return StageCut(_starts(chosen), slowest)

    def moved(self, cut: StageCut) -> list[StageCut]:
        """Return the cuts with one start moved by a block, without those that do not fit as far as is known."""
        whole = np.flatnonzero(self.is_whole.diagonal())
        cuts = []
        for number, start in enumerate(cut.starts[1:-1], 1):
            at = int(np.searchsorted(whole, start))
            for place in {*whole[max(0, at - 1) : at + 2].tolist()} - {*cut.starts}:
                starts = (*cut.starts[:number], place, *cut.starts[number + 1 :])
                value = max(self.stage_values(starts))
                if list(starts) == sorted(starts) and value < OVER_LIMIT_PENALTY:
                    cuts.append(StageCut(starts, value))
        return cuts

    def stage_values(self, starts: Sequence[int]) -> list[float]:
        """Return the seconds of a micro-batch on every stage of a cut, as far as is known."""
        return [float(self._values(stage)[ends]) for stage, ends in enumerate(pairwise(starts))]

    def parts(self, cut: StageCut) -> list[list[str]]:
        """Return the operators of every stage. One that every stage computes for itself goes with the one before it."""
        begins = {self.names[start]: number for number, start in enumerate(cut.starts[:-1])}
        parts: list[list[str]] = [[] for _ in cut.starts[1:]]
        current = 0
        for op in self.graph.ops:
            current = begins.get(op.name, current)
            parts[current].append(op.name)
        return parts

    def is_settled(self, cut: StageCut, best: float) -> bool:
        """Return whether no other cut has to be planned. ``cut``: the next one; ``best``: the least value of those
        that were planned."""
        if cut.value >= (1 - PARTITION_TOLERANCE) * best:
            return True
        return cut.starts in self.cuts

    def learn(self, cut: StageCut, seconds: Sequence[float]) -> float:
        """Take the planned seconds of every stage, and return the value of the cut."""
        self.values.clear()
        self.cuts.add(cut.starts)
        for stage, (ends, of_stage) in enumerate(zip(pairwise(cut.starts), seconds, strict=True)):
            self.planned[(stage, *ends)] = of_stage
        return max(self.stage_values(cut.starts))

    def refuse(self, cut: StageCut, needs: Mapping[int, float]) -> None:
        """Take the bytes on all devices that stages need which do not fit. The other stages of the cut fit."""
        self.values.clear()
        self.cuts.add(cut.starts)
        for stage, ends in enumerate(pairwise(cut.starts)):
            self.planned.setdefault((stage, *ends), 0.0)
            for other in range(len(self.in_flight)):
                if stage in needs and self.in_flight[other] >= self.in_flight[stage]:
                    more = self.needs[other][: ends[0] + 1, ends[1] :]
                    larger = (
                        np.ones_like(more, bool) if self.is_whole[ends] else ~self.is_whole[: ends[0] + 1, ends[1] :]
                    )
                    np.maximum(more, needs[stage], out=more, where=larger)  # whole blocks can be recomputed

    def _estimates(self, stage: int) -> Floats:
        """Return the seconds of a stage by its operators and by what it has to recompute."""
        needs, held = self.needs[stage], self.held[stage]
        share = np.clip((held - self.limit) / np.maximum(held - needs, 1.0), 0.0, 1.0)
        return self.seconds * (1 + RECOMPUTED_SHARE * share)

    def _values(self, stage: int) -> Floats:
        if stage in self.values:
            return self.values[stage]
        timed = [(key, seconds) for key, seconds in self.planned.items() if seconds]
        estimates = {of: self._estimates(of) for of in {stage, *(of for (of, _, _), _ in timed)}}
        ratio = min((seconds / estimates[of][begin, end] for (of, begin, end), seconds in timed), default=1.0)
        seconds = ratio * estimates[stage]  # with what estimates leave out
        bytes_known = np.where(self.is_whole, self.needs[stage], np.maximum(self.held[stage], self.needs[stage]))
        over = np.where(bytes_known > self.limit, OVER_LIMIT_PENALTY * bytes_known / max(self.limit, 1.0), 0.0)
        for (of, begin, end), of_stage in timed:
            if self.in_flight[stage] >= self.in_flight[of]:
                more = seconds[: begin + 1, end:]
                np.maximum(more, of_stage, out=more)
        for (of, begin, end), of_stage in timed:
            if of == stage:  # its plan fits, whatever its estimate was
                seconds[begin, end], over[begin, end] = of_stage, 0.0
        self.values[stage] = np.where(self.seconds < inf, seconds + over, inf)
        return self.values[stage]


def _costs(graph: Graph, ops: Sequence[Op], prices: Prices) -> dict[str, Floats]:
    """Return, for every operator, its costs.

    ``seconds``: forward and backward, as if it could be split over all devices of a stage. ``parameters``: bytes of
    parameters that no earlier operator reads, with gradients and optimizer states. ``values``: bytes of results that a
    micro-batch keeps for backward. ``sent``: bytes that cross a cut before it. ``working``: bytes that it reads and
    makes, without parameters. ``reads``: 1 if it reads a parameter, else 0; every stage must have such an operator.
    """
    values, devices = graph.by_name, prices.links.mesh.num_devices
    parameters = {s.value for s in graph.sources if s.kind == "parameter"}
    last = {name: i for i, op in enumerate(ops) for name in op.operands}
    costs = {name: np.zeros(len(ops)) for name in ("seconds", "parameters", "values", "working", "reads")}
    change = np.zeros(len(ops) + 1)
    seen: set[str] = set()
    for i, op in enumerate(ops):
        operands, results = [values[name] for name in op.operands], [values[name] for name in op.results]
        shapes = [value.shape for value in operands], [value.shape for value in results]
        costs["seconds"][i] = prices.operator(op, operands, results, shapes) / devices
        for name in parameters.intersection(op.operands) - seen:
            seen.add(name)
            per_element = prices.resident_bytes_per_element(values[name], name in graph.updated)
            costs["parameters"][i] += values[name].numel * per_element
        costs["values"][i] = sum(value.num_bytes for value in results if value.requires_grad)
        costs["working"][i] = sum(values[name].num_bytes for name in {*op.operands, *op.results} - parameters)
        costs["reads"][i] = bool(parameters.intersection(op.operands))
        for name in op.results:
            if name in last and last[name] > i:
                change[i + 1] += values[name].num_bytes
                change[last[name] + 1] -= values[name].num_bytes
    return {**costs, "sent": np.cumsum(change)[:-1]}


def _rewritten(graph: Graph, ops: Sequence[Op], free: frozenset[str]) -> Iterator[tuple[int, int]]:
    """Yield, for every buffer with computed new values, its first reader and the operator that makes them. They belong
    to one stage: only cotangents are sent backward."""
    makers = {name: i for i, op in enumerate(ops) for name in op.results}
    for buffer, value in graph.mutations:
        repeated = {buffer}
        for op in graph.ops:
            if free.issuperset(op.results) and not repeated.isdisjoint(op.operands):
                repeated.update(op.results)
        readers = (i for i, op in enumerate(ops) if not repeated.isdisjoint(op.operands))
        if value in makers and (first := next(readers, makers[value])) < makers[value]:
            yield first, makers[value]


def _positions(sent: Floats, num_stages: int) -> list[int]:
    """Return the positions where stages may begin, as indices of operators, and the end."""
    inner = [position for position in range(1, len(sent)) if sent[position] < inf]
    most = max(MAX_CUT_POSITIONS, num_stages)
    if len(inner) > most:
        inner = sorted(sorted(inner, key=lambda position: (sent[position], position))[:most])
    return [0, *inner, len(sent)]


def _block_starts(ops: Sequence[Op], positions: Sequence[int]) -> NDArray[np.bool_]:
    """Return, for every position, whether a stage that begins or ends there has whole blocks."""
    blocks = ["", *(block_of(op.name) for op in ops), ""]
    return np.array([blocks[p] != blocks[p + 1] or not blocks[p] for p in positions])
