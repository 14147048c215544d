"""Keep outputs sharded until their first use.

A program delivers such an output as this rank's part. The user gets a ``LazyTensor``: a tensor of the whole shape
without memory. The first operator that reads its values gathers it, and so do ``numpy()``, ``tolist()``, pickling and
copying: every rank must do it. For autograd it is an ordinary tensor. Its cotangent takes the backward column of the
conversion's cell, whether or not the output was read.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from shardwise.errors import CaptureWarning, ShardwiseError, warn_user
from shardwise.graph.capture import OutputMemory
from shardwise.graph.ir import Graph, Ref, refs
from shardwise.graph.trees import storage_of
from shardwise.layouts.text import format_dtype
from shardwise.plans.quantities import format_bytes
from shardwise.programs.buckets import Bucket
from shardwise.programs.spmd import SpmdProgram
from shardwise.programs.spmd_steps import Conversion, OpStep
from shardwise.runtime.communicator import Communicator
from shardwise.runtime.messages import Purpose
from shardwise.runtime.transit import Direction, stages

aten = torch.ops.aten
# By default, smaller outputs are gathered at once: a separate message later costs more, and a single rank may read
# them.
LEAST_BYTES = 2**20
# Methods that access a tensor's memory without an operator.
_MEMORY = frozenset(
    getattr(Tensor, name)
    for name in (
        *("numpy", "tolist", "__array__", "__reduce_ex__", "__deepcopy__", "__dlpack__", "data_ptr"),
        *("untyped_storage", "storage", "storage_offset", "stride", "is_contiguous", "share_memory_"),
    )
)


def with_outputs_split(
    spmd: SpmdProgram, memories: Sequence[OutputMemory | None], least_bytes: int
) -> tuple[SpmdProgram, dict[str, Conversion]]:
    """Remove the conversions that only gather outputs other than the loss; return the program and these conversions, by
    the values it delivers instead. Kept are those of outputs that are parameters or buffers, are 0-dim, need no
    message, or have fewer than ``least_bytes``."""
    fixed = {spmd.loss, *(value for _, value in spmd.mutations)}
    for step in spmd.steps:
        fixed.update(step.operands if isinstance(step, OpStep) else ())
    fixed.update(conversion.value for conversion in spmd.conversions)
    for output, memory in zip(spmd.outputs, memories, strict=True):
        if isinstance(output, Ref) and memory is not None and memory.name in spmd.graph.source_of:
            fixed.add(output.name)
    splittable = set(refs(spmd.outputs)) - fixed
    gatherings = {
        conversion.result: conversion
        for conversion in spmd.conversions
        if conversion.result in splittable
        and conversion.target.shape
        and prod(conversion.target.shape) * conversion.itemsize >= least_bytes
        and conversion.collectives()
    }
    steps: list[OpStep | Conversion | Bucket] = []
    for step in spmd.steps:
        kept = tuple(conversion for conversion in step.conversions if conversion.result not in gatherings)
        if len(kept) == len(step.conversions):
            steps.append(step)
        elif kept:
            steps.append(replace(step, conversions=kept) if isinstance(step, Bucket) and kept[1:] else kept[0])
    outputs = tuple(
        Ref(gatherings[out.name].value) if isinstance(out, Ref) and out.name in gatherings else out
        for out in spmd.outputs
    )
    return replace(spmd, steps=tuple(steps), outputs=outputs), {
        conversion.value: conversion for conversion in gatherings.values()
    }


def deliver_outputs(
    outputs: Sequence[Any], names: Sequence[Any], split: Mapping[str, Conversion], graph: Graph, ranks: Communicator
) -> list[Any]:
    """Return the flattened outputs of a call, sharded ones as ``LazyTensor``. ``names``: the program's value of each
    output; ``split``: the conversions of the sharded ones."""
    outputs_read: list[Any] = []
    unread_of: dict[tuple[int, str], Tensor] = {}
    for output, name in zip(outputs, names, strict=True):
        if isinstance(name, Ref) and name.name in split and isinstance(output, Tensor):
            key = (id(output), name.name)
            if key not in unread_of:
                unread = UngatheredOutput(output.detach(), split[name.name], graph, ranks, len(unread_of))
                unread_of[key] = _DeferGather.apply(output, unread)  # type: ignore[no-untyped-call]
            output = unread_of[key]
        outputs_read.append(output)
    return outputs_read


def _read_all(tree: Any) -> Any:
    return pytree.tree_map_only(LazyTensor, plain_tensor, tree)


class UngatheredOutput:
    """This rank's part of an output until it is gathered. ``number``: its index among its call's outputs."""

    def __init__(self, part: Tensor, conversion: Conversion, graph: Graph, ranks: Communicator, number: int) -> None:
        self.part: Tensor | None = part
        self.conversion, self.graph, self.ranks = conversion, graph, ranks
        self.shape, self.dtype, self.device = conversion.target.shape, part.dtype, part.device
        self.call, self.number = ranks.calls, number
        self._whole: Tensor | None = None

    def whole(self) -> Tensor:
        """Return the whole output, gathered on the first call. Raises ShardwiseError if ranks read different outputs,
        and CollectiveError if one does not read."""
        if torch.compiler.is_compiling():  # Dynamo must not trace the messages of a read
            read: Tensor = torch.compiler.disable(self.whole)()
            return read
        if self._whole is None:
            assert self.part is not None, "it is not read yet"
            place = f"reading an output of call {self.call}, {self.described}"
            doing = f"{place}, which every rank must read (or outputs='whole' in parallelize),"
            if not self.ranks.meet((self.call << 16) + self.number, doing):
                raise ShardwiseError(
                    f"ranks read different outputs: rank {self.ranks.rank} reads {self.described}, of call {self.call}",
                    fix="read outputs on every rank, in the same order, or pass outputs='whole' to sw.parallelize",
                )
            with torch.no_grad():
                self._whole = self._converted(self.part, backward=False).contiguous()
            self.part = None
        return self._whole

    def cotangent_of_part(self, cotangent: Tensor) -> Tensor:
        """Return this rank's part of a cotangent of the whole."""
        if torch.compiler.is_compiling():
            part: Tensor = torch.compiler.disable(self.cotangent_of_part)(cotangent)
            return part
        return self._converted(cotangent, backward=True)

    def _converted(self, tensor: Tensor, *, backward: bool) -> Tensor:
        purpose = Purpose((self.conversion,), self.graph, self.ranks, backward)
        converted: Tensor = Direction(tuple(stages([self.conversion.moves], purpose)), purpose)([tensor])[0]
        return converted

    @property
    def described(self) -> str:
        """Describe the output: ``f32[8, 128, 32000] of /lm_head/linear (125.0 MiB)``."""
        producer = self.graph.producer.get(self.conversion.origin)
        of = f" of {producer.name}" if producer is not None else ""
        size = format_bytes(prod(self.shape) * self.dtype.itemsize)
        return f"{format_dtype(self.dtype)}{list(self.shape)}{of} ({size})"


