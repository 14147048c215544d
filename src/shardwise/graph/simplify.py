"""Removal of operators without effect: casts to the same dtype, copies (a graph is functional), views of the whole,
operators that return their operand, a zero that is added to a loss.

``view`` becomes ``reshape``: on a rank the operand may be a slice, which cannot be viewed.

``expand_as`` uses only the shape of its second operand, and each result of ``meshgrid`` only one operand. They become
``expand`` with that one operand. Autograd sends the others no gradient; a program that kept them would convert them,
and list a backward that never runs. ``new_zeros`` and similar become ``zeros``, which has no operand.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch._ops import OpOverload

from shardwise.graph.emitter import Emitter, Rewrite
from shardwise.graph.inner_gradients import LEAF
from shardwise.graph.ir import Arg, Op, Ref, Value
from shardwise.graph.schema import arguments, by_operator

aten = torch.ops.aten


def _operand(op: Op) -> Ref:
    operand = op.args[0]
    assert isinstance(operand, Ref)
    return operand


def _returned_if(is_same: Callable[[Op, Value], bool], op: Op, emitter: Emitter) -> tuple[Arg, ...] | None:
    """Replace operators by their operand where they return it. ``is_same``: of an operator and its operand."""
    if not isinstance(op.args[0], Ref):  # a number, which becomes a tensor
        return None
    return (_operand(op),) if is_same(op, emitter.value(_operand(op))) else None


def _like(target: OpOverload, argument: str, op: Op, emitter: Emitter) -> tuple[Arg, ...]:
    """Rewrite ``x.type_as(other)`` and similar, which read only the dtype or the shape of the other."""
    return (emitter.emit(target, _operand(op), getattr(emitter.value(op.args[1]), argument)),)


def _reshape(op: Op, emitter: Emitter) -> tuple[Arg, ...] | None:
    size = emitter.value(op.args[1]).shape if isinstance(op.args[1], Ref) else op.args[1]
    if emitter.value(_operand(op)).shape == size:
        return (_operand(op),)
    return None if op.target is aten.reshape.default else (emitter.emit(aten.reshape.default, _operand(op), size),)


def _broadcast(op: Op, emitter: Emitter) -> tuple[Arg, ...]:
    """Rewrite broadcast_tensors: expand every operand to the common shape, if it has another."""
    shape = tuple(torch.broadcast_shapes(*(emitter.value(ref).shape for ref in op.args[0])))
    return tuple(emitter.emit(aten.expand.default, ref, shape) for ref in op.args[0])


def _meshgrid(op: Op, emitter: Emitter) -> tuple[Arg, ...]:
    """Put every operand along its own dim (the first two exchanged under "xy"), and expand it to the common shape."""
    operands = op.args[0]
    dims = list(range(len(operands)))
    if arguments(op).get("indexing") == "xy" and len(dims) > 1:
        dims[:2] = 1, 0
    shape = [1] * len(dims)
    for ref, dim in zip(operands, dims, strict=True):
        shape[dim] = emitter.value(ref).numel
    grids = []
    for ref, dim in zip(operands, dims, strict=True):
        along = tuple(size if position == dim else 1 for position, size in enumerate(shape))
        reshaped = emitter.emit(aten.reshape.default, ref, along)
        grids.append(emitter.emit(aten.expand.default, reshaped, tuple(shape)))
    return tuple(grids)


def _constructor(target: OpOverload, op: Op, emitter: Emitter) -> tuple[Arg, ...]:
    """Rewrite ``x.new_zeros(size)`` and similar, which read only the dtype of ``x``."""
    args = arguments(op)
    dtype = emitter.value(_operand(op)).dtype if args["dtype"] is None else args["dtype"]
    fill = (args["fill_value"],) if "fill_value" in args else ()
    return (emitter.emit(target, args["size"], *fill, dtype=dtype),)


def _takes_all(op: Op, x: Value) -> bool:
    args = arguments(op)
    size = x.shape[args["dim"]]
    start, end = args["start"] or 0, size if args["end"] is None else args["end"]
    return bool((start == 0 or start <= -size) and end >= size and args["step"] == 1)


def _cat(op: Op, emitter: Emitter) -> tuple[Arg, ...] | None:
    """Drop operands without elements (the empty start of a key-value cache), unless a gradient of zeros flows through
    them."""
    tensors = op.args[0]
    full = tuple(ref for ref in tensors if emitter.value(ref).numel or emitter.value(ref).requires_grad)
    if len(full) == len(tensors) or not full or len({emitter.value(ref).dtype for ref in tensors}) > 1:
        return None
    if len(full) == 1:
        return (full[0],)
    return (emitter.emit(op.target, full, arguments(op)["dim"] % len(emitter.value(full[0]).shape)),)


def _adds_nothing(op: Op, x: Value) -> bool:
    """Return whether the number 0, with which a sum of losses began, is added to a scalar."""
    other = arguments(op)["other"]
    return not isinstance(other, Ref) and bool(other == 0) and x.shape == () and x.dtype.is_floating_point


def _dense(op: Op, emitter: Emitter) -> tuple[Arg, ...] | None:
    """Rewrite a lookup with a sparse gradient to one with a dense gradient."""
    args = arguments(op)
    if not args["sparse"]:
        return None
    positional = tuple(False if name == "sparse" else value for name, value in args.items())
    return emitter.emit_several(op.target, *positional)


def _transposed_twice(op: Op, emitter: Emitter) -> tuple[Arg, ...] | None:
    """Return the operand of two transposes in a row, as gradients inside forward make of weights of linear layers."""
    made = emitter.producer.get(_operand(op).name)
    return (made.args[0],) if made is not None and made.target is aten.t.default else None


def _complex_view(op: Op, emitter: Emitter) -> tuple[Arg, ...]:
    """Make pairs adjacent in memory, as the operator requires: the copies that did so were dropped."""
    packed = emitter.emit_as_is(aten.clone.default, _operand(op), memory_format=torch.contiguous_format)
    return emitter.emit_as_is(aten.view_as_complex.default, *packed)


SIMPLIFICATIONS: dict[OpOverload, Rewrite] = by_operator(
    {
        "add.Tensor": partial(_returned_if, _adds_nothing),
        "alias clone contiguous lift_fresh lift_fresh_copy positive": partial(_returned_if, lambda op, x: True),
        "detach": partial(_returned_if, lambda op, x: not x.requires_grad),
        "to.dtype": partial(_returned_if, lambda op, x: x.dtype == op.args[1]),
        "type_as to.other": partial(_like, aten.to.dtype, "dtype"),
        "flatten.using_ints": partial(_returned_if, lambda op, x: len(x.shape) == 1),
        "real conj conj_physical resolve_conj resolve_neg": partial(_returned_if, lambda op, x: not x.dtype.is_complex),
        "view _unsafe_view reshape view_as reshape_as": _reshape,
        "expand": partial(_returned_if, lambda op, x: x.shape == op.args[1]),
        "expand_as": partial(_like, aten.expand.default, "shape"),
        "broadcast_tensors": _broadcast,
        "meshgrid meshgrid.indexing": _meshgrid,
        "new_zeros": partial(_constructor, aten.zeros.default),
        "new_ones": partial(_constructor, aten.ones.default),
        "new_full": partial(_constructor, aten.full.default),
        "new_empty": partial(_constructor, aten.empty.memory_format),
        "slice.Tensor": partial(_returned_if, _takes_all),
        "cat": _cat,
        "view_as_complex": _complex_view,
        "embedding": _dense,
        "t": _transposed_twice,
    },
    {LEAF: partial(_returned_if, lambda op, x: True)},
)
