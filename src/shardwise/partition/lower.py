"""Lowering: an operator whose strategy splits a ``lowered`` factor becomes a small graph of operators that can be
split.

The rule names the program as an ordinary function over tensors. It is captured like a model, and its operators get
their strategies by following the layouts of the operands, so that a lowering is priced, printed and verified like
everything else.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from typing import Any

import torch

from shardwise.errors import LayoutError
from shardwise.graph.capture import capture_function
from shardwise.graph.ir import Arg, Graph, Op, Ref, Value, map_refs
from shardwise.layouts.layout import Atom, Layout
from shardwise.layouts.mesh import Mesh
from shardwise.layouts.strategy import Strategy, apply_strategy
from shardwise.rules.atoms import factor_graph
from shardwise.rules.rule import Lowering, OpRule, takes_runs
from shardwise.rules.tables import rule_of, whole_rule
from shardwise.search.propagate import Propagation, where_of


@dataclass(frozen=True, slots=True)
class PlacedOp:
    """An operator together with its rule and strategy."""

    op: Op
    rule: OpRule
    strategy: Strategy


@dataclass(frozen=True, slots=True)
class Slot:
    """A tensor operand in the arguments of a lowering: everything that capturing it depends on."""

    position: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool


def needs_lowering(rule: OpRule, strategy: Strategy) -> bool:
    return any(axes and rule.factor(factor).kind == "lowered" for factor, axes in strategy.factors)


def lower(placed: PlacedOp, graph: Graph, mesh: Mesh) -> tuple[list[PlacedOp], tuple[Value, ...]]:
    """The operators that replace one (itself, if none of its lowered factors is split), and the values that they add.

    Results keep the names of the original results; inner operators and values are named after the operator.
    """
    op, rule, strategy = placed.op, placed.rule, placed.strategy
    if not needs_lowering(rule, strategy):
        return [placed], ()
    assert rule.lowering is not None, f"{op.name}: the rule {rule} has a lowered factor and no lowering"
    operands = apply_strategy(rule, strategy, mesh).operands
    told = (("runs", _runs(operands[0])),) if takes_runs(rule.lowering) else ()
    fragment = _fragment(op, rule.lowering, told, graph)
    given = dict(zip(op.operands, operands, strict=True))
    rules = {inner.name: _rule_within(rule.lowering, inner, fragment) for inner in fragment.ops}
    factored = factor_graph(fragment, rules, {name: layout.atoms for name, layout in given.items()})
    sources = {name: where_of(_over(layout, factored.atoms[name])) for name, layout in given.items()}
    strategies = Propagation(fragment, factored.rules, mesh, sources=sources).run()
    found: list[PlacedOp] = []
    values = [value for value in fragment.values if value.name not in graph.by_name]
    for inner in fragment.ops:
        deeper, added = lower(PlacedOp(inner, factored.rules[inner.name], strategies[inner.name]), fragment, mesh)
        found.extend(deeper)
        values.extend(added)
    return found, tuple(values)


def _over(layout: Layout, atoms: tuple[tuple[int, ...], ...]) -> Layout:
    """The layout over the atoms into which the fragment divides the value, if it can be written so."""
    try:
        return layout.refine(atoms)
    except LayoutError:
        return layout


def _rule_within(lowering: Lowering, inner: Op, fragment: Graph) -> OpRule:
    """The rule of an operator of a lowering. Where the lowering uses the operator that it stands for, it means the
    operator itself: what would be lowered is whole there."""
    rule = rule_of(inner, fragment) or whole_rule(inner, fragment)
    if rule.lowering is not lowering:
        return rule
    return rule.with_kinds({factor.name: "whole" for factor in rule.factors if factor.kind == "lowered"})


def _runs(layout: Layout) -> tuple[int, ...]:
    """Per dim the length of the contiguous runs that every device holds; the whole dim where they are not equal."""

    def run(dim: tuple[Atom, ...]) -> int:
        length = 1
        for atom in reversed(dim):
            count = layout.mesh.size_of(atom.axes)
            if atom.size % count:
                break
            length *= atom.size // count
            if count > 1:
                return length
        return prod(atom.size for atom in dim)

    return tuple(map(run, layout.dims))


def _fragment(op: Op, lowering: Lowering, told: tuple[tuple[str, Arg], ...], graph: Graph) -> Graph:
    """The captured lowering with the operator's own value names at its ends. ``told``: what it is given besides."""
    order = tuple(dict.fromkeys(op.operands))

    def slot(name: str) -> Slot:
        value = graph.by_name[name]
        return Slot(order.index(name), value.shape, value.dtype, value.requires_grad)

    args = tuple(map_refs(arg, slot) for arg in op.args)
    kwargs = tuple((key, map_refs(arg, slot)) for key, arg in op.kwargs) + told
    captured = _capture_lowering(lowering, args, kwargs)
    names: dict[str, str] = {source.value: order[i] for i, source in enumerate(captured.sources)}
    produced = [output.name for output in captured.outputs]
    names.update(dict(zip(produced, op.results, strict=True)))
    for value in captured.values:
        names.setdefault(value.name, f"{op.name}.{value.name}")

    def rename(arg: Arg) -> Arg:
        return map_refs(arg, lambda name: Ref(names[name]))

    ops = tuple(
        Op(
            f"{op.name}.{inner.name.rpartition('/')[2]}",
            inner.target,
            tuple(rename(arg) for arg in inner.args),
            tuple((key, rename(arg)) for key, arg in inner.kwargs),
            tuple(names[name] for name in inner.results),
            op.source,
            op.scope,
        )
        for inner in captured.ops
    )
    values = tuple(replace(value, name=names[value.name]) for value in captured.values)
    sources = tuple(replace(source, value=names[source.value]) for source in captured.sources)
    outputs = tuple(Ref(name) for name in op.results)
    return Graph(values, sources, ops, outputs)


@lru_cache(maxsize=4096)
def _capture_lowering(lowering: Lowering, args: tuple[Any, ...], kwargs: tuple[tuple[str, Any], ...]) -> Graph:
    slots: dict[int, Slot] = {}

    def collect(arg: Any) -> None:
        if isinstance(arg, Slot):
            slots[arg.position] = arg
        elif isinstance(arg, tuple):
            for item in arg:
                collect(item)

    collect((args, tuple(value for _, value in kwargs)))
    examples = tuple(
        torch.empty(s.shape, dtype=s.dtype, device="meta", requires_grad=s.requires_grad)
        for _, s in sorted(slots.items())
    )

    def call(*tensors: torch.Tensor) -> Any:
        def fill(arg: Any) -> Any:
            if isinstance(arg, Slot):
                return tensors[arg.position]
            return [fill(item) for item in arg] if isinstance(arg, tuple) else arg

        return lowering(*[fill(arg) for arg in args], **{key: fill(value) for key, value in kwargs})

    return capture_function(call, examples)


def lower_all(
    graph: Graph, rules: Mapping[str, OpRule], strategies: Mapping[str, Strategy], mesh: Mesh
) -> tuple[tuple[PlacedOp, ...], Graph]:
    """Every operator with its rule and strategy, lowered where its strategy asks for it; and the graph of what
    results."""
    placed: list[PlacedOp] = []
    values = list(graph.values)
    for op in graph.ops:
        found, added = lower(PlacedOp(op, rules[op.name], strategies[op.name]), graph, mesh)
        placed.extend(found)
        values.extend(added)
    return tuple(placed), replace(graph, values=tuple(values), ops=tuple(item.op for item in placed))
