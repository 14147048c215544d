"""Predicted against measured seconds of collectives on GPUs, a line for each table: ``make bench-collectives``.

``--data`` is a folder of nccl-tests runs that others published, ``vtrain_nccl_allreduce`` and ``galvatron_a100`` in
it, with the file names of their repositories: all-reduces of 2 to 8 A100 and V100 in one node (vTrain), all-reduces and
all-to-alls of 2 to 8 A100 in one node, and bus bandwidths of 2 to 16 A100 in two nodes (Galvatron). Each is predicted
twice: with the bundled figures (datasheets and NCCL's own constants, nothing from these tables), and with figures that
``shardwise calibrate`` fits to a part of the table; the other part is held out.
"""

from __future__ import annotations

import argparse
import csv
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from shardwise.costs.cluster import Cluster, Level
from shardwise.costs.collectives import Span, affine_terms
from shardwise.costs.fit import CollectiveTime, fit_level, quantile

CALIBRATED_ON = (2, 4, 8)
MIB = 2**20


@dataclass(frozen=True)
class Table:
    """Measurements of one kind of group; ``fitted``: whether calibration saw them."""

    name: str
    times: tuple[CollectiveTime, ...]
    fitted: bool


@dataclass(frozen=True)
class Errors:
    """Relative errors of a table."""

    num_points: int
    median: float
    ninetieth: float
    largest: float


def errors(times: Sequence[CollectiveTime], levels: tuple[Level, ...]) -> Errors:
    found = []
    for time in times:
        predicted = min(
            fixed + slope * time.num_bytes for fixed, slope in affine_terms(time.kind, levels, Span(time.units))
        )
        found.append(abs(predicted - time.seconds) / time.seconds)
    return Errors(len(found), quantile(found, 0.5), quantile(found, 0.9), max(found))


def vtrain(data: Path, gpu: str) -> tuple[Table, ...]:
    """All-reduce times (out of place) of 2 to 8 GPUs, in steps of 1 MiB up to 1 GiB."""
    tables = []
    for size in range(2, 9):
        path = data / "vtrain_nccl_allreduce" / f"trace_{gpu}_AR_GPU{size}_1M_1024M_LUT.csv"
        with path.open(encoding="utf-8") as file:
            rows = list(csv.reader(file))[1:]
        times = tuple(
            CollectiveTime("all_reduce", (size, 1), float(row[0]), float(row[3]) * 1e-9) for row in rows if len(row) > 3
        )
        tables.append(Table(f"vtrain {gpu}, all_reduce of {size}", times, size in CALIBRATED_ON))
    return tuple(tables)


def galvatron(data: Path) -> tuple[Table, ...]:
    """All-reduce and all-to-all times of 2 to 8 A100 in a node, 1 to 1,024 MB (taken as MiB) of input per rank."""
    content = json.loads((data / "galvatron_a100" / "sp_time_1nodes_8gpus_per_node.json").read_text(encoding="utf-8"))
    found: dict[tuple[str, int], list[CollectiveTime]] = {}
    for key, milliseconds in content.items():
        match = re.fullmatch(r"(allreduce|all2all)_size_(\d+)_(\d+)MB_time", key)
        assert match is not None, f"{key} is not an entry of this table"
        kind, size = {"allreduce": "all_reduce", "all2all": "all_to_all"}[match[1]], int(match[2])
        time = CollectiveTime(kind, (size, 1), float(match[3]) * MIB, milliseconds * 1e-3)
        found.setdefault((kind, size), []).append(time)
    # Calibration sees the ends, 2 and 8; groups of 4 are held out.
    return tuple(
        Table(f"galvatron a100, {kind} of {size}", tuple(times), size != 4) for (kind, size), times in found.items()
    )


