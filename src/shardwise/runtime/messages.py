"""A message of a program: the conversions that it serves, the tensors packed into it, and why it failed."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from math import ceil, prod

import torch
import torch.distributed as dist

from shardwise.errors import CollectiveError, OutOfDeviceMemoryError, ShardwiseError
from shardwise.graph.ir import Graph
from shardwise.layouts.layout import Layout
from shardwise.layouts.text import format_layout
from shardwise.plans.quantities import format_bytes
from shardwise.programs.keyed_rows import RowExchange
from shardwise.programs.moves import LocalMove
from shardwise.programs.spmd_steps import Conversion
from shardwise.rules.keyed_rows import imbalance_of
from shardwise.runtime.communicator import (
    Communicator,
    InFlight,
    adds_rows,
    backend_of,
    exchange_rows,
    gather_rows,
    is_gloo,
    scatter_tensor,
    sum_received,
)
from shardwise.runtime.faults import BlockedRank, exchange_failed, is_out_of_memory
from shardwise.runtime.gpu_watcher import gpu_watcher
from shardwise.runtime.heartbeat_file import trail

REDUCTIONS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN, "any": dist.ReduceOp.MAX}


@dataclass(frozen=True, eq=False)
class Purpose:
    """The purpose of a message or local step: one direction of one or more conversions of a program."""

    conversions: tuple[Conversion, ...]
    graph: Graph
    ranks: Communicator
    backward: bool

    @property
    def largest(self) -> Conversion:
        return max(self.conversions, key=lambda conversion: prod(conversion.target.shape) * conversion.itemsize)

    def operator(self, conversion: Conversion) -> tuple[str, str]:
        """Return (name, source line) of the operator that needs the converted value."""
        op = self.graph.op_by_name.get(conversion.op)
        if op is None:
            op = self.graph.producer.get(conversion.origin)  # an output of the model: the operator that computed it
        return (op.name, op.source) if op else (conversion.op, "")

    def layouts(self, conversion: Conversion) -> tuple[Layout, Layout]:
        """Return the layouts before and after."""
        if self.backward:
            return conversion.target.dual, conversion.source.dual
        return conversion.source, conversion.target

    def named(self, conversion: Conversion) -> str:
        """Name the converted value: ``blocks.0.mlp.up.weight``, or ``layer_norm (of norm/layer_norm, gpt.py:85)``."""
        source = self.graph.source_of.get(conversion.origin)
        producer = self.graph.producer.get(conversion.origin)
        maker = f" (of {producer.name}, {producer.source})" if producer else ""
        return "gradient of " * self.backward + (source.names[0] if source else conversion.origin) + maker

    def describe(self, conversion: Conversion) -> str:
        """Describe value and layouts: ``norm.weight: f32[24] -> f32[24] replicated(dp) and 3 more tensors``."""
        value = self.graph.by_name[conversion.origin]
        dtype = (value.reduced if self.backward else None) or value.dtype
        before, after = (format_layout(layout, dtype) for layout in self.layouts(conversion))
        more = len(self.conversions) - 1
        together = f" and {more} more tensor{'s' * (more > 1)}" if more else ""
        return f"{self.named(conversion)}: {before} -> {after}{together}"

    def num_bytes(self, kind: str, axes: tuple[str, ...]) -> int:
        """Return the bytes of the whole message of a collective."""
        collectives = (c for conversion in self.conversions for c in conversion.collectives(backward=self.backward))
        return sum(c.num_bytes for c in collectives if (c.kind, c.axes) == (kind, axes))


class CollectiveMessage:
    """One collective for one tensor, or for several with the same moves. All sizes are known beforehand. ``number``: of
    its latest run, among all collectives this rank started. ``together``: positions of the tensors that share buffers
    (``programs.moves.sharing_buffers``)."""

    def __init__(
        self,
        moves: Sequence[LocalMove],
        ranks: Communicator,
        purpose: Purpose,
        together: Sequence[Sequence[int]],
        in_place: bool = False,
    ) -> None:
        first = moves[0]
        assert first.kind is not None, "a local step sends no message"
        self.ranks, self.purpose, self.number = ranks, purpose, 0
        self.kind, self.axes, self.with_own = first.kind, first.axes, first.with_own
        self.together = together
        self.parcels = [PackedTensors([moves[i] for i in positions], ranks, in_place) for positions in together]
        self.is_gloos = is_gloo(ranks.group(first.axes))
        self.is_nccls = backend_of(ranks.group(first.axes)) == "nccl"

    def __call__(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Run the collective and return its results. Raises as ``launch``."""
        buffers, _ = self.launch(tensors, wait=True)
        return self.land(buffers, tensors if self.with_own else ())

    def launch(self, tensors: Sequence[torch.Tensor], *, wait: bool) -> tuple[list[torch.Tensor], list[InFlight]]:
        """Start the collective: return (the buffers it fills, the handles for ``finish``, none if it is done).

        Raises CollectiveError, or OutOfDeviceMemoryError.
        """
        self.ranks.launched = self.number = self.ranks.launched + 1
        try:
            with trail.waiting(self.label) if wait else nullcontext():
                buffers, flights, num_bytes = self._start(tensors, wait and not self.is_gloos)
                self.ranks.note(self.kind, self.axes, num_bytes)
                for flight in flights if wait else ():
                    flight.wait()
                if wait:
                    self._watch()
        except (RuntimeError, MemoryError) as error:
            self._explain(error)
            raise
        return buffers, [] if wait else flights

    def _start(self, tensors: Sequence[torch.Tensor], blocks: bool) -> tuple[list[torch.Tensor], list[InFlight], int]:
        """Start the collective: return (what ``land`` takes, the handles that are left to wait for, its bytes)."""
        sent = [
            parcel.launch([tensors[i] for i in positions], blocks)
            for parcel, positions in zip(self.parcels, self.together, strict=True)
        ]
        flights = [] if blocks else [flight for _, flight, _ in sent]
        return [buffer for buffer, *_ in sent], flights, sum(num_bytes for *_, num_bytes in sent)

    def finish(self, flights: Sequence[InFlight]) -> None:
        """Wait for a collective. Raises the same errors as ``launch``."""
        try:
            with trail.waiting(self.label):
                for flight in flights:
                    flight.wait()
                self._watch()
        except (RuntimeError, MemoryError) as error:
            self._explain(error)
            raise

    def _watch(self) -> None:
        if self.is_nccls:
            number, call = self.number, self.ranks.calls
            gpu_watcher.started(lambda error: collective_failed(error, self, number, call))

    @cached_property
    def label(self) -> bytes:
        """Describe the collective for the rank's heartbeat file."""
        return collective_of(self).encode()

    def _explain(self, error: Exception) -> None:
        # No context manager of its own: entering a generator twice per message costs every step.
        explained: ShardwiseError | None = conversion_failed(error, self.purpose)
        if explained is None and self.is_nccls:
            explained = gpu_watcher.explained(error)
        if explained is None:
            explained = collective_failed(error, self, self.number, self.ranks.calls)
        if explained is not None:
            raise explained from error

    def land(self, buffers: list[torch.Tensor], this_rank: Sequence[torch.Tensor] = ()) -> list[torch.Tensor]:
        """Return the results from filled buffers. ``this_rank``: its own tensor, if the move needs it too."""
        results: dict[int, torch.Tensor] = {}
        for parcel, positions in zip(reversed(self.parcels), reversed(self.together), strict=True):
            results.update(zip(positions, parcel.land(buffers.pop(), this_rank), strict=True))
        return [results[i] for i in range(len(results))]


