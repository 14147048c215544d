"""The types in which lowerings compute."""

from __future__ import annotations

import torch
from torch import Tensor


def wide(x: Tensor) -> Tensor:
    """float32 for the 16-bit types, in which PyTorch's kernels accumulate; other types as they are."""
    return x.to(torch.float32) if x.dtype in (torch.float16, torch.bfloat16) else x


def cast(x: Tensor, dtype: torch.dtype | None) -> Tensor:
    """None: as it is."""
    return x if dtype is None or x.dtype == dtype else x.to(dtype)
