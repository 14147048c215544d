"""Simulated days of training with faults as production has them: ``python -m simulated_job.sweep --days 10000``.

Between two faults a job trains undisturbed, which is not simulated; around each fault everything is. A window is a job
of random size that runs some steps and saves, with one fault or more at a random moment. It stands for the days that a
job of that size runs between two faults, at the rate of Llama 3's 405B run: 466 interruptions in 54 days on 16,384 GPUs
(Grattafiori et al. 2024, section 3.3.4). Its table 5 gives the shares of the kinds.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from statistics import median

from simulated_job.simulated_launchers import Setting, SimulatedJob
from simulated_job.simulated_time import SimulationError
from simulated_job.simulated_training import Training

RANK_DAYS_PER_FAULT = 16384 * 54 / 466


def _some_rank(run: SimulatedJob) -> int:
    return run.simulation.random.choice([rank.rank for rank in run.cluster.ranks if rank.code is None])


def _some_machine(run: SimulatedJob) -> int:
    alive = [machine.node for machine in run.machines if machine.launcher is not None and machine.launcher.alive]
    return run.simulation.random.choice(alive)


def _rack(run: SimulatedJob) -> None:
    """A switch takes a quarter of the machines away, for a while or for good."""
    count = max(1, len(run.machines) // 4)
    first = run.simulation.random.randrange(len(run.machines) - count + 1)
    run.divide(range(first, first + count))
    if run.simulation.random.random() < 0.5:
        run.simulation.at(run.simulation.now + run.simulation.random.uniform(1.0, 40.0), run.unite)


def _slow_disk(run: SimulatedJob) -> None:
    run.simulation.say("fault: a slow disk")
    run.machines[_some_machine(run)].slow_disk = 200.0


def _straggler(run: SimulatedJob) -> None:
    node = _some_machine(run)
    run.simulation.say(f"fault: machine {node} is slow")
    run.machines[node].slow = 1.5


# Shares: GPU and its memory 58.7 %, software 12.9 %, switches and cables 8.4 %, hosts, their maintenance, power, and
# disks 15 %, silent data corruption 1.4 %; what is left are stragglers and slow disks, which interrupt nothing.
FAULTS: dict[str, tuple[float, Callable[[SimulatedJob], object]]] = {
    "a rank is killed": (0.45, lambda run: run.kill_rank(_some_rank(run))),
    "a rank is stopped": (0.10, lambda run: run.stop_rank(_some_rank(run))),
    "a script fails": (0.10, lambda run: run.fail_rank(_some_rank(run), ValueError("a batch is bad"))),
    "a machine loses its power": (0.10, lambda run: run.end_machine(_some_machine(run))),
    "a launcher is killed": (0.05, lambda run: run.end_machine(_some_machine(run), by_power=False)),
    "the head loses its power": (0.03, lambda run: run.end_machine(0)),
    "the head is killed": (0.02, lambda run: run.end_machine(0, by_power=False)),
    "a switch": (0.08, _rack),
    "a slow disk": (0.04, _slow_disk),
    "a straggler": (0.03, _straggler),
}


def window(seed: int, folder: Path, most_ranks: int = 64, *, keeps: bool = False) -> tuple[str, SimulatedJob]:
    """Run the job of a seed. Returns its fault and the run. Raises SimulationError where an invariant does not hold."""
    draw = random.Random(seed)
    sizes = [(2, 2), (3, 2), (4, 4), (8, 2), (8, 4), (8, 8)]
    machines, ranks = draw.choice([size for size in sizes if size[0] * size[1] <= most_ranks])
    setting = Setting(
        machines, ranks, min_ranks=ranks, spares=draw.choice([0, 0, 1]), seed=seed, until=2000.0,
        silent_seconds=draw.choice([5.0, 10.0, 20.0]), keeps=keeps,
    )  # fmt: skip
    training = Training(
        folder, num_steps=16, step_seconds=draw.choice([0.2, 1.0, 5.0]), save_every=draw.choice([2, 3, 4]),
        blocking=draw.random() < 0.5, store_seconds=draw.choice([0.0005, 0.005, 0.05]),
    )  # fmt: skip
    run = SimulatedJob(setting, training)
    names, weights = list(FAULTS), [share for share, _ in FAULTS.values()]
    chosen = draw.choices(names, weights)
    while draw.random() < 0.25:  # two at once, or soon after
        chosen += draw.choices(names, weights)
    for name in chosen:
        step, seconds = draw.randrange(1, 12), draw.choice([0.0, draw.uniform(0, 0.1), draw.uniform(0, 6.0)])

        def act(name: str = name) -> None:
            if any(rank.code is None for rank in run.cluster.ranks) and not run.is_over():
                FAULTS[name][1](run)

        run.when_step(step, act, seconds)
    return " and ".join(chosen), run.run()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--days", type=float, default=10000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep-processes", action="store_true")
    options = parser.parse_args()
    days, seed, began = 0.0, options.seed, time.process_time()
    seconds: dict[str, list[float]] = defaultdict(list)
    counts: Counter[str] = Counter()
    while days < options.days:
        with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as folder:
            try:
                fault, run = window(seed, Path(folder), keeps=options.keep_processes)
            except SimulationError as error:
                print(f"seed {seed}: {error}")
                counts["failed"] += 1
                seed += 1
                continue
        name = fault if " and " not in fault else "several"
        counts[name] += 1
        seconds[name] += run.seconds_to_go_on()
        days += RANK_DAYS_PER_FAULT / run.setting.num_ranks
        seed += 1
    print("| fault | windows | generations | seconds to the next step, median | longest |\n|---|---|---|---|---|")
    for name in [*FAULTS, "several"]:
        times = seconds[name]
        middle, longest = (f"{median(times):.1f}", f"{max(times):.1f}") if times else ("", "")
        print(f"| {name} | {counts[name]} | {len(times)} | {middle} | {longest} |")
    spent = time.process_time() - began
    print(f"{days:,.0f} days, {seed - options.seed} windows, {counts['failed']} failed, {spent:.0f} s")


if __name__ == "__main__":
    main()
