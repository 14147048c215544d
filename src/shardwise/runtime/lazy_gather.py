"""Outputs that stay split until somebody reads them.

A program delivers such an output as this rank's part, and the user gets a tensor without memory (``LazyTensor``) of the
whole shape. The first operator that reads its values makes the conversion that brings the whole together, and so do
``numpy()``, ``tolist()``, pickling and copying: every rank must do it. To autograd it is an ordinary tensor, whose
cotangent takes the other column of the conversion's cell; whether and when it was read does not matter there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from shardwise.errors import ShardwiseError, problem
from shardwise.graph.capture import OutputMemory
from shardwise.graph.ir import Graph, Ref, refs
from shardwise.layouts.text import format_dtype
from shardwise.plans.quantities import format_bytes
from shardwise.programs.buckets import Bucket
from shardwise.programs.spmd import SpmdProgram, conversions_of
from shardwise.programs.spmd_steps import Conversion, OpStep
from shardwise.runtime.agree import meet_to_read
from shardwise.runtime.communicator import Communicator
from shardwise.runtime.faults import Purpose
from shardwise.runtime.transit import Direction, stages

aten = torch.ops.aten
# Where nobody says when: outputs with fewer bytes come at once, since a message later costs more than theirs, and one
# rank may read them alone.
LEAST_BYTES = 2**20
# What takes a tensor's memory (or its text) without an operator.
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
    """The program without the conversions that only bring outputs beside the loss together, and these: by the values
    that it delivers instead. Outputs that are a parameter or a buffer on one device are as of now, and stay; so do
    those of no dims, those that cost no message, and those with fewer bytes."""
    fixed = {spmd.loss, *(value for _, value in spmd.mutations)}
    for step in spmd.steps:
        fixed.update(step.operands if isinstance(step, OpStep) else ())
    fixed.update(conversion.value for conversion in spmd.conversions)
    for output, memory in zip(spmd.outputs, memories, strict=True):
        if isinstance(output, Ref) and memory is not None and memory.name in spmd.graph.source_of:
            fixed.add(output.name)
    wanted = set(refs(spmd.outputs)) - fixed
    gatherings = {
        conversion.result: conversion
        for conversion in spmd.conversions
        if conversion.result in wanted
        and conversion.target.shape
        and prod(conversion.target.shape) * conversion.itemsize >= least_bytes
        and conversion.collectives()
    }
    steps: list[OpStep | Conversion | Bucket] = []
    for step in spmd.steps:
        kept = tuple(conversion for conversion in conversions_of(step) if conversion.result not in gatherings)
        if len(kept) == len(conversions_of(step)):
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
    """Flattened outputs of a call, those that are split as tensors that are read later. ``names``: per output that of
    the program; ``split``: the conversions by those that are."""
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
    """A tree with its ``LazyTensor`` as plain tensors."""
    return pytree.tree_map_only(LazyTensor, plain_tensor, tree)


class UngatheredOutput:
    """An output's part on this rank, until it is brought together. ``number``: which of its call's outputs."""

    def __init__(self, part: Tensor, conversion: Conversion, graph: Graph, ranks: Communicator, number: int) -> None:
        self.part: Tensor | None = part
        self.conversion, self.graph, self.ranks = conversion, graph, ranks
        self.shape, self.dtype, self.device = conversion.target.shape, part.dtype, part.device
        self.call, self.number = ranks.calls, number
        self._whole: Tensor | None = None

    def whole(self) -> Tensor:
        """All of it; once, the ranks communicate. Raises ShardwiseError where they read different outputs, and
        CollectiveError where one does not."""
        if torch.compiler.is_compiling():  # a torch.compile around what reads: messages are not for Dynamo
            read: Tensor = torch.compiler.disable(self.whole)()
            return read
        if self._whole is None:
            assert self.part is not None, "it is not read yet"
            meet_to_read(self.ranks, self.call, self.number, self.described)
            with torch.no_grad():
                self._whole = self._converted(self.part, backward=False).contiguous()
            self.part = None
        return self._whole

    def cotangent_of_part(self, cotangent: Tensor) -> Tensor:
        """This rank's part of a cotangent of the whole."""
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
        """``f32[8, 128, 32000] of /lm_head/linear (125.0 MiB)``."""
        producer = self.graph.producer.get(self.conversion.origin)
        of = f" of {producer.name}" if producer is not None else ""
        size = format_bytes(prod(self.shape) * self.dtype.itemsize)
        return f"{format_dtype(self.dtype)}{list(self.shape)}{of} ({size})"


class LazyTensor(Tensor):
    """An output of a call of a parallel module, split over the ranks until its values are asked for: then every rank
    must ask. Shape, dtype, device and ``detach()`` do not ask; nor does ``repr``, which shows the values once they are
    here."""

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
            raise ShardwiseError(
                problem(
                    f"{func} would change the shape of an output that is brought together when it is read",
                    fix="write the operator without the underscore, or give parallelize outputs='whole'",
                )
            )
        wrapper_of: dict[int, LazyTensor] = {}

        def read(tensor: LazyTensor) -> Tensor:
            whole = tensor.unread.whole()
            wrapper_of[id(whole)] = tensor
            return whole

        args, kwargs = pytree.tree_map_only(LazyTensor, read, (args, kwargs or {}))
        result = func(*args, **kwargs)
        return pytree.tree_map_only(Tensor, lambda tensor: wrapper_of.get(id(tensor), tensor), result)

    __torch_dispatch__: Any = _dispatched  # torch declares these two as something else
    __repr__: Any = _text


def plain_tensor(tensor: LazyTensor) -> Tensor:
    """The values in a tensor of its own kind, a view that autograd knows."""
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


__all__ = ["LazyTensor", "UngatheredOutput", "deliver_outputs", "plain_tensor", "with_outputs_split"]
