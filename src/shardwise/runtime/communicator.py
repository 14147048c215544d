"""Run collectives on real ranks: the exchanges of ``programs.moves`` over ``torch.distributed`` process groups.

A program runs on the ranks of its placement. Only the groups it uses are created, in the same order on every rank of
the job. Gloo has no uneven all-gather and no booleans: uneven pieces are padded to the largest (the layouts give all
sizes), and booleans are sent as bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from copy import deepcopy
from dataclasses import dataclass
from datetime import timedelta
from functools import lru_cache
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from shardwise.errors import LaunchError
from shardwise.layouts.conversions import Collective
from shardwise.layouts.placement import Placement
from shardwise.runtime.faults import BlockedRank, exchange_failed, failure_store
from shardwise.runtime.heartbeat_file import trail
from shardwise.runtime.rank_tree import RankTree

# torch 2.13 renamed these two; the older names still work there, with a warning.
gather_tensor = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
scatter_tensor = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


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


def backend_of(group: Any = None) -> str:
    """Return the backend that carries the messages of a group (None: of the job): "nccl" if it carries those of GPUs,
    whatever the group has beside it ("cpu:gloo,cuda:nccl"), else that of CPUs."""
    asked = str(dist.get_backend(group))
    if asked in ("gloo", "nccl", "mpi"):
        return asked
    group = group or dist.group.WORLD
    for device, names in (("cuda", ("nccl",)), ("cpu", ("gloo", "mpi"))):
        with suppress(RuntimeError):  # the group has no backend for the device
            if (name := str(group._get_backend(torch.device(device)).name())) in names:
                return name
    return asked


def rank_device() -> torch.device:
    """Return this rank's device: its current GPU if messages between GPUs go through NCCL, else the CPU."""
    on_gpu = dist.is_initialized() and backend_of() == "nccl"
    return torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")


def finish_work(device: torch.device) -> None:
    """Wait for all work queued on a device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def is_gloo(group: Any) -> bool:
    return backend_of(group) == "gloo"


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

    A rank outside the placement has empty ``coordinates`` and takes part in ``create_groups`` only.
    """

    def __init__(self, place: Placement, name: str = "the program", backend: str | None = None) -> None:
        self.place, self.mesh, self.name, self.backend = place, place.mesh, name, backend
        self.calls = 0  # of the module, so far
        self.launched = 0  # collectives started, without those of compiled programs
        self.rank = dist.get_rank()
        self.coordinates = place.coordinates(self.rank) if self.rank in place.ranks else {}
        self.record: list[Collective] | None = None  # set to a list to record this rank's collectives
        self._groups: dict[frozenset[str], Any] = {}
        self._urgent: frozenset[frozenset[str]] = frozenset()  # the sets whose groups have high priority
        self.symmetric: dict[frozenset[str], bool] = {}  # axes -> whether their groups have symmetric memory
        self._reading: RankTree | None = None  # in which all ranks meet before an output is read

    def __deepcopy__(self, memo: dict[int, Any]) -> Communicator:
        other = type(self).__new__(type(self))  # process groups are shared: creating new ones is collective
        other.__dict__.update(self.__dict__)
        return other

    def __getstate__(self) -> dict[str, Any]:  # process groups are not stored: they are created again on use
        size = dist.get_world_size()
        groups: dict[str, Any] = {"_groups": {}, "_urgent": frozenset(), "symmetric": {}, "_reading": None}
        return {**self.__dict__, **groups, "record": None, "size": size}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore the state. Raises LaunchError if the file is another rank's, or of a job of another size."""
        stored = f"rank {state['rank']} of {state.pop('size')}"
        self.__dict__.update(state)
        here = f"rank {dist.get_rank()} of {dist.get_world_size()}" if dist.is_initialized() else "no rank"
        if here != stored:
            what = f"a parallel module that was stored on {stored} is loaded on {here}: it has one rank's shards"
            fix = "load the file of the same rank; any rank can read checkpoints of sw.save_checkpoint"
            raise LaunchError(what, fix=fix)

    def create_groups(
        self, axis_sets: Iterable[tuple[str, ...]], urgent: Collection[frozenset[str]] = frozenset()
    ) -> None:
        """Create the process groups of some sets of sub-axes. Every rank of the job must call this with the same sets,
        placement after placement in the same order.

        Their collectives get the time-out of the default group (torch gives new groups half an hour). ``urgent``: the
        sets whose messages NCCL sends on streams of high priority (``SpmdProgram.urgent_axes``). Such a set takes a new
        group where it has the job's, or one of an earlier program, which have none.
        """
        if self.backend not in (None, "nccl") or backend_of() != "nccl":
            urgent = frozenset()
        groups = {tuple(sorted(set(axes), key=self.mesh.order.__getitem__)) for axes in axis_sets}
        if not self._has_all_ranks:
            groups.add(self.mesh.sub_axes)  # of those in the placement
        for axes in sorted(groups):
            key = frozenset(axes)
            is_urgent = key in urgent and key not in self._urgent
            if key in self._groups and not is_urgent:
                continue
            is_world = self.mesh.size_of(axes) == self.mesh.num_devices and self.backend is None and self._has_all_ranks
            if is_world and not is_urgent:
                self._groups[key] = dist.group.WORLD
                continue
            self._groups[key] = new_groups(groups_along(self.place, axes), self.backend, is_urgent=is_urgent)
            self._urgent |= {key} if is_urgent else set()

    def create_reading_group(self) -> None:
        """Create the tree in which ranks meet to read an output; every rank of the job calls this. It carries no other
        messages, so a rank that reads alone waits and cannot pair with another collective."""
        if self._reading is None and self.mesh.num_devices > 1:
            self._reading = RankTree(f"reading-{_next_number()}", group_timeout())

    def meet(self, number: int, what: str) -> bool:
        """Wait for all ranks in the reading tree and return whether all passed the same number. Raises
        CollectiveError, naming ``what``, if one does not arrive."""
        seen = torch.tensor([number, -number])
        assert self._reading is not None, "create_reading_group comes first"
        with explain_failures(what, self._failed(what)):
            self._reading.largest(seen, lambda work: work.wait())
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

    def gather_flat(self, flat: torch.Tensor, counts: Sequence[int], what: str) -> list[torch.Tensor]:
        """Gather the flat tensors of all ranks of the placement, of ``counts`` elements."""
        padded = flat.new_zeros(max(counts))
        padded[: flat.numel()] = flat
        return [row[:count] for row, count in zip(self.gather_from_all(padded, what), counts, strict=True)]

    def swap(self, sent: Sequence[torch.Tensor], counts: Sequence[int], what: str) -> list[torch.Tensor]:
        """Send a flat tensor to every device of the placement; return those received, of ``counts`` elements."""
        is_world = self._has_all_ranks and self.backend is None
        group = dist.group.WORLD if is_world else self.group(self.mesh.sub_axes)
        self.launched += 1
        received, lengths = sent[0].new_empty(sum(counts)), [len(part) for part in sent]
        with explain_failures(what, self._failed(what)):
            work = dist.all_to_all_single(received, torch.cat(list(sent)), list(counts), lengths, group, async_op=True)
            InFlight(work, received, is_gloo(group)).wait()
        return list(received.split(list(counts)))

    def start_gather(self, tensor: torch.Tensor, what: str) -> GatheredRows:
        """Start ``gather_from_all`` and return its handle."""
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

    def note(self, kind: str, axes: tuple[str, ...], num_bytes: int) -> None:
        if self.record is not None:
            self.record.append(Collective(kind, axes, num_bytes))


