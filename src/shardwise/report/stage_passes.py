"""Simulate a pass over a micro-batch for every stage of a plan (its time, memory and messages), and write the step of a
pipeline as tracks of a trace.

The program of every stage is bound again from the plan, so that types and events have its names of operators and axes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from shardwise.costs.cluster import Cluster
from shardwise.costs.ledger import CATEGORIES, Peak
from shardwise.costs.memory import busiest_program, memory_of_program
from shardwise.costs.pipeline_simulation import Action, Order, SimulatedPipeline, StageSeconds, simulate_pipeline
from shardwise.costs.prediction import Interval
from shardwise.costs.prices import Prices
from shardwise.costs.timeline import Event, SimulatedStep, simulate_program
from shardwise.costs.trace import Held, Track, by_stream
from shardwise.errors import PlanError
from shardwise.graph.ir import Graph
from shardwise.layouts.text import format_layout
from shardwise.plans.bind_stages import bound
from shardwise.plans.plan import Plan
from shardwise.plans.price_scope import prices_of
from shardwise.plans.schedule import order_of, schedule_of
from shardwise.programs.rank_program import RankProgram
from shardwise.programs.vjp import VjpCache
from shardwise.search.orders import OrderProblem


@dataclass(frozen=True, eq=False)
class StagePass:
    """A stage without the others. ``program``: that of its fullest rank; ``step``: a simulated pass of the program;
    ``waiting``: bytes that other micro-batches in flight have saved; ``why``: maps an operator to table rows on its
    alternatives, or to None."""

    graph: Graph
    program: RankProgram
    prices: Prices
    step: SimulatedStep
    waiting: int = 0
    why: Callable[[str], Mapping[str, Any] | None] = lambda _: None

    @cached_property
    def over(self) -> tuple[Peak, ...]:
        """Return the memory at every operator."""
        over = memory_of_program(self.program, self.prices, over_time=True).over
        return tuple(with_saved(peak, self.waiting) for peak in over)

    def types(self, name: str) -> tuple[str, ...]:
        """Return the types of an operator's results."""
        layouts, graph = self.program.spmd.layouts, self.graph
        results = [value for value in graph.op_by_name[name].results if value in layouts]
        return tuple(format_layout(layouts[value], graph.by_name[value].dtype) for value in results)

    def reads(self, name: str) -> tuple[str, ...]:
        """Return the operators whose results an operator reads."""
        makers, operands = self.graph.producer, self.graph.op_by_name[name].operands
        return tuple(makers[value].name for value in operands if value in makers)


def stage_passes(plan: Plan, graph: Graph, prelude: Graph | None) -> tuple[StagePass, ...]:
    """Simulate all stages of a plan. ``graph``: one pass of its step; ``prelude``: the graph that runs once before."""
    stages, vjp_cache, passes = bound(plan, graph, prelude=prelude, training=plan.training), VjpCache(), []
    for number, (part, spmd) in enumerate(zip(stages.cut.parts, stages.spmds, strict=True)):
        program, prices = busiest_program(spmd, vjp_cache), prices_of(plan.alone(number))
        passes.append(StagePass(part, program, prices, simulate_program(program, prices)))
    return tuple(passes)


def places_of(plan: Plan) -> tuple[int, ...]:
    """Return the pipeline rank of every stage."""
    places = list(dict.fromkeys(stage.placement.ranks for stage in plan.stages))
    return tuple(places.index(stage.placement.ranks) for stage in plan.stages)


def order_in(plan: Plan) -> Order:
    """Return the actions of every pipeline rank in a step."""
    return order_of(schedule_of(plan.schedule, plan.order), 1 + max(places_of(plan)), plan.micro_batches)


def simulated_order(plan: Plan) -> tuple[Order, SimulatedPipeline] | None:
    """Simulate the step of a pipeline again, action by action. Return None if the plan has no prediction, or is
    not the one that was predicted."""
    if plan.pipeline is None:
        return None
    order = order_in(plan)
    step = simulate_pipeline(order, [stage.seconds for stage in plan.pipeline.stages])
    differs = abs(step.seconds - plan.pipeline.step_seconds) > 1e-9 * step.seconds
    return None if differs else (order, step)


def step_interval(plan: Plan, passes: Sequence[StagePass], cluster: Cluster) -> Interval:
    """Return the 90 % interval of the seconds of a step as it runs by default. Operators vary by the spread of the
    device, all else by the largest spread of the cluster's levels, in all stages at once."""
    assert plan.pipeline is not None, "it is predicted"
    operators, sent = 1 + cluster.device.spread, 1 + max((level.spread for level in cluster.levels), default=0.0)
    order, stages = order_in(plan), [stage.seconds for stage in plan.pipeline.stages]
    shares = [
        min(stage_pass.step.compute / stage_pass.step.seconds, 1.0) if stage_pass.step.seconds else 0.0
        for stage_pass in passes
    ]

    def seconds(sign: int) -> float:
        scaled = [
            _scaled(stage, share * operators**sign + (1 - share) * sent**sign, sent**sign)
            for stage, share in zip(stages, shares, strict=True)
        ]
        return simulate_pipeline(order, scaled).seconds

    shorter = plan.pipeline.default_seconds / plan.pipeline.step_seconds  # what stages take is eager
    return Interval(plan.pipeline.default_seconds, shorter * seconds(-1), shorter * seconds(1))


def _scaled(stage: StageSeconds, factor: float, sent: float) -> StageSeconds:
    return StageSeconds(
        factor * stage.forward, factor * stage.input, factor * stage.weight, sent * stage.send, factor * stage.update
    )


def stage_peak(plan: Plan, number: int, step: SimulatedStep) -> Peak:
    """Return the peak memory of a stage on a device, with all of its micro-batches in flight."""
    assert plan.pipeline is not None, "it is predicted"
    return with_saved(step.peak, round(plan.pipeline.stages[number].peak_bytes) - step.peak_bytes)


