"""The memory of a training step on one rank: a walk over its program, forward and backward, that counts what is live.

Storages are counted, not tensors: a view keeps its base alive. In forward a value lives until its last use, or until
the backward of an operator that keeps it (``costs.footprints`` asks autograd which); backward goes through the program
from its end, drops what was kept, and collects gradients. ``partition.message_memory`` says what conversions hold.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

from shardwise.costs.footprints import Call, Footprints, Form, Made, numbered
from shardwise.costs.prices import OPTIMIZER_STATES, Prices
from shardwise.partition.buckets import Bucket
from shardwise.partition.instructions import (
    Instruction,
    call_of,
    departures,
    last_uses,
    needed_instructions,
    operator_of,
)
from shardwise.partition.ledger import Ledger, Peak, Storage, Tensor
from shardwise.partition.linears import LinearStep
from shardwise.partition.message_memory import Flight, Messages, parts_of, stages_of
from shardwise.partition.program import LocalOp, Program, busiest_rank, localize, overwritable
from shardwise.partition.spmd import Spmd
from shardwise.partition.steps import Conversion


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of one rank. ``peak``: over the whole step; ``peak_of``: per phase; ``kept_bytes``: what autograd keeps at
    the end of forward."""

    peak: Peak
    peak_of: Mapping[str, Peak]
    kept_bytes: int


def memory_of(
    spmd: Spmd, prices: Prices, *, program: Program | None = None, footprints: Footprints | None = None
) -> Memory:
    """The memory of a training step. ``program``: of the rank that is looked at, by default the one that holds
    most; ``footprints``: those known already, which many programs of a model share."""
    program = program or localize(spmd, busiest_rank(spmd))
    return _Walk(program, prices, footprints or Footprints()).run()


@dataclass
class _Kept:
    """What an operator needs in backward."""

    call: Call
    names: tuple[str, ...]
    forms: tuple[Form, ...]
    storages: list[Storage]


@dataclass
class _Returning:
    """Gradients of a bucket on their way: the forms of its tensors where the message left."""

    bucket: Bucket
    tensors: list[Tensor]
    flight: Flight


