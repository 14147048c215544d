"""The benchmark of pipelines runs, and what it times computes the same."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "pipeline_time.py"
TINY = {"width": 16, "layers": 4, "vocab": 32, "batch": 8, "time": 8, "rounds": 2, "micro-batches": 4, "deep": 6}


@pytest.mark.long
def test_pipelines_by_hand_and_ours_take_turns_and_compute_the_same_losses() -> None:
    options = [word for name, value in TINY.items() for word in (f"--{name}", str(value))]
    command = [sys.executable, str(BENCHMARK), "--ranks", "2", "--schedules", "1F1B", "ZBVZeroBubble", *options]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert ended.returncode == 0, ended.stderr
    assert len(re.findall(r"2 ranks: bubble [\d.]+% measured, [\d.]+% simulated", ended.stdout)) == 2
    assert ended.stdout.count("by hand, again") == 2
    assert re.search(r"6 layers: captured in [\d.]+ s, cut into 4 stages and bound in [\d.]+ s", ended.stdout)
