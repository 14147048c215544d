"""What real gloo ranks send, ask their store and do in a folder, beside what the simulation counts."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import shardwise as sw
from launch.gloo_ranks import RunRanks
from shardwise.runtime import agree
from shardwise.runtime.rank_tree import SmallGroup
from shardwise.train import saving
from shardwise.train.local_folder import LocalFolder
from shardwise.train.names import FILE
from simulated_job.simulated_launchers import Setting, SimulatedJob
from simulated_job.simulated_machines import RankHere
from simulated_job.simulated_ranks import guarded, tracker_of
from simulated_job.simulated_training import RankState, Seen, SimulatedTraining, Training

_OPERATIONS = ("put", "read_all", "content", "begin", "commit")  # those that do not wait for others


def save_and_load(folder: Path) -> None:
    par = Seen()
    for step in (1, 2):
        sw.save_checkpoint(folder / f"step-{step}", par, step=step)
    sw.load_checkpoint(folder / "step-1", par)


@contextmanager
def counting(counts: Callable[[], Counter[str]]) -> Iterator[None]:
    """Count calls of folders and of the groups of trees."""
    patched = pytest.MonkeyPatch()

    def counted(name: str, whole: Callable[..., Any]) -> Callable[..., Any]:
        def call(self: Any, *args: Any) -> Any:
            if name != "read" or args[0] == FILE or args[0].startswith("part-"):
                counts()[name] += 1
            return whole(self, *args)

        return call

    def written(*args: Any) -> Any:
        counts()["write"] += 1
        return write(*args)

    write = saving.write
    for name in (*_OPERATIONS, "read"):
        patched.setattr(LocalFolder, name, counted(name, getattr(LocalFolder, name)))
    patched.setattr(saving, "write", written)
    for name in ("gather", "from_first"):
        patched.setattr(SmallGroup, name, counted(name, getattr(SmallGroup, name)))
    try:
        yield
    finally:
        patched.undo()


def on_a_rank(folder: str) -> tuple[dict[str, int], int, int]:
    """On a real rank: return the counts, and the keys of the store and the sockets that a tree takes."""
    agree.FANOUT = 3  # as with more ranks: else eight ranks gather without a tree
    store = dist.distributed_c10d._get_default_store()
    dist.barrier()
    keys, sockets = store.num_keys(), _num_sockets()
    dist.barrier()
    agree.rank_tree()
    sockets = _num_sockets() - sockets
    dist.barrier()
    keys = store.num_keys() - keys
    found = Counter[str]()
    with counting(lambda: found):
        save_and_load(Path(folder))
    return dict(found), keys, sockets


def _num_sockets() -> int:
    folder = "/proc/self/fd"
    return sum(
        os.path.islink(f"{folder}/{name}") and "socket" in os.readlink(f"{folder}/{name}")
        for name in os.listdir(folder)
    )


class _Saves(SimulatedTraining):
    def script(self, process: RankHere) -> None:
        guarded(process, lambda: self._save(process))

    def _save(self, process: RankHere) -> None:
        world = self.worlds.join(process)
        self.states[process] = RankState(process, world, None, tracker_of(process))  # type: ignore[arg-type]
        agree.rank_tree()
        save_and_load(self.training.folder / "run")
        process.counts["done"] = 1


def simulated(num_ranks: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[Counter[str]]:
    monkeypatch.setattr(agree, "FANOUT", 3)
    run = SimulatedJob(Setting(1, num_ranks), Training(folder, num_steps=0))
    training = _Saves(run.worlds, Training(folder, num_steps=0))
    run.training, run.script = training, training.script
    nobody = Counter[str]()
    with counting(lambda: training.here_or_thread.counts if run.simulation.current else nobody):
        run.run()
    ranks = sorted(run.cluster.ranks, key=lambda rank: rank.rank)
    assert all(rank.counts["done"] for rank in ranks)
    return [rank.counts for rank in ranks]


@pytest.mark.parametrize("num_ranks", [10, pytest.param(64, marks=pytest.mark.long)])
def test_real_ranks_do_what_the_simulation_counts(
    num_ranks: int, run_ranks: RunRanks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = run_ranks(on_a_rank, num_ranks, str(tmp_path / "real"))
    expected = simulated(num_ranks, tmp_path / "simulated", monkeypatch)
    for rank, ((counts, _, sockets), simulated_counts) in enumerate(zip(real, expected, strict=True)):
        for name in (*_OPERATIONS, "read", "write", "gather", "from_first"):
            assert counts.get(name, 0) == simulated_counts[name], (rank, name)
        # Each group of a tree has a listener besides the connections to its members.
        assert 1 <= sockets - simulated_counts["rank connections"] <= 2, rank
    members = sum(sockets - counts["rank connections"] for (*_, sockets), counts in zip(real, expected, strict=True))
    assert {keys for _, keys, _ in real} == {members}, "each member says once where it listens"
