"""Lowering: replaces an operator whose strategy splits a ``lowered`` factor by a small graph of operators that can be
split.

The rule gives the lowering as an ordinary function over tensors. It is captured like a model, and its operators get
their strategies by propagation from the layouts of the operands. So lowerings are priced, printed and verified like any
other operators.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import prod
from typing import Any

import torch

from shardwise.errors import LayoutError
from shardwise.graph.capture import capture_function
from shardwise.graph.ir import Graph, Op, Ref, Value, map_operands, map_refs
from shardwise.graph.precision import for_float64
from shardwise.graph.to_float64 import to_float64
from shardwise.layouts.choice import where_of
from shardwise.layouts.layout import Atom, Layout
from shardwise.layouts.mesh import Mesh
from shardwise.layouts.strategy import Strategy, apply_strategy
from shardwise.programs.propagate import Propagation
from shardwise.rules.atoms import Factored, factor_graph
from shardwise.rules.rule import Lowering, OpRule, takes_runs
from shardwise.rules.tables import CUSTOM, rule_of, whole_rule

_INSIDE = "./"  # separates an operator's name from that of an operator of its lowering


@dataclass(frozen=True, slots=True)
class PlacedOp:
    """An operator together with its rule and strategy."""

    op: Op
    rule: OpRule
    strategy: Strategy


@dataclass(frozen=True, slots=True)
class TensorArgument:
    """A tensor operand in the arguments of a lowering, with all properties that capturing depends on."""

    position: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool


@dataclass(frozen=True, slots=True)
class NumberArgument:
    """A number in the arguments of a lowering, compared by its text: 1, 1.0 and True are equal in Python, but give
    results of different dtypes."""

    text: str
    value: complex = field(compare=False)


def lower(
    placed: PlacedOp, graph: Graph, mesh: Mesh, original: Graph | None = None
) -> tuple[list[PlacedOp], tuple[Value, ...]]:
    """Return the operators that replace one (itself, if none of its lowered factors is split), and the added values.

    Results keep the names of the original results; inner operators and values are named after the operator.
    ``original``: the graph in its own dtypes, if ``graph`` computes in float64. What replaces an operator may depend on
    dtypes (16-bit types are accumulated in float32 and cast back), so it is captured in those.
    """
    op, rule, strategy = placed.op, placed.rule, placed.strategy
    if not any(axes and rule.factor(factor).kind == "lowered" for factor, axes in strategy.factors):
        return [placed], ()
    assert rule.lowering is not None, f"{op.name}: the rule {rule} has a lowered factor and no lowering"
    layouts = dict(zip(op.operands, apply_strategy(rule, strategy, mesh).operands, strict=True))
    order = tuple(layouts)

    def slot(name: str) -> TensorArgument:
        value = (original or graph).by_name[name]
        return TensorArgument(order.index(name), value.shape, value.dtype, value.requires_grad)

    args, kwargs = (_immutable(map_refs(part, slot)) for part in (op.args, op.kwargs))
    if takes_runs(rule.lowering):
        kwargs += (("runs", _runs(layouts[op.operands[0]])),)
    version = CUSTOM.version, original is not None
    lowered = _lowered(rule.lowering, args, kwargs, tuple(layouts.values()), mesh, version)
    names = dict(zip(lowered.sources, order, strict=True)) | dict(zip(lowered.outputs, op.results, strict=True))

    def named(name: str) -> str:
        return names.get(name) or f"{op.name}.{name}"

    def renamed(item: PlacedOp) -> PlacedOp:
        inner = map_operands(item.op, lambda name: Ref(named(name)))
        name, results = f"{op.name}.{inner.name}", tuple(map(named, inner.results))
        return replace(item, op=replace(inner, name=name, results=results, source=op.source, scope=op.scope))

    return list(map(renamed, lowered.items)), tuple(replace(value, name=named(value.name)) for value in lowered.values)


def _immutable(arg: Any) -> Any:
    """Return the argument with every number wrapped in a ``NumberArgument``."""
    if isinstance(arg, tuple):
        return tuple(map(_immutable, arg))
    return NumberArgument(repr(arg), arg) if isinstance(arg, (int, float, complex)) else arg


@dataclass(frozen=True, slots=True)
class _Lowered:
    """A lowering under its own names: operands, results, operators and intermediate values."""

    sources: tuple[str, ...]
    outputs: tuple[str, ...]
    items: tuple[PlacedOp, ...]
    values: tuple[Value, ...]


@lru_cache(maxsize=4096)
def _lowered(
    lowering: Lowering,
    args: tuple[Any, ...],
    kwargs: tuple[tuple[str, Any], ...],
    layouts: tuple[Layout, ...],
    mesh: Mesh,
    version: tuple[int, bool],
) -> _Lowered:
    """Return the lowering for operands in some layouts, cached so that equal layers share it. ``version``: of the
    user's rules, part of the cache key; and whether it computes in float64, whatever the dtypes of its operands are."""
    narrow, fragment, factored = _divided(lowering, args, kwargs, tuple(layout.atoms for layout in layouts), version)
    named = dict(zip((source.value for source in fragment.sources), layouts, strict=True))
    sources = {name: where_of(_over(layout, factored.atoms[name])) for name, layout in named.items()}
    strategies = Propagation(fragment, factored.rules, mesh, sources=sources).run()
    outputs = tuple(output.name for output in fragment.outputs)
    items: list[PlacedOp] = []
    values = [value for value in fragment.values if value.name not in named and value.name not in outputs]
    for inner in fragment.ops:
        placed = PlacedOp(inner, factored.rules[inner.name], strategies[inner.name])
        deeper, added = lower(placed, fragment, mesh, narrow)
        items.extend(deeper)
        values.extend(added)
    return _Lowered(tuple(named), outputs, tuple(items), tuple(values))


