"""The prepared run on one GPU (``benchmarks/gpu_run.py``), with tiny sizes on the emulated one."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from launch.gloo_ranks import RunRanks
from runtime.interpreted import interpret_section
from shardwise.runtime import compiled

FOLDER = Path(__file__).parents[2] / "benchmarks"
Answers = dict[str, list[dict[str, Any]]]


def on_a_gpu(parts: list[str]) -> tuple[Answers, list[str]]:
    """Return the lines of the parts, and the races."""
    from emulated_gpu.device import record

    sys.path.insert(0, str(FOLDER))
    run = importlib.import_module("gpu_run")
    here = run.Here(tiny=True, kind="cuda")
    # Without Triton no code is generated: the sections of compiled programs run kernel by kernel.
    with mock.patch.object(compiled, "compile_with_inductor", interpret_section):
        return {part: list(run.PARTS[part][0](here)) for part in parts}, list(record.races)


def on_late_ranks(folder: str, cases: list[str]) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the lines of a rank whose group is the late one in place of the emulated NCCL, and the races."""
    from emulated_gpu.device import record

    sys.path.insert(0, str(FOLDER))
    run = importlib.import_module("late_ranks")
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    run.join(rank, size, Path(folder) / "late", "cuda")
    lines = list(run.rank_lines(cases, "cuda"))
    dist.barrier()
    return lines, list(record.races)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "cases",
    [
        ["tensor parallel, ZeRO 3"],
        pytest.param(["ZeRO 1, micro-batches", "experts", "stages", "states on the host"], marks=pytest.mark.long),
    ],
    ids="-".join,
)
def test_late_messages_change_no_loss(cases: list[str], run_gpu_ranks: RunRanks, tmp_path: Path) -> None:
    for lines, races in run_gpu_ranks(on_late_ranks, 2, str(tmp_path), cases):
        assert not races
        assert [line["case"] for line in lines] == cases
        assert all(line["ok"] and line["device"].startswith("cuda") for line in lines), lines


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "parts",
    [
        ["environment", "head_loss", "float8", "fused_products", "copies", "waits"],
        pytest.param(["equal", "peaks", "graphs", "rank_programs"], marks=pytest.mark.long),
    ],
    ids="-".join,
)
def test_parts_run_on_a_gpu_without_a_race(parts: list[str], run_gpu_ranks: RunRanks) -> None:
    ((found, races),) = run_gpu_ranks(on_a_gpu, 1, parts)
    assert not races
    assert all(found.values())
    for line in (line for of_part in found.values() for line in of_part):
        assert line.get("ok", True), line
        assert line.get("peak_bytes", 1) > 0, line
