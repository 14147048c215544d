"""Functions of ``map`` on arrays of any kind: operands by position, settings by name (``named.settings_of``)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from shardwise.errors import problem
from shardwise.mindspore.checks import closest, integer
from shardwise.mindspore.named import Function, WithSettings, absent, classes_of
from shardwise.mindspore.tensor_methods import dtype_of

Array = np.ndarray[Any, Any]
Row = dict[str, Array]
Columns = str | Sequence[str] | None


def as_array(value: Any) -> Array:
    if isinstance(value, torch.Tensor):
        return value.detach().cpu().numpy()
    return np.asarray(value)


def names_of(columns: str | Sequence[str]) -> tuple[str, ...]:
    """Return column names, given as a list or as a single one."""
    names = (columns,) if isinstance(columns, str) else columns
    if not isinstance(names, list | tuple) or not names or not all(isinstance(name, str) and name for name in names):
        raise TypeError(problem(f"the names of columns are {columns!r}", fix='give a list: ["input", "label"]'))
    if twice := [name for name in names if names.count(name) > 1]:
        raise ValueError(problem(f'there are two columns "{twice[0]}"', fix="name every column once"))
    return tuple(names)


def named(columns: str | Sequence[str], column_names: Sequence[str]) -> tuple[str, ...]:
    """Check column names against those of a dataset and return them."""
    names = names_of(columns)
    if unknown := [name for name in names if name not in column_names]:
        raise ValueError(problem(f'there is no column "{unknown[0]}"', fix=closest(unknown[0], column_names)))
    return names


def count_of(name: str, value: Any, low: int = 1) -> int:
    """Check for a number of rows."""
    if integer(name, value) < low:
        raise ValueError(problem(f"{name} is {value}", fix=f"give an integer from {low} on"))
    return int(value)


def applied(functions: Sequence[Function], operands: tuple[Any, ...]) -> tuple[Any, ...]:
    """Apply functions in turn to some operands."""
    for function in functions:
        result = function(*operands)
        operands = result if isinstance(result, tuple) else (result,)
    return operands


def _one_or_all(results: tuple[Any, ...]) -> Any:
    return results[0] if len(results) == 1 else results


def numpys(dtype: Any) -> np.dtype[Any]:
    """Return the numpy dtype of a torch dtype, a name, or a numpy dtype."""
    return torch.empty(0, dtype=dtype_of(dtype)).numpy().dtype


def _functions(name: str, value: Any) -> list[Function]:
    if not isinstance(value, (list, tuple)) or not all(map(callable, value)):
        raise TypeError(problem(f"Compose({value!r})", fix="a list of functions"))
    return list(value)


DTYPES = dict.fromkeys(("output_type", "data_type", "dtype"), lambda _, dtype: numpys(dtype))  # checks of settings


class Transform(WithSettings):
    """The transform ``function(*operands, **settings)``."""

    function: Function
    checks = DTYPES

    def __call__(self, *operands: Any) -> Any:
        return type(self).function(*operands, **self._chosen())


def _hot(x: Any, *, num_classes: int, smoothing_rate: float = 0.0) -> Array:
    numbers, rate = np.asarray(x), smoothing_rate
    if numbers.size and not 0 <= numbers.min() <= numbers.max() < num_classes:
        what = f"OneHot({num_classes}) of the class {int(numbers.max())}"
        raise RuntimeError(problem(what, fix=f"numbers from 0 to {num_classes - 1}"))
    hot = np.eye(num_classes, dtype=np.float32 if rate else numbers.dtype)[numbers]
    return np.asarray(hot * (1 - rate) + rate / num_classes if rate else hot)


def pad_end(x: Any, *, pad_shape: Any, pad_value: Any = None) -> Array:
    """Pad or truncate the ends of an array; None in ``pad_shape`` keeps a dim."""
    array = np.asarray(x)
    shape = [length if size is None else size for length, size in zip(array.shape, pad_shape, strict=True)]
    padded = np.full(shape, pad_value or 0, array.dtype)
    common = tuple(slice(min(a, b)) for a, b in zip(array.shape, shape, strict=True))
    padded[common] = array[common]
    return padded


CLASSES = classes_of({
    "OneHot": _hot,
    "PadEnd": pad_end,
    "TypeCast": lambda x, *, output_type: np.asarray(x).astype(output_type),
}, Transform, __name__) | classes_of({
    "Compose": lambda *operands, transforms: _one_or_all(applied(transforms, operands)),
    "RandomApply": lambda *operands, transforms, prob=0.5: (
            _one_or_all(applied(transforms, operands) if np.random.random() < prob else operands)),
    "RandomChoice": lambda *operands, transforms: (transforms[np.random.randint(len(transforms))](*operands)),
}, Transform, __name__, checks={"transforms": _functions})  # fmt: skip
globals().update(CLASSES)

__all__ = [*CLASSES]
__getattr__ = absent(__name__, lambda: __all__)
