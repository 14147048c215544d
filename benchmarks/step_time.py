"""Times training steps: plain PyTorch, tensor and data parallelism by hand, DTensor, DDP, FSDP2, and ours.

The row check-finite compares ours, with the check for NaN in every step, to ours without it.

Every row is one run of its own ranks (gloo, one thread each), in which all contenders train the same model from the
same weights. They must agree on the losses before anything is timed. Then they take turns, step by step, in an order
that changes from round to round: a machine's speed drifts by more than what is measured, so the ratio of two contenders
is taken within each round, and of these ratios the median and the quartiles are shown. A step takes as long as on the
slowest rank. The baseline runs twice; how far "again" is from 1 tells what the run cannot resolve. Where other programs
share the cores, the ratio of processor time, which does not count the waiting, is steadier.

Run ``python benchmarks/step_time.py [--ranks 2 4] [--width 256 768] [--profile] [--json FILE]``.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported, here and in every rank

import torch
import torch.distributed as dist
from contenders import ROWS, Setting, TrainStep, build_all
from rich.console import Console
from rich.table import Table
from step_profile import StepProfile, profile_steps, profile_table
from torch import Tensor
from torch.multiprocessing.spawn import start_processes
from transformer import Shape, Transformer

import shardwise
from shardwise.launch.ranks import keep_freed_memory

LOSS_STEPS = 3  # compared before timing: the first shows the forward, the others gradients and optimizer too
# Sums are taken in another order. AdamW turns the rounding of a tiny gradient into a whole step, but such a gradient
# moves the loss by as little: measured over three steps, all rows and widths, at most 1.4e-7. A missing sum over ranks
# shows; a wrong scale of all gradients would not (AdamW divides by it), and costs no time either.
LOSS_TOLERANCE = 1e-5
TIMEOUT = timedelta(minutes=5)
PRELOADED = ["torch.distributed.fsdp", "torch.distributed.tensor.parallel", "shardwise"]  # once for all runs' ranks


@dataclass(frozen=True, slots=True)
class Job:
    """One run. ``row``: a key of ROWS."""

    row: str
    num_ranks: int
    shape: Shape
    rounds: int
    profiled: int  # steps to profile after the rounds


@dataclass(frozen=True, slots=True)
class Result:
    """What a run measured, by contender. ``seconds`` and ``cpu_seconds`` (of all threads): per round, on the rank with
    the most."""

    job: Job
    losses: Mapping[str, list[float]]
    seconds: Mapping[str, list[float]]
    cpu_seconds: Mapping[str, list[float]]
    profiles: Mapping[str, StepProfile]


def ratios(seconds: Mapping[str, list[float]], name: str) -> list[float]:
    """Per round, the step of a contender over that of the baseline."""
    baseline = next(iter(seconds.values()))
    return [own / other for own, other in zip(seconds[name], baseline, strict=True)]


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Lower quartile, median, upper quartile."""
    low, middle, high = torch.tensor(values, dtype=torch.float64).quantile(torch.tensor([0.25, 0.5, 0.75]).double())
    return float(low), float(middle), float(high)


# -- in a rank ---------------------------------------------------------------------------------------------------------


def rank_main(rank: int, job: Job, folder: str) -> None:
    """What every rank does; rank 0 leaves the result in ``folder``."""
    torch.set_num_threads(1)
    keep_freed_memory(os.environ)  # for all contenders, as shardwise.init_ranks does
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=job.num_ranks, timeout=TIMEOUT)
    torch.manual_seed(0)
    row = ROWS[job.row]
    whole = Transformer(job.shape)
    size = (job.shape.batch, job.shape.time)
    batch = torch.randint(job.shape.vocab, size), torch.randint(job.shape.vocab, size)
    setting = Setting(row.mesh(job.num_ranks), batch)
    steps = build_all(row, whole, setting)
    losses = {name: [step(*batch).item() for _ in range(LOSS_STEPS)] for name, step in steps.items()}
    check_losses(losses)
    gc.collect()
    gc.freeze()  # what exists by now is nobody's garbage: no collection during the steps looks at it
    seconds, cpu_seconds = (slowest(own) for own in take_turns(steps, batch, job.rounds))
    compared = {name: steps[name] for name in (row.contenders[0].name, "ours")}
    profiles = profile_steps(compared, batch, job.profiled) if job.profiled else {}
    if rank == 0:
        torch.save(Result(job, losses, seconds, cpu_seconds, profiles), f"{folder}/result")
    dist.barrier()
    dist.destroy_process_group()


def check_losses(losses: Mapping[str, Sequence[float]]) -> None:
    """Raise if the contenders do not compute the same thing."""
    expected = next(iter(losses.values()))
    for name, found in losses.items():
        if any(abs(a - b) > LOSS_TOLERANCE * abs(b) for a, b in zip(found, expected, strict=True)):
            raise AssertionError(f"{name} computes something else: its losses are {found}, not {expected}")


