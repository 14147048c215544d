"""The shards of every tensor on a grid of devices, for the page."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil, prod
from typing import Any

from shardwise.layouts.layout import Layout, Ranges
from shardwise.layouts.mesh import Mesh
from shardwise.plans.entries import Stage
from shardwise.plans.printing import merged_tensors

MOST_DEVICES = 128  # shown in a grid
MOST_LISTED = 16  # ranks listed in a table row
MOST_UNEVEN = 4096  # devices whose shard sizes are computed one by one, if layouts are uneven


@dataclass(frozen=True)
class Grid:
    """The shown devices of a stage: ``ranks`` row by row, ``columns`` per row; ``caption`` describes them."""

    ranks: tuple[int, ...]
    columns: int
    caption: str

    @staticmethod
    def of(mesh: Mesh) -> Grid:
        """Return a grid of all devices, or of the first ones along every axis if there are too many."""
        shown = [size for _, size in mesh.axes]
        while prod(shown) > MOST_DEVICES:
            longest = shown.index(max(shown))
            shown[longest] = max(1, shown[longest] // 2)
        strides = [prod(size for _, size in mesh.axes[i + 1 :]) for i in range(len(shown))]
        ranks = [0]
        for count, stride in zip(shown, strides, strict=True):
            ranks = [rank + i * stride for rank in ranks for i in range(count)]
        axes = " x ".join(f"{name} {n} of {size}" for n, (name, size) in zip(shown, mesh.axes, strict=True))
        what = "every device" if len(ranks) == mesh.num_devices else f"{len(ranks)} of {mesh.num_devices:,} devices"
        along = mesh.axes[-1][0] if mesh.axes else ""
        caption = f"{what} ({axes}); a row runs along {along}" if along else what
        return Grid(tuple(ranks), shown[-1] if shown else 1, caption)


def device_grid(stage: Stage) -> dict[str, Any]:
    """Return the grid of a stage, its tensors, and for every layout the shard on each device with its indices."""
    grid = Grid.of(stage.mesh)
    names = {entry.layout: entry.name for entry in (*stage.inputs, *stage.parameters, *stage.buffers)}
    layouts = list(names)
    tensors = [
        {"kind": kind, "name": name, "layout": text, "key": layouts.index(text)}
        for kind, entries in (("input", stage.inputs), ("parameter", stage.parameters), ("buffer", stage.buffers))
        for name, text in merged_tensors(entries)
    ]
    parsed = [stage.layouts[name] for name in names.values()]
    placed = stage.placement.ranks
    return {
        "columns": grid.columns,
        "caption": grid.caption,
        "ranks": [placed[rank] for rank in grid.ranks],
        "tensors": tensors,
        "held": [_ranks_by_shape(layout, placed) for layout in parsed],
        "shards": [_shards(layout, grid) for layout in parsed],
    }


def _shards(layout: Layout, grid: Grid) -> dict[str, Any]:
    """Return ``of``, the number of the shard on every device, and ``what``, the indices of every shard."""
    numbers: dict[str, int] = {}
    shard_of = [
        numbers.setdefault(_indices(layout, layout.mesh.coordinates(rank)), len(numbers)) for rank in grid.ranks
    ]
    return {"of": shard_of, "what": list(numbers)}


def _indices(layout: Layout, coordinates: Mapping[str, int]) -> str:
    """Format indices as ``[0:16, :]``. A dim that is a product of atoms has a range for each: ``[: x 0:8, :]``."""
    windows = {(window.dim, window.atom): window for window in layout.windows}
    dims = []
    for d, dim in enumerate(layout.dims):
        parts = []
        for i, atom in enumerate(dim):
            window = windows.get((d, i))
            if window is not None:
                parts.append(_ranges(window.ranges[layout.index_along(d, i, coordinates)]))
            else:
                start, length = layout.atom_pieces(d, i, coordinates)
                parts.append(":" if length == atom.size else f"{start}:{start + length}")
        dims.append(" x ".join(parts))
    return f"[{', '.join(dims)}]"


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
