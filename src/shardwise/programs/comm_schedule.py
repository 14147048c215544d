"""When the messages of parameters go, where a conversion takes several, and where several are needed at once.

Every message has the time from one *place* to the next: buckets between which there is no product are in one place, as
what is computed between them hides nothing. In forward an exchange of n messages leaves n places ahead of its use, and
its next message leaves with what the last one brought at every place on the way. In backward gradients go on where
buckets of other places leave, and arrive there if forward gathers them, else at the end. So a message over one axis
travels beside that of the next bucket over another.

An exchange is a tuple of *legs*: the first is what leaves, each later one what arrives and leaves again, the last what
arrives in the end.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Generic, TypeVar

Leg = TypeVar("Leg")


def legs_ahead(counts: Sequence[int], places: Sequence[int]) -> list[list[tuple[int, int]]]:
    """What leaves at the start, and ahead of each exchange's arrival: (exchange, leg). First legs go ahead of what has
    to arrive first, which nothing does at the start. ``counts``: messages per exchange, in the order in which they are
    needed; ``places``: where."""
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
    """An exchange of gradients on its way: the place where it left or went on, whether forward gathers the parameters,
    and the legs to go."""

    place: int
    is_gathered: bool
    legs: list[Leg]


@dataclass
class GradientReduceQueue(Generic[Leg]):
    """Exchanges of gradients on their way, in the order in which they left."""

    flights: list[InFlightExchange[Leg]] = field(default_factory=list)

    def leave(self, place: int, is_gathered: bool, legs: Sequence[Leg]) -> Iterator[Leg]:
        """An exchange leaves: its first leg, and those of others that follow. What leaves again goes ahead of what
        arrives."""
        first, *rest = legs
        yield first
        for flight in sorted(self.flights, key=lambda flight: -len(flight.legs)):
            follows = len(flight.legs) > 1 or (is_gathered and flight.is_gathered)
            if follows and flight.place != place:
                flight.place = place
                yield flight.legs.pop(0)
        self.flights = [*(flight for flight in self.flights if flight.legs), InFlightExchange(place, is_gathered, rest)]

    def end(self) -> Iterator[Leg]:
        """All that is left."""
        while self.flights:
            most = max(len(flight.legs) for flight in self.flights)
            for flight in self.flights:
                if len(flight.legs) == most:
                    yield flight.legs.pop(0)
            self.flights = [flight for flight in self.flights if flight.legs]


__all__ = ["GradientReduceQueue", "legs_ahead"]
