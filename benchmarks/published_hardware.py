"""The hardware of rows of published runs (for ``published_prices.py``): a bundled cluster, with the links that a row
states; a GPU that is none of these has the datasheet of its own, and reaches of it what the bundled one that is most
like it does."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import cache

from shardwise.costs.cluster import Cluster
from shardwise.costs.machine import family_of
from shardwise.costs.units import Figures

REACHED = 0.92  # of a network card, as in the bundled clusters


@dataclass(frozen=True, slots=True)
class Sheet:
    """What a datasheet states of a GPU beside the bundled one that is most ``like`` it: parts of its peak FLOP/s, bytes
    a second and bytes of memory, and of a link's bandwidth inside a node."""

    like: str
    flops: float = 1.0
    bandwidth: float | None = None
    memory: float | None = None
    links: float = 1.0


# The first whose words are all in the name of a GPU. Six stacks of HBM2e are an H100 PCIe's five and one (2 TB/s); what
# 500 W leave of the clocks is not known: priced as 700 W. Of MI250 and MI250X a device is one of two dies.
SHEETS = {
    "H100 96GB HBM2e": Sheet("h100", bandwidth=2.4e12, memory=96e9),
    "GH200 141GB": Sheet("h200"),
    "GH200 144GB": Sheet("h200", bandwidth=4.9e12, memory=144e9),
    "GH200": Sheet("h100", bandwidth=4.0e12, memory=96e9),
    "B300": Sheet("gb300", flops=0.9),
    "A100 64GB": Sheet("a100-80", bandwidth=1.638e12, memory=64e9),
    "A800 40GB": Sheet("a100-40", links=2 / 3),
    "A800": Sheet("a100-80", links=2 / 3),
    "A100": Sheet("a100-80"),
    "A40": Sheet("rtx-a6000", flops=149.7 / 154.8, bandwidth=696e9),
    "A10G": Sheet("rtx-a6000", flops=70 / 154.8, bandwidth=600e9, memory=24e9),
    "A10": Sheet("rtx-a6000", flops=125 / 154.8, bandwidth=600e9, memory=24e9),
    "L40": Sheet("l40s", flops=0.5),
    "MI355X": Sheet("mi300x", flops=2516 / 1307.4, bandwidth=8.0e12, memory=288e9, links=1075 / 896),
    "MI350X": Sheet("mi300x", flops=2307 / 1307.4, bandwidth=8.0e12, memory=288e9, links=1075 / 896),
    "MI325X": Sheet("mi300x", bandwidth=6.0e12, memory=256e9),
    "MI250X": Sheet("mi300x", flops=191.5 / 1307.4, bandwidth=1.6e12, memory=64e9, links=100 / 128),
    "MI250": Sheet("mi300x", flops=181.1 / 1307.4, bandwidth=1.6e12, memory=64e9, links=100 / 128),
}


def sheet_of(gpu: str) -> Sheet | None:
    """Return the datasheet of a GPU that is not bundled, or is of another kind than the bundled one of its name; else
    None."""
    words, is_bundled = set(re.split(r"[\s/_-]+", gpu.upper())), family_of(gpu)[1]
    for name, sheet in SHEETS.items():
        needed = name.upper().split()
        if set(needed) <= words and not (is_bundled and len(needed) == 1):
            return sheet
    return None


def device_named(gpu: str) -> str:
    """Return the bundled family that a GPU is priced as; empty if there is none."""
    sheet, (family, is_named) = sheet_of(gpu), family_of(gpu)
    return sheet.like if sheet is not None else family if is_named else ""


def likened(gpu: str) -> str:
    """Return what of a GPU is another's; empty where it is bundled."""
    if "PCIE" in gpu.upper() and device_named(gpu).startswith("a100"):
        return "device: an A100 SXM with its links"
    sheet = sheet_of(gpu)
    return "" if sheet is None else f"device: by its datasheet, what it reaches as {sheet.like}"


def node_rate(interconnect: str) -> float | None:
    """Gb/s of a node's network cards together, where a row states them."""
    if match := re.search(r"(\d+) Gb/s per node", interconnect):
        return float(match[1])
    if match := re.search(r"(\d+)x (?:HDR|Omni-Path )(\d+)", interconnect):
        return float(match[1]) * float(match[2])
    return None


@cache
def cluster_of(gpu: str, gpus: int, per_node: int, interconnect: str) -> Cluster:
    """The hardware of a row: a bundled cluster, with the links that the row states."""
    inside = min(per_node, gpus)
    cluster = Cluster.load(f"{device_named(gpu)}-{max(gpus // inside, 1)}x{inside}")
    sheet = sheet_of(gpu) or Sheet("")
    node, *network = cluster.levels
    rate = node_rate(interconnect)
    if rate is not None:
        network = [replace(level, bandwidth=rate * 1e9 / 8 / inside * REACHED) for level in network]
    if "NVSwitch" in interconnect:  # any two GPUs have all links of one
        node = replace(node, group_bandwidths=())
    device = cluster.device
    device = replace(
        device,
        flops=Figures({dtype: sheet.flops * peak for dtype, peak in device.flops.items()}),
        memory_bandwidth=sheet.bandwidth or device.memory_bandwidth,
        memory_bytes=sheet.memory or device.memory_bytes,
    )
    if sheet.links != 1.0:  # groups that were measured had the other's links
        groups = tuple((size, sheet.links * own) for size, own in node.group_bandwidths)
        node = replace(node, bandwidth=sheet.links * node.bandwidth, group_bandwidths=groups, lines=())
    return replace(cluster, device=device, levels=(node, *network))
