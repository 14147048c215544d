"""Collectives over chosen ranks, for programs that are written rank by rank instead of being partitioned here.

A ``RankGroup`` is the only handle of it; a group of one rank exchanges nothing, so that such a program runs as a single
process too. ``record_exchanges`` lists what is exchanged. Nothing here is differentiable: whoever needs a gradient says
which.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from unittest.mock import patch
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from shardwise.errors import LaunchError, problem
from shardwise.launch.ranks import rank, world_size
from shardwise.runtime.communicator import gather_tensor, group_timeout, scatter_tensor

REDUCTIONS = {
    "sum": dist.ReduceOp.SUM,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
    "prod": dist.ReduceOp.PRODUCT,
}


@dataclass(frozen=True, slots=True)
class RankGroup:
    """Some ranks, ascending; this process may be none of them. ``handle``: the process group, if they exchange."""

    ranks: tuple[int, ...]
    handle: Any = field(default=None, compare=False, repr=False)

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def position(self) -> int:
        """This process's number in the group. LaunchError if it is not a member."""
        if rank() not in self.ranks:
            what = f"rank {rank()} is not in the group of the ranks {_dashed(self.ranks)}"
            raise LaunchError(problem(what, fix="let only members call the collectives of a group"))
        return self.ranks.index(rank())


class RecordedExchange(NamedTuple):
    """A collective that this rank took part in. ``num_bytes``: what is reduced, or all pieces together."""

    kind: str
    group: tuple[int, ...]
    num_bytes: int


# Not a context variable: on a GPU, autograd runs the backward of a collective in a thread of its own.
_records: list[list[RecordedExchange]] = []


@contextmanager
def record_exchanges() -> Iterator[list[RecordedExchange]]:
    """A list that grows by every exchange of this process until the block ends."""
    record: list[RecordedExchange] = []
    _records.append(record)
    try:
        yield record
    finally:
        _records[:] = [other for other in _records if other is not record]


# By the group of all ranks: how many groups of some ranks this process has made, also those that it has left.
_groups_made: WeakKeyDictionary[Any, Counter[tuple[int, ...]]] = WeakKeyDictionary()


def is_connected() -> bool:
    """Whether this process has joined the others (``init_ranks``, or the script's own ``init_process_group``)."""
    return dist.is_initialized()


def backend() -> str:
    """The backend of all ranks: "gloo", "nccl"; empty before they are connected."""
    return str(dist.get_backend()) if dist.is_initialized() else ""


def all_ranks_group() -> RankGroup:
    """All ranks. LaunchError if there are several and they are not connected yet."""
    if world_size() > 1 and not dist.is_initialized():
        what = f"this process is rank {rank()} of {world_size()} and has not joined the others yet"
        raise LaunchError(problem(what, fix="call init() first (shardwise.init_ranks(), or the dialect's own)"))
    return RankGroup(tuple(range(world_size())), dist.group.WORLD if dist.is_initialized() else None)


def make_group(ranks: Sequence[int]) -> RankGroup:
    """A group of some ranks. All its members must make it, in the same order as their other common groups; the rest
    may, and wait for nobody."""
    members = tuple(sorted(ranks))
    whole = all_ranks_group()
    if members == whole.ranks:
        return whole
    if len(members) == 1 or rank() not in members:
        return RankGroup(members)
    groups_made = _groups_made.setdefault(whole.handle, Counter())
    groups_made[members] += 1
    name = f"shardwise/{'-'.join(map(str, members))}/{groups_made[members]}"
    # Members meet under a name. Torch's counts all groups of a rank, of which another member may have more or fewer.
    with patch.object(dist.distributed_c10d, "_hash_ranks_to_str", lambda ranks: name):
        handle = dist.new_group(list(members), timeout=group_timeout(), use_local_synchronization=True)
    return RankGroup(members, handle)


def leave_group(group: RankGroup) -> None:
    """Free a group's connections; the group of all ranks stays."""
    if group.handle is not None and group.size < world_size():
        dist.destroy_process_group(group.handle)


def all_reduce(tensor: torch.Tensor, reduction: str, group: RankGroup) -> torch.Tensor:
    """The ``reduction`` ("sum", "max", "min", "prod") of the members' tensors, as a new tensor."""
    result = tensor.contiguous().clone()
    if _exchanges("all_reduce", result, group):
        dist.all_reduce(result, op=REDUCTIONS[reduction], group=group.handle)
    return result


def all_gather(tensor: torch.Tensor, group: RankGroup) -> torch.Tensor:
    """The members' equally large tensors, one behind the other along dim 0; a scalar counts as one row."""
    sent = tensor.contiguous()
    sent = sent.reshape(1) if sent.ndim == 0 else sent
    result = sent.new_empty(group.size * sent.shape[0], *sent.shape[1:])
    if not _exchanges("all_gather", result, group):
        return sent.clone()
    gather_tensor(result.view(-1), sent.view(-1), group=group.handle)
    return result


def reduce_scatter(tensor: torch.Tensor, reduction: str, group: RankGroup) -> torch.Tensor:
    """Member i's i-th part, along dim 0, of the reduction of the members' tensors. Their dim 0 is divisible."""
    sent = tensor.contiguous()
    if not _exchanges("reduce_scatter", sent, group):
        return sent.clone()
    result = sent.new_empty(sent.shape[0] // group.size, *sent.shape[1:])
    scatter_tensor(result.view(-1), sent.view(-1), op=REDUCTIONS[reduction], group=group.handle)
    return result


def broadcast(tensor: torch.Tensor, root: int, group: RankGroup) -> torch.Tensor:
    """What rank ``root`` (its number among all ranks) has, as a new tensor."""
    result = tensor.contiguous().clone()
    if _exchanges("broadcast", result, group):
        dist.broadcast(result, src=root, group=group.handle)
    return result


def all_to_all(pieces: Sequence[torch.Tensor], group: RankGroup) -> list[torch.Tensor]:
    """Piece i goes to member i; returned are the pieces that came, by member. All have the same shape."""
    sent = torch.stack([piece.contiguous() for piece in pieces])
    if not _exchanges("all_to_all", sent, group):
        return list(sent.unbind(0))
    result = torch.empty_like(sent)
    dist.all_to_all_single(result.view(-1), sent.view(-1), group=group.handle)
    return list(result.unbind(0))


def exchange(
    tensors: Sequence[torch.Tensor], to: Sequence[int], empty: Sequence[torch.Tensor], sources: Sequence[int]
) -> tuple[torch.Tensor, ...]:
    """Tensor i goes to rank ``to[i]``, of all ranks; what comes from the ``sources`` fills the ``empty`` ones, which
    are returned. Between two ranks messages arrive in their order."""
    kept_here = [tensor for tensor, target in zip(tensors, to, strict=True) if target == rank()]
    calls = [
        dist.P2POp(dist.isend, tensor.contiguous(), target)
        for tensor, target in zip(tensors, to, strict=True)
        if target != rank()
    ]
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
    """Whether anything must be sent; then it is recorded. LaunchError if this rank is not a member."""
    _ = group.position
    if group.size == 1:
        return False
    for record in _records:
        record.append(RecordedExchange(kind, group.ranks, tensor.numel() * tensor.element_size()))
    return True


def _dashed(ranks: Sequence[int]) -> str:
    return "-".join(map(str, ranks))
