"""Every entry of torch's databases of operators, modules and optimizers is captured, planned, split and compared with
one device: ``python -m oracle`` in tests/ (part of ``make sweep``; ``make operator-database`` writes the tables of
docs/operator-database.md).

``python -m oracle --samples 8 addmm linalg_svd`` runs single entries. Each entry runs in a process of its own, which
may crash or take too long without ending the others.
"""

from __future__ import annotations

import argparse
import time
from collections import deque
from collections.abc import Mapping, Sequence
from multiprocessing import get_context
from multiprocessing.connection import Connection

import torch

from oracle.databases import database
from oracle.optimizers import optimizer_outcomes
from oracle.outcomes import FAULTS, Outcome, outcomes
from oracle.page import COLUMNS, PAGE, counts, tables, with_tables, without_rule

SECONDS = 300.0  # for all samples of an entry


def _send(pipe: Connection, database_name: str, name: str, count: int, plans: int | None) -> None:
    torch.set_num_threads(1)
    if database_name == "optimizers":
        pipe.send(list(optimizer_outcomes(name, count)))
    else:
        pipe.send(list(outcomes(name, database(database_name)[name], count, plans)))
    pipe.close()


def run(tasks: Sequence[tuple[str, str]], count: int, plans: int | None, jobs: int) -> dict[str, list[Outcome]]:
    context = get_context("fork")
    results: dict[str, list[Outcome]] = {name: [] for name, _ in tasks}
    waiting, running = deque(tasks), {}
    while waiting or running:
        while waiting and len(running) < jobs:
            task = waiting.popleft()
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=_send, args=(theirs, *task, count, plans))
            process.start()
            theirs.close()
            running[task] = process, ours, time.monotonic()
        for task, (process, pipe, started) in list(running.items()):
            ended = None
            if pipe.poll(0.01):
                try:
                    ended = pipe.recv()
                except EOFError:
                    process.join()
                    ended = [Outcome(task[1], "crashed", f"exit code {process.exitcode}")]
            elif time.monotonic() - started > SECONDS:
                ended = [Outcome(task[1], "out of time", f"more than {SECONDS:.0f} s")]
                process.kill()
            if ended is not None:
                process.join()
                del running[task]
                results[task[0]] += ended
                done = len(tasks) - len(waiting) - len(running)
                if done % 100 == 0 or done == len(tasks):
                    print(f"{done} of {len(tasks)} entries", flush=True)
                for outcome in ended:
                    if outcome.ended in FAULTS:
                        print(f"{outcome.entry}: {outcome.ended}: {outcome.detail}", flush=True)
    return results


def show(results: Mapping[str, Sequence[Outcome]]) -> None:
    """Print how many samples came how far, and how many operators have no rule."""
    for name, every in results.items():
        ran = [outcome for outcome in every if outcome.ended != "eager"]
        counted = counts(ran)
        shown = ", ".join(f"{counted[column]} {column}" for column in COLUMNS)
        print(f"{name}: {len({o.entry for o in ran})} entries, {len(ran)} samples: {shown}")
    operators = without_rule(results)
    print(f"{len(operators)} operators without a rule: {', '.join(operators)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="entries whose name contains one of these; all by default")
    parser.add_argument("--databases", nargs="*", default=["operators", "modules", "optimizers"])
    parser.add_argument("--samples", type=int, default=3, help="of an entry, spread over all that it has")
    parser.add_argument("--plans", type=int, default=2, help="of a sample, at random, beside the default one")
    parser.add_argument("--rules", action="store_true", help="only capture samples, and count operators without a rule")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--write", action="store_true", help=f"write the tables in {PAGE.name}")
    options = parser.parse_args()
    tasks = [
        (kind, name)
        for kind in options.databases
        for name in database(kind)
        if not options.names or any(part in name for part in options.names)
    ]
    list(outcomes("addmm", database("operators")["addmm"], 1, 1))  # what is compiled and read once, ahead of all forks
    results = run(tasks, options.samples, None if options.rules else options.plans, options.jobs)
    show(results)
    if options.write and not options.rules:
        PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8"), tables(results)), encoding="utf-8")
    if any(outcome.ended in FAULTS for every in results.values() for outcome in every):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
