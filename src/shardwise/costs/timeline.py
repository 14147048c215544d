"""A simulated training step: when every operator and every message of a program runs.

The search adds seconds up; here they lie on a timeline, in the order in which a rank executes them. Operators run one
after the other on one stream. The messages of a group (the devices along the same axes) follow each other on a stream
of their own; the list says where a message leaves and where it is waited for.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from shardwise.costs.ledger import Peak
from shardwise.costs.memory import busiest_program, memory_of_program
from shardwise.costs.prices import LocalShapes, Prices
from shardwise.costs.pricing import collective_seconds, priced_call
from shardwise.graph.ir import Op, Value
from shardwise.layouts.conversions import Collective
from shardwise.programs.instructions import Arrive, Compute, Convert, Depart, Instruction, sent_by
from shardwise.programs.rank_program import Program
from shardwise.programs.spmd import Spmd
from shardwise.programs.steps import Step
from shardwise.programs.vjp import Kinds


@dataclass(frozen=True, slots=True)
class Event:
    """An operator, or a message of a group. ``stream``: the axes of the group; empty: operators. ``part``: "forward",
    "backward" or "update"."""

    name: str
    part: str
    stream: tuple[str, ...]
    start: float
    seconds: float
    num_bytes: int = 0


@dataclass(frozen=True, slots=True)
class SimulatedStep:
    """``seconds``: of the whole step; ``compute``: of operators and the optimizer's update; ``communication``: of all
    messages; ``exposed``: how long operators wait for messages; ``peak``: the most memory; ``events``: by their start
    on every stream."""

    seconds: float
    compute: float
    communication: float
    exposed: float
    peak: Peak
    events: tuple[Event, ...] = ()

    @property
    def peak_bytes(self) -> int:
        return self.peak.num_bytes


def simulate(spmd: Spmd, prices: Prices, kinds: Kinds | None = None) -> SimulatedStep:
    """A step of the busiest rank. ``kinds``: those traced already."""
    program = busiest_program(spmd, kinds or Kinds())
    timeline = _Timeline(program, prices)
    timeline.run()
    peak = memory_of_program(program, prices).peak
    waited = timeline.now - timeline.compute
    exposed, events = max(waited, 0.0), tuple(timeline.events)
    return SimulatedStep(timeline.now, timeline.compute, timeline.communication, exposed, peak, events)


@dataclass
class _Timeline:
    """``now``: when the operators so far are done; ``free``: axes of a group -> when its messages so far are;
    ``arrivals``: flight -> when its message is there."""

    program: Program
    prices: Prices
    now: float = 0.0
    compute: float = 0.0
    communication: float = 0.0
    free: dict[tuple[str, ...], float] = field(default_factory=dict)
    arrivals: dict[str, float] = field(default_factory=dict)
    part: str = "forward"
    events: list[Event] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.spmd = self.program.spmd
        self.steps = {step.placed.op.name: step for step in self.spmd.steps if isinstance(step, Step)}
        self.parameters = {s.value: s for s in self.spmd.graph.sources if s.kind == "parameter"}

    def run(self) -> None:
        self._walk(self.program.forward)
        self.part = "backward"
        self._walk(self.program.backward)
        self.part = "update"
        for name in self.parameters:
            if name in self.spmd.graph.updated:
                numel = self.spmd.layouts[name].max_local_numel
                self._work(name, self.prices.update(self.spmd.graph.by_name[name], numel))

    def _walk(self, instructions: tuple[Instruction, ...]) -> None:
        parts = {(i.origin.op, i.origin.part) for i in instructions if isinstance(i, Compute)}
        done: set[tuple[str, str]] = set()
        for instruction in instructions:
            if isinstance(instruction, Compute):
                key = instruction.origin.op, instruction.origin.part
                if key[1] == "cast":
                    self._work(f"cast of {instruction.results[0]}", self._cast(instruction))
                elif key not in done and key[0] in self.steps:
                    both = {(key[0], "input"), (key[0], "weight")} <= parts
                    self._work(key[0], self._seconds(*key, both=both))
                done.add(key)
            elif isinstance(instruction, Convert):
                self.now = self._message(sent_by(instruction))
            elif isinstance(instruction, Depart):
                self.arrivals[instruction.flight] = self._message(sent_by(instruction))
            elif isinstance(instruction, Arrive):
                self.now = max(self.now, self.arrivals.pop(instruction.flight))

    # -- what takes how long -------------------------------------------------------------------------------------------

    def _seconds(self, op: str, part: str, *, both: bool) -> float:
        """Seconds of one part of an operator. Backward is divided in halves where it has two parts. The sum with a bias
        is part of its product and takes no time."""
        call = self._call(op)
        if part == "forward":
            return self.prices.forward(*call)
        return self.prices.backward(*call) / (2 if both else 1)

    def _cast(self, cast: Compute) -> float:
        """Seconds of a cast: what it reads, and what it writes."""
        (operand,), (form,) = cast.operands, cast.forms
        return self.prices.moved(self.program.forms[operand].num_bytes + form.num_bytes)

    def _work(self, name: str, seconds: float) -> None:
        self.events.append(Event(name, self.part, (), self.now, seconds))
        self.now += seconds
        self.compute += seconds

    def _message(self, collectives: tuple[Collective, ...]) -> float:
        """When collectives, one after the other, are done that could start now."""
        ready = self.now
        for collective in collectives:
            seconds = collective_seconds([collective], self.prices)
            start = max(ready, self.free.get(collective.axes, 0.0))
            own = Event(collective.kind, self.part, collective.axes, start, seconds, collective.num_bytes)
            self.events.append(own)
            ready = start + seconds
            self.free[collective.axes] = ready
            self.communication += seconds
        return ready

    def _call(self, op: str) -> tuple[Op, list[Value], list[Value], LocalShapes]:
        return priced_call(self.steps[op], self.spmd.graph)
