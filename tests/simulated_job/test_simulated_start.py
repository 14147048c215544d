"""The start of a job: seconds to the first step, and what each rank does for it, by size."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import shardwise as sw
from simulated_job.simulated_launchers import Setting, SimulatedJob
from simulated_job.simulated_start import SimulatedStart, Start
from simulated_job.simulated_training import Training


def started(machines: int, folder: Path) -> tuple[SimulatedStart, Counter[str]]:
    """Return the start of a job of eight ranks a machine, and the largest counts of a rank but the first."""
    start = Start(sw.Mesh(dp=machines, tp=8), Training(folder, num_steps=1))
    run = SimulatedJob(Setting(machines, 8, until=300.0), start).run()
    assert isinstance(run.training, SimulatedStart)
    most = Counter[str]()
    for rank in run.cluster.ranks:
        most |= rank.counts if rank.rank else Counter()
    return run.training, most


def test_what_a_rank_does_until_the_first_step_hardly_grows_with_the_number_of_ranks(tmp_path: Path) -> None:
    (few, some), (many, more) = (started(machines, tmp_path / str(machines)) for machines in (3, 24))
    fewer, levels = 2, 3  # of the tree over 24 ranks, and over 192
    assert more["splits"] == some["splits"] == 2, "one for each set of axes"
    assert more["file operations"] <= some["file operations"] + 1 <= levels + 1
    assert more["rank connections"] <= 7 * levels
    for name in ("rank messages", "store requests"):
        assert more[name] / levels < 1.3 * some[name] / fewer, name
    assert max(map(len, many.texts.values())) < 2 * max(map(len, few.texts.values()))
    for job in (few, many):
        seconds = job.began["first step"] - job.start.capture_seconds - job.training.step_seconds
        assert seconds < 15.0, "5 of them are the imports and the script's own"
