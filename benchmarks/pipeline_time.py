"""Times training steps of pipelines: torch's schedules on stages cut by hand, and ours on the same schedule and cut.

Every row is one run of its own ranks (gloo, one thread each). Contenders must agree on the losses, then take turns, as
``step_time.py`` has it. Afterwards the bubble of our steps is measured, the share of the step in which no stage of a
rank works, beside the one that is simulated from the seconds that the stages took. Last, how long a model of many
layers takes to be cut and bound, beyond its capture.

Run ``python benchmarks/pipeline_time.py [--ranks 2 4] [--schedules 1F1B GPipe] [--rounds 20] [--layers 8] [--deep N]``.
"""

from __future__ import annotations

import argparse
import gc
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import mean, median
from typing import Any
from unittest import mock

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported, here and in every rank

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from step_time import LOSS_STEPS, TIMEOUT, check_losses, quartiles, ratios, result_of_ranks, slowest, take_turns
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class
from transformer import Shape, Transformer

import shardwise as sw
from shardwise.costs.pipeline_simulation import StageSeconds, simulate_pipeline
from shardwise.graph.capture import capture
from shardwise.plans.bind_stages import bound, step_graph
from shardwise.plans.schedule import SCHEDULES, order_of, schedule_of
from shardwise.runtime.stage import StageWorker

TARGET = 1.05
BUBBLE_STEPS = 5
Step = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Job:
    """One run. ``micro_batches``: of a step."""

    schedule: str
    num_ranks: int
    shape: Shape
    micro_batches: int
    rounds: int


@dataclass(frozen=True, slots=True)
class Result:
    """What a run measured: seconds per contender and round on the rank with the most, and bubbles of our steps."""

    job: Job
    seconds: dict[str, list[float]]
    cpu_seconds: dict[str, list[float]]
    measured_bubble: float
    simulated_bubble: float


