"""Builds from strategies the single program of all ranks: operators in their layouts, and the conversions between them.

Two uses of a value in the same layout share one conversion, placed where it is first needed (so that in backward the
collectives interleave with the computation). Every tensor that the model returns is delivered invariant.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeGuard

import torch

from shardwise.errors import LayoutError
from shardwise.graph.ir import Arg, Graph, Ref, refs
from shardwise.layouts.conversions import Collective
from shardwise.layouts.layout import Layout
from shardwise.layouts.mesh import Mesh
from shardwise.layouts.strategy import Strategy, check_strategy
from shardwise.programs.buckets import BUCKET_BYTES, Bucket, fill_buckets
from shardwise.programs.builder import Builder, Choice
from shardwise.programs.comm_schedule import GradientReduceQueue, legs_ahead
from shardwise.programs.float8_gathers import Float8Gathers, weight_scales
from shardwise.programs.lower import PlacedOp, lower_all
from shardwise.programs.row_chunks import SMALLEST_SHARE, Ahead, in_chunks
from shardwise.programs.spmd_steps import Conversion, OpStep
from shardwise.rules.rule import OpRule


@dataclass(frozen=True)
class Lifetimes:
    """The memory policy of a program. All names are those of the lowered graph.

    Attributes:
        operators: Operators whose results backward recomputes.
        conversions: Results of conversions that backward repeats, such as gathers of parameters.
        offloaded: Operators whose kept results are offloaded to the host.
        once: Parameters that a step of several micro-batches casts and gathers once. It also reduces their gradients
            once (``programs.grad_accum_program``).
        prefetch: The depth of gathers of parameters (``programs.comm_schedule``).
    """

    operators: frozenset[str] = frozenset()
    conversions: frozenset[str] = frozenset()
    offloaded: frozenset[str] = frozenset()
    once: frozenset[str] = frozenset()
    prefetch: int = 1

    def __bool__(self) -> bool:
        """Return whether a rank's program must be rewritten. This ignores ``once`` and ``prefetch``.

        Recomputation and offloading change the instructions of a micro-batch (``programs.lifetimes``). ``once`` does
        not: ``programs.grad_accum_program`` moves whole conversions out of the micro-batch. So a policy that has only
        ``once`` is false. Test ``lifetimes.once`` itself to ask for it.
        """
        return bool(self.operators or self.conversions or self.offloaded)


@dataclass(frozen=True)
class SpmdProgram:
    """The program of all ranks. ``layouts``: every value (and every conversion's result) -> its layout. ``graph`` is
    the lowered graph.

    ``outputs``: per flattened output the name of a value that is whole on every rank (or in the layout in which it is
    delivered), or a constant; ``loss`` likewise; ``mutations``: (buffer value, name of the value in the buffer's
    layout). ``cotangents``: of a part of a cut graph, those outputs whose cotangents come from outside, in the dual
    layouts. ``lifetimes``: the memory policy. ``is_fused``: whether messages are joined with products
    (``programs.fused_products``).
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
    is_fused: bool = False

    @cached_property
    def conversions(self) -> tuple[Conversion, ...]:
        """Return all conversions in order; those that share messages are adjacent."""
        return tuple(conversion for step in self.steps for conversion in step.conversions)

    @cached_property
    def urgent_axes(self) -> frozenset[frozenset[str]]:
        """Return the sets of sub-axes along which mostly activations and their cotangents travel. Kernels wait for
        these at once, while parameters are gathered ahead of their use, and gradients reduced behind it. A set that has
        both has one communicator, whose messages run one after the other; the larger share decides. Sets with few
        bytes, such as counts of a loss, are not urgent."""
        balance: Counter[frozenset[str]] = Counter()
        for conversion in self.conversions:
            source = self.graph.source_of.get(conversion.origin)
            is_parameter = source is not None and source.kind == "parameter"
            if not is_parameter and conversion.op not in self.graph.op_by_name:
                continue  # no kernel waits for what the program only delivers
            for message in (*conversion.collectives(), *conversion.collectives(backward=True)):
                balance[frozenset(message.axes)] += -message.num_bytes if is_parameter else message.num_bytes
        least = max(balance.values(), default=0) // SMALLEST_SHARE
        return frozenset(axes for axes, num_bytes in balance.items() if num_bytes > least)

    @cached_property
    def fused_axes(self) -> frozenset[frozenset[str]]:
        """Return the sets of sub-axes along which messages of values may be joined with products."""
        parameters = {source.value for source in self.graph.sources if source.kind == "parameter"}
        values = (conversion for conversion in self.conversions if conversion.origin not in parameters)
        messages = (one for c in values for one in (*c.collectives(), *c.collectives(backward=True)))
        return frozenset(frozenset(m.axes) for m in messages if m.kind in ("all_gather", "reduce_scatter"))

    @cached_property
    def keyed_operators(self) -> frozenset[str]:
        """Return the operators on rows that follow keys, whose number is known in the step only."""
        return frozenset(
            step.placed.op.name
            for step in self.steps
            if isinstance(step, OpStep)
            if any(layout.keyed_axes for layout in (*step.operand_layouts, *step.result_layouts))
        )

    def is_once(self, step: OpStep | Conversion | Bucket) -> bool:
        """Return whether a step of several micro-batches runs these conversions once (``grad_accum_program``)."""
        once = self.lifetimes.once
        if isinstance(step, OpStep) or not once:
            return False
        return self.of_scales(step.results) or all(c.value in once for c in step.conversions)

    @cached_property
    def _weight_scales(self) -> frozenset[str]:
        return weight_scales(self.graph, _single(self.steps))

    def of_scales(self, results: Sequence[str]) -> bool:
        """Return whether these are scales of weights, which forward finds first (``programs.float8_gathers``)."""
        return bool(results) and self._weight_scales.issuperset(results)

    def place_of(self, conversions: Sequence[Conversion]) -> int:
        """Return the place of a bucket: the number of products before it (``programs.comm_schedule``)."""
        return self._places[conversions[0].result]

    @cached_property
    def _places(self) -> Mapping[str, int]:
        places: dict[str, int] = {}
        products, behind = 0, False  # behind: the last operator was a product
        for step in self.steps:
            if isinstance(step, OpStep):
                behind = step.placed.rule.is_product
                products += behind
                continue
            for conversion in step.conversions:
                op = self.graph.op_by_name.get(conversion.op)
                is_bias = behind and op is not None and op.target is torch.ops.aten.add.Tensor  # (fused_products)
                places[conversion.result] = products - is_bias
        return places

    def forward_collectives(self, *, in_passes: bool = False) -> tuple[Collective, ...]:
        """Return every collective of one forward pass, in order. A message of parameters starts before the previous one
        is waited for (``programs.comm_schedule``). ``in_passes``: of the first micro-batch of several, after those that
        run once before it."""
        leaving = [step for step in self.steps if _of_parameters(step) and step.collectives()]
        start, *slots = legs_ahead(
            [len(bucket.collectives()) for bucket in leaving],
            [self.place_of(bucket.conversions) for bucket in leaving],
            self.lifetimes.prefetch,
        )
        slot_of = dict(zip(map(id, leaving), slots, strict=True))
        ordered: list[tuple[Conversion | Bucket, Collective]]
        first = [step for step in self.steps if not isinstance(step, OpStep) and self.of_scales(step.results)]
        ordered = [(step, collective) for step in first for collective in step.collectives()]
        ordered += [(leaving[i], leaving[i].collectives()[leg]) for i, leg in start]
        for step in self.steps:
            if id(step) in slot_of:
                ordered += [(leaving[i], leaving[i].collectives()[leg]) for i, leg in slot_of[id(step)]]
            elif not isinstance(step, OpStep) and not self.of_scales(step.results):
                ordered += [(step, collective) for collective in step.collectives()]
        if in_passes:
            ordered.sort(key=lambda sent: self.is_once(sent[0]), reverse=True)
        return tuple(collective for _, collective in ordered)

    def backward_collectives(self, *, in_passes: bool = False) -> tuple[Collective, ...]:
        """Return every collective of one backward pass, in order: steps from last to first; of the conversions before
        an operator those of values first, then parameters; and only those through which a gradient of the loss flows.
        ``programs.comm_schedule`` places later messages of gradients. ``in_passes``: of one micro-batch of several,
        followed by those that run once after the last."""
        ordered: list[tuple[Conversion | Bucket, Collective]] = []
        returning: GradientReduceQueue[tuple[tuple[Conversion | Bucket, Collective], ...]] = GradientReduceQueue()
        for step in backward_order(self.steps):
            if isinstance(step, OpStep):
                largest = self.largest.get(step.placed.op.name)
                if largest is not None and not self._reached.isdisjoint(step.results):
                    ordered += [(largest, collective) for collective in largest.collectives()]
                continue
            if not any(map(self.receives_gradient, step.conversions)):
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

    @cached_property
    def largest(self) -> Mapping[str, Conversion]:
        """Map operators whose backward needs the largest cotangent of all ranks (``OpRule.largest``) to its conversion.
        Plans do not list it: it follows from the layout of the operator's result."""
        steps = (step for step in self.steps if isinstance(step, OpStep) and step.placed.rule.largest is not None)
        return {step.placed.op.name: step.largest(self.graph) for step in steps}

    def receives_gradient(self, conversion: Conversion) -> bool:
        """Return whether a cotangent of the loss reaches the conversion's result."""
        return conversion.differentiable and conversion.result in self._reached

    @cached_property
    def _reached(self) -> frozenset[str]:
        """Return the names that receive a cotangent from the loss or, in a part of a cut graph, from outside."""
        reached = set(self.cotangents) | ({self.loss} if self.loss is not None else set())
        grad = self.graph.by_name
        for step in reversed(self.steps):
            if not isinstance(step, OpStep):
                reached.update(c.value for c in step.conversions if c.result in reached and c.differentiable)
            elif any(result in reached and grad[result].requires_grad for result in step.results):
                named = zip(step.operands, step.placed.op.operands, strict=True)
                reached.update(name for name, original in named if grad[original].requires_grad)
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
    """Build the program of all ranks for a choice. ``rules``: the divided rules; ``bucket_bytes``: the largest message
    that several parameters share (0: none is shared); ``by_block``: only parameters of one repeated block of the model
    share messages. Raises LayoutError as ``place_ops`` does."""
    steps, lowered, choice = in_chunks(*place_ops(graph, rules, choice.strategies, mesh), choice, mesh)
    spmd = gather_in_float8(insert_conversions(steps, lowered, choice, mesh))
    return fill(spmd, bucket_bytes, by_block=by_block)


def place_ops(
    graph: Graph,
    rules: Mapping[str, OpRule],
    strategies: Mapping[str, Strategy],
    mesh: Mesh,
    original: Graph | None = None,
) -> tuple[tuple[PlacedOp, ...], Graph]:
    """Return what ``lower_all`` returns. Raises LayoutError naming the operator if a strategy does not fit its rule."""
    for op in graph.ops:
        try:
            check_strategy(rules[op.name], strategies[op.name], mesh)
        except LayoutError as error:
            raise LayoutError(str(error), op=op.name, source=op.source) from error
    return lower_all(graph, rules, strategies, mesh, original)


def insert_conversions(steps: Sequence[PlacedOp | Ahead], graph: Graph, choice: Choice, mesh: Mesh) -> SpmdProgram:
    """Return the program without buckets: the operators of a lowered graph, and every conversion by itself. ``steps``:
    the operators in order (``programs.row_chunks``)."""
    stored, delivered = {name: choice.sources[name] for name in graph.source_of}, choice.delivered
    builder = Builder(graph, mesh, replace(choice, sources=stored))
    for step in steps:
        if isinstance(step, Ahead):
            for item in step.operators:
                builder.convert_ahead(item)
        else:
            builder.add(step)

    def whole(value: str) -> str:
        return builder.convert(value, Layout.whole(mesh, graph.by_name[value].shape), "")

    delivered_as = {
        name: builder.convert(name, delivered[name], "") if name in delivered else whole(name)
        for name in refs(graph.outputs)
    }
    outputs = tuple(Ref(delivered_as[out.name]) if isinstance(out, Ref) else out for out in graph.outputs)
    cotangents = tuple(delivered_as[name] for name in graph.cotangents or ())
    loss = whole(graph.loss) if graph.loss is not None else None
    mutations = tuple((buffer, builder.convert(value, choice.sources[buffer], "")) for buffer, value in graph.mutations)
    graph = builder.keyed.extended(graph)
    steps_made, is_fused = tuple(builder.steps), choice.row_chunks == "fused"
    return SpmdProgram(
        mesh, graph, builder.layouts, steps_made, outputs, loss, mutations, cotangents, is_fused=is_fused
    )


def float8_gathers(spmd: SpmdProgram) -> Float8Gathers:
    """Return the gathers of a program that may be in float8."""
    ends = {*refs(spmd.outputs), *spmd.cotangents, *(value for _, value in spmd.mutations)}
    return Float8Gathers(spmd.graph, _single(spmd.steps), ends)


def gather_in_float8(
    spmd: SpmdProgram, predicate: Callable[[Conversion], bool] = lambda conversion: True
) -> SpmdProgram:
    """Return a program without buckets in which gathers of weights are in float8 where possible. ``predicate``: selects
    among them."""
    steps, layouts = float8_gathers(spmd).rounded(predicate)
    return replace(spmd, steps=steps, layouts={**spmd.layouts, **layouts})


def _single(steps: Sequence[OpStep | Conversion | Bucket]) -> list[OpStep | Conversion]:
    return [one for step in steps for one in ((step,) if isinstance(step, OpStep) else step.conversions)]


def fill(spmd: SpmdProgram, bucket_bytes: int, original: Graph | None = None, *, by_block: bool = False) -> SpmdProgram:
    """Put the conversions of a program into buckets (``programs.buckets``). ``original``: the graph whose source dtypes
    decide about sharing, if not the program's; ``by_block``: as in ``build_spmd``."""
    graph = spmd.graph
    values = graph.by_name | ({s.value: original.by_name[s.value] for s in original.sources} if original else {})
    parameters = frozenset(source.value for source in graph.sources if source.kind == "parameter")
    # The results of a training step: the loss (all outputs if there is none), values for other stages, and buffers.
    ends = {spmd.loss} if spmd.loss is not None else {*refs(spmd.outputs)}
    steps = fill_buckets(
        [step for step in spmd.steps if not isinstance(step, Bucket)],
        parameters,
        values.__getitem__,
        spmd.receives_gradient,
        bucket_bytes,
        ends={*ends, *spmd.cotangents, *(value for _, value in spmd.mutations)},
        by_block=by_block,
    )
    return replace(spmd, steps=steps)


def with_buckets(spmd: SpmdProgram, buckets: Sequence[Bucket]) -> SpmdProgram:
    """Put conversions of a program without buckets into the given buckets, each where its first member stood. Raises
    LayoutError if a value does not exist yet or is needed earlier, or if members communicate differently."""
    bucket_of = {conversion.result: bucket for bucket in buckets for conversion in bucket.conversions}
    parameters = {source.value for source in spmd.graph.sources if source.kind == "parameter"}
    available = {source.value for source in spmd.graph.sources}
    steps: list[OpStep | Conversion | Bucket] = []
    for step in spmd.steps:
        if isinstance(step, OpStep):
            available.update(step.results)
            steps.append(step)
            continue
        (conversion,) = step.conversions
        bucket = bucket_of.get(conversion.result)
        if bucket is not None:
            if conversion.result in available:  # already placed with the first member of its bucket
                continue
            _check_bucket(bucket, conversion, available, parameters)
        steps.append(bucket or conversion)
        available.update(steps[-1].results)
    return replace(spmd, steps=tuple(steps))


def _check_bucket(bucket: Bucket, first: Conversion, available: set[str], parameters: set[str]) -> None:
    """Raise LayoutError if the members of a bucket cannot share messages. ``first``: the member that is needed first;
    ``available``: the values that exist at its position."""
    kinds = {tuple((move.cell, move.axes) for move in c.moves) for c in bucket.conversions}
    late = [c.origin for c in bucket.conversions if c.value not in available]
    computed = [c.origin for c in bucket.conversions if bucket.of_parameters and c.value not in parameters]
    why = ""
    if bucket.conversions[0] is not first:
        why = f"{first.origin} is needed before {bucket.conversions[0].origin}"
    elif late:
        why = f"{late[0]} is not computed yet"
    elif computed:
        why = f"{computed[0]} is not a parameter, so its collective cannot start early"
    elif len(kinds) > 1:
        why = "they have different moves"
    if why:
        members = f"{bucket.conversions[0].origin} and {len(bucket.conversions) - 1} more"
        raise LayoutError(f"{members} cannot share messages: {why}")


def backward_order(steps: Sequence[OpStep | Conversion | Bucket]) -> list[OpStep | Conversion | Bucket]:
    """Return the steps in the order of backward: from last to first. Of the conversions before an operator those of
    values precede buckets of parameters, so that their message is in flight while gradients of the parameters are
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
