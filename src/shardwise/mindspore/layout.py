"""``ms.Layout``: strategies by names of the device matrix's dims, for layouts that split counts cannot describe."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from math import prod
from typing import Any

from shardwise import Mesh
from shardwise.errors import LayoutError, problem
from shardwise.mindspore.checks import closest
from shardwise.mindspore.library import Atom, format_layout
from shardwise.mindspore.library import Layout as TensorLayout

AXIS = "data"  # axis of all devices; by this name operators without strategy split their batch over it
Counts = tuple[tuple[int, ...], ...]


class Layout:
    """A layout by names: ``Layout((2, 2, 2), ("dp", "sp", "mp"))`` names the dims of the device matrix. A call with a
    name, tuple of names or "None" per dim places a tensor: ``layout("dp", ("sp", "mp"))``. The product of
    ``device_matrix`` is the number of devices, row-major. Raises ValueError for other numbers and names."""

    def __init__(
        self, device_matrix: Sequence[int], alias_name: Sequence[str], rank_list: Sequence[int] | None = None
    ) -> None:
        self.device_matrix, self.alias_name = tuple(device_matrix), tuple(alias_name)
        self.tensor_map: tuple[tuple[str, ...], ...] | None = None
        what = f"Layout({self.device_matrix}, {self.alias_name})"
        if len(self.device_matrix) != len(self.alias_name) or len({*self.alias_name}) != len(self.alias_name):
            raise ValueError(problem(what, fix='one name for each dim: Layout((2, 4), ("dp", "mp"))'))
        if any(isinstance(size, bool) or not isinstance(size, int) or size < 1 for size in self.device_matrix):
            raise ValueError(problem(what, fix="whole numbers from 1"))
        if rank_list is not None and list(rank_list) != list(range(prod(self.device_matrix))):
            raise ValueError(problem(f"{what} on the ranks {list(rank_list)}", fix="all ranks, in order: leave it out"))

    def __call__(self, *tensor_map: str | tuple[str, ...]) -> Layout:
        placed = copy.copy(self)
        names = [(entry,) if isinstance(entry, str) else tuple(entry) for entry in tensor_map]
        placed.tensor_map = tuple(tuple(name for name in entry if name != "None") for entry in names)
        used = [name for entry in placed.tensor_map for name in entry]
        for name in used:
            if name not in self.alias_name:
                raise ValueError(problem(f"the layout has no dim {name!r}", fix=closest(name, self.alias_name)))
            if used.count(name) > 1:
                raise ValueError(problem(f"{name!r} splits two dims in {tensor_map}", fix="use every name once"))
        return placed

    @property
    def counts(self) -> tuple[int, ...]:
        """Return the number of parts of each dim."""
        if self.tensor_map is None:
            raise ValueError(problem(f"{self} does not place a tensor", fix='call it: layout("dp", "None")'))
        sizes = dict(zip(self.alias_name, self.device_matrix, strict=True))
        return tuple(prod(sizes[name] for name in names) for names in self.tensor_map)

    def text(self, shape: Sequence[int], devices: int) -> str:
        """Return the layout of a tensor as text. Raises LayoutError if the device matrix does not fit."""
        mesh = Mesh({AXIS: devices})
        axes, left = {}, list(mesh.sub_axes)
        for name, size in zip(self.alias_name, self.device_matrix, strict=True):
            taken: list[str] = []
            while left and mesh.size_of(taken) < size:
                taken.append(left.pop(0))
            if mesh.size_of(taken) != size:
                what = f"the device matrix {self.device_matrix} is not {devices} devices in rows of {mesh.sizes}"
                raise LayoutError(what, fix=f"numbers whose product is {devices}")
            axes[name] = taken
        if left or len(shape) != len(self.counts):
            what = f"{self} is for {prod(self.device_matrix)} devices and {len(self.counts)} dims"
            raise LayoutError(f"{what}; there are {devices}, and the shape {list(shape)}", fix="as many")
        dims = (
            (Atom(size, tuple(axis for name in names for axis in axes[name])),)
            for size, names in zip(shape, self.tensor_map or (), strict=True)
        )
        return format_layout(TensorLayout(mesh, tuple(dims)))

    def __repr__(self) -> str:
        called = "" if self.tensor_map is None else "(" + ", ".join(map(str, self.tensor_map)) + ")"
        return f"Layout({self.device_matrix}, {self.alias_name}){called}"


Layouts = tuple[Layout | None, ...]


def as_counts(strategy: Any) -> tuple[Any, Layouts | None]:
    """Replace the layouts of a strategy by split counts. Return also the layouts, if there are any."""
    if not isinstance(strategy, (tuple, list)) or not any(isinstance(entry, Layout) for entry in strategy):
        return strategy, None
    counts = tuple(entry.counts if isinstance(entry, Layout) else entry for entry in strategy)
    return counts, tuple(entry if isinstance(entry, Layout) else None for entry in strategy)
