"""The virtual cluster: all ranks' programs in lockstep in one process, every collective done as arithmetic.

It is the oracle of the tests and what ``shardwise.verify`` shows. It keeps a record of the collectives it performs,
which must be exactly those the plan lists.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from shardwise.layouts.conversions import COLLECTIVES, Collective, Move, Primitive
from shardwise.layouts.mesh import Mesh
from shardwise.runtime.moves import Exchange, Steps, run_primitive


class VirtualCluster:
    """Executes moves for all ranks of a mesh at once."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self.coordinates = [mesh.coordinates(rank) for rank in range(mesh.num_devices)]
        self.record: list[Collective] = []  # what was performed, in order; bytes on the busiest rank

    def convert(self, tensors: Sequence[torch.Tensor], moves: Sequence[Move]) -> list[torch.Tensor]:
        """Convert every rank's tensor through the moves, differentiably."""
        for move in moves:
            if move.entry.forward == "none" and move.entry.backward == "none":
                continue
            tensors = _VirtualMove.apply(self, move, *tensors)
        return list(tensors)

    def perform(
        self, primitive: Primitive, move: Move, tensors: Sequence[torch.Tensor], backward: bool
    ) -> list[torch.Tensor]:
        """One primitive on all ranks, in lockstep."""
        steps: list[Steps] = [
            run_primitive(primitive, move, tensor, coordinates, backward=backward)
            for tensor, coordinates in zip(tensors, self.coordinates, strict=True)
        ]
        if primitive not in COLLECTIVES:
            return [_finish(step, None) for step in steps]
        requests = [next(step) for step in steps]
        self._log(requests)
        answers = exchange_all(self.mesh, requests)
        return [_finish(step, answer) for step, answer in zip(steps, answers, strict=True)]

    def _log(self, requests: list[Exchange]) -> None:
        largest = max(request.num_bytes for request in requests)
        self.record.append(Collective(requests[0].kind, requests[0].axes, largest))


def _finish(step: Steps, answer: list[torch.Tensor] | None) -> torch.Tensor:
    try:
        if answer is None:
            next(step)
        else:
            step.send(answer)
    except StopIteration as stop:
        result: torch.Tensor = stop.value
        return result
    raise AssertionError("a primitive performs at most one exchange")


def exchange_all(mesh: Mesh, requests: Sequence[Exchange]) -> list[list[torch.Tensor]]:
    """Answer every rank's request. All ranks ask for the same collective over the same axes."""
    kinds = {(request.kind, request.axes, request.reduction) for request in requests}
    assert len(kinds) == 1, f"ranks ask for different collectives: {sorted(kinds)}"
    answers: list[list[torch.Tensor]] = []
    for rank, request in enumerate(requests):
        group = mesh.group(request.axes, rank)
        index = group.index(rank)
        if request.kind == "all_gather":
            answer = [requests[member].tensors[0].clone() for member in group]
        elif request.kind == "all_to_all":
            answer = [requests[member].tensors[index].clone() for member in group]
        else:
            position = index if request.kind == "reduce_scatter" else 0
            answer = [_reduce([requests[member].tensors[position] for member in group], request.reduction)]
        for tensor, shape in zip(answer, request.shapes, strict=True):
            assert tuple(tensor.shape) == shape, (
                f"{request.kind} over {request.axes}: {tuple(tensor.shape)}, not {shape}"
            )
        answers.append(answer)
    return answers


def _reduce(tensors: list[torch.Tensor], reduction: str) -> torch.Tensor:
    total = tensors[0].clone()
    for tensor in tensors[1:]:
        if reduction == "sum":
            total += tensor
        elif reduction == "max":
            total = torch.maximum(total, tensor)
        elif reduction == "min":
            total = torch.minimum(total, tensor)
        else:
            total = torch.logical_or(total, tensor).to(total.dtype)
    return total


class _VirtualMove(torch.autograd.Function):
    """A move of all ranks' tensors: its backward is the other column of the table."""

    @staticmethod
    def forward(ctx: Any, cluster: VirtualCluster, move: Move, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.cluster, ctx.move = cluster, move
        results = cluster.perform(move.entry.forward, move, tensors, backward=False)
        return tuple(_fresh(result, tensors) for result in results)

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor) -> tuple[Any, ...]:
        results = ctx.cluster.perform(ctx.move.entry.backward, ctx.move, cotangents, backward=True)
        return (None, None, *(_fresh(result, cotangents) for result in results))


def _fresh(result: torch.Tensor, given: Sequence[torch.Tensor]) -> torch.Tensor:
    """Never hand out a tensor (or a view of one) that came in: ranks must not share."""
    return result.clone() if any(result is tensor or result._base is not None for tensor in given) else result
