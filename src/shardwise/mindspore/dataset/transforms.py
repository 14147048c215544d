"""Functions of ``map`` on arrays of any kind."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from shardwise.errors import problem
from shardwise.mindspore.named import Function, WithSettings, absent, classes_of
from shardwise.mindspore.tensor_methods import dtype_of

Array = np.ndarray[Any, Any]


def applied(functions: Sequence[Function], operands: tuple[Any, ...]) -> tuple[Any, ...]:
    """Apply functions in turn to some operands."""
    for function in functions:
        result = function(*operands)
        operands = result if isinstance(result, tuple) else (result,)
    return operands


def numpys(dtype: Any) -> np.dtype[Any]:
    """Return the numpy dtype of a torch dtype, a name, or a numpy dtype."""
    return torch.empty(0, dtype=dtype_of(dtype)).numpy().dtype


class Transform(WithSettings):
    """The transform ``function(*operands, **settings)``."""

    function: Function

    def __call__(self, *operands: Any) -> Any:
        return type(self).function(*operands, **self._chosen())


class Compose(WithSettings, transforms=...):
    """A sequence of functions."""

    transforms: Any

    def _settle(self) -> None:
        if not isinstance(self.transforms, (list, tuple)) or not all(map(callable, self.transforms)):
            raise TypeError(problem(f"Compose({self.transforms!r})", fix="a list of functions"))
        self.transforms = list(self.transforms)

    def __call__(self, *operands: Any) -> Any:
        results = applied(self.transforms, operands)
        return results[0] if len(results) == 1 else results


class RandomApply(Compose, transforms=..., prob=0.5):
    """A sequence of functions that is applied with probability ``prob``."""

    def __call__(self, *operands: Any) -> Any:
        if np.random.random() < self.prob:
            return super().__call__(*operands)
        return operands[0] if len(operands) == 1 else operands


class RandomChoice(Compose):
    """One of the functions, chosen at random."""

    def __call__(self, *operands: Any) -> Any:
        return self.transforms[np.random.randint(len(self.transforms))](*operands)


class RandomOrder(Compose):
    """The functions in a random order."""

    def __call__(self, *operands: Any) -> Any:
        order = [self.transforms[i] for i in np.random.permutation(len(self.transforms))]
        return Compose(order)(*operands)


class TypeCast(WithSettings, output_type=...):
    """Conversion to another dtype."""

    def _settle(self) -> None:
        self.dtype = numpys(self.output_type)

    def __call__(self, x: Any) -> Array:
        return np.asarray(x).astype(self.dtype)


def _hot(x: Any, *, num_classes: int, smoothing_rate: float = 0.0) -> Array:
    """Class indices as one-hot vectors. ``smoothing_rate``: label smoothing, shared by all classes."""
    numbers, rate = np.asarray(x), smoothing_rate
    if numbers.size and not 0 <= numbers.min() <= numbers.max() < num_classes:
        what = f"OneHot({num_classes}) of the class {int(numbers.max())}"
        raise RuntimeError(problem(what, fix=f"numbers from 0 to {num_classes - 1}"))
    hot = np.eye(num_classes, dtype=np.float32 if rate else numbers.dtype)[numbers]
    return np.asarray(hot * (1 - rate) + rate / num_classes if rate else hot)


def pad_end(x: Any, *, pad_shape: Any, pad_value: Any = None) -> Array:
    """Padding or truncation to ``pad_shape`` at the ends; None keeps a dim."""
    array = np.asarray(x)
    shape = [length if size is None else size for length, size in zip(array.shape, pad_shape, strict=True)]
    padded = np.full(shape, pad_value or 0, array.dtype)
    common = tuple(slice(min(a, b)) for a, b in zip(array.shape, shape, strict=True))
    padded[common] = array[common]
    return padded


CLASSES = classes_of({
    "OneHot": _hot,
    "Fill": ("An array filled with one value.", lambda x, *, fill_value: np.full_like(np.asarray(x), fill_value)),
    "PadEnd": pad_end,
    "Concatenate": (
        "Concatenation of the columns along ``axis``, between ``prepend`` and ``append``.",
        lambda *operands, axis=0, prepend=None, append=None: np.concatenate(
            [np.asarray(x) for x in (prepend, *operands, append) if x is not None], axis)),
    "Duplicate": ("The column and a copy of it.", lambda x: (x, np.copy(x))),
    "Unique": (
        "The distinct elements, the index of each element among them, and their counts.",
        lambda x: np.unique(np.asarray(x), return_inverse=True, return_counts=True)),
}, Transform, __name__)  # fmt: skip
globals().update(CLASSES)


class Relational(enum.Enum):
    """Comparisons of ``Mask``."""

    EQ, NE, GT, GE, LT, LE = "equal", "not_equal", "greater", "greater_equal", "less", "less_equal"


class Mask(WithSettings, operator=..., constant=..., dtype=np.bool_):
    """A mask of the comparison of elements with a constant."""

    dtype: Any

    def _settle(self) -> None:
        self.compare, self.dtype = getattr(np, self.operator.value), numpys(self.dtype)

    def __call__(self, x: Any) -> Array:
        return np.asarray(self.compare(np.asarray(x), self.constant)).astype(self.dtype)


class Slice:
    """A slice: numbers, slices, lists of numbers or None, one per dim."""

    def __init__(self, *slices: Any) -> None:
        self.slices = tuple(slice(None) if index is None else index for index in slices)

    def __call__(self, x: Any) -> Array:
        array = np.asarray(x)
        for dim, index in enumerate(self.slices):
            if index is not Ellipsis:
                array = array[(slice(None),) * dim + ([index] if isinstance(index, int) else index,)]
        return array


__all__ = [
    "Compose", "Mask", "RandomApply", "RandomChoice", "RandomOrder", "Relational", "Slice", "TypeCast", *CLASSES,
]  # fmt: skip
__getattr__ = absent(__name__, lambda: __all__, {"c_transforms": "transforms itself", "OneHotOp": "OneHot"})
