"""The benchmark of experts runs, what it times computes the same, and rows travel as they do by hand."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "experts.py"
TINY = {"width": 16, "layers": 1, "batch": 4, "time": 8, "rounds": 2, "experts": 4}


@pytest.mark.long
def test_experts_by_hand_and_ours_take_turns_and_send_the_same_rows(tmp_path: Path) -> None:
    options = [word for name, value in TINY.items() for word in (f"--{name}", str(value))]
    command = [sys.executable, str(BENCHMARK), "--ranks", "1", "2", *options, "--json", str(tmp_path / "found.json")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert ended.returncode == 0, ended.stderr
    alone, ranks = json.loads((tmp_path / "found.json").read_text())["runs"]
    assert list(alone["losses"]) == ["plain", "plain, again", "ours"]
    assert ranks["sent"]["by hand"] > 0
    assert ranks["sent"]["ours, rows travel"] == ranks["sent"]["by hand"]
