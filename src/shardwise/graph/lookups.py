"""Rewrite of lookups that read every row of a dim at that row's position: they are element-wise in that dim.

Models pair an index that counts the rows of a dim with one that chooses among the elements of each row:
``mask[arange(batch)[:, None], positions]``, ``hidden[arange(batch), lengths - 1]``, ``scores[arange(batch), labels]``.
For ``aten.index`` both are lookups, whose rows can be split only as a sum, and never over micro-batches. If an index is
known to count the rows (``graph.positions``), the dim becomes a batch dim:

    all indices count rows   a view of the operand
    others do not            ``gather``, over the dims of these as one
    index_put                ``scatter`` and ``scatter_add``, in the same way

Indices may be negative, as in ``aten.index``; one out of range raises torch's error, as before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

import torch
from torch import Tensor

from shardwise.graph.emitter import Emitter, rewrite_graph
from shardwise.graph.ir import Arg, Graph, Op, Ref
from shardwise.graph.positions import evaluate_known_values
from shardwise.graph.predicates import Abstract, KnownTensor
from shardwise.graph.schema import arguments

aten = torch.ops.aten
_LOOKUPS = (aten.index.Tensor, aten.index_put.default)


def align_lookups(graph: Graph, constants: Mapping[str, Tensor]) -> Graph:
    """Rewrite the graph's lookups as above. ``constants``: the data of its sources of kind "constant"."""
    wanted = {
        index.name
        for op in graph.ops
        if op.target in _LOOKUPS
        for index in arguments(op)["indices"]
        if index is not None
    }
    if not wanted:
        return graph
    rewriting = _LookupRewriting(evaluate_known_values(graph, wanted, constants))
    return rewrite_graph(graph, {aten.index.Tensor: rewriting.index, aten.index_put.default: rewriting.index_put})


@dataclass(frozen=True)
class _LookupRewriting:
    """Rewrites lookups (``emitter.Rewrite``) by what is known of their indices."""

    known: Mapping[str, Abstract]

    def index(self, op: Op, emitter: Emitter) -> tuple[Arg, ...] | None:
        lookup = self._lookup(op, emitter)
        return None if lookup is None else (lookup.read(),)

    def index_put(self, op: Op, emitter: Emitter) -> tuple[Arg, ...] | None:
        lookup, args = self._lookup(op, emitter), arguments(op)
        written = None if lookup is None else lookup.write(args["values"], args["accumulate"])
        return None if written is None else (written,)

    def _lookup(self, op: Op, emitter: Emitter) -> _Lookup | None:
        """Return the lookup if one of its indices counts the rows of its dim along one dim of the result only."""
        indices, before = (arguments(call)["indices"] for call in (op, emitter.origin))
        operand = arguments(op)["self"]
        shape = emitter.value(operand).shape
        refs = {dim: ref for dim, ref in enumerate(indices) if ref is not None}
        values = {dim: emitter.value(ref) for dim, ref in refs.items()}
        if any(value.dtype not in (torch.int32, torch.int64) for value in values.values()):
            return None
        total = tuple(torch.broadcast_shapes(*(value.shape for value in values.values())))
        rows: dict[int, int] = {}
        for dim in refs:
            value = self.known.get(before[dim].name)
            along = _counted(value, shape[dim], set(rows.values()), total) if isinstance(value, KnownTensor) else None
            rows |= {} if along is None else {dim: along}
        chosen = {dim: ref for dim, ref in refs.items() if dim not in rows}
        return _Lookup(emitter, operand, shape, total, rows, chosen) if rows else None


def _counted(index: KnownTensor, size: int, taken: set[int], total: tuple[int, ...]) -> int | None:
    """Return the dim of the result along which an index is 0, 1, ... ``size - 1`` while constant along all others."""
    core = index.core
    if core.numel() != size or not torch.equal(core.flatten() % size, torch.arange(size, dtype=core.dtype)):
        return None
    first = len(total) - core.dim()
    fitting = (first + dim for dim, length in enumerate(core.shape) if length == size and total[first + dim] == size)
    return next((dim for dim in fitting if dim not in taken), None)


