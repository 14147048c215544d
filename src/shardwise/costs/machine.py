"""``Cluster.local``: the devices of this machine as a cluster, out of what ``costs.probe`` finds.

Peaks, and how much of them is reached, are those of a bundled family, which the name of a GPU tells; its memory is the
GPU's own. Links inside the machine are read off ``nvidia-smi topo -m``: where all GPUs are joined by as many NVLinks as
the family has, they are the family's; by fewer, that part of them; in pairs or fours, a level of its own; else PCIe.
What was assumed is printed, once for each sentence.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from shardwise.costs import probe
from shardwise.costs.cluster import Cluster, Device, Level, slowest_device
from shardwise.costs.cluster_file import MEASURE, family, print_note_once
from shardwise.costs.units import format_quantity
from shardwise.errors import ShardwiseError

# The first whose words are all in the name of a GPU (as torch and nvidia-smi write it) is its family. A100 on PCIe
# differ from those on SXM by 5 % of the bandwidth of their memory, and by their links, which the topology tells.
_FAMILIES = (
    ("GB300", "gb300"),
    ("GB200", "gb200"),
    ("B200", "b200"),
    ("H200", "h200"),
    ("H20", "h20"),
    ("H800", "h800"),
    ("H100 NVL", "h100-nvl"),
    ("H100 PCIe", "h100-pcie"),
    ("H100", "h100"),
    ("A100 40GB", "a100-40"),
    ("A100 80GB", "a100-80"),
    ("L40S", "l40s"),
    ("L4", "l4"),
    ("RTX 6000 Ada", "rtx-6000-ada"),
    ("RTX A6000", "rtx-a6000"),
    ("RTX 5090", "rtx-5090"),
    ("RTX 4090", "rtx-4090"),
    ("RTX 3090", "rtx-3090"),
    ("T4", "t4"),
    ("V100", "v100"),
    ("MI300X", "mi300x"),
    ("Ascend 910A", "ascend-910a"),
    ("Ascend 910B", "ascend-910b"),
)
# Of a GPU with another name: a family of the same architecture, by CUDA's compute capability.
_BY_CAPABILITY = {
    (7, 0): "v100",
    (7, 5): "t4",
    (8, 0): "a100-80",
    (8, 6): "rtx-3090",
    (8, 9): "l4",
    (9, 0): "h100",
    (10, 0): "b200",
    (10, 3): "gb300",
    (12, 0): "rtx-5090",
}
_OTHER_CHIPS = {"MIG", "LAPTOP", "TI", "D"}  # words of names that otherwise are those of a larger or smaller GPU
_OTHERWISE = "a100-80"
# NVLinks of one GPU (NVIDIA datasheets: 600 GB/s of A100 and of bridged H100, 900 of H20, H100 and H200, 400 of H800,
# 1,800 of B200, GB200 and GB300).
_NVLINKS = dict.fromkeys(("gb300", "gb200", "b200", "h20", "h200", "h100"), 18)
_NVLINKS |= {"h800": 8} | dict.fromkeys(("h100-nvl", "h100-pcie", "a100-40", "a100-80"), 12)
# B/s of one NVLink 3 or 4 in one direction, of which a ring reaches 0.82, as on H200 (clusters/h100.toml).
_BRIDGED = 25e9 * 0.82

# Of another GPU's memory: 2.1 GiB and 4 % (the page on clusters).
_FIXED_RESERVE, _SHARED_RESERVE = 2.1 * 2**30, 0.04
_SAME_MEMORY = 0.05  # two cards of a family differ by less: in what the driver leaves
_OWN_CONTEXT = 2**30  # what this process takes of a GPU beside tensors, at most (half of it was measured)

_ESCAPES = re.compile(r"\x1b\[[0-9;]*m")


def local(num_devices: int) -> Cluster:
    """See ``Cluster.local``."""
    if isinstance(num_devices, bool) or not isinstance(num_devices, int) or num_devices < 1:
        what = f"a cluster has a whole number of devices from 1, not {num_devices!r}"
        raise ShardwiseError(what, fix="such as 8, or a cluster by name: h100-1x8")
    gpus = probe.gpus()
    cluster, assumed = _of_gpus(gpus, num_devices) if gpus else _of_cpus(num_devices)
    print_note_once(f"Cluster.local({num_devices}): {'; '.join(assumed)}; {MEASURE}")
    return cluster.renamed("local")


def family_of(name: str, capability: tuple[int, int] = (0, 0)) -> tuple[str, bool]:
    """Return the bundled family of a GPU, and whether its name told it (else it is one like it).

    >>> family_of("NVIDIA H100 80GB HBM3"), family_of("NVIDIA A100-SXM4-40GB"), family_of("NVIDIA L40", (8, 9))
    (('h100', True), ('a100-40', True), ('l4', False))
    """
    words = re.split(r"[\s/_-]+", name.upper())
    for pattern, chosen in _FAMILIES:
        if _OTHER_CHIPS.isdisjoint(words) and set(pattern.upper().split()) <= set(words):
            return chosen, True
    return _BY_CAPABILITY.get(capability, _OTHERWISE), False


def _of_cpus(num_devices: int) -> tuple[Cluster, list[str]]:
    whole = probe.memory_bytes()
    cluster = family("local").with_devices(num_devices)
    device_bytes = float(max(1, whole // num_devices))
    device = replace(cluster.device, memory_bytes=device_bytes)
    source = f"{format_quantity(whole, 'B')} that processes may use on this machine, in {num_devices} equal parts"
    sources = tuple({**dict(cluster.sources), "device.memory": source}.items())
    return replace(cluster, device=device, sources=sources), [
        f"this machine has no GPU: CPU ranks, each with its part of {format_quantity(whole, 'B')}",
        "speeds and links of the machine on which shardwise is tested",
    ]


def _of_gpus(gpus: Sequence[probe.Gpu], num_devices: int) -> tuple[Cluster, list[str]]:
    inside = min(num_devices, len(gpus))
    if num_devices % inside:
        what = f"{num_devices} devices: this machine has {inside} GPUs, and {num_devices} is not a multiple"
        fix = f"choose at most {inside}, or a multiple; CPU ranks: sw.Cluster.load('local').with_devices({num_devices})"
        raise ShardwiseError(what, fix=fix)
    listed = probe.smi_gpus()
    used = gpus[:inside]
    assumed: list[str] = []
    names = [family_of(gpu.name, gpu.capability) for gpu in used]
    devices = [
        _device(gpu, name, listed.get(gpu.uuid), place, assumed)
        for place, (gpu, (name, _)) in enumerate(zip(used, names, strict=True))
    ]
    kinds = {gpu.name: 0 for gpu in used}
    for gpu in used:
        kinds[gpu.name] += num_devices // inside
    for gpu_name, (name, is_named) in dict(zip((gpu.name for gpu in used), names, strict=True)).items():
        assumed.insert(0, f"{gpu_name} with the figures of {name}{'' if is_named else ', which may be similar'}")
    slowest_family = min((name for name, _ in names), key=lambda name: family(name).levels[0].bandwidth)
    rows = [listed[gpu.uuid].index for gpu in used if gpu.uuid in listed]
    links = _link_kinds(probe.topology(), rows) if inside > 1 and len(rows) == inside else None
    levels, link = _levels(slowest_family, devices[0], inside, links)
    if inside > 1:
        assumed.append(link)
    num_nodes = num_devices // inside
    if num_nodes > 1:
        levels += [replace(family(slowest_family).levels[-1], size=num_nodes)]
        assumed.append(
            f"{num_nodes} such machines with the network of {slowest_family} (a GPU each for more ranks than GPUs: "
            "on one machine they would run on the CPU)"
        )
    sources = {
        **dict(family(slowest_family).sources),
        "device.memory": "this machine's GPU",
        "levels.node.bandwidth": link,
    }
    mixed = tuple(kinds.items()) if len(kinds) > 1 else ()
    return Cluster("local", slowest_device(devices), tuple(levels), mixed, sources=tuple(sources.items())), assumed


def _device(gpu: probe.Gpu, name: str, seen: probe.SmiGpu | None, place: int, assumed: list[str]) -> Device:
    """A family's device with a GPU's own memory, less what other processes have of it and what torch may not take."""
    like = family(name).device
    whole = float(max(gpu.memory_bytes, seen.memory_bytes if seen is not None else 0))
    similar = abs(whole / like.memory_bytes - 1) <= _SAME_MEMORY
    reserve = like.reserve_bytes if similar else _FIXED_RESERVE + _SHARED_RESERVE * whole
    taken = 0.0 if seen is None else float(seen.used_bytes - gpu.held_bytes)
    if taken > _OWN_CONTEXT:
        assumed.append(f"other processes hold {format_quantity(taken, 'B')} of GPU {place}")
        reserve += taken
    if gpu.fraction < 1:
        assumed.append(f"torch may use {gpu.fraction:.0%} of GPU {place} (set_per_process_memory_fraction)")
        reserve = max(reserve, whole - gpu.fraction * gpu.memory_bytes)
    if reserve >= whole:
        what = f"GPU {place} ({gpu.name}, {format_quantity(whole, 'B')}) has no memory left for a plan"
        fix = f"end its processes (see nvidia-smi), or choose other GPUs: CUDA_VISIBLE_DEVICES; {'; '.join(assumed)}"
        raise ShardwiseError(what, fix=fix)
    return replace(like, name=gpu.name, memory_bytes=whole, reserve_bytes=reserve)


def _link_kinds(table: str, rows: Sequence[int]) -> list[list[str]] | None:
    """Parse the pairwise GPU links (NV18, PIX, SYS, ...) from nvidia-smi's table; None if rows are missing."""
    lines = [_ESCAPES.sub("", line).split() for line in table.splitlines()]
    cells = {
        line[0]: line[1:]
        for line in lines
        if len(line) > 1 and re.fullmatch(r"GPU\d+", line[0]) and not line[1].startswith("GPU")  # not the header
    }
    try:
        return [[cells[f"GPU{row}"][column] for column in rows] for row in rows]
    except (KeyError, IndexError):
        return None


