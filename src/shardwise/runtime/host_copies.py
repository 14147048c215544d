"""Copies between a device and its host that run beside the kernels, on a stream for each direction.

On the host they are in pinned memory, which torch keeps for the next step. Where the device is the host (CPU ranks) a
copy is made on the spot: the same program, without the gain.
"""

from __future__ import annotations

from functools import cache
from typing import Literal

import torch
from torch import Tensor

from shardwise.errors import ShardwiseError, problem
from shardwise.runtime.hosted import HOST


class Copying(torch.nn.Module):
    """Starts a copy. ``device``: where the program runs (None: where its tensors are); what is copied must stay until
    ``Landing`` has waited."""

    def __init__(self, to: Literal["host", "device"], device: torch.device | None) -> None:
        super().__init__()
        self.to_host, self.device = to == "host", device
        self.landed: torch.cuda.Event | None = None

    def forward(self, tensor: Tensor) -> Tensor:
        device = tensor.device if self.to_host else self.device or HOST
        if device.type != "cuda":
            return tensor.clone()
        target = _pinned(tensor) if self.to_host else torch.empty_like(tensor, device=device)
        stream = _stream(device, self.to_host)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            target.copy_(tensor, non_blocking=True)
            self.landed = stream.record_event()
        return target


class Landing(torch.nn.Module):
    """The kernels that follow wait for a copy."""

    def __init__(self, copying: Copying) -> None:
        super().__init__()
        self.copying = [copying]  # not a module of this one

    def forward(self, on_device: Tensor) -> None:
        (copying,) = self.copying
        if copying.landed is not None:
            torch.cuda.current_stream(on_device.device).wait_event(copying.landed)
            copying.landed = None


@cache
def _stream(device: torch.device, to_host: bool) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def _pinned(tensor: Tensor) -> Tensor:
    """Pinned memory for a tensor. Raises ShardwiseError where the host gives none."""
    try:
        return torch.empty_like(tensor, device=HOST, pin_memory=True)
    except RuntimeError as error:
        what = f"the host gives no pinned memory for {tensor.nbytes:,} bytes: {error}"
        fix = 'raise the limit of locked memory (ulimit -l), or plan with offload="none"'
        raise ShardwiseError(problem(what, fix=fix)) from error