def with_saved(peak: Peak, more: int) -> Peak:
    """Return a peak with ``more`` additional bytes that are saved for backward."""
    return replace(peak, num_bytes=peak.num_bytes + more, parts={**peak.parts, "saved": peak.parts["saved"] + more})


def fullest_place(plan: Plan, passes: Sequence[StagePass]) -> Peak:
    """Return the peak of a device on the fullest pipeline rank: all of its stages with their micro-batches in flight,
    while the stage with the largest working memory runs."""
    place_of, order = places_of(plan), order_in(plan)
    kept = [float(stage_pass.step.kept_bytes) for stage_pass in passes]
    seconds = tuple(StageSeconds(1.0, 1.0, 1.0, 0.0, 0.0) for _ in passes)
    work = OrderProblem(seconds, place_of, plan.micro_batches, tuple(kept), (0.0,) * len(order))
    peaks = []
    for place, in_flight in enumerate(work.peaks(order)):
        parts = Counter[str](dict.fromkeys(CATEGORIES, 0))
        parts["saved"] = round(in_flight)
        stages = work.stages_at[place]
        number = max(
            stages, key=lambda candidate: passes[candidate].step.peak_bytes - sum(passes[candidate].step.rests.values())
        )
        fullest = passes[number].step.peak
        for other in stages:
            parts.update(fullest.parts if other == number else passes[other].step.rests)
            parts["saved"] -= passes[other].step.kept_bytes
        peaks.append(Peak(sum(parts.values()), f"stage {number}, {fullest.phase}", fullest.op, dict(parts)))
    return max(peaks, key=lambda peak: peak.num_bytes)


FIRST = 0  # the micro-batch whose operators are shown


def tracks_of(plan: Plan, passes: Sequence[StagePass]) -> list[Track]:
    """Return one track per pipeline rank: its actions, its sends, the operators and messages of its first micro-batch
    (none of a backward in two parts), and the memory of a device. ``passes``: those of all stages. Raises PlanError for
    a plan that was not simulated."""
    simulated = simulated_order(plan)
    if simulated is None or plan.pipeline is None:
        raise PlanError("the steps of these stages were not simulated", fix='plan with search="dynamic_programming"')
    order, step = simulated
    seconds, place_of = [stage.seconds for stage in plan.pipeline.stages], places_of(plan)
    return [_track(place, order, step, seconds, place_of, passes) for place in range(len(order))]


def _track(
    place: int,
    order: Order,
    step: SimulatedPipeline,
    seconds: Sequence[StageSeconds],
    place_of: Sequence[int],
    passes: Sequence[StagePass],
) -> Track:
    timed = list(zip(order[place], step.starts[place], strict=True))
    actions: list[Event] = []
    inside: list[Event] = []
    rows: dict[str, list[Event]] = {"actions": actions, "to the next stage": [], "back to the stage before": []}
    last = 0.0
    for action, start in timed:
        taken, number = seconds[action.stage].of(action.kind), action.stage
        last = max(last, start + taken)
        actions.append(Event(f"stage {number}, {action}", action.kind, (), start, taken))
        to = number + 1 if action.kind == "forward" else number - 1
        if action.kind != "weight" and 0 <= to < len(seconds) and place_of[to] != place:
            title = "to the next stage" if to > number else "back to the stage before"
            name, send = f"micro-batch {action.micro_batch} to stage {to}", seconds[min(to, number)].send
            rows[title].append(Event(name, action.kind, (), start + taken, send))
        if action.micro_batch == FIRST and action.kind in ("forward", "backward"):
            inside += _inside(passes[number], action, start)
    numbers = [number for number, home in enumerate(place_of) if home == place]
    spmds = [passes[number].program.spmd for number in numbers]
    first = {f"micro-batch {FIRST}: {title}": events for title, events in by_stream(inside, spmds[0].mesh).items()}
    lines = {op.name: op.source for spmd in spmds for op in spmd.graph.ops}
    for number in numbers:
        actions.append(Event(f"stage {number}, update", "update", (), last, seconds[number].update))
        last += seconds[number].update
    memory = tuple(_memory(timed, seconds, numbers, passes))
    return Track(f"pipeline rank {place}, simulated", {t: e for t, e in (rows | first).items() if e}, lines, memory)


def _inside(stage: StagePass, action: Action, start: float) -> Iterator[Event]:
    events = [event for event in stage.step.events if event.part == action.kind]
    begins = 0.0 if action.kind == "forward" else stage.step.forward
    return (replace(event, start=start + event.start - begins) for event in events)


def _memory(
    timed: Sequence[tuple[Action, float]],
    seconds: Sequence[StageSeconds],
    stages: Sequence[int],
    passes: Sequence[StagePass],
) -> Iterator[Held]:
    """Yield the memory of a device during and after each action. ``stages``: those of its pipeline rank."""
    staying = Counter[str]()
    for number in stages:
        staying.update({**passes[number].step.rests, "saved": 0})
    in_flight = Counter[int]()

    def resting() -> Counter[str]:
        saved = sum(in_flight[number] * passes[number].step.kept_bytes for number in stages)
        return Counter({**staying, "saved": staying["saved"] + saved})

    yield 0.0, resting()
    for action, start in timed:
        pass_of_stage = passes[action.stage].step
        in_flight[action.stage] += action.kind == "forward"
        working = resting()
        working["temporaries"] += max(0, pass_of_stage.peak.num_bytes - sum(pass_of_stage.rests.values()))
        yield start, working
        in_flight[action.stage] -= action.kind in ("backward", "weight")
        yield start + seconds[action.stage].of(action.kind), resting()
