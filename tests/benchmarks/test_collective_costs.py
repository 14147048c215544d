"""The comparison with published tables, on tables made up from a model that a line can fit."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "collective_costs.py"
MIB = 2**20


def seconds(kind: str, size: int, num_bytes: float) -> float:
    """60 us and 3 us per step, 150 GB/s."""
    steps = {"all_reduce": 2, "all_to_all": 1}[kind] * (size - 1)
    return 60e-6 + 3e-6 * steps + steps / size * num_bytes / 150e9


def write_tables(folder: Path) -> None:
    (folder / "vtrain_nccl_allreduce").mkdir()
    (folder / "galvatron_a100").mkdir()
    for gpu in ("a100", "v100"):
        for size in range(2, 9):
            lines = ["size(B),count,type,time(ns),busbw(GB/s),time(ns),busbw(GB/s)"]
            for mib in (1, 2, 4, 64, 512, 1024):
                nanoseconds = seconds("all_reduce", size, mib * MIB) * 1e9
                lines.append(f"{mib * MIB},{mib * MIB // 4},float,{nanoseconds:.0f},0,0,0")
            path = folder / "vtrain_nccl_allreduce" / f"trace_{gpu}_AR_GPU{size}_1M_1024M_LUT.csv"
            path.write_text("\n".join(lines) + "\n")
    times = {
        f"{name}_size_{size}_{mib}MB_time": seconds(kind, size, mib * MIB) * 1e3
        for name, kind in (("allreduce", "all_reduce"), ("all2all", "all_to_all"))
        for size in (2, 4, 8)
        for mib in (1, 8, 64, 1024)
    }
    (folder / "galvatron_a100" / "sp_time_1nodes_8gpus_per_node.json").write_text(json.dumps(times))
    bandwidths = {
        "allreduce_size_8_consec_1": 150.0,
        "allreduce_size_4_consec_0": 20.0,
        "allreduce_size_2_consec_0": 10.0,
    }
    name = "allreduce_bandwidth_2nodes_8gpus_per_node.json"
    (folder / "galvatron_a100" / name).write_text(json.dumps(bandwidths))


def test_every_table_has_a_line_with_both_errors(tmp_path: Path) -> None:
    write_tables(tmp_path)
    ended = subprocess.run(
        [sys.executable, str(BENCHMARK), "--data", str(tmp_path)], capture_output=True, text=True, timeout=300
    )
    assert ended.returncode == 0, ended.stderr
    rows = [line for line in ended.stdout.splitlines() if line.startswith(("vtrain", "galvatron"))]
    assert len(rows) == 2 * 7 + 6 + 3
    assert sum("(held out)" in row for row in rows) == 2 * 4 + 2 + 2
    errors = {row[:60].split("  ")[0]: [float(text) for text in re.findall(r"([\d.]+)%", row)] for row in rows}
    assert all(len(found) == 6 for found in errors.values())
    fitted = [found[3] for name, found in errors.items() if "a100" in name]  # the median of the calibrated ones
    assert max(fitted) < 1.0
    assert min(found[0] for name, found in errors.items() if "all_to_all" in name) > 1.0


def test_a_folder_without_tables_is_said_to_be_one(tmp_path: Path) -> None:
    command = [sys.executable, str(BENCHMARK), "--data", str(tmp_path / "none")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 2
    assert "there are no tables in" in ended.stderr
