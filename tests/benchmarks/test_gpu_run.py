"""The prepared run on one GPU, with tiny sizes on the CPU."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu_run.py"


def lines(*arguments: str) -> tuple[int, list[dict[str, Any]]]:
    done = subprocess.run([sys.executable, str(SCRIPT), "--dry", *arguments], capture_output=True, text=True)
    return done.returncode, [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize(
    "parts",
    [
        ["environment"],
        pytest.param(
            ["equal", "peaks", "head_loss", "float8", "copies", "waits", "graphs", "late", "rank_programs", "steps"],
            marks=pytest.mark.long,
        ),
    ],
    ids="-".join,
)
def test_every_part_answers(parts: list[str]) -> None:
    code, found = lines("--only", *parts)
    assert not code, found
    assert [line["part"] for line in found if "ended" in line] == parts
    assert all(any(line["part"] == part and "ended" not in line for line in found) for part in parts)


def test_a_part_that_does_not_end_in_time_is_said_and_costs_its_limit() -> None:
    code, found = lines("--only", "equal", "copies", "--seconds", "1")
    assert code
    assert "at its limit" in found[-2]["ended"]
    assert "no time is left" in found[-1]["ended"]


def test_a_round_of_heads_ends_before_the_next_one_counts_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    run = importlib.import_module("gpu_run")
    stands_in = torch.nn.Identity()  # for a module of ranks, which are not started here
    stands_in.step = lambda *batch: torch.zeros(())
    monkeypatch.setattr(run.sw, "parallelize", lambda *arguments, **options: stands_in)
    rounds = run.head_loss(run.Here(tiny=True))
    assert "peak_bytes" in next(rounds)
    kept = rounds.gi_frame.f_locals.values()
    assert not [value for value in kept if isinstance(value, torch.nn.Module | torch.Tensor)]
