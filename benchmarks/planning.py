"""How long redistributions take to plan, and how near to the minimum they are: random pairs of layouts.

Every sub-axis (or with *whole axes* every mesh axis) of a mesh shards one of three dims, in any order, or is in another
state: with its half of sharding axes more scattered than what models ask for. *cold*: nothing is remembered; *space*:
other pairs of the same mesh have been planned before; *again*: the same question. Seconds are a price function with a
slow axis. *states*: how many the search looked at. *times the minimum*: elements sent, all pairs together and the worst
one, against the independent search of ``tests/layouts`` where that is possible, else against a search that may look at
40 times as many states.

Run ``make bench-planning``, or ``python benchmarks/planning.py [--pairs 200]``.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

from rich.console import Console
from rich.table import Table

sys.path.append(str(Path(__file__).parents[1] / "tests"))

from layouts.independent_search import SENT, Search
from layouts.optimality import plain, price_of_redistribution
from shardwise.layouts import redistribute, shortest_path
from shardwise.layouts.conversions import COLLECTIVES, Primitive
from shardwise.layouts.layout import Layout
from shardwise.layouts.mesh import Mesh

MESHES = (
    (Mesh(a=2, b=2), False),
    (Mesh(a=8, b=4, c=2), True),
    (Mesh(a=2, b=2, c=2, d=2), False),
    (Mesh(a=16, b=16, c=8, d=8), True),
    (Mesh(a=4, b=8), False),
    (Mesh(dp=8, tp=8), False),
    (Mesh(dp=64, cp=32, tp=8), False),
    (Mesh(a=16, b=16, c=8, d=8), False),
)
SIZE = 1 << 16


@dataclass(frozen=True)
class Seconds:
    """The first axis is a hundred times slower than the others."""

    slow: str

    def __call__(self, primitive: Primitive, axes: tuple[str, ...], elements: float) -> tuple[float, ...]:
        if primitive not in COLLECTIVES:
            return (0.0,)
        return (5e-6 + elements / (1e9 if any(axis.split(".")[0] == self.slow for axis in axes) else 1e11),)


def random_layout(mesh: Mesh, whole_axes: bool, num_dims: int, size: int, rng: random.Random) -> Layout:
    axes = [mesh.expand(name) for name, _ in mesh.axes] if whole_axes else [(axis,) for axis in mesh.sub_axes]
    rng.shuffle(axes)
    places = {own: rng.choice([*[(d, 0) for d in range(num_dims)] * 2, *"IRP"]) for own in axes}
    return Layout.whole(mesh, (size,) * num_dims).moved({axis: places[own] for own in axes for axis in own})


def forget() -> None:
    for cached in (redistribute._redistribute, redistribute._search, shortest_path.solve, shortest_path._steps):
        cached.cache_clear()


def timed(question: Callable[[], object]) -> float:
    start = time.process_time()
    question()
    return (time.process_time() - start) * 1e3


def spread(milliseconds: list[float]) -> str:
    own = sorted(milliseconds)
    return f"{own[len(own) // 2]:.1f} / {own[len(own) * 99 // 100]:.1f} / {own[-1]:.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description="Distribution of planning times of redistributions.")
    parser.add_argument("--pairs", type=int, default=200)
    options = parser.parse_args()
    table = Table(title="planning one redistribution: p50 / p99 / max in ms of processor time")
    for name in ("mesh", "cold", "space", "seconds, cold", "again", "states (p50, max)", "times the minimum"):
        table.add_column(name)
    for mesh, whole_axes in MESHES:
        table.add_row(*measured(mesh, whole_axes, options.pairs))
        Console(width=150).print(f"{mesh} done")
    Console(width=150).print(table)


def measured(mesh: Mesh, whole_axes: bool, num_pairs: int) -> tuple[str, ...]:
    rng, price = random.Random(0), Seconds(mesh.axes[0][0])
    pairs = [
        (random_layout(mesh, whole_axes, 3, SIZE, rng), random_layout(mesh, whole_axes, 3, SIZE, rng))
        for _ in range(num_pairs)
    ]
    pairs = [(source, target) for source, target in pairs if source != target]
    cold, seconds, space, again = [], [], [], []
    for source, target in pairs:
        for own, given in ((cold, None), (seconds, price)):
            forget()
            own.append(timed(lambda s=source, t=target, p=given: redistribute.redistribute(s, t, price=p)))
    forget()
    for own in (space, again):
        own += [timed(lambda s=s, t=t: redistribute.redistribute(s, t)) for s, t in pairs]
    settled = sorted(redistribute._search(s, t, True, None)[1].num_settled for s, t in pairs)
    return (
        f"{mesh}{' whole axes' if whole_axes else ''}",
        *map(spread, (cold, space, seconds)),
        f"{max(again):.3f} at most",
        f"{settled[len(settled) // 2]}, {settled[-1]}",
        against_minimum(mesh, pairs, whole_axes),
    )


def against_minimum(mesh: Mesh, pairs: list[tuple[Layout, Layout]], whole_axes: bool) -> str:
    if len(mesh.sub_axes) == 4 and not whole_axes:
        search, rng = Search(mesh, plain(16, 16)), random.Random(0)
        number = {search.layout(placement): i for i, placement in enumerate(search.placements)}
        small = [tuple(random_layout(mesh, False, 2, 16, rng) for _ in range(2)) for _ in pairs]
        least = [float(search.cheapest[number[s], number[t]] // SENT) / mesh.num_devices for s, t in small]
        sent = [sum(price_of_redistribution(s, t)[:1]) for s, t in small]
        return f"{told(sent, least)} of the independent search"
    sent = [price_of_redistribution(s, t)[0] for s, t in pairs]
    with patch.object(shortest_path, "SETTLED_UP_TO", 40 * shortest_path.SETTLED_UP_TO):
        forget()
        least = [price_of_redistribution(s, t)[0] for s, t in pairs]
    forget()
    return told(sent, least)


def told(sent: list[float], least: list[float]) -> str:
    worst = max((own / other for own, other in zip(sent, least, strict=True) if other), default=1.0)
    return f"{sum(sent) / sum(least):.3f}, {worst:.2f}"


if __name__ == "__main__":
    main()
