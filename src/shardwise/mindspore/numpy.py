"""``mindspore.numpy``: functions under numpy's names, implemented with ``ops`` and torch."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import Any

import numpy as np
import torch

from shardwise.mindspore.checks import one_of
from shardwise.mindspore.named import absent
from shardwise.mindspore.ops.functions import FUNCTIONS, ours
from shardwise.mindspore.tensor import Tensor, as_torch
from shardwise.mindspore.tensor_methods import dtype_of, taken


def _as_tensor(obj: Any, dtype: Any = None, copy: bool = True, ndmin: int = 0) -> Tensor:
    tensor = as_torch(obj, None if dtype is None else dtype_of(dtype))
    return Tensor(tensor.reshape((1,) * max(ndmin - tensor.dim(), 0) + tuple(tensor.shape)))


def _in_words(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function of tensors so that it also takes lists and numbers."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*(_as_tensor(x) if isinstance(x, (list, tuple)) and x else x for x in args), **kwargs)

    return call


def _rolled(a: Any, axis: int, start: int = 0) -> Any:
    """Move ``axis`` before ``start``."""
    axis, start = axis % a.dim(), start + a.dim() if start < 0 else start
    return torch.movedim(a, axis, start - 1 if axis < start else start)


def _interpolated(x: Any, xp: Any, fp: Any, left: Any = None, right: Any = None) -> Any:
    """Interpolate linearly between points (xp, fp) at ``x``; outside of them use the end values."""
    x = torch.as_tensor(x, dtype=fp.dtype)
    high = torch.searchsorted(xp, x).clamp(1, len(xp) - 1)
    share = (x - xp[high - 1]) / (xp[high] - xp[high - 1])
    inside = torch.lerp(fp[high - 1], fp[high], share.clamp(0, 1))
    below = inside if left is None else torch.where(x < xp[0], left, inside)
    return below if right is None else torch.where(x > xp[-1], right, below)


def _convolved(a: Any, v: Any, mode: str = "full") -> Any:
    """Convolve two sequences."""
    whole = torch.nn.functional.conv1d(a.view(1, 1, -1), v.flip(0).view(1, 1, -1), padding=len(v) - 1).view(-1)
    size = {"full": len(whole), "same": max(len(a), len(v)), "valid": abs(len(a) - len(v)) + 1}[mode]
    return whole[(len(whole) - size) // 2 :][:size]


def _set(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a set operation of two sequences: the sorted distinct elements of the first that ``function`` keeps."""
    return lambda ar1, ar2, assume_unique=False: (distinct := torch.unique(ar1))[function(distinct, ar2)]


def _along_axis(func1d: Callable[..., Any], axis: int, arr: Any, *args: Any, **kwargs: Any) -> Any:
    """Apply a function to each row along ``axis``, and put the dims of its results there."""
    rows, axis = arr.movedim(axis, -1), axis % arr.dim()
    stacked = torch.stack([torch.as_tensor(func1d(row, *args, **kwargs)) for row in rows.reshape(-1, rows.shape[-1])])
    out = stacked.reshape(*rows.shape[:-1], *stacked.shape[1:])
    return out.movedim(tuple(range(rows.dim() - 1, out.dim())), tuple(range(axis, axis + out.dim() - rows.dim() + 1)))


def _chosen(a: Any, choices: Any, mode: str = "clip") -> Any:
    """Pick at each position the element of the choice that ``a`` numbers. Numbers out of range are clipped ("clip") or
    wrapped ("wrap")."""
    is_cut = one_of("clip", "wrap")("mode", mode) == "clip"
    numbers = (a.clamp(0, len(choices) - 1) if is_cut else a % len(choices)).long()
    *broadcast, numbers = torch.broadcast_tensors(*choices, numbers)
    return torch.stack(broadcast).gather(0, numbers.unsqueeze(0)).squeeze(0)


def _numbers(x: Any, dtype: Any) -> Any:
    """Return numbers as a dtype; whole ones are int32 by default."""
    return x.to(
        torch.int32 if dtype is None and x.dtype == torch.int64 else x.dtype if dtype is None else dtype_of(dtype)
    )


def _flat(a: Any, axis: int | None) -> tuple[Any, int]:
    return (a.reshape(-1), 0) if axis is None else (a, axis)


_WINDOWS = {"bartlett": "bartlett", "blackman": "blackman", "hamming": "hamming", "hanning": "hann"}

