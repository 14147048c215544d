"""Process-wide cache of results about calls of PyTorch's own operators, valid for the present global settings of torch.

Operators of other libraries may be registered again at any time, so they are not cached.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

import torch
from torch._ops import OpOverload

_MOST = 50_000  # calls; a plan of a large model has some thousands
Found = TypeVar("Found")


class CallCache(Generic[Found]):
    """Cache of results by call signature."""

    def __init__(self) -> None:
        self._results: dict[object, Found] = {}

    def get(self, target: Any, signature: object) -> Found | None:
        """Return the cached result of a call under the present settings, or None."""
        return self._results.get((signature, switches())) if is_pytorchs(target) else None

    def keep(self, target: Any, signature: object, result: Found) -> None:
        """Cache the result of a call if its operator is PyTorch's."""
        if not is_pytorchs(target):
            return
        if len(self._results) == _MOST:
            self._results.clear()
        self._results[signature, switches()] = result


def is_pytorchs(target: Any) -> bool:
    return isinstance(target, OpOverload) and target.namespace == "aten"


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[torch.dtype]:
    """Set torch's default dtype while the context lasts. Yields the one before."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield before
    finally:
        torch.set_default_dtype(before)


def switches() -> tuple[object, ...]:
    """Return the settings of this process by which PyTorch chooses kernels and types."""
    backends = torch.backends
    return (
        torch.get_default_dtype(),
        torch.is_inference_mode_enabled(),
        *(
            torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
            for device in ("cpu", "cuda")
        ),
        torch.are_deterministic_algorithms_enabled(),
        backends.mkldnn.enabled,
        (backends.cudnn.enabled, backends.cudnn.benchmark, backends.cudnn.deterministic),
        (backends.cuda.flash_sdp_enabled(), backends.cuda.mem_efficient_sdp_enabled()),
        (backends.cuda.math_sdp_enabled(), backends.cuda.cudnn_sdp_enabled()),
    )
