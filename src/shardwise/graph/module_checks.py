"""Rejection of modules that cannot be captured as they are.

Kinds of modules are identified by class name, because graph/ does not know the runtime. Parameters and buffers must not
overlap in memory: on one device a write to one is a write to the other, while ranks have separate memory for each.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import is_fake

from shardwise.errors import CaptureError

_INSIDE = "pass the wrapped model (model.module): the plan replaces the wrapper"
_SPLIT = "pass the original model: a parallel module holds the shards of one rank"
_SCRIPT = "pass the module from which the script was made: shardwise captures its Python code"
_KINDS = {
    "torch.nn.parallel.distributed.DistributedDataParallel": _INSIDE,
    "torch.distributed.fsdp.fully_sharded_data_parallel.FullyShardedDataParallel": _INSIDE,
    "torch.distributed.fsdp.FSDPModule": "pass the model without fully_shard; the plan shards parameters",
    "torch.jit._script.ScriptModule": _SCRIPT,
    "shardwise.runtime.parallel.Parallel": _SPLIT,
}


def check_kinds(module: Any) -> None:
    """Raise CaptureError for an object that is no module, or that is or contains a module of another tool."""
    if not isinstance(module, nn.Module):
        what = f"the model is a {type(module).__name__}, not a torch.nn.Module"
        raise CaptureError(what, fix="pass the module itself; wrap a function as the forward of a module")
    for path, submodule in module.named_modules():
        for kind in type(submodule).__mro__:
            if fix := _KINDS.get(f"{kind.__module__}.{kind.__qualname__}"):
                what = f"{f'{path} is' if path else 'the model is'} a {kind.__name__}, which cannot be captured"
                raise CaptureError(what, fix=fix)
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if tensor.layout != torch.strided:
            layout = str(tensor.layout).removeprefix("torch.")
            what = f"{name} is a sparse tensor ({layout}), which cannot be split"
            raise CaptureError(what, fix=f"register {name}.to_dense() and multiply with torch.matmul")


def check_memory(module: nn.Module) -> None:
    """Raise CaptureError for two parameters or buffers that share elements but are not one tensor. Two names of one
    tensor (tied weights) are allowed, and so are disjoint parts of one storage (real and imaginary parts of a
    table)."""
    extents: list[_Extent] = []
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        has_memory = not (nn.parameter.is_lazy(tensor) or tensor.is_meta or is_fake(tensor))
        if has_memory and tensor.layout == torch.strided and tensor.numel():
            extents.append(_Extent.of(name, tensor))
    extents.sort(key=lambda extent: extent.start)
    open_extents: list[_Extent] = []
    for extent in extents:
        open_extents = [other for other in open_extents if other.stop > extent.start]
        for other in open_extents:
            if _have_common_bytes(other, extent):
                raise CaptureError(
                    f"{other.name} and {extent.name} are two tensors in the same memory: on ranks, writes to "
                    "one would not reach the other",
                    fix="register one tensor under both names (tied weights), or a separate clone() for each",
                )
        open_extents.append(extent)


@dataclass(frozen=True, slots=True)
class _Extent:
    """The bytes of a tensor: from ``start`` to ``stop``, at ``strides`` over ``sizes``."""

    name: str
    start: int
    stop: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]

    @staticmethod
    def of(name: str, tensor: torch.Tensor) -> _Extent:
        itemsize = tensor.element_size()
        pairs = [(n, s * itemsize) for n, s in zip(tensor.shape, tensor.stride(), strict=True) if s]  # expanded: once
        start, last = tensor.data_ptr(), sum((n - 1) * s for n, s in pairs)
        sizes, strides = (*(n for n, _ in pairs), itemsize), (*(s for _, s in pairs), 1)
        return _Extent(name, start, start + last + itemsize, sizes, strides)


def _have_common_bytes(first: _Extent, second: _Extent) -> bool:
    start = min(first.start, second.start)
    taken = torch.zeros(max(first.stop, second.stop) - start, dtype=torch.bool, device="cpu")
    taken.as_strided(first.sizes, first.strides, first.start - start).fill_(True)
    return bool(taken.as_strided(second.sizes, second.strides, second.start - start).any())
