"""The benchmark of plans chosen by price runs on real ranks, and what it times computes the same."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "auto_plans.py"
NAMES = ["data parallel", "data parallel, again", "dynamic_programming", "recursive_programming"]


@pytest.mark.long
def test_plans_take_turns_on_real_ranks(tmp_path: Path) -> None:
    options = ["--models", "reid", "--rounds", "2", "--orders", "2", "--order-model", "dlrm"]
    command = [sys.executable, str(BENCHMARK), *options, "--json", str(tmp_path / "rows.json")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert ended.returncode == 0, ended.stderr
    rows = json.loads((tmp_path / "rows.json").read_text())
    named = [row for row in rows if row["model"] == "reid"]
    assert [row["plan"] for row in named] == [*NAMES, "sharding_propagation"]
    predicted = {row["plan"]: row["predicted"] for row in named}
    assert predicted["dynamic_programming"] < 0.6 * predicted["data parallel"]
    assert {"random 0", "random 1"} <= {row["plan"] for row in rows if row["model"] == "dlrm"}
    assert "rank correlation" in ended.stdout
