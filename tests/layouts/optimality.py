"""Every pair of placements of a small tensor: what ``redistribute`` sends against the independent minimum."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache

from layouts.independent_search import SENT, Dims, Search
from shardwise.errors import LayoutError
from shardwise.layouts import redistribute as redistribution
from shardwise.layouts.conversions import Move, collective_of
from shardwise.layouts.layout import Atom, Layout, common_atoms
from shardwise.layouts.mesh import Mesh
from shardwise.layouts.redistribute import Price, redistribute
from shardwise.layouts.shortest_path import Cost


def plain(*sizes: int) -> Dims:
    return tuple(((size,),) for size in sizes)


def price_of(moves: Iterable[Move], mesh: Mesh, *, differentiable: bool = True) -> int:
    """Elements that the busiest rank sends forward and backward, times devices, times SENT, plus messages."""
    sent, messages = 0.0, 0
    for move in moves:
        for backward in (False, True) if differentiable else (False,):
            sent += move.num_sent(backward)
            messages += collective_of(move, 1, backward=backward) is not None
    return round(sent * mesh.num_devices) * SENT + messages


def price_of_redistribution(source: Layout, target: Layout, price: Price | None = None) -> Cost:
    """The cost that ``redistribute`` found for its moves, of layouts without windows: component by component, by
    default (elements sent by the busiest rank, messages)."""
    return redistribution._search(source, target, True, price)[2]


def peak_of(moves: Iterable[Move]) -> int:
    """Elements of the largest local tensor on the way, ends included."""
    return max((side.max_local_numel for move in moves for side in (move.source, move.target)), default=0)


@dataclass
class Outcome:
    """What a comparison found. ``worse``: the pairs that send more than the minimum, or as much in more messages, with
    both prices; ``cheaper``: those for which the independent search found nothing as cheap. ``hungry``: the pairs with
    a larger tensor on the way than an equally cheap list needs. ``grew``: how many hold more on the way than at either
    end, by how many times as much, all of them to send less (or in fewer messages)."""

    pairs: int = 0
    sent: int = 0
    least: int = 0
    worse: list[tuple[float, Layout, Layout, int, int]] = field(default_factory=list)
    cheaper: list[tuple[Layout, Layout, int, int]] = field(default_factory=list)
    hungry: list[tuple[Layout, Layout, int, int]] = field(default_factory=list)
    grew: Counter[float] = field(default_factory=Counter)

    def add(self, source: Layout, target: Layout, least: int, least_peak: int) -> None:
        moves = redistribute(source, target)
        price, peak = price_of(moves, source.mesh), peak_of(moves)
        self.pairs += 1
        self.sent, self.least = self.sent + price // SENT, self.least + least // SENT
        if price > least:
            more = price // SENT / (least // SENT) if least >= SENT else float("inf") if price >= SENT else 1.0
            self.worse.append((more, source, target, price, least))
        elif price < least:
            self.cheaper.append((source, target, price, least))
        elif moves and peak > least_peak:
            self.hungry.append((source, target, peak, least_peak))
        ends = max(source.max_local_numel, target.max_local_numel)
        if peak > ends:
            self.grew[round(peak / ends, 3)] += 1

    @property
    def is_optimal(self) -> bool:
        return not (self.worse or self.cheaper or self.hungry)

    def __str__(self) -> str:
        told = f"{self.pairs} pairs, {self.pairs - len(self.worse) - len(self.cheaper)} at the minimum"
        if self.worse:
            factors = [more for more, *_ in self.worse]
            finite = [factor for factor in factors if factor < float("inf")]
            told += f"; {sum(f == 1 for f in factors)} send more messages, {sum(f > 1 for f in factors)} more bytes"
            told += f" (worst {max(finite, default=1):.3f} times"
            told += f", {len(factors) - len(finite)} something instead of nothing" if len(finite) < len(factors) else ""
            told += f"; all pairs together {self.sent / max(1, self.least):.4f} times)"
        if self.cheaper:
            told += f"; {len(self.cheaper)} cheaper than the minimum"
        if self.hungry:
            told += f"; {len(self.hungry)} hold more than an equally cheap list"
        if self.grew:
            times = ", ".join(f"{times:g} times: {count}" for times, count in sorted(self.grew.items()))
            return f"{told}; more on the way than at both ends in {self.grew.total()} ({times})"
        return told

    def first(self) -> str:
        """The first pairs that are not as they should be."""
        found = [*self.worse[:3], *self.cheaper[:3], *self.hungry[:3]]
        return "\n".join([str(self), *(" ".join(map(str, pair)) for pair in found)])


def compare(search: Search, every: int = 1) -> Outcome:
    layouts, outcome = [search.layout(placement) for placement in search.placements], Outcome()
    for i in range(0, len(layouts), every):
        for j, target in enumerate(layouts):
            outcome.add(layouts[i], target, int(search.cheapest[i, j]), int(search.least_peak[i, j]))
    return outcome


def pairs_of_divided(mesh: Mesh, dims: Dims, every: int = 1) -> Iterator[tuple[Layout, Layout]]:
    """All pairs of placements of a tensor whose dims may be divided in the given ways, from every so many sources; each
    in its shortest form, in which an atom has its name only if something makes a difference between it and the next."""
    search = Search(mesh, dims)
    layouts = sorted({search.layout(placement).canonical() for placement in search.placements}, key=str)
    for source in layouts[::every]:
        for target in layouts:
            yield source, target


def compare_divided(mesh: Mesh, dims: Dims, every: int = 1) -> Outcome:
    """The same over dims divided into atoms. The minimum is over the atoms that both ends together name: the coarsest
    that refine both, or where there are none, those of one end or those of the other."""
    outcome = Outcome()
    for source, target in pairs_of_divided(mesh, dims, every):
        common, own, other = _common(source, target)
        search, number = _search(mesh, common)
        i, j = number[own], number[other]
        outcome.add(source, target, int(search.cheapest[i, j]), int(search.least_peak[i, j]))
    return outcome


@lru_cache(maxsize=64)
def _search(mesh: Mesh, dims: Dims) -> tuple[Search, dict[Layout, int]]:
    search = Search(mesh, dims)
    number: dict[Layout, int] = {}
    for i, placement in enumerate(search.placements):
        number.setdefault(search.layout(placement), i)
    return search, number


def _common(source: Layout, target: Layout) -> tuple[Dims, Layout, Layout]:
    """The atoms that two layouts name together, and both written over them."""
    ways: list[tuple[tuple[int, ...], ...]] = []
    written: list[list[tuple[Atom, ...]]] = [[], []]
    for both in zip(source.dims, target.dims, strict=True):
        sizes = [tuple(atom.size for atom in dim) for dim in both]
        atoms = common_atoms(*sizes)
        try:
            if atoms is None:
                raise LayoutError("they do not nest")
            finer = [Layout(source.mesh, (dim,)).refine((atoms,)).dims[0] for dim in both]
            ways.append((atoms,))
        except LayoutError:
            finer = list(both)
            ways.append(tuple(dict.fromkeys(sizes)))
        for side, dim in zip(written, finer, strict=True):
            side.append(dim)
    own, other = (
        Layout(side.mesh, tuple(dims), side.states) for side, dims in zip((source, target), written, strict=True)
    )
    return tuple(ways), own, other
