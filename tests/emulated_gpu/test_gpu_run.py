"""The prepared run on one GPU (``benchmarks/gpu_run.py``), with tiny sizes on the emulated one."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

from launch.gloo_ranks import RunRanks

FOLDER = Path(__file__).parents[2] / "benchmarks"
Answers = dict[str, list[dict[str, Any]]]


def on_a_gpu(parts: list[str]) -> tuple[Answers, list[str]]:
    """Return the lines of the parts, and the races."""
    from emulated_gpu.device import record

    sys.path.insert(0, str(FOLDER))
    run = importlib.import_module("gpu_run")
    here = run.Here(tiny=True, kind="cuda")
    return {part: list(run.PARTS[part][0](here)) for part in parts}, list(record.races)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "parts",
    [["environment", "head_loss", "float8", "copies"], pytest.param(["equal", "peaks"], marks=pytest.mark.long)],
    ids="-".join,
)
def test_parts_run_on_a_gpu_without_a_race(parts: list[str], run_gpu_ranks: RunRanks) -> None:
    ((found, races),) = run_gpu_ranks(on_a_gpu, 1, parts)
    assert not races
    assert all(found.values())
    for line in (line for of_part in found.values() for line in of_part):
        assert line.get("ok", True), line
        assert line.get("peak_bytes", 1) > 0, line
