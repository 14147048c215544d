"""The memory of a training step on one rank: a walk over its program, forward and backward, that counts what is live.

Storages are counted, not tensors: a view keeps its base alive. In forward a value lives until its last use, or until
the backward of an operator that keeps it (``costs.footprints`` asks autograd which); backward goes through the program
from its end, drops what was kept, and collects gradients. Conversions hold the buffers of their messages as
``runtime.communicator`` does: what is sent lives until the message has arrived.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Literal

from shardwise.costs.footprints import Call, Footprints, Form, Made, numbered
from shardwise.costs.prices import OPTIMIZER_STATES, Prices
from shardwise.graph.ir import Arg, Ref, refs
from shardwise.layouts.conversions import COLLECTIVES, Move
from shardwise.layouts.layout import Layout
from shardwise.partition.buckets import Bucket
from shardwise.partition.linears import LinearStep, join_linears
from shardwise.partition.program import LocalOp, Program, busiest_rank, localize, overwritable
from shardwise.partition.spmd import Spmd, conversions_of
from shardwise.partition.steps import Conversion

Category = Literal["parameters", "gradients", "optimizer states", "inputs", "saved", "temporaries", "communication"]
CATEGORIES: tuple[Category, ...] = (
    "parameters",
    "gradients",
    "optimizer states",
    "inputs",
    "saved",
    "temporaries",
    "communication",
)
Instruction = LocalOp | Conversion | Bucket | LinearStep


@dataclass(frozen=True, slots=True)
class Peak:
    """The most bytes that are live at once: in which ``phase`` ("forward", "backward" or "update"), at which operator,
    and what they are made of (the sum is ``num_bytes``)."""

    num_bytes: int
    phase: str
    op: str
    parts: Mapping[str, int]

    @property
    def where(self) -> str:
        return f"{self.phase} of {self.op}" if self.op else self.phase


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


@dataclass(eq=False, slots=True)
class _Storage:
    """``owners``: names, cotangents and messages that hold it; ``keepers``: backward functions that do."""

    num_bytes: int
    category: Category
    owners: int = 0
    keepers: int = 0

    @property
    def counted_as(self) -> Category:
        return "saved" if self.keepers and self.category in ("temporaries", "communication") else self.category


@dataclass(frozen=True, slots=True)
class _Tensor:
    form: Form
    storage: _Storage


@dataclass
class _Kept:
    """What an operator needs in backward."""

    call: Call
    names: tuple[str, ...]
    forms: tuple[Form, ...]
    storages: list[_Storage]


@dataclass
class _Flight:
    """A message on its way: its buffer, and what is sent."""

    buffer: _Storage
    sent: _Storage | None


@dataclass
class _Returning:
    """Gradients of a bucket on their way: the forms of its tensors where the message left."""

    bucket: Bucket
    tensors: list[_Tensor]
    flight: _Flight


@dataclass
class _Walk:
    program: Program
    prices: Prices
    footprints: Footprints
    tensors: dict[str, _Tensor] = field(default_factory=dict)
    cotangents: dict[str, _Tensor] = field(default_factory=dict)
    phase: str = "forward"
    op: str = ""

    def __post_init__(self) -> None:
        self.spmd = self.program.spmd
        self.graph = self.spmd.graph
        self.coordinates = dict(self.spmd.mesh.coordinates(self.program.rank))
        self.live: Counter[Category] = Counter()
        self.peaks: dict[str, Peak] = {}
        self.kept: dict[int, _Kept] = {}
        self.flights: dict[int, _Flight] = {}
        self.returning: dict[int, _Returning] = {}
        self.overwritable = overwritable(self.program)
        self.parameters = {s.value: s for s in self.graph.sources if s.kind == "parameter"}
        self.instructions = needed_instructions(self.program)
        self.last_use = _last_use(self.instructions, self.spmd)
        # Buckets with a message in forward -> the next one, which leaves before this one is waited for.
        sends = [
            i
            for i, own in enumerate(self.instructions)
            if isinstance(own, Bucket) and own.of_parameters and own.collectives()
        ]
        self.after = dict(zip(sends, [*sends[1:], None], strict=True)) if sends else {}

    # -- storages ------------------------------------------------------------------------------------------------------

    def new(self, num_bytes: int, category: Category = "temporaries") -> _Storage:
        """A storage that someone is about to hold."""
        storage = _Storage(num_bytes, category)
        self.live[category] += num_bytes
        self.note()
        return storage

    def hold(self, storage: _Storage) -> _Storage:
        storage.owners += 1
        return storage

    def keep(self, storage: _Storage) -> None:
        """For backward."""
        self._change(storage, 0, 1)

    def drop(self, storage: _Storage, *, kept: bool = False) -> None:
        """One holder (or keeper) less; the last one frees it."""
        self._change(storage, -(not kept), -kept)

    def _change(self, storage: _Storage, owners: int, keepers: int) -> None:
        self.live[storage.counted_as] -= storage.num_bytes
        storage.owners += owners
        storage.keepers += keepers
        if storage.owners or storage.keepers:
            self.live[storage.counted_as] += storage.num_bytes

    def note(self, transient: int = 0) -> None:
        """What is live now, and ``transient`` bytes more, may be the most."""
        total = sum(self.live.values()) + transient
        known = self.peaks.get(self.phase)
        if known is None or total > known.num_bytes:
            parts: dict[str, int] = {name: self.live[name] for name in CATEGORIES}
            parts["temporaries"] += transient
            self.peaks[self.phase] = Peak(total, self.phase, self.op, parts)

    # -- the step ------------------------------------------------------------------------------------------------------

    def run(self) -> Memory:
        self._persistent()
        self._depart(next(iter(self.after), None))
        for index, instruction in enumerate(self.instructions):
            self._depart(self.after.get(index))
            self.op = _operator(instruction)
            self._forward(index, instruction)
            for name in self.last_use.get(index, ()):
                self._forget(name)
        kept = self.live["saved"]
        self.phase = "backward"
        self._backward_all()
        self._update()
        return Memory(max(self.peaks.values(), key=lambda peak: peak.num_bytes), self.peaks, kept)

    def _persistent(self) -> None:
        """What is there before the step: sources, and optimizer states."""
        states = OPTIMIZER_STATES[self.prices.optimizer]
        for source in self.graph.sources:
            value = self.graph.by_name[source.value]
            shape = self._shape(self.spmd.layouts[source.value])
            dtype = self.prices.dtype(value) if source.kind in ("parameter", "input") else value.dtype
            form = Form.contiguous(shape, dtype, source.trainable and value.requires_grad)
            is_parameter = source.kind == "parameter"
            storage = self.hold(self.new(form.num_bytes, "parameters" if is_parameter else "inputs"))
            self.tensors[source.value] = _Tensor(form, storage)
            if is_parameter:
                stored = prod(shape) * self.prices.stored_itemsize(value)
                if self.prices.stored_itemsize(value) != dtype.itemsize:  # what is computed with is a cast of it
                    self.hold(self.new(stored, "parameters"))
                if source.trainable:
                    self.hold(self.new(states * stored, "optimizer states"))

    def _forget(self, name: str) -> None:
        tensor = self.tensors.pop(name, None)
        if tensor is not None:
            self.drop(tensor.storage)

    def _shape(self, layout: Layout) -> tuple[int, ...]:
        return layout.local_shape(self.coordinates)

    # -- forward -------------------------------------------------------------------------------------------------------

    def _forward(self, index: int, instruction: Instruction) -> None:
        if isinstance(instruction, Conversion):
            tensor = self.tensors[instruction.value]
            free = self.overwritable.get(instruction.result, (False, False))[0]
            made = self._converted(tensor, instruction, backward=False, in_place=free)
            self.hold(made.storage)
            self._bind(instruction.result, made, tensor.form.requires_grad and instruction.differentiable)
        elif isinstance(instruction, Bucket):
            self._forward_bucket(index, instruction)
        else:
            self._forward_call(index, instruction)

    def _bind(self, name: str, tensor: _Tensor, requires_grad: bool) -> None:
        """A name for a tensor that is held already."""
        form = tensor.form
        self.tensors[name] = _Tensor(Form(form.shape, form.stride, form.dtype, requires_grad), tensor.storage)

    def _forward_call(self, index: int, instruction: LocalOp | LinearStep) -> None:
        target, args, kwargs, results = _call(instruction)
        call, names = numbered(target, args, kwargs)
        operands = [self.tensors[name] for name in names]
        forms = tuple(tensor.form for tensor in operands)
        own = self.footprints.forward(call, forms)
        self.note(own.peak_bytes)
        made: list[_Storage] = []
        for item in own.results:
            made.append(self.hold(self._memory_of(item, [t.storage for t in operands], made)))
        kept = [operands[i].storage if kind == "operand" else made[i] for kind, i in own.saved]
        if own.saved_bytes:
            kept.append(self.new(own.saved_bytes))
        if any(item.form.requires_grad for item in own.results):
            for storage in kept:
                self.keep(storage)
            self.kept[index] = _Kept(call, names, forms, kept)
        for name, item, storage in zip(results, own.results, made, strict=True):
            self.tensors[name] = _Tensor(item.form, storage)

    def _memory_of(self, item: Made, operands: Sequence[_Storage], results: Sequence[_Storage]) -> _Storage:
        if item.shares is None:
            return self.new(item.num_bytes)
        kind, position = item.shares
        return operands[position] if kind != "result" else results[position]

    # -- backward ------------------------------------------------------------------------------------------------------

    def _backward_all(self) -> None:
        loss = self.spmd.loss
        if loss is None:
            return
        form = self.tensors[loss].form
        self.cotangents[loss] = _Tensor(form, self.hold(self.new(form.num_bytes)))
        for name in [name for name in self.tensors if name not in self.graph.source_of and name != loss]:
            self._forget(name)
        for index in reversed(range(len(self.instructions))):
            instruction = self.instructions[index]
            self.op = _operator(instruction)
            if isinstance(instruction, Conversion):
                cotangent = self.cotangents.pop(instruction.result, None)
                if cotangent is not None:
                    free = self.overwritable.get(instruction.result, (False, False))[1]
                    made = self._converted(cotangent, instruction, backward=True, in_place=free)
                    self._arrive(instruction.value, made)
                    self.drop(cotangent.storage)
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
        given = [self.cotangents.pop(name, None) for name in _call(instruction)[3]]
        if any(given):
            forms = tuple(None if tensor is None else tensor.form for tensor in given)
            own = self.footprints.backward(kept.call, kept.forms, forms)
            self.note(own.peak_bytes)
            made: dict[int, _Storage] = {}
            for position, item in enumerate(own.cotangents):
                if item is None:
                    continue
                if item.shares is None:
                    storage = self.new(item.num_bytes)
                elif item.shares[0] == "cotangent":
                    tensor = given[item.shares[1]]
                    assert tensor is not None, "a cotangent that was given"
                    storage = tensor.storage
                else:
                    storage = made[item.shares[1]]
                made[position] = self.hold(storage)
            # What the call was given is gone when its results reach their places.
            for tensor in given:
                if tensor is not None:
                    self.drop(tensor.storage)
            for storage in kept.storages:
                self.drop(storage, kept=True)
            for position, storage in made.items():
                item = own.cotangents[position]
                assert item is not None, "made for an operand"
                self._add(kept.names[position], _Tensor(item.form, storage))
            return
        for storage in kept.storages:
            self.drop(storage, kept=True)

    def _arrive(self, name: str, tensor: _Tensor) -> None:
        """A cotangent that nobody holds yet reaches a value."""
        self.hold(tensor.storage)
        self._add(name, tensor)

    def _add(self, name: str, tensor: _Tensor) -> None:
        """A cotangent, held already, is added to what a value has got before; parameters get their gradients."""
        before = self.cotangents.get(name)
        if before is not None:
            alone = before.storage.owners == 1 and not before.storage.keepers
            if alone:  # added in place
                self.drop(tensor.storage)
                return
            total = self.hold(self.new(Form.contiguous(tensor.form.shape, tensor.form.dtype, False).num_bytes))
            self.drop(before.storage)
            self.drop(tensor.storage)
            self.cotangents[name] = _Tensor(Form.contiguous(tensor.form.shape, tensor.form.dtype, False), total)
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
            storage = self.hold(self.new(prod(tensor.form.shape) * tensor.form.dtype.itemsize))
            self.drop(tensor.storage)
        stored = self.prices.stored_itemsize(value)
        if stored != tensor.form.dtype.itemsize:
            own = self.hold(self.new(prod(tensor.form.shape) * stored))
            self.drop(storage)
            storage = own
        self.live[storage.counted_as] -= storage.num_bytes
        storage.category = "gradients"
        self.live[storage.counted_as] += storage.num_bytes
        self.cotangents[name] = _Tensor(tensor.form, storage)

    def _update(self) -> None:
        """The optimizer goes from parameter to parameter, with one temporary tensor of its size (the denominator of
        Adam) where there are states."""
        self.phase, self.op = "update", ""
        for name in [name for name in self.tensors if name not in self.graph.source_of]:
            self._forget(name)
        for name in [name for name in self.cotangents if name not in self.parameters]:
            self.drop(self.cotangents.pop(name).storage)
        own = [
            (prod(self.tensors[name].form.shape) * self.prices.stored_itemsize(self.graph.by_name[name]), source)
            for name, source in self.parameters.items()
            if source.trainable
        ]
        largest, source = max(own, key=lambda item: item[0], default=(0, None))
        self.op = source.names[0] if source is not None else ""
        self.note(largest if OPTIMIZER_STATES[self.prices.optimizer] else 0)

    # -- conversions ---------------------------------------------------------------------------------------------------

    def _converted(self, tensor: _Tensor, conversion: Conversion, *, backward: bool, in_place: bool) -> _Tensor:
        """A tensor (or cotangent) after the moves of a conversion. Nobody holds the result yet."""
        held: _Storage | None = None
        moves = conversion.moves[::-1] if backward else conversion.moves
        for move in moves:
            entry = _primitive(move, backward)
            after = self._one_move(tensor, move, backward, in_place and held is None)
            if entry != "none":
                in_place = False
            if held is not None and after.storage is not held:
                self.drop(held)
                held = None
            if after.storage is not tensor.storage:
                held = self.hold(after.storage)
            tensor = after
        if held is not None:
            held.owners -= 1  # handed over: whoever asked holds it from here
        return tensor

    def _one_move(self, tensor: _Tensor, move: Move, backward: bool, in_place: bool) -> _Tensor:
        primitive = _primitive(move, backward)
        after = move.source if backward else move.target
        shape = self._shape(after)
        form = Form.contiguous(shape, tensor.form.dtype, tensor.form.requires_grad)
        if primitive == "none" or (primitive == "keep_one" and not any(self.coordinates[a] for a in move.axes)):
            return tensor
        if primitive == "slice":
            if _is_narrow(after, move.axes):
                return _Tensor(Form(shape, tensor.form.stride, form.dtype, form.requires_grad), tensor.storage)
            return _Tensor(form, self.new(form.num_bytes))
        if primitive not in COLLECTIVES:  # zeros around or in place of it; windows
            return _Tensor(form, self.new(form.num_bytes))
        if primitive == "all_reduce" and in_place and tensor.form.is_contiguous:
            return tensor
        flight = self._launch([tensor], [move], backward)
        (made,) = self._land(flight, [tensor], [move], backward)
        return made

    def _launch(self, tensors: Sequence[_Tensor], moves: Sequence[Move], backward: bool) -> _Flight:
        """One message for some tensors; both buffers are held."""
        move = moves[0]
        primitive = _primitive(move, backward)
        itemsize = tensors[0].form.dtype.itemsize
        own = sum(prod(t.form.shape) for t in tensors) * itemsize
        size = self.spmd.mesh.size_of(move.axes)
        sides = [((m.target, m.source) if backward else (m.source, m.target)) for m in moves]
        single = len(tensors) == 1
        if primitive == "all_reduce":
            return _Flight(self.hold(self.new(own, "communication")), None)
        if primitive == "all_gather":
            sent = None
            if not single or not tensors[0].form.is_contiguous:
                sent = self.hold(self.new(own, "communication"))
            largest = sum(before.max_local_numel for before, _ in sides) * itemsize
            return _Flight(self.hold(self.new(size * largest, "communication")), sent)
        if primitive == "reduce_scatter":
            sent = None
            in_order = single and _is_leading(*sides[0][::-1], move.axes, self.coordinates)
            if not in_order or not tensors[0].form.is_contiguous:
                if not in_order:
                    self.note(own)  # the parts one by one, before they are joined
                sent = self.hold(self.new(own, "communication"))
            received = sum(prod(self._shape(after)) for _, after in sides) * itemsize
            return _Flight(self.hold(self.new(received, "communication")), sent)
        received = sum(prod(self._shape(after)) for _, after in sides) * itemsize
        sent = self.hold(self.new(own, "communication"))
        self.note(own + received)  # the parts one by one live until the message leaves
        return _Flight(self.hold(self.new(received, "communication")), sent)

    def _land(
        self, flight: _Flight, tensors: Sequence[_Tensor], moves: Sequence[Move], backward: bool
    ) -> list[_Tensor]:
        """The tensors that a message brought, which nobody holds yet."""
        if flight.sent is not None:
            self.drop(flight.sent)
        found: list[_Tensor] = []
        fresh: list[_Storage] = []
        for tensor, move in zip(tensors, moves, strict=True):
            primitive = _primitive(move, backward)
            before, after = (move.target, move.source) if backward else (move.source, move.target)
            form = Form.contiguous(self._shape(after), tensor.form.dtype, tensor.form.requires_grad)
            alias = primitive in ("all_reduce", "reduce_scatter") or (
                len(tensors) == 1
                and primitive == "all_gather"
                and _is_leading(before, after, move.axes, self.coordinates)
            )
            if alias:
                found.append(_Tensor(form, flight.buffer))
            else:
                fresh.append(self.hold(self.new(form.num_bytes)))
                found.append(_Tensor(form, fresh[-1]))
        if fresh:
            self.drop(flight.buffer)
        else:
            flight.buffer.owners -= 1
        for storage in fresh:
            storage.owners -= 1
        return found

    # -- buckets -------------------------------------------------------------------------------------------------------

    def _depart(self, index: int | None) -> None:
        if index is None:
            return
        bucket = self.instructions[index]
        assert isinstance(bucket, Bucket), "what departs"
        self.op = _operator(bucket)
        tensors = self._held([self.tensors[c.value] for c in bucket.conversions])
        before, message, _ = _parts(bucket, backward=False)
        tensors = self._through(tensors, before, backward=False)
        self.flights[index] = self._launch(tensors, message, backward=False)
        for tensor in tensors:
            self.drop(tensor.storage)

    def _held(self, tensors: Sequence[_Tensor]) -> list[_Tensor]:
        for tensor in tensors:
            self.hold(tensor.storage)
        return list(tensors)

    def _through(self, tensors: list[_Tensor], stages: Iterable[list[Move]], *, backward: bool) -> list[_Tensor]:
        """Tensors that are held, after some stages of a bucket; the results are held instead."""
        for moves in stages:
            if _primitive(moves[0], backward) in COLLECTIVES:
                made = self._land(self._launch(tensors, moves, backward), tensors, moves, backward)
            else:
                made = [self._one_move(t, move, backward, False) for t, move in zip(tensors, moves, strict=True)]
            self._held(made)
            for tensor in tensors:
                self.drop(tensor.storage)
            tensors = made
        return tensors

    def _forward_bucket(self, index: int, bucket: Bucket) -> None:
        given = [self.tensors[c.value] for c in bucket.conversions]
        before, message, after = _parts(bucket, backward=False)
        flight = self.flights.pop(index, None)
        if flight is None:
            stages = [*before, *([message] if message else []), *after]
            made = self._through(self._held(given), stages, backward=False)
        else:
            landed = self._held(self._land(flight, given, message, backward=False))
            made = self._through(landed, after, backward=False)
        for conversion, source, tensor in zip(bucket.conversions, given, made, strict=True):
            self._bind(conversion.result, tensor, source.form.requires_grad and conversion.differentiable)

    def _backward_bucket(self, index: int, bucket: Bucket) -> None:
        """Cotangents wait for each other, and leave together; those of parameters are not waited for."""
        members = tuple(c for c in bucket.conversions if c.result in self.cotangents)
        if not members:
            return
        bucket = Bucket(members, bucket.of_parameters)
        tensors = [self.cotangents.pop(c.result) for c in members]
        before, message, after = _parts(bucket, backward=True)
        if bucket.of_parameters and message:
            tensors = self._through(tensors, before, backward=True)
            self.returning[index] = _Returning(bucket, tensors, self._launch(tensors, message, backward=True))
            for tensor in tensors:
                self.drop(tensor.storage)
            return
        made = self._through(tensors, [*before, *([message] if message else []), *after], backward=True)
        for conversion, tensor in zip(members, made, strict=True):
            self._add(conversion.value, tensor)

    def _land_gradients(self, index: int) -> None:
        """The gradients of a bucket have arrived."""
        own = self.returning.pop(index, None)
        if own is None:
            return
        self.op = _operator(own.bucket)
        _, message, after = _parts(own.bucket, backward=True)
        landed = self._held(self._land(own.flight, own.tensors, message, backward=True))
        made = self._through(landed, after, backward=True)
        for conversion, tensor in zip(own.bucket.conversions, made, strict=True):
            self._add(conversion.value, tensor)


def _call(
    instruction: LocalOp | LinearStep,
) -> tuple[object, tuple[Arg, ...], tuple[tuple[str, Arg], ...], tuple[str, ...]]:
    """Target, args, kwargs and results."""
    if isinstance(instruction, LocalOp):
        call = instruction.call
        return call.target, call.args, call.kwargs, instruction.results
    own = (instruction.x, instruction.weight, instruction.bias)
    args = tuple(Ref(name) for name in own if name is not None)
    return instruction.product.call.target, args, (), (instruction.result,)


def _operator(instruction: Instruction) -> str:
    """The operator that an instruction belongs to."""
    if isinstance(instruction, LocalOp):
        return instruction.op
    if isinstance(instruction, LinearStep):
        return instruction.product.op
    return conversions_of(instruction)[0].op


def _uses(instruction: Instruction) -> tuple[str, ...]:
    if isinstance(instruction, (Conversion, Bucket)):
        return tuple(conversion.value for conversion in conversions_of(instruction))
    _, args, kwargs, _ = _call(instruction)
    return tuple(refs((args, tuple(value for _, value in kwargs))))


def _makes(instruction: Instruction) -> tuple[str, ...]:
    if isinstance(instruction, (Conversion, Bucket)):
        return tuple(conversion.result for conversion in conversions_of(instruction))
    return _call(instruction)[3]


def needed_instructions(program: Program) -> list[Instruction]:
    """Those that the loss or a mutation needs: a training step computes no other outputs. Linear layers are joined."""
    instructions, spmd = join_linears(program), program.spmd
    wanted = {value for _, value in spmd.mutations}
    if spmd.loss is not None:
        wanted.add(spmd.loss)
    else:
        wanted.update(refs(spmd.outputs))
    found: list[Instruction] = []
    for instruction in reversed(instructions):
        if wanted.intersection(_makes(instruction)):
            wanted.update(_uses(instruction))
            found.append(instruction)
    return found[::-1]


def _last_use(instructions: Sequence[Instruction], spmd: Spmd) -> dict[int, list[str]]:
    """Position -> the values that nothing uses after it. Sources, the loss and what is written back stay."""
    last: dict[str, int] = {}
    for index, instruction in enumerate(instructions):
        last.update(dict.fromkeys((*_uses(instruction), *_makes(instruction)), index))
    stay = {*spmd.graph.source_of, spmd.loss, *(value for _, value in spmd.mutations)}
    found: dict[int, list[str]] = {}
    for name, index in last.items():
        if name not in stay:
            found.setdefault(index, []).append(name)
    return found


def _primitive(move: Move, backward: bool) -> str:
    return move.entry.backward if backward else move.entry.forward


def _parts(bucket: Bucket, *, backward: bool) -> tuple[list[list[Move]], list[Move], list[list[Move]]]:
    """The moves of a bucket before its first message, those of the message (maybe none), and those after it."""
    stages = [list(moves) for moves in zip(*(c.moves for c in bucket.conversions), strict=True)]
    if backward:
        stages.reverse()
    at = next((i for i, moves in enumerate(stages) if _primitive(moves[0], backward) in COLLECTIVES), None)
    return (stages, [], []) if at is None else (stages[:at], stages[at], stages[at + 1 :])


def _is_leading(sharded: Layout, whole: Layout, axes: Sequence[str], coordinates: Mapping[str, int]) -> bool:
    """Whether the slices of a tensor over some axes, one behind the other, are the tensor as it lies in memory."""
    places = [(d, i) for d, dim in enumerate(sharded.dims) for i, atom in enumerate(dim) if {*atom.axes} & {*axes}]
    if len(places) != 1:
        return False
    ((d, i),) = places
    atom = sharded.dims[d][i]
    before = prod(whole.local_shape(coordinates)[:d]) * prod(sharded.local_atoms(coordinates)[d][:i])
    return before == 1 and atom.size % sharded.mesh.size_of(atom.axes) == 0


def _is_narrow(after: Layout, axes: Sequence[str]) -> bool:
    """Whether a slice is a window on the tensor: no atom inside a dim is cut."""
    return all(
        not {*atom.axes} & {*axes} or prod(own.size for own in dim[:i]) == 1
        for dim in after.dims
        for i, atom in enumerate(dim)
    )