class LazyTensor(Tensor):
    """An output of a parallel module that stays sharded until its values are read, which every rank must do. Shape,
    dtype, device and ``detach()`` do not read; nor does ``repr``, which shows the values once they are gathered."""

    unread: UngatheredOutput

    @staticmethod
    def __new__(cls, unread: UngatheredOutput) -> LazyTensor:
        make: Any = Tensor._make_wrapper_subclass
        tensor: LazyTensor = make(cls, unread.shape, dtype=unread.dtype, device=unread.device)
        tensor.unread = unread
        return tensor

    def _text(self) -> str:
        if self.unread.part is None:
            return repr(plain_tensor(self))
        return f"<{self.unread.described}, {self.unread.conversion.source}, whole when every rank reads it>"

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _MEMORY:
            return func(*_read_all(args), **_read_all(kwargs or {}))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs or {})

    @classmethod
    def _dispatched(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is aten.detach.default:
            return LazyTensor(args[0].unread)
        if torch.Tag.inplace_view in func.tags:
            what = f"{func} would change the shape of an output that is not gathered yet"
            fix = "write the operator without the underscore, or pass outputs='whole' to parallelize"
            raise ShardwiseError(what, fix=fix)
        wrapper_of: dict[int, LazyTensor] = {}

        def read(tensor: LazyTensor) -> Tensor:
            whole = tensor.unread.whole()
            wrapper_of[id(whole)] = tensor
            return whole

        args, kwargs = pytree.tree_map_only(LazyTensor, read, (args, kwargs or {}))
        result = func(*args, **kwargs)
        return pytree.tree_map_only(Tensor, lambda tensor: wrapper_of.get(id(tensor), tensor), result)

    __torch_dispatch__: Any = _dispatched  # torch declares these two with other types
    __repr__: Any = _text


def plain_tensor(tensor: LazyTensor) -> Tensor:
    """Return the values as a plain tensor, a view that autograd records."""
    with torch.set_grad_enabled(tensor.requires_grad):
        return tensor.view_as(tensor)


class _DeferGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, unread: UngatheredOutput) -> Tensor:
        ctx.unread = unread
        ctx.set_materialize_grads(False)
        return LazyTensor(unread)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple[Tensor | None, None]:
        (cotangent,) = cotangents
        return (None if cotangent is None else ctx.unread.cotangent_of_part(cotangent)), None