def take_turns(
    steps: Mapping[str, TrainStep], batch: tuple[Tensor, Tensor], rounds: int
) -> tuple[Mapping[str, list[float]], Mapping[str, list[float]]]:
    """Seconds, and seconds of the processor, of this rank per contender and round."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    cpu_seconds: dict[str, list[float]] = {name: [] for name in steps}
    names = list(steps)
    for index in range(rounds):
        order = names[index % len(names) :] + names[: index % len(names)]
        for name in order if index % 2 == 0 else reversed(order):  # nobody always follows the same one
            dist.barrier()
            start, cpu_start = time.perf_counter(), time.process_time()
            steps[name](*batch)
            seconds[name].append(time.perf_counter() - start)
            cpu_seconds[name].append(time.process_time() - cpu_start)
    return seconds, cpu_seconds


def slowest(seconds: Mapping[str, list[float]]) -> dict[str, list[float]]:
    """The longest over the ranks."""
    table = torch.tensor(list(seconds.values()), dtype=torch.float64)
    dist.all_reduce(table, dist.ReduceOp.MAX)
    return dict(zip(seconds, table.tolist(), strict=True))


# -- in the script -----------------------------------------------------------------------------------------------------


def run(job: Job) -> Result:
    """The result of a run."""
    result: Result = result_of_ranks(rank_main, job, job.num_ranks)
    return result


def result_of_ranks(main_of_rank: Callable[..., None], job: Any, num_ranks: int) -> Any:
    """Start ranks, ``main_of_rank(rank, job, folder)`` each, and wait for what they save as ``folder/result``."""
    get_context("forkserver").set_forkserver_preload(PRELOADED)
    with tempfile.TemporaryDirectory() as folder:
        start_processes(main_of_rank, (job, folder), nprocs=num_ranks, start_method="forkserver")
        return torch.load(f"{folder}/result", weights_only=False)


def jobs_of(options: argparse.Namespace) -> list[Job]:
    """All runs that were asked for, cheapest first."""
    jobs = []
    for width in options.width:
        shape = Shape(width, options.layers, options.head_width, options.vocab, options.batch, options.time)
        base = Job("trivial", 1, shape, options.rounds, options.profile)
        if "trivial" in options.rows:
            jobs.append(base)
        for num_ranks in options.ranks:
            for row in ("tp", "dp", "zero-1", "zero-3", "check-finite", "dp-tp"):
                if row in options.rows and (row != "dp-tp" or (num_ranks >= 4 and num_ranks % 2 == 0)):
                    jobs.append(replace(base, row=row, num_ranks=num_ranks))
    return jobs


def title(job: Job) -> str:
    ranks = "1 rank" if job.num_ranks == 1 else f"{job.num_ranks} ranks"
    return f"{ROWS[job.row].name}, {ranks}, width {job.shape.width}"


def time_table(results: Sequence[Result]) -> Table:
    """One line per contender of every run."""
    table = Table(title="seconds of a training step, and its ratio to the first contender's, round by round")
    for heading in ("run", "contender", "median ms", "ratio", "quartiles", "target", "CPU ms", "CPU ratio"):
        table.add_column(heading, justify="left" if heading in ("run", "contender") else "right", no_wrap=True)
    for result in results:
        row = ROWS[result.job.row]
        for index, name in enumerate(result.seconds):
            low, ratio, high = quartiles(ratios(result.seconds, name))
            verdict = f"{row.target:.2f} {'met' if ratio <= row.target else 'missed'}" if name == "ours" else ""
            milliseconds, cpu_milliseconds = (
                f"{1000 * median(seconds[name]):.1f}" for seconds in (result.seconds, result.cpu_seconds)
            )
            cpu_ratio = f"{median(ratios(result.cpu_seconds, name)):.3f}"
            table.add_row(
                title(result.job) if index == 0 else "",
                name,
                milliseconds,
                f"{ratio:.3f}",
                f"{low:.3f} - {high:.3f}",
                verdict,
                cpu_milliseconds,
                cpu_ratio,
            )
        table.add_section()
    return table


def as_json(results: Sequence[Result]) -> dict[str, Any]:
    """Everything measured, to keep: ratios as (lower quartile, median, upper quartile)."""
    return {
        "torch": torch.__version__,
        "commit": commit(),
        "cores": os.cpu_count(),
        "runs": [
            {
                "row": result.job.row,
                "num_ranks": result.job.num_ranks,
                "shape": asdict(result.job.shape),
                "target": ROWS[result.job.row].target,
                "losses": dict(result.losses),
                "seconds": dict(result.seconds),
                "cpu_seconds": dict(result.cpu_seconds),
                "ratios": {name: quartiles(ratios(result.seconds, name)) for name in result.seconds},
                "profiles": {name: asdict(profile) for name, profile in result.profiles.items()},
            }
            for result in results
        ],
    }


def commit() -> str:
    """The commit of the library that was measured, with a + if the tree has changes."""
    command = ["git", "-C", str(Path(shardwise.__file__).parent), "describe", "--always", "--dirty=+"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip() or "unknown"


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rows", nargs="+", choices=tuple(ROWS), default=list(ROWS))
    parser.add_argument("--width", type=int, nargs="+", default=[256, 768])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--head-width", type=int, default=64)
    parser.add_argument("--vocab", type=int, default=4096)
    parser.add_argument("--batch", type=int, default=8, help="samples in the whole batch")
    parser.add_argument("--time", type=int, default=128, help="tokens of a sample")
    parser.add_argument("--rounds", type=int, default=25, help="steps of every contender")
    parser.add_argument(
        "--profile",
        type=int,
        nargs="?",
        const=10,
        default=0,
        metavar="STEPS",
        help="show too where this many further steps (10) of the baseline and of ours spend their time, side by side",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to keep everything measured")
    return parser.parse_args(arguments)


def main() -> None:
    options = parse()
    console = Console(width=None if sys.stdout.isatty() else 140)
    results: list[Result] = []
    for job in jobs_of(options):
        start = time.perf_counter()
        results.append(run(job))
        print(f"{title(job)}: {time.perf_counter() - start:.0f} s", file=sys.stderr, flush=True)
        if job.profiled:
            console.print(profile_table(title(job), results[-1].profiles))
        if options.json:  # after every run: what was measured stays, whatever happens to the next
            options.json.write_text(json.dumps(as_json(results), indent=1))
    console.print(time_table(results))


if __name__ == "__main__":
    main()
