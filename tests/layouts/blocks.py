"""Transfers between stages in one process: cuts, delivers and joins blocks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, product

import torch
from torch import Tensor

from layouts.transfers import TransferBlock
from shardwise.layouts.layout import Layout, Ranges
from shardwise.layouts.placement import Placement


def deliver(
    blocks: Sequence[TransferBlock], shards: Mapping[int, Tensor], target: Layout, target_place: Placement
) -> dict[int, Tensor]:
    """Return the tensor of every rank in the target's placement after a transfer. ``shards``: the tensors of the
    source's global ranks."""
    messages: dict[int, list[tuple[TransferBlock, Tensor]]] = defaultdict(list)
    for block in blocks:
        messages[block.receiver].append((block, cut_block(shards[block.sender], block)))
    like = next(iter(shards.values()))
    return {
        rank: join_blocks(target.local_shape(target_place.coordinates(rank)), messages[rank], like)
        for rank in target_place.ranks
    }


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
