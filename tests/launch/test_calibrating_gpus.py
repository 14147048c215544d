"""What ``shardwise calibrate`` measures on GPUs, without one: the kernels that it finds, and what is made of times."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import shardwise as sw
from shardwise.costs.cluster import Device
from shardwise.costs.cluster_file import family
from shardwise.costs.fit import KernelTime, MatmulTime, Measurements, StreamTime, fit_cluster, residuals
from shardwise.costs.kernels import KernelWork, kernel_seconds
from shardwise.costs.units import Figures
from shardwise.launch.calibrate import calibrate
from shardwise.launch.measure import KernelSizes, host_bandwidth, kernel_times, launch_seconds, main, noise_of

CPU = torch.device("cpu")
# Kinds that PyTorch's CPU kernels have as well (on a GPU also rms_norm, random and their backward).
ALSO_ON_CPU = {
    *("attention", "attention_backward", "layer_norm", "layer_norm_backward", "softmax", "softmax_backward"),
    *("log_softmax_backward", "reduction", "column_reduction", "scatter", "convolution", "convolution_backward"),
    *("batch_norm", "batch_norm_backward", "pool", "pool_backward", "update"),
}


def test_every_kind_of_kernel_is_called_with_its_work() -> None:
    def seconds(call: object) -> float:
        assert callable(call)
        call()
        return 1.0

    times = list(kernel_times(seconds, CPU, KernelSizes.of(tiny=True)))
    assert {time.work.kind for time in times} >= ALSO_ON_CPU
    attention = next(time.work for time in times if time.work.kind == "attention")
    assert attention.flops == 2 * (2 * 2 * 16 * 16 * 8) / 2  # scores and means of 2 heads, half of them seen
    assert attention.rows == 2 * 16
    update = next(time.work for time in times if time.work.kind == "update")
    assert update.num_bytes == 7 * 4 * 16 * 32  # parameter, gradient and two states read, all but the gradient written
    assert launch_seconds(lambda call, number: 1e-6 * number, CPU) == 5e-4
    assert host_bandwidth(lambda call: 0.5, CPU, 2**20) == 2**21


def measured(
    device: Device, *, kernels: tuple[KernelWork, ...] = (), name: str = "NVIDIA H100 80GB HBM3"
) -> Measurements:
    latency = device.kernel_latency
    matmuls = [
        MatmulTime("bf16", f, latency + device.matmul_ramp + f / device.matmul_flops("bf16"))
        for f in (1e10, 1e11, 1e12)
    ]
    streams = [StreamTime(n, latency + n / device.bytes_per_second()) for n in (1e6, 1e7, 1e9)]
    return Measurements(
        name,
        80e9,
        (1,),
        latency,
        tuple(matmuls),
        tuple(streams),
        (),
        kernels=tuple(KernelTime(work, kernel_seconds(device, work)) for work in kernels),
        launch=9e-6,
        host_bandwidth=50e9,
        reserve_bytes=4e9,
        facts={"backend": "nccl 2.27", "date": "today", "software": f"shardwise {sw.__version__}"},
    )


def test_figures_of_kernels_are_found_again() -> None:
    known = family("h100").device
    shares = {"attention": 0.7, "attention_backward": 0.5, "softmax": 0.6, "scatter": 0.05, "update": 0.8}
    truth = replace(known, kernels=Figures({**known.kernels, **shares}))
    works = (
        KernelWork("attention", 1e12, 1e8, rows=64 * 4096, dtype="bf16"),
        KernelWork("attention_backward", 2.5e12, 2e8, rows=64 * 4096, dtype="bf16"),
        KernelWork("softmax", num_bytes=2e8),
        KernelWork("scatter", num_bytes=1e8, written=5e7),
        KernelWork("update", num_bytes=1e9),
    )
    points = measured(truth, kernels=works)
    cluster = fit_cluster(points, "mine", family("h100"))
    found = cluster.device
    assert {kind: found.kernels[kind] for kind in shares} == pytest.approx(shares, rel=1e-6)
    assert found.kernels["rms_norm"] == known.kernels["rms_norm"]  # nobody measured it
    assert (found.launch, found.host_bandwidth, found.reserve_bytes) == (9e-6, 50e9, 4e9)
    errors = {residual.series: residual.relative_error for residual in residuals(cluster, points)}
    assert errors["attention"] == pytest.approx(0, abs=1e-6)
    assert Measurements.from_json(json.loads(json.dumps(points.to_json()))) == points


def test_links_of_one_gpu_are_those_of_its_bundled_cluster(tmp_path: Path) -> None:
    points = tmp_path / "points.json"
    points.write_text(json.dumps(measured(family("h200").device, name="NVIDIA H200").to_json()))
    cluster, lines = calibrate(tmp_path / "mine.toml", points=points)
    (level,), (known, _) = cluster.levels, family("h200").levels
    assert (level.size, level.bandwidth, level.latency) == (1, known.bandwidth, known.latency)
    assert "as h200: not measured on 1 device" in (tmp_path / "mine.toml").read_text()
    assert cluster.device.flops["f8"] == family("h200").device.flops["f8"]
    assert not any("busy" in line for line in lines)
    unknown = replace(measured(family("h200").device), device="another GPU", noise=0.8)
    points.write_text(json.dumps(unknown.to_json()))
    cluster, lines = calibrate(tmp_path / "other.toml", points=points)
    assert cluster.levels[0].bandwidth == family("local").levels[0].bandwidth
    assert "as local: not measured on 1 device" in (tmp_path / "other.toml").read_text()
    assert "more than 1.80 times as long" in lines[0]
    assert "end other programs" in lines[0]
    assert lines[0] in (tmp_path / "other.toml").read_text()


def test_noise_is_how_far_rounds_are_apart() -> None:
    quiet = [[StreamTime(1.0, 2.0), StreamTime(2.0, 4.0)], [StreamTime(1.0, 2.0), StreamTime(2.0, 4.4)]]
    assert noise_of(quiet, []) == pytest.approx(0.025)


def test_one_rank_measures_and_names_this_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    path = tmp_path / "points.json"
    try:
        main([str(path), "--tiny"])
    finally:
        torch.distributed.destroy_process_group()
    facts = json.loads(path.read_text())["facts"]
    assert f"shardwise {sw.__version__}, torch {torch.__version__}" in facts["software"]
