"""Cut a global tensor into a rank's shard, and shards into the blocks that pipeline stages exchange."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import accumulate, product

import torch

from shardwise.layouts.layout import Layout, Ranges
from shardwise.layouts.transfer import TransferBlock


def shard(full: torch.Tensor, layout: Layout, coordinates: Mapping[str, int]) -> torch.Tensor:
    """Return the shard of a global tensor at ``coordinates``, in a layout without partial states: a view where
    possible."""
    assert not layout.partial_axes, f"a partial value has no shards: {layout}"
    part = full.reshape(tuple(atom.size for dim in layout.dims for atom in dim))
    atoms = [(d, i) for d, dim in enumerate(layout.dims) for i in range(len(dim))]
    for position, (d, i) in enumerate(atoms):
        part = part.narrow(position, *layout.atom_pieces(d, i, coordinates))
    return part.reshape(layout.local_shape(coordinates))


def cut_block(local: torch.Tensor, block: TransferBlock) -> torch.Tensor:
    """Return a block's elements from the sender's tensor, contiguous."""
    for dim, ranges in enumerate(block.taken):
        local = torch.cat([local.narrow(dim, start, stop - start) for start, stop in ranges], dim)
    return local.contiguous()


def join_blocks(
    shape: tuple[int, ...], messages: Iterable[tuple[TransferBlock, torch.Tensor]], like: torch.Tensor
) -> torch.Tensor:
    """Assemble a receiver's tensor from its blocks and their messages. ``like``: gives dtype and device."""
    joined = like.new_empty(shape)
    num_filled = 0
    for block, message in messages:
        num_filled += block.numel
        for box in product(*map(_with_offsets, block.placed)):
            target, part = joined, message
            for dim, (start, stop, offset) in enumerate(box):
                target = target.narrow(dim, start, stop - start)
                part = part.narrow(dim, offset, stop - start)
            target.copy_(part)
    assert num_filled == joined.numel(), f"blocks of {num_filled} elements for a tensor of {joined.numel()}"
    return joined


def _with_offsets(ranges: Ranges) -> list[tuple[int, int, int]]:
    """Return the ranges, each with its offset in their concatenation."""
    offsets = accumulate((stop - start for start, stop in ranges), initial=0)
    return [(start, stop, offset) for (start, stop), offset in zip(ranges, offsets, strict=False)]
