"""Bookkeeping of selected rows while a graph is built: their masks, their counts, and masking of the other rows.

``graph.selected`` computes with them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from shardwise.errors import CaptureError
from shardwise.graph.emitter import Emitter
from shardwise.graph.expert_masks import selects_once
from shardwise.graph.ir import Arg, Op, Ref
from shardwise.graph.origins import is_of_package
from shardwise.graph.schema import arguments, has_symbols, is_random, is_symbolic, operator_name
from shardwise.graph.trees import argument_key

aten = torch.ops.aten

_FIX = (
    "compute row by row and reduce (sum, mean, a loss) or put the rows back (out[mask] = rows); or keep all rows: "
    "torch.where(mask, x, 0), and divide by mask.sum()"
)
# Of numbers of rows, by the names of sympy's and torch's classes.
_ARITHMETIC: dict[str, Any] = {
    "Add": aten.add.Tensor,
    "Mul": aten.mul.Tensor,
    "Max": aten.maximum.default,
    "IntTrueDiv": aten.div.Tensor,
    "FloatTrueDiv": aten.div.Tensor,
}


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of a value: along ``dim`` it has the rows of a flat mask, ``copies`` neighbours for each."""

    mask: Ref
    dim: int
    copies: int = 1


@dataclass(frozen=True, slots=True)
class Accumulation:
    """Rows that were added to a value, or put into it, where a mask selected them: ``after`` was computed from
    ``before`` and from rows of ``mask``, with zeros in place of the others, by the operators named ``ops``."""

    mask: str
    before: str
    after: str
    ops: frozenset[str]


