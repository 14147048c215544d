"""The price of a program: of its operators on their local shapes, and of the collectives of its conversions.

The search prices strategies one by one; this prices what was emitted.

A parameter is gathered before its first use, and its gradient is reduced after the last kernel of backward that adds to
it, which is that of the same use. So of its messages no more is hidden than what is computed before that use in forward
and after it in backward (``overlap_windows``): nothing, for the first operator of a model; and little, for a wide head
on a narrow body.
"""

from __future__ import annotations

from collections.abc import Container, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

import numpy as np

from shardwise.costs.prices import LocalShapes, Prices
from shardwise.costs.saved_for_backward import numbered_call
from shardwise.graph.ir import Graph, Op, Value
from shardwise.layouts.conversions import Collective
from shardwise.layouts.layout import Layout
from shardwise.programs.spmd import SpmdProgram
from shardwise.programs.spmd_steps import Conversion, OpStep


def largest_shape(layout: Layout) -> tuple[int, ...]:
    """Return the local shape on the device that holds most."""
    return tuple(prod(-(-atom.size // layout.mesh.size_of(atom.axes)) for atom in dim) for dim in layout.dims)


def priced_call(step: OpStep, graph: Graph) -> tuple[Op, list[Value], list[Value], LocalShapes]:
    """Return an operator of a program as ``Prices`` takes it, on the device that holds most."""
    op = step.placed.op
    operands, results = [graph.by_name[name] for name in op.operands], [graph.by_name[name] for name in op.results]
    shapes = tuple(map(largest_shape, step.operand_layouts)), tuple(map(largest_shape, step.result_layouts))
    return op, operands, results, shapes


def collective_seconds(collectives: Sequence[Collective], prices: Prices) -> float:
    """Seconds of collectives one after the other."""
    return float(sum(prices.links.seconds(c.kind, c.axes, c.num_bytes) for c in collectives))


def conversion_seconds(conversion: Conversion, prices: Prices, *, is_parameter: bool = False) -> float:
    """Seconds of a conversion, forward and backward: by itself, or of a parameter its share of a full message."""
    collectives = (*conversion.collectives(), *conversion.collectives(backward=True))
    if not is_parameter:
        return collective_seconds(collectives, prices)
    shares = (prices.parameter_collective(c.kind, c.axes, np.array([float(c.num_bytes)]))[0] for c in collectives)
    return float(sum(shares))


@dataclass(frozen=True, slots=True)
class ProgramPrice:
    """Seconds of one training step, component by component, without overlap: collectives that operators wait for,
    operators, the part of collectives of parameters that overlaps with operators, and the casts and updates of
    parameters. What backward makes again is counted twice."""

    exposed: float
    compute: float
    traffic: float
    update: float


def price_program(
    spmd: SpmdProgram, prices: Prices, free: Container[str] = (), windows: Mapping[str, float] | None = None
) -> ProgramPrice:
    """The price of an emitted program. ``free``: operators that depend on no parameter, which every plan makes where
    they are needed; ``windows``: parameter -> what its messages can hide behind (``overlap_windows``; not given: as
    long as they take). Outputs other than the loss are not priced: a training step does not deliver them."""
    graph = spmd.graph
    parameters = frozenset(s.value for s in graph.sources if s.kind == "parameter")
    written = {value for _, value in graph.mutations}
    exposed = compute = traffic = update = 0.0
    for step in spmd.steps:
        if isinstance(step, OpStep):
            if step.placed.op.name not in free:
                compute += prices.operator(*priced_call(step, graph))
            if step.placed.op.name in spmd.lifetimes.operators:
                compute += prices.forward(*priced_call(step, graph))
            continue
        for conversion in step.conversions:
            origin = conversion.origin
            if not conversion.op and origin != graph.loss and origin not in written:
                continue
            is_parameter = origin in parameters
            seconds = conversion_seconds(conversion, prices, is_parameter=is_parameter)
            hidden = min(seconds, (windows or {}).get(origin, seconds)) if is_parameter else 0.0
            if conversion.value in spmd.lifetimes.once and prices.passes > 1:  # ahead of all passes, or behind them
                seconds, hidden = seconds / prices.passes, 0.0
            if conversion.result in spmd.lifetimes.conversions:  # converted again in backward
                forward = replace(conversion, differentiable=False)
                recomputed = conversion_seconds(forward, prices, is_parameter=is_parameter)
                # For an operator that is computed again as well it is waited for on the spot.
                beside = is_parameter or conversion.op not in spmd.lifetimes.operators
                seconds, hidden = seconds + recomputed, hidden + (recomputed if beside else 0.0)
            hidden *= prices.device.overlap
            traffic += hidden
            exposed += seconds - hidden
    for source in graph.sources:
        value, numel = graph.by_name[source.value], spmd.layouts[source.value].max_local_numel
        if source.kind == "parameter":
            update += prices.casts(value, numel, source.value in graph.updated)
        if source.value in graph.updated:
            update += prices.update(value, numel)
    return ProgramPrice(exposed, compute, traffic, update)


def overlap_windows(graph: Graph, prices: Prices) -> dict[str, float]:
    """Parameter -> seconds of the operators, forward and backward, before the first that uses it. On whole values: no
    plan has more to compute there, so that what does not fit is waited for in every plan."""
    parameters = {source.value for source in graph.sources if source.kind == "parameter"}
    windows: dict[str, float] = {}
    seconds_of: dict[Hashable, float] = {}  # what decides the price of an operator -> its seconds
    seconds = 0.0
    for op in graph.ops:
        for name in op.operands:
            if name in parameters:
                windows.setdefault(name, seconds)
        operands, results = [graph.by_name[name] for name in op.operands], [graph.by_name[name] for name in op.results]
        tensors = tuple((value.shape, value.dtype, value.requires_grad) for value in (*operands, *results))
        target, args, kwargs = numbered_call(op)
        key = target, repr(args), repr(kwargs), len(operands), tensors  # repr tells 1, 1.0 and True apart
        if key not in seconds_of:
            shapes = [value.shape for value in operands], [value.shape for value in results]
            seconds_of[key] = prices.operator(op, operands, results, shapes)
        seconds += seconds_of[key]
    return windows
