"""Differentiable communication operators for programs that split their own computation (hybrid parallelism).

Every rank differentiates its own loss with the seed 1, so the gradient is that of the sum of the ranks' losses.
Therefore the backward of an operator is a collective as well. A group of one rank exchanges nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from shardwise.errors import CaptureError, problem
from shardwise.mindspore.checks import closest
from shardwise.mindspore.communication.management import GlobalComm, find_group
from shardwise.mindspore.library import rank_groups
from shardwise.mindspore.named import WithSettings
from shardwise.mindspore.ops.primitive import Primitive

Tensor = torch.Tensor


class ReduceOp:
    """Reductions of the ranks' tensors."""

    SUM, MAX, MIN, PROD = "sum", "max", "min", "prod"


REDUCTIONS = (ReduceOp.SUM, ReduceOp.MAX, ReduceOp.MIN, ReduceOp.PROD)


def counting() -> AbstractContextManager[list[rank_groups.RecordedExchange]]:
    """Record the exchanges of this process's operators, their gradients and gradient reducers within the context, as a
    list of (kind, ranks, bytes)."""
    return rank_groups.record_exchanges()


class _Communication(WithSettings, Primitive):
    """Common base of the operators. The group is looked up when the operator is called. They take no strategy."""

    def _take(self, values: dict[str, Any]) -> None:
        group = values.pop("group")
        Primitive.__init__(self)
        self.attrs["group"] = group
        if group is not None and not isinstance(group, str):
            what = f"{type(self).__name__}: the group is {group!r}, of type {type(group).__name__}"
            raise TypeError(problem(what, fix="give the name of a group, made by create_group(name, rank_ids)"))
        self._given = group
        vars(self).update(values)

    @property
    def group(self) -> str:
        """Return the name of the group; by default that of all ranks."""
        return GlobalComm.WORLD_COMM_GROUP if self._given is None else str(self._given)

    def _members(self) -> rank_groups.RankGroup:
        if torch.compiler.is_exporting():
            what = f"{self.name} is called in a cell that a plan splits; the plan inserts the communication itself"
            fix = "leave it out, or set parallel_mode='hybrid_parallel' and split the computation by hand"
            raise CaptureError(problem(what, op=self.instance_name, fix=fix))
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

    def _settle(self) -> None:
        _check_reduction("AllReduce", self.op)

    def __call__(self, input_x: Tensor) -> Tensor:
        return _applied(_AllReduce, input_x, self.op, self._members())


class AllGather(_Communication, group=None):
    """The ranks' tensors, concatenated along dim 0. The gradient is the ReduceScatter of the cotangents."""

    def __call__(self, input_x: Tensor) -> Tensor:
        return _applied(_AllGather, input_x if input_x.ndim else input_x.reshape(1), self._members())


class ReduceScatter(_Communication, op=ReduceOp.SUM, group=None):
    """Rank i's i-th part, along dim 0, of the ranks' reduced tensors. The gradient of a sum is the AllGather of the
    cotangents; other reductions have no gradient."""

    def _settle(self) -> None:
        _check_reduction("ReduceScatter", self.op)

    def __call__(self, input_x: Tensor) -> Tensor:
        group = self._members()
        self._divisible(input_x, 0, group.size)
        return _applied(_ReduceScatter, input_x, self.op, group)


class Broadcast(_Communication, root_rank=..., group=None):
    """The tensor, or tuple of tensors, of ``root_rank`` (a global rank).

    The gradient is the identity, as in the reference: every rank keeps its own cotangent. So parameters that are equal
    on all ranks get every rank's own gradient, which a gradient reducer then adds.
    """

    def _settle(self) -> None:
        if isinstance(self.root_rank, bool) or not isinstance(self.root_rank, int):
            what = f"Broadcast: root_rank is {self.root_rank!r}, of type {type(self.root_rank).__name__}"
            raise TypeError(problem(what, fix="give the number of a rank"))

    def __call__(self, input_x: Tensor | tuple[Tensor, ...]) -> Tensor | tuple[Tensor, ...]:
        group = self._members()
        if self.root_rank not in group.ranks:
            what = f'Broadcast: rank {self.root_rank} is not in the group "{self.group}" of {list(group.ranks)}'
            raise ValueError(problem(what, fix="choose one of its members"))
        if isinstance(input_x, Tensor):
            return _applied(_Broadcast, input_x, self.root_rank, group)
        return tuple(_applied(_Broadcast, tensor, self.root_rank, group) for tensor in input_x)


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
        return _applied(_AlltoAll, input_x, self.split_dim, self.concat_dim, group)


