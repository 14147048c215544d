"""Copies to the host on streams of their own: which stream waits for which, in what order."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from raising import raises
from shardwise.errors import ShardwiseError
from shardwise.runtime import host_copies
from shardwise.runtime.host_copies import StartCopy, WaitForCopy

CUDA = torch.device("cuda", 0)


class Stream:
    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log

    def wait_stream(self, other: Stream) -> None:
        self.log.append(f"{self.name} waits for {other.name}")

    def wait_event(self, event: str) -> None:
        self.log.append(f"{self.name} waits for {event}")

    def record_event(self) -> str:
        self.log.append(f"{self.name} records")
        return f"a copy on {self.name}"


def test_copies_run_beside_the_kernels_which_wait_where_they_land() -> None:
    log: list[str] = []
    main, streams = Stream("main", log), {True: Stream("out", log), False: Stream("in", log)}
    pinned: list[Any] = []

    def copy(target: torch.Tensor, source: torch.Tensor, non_blocking: bool) -> None:
        log.append(f"{source.device.type} to {target.device.type}" + ", not waited for" * non_blocking)

    def empty_like(tensor: torch.Tensor, *, device: torch.device, pin_memory: bool = False) -> torch.Tensor:
        pinned.append((device.type, pin_memory))
        return torch.empty(tensor.shape, dtype=tensor.dtype, device=device)

    with (
        FakeTensorMode(),
        mock.patch.object(host_copies, "_stream", lambda device, to_host: streams[to_host]),
        mock.patch.object(torch.cuda, "current_stream", return_value=main),
        mock.patch.object(torch.cuda, "stream", return_value=nullcontext()),
        mock.patch.object(torch.Tensor, "copy_", copy),
        mock.patch.object(torch, "empty_like", empty_like),
    ):
        value = torch.empty(3, 4, dtype=torch.bfloat16, device=CUDA)
        out = StartCopy("host", CUDA)
        on_host = out(value)
        assert on_host.device.type == "cpu"
        WaitForCopy(out)(value)
        back = StartCopy("device", CUDA)
        returned = back(on_host)
        assert returned.device == CUDA
        WaitForCopy(back)(returned)
        WaitForCopy(back)(returned)  # what has landed is not waited for again
    assert pinned == [("cpu", True), ("cuda", False)]
    assert log == [
        "out waits for main",
        "cuda to cpu, not waited for",
        "out records",
        "main waits for a copy on out",
        "in waits for main",
        "cpu to cuda, not waited for",
        "in records",
        "main waits for a copy on in",
    ]


def test_where_no_memory_can_be_pinned_the_error_says_so() -> None:
    def refuses(*_: Any, **__: Any) -> Any:
        raise RuntimeError("CUDA error: out of memory")

    with (
        FakeTensorMode(),
        mock.patch.object(torch, "empty_like", refuses),
        raises(ShardwiseError, "48 bytes", "pinned memory", fix="ulimit"),
    ):
        StartCopy("host", CUDA)(torch.empty(3, 4, device=CUDA))


def test_where_the_host_is_the_device_a_copy_is_a_copy() -> None:
    value = torch.randn(3, 4).t()
    copied = StartCopy("host", None)(value)
    assert torch.equal(copied, value)
    assert copied.stride() == value.stride()
    assert copied.data_ptr() != value.data_ptr()
