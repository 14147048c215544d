"""The meshes that a search over mesh shapes tries: those that respect the levels of a cluster."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import product
from math import prod

from shardwise.costs.cluster import Cluster
from shardwise.errors import ShardwiseError
from shardwise.layouts.mesh import Mesh, prime_factors


def candidate_meshes(cluster: Cluster, max_axes: int) -> tuple[Mesh, ...]:
    """Return the meshes that a search tries if the user names none, with axes named after their levels. The last has
    one axis: shapes of several axes with the same price may take two messages there (a gather over one axis, then over
    the other), of which the second waits for the first, and neither leaves early."""
    meshes = []
    shapes = mesh_shapes(cluster, max_axes)
    for shape in dict.fromkeys((*shapes, *mesh_shapes(cluster, 1))):
        names = [level.name for level in cluster.levels]
        left = [level.size for level in cluster.levels]
        axes: list[tuple[str, int]] = []
        for size in reversed(shape):
            level = next((i for i, room in enumerate(left) if room > 1), len(left) - 1)
            axes.append((names[level], size))
            while size > 1 and level < len(left):
                taken = min(size, left[level])
                left[level] //= taken
                size //= taken
                level += 1
        named: list[tuple[str, int]] = []
        for name, size in reversed(axes):
            same = sum(other == name for other, _ in axes)
            number = sum(taken_name.rstrip("0123456789") == name for taken_name, _ in named) + 1
            named.append((f"{name}{number}" if same > 1 else name, size))
        meshes.append(Mesh(named))
    return tuple(meshes) or (Mesh({cluster.levels[0].name: cluster.num_devices}),)


def mesh_shapes(cluster: Cluster, max_axes: int) -> tuple[tuple[int, ...], ...]:
    """Return sizes of mesh axes, outermost first, for at most ``max_axes`` (from 1) axes.

    Each axis lies inside one level. Only shapes that cannot be refined within ``max_axes`` are listed (a refined axis
    can always be used whole), and one order of the axes inside a level, where all orders are the same links: the longer
    axis outside. If there are more levels than axes, neighbouring levels share an axis, in every way.
    """
    if isinstance(max_axes, bool) or not isinstance(max_axes, int) or max_axes < 1:
        raise ShardwiseError(
            f"a mesh has at least one axis, not {max_axes}", fix="max_mesh_axes: a whole number from 1"
        )
    levels = tuple(level.size for level in reversed(cluster.levels) if level.size > 1)
    max_axes = min(max_axes, max(len(prime_factors(cluster.num_devices)), 1))  # there are no shapes of more
    shapes: dict[tuple[int, ...], None] = {}
    for merged in _merged(levels, max_axes):
        for counts in product(range(1, max_axes + 1), repeat=len(merged)):
            if sum(counts) <= max_axes:
                for parts in product(*(_products(size, count) for size, count in zip(merged, counts, strict=True))):
                    shapes[tuple(size for part in parts for size in part)] = None
    longest = max((len(shape) for shape in shapes), default=0)
    return tuple(shape for shape in shapes if len(shape) == longest)


def _merged(levels: tuple[int, ...], max_axes: int) -> Iterator[tuple[int, ...]]:
    """Yield the levels, or neighbours of them multiplied so that at most ``max_axes`` are left."""
    if len(levels) <= max_axes:
        yield levels
        return
    for cuts in product((False, True), repeat=len(levels) - 1):
        if sum(cuts) == max_axes - 1:
            groups = [[levels[0]]]
            for size, cut in zip(levels[1:], cuts, strict=True):
                if cut:
                    groups.append([size])
                else:
                    groups[-1].append(size)
            yield tuple(prod(group) for group in groups)


@cache
def _products(number: int, count: int, most: int | None = None) -> tuple[tuple[int, ...], ...]:
    """Return ``number`` as products of ``count`` numbers from 2, in descending order."""
    most = number if most is None else most
    if count == 1:
        return ((number,),) if 1 < number <= most else ()
    return tuple(
        (first, *others)
        for first in range(min(most, number), 1, -1)
        if number % first == 0
        for others in _products(number // first, count - 1, first)
    )
