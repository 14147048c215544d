"""Conversions on this rank, between the operators of its program: autograd functions around collectives.

A conversion by itself waits for its collectives. A bucket of parameters does not: its message leaves at one place of
the program and arrives at another, in forward and in backward alike. ``Depart`` stands where the message can leave in
forward, ``Arrive`` where its content is first needed; backward passes them in the opposite order, so that gradients
leave at ``Arrive`` and are there at ``Depart``. Autograd runs newest nodes first: a ``Depart`` at the start of the
program waits for its gradients when all else is done.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardwise.graph.ir import Graph
from shardwise.partition.buckets import Bucket
from shardwise.partition.steps import Conversion
from shardwise.runtime.communicator import Communicator, Message
from shardwise.runtime.faults import Purpose, conversion_failed, refuse_create_graph
from shardwise.runtime.moves import LocalMove, local_move

Together = Callable[[Sequence[Tensor]], list[Tensor]]


@dataclass(frozen=True)
class Direction:
    """One direction of a conversion, or of a bucket: functions of this rank's tensor, or of its list of tensors, one
    after the other. ``purpose``: for errors."""

    steps: tuple[Callable[[Any], Any], ...]
    purpose: Purpose

    def __call__(self, tensors: Any) -> Any:
        if torch.compiler.is_compiling():
            return self._run(tensors)
        try:
            return self._run(tensors)
        except (RuntimeError, MemoryError) as error:
            explained = conversion_failed(error, self.purpose)
            if explained is None:
                raise
            raise explained from error

    def _run(self, tensors: Any) -> Any:
        for step in self.steps:
            tensors = step(tensors)
        return tensors


@dataclass(frozen=True)
class Both:
    """Both directions of a conversion."""

    forward: Direction
    backward: Direction


class Convert(torch.nn.Module):
    """A conversion as a module, so that it prints with its name and layouts. ``may_overwrite``: whether its first
    collective may use the memory of the value (in forward), of the cotangent (in backward)."""

    def __init__(
        self, conversion: Conversion, graph: Graph, ranks: Communicator, may_overwrite: tuple[bool, bool]
    ) -> None:
        super().__init__()
        self.conversion = conversion
        forward, backward = (Purpose((conversion,), graph, ranks, backward) for backward in (False, True))
        self.both = Both(
            Direction(tuple(ranks.steps(conversion.moves, forward, in_place=may_overwrite[0])), forward),
            Direction(tuple(ranks.steps(conversion.moves, backward, in_place=may_overwrite[1])), backward),
        )

    def forward(self, tensor: Tensor) -> Tensor:
        result: Tensor = _Convert.apply(tensor, self.both)  # type: ignore[no-untyped-call]
        return result

    def extra_repr(self) -> str:
        return f"{self.conversion.source} -> {self.conversion.target}"


class _Convert(torch.autograd.Function):
    """All moves of one conversion on this rank."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, both: Both) -> Tensor:
        ctx.both = both
        result: Tensor = both.forward(tensor)
        return result

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor, None]:
        refuse_create_graph()
        return ctx.both.backward(cotangent), None


class ConvertTogether(torch.nn.Module):
    """A bucket whose messages are waited for on the spot."""

    def __init__(self, bucket: Bucket, graph: Graph, ranks: Communicator) -> None:
        super().__init__()
        self.bucket = bucket
        forward, backward = (Purpose(bucket.conversions, graph, ranks, backward) for backward in (False, True))
        self.both = Both(
            Direction(tuple(_stages(bucket, forward)), forward), Direction(tuple(_stages(bucket, backward)), backward)
        )

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        if not torch.is_grad_enabled() or not any(tensor.requires_grad for tensor in tensors):
            # Without gradients, Dynamo (2.13) drops the context of a function with as many tensors as parameters.
            return tuple(self.both.forward(tensors))
        result: tuple[Tensor, ...] = _ConvertTogether.apply(self.both, *tensors)  # type: ignore[no-untyped-call]
        return result

    def extra_repr(self) -> str:
        return _described(self.bucket)


class _ConvertTogether(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, both: Both, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.both = both
        return tuple(both.forward(tensors))

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Any, ...]:
        refuse_create_graph()
        return (None, *ctx.both.backward(cotangents))


def _stages(bucket: Bucket, purpose: Purpose) -> list[Together]:
    """All moves of a bucket, in the direction of ``purpose``; identities are left out."""
    ranks, backward = purpose.ranks, purpose.backward
    found: list[Together] = []
    together = list(zip(*(conversion.moves for conversion in bucket.conversions), strict=True))
    for moves in reversed(together) if backward else together:
        own = [local_move(move, ranks.coordinates, backward=backward) for move in moves]
        if own[0].kind is not None:
            found.append(Exchange(Message(own, ranks, purpose)))
        elif not all(move.is_identity for move in own):
            found.append(_each(own))
    return found


