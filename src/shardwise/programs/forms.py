"""Tensor metadata as an allocator sees it: sizes, strides and dtype."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch

from shardwise.graph.ir import Value


@dataclass(frozen=True, slots=True)
class Form:
    """Sizes, strides and dtype of a tensor, and whether a gradient flows through it. ``is_conj``, ``is_neg``: whether
    it is a lazy conjugate or negative view of its memory, as PyTorch makes them of complex tensors."""

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
        """Return the form of a value of a graph, which is contiguous."""
        takes_grad = value.requires_grad and (value.dtype.is_floating_point or value.dtype.is_complex)
        return Form.contiguous(value.shape, value.dtype, takes_grad)

    @staticmethod
    def of(tensor: torch.Tensor) -> Form:
        """Return the form of a tensor."""
        sizes, strides = tuple(tensor.shape), tuple(tensor.stride())
        return Form(sizes, strides, tensor.dtype, tensor.requires_grad, tensor.is_conj(), tensor.is_neg())

    def empty(self, device: str) -> torch.Tensor:
        """Return an uninitialized tensor of this form. One that needs a gradient is a view of a leaf, because autograd
        refuses in-place operators on leaves."""
        tensor = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=device)
        if self.requires_grad:
            tensor = tensor.requires_grad_().as_strided(tensor.shape, tensor.stride())
        tensor = torch._conj(tensor) if self.is_conj else tensor
        return torch._neg_view(tensor) if self.is_neg else tensor

    @property
    def is_contiguous(self) -> bool:
        """Return whether the memory holds the elements in order, neither conjugated nor negated."""
        if self.is_conj or self.is_neg:
            return False
        return self.stride == Form.contiguous(self.shape, self.dtype).stride or 0 in self.shape

    @property
    def is_dense(self) -> bool:
        """Return whether a copy has the same strides: there are no gaps and no repeated elements."""
        return is_dense(self.shape, self.stride)

    @property
    def num_bytes(self) -> int:
        """Return the bytes of a tensor that shares its memory with no other. Expanded dims count once."""
        count = self.dtype.itemsize
        for size, stride in zip(self.shape, self.stride, strict=True):
            count *= size if stride else 1
        return count

    def with_gradient(self, requires_grad: bool) -> Form:
        return self if self.requires_grad == requires_grad else replace(self, requires_grad=requires_grad)


def is_dense(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Return whether elements fill their memory without overlap or gaps, in any order of dims."""
    expected = 1
    for step, size in sorted((step, size) for size, step in zip(shape, stride, strict=True) if size != 1):
        if step != expected:
            return False
        expected *= size
    return True


@lru_cache(maxsize=16384)
def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))