class RowExchangeMessage(CollectiveMessage):
    """Rows that go to the owners of their keys, or return: as many as the keys say, which the host reads."""

    def __init__(self, move: LocalMove, rows: RowExchange, ranks: Communicator, purpose: Purpose) -> None:
        super().__init__((move,), ranks, purpose, ())
        self.rows, self.num_rows = rows, 0

    def _start(self, tensors: Sequence[torch.Tensor], blocks: bool) -> tuple[list[torch.Tensor], list[InFlight], int]:
        tensor, *ways = tensors
        sends, receives = self.rows.counts(ways)
        self.num_rows = sum(receives if self.rows.outward else sends)
        packed = self.rows.pack(tensor, ways)
        sent = _wire(packed)
        received = sent.new_empty(sum(receives), *sent.shape[1:])
        group = self.ranks.group(self.axes)
        work = dist.all_to_all_single(received, sent, receives, sends, group=group, async_op=not blocks)
        flights = [] if blocks else [InFlight(work, sent, self.is_gloos)]
        return [received.view(packed.dtype), *ways], flights, self.purpose.num_bytes(self.kind, self.axes)

    def land(self, buffers: list[torch.Tensor], this_rank: Sequence[torch.Tensor] = ()) -> list[torch.Tensor]:
        """Return the result from the rows that arrived. ``buffers``: these, and the ways."""
        return [self.rows.unpack(buffers[0], buffers[1:])]

    def _explain(self, error: Exception) -> None:
        if is_out_of_memory(error) and (crowded := too_many_rows(error, self)) is not None:
            raise crowded from error
        super()._explain(error)


