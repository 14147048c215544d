"""A measured step next to the predicted one: ``par.profile``.

The rank's instruction lists run node by node: each operator alone, each message awaited at once, so that a time belongs
to one thing. The unmodified step, with its overlap, is also timed. Across ranks, the slowest counts for an operator.
The fastest counts for a message, since the other ranks' times include waiting for it.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch
import torch.distributed as dist
from torch import fx
from torch.utils._pytree import tree_leaves

from shardwise.costs.collectives import Links
from shardwise.costs.kernels import KernelCall, work_of
from shardwise.costs.pipeline_simulation import Action, Kind, Order, StageSeconds, simulate_pipeline, stage_seconds
from shardwise.costs.timeline import Event, accumulation_name, simulate_program
from shardwise.costs.trace import Track, write_trace
from shardwise.layouts.mesh import Mesh
from shardwise.plans.plan import Plan
from shardwise.plans.price_scope import prices_of
from shardwise.plans.quantities import format_bytes, format_seconds
from shardwise.programs.instructions import Compute, sent_by
from shardwise.programs.rank_program import RankProgram
from shardwise.programs.vjp import VjpCache
from shardwise.runtime.agree import gather_values
from shardwise.runtime.communicator import Communicator, finish_work
from shardwise.runtime.cuda_graphs import graph_bytes
from shardwise.runtime.stage import StageCall, StageWorker
from shardwise.runtime.step import CallableStep, GradAccumStep, Half, Observer, observed
from shardwise.runtime.torch_schedules import Scheduled
from shardwise.runtime.transit import Converting, Departing

Key = tuple[str, str, tuple[str, ...]]  # part, name, stream
_NUM_SHOWN = 12


@dataclass(frozen=True, slots=True)
class ProfileRow:
    """An operator, or all messages of a kind over the same axes, in forward or backward: seconds per micro-batch, and
    the figure of the cluster file that predicts them."""

    name: str
    part: str
    measured: float
    predicted: float
    figure: str

    @property
    def difference(self) -> float:
        return abs(self.measured - self.predicted)


@dataclass(frozen=True, slots=True)
class StepProfile:
    """A measured and predicted step, without updates of an optimizer. ``step_seconds``: (measured, predicted) seconds
    of forward and backward of a micro-batch; ``peak_bytes``: (measured, predicted) peak memory of a micro-batch,
    without optimizer states on CPUs; ``rows``: largest disagreement first; ``events``: of this rank, measured one by
    one, and predicted; ``compiled``: the step is compiled, while the operators were measured uncompiled;
    ``graph_bytes``: kept by CUDA graphs from step to step (0: there are none); ``alone``: the rank if it ran without
    the others, in which case messages are left out."""

    step_seconds: tuple[float, float]
    peak_bytes: tuple[int, int]
    rows: tuple[ProfileRow, ...]
    cluster: str
    compiled: bool
    mesh: Mesh = field(repr=False)
    events: tuple[tuple[Event, ...], tuple[Event, ...]] = field(repr=False)
    alone: int | None = None
    graph_bytes: int = 0

    def trace(self, path: str | Path) -> None:
        """Write both steps as one trace for https://ui.perfetto.dev: measured above predicted, with the same names.
        Measured events are laid end to end."""
        measured, predicted = self.events
        steps = {"measured, one by one": measured, "predicted": predicted}
        write_trace(path, [Track.of(title, events, self.mesh) for title, events in steps.items()])

    def __str__(self) -> str:
        measured, predicted = map(format_seconds, self.step_seconds)
        peak, expected = map(format_bytes, self.peak_bytes)
        compiled = ["the step is compiled; the operators, measured and predicted, are not"] if self.compiled else []
        compiled += [f"CUDA graphs keep {format_bytes(self.graph_bytes)} from step to step"] * (self.graph_bytes > 0)
        alone = [] if self.alone is None else [f"rank {self.alone} of {self.mesh.num_devices} alone: without messages"]
        lines = [
            *alone,
            f"forward and backward {measured}, predicted {predicted} ({self.cluster})",
            f"peak memory {peak}, predicted {expected}",
            *compiled,
            f"{'measured':>10} {'predicted':>10}  the largest disagreements first; the figure to calibrate",
        ]
        for row in self.rows[:_NUM_SHOWN]:
            seconds = f"{format_seconds(row.measured):>10} {format_seconds(row.predicted):>10}"
            lines.append(f"{seconds}  {row.part} of {row.name}: {row.figure}")
        lines += [f"{'':21}  and {len(self.rows) - _NUM_SHOWN} more"] if len(self.rows) > _NUM_SHOWN else []
        return "\n".join([*lines, "shardwise calibrate -o my.toml measures these figures on this machine"])


def profile_step(
    step: Callable[[], Any],
    emitted_step: CallableStep | GradAccumStep,
    plan: Plan,
    state: Sequence[torch.Tensor],
    device: torch.device,
    steps: int,
    *,
    alone: int | None = None,
    group: Any = None,
) -> StepProfile:
    """Profile a step that has run once; every rank of ``group`` calls it (None: of the job). ``step``: runs forward and
    backward of ``emitted_step``; ``state``: parameters and buffers of this rank; ``alone``: this rank, if there are no
    others."""

    def gather(value: Any) -> list[Any]:
        return [value] if alone is not None else gather_values(value, group)

    variant = None if emitted_step.compiling is None else emitted_step.compiling.variant
    emitted = variant.emitted if isinstance(variant, CallableStep) else variant
    compiled = None if emitted is None else emitted.program
    in_graphs = 0
    if compiled is not None:
        step()  # the second one captures CUDA graphs
        in_graphs = graph_bytes(compiled)
    wall, peak = _measured(step, device, steps)
    clocks = [_Clock(emitted_step.program, device, state) for _ in range(steps)]
    for clock in clocks:
        with observed(emitted_step, clock):
            step()
    prices = prices_of(plan)
    predicted = simulate_program(emitted_step.program, prices)
    whole = predicted
    if compiled is not None:
        whole = simulate_program(emitted_step.program, prices, compiled=True, graphs=in_graphs > 0)
    expected = tuple(event for event in predicted.events if event.part != "update")
    left_out = sum(event.seconds for event in whole.events if event.part == "update")
    if alone is not None:
        left_out += whole.exposed
        expected = tuple(event for event in expected if not event.stream)
        for clock in clocks:
            clock.events = [event for event in clock.events if not event.stream]
    on_cpu = device.type == "cpu"
    states = predicted.peak.parts.get("optimizer states", 0) if on_cpu else 0
    rows = _compared(clocks, expected, prices.links, gather)
    return StepProfile(
        (max(gather(wall)) / clocks[0].num_passes, whole.seconds - left_out),
        (
            max(clock.peak for clock in clocks) if on_cpu else peak,
            predicted.peak_bytes - states + max(in_graphs - predicted.kept_bytes, 0),  # saved values are results
        ),
        tuple(sorted(rows, key=lambda row: -row.difference)),
        prices.links.cluster.name,
        compiled is not None,
        plan.mesh,
        (tuple(clocks[-1].events), expected),
        alone,
        in_graphs,
    )


def _measured(step: Callable[[], Any], device: torch.device, steps: int) -> tuple[float, int]:
    """Return the median seconds of a step, and its peak bytes on a GPU (0 elsewhere)."""
    on_gpu = device.type == "cuda"
    finish_work(device)
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(device)
    walls = []
    for _ in range(steps):
        start = time.perf_counter()
        step()
        finish_work(device)
        walls.append(time.perf_counter() - start)
    return median(walls), torch.cuda.max_memory_allocated(device) if on_gpu else 0


def steps_of(
    emitted_step: CallableStep | GradAccumStep, tensors: Sequence[torch.Tensor], passes: int
) -> Callable[[], None]:
    """Return a function that runs forward and backward of a batch, or of ``passes`` micro-batches, on ``tensors``."""

    def run() -> None:
        for tensor in tensors:
            tensor.grad = None
        if isinstance(emitted_step, CallableStep):
            delivered, _ = emitted_step(tensors)
            delivered[0].backward()  # the loss is delivered first
            return
        running = emitted_step.begin(tensors)
        program = running.emitted.program
        with torch.no_grad():
            for _ in range(passes):
                delivered, _, saved = running.forward(tensors)
                named = zip(program.cotangents, delivered, strict=True)
                cotangents = [torch.ones_like(value) for name, value in named if name is not None]
                if cotangents:  # a stage whose parameters are all frozen has none
                    kept = list(saved)
                    del saved
                    gradients = running.emitted.backward.forward(kept, *cotangents)
                    running.add(dict(zip(program.gradients, gradients, strict=True)), tensors)
        running.end()

    return run


@dataclass
class _Clock(Observer):
    """Times of one step, node by node. ``state``: tensors that outlive the step; ``peak``: peak bytes of it and of a
    micro-batch's values (not on GPUs, which count by themselves); ``figures``: per operator the seconds of its longest
    kernel and the figure that predicts it."""

    program: RankProgram
    device: torch.device
    state: Sequence[torch.Tensor]
    now: float = 0.0
    peak: int = 0
    num_passes: int = 0
    events: list[Event] = field(default_factory=list)
    figures: dict[tuple[str, str], tuple[float, str]] = field(default_factory=dict)

    def begin(self, half: Half) -> None:
        self.num_passes += half.part == "forward"

    def run(self, node: fx.Node, half: Half, values: Mapping[fx.Node, Any], call: Callable[[], Any]) -> Any:
        result = self._timed(node, half, call)
        self.count((*values.values(), result))
        return result

    def _timed(self, node: fx.Node, half: Half, call: Callable[[], Any]) -> Any:
        target, part = half.target(node), half.part
        finish_work(self.device)
        start = time.perf_counter()
        result = call()
        if isinstance(target, Departing):
            target.message.finish(result[1])
            result[1] = []
        finish_work(self.device)
        seconds = time.perf_counter() - start
        if "index" in node.meta:
            instruction = half.instructions[node.meta["index"]]
            assert isinstance(instruction, Compute), f"{node} is not an operator"
            is_cast = instruction.origin.part == "cast"
            name = f"cast of {instruction.results[0]}" if is_cast else instruction.origin.op
            self.figures[part, name] = max(
                self.figures.get((part, name), (0.0, "")), (seconds, self._figure(instruction))
            )
            self._add(Event(name, part, (), self.now, seconds))
        elif isinstance(target, (Converting, Departing)):
            sent = sent_by(target.instruction)
            total = sum(collective.num_bytes for collective in sent)
            for collective in sent:
                share = collective.num_bytes / total if total else 1 / len(sent)
                self._add(
                    Event(collective.kind, part, collective.axes, self.now, seconds * share, collective.num_bytes)
                )
        return result

    def add(self, source: str, total: torch.Tensor, gradient: torch.Tensor) -> None:
        finish_work(self.device)
        start = time.perf_counter()
        total.add_(gradient)
        finish_work(self.device)
        name = accumulation_name(self.program.spmd.graph.source_of[source])
        self._add(Event(name, "backward", (), self.now, time.perf_counter() - start))

    def count(self, values: Iterable[Any]) -> None:
        if self.device.type != "cpu":
            return
        tensors = (leaf for leaf in tree_leaves((list(values), list(self.state))) if isinstance(leaf, torch.Tensor))
        storages = {storage.data_ptr(): storage.nbytes() for x in tensors if (storage := x.untyped_storage()).nbytes()}
        self.peak = max(self.peak, sum(storages.values()))

    def _add(self, event: Event) -> None:
        self.events.append(event)
        self.now += event.seconds

    def _figure(self, instruction: Compute) -> str:
        """Return the figure of the cluster file that predicts an operator's time."""
        forms = self.program.forms
        written = [*instruction.forms, *(forms[name] for name in instruction.writes)]
        call = KernelCall(instruction.target, instruction.args, instruction.kwargs)
        work = work_of(call, [forms[name] for name in instruction.operands], written)
        if work.kind:
            return f"device.kernels.{work.kind}"
        return f"device.matmul_efficiency.{work.dtype}" if work.flops else "device.memory_efficiency"


