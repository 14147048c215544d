"""Collectives that write into tensors, like torch.distributed, over the dialect's groups."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from shardwise.mindspore import rank_groups
from shardwise.mindspore.communication import management as D
from shardwise.mindspore.communication.comm_func import Done, barrier, recv, send
from shardwise.mindspore.named import absent
from shardwise.mindspore.ops.communication import ReduceOp

Tensor = torch.Tensor
Handle = Done | None


def init_process_group(backend: str | None = None, *settings: Any, **named: Any) -> None:
    """Join the other ranks: ``communication.init``. The launcher decides how they connect."""
    D.init(backend)


def is_initialized() -> bool:
    return dist.is_initialized()


def is_available() -> bool:
    return True


def destroy_process_group(group: str | None = None) -> None:
    """Remove a group. Without a group leave all ranks."""
    D.release() if group is None else D.destroy_group(group)


def get_rank(group: str | None = None) -> int:
    return D.get_rank(group or D.GlobalComm.WORLD_COMM_GROUP)


def get_world_size(group: str | None = None) -> int:
    return D.find_group(group).size


def get_backend(group: str | None = None) -> str:
    return rank_groups.backend()


def get_global_rank(group: str | None, group_rank: int) -> int:
    return D.get_world_rank_from_group_rank(group or D.GlobalComm.WORLD_COMM_GROUP, group_rank)


def get_group_rank(group: str | None, global_rank: int) -> int:
    return D.get_group_rank_from_world_rank(global_rank, group or D.GlobalComm.WORLD_COMM_GROUP)


def get_process_group_ranks(group: str | None = None) -> list[int]:
    return list(D.find_group(group).ranks)


def new_group(ranks: Sequence[int] | None = None, timeout: Any = None, backend: Any = None, *others: Any) -> str:
    """Return the name of a group of these ranks."""
    if ranks is None:
        return D.GlobalComm.WORLD_COMM_GROUP
    name = f"group of {D.group_ranks_name(ranks)}"
    if name not in D._groups:
        D.create_group(name, list(ranks))
    return name


def _written(target: Tensor, value: Tensor, async_op: bool) -> Handle:
    target.detach().copy_(value.reshape(target.shape))
    return Done() if async_op else None


def all_reduce(tensor: Tensor, op: str = ReduceOp.SUM, group: str | None = None, async_op: bool = False) -> Handle:
    return _written(tensor, rank_groups.all_reduce(tensor.detach(), op, D.find_group(group)), async_op)


def reduce(
    tensor: Tensor, dst: int, op: str = ReduceOp.SUM, group: str | None = None, async_op: bool = False
) -> Handle:
    """Write the reduction to ``tensor`` on ``dst``."""
    reduced = rank_groups.all_reduce(tensor.detach(), op, D.find_group(group))
    return _written(tensor, reduced if get_rank() == dst else tensor, async_op)


def broadcast(tensor: Tensor, src: int, group: str | None = None, async_op: bool = False) -> Handle:
    return _written(tensor, rank_groups.broadcast(tensor.detach(), src, D.find_group(group)), async_op)


def all_gather_into_tensor(
    output_tensor: Tensor, input_tensor: Tensor, group: str | None = None, async_op: bool = False
) -> Handle:
    return _written(output_tensor, rank_groups.all_gather(input_tensor.detach(), D.find_group(group)), async_op)


def all_gather(
    tensor_list: Sequence[Tensor], tensor: Tensor, group: str | None = None, async_op: bool = False
) -> Handle:
    parts = rank_groups.all_gather(tensor.detach().unsqueeze(0), D.find_group(group))
    return [_written(buffer, part, async_op) for buffer, part in zip(tensor_list, parts, strict=True)][-1]


def gather(
    tensor: Tensor, gather_list: Sequence[Tensor] | None, dst: int = 0, group: str | None = None, async_op: bool = False
) -> Handle:
    parts = rank_groups.all_gather(tensor.detach().unsqueeze(0), D.find_group(group))
    if get_rank() == dst:
        for buffer, part in zip(gather_list or (), parts, strict=True):
            _written(buffer, part, async_op)
    return Done() if async_op else None


def scatter(
    tensor: Tensor, scatter_list: Sequence[Tensor] | None, src: int = 0, group: str | None = None,
    async_op: bool = False,
) -> Handle:  # fmt: skip
    members = D.find_group(group)
    sent = torch.stack(tuple(scatter_list or (tensor.detach(),) * members.size)).detach()
    return _written(tensor, rank_groups.broadcast(sent, src, members)[members.position], async_op)


def reduce_scatter_tensor(
    output: Tensor, input: Tensor, op: str = ReduceOp.SUM, group: str | None = None, async_op: bool = False
) -> Handle:
    return _written(output, rank_groups.reduce_scatter(input.detach(), op, D.find_group(group)), async_op)


def reduce_scatter(
    output: Tensor, input_list: Sequence[Tensor], op: str = ReduceOp.SUM, group: str | None = None,
    async_op: bool = False,
) -> Handle:  # fmt: skip
    return reduce_scatter_tensor(output, torch.cat([x.detach() for x in input_list]), op, group, async_op)


def all_to_all(
    output_tensor_list: Sequence[Tensor], input_tensor_list: Sequence[Tensor], group: str | None = None,
    async_op: bool = False,
) -> Handle:  # fmt: skip
    parts = rank_groups.all_to_all([x.detach() for x in input_tensor_list], D.find_group(group))
    return [_written(buffer, part, async_op) for buffer, part in zip(output_tensor_list, parts, strict=True)][-1]


def all_gather_object(object_list: list[Any], obj: Any, group: str | None = None) -> None:
    """Gather one object of any type from each rank."""
    members = D.find_group(group)
    if members.size == 1:
        object_list[0] = obj
    else:
        dist.all_gather_object(object_list, obj, group=members.handle)


def broadcast_object_list(object_list: list[Any], src: int = 0, group: str | None = None, device: Any = None) -> None:
    members = D.find_group(group)
    if members.size > 1:
        dist.broadcast_object_list(object_list, src, group=members.handle)


__all__ = [
    "ReduceOp", "all_gather", "all_gather_into_tensor", "all_gather_object", "all_reduce", "all_to_all", "barrier",
    "broadcast", "broadcast_object_list", "destroy_process_group", "gather", "get_backend", "get_global_rank",
    "get_group_rank", "get_process_group_ranks", "get_rank", "get_world_size", "init_process_group",
    "is_available", "is_initialized", "new_group", "recv", "reduce", "reduce_scatter",
    "reduce_scatter_tensor", "scatter", "send",
]  # fmt: skip
__getattr__ = absent(__name__, lambda: __all__)
