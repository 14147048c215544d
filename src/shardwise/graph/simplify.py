"""Removal of operators without effect: casts to the same dtype, copies (a graph is functional), views of the whole,
operators that return their operand, a zero that is added to a loss.

``view`` becomes ``reshape``: on a rank the operand may be a slice, which cannot be viewed.

``expand_as`` uses only the shape of its second operand, and each result of ``meshgrid`` only one operand. They become
``expand`` with that one operand. Autograd sends the others no gradient; a program that kept them would convert them,
and list a backward that never runs. ``new_zeros`` and similar become ``zeros``, which has no operand.
"""

from __future__ import annotations

import torch
from torch._ops import OpOverload

from shardwise.graph.emitter import Emitter, Rewrite
from shardwise.graph.ir import Arg, Op, Ref
from shardwise.graph.schema import arguments, by_operator

aten = torch.ops.aten


def _operand(op: Op) -> Ref:
    operand = op.args[0]
    assert isinstance(operand, Ref)
    return operand


def _identity(op: Op, emitter: Emitter) -> tuple[Arg, ...]:
    return (_operand(op),)


def _cast(op: Op, emitter: Emitter) -> tuple[Arg, ...] | None:
    return (_operand(op),) if emitter.value(_operand(op)).dtype == op.args[1] else None


def _cast_like(op: Op, emitter: Emitter) -> tuple[Arg, ...]:
    return (emitter.emit(aten.to.dtype, _operand(op), emitter.value(op.args[1]).dtype),)


def _detach(op: Op, emitter: Emitter) -> tuple[Arg, ...] | None:
    return None if emitter.value(_operand(op)).requires_grad else (_operand(op),)


def _reshape(op: Op, emitter: Emitter) -> tuple[Arg, ...] | None:
    size = op.args[1]
    if emitter.value(_operand(op)).shape == size:
        return (_operand(op),)
    return None if op.target is aten.reshape.default else (emitter.emit(aten.reshape.default, _operand(op), size),)


def _reshape_like(op: Op, emitter: Emitter) -> tuple[Arg, ...]:
    shape = emitter.value(op.args[1]).shape
    if emitter.value(_operand(op)).shape == shape:
        return (_operand(op),)
    return (emitter.emit(aten.reshape.default, _operand(op), shape),)


def _flatten(op: Op, emitter: Emitter) -> tuple[Arg, ...] | None:
    """Replace ``flatten`` of a tensor of one dim by the tensor."""
    return (_operand(op),) if len(emitter.value(_operand(op)).shape) == 1 else None


def _of_real(op: Op, emitter: Emitter) -> tuple[Arg, ...] | None:
    """Replace conjugation, or the real part, of a real tensor by the tensor."""
    return None if emitter.value(_operand(op)).dtype.is_complex else (_operand(op),)


def _at_least(rank: int) -> Rewrite:
    """Rewrite ``atleast_1d`` and similar of several tensors: those with enough dims are returned."""

    def rewrite(op: Op, emitter: Emitter) -> tuple[Arg, ...] | None:
        operands: tuple[Arg, ...] = op.args[0]
        return operands if all(len(emitter.value(ref).shape) >= rank for ref in operands) else None

    return rewrite


def _expand(op: Op, emitter: Emitter) -> tuple[Arg, ...] | None:
    return (_operand(op),) if emitter.value(_operand(op)).shape == op.args[1] else None


def _expand_like(op: Op, emitter: Emitter) -> tuple[Arg, ...]:
    return (emitter.emit(aten.expand.default, _operand(op), emitter.value(op.args[1]).shape),)


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


def _constructor(target: OpOverload) -> Rewrite:
    """Rewrite ``x.new_zeros(size)`` and similar, which read only the dtype of ``x``."""

    def rewrite(op: Op, emitter: Emitter) -> tuple[Arg, ...]:
        args = arguments(op)
        dtype = emitter.value(_operand(op)).dtype if args["dtype"] is None else args["dtype"]
        fill = (args["fill_value"],) if "fill_value" in args else ()
        return (emitter.emit(target, args["size"], *fill, dtype=dtype),)

    return rewrite


def _slice(op: Op, emitter: Emitter) -> tuple[Arg, ...] | None:
    """Replace a slice of everything by its operand."""
    args = arguments(op)
    shape = emitter.value(_operand(op)).shape
    size = shape[args["dim"]]
    start, end = args["start"] or 0, size if args["end"] is None else args["end"]
    whole = (start == 0 or start <= -size) and end >= size and args["step"] == 1
    return (_operand(op),) if whole else None


def _cat(op: Op, emitter: Emitter) -> tuple[Arg, ...] | None:
    """Drop operands without elements (the empty start of a key-value cache), unless a gradient of zeros flows through
    them."""
    tensors = op.args[0]
    full = tuple(ref for ref in tensors if emitter.value(ref).numel or emitter.value(ref).requires_grad)
    if len(full) == len(tensors) or not full:
        return None
    rest = emitter.value(full[0])
    dtypes = {emitter.value(ref).dtype for ref in tensors}
    if len(dtypes) > 1:
        return None
    if len(full) == 1:
        return (full[0],)
    return (emitter.emit(op.target, full, arguments(op)["dim"] % len(rest.shape)),)


def _sum(op: Op, emitter: Emitter) -> tuple[Arg, ...] | None:
    """Replace a scalar added to the number 0, with which a sum of losses began, by the scalar."""
    other, value = arguments(op)["other"], emitter.value(_operand(op))
    is_sum_so_far = not isinstance(other, Ref) and other == 0 and value.shape == () and value.dtype.is_floating_point
    return (_operand(op),) if is_sum_so_far else None


def _dense(op: Op, emitter: Emitter) -> tuple[Arg, ...] | None:
    """Rewrite a lookup with a sparse gradient to one with a dense gradient."""
    args = arguments(op)
    if not args["sparse"]:
        return None
    positional = tuple(False if name == "sparse" else value for name, value in args.items())
    return emitter.emit_several(op.target, *positional)


def _complex_view(op: Op, emitter: Emitter) -> tuple[Arg, ...]:
    """Make pairs adjacent in memory, as the operator requires: the copies that did so were dropped."""
    packed = emitter.emit_as_is(aten.clone.default, _operand(op), memory_format=torch.contiguous_format)
    return emitter.emit_as_is(aten.view_as_complex.default, *packed)


SIMPLIFICATIONS: dict[OpOverload, Rewrite] = by_operator(
    {
        "add.Tensor": _sum,
        "alias clone contiguous lift_fresh lift_fresh_copy positive": _identity,
        "detach": _detach,
        "to.dtype": _cast,
        "type_as": _cast_like,
        "flatten.using_ints": _flatten,
        "real conj conj_physical resolve_conj resolve_neg": _of_real,
        "atleast_1d.Sequence": _at_least(1),
        "atleast_2d.Sequence": _at_least(2),
        "atleast_3d.Sequence": _at_least(3),
        "view _unsafe_view reshape": _reshape,
        "view_as reshape_as": _reshape_like,
        "expand": _expand,
        "expand_as": _expand_like,
        "broadcast_tensors": _broadcast,
        "meshgrid meshgrid.indexing": _meshgrid,
        "new_zeros": _constructor(aten.zeros.default),
        "new_ones": _constructor(aten.ones.default),
        "new_full": _constructor(aten.full.default),
        "new_empty": _constructor(aten.empty.memory_format),
        "slice.Tensor": _slice,
        "cat": _cat,
        "view_as_complex": _complex_view,
        "embedding": _dense,
    }
)
