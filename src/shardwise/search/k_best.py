"""The k assignments of least value, exactly.

An elimination is decoded from its last variable to its first. With the values of its neighbours fixed, every value of a
variable has a known least sum of all that is left. So the extra cost of an assignment over the best is the sum of the
extra costs of its values over the least ones. The assignments are taken in order of that sum. The children of an
assignment are those that leave its path at one later variable (Lawler, A procedure for computing the K best solutions
to discrete optimization problems, Management Science 18(7), 1972). Each costs one decoding, and all of them one
elimination.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np

from shardwise.search.elimination import Elimination, Problem, Table, eliminated_minimum, elimination_of


def k_best(problem: Problem, k: int) -> list[tuple[float, list[int]]]:
    """Return the ``k`` best (value, assignment), in order; fewer where there are no more. Raises TooWide."""
    elimination = elimination_of(problem)
    decoder = _AssignmentDecoder(elimination, elimination.tables(problem))
    # (value over the least one, order of arrival, the assignment whose way it leaves, position, value there)
    heap: list[tuple[float, int, list[int], int, int]] = [(0.0, 0, [0] * len(problem.sizes), -1, 0)]
    best: list[tuple[float, list[int]]] = []
    arrived = 0
    while heap and len(best) < k:
        more, _, parent, position, value = heapq.heappop(heap)
        assignment, offers = decoder.completed(parent, position, value, k - len(best))
        total = problem.value(assignment)
        if not np.isfinite(total):
            break
        best.append((total, assignment))
        for extra, at, other in offers:
            arrived += 1
            heapq.heappush(heap, (more + extra, arrived, assignment, at, other))
    return best


@dataclass
class _AssignmentDecoder:
    """Decoder of variables from the last eliminated to the first, with a cache of sums beside neighbours."""

    elimination: Elimination
    tables: list[Table]

    def __post_init__(self) -> None:
        self.order = self.elimination.order[::-1]
        self._known: dict[tuple[int, tuple[int, ...]], Table] = {}

    def completed(
        self, parent: list[int], position: int, value: int, count: int
    ) -> tuple[list[int], list[tuple[float, int, int]]]:
        """Return the least assignment that agrees with ``parent`` before a position of the order and has ``value``
        there, and the ``count`` cheapest ways to leave it later: (extra cost, position, value)."""
        assignment = list(parent)
        if position >= 0:
            assignment[self.order[position][0]] = value
        offers: list[tuple[float, int, int]] = []
        for at in range(position + 1, len(self.order)):
            variable, number, step, neighbours = self.order[at]
            key = number, tuple([assignment[v] for v in neighbours])
            more = self._known.get(key)
            if more is None:
                total = eliminated_minimum(step, self.tables, key[1])
                least = total.min()
                more = self._known[key] = total - least if np.isfinite(least) else np.zeros_like(total)
            chosen = assignment[variable] = int(more.argmin())
            nearest = range(len(more)) if len(more) <= count else np.argpartition(more, count)[: count + 1].tolist()
            offers += [(float(more[i]), at, i) for i in nearest if i != chosen and np.isfinite(more[i])]
        return assignment, heapq.nsmallest(count, offers)
