"""The price of a program: of its operators on their local shapes, and of the collectives of its conversions.

The search prices strategies one by one; this prices what was emitted. For a lowered strategy the two meet: its price is
that of the program that it is lowered to.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass, field, replace
from math import prod

import numpy as np

from shardwise.costs.prices import LocalShapes, Prices
from shardwise.costs.saved import Saved, saved_by
from shardwise.graph.ir import Graph, Op, Value
from shardwise.layouts.conversions import Collective
from shardwise.layouts.layout import Layout
from shardwise.layouts.strategy import Strategy, apply_strategy
from shardwise.partition.lower import PlacedOp, lower
from shardwise.partition.spmd import Builder, Spmd, conversions_of, gradient_free
from shardwise.partition.steps import Conversion, Step
from shardwise.rules.rule import OpRule
from shardwise.search.domains import Fragment
from shardwise.search.routing import Router


def largest_shape(layout: Layout) -> tuple[int, ...]:
    """The local shape on the device that holds most."""
    return tuple(prod(-(-atom.size // layout.mesh.size_of(atom.axes)) for atom in dim) for dim in layout.dims)


def priced_call(step: Step, graph: Graph) -> tuple[Op, list[Value], list[Value], LocalShapes]:
    """An operator of a program as ``Prices`` takes it, on the device that holds most."""
    op = step.placed.op
    operands, results = [graph.by_name[name] for name in op.operands], [graph.by_name[name] for name in op.results]
    shapes = tuple(map(largest_shape, step.operand_layouts)), tuple(map(largest_shape, step.result_layouts))
    return op, operands, results, shapes


def collective_seconds(collectives: Sequence[Collective], prices: Prices) -> float:
    """Seconds of collectives one after the other."""
    return float(sum(prices.collective(c.kind, c.axes, np.array([float(c.num_bytes)]))[0] for c in collectives))


def conversion_seconds(conversion: Conversion, value: Value, prices: Prices, *, is_parameter: bool = False) -> float:
    """Seconds of a conversion by itself, forward and backward."""
    forward = replace(conversion, itemsize=prices.dtype(value).itemsize)
    backward = replace(conversion, itemsize=prices.grad_itemsize(value, is_parameter))
    return collective_seconds(forward.collectives(), prices) + collective_seconds(
        backward.collectives(backward=True), prices
    )


@dataclass
class Fragments:
    """Prices what strategies lower operators to (``search.domains.PriceFragment``)."""

    graph: Graph
    router: Router
    _saved: dict[str, Saved] = field(default_factory=dict)  # by the name of the operator inside

    def __call__(self, op: Op, rule: OpRule, strategy: Strategy) -> Fragment:
        mesh, prices = self.router.axes.mesh, self.router.prices
        items, added = lower(PlacedOp(op, rule, strategy), self.graph, mesh)
        named = dict.fromkeys((*op.operands, *op.results))
        values = (*(self.graph.by_name[name] for name in named), *added)
        small = Graph(values, (), tuple(item.op for item in items), ())
        layouts = self._taken(op, rule, strategy, items)
        builder = Builder(small, mesh, dict(layouts), self.router)
        for item in items:
            builder.add(item)
        # Operands that an operator inside keeps; those that the whole operator keeps are counted where they come from.
        whole = saved_by(op, [self.graph.by_name[name] for name in op.operands])
        outside = {op.operands[i] for i in whole.operands}
        compute = exposed = kept = 0.0
        for step in builder.steps:
            if isinstance(step, Step):
                compute += prices.operator(*priced_call(step, small))
                kept += self._kept_bytes(step, small) + self._kept_operands(op, step, small, outside)
            else:
                exposed += conversion_seconds(step, small.by_name[step.origin], prices)
        return Fragment(
            tuple(layouts[name] for name in op.operands),
            tuple(builder.layouts[name] for name in op.results),
            compute,
            exposed,
            kept,
        )

    def _taken(self, op: Op, rule: OpRule, strategy: Strategy, items: Sequence[PlacedOp]) -> dict[str, Layout]:
        """Operand -> the layout in which a lowering takes it: the one in which it is used inside, or the strategy's
        where it is used in several, or through windows."""
        mesh = self.router.axes.mesh
        used: dict[str, set[Layout]] = {}
        for item in items:
            applied = apply_strategy(item.rule, item.strategy, mesh).operands
            for name, layout in zip(item.op.operands, applied, strict=True):
                used.setdefault(name, set()).add(layout.canonical())
        found = {}
        for name, layout in zip(op.operands, apply_strategy(rule, strategy, mesh).operands, strict=True):
            inside = used.get(name, set())
            only = next(iter(inside)) if len(inside) == 1 else layout
            only = layout.without_windows if only.windows else only
            found[name] = only if self.graph.by_name[name].requires_grad else gradient_free(only)
        return found

    def _kept_operands(self, op: Op, step: Step, graph: Graph, counted: set[str]) -> float:
        """Bytes of the operands of ``op`` that one operator inside its lowering keeps. Those in ``counted`` are counted
        already; what this counts is added to them."""
        inner = step.placed.op
        values = [graph.by_name[name] for name in inner.operands]
        saved = saved_by(inner, values)
        total = 0.0
        for i in saved.operands:
            name = inner.operands[i]
            if name in op.operands and name not in counted:
                counted.add(name)
                total += step.operand_layouts[i].max_local_numel * self.router.prices.dtype(values[i]).itemsize
        return total

    def _kept_bytes(self, step: Step, graph: Graph) -> float:
        """Bytes that one operator inside a lowering keeps for backward, values of the lowering included."""
        op, dtype = step.placed.op, self.router.prices.dtype
        values = [graph.by_name[name] for name in op.operands]
        outputs = [graph.by_name[name] for name in op.results]
        saved = self._saved.get(op.name)
        if saved is None:
            saved = self._saved[op.name] = saved_by(op, values)
        total = 0.0
        for i in saved.operands:
            if op.operands[i] not in self.graph.by_name:
                total += step.operand_layouts[i].max_local_numel * dtype(values[i]).itemsize
        for i in saved.results:
            total += step.result_layouts[i].max_local_numel * dtype(outputs[i]).itemsize
        whole = sum(value.numel for value in outputs)
        part = sum(layout.max_local_numel for layout in step.result_layouts)
        return total + saved.other_bytes * part / max(whole, 1)


@dataclass(frozen=True, slots=True)
class ProgramPrice:
    """Seconds of one training step, component by component, without overlap: collectives that operators wait for,
    operators, the part of collectives of parameters that overlaps with operators, and the optimizer's update."""

    exposed: float
    compute: float
    traffic: float
    update: float


