"""Fake copies of modules, captured in place of the originals."""

from __future__ import annotations

import copy
import inspect
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from shardwise.errors import CaptureError
from shardwise.graph.step_precision import Precision


def fake_like(tensor: torch.Tensor, mode: FakeTensorMode, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return a fake CPU tensor of the same shape, strides, dtype (or ``dtype``), requires_grad and class (parameter or
    not)."""
    with mode:
        fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype or tensor.dtype, device="cpu")
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(fake, requires_grad=tensor.requires_grad)
    return fake.requires_grad_(tensor.requires_grad)


def fake_copy(module: nn.Module, mode: FakeTensorMode, precision: Precision) -> nn.Module:
    """Copy a module with fake parameters and buffers. The copy shares no state with it, tied tensors stay tied, and
    parameters have the compute dtype."""
    memo: dict[int, Any] = {}
    for _, tensor in (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)):
        if nn.parameter.is_lazy(tensor):
            raise CaptureError(
                "a lazy module has no shapes yet", fix="run the module once on real inputs before planning it"
            )
        dtype = precision.computed(tensor.dtype) if isinstance(tensor, nn.Parameter) else tensor.dtype
        memo.setdefault(id(tensor), fake_like(tensor, mode, dtype))
    for path, owner in module.named_modules():
        for attribute, value in vars(owner).items():
            if isinstance(value, torch.Tensor) and id(value) not in memo:
                if value.is_meta:
                    raise CaptureError(
                        f"the tensor attribute {attribute!r} is on meta, without data, and not a parameter or buffer",
                        op=path or type(owner).__name__,
                        fix=f'register it: self.register_buffer("{attribute}", ..., persistent=False)',
                    )
                # Tensors computed from parameters are not used: their gradients would not reach the parameters.
                memo[id(value)] = value.detach().cpu().requires_grad_(not value.is_leaf)
    return deep_copy(module, memo)


def empty_copy(module: nn.Module, device: str) -> nn.Module:
    """Copy a module with parameters and buffers without values on another device; tied tensors stay tied."""
    memo: dict[int, Any] = {}
    for tensor in (*module.parameters(), *module.buffers()):
        empty = torch.empty_like(tensor, device=device)
        memo[id(tensor)] = nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty
    return deep_copy(module, memo)


def deep_copy(module: nn.Module, memo: dict[int, Any] | None = None) -> nn.Module:
    """Return a deep copy. Tensor attributes computed from parameters (a pruned weight) are copied without their
    history; a ``forward`` that was compiled on its own (``m.forward = torch.compile(m.forward)``) is copied as it was
    before. Raises CaptureError if the module cannot be copied."""
    computed = [v for submodule in module.modules() for v in vars(submodule).values() if isinstance(v, torch.Tensor)]
    memo = {id(v): v.detach().clone() for v in computed if not v.is_leaf} | (memo or {})
    try:
        copied = copy.deepcopy(module, memo)
    except (TypeError, RuntimeError, NotImplementedError) as error:
        raise CaptureError(
            f"{type(module).__name__} cannot be copied: {error}",
            fix="make copy.deepcopy(module) work: keep locks, open files and results out of its attributes",
        ) from error
    for own, other in zip(module.modules(), copied.modules(), strict=False):
        before = inspect.unwrap(getattr(vars(own).get("forward"), "_torchdynamo_orig_callable", lambda: None))
        if getattr(before, "__self__", None) is own:  # a function is not copied: it would run the original's weights
            vars(other)["forward"] = MethodType(before.__func__, other)
    return copied
