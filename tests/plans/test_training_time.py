"""How much of a month a plan trains: its parts, by hand."""

from __future__ import annotations

import contextlib
import io
import json
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import shardwise as sw
from raising import raises
from shardwise import cli
from shardwise.costs.failures import FailureStatistics
from shardwise.plans.survival import Survival
from shardwise.plans.training_time import format_duration, training_time

GB = 10**9
# 8 machines of 8: every rank holds 10 GB that no other has, and 2 GB that all have.
HELD = {frozenset([rank]): {"w": 10 * GB} for rank in range(64)} | {frozenset(range(64)): {"b": 2 * GB}}
MACHINES = tuple(tuple(range(first, first + 8)) for first in range(0, 64, 8))
SURVIVAL = Survival(HELD, MACHINES, "adamw")
STATISTICS = FailureStatistics(640.0, 100.0, 0.75, 50.0, 250.0, 10**8)  # one in 10 hours of the job


def cluster(**changes: Any) -> sw.Cluster:
    return replace(sw.Cluster.load("h100-8x8"), failures=replace(STATISTICS, **changes))


def test_the_parts_are_what_the_state_and_the_statistics_say() -> None:
    found = training_time(SURVIVAL, cluster(), 20.0, 30.0)
    assert found.interruptions.value == pytest.approx(72)
    assert (found.interruptions.low, found.interruptions.high) == (pytest.approx(54, abs=1), pytest.approx(91, abs=2))
    copies, plain = found.policies
    assert (copies.copies, plain.copies) == (True, False)
    written = (640 + 2) / 64 * GB
    assert plain.stall == pytest.approx(1.5e-3 + written / sw.Cluster.load("h100").device.host_bandwidth)
    assert plain.duration == pytest.approx(plain.stall + written / 10**8)
    # At the optimum of so rare faults: 300 s down, half an interval and a save repeated, 12 GB read at 100 MB/s.
    again = 0.75 * (plain.every / 2 + plain.duration + 120) + 300 + 0.25 * 10
    assert plain.share.value == pytest.approx(1 - again / 36_000 - plain.stall / plain.every, abs=5e-4)
    assert plain.share.low < plain.share.value < plain.share.high
    # Copies: ten steps of 20 s, of which 5 and one more are repeated in the mean; they cost two copies of the state.
    again = 300 + 0.75 * 120 + 0.25 * 10
    assert copies.share.value == pytest.approx(1 - again / 36_000 - 2 * plain.stall / 200, abs=5e-4)
    assert found.share is copies.share
    assert copies.every > 10 * plain.every


def test_cheaper_copies_or_rarer_faults_decide_between_the_two() -> None:
    rare = training_time(SURVIVAL, cluster(hours_between=10**6), 0.5, 30.0)
    assert not rare.policies[0].copies  # two copies of 10 GB in every ten steps cost more than they save
    often = training_time(SURVIVAL, cluster(hours_between=100.0), 5.0, 30.0)
    assert often.policies[0].copies
    one = training_time(replace(SURVIVAL, machines=(tuple(range(64)),)), cluster(), 5.0, 30.0)
    assert [policy.copies for policy in one.policies] == [False]  # there is no other machine


def test_without_statistics_or_with_numbers_that_cannot_be_it_is_refused() -> None:
    with raises(sw.ShardwiseError, "h100-8x8", "statistics", fix="--mtbf"):
        training_time(SURVIVAL, replace(cluster(), failures=None), 1.0, 30.0)
    with raises(sw.ShardwiseError, "speed", fix="--store"):
        training_time(SURVIVAL, cluster(store=0.0), 1.0, 30.0)
    for days in (0.0, -1.0, float("nan"), float("inf"), "30", True):
        with raises(sw.ShardwiseError, "days", days):
            training_time(SURVIVAL, cluster(), 1.0, days)  # type: ignore[arg-type]


def test_durations_are_readable() -> None:
    assert [format_duration(seconds) for seconds in (7, 90, 900, 7200)] == ["7 s", "1.5 min", "15 min", "2 h"]


MODEL = """
import torch
from torch import nn


def build():
    net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    return net, (torch.randn(16, 64), torch.randn(16, 64)), nn.functional.mse_loss
"""


def test_the_command_says_it_and_takes_other_statistics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)

    def run(*options: str, code: int = 0) -> str:
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), warnings.catch_warnings(action="ignore"):
            assert cli.main(["fits", "model.py:build", "--mesh", "dp=4", "--seconds", "0", *options]) == code
        return err.getvalue() if code else out.getvalue()

    text = run("--cluster", "h100-2x2", "--days", "30")
    assert "of 30 days 100.0% (100.0%-100.0%) train, with 0.0632 interruptions (0-1)" in text
    assert "checkpoints alone" in text
    assert "with copies on other machines every 10 steps" in text
    data = json.loads(run("--cluster", "h100-2x2", "--days", "30", "--mtbf", "24", "--restart", "600", "--json"))
    assert data["training"]["interruptions"] == pytest.approx(120)
    assert data["training"]["policies"][0]["share"] == pytest.approx(1 - 120 * 660 / 2_592_000, abs=0.005)
    for options, words in {
        ("--cluster", "a100-80-2x2", "--days", "30"): "no failure statistics",
        ("--cluster", "a100-80-2x2", "--days", "30", "--restart", "5"): "no failure statistics",
        ("--cluster", "a100-80-2x2", "--days", "30", "--mtbf", "5000"): "no speed of its store",
        ("--cluster", "h100-2x2", "--mtbf", "5000"): "about a period",
        ("--cluster", "h100-2x2", "--days", "30", "--mtbf", "0"): "must be a positive number",
        ("--cluster", "h100-2x2", "--days", "30", "--store", "fast"): "fast",
    }.items():
        assert words in run(*options, code=2)
    assert "of 30 days" in run("--cluster", "a100-80-2x2", "--days", "30", "--mtbf", "5000", "--store", "1 GB/s")
