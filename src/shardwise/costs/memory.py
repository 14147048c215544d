"""The memory of a training step on one rank: a walk over its list of instructions that counts what is live.

Storages are counted, not tensors: a view keeps its base alive. A value lives until the last instruction that reads it,
in forward or in backward; ``costs.message_memory`` says what exchanges hold besides.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from shardwise.costs.ledger import STAYING, Category, Ledger, LedgerTensor, Peak, Storage, static_bytes
from shardwise.costs.message_memory import Flight, MessageLedger, parts_of, stages_of
from shardwise.costs.optimizers import (
    Whole,
    decomposition_bytes,
    is_on_host,
    looks_at_matrices,
    state_bytes,
    states_of,
    temporary_bytes,
    whole_matrix_bytes,
)
from shardwise.costs.prices import Prices
from shardwise.costs.product_messages import product_bytes, symmetric_bytes
from shardwise.programs.casts import computed_name
from shardwise.programs.differentiate import differentiate
from shardwise.programs.fused_products import FusedProduct
from shardwise.programs.grad_accum_program import GradAccumProgram, repeated
from shardwise.programs.hoist_constants import with_constants_apart
from shardwise.programs.instructions import Arrive, Compute, Convert, Copy, Depart, Instruction
from shardwise.programs.program import busiest_rank, localize
from shardwise.programs.rank_program import RankProgram
from shardwise.programs.spmd import SpmdProgram
from shardwise.programs.state_groups import is_offloaded, state_groups
from shardwise.programs.vjp import VjpCache


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """Bytes of one rank. ``peak``: over the whole step; ``peak_of``: per phase; ``kept_bytes``: what is saved for
    backward at the end of forward; ``host_bytes``: what is pinned in the memory of the host for
    what waits there, of that and of the optimizer's states; ``over``: the most at every operator in turn, where that
    was asked for; ``held``: (phase, operator) -> the most while it runs."""

    peak: Peak
    peak_of: Mapping[str, Peak]
    kept_bytes: int
    host_bytes: int = 0
    over: tuple[Peak, ...] = ()
    held: Mapping[tuple[str, str], int] = field(default_factory=dict)

    @property
    def rests(self) -> dict[str, int]:
        """Return the bytes held between two micro-batches, with one saved, by category: at most those at work."""
        fullest = max(self.peak_of.values(), key=static_bytes)
        stays: dict[str, int] = {name: fullest.parts.get(name, 0) for name in STAYING}
        return {**stays, "saved": min(self.kept_bytes, self.peak.num_bytes - sum(stays.values()))}


def pinned_bytes(num_bytes: int) -> int:
    """Return the bytes that torch pins for a tensor: the next power of two."""
    return 1 << (num_bytes - 1).bit_length() if num_bytes else 0


def busiest_program(spmd: SpmdProgram, vjp_cache: VjpCache) -> RankProgram:
    return differentiate(localize(spmd, busiest_rank(spmd)), vjp_cache)


def memory_of(spmd: SpmdProgram, prices: Prices, *, vjp_cache: VjpCache | None = None) -> MemoryEstimate:
    """Return the memory of a training step of the rank that holds most. ``vjp_cache``: traces that the programs of a
    model share."""
    return memory_of_program(busiest_program(spmd, vjp_cache or VjpCache()), prices)


def memory_of_program(
    program: RankProgram, prices: Prices, parts: ProgramParts | None = None, *, over_time: bool = False
) -> MemoryEstimate:
    """Return the memory of one rank's training step. ``parts``: those of it, where they are there already;
    ``over_time``: whether to keep what is held at every operator, and not only the most."""
    parts = parts or ProgramParts.of(program, prices)
    ledger = Ledger(over=[] if over_time else None)
    return _Walk(parts.each, prices, parts.constants, parts.once, ledger=ledger).run()


@dataclass(frozen=True, eq=False)
class ProgramParts:
    """How often a program's parts run. ``constants``: once, ahead of all steps; ``once``: once in a step of several
    passes (None: it is one pass, or does nothing once); ``each``: in every pass."""

    constants: RankProgram
    once: GradAccumProgram | None
    each: RankProgram

    @staticmethod
    def of(program: RankProgram, prices: Prices) -> ProgramParts:
        once = repeated(program) if prices.passes > 1 and program.spmd.lifetimes.once else None
        divided = with_constants_apart(program if once is None else once.each)
        return ProgramParts(divided.constants, once, divided.step)


@dataclass
class _Walk:
    """``constants``: what makes values that stay from step to step (``programs.hoist_constants``); ``parts``: what a
    step of several passes does once, around ``program``, which is a pass."""

    program: RankProgram
    prices: Prices
    constants: RankProgram
    parts: GradAccumProgram | None = None
    tensors: dict[str, LedgerTensor] = field(default_factory=dict)
    ledger: Ledger = field(default_factory=Ledger)
    flights: dict[str, tuple[Flight, list[LedgerTensor]]] = field(default_factory=dict)
    host_bytes: int = 0
    sums: dict[str, Storage] = field(default_factory=dict)  # source -> its gradients of earlier passes

    def __post_init__(self) -> None:
        self.spmd = self.program.spmd
        self.graph = self.spmd.graph
        is_gloo = not self.prices.device.host_bandwidth  # ranks on CPUs
        coordinates = self.spmd.mesh.coordinates(self.program.rank)
        self.messages = MessageLedger(self.ledger, self.spmd.mesh, coordinates, is_gloo)
        self.parameters = {s.value: s for s in self.graph.sources if s.kind == "parameter"}
        self.fixed = {*self.constants.delivered}
        self.casts = {computed_name(name) for name in self.parameters} | ({*self.program.given} - self.fixed)
        self.saved = set(self.program.saved)
        parts = [self.program] if self.parts is None else [self.program, self.parts.behind]
        gradients = [pair for part in parts for pair in part.gradients.items()]
        self.gradients = {name for source, name in gradients if source in self.parameters}
        self.matrices = self._split_matrices()
        self.dying = self._last_reads()

    def _last_reads(self) -> dict[int, list[str]]:
        """Position, forward and backward counted through, -> the names that nothing reads after it."""
        last: dict[str, int] = {}
        for index, instruction in enumerate((*self.program.forward, *self.program.backward)):
            last.update(dict.fromkeys((*instruction.operands, *instruction.results), index))
        written = {value for _, value in self.program.mutations}
        stay = {*self.graph.source_of, *self.program.given, *self.program.delivered, *written, *self.gradients}
        dying: dict[int, list[str]] = {}
        for name, index in last.items():
            if name not in stay:
                dying.setdefault(index, []).append(name)
        return dying

    def run(self) -> MemoryEstimate:
        self._persistent()
        self._once(self.constants.forward, self.fixed)
        if self.parts is not None:
            self._once(self.parts.ahead.forward, self.program.given)
        for index, instruction in enumerate(self.program.forward):
            self._run(index, instruction)
        kept = self.ledger.live["saved"]
        self.ledger.phase = "backward"
        for name in self.program.cotangents:
            if name is not None:
                form = self.program.forms[name]
                self._name(name, LedgerTensor(form, self.ledger.new(form.num_bytes)))
        for index, instruction in enumerate(self.program.backward, len(self.program.forward)):
            self._run(index, instruction)
        self._update()
        return MemoryEstimate(
            max(self.ledger.peaks.values(), key=lambda peak: peak.num_bytes),
            self.ledger.peaks,
            kept,
            self.host_bytes,
            tuple(self.ledger.over or ()),
            self.ledger.held,
        )

    def _persistent(self) -> None:
        """Record the memory before a pass: sources, optimizer states, and gradients of earlier passes."""
        states, on_host = states_of(self.prices.optimizer), is_on_host(self.prices.optimizer)
        for source in self.graph.sources:
            form = self.program.forms[source.value]
            is_parameter = source.kind == "parameter"
            storage = self.ledger.hold(self.ledger.new(form.num_bytes, "parameters" if is_parameter else "inputs"))
            self.tensors[source.value] = LedgerTensor(form, storage)
            if is_parameter and source.value in self.graph.updated:
                shape = self.graph.by_name[source.value].shape  # read for optimizers of whole matrices only
                is_split = source.value in self.matrices
                kept_states = 0 if is_split else state_bytes(self.prices.optimizer, form.num_bytes, shape)
                away = on_host and is_offloaded(form.num_bytes) and self.prices.device.host_bandwidth > 0
                self.host_bytes += states * pinned_bytes(form.num_bytes) * away
                self.ledger.hold(self.ledger.new(kept_states * (not away), "optimizer states"))
                if self.prices.passes > 1:  # what earlier passes added up; their sum is what is updated with
                    gradient = self.program.gradients.get(source.value)
                    kept = form if gradient is None else self.program.forms[gradient]
                    self.sums[source.value] = self.ledger.hold(self.ledger.new(kept.num_bytes, "gradients"))

        if self.matrices:
            self.ledger.hold(self.ledger.new(self._whole_bytes()[0], "optimizer states"))

    def _split_matrices(self) -> dict[str, Whole]:
        """Return the split parameters that an optimizer updates whole, with their bytes and shapes."""
        if not looks_at_matrices(self.prices.optimizer):
            return {}
        whole = {
            name: self.graph.by_name[name].numel * self.graph.by_name[name].kept_dtype.itemsize
            for name in self.parameters
            if name in self.graph.updated
        }
        return {
            name: (size, self.graph.by_name[name].shape)
            for name, size in whole.items()
            if self.program.forms[name].num_bytes < size
        }

    def _whole_bytes(self) -> tuple[int, int]:
        shards = sum(self.program.forms[name].num_bytes for name in self.matrices)
        matrices, num_devices = [*self.matrices.values()], self.spmd.mesh.num_devices
        return whole_matrix_bytes(self.prices.optimizer, shards, matrices, num_devices)

    def _once(self, instructions: tuple[Instruction, ...], stays: Iterable[str]) -> None:
        """Run instructions once, before or after the passes of a step. ``stays``: names of values to keep."""
        last = {name: i for i, entry in enumerate(instructions) for name in (*entry.operands, *entry.results)}
        kept = {*stays, *self.graph.source_of}
        for index, instruction in enumerate(instructions):
            self._run(-1, instruction)
            for name in {*instruction.operands, *instruction.results} - kept:
                if last[name] == index:
                    self._forget(name)

    # -- instructions --------------------------------------------------------------------------------------------------

    def _run(self, index: int, instruction: Instruction) -> None:
        """``index``: its position in the step, forward and backward counted through; negative: it has none."""
        self.ledger.op = instruction.origin.op
        if isinstance(instruction, Compute):
            self._compute(instruction)
        elif isinstance(instruction, FusedProduct):
            self._fused(instruction)
        elif isinstance(instruction, Convert):
            self._convert(instruction)
        elif isinstance(instruction, Depart):
            self._depart(instruction)
        elif isinstance(instruction, Arrive):
            self._arrive(instruction)
        elif isinstance(instruction, Copy):
            self._copy(instruction)
        for name in self.dying.get(index, ()):
            self._forget(name)

    def _name(self, name: str, tensor: LedgerTensor) -> None:
        """A name for a tensor; the storage is what the name is, unless it was something already."""
        storage = self.ledger.hold(tensor.storage)
        category: Category = "saved" if name in self.saved else "gradients" if name in self.gradients else "temporaries"
        category = "parameters" if name in self.casts else "inputs" if name in self.fixed else category
        if storage.category in ("temporaries", "communication") and category != "temporaries":
            self.ledger.recategorize(storage, category)
        self.tensors[name] = LedgerTensor(self.program.forms.get(name, tensor.form), storage)

    def _forget(self, name: str) -> None:
        tensor = self.tensors.pop(name, None)
        if tensor is not None:
            self.ledger.drop(tensor.storage)

    def _compute(self, instruction: Compute) -> None:
        self.ledger.note(instruction.workspace)
        for name, form, shared in zip(instruction.results, instruction.forms, instruction.shares, strict=True):
            storage = self.ledger.new(form.num_bytes) if shared is None else self.tensors[shared].storage
            self._name(name, LedgerTensor(form, storage))

    def _fused(self, instruction: FusedProduct) -> None:
        """What is scattered is there as a whole. Values that lie in another order are there twice."""
        forms, turned = self.program.forms, instruction.is_turned
        made = turned * sum(form.num_bytes for form in instruction.forms)
        if not instruction.gathers:
            made = (1 + turned) * product_bytes(instruction, forms)
        self.ledger.note(symmetric_bytes(instruction, forms) + made)
        for name, form in zip(instruction.results, instruction.forms, strict=True):
            self._name(name, LedgerTensor(form, self.ledger.new(form.num_bytes)))

    def _convert(self, instruction: Convert) -> None:
        tensors = [self.tensors[name] for name in instruction.operands]
        if len(tensors) == 1:
            conversion = instruction.conversions[0]
            converted = self.messages.converted(
                tensors[0], conversion, backward=instruction.backward, in_place=instruction.overwrites
            )
            self._name(instruction.results[0], converted)
            return
        stages = stages_of(instruction.conversions, backward=instruction.backward)
        results = self.messages.through(self.messages.hold(tensors), stages, backward=instruction.backward)
        self._name_results(instruction.results, results)

    def _name_results(self, names: tuple[str, ...], tensors: list[LedgerTensor]) -> None:
        for name, tensor in zip(names, tensors, strict=True):
            self._name(name, tensor)
            tensor.storage.owners -= 1  # the name holds it from here

    def _depart(self, instruction: Depart) -> None:
        tensors = self.messages.hold([self.tensors[name] for name in instruction.operands])
        before, message, _ = parts_of(instruction.conversions, backward=instruction.backward)
        tensors = self.messages.through(tensors, before, backward=instruction.backward)
        in_place = instruction.overwrites and not before
        flight = self.messages.launch(tensors, message, instruction.backward, in_place=in_place)
        self.flights[instruction.flight] = flight, tensors
        for tensor in tensors:
            self.ledger.drop(tensor.storage)

    def _arrive(self, instruction: Arrive) -> None:
        flight, tensors = self.flights.pop(instruction.flight)
        _, message, after = parts_of(instruction.conversions, backward=instruction.backward)
        landed = self.messages.hold(self.messages.land(flight, tensors, message, instruction.backward))
        self._name_results(instruction.results, self.messages.through(landed, after, backward=instruction.backward))

    def _copy(self, copy: Copy) -> None:
        away = copy.to == "host" and self.prices.device.host_bandwidth > 0
        self.host_bytes += pinned_bytes(copy.form.num_bytes) * away
        self._name(copy.result, LedgerTensor(copy.form, self.ledger.new(0 if away else copy.form.num_bytes)))

    # -- the optimizer -------------------------------------------------------------------------------------------------

    def _update(self) -> None:
        """The optimizer with its own temporaries; this pass's gradients are added to those of earlier ones."""
        self.ledger.phase, self.ledger.op = "update", ""
        stored = {name: self.program.forms[name].num_bytes for name in self.parameters}
        if self.prices.passes > 1:  # they were added to those that stay, and are gone
            for name in self.gradients & self.tensors.keys():
                self._forget(name)
        stay = {*self.graph.source_of, *self.gradients, *self.fixed}
        for name in [name for name in self.tensors if name not in stay]:
            self._forget(name)
        if self.parts is not None:
            behind = self.parts.behind
            for source, name in self.parts.sums.items():
                self.tensors[name] = LedgerTensor(behind.forms[name], self.sums[source])
            self._once(behind.backward, behind.gradients.values())
        updated = [name for name in self.parameters if name in self.graph.updated]
        if updated:
            self.ledger.op = self.parameters[max(updated, key=lambda name: stored[name])].names[0]
        optimizer, foreach = self.prices.optimizer, self.prices.device.foreach
        if looks_at_matrices(optimizer):
            alone = [(stored[name], self.graph.by_name[name].shape) for name in updated if name not in self.matrices]
            temporaries = temporary_bytes(optimizer, [size for size, _ in alone], foreach=foreach)
            temporaries += decomposition_bytes(optimizer, alone)
            self.ledger.note(max(self._whole_bytes()[1] if self.matrices else 0, temporaries))
            return
        if not is_on_host(optimizer):
            self.ledger.note(temporary_bytes(optimizer, [stored[name] for name in updated], foreach=foreach))
            return
        groups = [[stored[name] for name in group] for group in state_groups([(n, stored[n]) for n in updated])]
        here = [
            states_of(optimizer) * sum(filter(is_offloaded, group)) for group in groups
        ]  # states that came, two groups
        for group, arrived, coming in zip(groups, here, [*here[1:], 0], strict=True):
            states = self.ledger.hold(self.ledger.new(arrived + coming, "optimizer states"))
            self.ledger.note(temporary_bytes(optimizer, group, foreach=foreach))
            self.ledger.drop(states)
