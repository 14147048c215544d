"""The cluster: the hardware that a plan is made for, as data.

A *device* computes and holds memory. A *level* connects units of the level below it: GPUs to a node, nodes to a
cluster (or to pods, and pods to a cluster). Ranks are numbered so that neighbours are close: with nodes of 8, rank
``r`` sits in node ``r // 8``. Figures are in SI base units: bytes, seconds, FLOP/s, B/s (one direction). ``sources``
names the source of each figure. ``costs/cluster_file.py`` reads and writes the TOML files, the page on clusters
describes them.
"""

from __future__ import annotations

import re
from collections.abc import Container, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any

from shardwise.costs.failures import FailureStatistics
from shardwise.costs.units import Figures, format_quantity
from shardwise.errors import ShardwiseError

# Kinds whose figure is a part of the peak FLOP/s, and those whose figure is a part of the memory bandwidth.
PRODUCTS = (
    "attention", "attention_backward", "masked_attention", "masked_attention_backward",
    "convolution", "convolution_backward",
)  # fmt: skip
MOVES = (
    "reduction", "column_reduction", "fused_reduction", "softmax", "softmax_backward", "log_softmax_backward",
    "layer_norm", "layer_norm_backward", "rms_norm", "rms_norm_backward", "batch_norm", "batch_norm_backward",
    "random", "scatter", "pool", "pool_backward", "update",
)  # fmt: skip

# A dtype without a figure of its own runs at that of the next one (converted, as V100 runs bfloat16 through float32).
_RUNS_AS = {"f8": "f16", "bf16": "f32", "f16": "f32", "tf32": "f32", "f64": "f32", "f32": "f64"}


def rate_dtype(dtype: str, flops: Container[str]) -> str:
    """Return the dtype whose rate stands for ``dtype``; empty if none does."""
    tried: list[str] = []
    while dtype and dtype not in flops and dtype not in tried:
        tried.append(dtype)
        dtype = _RUNS_AS.get(dtype, "")
    return dtype if dtype in flops else ""


# Seconds that a copy to the host takes beside its bytes (measured on an H100: 1 MiB in 24 us, 64 MiB in 1,221 us).
COPY_LATENCY = 5e-6

# Bytes of an allocation that malloc takes from the system and gives back when it is freed, however often that happens:
# glibc's DEFAULT_MMAP_THRESHOLD_MAX on 64 bits.
_FRESH = 2**25


