"""A measured pipeline step next to the simulated one: ``par.profile`` under a plan of stages.

Two things are measured. First, unmodified steps, action by action: the time of each stage per micro-batch, and how long
its pipeline rank waits for others. Second, each stage's program alone, operator by operator (``runtime.step_profile``),
on the inputs of its first micro-batch. Its ranks exchange messages, without waiting for other stages.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch
import torch.distributed as dist

from shardwise.costs.pipeline_simulation import Action, Kind, Order, StageSeconds, simulate_pipeline, stage_seconds
from shardwise.costs.timeline import Event
from shardwise.costs.trace import Track, write_trace
from shardwise.layouts.mesh import Mesh
from shardwise.plans.plan import Plan
from shardwise.plans.price_scope import prices_of
from shardwise.plans.quantities import format_seconds
from shardwise.programs.vjp import VjpCache
from shardwise.runtime.agree import gather_values
from shardwise.runtime.communicator import Communicator
from shardwise.runtime.stage import StageCall, StageWorker
from shardwise.runtime.step_profile import StepProfile, profile_step, steps_of
from shardwise.runtime.torch_schedules import Scheduled


@dataclass(frozen=True, slots=True)
class PipelineProfile:
    """A measured and predicted pipeline step; all ranks have the same. ``step_seconds``: (measured on the slowest rank,
    predicted), without the optimizer; ``bubbles``: (measured, predicted) share of all pipeline ranks' time spent
    waiting; ``order_bubble``: the bubble of the schedule with measured stage times and free messages; ``measured``,
    ``predicted``: seconds per micro-batch of each stage; ``stages``: operator profiles by stage number; ``events``:
    (measured, predicted) actions of every pipeline rank, from the last measured step."""

    step_seconds: tuple[float, float]
    bubbles: tuple[float, float]
    order_bubble: float
    measured: tuple[StageSeconds, ...]
    predicted: tuple[StageSeconds, ...]
    stages: Mapping[int, StepProfile]
    title: str
    mesh: Mesh = field(repr=False)
    events: tuple[tuple[tuple[Event, ...], ...], tuple[tuple[Event, ...], ...]] = field(repr=False)

    def trace(self, path: str | Path) -> None:
        """Write both steps as one trace for https://ui.perfetto.dev, with one row per pipeline rank."""
        titles = ("measured", "predicted")
        tracks = [
            Track.of(f"place {place}, {title}", events, self.mesh)
            for title, places in zip(titles, self.events, strict=True)
            for place, events in enumerate(places)
        ]
        write_trace(path, tracks)

    def __str__(self) -> str:
        seconds, expected = map(format_seconds, self.step_seconds)
        waits, foreseen = self.bubbles
        lines = [
            f"{self.title}: {seconds}, predicted {expected}, without the optimizer",
            f"pipeline ranks idle {waits:.1%} of it, predicted {foreseen:.1%}; the schedule alone causes "
            f"{self.order_bubble:.1%} (measured stage times, free messages)",
            f"{'':9} {'forward':>10} {'predicted':>10} {'backward':>10} {'predicted':>10}  of a micro-batch",
        ]
        for number, (measured, predicted) in enumerate(zip(self.measured, self.predicted, strict=True)):
            times = (
                measured.forward,
                predicted.forward,
                measured.input + measured.weight,
                predicted.input + predicted.weight,
            )
            lines.append(f"stage {number:<3} " + " ".join(f"{format_seconds(seconds_of):>10}" for seconds_of in times))
        for number, profile in sorted(self.stages.items()):
            lines += [
                "",
                f"stage {number} by itself, one micro-batch",
                *(f"  {line}" for line in str(profile).split("\n")),
            ]
        return "\n".join(lines)


