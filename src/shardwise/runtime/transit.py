"""Conversions on this rank: modules that run the exchanges of a program and print with its names and layouts.

``Converting`` waits for its messages. ``Departing`` launches a message and returns a handle, which ``Arriving`` waits
for where the content is first needed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardwise.graph.ir import Graph
from shardwise.layouts.conversions import Move
from shardwise.programs.instructions import Arrive, Convert, Depart
from shardwise.programs.moves import LocalMove, local_move, sharing_buffers
from shardwise.runtime.communicator import Communicator, is_gloo
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
