"""Clusters: units, files, bundled ones, sizes, hosts, and what is said about files that are wrong."""

from __future__ import annotations

import json
import pickle
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import shardwise as sw
from raising import raises
from shardwise.costs.cluster import Cluster, Device, slowest_device
from shardwise.costs.cluster_file import assumed_figures, families, family, format_cluster, parse
from shardwise.costs.units import UNITS, Figures, format_quantity, parse_quantity
from shardwise.errors import LaunchError, ShardwiseError

SMALL = """
name = "small"

[device]
name = "A"
memory = "16 GiB"
memory_bandwidth = "500 GB/s"
kernel_latency = "5 us"

[device.flops]
bf16 = "100 TFLOP/s"

[[levels]]
name = "node"
size = 4
bandwidth = "100 GB/s"
latency = "2 us"

[[levels]]
name = "network"
size = 3
bandwidth = "100 Gb/s"
latency = "10 us"
shared_by = 4
"""


@pytest.mark.parametrize(
    ("text", "unit", "number"),
    [
        ("900 GB/s", "B/s", 9e11),
        ("80 GiB", "B", 80 * 2**30),
        ("312 TFLOP/s", "FLOP/s", 3.12e14),
        ("312TFLOPS", "FLOP/s", 3.12e14),
        ("5 us", "s", 5e-6),
        ("5 µs", "s", 5e-6),
        ("400 Gbit/s", "B/s", 5e10),
        ("400 Gb/s", "B/s", 5e10),
        ("85 %", "", 0.85),
        (1.5e12, "B/s", 1.5e12),
        ("2e9", "FLOP", 2e9),
    ],
)
def test_figures_are_read_with_their_units(text: object, unit: str, number: float) -> None:
    assert parse_quantity(text, unit) == pytest.approx(number, rel=1e-12)


@pytest.mark.parametrize(
    ("value", "unit", "match"),
    [
        ("900 GB", "B/s", "'GB'"),
        ("900 parsecs", "B/s", "'parsecs'"),
        ("fast", "B/s", "'fast'"),
        (-1, "B/s", "-1 is negative"),
        ("-3 us", "s", "'-3 us' is negative"),
        (float("inf"), "s", "inf is not finite"),
        (float("nan"), "s", "nan is not finite"),
        (True, "s", "True"),
        (None, "B", "None"),
        ("1.2.3 GB", "B", "'1.2.3'"),
    ],
)
def test_figures_that_are_none_are_refused(value: object, unit: str, match: object) -> None:
    with raises(ShardwiseError, match):
        parse_quantity(value, unit)


@pytest.mark.parametrize("unit", UNITS)
def test_figures_are_written_so_that_they_read_back(unit: str) -> None:
    for number in (0.0, 3e-9, 7.25e-6, 0.5, 12.0, 4321.0, 8.25e10, 2.0**36, 3.12e14):
        assert parse_quantity(format_quantity(number, unit), unit) == pytest.approx(number, rel=1e-3)


@pytest.mark.parametrize(
    ("number", "text"),
    [(95830 * 2.0**20, "95830 MiB"), (24684100 * 2.0**10, "23.54 GiB"), (2.0**20 + 1, "1 MiB"), (1.0, "1 B")],
)
def test_bytes_are_written_without_powers_of_ten(number: float, text: str) -> None:
    assert format_quantity(number, "B") == text


def test_bundled_clusters_have_every_figure_and_say_where_each_figure_comes_from() -> None:
    wanted = {
        "a100-40",
        "a100-80",
        "h100",
        "h100-nvl",
        "h100-pcie",
        "h200",
        "h800",
        "b200",
        "v100",
        "mi300x",
        "ascend-910a",
        "ascend-910b",
        "l4",
        "l40s",
        "t4",
        "rtx-3090",
        "rtx-4090",
        "rtx-5090",
        "rtx-6000-ada",
        "rtx-a6000",
        "h20",
        "gb200",
        "gb300",
        "local",
    }
    assert set(families()) == wanted
    racks = {"gb200", "gb300"}
    for name in racks:
        assert [level.size for level in family(name).levels] == [72, 256], name
        assert Cluster.load(f"{name}-2x72").num_devices == 144
    for name in wanted - racks - {"local"}:
        largest = family(name)
        assert (largest.levels[-1].size, largest.num_devices) == (2048, 8 * 2048), name
        assert Cluster.load(f"{name}-1x8").num_devices == 8
        assert Cluster.load(f"{name}-2048x8").num_devices == 16384
    for name in wanted:
        cited = dict(family(name).sources)
        missing = [
            key for key in figures_of(family(name)) if not any(f"{key}.".startswith(f"{source}.") for source in cited)
        ]
        assert not missing, f"{name}: {missing} have no source"
        assert all(text.strip() for text in cited.values())


