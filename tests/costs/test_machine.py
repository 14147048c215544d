"""The machine as it is: what ``Cluster.local`` makes of the answers of torch, nvidia-smi and Linux."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from raising import raises
from shardwise.costs import probe
from shardwise.costs.cluster import Cluster
from shardwise.costs.cluster_file import family, format_cluster, parse
from shardwise.costs.machine import family_of
from shardwise.errors import ShardwiseError

H100 = probe.Gpu("NVIDIA H100 80GB HBM3", 81_079 * 2**20, (9, 0))


def machine(
    monkeypatch: pytest.MonkeyPatch,
    gpus: list[probe.Gpu],
    links: list[list[str]] | None = None,
    used_bytes: dict[int, int] | None = None,
) -> None:
    """A machine with these GPUs, as ``probe`` would find it. ``links``: of ``nvidia-smi topo -m``, which is there only
    then."""
    named = tuple(
        probe.Gpu(gpu.name, gpu.memory_bytes, gpu.capability, f"GPU-{i}", gpu.held_bytes, gpu.fraction)
        for i, gpu in enumerate(gpus)
    )
    monkeypatch.setattr(probe, "gpus", lambda: named)
    seen = {
        gpu.uuid: probe.SmiGpu(i, gpu.memory_bytes + 480 * 2**20, (used_bytes or {}).get(i, 0))
        for i, gpu in enumerate(named)
    }
    monkeypatch.setattr(probe, "smi_gpus", lambda: seen if links is not None else {})
    head = "\t" + "\t".join(f"\x1b[4mGPU{i}\x1b[0m" for i in range(len(gpus))) + "\tNIC0\tCPU Affinity\tNUMA Affinity"
    rows = [f"GPU{i}\t{chr(9).join(row)}\tPXB\t0-51\t0" for i, row in enumerate(links or [])]
    legend = "\nLegend:\n\n  X    = Self\n  NV#  = Connection traversing a bonded set of # NVLinks\n"
    monkeypatch.setattr(probe, "topology", lambda: "\n".join([head, *rows, legend]) if links else "")


def full(size: int, way: str) -> list[list[str]]:
    return [[" X " if a == b else way for b in range(size)] for a in range(size)]


def test_eight_h100_are_the_bundled_node_with_their_own_name(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    machine(monkeypatch, [H100] * 8, full(8, "NV18"))
    cluster, known = Cluster.local(8), Cluster.load("h100")
    assert cluster.levels == known.levels
    assert cluster.device.flops == known.device.flops
    assert cluster.device.kernels == known.device.kernels
    assert cluster.device.memory_bytes == 81_559 * 2**20
    assert cluster.device.usable_bytes > 74 * 2**30
    assert cluster.num_devices == 8
    said = capfd.readouterr().err
    assert "NVIDIA H100 80GB HBM3 with the figures of h100; NVLink (NV18), as in h100; shardwise calibrate" in said
    assert Cluster.local(4).levels[0].size == 4
    Cluster.local(8)
    assert "Cluster.local(8)" not in capfd.readouterr().err  # once


def test_more_devices_than_gpus_are_more_such_machines(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    machine(monkeypatch, [H100] * 8, full(8, "NV18"))
    cluster = Cluster.local(32)
    assert [level.size for level in cluster.levels] == [8, 4]
    assert cluster.levels == Cluster.load("h100-4x8").levels
    assert "4 such machines with the network of h100" in capfd.readouterr().err
    with raises(ShardwiseError, 12, "8 GPUs", 8):
        Cluster.local(12)
    with raises(ShardwiseError, "devices from 1", "not 0", fix="h100-1x8"):
        Cluster.local(0)


@pytest.mark.parametrize(
    ("name", "capability", "chosen"),
    [
        ("NVIDIA H100 80GB HBM3", (9, 0), ("h100", True)),
        ("NVIDIA H100 PCIe", (9, 0), ("h100-pcie", True)),
        ("NVIDIA H100 NVL", (9, 0), ("h100-nvl", True)),
        ("NVIDIA H200", (9, 0), ("h200", True)),
        ("NVIDIA H800", (9, 0), ("h800", True)),
        ("NVIDIA GH200 480GB", (9, 0), ("h100", False)),
        ("NVIDIA A100-SXM4-40GB", (8, 0), ("a100-40", True)),
        ("NVIDIA A100-SXM4-80GB", (8, 0), ("a100-80", True)),
        ("NVIDIA A100 80GB PCIe", (8, 0), ("a100-80", True)),
        ("NVIDIA A100-PCIE-40GB", (8, 0), ("a100-40", True)),
        ("NVIDIA L4", (8, 9), ("l4", True)),
        ("Ascend 910B", (0, 0), ("ascend-910b", True)),
        ("NVIDIA L40S", (8, 9), ("l40s", True)),
        ("NVIDIA RTX 6000 Ada Generation", (8, 9), ("rtx-6000-ada", True)),
        ("NVIDIA RTX A6000", (8, 6), ("rtx-a6000", True)),
        ("NVIDIA GeForce RTX 4090", (8, 9), ("rtx-4090", True)),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", (8, 9), ("l4", False)),
        ("NVIDIA GeForce RTX 3090 Ti", (8, 6), ("rtx-3090", False)),
        ("Tesla T4", (7, 5), ("t4", True)),
        ("NVIDIA H20", (9, 0), ("h20", True)),
        ("NVIDIA GB200", (10, 0), ("gb200", True)),
        ("NVIDIA B200", (10, 0), ("b200", True)),
        ("Tesla V100-SXM2-32GB", (7, 0), ("v100", True)),
        ("AMD Instinct MI300X", (9, 4), ("mi300x", True)),
        ("NVIDIA H100 80GB HBM3 MIG 3g.40gb", (9, 0), ("h100", False)),
        ("NVIDIA GeForce RTX 3060", (8, 6), ("rtx-3090", False)),
    ],
)
def test_a_gpu_is_known_by_its_name(name: str, capability: tuple[int, int], chosen: tuple[str, bool]) -> None:
    assert family_of(name, capability) == chosen


def test_links_are_those_that_nvidia_smi_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    a100 = probe.Gpu("NVIDIA A100 80GB PCIe", 81_050 * 2**20, (8, 0))
    nvlink, device = family("a100-80").levels[0], family("a100-80").device
    machine(monkeypatch, [a100] * 4, full(4, "SYS"))
    (pcie,) = Cluster.local(4).levels
    assert pcie.bandwidth == device.host_bandwidth / 2 < nvlink.bandwidth / 10
    pairs = [[" X " if a == b else "NV12" if a // 2 == b // 2 else "SYS" for b in range(4)] for a in range(4)]
    machine(monkeypatch, [a100] * 4, pairs)
    inner, outer = Cluster.local(4).levels
    assert (inner.size, inner.bandwidth, outer.size) == (2, pytest.approx(nvlink.bandwidth), 2)
    assert outer == pcie.__class__(**{f: getattr(pcie, f) for f in pcie.__slots__} | {"size": 2})
    machine(monkeypatch, [a100] * 4, full(4, "NV4"))  # a third of what a full board has
    (fewer,) = Cluster.local(4).levels
    assert fewer.bandwidth == pytest.approx(nvlink.bandwidth / 3)
    assert nvlink.lines  # a full board was measured,
    assert not fewer.lines  # this one was not
    crossed = [[" X " if a == b else "NV12" if (a + b) == 3 else "SYS" for b in range(4)] for a in range(4)]
    machine(monkeypatch, [a100] * 4, crossed)  # the pairs are no neighbours
    assert Cluster.local(4).levels == (pcie,)
    machine(monkeypatch, [a100] * 4)  # nvidia-smi is not there
    assert Cluster.local(4).levels[0].bandwidth == nvlink.bandwidth
    nvl = probe.Gpu("NVIDIA H100 NVL", 95_346 * 2**20, (9, 0))
    machine(monkeypatch, [nvl] * 2, full(2, "NV12"))
    assert Cluster.local(2).levels[0].bandwidth == pytest.approx(12 * 25e9 * 0.82)
    machine(monkeypatch, [nvl] * 2, full(2, "NODE"))
    assert Cluster.local(2).levels[0].bandwidth == family("h100-nvl").levels[0].bandwidth


def test_memory_is_what_this_process_can_get(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    machine(monkeypatch, [H100], [[" X "]])
    free = Cluster.local(1).device.usable_bytes
    held = probe.Gpu(H100.name, H100.memory_bytes, held_bytes=30 * 2**30)
    machine(monkeypatch, [held], [[" X "]], {0: 30 * 2**30 + 500 * 2**20})  # this process's own, with its context
    assert Cluster.local(1).device.usable_bytes == free
    machine(monkeypatch, [H100], [[" X "]], {0: 40 * 2**30})
    assert Cluster.local(1).device.usable_bytes == free - 40 * 2**30
    assert "other processes hold 40 GiB of GPU 0" in capfd.readouterr().err
    machine(monkeypatch, [H100], [[" X "]], {0: 78 * 2**30})
    with raises(ShardwiseError, "GPU 0 (NVIDIA H100 80GB HBM3, 81559 MiB)"):
        Cluster.local(1)
    machine(monkeypatch, [probe.Gpu(H100.name, H100.memory_bytes, fraction=0.5)])
    assert Cluster.local(1).device.usable_bytes == H100.memory_bytes / 2
    machine(monkeypatch, [probe.Gpu("NVIDIA GH200 480GB", 97_871 * 2**20, (9, 0))])
    assert Cluster.local(1).device.usable_bytes == pytest.approx(0.96 * 97_871 * 2**20 - 2.1 * 2**30)


def test_different_gpus_are_planned_with_the_worst_of_each(monkeypatch: pytest.MonkeyPatch) -> None:
    l4 = probe.Gpu("NVIDIA L4", 22_564 * 2**20, (8, 9))
    machine(monkeypatch, [H100, l4], full(2, "PHB"))
    cluster = Cluster.local(2)
    assert cluster.mixed == (("NVIDIA H100 80GB HBM3", 1), ("NVIDIA L4", 1))
    assert cluster.device.memory_bytes == 23_044 * 2**20
    assert cluster.device.peak_flops("bf16") == family("l4").device.peak_flops("bf16")
    assert Cluster.local(1).device.name == H100.name


def test_ranks_on_cpus_share_the_memory_that_control_groups_leave(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(probe, "gpus", lambda: ())
    monkeypatch.setattr(probe, "memory_bytes", lambda: 48 * 2**30)
    cluster = Cluster.local(6)
    assert cluster.device.memory_bytes == 8 * 2**30
    assert "48 GiB" in dict(cluster.sources)["device.memory"]
    assert cluster.levels == Cluster.load("local").with_devices(6).levels
    assert parse(format_cluster(cluster)) == cluster
    monkeypatch.undo()
    whole = probe.memory_bytes(tmp_path)
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("0::/user.slice/job\n")
    for folder, limit in (("user.slice", "5000000"), ("user.slice/job", "max"), ("", "9000000")):
        (tmp_path / "sys/fs/cgroup" / folder).mkdir(parents=True, exist_ok=True)
        (tmp_path / "sys/fs/cgroup" / folder / "memory.max").write_text(limit + "\n")
    assert probe.memory_bytes(tmp_path) == 5_000_000 < whole
    (tmp_path / "proc/self/cgroup").write_text("12:cpu,cpuacct:/x\n9:memory:/job\n1:name=systemd:/y\n")
    (tmp_path / "sys/fs/cgroup/memory/job").mkdir(parents=True)
    (tmp_path / "sys/fs/cgroup/memory/job/memory.limit_in_bytes").write_text("7000000\n")
    assert probe.memory_bytes(tmp_path) == 7_000_000
    (tmp_path / "sys/fs/cgroup/memory/job/memory.limit_in_bytes").write_text("9223372036854771712\n")  # none
    assert probe.memory_bytes(tmp_path) == whole


def test_torch_and_nvidia_smi_are_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = SimpleNamespace(name="NVIDIA L4", total_memory=100, major=8, minor=9, uuid="abc-def")
    for name, answer in (
        ("is_available", lambda: True),
        ("device_count", lambda: 2),
        ("get_device_properties", lambda index: properties),
        ("memory_reserved", lambda index: 10 * index),
        ("get_per_process_memory_fraction", lambda index: 1.0),
    ):
        monkeypatch.setattr(torch.cuda, name, answer)
    gpus = probe.gpus()
    assert gpus == (
        probe.Gpu("NVIDIA L4", 100, (8, 9), "GPU-abc-def", 0),
        probe.Gpu("NVIDIA L4", 100, (8, 9), "GPU-abc-def", 10),
    )
    answers = {"--query-gpu=uuid,index,memory.total,memory.used": "GPU-abc, 3, 23034, 512\nGPU-x, 4, [N/A], [N/A]\n"}
    monkeypatch.setattr(probe, "_smi", lambda *arguments: answers.get(arguments[0], ""))
    assert probe.smi_gpus() == {"GPU-abc": probe.SmiGpu(3, 23_034 * 2**20, 512 * 2**20)}
    assert probe.topology() == ""
