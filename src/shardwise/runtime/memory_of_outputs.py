"""Memory sharing between what a step returns and the buffers it writes, as on one device.

A graph has values but no memory: a copy is the same value as its source, and a program returns whichever tensor holds
the value. ``capture`` notes which outputs share memory on one device; outputs that do not are separated here. An output
that is a buffer, or a view of one, aliases this rank's buffer if the rank holds the whole buffer.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from shardwise.errors import CaptureWarning, warn_user
from shardwise.graph.capture import OutputMemory
from shardwise.graph.trees import storage_of
from shardwise.programs.spmd import SpmdProgram


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
