"""Copy between a device and its host beside the kernels, on one stream per direction.

Host copies are in pinned memory, which torch caches for the next step. Where the device is the CPU, copies are made at
once: the same program, without the gain.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor

from shardwise.errors import ShardwiseError
from shardwise.runtime.cpu_embedding import HOST


class StartCopy(torch.nn.Module):
    """Starts a copy. ``device``: the program's (None: its tensors'). The source must stay until ``WaitForCopy`` has
    waited."""

    def __init__(self, to: Literal["host", "device"], device: torch.device | None) -> None:
        super().__init__()
        self.to_host, self.device = to == "host", device
        self.landed: torch.cuda.Event | None = None

    def forward(self, tensor: Tensor) -> Tensor:
        target = host_memory(tensor) if self.to_host else torch.empty_like(tensor, device=self.device or HOST)
        self.landed = start_copy(tensor, target).landed
        return target


class WaitForCopy(torch.nn.Module):
    """Makes the following kernels wait for a copy."""

    def __init__(self, copying: StartCopy) -> None:
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


@dataclass(frozen=True, slots=True)
class CopyInFlight:
    """A copy under way. ``source`` is held until it has finished; ``landed``: None if it was made at once."""

    source: Tensor
    landed: torch.cuda.Event | None = None
    device: torch.device = HOST

    def wait(self) -> None:
        """Make the following kernels wait for it."""
        if self.landed is not None:
            torch.cuda.current_stream(self.device).wait_event(self.landed)

    def finish(self) -> None:
        """Block until it has finished."""
        if self.landed is not None and not self.landed.query():
            self.landed.synchronize()


def start_copy(source: Tensor, target: Tensor) -> CopyInFlight:
    """Start a copy to or from the host, beside the kernels, on the stream for its direction."""
    device = target.device if source.device == HOST else source.device
    if device.type != "cuda":
        target.copy_(source)
        return CopyInFlight(source)
    stream = _stream(device, target.device == HOST)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        target.copy_(source, non_blocking=True)
        return CopyInFlight(source, stream.record_event(), device)


class Arrivals:
    """The inputs of a call on their way to the device. The host waits for no kernel: inputs are copied on a stream that
    waits for none, so they arrive while the device is busy with the step before."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._read: list[CopyInFlight] = []  # from the caller's own memory

    def bring(self, tensor: Tensor) -> Tensor:
        """Return a tensor on the device."""
        if self.device.type != "cuda" or tensor.device != HOST or tensor.requires_grad:
            return tensor.to(self.device)
        is_callers = tensor.is_contiguous() and tensor.is_pinned()
        try:
            source = tensor if is_callers else _pinned_like(tensor).copy_(tensor)  # a copy from pageable memory blocks
        except ShardwiseError:  # no memory can be pinned: the host waits, as a plain copy does
            return tensor.to(self.device)
        stream, current = _stream(self.device, False), torch.cuda.current_stream(self.device)
        with torch.cuda.stream(stream):
            target = torch.empty_like(source, device=self.device)  # memory of that stream: no kernel used it before
            target.copy_(source, non_blocking=True)
            landed = stream.record_event()
        current.wait_event(landed)
        target.record_stream(current)
        if is_callers:
            self._read.append(CopyInFlight(source, landed, self.device))
        return target

    def finish(self) -> None:
        """Return once the caller may write its tensors again."""
        for copy in self._read:
            copy.finish()


def register(memory: Tensor) -> str:
    """Pin memory that torch did not allocate, for copies beside the kernels. Return why the driver does not, or an
    empty string."""
    error = int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0))
    if error == 0:
        return ""
    # CUDA keeps the error for whoever asks next: the next kernel would fail with it. torch does not offer to take it.
    runtime = gpu_runtime()
    (runtime.hipGetLastError if torch.version.hip else runtime.cudaGetLastError)()
    return f"cudaHostRegister of {memory.nbytes:,} bytes: error {error}"


@cache
def gpu_runtime() -> Any:
    """Return the runtime of CUDA or ROCm that torch has loaded."""
    if torch.version.hip:
        return ctypes.CDLL("libamdhip64.so")
    return ctypes.CDLL(f"libcudart.so.{str(torch.version.cuda).partition('.')[0]}")


def unregister(memory: Tensor) -> None:
    """Undo ``register``, before the memory is freed."""
    torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())


def host_memory(tensor: Tensor) -> Tensor:
    """Allocate host memory for a tensor, pinned for a GPU tensor. Raises ShardwiseError if pinning fails."""
    if tensor.device.type != "cuda":
        return torch.empty_like(tensor, device=HOST)
    return _pinned_like(tensor)


def _pinned_like(tensor: Tensor) -> Tensor:
    try:
        return torch.empty_like(tensor, device=HOST, pin_memory=True)
    except RuntimeError as error:
        what = f"cannot allocate {tensor.nbytes:,} bytes of pinned memory: {error}"
        fix = 'raise the limit of locked memory (ulimit -l), or plan with offload="none"'
        raise ShardwiseError(what, fix=fix) from error