def figures_of(cluster: Cluster) -> list[str]:
    """The names of all figures of a cluster, as its sources name them."""
    device = (
        "flops",
        "memory",
        "reserve",
        "memory_bandwidth",
        "kernel_latency",
        "matmul_half_flops",
        "memory_efficiency",
    )
    found = [f"device.{name}" for name in device] + ["device.matmul_efficiency"] * bool(
        cluster.device.matmul_efficiency
    )
    for level in cluster.levels:
        found.append(f"levels.{level.name}.bandwidth")
        found += [f"levels.{level.name}.group_bandwidths"] * bool(level.group_bandwidths)
        found += [f"levels.{level.name}.efficiency"] * bool(level.efficiency)
        found += [f"levels.{level.name}.in_switch"] * bool(level.in_switch)
        found += [f"levels.{level.name}.hierarchical"] * level.hierarchical
    found += ["failures"] * (cluster.failures is not None)
    return [*found, "levels.latency", "levels.launch"]


@pytest.mark.parametrize("name", families())
def test_a_cluster_is_written_so_that_it_reads_back(name: str) -> None:
    cluster = family(name)
    text = format_cluster(cluster, {"date": "today", "residuals": ['a "quoted" line', "another"]})
    again = parse(text)
    assert again == cluster
    assert again.sources == cluster.sources


def test_clusters_are_values() -> None:
    one, other = Cluster.load("h100-16x8"), Cluster.load("h100-16x8")
    assert one == other
    assert hash(one) == hash(other)
    assert pickle.loads(pickle.dumps(one)) == one
    assert one != Cluster.load("h100-8x8")
    assert Figures({"b": 1.0, "a": 2.0}) == Figures({"a": 2.0, "b": 1.0})
    assert dict(Figures({"a": 2.0})) == {"a": 2.0}
    assert "b" not in Figures({"a": 2.0})


def test_names_say_nodes_and_devices_per_node() -> None:
    cluster = Cluster.load("a100-80-16x8")
    assert [level.size for level in cluster.levels] == [8, 16]
    assert cluster.num_devices == 128
    assert cluster.name == "a100-80-16x8"
    assert [level.size for level in Cluster.load("h100").levels] == [8]
    assert [level.size for level in Cluster.load("ascend-910a-4x8").levels] == [4, 2, 4]
    assert [level.size for level in Cluster.load("ascend-910a-4x2").levels] == [2, 1, 4]


@pytest.mark.parametrize(
    ("name", "match"),
    [
        ("h101", ("'h101'", "h100")),
        ("h100-0x8", ("0 nodes of 8", "1 to 2048 nodes of 1 to 8")),
        ("h100-4096x8", (4096, 8, 2048)),
        ("h100-2x16", ("2 nodes of 16", "1 to 2048 nodes of 1 to 8")),
        ("ascend-910a-2x6", ("ascend-910a", "6 devices", "multiple of 4")),
        ("local-2x4", ("2 nodes of 4", "local", "1 to 1 nodes")),
        ("nowhere/cluster.toml", "'nowhere/cluster.toml'"),
    ],
)
def test_names_that_lead_nowhere_are_explained(name: str, match: object) -> None:
    with raises(ShardwiseError, match):
        Cluster.load(name)


def test_a_cluster_with_another_number_of_devices_fills_its_nodes_first() -> None:
    cluster = parse(SMALL)
    assert [level.size for level in cluster.with_devices(2).levels] == [2]
    assert [level.size for level in cluster.with_devices(8).levels] == [4, 2]
    with raises(ShardwiseError, "small", "6 devices", "multiple of 4"):
        cluster.with_devices(6)
    with raises(ShardwiseError, "small", "16 devices", "has 12", fix="h100-16x8"):
        cluster.with_devices(16)
    with raises(ShardwiseError, "h100", "16 devices", "has 8", fix="h100-16x8"):
        Cluster.load("h100").with_devices(16)
    for wrong in (0, -1, True, 2.0):
        with raises(ShardwiseError, "devices from 1", f"not {wrong}"):
            cluster.with_devices(wrong)  # type: ignore[arg-type]
    assert Cluster.local(7).num_devices == 7


