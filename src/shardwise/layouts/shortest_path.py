"""The cheapest steps between two states: A*, the shortest path search that knows a lower bound of what is left.

The bound (Hart, Nilsson and Raphael 1968). I, R and P are the numbers of devices along the units in each state, N the
elements of the tensor. What is counted are the elements that a rank sends on average, times the number of devices.

* All ranks together know N I R elements as they finally are (of a summand, its share of the sum). To know more,
  as many must be sent.
* There are N P different summands. To have fewer, as many must be sent. An all-reduce does both and sends both.
* Local steps change neither number for the better.

So from x to y at least this goes forward:

    N max(0, I R (y) - I R (x)) + N max(0, P (x) - P (y))

The backward of a path leads from the dual of y to the dual of x (R becomes P, and P becomes whole). So backward:

    N max(0, I P (x) - I P (y)) + N max(0, R (y) - R (x))

Each single conversion of the table meets the bound exactly. Exchanges are not seen by it.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from itertools import count
from math import prod
from operator import add

from shardwise.layouts.conversions import COLLECTIVES, Primitive
from shardwise.layouts.directed import Directed
from shardwise.layouts.layout import PARTIAL_KINDS
from shardwise.layouts.redistribution_steps import (
    EXACT_UP_TO,
    RedistributionStep,
    RedistributionSteps,
    Space,
    State,
    moved_units,
)

Cost = tuple[float, ...]

SETTLED_UP_TO = 128  # states, over more than EXACT_UP_TO units; then a direct route from one of them is taken


# (primitive, units, elements that the busiest rank sends, times the devices) -> the cost of one direction of a step.
# Compared by value; costs are summed component by component.
StepPrice = Callable[[Primitive, tuple[int, ...], float], Cost]


@dataclass(frozen=True, slots=True)
class Path:
    """``states``: ends included. ``num_settled``: states that the search looked at."""

    states: tuple[State, ...]
    cost: Cost
    num_settled: int


@lru_cache(maxsize=100_000)
def solve(space: Space, source: State, target: State, price: StepPrice | None = None) -> Path | None:
    """A cheapest path; over more than EXACT_UP_TO units, one that is no dearer than the direct route. By default the
    fewest elements sent by the busiest rank (times the devices), then messages; any price is of both directions. Equal
    prices are settled by the elements held after every step (slicing early), then by the number of steps. None where no
    path exists (a partial value of a kind other than sum would have to arise)."""
    return _AStar(_steps(space), target, price).path_from(source)


_steps = lru_cache(maxsize=64)(RedistributionSteps)


class _AStar:
    def __init__(self, steps: RedistributionSteps, target: State, price: StepPrice | None) -> None:
        self.steps, self.target, self.price = steps, target, price
        self.directed = Directed(steps, target) if len(steps.sizes) > EXACT_UP_TO else None
        self.differentiable = steps.space.differentiable
        self.numel = prod(steps.atoms[p] for spans in steps.spans for p in spans[0])
        self.goal = self._products(target)
        self.last = (steps.numel(target[0]), 1)
        self._bounds: dict[tuple[str, ...], Cost] = {}

    def path_from(self, source: State) -> Path | None:
        zero = tuple(0.0 for _ in self._bound(source))
        best: dict[State, Cost] = {source: zero}
        parent: dict[State, State] = {}
        done: dict[State, None] = {}  # a set that keeps the order
        ticket = count()
        heap = [(self._bound(source), 0, source)]
        while heap:
            _, _, state = heapq.heappop(heap)
            if state in done:
                continue
            done[state] = None
            if state == self.target:
                return Path(_back(parent, state), best[state], len(done))
            if self.directed and len(done) == SETTLED_UP_TO:
                return self._give_up(self.directed, done, parent, best)
            cost = best[state]
            exchanged = state in parent and parent[state][1] == state[1]
            for step in self.directed.steps(state) if self.directed else self.steps.everywhere(state, exchanged):
                after = step.after
                if after in done:
                    continue
                total = tuple(map(add, cost, self._cost(state, step)))
                lowest = best.get(after)
                if lowest is None or total < lowest:
                    best[after] = total
                    parent[after] = state
                    heapq.heappush(heap, (tuple(map(add, total, self._bound(after))), next(ticket), after))
        return None

    def _give_up(
        self, directed: Directed, settled: Iterable[State], parent: dict[State, State], best: dict[State, Cost]
    ) -> Path:
        """Return the cheapest of the direct routes from all settled states (the source is one)."""
        nearest: tuple[Cost, State, tuple[RedistributionStep, ...]] | None = None
        for start in settled:
            route, cost, state = directed.route(start), best[start], start
            for step in route:
                cost, state = tuple(map(add, cost, self._cost(state, step))), step.after
            if nearest is None or cost < nearest[0]:
                nearest = cost, start, route
        assert nearest is not None, "the source is settled first"
        cost, start, route = nearest
        return Path((*_back(parent, start), *(step.after for step in route)), cost, SETTLED_UP_TO)

    def _cost(self, before: State, step: RedistributionStep) -> Cost:
        """Return the cost of both directions of a step, and its tie-breakers."""
        if self.price is None:
            if self.differentiable:
                return (step.sent_forward + step.sent_backward, step.num_messages, step.largest_local, 1)
            return (step.sent_forward, step.forward in COLLECTIVES, step.largest_local, 1)
        units = step.units or moved_units(before[0], step.after[0])
        cost = self.price(step.forward, units, step.sent_forward)
        if self.differentiable:
            cost = tuple(map(add, cost, self.price(step.backward, units, step.sent_backward)))
        return (*cost, step.largest_local, 1)

    def _bound(self, state: State) -> Cost:
        """At least what is left to pay, and its tie-breakers."""
        bound = self._bounds.get(state[1])
        if bound is None:
            if self.price is None:
                elements = self._least_sent(state)
                bound = elements, 1 if elements else 0
            else:  # a message may cost nothing
                bound = (0.0,) * len(self.price("none", (), 0.0))
            self._bounds[state[1]] = bound
        return (*bound, 0, 0) if state == self.target else (*bound, *self.last)

    def _least_sent(self, state: State) -> int:
        """At least the elements that are still to be sent, times the devices (the formulas above)."""
        (i, r, p), (i_goal, r_goal, p_goal) = self._products(state), self.goal
        least = max(0, i_goal * r_goal - i * r) + max(0, p - p_goal)
        if self.differentiable:
            least += max(0, i * p - i_goal * p_goal) + max(0, r_goal - r)
        return self.numel * least

    def _products(self, state: State) -> tuple[int, int, int]:
        """Devices along the units that are invariant, replicated, partial."""
        products = {"I": 1, "R": 1, "P": 1}
        for size, state_of_unit in zip(self.steps.sizes, state[1], strict=True):
            if state_of_unit != "S":
                products["P" if state_of_unit in PARTIAL_KINDS else state_of_unit] *= size
        return products["I"], products["R"], products["P"]


def _back(parent: dict[State, State], state: State) -> tuple[State, ...]:
    path: list[State] = [state]
    while path[-1] in parent:
        path.append(parent[path[-1]])
    return tuple(reversed(path))
