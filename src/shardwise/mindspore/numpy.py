"""``mindspore.numpy``: functions under numpy's names, over those of ``ops`` and torch's."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import Any

import numpy as np
import torch

from shardwise.mindspore.named import absent
from shardwise.mindspore.ops.functions import FUNCTIONS, ours
from shardwise.mindspore.tensor import Tensor, as_torch
from shardwise.mindspore.tensor_methods import dtype_of, taken


def _made(obj: Any, dtype: Any = None, copy: bool = True, ndmin: int = 0) -> Tensor:
    tensor = as_torch(obj, None if dtype is None else dtype_of(dtype))
    return Tensor(tensor.reshape((1,) * max(ndmin - tensor.dim(), 0) + tuple(tensor.shape)))


def _in_words(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of tensors, which takes lists and numbers as well."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*(_made(x) if isinstance(x, (list, tuple)) and x else x for x in args), **kwargs)

    return call


_OWN: dict[str, Callable[..., Any]] = {
    "array": _made,
    "asarray": _made,
    "asfarray": lambda a, dtype=torch.float32: _made(a, dtype),
    "copy": lambda a: a.clone(),
    "dot": lambda a, b: a * b if not (a.dim() and b.dim()) else torch.tensordot(a, b, ([-1], [max(b.dim() - 2, 0)])),
    "empty": FUNCTIONS["zeros"],
    "full": lambda shape, fill_value, dtype=None: FUNCTIONS["full"](shape, fill_value, dtype=dtype),
    "linspace": lambda start, stop, num=50, dtype=None: torch.linspace(
        start, stop, num, dtype=None if dtype is None else dtype_of(dtype)),
    "mean": lambda a, axis=None, keepdims=False: FUNCTIONS["mean"](a, axis, keepdims),
    "split": lambda x, indices_or_sections, axis=0: list(torch.tensor_split(x, indices_or_sections, axis)),
    "sum": lambda a, axis=None, dtype=None, keepdims=False: FUNCTIONS["sum"](a, axis, keepdims, dtype=dtype),
    "append": lambda arr, values, axis=None: torch.cat(
        (arr.reshape(-1), _made(values).reshape(-1)) if axis is None else (arr, values), axis or 0),
    "array_split": lambda x, indices_or_sections, axis=0: list(torch.tensor_split(x, indices_or_sections, axis)),
    "average": lambda x, axis=None, weights=None: FUNCTIONS["mean"](x, axis) if weights is None else
    FUNCTIONS["sum"](x * weights, axis) / FUNCTIONS["sum"](torch.as_tensor(weights).broadcast_to(x.shape), axis),
    "empty_like": lambda prototype, dtype=None: FUNCTIONS["zeros_like"](prototype, dtype=dtype),
    "indices": lambda dimensions, dtype=torch.int32: torch.stack(torch.meshgrid(
        *(torch.arange(size, dtype=dtype_of(dtype)) for size in dimensions), indexing="ij")),
    "pad": lambda arr, pad_width, mode="constant", constant_values=0: FUNCTIONS["pad"](
        arr, [int(n) for pair in reversed(np.broadcast_to(pad_width, (arr.dim(), 2)).tolist()) for n in pair], mode,
        constant_values),
    "select": lambda condlist, choicelist, default=0: reduce(
        lambda rest, own: torch.where(own[0], own[1], rest),
        reversed(list(zip(condlist, choicelist, strict=True))), _made(default).to(choicelist[0])),
    "sort": lambda a, axis=-1: FUNCTIONS["sort"](a, axis)[0],
    "take": lambda a, indices, axis=None: taken(a, indices, axis),
    "tensordot": lambda a, b, axes=2: torch.tensordot(a, b, axes),
    "transpose": lambda a, axes=None: a.permute(tuple(axes) if axes is not None else tuple(reversed(range(a.dim())))),
    "unique": lambda x, return_inverse=False: torch.unique(x, return_inverse=return_inverse),
}  # fmt: skip
_OWN = {name: ours(name, own) for name, own in _OWN.items()}
_LISTS = {"concatenate": "cat", "stack": "stack", "vstack": "vstack", "hstack": "hstack", "dstack": "dstack"}
_SAME = {
    "power": "pow", "divide": "div", "true_divide": "div", "mod": "remainder", "multiply": "mul", "subtract": "sub",
    "negative": "neg", "max": "amax", "min": "amin", "invert": "logical_not", "ravel": "ravel", "repeat":
    "repeat_interleave", "identity": "eye",
}  # fmt: skip
_NAMES = [
    "abs", "absolute", "add", "all", "amax", "amin", "any", "arange", "arccos", "arcsin", "arctan", "arctan2",
    "argmax", "argmin", "argsort", "atleast_1d", "atleast_2d", "atleast_3d", "bincount", "bitwise_and",
    "bitwise_or", "bitwise_xor", "broadcast_to", "ceil", "clip", "copysign", "corrcoef", "cos", "cosh",
    "count_nonzero", "cov", "cross", "cumprod", "cumsum", "deg2rad", "diag", "diagonal", "eq", "equal", "exp",
    "exp2", "expand_dims", "expm1", "eye", "flip", "fliplr", "flipud", "float_power", "floor", "floor_divide",
    "fmax", "fmin", "fmod", "full_like", "gcd", "greater", "greater_equal", "heaviside", "hypot", "inner",
    "isclose", "isfinite", "isinf", "isnan", "kron", "lcm", "less", "less_equal", "log", "log10", "log1p", "log2",
    "logaddexp", "logaddexp2", "logical_and", "logical_not", "logical_or", "logical_xor", "logspace", "matmul",
    "maximum", "meshgrid", "minimum", "moveaxis", "nan_to_num", "nanmean", "nansum", "norm", "not_equal", "ones",
    "ones_like", "outer", "prod", "rad2deg", "rand", "randint", "randn", "ravel", "reciprocal", "remainder",
    "reshape", "roll", "rot90", "searchsorted", "sign", "sin", "sinc", "sinh", "sqrt", "square", "squeeze", "std",
    "swapaxes", "tan", "tanh", "tile", "trace", "trapz", "tril", "triu", "trunc", "vander", "var", "where", "zeros",
    "zeros_like",
]  # fmt: skip
FUNCTIONS_HERE: dict[str, Callable[..., Any]] = {
    **{name: _in_words(FUNCTIONS[name]) for name in _NAMES},
    **{name: _in_words(FUNCTIONS[same]) for name, same in _SAME.items()},
    **{name: FUNCTIONS[same] for name, same in _LISTS.items()},
    **{name: _in_words(own) for name, own in _OWN.items()},
    **dict.fromkeys(("array", "asarray"), _made),
    **{name: _OWN[name] for name in ("full", "indices", "pad", "select")},
}
for _name in ("reshape", "zeros", "ones", "broadcast_to", "tile", "rand", "randint"):  # tuples are shapes here
    FUNCTIONS_HERE[_name] = FUNCTIONS[_name]
pi, e, inf, nan, newaxis = 3.141592653589793, 2.718281828459045, float("inf"), float("nan"), None
float16, float32, float64 = torch.float16, torch.float32, torch.float64
int8, int16, int32, int64, uint8, bool_ = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.bool)

__all__ = list(FUNCTIONS_HERE)
_missing = absent(__name__, lambda: __all__)


def __getattr__(name: str) -> Any:
    """The functions, whose names would hide Python's own in this file."""
    return FUNCTIONS_HERE[name] if name in FUNCTIONS_HERE else _missing(name)