class PackedTensors:
    """Tensors of a message that share its buffers."""

    def __init__(self, moves: Sequence[LocalMove], ranks: Communicator, in_place: bool) -> None:
        first = moves[0]
        self.moves, self.in_place, self.kind = list(moves), in_place, first.kind
        self.group = ranks.group(first.axes)
        self.size = ranks.mesh.size_of(first.axes)
        self.op, self.is_least = REDUCTIONS[first.reduction], first.reduction == "min"
        self.floating: torch.dtype | None = None  # of numbers that were sent as integers (``_in_order``)
        # Elements per tensor that each member sends (all_gather) or receives (other kinds).
        self.counts = [[prod(shape) for shape in move.received] for move in moves]
        self.totals = [sum(counts) for counts in zip(*self.counts, strict=True)]
        self.largest = max(self.totals)
        self.even = all(total == self.largest for total in self.totals)
        self.single = len(moves) == 1
        self.is_gloos = is_gloo(self.group)
        # PyTorch's fake group fills no exchange (torch 2.11), and an index must be in its bounds.
        is_fake = dist.get_backend(self.group) == "fake"
        self.buffer_like = torch.Tensor.new_zeros if is_fake else torch.Tensor.new_empty
        self.adds_rows = self.kind == "reduce_scatter" and adds_rows(self.group)

    def launch(self, tensors: Sequence[torch.Tensor], wait: bool) -> tuple[torch.Tensor, InFlight, int]:
        """Start the collective: return (the buffer that is filled, its handle, bytes of the collective)."""
        starts = {
            "all_reduce": self._all_reduce,
            "all_gather": self._all_gather,
            "reduce_scatter": self._reduce_scatter,
        }
        return starts.get(str(self.kind), self._all_to_all)(tensors, wait)

    def land(self, buffer: torch.Tensor, this_rank: Sequence[torch.Tensor] = ()) -> list[torch.Tensor]:
        """Return the results from the buffer. ``this_rank``: its own tensor, if the move needs it too."""
        if self.adds_rows:
            buffer = sum_received(buffer, self.size)
        if self.floating is not None:
            buffer = _from_order(buffer, self.is_least, self.floating)
        if self.kind in ("all_reduce", "reduce_scatter"):
            if self.single:
                only = self.moves[0]
                return [buffer if buffer.shape == only.shape else buffer.flatten()[: prod(only.shape)].view(only.shape)]
            sizes = [prod(move.shape) for move in self.moves]
            pieces = buffer.flatten()[: sum(sizes)].split(sizes)
            return [piece.view(move.shape) for piece, move in zip(pieces, self.moves, strict=True)]
        if self.single and self.even and self.moves[0].receives_memory:
            return [buffer.view(self.moves[0].shape)]
        if self.kind == "all_gather":
            rows = buffer.view(self.size, self.largest).unbind(0)
        else:
            rows = buffer.split(self.totals)
        arrived: list[list[torch.Tensor]] = [[] for _ in self.moves]
        for member, row in enumerate(rows):
            start = 0
            for pieces, counts, move in zip(arrived, self.counts, self.moves, strict=True):
                pieces.append(row[start : start + counts[member]].view(move.received[member]))
                start += counts[member]
        return [move.unpack([*pieces, *this_rank]) for move, pieces in zip(self.moves, arrived, strict=True)]

    def _all_reduce(self, tensors: Sequence[torch.Tensor], wait: bool) -> tuple[torch.Tensor, InFlight, int]:
        if self.single:
            (tensor,) = tensors
            wire = tensor.contiguous()
            wire = wire.view(torch.uint8) if tensor.dtype == torch.bool else wire
            buffer = wire if self.in_place or not tensor.is_contiguous() else wire.clone()
        else:
            tensor = buffer = torch.cat([tensor.reshape(-1) for tensor in tensors])
        num_bytes, op = buffer.nbytes, self.op
        if op != dist.ReduceOp.SUM and tensor.is_floating_point():
            self.floating, op = tensor.dtype, dist.ReduceOp.MAX
            tensor = buffer = _in_order(tensor, self.is_least)
        work = dist.all_reduce(buffer, op=op, group=self.group, async_op=not wait)
        return buffer.view(tensor.dtype), InFlight(work, buffer, self.is_gloos), num_bytes

    def _all_gather(self, tensors: Sequence[torch.Tensor], wait: bool) -> tuple[torch.Tensor, InFlight, int]:
        sent = _row([_wire(tensor) for tensor in tensors], self.largest)
        received = self.buffer_like(sent, self.size * self.largest)
        work = gather_rows(received, sent, self.group, is_async=not wait)
        num_bytes = sum(self.totals) * sent.element_size()
        return received.view(tensors[0].dtype), InFlight(work, sent, self.is_gloos), num_bytes

    def _reduce_scatter(self, tensors: Sequence[torch.Tensor], wait: bool) -> tuple[torch.Tensor, InFlight, int]:
        if self.single and self.moves[0].sends_memory:
            sent = tensors[0].contiguous().view(-1)
            total = sent.numel()
        else:
            packed = [move.pack(tensor) for move, tensor in zip(self.moves, tensors, strict=True)]
            rows = [[messages[member] for messages in packed] for member in range(self.size)]
            total = sum(part.numel() for row in rows for part in row)
            sent = _padded(rows)
        num_bytes = total * sent.element_size()
        if self.adds_rows:
            return *exchange_rows(sent, self.group, is_async=not wait), num_bytes
        received = self.buffer_like(sent, sent.numel() // self.size)
        work = scatter_tensor(received, sent, op=self.op, group=self.group, async_op=not wait)
        return received, InFlight(work, sent, self.is_gloos), num_bytes

    def _all_to_all(self, tensors: Sequence[torch.Tensor], wait: bool) -> tuple[torch.Tensor, InFlight, int]:
        packed = [move.pack(tensor) for move, tensor in zip(self.moves, tensors, strict=True)]
        parts = [[_wire(messages[member]).reshape(-1) for messages in packed] for member in range(self.size)]
        counts = [sum(part.numel() for part in row) for row in parts]
        sent = torch.cat([part for row in parts for part in row])
        received = self.buffer_like(sent, sum(self.totals))
        work = dist.all_to_all_single(received, sent, self.totals, counts, group=self.group, async_op=not wait)
        return received.view(tensors[0].dtype), InFlight(work, sent, self.is_gloos), sent.nbytes


def _in_order(x: torch.Tensor, is_least: bool) -> torch.Tensor:
    """Return integers, contiguous, whose maximum is that of floating numbers, or their minimum (``is_least``), and NaN
    if there is one. Backends compare numbers and lose NaN: gloo keeps that of rank 0 only (torch 2.13)."""
    x = (x.float() if x.itemsize == 2 else x).contiguous()
    bits = (-x if is_least else x).view(torch.int32 if x.itemsize == 4 else torch.int64)
    most = torch.iinfo(bits.dtype).max  # the bits of a NaN
    return torch.where(bits < 0, bits ^ most, bits).masked_fill_(x.isnan(), most)


def _from_order(keys: torch.Tensor, is_least: bool, dtype: torch.dtype) -> torch.Tensor:
    """Return the numbers of ``_in_order``."""
    bits = torch.where(keys < 0, keys ^ torch.iinfo(keys.dtype).max, keys)
    x = bits.view(torch.float32 if keys.itemsize == 4 else torch.float64)
    return (-x if is_least else x).to(dtype)


def _row(parts: Sequence[torch.Tensor], length: int) -> torch.Tensor:
    """Concatenate flattened parts, padded to a length."""
    flat = [part.reshape(-1) for part in parts]
    missing = length - sum(part.numel() for part in flat)
    if missing:
        flat.append(flat[0].new_zeros(missing))
    return torch.cat(flat) if len(flat) > 1 else flat[0]


def _padded(rows: Sequence[Sequence[torch.Tensor]]) -> torch.Tensor:
    """Concatenate rows of parts, each padded to the longest row. Each part is copied once, whatever its strides."""
    sizes = [[part.numel() for part in row] for row in rows]
    longest = max(map(sum, sizes))
    joined = rows[0][0].new_empty(len(rows), longest)
    for row, lengths, whole in zip(rows, sizes, joined, strict=True):
        *places, padding = whole.split([*lengths, longest - sum(lengths)])
        for part, place in zip(row, places, strict=True):
            place.view(part.shape).copy_(part)
        padding.zero_()
    return joined.view(-1)


# Dtypes that NCCL does not send -> as what their bits are moved.
_MOVED_AS = {
    torch.bool: torch.uint8,
    torch.int16: torch.float16,
    torch.uint16: torch.float16,
    torch.uint32: torch.int32,
    torch.uint64: torch.int64,
    torch.complex32: torch.int32,
    torch.float8_e4m3fn: torch.uint8,
}


def _wire(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor as it is moved, in a dtype that every backend sends, and contiguous."""
    tensor = tensor.contiguous()
    return tensor.view(_MOVED_AS.get(tensor.dtype, tensor.dtype))


# ------------------------------------------------------------------------------------------------------------- failures


def collective_failed(error: Exception, message: CollectiveMessage, number: int, call: int) -> CollectiveError | None:
    """Explain ``error``, which ended the collective ``number`` of this rank, of ``message``, in a ``call`` of the
    module; None if it is not a network error."""
    purpose = message.purpose
    first = purpose.conversions[0]
    name, line = purpose.operator(first)
    size = format_bytes(purpose.num_bytes(message.kind, message.axes))
    direction = "backward" if purpose.backward else "forward"
    members = tuple(sorted(message.ranks.place.group(message.axes, message.ranks.rank)))
    waiting = BlockedRank(message.ranks.name, number, collective_of(message), members)
    what = f"{message.kind} over {message.ranks.mesh.format_axes(message.axes)}"
    facts = [("value", purpose.describe(first)), ("pass", f"{direction}, call {call}")]
    return exchange_failed(error, message.ranks.rank, waiting, f"{what} ({size})", name, line, facts)


def collective_of(message: CollectiveMessage) -> str:
    """Describe a collective: ``all_reduce over tp for /add (gpt.py:82), forward``."""
    what = f"{message.kind} over {message.ranks.mesh.format_axes(message.axes)}"
    if not message.purpose.conversions:
        return what
    name, line = message.purpose.operator(message.purpose.conversions[0])
    direction = "backward" if message.purpose.backward else "forward"
    return f"{what} for {name} ({line}), {direction}"


def too_many_rows(error: Exception, message: RowExchangeMessage) -> OutOfDeviceMemoryError | None:
    """Explain ``error``, which ended an exchange of keyed rows for lack of memory; None if no more rows belong to the
    rank's keys than were planned for."""
    purpose, ranks = message.purpose, message.ranks
    conversion = purpose.conversions[0]
    layout = next(layout for layout in purpose.layouts(conversion) if layout.keyed_axes)
    planned = layout.local_shape(ranks.coordinates)[0]
    if message.num_rows <= planned:
        return None
    state = next(state for axis, state in layout.states if axis in layout.keyed_axes)
    name, line = purpose.operator(conversion)
    imbalance, owners = imbalance_of(state), ranks.mesh.size_of(layout.keyed_axes)
    needed = min(ceil(100 * imbalance * message.num_rows / planned) / 100, owners)
    what = f"out of memory on rank {ranks.rank}: {message.num_rows:,} rows belong to its experts in this step, and the "
    what += f"plan has memory for {planned:,} ({imbalance:g} times the mean of {owners} owners)"
    facts = [("value", purpose.describe(conversion)), ("error", str(error).split("\n", 1)[0])]
    fix = f"plan with imbalance={needed:g} or more, or with a smaller micro-batch; or balance the router"
    return OutOfDeviceMemoryError(what, op=name, source=line, fix=fix, facts=facts)


def conversion_failed(error: Exception, purpose: Purpose) -> OutOfDeviceMemoryError | None:
    """Explain ``error``, which ended a conversion; None if it is not an out-of-memory error."""
    if isinstance(error, ShardwiseError) or not is_out_of_memory(error):
        return None
    largest = purpose.largest
    itemsize = largest.grad_itemsize if purpose.backward else largest.itemsize
    before, after = (
        prod(layout.local_shape(purpose.ranks.coordinates)) * itemsize for layout in purpose.layouts(largest)
    )
    whole = prod(largest.target.shape) * itemsize
    name, line = purpose.operator(largest)
    what = f"out of memory on rank {purpose.ranks.rank}, converting {purpose.named(largest)} to another layout"
    details = [
        ("value", purpose.describe(largest)),
        (
            "bytes",
            f"{format_bytes(after)} here afterwards, {format_bytes(before)} before; the whole tensor has "
            f"{format_bytes(whole)}; plus a buffer of up to {format_bytes(max(before, after))}",
        ),
        ("error", str(error).split("\n", 1)[0]),
    ]
    fix = (
        "keep it sharded there (strategies= of sw.plan, sw.shard, sw.constrain), or use a smaller batch or more devices"
    )
    return OutOfDeviceMemoryError(what, op=name, source=line, fix=fix, facts=details)
