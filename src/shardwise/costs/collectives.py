"""Seconds of collectives: latency + bandwidth, over the levels that a group of devices really spans.

**Which links.** Ranks are numbered row-major over the mesh, the last axis closest, and neighbours fill nodes. With
nodes of 8, a group over the outer axis of ``Mesh(dp=16, tp=8)`` has one member in each of 16 nodes; a group over ``tp``
has all its members in one. ``Span`` holds these numbers. All groups over the same axes communicate at the same time, so
of the links of a level a group has the share of its members: eight groups over ``dp`` have one of a node's eight
network cards each (or an eighth of the only one).

**Rings** (``_ring``). Of a message of ``b`` bytes on ``n`` devices, an all-gather or a reduce-scatter carries
``b (n - 1) / n`` over every link of a ring, an all-reduce twice that (Patarasu and Yuan, "Bandwidth optimal all-reduce
algorithms", 2009). The slowest level sets the pace. There are ``n - 1`` or ``2 (n - 1)`` steps, of which as many cross
a level as there are units on it, as in NCCL's own model of itself (NVIDIA/nccl, src/graph/tuning.cc).

**Trees** (``_tree``). Over several nodes an all-reduce may also take the double binary tree (Sanders, Speck and Traeff,
2009), whose latency grows with the logarithm of the nodes.

**Switches** (``_switch``) that reduce themselves (NVLS): a device sends its message once and a share of the result.

**Hierarchies** (``_hierarchy``), where a level says that its library works so: reduce-scatter on the inner levels,
all-reduce of the slices across, all-gather inside. Only a slice of the message crosses.

**Cross-sections** (``_all_to_all``). Of a rank's ``b`` bytes, the part for devices of other units crosses that level.

Each algorithm is affine in the bytes; the cheapest is taken, as NCCL does. Where a level was calibrated with just such
groups, the line that was fitted to them counts instead of all that (``Level.lines``).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from math import log2, prod

from shardwise.costs.cluster import Cluster, Level
from shardwise.costs.units import Figures
from shardwise.errors import PlanError, problem
from shardwise.layouts.mesh import Mesh
from shardwise.layouts.placement import Placement

# How fast a tree is beside a ring: "busBw*.9" in NVIDIA/nccl, src/graph/tuning.cc (v2.8).
TREE_PACE = 0.9

# How many times a ring carries (n - 1) / n of the message.
_PASSES = {"all_gather": 1, "reduce_scatter": 1, "all_reduce": 2}

# A kind without figures of its own has those of the kind that sends in the same way.
_LIKE = {"halo_exchange": "collective_permute"}

KINDS = (*_PASSES, "all_to_all", "collective_permute", "halo_exchange")

Affine = tuple[float, float]  # seconds, seconds per byte


@dataclass(frozen=True, slots=True)
class Span:
    """Where the members of a group are. ``units[l]``: how many units of the level below ``l`` have any (``units[0]`` is
    the number of members, ``units[1]`` that of nodes); the last entry is 1."""

    units: tuple[int, ...]

    @property
    def size(self) -> int:
        return self.units[0]

    def members(self, level: int) -> float:
        """Members in one unit of the level below: 1 for level 0, members per node for level 1."""
        return self.size / self.units[level]

    def branches(self, level: int) -> float:
        """Return the number of units of the level below connected to one unit of this level."""
        return self.units[level] / self.units[level + 1]

    def used(self) -> tuple[int, ...]:
        """Return the levels on which members meet: whose units have several of the units below."""
        return tuple(level for level in range(len(self.units) - 1) if self.units[level] > self.units[level + 1])

    def passed(self) -> tuple[int, ...]:
        """Return the levels whose links messages take. What leaves a pod has left a node before, by the same network;
        the links inside a node are others."""
        farthest = self.used()[-1]
        return tuple(level for level in range(farthest + 1) if level > 0 or self.used()[0] == 0)


@dataclass(frozen=True)
class Links:
    """The links of a cluster as the groups of a mesh see them. ``ranks``: the global ranks of the mesh's devices; none:
    the mesh has the whole cluster.

    Raises PlanError if the mesh has another number of devices than the cluster, or ranks that the cluster has not.
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
                raise PlanError(problem(what, fix=fix))
        elif self.mesh.num_devices != self.cluster.num_devices:
            sizes = " x ".join(str(size) for _, size in self.mesh.axes) or "1"
            what = f"{self.mesh} has {sizes} = {self.mesh.num_devices} devices, {self.cluster.name} has"
            what += f" {self.cluster.num_devices}"
            raise PlanError(problem(what, fix=f"choose axes whose sizes multiply to {self.cluster.num_devices}"))

    def seconds(self, kind: str, axes: tuple[str, ...], num_bytes: float) -> float:
        """Seconds of a collective over the product of sub-axes, of ``num_bytes`` as ``Collective.num_bytes`` counts
        them, while all other groups over these axes do the same."""
        return min(fixed + slope * num_bytes for fixed, slope in self.algorithms(kind, axes))

    def algorithms(self, kind: str, axes: tuple[str, ...]) -> tuple[Affine, ...]:
        """(seconds, seconds per byte) of each algorithm."""
        algorithms = self._algorithms.get((kind, axes))
        if algorithms is None:
            algorithms = self._algorithms[kind, axes] = affine_terms(kind, self.cluster.levels, self.span(axes))
        return algorithms

    def span(self, axes: Iterable[str]) -> Span:
        """Return where the members of the groups over some (sub-)axes lie; of the most spread group if they differ."""
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
        """Sub-axis -> (distance of neighbours along it, in ranks; size)."""
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
    """Prices one direction of a move in seconds (``layouts.redistribute.Price``)."""

    links: Links
    itemsize: int

    def __call__(self, primitive: str, axes: tuple[str, ...], elements: float) -> tuple[float]:
        """``elements``: those that the busiest rank sends, as ``Move.num_sent`` counts them."""
        kind = "halo_exchange" if primitive == "halo_add" else primitive  # the way back
        if kind not in KINDS:
            return (0.0,)
        whole = elements / share_sent(kind, self.links.mesh.size_of(axes))
        return (self.links.seconds(kind, axes, whole * self.itemsize),)


