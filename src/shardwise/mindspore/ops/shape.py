"""Operators that rearrange, repeat, join or cut tensors, and that make them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from shardwise.errors import problem
from shardwise.mindspore import strict
from shardwise.mindspore.ops.primitive import Primitive, Shapes, Strategy


class Reshape(Primitive):
    """``Reshape()(x, (2, -1))``. It takes no strategy: its layout follows from its neighbours'."""

    splittable = False

    def compute(self, x: Any, shape: Sequence[int]) -> Any:
        return x.reshape(tuple(shape))


class Transpose(Primitive):
    """``Transpose()(x, (1, 0))``: the dims in another order."""

    def compute(self, x: Any, perm: Sequence[int]) -> Any:
        return x.permute(tuple(perm))


class ExpandDims(Primitive):
    """``ExpandDims()(x, 0)``: a new dim of size 1."""

    def compute(self, x: Any, axis: int) -> Any:
        return x.unsqueeze(axis)


class Squeeze(Primitive):
    """Without some dims of size 1; without ``axis``, all of them."""

    def __init__(self, axis: int | Sequence[int] = ()) -> None:
        super().__init__(axis=axis)
        self.axis = (axis,) if isinstance(axis, int) else tuple(axis)

    def compute(self, x: Any) -> Any:
        axes = self.axis or tuple(dim for dim, size in enumerate(x.shape) if size == 1)
        for axis in axes:
            if x.shape[axis] != 1:
                raise ValueError(
                    problem(f"Squeeze of dim {axis}, which has size {x.shape[axis]}", fix="a dim of size 1")
                )
        return x.squeeze(axes)


class Flatten(Primitive):
    """All dims but the first in one."""

    splittable = False

    def compute(self, x: Any) -> Any:
        return x.reshape(x.shape[0], -1)


class Tile(Primitive):
    """``Tile()(x, (2, 1))``: x repeated along each dim."""

    def compute(self, x: Any, multiples: Sequence[int]) -> Any:
        return x.repeat(tuple(multiples))


class BroadcastTo(Primitive):
    """``BroadcastTo((4, 3))(x)``; -1 keeps the size of a dim."""

    def __init__(self, shape: Sequence[int]) -> None:
        super().__init__(shape=tuple(shape))
        self.shape = tuple(shape)

    def compute(self, x: Any) -> Any:
        return x.expand(self.shape)


class _Joined(Primitive):
    """Of several tensors one: all are split alike, and not along ``axis``."""

    why = "along which the inputs are joined"

    def __init__(self, axis: int = 0) -> None:
        super().__init__(axis=axis)
        self.axis = axis

    def check_strategy(self, strategy: Strategy, shapes: Shapes, args: tuple[Any, ...]) -> None:
        axis = strict.dim_of(self.title, self.axis, len(shapes[0]))
        for counts in strategy:
            strict.whole(self.title, counts, (axis,), self.why)


class Concat(_Joined):
    """``Concat(1)((x, y))``: tensors one behind the other along ``axis``."""

    def compute(self, tensors: Any) -> Any:
        return torch.cat(tuple(tensors), self.axis)


class Stack(_Joined):
    """``Stack(0)((x, y))``: tensors along a new dim."""

    def compute(self, tensors: Any) -> Any:
        return torch.stack(tuple(tensors), self.axis)

    def check_strategy(self, strategy: Strategy, shapes: Shapes, args: tuple[Any, ...]) -> None:
        """Along a new dim nothing is split."""


class Pack(Stack):
    """The old name of Stack."""


class Unstack(_Joined):
    """A tuple of the slices along ``axis``."""

    why = "which is taken apart"

    def __init__(self, axis: int = 0, num: int | None = None) -> None:
        super().__init__(axis)

    def compute(self, x: Any) -> Any:
        return x.unbind(self.axis)