def _levels(name: str, device: Device, size: int, links: list[list[str]] | None) -> tuple[list[Level], str]:
    """Return the link levels within one machine, innermost first, and a sentence about them."""
    like = replace(family(name).levels[0], size=size)
    if links is None:
        return [like], f"links between them as in {name} (not reported by nvidia-smi)"
    pairs = [links[a][b] for a in range(size) for b in range(size) if a != b]
    if not any(link.startswith("NV") for link in pairs) or name not in _NVLINKS:
        if name not in _NVLINKS or like.bandwidth <= device.host_bandwidth:
            return [like], f"links as in {name} ({min(pairs)})"
        return [_through_host(size, device)], f"PCIe through the host ({min(pairs)}), half of a copy's rate assumed"
    island = next(size // parts for parts in range(1, size + 1) if size % parts == 0 and _joined(links, size // parts))
    if island == 1:
        return [_through_host(size, device)], "PCIe through the host: NVLinks join some pairs only"
    inner = [links[a][b] for a in range(size) for b in range(size) if a != b and a // island == b // island]
    width = min(int(link[2:]) for link in inner)
    is_switched = like.bandwidth > device.host_bandwidth
    if island == size and width >= _NVLINKS[name] and is_switched:
        return [like], f"NVLink (NV{width}), as in {name}"
    link_rate = like.bandwidth / _NVLINKS[name] if is_switched else _BRIDGED
    bridge = replace(
        like, name="bridge", size=island, bandwidth=width * link_rate, in_switch=0.0, group_bandwidths=(), lines=()
    )
    if island == size:
        return [bridge], f"NVLink (NV{width}), {format_quantity(width * link_rate, 'B/s')} of it assumed"
    outer = _through_host(size // island, device)
    return [bridge, outer], f"NVLink (NV{width}) in groups of {island}, PCIe between them"


def _joined(links: list[list[str]], island: int) -> bool:
    """Return whether neighbours in groups of this size are all joined by NVLink."""
    places = range(len(links))
    return all(links[a][b].startswith("NV") for a in places for b in places if a != b and a // island == b // island)


def _through_host(size: int, device: Device) -> Level:
    """PCIe without peer links: bytes go to the memory of the host and back."""
    pcie = family("l4").levels[0]
    return replace(pcie, size=size, bandwidth=device.host_bandwidth / 2)
