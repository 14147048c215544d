"""Refusals of what does not fit: by the least plan that a search found, or before any search, by a division.

The division is a lower bound. At the end of a step some device holds at least its even share of the parameters, of the
gradients of products' weights, and of the optimizer states: over all devices, and over all stages of a pipeline. No
layout, recomputation, offloading of activations or micro-batch changes that.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil, log2

from shardwise.costs.cluster import Cluster, Device
from shardwise.costs.flops import FLOPS
from shardwise.costs.optimizers import (
    ON_HOST,
    is_on_host,
    may_wait_on_host,
    parse_optimizer,
    state_bytes,
    temporary_bytes,
)
from shardwise.errors import NothingFits
from shardwise.graph.ir import Graph
from shardwise.graph.naming import value_name
from shardwise.graph.schema import is_view
from shardwise.plans.quantities import format_bytes
from shardwise.search.candidates import CandidateRanking
from shardwise.search.cost_graph import bytes_of_variables

NUM_LARGEST = 5
_MOST_DOUBLINGS = 10  # of the devices, in a suggestion


@dataclass(frozen=True)
class ResidentBytes:
    """Bytes that all devices hold together at the end of a step, at least; some device holds its even share.

    Attributes:
        of_parameter: Parameter -> bytes of itself, its gradient and its states.
        parts: "parameters", "gradients", "optimizer states" and "temporaries" of the update -> bytes.
    """

    of_parameter: dict[str, int]
    parts: dict[str, int]

    @staticmethod
    def of(graph: Graph, optimizer: str, device: Device, *, staged: bool = False) -> ResidentBytes:
        """Return the bytes of a graph's parameters.

        Gradients count only if a product makes them: others may share their memory with each other (those of two
        parameters that are added). Temporaries of the update count without ``staged`` only, as the stages of a pipeline
        rank update one after the other.
        """
        on_device = not (is_on_host(optimizer) and device.host_bandwidth)
        of_parameter: dict[str, int] = {}
        parts = dict.fromkeys(("parameters", "gradients", "optimizer states", "temporaries"), 0)
        multiplied, updated = _multiplied(graph), list[int]()
        for source in graph.sources:
            if source.kind != "parameter":
                continue
            value = graph.by_name[source.value]
            size, is_updated = value.numel * value.kept_dtype.itemsize, source.value in graph.updated
            gradient = size * (is_updated and source.value in multiplied)
            parts["parameters"] += size
            parts["gradients"] += gradient
            states = state_bytes(optimizer, size, value.shape) if on_device and is_updated else 0
            parts["optimizer states"] += states
            updated += [size] * is_updated
            of_parameter[source.value] = size + gradient + states
        variant = parse_optimizer(optimizer)[1] or ("foreach" if device.foreach else "single")
        if on_device and not staged and variant == "foreach":
            parts["temporaries"] = temporary_bytes(optimizer, updated, foreach=True)
        return ResidentBytes(of_parameter, parts)

    @property
    def total(self) -> int:
        return sum(self.parts.values())

    def on_each(self, num_devices: int) -> int:
        """Return the bytes that some device holds at least."""
        return sum(-(-size // num_devices) for size in self.parts.values())


def refuse_division(graph: Graph, optimizer: str, cluster: Cluster, limit: float, *, staged: bool) -> None:
    """Raise NothingFits if the even share of what stays from step to step is above ``limit`` bytes. Its fixes are those
    that this arithmetic allows; none is planned."""
    resident = ResidentBytes.of(graph, optimizer, cluster.device, staged=staged)
    count = cluster.num_devices
    if resident.on_each(count) <= limit:
        return
    needed = resident.on_each(count)
    shares = {name: -(-size // count) for name, size in resident.parts.items() if size}
    added = " + ".join(f"{name} {size:,}" for name, size in shares.items())
    held = sorted(resident.of_parameter.items(), key=lambda item: -item[1])
    raise NothingFits(
        f"no plan fits: every division keeps at least {format_bytes(needed)} on a device, {format_bytes(int(limit))} "
        f"are allowed{_reserved(cluster.device, limit)}",
        [
            ("needed", f"{added} = {needed:,} bytes, each divided evenly by {count} devices"),
            ("largest", _largest([(f"storage {value_name(name, graph)}", size / count) for name, size in held])),
            ("least", "is this arithmetic, before any search; activations and messages come on top"),
        ],
        _FIX,
        tuple(_divisions_that_fit(graph, optimizer, cluster, limit, staged=staged)),
    )


def _divisions_that_fit(graph: Graph, optimizer: str, cluster: Cluster, limit: float, *, staged: bool) -> Iterator[str]:
    """Yield the changes after which the even share is within the limit: states on the host, more devices, both."""
    count, can_wait = cluster.num_devices, cluster.device.host_bandwidth and may_wait_on_host(optimizer)
    ways = [(optimizer, "")]
    if can_wait:
        named = f"{optimizer}{ON_HOST}"
        ways.insert(0, (named, f'the optimizer\'s states on the host (optimizer="{named}")'))
    for name, change in ways:
        resident = ResidentBytes.of(graph, name, cluster.device, staged=staged)
        factor = 1 << max(0, ceil(log2(max(1.0, resident.total / (limit * count)))))
        factor *= 1 + (resident.on_each(count * factor) > limit)  # shares are rounded up
        if factor > 1 << _MOST_DOUBLINGS:
            continue
        more = f"{factor} times the devices ({factor * count})" if factor > 1 else ""
        least = format_bytes(resident.on_each(count * factor))
        yield f"{' and '.join(filter(None, (change, more)))}: at least {least} stay on a device (not planned)"


def _multiplied(graph: Graph) -> set[str]:
    """Return the parameters whose gradient a product makes: it reads them, as they are or through views."""
    parameter_of = {source.value: source.value for source in graph.sources if source.kind == "parameter"}
    found = set[str]()
    for op in graph.ops:
        read = [parameter_of[name] for name in op.operands if name in parameter_of]
        if op.target in FLOPS and any(graph.by_name[name].requires_grad for name in op.results):
            found.update(read)
        elif is_view(op.target) and len(read) == len(op.operands) == 1:
            parameter_of.update(dict.fromkeys(op.results, read[0]))
    return found


_FIX = (
    "use more devices or devices with more memory, a smaller micro_batch=, an optimizer with fewer states or with its "
    'states on the host ("adamw on host"), or recompute="auto" (the default); sw.fits plans such fixes and names the '
    "three cheapest"
)


def nothing_fits(least: CandidateRanking) -> NothingFits:
    """Return the error. ``least``: the plan that needs the least memory of all considered. Its peak is an upper bound
    of the least that any plan needs."""
    cost, assignment, peak = least.search.cost, least.search.outcome.assignment, least.best.peak
    total, graph = int(least.best.num_bytes), cost.domains.graph
    parts = {**peak.parts, "kept of other micro-batches in flight": least.best.others}
    added = " + ".join(f"{name} {size:,}" for name, size in parts.items() if size)
    held = sorted(bytes_of_variables(cost, assignment).items(), key=lambda item: -item[1])
    shown = [(f"{kind} {name if kind == 'operator' else value_name(name, graph)}", size) for (kind, name), size in held]
    return NothingFits(
        f"no plan fits: the least memory that was found is {format_bytes(total)} a device, "
        f"{format_bytes(int(least.limit))} are allowed{_reserved(cost.domains.prices.device, least.limit)}",
        [
            ("needed", f"{added} = {total:,} bytes, at the peak of the plan that needs least, {peak.where}"),
            ("largest", _largest(shown)),
            ("least", "is what that plan takes; messages and temporaries do not add up, so another may take less"),
        ],
        _FIX,
    )


def _reserved(device: Device, limit: float) -> str:
    """Return how the limit is computed, if it is what the devices have."""
    if not device.reserve_bytes or limit != device.usable_bytes:
        return ""
    return f" ({format_bytes(device.memory_bytes)} less a reserve of {format_bytes(device.reserve_bytes)})"


def _largest(held: Sequence[tuple[str, float]]) -> str:
    """Return what holds most, with all that belongs to it, and the total of the others. ``held``: the largest first."""
    others = [size for _, size in held[NUM_LARGEST:] if size]
    shown = [f"{name} {format_bytes(size)}" for name, size in held[:NUM_LARGEST]]
    return ", ".join([*shown, *([f"{len(others)} others {format_bytes(sum(others))}"] if others else [])])
