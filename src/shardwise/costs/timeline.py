"""A simulated training step: when every operator and every message of a program runs.

The search adds seconds up; here they lie on a timeline, in the order in which a rank executes them. Operators run one
after the other on one stream. The messages of a group (the devices along the same axes) follow each other on a stream
of their own, and messages of parameters also where groups use the same links; the list says where a message leaves and
where it is waited for. Copies to the host and from there have a stream each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch._ops import OpOverload

from shardwise.costs.compute import assumed_backward, is_one_kernel
from shardwise.costs.fused_kernels import FusedKernels, fused_kernels
from shardwise.costs.kernels import KernelCall, KernelWork, PricedKernel, work_of
from shardwise.costs.ledger import Peak
from shardwise.costs.memory import ProgramParts, busiest_program, memory_of_program
from shardwise.costs.optimizers import is_on_host, states_of
from shardwise.costs.prices import Prices
from shardwise.costs.pricing import priced_call
from shardwise.costs.product_messages import FusedProductCost, works
from shardwise.graph.ir import Source
from shardwise.layouts.conversions import Collective
from shardwise.programs.fused_products import FusedProduct
from shardwise.programs.grad_accum_program import GradAccumProgram
from shardwise.programs.instructions import Arrive, Compute, Convert, Copy, Depart, Instruction, Land, sent_by
from shardwise.programs.rank_program import RankProgram
from shardwise.programs.spmd import SpmdProgram
from shardwise.programs.spmd_steps import OpStep
from shardwise.programs.state_groups import is_offloaded, state_groups
from shardwise.programs.vjp import Differentiate, Record, VjpCache

ONCE = "once a step"  # the part of events that a step of several passes has once
# Products are slower by this share while a copy runs (measured on an H100: 5 %).
BESIDE_COPIES = 0.05


@dataclass(frozen=True, slots=True)
class Event:
    """A kernel of an operator, a message of a group, or a copy. ``stream``: the axes of the group; empty: kernels.
    ``part``: "forward", "backward", "update" or, of several passes, "once a step" (a pass's share of it)."""

    name: str
    part: str
    stream: tuple[str, ...]
    start: float
    seconds: float
    num_bytes: int = 0


@dataclass(frozen=True, slots=True)
class SimulatedStep:
    """``seconds``: of the whole step; ``forward``: of its forward pass; ``compute``: of operators and the optimizer's
    update; ``communication``: of all messages; ``exposed``: how long operators wait for messages, or are slowed down by
    them; ``copy_wait``: how long they wait for copies from and to the host; ``cast_seconds``: of kernels that only cast
    sources and gradients between dtypes, and their starts; ``peak``: the most memory; ``events``: by
    their start on every stream; ``held``: (phase, operator) -> the most memory while it runs; ``kept_bytes``: what
    forward saves for backward; ``rests``: what is held between two passes, that included, by category."""

    seconds: float
    compute: float
    communication: float
    exposed: float
    peak: Peak
    forward: float = 0.0
    events: tuple[Event, ...] = ()
    held: Mapping[tuple[str, str], int] = field(default_factory=dict)
    kept_bytes: int = 0
    rests: Mapping[str, int] = field(default_factory=dict)
    copy_wait: float = 0.0
    cast_seconds: float = 0.0

    @property
    def peak_bytes(self) -> int:
        return self.peak.num_bytes

    @property
    def host_wait(self) -> float:
        """Return the seconds in which kernels wait for the host to start them."""
        return max(self.seconds - self.compute - self.exposed - self.copy_wait, 0.0)


def figures_of(step: SimulatedStep | None, name: str = "simulated_seconds") -> dict[str, Any]:
    """Return the fields of a ``Prediction`` that a simulated step gives. ``name``: that of its seconds."""
    if step is None:
        return {}
    waits = {"host_wait": step.host_wait, "message_wait": step.exposed, "copy_wait": step.copy_wait}
    waits["cast_seconds"] = step.cast_seconds
    return {name: step.seconds, **waits}


def accumulation_name(source: Source) -> str:
    return f"gradient of {source.names[0]}, added up"


def simulate(spmd: SpmdProgram, prices: Prices, vjp_cache: VjpCache | None = None) -> SimulatedStep:
    """Simulate a step of the busiest rank. ``vjp_cache``: traces that the programs of a model share."""
    return simulate_program(busiest_program(spmd, vjp_cache or VjpCache()), prices)


def simulate_program(
    program: RankProgram, prices: Prices, *, compiled: bool = False, graphs: bool = False
) -> SimulatedStep:
    """Simulate the step of a rank from its list; of a compiled program, whose sections were priced, as well. Of
    several passes it is one of them, with its share of what the step does once. ``compiled``: with the kernels that a
    compiler would make of the list; ``graphs``: whether these are CUDA graphs as well, between messages; the memory is
    that of the list."""
    parts = ProgramParts.of(program, prices)
    timeline = Timeline(program, prices, parts, compiled, graphs)
    timeline.halves()
    memory = memory_of_program(program, prices, parts)
    waited = timeline.now - timeline.compute - timeline.starved - timeline.copy_wait
    exposed, events = max(waited, 0.0), tuple(timeline.events)
    return SimulatedStep(
        timeline.now,
        timeline.compute,
        timeline.communication,
        exposed,
        memory.peak,
        timeline.forward,
        events,
        memory.held,
        memory.kept_bytes,
        memory.rests,
        timeline.copy_wait,
        timeline.cast_seconds,
    )


@dataclass
class Timeline:
    """A program's step, walked once. ``now``: when the kernels so far are done; ``host``: when the host has started
    them; ``starved``: how long they waited for it; ``copy_wait``: for copies from and to the host; ``free``: axes of a
    group -> when its messages so far are; ``links``: level of the cluster -> when its links have carried the messages
    of parameters so far; ``arrivals``: flight -> when its message is there; ``copied``: "host", "device" -> when the
    copies there are done so far, and likewise every copy by itself; ``recorded``: tape of a call that autograd keeps ->
    what its backward does; ``fused``: operators that are one kernel each way, of which ``done`` are those that have
    run. ``parts``: of the program, where they are there already. ``compiled``: whether a compiler makes the kernels,
    which are then ``kernels``; ``graphs``: whether the host starts those between two messages at once, of which the
    first has been (``in_graph``)."""

    program: RankProgram
    prices: Prices
    parts: ProgramParts | None = None
    compiled: bool = False
    graphs: bool = False
    now: float = 0.0
    host: float = 0.0
    forward: float = 0.0
    compute: float = 0.0
    starved: float = 0.0
    copy_wait: float = 0.0
    cast_seconds: float = 0.0
    communication: float = 0.0
    on_weights: float = 0.0  # of compute
    free: dict[tuple[str, ...], float] = field(default_factory=dict)
    links: dict[str, float] = field(default_factory=dict)
    recorded: dict[str, tuple[KernelWork, ...]] = field(default_factory=dict)
    done: set[tuple[str, bool, bool]] = field(default_factory=set)
    kernels: FusedKernels = field(default_factory=dict)
    arrivals: dict[str, float] = field(default_factory=dict)
    copied: dict[str, float] = field(default_factory=dict)
    part: str = "forward"
    events: list[Event] = field(default_factory=list)
    in_graph: bool = False

    def __post_init__(self) -> None:
        self.spmd = self.program.spmd
        steps = (step for step in self.spmd.steps if isinstance(step, OpStep))
        self.fused = {step.placed.op.name: step for step in steps if is_one_kernel(self.prices.device, step.placed.op)}
        self.parameters = {s.value: s for s in self.spmd.graph.sources if s.kind == "parameter"}

    def halves(self) -> tuple[float, float, float, float]:
        """Walk the step: the seconds of forward, of the operators' work on weights, of all backward, and of the update
        with what else a step does once (of several passes a pass's share of it)."""
        parts = self.parts or ProgramParts.of(self.program, self.prices)
        if parts.once is not None:
            self._share(parts.once)
        self.program = parts.each  # constants take no time in a step
        if self.compiled:
            alone = self.spmd.keyed_operators.union(self.fused)  # rows whose number changes are not compiled
            self.kernels = fused_kernels(self.program, lambda instruction: instruction.origin.op in alone)
        ahead = self.now
        self._walk(self.program.forward)
        self.forward = self.now - ahead
        self.part = "backward"
        self._walk(self.program.backward)
        self._add_up()
        backward = self.now - self.forward - ahead
        self.part = "update"
        self._update()
        return self.forward, self.on_weights, backward, self.now - self.forward - backward

    def _add_up(self) -> None:
        for source, name in self.program.gradients.items():
            if source in self.parameters and source in self.spmd.graph.updated:
                seconds = self.prices.added(self.program.forms[name].num_bytes)
                if seconds:
                    before = self.compute
                    self._start()
                    self._work(accumulation_name(self.parameters[source]), seconds)
                    self.on_weights += self.compute - before

    def _share(self, parts: GradAccumProgram) -> None:
        """Walk what a step does once: a pass's share of the seconds."""
        for part, instructions in ((parts.ahead, parts.ahead.forward), (parts.behind, parts.behind.backward)):
            once = Timeline(part, self.prices, part=ONCE)
            once._walk(instructions)
            share = 1 / self.prices.passes
            self.events += [
                replace(event, start=self.now + event.start * share, seconds=event.seconds * share)
                for event in once.events
            ]
            self.now += once.now * share
            self.host += once.now * share
            self.compute += once.compute * share
            self.starved += once.starved * share
            self.copy_wait += once.copy_wait * share
            self.cast_seconds += once.cast_seconds * share
            self.communication += once.communication * share

    def _update(self) -> None:
        """The optimizer; where its states wait on the host, group by group (``programs.state_groups``)."""
        graph, layouts = self.spmd.graph, self.spmd.layouts
        updated = [name for name in self.parameters if name in graph.updated]
        sizes = {name: self.program.forms[name].num_bytes for name in updated}
        on_host = is_on_host(self.prices.optimizer)
        groups = state_groups([*sizes.items()]) if on_host else [updated]
        came, left = [self._states("device", groups[0], sizes)] if groups else [], [self.now]
        for number, group in enumerate(groups):
            self._land(max(came[number], left[-1]))  # room for the states of two groups
            if number + 1 < len(groups):
                came.append(self._states("device", groups[number + 1], sizes))
            for name in group:
                self._work(name, self.prices.update_kernels(graph.by_name[name], layouts[name].max_local_numel))
            left.append(self._states("host", group, sizes))
        self._land(left[-1])

    def _states(self, to: str, group: Sequence[str], sizes: Mapping[str, int]) -> float:
        """When the states of a group that wait on the host are there, or back."""
        seconds = sum(self.prices.states_moved(sizes[name]) for name in group)
        moved = states_of(self.prices.optimizer) * sum(sizes[name] for name in group if is_offloaded(sizes[name]))
        return self._copied(f"states of {group[0]} to the {to}", to, seconds, moved) if seconds else self.now

    def _copied(self, name: str, to: str, seconds: float, num_bytes: int) -> float:
        """When a copy that could start now has landed."""
        landed = max(self.now, self.copied.get(to, 0.0)) + seconds
        self.copied[to] = landed
        self.events.append(Event(name, self.part, (f"copies to the {to}",), landed - seconds, seconds, num_bytes))
        return landed

    def _land(self, landed: float) -> None:
        """Wait for a copy."""
        self.copy_wait += max(landed - self.now, 0.0)
        self.now = max(self.now, landed)

    def _walk(self, instructions: tuple[Instruction, ...]) -> None:
        for instruction in instructions:
            if isinstance(instruction, Compute):
                before, begun = self.compute, self.now
                self._kernel(instruction)
                self.cast_seconds += self.now - begun if instruction.origin.part == "cast" else 0.0
                self.on_weights += self.compute - before if instruction.origin.part == "weight" else 0.0
                continue
            self.in_graph = False
            if isinstance(instruction, FusedProduct):
                self._fused(instruction)
            elif isinstance(instruction, Convert):
                self.now = self._message(sent_by(instruction), instruction.of_parameters)
            elif isinstance(instruction, Depart):
                self.arrivals[instruction.flight] = self._message(sent_by(instruction), instruction.of_parameters)
            elif isinstance(instruction, Arrive):
                self.now = max(self.now, self.arrivals.pop(instruction.flight))
                if self.graphs:  # a graph reads it from a place of its own
                    self._start()
                    read = sum(form.num_bytes for form in instruction.forms)
                    self._work("copy for a graph", self.prices.moved(2 * read))
            elif isinstance(instruction, Copy):
                size, name = instruction.form.num_bytes, f"{instruction.value} to the {instruction.to}"
                seconds = self.prices.device.host_seconds(size)
                self.copied[instruction.result] = self._copied(name, instruction.to, seconds, size)
            elif isinstance(instruction, Land):
                self._land(self.copied.pop(instruction.copy))

    # -- what takes how long -------------------------------------------------------------------------------------------

    def _kernel(self, instruction: Compute) -> None:
        """One kernel: it starts when the one before it is done, and the host has come to it."""
        if instruction.is_view:
            return
        is_kernel = isinstance(instruction.target, OpOverload)
        is_captured = self.graphs and is_kernel and instruction.origin.op not in self.spmd.keyed_operators
        if (step := self.fused.get(instruction.origin.op)) is not None:
            key = instruction.origin.op, instruction.origin.part == "forward", instruction.origin.again
            if key not in self.done:
                self.done.add(key)
                price = self.prices.forward if key[1] else self.prices.backward
                self._start(graphs=is_captured)
                self._work(key[0], price(*priced_call(step, self.spmd.graph)))
            return
        forms = self.program.forms
        results = [*instruction.forms, *(forms[name] for name in instruction.writes)]
        operands = [forms[name] for name in instruction.operands]
        call = KernelCall(instruction.target, instruction.args, instruction.kwargs)
        works: tuple[KernelWork, ...]
        if id(instruction) in self.kernels:
            works = self.kernels[id(instruction)]
        elif isinstance(call.target, Record):
            whole = work_of(KernelCall(*call.target.call), operands, results)
            self.recorded[instruction.results[-1]] = assumed_backward(whole, operands)
            works = (whole,)
        elif isinstance(call.target, Differentiate):
            works = self.recorded[instruction.operands[0]]
        elif not is_kernel and isinstance(call.target, PricedKernel):
            works = call.target.works
        else:
            works = (work_of(call, operands, results),)
        name = f"cast of {instruction.results[0]}" if instruction.origin.part == "cast" else instruction.origin.op
        for work in works:
            self._start(graphs=is_captured)
            self._work(name, self.prices.kernel(work))

    def _fused(self, instruction: FusedProduct) -> None:
        """A message and its products: at once where devices read each other's memory, else one after the other."""
        sent, forms, links = sent_by(instruction), self.program.forms, self.prices.links
        (collective,) = sent
        if not links.has_symmetric_memory(collective.axes):
            self.now = self._message(sent, False) if instruction.gathers else self.now
            for work in works(instruction, forms):
                self._start()
                self._work(instruction.origin.op, self.prices.kernel(work))
            self.now = self.now if instruction.gathers else self._message(sent, False)
            return
        parts = links.mesh.size_of(collective.axes)
        message = links.seconds(collective.kind, collective.axes, collective.num_bytes)
        barrier = self.prices.device.kernel_latency + links.cluster.levels[0].latency
        cost = FusedProductCost(instruction, forms, self.prices.device, parts, message, barrier)
        self.now = max(self.now, self.free.get(collective.axes, 0.0))
        self._start()
        begun = self.now
        self._work(instruction.origin.op, (1 + BESIDE_COPIES) * cost.products + cost.moves)
        # The rest of the kernels is started meanwhile, and the message may take longer.
        self.host += (cost.num_kernels - 1) * self.prices.device.launch
        end = max(self.now, begun + cost.seconds)
        self.starved += max(self.host - end, 0.0)
        self.now = max(end, self.host)
        event = Event(collective.kind, self.part, collective.axes, begun, message, collective.num_bytes)
        self.events.append(event)
        self.communication += message
        self.free[collective.axes] = self.now

    def _start(self, *, graphs: bool = False) -> None:
        """The host starts a kernel, which waits for it. Of a graph it starts the first one only."""
        self.host += 0.0 if graphs and self.in_graph else self.prices.device.launch
        self.in_graph = graphs
        self.starved += max(self.host - self.now, 0.0)
        self.now = max(self.now, self.host)

    def _work(self, name: str, seconds: float) -> None:
        beside = max((self.copied.get(to, 0.0) for to in ("host", "device")), default=0.0) - self.now
        seconds += BESIDE_COPIES * min(seconds, max(beside, 0.0))
        self.compute += seconds
        taken = self._beside_messages(seconds)
        self.events.append(Event(name, self.part, (), self.now, taken))
        self.now += taken

    def _beside_messages(self, seconds: float) -> float:
        """Return the duration of ``seconds`` of work that runs at the device's ``overlap`` rate while messages are in
        flight. The time lost counts as exposed."""
        sent, rate = max(self.free.values(), default=0.0) - self.now, self.prices.device.overlap
        if sent <= 0:
            return seconds
        return seconds / rate if seconds < rate * sent else seconds + (1 - rate) * sent

    def _message(self, collectives: tuple[Collective, ...], of_parameters: bool) -> float:
        """When collectives, one after the other, are done that could start now."""
        ready = self.now
        for collective in collectives:
            seconds = self.prices.links.seconds(collective.kind, collective.axes, collective.num_bytes)
            levels = self.prices.links.level_names(collective.axes) if of_parameters else ()
            start = max(ready, self.free.get(collective.axes, 0.0), *(self.links.get(level, 0.0) for level in levels))
            event = Event(collective.kind, self.part, collective.axes, start, seconds, collective.num_bytes)
            self.events.append(event)
            ready = start + seconds
            self.free[collective.axes] = ready
            self.links.update(dict.fromkeys(levels, ready))
            self.communication += seconds
        return ready
