"""Cuts of a model into stages so that the slowest is as fast as possible, and none holds too much.

A cut may be before any operator. The seconds of an operator are those on the devices of a stage, as if it could be
split over all of them; sends overlap with them. Of cuts whose slowest stage is nearly as fast, the one of the fewest
bytes is taken. The best boundaries are found exactly, by dynamic programming over their positions; if there are very
many, over those that the fewest bytes cross.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, isfinite

import numpy as np
from numpy.typing import NDArray

from shardwise.costs.pipeline_simulation import send_seconds
from shardwise.costs.prices import Prices
from shardwise.errors import PlanError, problem
from shardwise.graph.cut import free_values
from shardwise.graph.ir import Graph
from shardwise.search.constants import MAX_CUT_POSITIONS, OVER_LIMIT_PENALTY, SLOWEST_STAGE_SLACK

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class _OperatorCosts:
    """Costs of every operator that is not repeated: its seconds, forward and backward, and the bytes that its stage
    holds for it: of parameters (where they are first used) and of values per micro-batch. ``sent``: bytes that cross in
    front of it; ``reads``: whether it reads parameters, of which every stage has some."""

    names: tuple[str, ...]
    seconds: Floats
    parameters: Floats
    values: Floats
    sent: Floats
    reads: Floats


def balanced_parts(
    graph: Graph, num_stages: int, prices: Prices, limit: float, in_flight: Sequence[int], per_place: int = 1
) -> tuple[list[list[str]], bool]:
    """Return the operators of every stage, and whether memory costs no time: with everything kept, each stage fits
    where the slowest is as fast as without a limit. If nothing fits, memory is divided. ``limit``: the bytes of a
    device; ``in_flight``: per stage the micro-batches whose values it keeps at once; ``per_place``: the stages that
    share a device. Raises PlanError for fewer positions than cuts."""
    weights = _weigh(graph, prices)
    count = len(weights.names)
    if count < num_stages:
        raise PlanError(
            problem(
                f"{num_stages} stages need {num_stages - 1} cuts, and the model has {count} operators that can be "
                "divided among them",
                fix=f"ask for at most {count} stages",
            )
        )
    positions = _positions(weights, num_stages)
    devices = prices.links.mesh.num_devices
    latency = send_seconds(prices, devices, 0.0)  # of each message; not what bounds how many micro-batches pass
    sends = [send_seconds(prices, devices, float(weights.sent[p]) / devices) - latency for p in positions[:-1]] + [0.0]
    starts, fits = _best(weights, positions, np.array(sends), num_stages, limit * devices / per_place, in_flight)
    return _parts(graph, weights, starts), fits


def _weigh(graph: Graph, prices: Prices) -> _OperatorCosts:
    free = free_values(graph)
    ops = [op for op in graph.ops if not free.issuperset(op.results)]
    values, devices = graph.by_name, prices.links.mesh.num_devices
    parameters = {s.value for s in graph.sources if s.kind == "parameter"}
    last = {name: i for i, op in enumerate(ops) for name in op.operands}
    seconds, resident_bytes, kept = np.zeros(len(ops)), np.zeros(len(ops)), np.zeros(len(ops))
    change = np.zeros(len(ops) + 1)
    seen: set[str] = set()
    for i, op in enumerate(ops):
        operands, results = [values[name] for name in op.operands], [values[name] for name in op.results]
        shapes = [value.shape for value in operands], [value.shape for value in results]
        seconds[i] = prices.operator(op, operands, results, shapes) / devices
        for name in op.operands:
            if name in parameters and name not in seen:
                seen.add(name)
                per_element = prices.resident_bytes_per_element(values[name], name in graph.updated)
                resident_bytes[i] += values[name].numel * per_element
        kept[i] = sum(value.num_bytes for value in results if value.requires_grad)
        for name in op.results:
            if name in last and last[name] > i:
                change[i + 1] += values[name].num_bytes
                change[last[name] + 1] -= values[name].num_bytes
    reads = np.array([float(any(name in parameters for name in op.operands)) for op in ops])
    return _OperatorCosts(tuple(op.name for op in ops), seconds, resident_bytes, kept, np.cumsum(change)[:-1], reads)


def _positions(weights: _OperatorCosts, num_stages: int) -> list[int]:
    """Return the positions where stages may begin, and the end."""
    count = len(weights.names)
    inner = list(range(1, count))
    most = max(MAX_CUT_POSITIONS, num_stages)
    if len(inner) > most:
        inner = sorted(sorted(inner, key=lambda position: (weights.sent[position], position))[:most])
    return [0, *inner, count]


def _best(
    weights: _OperatorCosts,
    positions: list[int],
    sends: Floats,
    num_stages: int,
    limit: float,
    in_flight: Sequence[int],
) -> tuple[list[int], bool]:
    """Return the positions at which stages begin, and whether memory costs no time: first the least seconds of the
    slowest stage are found, then the fewest bytes of the cuts that come near."""
    summed = (weights.seconds, weights.parameters, weights.values, weights.reads)
    seconds, parameters, values, reads = (np.concatenate([[0.0], np.cumsum(weight)])[positions] for weight in summed)
    sent = np.array([weights.sent[p] if 0 < p < len(weights.names) else 0.0 for p in positions])
    is_stage = reads[None, :] > reads[:, None]
    span = np.maximum(seconds[None, :] - seconds[:, None], sends[None, :])  # [begin, end]: it sends beside its work
    spans: list[Floats] = []
    for stage in range(num_stages):
        num_bytes = parameters[None, :] - parameters[:, None] + in_flight[stage] * (values[None, :] - values[:, None])
        # Bytes that are too many count as seconds without end; where nothing fits they are divided.
        excess = (
            np.where(num_bytes > limit, OVER_LIMIT_PENALTY * num_bytes / max(limit, 1.0), 0.0)
            if isfinite(limit)
            else 0.0
        )
        spans.append(np.where(is_stage, span + excess, inf))
    slowest = _least_slowest(spans)
    most = SLOWEST_STAGE_SLACK * slowest
    fits = slowest <= SLOWEST_STAGE_SLACK * _least_slowest([np.where(is_stage, span, inf)] * num_stages)
    if most == inf:
        raise PlanError(
            problem(
                f"{num_stages} stages need parameters each, and {int(reads[-1])} operators read some",
                fix="ask for fewer stages",
            )
        )
    total = np.full(len(positions), inf)
    total[0] = 0.0
    chosen: list[NDArray[np.int64]] = []
    for of_stage in spans:
        bytes_sent = np.where(of_stage <= most, total[:, None] + sent[None, :], inf)
        chosen.append(np.argmin(bytes_sent, axis=0))
        total = bytes_sent.min(axis=0)
    at, starts = len(positions) - 1, []
    for back in reversed(chosen):
        at = int(back[at])
        starts.append(positions[at])
    return starts[::-1], fits


def _least_slowest(spans: Sequence[Floats]) -> float:
    """Return the least seconds of the slowest stage. ``spans``: of every stage [begin, end]."""
    slowest = np.full(len(spans[0]), inf)
    slowest[0] = 0.0
    for of_stage in spans:
        slowest = np.maximum(slowest[:, None], of_stage).min(axis=0)
    return float(slowest[-1])


def _parts(graph: Graph, weights: _OperatorCosts, starts: Sequence[int]) -> list[list[str]]:
    """Split all operators into stages; repeated ones go with the one before them."""
    begins = {weights.names[start]: number for number, start in enumerate(starts)}
    parts: list[list[str]] = [[] for _ in starts]
    current = 0
    for op in graph.ops:
        current = begins.get(op.name, current)
        parts[current].append(op.name)
    return parts


__all__ = ["balanced_parts"]
