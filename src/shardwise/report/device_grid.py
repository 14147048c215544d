"""Which device holds which part of a tensor, for the page."""

from __future__ import annotations

from math import ceil
from typing import Any

from shardwise.layouts.layout import Layout, Ranges
from shardwise.plans.entries import Stage
from shardwise.plans.printing import merged_tensors

MOST_LISTED = 16  # ranks listed in a table row
MOST_UNEVEN = 4096  # devices whose shard sizes are computed one by one, if layouts are uneven

Piece = tuple[int, list[tuple[int, int]], list[str]]


def device_grid(stage: Stage) -> dict[str, Any]:
    """Return the tensors of a stage, and for every layout how many ranks hold shards of which shape."""
    names = {entry.layout: entry.name for entry in (*stage.inputs, *stage.parameters, *stage.buffers)}
    layouts = list(names)
    tensors = [
        {"kind": kind, "name": name, "layout": text, "key": layouts.index(text)}
        for kind, entries in (("input", stage.inputs), ("parameter", stage.parameters), ("buffer", stage.buffers))
        for name, text in merged_tensors(entries)
    ]
    parsed = [stage.layouts[name] for name in names.values()]
    return {"tensors": tensors, "held": [_ranks_by_shape(layout, stage.placement.ranks) for layout in parsed]}


def pieces_of(layout: Layout) -> list[list[Piece]]:
    """Return for every atom of every dim its size, the (stride, size) of the sub-axes that split it, and, if its
    parts are uneven windows, their indices as texts. The device at position ``p`` of the mesh holds part ``i`` of the
    atom, where ``i = i * size + p // stride % size`` over the sub-axes: elements ``i * size // count`` up to those of
    the next part."""
    strides: dict[str, tuple[int, int]] = {}
    stride = 1
    for axis in reversed(layout.mesh.sub_axes):
        strides[axis] = stride, layout.mesh.sizes[axis]
        stride *= layout.mesh.sizes[axis]
    windows = {(window.dim, window.atom): [*map(_ranges, window.ranges)] for window in layout.windows}
    return [
        [(atom.size, [strides[axis] for axis in atom.axes], windows.get((d, i), [])) for i, atom in enumerate(dim)]
        for d, dim in enumerate(layout.dims)
    ]


def _ranges(ranges: Ranges) -> str:
    return "+".join(f"{start}:{stop}" for start, stop in ranges) or "nothing"


def _ranks_by_shape(layout: Layout, placed: tuple[int, ...]) -> list[tuple[str, str, str]]:
    """Return (local shape, number of ranks with a shard of it, the first of these ranks) for every local shape."""
    mesh = layout.mesh
    step = 1 if layout.is_even else ceil(mesh.num_devices / MOST_UNEVEN)
    ranks: dict[tuple[int, ...], list[int]] = {}
    if layout.is_even:
        ranks[layout.local_shape(mesh.coordinates(0))] = [*placed]
    else:
        for rank in range(0, mesh.num_devices, step):
            ranks.setdefault(layout.local_shape(mesh.coordinates(rank)), []).append(placed[rank])
    return [
        (
            str(list(shape)),
            f"{len(holders):,}" if step == 1 else f"{len(holders):,} of {MOST_UNEVEN:,} looked at",
            ", ".join(map(str, holders[:MOST_LISTED])) + (" ..." if len(holders) > MOST_LISTED else ""),
        )
        for shape, holders in ranks.items()
    ]
