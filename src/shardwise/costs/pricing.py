"""The price of a program: of its operators on their local shapes, and of the collectives of its conversions.

The search prices strategies one by one; this prices what was emitted. A lowered strategy has the price of the program
that it lowers its operator to (``Fragments``). ``Router`` chooses moves between layouts by price.

A parameter is gathered before its first use, and its gradient is reduced after the last kernel of backward that adds to
it, which is that of the same use. So of its messages no more is hidden than what is computed before that use in forward
and after it in backward (``overlap_windows``): nothing, for the first operator of a model; and little, for a wide head
on a narrow body.
"""

from __future__ import annotations

from collections.abc import Container, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

import numpy as np

from shardwise.costs.prices import LocalShapes, Prices
from shardwise.costs.saved_for_backward import Saved, numbered_call, saved_for_backward
from shardwise.graph.ir import Graph, Op, Value
from shardwise.layouts.conversions import Collective, Move
from shardwise.layouts.layout import PARTIAL_KINDS, Layout, common_atoms
from shardwise.layouts.redistribute import redistribute, through_windows
from shardwise.layouts.routes import Axes, Routes, RouteTensor
from shardwise.layouts.strategy import Strategy, apply_strategy
from shardwise.programs.builder import Builder, Choice, gradient_free
from shardwise.programs.lower import PlacedOp, lower
from shardwise.programs.spmd import SpmdProgram
from shardwise.programs.spmd_steps import Conversion, OpStep
from shardwise.rules.arguments import operand_positions, replace_arguments
from shardwise.rules.attention_kernels import RING_GRADIENTS, RING_STEP, busiest_block
from shardwise.rules.rule import LocalContext, OpRule, Piece, base_name


def largest_shape(layout: Layout) -> tuple[int, ...]:
    """Return the local shape on the device that holds most."""
    return layout.without_windows.max_local_shape


def priced_call(step: OpStep, graph: Graph) -> tuple[Op, list[Value], list[Value], LocalShapes]:
    """Return an operator of a program as ``Prices`` takes it, on the device that holds most."""
    op = step.placed.op
    operands, results = [graph.by_name[name] for name in op.operands], [graph.by_name[name] for name in op.results]
    shapes = tuple(map(largest_shape, step.operand_layouts)), tuple(map(largest_shape, step.result_layouts))
    if any(layout.keyed_axes for layout in step.operand_layouts):
        op = owners_call(op, step.placed.rule, shapes)
    if op.target in (RING_STEP, RING_GRADIENTS):  # all devices wait for the busiest one
        whole = {name: operands[i].shape for name, (i, *_) in operand_positions(op).items()}
        call = replace_arguments(op, blocks=(busiest_block(op, whole)[0],) * whole["q"][-3])
        op = replace(op, args=call.args, kwargs=call.kwargs)
    return op, operands, results, shapes


def owners_call(op: Op, rule: OpRule, shapes: LocalShapes) -> Op:
    """Return the operator as an owner of keys calls it: none of its rows is of other owners' keys."""
    owned = rule.keyed.owned if rule.keyed is not None else None
    if owned is None or rule.localize is None:
        return op
    sizes = zip(chain(*rule.operands), chain(*shapes[0]), strict=True)
    length = next(size for dim, size in sizes if dim == (owned,))
    context = LocalContext(tuple(shapes[0]), tuple(shapes[1]), {base_name(owned): (Piece(length, 0, length),)})
    call = rule.localize(op, context)
    return replace(op, args=call.args, kwargs=call.kwargs)


def collective_seconds(collectives: Sequence[Collective], prices: Prices) -> float:
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


@dataclass(frozen=True, slots=True)
class Fragment:
    """What a lowered strategy is made of: the layouts in which it takes its operands and has its results; seconds of
    its operators and, apart, of its collectives, forward and backward; and the bytes that its inside keeps for
    backward."""

    operands: tuple[Layout, ...]
    results: tuple[Layout, ...]
    compute: float
    exposed: float
    kept_bytes: float


