"""From strategies to the one program that all ranks run: operators in their layouts, and the conversions between them.

Two uses of a value in the same layout share one conversion, made where it is first needed (so that in backward the
collectives interleave with the computation). Every tensor the model returns is delivered invariant.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from shardwise.errors import LayoutError, problem
from shardwise.graph.ir import Arg, Graph, Op, Ref, Value
from shardwise.layouts.conversions import Collective, Move
from shardwise.layouts.layout import Layout
from shardwise.layouts.mesh import Mesh
from shardwise.layouts.redistribute import redistribute
from shardwise.layouts.strategy import Strategy, apply_strategy, check_strategy
from shardwise.partition.buckets import BUCKET_BYTES, Bucket, fill_buckets
from shardwise.partition.lower import PlacedOp, lower_all
from shardwise.partition.steps import Conversion, Step
from shardwise.rules.rule import OpRule

# The moves between two layouts of a value.
Route = Callable[[Value, Layout, Layout], tuple[Move, ...]]


@dataclass(frozen=True)
class Spmd:
    """The program of all ranks. ``layouts``: every value (and every conversion's result) -> its layout. ``graph`` is
    the lowered graph.

    ``outputs``: per flattened output the name of a value that is whole on every rank, or a constant; ``loss`` likewise;
    ``mutations``: (buffer value, name of the value in the buffer's layout).
    """

    mesh: Mesh
    graph: Graph
    layouts: Mapping[str, Layout]
    steps: tuple[Step | Conversion | Bucket, ...]
    outputs: tuple[Arg, ...]
    loss: str | None
    mutations: tuple[tuple[str, str], ...]

    @cached_property
    def conversions(self) -> tuple[Conversion, ...]:
        """All conversions in order, those that share their messages side by side."""
        return tuple(conversion for step in self.steps for conversion in conversions_of(step))

    def forward_collectives(self) -> tuple[Collective, ...]:
        """Every collective of one forward pass, in order."""
        return tuple(c for step in self.steps if not isinstance(step, Step) for c in step.collectives())

    def backward_collectives(self) -> tuple[Collective, ...]:
        """Every collective of one backward pass, in the order in which autograd runs them: newest step first, and only
        those through which a gradient of the loss flows."""
        return tuple(
            c
            for step in reversed(self.steps)
            if not isinstance(step, Step) and any(map(self.receives_gradient, conversions_of(step)))
            for c in step.collectives(backward=True)
        )

    def receives_gradient(self, conversion: Conversion) -> bool:
        """Whether a cotangent of the loss reaches the conversion's result."""
        return conversion.differentiable and conversion.result in self._reached

    @cached_property
    def _reached(self) -> frozenset[str]:
        """Names that receive a cotangent when the loss is differentiated."""
        if self.loss is None:
            return frozenset()
        reached = {self.loss}
        grad = self.graph.by_name
        for step in reversed(self.steps):
            if not isinstance(step, Step):
                reached.update(c.value for c in conversions_of(step) if c.result in reached and c.differentiable)
            elif any(result in reached and grad[result].requires_grad for result in step.placed.op.results):
                for name, original in zip(step.operands, step.placed.op.operands, strict=True):
                    if grad[original].requires_grad:
                        reached.add(name)
        return frozenset(reached)


def build_spmd(
    graph: Graph,
    rules: Mapping[str, OpRule],
    strategies: Mapping[str, Strategy],
    sources: Mapping[str, Layout],
    mesh: Mesh,
    *,
    bucket_bytes: int = BUCKET_BYTES,
    parameter_dtypes: Mapping[str, torch.dtype] | None = None,
    route: Route | None = None,
    shared: Mapping[str, Layout] | None = None,
) -> Spmd:
    """Insert the conversions. ``rules``: the divided rules; ``sources``: source value -> the layout it is stored or
    delivered in; ``bucket_bytes``: the largest message that several parameters share (``partition.buckets``; 0: none
    is shared); ``parameter_dtypes``: those that decide about sharing, where they are not the graph's; ``route``: the
    moves between two layouts of a value (by default those that send the fewest bytes); ``shared``: values that are
    converted to one layout first, from which all consumers take them.

    Raises LayoutError naming the operator when a strategy is not one of its own.
    """
    for op in graph.ops:
        _check(op, rules[op.name], strategies[op.name], mesh)
    placed, lowered = lower_all(graph, rules, strategies, mesh)
    builder = Builder(lowered, mesh, {name: sources[name] for name in graph.source_of}, route, shared)
    for item in placed:
        builder.add(item)
    outputs = tuple(Ref(builder.whole(out.name)) if isinstance(out, Ref) else out for out in graph.outputs)
    loss = builder.whole(graph.loss) if graph.loss is not None else None
    mutations = tuple((buffer, builder.convert(value, sources[buffer], "")) for buffer, value in graph.mutations)
    plain = Spmd(mesh, lowered, builder.layouts, tuple(builder.steps), outputs, loss, mutations)
    parameters = frozenset(source.value for source in lowered.sources if source.kind == "parameter")
    steps = fill_buckets(
        builder.steps,
        parameters,
        lambda value: (parameter_dtypes or {}).get(value, lowered.by_name[value].dtype),
        plain.receives_gradient,
        bucket_bytes,
    )
    return replace(plain, steps=steps)


def conversions_of(step: Step | Conversion | Bucket) -> tuple[Conversion, ...]:
    """The conversions of a step: none, one, or those of a bucket."""
    if isinstance(step, Bucket):
        return step.conversions
    return (step,) if isinstance(step, Conversion) else ()


def _check(op: Op, rule: OpRule, strategy: Strategy, mesh: Mesh) -> None:
    try:
        check_strategy(rule, strategy, mesh)
    except LayoutError as error:
        raise LayoutError(problem(str(error), op=op.name, source=op.source)) from error


class Builder:
    """The steps so far, the layout of every name, and the conversions already made.

    ``route``: the moves between two layouts of a value; ``shared``: values whose consumers convert from a layout that
    they share.
    """

    def __init__(
        self,
        graph: Graph,
        mesh: Mesh,
        layouts: dict[str, Layout],
        route: Route | None = None,
        shared: Mapping[str, Layout] | None = None,
    ) -> None:
        self.graph, self.mesh, self.layouts = graph, mesh, layouts
        self.route, self.shared = route or fewest_bytes, shared or {}
        self.steps: list[Step | Conversion] = []
        self._shared_as: dict[str, str] = {}  # value -> the name of its shared layout
        self._made: dict[tuple[str, Layout], str] = {}
        self._count: dict[str, int] = {}

    def add(self, placed: PlacedOp) -> None:
        applied = apply_strategy(placed.rule, placed.strategy, self.mesh)
        names = tuple(
            self.convert(value, layout, placed.op.name)
            for value, layout in zip(placed.op.operands, applied.operands, strict=True)
        )
        layouts = tuple(self.layouts[name] for name in names)
        self.steps.append(Step(placed, names, layouts, applied.results))
        self.layouts.update(zip(placed.op.results, applied.results, strict=True))

    def whole(self, value: str) -> str:
        """The name of the value, invariant on every axis."""
        return self.convert(value, Layout.whole(self.mesh, self.graph.by_name[value].shape), "")

    def convert(self, value: str, target: Layout, op: str) -> str:
        """The name under which ``value`` is available in ``target``; without gradient, replicated and invariant are the
        same."""
        if value in self.shared and value not in self._shared_as:
            self._shared_as[value] = self._converted(value, value, self.shared[value], op)
        return self._converted(self._shared_as.get(value, value), value, target, op)

    def _converted(self, name: str, origin: str, target: Layout, op: str) -> str:
        """The name under which ``origin``, available as ``name``, is available in ``target``."""
        info, source = self.graph.by_name[origin], self.layouts[name]
        if not info.requires_grad:
            source, target = gradient_free(source), gradient_free(target)
        target = target.canonical()
        if source.canonical() == target:
            return name
        key = (origin, target)
        if key not in self._made:
            moves = self.route(info, source, target)
            self._count[origin] = self._count.get(origin, 0) + 1
            result = f"{origin}:{self._count[origin]}"
            self._made[key] = result
            self.layouts[result] = target
            self.steps.append(
                Conversion(name, origin, result, source, target, moves, info.requires_grad, info.dtype.itemsize, op)
            )
        return self._made[key]


def fewest_bytes(value: Value, source: Layout, target: Layout) -> tuple[Move, ...]:
    """The moves that send the fewest bytes."""
    return redistribute(source, target, differentiable=value.requires_grad)


def gradient_free(layout: Layout) -> Layout:
    """The layout of a value that has no cotangent: replicated and invariant are the same."""
    replicated = [axis for axis, state in layout.states if state == "R"]
    return layout.moved(dict.fromkeys(replicated, "I")) if replicated else layout
