"""Run collectives on real ranks: the exchanges of ``programs.moves`` over ``torch.distributed`` process groups.

A program runs on the ranks of its placement. Only the groups it uses are created, in the same order on every rank of
the job. Gloo has no uneven all-gather and no booleans: uneven pieces are padded to the largest (the layouts give all
sizes), and booleans are sent as bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from math import prod
from typing import Any

import torch
import torch.distributed as dist

from shardwise.errors import LaunchError, problem
from shardwise.layouts.conversions import Collective
from shardwise.layouts.placement import Placement
from shardwise.programs.moves import LocalMove
from shardwise.runtime.collective_tracker import trail
from shardwise.runtime.failure_store import failure_store
from shardwise.runtime.faults import (
    BlockedRank,
    Purpose,
    collective_failed,
    collective_of,
    conversion_failed,
    exchange_failed,
)

# torch 2.13 renamed these two; the older names still work there, with a warning.
gather_tensor = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
scatter_tensor = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

REDUCTIONS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN, "any": dist.ReduceOp.MAX}


@dataclass(frozen=True, slots=True)
class InFlight:
    """A collective that was started. It holds what it sends until the wait: on GPUs it runs on its own stream, and
    freed memory is reused at once. ``rows``: (the buffer that arrives, this rank's own rows to add to it)."""

    work: Any
    sent: torch.Tensor
    is_gloos: bool
    rows: tuple[torch.Tensor, torch.Tensor] | None = None

    def wait(self) -> None:
        """Wait until it is done; with gloo, or until a failing rank is known."""
        if self.is_gloos:
            failure_store.wait(self.work)
        else:
            self.work.wait()
        if self.rows is not None:
            received, this_rows = self.rows
            received.add_(this_rows)


def is_gloo(group: Any) -> bool:
    return bool(dist.get_backend(group) == "gloo")


def adds_rows(group: Any) -> bool:
    """Return whether a reduce-scatter in the group is an all-to-all whose rows each member sums. Gloo's own reduces
    everything on every rank: 20 MiB took 51 ms among two ranks and 50 among four, an all-to-all 13 and 27 (torch 2.13,
    a 2-core AMD EPYC under load)."""
    return is_gloo(group)


def exchange_rows(sent: torch.Tensor, group: Any, *, is_async: bool) -> tuple[torch.Tensor, InFlight]:
    """Start the all-to-all: return (the input of ``sum_received``, the handle). ``sent``: one row per member,
    concatenated. With two ranks each receives only the other's row, and adds its own on arrival."""
    size = dist.get_world_size(group)
    if size != 2:
        received = torch.empty_like(sent)
        work = dist.all_to_all_single(received, sent, group=group, async_op=is_async)
        return received, InFlight(work, sent, is_gloo(group))
    rows, place = sent.view(2, -1), dist.get_rank(group)
    received = torch.empty_like(rows[1 - place])
    work = _swap(received, rows[1 - place], place, group, is_async)
    return received, InFlight(work, sent, is_gloo(group), (received, rows[place]))


def gather_rows(received: torch.Tensor, sent: torch.Tensor, group: Any, *, is_async: bool) -> Any:
    """Start an all-gather and return its handle. ``received``: one row per member, concatenated. Two gloo ranks swap
    rows and copy their own: gloo's own all-gather of 20 MiB took twice the processor time (torch 2.13, a 2-core AMD
    EPYC under load)."""
    if not (is_gloo(group) and dist.get_world_size(group) == 2):
        return gather_tensor(received, sent, group=group, async_op=is_async)
    rows, place = received.view(2, -1), dist.get_rank(group)
    work = _swap(rows[1 - place], sent, place, group, is_async)
    rows[place].copy_(sent)
    return work


def _swap(received: torch.Tensor, sent: torch.Tensor, place: int, group: Any, is_async: bool) -> Any:
    """Exchange equally large tensors between the two ranks of a group."""
    counts = [len(sent) * (place == 1), len(sent) * (place == 0)]
    return dist.all_to_all_single(received, sent, counts, counts, group=group, async_op=is_async)


def sum_received(received: torch.Tensor, size: int) -> torch.Tensor:
    """Sum the rows received from the members, in rank order."""
    return received if size == 2 else received.view(size, -1).sum(0, dtype=received.dtype)


# A network error -> the error to raise instead; None for any other error.
Failed = Callable[[Exception], Exception | None]


@contextmanager
def explain_failures(what: str, failed: Failed) -> Iterator[None]:
    """Track an exchange that this rank waits for, and explain its network errors."""
    try:
        with trail.waiting(what.encode()):
            yield
    except RuntimeError as error:
        explained = failed(error)
        if explained is None:
            raise
        raise explained from error


@dataclass
class GatheredRows:
    """Equally large tensors of all ranks that are being gathered, one row each."""

    rows: torch.Tensor
    flight: InFlight
    what: str
    failed: Failed

    def wait(self) -> torch.Tensor:
        """Wait for the rows and return them. Raises CollectiveError."""
        with explain_failures(self.what, self.failed):
            self.flight.wait()
        return self.rows


class Communicator:
    """Performs this rank's moves among the ranks of a placement. Process groups are cached per set of sub-axes.
    ``name``: the module's, for errors; ``backend``: of groups that need another one than the default group's.

    A rank outside the placement has empty ``coordinates`` and takes part in ``create_groups`` only. ``before_next``: a
    check to run before the next collective starts, if any (``runtime.signatures``).
    """

    def __init__(self, place: Placement, name: str = "the program", backend: str | None = None) -> None:
        self.place, self.mesh, self.name, self.backend = place, place.mesh, name, backend
        self.calls = 0  # of the module, so far
        self.launched = 0  # collectives started, without those of compiled programs
        self.rank = dist.get_rank()
        self.coordinates = place.coordinates(self.rank) if self.rank in place.ranks else {}
        self.before_next: Callable[[], None] | None = None
        self.record: list[Collective] | None = None  # set to a list to record this rank's collectives
        self._groups: dict[frozenset[str], Any] = {}
        self._reading: Any = None  # the group of all ranks that meets before an output is read

    def __deepcopy__(self, memo: dict[int, Any]) -> Communicator:
        other = type(self).__new__(type(self))  # process groups are shared: creating new ones is collective
        other.__dict__.update(self.__dict__)
        return other

    def __getstate__(self) -> dict[str, Any]:  # process groups are not stored: they are created again on use
        size = dist.get_world_size()
        return {**self.__dict__, "_groups": {}, "_reading": None, "before_next": None, "record": None, "size": size}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore the state. Raises LaunchError if the file is another rank's, or of a job of another size."""
        stored = f"rank {state['rank']} of {state.pop('size')}"
        self.__dict__.update(state)
        here = f"rank {dist.get_rank()} of {dist.get_world_size()}" if dist.is_initialized() else "no rank"
        if here != stored:
            raise LaunchError(
                problem(
                    f"a parallel module that was stored on {stored} is loaded on {here}: it has one rank's shards",
                    fix="load the file of the same rank; any rank can read checkpoints of sw.save_checkpoint",
                )
            )

    def create_groups(self, axis_sets: Iterable[tuple[str, ...]]) -> None:
        """Create the process groups of some sets of sub-axes. Every rank of the job must call this with the same sets,
        placement after placement in the same order.

        Their collectives get the time-out of the default group (torch gives new groups half an hour).
        """
        groups = {tuple(sorted(set(axes), key=self.mesh.order.__getitem__)) for axes in axis_sets}
        if not self._has_all_ranks:
            groups.add(self.mesh.sub_axes)  # of those in the placement
        for axes in sorted(groups):
            if frozenset(axes) in self._groups:
                continue
            if self.mesh.size_of(axes) == self.mesh.num_devices and self.backend is None and self._has_all_ranks:
                self._groups[frozenset(axes)] = dist.group.WORLD
                continue
            devices = range(self.mesh.num_devices)
            for group_devices in dict.fromkeys(tuple(sorted(self.mesh.group(axes, device))) for device in devices):
                members = [self.place.ranks[device] for device in group_devices]
                group = new_group(members, self.backend)
                if self.rank in members or self.rank not in self.place.ranks:
                    self._groups[frozenset(axes)] = group

    def create_reading_group(self) -> None:
        """Create the group in which ranks meet to read an output; every rank of the job calls this. It carries no other
        messages, so a rank that reads alone waits and cannot pair with another collective."""
        if self._reading is None and self.mesh.num_devices > 1:
            self._reading = dist.new_group(timeout=group_timeout(), backend="gloo")

    def meet(self, number: int, what: str) -> bool:
        """Wait for all ranks in the reading group and return whether all passed the same number. Raises
        CollectiveError, naming ``what``, if one does not arrive."""
        seen = torch.tensor([number, -number])
        with explain_failures(what, self._failed(what)):
            dist.all_reduce(seen, dist.ReduceOp.MAX, group=self._reading)
        return int(seen[0]) == -int(seen[1])

    @property
    def _has_all_ranks(self) -> bool:
        return len(self.place.ranks) == dist.get_world_size()

    def group(self, axes: tuple[str, ...]) -> Any:
        """Return the group of the ranks that differ along ``axes`` only. Raises LayoutError outside the placement."""
        self.place.device_of(self.rank)
        return self._groups[frozenset(axes)]

    def gather_from_all(self, tensor: torch.Tensor, what: str) -> torch.Tensor:
        """Gather the equally large tensors of all ranks of the placement, one row each. ``what``: names the exchange in
        a CollectiveError."""
        return self.start_gather(tensor, what).wait()

    def start_gather(self, tensor: torch.Tensor, what: str) -> GatheredRows:
        """Start ``gather_from_all`` and return its handle."""
        self.make_sure()
        is_world = self._has_all_ranks and self.backend is None
        group = dist.group.WORLD if is_world else self.group(self.mesh.sub_axes)
        self.launched += 1
        failed = self._failed(what)
        rows, sent = tensor.new_empty(self.mesh.num_devices, tensor.numel()), tensor.reshape(-1)
        with explain_failures(what, failed):
            work = gather_tensor(rows.view(-1), sent, group=group, async_op=True)
        return GatheredRows(rows, InFlight(work, sent, is_gloo(group)), what, failed)

    def bring(self, tensor: torch.Tensor, source: int, target: int | None, what: str) -> torch.Tensor:
        """Return a tensor of rank ``source`` on rank ``target``, or on all (None); the others pass one of its shape.
        Raises CollectiveError, naming ``what``."""
        self.make_sure()
        self.launched += 1
        wire = tensor.contiguous().reshape(-1).view(torch.uint8)  # no backend sends every dtype
        if wire.numel() and source != target and (target is None or self.rank in (source, target)):
            with explain_failures(what, self._failed(what)):
                if target is None:
                    dist.broadcast(wire, source)
                elif self.rank == source:
                    dist.send(wire, target)
                else:
                    dist.recv(wire, source)
        return wire.view(tensor.dtype).view(tensor.shape)

    def _failed(self, what: str) -> Failed:
        """Return the function that explains a network error in an exchange of all ranks. ``what``: its purpose."""
        waiting = BlockedRank(self.name, self.launched, what, self.place.ranks)
        facts = [("pass", f"call {self.calls}")]
        return lambda error: exchange_failed(error, self.rank, waiting, what, "", "", facts)

    def make_sure(self) -> None:
        """Run the pending check of this rank's assumptions, if any; called before every collective."""
        if self.before_next is not None:
            self.before_next()

    def note(self, kind: str, axes: tuple[str, ...], num_bytes: int) -> None:
        """Add a collective to the record, if one is kept."""
        if self.record is not None:
            self.record.append(Collective(kind, axes, num_bytes))


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
        self.is_gloos = self.parcels[0].is_gloos

    def launch(self, tensors: Sequence[torch.Tensor], *, wait: bool) -> tuple[list[torch.Tensor], list[InFlight]]:
        """Start the collective: return (the buffers it fills, the handles for ``finish``, none if it is done).

        Raises CollectiveError, or OutOfDeviceMemoryError.
        """
        self.ranks.make_sure()
        self.ranks.launched = self.number = self.ranks.launched + 1
        try:
            if not wait:
                return self._launch(tensors, wait=False)
            with trail.waiting(self.label):
                buffers, flights = self._launch(tensors, wait=not self.is_gloos)
                for flight in flights:
                    flight.wait()
                return buffers, []
        except (RuntimeError, MemoryError) as error:
            self._explain(error)
            raise

    def finish(self, flights: Sequence[InFlight]) -> None:
        """Wait for a collective. Raises the same errors as ``launch``."""
        try:
            with trail.waiting(self.label):
                for flight in flights:
                    flight.wait()
        except (RuntimeError, MemoryError) as error:
            self._explain(error)
            raise

    @cached_property
    def label(self) -> bytes:
        """Describe the collective for the rank's heartbeat file."""
        return collective_of(self).encode()

    def _explain(self, error: Exception) -> None:
        explained = conversion_failed(error, self.purpose) or collective_failed(error, self)
        if explained is not None:
            raise explained from error

    def _launch(self, tensors: Sequence[torch.Tensor], wait: bool) -> tuple[list[torch.Tensor], list[InFlight]]:
        sent = [
            parcel.launch([tensors[i] for i in positions], wait)
            for parcel, positions in zip(self.parcels, self.together, strict=True)
        ]
        self.ranks.note(self.kind, self.axes, sum(num_bytes for *_, num_bytes in sent))
        return [buffer for buffer, *_ in sent], [] if wait else [flight for _, flight, _ in sent]

    def land(self, buffers: list[torch.Tensor], this_rank: Sequence[torch.Tensor] = ()) -> list[torch.Tensor]:
        """Return the results from filled buffers. ``this_rank``: its own tensor, if the move needs it too."""
        results: dict[int, torch.Tensor] = {}
        for parcel, positions in zip(reversed(self.parcels), reversed(self.together), strict=True):
            results.update(zip(positions, parcel.land(buffers.pop(), this_rank), strict=True))
        return [results[i] for i in range(len(results))]


class PackedTensors:
    """Tensors of a message that share its buffers."""

    def __init__(self, moves: Sequence[LocalMove], ranks: Communicator, in_place: bool) -> None:
        first = moves[0]
        self.moves, self.in_place, self.kind = list(moves), in_place, first.kind
        self.group = ranks.group(first.axes)
        self.size = ranks.mesh.size_of(first.axes)
        self.op = REDUCTIONS[first.reduction]
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
        if self.kind == "all_reduce":
            return self._all_reduce(tensors, wait)
        if self.kind == "all_gather":
            return self._all_gather(tensors, wait)
        if self.kind == "reduce_scatter":
            return self._reduce_scatter(tensors, wait)
        return self._all_to_all(tensors, wait)

    def land(self, buffer: torch.Tensor, this_rank: Sequence[torch.Tensor] = ()) -> list[torch.Tensor]:
        """Return the results from the buffer. ``this_rank``: its own tensor, if the move needs it too."""
        if self.adds_rows:
            buffer = sum_received(buffer, self.size)
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
            wire = _wire(tensor)
            buffer = wire if self.in_place or not tensor.is_contiguous() else wire.clone()
        else:
            tensor = buffer = torch.cat([tensor.reshape(-1) for tensor in tensors])
        work = dist.all_reduce(buffer, op=self.op, group=self.group, async_op=not wait)
        return buffer.view(tensor.dtype), InFlight(work, buffer, self.is_gloos), buffer.nbytes

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


def new_group(members: Sequence[int], backend: str | None = None) -> Any:
    """Create a process group of some ranks; all ranks of the job call this. ``backend``: if not the default's."""
    everyone: Any = dist.group.WORLD
    device = everyone.bound_device_id
    if backend is not None:
        # With a bound device torch makes outside ranks split the NCCL communicator, which hangs for a gloo group.
        everyone.bound_device_id = None
    try:
        return dist.new_group(list(members), timeout=group_timeout(), backend=backend)
    finally:
        everyone.bound_device_id = device


def group_timeout() -> timedelta | None:
    """Return the time-out of the default group, which every other group gets."""
    device = torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")
    options: Any = getattr(dist.distributed_c10d._get_default_group()._get_backend(device), "options", None)
    timeout: timedelta | None = getattr(options, "_timeout", None)
    return timeout


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


def _wire(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor as it is sent: contiguous, booleans as bytes."""
    tensor = tensor.contiguous()
    return tensor.view(torch.uint8) if tensor.dtype == torch.bool else tensor
