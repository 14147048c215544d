"""Functions of ``map`` on arrays of any kind."""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from shardwise.errors import problem
from shardwise.mindspore.named import absent
from shardwise.mindspore.tensor_methods import dtype_of

Array = np.ndarray[Any, Any]
Function = Callable[..., Any]


def applied(functions: Sequence[Function], operands: tuple[Any, ...]) -> tuple[Any, ...]:
    """What functions make of some operands, one after the other."""
    for function in functions:
        result = function(*operands)
        operands = result if isinstance(result, tuple) else (result,)
    return operands


def numpys(dtype: Any) -> np.dtype[Any]:
    """A dtype of torch, by name, or of numpy, as numpy's."""
    return torch.empty(0, dtype=dtype_of(dtype)).numpy().dtype


class Compose:
    """Functions one after the other."""

    def __init__(self, transforms: Sequence[Function]) -> None:
        if not isinstance(transforms, (list, tuple)) or not all(map(callable, transforms)):
            raise TypeError(problem(f"Compose({transforms!r})", fix="a list of functions"))
        self.transforms = list(transforms)

    def __call__(self, *operands: Any) -> Any:
        results = applied(self.transforms, operands)
        return results[0] if len(results) == 1 else results


class RandomApply(Compose):
    """All of the functions, with probability ``prob``."""

    def __init__(self, transforms: Sequence[Function], prob: float = 0.5) -> None:
        super().__init__(transforms)
        self.prob = prob

    def __call__(self, *operands: Any) -> Any:
        if np.random.random() < self.prob:
            return super().__call__(*operands)
        return operands[0] if len(operands) == 1 else operands


class RandomChoice(Compose):
    """One of the functions."""

    def __call__(self, *operands: Any) -> Any:
        return self.transforms[np.random.randint(len(self.transforms))](*operands)


class RandomOrder(Compose):
    """The functions in a random order."""

    def __call__(self, *operands: Any) -> Any:
        order = [self.transforms[i] for i in np.random.permutation(len(self.transforms))]
        return Compose(order)(*operands)


class TypeCast:
    """Another dtype."""

    def __init__(self, output_type: Any) -> None:
        self.dtype = numpys(output_type)

    def __call__(self, x: Any) -> Array:
        return np.asarray(x).astype(self.dtype)


class OneHot:
    """Class numbers as one-hot vectors. ``smoothing_rate``: shared by all classes."""

    def __init__(self, num_classes: int, smoothing_rate: float = 0.0) -> None:
        self.num_classes, self.rate = num_classes, smoothing_rate

    def __call__(self, x: Any) -> Array:
        numbers = np.asarray(x)
        if numbers.size and not 0 <= numbers.min() <= numbers.max() < self.num_classes:
            what = f"OneHot({self.num_classes}) of the class {int(numbers.max())}"
            raise RuntimeError(problem(what, fix=f"numbers from 0 to {self.num_classes - 1}"))
        hot = np.eye(self.num_classes, dtype=np.float32 if self.rate else numbers.dtype)[numbers]
        return np.asarray(hot * (1 - self.rate) + self.rate / self.num_classes if self.rate else hot)


class Fill:
    """The same value everywhere."""

    def __init__(self, fill_value: Any) -> None:
        self.value = fill_value

    def __call__(self, x: Any) -> Array:
        return np.full_like(np.asarray(x), self.value)


class PadEnd:
    """As long as ``pad_shape``, cut or filled at the ends; None keeps a dim."""

    def __init__(self, pad_shape: Sequence[int | None], pad_value: Any = None) -> None:
        self.shape, self.value = tuple(pad_shape), pad_value

    def __call__(self, x: Any) -> Array:
        array = np.asarray(x)
        shape = [length if size is None else size for length, size in zip(array.shape, self.shape, strict=True)]
        padded = np.full(shape, self.value or 0, array.dtype)
        common = tuple(slice(min(a, b)) for a, b in zip(array.shape, shape, strict=True))
        padded[common] = array[common]
        return padded


class Concatenate:
    """The columns one behind the other along ``axis``, between ``prepend`` and ``append``."""

    def __init__(self, axis: int = 0, prepend: Any = None, append: Any = None) -> None:
        self.axis, self.ends = axis, (prepend, append)

    def __call__(self, *operands: Any) -> Array:
        first, last = ([] if end is None else [np.asarray(end)] for end in self.ends)
        return np.concatenate([*first, *map(np.asarray, operands), *last], self.axis)


class Duplicate:
    """The column twice."""

    def __call__(self, x: Any) -> tuple[Any, Any]:
        return x, np.copy(x)


class Relational(enum.Enum):
    """How ``Mask`` compares."""

    EQ, NE, GT, GE, LT, LE = "equal", "not_equal", "greater", "greater_equal", "less", "less_equal"


class Mask:
    """Where elements compare so with a constant."""

    def __init__(self, operator: Relational, constant: Any, dtype: Any = np.bool_) -> None:
        self.compare, self.constant, self.dtype = getattr(np, operator.value), constant, numpys(dtype)

    def __call__(self, x: Any) -> Array:
        return np.asarray(self.compare(np.asarray(x), self.constant)).astype(self.dtype)


class Slice:
    """A part: numbers, slices, lists of numbers or None, one per dim."""

    def __init__(self, *slices: Any) -> None:
        self.slices = tuple(slice(None) if index is None else index for index in slices)

    def __call__(self, x: Any) -> Array:
        array = np.asarray(x)
        for dim, index in enumerate(self.slices):
            if index is not Ellipsis:
                array = array[(slice(None),) * dim + ([index] if isinstance(index, int) else index,)]
        return array


class Unique:
    """The different elements, where each was, and how often."""

    def __call__(self, x: Any) -> tuple[Any, ...]:
        return np.unique(np.asarray(x), return_inverse=True, return_counts=True)


__all__ = [
    "Compose", "Concatenate", "Duplicate", "Fill", "Mask", "OneHot", "PadEnd", "RandomApply", "RandomChoice",
    "RandomOrder", "Relational", "Slice", "TypeCast", "Unique",
]  # fmt: skip
__getattr__ = absent(__name__, lambda: __all__, {"c_transforms": "transforms itself", "OneHotOp": "OneHot"})