def _num_units(
    group: list[tuple[int, int]], rest: list[tuple[int, int]], unit: int, ranks: tuple[int, ...] = ()
) -> int:
    """Return the number of blocks of ``unit`` neighbouring ranks that a group of (stride, size) sub-axes touches.
    ``ranks``: those of the devices, where they are not counted from 0."""
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
    """Messages that follow one another in a collective inside one level."""
    if kind in _PASSES:
        return _PASSES[kind] * (num_members - 1)
    return {"all_to_all": num_members - 1, "collective_permute": 1, "halo_exchange": 2}[kind]


def share_sent(kind: str, num_members: int) -> float:
    """Return the part of a message that a device sends in a collective inside one level."""
    if kind in ("collective_permute", "halo_exchange"):
        return 1.0
    return _PASSES.get(kind, 1) * (num_members - 1) / num_members


def affine_terms(kind: str, levels: tuple[Level, ...], span: Span) -> tuple[Affine, ...]:
    """(seconds, seconds per byte) of each algorithm that a group may use for a kind of collective."""
    if kind not in KINDS:
        raise ValueError(f"{kind!r} is not one of {', '.join(KINDS)}")
    if span.size == 1:
        return ((0.0, 0.0),)
    used = span.used()
    if len(used) == 1 and (measured := levels[used[0]].line(kind, span.size)) is not None:
        return (measured,)
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
    """B/s that one device gets from the links of a level, when all devices use them."""
    times = levels[level]
    return times.link_bandwidth(span.branches(level)) * _figure(times.efficiency, kind, 1.0) / times.shared_by


def _pace(kind: str, levels: tuple[Level, ...], span: Span) -> float:
    """B/s of a ring through all members, or of neighbours in a line: the slowest level's. Of the links that connect
    two units, the group has those of its members there."""
    return min(_rate(kind, levels, span, level) * span.members(level) for level in span.passed())


def _ring(kind: str, levels: tuple[Level, ...], span: Span) -> Affine:
    passes = _PASSES[kind]
    steps = sum((span.units[level] - span.units[level + 1]) * levels[level].latency for level in span.used())
    share = (span.size - 1) / span.size
    return _launch(kind, levels, span) + passes * steps, passes * share / _pace(kind, levels, span)


def _tree(levels: tuple[Level, ...], span: Span) -> Affine:
    """Up and down: a chain inside a node, a double binary tree across."""
    depth = sum(log2(span.branches(level)) * levels[level].latency for level in span.used() if level > 0)
    chain = (span.members(1) - 1) * levels[0].latency
    return _launch("all_reduce", levels, span) + 2 * (chain + depth), 2 / (
        TREE_PACE * _pace("all_reduce", levels, span)
    )


def _switch(level: Level, ring: Affine, span: Span) -> Affine:
    """Return the line of an in-switch all-reduce: each device sends its message and its share of the sum, 1 + 1/n
    against the 2 (n - 1) / n of a ring. It starts no sooner than a ring does."""
    return ring[0], (1 + 1 / span.size) * level.shared_by / (level.in_switch * level.link_bandwidth(span.size))


def _hierarchy(kind: str, levels: tuple[Level, ...], span: Span) -> Affine:
    """A ring per level, each over the slice that the levels inside leave to a device."""
    passes, fixed, slope = _PASSES[kind], 0.0, 0.0
    for level in span.used():
        units = span.branches(level)
        fixed += (
            _figure(levels[level].launches, kind, levels[level].launch) + passes * (units - 1) * levels[level].latency
        )
        slope += passes * (units - 1) / units / span.members(level) / _rate(kind, levels, span, level)
    return fixed, slope


def _all_to_all(levels: tuple[Level, ...], span: Span) -> Affine:
    """Every rank has a part for every other; it leaves through each level's link what is for devices behind it."""
    fixed, slope = _launch("all_to_all", levels, span), 0.0
    for level in span.passed():
        inside, here = span.members(level), span.members(level + 1)
        fixed += (here - inside) * levels[level].latency
        crossing = (here if level == 0 else span.size) - inside  # what leaves a node does not take the node's links
        slope = max(slope, crossing / span.size / _rate("all_to_all", levels, span, level))
    return fixed, slope


def _neighbours(kind: str, levels: tuple[Level, ...], span: Span) -> Affine:
    """A permutation, in which all members may send across the same level; or an exchange with both neighbours, in which
    only those at the ends of a unit do."""
    farthest = span.used()[-1]
    if kind == "halo_exchange":
        return _launch(kind, levels, span) + 2 * levels[farthest].latency, 1 / _pace(kind, levels, span)
    slowest = min(_rate(kind, levels, span, level) for level in span.passed())
    return _launch(kind, levels, span) + levels[farthest].latency, 1 / slowest
