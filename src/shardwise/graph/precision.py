"""The types in which lowerings compute."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

_IN_FLOAT64: ContextVar[bool] = ContextVar("in_float64", default=False)


@contextmanager
def for_float64(wide: bool) -> Iterator[None]:
    """Capture a lowering in its own dtypes that computes in float64 afterwards, if ``wide``."""
    token = _IN_FLOAT64.set(wide)
    try:
        yield
    finally:
        _IN_FLOAT64.reset(token)


def eps_of(x: Tensor) -> float:
    """Return the machine epsilon of the dtype in which a lowering computes."""
    return torch.finfo(torch.float64 if _IN_FLOAT64.get() else x.dtype).eps


def wide(x: Tensor) -> Tensor:
    """float32 for the 16-bit types, in which PyTorch's kernels accumulate; other types as they are."""
    return x.to(torch.float32) if x.dtype in (torch.float16, torch.bfloat16) else x


def cast(x: Tensor, dtype: torch.dtype | None) -> Tensor:
    """None: as it is."""
    return x if dtype is None or x.dtype == dtype else x.to(dtype)
