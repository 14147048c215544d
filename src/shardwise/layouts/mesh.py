"""The mesh: named axes of devices, and the prime sub-axes into which they divide.

A mesh has no devices in it: it is shape and names. Ranks are numbered row-major over the axes, the last axis fastest
(and, by convention, closest). Axes of composite size divide into *sub-axes* of prime size, major first, so that two
operators which see the same eight devices as ``(2, 4)`` and as ``(8, 1)`` speak about the same three binary sub-axes.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod

from shardwise.errors import LayoutError, NotationError, caret
from shardwise.untrusted_text import MAX_DEVICES, check_notation, shorten_repr, whole_number

_MOST_AXES = 64
_MOST_CHARACTERS = 2**13  # of a mesh as text
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")


def prime_factors(number: int) -> tuple[int, ...]:
    """Prime factors in ascending order: 12 -> (2, 2, 3); 1 -> ()."""
    factors: list[int] = []
    divisor = 2
    while number > 1:
        if number % divisor == 0:
            factors.append(divisor)
            number //= divisor
        else:
            divisor = divisor + 1 if divisor * divisor < number else number
    return tuple(factors)


@dataclass(frozen=True, init=False)
class Mesh:
    """Named mesh axes with their sizes: ``Mesh(dp=2, tp=4)`` is eight devices.

    ``sub_axes`` are the prime parts: an axis of prime size is its own sub-axis (``dp``), the others number theirs,
    major first (``tp.0``, ``tp.1``); axes of size 1 have none. Layouts and strategies name sub-axes; texts may name
    whole axes.

    Args:
        axes: Mapping or (name, size) pairs, major first; the keyword arguments follow them.
        sizes: Number of devices along each axis, by name.

    Raises:
        LayoutError: A name or size is invalid, a name occurs twice, or there are more than ``texts.MAX_DEVICES``
            devices, which bounds the work done for each.
    """

    axes: tuple[tuple[str, int], ...]

    def __init__(self, axes: Mapping[str, int] | Iterable[tuple[str, int]] = (), /, **sizes: int) -> None:
        pairs = tuple(axes.items() if isinstance(axes, Mapping) else axes) + tuple(sizes.items())
        if len(pairs) > _MOST_AXES:
            raise LayoutError(f"a mesh of {len(pairs):,} axes, more than {_MOST_AXES}")
        for name, size in pairs:
            if not isinstance(name, str) or not _NAME.fullmatch(name):
                raise LayoutError(f"mesh axis name {shorten_repr(name)} is not an identifier of at most 64 characters")
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise LayoutError(
                    f"mesh axis {name} needs a positive whole number of devices, not {shorten_repr(size)}"
                )
            if size > MAX_DEVICES:
                raise LayoutError(f"mesh axis {name} has {shorten_repr(size)} devices, more than {MAX_DEVICES:,}")
        if prod(size for _, size in pairs) > MAX_DEVICES:
            product = " x ".join(str(size) for _, size in pairs)
            raise LayoutError(f"a mesh of {product} devices, more than {MAX_DEVICES:,}")
        twice = [name for name, count in Counter(name for name, _ in pairs).items() if count > 1]
        if twice:
            raise LayoutError(f"mesh axis {twice[0]} is named twice")
        object.__setattr__(self, "axes", pairs)

    @cached_property
    def num_devices(self) -> int:
        return prod(size for _, size in self.axes)

    @cached_property
    def _parts(self) -> dict[str, tuple[str, ...]]:
        parts = {}
        for name, size in self.axes:
            primes = prime_factors(size)
            parts[name] = (name,) if len(primes) == 1 else tuple(f"{name}.{i}" for i in range(len(primes)))
        return parts

    @cached_property
    def sizes(self) -> dict[str, int]:
        """Sub-axis -> its (prime) size, in device order, major first."""
        return {
            part: prime
            for name, size in self.axes
            for part, prime in zip(self._parts[name], prime_factors(size), strict=True)
        }

    @cached_property
    def sub_axes(self) -> tuple[str, ...]:
        return tuple(self.sizes)

    @cached_property
    def order(self) -> dict[str, int]:
        """Sub-axis -> its position in device order."""
        return {axis: i for i, axis in enumerate(self.sub_axes)}

    def expand(self, name: str) -> tuple[str, ...]:
        """Return the sub-axes of an axis (``tp`` -> ``("tp.0", "tp.1")``) or of a sub-axis (itself).

        Raises:
            LayoutError: The mesh has no such name.
        """
        if name in self._parts:
            return self._parts[name]
        if name in self.sizes:
            return (name,)
        axes = ", ".join(f"{axis}={size}" for axis, size in self.axes)
        raise LayoutError(f"unknown mesh axis {shorten_repr(name)}: the mesh is ({axes})")

    def size_of(self, axes: Iterable[str]) -> int:
        """Return the number of devices along the product of sub-axes."""
        return prod(self.sizes[axis] for axis in axes)

    def coordinates(self, rank: int) -> dict[str, int]:
        """Return the coordinate of a rank on every sub-axis.

        Args:
            rank: Rank, from 0 to ``num_devices - 1``.

        Returns:
            Sub-axis -> coordinate.

        Raises:
            LayoutError: The mesh has no such rank.
        """
        if isinstance(rank, bool) or not isinstance(rank, int) or not 0 <= rank < self.num_devices:
            raise LayoutError(f"there is no rank {shorten_repr(rank)}: {self} has ranks 0 to {self.num_devices - 1}")
        coordinate_of: dict[str, int] = {}
        for axis in reversed(self.sub_axes):
            rank, coordinate_of[axis] = divmod(rank, self.sizes[axis])
        return {axis: coordinate_of[axis] for axis in self.sub_axes}

    def rank_of(self, coordinates: Mapping[str, int]) -> int:
        """Return the rank at some coordinates.

        Args:
            coordinates: Sub-axis -> coordinate, for every sub-axis.

        Returns:
            The rank.

        Raises:
            LayoutError: The mesh has no such coordinates.
        """
        rank = 0
        for axis in self.sub_axes:
            if not 0 <= coordinates[axis] < self.sizes[axis]:
                raise LayoutError(
                    f"there is no coordinate {coordinates[axis]} of {axis}, which has size {self.sizes[axis]}"
                )
            rank = rank * self.sizes[axis] + coordinates[axis]
        return rank

    def index_along(self, axes: Iterable[str], rank: int) -> int:
        """Return the position of a rank along the product of sub-axes, the first of them major."""
        coordinates, index = self.coordinates(rank), 0
        for axis in axes:
            index = index * self.sizes[axis] + coordinates[axis]
        return index

    def group(self, axes: tuple[str, ...], rank: int) -> tuple[int, ...]:
        """Return the ranks that differ from ``rank`` along ``axes`` only.

        Args:
            axes: Axes or sub-axes, the first major.
            rank: A member of the group.

        Returns:
            The ranks of the group, ordered by their position along ``axes``.

        Raises:
            LayoutError: The mesh has no such rank or axis, or an axis is named twice.
        """
        base = self.coordinates(rank)
        axes = tuple(part for axis in axes for part in self.expand(axis))
        if len(set(axes)) < len(axes):
            raise LayoutError(f"an axis appears twice in ({', '.join(axes)}): name every axis once")
        ranks: list[int] = []
        for index in range(self.size_of(axes)):
            coordinates = dict(base)
            for axis in reversed(axes):
                index, coordinates[axis] = divmod(index, self.sizes[axis])
            ranks.append(self.rank_of(coordinates))
        return tuple(ranks)

    def format_axes(self, axes: tuple[str, ...]) -> str:
        """Sub-axes as text, whole axes by their own name: ``("dp", "tp.0", "tp.1")`` -> ``(dp,tp)``."""
        names: list[str] = []
        rest = axes
        while rest:
            whole = rest[0].rpartition(".")[0]
            parts = self._parts.get(whole, ())
            if parts and rest[: len(parts)] == parts:
                names.append(whole)
                rest = rest[len(parts) :]
            else:
                names.append(rest[0])
                rest = rest[1:]
        return names[0] if len(names) == 1 else "(" + ",".join(names) + ")"

    def format_sizes(self) -> str:
        """Format the sizes of the axes, for a mesh whose axes are not named by role yet: ``2 x 4``."""
        return " x ".join(str(size) for _, size in self.axes) or "1"

    def parse_axes(self, text: str) -> tuple[str, ...]:
        """Invert ``format_axes``; spaces are allowed."""
        names = text.strip().removeprefix("(").removesuffix(")").split(",")
        if len(names) > _MOST_AXES:
            raise LayoutError(f"{len(names):,} axes in {shorten_repr(text)}, more than {_MOST_AXES}")
        return tuple(part for name in names for part in self.expand(name.strip()))

    def __str__(self) -> str:
        return "Mesh(" + ", ".join(f"{name}={size}" for name, size in self.axes) + ")"

    __repr__ = __str__

    @staticmethod
    def parse(text: str) -> Mesh:
        """``"Mesh(dp=2, tp=4)"`` or ``"dp=2, tp=4"`` -> Mesh. Raises NotationError or LayoutError."""
        reads = "a mesh reads dp=2, tp=4"
        inner = check_notation(text, reads, _MOST_CHARACTERS).strip()
        if inner.startswith("Mesh(") and inner.endswith(")"):
            inner = inner[len("Mesh(") : -1]
        pairs: list[tuple[str, int]] = []
        column = text.find(inner)
        for item in inner.split(",") if inner.strip() else ():
            name, _, size = (part.strip() for part in item.partition("="))
            number = whole_number(size)
            if not _NAME.fullmatch(name) or number is None:
                raise NotationError(caret(text, column, reads))
            pairs.append((name, number))
            column += len(item) + 1
        return Mesh(pairs)
