"""Operators that combine the elements of some dims, that scan or that sort one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch

from shardwise.mindspore import strict
from shardwise.mindspore.ops.primitive import Primitive, Shapes, Strategy
from shardwise.mindspore.tensor_methods import product

Axes = int | Sequence[int]


class Reduce(Primitive):
    """``ReduceSum(keep_dims)(x, axis)``: any dims, without ``axis`` all. They may be split: results are reduced."""

    function: ClassVar[Callable[..., Any]]  # of x, dims and whether they are kept

    def __init__(self, keep_dims: bool = False) -> None:
        super().__init__(keep_dims=keep_dims)
        self.keep_dims = keep_dims

    def compute(self, x: Any, axis: Axes = ()) -> Any:
        dims = (axis,) if isinstance(axis, int) else tuple(axis)
        return type(self).function(x, dims or tuple(range(x.dim())), self.keep_dims)


REDUCTIONS = {
    f"Reduce{name}": type(f"Reduce{name}", (Reduce,), {
        "function": staticmethod(function), "sums": function in (torch.sum, torch.mean),
        "lead": 0 if function is product else None, "__doc__": Reduce.__doc__, "__module__": __name__,
    }) for name, function in (
        ("Sum", torch.sum), ("Mean", torch.mean), ("Max", torch.amax), ("Min", torch.amin), ("All", torch.all),
        ("Any", torch.any), ("Prod", product))
}  # fmt: skip
globals().update(REDUCTIONS)


class ArgMaxWithValue(Primitive):
    """Where the largest element of a dim is, and its value."""

    def __init__(self, axis: int = 0, keep_dims: bool = False) -> None:
        super().__init__(axis=axis, keep_dims=keep_dims)
        self.axis, self.keep_dims = axis, keep_dims

    def compute(self, x: Any) -> Any:
        value, index = x.max(self.axis, keepdim=self.keep_dims)
        return index, value


class ArgMinWithValue(ArgMaxWithValue):
    """Where the smallest element of a dim is, and its value."""

    def compute(self, x: Any) -> Any:
        value, index = x.min(self.axis, keepdim=self.keep_dims)
        return index, value


class Argmax(Primitive):
    """Where the largest element of a dim is."""

    def __init__(self, axis: int = -1, output_type: torch.dtype = torch.int32) -> None:
        super().__init__(axis=axis, output_type=output_type)
        self.axis, self.output_type = axis, output_type

    def compute(self, x: Any) -> Any:
        return x.argmax(self.axis).to(self.output_type)


class Argmin(Argmax):
    """Where the smallest element of a dim is."""

    def compute(self, x: Any) -> Any:
        return x.argmin(self.axis).to(self.output_type)


class CumSum(Primitive):
    """``CumSum(exclusive, reverse)(x, axis)``: sums of the first elements, without the element itself if
    ``exclusive``, from the last one on if ``reverse``."""

    lead = 0

    def __init__(self, exclusive: bool = False, reverse: bool = False) -> None:
        super().__init__(exclusive=exclusive, reverse=reverse)
        self.exclusive, self.reverse = exclusive, reverse

    def compute(self, x: Any, axis: int) -> Any:
        y = x.flip(axis) if self.reverse else x
        y = y.cumsum(axis)
        y = y.flip(axis) if self.reverse else y
        return y - x if self.exclusive else y

    def check_strategy(self, strategy: Strategy, shapes: Shapes, args: tuple[Any, ...]) -> None:
        axis = strict.dim_of(self.title, args[1], len(shapes[0]))
        strict.whole(self.title, strategy[0], (axis,), "along which it accumulates")


class CumProd(CumSum):
    """Products of the first elements, as ``CumSum``."""

    def compute(self, x: Any, axis: int) -> Any:
        y = x.flip(axis) if self.reverse else x
        if self.exclusive:
            y = torch.cat((torch.ones_like(y.narrow(axis, 0, 1)), y.narrow(axis, 0, y.shape[axis] - 1)), axis)
        y = y.cumprod(axis)
        return y.flip(axis) if self.reverse else y


class TopK(Primitive):
    """``TopK(sorted)(x, k)``: the k largest elements of the last dim, and where they are."""

    def __init__(self, sorted: bool = True) -> None:
        super().__init__(sorted=sorted)
        self.sorted = sorted

    def compute(self, x: Any, k: int) -> Any:
        return tuple(x.topk(k, -1, sorted=self.sorted))

    def check_strategy(self, strategy: Strategy, shapes: Shapes, args: tuple[Any, ...]) -> None:
        strict.whole(self.title, strategy[0], (len(shapes[0]) - 1,), "of which it finds the largest elements")


class Sort(Primitive):
    """The elements of a dim in order, and where they were."""

    def __init__(self, axis: int = -1, descending: bool = False) -> None:
        super().__init__(axis=axis, descending=descending)
        self.axis, self.descending = axis, descending

    def compute(self, x: Any) -> Any:
        return tuple(x.sort(self.axis, descending=self.descending))

    def check_strategy(self, strategy: Strategy, shapes: Shapes, args: tuple[Any, ...]) -> None:
        axis = strict.dim_of(self.title, self.axis, len(shapes[0]))
        strict.whole(self.title, strategy[0], (axis,), "which it sorts")


__all__ = ["ArgMaxWithValue", "ArgMinWithValue", "Argmax", "Argmin", "CumProd", "CumSum", "Sort", "TopK"]
__all__ += list(REDUCTIONS)
