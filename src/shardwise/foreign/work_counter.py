"""Counts the seconds of a rank's kernels, by the roofline that prices plans, and of its messages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import flop_registry

from shardwise.costs import kernels
from shardwise.costs.cluster import Device
from shardwise.costs.collectives import KINDS, Links
from shardwise.costs.kernels import DTYPE_NAMES, is_view, kernel_seconds
from shardwise.dispatch_mode import DispatchMode
from shardwise.foreign.rank_threads import ObservedMessage, axes_of


class WorkCounter(DispatchMode):
    """Sums the seconds of the kernels that run inside it, forward and backward. float64 tensors count as ``dtype``,
    because only the comparison widened them."""

    def __init__(self, device: Device, dtype: torch.dtype) -> None:
        super().__init__()
        self.device, self.dtype, self.seconds = device, dtype, 0.0
        self.counts = True

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Count nothing inside this context: reading results is not part of the step."""
        self.counts = False
        try:
            yield
        finally:
            self.counts = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DTensor in types:
            return NotImplemented  # its operations on local tensors are dispatched here again
        result = func(*args, **(kwargs or {}))
        if self.counts and func.namespace == "aten" and not is_view(func):
            tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs, result)) if isinstance(leaf, Tensor)]
            counts = flop_registry.get(func._overloadpacket)
            flops = counts(*args, **(kwargs or {}), out_val=result) if counts else 0
            moved = sum(tensor.numel() * itemsize(tensor.dtype, self.dtype) for tensor in tensors)
            kernel = kernels.KernelWork(flops=flops, num_bytes=moved, dtype=DTYPE_NAMES.get(self.dtype, "f32"))
            self.seconds += kernel_seconds(self.device, kernel)
        return result


def itemsize(dtype: torch.dtype, stored: torch.dtype) -> int:
    return (stored if dtype == torch.float64 else dtype).itemsize


@dataclass(frozen=True, slots=True)
class SentMessages:
    """The messages of a step of one rank. ``unpriced``: kinds that the cost model does not know."""

    count: int
    num_bytes: int
    seconds: float
    unpriced: tuple[str, ...]


def message_totals(messages: Sequence[ObservedMessage], links: Links, dtype: torch.dtype) -> SentMessages:
    """Return number, bytes and seconds of messages, without overlap. A group of one rank sends nothing."""
    count, total, seconds, unpriced = 0, 0, 0.0, set[str]()
    for message in messages:
        if len(message.ranks) < 2:
            continue
        num_bytes = sum(number * itemsize(stored, dtype) for stored, number in message.num_elements)
        count, total = count + 1, total + num_bytes
        if message.kind in KINDS:
            seconds += links.seconds(message.kind, axes_of(links.mesh, message.ranks), num_bytes)
        else:
            unpriced.add(message.kind)
    return SentMessages(count, total, seconds, tuple(sorted(unpriced)))
