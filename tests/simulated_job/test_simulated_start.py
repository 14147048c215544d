"""The start of a job: seconds to the first step, and what each rank does for it, by size."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

import shardwise as sw
from simulated_job.simulated_launchers import Setting, SimulatedJob
from simulated_job.simulated_start import SimulatedStart, Start
from simulated_job.simulated_training import Training


def started(
    machines: int, folder: Path, look_seconds: float = 0.5
) -> tuple[SimulatedStart, Counter[str], Counter[str]]:
    """Return the start of a job of eight ranks a machine, the counts of rank 0, and the largest of any other rank."""
    start = Start(sw.Mesh(dp=machines, tp=8), Training(folder, num_steps=1), look_seconds=look_seconds)
    run = SimulatedJob(Setting(machines, 8, until=300.0), start).run()
    assert isinstance(run.training, SimulatedStart)
    most, zero = Counter[str](), Counter[str]()
    for rank in run.cluster.ranks:
        if rank.rank:
            most |= rank.counts
        else:
            zero = rank.counts
    return run.training, zero, most


@pytest.mark.parametrize("machines", [32, pytest.param(128, marks=pytest.mark.long)])
def test_what_a_rank_does_until_the_first_step_hardly_grows_with_the_number_of_ranks(
    machines: int, tmp_path: Path
) -> None:
    (few, _, some), (many, zero, more) = (started(number, tmp_path / str(number)) for number in (8, machines))
    fewer, levels = 2, {32: 3, 128: 4}[machines]  # of the tree over 64 ranks, over 256 and over 1,024
    assert more["splits"] == some["splits"] == 2, "one for each set of axes"
    assert more["file operations"] - some["file operations"] <= levels - fewer
    assert more["rank connections"] <= 7 * levels
    assert more["rank messages"] / levels <= some["rank messages"] / fewer
    assert more["store requests"] <= some["store requests"] + 5
    assert zero["store requests"] < 40 + machines / 4, "rank 0 asks for many ranks at a time"
    assert max(map(len, many.texts.values())) < 2 * max(map(len, few.texts.values()))
    for job in (few, many):
        seconds = job.began["first step"] - job.start.capture_seconds - job.training.step_seconds
        assert seconds < 15.0, "5 of them are the imports and the script's own"


def test_how_often_launchers_look_at_ranks_changes_no_start(tmp_path: Path) -> None:
    (rarely, *of_ranks), (often, *of_others) = (started(8, tmp_path / str(each), each) for each in (0.5, 0.05))
    assert of_ranks == of_others
    assert rarely.began == often.began
