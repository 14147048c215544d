"""Elimination of sorts by expert: rows that are sorted and later put back are computed in their original order.

A mixture of experts sorts the rows of all samples by expert, so that one grouped product computes them all, and puts
the results back. Sorting mixes samples: a split batch would be gathered ahead of the sort. Operators in between act row
by row, so the order does not matter. Here values in sorted order are replaced by the same values in the order of the
samples, and the product takes rows in any order (``graph.grouped``). The batch stays split, on ranks and over
micro-batches, and rows of the same token share one row.

    sort, argsort           of a vector: rows of an order begin
    index, gather           by the order, or by ``order // k``: rows of tokens that stand ``k`` times beside each other
    histc, bincount, sum    over sorted rows: the same over the rows as they were
    searchsorted            of the cumulative counts, for products alone: the experts of the sorted rows
    row by row              stays, on rows as they were
    index, index_add, ...   by the inverse, or adding to tokens: the rows, or their sums by token

If any reader of a sorted value is none of these, the whole sort stays.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

import torch

from shardwise.graph.custom_operators import RANDOM
from shardwise.graph.emitter import Emitter
from shardwise.graph.grouped import grouped_mm
from shardwise.graph.ir import Arg, Graph, Op, Ref, map_operands, only_ref, refs
from shardwise.graph.schema import arguments, is_random

aten = torch.ops.aten

_SORTS = (aten.sort.default, aten.sort.stable, aten.argsort.default, aten.argsort.stable)
_CASTS = (aten.to.dtype, aten._to_copy.default)
_HOLD_EXPERTS = (torch.int32, torch.int64, torch.float32, torch.float64)  # numbers of experts, as they are
_QUOTIENTS = (aten.floor_divide.default, aten.div.Scalar_mode, aten.div.Tensor_mode)
_LIKE = (aten.empty_like.default, aten.zeros_like.default)
_BLANKS = (*_LIKE, aten.zeros.default, aten.new_zeros.default, aten.new_empty.default, aten.empty.memory_format)
_COUNTING = (aten.arange.default, aten.arange.start, aten.arange.start_step)
_COUNTS = (aten.histc.default, aten.bincount.default, aten.sum.default)
_BOUNDS = {  # comparisons with the number of experts -> what is subtracted from it
    **dict.fromkeys((aten.ge.Scalar, aten.lt.Scalar, aten.eq.Scalar, aten.ne.Scalar), 0),
    **dict.fromkeys((aten.gt.Scalar, aten.le.Scalar), 1),
}
_RESHAPES = (aten.reshape.default, aten.flatten.using_ints, aten.unsqueeze.default, aten.expand.default)
# Operators on rows of any shape, and the argument that says on which dims: none of them may be the first.
_BY_DIM = {
    aten.softmax.int: "dim",
    aten.log_softmax.int: "dim",
    aten.glu.default: "dim",
    aten.cat.default: "dim",
    aten.chunk.default: "dim",
    aten.split.Tensor: "dim",
    aten.split_with_sizes.default: "dim",
    aten.slice.Tensor: "dim",
    aten.select.int: "dim",
    aten.squeeze.dim: "dim",
    aten.sum.dim_IntList: "dim",
    aten.amax.default: "dim",
}

_Kind = Literal["rows", "order", "inverse", "blank"]


@dataclass(frozen=True, slots=True)
class _SortedValue:
    """A value in the order of a sort. For sorted rows, ``value`` holds the unsorted rows, each for ``copies``
    neighbours. An order holds the original positions of sorted rows, or their tokens."""

    kind: _Kind
    sort: str
    value: Ref | None = None
    copies: int = 1


class _MixesRows(Exception):
    """Raised for a reader of sorted values that may mix rows."""

    def __init__(self, sort: str) -> None:
        self.sort = sort


def eliminate_expert_sorts(graph: Graph) -> Graph:
    """Return the graph without the sorts whose sorted values are used row by row and put back."""
    sorts = {op.name: op for op in graph.ops if op.target in _SORTS and _is_of_rows(op, graph)}
    while sorts:
        try:
            return _SortElimination(graph, frozenset(sorts)).graph()
        except _MixesRows as unknown:
            del sorts[unknown.sort]
    return graph


def _is_of_rows(op: Op, graph: Graph) -> bool:
    """Return whether a sort is an ascending sort of a vector of integers."""
    value = graph.by_name[op.operands[0]]
    return len(value.shape) == 1 and not value.dtype.is_floating_point and not arguments(op).get("descending")


@dataclass
class _SortElimination:
    """Rewrites a graph without some sorts. ``ordered``: old values in the order of a sort; ``keys``: sort -> its
    operand."""

    old: Graph
    sorts: frozenset[str]
    ordered: dict[str, _SortedValue] = field(default_factory=dict)
    keys: dict[str, Ref] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.emitter = Emitter.over(self.old)

    def graph(self) -> Graph:
        """Return the new graph. Raises _MixesRows for the first reader that is not supported."""
        for op in self.old.ops:
            self.emitter.origin = op
            owner = next((self.ordered[name].sort for name in op.operands if name in self.ordered), None)
            if owner is not None:
                self._follow(op, owner)
            elif op.name in self.sorts:
                self._begin(op)
            elif not self._finds_experts(op):
                self.emitter.known.update(zip(op.results, self._written(op), strict=True))
        return self._finish()

    def _finish(self) -> Graph:
        old = self.old
        used = [*refs(old.outputs), *(name for pair in (*old.mutations, *old.constraints) for name in pair)]
        for name in (*used, old.loss or ""):
            if name in self.ordered:
                raise _MixesRows(self.ordered[name].sort)
        return self.emitter.rewritten(old)

    def _written(self, op: Op) -> tuple[Arg, ...]:
        """Emit the operator on rows in their original order."""

        def of(name: str) -> Arg:
            return self._rows(self.ordered[name]) if name in self.ordered else self.emitter.known[name]

        return self.emitter.apply(map_operands(op, of), op.results)

    def _rows(self, rows: _SortedValue) -> Ref:
        """Return the unsorted rows, with copies repeated."""
        assert rows.value is not None, "an order has no rows"
        if rows.copies == 1:
            return rows.value
        tokens, *rest = self.emitter.value(rows.value).shape
        emit = self.emitter.emit
        repeated = emit(aten.expand.default, emit(aten.unsqueeze.default, rows.value, 1), (tokens, rows.copies, *rest))
        return emit(aten.reshape.default, repeated, (tokens * rows.copies, *rest))

    def _shape(self, name: str) -> tuple[int, ...]:
        return self.old.by_name[name].shape

    def _count_of(self, sort: str) -> int:
        return self.emitter.value(self.keys[sort]).numel

    def _is_rows(self, name: str) -> bool:
        return name in self.ordered and self.ordered[name].kind == "rows"

    # -- orders --------------------------------------------------------------------------------------------------------

    def _begin(self, op: Op) -> None:
        keys = self.keys[op.name] = self.emitter.now(op.operands[0])
        *rows, order = op.results
        self.ordered[order] = _SortedValue("order", op.name)
        self.ordered |= {name: _SortedValue("rows", op.name, keys) for name in rows}

    def _follow(self, op: Op, sort: str) -> None:
        mixed = any(name in self.ordered and self.ordered[name].sort != sort for name in op.operands)
        results = None if mixed or is_random(op.target) or op.target in RANDOM else self._results(op, sort)
        if results is None:
            raise _MixesRows(sort)
        for name, result in zip(op.results, results, strict=True):
            if isinstance(result, _SortedValue):
                self.ordered[name] = result
            else:
                self.emitter.known[name] = result

    def _results(self, op: Op, sort: str) -> tuple[_SortedValue | Arg, ...] | None:
        """Return the results: values in the order of the sort, or new values emitted here. None: not supported."""
        for rule in (self._of_order, self._gathered_rows, self._put, self._added):
            result = rule(op, sort)
            if result is not None:
                return (result,)
        if not all(self._is_rows(name) for name in op.operands if name in self.ordered):
            return None
        if op.target is grouped_mm._opoverload:
            return self._product(op, sort)
        if op.target in _LIKE or self._forgets_order(op):
            return self._written(op)
        if not self._is_alike(op):
            return None
        return tuple(_SortedValue("rows", sort, only_ref(new)) for new in self._written(op))

    def _of_order(self, op: Op, sort: str) -> _SortedValue | None:
        """Return what an operator makes of an order: token numbers, the inverse, a blank for it, or more dims."""
        first = self.ordered.get(op.operands[0])
        if first is None or first.kind != "order" or len(op.operands) > 1:
            return None
        call, shape = arguments(op), self._shape(op.results[0])
        if op.target in _SORTS and first.copies == 1 and shape == (self._count_of(sort),):
            return _SortedValue("inverse", sort) if len(op.results) == 1 and not call.get("descending") else None
        if op.target in _QUOTIENTS and first.copies == 1 and isinstance(op.args[1], int) and op.args[1] > 0:
            floors = call.get("rounding_mode", "floor") == "floor"
            return replace(first, copies=op.args[1]) if floors else None
        if op.target in _LIKE:
            return _SortedValue("blank", sort) if shape == (self._count_of(sort),) else None
        return first if self._keeps_rows(op, self._count_of(sort)) else None

    def _finds_experts(self, op: Op) -> bool:
        """Return whether an operator looks up the experts of sorted rows in cumulative counts of their keys; it is then
        dropped, since every row has its expert. Only products may read it: a row of an uncounted expert gets another
        number by the lookup, but no product by either number."""
        call = arguments(op)
        if op.target is not aten.searchsorted.Tensor or not call["right"] or call["sorter"] is not None:
            return False
        if any(reader.target is not grouped_mm._opoverload for reader in self.old.consumers[op.results[0]]):
            return False
        ends, rows = op.operands
        keys = self._keys_of_ends(self.emitter.known[ends]) if self._is_counting(rows) else None
        sort = next((name for name, ref in self.keys.items() if self._shape(rows) == self._same(ref, keys)), None)
        if sort is None:
            return False
        self.ordered[op.results[0]] = _SortedValue("rows", sort, self.keys[sort])
        return True

    def _same(self, ref: Ref, keys: Ref | None) -> tuple[int, ...] | None:
        """Return the shape of a sort's keys if they are the counted ones, else None."""
        same = keys is not None and self._root(ref) == self._root(keys)
        return self.emitter.value(ref).shape if same else None

    def _keys_of_ends(self, ends: Arg) -> Ref | None:
        """Return the operand whose values were counted from 0 on, if ``ends`` are the cumulative counts."""
        total = self._producer_of(ends)
        if total is None or total.target is not aten.cumsum.default:
            return None
        count = self._producer_of(total.args[0])
        if count is None:
            return None
        call = arguments(count)
        if count.target is aten.histc.default:
            bins = call["bins"]
            return only_ref(call["self"]) if (call["min"], call["max"]) == (0, bins - 1) else None
        if count.target is aten.bincount.default:
            return only_ref(call["self"]) if call["weights"] is None else None
        if count.target is aten.sum.dim_IntList and call["dim"] == (0,) and not call["keepdim"]:
            flags = self._producer_of(call["self"])
            is_flags = flags is not None and flags.target is aten.one_hot.default
            return only_ref(flags.args[0]) if flags is not None and is_flags else None
        return None

    def _producer_of(self, arg: Arg) -> Op | None:
        """Return the producer of a new value, skipping exact casts."""
        op = self.emitter.producer.get(only_ref(arg).name)
        while op is not None and self._is_exact(op):
            op = self.emitter.producer.get(op.operands[0])
        return op

    def _is_exact(self, op: Op) -> bool:
        """Return whether an operator is a cast that keeps expert and row numbers exact."""
        return op.target in _CASTS and self.emitter.values[op.results[0]].dtype in _HOLD_EXPERTS

    def _root(self, ref: Ref) -> str:
        """Return the name of a new value before its casts and reshapes."""
        name = ref.name
        while (op := self.emitter.producer.get(name)) is not None and self._keeps_elements(op):
            name = op.operands[0]
        return name

    def _keeps_elements(self, op: Op) -> bool:
        is_integer = not self.emitter.values[op.operands[0]].dtype.is_floating_point if op.operands else False
        reshapes = op.target in _RESHAPES and op.target is not aten.expand.default
        return is_integer and (self._is_exact(op) or reshapes)

    # -- rows in and out -----------------------------------------------------------------------------------------------

    def _gathered_rows(self, op: Op, sort: str) -> _SortedValue | Arg | None:
        index = self._index(op)
        if index is None or op.operands[0] == index:
            return None
        name, by = op.operands[0], self.ordered[index]
        if by.kind == "inverse":
            return self._rows(self.ordered[name]) if self._is_rows(name) else None
        if name in self.ordered or by.kind == "blank":
            return None
        if by.kind == "order":
            is_whole = self._shape(name)[0] * by.copies == self._count_of(sort)
            return _SortedValue("rows", sort, self.emitter.now(name), by.copies) if is_whole else None
        (taken,) = self._written(op)  # what belongs to the expert of a row
        return _SortedValue("rows", sort, only_ref(taken))

    def _index(self, op: Op) -> str | None:
        """Return the index in the order of a sort by which an operator selects whole rows on dim 0."""
        call = arguments(op)
        index: Arg = None
        if op.target is aten.index.Tensor:
            at = call["indices"]
            index = at[0] if isinstance(at, tuple) and len(at) == 1 else None
        elif op.target in (aten.index_select.default, aten.gather.default):
            index = call["index"] if call["dim"] == 0 else None
        elif op.target is aten.embedding.default:
            index = call["indices"] if call["padding_idx"] == -1 else None  # a row of padding has no gradient
        if not isinstance(index, Ref) or index.name not in self.ordered:
            return None
        whole = self._shape(op.operands[0])[1:] if op.target is aten.gather.default else ()
        return index.name if self._shape(index.name)[1:] == whole else None

    def _put(self, op: Op, sort: str) -> _SortedValue | Arg | None:
        """Rewrite a write of rows to their original positions; writing 0, 1, 2, ... gives the inverse."""
        call = arguments(op)
        if op.target is aten.scatter.src:
            at, values, plain = call["index"], call["src"], call["dim"] == 0
        elif op.target is aten.index_put.default:
            indices = call["indices"]
            at = indices[0] if isinstance(indices, tuple) and len(indices) == 1 else None
            values, plain = call["values"], not call["accumulate"]
        else:
            return None
        base = op.operands[0]
        if not plain or not isinstance(at, Ref) or not isinstance(values, Ref) or not self._is_blank(base):
            return None
        by, shape = self.ordered.get(at.name), self._shape(values.name)
        indexed = shape if op.target is aten.scatter.src else shape[:1]
        whole = self._shape(base) == shape and self._shape(at.name) == indexed
        if by is None or by.kind != "order" or by.copies != 1 or not whole:
            return None
        if self._is_rows(values.name):
            return self._rows(self.ordered[values.name])
        return _SortedValue("inverse", sort) if self._is_counting(values.name) else None

    def _added(self, op: Op, sort: str) -> Arg | None:
        if op.target not in (aten.index_add.default, aten.scatter_add.default):
            return None
        call = arguments(op)
        at, added = call["index"], call["src" if op.target is aten.scatter_add.default else "source"]
        base = op.operands[0]
        if call["dim"] != 0 or call.get("alpha", 1) != 1 or not isinstance(at, Ref) or not isinstance(added, Ref):
            return None
        by, shape = self.ordered.get(at.name), self._shape(added.name)
        if by is None or by.kind != "order" or base in self.ordered or not self._is_rows(added.name):
            return None
        indexed = shape if op.target is aten.scatter_add.default else shape[:1]
        tokens = shape[0] // by.copies
        of_tokens = self._shape(base) == (tokens, *shape[1:]) and tokens * by.copies == shape[0]
        if not of_tokens or self._shape(at.name) != indexed:
            return None
        rows = self._rows(self.ordered[added.name])
        emit = self.emitter.emit
        if by.copies > 1:
            rows = emit(aten.sum.dim_IntList, emit(aten.reshape.default, rows, (tokens, by.copies, *shape[1:])), (1,))
        return emit(aten.add.Tensor, self.emitter.now(base), rows)

    def _is_blank(self, name: str) -> bool:
        producer = self.old.producer.get(name)
        return producer is not None and producer.target in _BLANKS

    def _is_counting(self, name: str) -> bool:
        """Return whether a value is 0, 1, 2, ..."""
        producer = self.old.producer.get(name)
        while producer is not None and producer.target in _CASTS:
            producer = self.old.producer.get(producer.operands[0])
        if producer is None or producer.target not in _COUNTING:
            return False
        call = arguments(producer)
        return (call.get("start", 0), call.get("step", 1)) == (0, 1)

    # -- row by row ----------------------------------------------------------------------------------------------------

    def _product(self, op: Op, sort: str) -> tuple[_SortedValue, ...] | None:
        """Rewrite a grouped product; a token that stands for several rows is read once."""
        x, weight, experts = op.operands
        if not self._is_rows(x) or not self._is_rows(experts) or weight in self.ordered:
            return None
        skips = self._is_compared(sort, self._shape(weight)[0])
        operands = self.ordered[x].value, self.emitter.now(weight), self._rows(self.ordered[experts])
        return (_SortedValue("rows", sort, self.emitter.emit(op.target, *operands, *op.args[3:6], skips)),)

    def _is_compared(self, sort: str, count: int) -> bool:
        """Return whether the model itself tells rows of experts from those of none, which have the number ``count``."""
        keys = self._old_root(self.old.op_by_name[sort].operands[0])
        return any(
            op.target in _BOUNDS
            and arguments(op)["other"] == count - _BOUNDS[op.target]
            and self._old_root(op.operands[0]) == keys
            for op in self.old.ops
        )

    def _old_root(self, name: str) -> str:
        """Return the name of an old value before casts, reshapes, sorts and reads by an order."""
        while (op := self.old.producer.get(name)) is not None and op.operands:
            is_same = op.target in (*_CASTS, *_RESHAPES, *_SORTS) or self._index(op) is not None
            if not is_same or (op.target in _SORTS and name != op.results[0]):
                break
            name = op.operands[0]
        return name

    def _keeps_rows(self, op: Op, count: int) -> bool:
        """Return whether an operator reshapes only the dims after dim 0, which has ``count`` rows."""
        (before,), (after,) = ([self._shape(name) for name in names] for names in (op.operands, op.results))
        aligned = op.target is not aten.expand.default or len(before) == len(after)
        return op.target in _RESHAPES and aligned and before[:1] == after[:1] == (count,)

    def _forgets_order(self, op: Op) -> bool:
        """Return whether an operator's result does not depend on the order of the rows."""
        if op.target is aten.sum.dim_IntList:
            dims = arguments(op)["dim"]
            return not dims or 0 in _dims(dims, len(self._shape(op.operands[0])))
        return op.target in _COUNTS and len(op.operands) == 1

    def _is_alike(self, op: Op) -> bool:
        """Return whether an operator computes each row independently and returns rows."""
        rows = [name for name in op.operands if name in self.ordered]
        others = [self._shape(name) for name in op.operands if name not in self.ordered]
        rank = len(self._shape(rows[0]))
        if any(self._shape(name)[:1] != self._shape(rows[0])[:1] for name in (*rows, *op.results)):
            return False
        if torch.Tag.pointwise in op.target.tags or op.target in _CASTS:
            ranks = {len(self._shape(name)) for name in (*rows, *op.results)}
            return len(ranks) == 1 and all(len(shape) < rank or shape[0] == 1 for shape in others)
        if op.target in _BY_DIM:
            return not others and 0 not in _dims(arguments(op)[_BY_DIM[op.target]], rank)
        if op.target in _RESHAPES:
            return self._keeps_rows(op, self._shape(rows[0])[0])
        if op.target in (aten.linear.default, aten.matmul.default, aten.mm.default):
            return rank == 2 and rows == [op.operands[0]] and all(len(shape) == 2 for shape in others)
        if op.target in (aten.layer_norm.default, aten.rms_norm.default):
            return rows == [op.operands[0]] and len(arguments(op)["normalized_shape"]) < rank
        return op.target is aten.one_hot.default and not others


def _dims(dims: Arg, rank: int) -> set[int]:
    """Return the dims that an argument names, counted from the first."""
    return {dim % rank for dim in (dims if isinstance(dims, tuple) else (dims,)) if isinstance(dim, int)}
