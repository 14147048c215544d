"""A tensor as an allocator sees it: sizes, strides and dtype."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch

from shardwise.graph.ir import Value


@dataclass(frozen=True, slots=True)
class Form:
    """Sizes, strides and dtype of a tensor; whether a gradient flows through it. ``is_conj``, ``is_neg``: its memory
    holds the conjugates of its numbers, or their negatives, as torch's lazy views of complex tensors have them."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    is_conj: bool = False
    is_neg: bool = False

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
        sizes, strides = tuple(tensor.shape), tuple(tensor.stride())
        return Form(sizes, strides, tensor.dtype, tensor.requires_grad, tensor.is_conj(), tensor.is_neg())

    def empty(self, device: str) -> torch.Tensor:
        """A tensor of this form. One that needs a gradient is a view of a leaf, which operators in place may be called
        on."""
        tensor = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=device)
        if self.requires_grad:
            tensor = tensor.requires_grad_().as_strided(tensor.shape, tensor.stride())
        tensor = torch._conj(tensor) if self.is_conj else tensor
        return torch._neg_view(tensor) if self.is_neg else tensor

    @property
    def is_contiguous(self) -> bool:
        """Whether its numbers lie in memory as they are, one after the other."""
        if self.is_conj or self.is_neg:
            return False
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