_OWN: dict[str, Callable[..., Any]] = {
    **{name: (lambda window: lambda M: window(M, periodic=False))(getattr(torch, f"{kind}_window"))
       for name, kind in _WINDOWS.items()},
    "apply_along_axis": _along_axis,
    "around": lambda a, decimals=0: torch.round(a, decimals=decimals),
    "array_equal": lambda a1, a2, equal_nan=False: a1.shape == a2.shape and bool(torch.isclose(
        a1, a2, 0, 0, equal_nan).all()),
    "broadcast_arrays": lambda *args: list(torch.broadcast_tensors(*args)),
    "cbrt": lambda x: x.sign() * x.abs() ** (1 / 3),
    "choose": _chosen,
    "convolve": _convolved,
    "correlate": lambda a, v, mode="valid": _convolved(a, v.flip(0), mode),
    "diag_indices": lambda n, ndim=2: (torch.arange(n, dtype=torch.int32),) * ndim,
    "digitize": lambda x, bins, right=False: torch.bucketize(x, bins, right=not right).to(torch.int32),
    "divmod": lambda x1, x2: (torch.floor_divide(x1, x2), torch.remainder(x1, x2)),
    "ediff1d": lambda ary, to_end=None, to_begin=None: torch.cat([
        part.reshape(-1) for part in (to_begin, ary.reshape(-1).diff(), to_end) if part is not None]),
    "geomspace": lambda start, stop, num=50, dtype=torch.float32: (
        start * (stop / start) ** torch.linspace(0, 1, num, dtype=torch.float64)).to(dtype_of(dtype)),
    "gradient": lambda f, *varargs, axis=None, edge_order=1: gradients[0] if len(gradients := torch.gradient(
        f, spacing=(varargs if len(varargs) > 1 else varargs[0]) if varargs else 1.0, dim=axis,
        edge_order=edge_order)) == 1 else list(gradients),
    "histogram": lambda a, bins=10, range=None, weights=None, density=False: tuple(torch.histogram(
        a.float(), bins, range=range, weight=weights, density=density)),
    "interp": _interpolated,
    "intersect1d": _set(torch.isin),
    "isin": lambda element, test_elements, invert=False: torch.isin(element, test_elements, invert=invert),
    "matrix_power": lambda a, n: torch.linalg.matrix_power(a, n),
    "multi_dot": lambda arrays: torch.linalg.multi_dot(list(arrays)),
    "nancumsum": lambda a, axis=None: torch.nan_to_num(a if axis is not None else a.reshape(-1)).cumsum(axis or 0),
    "nanmax": lambda a, axis=None, keepdims=False: FUNCTIONS["amax"](
        torch.where(a.isnan(), -np.inf, a), axis, keepdims),
    "nanmin": lambda a, axis=None, keepdims=False: FUNCTIONS["amin"](
        torch.where(a.isnan(), np.inf, a), axis, keepdims),
    "polyval": lambda p, x: reduce(lambda sum, coefficient: sum * x + coefficient, p, torch.zeros_like(x)),
    "roll": lambda a, shift, axis=None: torch.roll(a, shift, axis),
    "ptp": lambda x, axis=None, keepdims=False: FUNCTIONS["amax"](x, axis, keepdims) - FUNCTIONS["amin"](
        x, axis, keepdims),
    "rollaxis": _rolled,
    "setdiff1d": _set(lambda distinct, others: ~torch.isin(distinct, others)),
    "size": lambda a, axis=None: a.numel() if axis is None else a.shape[axis],
    "take_along_axis": lambda arr, indices, axis: torch.take_along_dim(arr, indices.long(), axis),
    "tri": lambda N, M=None, k=0, dtype=torch.float32: torch.ones(N, M or N, dtype=dtype_of(dtype)).tril(k),
    "tril_indices": lambda n, k=0, m=None: tuple(torch.tril_indices(n, m or n, k)),
    "triu_indices": lambda n, k=0, m=None: tuple(torch.triu_indices(n, m or n, k)),
    "vdot": lambda a, b: torch.dot(a.reshape(-1), b.reshape(-1)),
    "arange": lambda start, stop=None, step=1, dtype=None: _numbers(FUNCTIONS["arange"](start, stop, step), dtype),
    "array": _as_tensor,
    "asarray": _as_tensor,
    "asfarray": lambda a, dtype=torch.float32: _as_tensor(a, dtype),
    "copy": lambda a: a.clone(),
    "dot": lambda a, b: a * b if not (a.dim() and b.dim()) else torch.tensordot(a, b, ([-1], [max(b.dim() - 2, 0)])),
    "empty": FUNCTIONS["zeros"],
    "cumprod": lambda a, axis=None, dtype=None: FUNCTIONS["cumprod"](*_flat(a, axis), dtype=dtype),
    "cumsum": lambda a, axis=None, dtype=None: FUNCTIONS["cumsum"](*_flat(a, axis), dtype=dtype),
    "flip": lambda m, axis=None: FUNCTIONS["flip"](m, axis),
    "full": lambda shape, fill_value, dtype=None: _numbers(FUNCTIONS["full"](shape, fill_value), dtype),
    "linspace": lambda start, stop, num=50, dtype=None: torch.linspace(
        start, stop, num, dtype=None if dtype is None else dtype_of(dtype)),
    "mean": lambda a, axis=None, keepdims=False: FUNCTIONS["mean"](a, axis, keepdims),
    "split": lambda x, indices_or_sections, axis=0: list(torch.tensor_split(x, indices_or_sections, axis)),
    "sum": lambda a, axis=None, dtype=None, keepdims=False: FUNCTIONS["sum"](a, axis, keepdims, dtype=dtype),
    "append": lambda arr, values, axis=None: torch.cat(
        (arr.reshape(-1), _as_tensor(values).reshape(-1)) if axis is None else (arr, values), axis or 0),
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
        lambda rest, case: torch.where(case[0], case[1], rest),
        reversed(list(zip(condlist, choicelist, strict=True))), _as_tensor(default).to(choicelist[0])),
    "sort": lambda a, axis=-1: FUNCTIONS["sort"](a, axis)[0],
    "take": lambda a, indices, axis=None: taken(a, indices, axis),
    "tensordot": lambda a, b, axes=2: torch.tensordot(a, b, axes),
    "transpose": lambda a, axes=None: a.permute(tuple(axes) if axes is not None else tuple(reversed(range(a.dim())))),
    "unique": lambda x, return_inverse=False: torch.unique(x, return_inverse=return_inverse),
}  # fmt: skip
_OWN = {name: ours(name, function) for name, function in _OWN.items()}
_LISTS = {"concatenate": "cat", "stack": "stack", "vstack": "vstack", "hstack": "hstack", "dstack": "dstack",
          "column_stack": "column_stack"}  # fmt: skip
