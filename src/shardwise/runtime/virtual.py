"""The virtual cluster: all ranks' programs in lockstep in one process, every collective done as arithmetic.

It is the oracle of the tests and what ``shardwise.verify`` shows. It keeps a record of the collectives it performs,
which must be exactly those the plan lists.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from shardwise.layouts.conversions import Collective, Move
from shardwise.layouts.mesh import Mesh
from shardwise.runtime.moves import LocalMove, local_move


class VirtualCluster:
    """Executes moves for all ranks of a mesh at once."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self.coordinates = [mesh.coordinates(rank) for rank in range(mesh.num_devices)]
        self.record: list[Collective] = []  # what was performed, in order; bytes on the busiest rank

    def convert(self, tensors: Sequence[Tensor], moves: Sequence[Move]) -> list[Tensor]:
        """Convert every rank's tensor through the moves, differentiably."""
        return self.convert_together([tensors], [moves])[0]

    def convert_together(
        self, tensors: Sequence[Sequence[Tensor]], moves: Sequence[Sequence[Move]]
    ) -> list[list[Tensor]]:
        """Convert several values, each held by every rank, through moves of the same kinds over the same axes; each
        collective is one message for all."""
        count, ranks = len(tensors), self.mesh.num_devices
        held = [list(own) for own in tensors]
        for together in zip(*moves, strict=True):
            if all(move.entry.forward == "none" and move.entry.backward == "none" for move in together):
                continue
            flat = _VirtualMove.apply(self, together, *(tensor for own in held for tensor in own))
            held = [list(flat[i * ranks : (i + 1) * ranks]) for i in range(count)]
        return held

    def perform(self, move: Move, tensors: Sequence[Tensor], backward: bool) -> list[Tensor]:
        """One direction of a move on all ranks, in lockstep."""
        own_moves = [local_move(move, coordinates, backward=backward) for coordinates in self.coordinates]
        if own_moves[0].kind is None:
            return [own.unpack([tensor]) for own, tensor in zip(own_moves, tensors, strict=True)]
        packed = [own.pack(tensor) for own, tensor in zip(own_moves, tensors, strict=True)]
        self._log(own_moves, packed)
        answers = exchange_all(self.mesh, own_moves, packed)
        return [
            own.unpack([*answer, tensor] if own.with_own else answer)
            for own, answer, tensor in zip(own_moves, answers, tensors, strict=True)
        ]

    def perform_together(self, moves: Sequence[Move], tensors: Sequence[Tensor], backward: bool) -> list[Tensor]:
        """``perform`` for several moves; ``tensors``: all ranks' of the first, then of the second. Recorded as one."""
        before, ranks = len(self.record), self.mesh.num_devices
        results: list[Tensor] = []
        for i, move in enumerate(moves):
            results += self.perform(move, tensors[i * ranks : (i + 1) * ranks], backward)
        own = self.record[before:]
        if own:
            self.record[before:] = [Collective(own[0].kind, own[0].axes, sum(one.num_bytes for one in own))]
        return results

    def _log(self, own_moves: Sequence[LocalMove], packed: Sequence[Sequence[Tensor]]) -> None:
        kind = own_moves[0].kind
        assert kind is not None, "only collectives are recorded"
        largest = max(num_bytes(own, tensors) for own, tensors in zip(own_moves, packed, strict=True))
        self.record.append(Collective(kind, own_moves[0].axes, largest))


def num_bytes(own: LocalMove, packed: Sequence[Tensor]) -> int:
    """Bytes of the whole message on a rank: the gathered tensor of an all_gather, the input of the others."""
    if own.kind == "all_gather":
        return sum(prod(shape) for shape in own.received) * packed[0].element_size()
    return sum(tensor.numel() for tensor in packed) * packed[0].element_size()


def exchange_all(mesh: Mesh, own_moves: Sequence[LocalMove], packed: Sequence[list[Tensor]]) -> list[list[Tensor]]:
    """What every rank receives. All ranks take part in the same collective over the same axes."""
    kinds = {(own.kind, own.axes, own.reduction) for own in own_moves}
    assert len(kinds) == 1, f"ranks ask for different collectives: {sorted(map(str, kinds))}"
    answers: list[list[Tensor]] = []
    for rank, own in enumerate(own_moves):
        group = sorted(mesh.group(own.axes, rank))
        index = group.index(rank)
        if own.kind == "all_gather":
            answer = [packed[member][0].clone() for member in group]
        elif own.kind in ("all_to_all", "collective_permute", "halo_exchange"):
            answer = [packed[member][index].clone() for member in group]
        else:
            position = index if own.kind == "reduce_scatter" else 0
            answer = [_reduce([packed[member][position] for member in group], own.reduction)]
        for tensor, shape in zip(answer, own.received, strict=True):
            assert tuple(tensor.shape) == shape, f"{own.kind} over {own.axes}: {tuple(tensor.shape)}, not {shape}"
        answers.append(answer)
    return answers


def _reduce(tensors: list[Tensor], reduction: str) -> Tensor:
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
    """A move of all ranks' tensors (of one value, or of several): its backward is the other column of the table."""

    @staticmethod
    def forward(ctx: Any, cluster: VirtualCluster, moves: Sequence[Move], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.cluster, ctx.moves = cluster, moves
        results = cluster.perform_together(moves, tensors, backward=False)
        return tuple(_fresh(result, tensors) for result in results)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Any, ...]:
        results = ctx.cluster.perform_together(ctx.moves, cotangents, backward=True)
        return (None, None, *(_fresh(result, cotangents) for result in results))


def _fresh(result: Tensor, given: Sequence[Tensor]) -> Tensor:
    """Never hand out a tensor (or a view of one) that came in: ranks must not share."""
    return result.clone() if any(result is tensor or result._base is not None for tensor in given) else result
