"""Issue order of parameter all-gathers and gradient reduce-scatters that take several collectives.

Every message may take the time from one *place* to the next. Buckets with no product between them are in one place:
what is computed between them is too short to hide a message. In forward an exchange of n messages starts n places ahead
of its use; at every place on the way the next message leaves with the data of the last one. In backward the next
message of a gradient leaves where a bucket of another place starts. The last one arrives there if forward gathers the
parameter, else at the end. So a message over one axis overlaps with that of the next bucket over another axis.

An exchange is a tuple of *legs*: the first one is the first departure, each later one an arrival followed by the next
departure, the last one the final arrival.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Generic, TypeVar

Leg = TypeVar("Leg")


def legs_ahead(counts: Sequence[int], places: Sequence[int]) -> list[list[tuple[int, int]]]:
    """Return the (exchange, leg) pairs to issue at the start, and ahead of each exchange's final arrival. First legs
    come before legs that begin with an arrival. ``counts``: messages per exchange, in the order in which exchanges are
    needed; ``places``: the place of each."""
    firsts = [0, *(i for i, (a, b) in enumerate(pairwise(places), 1) if a != b)] if places else []
    groups = [range(begin, end) for begin, end in pairwise([*firsts, len(places)])]
    ahead: list[list[tuple[int, int]]] = [[] for _ in range(len(counts) + 1)]
    most = max(counts, default=0)
    for now in range(-most, len(groups)):
        for later in reversed(range(max(now, 0), min(now + most + 1, len(groups)))):
            for exchange in groups[later]:
                leg = counts[exchange] - (later - now)
                if 0 <= leg < counts[exchange]:
                    ahead[0 if now < 0 and leg == 0 else firsts[max(now, 0)] + 1].append((exchange, leg))
    return [sorted(legs, key=lambda one: one[1] > 0) for legs in ahead]


@dataclass
class InFlightExchange(Generic[Leg]):
    """An exchange of gradients in flight: the place of its last departure, whether forward gathers the parameters, and
    the remaining legs."""

    place: int
    is_gathered: bool
    legs: list[Leg]


@dataclass
class GradientReduceQueue(Generic[Leg]):
    """Exchanges of gradients in flight, in the order in which they started."""

    flights: list[InFlightExchange[Leg]] = field(default_factory=list)

    def leave(self, place: int, is_gathered: bool, legs: Sequence[Leg]) -> Iterator[Leg]:
        """Start an exchange: yield its first leg and the legs of other exchanges that are now due. Legs with a further
        departure come before final arrivals."""
        first, *rest = legs
        yield first
        for flight in sorted(self.flights, key=lambda flight: -len(flight.legs)):
            follows = len(flight.legs) > 1 or (is_gathered and flight.is_gathered)
            if follows and flight.place != place:
                flight.place = place
                yield flight.legs.pop(0)
        self.flights = [*(flight for flight in self.flights if flight.legs), InFlightExchange(place, is_gathered, rest)]

    def end(self) -> Iterator[Leg]:
        """Yield all remaining legs."""
        while self.flights:
            most = max(len(flight.legs) for flight in self.flights)
            for flight in self.flights:
                if len(flight.legs) == most:
                    yield flight.legs.pop(0)
            self.flights = [flight for flight in self.flights if flight.legs]


__all__ = ["GradientReduceQueue", "legs_ahead"]