def price_program(spmd: Spmd, prices: Prices, free: Container[str] = ()) -> ProgramPrice:
    """The price of an emitted program. ``free``: operators that depend on no parameter, which every plan makes where
    they are needed. Outputs other than the loss are not priced: a training step does not deliver them."""
    graph = spmd.graph
    parameters = frozenset(s.value for s in graph.sources if s.kind == "parameter")
    written = {value for _, value in graph.mutations}
    exposed = compute = traffic = update = 0.0
    for step in spmd.steps:
        if isinstance(step, Step):
            if step.placed.op.name not in free:
                compute += prices.operator(*priced_call(step, graph))
            continue
        for conversion in conversions_of(step):
            origin = conversion.origin
            if not conversion.op and origin != graph.loss and origin not in written:
                continue
            is_parameter = origin in parameters
            seconds = conversion_seconds(conversion, graph.by_name[origin], prices, is_parameter=is_parameter)
            hidden = prices.device.overlap if is_parameter else 0.0
            traffic += hidden * seconds
            exposed += (1 - hidden) * seconds
    for source in graph.sources:
        if source.value in graph.updated:
            update += prices.update(graph.by_name[source.value], spmd.layouts[source.value].max_local_numel)
    return ProgramPrice(exposed, compute, traffic, update)
