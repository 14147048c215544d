"""Redistribution against the independent minimum over more pairs than the test suite compares: ``make
sweep-redistribution``, or ``python -m layouts.sweep`` in tests/ (about seven minutes).

What the suite asserts is compared here without strides. Where the library does not claim the minimum, this measures how
far it is from it.
"""

from __future__ import annotations

import time
from math import prod

from layouts.independent_search import SENT, Dims, Search
from layouts.optimality import Outcome, compare, compare_divided, plain
from shardwise.layouts.mesh import Mesh

BINARY, SIX, FOUR = Mesh(a=2, b=2, c=2), Mesh(a=2, b=3), Mesh(a=2, b=2)

# (mesh, dims): every pair is at the minimum. (2, 4) and (8,) have the same sub-axes as (2, 2, 2).
EXACT: tuple[tuple[Mesh, Dims], ...] = (
    (BINARY, plain(8, 8)),
    (BINARY, plain(16, 8)),
    (BINARY, plain(8, 8, 8)),
    (SIX, plain(6, 6)),
    (SIX, plain(6, 6, 6)),
    # Sizes that do not divide.
    (BINARY, plain(6, 5)),
    (BINARY, plain(9, 8)),
    (SIX, plain(5, 7)),
    (SIX, plain(5, 7, 3)),
    (SIX, plain(12, 7, 9)),
)

# (mesh, dims, every so many sources): dims divided into atoms, some in two ways that do not nest.
DIVIDED: tuple[tuple[Mesh, Dims, int], ...] = (
    (BINARY, (((8, 8),), ((8,),)), 1),
    (BINARY, (((8, 8),), ((8, 8),)), 7),
    (SIX, (((6, 6),), ((6,),)), 1),
    (SIX, (((6, 6),), ((6, 6),)), 1),
    (SIX, (((6, 12), (9, 8)),), 1),
    (SIX, (((12, 18), (18, 12)),), 1),
    (SIX, (((12, 18), (18, 12)), ((6,),)), 1),
    (FOUR, (((8, 12), (12, 8)),), 1),
    (FOUR, (((8, 12), (12, 8)), ((4,),)), 1),
    (FOUR, (((8, 12), (12, 8)), ((8, 12), (12, 8))), 1),
)

# Meshes whose axes stay whole: dividing them is never worse, and never better either.
WHOLE_AXES: tuple[tuple[Mesh, Dims], ...] = tuple(
    (mesh, dims) for mesh in (Mesh(x=8), Mesh(a=2, b=4)) for dims in (plain(8, 8), plain(8, 8, 8))
)

# Uneven tensors that are treated as if they divided evenly: four atoms and more, or three over three sub-axes.
ROUNDED: tuple[tuple[Mesh, Dims, int], ...] = (
    (BINARY, plain(6, 5, 7), 4),
    (BINARY, plain(9, 17, 11), 4),
    (BINARY, plain(25, 35, 18), 12),
    (BINARY, plain(50, 35, 42), 24),
)

# More than three units: the search takes few of all steps.
MANY: tuple[tuple[Mesh, Dims, int], ...] = ((Mesh(a=2, b=2, c=2, d=2), plain(16, 16), 40),)

# Fewer rows than devices along them. Some shards are empty, and a step that is none in general may by chance be one.
SCARCE: tuple[tuple[Mesh, Dims], ...] = (
    (BINARY, plain(4, 2)),
    (BINARY, plain(4, 4)),
    (SIX, plain(2, 6)),
    (SIX, plain(1, 5)),
)


def main() -> None:
    failed = 0
    for mesh, dims in EXACT:
        failed += _tell("", mesh, dims, compare, Search(mesh, dims))
    for mesh, dims in WHOLE_AXES:
        failed += _tell("whole axes: ", mesh, dims, compare, Search(mesh, dims, whole_axes=True))
    for mesh, dims, every in DIVIDED:
        failed += _tell("atoms: ", mesh, dims, compare_divided, mesh, dims, every)
    for mesh, dims, every in ROUNDED:
        _tell("as if even: ", mesh, dims, compare, Search(mesh, dims), every)
    for mesh, dims, every in MANY:
        _tell("four sub-axes: ", mesh, dims, compare, Search(mesh, dims), every)
    for mesh, dims in SCARCE:
        _tell("fewer rows than devices: ", mesh, dims, compare, Search(mesh, dims))
    tell_what_finer_atoms_would_save(BINARY, (((8, 8),), ((8, 8),)))
    tell_what_finer_atoms_would_save(SIX, (((6, 6),), ((6, 6),)))
    for mesh, dims in ((BINARY, plain(8, 8)), (BINARY, plain(8, 8, 8)), (SIX, plain(6, 6)), (SIX, plain(6, 6, 6))):
        tell_what_lists_apart_would_save(mesh, dims)
    print(f"{failed} of those that must be at the minimum are not")
    if failed:
        raise SystemExit(1)


def _tell(kind: str, mesh: Mesh, dims: Dims, run: object, *arguments: object) -> bool:
    start = time.process_time()
    outcome = run(*arguments)  # type: ignore[operator]
    assert isinstance(outcome, Outcome)
    print(f"{kind}{mesh} {_format(dims)}: {outcome} [{time.process_time() - start:.0f} s]", flush=True)
    return not outcome.is_optimal


def tell_what_finer_atoms_would_save(mesh: Mesh, dims: Dims) -> None:
    """Between layouts of undivided dims: what paths through layouts that divide them would send less.

    The library does not look for these: it divides dims only where one of the ends does.
    """
    fine, coarse = Search(mesh, dims), Search(mesh, plain(*(prod(ways[0]) for ways in dims)))
    number = {fine.layout(placement).canonical(): i for i, placement in reversed(list(enumerate(fine.placements)))}
    layouts = [coarse.layout(placement) for placement in coarse.placements]
    at = [number[layout] for layout in layouts]
    less = [
        (coarse.cheapest[i, j] // SENT) / (fine.cheapest[at[i], at[j]] // SENT)
        for i in range(len(at))
        for j in range(len(at))
        if coarse.cheapest[i, j] // SENT > fine.cheapest[at[i], at[j]] // SENT
    ]
    print(
        f"through finer atoms: {mesh} {_format(coarse.dims)} by way of {_format(dims)}: {len(less)} of {len(at) ** 2} "
        f"pairs would send less (at most {max(less, default=1):.3f}, on average {sum(less) / len(less):.3f} times)"
    )


def tell_what_lists_apart_would_save(mesh: Mesh, dims: Dims) -> None:
    """What would be sent less if backward need not mirror forward: each direction its own list of moves."""
    search = Search(mesh, dims)
    paired, apart = search.cheapest, search.cheapest_apart
    assert (apart <= paired).all()
    less = (paired // SENT)[paired // SENT > apart // SENT] / (apart // SENT)[paired // SENT > apart // SENT]
    fewer = int(((paired // SENT == apart // SENT) & (paired > apart)).sum())
    print(
        f"each direction its own list: {mesh} {_format(dims)}: {len(less)} of {paired.size} pairs would send less (at "
        f"most {less.max():.3f}, on average {less.mean():.3f} times), {fewer} as much in fewer messages; all pairs "
        f"together {(paired // SENT).sum() / (apart // SENT).sum():.4f} times"
    )


def _format(dims: Dims) -> str:
    def one(way: tuple[int, ...]) -> str:
        return str(way[0]) if len(way) == 1 else "(" + " ".join(map(str, way)) + ")"

    return "[" + ", ".join(" or ".join(map(one, ways)) for ways in dims) + "]"


if __name__ == "__main__":
    main()
