"""Differentiable communication operators for programs that split their own computation (hybrid parallelism).

Every rank differentiates its own loss with the seed 1, so the gradient is that of the sum of the ranks' losses.
Therefore the backward of an operator is a collective as well. A group of one rank exchanges nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from shardwise.errors import CaptureError, problem
from shardwise.mindspore import rank_groups
from shardwise.mindspore.checks import closest, integer, of_type
from shardwise.mindspore.communication.management import GlobalComm, find_group
from shardwise.mindspore.named import SETTINGS, WithSettings
from shardwise.mindspore.ops.primitive import Primitive

Tensor = torch.Tensor
RankGroup = rank_groups.RankGroup
Exchange = Callable[[Tensor], Tensor]


class ReduceOp:
    """Reductions of the ranks' tensors."""

    SUM, MAX, MIN, PROD = "sum", "max", "min", "prod"


REDUCTIONS = (ReduceOp.SUM, ReduceOp.MAX, ReduceOp.MIN, ReduceOp.PROD)
counting = rank_groups.record_exchanges  # also of gradients and of gradient reducers


class _Communication(WithSettings, Primitive):
    """Common base of the operators. The group is looked up when the operator is called. They take no strategy."""

    def _take(self, values: dict[str, Any]) -> None:
        group = values.pop("group")
        Primitive.__init__(self)
        self.attrs["group"] = group
        if group is not None:
            fix = "give the name of a group, made by create_group(name, rank_ids)"
            of_type(f"{type(self).__name__}: the group", group, str, fix)
        self._given = group
        vars(self).update(values)
        op = values.get("op", ReduceOp.SUM)
        if of_type(f"{self.name}: op", op, str, "give ReduceOp.SUM") not in REDUCTIONS:
            raise ValueError(problem(f'{self.name}: there is no reduction "{op}"', fix=closest(op, REDUCTIONS)))

    @property
    def group(self) -> str:
        """Return the name of the group; by default that of all ranks."""
        return GlobalComm.WORLD_COMM_GROUP if self._given is None else str(self._given)

    def _members(self) -> RankGroup:
        if torch.compiler.is_exporting():
            what = f"{self.name} is called in a cell that a plan splits; the plan inserts the communication itself"
            fix = "leave it out, or set parallel_mode='hybrid_parallel' and split the computation by hand"
            raise CaptureError(what, op=self.instance_name, fix=fix)
        return find_group(self.group)

    def _divisible(self, tensor: Tensor, dim: int, parts: int) -> None:
        if not -tensor.ndim <= dim < tensor.ndim:
            what = f"{type(self).__name__}: there is no dim {dim} in {list(tensor.shape)}"
            raise ValueError(problem(what, fix=f"the tensor has {tensor.ndim} dims"))
        if tensor.shape[dim] % parts:
            what = (
                f"{type(self).__name__}: dim {dim} of {list(tensor.shape)} is {tensor.shape[dim]}, "
                f"which is not divisible by {parts}"
            )
            raise ValueError(problem(what, fix=f"pad it to {-(-tensor.shape[dim] // parts) * parts}"))


class AllReduce(_Communication, op=ReduceOp.SUM, group=None):
    """The sum, maximum, minimum or product of the ranks' tensors.

    The gradient of a sum is the sum of the cotangents. That of an extremum is the same sum where the rank's own element
    is the result (each of equal elements gets it). That of a product is the sum times the product of the others. (The
    reference uses the extremum's gradient there, which is not a product's.)
    """

    def __call__(self, input_x: Tensor) -> Tensor:
        return _all_reduce(input_x, self.op, self._members())


class AllGather(_Communication, group=None):
    """The ranks' tensors, concatenated along dim 0. The gradient is the ReduceScatter of the cotangents."""

    def __call__(self, input_x: Tensor) -> Tensor:
        return _all_gather(input_x if input_x.ndim else input_x.reshape(1), self._members())


class ReduceScatter(_Communication, op=ReduceOp.SUM, group=None):
    """Rank i's i-th part, along dim 0, of the ranks' reduced tensors. The gradient of a sum is the AllGather of the
    cotangents; other reductions have no gradient."""

    def __call__(self, input_x: Tensor) -> Tensor:
        group = self._members()
        self._divisible(input_x, 0, group.size)
        return _reduce_scatter(input_x, self.op, group)


