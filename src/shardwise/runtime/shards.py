"""Cutting the global tensor into a rank's shard, and putting shards together again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from shardwise.layouts.layout import Layout


def shard(full: torch.Tensor, layout: Layout, coordinates: Mapping[str, int]) -> torch.Tensor:
    """What the rank at ``coordinates`` holds of a global tensor in a layout without partial states: a view where
    possible."""
    assert not layout.partial_axes, f"a partial value has no shards: {layout}"
    return _part(full, layout, coordinates).reshape(layout.local_shape(coordinates))


def unshard(shards: Sequence[torch.Tensor], layout: Layout) -> torch.Tensor:
    """The global tensor from all ranks' shards (of replicas, the lowest rank's)."""
    full = shards[0].new_empty(layout.shape)
    for rank in reversed(range(layout.mesh.num_devices)):
        coordinates = layout.mesh.coordinates(rank)
        part = _part(full, layout, coordinates)  # a view: ``full`` is contiguous
        part.copy_(shards[rank].detach().reshape(part.shape))
    return full


def _part(full: torch.Tensor, layout: Layout, coordinates: Mapping[str, int]) -> torch.Tensor:
    """The rank's part of a global tensor, a dim for every atom."""
    part = full.reshape(tuple(atom.size for dim in layout.dims for atom in dim))
    atoms = [(d, i) for d, dim in enumerate(layout.dims) for i in range(len(dim))]
    for position, (d, i) in enumerate(atoms):
        part = part.narrow(position, *layout.atom_pieces(d, i, coordinates))
    return part
