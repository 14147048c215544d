"""Write a simulated step of a pipeline as tracks of a trace: the actions and memory of every pipeline rank."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

from shardwise.costs.pipeline_simulation import Action, Order, SimulatedPipeline, StageSeconds
from shardwise.costs.timeline import Event
from shardwise.costs.trace import Held, Track, by_stream
from shardwise.errors import PlanError
from shardwise.plans.plan import Plan
from shardwise.report.stage_passes import StagePass, places_of, simulated_order

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
    """Return the operators and messages of an action that begins at ``start``."""
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
