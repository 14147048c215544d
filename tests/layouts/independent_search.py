"""The cheapest redistribution between all pairs of placements, searched exhaustively from the definitions.

This is what ``shardwise.layouts.redistribute`` is compared with. It shares no code with it and takes none of its
shortcuts: a placement says for every prime sub-axis where it is; which elements every rank holds is written out as a
set; an edge is anything that *these sets* allow one collective to do; and the cheapest paths between all pairs are
found at once (Floyd and Warshall, who need not care what a price means). For that tensor and mesh must be small.

What one step may do, to any set of sub-axes at once that are all in one state and all go to one state:

* join: they stop sharding. All-gather to I or R, or zero-padding to P. Possible where the ranks of a group along them
  hold disjoint parts before, and every rank's part afterwards is the union of those parts.
* cut: they begin to shard. Slice from I or R, or reduce-scatter from P. The reverse of a join.
* change between I, R and P: all-reduce or a local step.
* exchange: the sub-axes that shard are arranged in any other way, by an all-to-all or a collective permute.

Forward and backward are those of the sixteen conversions (docs/tour.md). A step costs what the busiest
rank sends in both (ring and pairwise algorithms), then one message per collective.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations, product
from math import prod

import numpy as np

from shardwise.layouts.layout import Atom, Layout
from shardwise.layouts.mesh import Mesh

Dims = tuple[tuple[tuple[int, ...], ...], ...]  # per dim, per way to divide it, the sizes of the atoms
Orders = tuple[tuple[int, ...], ...]  # per position (atom) the axes that shard it, major first
Direction = tuple[str, float]  # the collective ('' for none), and what the busiest rank sends
Sets = np.ndarray  # [ranks, elements]: who holds what

SENT = 1000  # prices are whole numbers: elements sent, times the number of devices, times SENT, plus messages
NEVER = np.int64(2) ** 60

# Per change of state: (forward, backward); AG and RS: what is sent for each part that is joined or cut, AR: all-reduce.
JOINED = {"I": ("AG", ""), "R": ("AG", "RS"), "P": ("", "")}
CUT = {"I": ("", "AG"), "R": ("", ""), "P": ("RS", "AG")}
CHANGED = {
    ("I", "R"): ("", "AR"),
    ("I", "P"): ("", ""),
    ("R", "I"): ("", ""),
    ("R", "P"): ("", ""),
    ("P", "I"): ("AR", ""),
    ("P", "R"): ("AR", "AR"),
}


@dataclass(frozen=True)
class Placement:
    """Where every sub-axis is: sharding a position (an atom), or in state I, R or P."""

    orders: Orders
    letters: tuple[str, ...]  # S for those that shard


@dataclass(frozen=True)
class Search:
    """All placements of a tensor on a mesh, and the price of the cheapest path between any two.

    ``dims``: for every tensor dim the ways in which it may be divided (mostly one), each the sizes of its atoms.
    ``whole_axes``: mesh axes stay undivided, as if there were no sub-axes.
    """

    mesh: Mesh
    dims: Dims
    whole_axes: bool = False

    @cached_property
    def axes(self) -> list[tuple[str, ...]]:
        if self.whole_axes:
            return [self.mesh.expand(name) for name, _ in self.mesh.axes]
        return [(name,) for name in self.mesh.sub_axes]

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        return tuple(self.mesh.size_of(names) for names in self.axes)

    @cached_property
    def positions(self) -> list[tuple[int, int, int]]:
        """(dim, way, atom) of all atoms."""
        return [(d, w, i) for d, ways in enumerate(self.dims) for w, way in enumerate(ways) for i in range(len(way))]

    @cached_property
    def orders(self) -> list[Orders]:
        found: list[Orders] = [((),) * len(self.positions)]
        for axis in range(len(self.sizes)):
            found += [
                (*orders[:p], (*own[:slot], axis, *own[slot:]), *orders[p + 1 :])
                for orders in found
                for p, own in enumerate(orders)
                if self._ways(orders, p)
                for slot in range(len(own) + 1)
            ]
        return found

    def _ways(self, orders: Orders, p: int) -> bool:
        """Whether position ``p`` belongs to the way in which its dim is divided so far, if any."""
        dim, way, _ = self.positions[p]
        used = {self.positions[q][:2] for q, own in enumerate(orders) if own}
        return all(other == (dim, way) for other in used if other[0] == dim)

    @cached_property
    def placements(self) -> list[Placement]:
        found = []
        for orders in self.orders:
            shards = {axis for own in orders for axis in own}
            choices = ["S" if axis in shards else "IRP" for axis in range(len(self.sizes))]
            found += [Placement(orders, letters) for letters in product(*choices)]
        return found

    def layout(self, placement: Placement) -> Layout:
        own = dict(zip(self.positions, placement.orders, strict=True))
        dims = []
        for d, ways in enumerate(self.dims):
            way = max(range(len(ways)), key=lambda w: any(own[d, w, i] for i in range(len(ways[w]))))
            dims.append(
                tuple(
                    Atom(size, tuple(name for axis in own[d, way, i] for name in self.axes[axis]))
                    for i, size in enumerate(ways[way])
                )
            )
        states = tuple(
            (name, letter)
            for names, letter in zip(self.axes, placement.letters, strict=True)
            for name in names
            if letter in "RP"
        )
        return Layout(self.mesh, tuple(dims), states)

    # -------------------------------------------------------------------------------------------- who holds what

    @cached_property
    def coordinates(self) -> list[tuple[int, ...]]:
        return list(product(*map(range, self.sizes)))

    def held(self, orders: Orders) -> Sets:
        """Row r, column e: whether rank r holds element e of the tensor."""
        sets = []
        for coordinates in self.coordinates:
            elements = np.ones(1, dtype=bool)
            for d, ways in enumerate(self.dims):
                rows = np.ones(prod(ways[0]), dtype=bool)
                for p, (dim, way, atom) in enumerate(self.positions):
                    if dim == d and orders[p]:
                        size, minor = ways[way][atom], prod(ways[way][atom + 1 :])
                        number = prod(self.sizes[axis] for axis in orders[p])
                        index = 0
                        for axis in orders[p]:
                            index = index * self.sizes[axis] + coordinates[axis]
                        place = np.arange(len(rows)) // minor % size
                        rows &= (index * size // number <= place) & (place < (index + 1) * size // number)
                elements = np.outer(elements, rows).ravel()
            sets.append(elements)
        return np.array(sets)

    def union(self, sets: Sets, axes: tuple[int, ...]) -> Sets:
        """Per rank and element, how many ranks that differ from it along ``axes`` only hold the element."""
        grid = sets.reshape(*self.sizes, -1).astype(np.int8)
        return np.broadcast_to(grid.sum(axes, keepdims=True), grid.shape).reshape(sets.shape)

    # ------------------------------------------------------------------------------------------------------ prices

    @cached_property
    def steps(self) -> np.ndarray:
        """The price of one step from every placement to every other one, forward and backward together."""
        return self._priced(backward=True)

    @cached_property
    def steps_forward(self) -> np.ndarray:
        return self._priced(backward=False)

    def _priced(self, backward: bool) -> np.ndarray:
        number = {placement: i for i, placement in enumerate(self.placements)}
        price = np.full((len(number), len(number)), NEVER)
        np.fill_diagonal(price, 0)
        for before, after, *directions in self._steps():
            counted = directions if backward else directions[:1]
            elements, messages = sum(sent for _, sent in counted), sum(bool(name) for name, _ in counted)
            i, j = number[before], number[after]
            price[i, j] = min(price[i, j], round(elements * len(self.coordinates)) * SENT + messages)
        return price

    def _steps(self) -> Iterator[tuple[Placement, Placement, Direction, Direction]]:
        """(before, after, what forward sends, what backward sends)."""
        of_orders: dict[Orders, list[tuple[str, ...]]] = {}
        for placement in self.placements:
            of_orders.setdefault(placement.orders, []).append(placement.letters)
        sets = {orders: self.held(orders) for orders in self.orders}
        largest = {orders: int(held.sum(1).max()) for orders, held in sets.items()}

        def sent(both: tuple[str, str], n: int, part: int) -> tuple[Direction, Direction]:
            prices = {"": 0, "AG": (n - 1) * part, "RS": (n - 1) * part, "AR": 2 * (n - 1) * part / n}
            return (both[0], prices[both[0]]), (both[1], prices[both[1]])

        for orders, held in sets.items():
            shards = {axis for own in orders for axis in own}
            others = [axis for axis in range(len(self.sizes)) if axis not in shards]
            for letters, axes in product(of_orders[orders], _subsets(others)):
                here, n = Placement(orders, letters), prod(self.sizes[axis] for axis in axes)
                (state, *more) = {letters[axis] for axis in axes}
                for new in "IRP" if not more else "":
                    if new != state:
                        there = Placement(orders, _with(letters, axes, new))
                        yield here, there, *sent(CHANGED[state, new], n, largest[orders])
            for new_orders, new_held in sets.items():
                now = {axis for own in new_orders for axis in own}
                if now == shards and new_orders != orders:
                    forward, backward = (held & ~new_held).sum(1).max(), (new_held & ~held).sum(1).max()
                    for letters in of_orders[orders]:
                        here, there = Placement(orders, letters), Placement(new_orders, letters)
                        yield here, there, ("exchange", int(forward)), ("exchange", int(backward))
                elif now > shards:
                    axes = tuple(sorted(now - shards))
                    n, part = prod(self.sizes[axis] for axis in axes), largest[new_orders]
                    if not np.array_equal(self.union(new_held, axes), held.astype(np.int8)):
                        continue
                    for letters, state in product(of_orders[new_orders], "IRP"):
                        here, there = Placement(orders, _with(letters, axes, state)), Placement(new_orders, letters)
                        yield here, there, *sent(CUT[state], n, part)
                        yield there, here, *sent(JOINED[state], n, part)

    @cached_property
    def cheapest(self) -> np.ndarray:
        """The price of the cheapest path from every placement to every other one."""
        return shortest(self.steps)

    @cached_property
    def cheapest_forward(self) -> np.ndarray:
        """The same where nothing goes back: the price of forward alone."""
        return shortest(self.steps_forward)

    @cached_property
    def cheapest_apart(self) -> np.ndarray:
        """The same where forward and backward need not mirror each other: each takes its own cheapest path, the
        cotangent from the dual of the target (S and I stay, R becomes P, P becomes I) to the dual of the source."""
        number = {placement: i for i, placement in enumerate(self.placements)}
        turned = {"S": "S", "I": "I", "R": "P", "P": "I"}
        dual = [number[Placement(p.orders, tuple(turned[letter] for letter in p.letters))] for p in self.placements]
        return self.cheapest_forward + self.cheapest_forward[np.ix_(dual, dual)].T

    @cached_property
    def largest(self) -> np.ndarray:
        """Elements on the rank that holds most, of every placement."""
        return np.array([self.held(placement.orders).sum(1).max() for placement in self.placements])

    @cached_property
    def least_peak(self) -> np.ndarray:
        """The largest local tensor on the cheapest path between any two placements whose largest local tensor is
        smallest."""
        found = np.full_like(self.cheapest, self.largest.max())
        for limit in sorted(set(self.largest.tolist()), reverse=True):
            steps = self.steps.copy()
            steps[self.largest > limit, :] = NEVER
            steps[:, self.largest > limit] = NEVER
            found[shortest(steps) == self.cheapest] = limit
        return found

    def path(self, source: int, target: int) -> list[Placement]:
        found = [source]
        while found[-1] != target:
            here = found[-1]
            onward = self.steps[here] + self.cheapest[:, target]
            onward[found] = NEVER
            found.append(int(np.argmin(onward)))
        return [self.placements[i] for i in found]


def shortest(steps: np.ndarray) -> np.ndarray:
    best: np.ndarray = steps.copy()
    for middle in range(len(best)):
        np.minimum(best, best[:, middle, None] + best[None, middle, :], out=best)
    return best


def _subsets(axes: list[int]) -> Iterator[tuple[int, ...]]:
    for count in range(1, len(axes) + 1):
        yield from combinations(axes, count)


def _with(letters: tuple[str, ...], axes: tuple[int, ...], letter: str) -> tuple[str, ...]:
    return tuple(letter if axis in axes else own for axis, own in enumerate(letters))