@lru_cache(maxsize=64)
def groups_along(place: Placement, axes: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
    """Return the groups of the ranks that differ along ``axes`` only, each in ascending order."""
    groups: list[tuple[int, ...]] = []
    left = dict.fromkeys(place.ranks)
    while left:
        groups.append(tuple(sorted(place.group(axes, next(iter(left))))))
        for rank in groups[-1]:
            del left[rank]
    return tuple(groups)


def new_groups(each: Sequence[Sequence[int]], backend: str | None = None, *, is_urgent: bool = False) -> Any:
    """Create groups without common ranks, each in ascending order, and return the one of this rank (None if it is in
    none); all ranks of the job call this. ``backend``: if not the default's; ``is_urgent``: of NCCL, with streams of
    high priority.

    A rank takes part in its own group only. Where all ranks make every group, 16,384 ranks meet 2,000 times for the
    groups of eight along one axis. A communicator of NCCL that is bound to a device is split once for all of them: to
    torch a rank names only its own group, or another one if it is in none.
    """
    everyone: Any = dist.group.WORLD
    rank, splits = dist.get_rank(), everyone.bound_device_id is not None and backend in (None, dist.get_backend())
    number = _next_number()
    members = next((members for members in each if rank in members), None)
    if splits and dist.get_backend() == "nccl":
        ranks, options = [list(members or each[0])], _high_priority() if is_urgent else None
        return dist.split_group(split_ranks=ranks, timeout=group_timeout(), pg_options=options)
    if (backend or dist.get_backend()) == "mpi":  # which makes groups among all ranks only
        groups = [dist.new_group(list(members), timeout=group_timeout(), backend=backend) for members in each]
        return next((group for group, members in zip(groups, each, strict=True) if rank in members), None)
    options = _high_priority() if is_urgent else None
    return None if members is None else group_of_members(members, f"groups-{number}/{members[0]}", backend, options)


def _high_priority() -> Any:
    """Return the options of a group of NCCL: those of the job, and streams of high priority. Its kernels get
    multiprocessors ahead of queued blocks of products that run beside them. torch writes into the options of a group:
    each needs its own."""
    everyone: Any = dist.group.WORLD
    options = deepcopy(everyone._get_backend(rank_device()).options)
    options.is_high_priority_stream = True
    return options


def group_of_members(members: Sequence[int], name: str, backend: str | None = None, options: Any = None) -> Any:
    """Create a process group of some ranks, which only these call. ``name``: no other group of these ranks has it, and
    all members give it; torch's own name counts all groups of a rank, and others may have more or fewer. ``options``:
    of its backend."""
    everyone: Any = dist.group.WORLD
    device, named = everyone.bound_device_id, f"shardwise/{name}"
    # With a bound device torch splits the communicator of all ranks, in which ranks outside would have to take part.
    everyone.bound_device_id = None
    try:
        with patch.object(dist.distributed_c10d, "_hash_ranks_to_str", lambda ranks: named):
            settings: Any = {"timeout": group_timeout(), "backend": backend, "pg_options": options}
            return dist.new_group(list(members), use_local_synchronization=True, **settings)
    finally:
        everyone.bound_device_id = device


def _next_number() -> int:
    """Return a number that all ranks get for their next common group: torch's count of them in this job."""
    state: Any = dist.distributed_c10d._world
    state.group_count += 1
    return int(state.group_count)


def group_timeout() -> timedelta | None:
    """Return the time-out of the default group, which every other group gets."""
    group = dist.distributed_c10d._get_default_group()
    options: Any = getattr(group._get_backend(rank_device()), "options", None)
    timeout: timedelta | None = getattr(options, "_timeout", None)
    return timeout
