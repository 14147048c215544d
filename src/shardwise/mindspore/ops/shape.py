"""Operators that rearrange, repeat, join, cut or create tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from shardwise.errors import problem
from shardwise.mindspore import strict
from shardwise.mindspore.named import classes_of
from shardwise.mindspore.ops.of_torch import of_functions
from shardwise.mindspore.ops.primitive import OfSettings, Primitive, Simple, Whole, along
from shardwise.mindspore.strict import Faults, Shapes, Strategy


def _squeezed(x: Any, axis: Any) -> Any:
    axes = ((axis,) if isinstance(axis, int) else tuple(axis)) or tuple(
        d for d, size in enumerate(x.shape) if size == 1
    )
    for dim in axes:
        if x.shape[dim] != 1:
            raise ValueError(problem(f"Squeeze of dim {dim}, which has size {x.shape[dim]}", fix="a dim of size 1"))
    return x.squeeze(axes)


class Split(OfSettings, axis=0, output_num=1):
    """The parts of a dim in ``output_num`` equal sizes, as a tuple."""

    whole = along("which is cut into parts")

    def compute(self, x: Any) -> Any:
        size, count = x.shape[self.axis], self.output_num
        if size % count:
            what = f"{self.title}: dim {self.axis} of size {size} in {count} parts: {size} % {count} = {size % count}"
            raise ValueError(problem(what, fix="a number that divides it"))
        return x.split(size // count, self.axis)


class _Cut(Primitive):
    """A part of a tensor, by slices. A dim that is split must be taken whole."""

    lead = 0

    def slices(self, shape: Sequence[int], *args: Any) -> tuple[Any, ...]:
        raise NotImplementedError

    def compute(self, x: Any, *args: Any) -> Any:
        return x[self.slices(x.shape, *args)]

    def faults(self, strategy: Strategy, shapes: Shapes, args: tuple[Any, ...]) -> Faults:
        (counts,), (shape,) = strategy, shapes
        taken = self.slices(shape, *args[1:])
        plain = [cut for cut in taken if cut is not None and cut is not Ellipsis]
        if len(plain) < len(taken):  # new dims and ellipses shift positions
            yield from strict.whole(counts, range(len(shape)), "and a mask is not 0")
        for dim, cut in enumerate(plain):
            if not isinstance(cut, slice) or cut.indices(shape[dim]) != (0, shape[dim], 1):
                text = f"{cut.start}:{cut.stop}:{cut.step}" if isinstance(cut, slice) else cut
                yield from strict.whole(counts, (dim,), f"of which {text} is taken (a split dim must be taken whole)")


class StridedSlice(OfSettings, _Cut, begin_mask=0, end_mask=0, ellipsis_mask=0, new_axis_mask=0, shrink_axis_mask=0):
    """``StridedSlice()(x, begin, end, strides)``. Bit i of a mask applies to entry i: ``begin_mask`` and ``end_mask``
    ignore it, ``ellipsis_mask`` makes it "...", ``new_axis_mask`` a new dim, ``shrink_axis_mask`` an index."""

    def slices(self, shape: Sequence[int], *args: Any) -> tuple[Any, ...]:
        begin, end, strides = args
        cuts: list[Any] = []
        for i, (start, stop, step) in enumerate(zip(begin, end, strides, strict=True)):
            on = {name for name, mask in self.attrs.items() if name.endswith("_mask") and mask >> i & 1}
            if "ellipsis_mask" in on:
                cuts.append(Ellipsis)
            elif "new_axis_mask" in on:
                cuts.append(None)
            elif "shrink_axis_mask" in on:
                cuts.append(start)
            else:
                cuts.append(slice(None if "begin_mask" in on else start, None if "end_mask" in on else stop, step))
        return tuple(cuts)


class Slice(_Cut):
    """A slice: ``Slice()(x, begin, size)``; a size of -1 takes the rest."""

    def slices(self, shape: Sequence[int], *args: Any) -> tuple[Any, ...]:
        begin, size = args
        return tuple(
            slice(start, None if length == -1 else start + length) for start, length in zip(begin, size, strict=True)
        )


def _joined(self: Any, shapes: Shapes, args: tuple[Any, ...]) -> Whole:
    return dict.fromkeys(range(len(shapes)), ((self.axis,), "along which the inputs are joined"))


# The operators of the last table take no strategy: their layout follows from their neighbours', or every device makes
# its part of a new tensor.
CLASSES = {
    **classes_of({
        **of_functions("ExpandDims=expand_dims; Tile; Transpose"),
        "BroadcastTo": (None, lambda x, *, shape: x.expand(shape), {
            "checks": {"shape": lambda _, shape: tuple(shape)}}),
        "Concat": (None, lambda tensors, *, axis=0: torch.cat(tuple(tensors), axis), {"whole": _joined}),
        "Pack": lambda tensors, *, axis=0: torch.stack(tuple(tensors), axis),
        "Squeeze": lambda x, *, axis=(): _squeezed(x, axis),
        "Stack": lambda tensors, *, axis=0: torch.stack(tuple(tensors), axis),
        "Unstack": (None, lambda x, *, axis=0, num=None: x.unbind(axis), {"whole": along("which is cut into parts")}),
    }, Simple, __name__, lead=None),
    **classes_of({
        **of_functions("Eye; Fill; Ones; Range; Reshape; Shape; Zeros"),
        "Depend": lambda value, expr: value,  # code runs in order anyway
        "Flatten": lambda x: x.reshape(x.shape[0], -1),
    }, Simple, __name__, lead=None, splittable=False),
}  # fmt: skip
globals().update(CLASSES)

__all__ = ["Slice", "Split", "StridedSlice", *CLASSES]