def galvatron_two_nodes(data: Path) -> tuple[Table, ...]:
    """Bus bandwidths of groups in two nodes of 8 A100. ``consec_0``: strided groups, which cross nodes. Sizes are not
    stated; bandwidths are taken as those of 256 MiB. Calibration sees strided pairs, one rank per node."""
    name = "allreduce_bandwidth_2nodes_8gpus_per_node.json"
    content = json.loads((data / "galvatron_a100" / name).read_text(encoding="utf-8"))
    tables = []
    for key, bandwidth in content.items():
        match = re.fullmatch(r"allreduce_size_(\d+)_consec_(\d)", key)
        assert match is not None, f"{key} is not an entry of this table"
        size, neighbours = int(match[1]), match[2] == "1"
        num_bytes = 256.0 * MIB
        seconds = 2 * (size - 1) / size * num_bytes / (bandwidth * 1e9)
        units = (size, 1 if neighbours and size <= 8 else 2, 1)
        name = f"galvatron 2 nodes, all_reduce of {size}, " + ("neighbours" if neighbours else "strided")
        tables.append(Table(name, (CollectiveTime("all_reduce", units, num_bytes, seconds),), units == (2, 2, 1)))
    return tuple(tables)


def calibrated(tables: Iterable[Table], like: Level) -> Level:
    """The level fitted to the tables that calibration may see."""
    times = [time for table in tables if table.fitted for time in table.times]
    return fit_level(like.name, like.size, times, like)


def across(tables: Sequence[Table], levels: tuple[Level, ...]) -> tuple[Level, ...]:
    """Two levels: the node's figures from its largest group, the network's from strided pairs."""
    (inner,) = (t.times[0] for t in tables if t.times[0].units == (8, 1, 1))
    (outer,) = (t.times[0] for t in tables if t.fitted)
    bandwidths = [2 * (t.units[0] - 1) / t.units[0] * t.num_bytes / t.seconds for t in (inner, outer)]
    return tuple(replace(level, bandwidth=bandwidth) for level, bandwidth in zip(levels, bandwidths, strict=True))


def report(data: Path, evenly: bool = False) -> list[tuple[Table, Errors, Errors]]:
    """(table, errors with the bundled figures, errors with calibrated ones)."""
    a100, v100 = Cluster.load("a100-80-2x8").levels, Cluster.load("v100").levels
    found = []
    one_node: list[tuple[tuple[Table, ...], Level]] = [
        (vtrain(data, "a100"), a100[0]),
        (vtrain(data, "v100"), v100[0]),
        (galvatron(data), a100[0]),
    ]
    for tables, bundled in one_node:
        fitted = calibrated(tables, bundled)
        for table in spread_evenly(tables) if evenly else tables:
            found.append((table, errors(table.times, (bundled,)), errors(table.times, (fitted,))))
    tables = galvatron_two_nodes(data)
    for table in tables:
        found.append((table, errors(table.times, a100), errors(table.times, across(tables, a100))))
    return found


def spread_evenly(tables: tuple[Table, ...]) -> tuple[Table, ...]:
    """Only messages of powers of two of MiB: as many small ones as large ones."""
    powers = {float(MIB * 2**p) for p in range(11)}
    return tuple(
        replace(table, times=tuple(time for time in table.times if time.num_bytes in powers)) for table in tables
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of the tables (see the top of this file)")
    parser.add_argument("--evenly", action="store_true", help="compare messages of 1, 2, 4, ... 1,024 MiB only")
    chosen = parser.parse_args()
    if not chosen.data.is_dir():
        parser.error(f"there are no tables in {chosen.data}: --data says where they are")
    print(f"{'':48} {'':>6}   {'bundled figures':^24}   {'calibrated':^24}")
    print(f"{'table':48} {'points':>6}   {'median':>7} {'p90':>7} {'worst':>8}   {'median':>7} {'p90':>7} {'worst':>8}")
    for table, bundled, fitted in report(chosen.data, chosen.evenly):
        name = table.name + ("" if table.fitted else "  (held out)")
        cells = [f"{e.median:7.1%} {e.ninetieth:7.1%} {e.largest:8.1%}" for e in (bundled, fitted)]
        print(f"{name:48} {bundled.num_points:6}   {cells[0]}   {cells[1]}")


if __name__ == "__main__":
    main()
