"""A tensor as an allocator sees it: sizes, strides and dtype."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch

from shardwise.graph.ir import Value


@dataclass(frozen=True, slots=True)
class Form:
    """Sizes, strides and dtype of a tensor; whether a gradient flows through it."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    @staticmethod
    def contiguous(shape: Sequence[int], dtype: torch.dtype, requires_grad: bool = False) -> Form:
        sizes = tuple(shape)
        return Form(sizes, _strides(sizes), dtype, requires_grad)

    @staticmethod
    def of_value(value: Value) -> Form:
        """That of a value of a graph, whose memory is contiguous."""
        takes_grad = value.requires_grad and (value.dtype.is_floating_point or value.dtype.is_complex)
        return Form.contiguous(value.shape, value.dtype, takes_grad)

    @staticmethod
    def of(tensor: torch.Tensor) -> Form:
        """That of a tensor."""
        return Form(tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype, tensor.requires_grad)

    @property
    def is_contiguous(self) -> bool:
        return self.stride == Form.contiguous(self.shape, self.dtype).stride or 0 in self.shape

    @property
    def num_bytes(self) -> int:
        """Of a tensor that has its memory for itself."""
        count = self.dtype.itemsize
        for size, stride in zip(self.shape, self.stride, strict=True):
            count *= size if stride else 1
        return count

    def with_gradient(self, requires_grad: bool) -> Form:
        return self if self.requires_grad == requires_grad else replace(self, requires_grad=requires_grad)


@lru_cache(maxsize=16384)
def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Those of contiguous memory."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))
