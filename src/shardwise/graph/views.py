"""Writes through views: computes the new value of the viewed tensor when a view of it changes.

PyTorch's views share memory with their base; a graph has only values. A write to ``x[:, 0]`` becomes a new ``x``, in
which that column is replaced (``select_scatter``), and later uses of ``x`` and of its other views use the new value.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import torch
from torch._ops import OpOverload

from shardwise.graph.emitter import Emitter
from shardwise.graph.ir import Op, Ref
from shardwise.graph.schema import arguments, by_operator

aten = torch.ops.aten

# (arguments of the view, which of its results, current base, new value of the result, emitter) -> new base, None if
# impossible
Inverse = Callable[[dict[str, Any], int, Ref, Ref, Emitter], Ref | None]


def write_through(view: Op, index: int, base: Ref, new: Ref, emitter: Emitter) -> Ref | None:
    """Return the base after its view (result ``index`` of ``view``) became ``new``.

    None if the view cannot be written through.
    """
    inverse = INVERSES.get(view.target)
    return None if inverse is None else inverse(arguments(view), index, base, new, emitter)


def _scatter(emitter: Emitter, target: OpOverload, base: Ref, new: Ref, dim: int, *place: Any) -> Ref:
    """Write ``new`` into a part of ``base``; complex numbers as pairs: the operator has no complex derivative."""
    if not emitter.value(base).dtype.is_complex:
        return emitter.emit(target, base, new, dim, *place)
    dim %= len(emitter.value(base).shape)
    pairs = (emitter.emit(aten.view_as_real.default, emitter.emit(aten.resolve_conj.default, x)) for x in (base, new))
    return emitter.emit(aten.view_as_complex.default, emitter.emit(target, *pairs, dim, *place))


def _same(args: dict[str, Any], index: int, base: Ref, new: Ref, emitter: Emitter) -> Ref:
    return new


def _same_unless_complex(args: dict[str, Any], index: int, base: Ref, new: Ref, emitter: Emitter) -> Ref | None:
    return None if emitter.value(base).dtype.is_complex else new


def _reshaped(args: dict[str, Any], index: int, base: Ref, new: Ref, emitter: Emitter) -> Ref:
    return emitter.emit(aten.reshape.default, new, emitter.value(base).shape)


def _expanded(args: dict[str, Any], index: int, base: Ref, new: Ref, emitter: Emitter) -> Ref | None:
    if prod(emitter.value(base).shape) != prod(emitter.value(new).shape):
        return None
    return _reshaped(args, index, base, new, emitter)


def _transposed(args: dict[str, Any], index: int, base: Ref, new: Ref, emitter: Emitter) -> Ref:
    if len(emitter.value(base).shape) < 2:
        return new
    dims = (args.get("dim0", args.get("axis0", -2)), args.get("dim1", args.get("axis1", -1)))
    return emitter.emit(aten.transpose.int, new, *dims)


def _permuted(args: dict[str, Any], index: int, base: Ref, new: Ref, emitter: Emitter) -> Ref:
    rank = len(args["dims"])
    order = [dim % rank for dim in args["dims"]]
    return emitter.emit(aten.permute.default, new, tuple(order.index(dim) for dim in range(rank)))


# (arguments of the view, which of its results, size of its dim) -> where in the base the result lies
_Place = Callable[[dict[str, Any], int, int], tuple[Any, ...]]


def _part(target: OpOverload, place: _Place) -> Inverse:
    """Return the inverse of a view of a part of a dim, which ``target`` writes."""

    def inverse(args: dict[str, Any], index: int, base: Ref, new: Ref, emitter: Emitter) -> Ref:
        size = emitter.value(base).shape[args["dim"]]
        return _scatter(emitter, target, base, new, args["dim"], *place(args, index, size))

    return inverse


def _narrowed(args: dict[str, Any], index: int, size: int) -> tuple[int, int, int]:
    start = args["start"] % size
    return start, start + args["length"], 1


def _split(args: dict[str, Any], index: int, size: int) -> tuple[int, int, int]:
    parts = args.get("split_sizes", args.get("split_size"))
    if "chunks" in args:
        parts = -(-size // args["chunks"])
    assert parts is not None, f"a split without sizes: {args}"
    sizes = [min(parts, size - start) for start in range(0, size, parts)] if isinstance(parts, int) else list(parts)
    start = sum(sizes[:index])
    return start, start + sizes[index], 1


def _diagonal(args: dict[str, Any], index: int, base: Ref, new: Ref, emitter: Emitter) -> Ref:
    return emitter.emit(aten.diagonal_scatter.default, base, new, args["offset"], args["dim1"], args["dim2"])


INVERSES: dict[OpOverload, Inverse] = by_operator(
    {
        "alias detach contiguous to.dtype to.dtype_layout to.device to.other type_as positive": _same,
        "real conj resolve_conj resolve_neg": _same_unless_complex,
        "view reshape _unsafe_view view_as reshape_as flatten.using_ints unflatten.int ravel squeeze "
        "squeeze.dim squeeze.dims unsqueeze": _reshaped,
        "expand expand_as": _expanded,
        "transpose.int swapaxes swapdims t mT": _transposed,
        "permute": _permuted,
        "select.int": _part(aten.select_scatter.default, lambda args, index, size: (args["index"],)),
        "slice.Tensor": _part(
            aten.slice_scatter.default, lambda args, index, size: (args["start"], args["end"], args["step"])
        ),
        "narrow": _part(aten.slice_scatter.default, _narrowed),
        "unbind.int": _part(aten.select_scatter.default, lambda args, index, size: (index,)),
        "split.Tensor split.sizes split_with_sizes chunk": _part(aten.slice_scatter.default, _split),
        "diagonal": _diagonal,
    }
)