def profile_pipeline(
    step: Callable[[], Any],
    ready: StageCall,
    plan: Plan,
    ranks: Sequence[Communicator],
    device: torch.device,
    steps: int,
) -> PipelineProfile:
    """Profile a pipeline step that has run once; every rank calls it. ``step``: runs forward and backward of a batch by
    ``ready``; ``ranks``: communicators of all stages."""
    assert isinstance(ready.runs, Scheduled), "stages run on a schedule of torch"
    walls, busy, seconds, last = _steps(step, ready.runs, steps)
    for worker in ready.workers:
        worker.remembers = True
    step()
    profiles_here = {
        worker.number: _operators(worker, plan, ranks[worker.number], device, steps) for worker in ready.workers
    }
    everywhere = gather_values((median(walls), busy / sum(walls), seconds, last, profiles_here))
    places = dict.fromkeys(stage.placement.ranks for stage in plan.stages)
    place_of = {rank: place for place, place_ranks in enumerate(places) for rank in place_ranks}
    slowest: dict[tuple[int, Kind], float] = defaultdict(float)
    operators: dict[int, StepProfile] = {}
    events: dict[int, tuple[Event, ...]] = {}
    for rank, (_, _, means, timed, profiles) in enumerate(everywhere):
        for key, mean_seconds in means.items():
            slowest[key] = max(slowest[key], mean_seconds)
        operators = {**profiles, **operators}
        events.setdefault(place_of[rank], timed)
    measured = []
    for number in range(len(plan.stages)):  # a backward that is not split counts as its input half
        backward = slowest[number, "backward"] or slowest[number, "input"]
        measured.append(StageSeconds(slowest[number, "forward"], backward, slowest[number, "weight"], 0.0, 0.0))
    predicted = _predicted(plan, ready)
    order = ready.runs.order
    simulated = simulate_pipeline(order, [replace(stage, update=0.0) for stage in predicted])
    return PipelineProfile(
        (max(wall for wall, *_ in everywhere), simulated.seconds),
        (1 - mean(share for _, share, *_ in everywhere), simulated.bubbles),
        simulate_pipeline(order, measured).bubbles,
        tuple(measured),
        predicted,
        operators,
        f"a step of {len(ready.passes.sizes)} micro-batches in {len(plan.stages)} stages, {plan.schedule}",
        plan.stages[0].mesh,
        (tuple(events[place] for place in sorted(events)), _simulated_events(order, simulated.starts, predicted)),
    )


def _steps(
    step: Callable[[], Any], scheduled: Scheduled, steps: int
) -> tuple[list[float], float, dict[tuple[int, Kind], float], tuple[Event, ...]]:
    """Run steps and return (seconds of each, busy seconds of this rank, mean seconds per action, actions of the last
    step)."""
    walls: list[float] = []
    busy = 0.0
    taken: dict[tuple[int, Kind], list[float]] = defaultdict(list)
    last: tuple[Event, ...] = ()
    for _ in range(steps):
        dist.barrier()
        start = time.perf_counter()
        with scheduled.measured() as actions:
            step()
        dist.barrier()  # a pipeline rank waits at the end for slower ones
        walls.append(time.perf_counter() - start)
        for action, _, seconds in actions:
            busy += seconds
            taken[action.stage, action.kind].append(seconds)
        last = tuple(_event(action, began - start, seconds) for action, began, seconds in actions)
    return walls, busy, {key: mean(seconds) for key, seconds in taken.items()}, last


def _operators(worker: StageWorker, plan: Plan, ranks: Communicator, device: torch.device, steps: int) -> StepProfile:
    """Profile a stage alone on its largest micro-batch, operator by operator. All ranks of the stage call it."""
    in_passes = worker.programs[max(worker.sizes)].compiled.in_passes
    tensors, worker.remembered, worker.remembers = worker.remembered, [], False
    state = [tensor for tensor in worker.programs[max(worker.sizes)].compiled.tensors if tensor is not None]
    run, group = steps_of(in_passes, tensors, plan.micro_batches), ranks.group(ranks.mesh.sub_axes)
    run()
    return profile_step(run, in_passes, plan.alone(worker.number), state, device, steps, group=group)


def _predicted(plan: Plan, ready: StageCall) -> tuple[StageSeconds, ...]:
    """Return the predicted seconds of each stage. For a plan that was not chosen by price they are computed for CPU
    ranks, with free messages between stages."""
    if plan.pipeline is not None:
        return tuple(stage.seconds for stage in plan.pipeline.stages)
    priced = enumerate(ready.bound.spmds)
    return tuple(stage_seconds(spmd, prices_of(plan.alone(number)), 0.0, VjpCache()) for number, spmd in priced)


def _simulated_events(
    order: Order, starts: Sequence[Sequence[float]], stages: Sequence[StageSeconds]
) -> tuple[tuple[Event, ...], ...]:
    return tuple(
        tuple(
            _event(action, start, stages[action.stage].of(action.kind))
            for action, start in zip(actions, begins, strict=True)
        )
        for actions, begins in zip(order, starts, strict=True)
    )


def _event(action: Action, start: float, seconds: float) -> Event:
    return Event(f"stage {action.stage}, {action}", action.kind, (), start, seconds)
