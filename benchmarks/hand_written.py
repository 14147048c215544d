"""Tensor and data parallelism as a careful engineer writes them by hand for one model: what ours is measured against.

Tensor parallelism is Megatron's (Shoeybi et al., 2019): the first matrix of every pair is split by columns, the second
by rows, heads and vocabulary are split. Each collective works in place on a fresh tensor, the one in the backward of a
column-parallel layer runs while the gradient of the weight is computed, and the loss takes two all-reduces.

Data parallelism is that of DistributedDataParallel (Li et al., 2020) without its generality: gradients are joined in
buckets, and a bucket is reduced as soon as its last gradient is there.

ZeRO 1 (Rajbhandari et al., 2020) is as little work as it can be on gloo. The parameters of a bucket are views of one
flat tensor, of which every rank updates a contiguous part, wherever that cuts parameters: nothing is copied before or
after the parts are gathered. Gradients go to the rank that updates them, which adds them up: gloo's own reduce-scatter
reduces everything everywhere. No rank sends to itself.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from transformer import Block, Transformer

Group = dist.ProcessGroup
aten = torch.ops.aten

# Those of DistributedDataParallel: the first is small, so that the reductions start early.
FIRST_BUCKET_BYTES, BUCKET_BYTES = 1 << 20, 25 << 20


class _ColumnLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, group: Group) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.has_bias, ctx.group = bias is not None, group
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        rows = grad.flatten(0, -2)
        x_grad = rows @ weight
        work = dist.all_reduce(x_grad, group=ctx.group, async_op=True)
        weight_grad = rows.t() @ x.flatten(0, -2)
        bias_grad = rows.sum(0) if ctx.has_bias else None
        work.wait()
        return x_grad.view_as(x), weight_grad, bias_grad, None


class ColumnLinear(nn.Module):
    """A linear layer of which this rank computes some outputs. ``num_blocks``: the outputs are this many equal blocks,
    each split (3 for queries, keys and values)."""

    def __init__(self, whole: nn.Linear, group: Group, num_blocks: int = 1) -> None:
        super().__init__()
        self.group = group

        def part(tensor: Tensor) -> nn.Parameter:
            blocks = tensor.detach().unflatten(0, (num_blocks, -1)).chunk(group.size(), dim=1)
            return nn.Parameter(blocks[group.rank()].flatten(0, 1).clone())

        self.weight = part(whole.weight)
        self.bias = None if whole.bias is None else part(whole.bias)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = _ColumnLinear.apply(x, self.weight, self.bias, self.group)  # type: ignore[no-untyped-call]
        return result


class _RowLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, group: Group) -> Tensor:
        ctx.save_for_backward(x, weight)
        result = F.linear(x, weight)
        dist.all_reduce(result, group=group)
        return result.add_(bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        rows = grad.flatten(0, -2)
        return (rows @ weight).view_as(x), rows.t() @ x.flatten(0, -2), rows.sum(0), None


class RowLinear(nn.Module):
    """A linear layer of which this rank has some inputs."""

    def __init__(self, whole: nn.Linear, group: Group) -> None:
        super().__init__()
        self.group = group
        self.weight = nn.Parameter(whole.weight.detach().chunk(group.size(), dim=1)[group.rank()].clone())
        self.bias = nn.Parameter(whole.bias.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = _RowLinear.apply(x, self.weight, self.bias, self.group)  # type: ignore[no-untyped-call]
        return result


class _VocabEmbedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight: Tensor, group: Group) -> Tensor:
        local = ids - group.rank() * len(weight)
        elsewhere = (local < 0).logical_or_(local >= len(weight))
        local.masked_fill_(elsewhere, 0)
        elsewhere = elsewhere.unsqueeze(-1)
        ctx.save_for_backward(local, elsewhere)
        ctx.num_rows = len(weight)
        result = F.embedding(local, weight).masked_fill_(elsewhere, 0.0)
        dist.all_reduce(result, group=group)
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        local, elsewhere = ctx.saved_tensors
        own = grad.masked_fill(elsewhere, 0.0)
        weight_grad: Tensor = aten.embedding_dense_backward(own, local, ctx.num_rows, -1, False)
        return None, weight_grad, None


class VocabEmbedding(nn.Module):
    """An embedding of which this rank has some rows."""

    def __init__(self, whole: nn.Embedding, group: Group) -> None:
        super().__init__()
        self.group = group
        self.weight = nn.Parameter(whole.weight.detach().chunk(group.size())[group.rank()].clone())

    def forward(self, ids: Tensor) -> Tensor:
        result: Tensor = _VocabEmbedding.apply(ids, self.weight, self.group)  # type: ignore[no-untyped-call]
        return result


class _VocabCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, group: Group) -> Tensor:
        local = labels - group.rank() * logits.shape[1]
        elsewhere = (local < 0).logical_or_(local >= logits.shape[1])
        local.masked_fill_(elsewhere, 0)
        largest = logits.amax(1, keepdim=True)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
        shifted = logits - largest
        chosen = shifted.gather(1, local.unsqueeze(1)).squeeze(1).masked_fill_(elsewhere, 0.0)
        exponentials = shifted.exp_()
        both = torch.stack([chosen, exponentials.sum(1)])  # one collective for the two
        dist.all_reduce(both, group=group)
        chosen, total = both
        ctx.save_for_backward(exponentials, total, local, elsewhere)
        loss: Tensor = (total.log() - chosen).mean()
        return loss

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        exponentials, total, local, elsewhere = ctx.saved_tensors
        share = grad / len(total)
        logits_grad = exponentials.mul_((share / total).unsqueeze(1))  # saved for this one use
        chosen = torch.where(elsewhere, 0.0, -share).unsqueeze(1)
        return logits_grad.scatter_add_(1, local.unsqueeze(1), chosen), None, None


class VocabCrossEntropy(nn.Module):
    """The mean cross entropy of logits of which this rank has some classes."""

    def __init__(self, group: Group) -> None:
        super().__init__()
        self.group = group

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        result: Tensor = _VocabCrossEntropy.apply(logits, labels, self.group)  # type: ignore[no-untyped-call]
        return result


def make_tensor_parallel(model: Transformer, group: Group) -> Transformer:
    """Replace, in place, every layer of a model that is split by this rank's part of it."""

    def column(module: nn.Module, num_blocks: int = 1) -> ColumnLinear:
        assert isinstance(module, nn.Linear)
        return ColumnLinear(module, group, num_blocks)

    def row(module: nn.Module) -> RowLinear:
        assert isinstance(module, nn.Linear)
        return RowLinear(module, group)

    assert isinstance(model.tokens, nn.Embedding)
    model.tokens = VocabEmbedding(model.tokens, group)
    for block in model.blocks:
        assert isinstance(block, Block)
        block.attention.qkv, block.attention.out = column(block.attention.qkv, num_blocks=3), row(block.attention.out)
        block.up, block.down = column(block.up), row(block.down)
    model.head, model.loss = column(model.head), VocabCrossEntropy(group)
    return model


