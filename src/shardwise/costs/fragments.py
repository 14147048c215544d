"""The price of a lowered strategy: that of the program which the strategy lowers its operator to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from shardwise.costs.pricing import conversion_seconds, priced_call
from shardwise.costs.routing import Router
from shardwise.costs.saved_for_backward import Saved, saved_for_backward
from shardwise.graph.ir import Graph, Op
from shardwise.layouts.layout import Layout
from shardwise.layouts.strategy import Strategy, apply_strategy
from shardwise.programs.lower import PlacedOp, lower
from shardwise.programs.spmd import Builder, Choice, gradient_free
from shardwise.programs.spmd_steps import OpStep
from shardwise.rules.rule import OpRule


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
    """Prices what strategies lower operators to ; each is asked for by an operator, its rule and the strategy."""

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
