"""Collectives as functions, differentiable where the operators of ``ops`` are.

Functions that take ``async_op`` return the result and a handle (None unless ``async_op``).
"""

from __future__ import annotations

from typing import Any

import torch

from shardwise.mindspore import rank_groups
from shardwise.mindspore.communication import management as D
from shardwise.mindspore.named import absent, functions_of
from shardwise.mindspore.ops import communication as C

Tensor = torch.Tensor
SUM = C.ReduceOp.SUM


class Done:
    """The handle of an exchange that has already completed."""

    def wait(self) -> bool:
        return True


def _with_handle(result: Any, async_op: bool) -> Any:
    return result, Done() if async_op else None


def _scattered(tensor: Tensor, src: int, group: str | None) -> Tensor:
    members, (whole,) = D.find_group(group), C.Broadcast(src, group)((tensor,))
    return whole.chunk(members.size)[members.position]


def _exchanged(shape: Any, tensor: Tensor, received: Any, sent: Any, group: str | None) -> Tensor:
    """Exchange equal parts along dim 0 among all ranks, or parts of the given sizes."""
    ranks, rest, shape = list(D.find_group(group).ranks), tuple(tensor.shape[1:]), tuple(shape)
    if sent is None and received is None:
        return C.AlltoAll(len(ranks), 0, 0, group)(tensor)
    sent = sent or [tensor.shape[0] // len(ranks)] * len(ranks)
    shapes = [(size, *rest) for size in received or [shape[0] // len(ranks)] * len(ranks)]
    parts = C.NeighborExchange(ranks, ranks, shapes, None, tensor.dtype, group)(tensor.split(list(sent)))
    return torch.cat(parts).reshape(shape)


# Results of one rank: other ranks have the tensor unchanged, or zeros. Parts are those of dim 0.
FUNCTIONS = functions_of({
    "all_reduce": lambda tensor, op=SUM, group=None, async_op=False: _with_handle(
        C.AllReduce(op, group)(tensor), async_op),
    "all_gather_into_tensor": lambda tensor, group=None, async_op=False: _with_handle(
        C.AllGather(group)(tensor), async_op),
    "reduce_scatter_tensor": lambda tensor, op=SUM, group=None, async_op=False: _with_handle(
        C.ReduceScatter(op, group)(tensor), async_op),
    "broadcast": lambda tensor, src=0, group=None: C.Broadcast(src, group)(tensor),
    "reduce": lambda tensor, dst, op=SUM, group=None: (tensor, C.AllReduce(op, group)(tensor))[D.get_rank() == dst],
    "gather_into_tensor": lambda tensor, dst=0, group=None: (
        rows := C.AllGather(group)(tensor), torch.zeros_like(rows))[D.get_rank() != dst],
    "scatter_tensor": lambda tensor, src=0, group=None: _scattered(tensor, src, group),
    "all_to_all_single_with_output_shape": lambda output_shape, tensor, output_split_sizes=None,
    input_split_sizes=None, group=None, async_op=False: _with_handle(
        _exchanged(output_shape, tensor, output_split_sizes, input_split_sizes, group), async_op),
    "barrier": lambda group=None: (rank_groups.all_reduce(torch.zeros(1), SUM, D.find_group(group)), None)[1],
    "send": lambda tensor, dst=0, group=None, tag=0: (C.Send(tag, dst, group)(tensor), None)[1],
    "recv": lambda tensor, src=0, group=None, tag=0: tensor.detach().copy_(  # which gives the shape
        C.Receive(tag, src, tensor.shape, tensor.dtype, group)()),
}, __name__)  # fmt: skip
globals().update(FUNCTIONS)

__all__ = [*FUNCTIONS]
__getattr__ = absent(__name__, lambda: __all__)
