"""``shardwise::split_rows`` and ``shardwise::join_rows``: a tensor in chunks of its rows, and the tensor of its chunks.

The rows of a dim are in ``blocks``, such as one per device that has a part of them. Chunk i has the i-th part of every
block, so that a device finds its part of every chunk in its own block.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shardwise.graph.operator_library import composite


def _split_rows(x: torch.Tensor, dim: int, blocks: int, chunks: int) -> list[torch.Tensor]:
    rows = x.shape[dim] // max(blocks * chunks, 1)
    parts = x.unflatten(dim, (blocks, chunks, rows)).unbind(dim + 1)
    return [part.flatten(dim, dim + 1).contiguous() for part in parts]


def _join_rows(chunks: Sequence[torch.Tensor], dim: int, blocks: int) -> torch.Tensor:
    if blocks == 1:
        return torch.cat(list(chunks), dim)
    rows = chunks[0].shape[dim] // max(blocks, 1)
    return torch.stack([chunk.unflatten(dim, (blocks, rows)) for chunk in chunks], dim + 1).flatten(dim, dim + 2)


SPLIT_ROWS, JOIN_ROWS = composite(_split_rows), composite(_join_rows)
