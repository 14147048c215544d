"""Calibration: figures are found again in synthetic measurements; the command works at tiny sizes."""

from __future__ import annotations

import json
import random
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from raising import raises
from shardwise import cli
from shardwise.costs.cluster import Cluster, Device, Level
from shardwise.costs.cluster_file import format_cluster, parse
from shardwise.costs.collectives import Span, affine_terms
from shardwise.costs.fit import (
    CollectiveTime,
    MatmulTime,
    Measurements,
    StreamTime,
    fit_cluster,
    fit_level,
    format_residuals,
    quantile,
    residuals,
    robust_line,
)
from shardwise.costs.units import Figures
from shardwise.errors import LaunchError
from shardwise.launch.measure import groups_of, hidden_part, second_fastest, sizes_of

KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "collective_permute")
SIZES = tuple(4.0**power for power in range(5, 14))

TRUTH = Cluster(
    "truth",
    Device("D", Figures({"f32": 5e12, "f64": 2e12}), 1e9, 2e11, 3e-6, Figures({"f32": 1.0, "f64": 1.0}), 4e7),
    (
        Level("node", 4, 8e10, 2e-6, launch=2e-5, group_bandwidths=((2, 6e10), (4, 8e10))),
        Level("network", 2, 5e9, 3e-5, launch=5e-5),
    ),
)


def measured(noise: float = 0.0, outliers: int = 0, seed: int = 0) -> Measurements:
    """What a machine with exactly the figures of ``TRUTH`` would show, with some noise, and some points ten times too
    slow."""
    randomly = random.Random(seed)
    device = TRUTH.device

    def disturbed(seconds: float) -> float:
        return seconds * randomly.uniform(1 - noise, 1 + noise)

    collectives = []
    for units in ((2, 1, 1), (4, 1, 1), (2, 2, 1), (8, 2, 1)):
        for kind in KINDS:
            for size in SIZES:
                seconds = min(f + s * size for f, s in affine_terms(kind, TRUTH.levels, Span(units)))
                collectives.append(CollectiveTime(kind, units, size, disturbed(seconds)))
    for index in randomly.sample(range(len(collectives)), outliers):
        collectives[index] = replace(collectives[index], seconds=collectives[index].seconds * 10)
    return Measurements(
        device="D",
        memory_bytes=1e9,
        sizes=(4, 2),
        kernel_latency=device.kernel_latency,
        matmuls=tuple(
            MatmulTime(
                dtype, f, disturbed(device.kernel_latency + device.matmul_half_flops / 5e12 + f / device.flops[dtype])
            )
            for dtype in ("f32", "f64")
            for f in SIZES
        ),
        streams=tuple(StreamTime(b, disturbed(device.kernel_latency + b / device.memory_bandwidth)) for b in SIZES),
        collectives=tuple(collectives),
        overlap=0.25,
        facts={"date": "2026-01-01", "software": "torch"},
    )


def test_a_line_is_found_between_outliers() -> None:
    points = [(x, 3.0 + 0.5 * x) for x in (1.0, 10.0, 100.0, 1e3, 1e4)]
    assert robust_line(points) == pytest.approx((3.0, 0.5))
    assert robust_line([*points, (5.0, 1e6), (500.0, 1e-3)]) == pytest.approx((3.0, 0.5))


def test_lines_have_no_negative_coefficients() -> None:
    assert robust_line([(1.0, 1.0), (2.0, 3.0), (3.0, 5.0)])[0] >= 0
    intercept, slope = robust_line([(1.0, 5.0), (2.0, 4.0), (3.0, 3.0)])
    assert slope == 0
    assert intercept == 4.0
    assert robust_line([(1.0, 5.0), (2.0, 4.0), (3.0, 3.0)], rising=True)[1] > 0
    assert robust_line([(4.0, 2.0)]) == (0.0, 0.5)
    assert robust_line([(4.0, 2.0), (4.0, 6.0), (4.0, 3.0)]) == (0.0, 0.75)
    assert robust_line([(0.0, 2.0)]) == (2.0, 0.0)


def test_many_points_are_thinned_evenly_over_the_orders_of_magnitude() -> None:
    """A thousand points, nearly all of them large: the few small ones still tell the intercept."""
    points = [(float(x), 100.0 + 2.0 * x) for x in range(1, 1025)]
    assert robust_line(points) == pytest.approx((100.0, 2.0))


def test_quantiles_are_of_the_values() -> None:
    values = [float(value) for value in range(1, 11)]
    assert quantile(values, 0.5) == 5
    assert quantile(values, 0.9) == 9
    assert quantile([3.0], 0.9) == 3


