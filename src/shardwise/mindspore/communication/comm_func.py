"""Collectives as functions, differentiable where the operators of ``ops`` are.

Functions that take ``async_op`` return the result and a handle (None unless ``async_op``).
"""

from __future__ import annotations

from typing import Any

import torch

from shardwise.mindspore import rank_groups
from shardwise.mindspore.communication import management as D
from shardwise.mindspore.named import absent
from shardwise.mindspore.ops import communication as C
from shardwise.mindspore.ops.communication import ReduceOp

Tensor = torch.Tensor


class Done:
    """The handle of an exchange that has already completed."""

    def wait(self) -> bool:
        return True


Pair = Any  # a tensor, and a Done or None


def _with_handle(result: Any, async_op: bool) -> Any:
    return result, Done() if async_op else None


def all_reduce(tensor: Tensor, op: str = ReduceOp.SUM, group: str | None = None, async_op: bool = False) -> Pair:
    return _with_handle(C.AllReduce(op, group)(tensor), async_op)


def all_gather_into_tensor(tensor: Tensor, group: str | None = None, async_op: bool = False) -> Pair:
    """Concatenate the ranks' tensors along dim 0."""
    return _with_handle(C.AllGather(group)(tensor), async_op)


def reduce_scatter_tensor(
    tensor: Tensor, op: str = ReduceOp.SUM, group: str | None = None, async_op: bool = False
) -> Pair:
    """Return this rank's part, along dim 0, of the reduction."""
    return _with_handle(C.ReduceScatter(op, group)(tensor), async_op)


def broadcast(tensor: Tensor, src: int = 0, group: str | None = None) -> Any:
    return C.Broadcast(src, group)(tensor)


def reduce(tensor: Tensor, dst: int, op: str = ReduceOp.SUM, group: str | None = None) -> Tensor:
    """Return the reduction on ``dst``, and the tensor unchanged on other ranks."""
    reduced = C.AllReduce(op, group)(tensor)
    return reduced if D.get_rank() == dst else tensor


def gather_into_tensor(tensor: Tensor, dst: int = 0, group: str | None = None) -> Tensor:
    """Return the ranks' tensors, concatenated along dim 0, on ``dst``, and zeros on other ranks."""
    gathered = C.AllGather(group)(tensor)
    return gathered if D.get_rank() == dst else torch.zeros_like(gathered)


def scatter_tensor(tensor: Tensor, src: int = 0, group: str | None = None) -> Tensor:
    """Return this rank's part, along dim 0, of the tensor of ``src``."""
    members = D.find_group(group)
    (whole,) = C.Broadcast(src, group)((tensor,))
    return whole.chunk(members.size)[members.position]


def all_to_all_single_with_output_shape(
    output_shape: Any, tensor: Tensor, output_split_sizes: Any = None, input_split_sizes: Any = None,
    group: str | None = None, async_op: bool = False,
) -> Pair:  # fmt: skip
    """Exchange equal parts along dim 0 among all ranks, or parts of the given sizes."""
    members = D.find_group(group)
    if input_split_sizes is None and output_split_sizes is None:
        return _with_handle(C.AlltoAll(members.size, 0, 0, group)(tensor), async_op)
    rest, shape = tuple(tensor.shape[1:]), tuple(output_shape)
    sent = input_split_sizes or [tensor.shape[0] // members.size] * members.size
    received = output_split_sizes or [shape[0] // members.size] * members.size
    ways, shapes = list(members.ranks), [(size, *rest) for size in received]
    parts = C.NeighborExchange(ways, ways, shapes, None, tensor.dtype, group)(tensor.split(list(sent)))
    return _with_handle(torch.cat(parts).reshape(shape), async_op)


def barrier(group: str | None = None) -> None:
    """Wait for all ranks of a group."""
    rank_groups.all_reduce(torch.zeros(1), ReduceOp.SUM, D.find_group(group))


def send(tensor: Tensor, dst: int = 0, group: str | None = None, tag: int = 0) -> None:
    C.Send(tag, dst, group)(tensor)


def recv(tensor: Tensor, src: int = 0, group: str | None = None, tag: int = 0) -> Tensor:
    """Receive a tensor from ``src``. ``tensor`` gives its shape and is overwritten."""
    received = C.Receive(tag, src, tensor.shape, tensor.dtype, group)()
    return tensor.detach().copy_(received)


__all__ = [
    "all_gather_into_tensor", "all_reduce", "all_to_all_single_with_output_shape", "barrier", "broadcast",
    "gather_into_tensor", "recv", "reduce", "reduce_scatter_tensor", "scatter_tensor", "send",
]  # fmt: skip
__getattr__ = absent(__name__, lambda: __all__)
