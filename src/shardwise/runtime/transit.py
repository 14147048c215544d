"""Conversions on this rank: modules that run the exchanges of a program and print with its names and layouts.

``Converting`` waits for its messages. ``Departing`` launches a message and returns a handle, which ``Arriving`` waits
for where the content is first needed.
"""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory  # defines the operators
from torch import Tensor

from shardwise.errors import listed
from shardwise.graph.ir import Graph
from shardwise.layouts.conversions import Move
from shardwise.programs.fused_products import FusedProduct
from shardwise.programs.instructions import Arrive, Convert, Depart, sent_by
from shardwise.programs.moves import LocalMove, local_move, sharing_buffers
from shardwise.runtime.communicator import Communicator, InFlight, is_gloo, rank_device
from shardwise.runtime.messages import CollectiveMessage, Purpose, RowExchangeMessage, conversion_failed

Together = Callable[[Sequence[Tensor]], Sequence[Tensor]]


@dataclass(frozen=True)
class Direction:
    """Functions of this rank's tensors, applied one after the other. ``purpose``: for errors."""

    steps: tuple[Callable[[Any], Any], ...]
    purpose: Purpose

    def __call__(self, tensors: Any) -> Any:
        try:
            for step in self.steps:
                tensors = step(tensors)
            return tensors
        except (RuntimeError, MemoryError) as error:
            explained = conversion_failed(error, self.purpose)
            if explained is None:
                raise
            raise explained from error


class _Exchange(torch.nn.Module):
    def __init__(self, instruction: Convert | Depart | Arrive) -> None:
        super().__init__()
        self.instruction: Any = instruction

    def extra_repr(self) -> str:
        conversions, backward = self.instruction.conversions, self.instruction.backward
        first = conversions[0]
        before, after = (first.target.dual, first.source.dual) if backward else (first.source, first.target)
        tensors = "" if len(conversions) == 1 else f"{len(conversions)} tensors such as {first.value}: "
        return f"{tensors}{before} -> {after}"


class Converting(_Exchange):
    """Conversions that are awaited at once: tensors -> tensors, one -> one."""

    def __init__(self, instruction: Convert, graph: Graph, ranks: Communicator) -> None:
        super().__init__(instruction)
        self.purpose = Purpose(instruction.conversions, graph, ranks, instruction.backward)
        self.single = len(instruction.conversions) == 1
        moves = [conversion.moves for conversion in instruction.conversions]
        self.direction = Direction(tuple(stages(moves, self.purpose, instruction.overwrites)), self.purpose)

    def forward(self, *tensors: Tensor) -> Any:
        converted = self.direction(tensors)
        return converted[0] if self.single else tuple(converted)


class Departing(_Exchange):
    """Launches a message: tensors -> [the buffers being filled, the handle to wait for]. The handle keeps the sent
    tensors alive. ``before``, ``after``: the local steps before the message, and from its buffers on."""

    def __init__(self, instruction: Depart, graph: Graph, ranks: Communicator) -> None:
        super().__init__(instruction)
        purpose = Purpose(instruction.conversions, graph, ranks, instruction.backward)
        steps = stages([conversion.moves for conversion in purpose.conversions], purpose, instruction.overwrites)
        sends, self.message = next((i, step) for i, step in enumerate(steps) if isinstance(step, CollectiveMessage))
        self.before = Direction(tuple(steps[:sends]), purpose)
        self.after = Direction((self.message.land, *steps[sends + 1 :]), purpose)

    def forward(self, *tensors: Tensor) -> list[Any]:
        return [*self.message.launch(self.before(tensors), wait=False)]


class Arriving(_Exchange):
    """Waits for a message and unpacks it: the result of ``Departing`` -> tensors. Frees the sent tensors first."""

    def __init__(self, instruction: Arrive, departing: Departing) -> None:
        super().__init__(instruction)
        self.message, self.after = departing.message, departing.after

    def forward(self, flight: list[Any]) -> tuple[Tensor, ...]:
        self.message.finish(flight[1])
        del flight[1]
        return tuple(self.after(flight.pop()))


def stages(moves: Sequence[Sequence[Move]], purpose: Purpose, in_place: bool = False) -> list[Together]:
    """Return the steps that run moves of tensors sent together (``moves``: of each), in the direction of ``purpose``
    and in execution order, without identities. ``in_place``: the first message may reuse the memory of its input."""
    ranks, backward = purpose.ranks, purpose.backward
    steps: list[Together] = []
    together = list(zip(*moves, strict=True))
    for step in reversed(together) if backward else together:
        parts = [local_move(move, ranks.coordinates, backward=backward) for move in step]
        if parts[0].kind is not None:
            if parts[0].rows is not None:
                steps.append(RowExchangeMessage(parts[0], parts[0].rows, ranks, purpose))
                continue
            on_gloo = is_gloo(ranks.group(parts[0].axes))
            buffers = sharing_buffers(step, ranks.coordinates, backward=backward, on_gloo=on_gloo)
            steps.append(CollectiveMessage(parts, ranks, purpose, buffers, in_place and not steps))
        elif not all(part.is_identity for part in parts):
            steps.append(_each(parts))
    return steps


