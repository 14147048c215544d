"""The benchmark of ResNet-50's modes runs on real ranks, and times nothing that differs."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

from raising import raises

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
TINY = ["--ranks", "2", "--layers", "1", "1", "--width", "8", "--classes", "10", "--image", "32", "--rounds", "2",
        "--search", "recursive_programming"]  # fmt: skip


@pytest.mark.long
def test_modes_take_turns_and_are_compared_in_a_table() -> None:
    command = [sys.executable, str(BENCHMARKS / "resnet_modes.py"), *TINY]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert ended.returncode == 0, ended.stderr
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in ended.stdout.splitlines() if "│" in line]
    assert [row[0] for row in rows] == ["data_parallel", "auto_parallel, recursive_programming"]
    assert all(float(row[1]) > 0 and int(row[4]) > 0 for row in rows)
    assert rows[0][2] == "1.000"


def test_modes_that_train_differently_are_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    check_losses = importlib.import_module("resnet_modes").check_losses
    check_losses({"data_parallel": [6.9, 6.8], "dynamic_programming": [6.900001, 6.800001]})
    with raises(AssertionError, "dynamic_programming"):
        check_losses({"data_parallel": [6.9, 6.8], "dynamic_programming": [6.9, 6.8001]})