def _compared(
    clocks: Sequence[_Clock], expected: Sequence[Event], links: Links, gather: Callable[[Any], list[Any]]
) -> Iterator[ProfileRow]:
    """Yield a row for every operator, and for all messages of a kind over the same axes, in each part of a step."""
    sums_of_passes = [_sums(clock.events, clock.num_passes) for clock in clocks]
    mine = {key: median(sums.get(key, 0.0) for sums in sums_of_passes) for key in sums_of_passes[0]}
    everyone = gather(mine)
    predicted = _sums(expected, 1)
    for key in dict.fromkeys((*mine, *predicted)):
        part, name, stream = key
        seconds = [sums[key] for sums in everyone if key in sums]
        measured = (min if stream else max)(seconds, default=0.0)
        levels = "" if not stream else ", ".join(f"levels.{level}" for level in links.level_names(stream))
        figure = levels or clocks[0].figures.get((part, name), (0.0, "device"))[1]
        title = f"{name} over {links.mesh.format_axes(stream)}" if stream else name
        yield ProfileRow(title, part, measured, predicted.get(key, 0.0), figure)


def _sums(events: Iterable[Event], num_passes: int) -> dict[Key, float]:
    sums: dict[Key, float] = defaultdict(float)
    for event in events:
        sums[event.part, event.name, event.stream] += event.seconds / num_passes
    return dict(sums)


# ----------------------------------------------------------------------------------------------------------------------
# A measured pipeline step next to the simulated one: ``par.profile`` under a plan of stages. Two things are measured.
# First, unmodified steps, action by action: the time of each stage per micro-batch, and how long its pipeline rank
# waits for others. Second, each stage's program alone, operator by operator (``runtime.step_profile``), on the inputs
# of its first micro-batch. Its ranks exchange messages, without waiting for other stages.


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