# ----------------------------------------------------------------------------------------------------------------------
# Memory sharing between what a step returns and the buffers it writes, as on one device. A graph has values but no
# memory: a copy is the same value as its source, and a program returns whichever tensor holds the value. ``capture``
# notes which outputs share memory on one device; outputs that do not are separated here. An output that is a buffer, or
# a view of one, aliases this rank's buffer if the rank holds the whole buffer.


def separate_memory(
    outputs: Sequence[Any], memories: Sequence[OutputMemory | None], sources: Mapping[str, Tensor]
) -> list[Any]:
    """Return the outputs, cloning those that share memory with another output or a source but would not on one device.

    ``memories``: one entry per output; ``sources``: value -> the tensor that this rank holds.
    """
    owner = {storage_of(tensor): name for name, tensor in sources.items() if tensor.numel()}
    separated = []
    for output, memory in zip(outputs, memories, strict=True):
        if memory is None or not isinstance(output, Tensor) or not output.numel():
            separated.append(output)
            continue
        if owner.setdefault(storage_of(output), memory.name) != memory.name:
            output = output.clone()
            owner[storage_of(output)] = memory.name
        separated.append(output)
    return separated


def write_buffers(buffers: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Write new values into buffers in place. A value that is itself a buffer (a swap of two) is cloned before it is
    overwritten."""
    if not buffers:
        return
    memories = {storage_of(buffer) for buffer in buffers}
    with torch.no_grad():
        kept = [value.clone() if storage_of(value) in memories else value for value in values]
        for buffer, value in zip(buffers, kept, strict=True):
            buffer.copy_(value)


def alias_buffers(
    outputs: Sequence[Any], memories: Sequence[OutputMemory | None], whole: Mapping[str, Tensor]
) -> list[Any]:
    """Return the outputs, replacing views of a buffer by views of this rank's buffer. ``whole``: value -> the buffers
    that this rank holds whole, after the step has written them."""
    results = []
    for output, memory in zip(outputs, memories, strict=True):
        buffer = None if memory is None else whole.get(memory.name)
        if memory is not None and buffer is not None and memory.geometry is not None:
            size, stride, offset = memory.geometry
            if buffer.is_contiguous() and buffer.dtype == output.dtype:
                output = buffer.as_strided(size, stride, buffer.storage_offset() + offset)
        results.append(output)
    return results


def whole_buffers(spmd: SpmdProgram) -> tuple[str, ...]:
    """Return the value names of the buffers that every rank holds whole."""
    buffers = [source.value for source in spmd.graph.sources if source.kind == "buffer"]
    return tuple(name for name in buffers if not spmd.layouts[name].positions)


def announce_copies(spmd: SpmdProgram, memories: Iterable[OutputMemory | None]) -> None:
    """Warn about outputs that alias a written buffer on one device but are copies on ranks."""
    shared = {memory.name for memory in memories if memory is not None}
    written = shared.intersection(name for name, _ in spmd.mutations) - set(whole_buffers(spmd))
    if written:
        names = ", ".join(sorted(spmd.graph.source_of[name].names[0] for name in written))
        warn_user(
            f"on one device an output is the buffer {names} itself, so later calls change it; this plan shards the "
            "buffer, so the output is a copy made at its call",
            CaptureWarning,
        )
