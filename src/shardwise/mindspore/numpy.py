"""``mindspore.numpy``: functions under numpy's names, implemented with ``ops`` and torch."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce, wraps
from typing import Any

import numpy as np
import torch

from shardwise.mindspore.named import TABLES, absent
from shardwise.mindspore.ops.functions import FUNCTIONS, ours
from shardwise.mindspore.ops.of_torch import of_torch
from shardwise.mindspore.tensor import Tensor, as_torch
from shardwise.mindspore.tensor_methods import dtype_of, taken


def _as_tensor(obj: Any, dtype: Any = None, copy: bool = True, ndmin: int = 0) -> Tensor:
    tensor = as_torch(obj, None if dtype is None else dtype_of(dtype))
    return Tensor(tensor.reshape((1,) * max(ndmin - tensor.dim(), 0) + tuple(tensor.shape)))


def _in_words(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function of tensors so that it also takes lists and numbers."""

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*(_as_tensor(x) if isinstance(x, (list, tuple)) and x else x for x in args), **kwargs)

    call.__module__, call.__name__, call.__qualname__ = __name__, name, name  # where pickle finds it
    return call


def _numbers(x: Any, dtype: Any) -> Any:
    """Return numbers as a dtype; whole ones are int32 by default."""
    return x.to(
        torch.int32 if dtype is None and x.dtype == torch.int64 else x.dtype if dtype is None else dtype_of(dtype)
    )


def _flat(a: Any, axis: int | None) -> tuple[Any, int]:
    return (a.reshape(-1), 0) if axis is None else (a, axis)


_OWN: dict[str, Callable[..., Any]] = {
    **of_torch(TABLES["numpy"]["of_torch"]),
    "size": lambda a, axis=None: a.numel() if axis is None else a.shape[axis],
    "arange": lambda start, stop=None, step=1, dtype=None: _numbers(FUNCTIONS["arange"](start, stop, step), dtype),
    "array": _as_tensor,
    "asarray": _as_tensor,
    "dot": lambda a, b: a * b if not (a.dim() and b.dim()) else torch.tensordot(a, b, ([-1], [max(b.dim() - 2, 0)])),
    "empty": FUNCTIONS["zeros"],
    "cumprod": lambda a, axis=None, dtype=None: FUNCTIONS["cumprod"](*_flat(a, axis), dtype=dtype),
    "cumsum": lambda a, axis=None, dtype=None: FUNCTIONS["cumsum"](*_flat(a, axis), dtype=dtype),
    "full": lambda shape, fill_value, dtype=None: _numbers(FUNCTIONS["full"](shape, fill_value), dtype),
    "append": lambda arr, values, axis=None: torch.cat(
        (arr.reshape(-1), _as_tensor(values).reshape(-1)) if axis is None else (arr, values), axis or 0),
    "pad": lambda arr, pad_width, mode="constant", constant_values=0: FUNCTIONS["pad"](
        arr, [int(n) for pair in reversed(np.broadcast_to(pad_width, (arr.dim(), 2)).tolist()) for n in pair], mode,
        constant_values),
    "select": lambda condlist, choicelist, default=0: reduce(lambda rest, case: torch.where(case[0], case[1], rest),
        reversed(list(zip(condlist, choicelist, strict=True))), _as_tensor(default).to(choicelist[0])),
    "sort": lambda a, axis=-1: FUNCTIONS["sort"](a, axis)[0],
    "take": lambda a, indices, axis=None: taken(a, indices, axis),
    "transpose": lambda a, axes=None: a.permute(tuple(axes) if axes is not None else tuple(reversed(range(a.dim())))),
}  # fmt: skip
_OWN = {name: ours(name, function, __name__) for name, function in _OWN.items()}
_OWN["round"] = _OWN["around"]
_of_ops = (row.partition("=") for row in TABLES["numpy"]["functions"].split())
FUNCTIONS_HERE: dict[str, Callable[..., Any]] = {
    name: function if name in TABLES["numpy"]["as_given"].split() else _in_words(name, function)
    for name, function in ({name: FUNCTIONS[same or name] for name, _, same in _of_ops} | _OWN).items()
}
pi, e, inf, nan, newaxis = 3.141592653589793, 2.718281828459045, float("inf"), float("nan"), None
float16, float32, float64 = torch.float16, torch.float32, torch.float64
int8, int16, int32, int64, uint8, bool_ = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.bool)

__all__ = list(FUNCTIONS_HERE)
__getattr__ = absent(__name__, lambda: __all__, FUNCTIONS_HERE)
