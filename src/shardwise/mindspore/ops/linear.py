"""Products of matrices, and the bias."""

from __future__ import annotations

from math import prod
from typing import Any

import torch

from shardwise.mindspore import strict
from shardwise.mindspore.ops.arithmetic import check_broadcast
from shardwise.mindspore.ops.primitive import Primitive, Shapes, Strategy


class MatMul(Primitive):
    """The product of two matrices, whose batch dims (if any) are broadcast to each other."""

    sums = True

    def __init__(self, transpose_a: bool = False, transpose_b: bool = False) -> None:
        super().__init__(transpose_a=transpose_a, transpose_b=transpose_b)
        self.transpose_a, self.transpose_b = transpose_a, transpose_b

    def compute(self, x: Any, y: Any) -> Any:
        x = x.transpose(-1, -2) if self.transpose_a else x
        y = y.transpose(-1, -2) if self.transpose_b else y
        return torch.matmul(x, y)

    def operand_counts(self, strategy: Strategy, shapes: Shapes, args: tuple[Any, ...]) -> Strategy:
        swapped = (self.transpose_a, self.transpose_b)
        first, second = (
            (*counts[:-2], counts[-1], counts[-2]) if swap and len(counts) > 1 else counts
            for counts, swap in zip(strategy, swapped, strict=True)
        )
        return first, second

    def _sides(self, strategy: Strategy, shapes: Shapes) -> tuple[tuple[int, ...], int, int, int]:
        """Counts of the batch dims, of rows, of the dim summed over, and of columns."""
        first, second = self.operand_counts(strategy, shapes, ())
        rank = max(len(first), len(second)) - 2
        aligned = [(1,) * (rank + 2 - len(counts)) + counts[:-2] for counts in (first, second)]
        return tuple(map(max, *aligned)) if rank else (), first[-2], first[-1], second[-1]

    def required_devices(self, strategy: Strategy, shapes: Shapes, args: tuple[Any, ...]) -> int:
        batch, *rest = self._sides(strategy, shapes)
        return prod(batch) * prod(rest)

    def check_strategy(self, strategy: Strategy, shapes: Shapes, args: tuple[Any, ...]) -> None:
        first, second = strategy
        check_broadcast(self.title, (first[:-2], second[:-2]), (shapes[0][:-2], shapes[1][:-2]))
        columns = first[-2] if self.transpose_a else first[-1]
        rows = second[-1] if self.transpose_b else second[-2]
        if columns != rows:
            raise strict.failure(
                self.title,
                f"the transpose_b is {str(self.transpose_b).lower()}, the shard num of first input's column is "
                f"{columns}, but the shard num of second input's row is {rows}",
                "both are the dim that the product sums over: split it equally in both inputs",
            )
        if self.out_strategy is not None:
            self._check_out(strategy, shapes)

    def _check_out(self, strategy: Strategy, shapes: Shapes) -> None:
        batch, a, b, c = self._sides(strategy, shapes)
        legal = ((*batch, a, c), (*batch, a * b, c))
        if self.out_strategy is None or self.out_strategy in ((legal[0],), (legal[1],)):
            return
        raise strict.failure(
            self.title,
            f"the output strategy {self.out_strategy} of {strategy} is neither {(legal[0],)} (AllReduce) nor "
            f"{(legal[1],)} (ReduceScatter)",
            "one of the two",
        )


class BatchMatMul(MatMul):
    """The products of two batches of matrices."""


class BiasAdd(Primitive):
    """x + b, where b belongs to dim 1 of x."""

    def __init__(self, data_format: str = "NCHW") -> None:
        super().__init__(data_format=data_format)

    def compute(self, x: Any, b: Any) -> Any:
        return x + b

    def prepared(self, strategy: Strategy | None, args: tuple[Any, ...]) -> tuple[Any, ...]:
        x, b = args
        for _ in range(x.dim() - 2):
            b = b.unsqueeze(-1)
        return x, b

    def operand_counts(self, strategy: Strategy, shapes: Shapes, args: tuple[Any, ...]) -> Strategy:
        first, second = strategy
        return first, (*second, *(1,) * (len(shapes[0]) - 2)) if second else ()

    def required_devices(self, strategy: Strategy, shapes: Shapes, args: tuple[Any, ...]) -> int:
        return prod(strategy[0])

    def check_strategy(self, strategy: Strategy, shapes: Shapes, args: tuple[Any, ...]) -> None:
        if strategy[0][1] != strategy[1][0]:
            raise strict.failure(
                self.title,
                f"the strategy {strategy} splits the channels of x in {strategy[0][1]} parts and the bias in "
                f"{strategy[1][0]}",
                f"({strategy[0]}, ({strategy[0][1]},))",
            )


__all__ = ["BatchMatMul", "BiasAdd", "MatMul"]
