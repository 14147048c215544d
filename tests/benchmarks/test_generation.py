"""The benchmark of generation runs, and the texts that it times are equal."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "generation.py"
TINY = {"width": 32, "layers": 1, "vocab": 64, "batch": 4, "prompt": 8, "tokens": 4, "rounds": 1}


@pytest.mark.long
def test_ranks_and_one_process_take_turns_and_write_the_same() -> None:
    options = [word for name, value in TINY.items() for word in (f"--{name}", str(value))]
    ended = subprocess.run(
        [sys.executable, str(BENCHMARK), *options], capture_output=True, text=True, timeout=600, check=False
    )
    assert ended.returncode == 0, ended.stderr
    assert [line.partition(":")[0] for line in ended.stdout.splitlines()] == ["greedy", "4 beams"]