@dataclass
class _Walk:
    program: Program
    prices: Prices
    footprints: Footprints
    tensors: dict[str, Tensor] = field(default_factory=dict)
    cotangents: dict[str, Tensor] = field(default_factory=dict)
    ledger: Ledger = field(default_factory=Ledger)

    def __post_init__(self) -> None:
        self.spmd = self.program.spmd
        self.graph = self.spmd.graph
        self.messages = Messages(self.ledger, self.spmd.mesh, self.spmd.mesh.coordinates(self.program.rank))
        self.kept: dict[int, _Kept] = {}
        self.flights: dict[int, Flight] = {}
        self.returning: dict[int, _Returning] = {}
        self.overwritable = overwritable(self.program)
        self.parameters = {s.value: s for s in self.graph.sources if s.kind == "parameter"}
        self.instructions = needed_instructions(self.program)
        self.last_use = last_uses(self.instructions, self.spmd)
        self.after = departures(self.instructions)

    # -- the step ------------------------------------------------------------------------------------------------------

    def run(self) -> Memory:
        self._persistent()
        self._depart(next(iter(self.after), None))
        for index, instruction in enumerate(self.instructions):
            self._depart(self.after.get(index))
            self.ledger.op = operator_of(instruction)
            self._forward(index, instruction)
            for name in self.last_use.get(index, ()):
                self._forget(name)
        kept = self.ledger.live["saved"]
        self.ledger.phase = "backward"
        self._backward_all()
        self._update()
        return Memory(max(self.ledger.peaks.values(), key=lambda peak: peak.num_bytes), self.ledger.peaks, kept)

    def _persistent(self) -> None:
        """What is there before the step: sources, and optimizer states."""
        states = OPTIMIZER_STATES[self.prices.optimizer]
        for source in self.graph.sources:
            value = self.graph.by_name[source.value]
            shape = self.messages.shape(self.spmd.layouts[source.value])
            dtype = self.prices.dtype(value) if source.kind in ("parameter", "input") else value.dtype
            form = Form.contiguous(shape, dtype, source.trainable and value.requires_grad)
            is_parameter = source.kind == "parameter"
            storage = self.ledger.hold(self.ledger.new(form.num_bytes, "parameters" if is_parameter else "inputs"))
            self.tensors[source.value] = Tensor(form, storage)
            if is_parameter:
                stored = prod(shape) * self.prices.stored_itemsize(value)
                if self.prices.stored_itemsize(value) != dtype.itemsize:  # what is computed with is a cast of it
                    self.ledger.hold(self.ledger.new(stored, "parameters"))
                if source.value in self.graph.updated:
                    self.ledger.hold(self.ledger.new(states * stored, "optimizer states"))

    def _forget(self, name: str) -> None:
        tensor = self.tensors.pop(name, None)
        if tensor is not None:
            self.ledger.drop(tensor.storage)

    # -- forward -------------------------------------------------------------------------------------------------------

    def _forward(self, index: int, instruction: Instruction) -> None:
        if isinstance(instruction, Conversion):
            tensor = self.tensors[instruction.value]
            free = self.overwritable.get(instruction.result, (False, False))[0]
            made = self.messages.converted(tensor, instruction, backward=False, in_place=free)
            self.ledger.hold(made.storage)
            self._bind(instruction.result, made, tensor.form.requires_grad and instruction.differentiable)
        elif isinstance(instruction, Bucket):
            self._forward_bucket(index, instruction)
        else:
            self._forward_call(index, instruction)

    def _bind(self, name: str, tensor: Tensor, requires_grad: bool) -> None:
        """A name for a tensor that is held already."""
        form = tensor.form
        self.tensors[name] = Tensor(Form(form.shape, form.stride, form.dtype, requires_grad), tensor.storage)

    def _forward_call(self, index: int, instruction: LocalOp | LinearStep) -> None:
        target, args, kwargs, results = call_of(instruction)
        call, names = numbered(target, args, kwargs)
        operands = [self.tensors[name] for name in names]
        forms = tuple(tensor.form for tensor in operands)
        own = self.footprints.forward(call, forms)
        self.ledger.note(own.peak_bytes)
        made: list[Storage] = []
        for item in own.results:
            made.append(self.ledger.hold(self._memory_of(item, [t.storage for t in operands], made)))
        kept = [operands[i].storage if kind == "operand" else made[i] for kind, i in own.saved]
        if own.saved_bytes:
            kept.append(self.ledger.new(own.saved_bytes))
        if any(item.form.requires_grad for item in own.results):
            for storage in kept:
                self.ledger.keep(storage)
            self.kept[index] = _Kept(call, names, forms, kept)
        for name, item, storage in zip(results, own.results, made, strict=True):
            self.tensors[name] = Tensor(item.form, storage)

    def _memory_of(self, item: Made, operands: Sequence[Storage], results: Sequence[Storage]) -> Storage:
        if item.shares is None:
            return self.ledger.new(item.num_bytes)
        kind, position = item.shares
        return operands[position] if kind != "result" else results[position]

    # -- backward ------------------------------------------------------------------------------------------------------

    def _backward_all(self) -> None:
        loss = self.spmd.loss
        if loss is None:
            return
        form = self.tensors[loss].form
        self.cotangents[loss] = Tensor(form, self.ledger.hold(self.ledger.new(form.num_bytes)))
        for name in [name for name in self.tensors if name not in self.graph.source_of and name != loss]:
            self._forget(name)
        for index in reversed(range(len(self.instructions))):
            instruction = self.instructions[index]
            self.ledger.op = operator_of(instruction)
            if isinstance(instruction, Conversion):
                cotangent = self.cotangents.pop(instruction.result, None)
                if cotangent is not None:
                    free = self.overwritable.get(instruction.result, (False, False))[1]
                    made = self.messages.converted(cotangent, instruction, backward=True, in_place=free)
                    self._arrive(instruction.value, made)
                    self.ledger.drop(cotangent.storage)
            elif isinstance(instruction, Bucket):
                self._backward_bucket(index, instruction)
                later = self.after.get(index)
                if later is not None:
                    self._land_gradients(later)
            else:
                self._backward_call(index, instruction)
        for index in sorted(self.returning, reverse=True):
            self._land_gradients(index)

    def _backward_call(self, index: int, instruction: LocalOp | LinearStep) -> None:
        kept = self.kept.pop(index, None)
        if kept is None:
            return
        given = [self.cotangents.pop(name, None) for name in call_of(instruction)[3]]
        if any(given):
            forms = tuple(None if tensor is None else tensor.form for tensor in given)
            own = self.footprints.backward(kept.call, kept.forms, forms)
            self.ledger.note(own.peak_bytes)
            made: dict[int, Storage] = {}
            for position, item in enumerate(own.cotangents):
                if item is None:
                    continue
                if item.shares is None:
                    storage = self.ledger.new(item.num_bytes)
                elif item.shares[0] == "cotangent":
                    tensor = given[item.shares[1]]
                    assert tensor is not None, "a cotangent that was given"
                    storage = tensor.storage
                else:
                    storage = made[item.shares[1]]
                made[position] = self.ledger.hold(storage)
            # What the call was given is gone when its results reach their places.
            for tensor in given:
                if tensor is not None:
                    self.ledger.drop(tensor.storage)
            for storage in kept.storages:
                self.ledger.drop(storage, kept=True)
            for position, storage in made.items():
                item = own.cotangents[position]
                assert item is not None, "made for an operand"
                self._add(kept.names[position], Tensor(item.form, storage))
            return
        for storage in kept.storages:
            self.ledger.drop(storage, kept=True)

    def _arrive(self, name: str, tensor: Tensor) -> None:
        """A cotangent that nobody holds yet reaches a value."""
        self.ledger.hold(tensor.storage)
        self._add(name, tensor)

    def _add(self, name: str, tensor: Tensor) -> None:
        """A cotangent, held already, is added to what a value has got before; parameters get their gradients."""
        before = self.cotangents.get(name)
        if before is not None:
            alone = before.storage.owners == 1 and not before.storage.keepers
            if alone:  # added in place
                self.ledger.drop(tensor.storage)
                return
            total = self.ledger.hold(
                self.ledger.new(Form.contiguous(tensor.form.shape, tensor.form.dtype, False).num_bytes)
            )
            self.ledger.drop(before.storage)
            self.ledger.drop(tensor.storage)
            self.cotangents[name] = Tensor(Form.contiguous(tensor.form.shape, tensor.form.dtype, False), total)
        else:
            self.cotangents[name] = tensor
        if name in self.parameters:
            self._accumulate(name)

    def _accumulate(self, name: str) -> None:
        """The gradient of a parameter: the cotangent itself where nothing else holds it, or a copy."""
        tensor = self.cotangents[name]
        value = self.graph.by_name[name]
        storage = tensor.storage
        if tensor.form.stride != self.tensors[name].form.stride and not tensor.form.is_contiguous:
            storage = self.ledger.hold(self.ledger.new(prod(tensor.form.shape) * tensor.form.dtype.itemsize))
            self.ledger.drop(tensor.storage)
        stored = self.prices.stored_itemsize(value)
        if stored != tensor.form.dtype.itemsize:
            own = self.ledger.hold(self.ledger.new(prod(tensor.form.shape) * stored))
            self.ledger.drop(storage)
            storage = own
        self.ledger.recategorize(storage, "gradients")
        self.cotangents[name] = Tensor(tensor.form, storage)

    def _update(self) -> None:
        """The optimizer goes from parameter to parameter, with one temporary tensor of its size (the denominator of
        Adam) where there are states."""
        self.ledger.phase, self.ledger.op = "update", ""
        for name in [name for name in self.tensors if name not in self.graph.source_of]:
            self._forget(name)
        for name in [name for name in self.cotangents if name not in self.parameters]:
            self.ledger.drop(self.cotangents.pop(name).storage)
        own = [
            (prod(self.tensors[name].form.shape) * self.prices.stored_itemsize(self.graph.by_name[name]), source)
            for name, source in self.parameters.items()
            if name in self.graph.updated
        ]
        largest, source = max(own, key=lambda item: item[0], default=(0, None))
        self.ledger.op = source.names[0] if source is not None else ""
        self.ledger.note(largest if OPTIMIZER_STATES[self.prices.optimizer] else 0)

    # -- buckets -------------------------------------------------------------------------------------------------------

    def _depart(self, index: int | None) -> None:
        if index is None:
            return
        bucket = self.instructions[index]
        assert isinstance(bucket, Bucket), "what departs"
        self.ledger.op = operator_of(bucket)
        tensors = self.messages.held([self.tensors[c.value] for c in bucket.conversions])
        before, message, _ = parts_of(bucket, backward=False)
        tensors = self.messages.through(tensors, before, backward=False)
        self.flights[index] = self.messages.launch(tensors, message, backward=False)
        for tensor in tensors:
            self.ledger.drop(tensor.storage)

    def _forward_bucket(self, index: int, bucket: Bucket) -> None:
        given = [self.tensors[c.value] for c in bucket.conversions]
        flight = self.flights.pop(index, None)
        if flight is None:
            stages = stages_of(bucket, backward=False)
            made = self.messages.through(self.messages.held(given), stages, backward=False)
        else:
            _, message, after = parts_of(bucket, backward=False)
            landed = self.messages.held(self.messages.land(flight, given, message, backward=False))
            made = self.messages.through(landed, after, backward=False)
        for conversion, source, tensor in zip(bucket.conversions, given, made, strict=True):
            self._bind(conversion.result, tensor, source.form.requires_grad and conversion.differentiable)

    def _backward_bucket(self, index: int, bucket: Bucket) -> None:
        """Cotangents wait for each other, and leave together; those of parameters are not waited for."""
        members = tuple(c for c in bucket.conversions if c.result in self.cotangents)
        if not members:
            return
        bucket = Bucket(members, bucket.of_parameters)
        tensors = [self.cotangents.pop(c.result) for c in members]
        before, message, _ = parts_of(bucket, backward=True)
        if bucket.of_parameters and message:
            tensors = self.messages.through(tensors, before, backward=True)
            self.returning[index] = _Returning(bucket, tensors, self.messages.launch(tensors, message, backward=True))
            for tensor in tensors:
                self.ledger.drop(tensor.storage)
            return
        made = self.messages.through(tensors, stages_of(bucket, backward=True), backward=True)
        for conversion, tensor in zip(members, made, strict=True):
            self._add(conversion.value, tensor)

    def _land_gradients(self, index: int) -> None:
        """The gradients of a bucket have arrived."""
        own = self.returning.pop(index, None)
        if own is None:
            return
        self.ledger.op = operator_of(own.bucket)
        _, message, after = parts_of(own.bucket, backward=True)
        landed = self.messages.held(self.messages.land(own.flight, own.tensors, message, backward=True))
        made = self.messages.through(landed, after, backward=True)
        for conversion, tensor in zip(own.bucket.conversions, made, strict=True):
            self._add(conversion.value, tensor)