class Split(_Joined):
    """``output_num`` equal parts of ``axis``, as a tuple."""

    why = "which is taken apart"

    def __init__(self, axis: int = 0, output_num: int = 1) -> None:
        super().__init__(axis)
        self.attrs["output_num"] = self.output_num = output_num

    def compute(self, x: Any) -> Any:
        size = x.shape[self.axis]
        if size % self.output_num:
            raise ValueError(
                problem(
                    f"{self.title}: dim {self.axis} of size {size} in {self.output_num} parts: {size} % "
                    f"{self.output_num} = {size % self.output_num}",
                    fix="a number that divides it",
                )
            )
        return x.split(size // self.output_num, self.axis)


class _Cut(Primitive):
    """A part of a tensor, by slices. A dim that is split is taken whole."""

    lead = 0

    def slices(self, shape: Sequence[int], *args: Any) -> tuple[Any, ...]:
        raise NotImplementedError

    def compute(self, x: Any, *args: Any) -> Any:
        return x[self.slices(x.shape, *args)]

    def check_strategy(self, strategy: Strategy, shapes: Shapes, args: tuple[Any, ...]) -> None:
        (counts,), (shape,) = strategy, shapes
        taken = self.slices(shape, *args[1:])
        plain = [cut for cut in taken if cut is not None and cut is not Ellipsis]
        if len(plain) < len(taken):  # new dims and ellipses: positions shift
            strict.whole(self.title, counts, range(len(shape)), "and a mask is not 0")
        for dim, cut in enumerate(plain):
            if not isinstance(cut, slice) or cut.indices(shape[dim]) != (0, shape[dim], 1):
                text = f"{cut.start}:{cut.stop}:{cut.step}" if isinstance(cut, slice) else cut
                strict.whole(self.title, counts, (dim,), f"of which {text} is taken (a split dim is taken whole)")


class StridedSlice(_Cut):
    """``StridedSlice()(x, begin, end, strides)``. Bit i of a mask speaks of entry i: ``begin_mask`` and ``end_mask``
    ignore it, ``ellipsis_mask`` makes it "...", ``new_axis_mask`` a new dim, ``shrink_axis_mask`` an index."""

    def __init__(
        self,
        begin_mask: int = 0,
        end_mask: int = 0,
        ellipsis_mask: int = 0,
        new_axis_mask: int = 0,
        shrink_axis_mask: int = 0,
    ) -> None:
        super().__init__(begin_mask=begin_mask, end_mask=end_mask, ellipsis_mask=ellipsis_mask,
                         new_axis_mask=new_axis_mask, shrink_axis_mask=shrink_axis_mask)  # fmt: skip

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
    """``Slice()(x, begin, size)``; a size of -1 takes the rest."""

    def slices(self, shape: Sequence[int], *args: Any) -> tuple[Any, ...]:
        begin, size = args
        return tuple(
            slice(start, None if length == -1 else start + length) for start, length in zip(begin, size, strict=True)
        )


class _Made(Primitive):
    """A new tensor: every device makes what it needs of it, whatever the strategy."""

    splittable = False


class Fill(_Made):
    """``Fill()(dtype, shape, value)``"""

    def compute(self, dtype: torch.dtype, shape: Sequence[int], value: float) -> Any:
        return torch.full(tuple(shape), value, dtype=dtype)


class Zeros(_Made):
    """``Zeros()(shape, dtype)``"""

    def compute(self, shape: Any, dtype: torch.dtype = torch.float32) -> Any:
        return torch.zeros(shape, dtype=dtype)


class Ones(_Made):
    """``Ones()(shape, dtype)``"""

    def compute(self, shape: Any, dtype: torch.dtype = torch.float32) -> Any:
        return torch.ones(shape, dtype=dtype)


class Eye(_Made):
    """``Eye()(n, m, dtype)``"""

    def compute(self, n: int, m: int, dtype: torch.dtype = torch.float32) -> Any:
        return torch.eye(n, m, dtype=dtype)


class Range(_Made):
    """``Range()(start, limit, delta)``"""

    def compute(self, start: Any, limit: Any, delta: Any = 1) -> Any:
        return torch.arange(start, limit, delta)


class Shape(_Made):
    """The shape, as a tuple."""

    def compute(self, x: Any) -> Any:
        return tuple(x.shape)


class Depend(_Made):
    """``value``, after ``expr`` has been computed: code runs in order anyway."""

    def compute(self, value: Any, expr: Any) -> Any:
        return value


__all__ = [
    "BroadcastTo", "Concat", "Depend", "ExpandDims", "Eye", "Fill", "Flatten", "Ones", "Pack", "Range", "Reshape",
    "Shape", "Slice", "Split", "Squeeze", "Stack", "StridedSlice", "Tile", "Transpose", "Unstack", "Zeros",
]  # fmt: skip
