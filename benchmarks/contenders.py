"""Who is measured in ``step_time.py``: each contender makes a training step of the same model out of the whole model.

A step takes the whole batch on every rank, runs forward, backward and AdamW, and returns the loss of the whole batch.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from hand_written import Buckets, make_tensor_parallel, sharded_buckets
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, loss_parallel, parallelize_module
from transformer import Block, Transformer

import shardwise as sw

TrainStep = Callable[[Tensor, Tensor], Tensor]

# Megatron's plan. The second matrix of every pair, attention, the other normalisations and the loss follow. The last
# normalisation is fixed, because it would be split (as in Megatron's sequence parallelism), which is another strategy.
TENSOR_PARALLEL = {"tokens": "v@tp", "blocks.*.attention.qkv": "n@tp", "blocks.*.up": "n@tp", "head": "n@tp"}
STRATEGIES: Mapping[tuple[str, ...], Mapping[str, Any]] = {
    ("tp",): {**TENSOR_PARALLEL, "norm": ((1, 1, 1), (1,), (1,))},
    ("dp", "tp"): {**TENSOR_PARALLEL, "norm": ((2, 1, 1), (1,), (1,))},
}


@dataclass(frozen=True, slots=True)
class Setting:
    """The ranks as a mesh, and the whole batch with which ours is planned."""

    mesh: DeviceMesh
    batch: tuple[Tensor, Tensor]

    def own_part(self, tensor: Tensor) -> Tensor:
        """This rank's share of a batch tensor."""
        return tensor.chunk(self.mesh.size(0))[self.mesh.get_local_rank(0)]

    def part_of_group(self, axis: str) -> dist.ProcessGroup:
        return self.mesh.get_group(axis)


@dataclass(frozen=True, slots=True)
class Contender:
    """``build``: (the whole model, which it may change; the setting) -> a step."""

    name: str
    build: Callable[[Transformer, Setting], TrainStep]


@dataclass(frozen=True, slots=True)
class Row:
    """Contenders that do the same work. The first is the one that ours is measured against, by ``target``."""

    name: str
    contenders: tuple[Contender, ...]
    mesh: Callable[[int], DeviceMesh]  # for a number of ranks
    target: float


def _train(
    forward_backward: Callable[[Tensor, Tensor], Tensor],
    parameters: Iterable[nn.Parameter],
    learning_rate: float = 1e-3,
) -> TrainStep:
    optimizer = torch.optim.AdamW(parameters, lr=learning_rate)

    def step(ids: Tensor, labels: Tensor) -> Tensor:
        loss = forward_backward(ids, labels)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def _whole_batch(model: nn.Module, context: Callable[[], AbstractContextManager[Any]] = nullcontext) -> TrainStep:
    def forward_backward(ids: Tensor, labels: Tensor) -> Tensor:
        with context():
            loss: Tensor = model(ids, labels)
            loss.backward()
        return loss.detach()

    return _train(forward_backward, model.parameters())


def _own_part(model: nn.Module, setting: Setting, buckets: Buckets | None = None) -> TrainStep:
    """Every data-parallel rank runs its part of the batch. The mean of their losses travels beside the backward.

    With ``buckets`` gradients are summed, so each rank's loss counts as its share; without, the model averages them.
    """
    group, size = setting.part_of_group("dp"), setting.mesh.size(0)
    share = torch.tensor(1.0 if buckets is None else 1 / size)

    def forward_backward(ids: Tensor, labels: Tensor) -> Tensor:
        loss: Tensor = model(setting.own_part(ids), setting.own_part(labels))
        mean = loss.detach() / size
        work = dist.all_reduce(mean, group=group, async_op=True)
        assert work is not None
        loss.backward(share)
        if buckets is not None:
            buckets.wait()
        work.wait()
        return mean

    return _train(forward_backward, model.parameters())


def plain(model: Transformer, setting: Setting) -> TrainStep:
    del setting
    return _whole_batch(model)


def hand_tensor_parallel(model: Transformer, setting: Setting) -> TrainStep:
    return _whole_batch(make_tensor_parallel(model, setting.part_of_group("tp")))


def hand_data_parallel(model: Transformer, setting: Setting) -> TrainStep:
    return _own_part(model, setting, Buckets(model.parameters(), setting.part_of_group("dp")))


def hand_zero_1(model: Transformer, setting: Setting) -> TrainStep:
    """A step begins with what the last one updated, as ours does, so that all of it is timed."""
    group = setting.part_of_group("dp")
    buckets = sharded_buckets(model.parameters(), group)
    optimizer = torch.optim.AdamW([bucket.shard for bucket in buckets], lr=1e-3)
    share = torch.tensor(1 / setting.mesh.size(0))

    def step(ids: Tensor, labels: Tensor) -> Tensor:
        for bucket in buckets:
            bucket.gather()
        for bucket in buckets:
            bucket.arrive()
        loss: Tensor = model(setting.own_part(ids), setting.own_part(labels))
        mean = loss.detach() * share
        work = dist.all_reduce(mean, group=group, async_op=True)
        assert work is not None
        loss.backward(share)
        for bucket in buckets:
            bucket.add_up()
        work.wait()
        optimizer.step()
        optimizer.zero_grad()
        return mean

    return step


