"""What a training step costs on a cluster: one object that the search, the program and its simulation all ask.

Optimizer and device decide how many bytes an optimizer state has and how long each operator and each collective takes;
a graph says in which dtypes its values are computed, stored and reduced.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from shardwise.costs.cluster import Device
from shardwise.costs.collectives import Links
from shardwise.costs.compute import Shape, operator_seconds
from shardwise.costs.kernels import KernelWork, kernel_seconds, product_rate
from shardwise.costs.optimizers import is_on_host, looks_at_matrices, parse_optimizer, state_bytes, states_of, update_of
from shardwise.graph.ir import Graph, Op, Value
from shardwise.programs.state_groups import is_offloaded

# Of the operands and of the results of a call on one device.
LocalShapes = tuple[Sequence[Shape], Sequence[Shape]]


def gradient_bytes(graph: Graph) -> int:
    """Return the bytes of all gradients that the optimizer reads, undivided."""
    updated = (graph.by_name[name] for name in graph.updated)
    return sum(value.numel * value.grad_itemsize for value in updated)


@dataclass(frozen=True)
class Prices:
    """Seconds and bytes on the devices of ``links``, of one pass: forward and backward of one batch. ``passes``: how
    many of them, with their gradients added up, there are to a step of the optimizer. ``bucket_bytes``: of a full
    message in which parameters travel together (0: each travels by itself). ``optimizer``: as ``costs.optimizers``
    describes one. Raises ShardwiseError for another."""

    links: Links
    optimizer: str = "adamw"
    passes: int = 1
    bucket_bytes: float = 0.0

    def __post_init__(self) -> None:
        parse_optimizer(self.optimizer)

    @property
    def device(self) -> Device:
        return self.links.cluster.device

    def with_buckets(self, graph: Graph, bucket_bytes: int) -> Prices:
        """The prices where parameters share messages of up to ``bucket_bytes``; none is fuller than all gradients."""
        return replace(self, bucket_bytes=float(min(bucket_bytes, gradient_bytes(graph))))

    # -- bytes ---------------------------------------------------------------------------------------------------------

    def resident_bytes_per_element(self, value: Value, updated: bool) -> float:
        """Return the bytes per element of a parameter that a device keeps from step to step: itself, and its gradient
        and states if the optimizer updates it."""
        itemsize = value.kept_dtype.itemsize
        if updated and looks_at_matrices(self.optimizer):
            return 2 * itemsize + state_bytes(self.optimizer, value.numel * itemsize, value.shape) / max(1, value.numel)
        return itemsize * (2 + self.states_on_device) if updated else itemsize

    @property
    def states_on_device(self) -> int:
        """Return the number of optimizer states that stay on the device from step to step."""
        on_host = is_on_host(self.optimizer) and self.device.host_bandwidth
        return 0 if on_host else states_of(self.optimizer)

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
        return operator_seconds(self.device, op, operands, results, shapes)

    def backward(self, op: Op, operands: Sequence[Value], results: Sequence[Value], shapes: LocalShapes) -> float:
        return operator_seconds(self.device, op, operands, results, shapes, backward=True)

    def update(self, value: Value, numel: float) -> float:
        """Return a pass's share of the seconds in which the optimizer updates ``numel`` elements of a parameter, and
        has their states from the host where they wait there; and those in which the pass's gradient is added up."""
        num_bytes = numel * value.kept_dtype.itemsize
        return self.update_kernels(value, numel) + self.states_moved(num_bytes) + self.added(num_bytes)

    def added(self, num_bytes: float) -> float:
        """Return a pass's share of the seconds in which a gradient is added to that of earlier passes: both are read,
        the sum is written. The first pass has none to add to."""
        return self.moved(3 * num_bytes) * (1 - 1 / self.passes)

    def update_kernels(self, value: Value, numel: float) -> float:
        """Return the seconds of the update alone. Kernel start-up counts where each parameter has its own."""
        update, itemsize = update_of(self.optimizer, foreach=self.device.foreach), value.kept_dtype.itemsize
        seconds, share = 0.0, 1.0
        if update.together and numel < value.numel:  # every device gathers parameter and gradient, and updates them
            whole = np.array([value.numel * itemsize], dtype=np.float64)
            seconds += 2 * float(self.parameter_collective("all_gather", self.links.mesh.sub_axes, whole)[0])
            numel = value.numel
        elif update.whole and numel < value.numel:  # one device updates the whole, the others others
            sent = np.array([numel * itemsize], dtype=np.float64)
            seconds += 3 * float(self.parameter_collective("all_to_all", self.links.mesh.sub_axes, sent)[0])
            numel, share = value.numel, 1 / self.links.mesh.num_devices
        size = numel * itemsize
        work = KernelWork("update", num_bytes=size * update.passes, scalars=numel * update.scalars)
        kernels = self.kernel(work) + (update.kernels - 1) * self.device.kernel_latency
        if flops := update.flops_of(value.shape):
            kernels += flops / product_rate(self.device, "", update.product_dtype)
        seconds += share * (kernels + update.fresh * self.device.fresh_seconds(size))
        return seconds / self.passes

    def states_moved(self, num_bytes: float) -> float:
        """Return a pass's share of the seconds in which the states of a parameter of ``num_bytes`` come to the device,
        while those of others leave it; 0 where they are there."""
        if not is_on_host(self.optimizer) or not is_offloaded(int(num_bytes)):
            return 0.0
        return self.device.host_seconds(states_of(self.optimizer) * num_bytes) / self.passes

    def casts(self, value: Value, numel: float, updated: bool) -> float:
        """A pass's seconds of the casts of ``numel`` elements of what a device stores: read in one dtype and written in
        the other; of an updated parameter the gradient as well, which arrives as it was reduced. (That it is cast
        ahead of its reduction, where it is not sharded yet, is seen by the simulation.)"""
        stored, arrives = value.kept_dtype.itemsize, value.grad_itemsize
        moved = stored + value.dtype.itemsize if value.stored is not None else 0
        if updated and (value.reduced or value.dtype) != value.kept_dtype:
            moved += arrives + stored
        return self.moved(numel * moved)

    def kernel(self, work: KernelWork) -> float:
        return kernel_seconds(self.device, work)

    def moved(self, num_bytes: float) -> float:
        """Seconds in which a device reads and writes so many bytes together."""
        return num_bytes / self.device.bytes_per_second()

    @cached_property
    def _hash(self) -> int:
        return hash((self.links, self.optimizer, self.passes, self.bucket_bytes))

    def __hash__(self) -> int:
        return self._hash
