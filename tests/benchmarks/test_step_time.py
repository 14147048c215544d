"""The benchmark of training steps runs, and what it times computes the same."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "step_time.py"
TINY = {"width": 16, "head-width": 8, "layers": 1, "vocab": 32, "batch": 4, "time": 8, "rounds": 2, "profile": 1}
CONTENDERS = {
    "trivial": ["plain PyTorch", "plain PyTorch, again", "ours"],
    "tp": ["hand written", "hand written, again", "DTensor", "ours"],
    "dp": ["hand written", "hand written, again", "DDP", "FSDP2", "ours"],
    "zero-1": ["DDP", "DDP, again", "hand written", "ours"],
    "zero-3": ["DDP", "DDP, again", "FSDP2", "ours"],
    "check-finite": ["unchecked", "unchecked, again", "ours"],
}


@pytest.mark.long
def test_every_contender_takes_its_turns_and_computes_the_same_losses(tmp_path: Path) -> None:
    options = [word for name, value in TINY.items() for word in (f"--{name}", str(value))]
    command = [sys.executable, str(BENCHMARK), "--ranks", "2", *options, "--json", str(tmp_path / "measured.json")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert ended.returncode == 0, ended.stderr
    runs = {run["row"]: run for run in json.loads((tmp_path / "measured.json").read_text())["runs"]}
    assert runs.keys() == CONTENDERS.keys()
    for row, run in runs.items():
        assert list(run["losses"]) == list(run["seconds"]) == list(run["ratios"]) == CONTENDERS[row]
        assert all(len(seconds) == 2 for seconds in run["seconds"].values())
        first, *others = run["losses"].values()
        assert all(losses == pytest.approx(first, rel=1e-5) for losses in others)
        assert list(run["profiles"]) == [CONTENDERS[row][0], "ours"]
    assert "data parallel, 2 ranks, width 16: a step of rank 0" in ended.stdout
    assert "1.02" in ended.stdout
