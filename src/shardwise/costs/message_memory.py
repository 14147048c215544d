"""The memory of conversions: the buffers that their messages need, as ``runtime.communicator`` holds them. What is sent
lives until the message has arrived.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from shardwise.costs.ledger import Ledger, LedgerTensor, Storage
from shardwise.layouts.conversions import COLLECTIVES, Move
from shardwise.layouts.layout import Layout
from shardwise.layouts.mesh import Mesh
from shardwise.programs.forms import Form
from shardwise.programs.moves import sharing_buffers
from shardwise.programs.spmd_steps import Conversion


@dataclass
class InFlightBuffer:
    """Some tensors of a message on their way, by position: their buffer, and what is sent."""

    tensors: list[int]
    buffer: Storage
    sent: Storage | None


Flight = list[InFlightBuffer]  # a message on its way


@dataclass(frozen=True)
class MessageLedger:
    """Conversions on the rank at ``coordinates``, written into a ledger. ``on_gloo``: a reduce-scatter is an exchange
    whose rows every rank adds up; of two ranks each adds its own to the other's, where that arrived."""

    ledger: Ledger
    mesh: Mesh
    coordinates: Mapping[str, int]
    on_gloo: bool

    def shape(self, layout: Layout) -> tuple[int, ...]:
        return layout.local_shape(self.coordinates)

    def converted(
        self, tensor: LedgerTensor, conversion: Conversion, *, backward: bool, in_place: bool
    ) -> LedgerTensor:
        """Return a tensor (or cotangent) after a conversion. The result has no owner yet."""
        current: Storage | None = None
        moves = conversion.moves[::-1] if backward else conversion.moves
        for move in moves:
            entry = move.primitive(backward)
            after = self._one_move(tensor, move, backward, in_place and current is None)
            if entry != "none":
                in_place = False
            if current is not None and after.storage is not current:
                self.ledger.drop(current)
                current = None
            if after.storage is not tensor.storage:
                current = self.ledger.hold(after.storage)
            tensor = after
        if current is not None:
            current.owners -= 1  # handed over: the caller owns it from here
        return tensor

    def _one_move(self, tensor: LedgerTensor, move: Move, backward: bool, in_place: bool) -> LedgerTensor:
        primitive = move.primitive(backward)
        after = move.source if backward else move.target
        shape = self.shape(after)
        form = Form.contiguous(shape, tensor.form.dtype, tensor.form.requires_grad)
        if primitive == "none" or (primitive == "keep_one" and not any(self.coordinates[a] for a in move.axes)):
            return tensor
        if primitive == "slice":
            if _is_narrow(after, move.axes):
                return LedgerTensor(Form(shape, tensor.form.stride, form.dtype, form.requires_grad), tensor.storage)
            return LedgerTensor(form, self.ledger.new(form.num_bytes))
        if primitive not in COLLECTIVES:  # zeros around or in place of it; windows
            return LedgerTensor(form, self.ledger.new(form.num_bytes))
        if primitive == "all_reduce" and in_place and tensor.form.is_contiguous:
            return tensor
        flight = self.launch([tensor], [move], backward)
        (received,) = self.land(flight, [tensor], [move], backward)
        return received

    def launch(
        self, tensors: Sequence[LedgerTensor], moves: Sequence[Move], backward: bool, *, in_place: bool = False
    ) -> Flight:
        """One message for some tensors; all buffers are held. ``in_place``: it may use the memory of a single one."""
        together = sharing_buffers(moves, self.coordinates, backward=backward, on_gloo=self.on_gloo)
        return [
            InFlightBuffer(ids, *self._launch([tensors[i] for i in ids], [moves[i] for i in ids], backward, in_place))
            for ids in together
        ]

    def _launch(
        self, tensors: Sequence[LedgerTensor], moves: Sequence[Move], backward: bool, in_place: bool
    ) -> tuple[Storage, Storage | None]:
        """Tensors that share buffers: (what is filled, what is sent)."""
        move = moves[0]
        primitive = move.primitive(backward)
        itemsize = tensors[0].form.dtype.itemsize
        sent_bytes = sum(prod(t.form.shape) for t in tensors) * itemsize
        size = self.mesh.size_of(move.axes)
        sides = [m.ends(backward) for m in moves]
        single = len(tensors) == 1
        if primitive == "all_reduce":
            own_memory = in_place and single and tensors[0].form.is_contiguous
            buffer = tensors[0].storage if own_memory else self.ledger.new(sent_bytes, "communication")
            return self.ledger.hold(buffer), None
        if primitive == "all_gather":
            as_it_lies = single and tensors[0].form.is_contiguous
            sent = tensors[0].storage if as_it_lies else self.ledger.new(sent_bytes, "communication")
            largest = sum(before.max_local_numel for before, _ in sides) * itemsize
            return self.ledger.hold(self.ledger.new(size * largest, "communication")), self.ledger.hold(sent)
        if primitive == "reduce_scatter":
            in_order = single and _is_leading(*sides[0][::-1], move.axes, self.coordinates)
            as_it_lies = in_order and tensors[0].form.is_contiguous
            sent = tensors[0].storage if as_it_lies else self.ledger.new(sent_bytes, "communication")
            rows = size if self.on_gloo and size > 2 else 1
            received = sum(prod(self.shape(after)) for _, after in sides) * itemsize * rows
            return self.ledger.hold(self.ledger.new(received, "communication")), self.ledger.hold(sent)
        received = sum(prod(self.shape(after)) for _, after in sides) * itemsize
        sent = self.ledger.hold(self.ledger.new(sent_bytes, "communication"))
        self.ledger.note(sent_bytes + received)  # the parts one by one live until the message leaves
        return self.ledger.hold(self.ledger.new(received, "communication")), sent

    def land(
        self, flight: Flight, tensors: Sequence[LedgerTensor], moves: Sequence[Move], backward: bool
    ) -> list[LedgerTensor]:
        """Return the tensors that a message brought, which have no owner yet."""
        for parcel in flight:
            if parcel.sent is not None:
                self.ledger.drop(parcel.sent)
        landed: dict[int, LedgerTensor] = {}
        for parcel in reversed(flight):
            parts, its_moves = [tensors[i] for i in parcel.tensors], [moves[i] for i in parcel.tensors]
            landed.update(zip(parcel.tensors, self._land(parcel.buffer, parts, its_moves, backward), strict=True))
        return [landed[i] for i in range(len(landed))]

    def _land(
        self, buffer: Storage, tensors: Sequence[LedgerTensor], moves: Sequence[Move], backward: bool
    ) -> list[LedgerTensor]:
        landed: list[LedgerTensor] = []
        fresh: list[Storage] = []
        size = self.mesh.size_of(moves[0].axes)
        if self.on_gloo and size > 2 and moves[0].primitive(backward) == "reduce_scatter":
            rows = buffer
            buffer = self.ledger.hold(self.ledger.new(rows.num_bytes // size, "communication"))
            self.ledger.drop(rows)
        for tensor, move in zip(tensors, moves, strict=True):
            primitive, (before, after) = move.primitive(backward), move.ends(backward)
            form = Form.contiguous(self.shape(after), tensor.form.dtype, tensor.form.requires_grad)
            alias = primitive in ("all_reduce", "reduce_scatter") or (
                len(tensors) == 1
                and primitive == "all_gather"
                and _is_leading(before, after, move.axes, self.coordinates)
            )
            if alias:
                landed.append(LedgerTensor(form, buffer))
            else:
                fresh.append(self.ledger.hold(self.ledger.new(form.num_bytes)))
                landed.append(LedgerTensor(form, fresh[-1]))
        if fresh:
            self.ledger.drop(buffer)
        else:
            buffer.owners -= 1
        for storage in fresh:
            storage.owners -= 1
        return landed

    def hold(self, tensors: Sequence[LedgerTensor]) -> list[LedgerTensor]:
        for tensor in tensors:
            self.ledger.hold(tensor.storage)
        return list(tensors)

    def through(
        self, tensors: list[LedgerTensor], stages: Iterable[list[Move]], *, backward: bool
    ) -> list[LedgerTensor]:
        """Tensors that are held, after some stages of a bucket; the results are held instead."""
        for moves in stages:
            if moves[0].primitive(backward) in COLLECTIVES:
                results = self.land(self.launch(tensors, moves, backward), tensors, moves, backward)
            else:
                results = [self._one_move(t, move, backward, False) for t, move in zip(tensors, moves, strict=True)]
            self.hold(results)
            for tensor in tensors:
                self.ledger.drop(tensor.storage)
            tensors = results
        return tensors


def stages_of(conversions: Sequence[Conversion], *, backward: bool) -> list[list[Move]]:
    """Return the moves of conversions that travel together, one list per stage, in the order of execution."""
    stages = [list(moves) for moves in zip(*(c.moves for c in conversions), strict=True)]
    return stages[::-1] if backward else stages


def parts_of(
    conversions: Sequence[Conversion], *, backward: bool
) -> tuple[list[list[Move]], list[Move], list[list[Move]]]:
    """The stages of conversions before their first message, that of the message (maybe none), and those after it."""
    stages = stages_of(conversions, backward=backward)
    at = next((i for i, moves in enumerate(stages) if moves[0].primitive(backward) in COLLECTIVES), None)
    return (stages, [], []) if at is None else (stages[:at], stages[at], stages[at + 1 :])


def _is_leading(sharded: Layout, whole: Layout, axes: Sequence[str], coordinates: Mapping[str, int]) -> bool:
    """Return whether a tensor's slices over some axes, one after the other, are the tensor in memory."""
    places = [(d, i) for d, dim in enumerate(sharded.dims) for i, atom in enumerate(dim) if {*atom.axes} & {*axes}]
    if len(places) != 1:
        return False
    ((d, i),) = places
    atom = sharded.dims[d][i]
    before = prod(whole.local_shape(coordinates)[:d]) * prod(sharded.local_atoms(coordinates)[d][:i])
    return before == 1 and atom.size % sharded.mesh.size_of(atom.axes) == 0


def _is_narrow(after: Layout, axes: Sequence[str]) -> bool:
    """Return whether a slice is a window on the tensor: no atom inside a dim is cut."""
    return all(
        not {*atom.axes} & {*axes} or prod(outer.size for outer in dim[:i]) == 1
        for dim in after.dims
        for i, atom in enumerate(dim)
    )