@dataclass(frozen=True)
class Exchange:
    """A message that is waited for on the spot."""

    message: Message

    def __call__(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return self.message.land(self.message.launch(tensors, wait=True)[0])


def _each(own: Sequence[LocalMove]) -> Together:
    return lambda tensors: [move.unpack((tensor,)) for move, tensor in zip(own, tensors, strict=True)]


# ------------------------------------------------------------------------------------------------- messages on the way


@dataclass
class Flight:
    """What one forward and backward pass has on the way: (buffer, handle) of either direction."""

    forward: tuple[Tensor, Any] | None = None
    backward: tuple[Tensor, Any] | None = None


@dataclass(frozen=True)
class Way:
    """One direction of a bucket: local steps, at most one message, local steps."""

    before: Direction
    message: Message | None
    after: Direction  # from the buffer of the message

    @staticmethod
    def of(bucket: Bucket, purpose: Purpose) -> Way:
        stages = _stages(bucket, purpose)
        sends = next((i for i, stage in enumerate(stages) if isinstance(stage, Exchange)), None)
        if sends is None:
            return Way(Direction(tuple(stages), purpose), None, Direction((), purpose))
        exchange = stages[sends]
        assert isinstance(exchange, Exchange), "the stage that sends"
        after: list[Callable[[Any], Any]] = [exchange.message.land, *stages[sends + 1 :]]
        return Way(Direction(tuple(stages[:sends]), purpose), exchange.message, Direction(tuple(after), purpose))

    def leave(self, tensors: Sequence[Tensor]) -> tuple[Tensor, Any]:
        """Send the message: (the buffer that fills, the handle to wait for)."""
        assert self.message is not None, "nothing is sent this way"
        return self.message.launch(self.before(tensors), wait=False)

    def land(self, sent: tuple[Tensor, Any]) -> Sequence[Tensor]:
        """Wait for the message, and unpack it."""
        assert self.message is not None, "nothing is sent this way"
        buffer, work = sent
        if work is not None:
            self.message.finish(work)
        landed: Sequence[Tensor] = self.after(buffer)
        return landed


@dataclass(frozen=True)
class Route:
    """A bucket of parameters, of which each direction sends at most one message. ``shapes``: of this rank's tensors
    before the conversion."""

    bucket: Bucket
    forward: Way
    backward: Way
    shapes: tuple[tuple[int, ...], ...]

    @staticmethod
    def of(bucket: Bucket, graph: Graph, ranks: Communicator) -> Route:
        shapes = tuple(c.source.local_shape(ranks.coordinates) for c in bucket.conversions)
        forward, backward = (Purpose(bucket.conversions, graph, ranks, backward) for backward in (False, True))
        return Route(bucket, Way.of(bucket, forward), Way.of(bucket, backward), shapes)


class Depart(torch.nn.Module):
    """Where a bucket's message leaves in forward, and its gradients are waited for in backward."""

    def __init__(self, route: Route) -> None:
        super().__init__()
        self.route = route

    def forward(self, *tensors: Tensor) -> tuple[Flight, tuple[Tensor, ...]]:
        flight = Flight()
        return flight, _Depart.apply(self.route, flight, *tensors)  # type: ignore[no-untyped-call]

    def extra_repr(self) -> str:
        return _described(self.route.bucket)


class Arrive(torch.nn.Module):
    """Where the content of a bucket is needed in forward, and its gradients leave in backward."""

    def __init__(self, route: Route) -> None:
        super().__init__()
        self.route = route

    def forward(self, flight: Flight, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        result: tuple[Tensor, ...] = _Arrive.apply(self.route, flight, *tensors)  # type: ignore[no-untyped-call]
        return result

    def extra_repr(self) -> str:
        return _described(self.route.bucket)


class _Depart(torch.autograd.Function):
    """In forward the tensors pass unchanged; they stand for the bucket until it arrives."""

    @staticmethod
    def forward(ctx: Any, route: Route, flight: Flight, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.route, ctx.flight = route, flight
        if route.forward.message is not None:
            flight.forward = route.forward.leave(tensors)
        return tensors

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Any, ...]:
        refuse_create_graph()
        route, flight = ctx.route, ctx.flight
        if route.backward.message is None:
            return (None, None, *cotangents)
        sent, flight.backward = flight.backward, None
        return (None, None, *route.backward.land(sent))


class _Arrive(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, route: Route, flight: Flight, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.route, ctx.flight = route, flight
        if route.forward.message is None:
            return tuple(route.forward.before(tensors))
        assert flight.forward is not None, "the message left at Depart"
        sent, flight.forward = flight.forward, None
        return tuple(route.forward.land(sent))

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Any, ...]:
        refuse_create_graph()
        route = ctx.route
        if route.backward.message is None:
            return (None, None, *route.backward.before(cotangents))
        ctx.flight.backward = route.backward.leave(cotangents)
        # Shapes without memory: the gradients themselves are on the way, and nobody may read them before Depart. (Zero
        # and not any number: torch's anomaly detection looks for nan in whatever a backward returns.)
        nothing = cotangents[0].new_zeros(())
        return (None, None, *(nothing.expand(shape) for shape in route.shapes))


def _described(bucket: Bucket) -> str:
    first = bucket.conversions[0]
    return f"{len(bucket.conversions)} tensors such as {first.value}: {first.source} -> {first.target}"