def _in_buckets(parameters: Iterable[nn.Parameter]) -> list[list[nn.Parameter]]:
    buckets: list[list[nn.Parameter]] = [[]]
    size = 0
    for parameter in reversed(list(parameters)):  # about the order in which gradients come
        num_bytes = parameter.numel() * parameter.element_size()
        if size and size + num_bytes > (FIRST_BUCKET_BYTES if len(buckets) == 1 else BUCKET_BYTES):
            buckets.append([])
            size = 0
        buckets[-1].append(parameter)
        size += num_bytes
    return buckets


class Buckets:
    """Sums gradients over the group while the backward runs. ``wait`` after it: ``.grad`` are then parts of buckets."""

    def __init__(self, parameters: Iterable[nn.Parameter], group: Group) -> None:
        self.group = group
        self._buckets = _in_buckets(parameters)
        self._pending: list[tuple[Any, Tensor, list[nn.Parameter]]] = []
        self._missing = [len(bucket) for bucket in self._buckets]
        self._flat = [torch.cat([torch.empty_like(p).flatten() for p in bucket]) for bucket in self._buckets]
        for index, bucket in enumerate(self._buckets):
            for parameter in bucket:
                parameter.register_post_accumulate_grad_hook(lambda _, index=index: self._arrived(index))

    def _arrived(self, index: int) -> None:
        self._missing[index] -= 1
        if self._missing[index] == 0:
            bucket = self._buckets[index]
            flat = torch.cat([p.grad.flatten() for p in bucket if p.grad is not None], out=self._flat[index])
            self._pending.append((dist.all_reduce(flat, group=self.group, async_op=True), flat, bucket))
            self._missing[index] = len(bucket)

    def wait(self) -> None:
        """Wait for all sums."""
        for work, flat, bucket in self._pending:
            work.wait()
            parts = flat.split([parameter.numel() for parameter in bucket])
            for parameter, part in zip(bucket, parts, strict=True):
                parameter.grad = part.view_as(parameter)
        self._pending.clear()


