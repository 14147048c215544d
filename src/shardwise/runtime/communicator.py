"""Collectives on real ranks: the exchanges of ``runtime.moves`` over ``torch.distributed`` process groups.

Only the groups that a program uses are created, in the same order on every rank. Gloo has no uneven all-gather and no
booleans: uneven pieces are padded to the largest (their sizes are known from the layouts), booleans travel as bytes.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import prod
from typing import Any

import torch
import torch.distributed as dist

from shardwise.layouts.conversions import Collective
from shardwise.layouts.mesh import Mesh
from shardwise.runtime.moves import Exchange, Steps

# torch 2.13 renamed these two; the older names still work there, with a warning.
_gather_tensor = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_scatter_tensor = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

REDUCTIONS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN, "any": dist.ReduceOp.MAX}


class Communicator:
    """Performs this rank's exchanges. Process groups are kept per set of sub-axes."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self.rank = dist.get_rank()
        self.coordinates = mesh.coordinates(self.rank)
        self.record: list[Collective] | None = None  # set to a list to note what this rank takes part in
        self._groups: dict[frozenset[str], Any] = {}
        self._members: dict[tuple[str, ...], tuple[int, ...]] = {}

    def create_groups(self, axis_sets: Iterable[tuple[str, ...]]) -> None:
        """Create the process groups of some sets of sub-axes; every rank must call this with the same sets."""
        for axes in sorted({tuple(sorted(set(axes), key=self.mesh.order.__getitem__)) for axes in axis_sets}):
            if frozenset(axes) in self._groups:
                continue
            if self.mesh.size_of(axes) == self.mesh.num_devices:
                self._groups[frozenset(axes)] = dist.group.WORLD
                continue
            seen: set[tuple[int, ...]] = set()
            for rank in range(self.mesh.num_devices):
                members = tuple(sorted(self.mesh.group(axes, rank)))
                if members not in seen:
                    seen.add(members)
                    group = dist.new_group(list(members))
                    if self.rank in members:
                        self._groups[frozenset(axes)] = group

    def perform(self, steps: Steps) -> torch.Tensor:
        """Drive one primitive to its result."""
        try:
            request = next(steps)
            steps.send(self.exchange(request))
        except StopIteration as stop:
            result: torch.Tensor = stop.value
            return result
        raise AssertionError("a primitive performs at most one exchange")

    def exchange(self, request: Exchange) -> list[torch.Tensor]:
        """Answer a request. Members are in the order of ``request.axes``, not of their ranks."""
        if self.record is not None:
            self.record.append(Collective(request.kind, request.axes, request.num_bytes))
        group = self._groups[frozenset(request.axes)]
        if request.axes not in self._members:
            self._members[request.axes] = self.mesh.group(request.axes, self.rank)
        members = self._members[request.axes]
        order = sorted(range(len(members)), key=members.__getitem__)  # position in the process group -> member
        if request.kind == "all_reduce":
            return [_all_reduce(request.tensors[0], group, request.reduction)]
        if request.kind == "all_gather":
            return _all_gather(request, group, order)
        if request.kind == "reduce_scatter":
            return [_reduce_scatter(request, group, order)]
        return _all_to_all(request, group, order)


def _wire(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as it travels: contiguous, booleans as bytes."""
    tensor = tensor.contiguous()
    return tensor.view(torch.uint8) if tensor.dtype == torch.bool else tensor


def _all_reduce(tensor: torch.Tensor, group: Any, reduction: str) -> torch.Tensor:
    buffer = _wire(tensor).clone(memory_format=torch.contiguous_format)
    dist.all_reduce(buffer, op=REDUCTIONS[reduction], group=group)
    return buffer.view(tensor.dtype)


def _all_gather(request: Exchange, group: Any, order: list[int]) -> list[torch.Tensor]:
    sent = _wire(request.tensors[0]).reshape(-1)
    counts = [prod(shape) for shape in request.shapes]
    largest = max(counts)
    if sent.numel() < largest:
        sent = torch.cat([sent, sent.new_empty(largest - sent.numel())])
    received = sent.new_empty(len(order) * largest)
    _gather_tensor(received, sent, group=group)
    result: list[torch.Tensor] = [sent] * len(order)
    for position, member in enumerate(order):
        piece = received[position * largest : position * largest + counts[member]]
        result[member] = piece.view(request.tensors[0].dtype).view(request.shapes[member])
    return result


def _reduce_scatter(request: Exchange, group: Any, order: list[int]) -> torch.Tensor:
    largest = max(tensor.numel() for tensor in request.tensors)
    parts = []
    for member in order:
        part = _wire(request.tensors[member]).reshape(-1)
        parts.append(part if part.numel() == largest else torch.cat([part, part.new_zeros(largest - part.numel())]))
    received = parts[0].new_empty(largest)
    _scatter_tensor(received, torch.cat(parts), group=group)
    return received[: prod(request.shapes[0])].view(request.shapes[0])


def _all_to_all(request: Exchange, group: Any, order: list[int]) -> list[torch.Tensor]:
    dtype = request.tensors[0].dtype
    sent = torch.cat([_wire(request.tensors[member]).reshape(-1) for member in order])
    given = [request.tensors[member].numel() for member in order]
    counts = [prod(request.shapes[member]) for member in order]
    received = sent.new_empty(sum(counts))
    dist.all_to_all_single(received, sent, counts, given, group=group)
    result: list[torch.Tensor] = [sent] * len(order)
    for member, piece in zip(order, received.split(counts), strict=True):
        result[member] = piece.view(dtype).view(request.shapes[member])
    return result
