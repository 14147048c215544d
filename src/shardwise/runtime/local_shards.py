"""Cut a global tensor into a rank's shard."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from shardwise.layouts.layout import Layout


def shard(full: torch.Tensor, layout: Layout, coordinates: Mapping[str, int]) -> torch.Tensor:
    """Return the shard of a global tensor at ``coordinates``, in a layout without partial states: a view where
    possible."""
    assert not layout.partial_axes, f"a partial value has no shards: {layout}"
    part = full.reshape(tuple(atom.size for dim in layout.dims for atom in dim))
    atoms = [(d, i) for d, dim in enumerate(layout.dims) for i in range(len(dim))]
    for position, (d, i) in enumerate(atoms):
        part = part.narrow(position, *layout.atom_pieces(d, i, coordinates))
    return part.reshape(layout.local_shape(coordinates))
