"""What is known of calls of PyTorch's own operators for the whole process: while no switch is set otherwise, a call of
the same types does the same.

Operators of others may be registered anew at any time, so that of these nothing is kept here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

import torch
from torch._ops import OpOverload

_MOST = 50_000  # calls; a plan of a large model knows some thousands
Found = TypeVar("Found")


class CallCache(Generic[Found]):
    """What was found of calls, by whatever tells two of them apart."""

    def __init__(self) -> None:
        self._results: dict[object, Found] = {}

    def get(self, target: Any, signature: object) -> Found | None:
        """What is known of a call, under the switches as they are."""
        return self._results.get((signature, switches())) if is_pytorchs(target) else None

    def keep(self, target: Any, signature: object, result: Found) -> None:
        """Keep what was found of a call, if its operator is PyTorch's."""
        if not is_pytorchs(target):
            return
        if len(self._results) == _MOST:
            self._results.clear()
        self._results[signature, switches()] = result


def is_pytorchs(target: Any) -> bool:
    return isinstance(target, OpOverload) and target.namespace == "aten"


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[torch.dtype]:
    """Set torch's default dtype for a while. Yields the one before."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield before
    finally:
        torch.set_default_dtype(before)


def switches() -> tuple[object, ...]:
    """The settings of this process by which PyTorch chooses kernels and types."""
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