class HandCut(nn.Module):
    """A stage as one writes it: some blocks, before the first of them the embeddings, behind the last the head."""

    def __init__(self, whole: Transformer, begin: int, end: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(whole.blocks[begin:end])
        self.tokens = whole.tokens if begin == 0 else None
        self.positions = whole.positions if begin == 0 else None
        is_last = end == len(whole.blocks)
        self.norm, self.head = (whole.norm, whole.head) if is_last else (None, None)

    def forward(self, x: Tensor) -> Tensor:
        if self.tokens is not None and self.positions is not None:
            x = self.tokens(x) + self.positions(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks:
            x = block(x)
        if self.norm is not None and self.head is not None:
            x = self.head(self.norm(x))
        return x


def begins(shape: Shape, num_stages: int) -> list[int]:
    """The blocks at which stages begin, and the end."""
    return [stage * shape.layers // num_stages for stage in range(num_stages + 1)]


def mean_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def by_hand(job: Job, whole: Transformer) -> Step:
    schedule = SCHEDULES[job.schedule]
    num_stages, rank = job.num_ranks * schedule.stages_per_place, dist.get_rank()
    cuts = begins(job.shape, num_stages)
    own = [stage for stage in range(num_stages) if schedule.place_of(stage, job.num_ranks) == rank]
    modules = [HandCut(whole, cuts[stage], cuts[stage + 1]) for stage in own]
    stages = [
        PipelineStage(module, stage, num_stages, torch.device("cpu"))
        for stage, module in zip(own, modules, strict=True)
    ]
    given: Any = stages if schedule.stages_per_place > 1 else stages[0]
    run: Any = get_schedule_class(job.schedule)(given, job.micro_batches, loss_fn=mean_loss)
    optimizer = torch.optim.AdamW([p for module in modules for p in module.parameters()], lr=1e-3)
    has_last = num_stages - 1 in own

    def step(ids: Tensor, labels: Tensor) -> Tensor:
        losses: list[Tensor] = []
        target = labels if has_last else None
        run.step(*((ids,) if 0 in own else ()), target=target, losses=losses, return_outputs=False)
        optimizer.step()
        optimizer.zero_grad()
        return torch.stack(losses).mean().detach() if losses else torch.zeros(())

    return step


def planned(job: Job, module: Transformer, batch: tuple[Tensor, Tensor]) -> sw.Plan:
    """The plan of the same cut: marks where the stages by hand begin."""
    schedule = SCHEDULES[job.schedule]
    for stage, begin in enumerate(begins(job.shape, job.num_ranks * schedule.stages_per_place)[:-1]):
        if begin:
            sw.stage(module.blocks[begin], stage)
    size = job.shape.batch // job.micro_batches
    options: dict[str, Any] = {"mode": "data_parallel", "micro_batch": size, "schedule": job.schedule}
    return sw.plan(module, batch, job.num_ranks, stages="marked", **options)


def ours(job: Job, module: Transformer, batch: tuple[Tensor, Tensor]) -> tuple[Step, sw.Parallel]:
    par = sw.parallelize(module, planned(job, module, batch) if dist.get_rank() == 0 else None)
    optimizer = torch.optim.AdamW(par.parameters(), lr=1e-3)

    def step(ids: Tensor, labels: Tensor) -> Tensor:
        loss = par.step(ids, labels, loss="last")
        optimizer.step()
        optimizer.zero_grad()
        return torch.zeros(()) if loss is None else loss

    return step, par


def bubbles(job: Job, par: sw.Parallel, batch: tuple[Tensor, Tensor]) -> tuple[float, float]:
    """The share of schedules in which ranks wait, measured, and simulated from the seconds of each stage's actions."""
    (ready,) = par._ready.values()
    taken: dict[tuple[int, str], list[float]] = {}
    run_forward, run_backward = StageWorker.forward, StageWorker.backward

    def timed(worker: StageWorker, kind: str, run: Callable[[], Any]) -> Any:
        start = time.perf_counter()
        found = run()
        taken.setdefault((worker.number, kind), []).append(time.perf_counter() - start)
        return found

    def forward(worker: StageWorker, number: int, received: Any) -> Any:
        return timed(worker, "forward", lambda: run_forward(worker, number, received))

    def backward(worker: StageWorker, number: int, kind: Any, cotangents: Any) -> Any:
        return timed(worker, kind, lambda: run_backward(worker, number, kind, cotangents))

    steps = []
    with mock.patch.object(StageWorker, "forward", forward), mock.patch.object(StageWorker, "backward", backward):
        for _ in range(BUBBLE_STEPS):
            dist.barrier()
            start = time.perf_counter()
            par.step(*batch, loss="last")
            dist.barrier()
            steps.append(time.perf_counter() - start)
    busy = sum(map(sum, taken.values()))
    everywhere: list[Any] = [None] * job.num_ranks
    dist.all_gather_object(everywhere, (busy / sum(steps), {key: mean(own) for key, own in taken.items()}))
    means = {key: seconds for _, own in everywhere for key, seconds in own.items()}
    schedule = schedule_of(job.schedule, par.plan.order)
    count = job.num_ranks * schedule.stages_per_place
    stages = []
    for stage in range(count):
        of = [means.get((stage, kind), 0.0) for kind in ("forward", "input", "weight", "backward")]
        stages.append(StageSeconds(of[0], of[1], of[2] or of[3], 0.0, 0.0))
    order = order_of(schedule, job.num_ranks, len(ready.passes.sizes))
    return 1 - mean(share for share, _ in everywhere), simulate_pipeline(order, stages).bubbles


def rank_main(rank: int, job: Job, folder: str) -> None:
    """What every rank does; rank 0 leaves the result in ``folder``."""
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=job.num_ranks, timeout=TIMEOUT)

    def model() -> Transformer:
        torch.manual_seed(0)
        return Transformer(job.shape)

    size = (job.shape.batch, job.shape.time)
    torch.manual_seed(1)
    batch = torch.randint(job.shape.vocab, size), torch.randint(job.shape.vocab, size)
    own, par = ours(job, model(), batch)
    steps = {"cut by hand": by_hand(job, model()), "by hand, again": by_hand(job, model()), "ours": own}
    losses = {name: [step(*batch).item() for _ in range(LOSS_STEPS)] for name, step in steps.items()}
    check_losses(losses)
    gc.collect()
    gc.freeze()
    seconds, cpu_seconds = (slowest(one) for one in take_turns(steps, batch, job.rounds))
    found = Result(job, seconds, cpu_seconds, *bubbles(job, par, batch))
    if rank == 0:
        torch.save(found, f"{folder}/result")
    dist.barrier()
    dist.destroy_process_group()


def run(job: Job) -> Result:
    result: Result = result_of_ranks(rank_main, job, job.num_ranks)
    return result


def seconds_to_cut(layers: int, num_stages: int) -> tuple[float, float]:
    """Of a model of many layers, on meta: seconds of its capture, and of being cut and bound to a plan."""
    shape = Shape(width=64, layers=layers, batch=8, time=16)
    with torch.device("meta"):
        module = Transformer(shape)
        batch = torch.zeros(8, 16, dtype=torch.int64), torch.zeros(8, 16, dtype=torch.int64)
    start = time.process_time()
    graph = step_graph(capture(module, batch).graph)
    captured = time.process_time() - start
    options: dict[str, Any] = {"stages": num_stages, "mode": "data_parallel", "schedule": "GPipe"}
    plan = sw.plan(module, batch, num_stages, global_batch=8, micro_batch=8, **options)
    start = time.process_time()
    bound(plan, graph)
    return captured, time.process_time() - start


def time_table(results: list[Result]) -> Table:
    table = Table(title="seconds of a training step, and its ratio to the stages cut by hand, round by round")
    for heading in ("run", "contender", "median ms", "ratio", "quartiles", "target", "CPU ms", "CPU ratio"):
        table.add_column(heading, justify="left" if heading in ("run", "contender") else "right", no_wrap=True)
    for result in results:
        for index, name in enumerate(result.seconds):
            low, ratio, high = quartiles(ratios(result.seconds, name))
            verdict = f"{TARGET:.2f} {'met' if ratio <= TARGET else 'missed'}" if name == "ours" else ""
            table.add_row(
                f"{result.job.schedule}, {result.job.num_ranks} ranks" if index == 0 else "",
                name,
                f"{1000 * median(result.seconds[name]):.1f}",
                f"{ratio:.3f}",
                f"{low:.3f} - {high:.3f}",
                verdict,
                f"{1000 * median(result.cpu_seconds[name]):.1f}",
                f"{median(ratios(result.cpu_seconds, name)):.3f}",
            )
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="*", default=[2, 4])
    parser.add_argument("--schedules", nargs="*", default=["1F1B", "GPipe"], help="torch's, by name")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--time", type=int, default=128)
    parser.add_argument("--vocab", type=int, default=4096)
    parser.add_argument("--deep", type=int, default=126, help="layers of the model that is cut and bound; 0: none")
    options = parser.parse_args()
    shape = Shape(options.width, options.layers, 64, options.vocab, options.batch, options.time)
    shape = replace(shape, head_width=min(64, options.width))
    console = Console(width=150)
    results = []
    for num_ranks in options.ranks:
        for schedule in options.schedules:
            results.append(run(Job(schedule, num_ranks, shape, options.micro_batches, options.rounds)))
            found = results[-1]
            console.print(
                f"{schedule}, {num_ranks} ranks: bubble {found.measured_bubble:.1%} measured, "
                f"{found.simulated_bubble:.1%} simulated"
            )
    if results:
        console.print(time_table(results))
    if options.deep:
        captured, cut = seconds_to_cut(options.deep, 4)
        console.print(
            f"{options.deep} layers: captured in {captured:.1f} s, cut into 4 stages and bound in {cut:.1f} s"
        )


if __name__ == "__main__":
    main()