class Broadcast(_Communication, root_rank=..., group=None):
    """The tensor, or tuple of tensors, of ``root_rank`` (a global rank).

    The gradient is the identity, as in the reference: every rank keeps its own cotangent. So parameters that are equal
    on all ranks get every rank's own gradient, which a gradient reducer then adds.
    """

    def _settle(self) -> None:
        integer("Broadcast: root_rank", self.root_rank, "give the number of a rank")

    def __call__(self, input_x: Tensor | tuple[Tensor, ...]) -> Tensor | tuple[Tensor, ...]:
        group = self._members()
        if self.root_rank not in group.ranks:
            what = f'Broadcast: rank {self.root_rank} is not in the group "{self.group}" of {list(group.ranks)}'
            raise ValueError(problem(what, fix="choose one of its members"))

        def sent(tensor: Tensor) -> Tensor:
            return _exchange(
                "Broadcast",
                tensor,
                lambda x: rank_groups.broadcast(x, self.root_rank, group),
                lambda cotangent: cotangent,
            )

        return sent(input_x) if isinstance(input_x, Tensor) else tuple(map(sent, input_x))


class AlltoAll(_Communication, split_count=..., split_dim=..., concat_dim=..., group=None):
    """An all-to-all: part i along ``split_dim`` goes to rank i; received parts are concatenated along ``concat_dim``.

    ``split_count`` is the size of the group. The gradient is the same exchange with the two dims swapped.
    """

    def __call__(self, input_x: Tensor) -> Tensor:
        group = self._members()
        if self.split_count != group.size:
            what = f'AlltoAll: split_count is {self.split_count}, but the group "{self.group}" has {group.size} ranks'
            raise ValueError(problem(what, fix=f"write split_count={group.size}"))
        self._divisible(input_x, self.split_dim, self.split_count)
        self._divisible(input_x, self.concat_dim, 1)
        return _all_to_all(input_x, self.split_dim, self.concat_dim, group)


class NeighborExchange(_Communication, **SETTINGS["ops.NeighborExchange"]):
    """A point-to-point exchange: tensor i goes to rank ``send_rank_ids[i]``; tensors from ``recv_rank_ids`` return as a
    tuple. The gradient takes the reverse paths. ``recv_shapes``, ``send_shapes``: of each; ``recv_type``: their
    dtype."""

    recv_shapes: Any

    def _settle(self) -> None:
        self.ways = (tuple(self.send_rank_ids), tuple(self.recv_rank_ids))
        self.recv_shapes = tuple(map(tuple, self.recv_shapes))
        if len(self.ways[1]) != len(self.recv_shapes):
            what = f"NeighborExchange: {len(self.recv_shapes)} recv_shapes of {len(self.ways[1])} ranks"
            raise ValueError(problem(what, fix="one for each"))

    def __call__(self, inputs: Any) -> tuple[Tensor, ...]:
        self._members()
        tensors = tuple(inputs)
        if len(tensors) != len(self.ways[0]):
            what = f"NeighborExchange: {len(tensors)} tensors for the ranks {list(self.ways[0])}"
            raise ValueError(problem(what, fix="one for each"))
        empty = torch.zeros((), requires_grad=any(tensor.requires_grad for tensor in tensors))
        return _exchanged(*self.ways, self.recv_shapes, self.recv_type, empty, *tensors)


class Send(_Communication, sr_tag=..., dest_rank=..., group=None, group_back=None):
    """A send to ``dest_rank``, which calls Receive with the same tag. It has no gradient (``NeighborExchange`` has
    one)."""

    def __call__(self, input_x: Tensor) -> Tensor:
        self._members()
        _exchanged((self.dest_rank,), (), (), input_x.dtype, torch.zeros(()), input_x.detach())
        return input_x


class Receive(_Communication, sr_tag=..., src_rank=..., shape=..., dtype=..., group=None, group_back=None):
    """A receive of a tensor of ``shape`` and ``dtype`` from ``src_rank``. It has no gradient (``NeighborExchange`` has
    one)."""

    def __call__(self, x: Any = None) -> Tensor:
        self._members()
        (received,) = _exchanged((), (self.src_rank,), (tuple(self.shape),), self.dtype, torch.zeros(()))
        return received


