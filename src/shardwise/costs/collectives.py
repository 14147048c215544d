"""Seconds of collectives: latency + bandwidth, over the levels that a group of devices really spans.

**Which links.** Ranks are numbered row-major over the mesh, the last axis closest, and neighbours fill nodes. With
nodes of 8, a group over the outer axis of ``Mesh(dp=16, tp=8)`` has one member in each of 16 nodes. A group over ``tp``
has all its members in one node. ``Span`` holds these numbers. All groups over the same axes communicate at the same
time. So the links of a level are shared among groups by their members. Each of the eight groups over ``dp`` has one of
a node's eight network cards (or an eighth of the only one).

**Rings** (``_ring``). Let a message have ``b`` bytes on ``n`` devices. An all-gather or a reduce-scatter carries
``b (n - 1) / n`` over every link of a ring, an all-reduce twice that. (Patarasu and Yuan, "Bandwidth optimal all-reduce
algorithms", 2009.) The slowest level sets the pace. There are ``n - 1`` or ``2 (n - 1)`` steps. As many of them cross a
level as it has units, as in NCCL's model of itself (NVIDIA/nccl, src/graph/tuning.cc).

**Trees** (``_tree``). Over several nodes an all-reduce may also take the double binary tree. Its latency grows with the
logarithm of the number of nodes (Sanders, Speck and Traeff, 2009).

**Switches** (``_switch``). A switch may reduce by itself (NVLS). A device then sends its message once, and a share of
the result.

**Hierarchies** (``_hierarchy``). If a level is ``hierarchical``, its library works level by level. It runs a
reduce-scatter on the inner levels, an all-reduce of the slices across, and an all-gather inside. Only a slice of the
message crosses.

**Cross-sections** (``_all_to_all``). Of a rank's ``b`` bytes, the part for devices of other units crosses that level.

Each algorithm is affine in the bytes; the cheapest is taken, as NCCL does. If a level was calibrated with groups of
this size, the fitted line replaces all algorithms (``Level.lines``).

Start here to see where a collective is priced. ``affine_terms`` lists the algorithms of a kind of collective for a
group, and ``Links.seconds`` takes the least. ``Prices`` (``costs/prices.py``) is what searches and simulations call.
``Level`` (``costs/cluster.py``) has the figures of a level.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from math import log2, prod

from shardwise.costs.cluster import Cluster, Level
from shardwise.costs.units import Figures
from shardwise.errors import PlanError
from shardwise.layouts.mesh import Mesh
from shardwise.layouts.placement import Placement

# Bandwidth of a tree relative to a ring: "busBw*.9" in NVIDIA/nccl, src/graph/tuning.cc (v2.8).
TREE_PACE = 0.9

# How many times a ring carries (n - 1) / n of the message.
_PASSES = {"all_gather": 1, "reduce_scatter": 1, "all_reduce": 2}

# A kind without figures of its own takes those of the kind that sends in the same way.
_LIKE = {"halo_exchange": "collective_permute"}

KINDS = (*_PASSES, "all_to_all", "collective_permute", "halo_exchange", "row_exchange")

Affine = tuple[float, float]  # seconds, seconds per byte


@dataclass(frozen=True, slots=True)
class Span:
    """Describes how a group of devices spreads over the levels of a cluster.

    ``units[0]`` is the number of members. ``units[l]``, for l > 0, is the number of units of level l - 1 that contain
    members: ``units[1]`` counts nodes. The last entry is 1, the cluster. So links of level l join ``units[l]`` units
    into ``units[l + 1]``. With 16 nodes of 8, a group of one device per node has ``(16, 16, 1)``. A group that fills
    one node has ``(8, 1, 1)``.
    """

    units: tuple[int, ...]

    @property
    def size(self) -> int:
        return self.units[0]

    def members(self, level: int) -> float:
        """Return the number of members in each unit that this level joins: 1 for level 0, a node's for level 1."""
        return self.size / self.units[level]

    def branches(self, level: int) -> float:
        """Return the number of units of the level below that this level joins into one of its units."""
        return self.units[level] / self.units[level + 1]

    def used(self) -> tuple[int, ...]:
        """Return the levels whose links join members: they join several units into one."""
        return tuple(level for level in range(len(self.units) - 1) if self.units[level] > self.units[level + 1])

    def passed(self) -> tuple[int, ...]:
        """Return the levels whose links carry messages of the group.

        These are all levels up to the farthest one used, since a message that leaves a pod also takes the network links
        of its node. Level 0, the links inside a node, counts only if members share a node.
        """
        farthest = self.used()[-1]
        return tuple(level for level in range(farthest + 1) if level > 0 or self.used()[0] == 0)


