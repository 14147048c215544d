"""Parameters and buffers that lie in each other's memory: a write to one is a write to the other on one device, and
ranks have memory of their own for each."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch._subclasses.fake_tensor import is_fake

from shardwise.errors import CaptureError, problem


def check_memory(module: nn.Module) -> None:
    """Raises CaptureError for two parameters or buffers with common elements that are not one tensor; names of one
    tensor (tied weights) are no fault, nor are parts of one storage beside or between each other (the real and the
    imaginary part of a table)."""
    held: list[_Held] = []
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        has_memory = not (nn.parameter.is_lazy(tensor) or tensor.is_meta or is_fake(tensor))
        if has_memory and tensor.layout == torch.strided and tensor.numel():
            held.append(_Held.of(name, tensor))
    held.sort(key=lambda one: one.start)
    open_ones: list[_Held] = []
    for one in held:
        open_ones = [other for other in open_ones if other.stop > one.start]
        for other in open_ones:
            if _have_common_bytes(other, one):
                raise CaptureError(
                    problem(
                        f"{other.name} and {one.name} lie in the same memory and are two tensors: what is written to "
                        "one would not be in the other on ranks",
                        fix="register one tensor under both names (tied weights), or a clone() of its own for each",
                    )
                )
        open_ones.append(one)


@dataclass(frozen=True, slots=True)
class _Held:
    """A tensor's bytes: between ``start`` and ``stop``, at ``strides`` over ``sizes``."""

    name: str
    start: int
    stop: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]

    @staticmethod
    def of(name: str, tensor: torch.Tensor) -> _Held:
        each = tensor.element_size()
        pairs = [(n, s * each) for n, s in zip(tensor.shape, tensor.stride(), strict=True) if s]  # expanded: once
        start, last = tensor.data_ptr(), sum((n - 1) * s for n, s in pairs)
        sizes, strides = (*(n for n, _ in pairs), each), (*(s for _, s in pairs), 1)
        return _Held(name, start, start + last + each, sizes, strides)


def _have_common_bytes(first: _Held, second: _Held) -> bool:
    """Of two whose bytes lie between each other."""
    start = min(first.start, second.start)
    taken = torch.zeros(max(first.stop, second.stop) - start, dtype=torch.bool, device="cpu")
    taken.as_strided(first.sizes, first.strides, first.start - start).fill_(True)
    return bool(taken.as_strided(second.sizes, second.strides, second.start - start).any())


__all__ = ["check_memory"]