@dataclass(frozen=True, slots=True)
class Device:
    """One accelerator (or one CPU rank).

    ``flops``: dtype (``f64``, ``f32``, ``tf32``, ``bf16``, ``f16``, ``f8``) -> peak FLOP/s of dense matmuls.
    ``memory_bytes``: all there is, as nvidia-smi says it. ``reserve_bytes``: what of it the tensors of a plan cannot
    have: driver and context, kernels, buffers of the communication library, and what the allocator loses between
    blocks. ``memory_bandwidth``: peak B/s. ``kernel_latency``: seconds of an operator that does next to nothing.
    ``fresh_bandwidth``: B/s at which the system hands out memory page by page, as it does on CPUs whenever a result of
    more than 32 MiB is first written (0: an allocator keeps memory, as on GPUs).
    ``host_bandwidth``: B/s of a copy to pinned memory of the host, or from there; 0: its memory is the host's.
    ``foreach``: whether torch's optimizers update all parameters at once there, as they do on GPUs, and not one by one.
    Four figures say how much of the peaks is reached, and calibration measures them: ``matmul_efficiency``, the
    fraction of the peak in large matmuls, by dtype; ``matmul_half_flops``, the FLOPs of a matmul in the fastest dtype
    that reaches half of that (a matmul of ``f`` FLOPs takes as long as ``f + matmul_half_flops`` at the full rate);
    ``memory_efficiency``, the fraction of the bandwidth that large element-wise operators reach; ``overlap``, the part
    of a collective that runs beside operators without slowing them down: 1 where the network moves bytes by itself, 0
    where the cores that compute do it.

    ``kernels``: kind of kernel (``costs.kernels``) -> the part of a peak that it reaches, where it is another: of the
    FLOP/s for products, of the memory bandwidth for all others. ``scalar_rate``: elements a second where a kernel goes
    one by one; ``attention_row``: seconds that attention takes per query row of a head, beside its FLOPs. ``launch``:
    seconds that the host takes to start a kernel; kernels wait for it where it is slower than they (0: they never do).
    ``spread``: nine of ten steps take between the predicted seconds of operators divided by ``1 + spread`` and these
    times it; ``memory_spread``: the same of peaks (0: not known). ``products``: the dtype in which products in bf16 and
    f16 are priced, in place of their own (empty: none): what another software would take.
    """

    name: str
    flops: Figures
    memory_bytes: float
    memory_bandwidth: float
    kernel_latency: float
    matmul_efficiency: Figures = field(default_factory=Figures)
    matmul_half_flops: float = 0.0
    memory_efficiency: float = 1.0
    overlap: float = 1.0
    reserve_bytes: float = 0.0
    foreach: bool = True
    host_bandwidth: float = 0.0
    kernels: Figures = field(default_factory=Figures)
    scalar_rate: float = 0.0
    attention_row: float = 0.0
    launch: float = 0.0
    spread: float = 0.0
    memory_spread: float = 0.0
    fresh_bandwidth: float = 0.0
    products: str = ""

    @property
    def usable_bytes(self) -> float:
        """Return the bytes available to a plan's tensors: device memory less the reserve."""
        return self.memory_bytes - self.reserve_bytes

    @property
    def is_cuda(self) -> bool:
        """Return whether torch calls it "cuda", as GPUs of NVIDIA and of AMD, by its name."""
        return re.search("NVIDIA|Tesla|Quadro|GeForce|AMD", self.name) is not None

    def peak_flops(self, dtype: str) -> float:
        """Peak FLOP/s of a dtype, or of the one that it is computed in."""
        return self.flops[self._computed_in(dtype)]

    def matmul_flops(self, dtype: str) -> float:
        """FLOP/s that large matmuls reach."""
        is_replaced = self.products and dtype in ("bf16", "f16")
        computed_in = self._computed_in(self.products if is_replaced else dtype)
        return self.flops[computed_in] * self.matmul_efficiency.get(computed_in, 1.0)

    @property
    def matmul_ramp(self) -> float:
        """Seconds that a matmul of any dtype takes beside its FLOPs at the full rate: filling the units that compute
        takes as long however fast they are."""
        return self.matmul_half_flops / max(map(self.matmul_flops, self.flops))

    def bytes_per_second(self) -> float:
        """B/s that large element-wise operators reach."""
        return self.memory_bandwidth * self.memory_efficiency

    def host_seconds(self, num_bytes: float) -> float:
        """Seconds of a copy to the host or back. Where the memory is the host's it is read and written."""
        rate = self.host_bandwidth or self.bytes_per_second() / 2
        return COPY_LATENCY * bool(self.host_bandwidth) + num_bytes / rate

    def fresh_seconds(self, num_bytes: float) -> float:
        """Seconds in which the system hands out the memory of a result."""
        return num_bytes / self.fresh_bandwidth if self.fresh_bandwidth and num_bytes > _FRESH else 0.0

    def _computed_in(self, dtype: str) -> str:
        listed = rate_dtype(dtype, self.flops)
        if not listed:
            what = f"{self.name} has no figure for {dtype} or a similar dtype"
            raise ShardwiseError(what, fix=f"add [device.flops] {dtype} to the cluster file")
        return listed