_SAME = """
    power=pow divide=div true_divide=div mod=remainder multiply=mul subtract=sub negative=neg max=amax min=amin
    invert=logical_not ravel=ravel repeat=repeat_interleave identity=eye arccosh=acosh arcsinh=asinh arctanh=atanh
    fabs=abs fix=trunc rint=round radians=deg2rad degrees=rad2deg"""
_NAMES = """
    abs absolute add all amax amin any arccos arcsin arctan arctan2 argmax argmin argsort atleast_1d atleast_2d
    atleast_3d bincount bitwise_and bitwise_or bitwise_xor broadcast_to ceil clip copysign corrcoef cos cosh
    count_nonzero cov cross deg2rad diag diagflat diagonal diff dsplit eq equal exp exp2 expand_dims
    expm1 eye fliplr flipud float_power floor floor_divide fmax fmin fmod full_like gcd greater greater_equal
    heaviside hsplit hypot inner isclose isfinite isinf isnan isneginf isposinf kron lcm less less_equal log log10
    log1p log2 logaddexp logaddexp2 logical_and logical_not logical_or logical_xor logspace matmul maximum meshgrid
    minimum moveaxis nan_to_num nanmean nansum norm not_equal ones ones_like outer positive prod rad2deg rand randint
    randn ravel reciprocal remainder reshape rot90 searchsorted sign signbit sin sinc sinh sqrt square squeeze std
    swapaxes tan tanh tile trace trapz tril triu trunc vander var vsplit where zeros zeros_like"""
FUNCTIONS_HERE: dict[str, Callable[..., Any]] = {
    **{name: _in_words(FUNCTIONS[name]) for name in _NAMES.split()},
    **{name: _in_words(FUNCTIONS[same]) for name, _, same in (row.partition("=") for row in _SAME.split())},
    **{name: FUNCTIONS[same] for name, same in _LISTS.items()},
    **{name: _in_words(function) for name, function in _OWN.items()},
    **dict.fromkeys(("array", "asarray"), _as_tensor),
    **{name: _OWN[name] for name in ("arange", "full", "indices", "pad", "roll", "select")},
}
for _name in ("reshape", "zeros", "ones", "broadcast_to", "tile", "rand", "randint"):  # tuples are shapes here
    FUNCTIONS_HERE[_name] = FUNCTIONS[_name]
pi, e, inf, nan, newaxis = 3.141592653589793, 2.718281828459045, float("inf"), float("nan"), None
float16, float32, float64 = torch.float16, torch.float32, torch.float64
int8, int16, int32, int64, uint8, bool_ = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.bool)

__all__ = list(FUNCTIONS_HERE)
_missing = absent(__name__, lambda: __all__)


def __getattr__(name: str) -> Any:
    """Return a function. As module globals their names would hide Python's own in this file."""
    return FUNCTIONS_HERE[name] if name in FUNCTIONS_HERE else _missing(name)