@lru_cache(maxsize=4096)
def _divided(
    lowering: Lowering,
    args: tuple[Any, ...],
    kwargs: tuple[tuple[str, Any], ...],
    atoms: tuple[tuple[tuple[int, ...], ...], ...],
    version: tuple[int, bool],
) -> tuple[Graph | None, Graph, Factored]:
    """Return the captured lowering in its own dtypes, if it is to compute in float64; the one that computes; and its
    rules, with factors divided at the atoms of the operands."""
    narrow, fragment = None, _capture_lowering(lowering, args, kwargs, version[1])
    if version[1]:
        narrow, fragment = fragment, to_float64(fragment)
    rules = {inner.name: rule_within(lowering, inner, fragment) for inner in fragment.ops}
    names = (source.value for source in fragment.sources)
    return narrow, fragment, factor_graph(fragment, rules, dict(zip(names, atoms, strict=True)))


def _over(layout: Layout, atoms: tuple[tuple[int, ...], ...]) -> Layout:
    """Return the layout refined to the atoms that the fragment gives the value, or unchanged if that is impossible."""
    try:
        return layout.refine(atoms)
    except LayoutError:
        return layout


def rule_within(lowering: Lowering | None, op: Op, graph: Graph) -> OpRule:
    """Return the rule of an operator of a lowering (None: of the model). If the lowering calls the operator that it
    replaces, its lowered factors are whole there, so that it is not lowered again."""
    rule = rule_of(op, graph) or whole_rule(op, graph)
    if lowering is None or rule.lowering is not lowering:
        return rule
    return rule.with_kinds({factor.name: "whole" for factor in rule.factors if factor.kind == "lowered"})


def _runs(layout: Layout) -> tuple[int, ...]:
    """Return per dim the length of the contiguous runs that every device holds; the whole dim if they are not equal."""

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


@lru_cache(maxsize=4096)
def _capture_lowering(
    lowering: Lowering, args: tuple[Any, ...], kwargs: tuple[tuple[str, Any], ...], wide: bool
) -> Graph:
    """Capture the lowering for operands of some shapes as a graph whose sources are the operands."""
    slots: dict[int, TensorArgument] = {}

    def collect(arg: Any) -> None:
        if isinstance(arg, TensorArgument):
            slots[arg.position] = arg
        elif isinstance(arg, tuple):
            for item in arg:
                collect(item)

    collect((args, kwargs))
    examples = tuple(
        torch.empty(s.shape, dtype=s.dtype, device="meta", requires_grad=s.requires_grad)
        for _, s in sorted(slots.items())
    )

    def call(*tensors: torch.Tensor) -> Any:
        def fill(arg: Any) -> Any:
            if isinstance(arg, TensorArgument):
                return tensors[arg.position]
            if isinstance(arg, NumberArgument):
                return arg.value
            return [fill(item) for item in arg] if isinstance(arg, tuple) else arg

        return lowering(*[fill(arg) for arg in args], **{key: fill(value) for key, value in kwargs})

    with for_float64(wide):
        graph = capture_function(call, examples)
    return replace(graph, ops=tuple(replace(op, name=op.name.rpartition("/")[2]) for op in graph.ops))


def lower_all(
    graph: Graph,
    rules: Mapping[str, OpRule],
    strategies: Mapping[str, Strategy],
    mesh: Mesh,
    original: Graph | None = None,
) -> tuple[tuple[PlacedOp, ...], Graph]:
    """Return every operator with its rule and strategy, lowered if its strategy splits a lowered factor, and the
    resulting graph. ``original``: as for ``lower``."""
    placed: list[PlacedOp] = []
    values = list(graph.values)
    for op in graph.ops:
        placed_ops, added = lower(PlacedOp(op, rules[op.name], strategies[op.name]), graph, mesh, original)
        placed.extend(placed_ops)
        values.extend(added)
    return tuple(placed), replace(graph, values=tuple(values), ops=tuple(item.op for item in placed))


def lowered_operators(names: Collection[str], graph: Graph, lowered: Graph) -> frozenset[str]:
    """Return the operators of the lowered graph that replace the given operators of the model."""
    return frozenset(op for name, ops in lowered_by_model(graph, lowered).items() if name in names for op in ops)


def lowered_by_model(graph: Graph, lowered: Graph) -> dict[str, list[str]]:
    """Map each operator of the model to the operators of the lowered graph that replace it."""
    operators: dict[str, list[str]] = {}
    for op in lowered.ops:
        operators.setdefault(_of_model(op.name, graph), []).append(op.name)
    return operators


def model_operators(names: Iterable[str], graph: Graph) -> frozenset[str]:
    """Return the operators of the model from which the given operators of the lowered graph come."""
    return frozenset(_of_model(name, graph) for name in names)


def _of_model(name: str, graph: Graph) -> str:
    return name if name in graph.op_by_name else name.partition(_INSIDE)[0]
