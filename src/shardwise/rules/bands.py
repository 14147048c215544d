"""How far from a query the keys lie that it sees, where the graph says so.

``graph.masks`` writes windows and causal masks as comparisons of positions: key k is seen by query q where
least <= k - q <= most. A mask that holds more conditions, such as padding, hides more: its band is that of the
condition that is known.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Final

import torch

from shardwise.graph.ir import Graph, Op, Ref
from shardwise.graph.schema import arguments

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Band:
    """The distances k - q at which query q may see key k, both ends included."""

    least: float = -inf
    most: float = inf

    def within(self, other: Band) -> Band:
        return Band(max(self.least, other.least), min(self.most, other.most))

    def meets(self, least: int, most: int) -> bool:
        """Whether a distance of these may be seen."""
        return self.least <= most and least <= self.most


EVERYTHING: Final = Band()
CAUSAL: Final = Band(most=0)

_AND = (aten.logical_and.default, aten.bitwise_and.Tensor, aten.__and__.Tensor)


def band_of(mask: str, graph: Graph) -> Band:
    """The band outside of which a boolean mask over (query, key) is False; all distances where nothing is known."""
    op = _producer(Ref(mask), graph)
    if op is None or graph.by_name[mask].dtype != torch.bool:
        return EVERYTHING
    if op.target in _AND:
        bands = [band_of(arg.name, graph) for arg in op.args if isinstance(arg, Ref)]
        return bands[0].within(bands[-1])
    if op.target in (aten.lt.Tensor, aten.ge.Tensor):
        first = _first_row(op.args[1], graph)
        keys = _producer(op.args[0], graph)
        if first is not None and keys is not None and _counts(keys, aten.arange.default, graph):
            # k < q + first, or k >= q + first
            return Band(most=first - 1) if op.target is aten.lt.Tensor else Band(least=first)
    return EVERYTHING


def _first_row(arg: object, graph: Graph) -> int | None:
    """``first``, where a value is ``first + q`` in row q."""
    column = _producer(arg, graph)
    if column is None or column.target is not aten.unsqueeze.default or arguments(column)["dim"] != 1:
        return None
    rows = _producer(column.args[0], graph)
    if rows is None or not _counts(rows, aten.arange.start, graph):
        return None
    first = arguments(rows)["start"]
    return first if isinstance(first, int) else None


def _counts(op: Op, target: object, graph: Graph) -> bool:
    """Whether an operator counts in whole numbers that are large enough."""
    return op.target is target and graph.by_name[op.results[0]].dtype == torch.int64


def _producer(arg: object, graph: Graph) -> Op | None:
    return graph.producer.get(arg.name) if isinstance(arg, Ref) else None
