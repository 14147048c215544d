"""Collectives over chosen ranks, for programs that are written rank by rank instead of being partitioned here.

They take a ``RankGroup``. A group of one rank exchanges nothing, so such a program also runs as a single process.
``record_exchanges`` lists the exchanges. Nothing here is differentiable: callers define the backward themselves.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from shardwise import rank, world_size
from shardwise.errors import LaunchError
from shardwise.mindspore.library import backend_of, gather_tensor, group_of_members, scatter_tensor

REDUCTIONS = {name: getattr(dist.ReduceOp, torchs) for name, torchs in (
    ("sum", "SUM"), ("max", "MAX"), ("min", "MIN"), ("prod", "PRODUCT"))}  # fmt: skip


@dataclass(frozen=True, slots=True)
class RankGroup:
    """A group of ranks, ascending; this process need not be a member. ``handle``: the process group, if it has one."""

    ranks: tuple[int, ...]
    handle: Any = field(default=None, compare=False, repr=False)

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def position(self) -> int:
        """Return this process's index in the group. Raises LaunchError if it is not a member."""
        if rank() not in self.ranks:
            what = f"rank {rank()} is not in the group of the ranks {'-'.join(map(str, self.ranks))}"
            raise LaunchError(what, fix="let only members call the collectives of a group")
        return self.ranks.index(rank())


class RecordedExchange(NamedTuple):
    """A collective of this rank. ``num_bytes``: of the reduced tensor, or of all pieces together."""

    kind: str
    group: tuple[int, ...]
    num_bytes: int


# Not a context variable: on a GPU, autograd runs the backward of a collective in a thread of its own.
_records: list[list[RecordedExchange]] = []


@contextmanager
def record_exchanges() -> Iterator[list[RecordedExchange]]:
    """Yield a list to which every exchange of this process is appended until the block ends."""
    record: list[RecordedExchange] = []
    _records.append(record)
    try:
        yield record
    finally:
        _records[:] = [other for other in _records if other is not record]


# How many groups this process has created per tuple of ranks, including those it has left; by the group of all ranks.
_groups_made: WeakKeyDictionary[Any, Counter[tuple[int, ...]]] = WeakKeyDictionary()


def backend() -> str:
    """Return the backend of all ranks ("gloo", "nccl"); empty before they are connected."""
    return backend_of() if dist.is_initialized() else ""


def all_ranks_group() -> RankGroup:
    """Return the group of all ranks. Raises LaunchError if there are several and they are not connected yet."""
    if world_size() > 1 and not dist.is_initialized():
        what = f"this process is rank {rank()} of {world_size()} and has not joined the others yet"
        raise LaunchError(what, fix="call init() first (shardwise.init_ranks(), or the dialect's own)")
    return RankGroup(tuple(range(world_size())), dist.group.WORLD if dist.is_initialized() else None)


def make_group(ranks: Sequence[int]) -> RankGroup:
    """Create a group of ranks. All members must call this, in the same order as for their other common groups. Other
    ranks may call it, and do not wait."""
    members = tuple(sorted(ranks))
    whole = all_ranks_group()
    if members == whole.ranks:
        return whole
    if len(members) == 1 or rank() not in members:
        return RankGroup(members)
    groups_made = _groups_made.setdefault(whole.handle, Counter())
    groups_made[members] += 1
    handle = group_of_members(members, f"{'-'.join(map(str, members))}/{groups_made[members]}")
    return RankGroup(members, handle)


def leave_group(group: RankGroup) -> None:
    """Free a group's connections; the group of all ranks is kept."""
    if group.handle is not None and group.size < world_size():
        dist.destroy_process_group(group.handle)


def all_reduce(tensor: torch.Tensor, reduction: str, group: RankGroup) -> torch.Tensor:
    """Return the ``reduction`` ("sum", "max", "min", "prod") of the members' tensors, as a new tensor."""
    result = tensor.contiguous().clone()
    if _exchanges("all_reduce", result, group):
        dist.all_reduce(result, op=REDUCTIONS[reduction], group=group.handle)
    return result


def all_gather(tensor: torch.Tensor, group: RankGroup) -> torch.Tensor:
    """Return the members' equally large tensors, concatenated along dim 0; a scalar counts as one row."""
    sent = tensor.contiguous()
    sent = sent.reshape(1) if sent.ndim == 0 else sent
    result = sent.new_empty(group.size * sent.shape[0], *sent.shape[1:])
    if not _exchanges("all_gather", result, group):
        return sent.clone()
    gather_tensor(result.view(-1), sent.view(-1), group=group.handle)
    return result


def reduce_scatter(tensor: torch.Tensor, reduction: str, group: RankGroup) -> torch.Tensor:
    """Reduce the members' tensors and return member i's i-th chunk along dim 0, which must be divisible."""
    sent = tensor.contiguous()
    if not _exchanges("reduce_scatter", sent, group):
        return sent.clone()
    result = sent.new_empty(sent.shape[0] // group.size, *sent.shape[1:])
    scatter_tensor(result.view(-1), sent.view(-1), op=REDUCTIONS[reduction], group=group.handle)
    return result


def broadcast(tensor: torch.Tensor, root: int, group: RankGroup) -> torch.Tensor:
    """Return the tensor of rank ``root`` (a global rank), as a new tensor."""
    result = tensor.contiguous().clone()
    if _exchanges("broadcast", result, group):
        dist.broadcast(result, src=root, group=group.handle)
    return result


def all_to_all(pieces: Sequence[torch.Tensor], group: RankGroup) -> list[torch.Tensor]:
    """Send piece i to member i; return the received pieces, by member. All have the same shape."""
    sent = torch.stack([piece.contiguous() for piece in pieces])
    if not _exchanges("all_to_all", sent, group):
        return list(sent.unbind(0))
    result = torch.empty_like(sent)
    dist.all_to_all_single(result.view(-1), sent.view(-1), group=group.handle)
    return list(result.unbind(0))


def exchange(
    tensors: Sequence[torch.Tensor], to: Sequence[int], empty: Sequence[torch.Tensor], sources: Sequence[int]
) -> tuple[torch.Tensor, ...]:
    """Send tensor i to global rank ``to[i]``, receive from the ``sources`` into the ``empty`` tensors, and return
    these. Messages between two ranks arrive in order."""
    kept_here = [tensor for tensor, target in zip(tensors, to, strict=True) if target == rank()]
    pairs = zip(tensors, to, strict=True)
    calls = [dist.P2POp(dist.isend, tensor.contiguous(), target) for tensor, target in pairs if target != rank()]
    for result, source in zip(empty, sources, strict=True):
        if source == rank():
            result.copy_(kept_here.pop(0))
        else:
            calls.append(dist.P2POp(dist.irecv, result, source))
    for record in _records:
        num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        record.append(RecordedExchange("exchange", tuple(sorted({*to, *sources, rank()})), num_bytes))
    for request in dist.batch_isend_irecv(calls) if calls else ():
        request.wait()
    return tuple(empty)


def _exchanges(kind: str, tensor: torch.Tensor, group: RankGroup) -> bool:
    """Record an exchange; return False if the group has one rank. Raises LaunchError if this rank is not a member."""
    _ = group.position
    if group.size == 1:
        return False
    for record in _records:
        record.append(RecordedExchange(kind, group.ranks, tensor.numel() * tensor.element_size()))
    return True
