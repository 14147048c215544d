"""Issue order of parameter all-gathers and gradient reduce-scatters that take several collectives.

An *exchange* is the collectives of one bucket in one direction. Each collective takes the result of the one before. An
exchange of n messages has n + 1 *legs*:

* leg 0 departs message 1;
* leg k, for 0 < k < n, waits for message k and departs message k + 1;
* leg n waits for message n, the final arrival.

The *place* of a bucket is the number of products before it (``SpmdProgram.place_of``). Buckets with no product between
them share a place, since the work between them is too short to hide a message. Exchanges are therefore scheduled by
*group*: group g holds all buckets of the g-th place.

**Forward** (``legs_ahead``). An exchange of n messages that group g uses issues leg k < n at group g - (n - k). So each
message overlaps with the computation of one group. Leg n is issued where the result is used. With a *prefetch depth* of
d, all of these legs are issued d - 1 groups earlier: a long message overlaps with several short groups, and its result
takes memory for as long.

**Backward** (``GradientReduceQueue``). An exchange issues leg 0 when its bucket is reached. When a bucket of another
place starts, every exchange in flight issues its next leg. A final arrival is issued there only if forward gathers the
parameters of both buckets, and otherwise at the end of backward.

In both orders, a message over one mesh axis overlaps with the message of a neighbouring bucket over another axis.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Generic, TypeVar

Leg = TypeVar("Leg")


def legs_ahead(counts: Sequence[int], places: Sequence[int], depth: int = 1) -> list[list[tuple[int, int]]]:
    """Return when to issue every leg but the final arrivals, as lists of (exchange, leg) pairs.

    Entry 0 lists the legs to issue before everything else. Entry i + 1 lists those to issue just before the final
    arrival of exchange i. The first exchange of a group issues the legs of the whole group. Within an entry, first legs
    come before legs that wait for an arrival. Where the group of a leg is negative, leg 0 goes to entry 0 and any other
    leg to the first group.

    Args:
        counts: Number of messages n of each exchange, in the order in which their results are used.
        places: The place of each exchange, in the same order.
        depth: The prefetch depth, from 1.
    """
    firsts = [0, *(i for i, (a, b) in enumerate(pairwise(places), 1) if a != b)] if places else []
    groups = [range(begin, end) for begin, end in pairwise([*firsts, len(places)])]
    ahead: list[list[tuple[int, int]]] = [[] for _ in range(len(counts) + 1)]
    most = max(counts, default=0) + depth - 1
    for now in range(-most, len(groups)):
        for later in reversed(range(max(now, 0), min(now + most + 1, len(groups)))):
            for exchange in groups[later]:
                leg = counts[exchange] - (later - now) + depth - 1
                if 0 <= leg < counts[exchange]:
                    ahead[0 if now < 0 and leg == 0 else firsts[max(now, 0)] + 1].append((exchange, leg))
    return [sorted(legs, key=lambda one: one[1] > 0) for legs in ahead]


@dataclass
class InFlightExchange(Generic[Leg]):
    """An exchange of gradients with legs left to issue.

    ``place``: the place of the bucket at which it last issued a leg. ``is_gathered``: whether forward gathers its
    parameters. ``legs``: the legs left, never empty in ``GradientReduceQueue.flights``.
    """

    place: int
    is_gathered: bool
    legs: list[Leg]


@dataclass
class GradientReduceQueue(Generic[Leg]):
    """Queue of the gradient exchanges in flight during backward, in the order in which they started."""

    flights: list[InFlightExchange[Leg]] = field(default_factory=list)

    def leave(self, place: int, is_gathered: bool, legs: Sequence[Leg]) -> Iterator[Leg]:
        """Start an exchange: yield its first leg, then the next leg of each exchange in flight that is due.

        An exchange is due if it last issued a leg at another place. If only its final arrival is left, forward must
        also gather the parameters of both exchanges. Exchanges with the most legs left come first, so departures
        precede final arrivals.
        """
        first, *rest = legs
        yield first
        for flight in sorted(self.flights, key=lambda flight: -len(flight.legs)):
            follows = len(flight.legs) > 1 or (is_gathered and flight.is_gathered)
            if follows and flight.place != place:
                flight.place = place
                yield flight.legs.pop(0)
        self.flights = [*(flight for flight in self.flights if flight.legs), InFlightExchange(place, is_gathered, rest)]

    def end(self) -> Iterator[Leg]:
        """Yield all remaining legs, the exchanges with the most legs left first, so that departures are not delayed."""
        while self.flights:
            most = max(len(flight.legs) for flight in self.flights)
            for flight in self.flights:
                if len(flight.legs) == most:
                    yield flight.legs.pop(0)
            self.flights = [flight for flight in self.flights if flight.legs]
