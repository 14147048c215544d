"""A run that is saved under one plan goes on under any other, as if nobody had stopped it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import shardwise as sw
from train.runs import go_on, make

RunRanks = Callable[..., list[Any]]


def chain(run_ranks: RunRanks, folder: Path, kinds: list[tuple[str, int]]) -> list[list[float]]:
    """Losses of a run that goes from split to split, four steps each."""
    losses = []
    for position, (kind, ranks) in enumerate(kinds):
        last = position == len(kinds) - 1
        save_as = "" if last else f"step-{4 * position + 4}"
        results = run_ranks(go_on, ranks, str(folder), kind, 4 * position, save_as, time_limit_seconds=240)
        assert all(result["losses"] == results[0]["losses"] for result in results)
        losses += results[0]["losses"]
        written = [result["written"] for result in results]
        print(kind, written, [result["num_bytes_read"] for result in results])
    return losses


def uninterrupted(run_ranks: RunRanks, folder: Path, steps: int) -> list[float]:
    (result,) = run_ranks(go_on, 1, str(folder), "dp1", 0, "", steps, time_limit_seconds=240)
    found: list[float] = result["losses"]
    return found


def test_a_run_goes_on(run_ranks: RunRanks, tmp_path: Path) -> None:
    kinds = [("dp4", 4), ("dp2 x tp2", 4), ("tp3", 3), ("zero2", 2), ("dp1", 1)]
    losses = chain(run_ranks, tmp_path, kinds)
    want = uninterrupted(run_ranks, tmp_path, 20)
    assert losses == pytest.approx(want, rel=1e-12)
