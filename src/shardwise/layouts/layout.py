"""Layouts: what every device holds of one tensor, and what its gradient looks like there.

On every (sub-)axis of the mesh a value is in one of four states:

``S`` sharded      each device holds its slice of one tensor dim; so is the cotangent
``I`` invariant    each device holds the whole, consumers do the same work everywhere; the cotangent is whole everywhere
``R`` replicated   each device holds the whole, consumers do different work; the cotangent is a summand on each device
``P`` partial      each device holds a summand; the cotangent is whole everywhere

A tensor dim is a product of *atoms*, major first, and an axis shards one atom of one dim: the 2,304 columns of GPT-2's
fused projection are ``(3 12@tp 64)``, whose shards are not contiguous. An atom may be sharded over several axes, major
first. Sizes need not divide: with N devices along its axes, device i of an atom of size n holds its rows
``floor(i n / N)`` to ``floor((i+1) n / N)``, which is the same whether the axes are seen one by one or merged.

Operators that look at neighbours (convolutions, shifted slices) want a sharded atom in *windows*: each device holds the
rows that its part of the result needs, which overlap and need not cover everything. The cotangent of a window is
that of its rows; a row in several windows has the sum of theirs. Windows that *tile* the atom are an uneven split.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from math import ceil, prod

from shardwise.errors import LayoutError
from shardwise.layouts.mesh import Mesh
from shardwise.rules.keyed_rows import IMBALANCE, copies_of, imbalance_of

PARTIAL_KINDS = {"P": "sum", "Pmax": "max", "Pmin": "min", "Pany": "any"}


def expected_rows(rows: int, owners: int, state: str) -> int:
    """Return the rows that are planned for on the busiest of the devices that own their keys, in a keyed state."""
    return min(rows, ceil(rows * imbalance_of(state) / owners)) if owners > 1 else rows


@dataclass(frozen=True, slots=True)
class Atom:
    """A factor of a tensor dim: its global size, and the sub-axes that shard it, major first."""

    size: int
    axes: tuple[str, ...] = ()


# The rows [start, stop) of an atom that a device holds, in the order in which it holds them.
Ranges = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Windows:
    """The rows that each device along its axes holds of a sharded atom: ``ranges[i]`` those of the i-th device."""

    dim: int
    atom: int
    ranges: tuple[Ranges, ...]

    @staticmethod
    def of_lengths(dim: int, atom: int, lengths: Sequence[int]) -> Windows:
        """Return an uneven split: one device after the other holds so many rows."""
        bounds = [0, *itertools.accumulate(lengths)]
        return Windows(dim, atom, tuple(((a, b),) if b > a else () for a, b in itertools.pairwise(bounds)))

    def tile(self, size: int) -> bool:
        """Return whether every row of the atom is on one device, and the devices hold them one behind the other."""
        ends = [0, *itertools.chain.from_iterable(window for ranges in self.ranges for window in ranges), size]
        return all(len(ranges) <= 1 for ranges in self.ranges) and all(
            a == b for a, b in zip(ends[::2], ends[1::2], strict=True)
        )

    @property
    def largest(self) -> int:
        """Rows on the device that holds most."""
        return max(map(num_rows, self.ranges))


def num_rows(ranges: Ranges) -> int:
    return sum(stop - start for start, stop in ranges)


@dataclass(frozen=True)
class Layout:
    """Placement of a tensor on a mesh: one state per sub-axis.

    Layouts compare by value; ``canonical()`` gives equal results for layouts that place every element equally.

    Args:
        mesh: The mesh.
        dims: Atoms of every tensor dim (at least one each).
        states: (sub-axis, state) of the sub-axes that neither shard an atom nor are invariant, in device order; the
            state is ``R``, ``P``, ``Pmax``, ``Pmin``, ``Pany`` or a keyed one (``keyed``: of dim 0).
        windows: Windows of the atoms that are held in windows instead of slices, by dim and atom.
    """

    mesh: Mesh
    dims: tuple[tuple[Atom, ...], ...]
    states: tuple[tuple[str, str], ...] = ()
    windows: tuple[Windows, ...] = ()

    @cached_property
    def _hash(self) -> int:
        return hash((self.mesh.axes, self.dims, self.states, self.windows))

    def __hash__(self) -> int:
        return self._hash

    @staticmethod
    def whole(mesh: Mesh, shape: tuple[int, ...], state: str = "I") -> Layout:
        """Return the layout with the whole tensor on every device, in the same state on every axis."""
        states = () if state == "I" else tuple((axis, state) for axis in mesh.sub_axes)
        return Layout(mesh, tuple((Atom(size),) for size in shape), states)

    @cached_property
    def shape(self) -> tuple[int, ...]:
        return tuple(prod(atom.size for atom in dim) for dim in self.dims)

    @cached_property
    def positions(self) -> dict[str, tuple[int, int]]:
        """Sub-axis -> (dim, atom) that it shards."""
        return {a: (d, i) for d, dim in enumerate(self.dims) for i, atom in enumerate(dim) for a in atom.axes}

    @cached_property
    def state_of(self) -> dict[str, str]:
        """Sub-axis -> ``S``, ``I``, ``R``, ``P``, ``Pmax``, ``Pmin`` or ``Pany``, for every sub-axis of the mesh."""
        by_axis = dict.fromkeys(self.mesh.sub_axes, "I")
        by_axis.update(self.states)
        by_axis.update(dict.fromkeys(self.positions, "S"))
        return by_axis

    @cached_property
    def _window_at(self) -> dict[tuple[int, int], Windows]:
        return {(window.dim, window.atom): window for window in self.windows}

    @cached_property
    def partial_axes(self) -> tuple[str, ...]:
        return tuple(axis for axis, state in self.states if state in PARTIAL_KINDS)

    @cached_property
    def keyed_axes(self) -> tuple[str, ...]:
        return tuple(axis for axis, state in self.states if copies_of(state))

    @cached_property
    def unkeyed(self) -> Layout:
        """The layout whose devices hold all rows that one of the devices along keyed axes holds."""
        return self.moved(dict.fromkeys(self.keyed_axes, "I"))

    def _expected(self, rows: int) -> int:
        """Return the rows of dim 0 that are planned for on the device which owns the keys of most."""
        state = next((state for _, state in self.states if copies_of(state)), "")
        owners = self.mesh.size_of(self.keyed_axes)
        return expected_rows(rows * copies_of(state), owners, state) if state else rows

    def atom_pieces(self, dim: int, atom: int, coordinates: Mapping[str, int]) -> tuple[int, int]:
        """Return (offset, length) of an atom on the device at ``coordinates``, which holds one range of it."""
        index = self.index_along(dim, atom, coordinates)
        if (window := self._window_at.get((dim, atom))) is not None:
            ranges = window.ranges[index]
            assert len(ranges) <= 1, f"several ranges are no piece: {self}"
            return (ranges[0][0], num_rows(ranges)) if ranges else (0, 0)
        size, count = self.dims[dim][atom].size, self.mesh.size_of(self.dims[dim][atom].axes)
        start = index * size // count
        return start, (index + 1) * size // count - start

    def held_ranges(self, dim: int, coordinates: Mapping[str, int]) -> Ranges:
        """Return the global rows [start, stop) of a dim on the device at ``coordinates``, in the order in which it
        holds them."""
        held: Ranges = ((0, 1),)
        for position, atom in enumerate(self.dims[dim]):
            start, length = self.atom_pieces(dim, position, coordinates)
            if length == atom.size:
                held = tuple((first * atom.size, last * atom.size) for first, last in held)
            else:
                outer = (row * atom.size + start for first, last in held for row in range(first, last))
                held = tuple((row, row + length) for row in outer if length)
        return held

    def index_along(self, dim: int, atom: int, coordinates: Mapping[str, int]) -> int:
        """Return the position of a device among those that share an atom."""
        index = 0
        for axis in self.dims[dim][atom].axes:
            index = index * self.mesh.sizes[axis] + coordinates[axis]
        return index

    def local_atoms(self, coordinates: Mapping[str, int]) -> tuple[tuple[int, ...], ...]:
        """Return the sizes of all atoms on a device, per dim."""
        plain = self.without_windows
        sizes = [[plain.atom_pieces(d, i, coordinates)[1] for i in range(len(dim))] for d, dim in enumerate(self.dims)]
        for (d, i), window in self._window_at.items():
            sizes[d][i] = num_rows(window.ranges[self.index_along(d, i, coordinates)])
        return tuple(map(tuple, sizes))

    def local_shape(self, coordinates: Mapping[str, int]) -> tuple[int, ...]:
        """Return the shape on a device; of a keyed tensor, whose rows depend on data, the one planned for."""
        if self._is_even:
            return self.max_local_shape
        shape = tuple(prod(sizes) for sizes in self.local_atoms(coordinates))
        return (self._expected(shape[0]), *shape[1:]) if self.keyed_axes else shape

    @cached_property
    def _is_even(self) -> bool:
        """Whether all devices hold tensors of the same shape."""
        atoms = (atom for dim in self.dims for atom in dim)
        return not self.windows and all(atom.size % self.mesh.size_of(atom.axes) == 0 for atom in atoms)

    @cached_property
    def max_local_shape(self) -> tuple[int, ...]:
        """The shape on the device that holds most (of a keyed tensor: that is planned for there)."""
        rows = tuple(prod(self.max_rows(d, i) for i in range(len(dim))) for d, dim in enumerate(self.dims))
        return (self._expected(rows[0]), *rows[1:]) if self.keyed_axes else rows

    @cached_property
    def max_local_numel(self) -> int:
        """Elements on the device that holds most (of a keyed tensor: that are planned for there)."""
        return prod(self.max_local_shape)

    def max_rows(self, dim: int, atom: int) -> int:
        """Return the rows of an atom on the device that holds most."""
        if (window := self._window_at.get((dim, atom))) is not None:
            return window.largest
        return -(-self.dims[dim][atom].size // self.mesh.size_of(self.dims[dim][atom].axes))

    @cached_property
    def is_even(self) -> bool:
        return not self.windows and all(
            atom.size % self.mesh.size_of(atom.axes) == 0 for dim in self.dims for atom in dim
        )

    def moved(self, axis_states: Mapping[str, str | tuple[int, int]]) -> Layout:
        """Return the layout with some sub-axes moved.

        Args:
            axis_states: Sub-axis -> new state, or the position (dim, atom) where it is appended as the minor-most.

        Returns:
            The new layout.
        """
        dims = [[list(atom.axes) for atom in dim] for dim in self.dims]
        for dim in dims:
            for axes in dim:
                axes[:] = [axis for axis in axes if axis not in axis_states]
        states = {axis: state for axis, state in self.states if axis not in axis_states}
        for axis, where in axis_states.items():
            if isinstance(where, tuple):
                dims[where[0]][where[1]].append(axis)
            elif where != "I":
                states[axis] = where
        new = tuple(
            tuple(Atom(atom.size, tuple(axes)) for atom, axes in zip(dim, new_dim, strict=True))
            for dim, new_dim in zip(self.dims, dims, strict=True)
        )
        ordered = tuple(sorted(states.items(), key=lambda item: self.mesh.order[item[0]]))
        return Layout(self.mesh, new, ordered, self.windows)

    @cached_property
    def without_windows(self) -> Layout:
        """The layout with slices in place of windows."""
        return Layout(self.mesh, self.dims, self.states) if self.windows else self

    @cached_property
    def dual(self) -> Layout:
        """The layout of the cotangent: S, K and I stay (in windows, those of one row add up), R becomes P, P becomes I
        (whole everywhere)."""
        duals = {axis: "P" if state == "R" else "I" for axis, state in self.states if not copies_of(state)}
        return self.moved(duals)

    def canonical(self) -> Layout:
        """Merge atoms wherever the merged dim places its elements in the same way."""
        return self._merged or self

    @cached_property
    def _merged(self) -> Layout | None:
        """The canonical layout, or None if this is it: only the collector would free an object that kept itself."""
        kept = {window.dim for window in self.windows}
        dims = tuple(dim if d in kept else _merge(dim, self.mesh) for d, dim in enumerate(self.dims))
        return None if dims == self.dims else replace(self, dims=dims)

    def refine(self, atoms: tuple[tuple[int, ...], ...]) -> Layout:
        """Return the same placement over finer atoms.

        Args:
            atoms: Sizes of the finer atoms, per dim.

        Returns:
            The refined layout.

        Raises:
            LayoutError: The atoms do not describe this layout.
        """
        if tuple(map(prod, atoms)) != self.shape or self.windows:
            raise LayoutError(f"a layout of shape {list(self.shape)} does not describe {[list(a) for a in atoms]}")
        dims = tuple(_refine(dim, sizes, self.mesh) for dim, sizes in zip(self.dims, atoms, strict=True))
        return replace(self, dims=dims)

    @cached_property
    def atoms(self) -> tuple[tuple[int, ...], ...]:
        """The global sizes of the atoms, per dim."""
        return tuple(tuple(atom.size for atom in dim) for dim in self.dims)

    @property
    def text(self) -> str:
        """The layout as ``parse_layout`` reads it, with its atoms as they are."""
        dims = [[self._atom_text(d, i) for i in range(len(dim))] for d, dim in enumerate(self.dims)]
        text = "[" + ", ".join(dim[0] if len(dim) == 1 else "(" + " ".join(dim) + ")" for dim in dims) + "]"
        for state in ("R", *PARTIAL_KINDS):
            axes = tuple(axis for axis, on_axis in self.states if on_axis == state)
            if axes:
                names = self.mesh.format_axes(axes).strip("()")
                text += f" replicated({names})" if state == "R" else f" partial({PARTIAL_KINDS[state]}@{names})"
        for state in sorted({state for _, state in self.states if copies_of(state)}):
            axes = tuple(axis for axis, on_axis in self.states if on_axis == state)
            of_row = f"{copies_of(state)}@" if copies_of(state) > 1 else ""
            uneven = "" if imbalance_of(state) == IMBALANCE else f"*{imbalance_of(state):g}"
            text += f" keyed({of_row}{self.mesh.format_axes(axes).strip('()')}{uneven})"
        return text

    def _atom_text(self, dim: int, atom: int) -> str:
        size, axes = self.dims[dim][atom].size, self.dims[dim][atom].axes
        if not axes:
            return str(size)
        text = f"{size}@{self.mesh.format_axes(axes)}"
        if (window := self._window_at.get((dim, atom))) is None:
            return text
        ranges = ("+".join(f"{start}:{stop}" for start, stop in ranges) for ranges in window.ranges)
        return text + "{" + "|".join(ranges) + "}"

    def __str__(self) -> str:
        return self.canonical().text

    __repr__ = __str__


def _merge(dim: tuple[Atom, ...], mesh: Mesh) -> tuple[Atom, ...]:
    merged: list[Atom] = []
    for atom in dim:
        if atom.size == 1 and not atom.axes:
            continue
        if merged:
            last = merged[-1]
            count = mesh.size_of(last.axes)
            if count == last.size or (not atom.axes and last.size % count == 0):
                merged[-1] = Atom(last.size * atom.size, last.axes + atom.axes)
                continue
        merged.append(atom)
    return tuple(merged) or (Atom(1),)


def _refine(dim: tuple[Atom, ...], sizes: tuple[int, ...], mesh: Mesh) -> tuple[Atom, ...]:
    """Write the atoms of a dim over ``sizes``, whose cut points include theirs after merging."""
    if tuple(atom.size for atom in dim) == sizes:
        return dim
    result: list[Atom] = []
    rest = list(sizes)
    for atom in _merge(dim, mesh):
        while rest[:1] == [1] and atom.size > 1:
            result.append(Atom(rest.pop(0)))
        taken = [rest.pop(0)] if rest else []
        while prod(taken) < atom.size and rest:
            taken.append(rest.pop(0))
        if prod(taken) != atom.size or not taken:
            raise LayoutError(f"({' '.join(map(str, sizes))}) does not divide an atom of size {atom.size}")
        result.extend(_spread(atom, tuple(taken), mesh))
    return (*result, *map(Atom, rest))


def _spread(atom: Atom, sizes: tuple[int, ...], mesh: Mesh) -> list[Atom]:
    """Divide one atom into several, handing its axes on from the major to the minor ones."""
    if len(sizes) == 1:
        return [Atom(sizes[0], atom.axes)]
    axes, result = list(atom.axes), []
    for position, size in enumerate(sizes):
        part_axes: list[str] = []
        left = size
        last = position == len(sizes) - 1
        while axes and (last or (left > 1 and left % mesh.sizes[axes[0]] == 0)):
            left //= mesh.sizes[axes[0]] if not last else 1
            part_axes.append(axes.pop(0))
        if axes and left != 1:
            raise LayoutError(
                f"{atom.size} over {mesh.format_axes(atom.axes)} is not a sharding of ({' '.join(map(str, sizes))})"
            )
        result.append(Atom(size, tuple(part_axes)))
    return result


@lru_cache(maxsize=100_000)
def common_atoms(first: tuple[int, ...], second: tuple[int, ...]) -> tuple[int, ...] | None:
    """Return the coarsest division of a dim that refines both, or None when their cut points do not nest.

    An atom of size 1 (which only matters when it is sharded) keeps its place among the others.
    """
    if 0 in first or 0 in second:  # nothing to divide
        return first if first == second else None
    cuts = sorted(_cuts(first) | _cuts(second))
    ones = _ones(first) | _ones(second)
    sizes = [1] * ones[1]
    for small, large in itertools.pairwise(cuts):
        if large % small:
            return None
        sizes += [large // small] + [1] * ones[large]
    return tuple(reversed(sizes)) or (1,)


def _ones(sizes: tuple[int, ...]) -> Counter[int]:
    """Count the atoms of size 1 at each stride."""
    return Counter(prod(sizes[i + 1 :]) for i, size in enumerate(sizes) if size == 1)


def _cuts(sizes: tuple[int, ...]) -> set[int]:
    """Strides of the atoms: (3, 12, 64) -> {1, 64, 768, 2304}."""
    cuts, stride = {1}, 1
    for size in reversed(sizes):
        stride *= size
        cuts.add(stride)
    return cuts