@dataclass
class SelectedRows:
    """The values with selected rows of a graph under construction. ``counts``: the symbol of a number of rows -> their
    mask; ``positions``: values that are coordinates of a mask's rows, with the mask and the dim (None: all dims, in
    columns); ``read_at``: rows that were read at coordinates -> the value, the mask and its dims; ``ranges``: values
    that number the rows."""

    emitter: Emitter
    rows: dict[str, Rows] = field(default_factory=dict)
    counts: dict[Any, Ref] = field(default_factory=dict)
    positions: dict[str, tuple[Ref, int | None]] = field(default_factory=dict)
    read_at: dict[str, tuple[str, tuple[Ref, tuple[int, ...]]]] = field(default_factory=dict)
    ranges: set[str] = field(default_factory=set)
    masked: dict[tuple[str, int], Ref] = field(default_factory=dict)
    numbers: dict[str, int] = field(default_factory=dict)
    calls: dict[object, int] = field(default_factory=dict)
    num_numbered: int = 0
    accumulations: list[Accumulation] = field(default_factory=list)

    # -- numbers of rows -----------------------------------------------------------------------------------------------

    def sized(self, op: Op) -> Op:
        """Return the operator with the sizes of all rows, and with counts if it computes with numbers of rows."""
        if not has_symbols((op.args, op.kwargs)):
            return op
        kinds = {argument.name: str(argument.type) for argument in op.target._schema.arguments}
        values = arguments(op)
        if op.target in (aten.arange.default, aten.arange.start) and values.get("start", 0) == 0:
            return replace(op, args=(self._full(values["end"]),), target=aten.arange.default)

        def sized(name: str, arg: Arg) -> Arg:
            if isinstance(arg, tuple):
                return tuple(sized(name, item) for item in arg)
            if not isinstance(arg, (torch.SymInt, torch.SymFloat)):
                return arg
            if kinds[name] == "Tensor" and isinstance(values["self"], Ref):
                number = self._counted(op, arg.node.expr)
                if isinstance(arg, torch.SymInt):
                    return number
                return self.emitter.emit(aten.to.dtype, number, self.emitter.value(values["self"]).dtype)
            if "int" in kinds[name] or "Int" in kinds[name]:
                return self._full(arg)
            raise self._refusal(op, "takes the number of selected rows")

        names = [argument.name for argument in op.target._schema.arguments]
        args = tuple(sized(name, arg) for name, arg in zip(names, op.args, strict=False))
        return replace(op, args=args, kwargs=tuple((name, sized(name, arg)) for name, arg in op.kwargs))

    def _full(self, size: Any) -> int:
        """Return a size with all rows in place of the selected ones."""
        if not isinstance(size, torch.SymInt):
            return int(size)
        all_rows = {symbol: self.emitter.value(mask).numel for symbol, mask in self.counts.items()}
        return int(size.node.expr.subs(all_rows))

    def _counted(self, op: Op, expr: Any) -> Any:
        """Emit a number computed from numbers of rows, ``expr`` of sympy, as a tensor."""
        emit = self.emitter.emit
        if expr.is_number:
            dtype = torch.int64 if expr.is_Integer else torch.float64
            return emit(aten.full.default, (), int(expr) if expr.is_Integer else float(expr), dtype=dtype)
        if expr in self.counts:
            return emit(aten.sum.default, self.counts[expr])
        name = type(expr).__name__
        if name == "ToFloat":
            return emit(aten.to.dtype, self._counted(op, expr.args[0]), torch.float64)
        if (target := _ARITHMETIC.get(name)) is None:
            raise self._refusal(op, f"takes {expr}, computed from the number of selected rows")
        numbers = [self._counted(op, arg) for arg in expr.args]
        if name.endswith("TrueDiv"):
            numbers = [emit(aten.to.dtype, number, torch.float64) for number in numbers]
        first, *others = numbers
        for other in others:
            first = emit(target, first, other)
        return first

    def _count(self, op: Op, size: Any, flat: Ref) -> None:
        symbol = size.node.expr if isinstance(size, torch.SymInt) else size
        is_free = getattr(symbol, "is_Symbol", False)
        if not is_free or self._key(self.counts.setdefault(symbol, flat).name) != self._key(flat.name):
            raise self._refusal(op, "selects rows, and their number is assumed equal to that of other rows")

    def _of_shape(self, op: Op, tensor: torch.Tensor) -> Rows:
        """Return the rows of a shape. Raises CaptureError unless they are in one dim, a fixed number for each."""
        sizes: list[Any] = list(tensor.shape)
        symbolic = [(dim, size) for dim, size in enumerate(sizes) if isinstance(size, torch.SymInt)]
        expr = symbolic[0][1].node.expr
        symbols = [symbol for symbol in expr.free_symbols if symbol in self.counts]
        if len(symbolic) == len(symbols) == 1:
            copies = expr / symbols[0]
            if copies.is_Integer:
                return Rows(self.counts[symbols[0]], symbolic[0][0], int(copies))
        raise self._refusal(op)

    # -- coordinates ---------------------------------------------------------------------------------------------------

    def _dims_at(self, indices: Sequence[Ref]) -> tuple[Ref, tuple[int, ...]] | None:
        """Return the mask, and its dims, whose rows' coordinates the indices are; else None."""
        found = [self.positions.get(index.name, (index, None)) for index in indices]
        mask, dims = found[0][0], tuple(dim for _, dim in found if dim is not None)
        is_distinct = len(found) == len(dims) == len(set(dims))
        return (mask, dims) if is_distinct and all(at == mask for at, _ in found) else None

    def _at_all_elements(self, x: Ref, mask: Ref, dims: Sequence[int], place: int) -> Ref | None:
        """Emit ``x``, whose dims from ``place`` on are these of the mask, with all dims of the mask there; None if they
        have other sizes."""
        shape, sizes = self.emitter.value(x).shape, self.emitter.value(mask).shape
        behind = shape[place + len(dims) :]
        if shape[place : place + len(dims)] != tuple(sizes[dim] for dim in dims):
            return None
        order = [place + dims.index(dim) for dim in sorted(dims)]
        if list(dims) != sorted(dims):
            x = self.emitter.emit(
                aten.permute.default, x, (*range(place), *order, *range(place + len(dims), len(shape)))
            )
        opened = tuple(size if dim in dims else 1 for dim, size in enumerate(sizes))
        opened_x = self.emitter.reshaped(x, (*shape[:place], *opened, *behind))
        return self.emitter.emit(aten.expand.default, opened_x, (*shape[:place], *sizes, *behind))

    def _summed_to(self, rows: Ref, mask: Ref, dims: Sequence[int], place: int) -> Ref:
        """Emit the sums of masked rows, in dim ``place``, over the mask's other dims."""
        shape, sizes = self.emitter.value(rows).shape, self.emitter.value(mask).shape
        opened = self.emitter.reshaped(rows, (*shape[:place], *sizes, *shape[place + 1 :]))
        others = tuple(place + dim for dim in range(len(sizes)) if dim not in dims)
        return self.emitter.emit(aten.sum.dim_IntList, opened, others) if others else opened

    def _increment(self, x: Ref, at: tuple[Ref, tuple[int, ...]], values: Ref) -> Ref | None:
        """Return the rows ``r`` of ``x[at] = x[at] + r``, if the mask selects no element of ``x`` twice."""
        total, (mask, dims) = self.emitter.producer.get(values.name), at
        if total is None or total.target is not aten.add.Tensor or arguments(total)["alpha"] != 1:
            return None
        read = [name for name in total.operands if self.read_at.get(name) == (x.name, at)]
        added = [name for name in total.operands if name not in read]
        if len(read) != 1 or len(added) != 1 or self.emitter.values[added[0]].shape != self.emitter.value(values).shape:
            return None
        is_sum = selects_once(self.emitter.producer, self.emitter.values, mask.name, dims)
        return Ref(added[0]) if is_sum else None

    def _accumulated(self, mask: Ref, before: Ref, added: Callable[[], Ref]) -> Ref:
        """Emit rows added to a value, or put into it, and note it (``graph.expert_loops``)."""
        start = len(self.emitter.ops)
        after = added()
        self.accumulations.append(
            Accumulation(mask.name, before.name, after.name, frozenset(op.name for op in self.emitter.ops[start:]))
        )
        return after

    # -- masks ---------------------------------------------------------------------------------------------------------

    def _hidden(self, rows: Rows, rank: int) -> Ref:
        """Emit a mask of the unselected rows, in a shape that broadcasts to that of their value."""
        emit, size = self.emitter.emit, self.emitter.value(rows.mask).numel
        mask = emit(aten.logical_not.default, rows.mask)
        if rows.copies > 1:
            mask = emit(aten.expand.default, self.emitter.reshaped(mask, (size, 1)), (size, rows.copies))
        return self.emitter.reshaped(mask, tuple(size * rows.copies if dim == rows.dim else 1 for dim in range(rank)))

    def _masked(self, ref: Ref, fill: int = 0) -> Ref:
        """Emit a value with ``fill`` in the unselected rows."""
        if ref.name not in self.rows:
            return ref
        if (ref.name, fill) not in self.masked:
            hidden = self._hidden(self.rows[ref.name], len(self.emitter.value(ref).shape))
            masked = self.emitter.emit(aten.masked_fill.Scalar, ref, hidden, fill)
            self.rows[masked.name] = self.rows[ref.name]
            self.masked[ref.name, fill] = self.masked[masked.name, fill] = masked
        return self.masked[ref.name, fill]

    def _check_masks(self, op: Op, names: Sequence[str]) -> None:
        """Raise CaptureError for rows of several masks."""
        if len({self._key(self.rows[name].mask.name) for name in names}) > 1:
            raise self._refusal(
                op, "takes rows selected by two masks", "compute the mask once, and index everything with it"
            )

    def _key(self, name: str) -> int:
        """Return a number that values have in common if they are computed equally from the same values."""
        for op in self.emitter.ops[self.num_numbered :]:
            call = op.target, argument_key((op.args, op.kwargs), self._number)
            for i, result in enumerate(op.results):
                key = result if is_random(op.target) else (call, i)
                self.numbers[result] = self.calls.setdefault(key, len(self.calls))
        self.num_numbered = len(self.emitter.ops)
        return self._number(name)

    def _number(self, name: str) -> int:
        return self.numbers.setdefault(name, self.calls.setdefault(name, len(self.calls)))

    def _refusal(self, op: Op, what: str = "", fix: str = _FIX) -> CaptureError:
        name = operator_name(op.target)
        what = what or "needs the rows selected by a mask as a tensor, and their number depends on data"
        if is_of_package("torch_geometric", op.source):
            fix = "pass add_self_loops=False to torch_geometric layers and add the loops to edge_index before"
        return CaptureError(f"{name} {what}", op=op.module, source=op.source, fix=fix)


def is_size(target: Any, val: Any) -> bool:
    """Return whether an operator reads a size that depends on data, or computes with such sizes in Python."""
    of_python = not isinstance(target, (torch._ops.OpOverload, torch._ops.HigherOrderOperator))
    return is_symbolic(val) and (of_python or operator_name(target) in ("sym_size", "sym_numel"))
