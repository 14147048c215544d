"""The operators as primitives."""

from __future__ import annotations

from typing import Any

import torch

from shardwise.mindspore import strict
from shardwise.mindspore.ops.primitive import Primitive, Strategy


class MatMul(Primitive):
    """The product of two matrices."""

    sums = True

    def __init__(self, transpose_a: bool = False, transpose_b: bool = False) -> None:
        super().__init__(transpose_a=transpose_a, transpose_b=transpose_b)
        self.transpose_a, self.transpose_b = transpose_a, transpose_b

    def compute(self, x: Any, y: Any) -> Any:
        x = x.transpose(-1, -2) if self.transpose_a else x
        y = y.transpose(-1, -2) if self.transpose_b else y
        return torch.matmul(x, y)

    def check_strategy(self, strategy: Strategy, shapes: tuple[tuple[int, ...], ...]) -> None:
        first, second = strategy
        columns = first[-2] if self.transpose_a else first[-1]
        rows = second[-1] if self.transpose_b else second[-2]
        if columns != rows:
            raise strict.failure(
                self.name,
                f"the transpose_b is {str(self.transpose_b).lower()}, the shard num of first input's column is {columns}, "
                f"but the shard num of second input's row is {rows}",
                "both are the dim that the product sums over: split it equally in both inputs",
            )


class ReLU(Primitive):
    def compute(self, x: Any) -> Any:
        return torch.relu(x)