@dataclass(frozen=True)
class Links:
    """Prices the collectives of a mesh's groups on the links of a cluster.

    ``ranks``: the global ranks of the mesh's devices. Empty: the mesh has the whole cluster.

    Raises PlanError if the mesh and the cluster have different numbers of devices, or if a rank is not in the cluster.
    """

    cluster: Cluster
    mesh: Mesh
    ranks: tuple[int, ...] = ()

    @staticmethod
    def of(cluster: Cluster, place: Placement) -> Links:
        """Return the links that the groups of a placement use."""
        return Links(cluster, place.mesh, () if len(place.ranks) == cluster.num_devices else place.ranks)

    def __post_init__(self) -> None:
        if self.ranks:
            absent = [rank for rank in self.ranks if rank >= self.cluster.num_devices]
            if absent:
                what = (
                    f"{Placement(self.mesh, self.ranks)}: {self.cluster.name} has {self.cluster.num_devices} devices, "
                )
                what += f"none for {len(absent)} of them from rank {absent[0]} on"
                fix = f"use ranks from 0 to {self.cluster.num_devices - 1}, or describe a larger cluster"
                raise PlanError(what, fix=fix)
        elif self.mesh.num_devices != self.cluster.num_devices:
            sizes = " x ".join(str(size) for _, size in self.mesh.axes) or "1"
            what = f"{self.mesh} has {sizes} = {self.mesh.num_devices} devices, {self.cluster.name} has"
            what += f" {self.cluster.num_devices}"
            raise PlanError(what, fix=f"choose axes whose sizes multiply to {self.cluster.num_devices}")

    def seconds(self, kind: str, axes: tuple[str, ...], num_bytes: float) -> float:
        """Return the seconds of a collective over the product of sub-axes, by the fastest algorithm.

        All other groups over these axes run the same collective at the same time. ``num_bytes`` is counted as in
        ``Collective.num_bytes``.
        """
        return min(fixed + slope * num_bytes for fixed, slope in self.algorithms(kind, axes))

    def algorithms(self, kind: str, axes: tuple[str, ...]) -> tuple[Affine, ...]:
        """Return the (seconds, seconds per byte) of each algorithm, cached."""
        algorithms = self._algorithms.get((kind, axes))
        if algorithms is None:
            algorithms = self._algorithms[kind, axes] = affine_terms(kind, self.cluster.levels, self.span(axes))
        return algorithms

    def span(self, axes: Iterable[str]) -> Span:
        """Return the span of the groups over some (sub-)axes. If they differ, units are those of the most spread."""
        group = [self._strides[part] for axis in axes for part in self.mesh.expand(axis)]
        rest = [stride for part, stride in self._strides.items() if stride not in group]
        units, unit = [prod(size for _, size in group)], 1
        for level in self.cluster.levels[:-1]:
            unit *= level.size
            units.append(_num_units(group, rest, unit, self.ranks))
        return Span((*units, 1))

    def level_names(self, axes: tuple[str, ...]) -> tuple[str, ...]:
        """Return the names of the levels that a group over these sub-axes spans, innermost first."""
        names = self._levels.get(axes)
        if names is None:
            used = self.span(axes).used()
            names = self._levels[axes] = tuple(self.cluster.levels[level].name for level in used)
        return names

    def has_symmetric_memory(self, axes: tuple[str, ...]) -> bool:
        """Return whether the devices of each group over these sub-axes read each other's memory."""
        return self.span(axes).used() == (0,) and self.cluster.levels[0].symmetric_memory

    def price(self, itemsize: int) -> LinkPrice:
        """Return the ``price`` for ``redistribute``, for tensors of ``itemsize`` bytes per element."""
        return LinkPrice(self, itemsize)

    @cached_property
    def _algorithms(self) -> dict[tuple[str, tuple[str, ...]], tuple[Affine, ...]]:
        return {}

    @cached_property
    def _levels(self) -> dict[tuple[str, ...], tuple[str, ...]]:
        return {}

    @cached_property
    def _strides(self) -> dict[str, tuple[int, int]]:
        """Map each sub-axis to (stride, size). The stride is the difference of ranks between neighbours along it."""
        strides, stride = {}, 1
        for axis in reversed(self.mesh.sub_axes):
            strides[axis] = stride, self.mesh.sizes[axis]
            stride *= self.mesh.sizes[axis]
        return strides

    @cached_property
    def _hash(self) -> int:
        return hash((self.cluster, self.mesh, self.ranks))

    def __hash__(self) -> int:
        return self._hash


