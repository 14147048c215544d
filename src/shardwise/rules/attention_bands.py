"""How far from a query the keys lie that it sees, where the graph says so.

Key k is seen by query q where least <= k - q <= most. What a mask says is worked out as in ``graph.attention_masks``,
but without the values of constants, of which rules know nothing. A mask that holds more conditions, such as padding,
hides more: its band is that of the conditions that are known.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import inf
from typing import Final

import torch

from shardwise.graph.ir import Arg, Graph, Op, Ref, Value
from shardwise.graph.positions import evaluate_known_values
from shardwise.graph.predicates import Abstract, Intervals, IntervalSelect

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Band:
    """The distances k - q at which query q may see key k, both ends included."""

    least: float = -inf
    most: float = inf

    def within(self, other: Band) -> Band:
        return Band(max(self.least, other.least), min(self.most, other.most))

    def meets(self, least: int, most: int) -> bool:
        """Return whether a distance of these may be seen."""
        return self.least <= most and least <= self.most

    def share(self, queries: int, keys: int) -> float:
        """Return the share of all query-key pairs that lie at such distances."""
        row = torch.arange(queries, dtype=torch.float64)
        first, last = ((row + end).clamp(0, keys) for end in (self.least, self.most + 1))
        return float((last - first).clamp(min=0).sum()) / (queries * keys)


_MOST_OPERATORS = 200  # models make masks of some thirty
EVERYTHING: Final = Band()
CAUSAL: Final = Band(most=0)

_AND = (aten.logical_and.default, aten.bitwise_and.Tensor, aten.__and__.Tensor)


def band_of(mask: str, graph: Graph) -> Band:
    """The band outside of which a boolean mask over (query, key) is False; all distances where nothing is known, or
    where it is made of very many operators."""
    value = graph.by_name[mask]
    if value.dtype != torch.bool or len(value.shape) < 2:
        return EVERYTHING
    visited = set[str]()
    producers: list[Op] = []

    def visit(name: str) -> None:
        op = graph.producer.get(name)
        if op is not None and op.name not in visited and len(visited) < _MOST_OPERATORS:
            visited.add(op.name)
            for operand in op.operands:
                visit(operand)
            producers.append(op)

    visit(mask)
    if len(visited) == _MOST_OPERATORS:
        return EVERYTHING
    names = dict.fromkeys(name for op in producers for name in (*op.operands, *op.results))
    return _band(mask, tuple(producers), tuple(graph.by_name[name] for name in names))


def band_between(first: Arg, end: Arg, graph: Graph) -> Band:
    """Return the band of queries that each see the keys from ``first`` up to ``end`` (names, or None): known of bounds
    that grow with the query."""
    least, behind = (
        op.args[0] if op is not None and op.target is aten.arange.start else limit
        for op, limit in ((_producer(first, graph), -inf), (_producer(end, graph), inf))
    )
    return Band(least, behind - 1)


def _producer(bound: Arg, graph: Graph) -> Op | None:
    return graph.producer.get(bound.name) if isinstance(bound, Ref) else None


@lru_cache(maxsize=256)
def _band(mask: str, ops: tuple[Op, ...], values: tuple[Value, ...]) -> Band:
    """Return the band of a mask that some operators make: layers that share one ask for it again and again."""
    graph = Graph(values, (), ops, ())
    return _within(mask, graph, evaluate_known_values(graph, {mask}, {}))


def _within(name: str, graph: Graph, known_values: Mapping[str, Abstract]) -> Band:
    value, op = known_values.get(name), graph.producer.get(name)
    if isinstance(value, IntervalSelect) and (value.query, value.key) == (-2, -1) and value.on.dtype == torch.bool:
        visible = value.seen if value.on.item() else value.seen.complement()
        return EVERYTHING if visible is None else _band_of(visible)
    if value is None and op is not None and op.target in _AND and graph.by_name[name].dtype == torch.bool:
        bands = [_within(arg.name, graph, known_values) for arg in op.args if isinstance(arg, Ref)]
        return bands[0].within(bands[-1])
    return EVERYTHING


def _band_of(seen: Intervals) -> Band:
    some = seen.sees_none.logical_not()
    if not some.any():
        return EVERYTHING
    rows = torch.arange(len(seen.lo))[some]
    return Band(int((seen.lo[some] - rows).min()), int((seen.hi[some] - 1 - rows).max()))
