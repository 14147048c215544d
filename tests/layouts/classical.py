"""The classical view of a layout, for printing: a device matrix and a tensor map, as in the specification.

The device matrix lists how many devices there are along each of its dims, row-major; the tensor map says for every
tensor dim which device dim splits it, counted from the right, or -1.
"""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.layouts.layout import Layout


@dataclass(frozen=True, slots=True)
class ClassicalView:
    """``tensor_map``: per tensor dim a device dim counted from the right, -1 for none, or a tuple of several (major
    first)."""

    device_matrix: tuple[int, ...]
    tensor_map: tuple[int | tuple[int, ...], ...]

    def __str__(self) -> str:
        return f"device matrix {self.device_matrix}, tensor map {self.tensor_map}"


def classical_view(layout: Layout) -> ClassicalView:
    """Neighbouring sub-axes that do the same merge into one device dim. Atoms within a dim and partial states are not
    shown: the view is defined for placements that split whole dims."""
    mesh = layout.mesh
    runs: list[tuple[object, list[str]]] = []
    for axis in mesh.sub_axes:
        place = layout.positions.get(axis)
        order = layout.dims[place[0]][place[1]].axes if place else ()
        follows = bool(runs) and runs[-1][0] == place
        if follows and place is not None:
            follows = order.index(axis) == order.index(runs[-1][1][-1]) + 1
        if follows:
            runs[-1][1].append(axis)
        else:
            runs.append((place, [axis]))
    matrix = tuple(mesh.size_of(axes) for _, axes in runs)
    device_dim = {axis: len(runs) - 1 - i for i, (_, axes) in enumerate(runs) for axis in axes}
    entries: list[int | tuple[int, ...]] = []
    for dim in layout.dims:
        used = tuple(dict.fromkeys(device_dim[axis] for atom in dim for axis in atom.axes))
        entries.append(-1 if not used else used[0] if len(used) == 1 else used)
    return ClassicalView(matrix, tuple(entries))
