"""What launchers and ranks do by size, as a table: ``python -m simulated_job.laws 8 64 512 2048``.

One rank of each job of the first table is killed. The launchers' part and the start up to the first step run at every
size; what ranks send, open and write (start, four steps, two checkpoints; and to resume after a loss) up to 16
machines. ``start 2048`` prints the table of starts alone.
"""

from __future__ import annotations

import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from shardwise.layouts.mesh import Mesh
from simulated_job.simulated_launchers import Setting, SimulatedJob
from simulated_job.simulated_start import SimulatedStart, Start
from simulated_job.simulated_training import Training

RANKS = 8
_MOST_MACHINES = 16  # whose ranks train


def launchers(machines: int) -> str:
    """Return a row of the table: what the head and the last launcher did, and how long it took."""
    run = SimulatedJob(Setting(machines, RANKS, min_ranks=RANKS, num_steps=4))
    run.when_step(2, lambda: run.kill_rank(machines * RANKS // 2))
    run.run(starts_within=2.0)
    head, last = run.machines[0].launcher, run.counts_of_launchers()[-1]
    assert head is not None
    cells = [
        f"{machines:,}", f"{machines * RANKS:,}", str(last["messages sent"]), f"{last['bytes received']:,}",
        f"{head.cpu_seconds / run.simulation.now:.3f}", f"{run.worlds.first_progress[0]:.1f}",
        f"{run.seconds_to_go_on()[0]:.1f}",
    ]  # fmt: skip
    return f"| {' | '.join(cells)} |"


def start(machines: int) -> str:
    """Return a row of the table of starts: when what is done, and what a rank does for it at most, but the first."""
    with tempfile.TemporaryDirectory() as folder:
        what = Start(Mesh(dp=machines, tp=RANKS), Training(Path(folder), num_steps=1))
        run = SimulatedJob(Setting(machines, RANKS, until=300.0), what).run(starts_within=2.0)
    assert isinstance(run.training, SimulatedStart)
    most = Counter[str]()
    for rank in run.cluster.ranks:
        most |= rank.counts if rank.rank else Counter()
    began, names = run.training.began, ("rank messages", "rank connections", "store requests", "file operations")
    seconds = [f"{began[name]:.1f}" for name in ("met", "programs", "groups", "manifest", "first step")]
    sizes = f"{max(map(len, run.training.texts.values())):,}"
    cells = [f"{machines * RANKS:,}", *seconds, *(f"{most[name]:,}" for name in names), sizes]
    return f"| {' | '.join(cells)} |"


def ranks(machines: int) -> Counter[str]:
    """Return the counts of a rank, on average."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as folder:
        setting = Setting(machines, RANKS)
        run = SimulatedJob(setting, Training(Path(folder), num_steps=4, batch_size=8, save_every=2)).run()
        total: Counter[str] = Counter()
        for rank in run.cluster.ranks:
            total.update(rank.counts)
        return Counter({name: round(number / setting.num_ranks) for name, number in total.items()})


def resumed(machines: int) -> tuple[Counter[str], Counter[str]]:
    """Return the counts of rank 0 after a loss, up to the end of the next step, and the most of ranks that are first of
    no group of eight."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as folder:
        run = SimulatedJob(Setting(machines, RANKS), Training(Path(folder), num_steps=3, save_every=0))
        run.when_step(2, lambda: run.kill_rank(5))
        run.run()
        assert run.training is not None
        assert run.training.resumed == [(0, 0), (1, 2)]
        zero, most = Counter[str](), Counter[str]()
        for rank in (rank for rank in run.cluster.ranks if rank.generation == 1):
            zero, most = (zero, most | rank.counts) if rank.rank % RANKS else (zero or rank.counts, most)
        return zero, most


def print_starts(sizes: Sequence[int]) -> None:
    names = ["ranks", "have met", "programs", "groups", "manifest", "first step", "messages", "connections"]
    names += ["store requests", "files read", "bytes of the largest"]
    print(f"| {' | '.join(names)} |\n|{'---|' * len(names)}")
    for machines in sizes:
        print(start(machines), flush=True)


def main() -> None:
    sizes = [int(text) for text in sys.argv[1:] if text != "start"] or [8, 64, 512, 2048]
    if "start" in sys.argv:
        print_starts(sizes)
        return
    names = ["launchers", "ranks", "messages of a launcher", "bytes it receives", "cores of the head"]
    names += ["seconds until all ranks have met", "seconds from a lost rank to the next step"]
    print(f"| {' | '.join(names)} |\n|{'---|' * len(names)}")
    for machines in sizes:
        print(launchers(machines), flush=True)
    print_starts(sizes)
    few = [machines for machines in (1, 2, 4, 8, 16) if machines <= min(max(sizes), _MOST_MACHINES)]
    names = ["rank messages", "rank connections", "file operations", "store requests"]
    print("| ranks | messages | connections of groups | file operations | store requests |\n|---|---|---|---|---|")
    for machines in few:
        of = ranks(machines)
        print(f"| {machines * RANKS} |", " | ".join(f"{of[name]:,}" for name in names), "|", flush=True)
    heads = ["ranks", "messages", "connections", "file operations", "store requests", "bytes", "bytes of rank 0"]
    print(f"| {' | '.join(heads)} |\n|{'---|' * len(heads)}")
    for machines in few[1:]:
        zero, of = resumed(machines)
        counts = [of[name] for name in (*names, "rank bytes")] + [zero["rank bytes"]]
        print(f"| {machines * RANKS} |", " | ".join(f"{count:,}" for count in counts), "|", flush=True)


if __name__ == "__main__":
    main()