def test_a_dtype_without_a_figure_runs_as_another() -> None:
    v100, a100 = Cluster.load("v100").device, Cluster.load("a100-80").device
    assert v100.peak_flops("bf16") == v100.peak_flops("f32")
    assert a100.peak_flops("f8") == a100.peak_flops("f16")
    assert a100.matmul_flops("bf16") < a100.peak_flops("bf16")
    with raises(ShardwiseError, "int4"):
        a100.peak_flops("int4")
    only_half = replace(a100, flops=Figures({"f16": 1e12}))
    with raises(ShardwiseError, "f32", "no figure"):
        only_half.peak_flops("f32")


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ('memory = "16 GiB"\n', "", ("device.memory", "missing")),
        ('"500 GB/s"', "-5", ("device.memory_bandwidth", -5)),
        ('"500 GB/s"', '"500 GB"', ("device.memory_bandwidth", "'GB'")),
        ('"16 GiB"', "0", ("device.memory", 0)),
        ("bf16 =", "bfloat =", "device.flops.bfloat"),
        ("size = 4", "size = 0", ("levels[0].size", "number", 0)),
        ("size = 4", 'size = "four"', ("levels[0].size", "'four'")),
        ('latency = "2 us"\n', "", "levels[0].latency"),
        ("shared_by = 4", "shared_by = 0", ("levels[1].shared_by", 0)),
        ("shared_by = 4", "share_by = 4", "levels[1].share_by"),
        ('name = "A"\n', "", "device.name"),
        ('name = "small"', "", ("name:", "missing")),
        ("[[levels]]", "[[level]]", ("levels: is missing", "level:")),
        ("[[levels]]", "[levels]", "TOML"),
        ("shared_by = 4", "hierarchical = 1", ("levels[1].hierarchical", 1)),
        ("shared_by = 4", 'group_bandwidths = {1 = "1 GB/s"}', ("levels[1].group_bandwidths.1", 2)),
        ("shared_by = 4", 'lines = {"all_reduce of 4" = ["1 us", "1 GB/s"]}', "levels[1].lines.'all_reduce of 4'"),
        ("shared_by = 4", 'lines = {"all_reduce over 4" = "1 us"}', "levels[1].lines.'all_reduce over 4'"),
        ("shared_by = 4", 'lines = {"all_reduce over 4" = ["1 us", "0 GB/s"]}', "'0 GB/s'"),
        ("shared_by = 4", "efficiency = {all_reduces = 1}", "levels[1].efficiency.all_reduces"),
        ('kernel_latency = "5 us"', 'reserve = "16 GiB"\nkernel_latency = 0', ("device.reserve", "16 GiB")),
        ('kernel_latency = "5 us"', "foreach = 1\nkernel_latency = 0", ("device.foreach", 1)),
        ('kernel_latency = "5 us"', "matmul_efficiency = {bf16 = 1.5}\nkernel_latency = 0", ("1.5", 1)),
    ],
)
def test_what_is_wrong_with_a_file_is_said_with_its_place(old: str, new: str, expected: object) -> None:
    assert old in SMALL
    with raises(ShardwiseError, expected):
        parse(SMALL.replace(old, new), "mine.toml")


ODD = ("{}", "[]", "[[]]", "true", '""', '"x"', "-1", "0", "nan", "inf", "1e400", '"1 m"', "2020-01-01", "[{a = 1}]")


def test_whatever_is_in_a_file_there_is_a_cluster_or_an_explanation() -> None:
    """Every line left out, repeated, and every value replaced by what does not belong there."""
    text = SMALL + "efficiency = {all_reduce = 0.5}\ngroup_bandwidths = {2 = 1e9}\n"
    text += 'lines = {"all_reduce over 2" = [0, 1]}\n[sources]\n"device.flops" = "a datasheet"\n'
    assert parse(text).num_devices == 12
    lines = text.splitlines()
    refused: list[str] = []
    for index, line in enumerate(lines):
        key, equals, _ = line.partition("=")
        for odd in ("", *(f"{key}= {value}" for value in ODD if equals), f"odd.{line}", line + "\n" + line):
            try:
                assert parse("\n".join([*lines[:index], odd, *lines[index + 1 :]])).num_devices >= 1
            except ShardwiseError as error:
                refused.append(str(error))
    assert len(refused) > 100
    assert all("fix:" in message for message in refused)
    for devices in ("devices = []", "devices = [1]", "devices = 1", "levels = 1"):
        with raises(ShardwiseError, "fix:"):
            parse('name = "odd"\n' + devices)


def test_a_mixed_cluster_keeps_its_devices() -> None:
    start, end = SMALL.index("[device]"), SMALL.index("[[levels]]")
    kinds = '[[devices]]\nlike = "a100-40"\ncount = 8\n\n[[devices]]\nlike = "h100"\ncount = 4\n\n'
    cluster = parse(SMALL[:start] + kinds + SMALL[end:])
    assert cluster.with_devices(12).mixed == cluster.mixed
    with raises(ShardwiseError, 8, "NVIDIA A100 SXM4 40GB", "kinds"):
        cluster.with_devices(8)