@dataclass(frozen=True, slots=True)
class Level:
    """What connects ``size`` units of the level below (devices, for the first level) to one unit of this level.

    ``bandwidth``: B/s in one direction of one link, as a large ring all-reduce gets it ("bus bandwidth").
    ``latency``: seconds per message from one device to the next. ``shared_by``: the number of devices that share one
    link (1: a network card for every device; 8: one for every node of 8). ``launch``: seconds that a collective over
    this level takes before the first byte leaves. ``group_bandwidths``: (number of units, B/s) where a group of so many
    units gets another bandwidth than all of them, in ascending order; numbers between are interpolated.
    ``efficiency``: kind of collective -> the fraction of the bandwidth that it gets (1 if it is not named).
    ``in_switch``: the fraction of the bandwidth that an all-reduce inside the switch reaches (NVLS), 0 where there is
    none. ``launches``: kind of collective -> its own ``launch``, where that is known.
    ``lines``: (kind, number of units, seconds, seconds per byte of the message) of groups that were measured; they
    count before the other figures. ``spread``: as of a device, of collectives. ``hierarchical``: whether the library
    works level by level in groups over this one (HCCL), not in one ring. ``symmetric_memory``: whether all devices of
    one unit read each other's memory, in one machine of NVIDIA GPUs on NVLink (of the first level).
    """

    name: str
    size: int
    bandwidth: float
    latency: float
    shared_by: int = 1
    launch: float = 0.0
    group_bandwidths: tuple[tuple[int, float], ...] = ()
    efficiency: Figures = field(default_factory=Figures)
    in_switch: float = 0.0
    launches: Figures = field(default_factory=Figures)
    lines: tuple[tuple[str, int, float, float], ...] = ()
    hierarchical: bool = False
    symmetric_memory: bool = False
    spread: float = 0.0

    def line(self, kind: str, num_units: int) -> tuple[float, float] | None:
        """(seconds, seconds per byte) that were measured for a kind of collective on groups of so many units."""
        return next((line[2:] for line in self.lines if line[:2] == (kind, num_units)), None)

    def link_bandwidth(self, num_units: float) -> float:
        """B/s of one link for a group that spans ``num_units`` units."""
        ratios = self.group_bandwidths
        if not ratios:
            return self.bandwidth
        if num_units <= ratios[0][0]:
            return ratios[0][1]
        for (low, slow), (high, fast) in pairwise(ratios):
            if num_units <= high:
                return slow + (fast - slow) * (num_units - low) / (high - low)
        return ratios[-1][1]


