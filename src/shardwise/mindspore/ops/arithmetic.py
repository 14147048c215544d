"""Elementwise operators, matrix products, and the bias."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F

from shardwise.errors import problem
from shardwise.mindspore.library import leading_names
from shardwise.mindspore.named import TABLES, Function, classes_of
from shardwise.mindspore.ops.of_torch import of_functions
from shardwise.mindspore.ops.primitive import Names, OfSettings, Simple, counted, dim_names, notation
from shardwise.mindspore.strict import Faults, Shapes, Strategy


class Elementwise(Simple):
    """An elementwise operator: ``function`` of one or several operands, broadcast."""

    lead = None

    def led(self, strategy: Strategy, *args: Any) -> Any:
        """Split the result by the counts of all operands. The operators inside follow it."""
        rank = max(map(len, strategy))
        padded = ((1,) * (rank - len(counts)) + counts for counts in strategy)
        return counted(self.compute(*args), tuple(map(max, zip(*padded, strict=True))))

    def followed(self, names: Names, args: tuple[Any, ...]) -> frozenset[str]:
        return frozenset(name for operand_names in names for name in operand_names)


def _extreme(function: Function, bound: str) -> Function:
    """Return a function of two operands, of which one may be a number: a bound of the other."""

    def computed(x: Any, y: Any) -> Any:
        if isinstance(x, torch.Tensor) and isinstance(y, torch.Tensor):
            return function(x, y)
        return x.clamp(**{bound: y}) if isinstance(x, torch.Tensor) else y.clamp(**{bound: x})

    return computed


ELEMENTS: dict[str, Any] = {
    **of_functions(TABLES["ops"]["elements"]),
    "GeLU": lambda x: F.gelu(x, approximate="tanh"), "Maximum": _extreme(torch.maximum, "min"),
    "Minimum": _extreme(torch.minimum, "max"),
    "Cast": lambda x, dtype: (x if isinstance(x, torch.Tensor) else torch.as_tensor(x)).to(dtype),
    "Elu": lambda x, *, alpha=1.0: F.elu(x, alpha),
    "LeakyReLU": lambda x, *, alpha=0.2: F.leaky_relu(x, alpha),
}  # fmt: skip
COMPOSED: dict[str, Any] = {  # made of several torch operators
    "AddN": lambda tensors: sum(tensors[1:], tensors[0]),
    "DivNoNan": lambda x, y: torch.where(y == 0, 0, x / torch.where(y == 0, 1, y)),
    "Identity": torch.clone,
    "Softsign": lambda x: x / (1 + x.abs()),
    "SquaredDifference": lambda x, y: (x - y).square(),
}


class MatMul(OfSettings, transpose_a=False, transpose_b=False):
    """The product of two matrices, with batch dims (if any) broadcast."""

    sums = True

    def _is_linear(self, *shapes: Any) -> bool:
        """Return whether torch has the product as one operator, which reads a weight of (out, in) as it is stored."""
        return self.transpose_b and not self.transpose_a and all(len(shape) == 2 for shape in shapes)

    def compute(self, x: Any, y: Any) -> Any:
        if self._is_linear(x.shape, y.shape) and x.shape[1] == y.shape[1]:
            return F.linear(x, y)
        x = x.transpose(-1, -2) if self.transpose_a else x
        y = y.transpose(-1, -2) if self.transpose_b else y
        if min(x.dim(), y.dim()) > 1 and x.shape[-1] != y.shape[-2]:
            what = f"{self.title}: {list(x.shape)} times {list(y.shape)}: {x.shape[-1]} columns, {y.shape[-2]} rows"
            fix = "shapes that fit; where data is made by a function, compare the order of its arguments"
            raise ValueError(problem(what, op=self.title, fix=fix))
        return torch.matmul(x, y)

    def operand_counts(self, strategy: Strategy, shapes: Shapes, args: tuple[Any, ...]) -> Strategy:
        swapped = (self.transpose_a, self.transpose_b and not self._is_linear(*shapes))
        first, second = (
            (*counts[:-2], counts[-1], counts[-2]) if swap and len(counts) > 1 else counts
            for counts, swap in zip(strategy, swapped, strict=True)
        )
        return first, second

    def dim_names(self, shapes: Shapes, args: tuple[Any, ...]) -> Names:
        first, second = ("k m" if self.transpose_a else "m k"), ("n k" if self.transpose_b else "k n")
        texts = (f"b... {dims}" if len(shape) > 1 else "k" for dims, shape in zip((first, second), shapes, strict=True))
        return dim_names(", ".join(texts), [len(shape) for shape in shapes])

    def strategy_text(self, strategy: Strategy | None, args: tuple[Any, ...]) -> str | None:
        """Return the layout notation if only the second operand has the batch dims: the device matrix has the order
        batch dims, m, k, n. The library would assign devices in the order in which dims appear."""
        shapes = self.strategy_shapes(args)
        batch = self._batch(shapes)
        first, second = ((1,) * (len(batch) + 2 - len(shape)) + shape for shape in shapes)
        if strategy is None or not any(a < b for a, b in zip(first[:-2], second[:-2], strict=True)):
            return None
        counts = self.counts_by_name(strategy, shapes, args)
        letters = (*leading_names(len(batch)), *"mkn")
        return notation({axis: counts[name] for axis, name in zip(letters, (*batch, *"mkn"), strict=True)})

    def _batch(self, shapes: Shapes) -> tuple[str, ...]:
        return tuple(f"b{i}" for i in range(max(map(len, shapes)) - 2, 0, -1))

    def faults(self, strategy: Strategy, shapes: Shapes, args: tuple[Any, ...]) -> Faults:
        if any(len(shape) < 2 for shape in shapes):
            what = f"the strategy {strategy} is for inputs {list(map(list, shapes))}, of which one is a vector"
            yield what, "two matrices, or set_auto_parallel_context(strict=False)"
        columns, rows = (
            dict(zip(names, counts, strict=True))["k"]
            for names, counts in zip(self.dim_names(shapes, args), strategy, strict=True)
        )
        if columns != rows:
            yield (
                f"the transpose_b is {str(self.transpose_b).lower()}, the shard num of first input's column is "
                f"{columns}, but the shard num of second input's row is {rows}",
                "both are the dim that the product sums over: split it equally in both inputs",
            )
        counts = self.counts_by_name(strategy, shapes, ())
        a, b, c = (counts[name] for name in "mkn")
        batch = [counts[name] for name in self._batch(shapes)]
        reduced, scattered = ((*batch, a, c),), ((*batch, a * b, c),)
        if self.out_strategy not in (None, reduced, scattered):
            yield (
                f"the output strategy {self.out_strategy} of {strategy} is neither {reduced} (AllReduce) nor "
                f"{scattered} (ReduceScatter)",
                "one of the two",
            )


class BatchMatMul(MatMul):
    """The products of two batches of matrices."""


class BiasAdd(OfSettings, data_format="NCHW"):
    """x + b, where b is broadcast along dim 1 of x."""

    dims = "n c b..., c"

    def compute(self, x: Any, b: Any) -> Any:
        return x + b

    def prepared(self, strategy: Strategy | None, args: tuple[Any, ...]) -> tuple[Any, ...]:
        x, b = args
        for _ in range(x.dim() - 2):
            b = b.unsqueeze(-1)
        return x, b

    def operand_counts(self, strategy: Strategy, shapes: Shapes, args: tuple[Any, ...]) -> Strategy:
        first, second = strategy
        return first, (*second, *(1,) * (len(shapes[0]) - 2))


CLASSES = classes_of(ELEMENTS, Elementwise, __name__) | classes_of(COMPOSED, Elementwise, __name__, lead=0)
globals().update(CLASSES)

__all__ = ["BatchMatMul", "BiasAdd", "MatMul", *CLASSES]
