"""A simulated training step: when every operator and every message of a program runs.

The search adds seconds up; here they lie on a timeline, in the order in which a rank executes them. Operators run one
after the other on one stream. The messages of a group (the devices along the same axes) follow each other on a stream
of their own. Conversions of values are waited for on the spot. A bucket of gathered parameters leaves when the one
before it is waited for, a bucket of gradients as soon as it is complete, and is waited for where ``runtime.transit``
waits; a linear layer computes the gradient of its weight while that of its input is reduced.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from shardwise.costs.footprints import Footprints
from shardwise.costs.prices import LocalShapes, Prices
from shardwise.graph.ir import Op, Value
from shardwise.layouts.conversions import Collective
from shardwise.partition.buckets import Bucket
from shardwise.partition.instructions import departures, needed_instructions
from shardwise.partition.ledger import Peak
from shardwise.partition.linears import LinearStep
from shardwise.partition.memory import memory_of
from shardwise.partition.pricing import collective_seconds, priced_call
from shardwise.partition.program import LocalOp, Program, localize
from shardwise.partition.spmd import Spmd
from shardwise.partition.steps import Conversion, Step


@dataclass(frozen=True, slots=True)
class SimulatedStep:
    """``seconds``: of the whole step; ``compute``: of operators and the optimizer's update; ``communication``: of all
    messages; ``exposed``: how long operators wait for messages; ``peak``: the most memory."""

    seconds: float
    compute: float
    communication: float
    exposed: float
    peak: Peak

    @property
    def peak_bytes(self) -> int:
        return self.peak.num_bytes

    @property
    def peak_at(self) -> str:
        return self.peak.where

    @property
    def peak_parts(self) -> Mapping[str, int]:
        return self.peak.parts


def simulate(spmd: Spmd, prices: Prices, footprints: Footprints | None = None) -> SimulatedStep:
    """A step of the busiest rank."""
    program = localize(spmd, spmd.mesh.num_devices - 1)
    timeline = _Timeline(program, prices)
    timeline.run()
    peak = memory_of(spmd, prices, program=program, footprints=footprints).peak
    waited = timeline.now - timeline.compute
    return SimulatedStep(timeline.now, timeline.compute, timeline.communication, max(waited, 0.0), peak)


@dataclass
class _Timeline:
    """``now``: when the operators so far are done; ``free``: axes of a group -> when its messages so far are."""

    program: Program
    prices: Prices
    now: float = 0.0
    compute: float = 0.0
    communication: float = 0.0
    free: dict[tuple[str, ...], float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.spmd = self.program.spmd
        self.steps = {step.placed.op.name: step for step in self.spmd.steps if isinstance(step, Step)}
        self.instructions = needed_instructions(self.program)
        self.parameters = {s.value: s for s in self.spmd.graph.sources if s.kind == "parameter"}

    def run(self) -> None:
        after = departures(self.instructions)
        done: dict[int, float] = {}

        def depart(index: int | None) -> None:
            if index is not None:
                bucket = self.instructions[index]
                assert isinstance(bucket, Bucket), "what departs"
                done[index] = self.message(self.collectives(bucket, backward=False), self.now)

        depart(next(iter(after), None))
        for index, instruction in enumerate(self.instructions):
            if index in after:
                depart(after[index])
                self.now = max(self.now, done[index])
            elif isinstance(instruction, (Conversion, Bucket)):
                self.now = self.message(self.collectives(instruction, backward=False), self.now)
            else:
                self.work(self.prices.forward(*self.call(instruction)))
        if self.spmd.loss is not None:
            self.backward(after)
        for name in self.parameters:
            if name in self.spmd.graph.updated:
                numel = self.spmd.layouts[name].max_local_numel
                self.work(self.prices.update(self.spmd.graph.by_name[name], numel))

    def backward(self, after: dict[int, int | None]) -> None:
        """From the end of the program; messages of gradients arrive where their buckets departed in forward."""
        arrivals: dict[int, float] = {}
        for index in reversed(range(len(self.instructions))):
            instruction = self.instructions[index]
            if isinstance(instruction, (Conversion, Bucket)):
                done = self.message(self.collectives(instruction, backward=True), self.now)
                if isinstance(instruction, Bucket) and instruction.of_parameters:
                    arrivals[index] = done
                else:
                    self.now = done
                later = after.get(index)
                if later is not None:
                    self.now = max(self.now, arrivals.pop(later, 0.0))
            elif isinstance(instruction, LinearStep) and instruction.conversion is not None:
                seconds = self.prices.backward(*self.call(instruction))
                self.work(seconds / 2)
                done = self.message(self.collectives(instruction.conversion, backward=True), self.now)
                self.work(seconds / 2)
                self.now = max(self.now, done)
            else:
                self.work(self.prices.backward(*self.call(instruction)))
        self.now = max([self.now, *arrivals.values()])

    # -- what takes how long -------------------------------------------------------------------------------------------

    def work(self, seconds: float) -> None:
        self.now += seconds
        self.compute += seconds

    def message(self, collectives: Sequence[Collective], ready: float) -> float:
        """When collectives, one after the other, are done that could start at ``ready``."""
        for collective in collectives:
            seconds = collective_seconds([collective], self.prices)
            ready = max(ready, self.free.get(collective.axes, 0.0)) + seconds
            self.free[collective.axes] = ready
            self.communication += seconds
        return ready

    def collectives(self, instruction: Conversion | Bucket, *, backward: bool) -> tuple[Collective, ...]:
        """The messages of a conversion or a bucket, in the dtypes that are priced."""
        members = instruction.conversions if isinstance(instruction, Bucket) else (instruction,)
        if backward and not any(map(self.spmd.receives_gradient, members)):
            return ()
        first = members[0]
        value = self.spmd.graph.by_name[first.origin]
        own = self.prices.dtype(value).itemsize
        if backward:
            own = self.prices.grad_itemsize(value, first.origin in self.parameters)
        return tuple(
            Collective(item.kind, item.axes, item.num_bytes * own // first.itemsize)
            for item in instruction.collectives(backward=backward)
        )

    def call(self, instruction: LocalOp | LinearStep) -> tuple[Op, list[Value], list[Value], LocalShapes]:
        """The operator that an instruction executes; the sum with a bias is part of its product and takes no time."""
        op = instruction.op if isinstance(instruction, LocalOp) else instruction.product.op
        return priced_call(self.steps[op], self.spmd.graph)