def test_exact_measurements_give_the_figures_back() -> None:
    found = fit_cluster(measured(), "found")
    device, truth = found.device, TRUTH.device
    assert device.flops["f32"] == pytest.approx(truth.flops["f32"], rel=1e-6)
    assert device.flops["f64"] == pytest.approx(truth.flops["f64"], rel=1e-6)
    assert device.matmul_half_flops == pytest.approx(truth.matmul_half_flops, rel=1e-6)
    assert device.bytes_per_second() == pytest.approx(truth.bytes_per_second(), rel=1e-6)
    assert device.overlap == 0.25
    for level, true in zip(found.levels, TRUTH.levels, strict=True):
        assert (level.name, level.size) == (true.name, true.size)
        assert level.latency == pytest.approx(true.latency, rel=1e-6)
        assert level.launch == pytest.approx(true.launch, rel=1e-6)
        for units in (2, 4)[: true.size // 2]:
            assert level.link_bandwidth(units) == pytest.approx(true.link_bandwidth(units), rel=1e-6)
        assert all(part == pytest.approx(1.0, rel=1e-6) for part in level.efficiency.values())
    errors = [residual.relative_error for residual in residuals(found, measured())]
    assert max(errors) < 1e-6
    assert len(errors) == len(SIZES) * (3 + 4 * len(KINDS))


@pytest.mark.parametrize("seed", range(5))
def test_noisy_measurements_with_outliers_give_nearly_the_figures(seed: int) -> None:
    found = fit_cluster(measured(noise=0.05, outliers=12, seed=seed), "found")
    for level, true in zip(found.levels, TRUTH.levels, strict=True):
        assert level.bandwidth == pytest.approx(true.bandwidth, rel=0.15)
    assert found.device.flops["f32"] == pytest.approx(TRUTH.device.flops["f32"], rel=0.15)
    errors = [residual.relative_error for residual in residuals(found, measured())]
    assert quantile(errors, 0.5) < 0.1
    assert quantile(errors, 0.9) < 0.2


def test_kinds_that_a_library_does_badly_get_their_own_efficiency_and_launch() -> None:
    slow = [
        replace(time, seconds=1e-3 + 3 * time.seconds) if time.kind == "reduce_scatter" else time
        for time in measured().collectives
        if time.units[1] == 1
    ]
    level = fit_level("node", 4, slow)
    assert level.efficiency["reduce_scatter"] == pytest.approx(1 / 3, rel=0.02)
    assert level.efficiency["all_gather"] == pytest.approx(1, rel=0.02)
    assert level.launches["reduce_scatter"] > 0.9e-3
    assert level.launches["all_gather"] < 0.1e-3


def test_group_sizes_that_nobody_measured_keep_the_shape_of_known_links() -> None:
    like = Level("node", 8, 90.0, 0.0, group_bandwidths=((2, 10.0), (3, 20.0), (4, 60.0), (8, 90.0)))
    times = [
        CollectiveTime("all_reduce", (n, 1), b, 2 * (n - 1) / n * b / pace)
        for n, pace in ((2, 20.0), (4, 120.0))
        for b in (1e6, 1e9)
    ]
    level = fit_level("node", 8, times, like)
    assert dict(level.group_bandwidths) == pytest.approx({2: 20.0, 3: 40.0, 4: 120.0, 8: 180.0})


def test_known_peaks_are_kept_and_the_part_that_is_reached_is_measured() -> None:
    peaks = replace(TRUTH.device, flops=Figures({"f32": 1e13, "f16": 5e13}), memory_bandwidth=4e11)
    found = fit_cluster(measured(), "found", replace(TRUTH, device=peaks)).device
    assert found.flops["f32"] == 1e13
    assert found.flops["f16"] == 5e13
    assert found.matmul_efficiency["f32"] == pytest.approx(0.5, rel=1e-6)
    assert found.flops["f64"] == pytest.approx(2e12, rel=1e-6)
    assert found.memory_efficiency == pytest.approx(0.5, rel=1e-6)


def test_measurements_and_the_fitted_file_read_back(tmp_path: Path) -> None:
    points = measured(noise=0.05)
    assert Measurements.from_json(json.loads(json.dumps(points.to_json()))) == points
    found = fit_cluster(points, "found")
    again = parse(format_cluster(found, {**points.facts, "residuals": format_residuals(residuals(found, points))}))
    assert again.num_devices == 8
    assert again.device.flops["f32"] == pytest.approx(found.device.flops["f32"], rel=1e-3)
    assert "2026-01-01" in dict(again.sources)["device.flops"]


def test_times_that_do_not_grow_still_give_rates() -> None:
    """Tiny sizes on a busy machine: larger ones may be faster."""
    points = measured()
    odd = replace(
        points,
        streams=(StreamTime(1e4, 5e-6), StreamTime(1e5, 4e-6)),
        matmuls=(MatmulTime("f32", 1e4, 5e-6), MatmulTime("f32", 1e5, 4e-6)),
        collectives=tuple(replace(time, seconds=1 / time.num_bytes) for time in points.collectives),
    )
    found = fit_cluster(odd, "odd")
    assert parse(format_cluster(found)).num_devices == 8
    assert 0 < found.device.bytes_per_second() < float("inf")


def test_one_device_needs_no_links() -> None:
    alone = replace(measured(), sizes=(1,), collectives=())
    assert fit_cluster(alone, "alone").num_devices == 1


@pytest.mark.parametrize("sizes", [(4,), (6,), (2, 3), (4, 2), (1, 4)])
def test_measured_groups_are_all_ranks_and_where_the_model_believes(sizes: tuple[int, ...]) -> None:
    """Every round has each rank in one group, and its units are those that ``Links`` would count."""
    inside, nodes = (*sizes, 1)[:2]
    rounds = list(groups_of(sizes))
    assert len({units for units, _ in rounds}) == len(rounds)
    for units, groups in rounds:
        assert sorted(rank for members in groups for rank in members) == list(range(inside * nodes))
        for members in groups:
            found = (len(members), len({rank // inside for rank in members}), 1)
            assert units == (found if nodes > 1 else (len(members), 1))


def test_ranks_are_measured_machine_by_machine() -> None:
    assert sizes_of(["a"] * 4) == (4,)
    assert sizes_of(["a", "a", "b", "b", "c", "c"]) == (2, 3)
    for names in (["a", "b", "a", "b"], ["a", "a", "b"], ["a", "a", "a", "b"], ["a", "b", "b", "a"]):
        with raises(LaunchError, ", ".join(names), "not consecutive", fix="machine by machine"):
            sizes_of(names)


def test_a_disturbed_round_does_not_count() -> None:
    rounds = [[StreamTime(1.0, 3.0), StreamTime(2.0, 9.0)], [StreamTime(1.0, 2.0), StreamTime(2.0, 4.0)]]
    rounds.append([StreamTime(1.0, 99.0), StreamTime(2.0, 5.0)])
    assert second_fastest(rounds) == (StreamTime(1.0, 3.0), StreamTime(2.0, 5.0))


def test_the_command_measures_this_machine(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Two real gloo ranks at tiny sizes; no time is asserted, only that the file says what was measured."""
    output = tmp_path / "mine.toml"
    assert cli.main(["calibrate", "-o", str(output), "--ranks", "2", "--tiny"]) == 0
    printed = capfd.readouterr().out
    cluster = Cluster.load(output)
    assert (cluster.name, cluster.num_devices) == ("mine", 2)
    assert cluster.device.flops["f32"] > 0
    assert cluster.levels[0].bandwidth > 0
    for series in ("matmul f32: 2 points", "element-wise: 2 points", *(f"{kind} over 2: 2 points" for kind in KINDS)):
        assert series in printed
        assert series in output.read_text()
    assert str(cluster) in printed
    text = output.read_text()
    assert "date = " in text
    assert f"Python {sys.version.split()[0]}" in text


def test_points_measured_elsewhere_are_fitted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    points, output = tmp_path / "points.json", tmp_path / "ours.toml"
    points.write_text(json.dumps(measured().to_json()))
    assert cli.main(["calibrate", "-o", str(output), "--points", str(points)]) == 0
    assert [level.size for level in Cluster.load(output).levels] == [4, 2]
    assert "all_gather over 8 x 2: 9 points, median 0%" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["-o", "mine.json"], "not a .toml file"),
        (["-o", "mine.toml", "--points", "none.json"], "cannot read the measurements"),
        (["-o", "mine.toml", "--like", "h99"], "unknown cluster 'h99'"),
        (["-o", "mine.toml", "--ranks", "-1"], "cannot start -1 ranks"),
    ],
)
def test_what_calibrate_cannot_do_is_explained(
    arguments: list[str],
    expected: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["calibrate", *arguments]) == cli.EXIT_USAGE
    assert expected in capsys.readouterr().err


def test_the_known_clusters_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["clusters"]) == 0
    printed = capsys.readouterr().out
    assert "h100: 8 x NVIDIA H100" in printed
    assert cli.main(["clusters", "l4-4x8"]) == 0
    shown = capsys.readouterr().out
    assert parse(shown) == Cluster.load("l4-4x8")
    assert "NVIDIA L4 datasheet" in shown
    assert cli.main(["clusters", "l5"]) == cli.EXIT_USAGE


def test_what_the_longer_hides_of_the_shorter() -> None:
    assert hidden_part(1.0, 2.0, 2.0) == hidden_part(2.0, 1.0, 1.5) == 1.0
    assert hidden_part(1.0, 2.0, 2.5) == 0.5
    assert hidden_part(1.0, 2.0, 3.5) == 0.0