@dataclass(frozen=True, slots=True)
class Cluster:
    """Hardware description: equal devices on network levels.

    Args:
        name: Name of the cluster.
        device: One device; for a mixed cluster with the worst of each figure, as a step waits for all devices.
        levels: Network levels, innermost first; ``num_devices`` is the product of their sizes.
        mixed: (device name, number) per kind, if the devices are not equal.
        price_per_hour: Price of a device in any currency (0: not known); the mean over several kinds.
        failures: Failure statistics, if there are any.
        sources: (figure, source of the figure) pairs.
    """

    name: str
    device: Device
    levels: tuple[Level, ...]
    mixed: tuple[tuple[str, int], ...] = ()
    price_per_hour: float = 0.0
    failures: FailureStatistics | None = None
    sources: tuple[tuple[str, str], ...] = field(default=(), compare=False, repr=False)

    @property
    def num_devices(self) -> int:
        return prod(level.size for level in self.levels)

    @staticmethod
    def load(name: str | Path, *, hosts: str | Path | None = None) -> Cluster:
        """Load a bundled cluster or a cluster file.

        Args:
            name: A bundled cluster (``"h100-16x8"``: 16 nodes of 8; ``"h100"``: one node), or a TOML file.
            hosts: A hostfile or a rank table (``.json``) that gives the numbers of nodes and devices.

        Returns:
            The cluster.

        Raises:
            ShardwiseError: The cluster cannot be read; the message lists all faults.
        """
        from shardwise.costs.cluster_file import load

        return load(name, hosts)

    @staticmethod
    def of(cluster: Cluster | str | int) -> Cluster:
        """Return a cluster, given as itself, by name or as a number of devices.

        Args:
            cluster: A Cluster, a name or file for ``load``, or a number of devices of this machine (``local``).

        Returns:
            The cluster.

        Raises:
            ShardwiseError: ``cluster`` is anything else.
        """
        if isinstance(cluster, Cluster):
            return cluster
        if isinstance(cluster, str):
            return Cluster.load(cluster)
        if isinstance(cluster, int):
            return Cluster.local(cluster)
        fix = 'pass a Cluster, a name ("h100-1x8", or a TOML file), or a number of devices'
        raise ShardwiseError(f"the cluster is {cluster!r}"[:200], fix=fix)

    @staticmethod
    def local(num_devices: int) -> Cluster:
        """Describe the devices of this machine.

        GPUs have their own memory, the links between them and the figures of the bundled cluster of their name. Without
        GPUs the devices are CPU ranks, which share the machine's memory (or what control groups leave of it) and have
        the figures of ``clusters/local.toml``. Assumptions are printed; ``shardwise calibrate`` measures.

        Args:
            num_devices: Number of devices; more than there are GPUs stands for several machines like this one.

        Returns:
            The cluster.

        Raises:
            ShardwiseError: The number is not a multiple of the GPUs here, or a GPU has no free memory.
        """
        from shardwise.costs.machine import local

        return local(num_devices)

    def with_products(self, dtype: str) -> Cluster:
        """Return the same hardware with products in bf16 and f16 priced in another dtype. Raises ShardwiseError if the
        devices have no figure for it."""
        if dtype not in self.device.flops:
            what = f"{self.device.name} has no figure for products in {dtype}"
            raise ShardwiseError(what, fix=f"leave products= out, or add [device.flops] {dtype} to the cluster file")
        return replace(self, device=replace(self.device, products=dtype))

    def with_devices(self, num_devices: int) -> Cluster:
        """Return the same hardware with fewer devices; inner levels are filled first.

        Args:
            num_devices: Number of devices.

        Returns:
            The smaller cluster.

        Raises:
            ShardwiseError: Full units of the inner levels do not make that number, or the cluster has fewer devices.
        """
        sizes = self._filled(self.levels[:-1], num_devices)
        if num_devices > self.num_devices:
            what = f"{self.name} cannot have {num_devices} devices: it has {self.num_devices}"
            raise ShardwiseError(what, fix="load a larger one (h100-16x8: 16 nodes of 8)")
        return self.resized((*sizes, num_devices // prod(sizes))).renamed(f"{self.name} with {num_devices} devices")

    def with_nodes(self, num_nodes: int, devices_per_node: int) -> Cluster:
        """Return the same hardware with fewer nodes (units of the last level), or fewer devices in each.

        Args:
            num_nodes: Number of nodes.
            devices_per_node: Number of devices in each node.

        Returns:
            The smaller cluster.

        Raises:
            ShardwiseError: The numbers exceed those that the cluster describes.
        """
        nodes, inside = (self.levels[-1].size, self.levels[:-1]) if len(self.levels) > 1 else (1, self.levels)
        most = prod(level.size for level in inside)
        if not (1 <= devices_per_node <= most and 1 <= num_nodes <= nodes):
            what = f"{num_nodes} nodes of {devices_per_node}: {self.name} describes 1 to {nodes} nodes of 1 to {most}"
            raise ShardwiseError(what, fix="choose numbers in this range, or write a cluster file")
        sizes = self._filled(inside, devices_per_node)
        return self.resized((*sizes, num_nodes) if len(self.levels) > 1 else sizes)

    def _filled(self, levels: Sequence[Level], num_devices: int) -> tuple[int, ...]:
        """Sizes of inner levels with which they make ``num_devices`` or a part of it."""
        if isinstance(num_devices, bool) or not isinstance(num_devices, int) or num_devices < 1:
            what = f"a cluster has a whole number of devices from 1, not {num_devices!r}"
            raise ShardwiseError(what, fix="such as 8; shardwise clusters lists described ones")
        sizes: list[int] = []
        rest = num_devices
        for level in levels:
            size = min(level.size, rest)
            if rest % size:
                what = (
                    f"{self.name} cannot have {num_devices} devices: {rest} is not a multiple of {size} ({level.name})"
                )
                raise ShardwiseError(what, fix=f"choose at most {size}, or a multiple of it")
            sizes.append(size)
            rest //= size
        return tuple(sizes)

    def resized(self, sizes: Sequence[int]) -> Cluster:
        """Return the same hardware with other level sizes; outer levels of size 1 are left out.

        Args:
            sizes: Number of units per level, innermost first.

        Returns:
            The resized cluster.

        Raises:
            ShardwiseError: The cluster is mixed and the number of devices changes.
        """
        if self.mixed and prod(sizes) != self.num_devices:
            kinds = ", ".join(f"{count} x {name}" for name, count in self.mixed)
            what = f"{self.name} has {kinds}: the kinds of {prod(sizes)} devices are not known"
            raise ShardwiseError(what, fix="write a cluster file with these devices")
        levels = [replace(level, size=size) for level, size in zip(self.levels, sizes, strict=True)]
        while len(levels) > 1 and levels[-1].size == 1:
            levels.pop()
        return replace(self, levels=tuple(levels))

    def renamed(self, name: str) -> Cluster:
        return replace(self, name=name)

    def __str__(self) -> str:
        """For example ``h100-16x8: 128 x NVIDIA H100 SXM5 80GB (81559 MiB, of which 5.3 GiB are no plan's), node of 8
        at 368 GB/s, ...``."""
        levels = ", ".join(
            f"{level.name} of {level.size} at {format_quantity(level.bandwidth, 'B/s')}"
            + (f" shared by {level.shared_by}" if level.shared_by > 1 else "")
            for level in self.levels
        )
        memory = format_quantity(self.device.memory_bytes, "B")
        if self.device.reserve_bytes:
            memory += f", of which {format_quantity(self.device.reserve_bytes, 'B')} are reserved"
        text = f"{self.name}: {self.num_devices} x {self.device.name} ({memory}), {levels}"
        if self.mixed:
            text += "; planned with the slowest figures of " + ", ".join(f"{n} x {name}" for name, n in self.mixed)
        return text


def slowest_device(devices: Sequence[Device]) -> Device:
    """The worst of every figure of several devices: FLOP/s that all dtypes of any of them have, the least memory (and
    of what a plan can have), the longest latency. Rates that large operators reach are the least of any device, at the
    efficiency it gives them."""
    first, names = devices[0], " / ".join(dict.fromkeys(device.name for device in devices))
    if len(set(devices)) == 1:
        return first
    dtypes = sorted({dtype for device in devices for dtype in device.flops})
    flops = {dtype: min(device.peak_flops(dtype) for device in devices) for dtype in dtypes}
    reached = {dtype: min(device.matmul_flops(dtype) for device in devices) for dtype in dtypes}
    figures_of = {entry.name: [getattr(device, entry.name) for device in devices] for entry in fields(Device)}
    worst: dict[str, Any] = {
        name: min(figures_of[name]) for name in ("memory_bytes", "memory_bandwidth", "overlap", "host_bandwidth")
    }
    for name in ("kernel_latency", "attention_row", "launch", "spread", "memory_spread"):
        worst[name] = max(figures_of[name])
    for name in ("scalar_rate", "fresh_bandwidth"):  # 0: it is not known, or there is none
        worst[name] = min(filter(None, figures_of[name]), default=0.0)
    kinds = sorted({kind for device in devices for kind in device.kernels})
    return Device(
        name=names,
        flops=Figures(flops),
        matmul_efficiency=Figures({dtype: reached[dtype] / flops[dtype] for dtype in dtypes}),
        matmul_half_flops=max(device.matmul_ramp for device in devices) * max(reached.values()),
        memory_efficiency=min(device.bytes_per_second() for device in devices) / worst["memory_bandwidth"],
        reserve_bytes=worst["memory_bytes"] - min(device.usable_bytes for device in devices),
        foreach=any(figures_of["foreach"]),
        # A device without a figure for a kind counts as 1.0, the rate of its large kernels.
        kernels=Figures({kind: min(kernels.get(kind, 1.0) for kernels in figures_of["kernels"]) for kind in kinds}),
        products=first.products if len(set(figures_of["products"])) == 1 else "",
        **worst,
    )
