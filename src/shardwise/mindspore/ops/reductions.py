"""Operators that reduce dims, or scan or sort one dim."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch

from shardwise.mindspore import strict
from shardwise.mindspore.named import classes_of
from shardwise.mindspore.ops.primitive import OfSettings, Simple
from shardwise.mindspore.strict import Shapes, Strategy
from shardwise.mindspore.tensor_methods import dims_of, product

Axes = int | Sequence[int]


class Reduce(OfSettings, keep_dims=False):
    """``ReduceSum(keep_dims)(x, axis)`` over any dims, by default all. Split dims are reduced over the devices."""

    function: ClassVar[Callable[..., Any]]  # takes x, dims and keepdim

    def compute(self, x: Any, axis: Axes = ()) -> Any:
        return type(self).function(x, dims_of(x, axis), self.keep_dims)


REDUCTIONS = {
    f"Reduce{name}": type(f"Reduce{name}", (Reduce,), {
        "function": staticmethod(function), "sums": function in (torch.sum, torch.mean),
        "lead": 0 if function is product else None, "__doc__": Reduce.__doc__, "__module__": __name__,
    }) for name, function in (
        ("Sum", torch.sum), ("Mean", torch.mean), ("Max", torch.amax), ("Min", torch.amin), ("All", torch.all),
        ("Any", torch.any), ("Prod", product))
}  # fmt: skip
globals().update(REDUCTIONS)


def _place_and_value(extreme: Callable[..., Any], x: Any, axis: int, keep_dims: bool) -> tuple[Any, Any]:
    value, index = extreme(x, axis, keepdim=keep_dims)
    return index, value


PLACES = classes_of({  # index of the largest or smallest element of a dim
    "ArgMaxWithValue": lambda x, *, axis=0, keep_dims=False: _place_and_value(torch.max, x, axis, keep_dims),
    "ArgMinWithValue": lambda x, *, axis=0, keep_dims=False: _place_and_value(torch.min, x, axis, keep_dims),
    "Argmax": lambda x, *, axis=-1, output_type=torch.int32: x.argmax(axis).to(output_type),
    "Argmin": lambda x, *, axis=-1, output_type=torch.int32: x.argmin(axis).to(output_type),
}, Simple, __name__, lead=None)  # fmt: skip
globals().update(PLACES)


class CumSum(OfSettings, exclusive=False, reverse=False):
    """Cumulative sums: ``CumSum(exclusive, reverse)(x, axis)``. ``exclusive`` leaves out the element itself,
    ``reverse`` starts at the last one."""

    lead = 0

    def compute(self, x: Any, axis: int) -> Any:
        y = x.flip(axis) if self.reverse else x
        y = y.cumsum(axis)
        y = y.flip(axis) if self.reverse else y
        return y - x if self.exclusive else y

    def check_strategy(self, strategy: Strategy, shapes: Shapes, args: tuple[Any, ...]) -> None:
        axis = strict.dim_of(self.title, args[1], len(shapes[0]))
        strict.whole(self.title, strategy[0], (axis,), "along which it accumulates")


class CumProd(CumSum):
    """Cumulative products, with the settings of ``CumSum``."""

    def compute(self, x: Any, axis: int) -> Any:
        y = x.flip(axis) if self.reverse else x
        if self.exclusive:
            y = torch.cat((torch.ones_like(y.narrow(axis, 0, 1)), y.narrow(axis, 0, y.shape[axis] - 1)), axis)
        y = y.cumprod(axis)
        return y.flip(axis) if self.reverse else y


class TopK(OfSettings, sorted=True):
    """The k largest elements of the last dim and their indices: ``TopK(sorted)(x, k)``."""

    def compute(self, x: Any, k: int) -> Any:
        return tuple(x.topk(k, -1, sorted=self.sorted))

    def check_strategy(self, strategy: Strategy, shapes: Shapes, args: tuple[Any, ...]) -> None:
        strict.whole(self.title, strategy[0], (len(shapes[0]) - 1,), "of which it finds the largest elements")


class Sort(OfSettings, axis=-1, descending=False):
    """The sorted elements of a dim and their indices."""

    def compute(self, x: Any) -> Any:
        return tuple(x.sort(self.axis, descending=self.descending))

    def check_strategy(self, strategy: Strategy, shapes: Shapes, args: tuple[Any, ...]) -> None:
        axis = strict.dim_of(self.title, self.axis, len(shapes[0]))
        strict.whole(self.title, strategy[0], (axis,), "which it sorts")


__all__ = ["CumProd", "CumSum", "Sort", "TopK", *PLACES, *REDUCTIONS]