def _each(parts: Sequence[LocalMove]) -> Together:
    return lambda tensors: [part.unpack((tensor,)) for part, tensor in zip(parts, tensors, strict=True)]


# ----------------------------------------------------------------------------------------------------------------------
# Runs a message and its products as one operator of symmetric memory, on GPUs of one machine that reach each other.
# Elsewhere the message and the products of the same instruction run one after the other.


class RunFusedProduct(Converting):
    """The operands of a ``FusedProduct`` -> its results."""

    def __init__(self, instruction: FusedProduct, graph: Graph, ranks: Communicator) -> None:
        super().__init__(instruction, graph, ranks)
        self.fused = FusedMessage(self) if ranks.symmetric.get(frozenset(sent_by(instruction)[0].axes)) else None

    def forward(self, *operands: torch.Tensor) -> Any:
        one = self.instruction
        if self.fused is not None:
            made, _ = self.fused.launch(operands, wait=True)
        elif one.gathers:
            (whole,) = self.direction(operands[:1])
            made = [whole, *one.products(whole, operands)]
        else:
            made = self.direction([one.scattered(operands)])
        return tuple(made) if one.gathers else made[0]


class FusedMessage(CollectiveMessage):
    """The collective of a fused product: operands -> results."""

    def __init__(self, running: RunFusedProduct) -> None:
        self.instruction, ranks = running.instruction, running.purpose.ranks
        (conversion,), (self.sent,) = self.instruction.conversions, sent_by(self.instruction)
        move = local_move(conversion.moves[0], ranks.coordinates, backward=self.instruction.backward)
        super().__init__([move], ranks, running.purpose, [[0]])
        self.group = ranks.group(self.sent.axes).group_name

    def _start(self, tensors: Sequence[torch.Tensor], blocks: bool) -> tuple[list[torch.Tensor], list[InFlight], int]:
        one, operators = self.instruction, torch.ops.symm_mem
        left, weights = tensors[0], one.weights(tensors)
        if one.gathers:
            whole, products = operators.fused_all_gather_matmul(left, weights, one.dim, self.group)
            made = [whole, *products]
        else:
            made = [operators.fused_matmul_reduce_scatter(left, weights[0], "sum", one.dim, self.group)]
        # Results of these operators lie in memory with ``dim`` first.
        made = [each.contiguous().view(form.shape) for each, form in zip(made, one.forms, strict=True)]
        return made, [], self.sent.num_bytes


def find_symmetric_memory(ranks: Communicator, axis_sets: Collection[frozenset[str]]) -> None:
    """Find the axes along which a message and its products are one operator, once each.

    All ranks call this, and the ranks of a group agree. Where a group has no symmetric memory, rank 0 prints it.
    """
    if not ranks.coordinates:
        return
    missing = []
    for axes in sorted(axis_sets - ranks.symmetric.keys(), key=sorted):
        ranks.symmetric[axes] = rank_device().type == "cuda" and have_symmetric_memory(ranks.group(tuple(axes)))
        if not ranks.symmetric[axes]:
            missing.append("+".join(sorted(axes)))
    if missing and ranks.rank == min(ranks.place.ranks):
        what = "row_chunks='fused', but these ranks are not NVIDIA GPUs of one machine that reach each other's memory"
        text = f"shardwise: the plan has {what}: messages along {listed(missing)} and products run one after the other"
        print(text, file=sys.stderr)


def have_symmetric_memory(group: Any) -> bool:
    """Return whether the GPUs of a group's ranks reach each other's memory. All of them must call this."""
    here, device = crc32(socket.gethostname().encode()), torch.cuda.current_device()
    others = [other for other in range(torch.cuda.device_count()) if other != device]
    reaches = bool(others) and torch.version.hip is None
    reaches = reaches and all(torch.cuda.can_device_access_peer(device, other) for other in others)
    seen = torch.tensor([here, -here, int(not reaches)], device="cuda")
    dist.all_reduce(seen, op=dist.ReduceOp.MAX, group=group)
    largest, smallest, is_missing = seen.tolist()
    return largest == -smallest and not is_missing
