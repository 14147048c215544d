"""From strategies to the one program that all ranks run: operators in their layouts, and the conversions between them.

Two uses of a value in the same layout share one conversion, made where it is first needed (so that in backward the
collectives interleave with the computation). Every tensor the model returns is delivered invariant.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TypeGuard

import torch

from shardwise.errors import LayoutError, problem
from shardwise.graph.ir import Arg, Graph, Op, Ref, Value, refs
from shardwise.layouts.conversions import Collective, Move
from shardwise.layouts.layout import Layout
from shardwise.layouts.mesh import Mesh
from shardwise.layouts.redistribute import redistribute
from shardwise.layouts.strategy import Strategy, apply_strategy, check_strategy
from shardwise.programs.buckets import BUCKET_BYTES, Bucket, fill_buckets
from shardwise.programs.comm_schedule import GradientReduceQueue, legs_ahead
from shardwise.programs.lower import PlacedOp, lower_all
from shardwise.programs.spmd_steps import Conversion, OpStep
from shardwise.rules.rule import OpRule

# The moves between two layouts of a value.
Route = Callable[[Value, Layout, Layout], tuple[Move, ...]]


@dataclass(frozen=True)
class Lifetimes:
    """What of forward is not kept for backward. ``operators``: those whose results are made again where backward reads
    them; ``conversions``: results of conversions that are; ``offloaded``: operators whose results, as far as they are
    kept, wait on the host; ``once``: parameters that a step of several passes casts and gathers once, and whose
    gradients it reduces once (``programs.grad_accum_program``). Names are those of the lowered graph."""

    operators: frozenset[str] = frozenset()
    conversions: frozenset[str] = frozenset()
    offloaded: frozenset[str] = frozenset()
    once: frozenset[str] = frozenset()

    def __bool__(self) -> bool:
        return bool(self.operators or self.conversions or self.offloaded)


@dataclass(frozen=True)
class Choice:
    """All that decides a program: a strategy for every operator, and for every source the layout in which it is stored
    or delivered. ``shared``: values that are converted to one layout first, from which all consumers take them;
    ``delivered``: outputs that are wanted in some layout, not whole (of a part of a cut graph those that it sends);
    ``route``: the moves between two layouts of a value (by default those that send the fewest bytes)."""

    strategies: Mapping[str, Strategy]
    sources: Mapping[str, Layout]
    shared: Mapping[str, Layout] = field(default_factory=dict)
    delivered: Mapping[str, Layout] = field(default_factory=dict)
    route: Route | None = None


@dataclass(frozen=True)
class SpmdProgram:
    """The program of all ranks. ``layouts``: every value (and every conversion's result) -> its layout. ``graph`` is
    the lowered graph.

    ``outputs``: per flattened output the name of a value that is whole on every rank (or in the layout in which it is
    delivered), or a constant; ``loss`` likewise; ``mutations``: (buffer value, name of the value in the buffer's
    layout). ``cotangents``: of a part of a cut graph, those outputs whose cotangents come from outside, in the dual
    layouts. ``lifetimes``: what is not kept from forward to backward.
    """

    mesh: Mesh
    graph: Graph
    layouts: Mapping[str, Layout]
    steps: tuple[OpStep | Conversion | Bucket, ...]
    outputs: tuple[Arg, ...]
    loss: str | None
    mutations: tuple[tuple[str, str], ...]
    cotangents: tuple[str, ...] = ()
    lifetimes: Lifetimes = Lifetimes()

    @cached_property
    def conversions(self) -> tuple[Conversion, ...]:
        """All conversions in order, those that share their messages side by side."""
        return tuple(conversion for step in self.steps for conversion in conversions_of(step))

    def is_once(self, step: OpStep | Conversion | Bucket) -> bool:
        """Whether a step of several passes makes these conversions once (``programs.grad_accum_program``)."""
        return not isinstance(step, OpStep) and all(c.value in self.lifetimes.once for c in conversions_of(step))

    def place_of(self, conversions: Sequence[Conversion]) -> int:
        """Where a bucket stands: the products ahead of it (``programs.comm_schedule``)."""
        return self._places[conversions[0].result]

    @cached_property
    def _places(self) -> Mapping[str, int]:
        places: dict[str, int] = {}
        products, behind = 0, False  # behind a product
        for step in self.steps:
            if isinstance(step, OpStep):
                behind = step.placed.rule.is_product
                products += behind
                continue
            for conversion in conversions_of(step):
                op = self.graph.op_by_name.get(conversion.op)
                is_bias = behind and op is not None and op.target is torch.ops.aten.add.Tensor  # (programs.fuse_bias)
                places[conversion.result] = products - is_bias
        return places

    def forward_collectives(self, *, in_passes: bool = False) -> tuple[Collective, ...]:
        """Every collective of one forward pass, in order: a message of parameters leaves before the one ahead of it is
        waited for (``programs.comm_schedule``). ``in_passes``: of the first of several, and of what is done ahead of
        it."""
        leaving = [step for step in self.steps if _of_parameters(step) and step.collectives()]
        start, *slots = legs_ahead(
            [len(bucket.collectives()) for bucket in leaving], [self.place_of(bucket.conversions) for bucket in leaving]
        )
        slot_of = dict(zip(map(id, leaving), slots, strict=True))
        ordered: list[tuple[Conversion | Bucket, Collective]] = []
        ordered += [(leaving[i], leaving[i].collectives()[leg]) for i, leg in start]
        for step in self.steps:
            if id(step) in slot_of:
                ordered += [(leaving[i], leaving[i].collectives()[leg]) for i, leg in slot_of[id(step)]]
            elif not isinstance(step, OpStep):
                ordered += [(step, collective) for collective in step.collectives()]
        if in_passes:
            ordered.sort(key=lambda sent: self.is_once(sent[0]), reverse=True)
        return tuple(collective for _, collective in ordered)

    def backward_collectives(self, *, in_passes: bool = False) -> tuple[Collective, ...]:
        """Every collective of one backward pass, in order: newest step first, of the conversions ahead of an operator
        those of values before those of parameters, and only those through which a gradient of the loss flows; what
        gradients send later goes where ``programs.comm_schedule`` says. ``in_passes``: of one of several, and of what
        is done behind the last."""
        ordered: list[tuple[Conversion | Bucket, Collective]] = []
        returning: GradientReduceQueue[tuple[tuple[Conversion | Bucket, Collective], ...]] = GradientReduceQueue()
        for step in backward_order(self.steps):
            if isinstance(step, OpStep) or not any(map(self.receives_gradient, conversions_of(step))):
                continue
            sent = [(step, collective) for collective in step.collectives(backward=True)]
            if sent and _of_parameters(step):
                arrival: tuple[()] = ()
                legs = [*((one,) for one in sent), arrival]
                for leg in returning.leave(self.place_of(step.conversions), bool(step.collectives()), legs):
                    ordered += leg
            else:
                ordered += sent
        for leg in returning.end():
            ordered += leg
        if in_passes:
            ordered.sort(key=lambda sent: self.is_once(sent[0]))
        return tuple(collective for _, collective in ordered)

    def receives_gradient(self, conversion: Conversion) -> bool:
        """Whether a cotangent of the loss reaches the conversion's result."""
        return conversion.differentiable and conversion.result in self._reached

    @cached_property
    def _reached(self) -> frozenset[str]:
        """Names that receive a cotangent when the loss is differentiated, or in a part when those from outside come."""
        reached = set(self.cotangents) | ({self.loss} if self.loss is not None else set())
        grad = self.graph.by_name
        for step in reversed(self.steps):
            if not isinstance(step, OpStep):
                reached.update(c.value for c in conversions_of(step) if c.result in reached and c.differentiable)
            elif any(result in reached and grad[result].requires_grad for result in step.placed.op.results):
                for name, original in zip(step.operands, step.placed.op.operands, strict=True):
                    if grad[original].requires_grad:
                        reached.add(name)
        return frozenset(reached)


def build_spmd(
    graph: Graph,
    rules: Mapping[str, OpRule],
    choice: Choice,
    mesh: Mesh,
    *,
    bucket_bytes: int = BUCKET_BYTES,
    by_block: bool = False,
) -> SpmdProgram:
    """What all ranks run under a choice. ``rules``: the divided rules; ``bucket_bytes``: the largest message that
    several parameters share (0: none is shared); ``by_block``: only those of one repeated block of the model do. Raises
    LayoutError as ``place_ops`` does."""
    placed, lowered = place_ops(graph, rules, choice.strategies, mesh)
    return fill(insert_conversions(placed, lowered, choice, mesh), bucket_bytes, by_block=by_block)


def place_ops(
    graph: Graph, rules: Mapping[str, OpRule], strategies: Mapping[str, Strategy], mesh: Mesh
) -> tuple[tuple[PlacedOp, ...], Graph]:
    """Every operator with its rule and strategy, lowered where its strategy asks for it; and the lowered graph. Raises
    LayoutError naming the operator when a strategy is not one of its own."""
    for op in graph.ops:
        _check(op, rules[op.name], strategies[op.name], mesh)
    return lower_all(graph, rules, strategies, mesh)


def insert_conversions(placed: Sequence[PlacedOp], graph: Graph, choice: Choice, mesh: Mesh) -> SpmdProgram:
    """The program without buckets: the operators of a lowered graph, and every conversion by itself."""
    sources, wanted = choice.sources, choice.delivered
    builder = Builder(graph, mesh, {name: sources[name] for name in graph.source_of}, choice.route, choice.shared)
    for item in placed:
        builder.add(item)
    delivered_as = {
        name: builder.convert(name, wanted[name], "") if name in wanted else builder.whole(name)
        for name in refs(graph.outputs)
    }
    outputs = tuple(Ref(delivered_as[out.name]) if isinstance(out, Ref) else out for out in graph.outputs)
    cotangents = tuple(delivered_as[name] for name in graph.cotangents or ())
    loss = builder.whole(graph.loss) if graph.loss is not None else None
    mutations = tuple((buffer, builder.convert(value, sources[buffer], "")) for buffer, value in graph.mutations)
    return SpmdProgram(mesh, graph, builder.layouts, tuple(builder.steps), outputs, loss, mutations, cotangents)


def fill(spmd: SpmdProgram, bucket_bytes: int, original: Graph | None = None, *, by_block: bool = False) -> SpmdProgram:
    """The program with its conversions put into buckets (``programs.buckets``). ``original``: the graph whose sources'
    dtypes decide about sharing, where it is another; ``by_block``: as in ``build_spmd``."""
    graph = spmd.graph
    values = graph.by_name | ({s.value: original.by_name[s.value] for s in original.sources} if original else {})
    parameters = frozenset(source.value for source in graph.sources if source.kind == "parameter")
    steps = fill_buckets(
        [step for step in spmd.steps if not isinstance(step, Bucket)],
        parameters,
        values.__getitem__,
        spmd.receives_gradient,
        bucket_bytes,
        ends=_trained(spmd),
        by_block=by_block,
    )
    return replace(spmd, steps=steps)


def _trained(spmd: SpmdProgram) -> set[str]:
    """What a training step makes: the loss (all outputs, where there is none), what is sent to other stages, and what
    is written to buffers."""
    ends = {spmd.loss} if spmd.loss is not None else {*refs(spmd.outputs)}
    return {*ends, *spmd.cotangents, *(value for _, value in spmd.mutations)}


def with_buckets(spmd: SpmdProgram, buckets: Sequence[Bucket]) -> SpmdProgram:
    """A program without buckets in which some conversions stand together, where the first of each bucket stood. Raises
    LayoutError where that can not be: a value is not there yet or needed before, or members communicate differently."""
    bucket_of = {conversion.result: bucket for bucket in buckets for conversion in bucket.conversions}
    parameters = {source.value for source in spmd.graph.sources if source.kind == "parameter"}
    available = {source.value for source in spmd.graph.sources}
    steps: list[OpStep | Conversion | Bucket] = []
    for step in spmd.steps:
        if isinstance(step, OpStep):
            available.update(step.placed.op.results)
            steps.append(step)
            continue
        (conversion,) = conversions_of(step)
        bucket = bucket_of.get(conversion.result)
        if bucket is not None:
            if conversion.result in available:  # it stands there, with the first of its bucket
                continue
            _check_bucket(bucket, conversion, available, parameters)
        steps.append(bucket or conversion)
        available.update(entry.result for entry in conversions_of(steps[-1]))
    return replace(spmd, steps=tuple(steps))


def _check_bucket(bucket: Bucket, first: Conversion, available: set[str], parameters: set[str]) -> None:
    """``first``: the member that is needed first; ``available``: the values that there are where it stands."""
    kinds = {tuple((move.cell, move.axes) for move in c.moves) for c in bucket.conversions}
    late = [c.origin for c in bucket.conversions if c.value not in available]
    computed = [c.origin for c in bucket.conversions if bucket.of_parameters and c.value not in parameters]
    why = ""
    if bucket.conversions[0] is not first:
        why = f"{first.origin} is needed before {bucket.conversions[0].origin}"
    elif late:
        why = f"{late[0]} is not there yet"
    elif computed:
        why = f"{computed[0]} is no parameter, and can not leave early"
    elif len(kinds) > 1:
        why = "they make different moves"
    if why:
        members = f"{bucket.conversions[0].origin} and {len(bucket.conversions) - 1} more"
        raise LayoutError(f"{members} can not share messages: {why}")


def backward_order(steps: Sequence[OpStep | Conversion | Bucket]) -> list[OpStep | Conversion | Bucket]:
    """The steps as backward takes them: from the last to the first, but of the conversions ahead of an operator those
    of values go before buckets of parameters, so that a message of the former travels while gradients of the latter are
    computed."""
    ordered: list[OpStep | Conversion | Bucket] = []
    run: list[OpStep | Conversion | Bucket] = []
    for step in reversed(steps):
        if isinstance(step, OpStep):
            ordered += sorted(run, key=_of_parameters)
            run = []
            ordered.append(step)
        else:
            run.append(step)
    return [*ordered, *sorted(run, key=_of_parameters)]


def _of_parameters(step: OpStep | Conversion | Bucket) -> TypeGuard[Bucket]:
    return isinstance(step, Bucket) and step.of_parameters


def conversions_of(step: OpStep | Conversion | Bucket) -> tuple[Conversion, ...]:
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
        self.steps: list[OpStep | Conversion] = []
        self._shared_as: dict[str, str] = {}  # value -> the name of its shared layout
        self._results: dict[tuple[str, Layout], str] = {}
        self._count: dict[str, int] = {}

    def add(self, placed: PlacedOp) -> None:
        applied = apply_strategy(placed.rule, placed.strategy, self.mesh)
        names = tuple(
            self.convert(value, layout, placed.op.name)
            for value, layout in zip(placed.op.operands, applied.operands, strict=True)
        )
        layouts = tuple(self.layouts[name] for name in names)
        self.steps.append(OpStep(placed, names, layouts, applied.results))
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
        if key not in self._results:
            moves = self.route(info, source, target)
            self._count[origin] = self._count.get(origin, 0) + 1
            result = f"{origin}:{self._count[origin]}"
            self._results[key] = result
            self.layouts[result] = target
            itemsizes = info.dtype.itemsize, info.grad_itemsize
            self.steps.append(
                Conversion(name, origin, result, source, target, moves, info.requires_grad, *itemsizes, op)
            )
        return self._results[key]


def fewest_bytes(value: Value, source: Layout, target: Layout) -> tuple[Move, ...]:
    """The moves that send the fewest bytes."""
    return redistribute(source, target, differentiable=value.requires_grad)


def gradient_free(layout: Layout) -> Layout:
    """The layout of a value that has no cotangent: replicated and invariant are the same."""
    replicated = [axis for axis, state in layout.states if state == "R"]
    return layout.moved(dict.fromkeys(replicated, "I")) if replicated else layout
