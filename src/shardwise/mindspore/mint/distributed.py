"""Collectives that write into tensors, like torch.distributed, over the dialect's groups."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from shardwise.mindspore import rank_groups
from shardwise.mindspore.communication import management as D
from shardwise.mindspore.communication.comm_func import Done, barrier, recv, send
from shardwise.mindspore.named import absent, functions_of
from shardwise.mindspore.ops.communication import AllGather, AllReduce, Broadcast, ReduceOp, ReduceScatter

Tensor = torch.Tensor


def new_group(ranks: Sequence[int] | None = None, timeout: Any = None, backend: Any = None, *others: Any) -> str:
    """Return the name of a group of these ranks."""
    if ranks is None:
        return D.GlobalComm.WORLD_COMM_GROUP
    name = f"group of {D.group_ranks_name(ranks)}"
    if name not in D._groups:
        D.create_group(name, list(ranks))
    return name


def _written(targets: Iterable[Tensor], values: Any, async_op: bool) -> Done | None:
    for target, value in zip(targets, values, strict=True):
        target.detach().copy_(value.reshape(target.shape))
    return Done() if async_op else None


def _rows(tensor: Tensor, group: str | None) -> Tensor:
    return AllGather(group)(tensor.detach().unsqueeze(0))


def _collected(tensor: Tensor, buffers: Any, dst: int, group: str | None, async_op: bool) -> Done | None:
    rows, is_here = _rows(tensor, group), D.get_rank() == dst
    return _written(buffers or () if is_here else (), rows if is_here else (), async_op)


def _scattered(tensor: Tensor, parts: Sequence[Tensor] | None, src: int, group: str | None) -> Any:
    members = D.find_group(group)
    sent = torch.stack(tuple(parts or (tensor.detach(),) * members.size)).detach()
    return Broadcast(src, group)(sent)[members.position]


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


_SUM = ReduceOp.SUM
FUNCTIONS = functions_of({
    # the launcher decides how ranks connect
    "init_process_group": lambda backend=None, *settings, **named: D.init(backend),
    "destroy_process_group": lambda group=None: D.release() if group is None else D.destroy_group(group),
    "is_initialized": lambda: dist.is_initialized(), "is_available": lambda: True,
    "get_rank": lambda group=None: D.get_rank(group), "get_world_size": lambda group=None: D.find_group(group).size,
    "get_backend": lambda group=None: rank_groups.backend(),
    "get_global_rank": lambda group, group_rank: D.get_world_rank_from_group_rank(group, group_rank),
    "get_group_rank": lambda group, global_rank: D.get_group_rank_from_world_rank(global_rank, group),
    "get_process_group_ranks": lambda group=None: list(D.find_group(group).ranks),
    "all_reduce": lambda tensor, op=_SUM, group=None, async_op=False: _written(
        [tensor], [AllReduce(op, group)(tensor.detach())], async_op),
    "reduce": lambda tensor, dst, op=_SUM, group=None, async_op=False: _written(  # on ``dst`` alone
        [tensor], [(tensor, AllReduce(op, group)(tensor.detach()))[D.get_rank() == dst]], async_op),
    "broadcast": lambda tensor, src, group=None, async_op=False: _written(
        [tensor], [Broadcast(src, group)(tensor.detach())], async_op),
    "all_gather_into_tensor": lambda output_tensor, input_tensor, group=None, async_op=False: _written(
        [output_tensor], [AllGather(group)(input_tensor.detach())], async_op),
    "all_gather": lambda tensor_list, tensor, group=None, async_op=False: _written(
        tensor_list, _rows(tensor, group), async_op),
    "gather": lambda tensor, gather_list, dst=0, group=None, async_op=False: _collected(
        tensor, gather_list, dst, group, async_op),
    "scatter": lambda tensor, scatter_list, src=0, group=None, async_op=False: _written(
        [tensor], [_scattered(tensor, scatter_list, src, group)], async_op),
    "reduce_scatter_tensor": lambda output, input, op=_SUM, group=None, async_op=False: _written(
        [output], [ReduceScatter(op, group)(input.detach())], async_op),
    "reduce_scatter": lambda output, input_list, op=_SUM, group=None, async_op=False: _written(
        [output], [ReduceScatter(op, group)(torch.cat(tuple(input_list)).detach())], async_op),
    "all_to_all": lambda output_tensor_list, input_tensor_list, group=None, async_op=False: _written(
        output_tensor_list, rank_groups.all_to_all([x.detach() for x in input_tensor_list], D.find_group(group)),
        async_op),
}, __name__)  # fmt: skip
globals().update(FUNCTIONS)

__all__ = [
    *FUNCTIONS, "ReduceOp", "all_gather_object", "barrier", "broadcast_object_list", "new_group", "recv", "send",
]  # fmt: skip
__getattr__ = absent(__name__, lambda: __all__)
