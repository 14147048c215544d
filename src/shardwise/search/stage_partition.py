"""Cuts a model into stages at any operator, so that the slowest stage is as fast as possible.

A cut may be before any operator, also inside a repeated block. ``plans.pipelines._balanced`` uses this cut if memory
costs no time. If memory binds, it cuts between blocks instead (``plans.stage_estimator``).

An operator's seconds are those on a stage's devices, as if it could be split over all of them. Sends overlap with them.
Let T(s, j) be the least seconds of the slowest of the first s stages, which end before position j::

    T(s, j) = min over i < j of max(T(s - 1, i), stage(s, i, j))

A stage over the memory limit counts OVER_LIMIT_PENALTY seconds and more. A second pass minimises the bytes that cross,
over cuts whose slowest stage is within SLOWEST_STAGE_SLACK of T. The result is exact for up to MAX_CUT_POSITIONS
positions. Of more, only those that the fewest bytes cross are tried.
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
    """Costs of every operator that depends on an input or a parameter. Every stage computes the others for itself.

    Attributes:
        names: The operators.
        seconds: Forward and backward, on the devices of a stage.
        parameters: Bytes of parameters that no earlier operator reads, with gradients and optimizer states.
        values: Bytes of results that a micro-batch keeps for backward.
        sent: Bytes of values that cross a cut before the operator.
        reads: 1 if the operator reads a parameter, else 0. Every stage must have such an operator.
    """

    names: tuple[str, ...]
    seconds: Floats
    parameters: Floats
    values: Floats
    sent: Floats
    reads: Floats


def balanced_parts(
    graph: Graph, num_stages: int, prices: Prices, limit: float, in_flight: Sequence[int], per_place: int = 1
) -> tuple[list[list[str]], bool]:
    """Return the operators of every stage, and whether memory costs no time.

    Memory costs no time if each stage fits without recomputation, and the slowest is nearly as fast as without a limit.
    If no cut fits, the stages exceed their limit as evenly as possible.

    Args:
        graph: The graph of a micro-batch.
        num_stages: Number of stages.
        prices: Prices on the devices of a stage.
        limit: Bytes of a device.
        in_flight: For every stage, the number of micro-batches whose values it keeps at once.
        per_place: Stages that share a device.

    Raises:
        PlanError: There are fewer operators, or fewer that read parameters, than stages.
    """
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
    latency = send_seconds(prices, devices, 0.0)  # left out below: micro-batches follow each other at the bandwidth
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
    """Return the positions where stages may begin, as indices of operators, and the end."""
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
    """Return the positions at which stages begin, and whether memory costs no time.

    The first pass finds the least seconds of the slowest stage. The second finds the fewest bytes sent, over cuts that
    are nearly as fast.
    """
    summed = (weights.seconds, weights.parameters, weights.values, weights.reads)
    seconds, parameters, values, reads = (np.concatenate([[0.0], np.cumsum(weight)])[positions] for weight in summed)
    sent = np.array([weights.sent[p] if 0 < p < len(weights.names) else 0.0 for p in positions])
    is_stage = reads[None, :] > reads[:, None]
    span = np.maximum(seconds[None, :] - seconds[:, None], sends[None, :])  # [begin, end]: sends overlap with work
    spans: list[Floats] = []
    for stage in range(num_stages):
        num_bytes = parameters[None, :] - parameters[:, None] + in_flight[stage] * (values[None, :] - values[:, None])
        # The penalty exceeds any seconds, and grows with the bytes: if nothing fits, the excess is divided evenly.
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
    """Return the least seconds of the slowest stage. ``spans``: for every stage, [begin, end] its seconds."""
    slowest = np.full(len(spans[0]), inf)
    slowest[0] = 0.0
    for of_stage in spans:
        slowest = np.maximum(slowest[:, None], of_stage).min(axis=0)
    return float(slowest[-1])


def _parts(graph: Graph, weights: _OperatorCosts, starts: Sequence[int]) -> list[list[str]]:
    """Split all operators into stages. An operator without costs goes with the one before it."""
    begins = {weights.names[start]: number for number, start in enumerate(starts)}
    parts: list[list[str]] = [[] for _ in starts]
    current = 0
    for op in graph.ops:
        current = begins.get(op.name, current)
        parts[current].append(op.name)
    return parts


__all__ = ["balanced_parts"]