@dataclass(frozen=True, slots=True)
class LinkPrice:
    """Prices one direction of a move in seconds (a ``Price`` of ``layouts.redistribute``)."""

    links: Links
    itemsize: int

    def __call__(self, primitive: str, axes: tuple[str, ...], elements: float) -> tuple[float]:
        """Return the seconds. ``elements``: those that the busiest rank sends, as ``Move.num_sent`` counts them."""
        kind = "halo_exchange" if primitive == "halo_add" else primitive  # its backward sends the same rows
        if kind not in KINDS:
            return (0.0,)
        whole = elements / share_sent(kind, self.links.mesh.size_of(axes))
        return (self.links.seconds(kind, axes, whole * self.itemsize),)


def _num_units(
    group: list[tuple[int, int]], rest: list[tuple[int, int]], unit: int, ranks: tuple[int, ...] = ()
) -> int:
    """Return the number of units that the most spread group over some sub-axes touches.

    A unit is a block of ``unit`` neighbouring ranks. ``group`` and ``rest`` are the (stride, size) of the sub-axes in
    the group and of the others. ``ranks``: global ranks of the mesh's devices; empty: 0, 1, 2, ...
    """
    if ranks:
        members, starts = _offsets(group), _offsets(rest)
        return max(len({ranks[start + member] // unit for member in members}) for start in starts)
    aligned = all(stride % unit == 0 or unit % (stride * size) == 0 for stride, size in (*group, *rest))
    if aligned:
        return prod(size for stride, size in group if stride % unit == 0)
    members, starts = _offsets(group), _offsets(rest)
    return max(len({(start + member) // unit for member in members}) for start in starts)


def _offsets(axes: list[tuple[int, int]]) -> list[int]:
    return [sum(steps) for steps in product(*(range(0, stride * size, stride) for stride, size in axes))]


# ----------------------------------------------------------------------------------------------------- algorithms


def num_steps(kind: str, num_members: int) -> int:
    """Return the number of successive messages of a collective inside one level."""
    if kind in _PASSES:
        return _PASSES[kind] * (num_members - 1)
    return {"collective_permute": 1, "halo_exchange": 2}.get(kind, num_members - 1)


def share_sent(kind: str, num_members: int) -> float:
    """Return the part of a message that a device sends in a collective inside one level."""
    if kind in ("collective_permute", "halo_exchange"):
        return 1.0
    return _PASSES.get(kind, 1) * (num_members - 1) / num_members


def affine_terms(kind: str, levels: tuple[Level, ...], span: Span) -> tuple[Affine, ...]:
    """Return the (seconds, seconds per byte) of each algorithm that a group may use for a kind of collective."""
    if kind not in KINDS:
        raise ValueError(f"{kind!r} is not one of {', '.join(KINDS)}")
    if span.size == 1:
        return ((0.0, 0.0),)
    used = span.used()
    if len(used) == 1 and (measured := levels[used[0]].line(kind, span.size)) is not None:
        return (measured,)
    if kind == "row_exchange":  # the same messages, of other lengths
        return affine_terms("all_to_all", levels, span)
    if kind in _PASSES:
        if any(levels[level].hierarchical for level in used):
            return (_hierarchy(kind, levels, span),)
        ring = _ring(kind, levels, span)
        if kind != "all_reduce":
            return (ring,)
        if len(used) == 1 and levels[used[0]].in_switch:
            return (ring, _switch(levels[used[0]], ring, span))
        return (ring, _tree(levels, span)) if span.units[1] > 1 else (ring,)
    if kind == "all_to_all":
        return (_all_to_all(levels, span),)
    return (_neighbours(kind, levels, span),)


def _figure(figures: Figures, kind: str, default: float) -> float:
    return figures.get(kind, figures.get(_LIKE.get(kind, kind), default))


def _launch(kind: str, levels: tuple[Level, ...], span: Span) -> float:
    return max(_figure(levels[level].launches, kind, levels[level].launch) for level in span.used())


def _rate(kind: str, levels: tuple[Level, ...], span: Span, level: int) -> float:
    """Return the B/s that one device gets from the links of a level while all devices use them."""
    times = levels[level]
    return times.link_bandwidth(span.branches(level)) * _figure(times.efficiency, kind, 1.0) / times.shared_by


def _pace(kind: str, levels: tuple[Level, ...], span: Span) -> float:
    """Return the B/s of a ring or a line through all members: those of the slowest level.

    Between two units, the group uses the links of all its members in a unit.
    """
    return min(_rate(kind, levels, span, level) * span.members(level) for level in span.passed())


def _ring(kind: str, levels: tuple[Level, ...], span: Span) -> Affine:
    passes = _PASSES[kind]
    steps = sum((span.units[level] - span.units[level + 1]) * levels[level].latency for level in span.used())
    share = (span.size - 1) / span.size
    return _launch(kind, levels, span) + passes * steps, passes * share / _pace(kind, levels, span)


def _tree(levels: tuple[Level, ...], span: Span) -> Affine:
    """Return the line of a tree all-reduce: a chain inside each node, a double binary tree across, up and down."""
    depth = sum(log2(span.branches(level)) * levels[level].latency for level in span.used() if level > 0)
    chain = (span.members(1) - 1) * levels[0].latency
    return _launch("all_reduce", levels, span) + 2 * (chain + depth), 2 / (
        TREE_PACE * _pace("all_reduce", levels, span)
    )


def _switch(level: Level, ring: Affine, span: Span) -> Affine:
    """Return the line of an in-switch all-reduce. It starts no sooner than a ring.

    Each device sends its message and its share of the sum. That is 1 + 1/n of the message, against 2 (n - 1) / n in a
    ring.
    """
    return ring[0], (1 + 1 / span.size) * level.shared_by / (level.in_switch * level.link_bandwidth(span.size))


def _hierarchy(kind: str, levels: tuple[Level, ...], span: Span) -> Affine:
    """Return the line of a hierarchy of rings, one per level. Each reduces the slice that inner levels leave."""
    passes, fixed, slope = _PASSES[kind], 0.0, 0.0
    for level in span.used():
        units = span.branches(level)
        fixed += (
            _figure(levels[level].launches, kind, levels[level].launch) + passes * (units - 1) * levels[level].latency
        )
        slope += passes * (units - 1) / units / span.members(level) / _rate(kind, levels, span, level)
    return fixed, slope


def _all_to_all(levels: tuple[Level, ...], span: Span) -> Affine:
    fixed, slope = _launch("all_to_all", levels, span), 0.0
    for level in span.passed():
        inside, here = span.members(level), span.members(level + 1)
        fixed += (here - inside) * levels[level].latency
        crossing = (here if level == 0 else span.size) - inside  # what leaves a node does not take the node's links
        slope = max(slope, crossing / span.size / _rate("all_to_all", levels, span, level))
    return fixed, slope


def _neighbours(kind: str, levels: tuple[Level, ...], span: Span) -> Affine:
    """Return the line of a permutation or of a halo exchange.

    In a permutation all members may send across the same level. In a halo exchange only members at the ends of a unit
    send across, so it has the bandwidth of a line through all members.
    """
    farthest = span.used()[-1]
    if kind == "halo_exchange":
        return _launch(kind, levels, span) + 2 * levels[farthest].latency, 1 / _pace(kind, levels, span)
    slowest = min(_rate(kind, levels, span, level) for level in span.passed())
    return _launch(kind, levels, span) + levels[farthest].latency, 1 / slowest
