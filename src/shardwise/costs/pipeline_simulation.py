"""A simulated step of a pipeline: when every stage works on every micro-batch, in the order of its schedule.

A place runs its actions one after another. A forward waits for what the stage before sends, a backward for the
cotangents of the stage behind, the work on weights for nothing but its own place. What no place works at is a bubble.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from shardwise.costs.memory import busiest_program
from shardwise.costs.prices import Prices
from shardwise.costs.timeline import Timeline
from shardwise.programs.spmd import SpmdProgram
from shardwise.programs.vjp import VjpCache

# What a stage does with a micro-batch: forward, the whole backward, or its parts for cotangents (input) and for
# parameters (weight).
Kind = Literal["forward", "backward", "input", "weight"]


@dataclass(frozen=True, slots=True)
class Action:
    """What a place does at once."""

    stage: int
    kind: Kind
    micro_batch: int

    def __str__(self) -> str:
        part = f"backward ({self.kind} part)" if self.kind in ("input", "weight") else self.kind
        return f"{part} of micro-batch {self.micro_batch}"


Order = tuple[tuple[Action, ...], ...]  # per place


@dataclass(frozen=True, slots=True)
class StageSeconds:
    """Of one micro-batch: ``forward``; of its backward ``input`` and ``weight``, which are the whole together;
    ``send``, until what it makes is at the next stage (a cotangent takes as long back). ``update``: of a step's
    optimizer."""

    forward: float
    input: float
    weight: float
    send: float
    update: float

    def of(self, kind: Kind) -> float:
        """Return the seconds of an action."""
        if kind == "backward":
            return self.input + self.weight
        return self.forward if kind == "forward" else self.input if kind == "input" else self.weight


@dataclass(frozen=True, slots=True)
class StagePrediction:
    """What a stage is expected to take per micro-batch (seconds forward and backward), the most memory of a device with
    all of its micro-batches in flight, and what it sends to the next stage per device; ``bubble``: the share of the
    step in which its place has nothing to do. ``weight``: of backward, the part for parameters; ``send``: the seconds
    of what it sends; ``update``: those of the optimizer, once a step."""

    forward: float
    backward: float
    peak_bytes: float
    sent_bytes: float
    bubble: float
    weight: float = 0.0
    send: float = 0.0
    update: float = 0.0

    @property
    def seconds(self) -> StageSeconds:
        return StageSeconds(self.forward, self.backward - self.weight, self.weight, self.send, self.update)


@dataclass(frozen=True, slots=True)
class PipelinePrediction:
    """A simulated step: its seconds, and the share of all places' time in which they wait. ``bound_seconds``: what no
    order of these stages on these places takes less than (0: not known); ``memory_bytes``: the most that a device
    holds, with all stages of its place (0: not known); ``compiled_seconds``: with the kernels that a compiler makes
    (0: the programs run eager)."""

    step_seconds: float
    bubble: float
    bound_seconds: float
    stages: tuple[StagePrediction, ...]
    memory_bytes: float = 0.0
    compiled_seconds: float = 0.0

    @property
    def default_seconds(self) -> float:
        """Return the seconds of a step as programs run by default: compiled on CUDA, eager elsewhere."""
        return self.compiled_seconds or self.step_seconds


@dataclass(frozen=True, slots=True)
class SimulatedPipeline:
    """``seconds``: of the step, updates included; ``busy``: per place the seconds in which it works; ``starts``: when
    every action of every place begins; ``in_flight``: per stage the most micro-batches between forward and backward."""

    seconds: float
    busy: tuple[float, ...]
    starts: tuple[tuple[float, ...], ...]
    in_flight: tuple[int, ...]

    def bubble(self, place: int) -> float:
        """Return the share of the step in which a place waits."""
        return 1 - self.busy[place] / self.seconds if self.seconds else 0.0

    @property
    def bubbles(self) -> float:
        return sum(map(self.bubble, range(len(self.busy)))) / len(self.busy)


def simulate_pipeline(order: Order, stages: Sequence[StageSeconds]) -> SimulatedPipeline:
    """Simulate a step in an order. Raises ValueError for one in which places wait for each other for ever."""
    place_of = {action.stage: place for place, actions in enumerate(order) for action in actions}
    ends: dict[tuple[int, Kind, int], float] = {}
    starts: list[list[float]] = [[] for _ in order]
    free, busy = [0.0] * len(order), [0.0] * len(order)
    flying, most = [0] * len(stages), [0] * len(stages)
    pending = sum(map(len, order))
    while pending:
        before = pending
        for place, actions in enumerate(order):
            while len(starts[place]) < len(actions):
                action = actions[len(starts[place])]
                ready = _ready(action, ends, stages, place_of)
                if ready is None:
                    break
                start = max(ready, free[place])
                starts[place].append(start)
                seconds = stages[action.stage].of(action.kind)
                free[place], busy[place] = start + seconds, busy[place] + seconds
                ends[action.stage, action.kind, action.micro_batch] = free[place]
                flying[action.stage] += {"forward": 1, "backward": -1, "weight": -1}.get(action.kind, 0)
                most[action.stage] = max(most[action.stage], flying[action.stage])
                pending -= 1
        if pending == before:
            raise ValueError("the order of a schedule deadlocks: ranks wait for each other")
    for number, stage in enumerate(stages):
        free[place_of[number]] += stage.update
        busy[place_of[number]] += stage.update
    return SimulatedPipeline(max(free), tuple(busy), tuple(map(tuple, starts)), tuple(most))


def _ready(
    action: Action, ends: dict[tuple[int, Kind, int], float], stages: Sequence[StageSeconds], place_of: dict[int, int]
) -> float | None:
    """When what an action needs is there; None: not known yet."""
    stage, micro_batch = action.stage, action.micro_batch
    if action.kind == "weight":
        return ends.get((stage, "input", micro_batch))
    if action.kind == "forward":
        if stage == 0:
            return 0.0
        done = ends.get((stage - 1, "forward", micro_batch))
        return None if done is None else done + _between(stage - 1, stages, place_of)
    own_forward = ends.get((stage, "forward", micro_batch))
    if own_forward is None or stage == len(stages) - 1:
        return own_forward
    kinds: tuple[Kind, ...] = ("backward", "input")
    later_ends = [ends[stage + 1, kind, micro_batch] for kind in kinds if (stage + 1, kind, micro_batch) in ends]
    return max(own_forward, later_ends[0] + _between(stage, stages, place_of)) if later_ends else None


def _between(stage: int, stages: Sequence[StageSeconds], place_of: dict[int, int]) -> float:
    return 0.0 if place_of[stage] == place_of[stage + 1] else stages[stage].send


def stage_seconds(
    spmd: SpmdProgram, prices: Prices, send: float, vjp_cache: VjpCache, *, compiled: bool = False
) -> StageSeconds:
    """Return the seconds of a stage's program on its busiest rank."""
    program = busiest_program(spmd, vjp_cache)
    timeline = Timeline(program, prices, compiled=compiled)
    forward, weight, backward, update = timeline.halves()
    return StageSeconds(forward, backward - weight, weight, send, update * prices.passes)


def send_seconds(prices: Prices, num_devices: int, num_bytes: float) -> float:
    """Seconds of a message to the device ``num_devices`` further on, while all devices send one."""
    levels = prices.links.cluster.levels
    size = 1
    for level in levels:
        size *= level.size
        if num_devices < size:
            break
    return level.launch + level.latency + num_bytes * level.shared_by / level.link_bandwidth(level.size)
