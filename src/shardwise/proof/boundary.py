"""Transfers between stages on virtual ranks: cuts, delivers and joins blocks in one process."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from torch import Tensor

from shardwise.layouts.layout import Layout
from shardwise.layouts.placement import Placement
from shardwise.layouts.transfer import TransferBlock
from shardwise.runtime.local_shards import cut_block, join_blocks


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
