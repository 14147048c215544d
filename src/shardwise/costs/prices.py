"""What a training step costs on a cluster: one object that the search, the program and its simulation all ask.

Precision, optimizer and device decide how many bytes a value, a gradient and an optimizer state have and how long each
operator and each collective takes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod

import numpy as np
import torch
from numpy.typing import NDArray

from shardwise.costs.cluster import Device
from shardwise.costs.collectives import Links
from shardwise.costs.compute import Shape, backward_seconds, forward_seconds
from shardwise.costs.optimizers import named, states_of
from shardwise.graph.ir import Graph, Op, Value

# Of the operands and of the results of a call on one device.
LocalShapes = tuple[Sequence[Shape], Sequence[Shape]]


@dataclass(frozen=True, slots=True)
class Precision:
    """Dtypes of a step, where they are not those of the model: ``compute`` for values and gathered parameters,
    ``parameter`` for what is stored (optimizer states as well), ``reduce`` for reduced gradients."""

    compute: torch.dtype | None = None
    parameter: torch.dtype | None = None
    reduce: torch.dtype | None = None


@dataclass(frozen=True)
class Prices:
    """Seconds and bytes on the devices of ``links``, of one pass: forward and backward of one batch. ``passes``: how
    many of them, with their gradients added up, there are to a step of the optimizer. ``bucket_bytes``: of a full
    message in which parameters travel together (0: each travels by itself). ``optimizer``: a name of
    ``costs.optimizers``, with or without a way to update. Raises ShardwiseError for another."""

    links: Links
    optimizer: str = "adamw"
    precision: Precision = field(default_factory=Precision)
    passes: int = 1
    bucket_bytes: float = 0.0

    def __post_init__(self) -> None:
        named(self.optimizer)

    @property
    def device(self) -> Device:
        return self.links.cluster.device

    def with_buckets(self, graph: Graph, bucket_bytes: int) -> Prices:
        """The prices where parameters share messages of up to ``bucket_bytes``; none is fuller than all gradients."""
        updated = [graph.by_name[name] for name in graph.updated]
        total = sum(prod(value.shape) * self.grad_itemsize(value, True) for value in updated)
        return replace(self, bucket_bytes=float(min(bucket_bytes, total)))

    # -- bytes ---------------------------------------------------------------------------------------------------------

    def dtype(self, value: Value) -> torch.dtype:
        """In which a value is computed and sent."""
        own = self.precision.compute
        return own if own is not None and value.dtype.is_floating_point else value.dtype

    def grad_itemsize(self, value: Value, is_parameter: bool) -> int:
        """Bytes per element of a cotangent on its way."""
        if is_parameter and self.precision.reduce is not None:
            return self.precision.reduce.itemsize
        return self.dtype(value).itemsize

    def stored_itemsize(self, value: Value) -> int:
        """Bytes per element of a parameter as it is stored."""
        own = self.precision.parameter
        return own.itemsize if own is not None and value.dtype.is_floating_point else value.dtype.itemsize

    def state_bytes(self, value: Value, updated: bool) -> int:
        """Bytes per element of a parameter that a device keeps from step to step: itself, and its gradient and states
        if the optimizer updates it."""
        own = self.stored_itemsize(value)
        return own * (2 + states_of(self.optimizer)) if updated else own

    # -- seconds -------------------------------------------------------------------------------------------------------

    def collective(self, kind: str, axes: tuple[str, ...], num_bytes: NDArray[np.float64]) -> NDArray[np.float64]:
        """Seconds of a collective per message size (``layouts.routes.Seconds``)."""
        best: NDArray[np.float64] | None = None
        for fixed, slope in self.links.algorithms(kind, axes):
            seconds = fixed + slope * num_bytes
            best = seconds if best is None else np.minimum(best, seconds)
        assert best is not None, f"{kind} over {axes} has no algorithm"
        return best

    def parameter_collective(
        self, kind: str, axes: tuple[str, ...], num_bytes: NDArray[np.float64]
    ) -> NDArray[np.float64]:
        """Seconds of a collective of a parameter: its share, by bytes, of those of a full message. The start of a
        message that does not get full is counted in part only."""
        if not self.bucket_bytes:
            return self.collective(kind, axes, num_bytes)
        message = np.maximum(num_bytes, self.bucket_bytes)
        return self.collective(kind, axes, message) * (num_bytes / message)

    def operator(self, op: Op, operands: Sequence[Value], results: Sequence[Value], shapes: LocalShapes) -> float:
        """Seconds of an operator on local ``shapes``, forward and backward. ``operands`` and ``results`` are the whole
        values."""
        return self.forward(op, operands, results, shapes) + self.backward(op, operands, results, shapes)

    def forward(self, op: Op, operands: Sequence[Value], results: Sequence[Value], shapes: LocalShapes) -> float:
        """Seconds of the forward call alone."""
        return forward_seconds(self.device, op, *shapes, self._dtypes(operands, results))

    def backward(self, op: Op, operands: Sequence[Value], results: Sequence[Value], shapes: LocalShapes) -> float:
        """Seconds of the backward of that call alone."""
        if not any(value.requires_grad for value in results):
            return 0.0
        needed = [value.requires_grad for value in operands]
        return backward_seconds(self.device, op, *shapes, self._dtypes(operands, results), needed)

    def _dtypes(self, operands: Sequence[Value], results: Sequence[Value]) -> list[torch.dtype]:
        return [self.dtype(value) for value in (*operands, *results)]

    def update(self, value: Value, numel: float) -> float:
        """A pass's share of the seconds in which the optimizer updates ``numel`` elements of a parameter: it reads
        parameter, gradient and states and writes parameter and states."""
        own = self.stored_itemsize(value)
        moved = own * (3 + 2 * states_of(self.optimizer))
        return numel * moved / self.device.bytes_per_second() / self.passes

    @cached_property
    def _hash(self) -> int:
        return hash((self.links, self.optimizer, self.precision, self.passes, self.bucket_bytes))

    def __hash__(self) -> int:
        return self._hash