def hand_both(model: Transformer, setting: Setting) -> TrainStep:
    return hand_data_parallel(make_tensor_parallel(model, setting.part_of_group("tp")), setting)


def dtensor(model: Transformer, setting: Setting) -> TrainStep:
    num_ranks = setting.mesh.size()

    def by_rank(tensor: Tensor) -> None:
        """Order the rows of queries, keys and values by rank: a DTensor is split into contiguous blocks."""
        tensor.data = tensor.data.unflatten(0, (3, num_ranks, -1)).transpose(0, 1).flatten(0, 2).contiguous()

    plan: dict[str, Any] = {
        "tokens": RowwiseParallel(input_layouts=_REPLICATED),
        "blocks.*.attention.qkv": ColwiseParallel(),
        "blocks.*.attention.out": RowwiseParallel(),
        "blocks.*.up": ColwiseParallel(),
        "blocks.*.down": RowwiseParallel(),
        "head": ColwiseParallel(use_local_output=False),
    }
    for block in model.blocks:
        assert isinstance(block, Block)
        for parameter in block.attention.qkv.parameters():
            by_rank(parameter)
    parallelize_module(model, setting.mesh, plan)
    return _whole_batch(model, loss_parallel)


_REPLICATED = torch.distributed.tensor.Replicate()


def distributed_data_parallel(model: Transformer, setting: Setting) -> TrainStep:
    ddp = nn.parallel.DistributedDataParallel(
        model, process_group=setting.part_of_group("dp"), gradient_as_bucket_view=True
    )
    return _own_part(ddp, setting)


def fsdp(model: Transformer, setting: Setting) -> TrainStep:
    for block in model.blocks:
        fully_shard(block, mesh=setting.mesh)
    fully_shard(model, mesh=setting.mesh)
    return _own_part(model, setting)


def ours(
    model: Transformer, setting: Setting, *, zero: Literal[1, 3] | None = None, check_finite: int | None = None
) -> TrainStep:
    mesh = setting.mesh
    names = mesh.mesh_dim_names
    assert names is not None
    plan = None
    if dist.get_rank() == 0:
        shape = sw.Mesh(**{name: mesh.size(i) for i, name in enumerate(names)})
        if mesh.size() == 1:
            plan = sw.plan(model, setting.batch, 1, mesh=shape, mode="stand_alone")
        elif "tp" in names:
            plan = sw.plan(model, setting.batch, mesh.size(), mesh=shape, strategies=STRATEGIES[names])
        else:
            plan = sw.plan(model, setting.batch, mesh.size(), mesh=shape, mode="data_parallel", zero=zero)
        kinds = {each.kind for entry in plan.conversions for each in (*entry.forward, *entry.backward)}
        wanted = {"all_reduce"} if zero is None else {"all_gather", "reduce_scatter", "all_reduce"}
        assert kinds <= wanted, f"not the strategy of the baseline, which has {wanted}: {kinds}"
    parallel = sw.parallelize(model, plan, check_finite=check_finite)
    return _train(parallel.step, parallel.parameters())


def _row(
    name: str,
    target: float,
    mesh: Callable[[int], DeviceMesh],
    *,
    zero: Literal[1, 3] | None = None,
    check_finite: int | None = None,
    **contenders: Any,
) -> Row:
    """``contenders`` by name, with spaces for underscores; the baseline runs twice, to show what is noise."""
    found = [Contender(key.replace("_", " "), build) for key, build in contenders.items()]
    again = Contender(f"{found[0].name}, again", found[0].build)
    ours_of_row = Contender("ours", partial(ours, zero=zero, check_finite=check_finite))
    return Row(name, (found[0], again, *found[1:], ours_of_row), mesh, target)


def _mesh(*axes: str) -> Callable[[int], DeviceMesh]:
    """All ranks along the last axis; with two axes, two along the first."""

    def build(num_ranks: int) -> DeviceMesh:
        sizes = (num_ranks,) if len(axes) == 1 else (2, num_ranks // 2)
        return init_device_mesh("cpu", sizes, mesh_dim_names=axes)

    return build


ROWS = {
    "trivial": _row("trivial plan", 1.02, _mesh("dp"), plain_PyTorch=plain),
    "tp": _row("tensor parallel", 1.05, _mesh("tp"), hand_written=hand_tensor_parallel, DTensor=dtensor),
    "dp": _row(
        "data parallel",
        1.05,
        _mesh("dp"),
        hand_written=hand_data_parallel,
        DDP=distributed_data_parallel,
        FSDP2=fsdp,
    ),
    "zero-1": _row("ZeRO 1", 1.05, _mesh("dp"), zero=1, DDP=distributed_data_parallel, hand_written=hand_zero_1),
    "zero-3": _row("ZeRO 3", 1.12, _mesh("dp"), zero=3, DDP=distributed_data_parallel, FSDP2=fsdp),
    "check-finite": _row("check_finite=1 against none", 1.10, _mesh("dp"), check_finite=1, unchecked=ours),
    "dp-tp": _row("2-way data x tensor", 1.05, _mesh("dp", "tp"), hand_written=hand_both),
}


def build_all(row: Row, whole: Transformer, setting: Setting) -> dict[str, TrainStep]:
    """The steps of a row's contenders, each over its own copy of the model."""
    return {contender.name: contender.build(copy.deepcopy(whole), setting) for contender in row.contenders}