@dataclass
class Fragments:
    """Prices the program that a strategy lowers an operator to."""

    graph: Graph
    router: Router
    _saved: dict[str, Saved] = field(default_factory=dict)  # by the name of the operator inside

    def __call__(self, op: Op, rule: OpRule, strategy: Strategy) -> Fragment:
        mesh, prices = self.router.axes.mesh, self.router.prices
        items, added = lower(PlacedOp(op, rule, strategy), self.graph, mesh)
        named = dict.fromkeys((*op.operands, *op.results))
        values = (*(self.graph.by_name[name] for name in named), *added)
        small = Graph(values, (), tuple(item.op for item in items), ())
        layouts = self._inputs(op, rule, strategy, items)
        builder = Builder(small, mesh, Choice({}, layouts, route=self.router))
        for item in items:
            builder.add(item)
        # Operands that an operator inside keeps; those that the whole operator keeps are counted where they come from.
        whole = saved_for_backward(op, [self.graph.by_name[name] for name in op.operands])
        outside = {op.operands[i] for i in whole.operands}
        compute = exposed = kept = 0.0
        for step in builder.steps:
            if isinstance(step, OpStep):
                compute += prices.operator(*priced_call(step, small))
                kept += self._kept_bytes(op, step, small, outside)
            else:
                exposed += conversion_seconds(step, prices)
        return Fragment(
            tuple(layouts[name] for name in op.operands),
            tuple(builder.layouts[name] for name in op.results),
            compute,
            exposed,
            kept,
        )

    def _inputs(self, op: Op, rule: OpRule, strategy: Strategy, items: Sequence[PlacedOp]) -> dict[str, Layout]:
        """Operand -> the layout in which a lowering takes it: the one in which it is used inside, or the strategy's
        where it is used in several, or through windows."""
        mesh = self.router.axes.mesh
        used: dict[str, set[Layout]] = {}
        for item in items:
            applied = apply_strategy(item.rule, item.strategy, mesh).operands
            for name, layout in zip(item.op.operands, applied, strict=True):
                used.setdefault(name, set()).add(layout.canonical())
        taken = {}
        for name, layout in zip(op.operands, apply_strategy(rule, strategy, mesh).operands, strict=True):
            inside = used.get(name, set())
            only = next(iter(inside)) if len(inside) == 1 else layout
            only = layout.without_windows if only.windows else only
            taken[name] = only if self.graph.by_name[name].requires_grad else gradient_free(only)
        return taken

    def _kept_bytes(self, op: Op, step: OpStep, graph: Graph, counted: set[str]) -> float:
        """Return the bytes that one operator inside the lowering of ``op`` keeps for backward: of its results, of
        values of the lowering, and of operands of ``op``. Of these, those in ``counted`` are counted already; what this
        counts is added to them."""
        inner = step.placed.op
        values, outputs = ([graph.by_name[name] for name in names] for names in (inner.operands, inner.results))
        saved = self._saved.get(inner.name)
        if saved is None:
            saved = self._saved[inner.name] = saved_for_backward(inner, values)
        total = 0.0
        for i in saved.operands:
            name = inner.operands[i]
            if name not in self.graph.by_name or (name in op.operands and name not in counted):
                counted.update({name} & {*op.operands})
                total += step.operand_layouts[i].max_local_numel * values[i].dtype.itemsize
        for i in saved.results:
            total += step.result_layouts[i].max_local_numel * outputs[i].dtype.itemsize
        whole = sum(value.numel for value in outputs)
        part = sum(layout.max_local_numel for layout in step.result_layouts)
        return total + saved.other_bytes * part / max(whole, 1)


Atoms = tuple[tuple[int, ...], ...]


class Router:
    """Moves between layouts: the cheapest in seconds on a described cluster.

    ``atoms``: of the values that the search knows, ``parameters``: those among them that are parameters. What has no
    node among ``Routes`` (parts of an axis that are treated differently, dims whose atoms do not nest) takes the path
    that ``redistribute`` finds, by the same seconds. ``known``: the routes so far of routers with the same axes, links
    and buckets.
    """

    def __init__(
        self,
        axes: Axes,
        prices: Prices,
        atoms: Mapping[str, Atoms] | None = None,
        parameters: frozenset[str] = frozenset(),
        known: dict[tuple[RouteTensor, bool], Routes] | None = None,
    ) -> None:
        self.axes, self.prices, self.atoms, self.parameters = axes, prices, atoms or {}, parameters
        self.known = {} if known is None else known

    def routes(
        self, value: Value, atoms: Atoms, *, is_parameter: bool = False, keyed: str = "", partial: str = "P"
    ) -> Routes:
        """Return the layouts of a kind of value and the routes between them. ``keyed``, ``partial``: as in
        ``RouteTensor``."""
        tensor = RouteTensor(atoms, value.dtype.itemsize, value.requires_grad, value.grad_itemsize, keyed, partial)
        routes = self.known.get((tensor, is_parameter))
        if routes is None:
            seconds = self.prices.parameter_collective if is_parameter else self.prices.collective
            routes = self.known[tensor, is_parameter] = Routes(self.axes, tensor, seconds)
        return routes

    def __call__(self, value: Value, source: Layout, target: Layout) -> tuple[Move, ...]:
        """Return the moves that turn ``source`` into ``target``."""
        if source.windows or target.windows:
            return through_windows(source, target, value.requires_grad, lambda *ends: self(value, *ends))
        if source.canonical() == target.canonical():
            return ()
        atoms = self.atoms.get(value.name) or _common(source, target)
        if atoms is not None:
            partial = next((state for _, state in source.states if state in PARTIAL_KINDS), "P")
            routes = self.routes(value, atoms, is_parameter=value.name in self.parameters, partial=partial)
            ends = routes.node_of(source), routes.node_of(target)
            if ends[0] is not None and ends[1] is not None:
                return routes.moves(ends[0], ends[1])
        seconds = self.prices.links.price(value.dtype.itemsize)
        return redistribute(source, target, differentiable=value.requires_grad, price=seconds)


def _common(source: Layout, target: Layout) -> Atoms | None:
    atoms = []
    for source_atoms, target_atoms in zip(source.canonical().atoms, target.canonical().atoms, strict=True):
        common = common_atoms(source_atoms, target_atoms)
        if common is None:
            return None
        atoms.append(common)
    return tuple(atoms)