@dataclass(frozen=True)
class _Lookup:
    """A lookup in ``operand``. ``total``: the broadcast shape of the indices; ``rows``: dim of the operand -> dim of
    ``total`` that counts its rows; ``chosen``: dim of the operand -> index that chooses among its elements.

    It is computed with unchosen dims first (``kept``), then the chosen ones as one; its result has ``kept`` first, then
    the dims of ``total`` that count no rows (``others``).
    """

    emitter: Emitter
    operand: Ref
    shape: tuple[int, ...]
    total: tuple[int, ...]
    rows: Mapping[int, int]
    chosen: Mapping[int, Ref]

    @cached_property
    def others(self) -> list[int]:
        return [dim for dim in range(len(self.total)) if dim not in self.rows.values()]

    @cached_property
    def kept(self) -> list[int]:
        return [dim for dim in range(len(self.shape)) if dim not in self.chosen]

    @cached_property
    def sizes(self) -> list[int]:
        """Return the shape of the result before its dims are reordered."""
        return [*(self.shape[dim] for dim in self.kept), *(self.total[dim] for dim in self.others)]

    @cached_property
    def order(self) -> list[int]:
        """Return the dims of ``sizes`` in the order of ``aten.index``: those of adjacent indices at their place, else
        first."""
        indexed = sorted([*self.rows, *self.chosen])
        adjacent = indexed == list(range(indexed[0], indexed[-1] + 1))
        start = indexed[0] if adjacent else 0
        dim_of = {along: dim for dim, along in self.rows.items()}
        middle = [
            self.kept.index(dim_of[dim]) if dim in dim_of else len(self.kept) + self.others.index(dim)
            for dim in range(len(self.total))
        ]
        free = [position for position, dim in enumerate(self.kept) if dim not in self.rows]
        return [*free[:start], *middle, *free[start:]]

    def read(self) -> Ref:
        if self.chosen:
            result = self.emitter.emit(aten.gather.default, self._flat(), len(self.kept), self._index())
            result = self.emitter.reshaped(result, self.sizes)
        else:
            opened = [*self.sizes[: len(self.kept)], *[1] * len(self.others)]
            result = self._expanded(self.emitter.reshaped(self.operand, opened), self.sizes)
        return self.emitter.permuted(result, self.order)

    def write(self, values: Ref, accumulate: bool) -> Ref | None:
        """Return the operand with values written where ``read`` reads. None if one element would get several values, or
        if all are overwritten, because the operand's gradient is then zeros and not None."""
        kept = self.sizes[: len(self.kept)]
        if not self.chosen and (prod(self.sizes) != prod(kept) or not accumulate):
            return None
        values = self._expanded(values, [self.sizes[dim] for dim in self.order])
        values = self.emitter.permuted(values, _inverse(self.order))
        if not self.chosen:
            return self.emitter.emit(aten.add.Tensor, self.operand, self.emitter.reshaped(values, kept))
        values = self.emitter.reshaped(values, [*kept, prod(self.sizes[len(kept) :])])
        scatter = aten.scatter_add.default if accumulate else aten.scatter.src
        result = self.emitter.emit(scatter, self._flat(), len(kept), self._index(), values)
        result = self.emitter.reshaped(result, [*kept, *(self.shape[dim] for dim in self.chosen)])
        return self.emitter.permuted(result, _inverse([*self.kept, *self.chosen]))

    def _flat(self) -> Ref:
        operand = self.emitter.permuted(self.operand, [*self.kept, *self.chosen])
        chosen = prod(self.shape[dim] for dim in self.chosen)
        return self.emitter.reshaped(operand, [*(self.shape[dim] for dim in self.kept), chosen])

    def _index(self) -> Ref:
        emit, strides = self.emitter.emit, [self.shape[dim] for dim in self.chosen]
        index: Any = None
        outside: Any = None
        for dim, ref in self.chosen.items():
            size = self.shape[dim]
            at = ref if self.emitter.value(ref).dtype == torch.int64 else emit(aten.to.dtype, ref, torch.int64)
            at = emit(aten.where.self, emit(aten.lt.Scalar, at, 0), emit(aten.add.Tensor, at, size), at)
            if len(self.chosen) == 1:
                index = at
                break
            wrong = emit(aten.ne.Tensor, at, emit(aten.clamp.default, at, 0, size - 1))
            index = at if index is None else emit(aten.add.Tensor, emit(aten.mul.Tensor, index, size), at)
            outside = wrong if outside is None else emit(aten.logical_or.default, outside, wrong)
        if outside is not None:  # one index out of range must not read another row
            index = emit(aten.masked_fill.Scalar, index, outside, prod(strides))
        shape = self.emitter.value(index).shape
        shape = (1,) * (len(self.total) - len(shape)) + shape
        along = [self.rows[dim] for dim in self.kept if dim in self.rows]
        index = self.emitter.permuted(self.emitter.reshaped(index, shape), [*along, *self.others])
        of_rows = [shape[self.rows[dim]] if dim in self.rows else 1 for dim in self.kept]
        index = self.emitter.reshaped(index, [*of_rows, *(shape[dim] for dim in self.others)])
        kept = self.sizes[: len(self.kept)]
        return self.emitter.reshaped(self._expanded(index, self.sizes), [*kept, prod(self.sizes[len(kept) :])])

    def _expanded(self, ref: Ref, shape: Sequence[int]) -> Ref:
        same = self.emitter.value(ref).shape == tuple(shape)
        return ref if same else self.emitter.emit(aten.expand.default, ref, tuple(shape))


def _inverse(dims: Sequence[int]) -> list[int]:
    return [dims.index(dim) for dim in range(len(dims))]
