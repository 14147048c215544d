"""Parameters and buffers that lie in each other's memory: a write to one is a write to the other on one device, and
ranks have memory of their own for each."""

from __future__ import annotations

import torch
from torch import nn
from torch._subclasses.fake_tensor import is_fake

from shardwise.errors import CaptureError, problem


def check_memory(module: nn.Module) -> None:
    """Raises CaptureError for two parameters or buffers with common elements that are not one tensor; names of one
    tensor (tied weights) are no fault, nor are parts of one storage side by side."""
    places: list[tuple[int, int, str]] = []
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        has_memory = not (nn.parameter.is_lazy(tensor) or tensor.is_meta or is_fake(tensor))
        if has_memory and tensor.layout == torch.strided and tensor.numel():
            start = tensor.data_ptr()
            last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
            places.append((start, start + (last + 1) * tensor.element_size(), name))
    places.sort()
    end, owner = 0, ""
    for start, stop, name in places:
        if start < end:
            raise CaptureError(
                problem(
                    f"{owner} and {name} lie in the same memory and are two tensors: what is written to one would not "
                    "be in the other on ranks",
                    fix="register one tensor under both names (tied weights), or a clone() of its own for each",
                )
            )
        end, owner = stop, name


__all__ = ["check_memory"]