class _Neighbors(torch.autograd.Function):
    """Point-to-point exchange of tensors. ``anchor``: a scalar that connects received tensors to the autograd graph."""

    @staticmethod
    def forward(
        ctx: Any, to: Any, sources: Any, shapes: Any, dtype: torch.dtype, anchor: Tensor, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.ways, ctx.shapes, ctx.dtype = (to, sources), [tuple(t.shape) for t in tensors], dtype
        return rank_groups.exchange(tensors, to, [torch.empty(shape, dtype=dtype) for shape in shapes], sources)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Any, ...]:
        to, sources = ctx.ways
        empty = [torch.empty(shape, dtype=ctx.dtype) for shape in ctx.shapes]
        received = rank_groups.exchange([c.contiguous() for c in cotangents], sources, empty, to)
        return None, None, None, None, torch.zeros(()), *received


_exchanged: Callable[..., tuple[Tensor, ...]] = _Neighbors.apply


# -------------------------------------------------------------------------------------------------------- gradients


class _Exchange(torch.autograd.Function):
    """``forth(tensor)``; its gradient is ``back(cotangent)``, with ``saves`` ``back(cotangent, tensor, result)``."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, forth: Exchange, back: Callable[..., Tensor], saves: bool) -> Tensor:
        ctx.back, result = back, forth(tensor)
        if saves:
            ctx.save_for_backward(tensor, result)
        return result

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.back(cotangent, *ctx.saved_tensors), None, None, None


def _exchange(
    name: str, tensor: Tensor, forth: Exchange, back: Callable[..., Tensor], saves: bool = False
) -> Tensor:  # fmt: skip
    if not isinstance(tensor, Tensor):
        what = f"{name} is called with {type(tensor).__name__}, not with a tensor"
        raise TypeError(problem(what, fix="give a tensor"))
    apply: Callable[..., Tensor] = _Exchange.apply
    return apply(tensor, forth, back, saves)


def _all_reduce(tensor: Tensor, op: str, group: RankGroup) -> Tensor:
    def back(cotangent: Tensor, *saved: Tensor) -> Tensor:
        total = _all_reduce(cotangent, ReduceOp.SUM, group)
        if op == ReduceOp.SUM:
            return total
        operand, result = saved
        if op != ReduceOp.PROD:
            return total * (operand == result)
        rows = _all_gather(operand.unsqueeze(0), group)  # not divided by the rank's own, which may be 0
        return total * torch.cat([rows[: group.position], rows[group.position + 1 :]]).prod(0)

    return _exchange("AllReduce", tensor, lambda x: rank_groups.all_reduce(x, op, group), back, op != ReduceOp.SUM)


def _all_gather(tensor: Tensor, group: RankGroup) -> Tensor:
    back = partial(_reduce_scatter, op=ReduceOp.SUM, group=group)
    return _exchange("AllGather", tensor, lambda x: rank_groups.all_gather(x, group), back)


def _reduce_scatter(tensor: Tensor, op: str, group: RankGroup) -> Tensor:
    def back(cotangent: Tensor) -> Tensor:
        if op != ReduceOp.SUM:
            what = f'ReduceScatter with the reduction "{op}" has no gradient'
            raise RuntimeError(problem(what, fix="use AllReduce, which has one, and take this rank's part"))
        return _all_gather(cotangent, group)

    return _exchange("ReduceScatter", tensor, lambda x: rank_groups.reduce_scatter(x, op, group), back)


def _all_to_all(tensor: Tensor, split_dim: int, concat_dim: int, group: RankGroup) -> Tensor:
    def forth(x: Tensor) -> Tensor:
        return torch.cat(rank_groups.all_to_all(x.chunk(group.size, split_dim), group), concat_dim)

    return _exchange("AlltoAll", tensor, forth, lambda cotangent: _all_to_all(cotangent, concat_dim, split_dim, group))


__all__ = [
    "AllGather", "AllReduce", "AlltoAll", "Broadcast", "NeighborExchange", "Receive", "ReduceOp", "ReduceScatter",
    "Send",
]  # fmt: skip
