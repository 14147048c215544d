"""Atoms: the parts into which the graph divides its dims, found before any strategy is chosen.

``view(64, 2304) -> (64, 3, 12, 64)`` says that the 2,304 columns are a product of three parts, and whatever produces
them (a linear layer, its weight, its bias) can be split along the part that the consumer keeps apart. So the cut points
of every dim travel along the rules, forwards and backwards, until nothing changes; then each factor of each rule is
divided at its cut points. A cut that does not nest with those already known stays where it arose: the redistribution
between the two views is then a real one.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod

from shardwise.graph.ir import Graph
from shardwise.rules.rule import Dims, Factor, OpRule


@dataclass(frozen=True)
class Factored:
    """``rules``: op name -> its rule with the factors divided (``n`` -> ``n.0``, ``n.1``). ``atoms``: value -> per dim
    the sizes of its atoms, major first."""

    rules: Mapping[str, OpRule]
    atoms: Mapping[str, tuple[tuple[int, ...], ...]]


class _DivisorChain:
    """A set of strides in a dim of known size that form a divisor chain."""

    __slots__ = ("size", "strides")

    def __init__(self, size: int) -> None:
        self.size = size
        self.strides: set[int] = set()

    def add(self, stride: int) -> bool:
        """True when the stride is new and nests with the others."""
        if stride <= 1 or stride >= self.size or stride in self.strides or self.size % stride:
            return False
        if any(stride % other and other % stride for other in self.strides):
            return False
        self.strides.add(stride)
        return True

    def sizes(self) -> tuple[int, ...]:
        chain = [1, *sorted(self.strides), self.size]
        return tuple(large // small for small, large in itertools.pairwise(chain))[::-1]


def factor_graph(
    graph: Graph, rules: Mapping[str, OpRule], fixed_atoms: Mapping[str, tuple[tuple[int, ...], ...]] | None = None
) -> Factored:
    """Divide the factors of all rules at the fixed point of the graph's cut points. ``fixed_atoms``: those
    that some values have from outside."""
    value_cuts = {v.name: tuple(_DivisorChain(size) for size in v.shape) for v in graph.values}
    for name, sizes_of_dims in (fixed_atoms or {}).items():
        for cuts, sizes in zip(value_cuts[name], sizes_of_dims, strict=True):
            stride = 1
            for size in reversed(sizes):
                stride *= size
                cuts.add(stride)
    factor_cuts = {name: {f.name: _DivisorChain(f.size) for f in rule.factors} for name, rule in rules.items()}
    queue = deque(graph.ops)
    queued = {op.name for op in graph.ops}
    neighbours = {
        v.name: (() if v.name not in graph.producer else (graph.producer[v.name],)) + graph.consumers[v.name]
        for v in graph.values
    }
    while queue:
        op = queue.popleft()
        queued.discard(op.name)
        rule = rules[op.name]
        tensors = [*zip(op.operands, rule.operands, strict=True), *zip(op.results, rule.results, strict=True)]
        changed = True
        touched: set[str] = set()
        while changed:
            changed = False
            for name, dims in tensors:
                for cuts, factors in zip(value_cuts[name], dims, strict=True):
                    base = 1
                    for factor in reversed(factors):
                        cuts_of_factor = factor_cuts[op.name][factor]
                        if base > 1 and cuts.add(base):
                            touched.add(name)
                        for stride in tuple(cuts.strides):
                            if (
                                base < stride < base * cuts_of_factor.size
                                and stride % base == 0
                                and cuts_of_factor.add(stride // base)
                            ):
                                changed = True
                        for stride in tuple(cuts_of_factor.strides):
                            if cuts.add(stride * base):
                                touched.add(name)
                        base *= cuts_of_factor.size
        for name in touched:
            for neighbour in neighbours[name]:
                if neighbour.name not in queued:
                    queued.add(neighbour.name)
                    queue.append(neighbour)
    refined = {op.name: _divide(rules[op.name], factor_cuts[op.name]) for op in graph.ops}
    atoms = {name: tuple(c.sizes() if c.size != 1 else (1,) for c in cuts) for name, cuts in value_cuts.items()}
    return Factored(refined, atoms)


def _divide(rule: OpRule, cuts: Mapping[str, _DivisorChain]) -> OpRule:
    """Return the rule with every factor replaced by its parts. Of a factor that others are windows of, only the major
    part can be split: the rows of any other are not contiguous."""
    seen_through = {window.factor for _, window in rule.windows}
    parts: dict[str, tuple[Factor, ...]] = {}
    for factor in rule.factors:
        sizes = cuts[factor.name].sizes() if cuts[factor.name].strides else (factor.size,)
        if len(sizes) == 1:
            parts[factor.name] = (factor,)
        else:
            assert prod(sizes) == factor.size, f"cuts {sizes} do not make {factor}"
            parts[factor.name] = tuple(
                replace(
                    factor,
                    name=f"{factor.name}.{i}",
                    size=size,
                    kind="whole" if i and factor.name in seen_through else factor.kind,
                )
                for i, size in enumerate(sizes)
            )

    def divide(tensor: Dims) -> Dims:
        return tuple(tuple(part.name for factor in dim for part in parts[factor]) for dim in tensor)

    owned = rule.keyed.owned if rule.keyed is not None else None
    return replace(
        rule,
        keyed=rule.keyed if owned is None or len(parts[owned]) == 1 else None,
        factors=tuple(part for factor in rule.factors for part in parts[factor.name]),
        operands=tuple(map(divide, rule.operands)),
        results=tuple(map(divide, rule.results)),
    )
