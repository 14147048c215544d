"""Training that loses ranks and machines of several: no sample and no digit of the losses is lost."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import pytest

from launch.gloo_ranks import RunRanks
from launch.machines import Machines
from shardwise.hosts import free_port
from train import elastic_run
from train.test_recovery import check_equal, uninterrupted

STEPS = 16


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scripts import from the folder of the tests, as pytest does; no checkpoint is newer than copies."""
    known = os.environ.get("PYTHONPATH")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (str(Path(__file__).parents[1]), known))))
    monkeypatch.setenv("PYTHONWARNINGS", "ignore")
    monkeypatch.setenv("SAVE_EVERY", "100")


@pytest.mark.parametrize("lost", [0, 1])
@pytest.mark.sampled(1)
def test_a_rank_of_one_machine_and_then_a_machine_cost_no_digit(run_ranks: RunRanks, tmp_path: Path, lost: int) -> None:
    """States and their shares (ZeRO 1) are on both machines: what a rank had is read from the other's memory. Without a
    machine training goes on from what the other has copies of."""
    run, whole = tmp_path / "run", tmp_path / "whole"
    run.mkdir()
    whole.mkdir()
    run_ranks(uninterrupted, 1, str(whole), STEPS, "zero")
    script, events = str(Path(elastic_run.__file__)), ["0:4:3:SIGKILL", f"1:14:{2 * lost}:machine"]
    command = [script, str(run), str(STEPS), "zero", *events]
    with contextlib.closing(Machines(tmp_path, command, free_port(), settings="min_ranks=1", plain=False)) as machines:
        for node in (0, 1):
            machines.start(node)
        codes = machines.codes(240.0)
    left = machines.said(1 - lost)
    assert codes[1 - lost] == 0, left
    assert "rank 3 was killed by SIGKILL after step 3; generation 1 goes on with 3 ranks, without slot 1" in left
    assert "training goes on after step 3, which was kept in memory" in machines.said(0)
    gone = "machine 0, the head, is gone" if lost == 0 else "machine 1 with rank 2 is gone"
    assert f"{gone} after step 13; generation 2 goes on with {1 + lost} rank" in left
    assert "training goes on after step 10, which other machines have copies of" in left
    check_equal(run, whole, STEPS)