class NeighborExchange(
    _Communication, send_rank_ids=..., recv_rank_ids=..., recv_shapes=..., send_shapes=..., recv_type=..., group=None
):
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


def _check_reduction(operator: str, op: str) -> None:
    if not isinstance(op, str):
        raise TypeError(problem(f"{operator}: op is {op!r}, of type {type(op).__name__}", fix="give ReduceOp.SUM"))
    if op not in REDUCTIONS:
        raise ValueError(problem(f'{operator}: there is no reduction "{op}"', fix=closest(op, REDUCTIONS)))


# -------------------------------------------------------------------------------------------------------- gradients


def _applied(function: type[torch.autograd.Function], tensor: Tensor, *rest: Any) -> Tensor:
    if not isinstance(tensor, Tensor):
        what = f"{function.__name__.lstrip('_')} is called with {type(tensor).__name__}, not with a tensor"
        raise TypeError(problem(what, fix="give a tensor"))
    apply: Callable[..., Tensor] = function.apply
    return apply(tensor, *rest)


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, op: str, group: rank_groups.RankGroup) -> Tensor:
        ctx.op, ctx.group = op, group
        result = rank_groups.all_reduce(tensor, op, group)
        if op != ReduceOp.SUM:
            ctx.save_for_backward(tensor, result)
        return result

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor | None, ...]:
        total = _applied(_AllReduce, cotangent, ReduceOp.SUM, ctx.group)
        if ctx.op == ReduceOp.SUM:
            return total, None, None
        tensor, result = ctx.saved_tensors
        if ctx.op == ReduceOp.PROD:
            return total * _product_of_others(tensor, ctx.group), None, None
        return total * (tensor == result), None, None


def _product_of_others(tensor: Tensor, group: rank_groups.RankGroup) -> Tensor:
    """Return the product of the other ranks' tensors, without a division, as elements may be 0."""
    rows = _applied(_AllGather, tensor.unsqueeze(0), group)
    return torch.cat([rows[: group.position], rows[group.position + 1 :]]).prod(0)


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: rank_groups.RankGroup) -> Tensor:
        ctx.group = group
        return rank_groups.all_gather(tensor, group)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor, None]:
        return _applied(_ReduceScatter, cotangent, ReduceOp.SUM, ctx.group), None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, op: str, group: rank_groups.RankGroup) -> Tensor:
        ctx.op, ctx.group = op, group
        return rank_groups.reduce_scatter(tensor, op, group)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor, None, None]:
        if ctx.op != ReduceOp.SUM:
            what = f'ReduceScatter with the reduction "{ctx.op}" has no gradient'
            raise RuntimeError(problem(what, fix="use AllReduce, which has one, and take this rank's part"))
        return _applied(_AllGather, cotangent, ctx.group), None, None


class _Broadcast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, root: int, group: rank_groups.RankGroup) -> Tensor:
        return rank_groups.broadcast(tensor, root, group)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor, None, None]:
        return cotangent, None, None


class _AlltoAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, split_dim: int, concat_dim: int, group: rank_groups.RankGroup) -> Tensor:
        ctx.dims, ctx.group = (split_dim, concat_dim), group
        return torch.cat(rank_groups.all_to_all(tensor.chunk(group.size, split_dim), group), concat_dim)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor, None, None, None]:
        split_dim, concat_dim = ctx.dims
        return _applied(_AlltoAll, cotangent, concat_dim, split_dim, ctx.group), None, None, None


__all__ = [
    "AllGather", "AllReduce", "AlltoAll", "Broadcast", "NeighborExchange", "Receive", "ReduceOp", "ReduceScatter",
    "Send",
]  # fmt: skip