class ShardedBucket:
    """Some parameters of which this rank updates one part, ``shard``: a row of them all, one behind the other."""

    def __init__(self, parameters: list[nn.Parameter], group: Group, number: int) -> None:
        self.parameters, self.group, self.number = parameters, group, number
        size, rank = group.size(), group.rank()
        sizes = [parameter.numel() for parameter in parameters]
        self.length, padded = sum(sizes), -(-sum(sizes) // size) * size
        whole = torch.cat([*(p.detach().flatten() for p in parameters), torch.zeros(padded - self.length)])
        for parameter, part in zip(parameters, whole[: self.length].split(sizes), strict=True):
            parameter.data = part.view_as(parameter)
            parameter.register_post_accumulate_grad_hook(lambda _: self._arrived())
        self._values, self._gradients = whole.view(size, -1), torch.zeros(size, padded // size)
        self._others = [other for other in range(size) if other != rank]
        self._received = torch.empty(size - 1, padded // size)
        self.shard = nn.Parameter(self._values[rank])
        self._missing, self._works = len(parameters), list[Any]()

    def _arrived(self) -> None:
        self._missing -= 1
        if self._missing == 0:
            gradients = [parameter.grad.flatten() for parameter in self.parameters if parameter.grad is not None]
            torch.cat(gradients, out=self._gradients.view(-1)[: self.length])
            self._missing = len(self.parameters)
            sent = {other: self._gradients[other] for other in self._others}
            self._exchange(sent, dict(zip(self._others, self._received, strict=True)))

    def _exchange(self, sent: dict[int, Tensor], received: dict[int, Tensor]) -> None:
        for other in self._others:
            self._works.append(dist.isend(sent[other], group=self.group, group_dst=other, tag=self.number))
            self._works.append(dist.irecv(received[other], group=self.group, group_src=other, tag=self.number))

    def arrive(self) -> None:
        """Wait for what is under way."""
        for work in self._works:
            work.wait()
        self._works.clear()

    def add_up(self) -> None:
        """Gradients of other ranks have arrived: the shard has the sum."""
        self.arrive()
        own = self._gradients[self.group.rank()]
        for row in self._received:
            own.add_(row)
        self.shard.grad = own
        for parameter in self.parameters:
            parameter.grad = None

    def gather(self) -> None:
        """Tell the other ranks what the shard is now."""
        own = self.shard.detach()
        self._exchange(dict.fromkeys(self._others, own), {other: self._values[other] for other in self._others})


def sharded_buckets(parameters: Iterable[nn.Parameter], group: Group) -> list[ShardedBucket]:
    """Parameters in buckets, in the order in which their gradients come."""
    return [ShardedBucket(bucket, group, number) for number, bucket in enumerate(_in_buckets(parameters))]