def test_all_faults_of_a_file_are_told_at_once() -> None:
    text = SMALL.replace('"500 GB/s"', "-5").replace('memory = "16 GiB"\n', "").replace("size = 3", "size = -3")
    places = ["device.memory", "device.memory_bandwidth", "levels[1].size"]
    with raises(ShardwiseError, 3, "fix:", source="mine.toml", facts=places):
        parse(text, "mine.toml")


def test_a_file_is_loaded_by_its_path(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(SMALL)
    cluster = Cluster.load(path)
    assert cluster.num_devices == 12
    assert cluster.device == Device("A", Figures({"bf16": 1e14}), 16 * 2**30, 5e11, 5e-6, Figures(), 0.0, 1.0)
    assert cluster.levels[1].bandwidth == 1.25e10
    assert cluster.levels[1].shared_by == 4
    assert str(cluster) == "small: 12 x A (16 GiB), node of 4 at 100 GB/s, network of 3 at 12.5 GB/s shared by 4"


def test_what_a_file_leaves_out_is_said_with_what_is_assumed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "short.toml"
    path.write_text(SMALL)
    Cluster.load(path)
    said = capsys.readouterr().err
    assert said.startswith(f"shardwise: {path} has no device.matmul_efficiency (assumed: large matmuls reach")
    for key in ("memory_efficiency", "overlap", "launch", "reserve", "host_bandwidth", "kernels", "spread"):
        assert f"device.{key} (assumed: " in said
    assert "device.flops.f16" not in said, "nothing could stand for it"
    assert "levels.network.launch (assumed: collectives begin at once)" in said
    assert "calibrate" in said
    path.write_text(SMALL.replace("[device]\n", '[device]\nlike = "h100"\n'))
    Cluster.load(path)
    said = capsys.readouterr().err
    assert "device." not in said
    assert "levels.node.launch" in said
    path.write_text(SMALL + '\n[measured]\nhost = "a machine"\n')
    Cluster.load(path)
    assert not capsys.readouterr().err, "calibration says what it measured"
    rates = SMALL.replace('bf16 = "100', 'f32 = "100')
    assert "device.flops.bf16 (assumed: the rate of f32)" in assumed_figures(tomllib.loads(rates))


def test_a_device_may_be_like_a_bundled_one() -> None:
    start, end = SMALL.index("[device]"), SMALL.index("[[levels]]")
    text = SMALL[:start] + '[device]\nlike = "h100"\nname = "capped"\nmatmul_efficiency = {bf16 = 0.5}\n' + SMALL[end:]
    device, h100 = parse(text).device, Cluster.load("h100").device
    assert device.name == "capped"
    assert device.flops == h100.flops
    assert device.matmul_flops("bf16") == h100.peak_flops("bf16") / 2
    assert device.matmul_flops("f32") == h100.matmul_flops("f32")
    with raises(ShardwiseError, "device.like", "'h99'"):
        parse(text.replace("h100", "h99"))


def test_a_mixed_cluster_is_planned_with_the_slowest_figures_and_says_so() -> None:
    start, end = SMALL.index("[device]"), SMALL.index("[[levels]]")
    kinds = '[[devices]]\nlike = "a100-40"\ncount = 8\n\n[[devices]]\nlike = "h100"\ncount = 4\n\n'
    cluster = parse(SMALL[:start] + kinds + SMALL[end:])
    a100, h100 = Cluster.load("a100-40").device, Cluster.load("h100").device
    assert cluster.device.memory_bytes == a100.memory_bytes
    assert cluster.device.peak_flops("bf16") == a100.peak_flops("bf16")
    assert cluster.device.matmul_flops("bf16") == pytest.approx(
        min(a100.matmul_flops("bf16"), h100.matmul_flops("bf16"))
    )
    assert cluster.mixed == ((a100.name, 8), (h100.name, 4))
    assert f"slowest figures of 8 x {a100.name}, 4 x {h100.name}" in str(cluster)
    assert slowest_device([a100, a100]) == a100
    with raises(ShardwiseError, 11, "4 x 3 = 12"):
        parse(SMALL[:start] + kinds.replace("count = 4", "count = 3") + SMALL[end:])
    with raises(ShardwiseError, "[device]", "[[devices]]"):
        parse(SMALL + kinds)


def test_a_reserve_is_taken_from_what_plans_may_have() -> None:
    """Measured on one H100: 81,559 MiB of nvidia-smi, 81,079 of CUDA, of which 80,552 are free beside the context and
    80,266 after a matmul that holds 128 itself; at most 3.15 GiB between blocks. And a GiB assumed for NCCL."""
    device = Cluster.load("h100").device
    measured = (81_559 - 80_266 - 128) / 1024 + 3.15 + 1
    assert device.reserve_bytes / 2**30 == pytest.approx(measured, abs=0.05)
    assert device.usable_bytes == device.memory_bytes - device.reserve_bytes
    assert Cluster.local(4).device.reserve_bytes == 0
    start, end = SMALL.index("[device]"), SMALL.index("[[levels]]")
    own = SMALL.replace('memory = "16 GiB"', 'memory = "16 GiB"\nreserve = "2 GiB"')
    assert parse(own).device.usable_bytes == 14 * 2**30
    assert "16 GiB, of which 2 GiB are reserved" in str(parse(own))
    like = SMALL[:start] + '[device]\nlike = "h100"\nreserve = "4 GiB"\n' + SMALL[end:]
    assert parse(like).device == replace(device, reserve_bytes=4 * 2**30)
    mixed = slowest_device([device, replace(device, memory_bytes=60 * 2**30, reserve_bytes=0.0, foreach=False)])
    assert (mixed.memory_bytes, mixed.usable_bytes) == (60 * 2**30, 60 * 2**30)
    assert mixed.foreach


def test_a_hostfile_says_how_many_nodes_there_are(tmp_path: Path) -> None:
    path = tmp_path / "hosts.txt"
    path.write_text("node1 slots=8\nnode2 slots=8\nnode3 slots=8\n")
    cluster = Cluster.load("h100", hosts=path)
    assert [level.size for level in cluster.levels] == [8, 3]
    assert "3 hosts of 8" in cluster.name
    path.write_text("node1 slots=8\nnode2 slots=4\n")
    with raises(ShardwiseError, "(node1: 8, node2: 4)"):
        Cluster.load("h100", hosts=path)
    path.write_text("node1 slots=16\n")
    with raises(ShardwiseError, 1, 16, "h100"):
        Cluster.load("h100", hosts=path)
    path.write_text("node1 slots=\n")
    with pytest.raises(LaunchError):
        Cluster.load("h100", hosts=path)


def test_a_rank_table_says_how_many_nodes_there_are(tmp_path: Path) -> None:
    path = tmp_path / "table.json"

    def write(ranks: list[list[int]]) -> None:
        servers = [
            {"server_id": f"10.0.0.{i}", "device": [{"device_id": d, "rank_id": r} for d, r in enumerate(own)]}
            for i, own in enumerate(ranks)
        ]
        path.write_text(json.dumps({"server_list": servers}))

    write([[4, 5, 6, 7], [0, 1, 2, 3]])
    assert [level.size for level in Cluster.load("ascend-910b", hosts=path).levels] == [4, 2]
    write([[0, 2, 4, 6], [1, 3, 5, 7]])
    with raises(ShardwiseError, "10.0.0.0", "0, 2, 4, 6"):
        Cluster.load("ascend-910b", hosts=path)


def test_a_price_is_written_read_and_refused_where_it_is_none() -> None:
    text = format_cluster(Cluster.load("h100-1x2"))
    assert "price_per_hour" not in text
    priced = parse("price_per_hour = 2.49\n" + text)
    assert priced.price_per_hour == 2.49
    assert parse(format_cluster(priced)) == priced != Cluster.load("h100-1x2")
    assert priced.with_devices(1).price_per_hour == 2.49
    for wrong in ("-1", "nan", "inf", "true", '"2 dollars"', "[2]", "1e9"):
        with raises(ShardwiseError, "price_per_hour"):
            parse(f"price_per_hour = {wrong}\n" + text)


def test_a_cluster_is_itself_its_name_or_a_number_of_devices() -> None:
    cluster = Cluster.load("h100-1x8")
    assert Cluster.of(cluster) is cluster
    assert Cluster.of("h100-1x8") == cluster
    assert Cluster.of(2).num_devices == 2
    plan = sw.plan(torch.nn.Linear(8, 8), torch.empty(8, 8), "h100-1x8", mode="data_parallel")
    assert plan.mesh.num_devices == 8
    for wrong in (None, 8.0, ["h100"]):
        with raises(sw.ShardwiseError, repr(wrong), "h100-1x8"):
            sw.plan(torch.nn.Linear(8, 8), torch.empty(8, 8), wrong)  # type: ignore[arg-type]
    with raises(sw.ShardwiseError, "'no-such'", facts=["bundled"]):
        sw.compare(torch.nn.Linear(8, 8), torch.empty(8, 8), "no-such")
