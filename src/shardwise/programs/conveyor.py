"""When the messages of parameters go, where a conversion takes several.

Every message has the time from one bucket to the next. In forward an exchange of n messages leaves n buckets ahead of
its use, and its next message leaves with what the last one brought at every bucket on the way. In backward gradients
go on where later buckets leave, and arrive there if forward gathers them, else at the end. So a message over one axis
travels beside that of the next bucket over another.

An exchange is a tuple of *legs*: the first is what leaves, each later one what arrives and leaves again, the last what
arrives in the end.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

Leg = TypeVar("Leg")


def slots_of_forward(counts: Sequence[int]) -> list[list[tuple[int, int]]]:
    """What leaves at the start, and where each exchange is needed, just before it arrives: (exchange, leg), the latest
    exchange first. ``counts``: messages per exchange, in the order in which they are needed."""
    slots: list[list[tuple[int, int]]] = [[] for _ in range(len(counts) + 1)]
    most = max(counts, default=0)
    for slot in range(-most, len(counts)):
        for exchange in reversed(range(max(slot, 0), min(slot + most + 1, len(counts)))):
            leg = slot - exchange + counts[exchange]
            if 0 <= leg < counts[exchange]:
                slots[max(slot + 1, 0)].append((exchange, leg))
    return slots


@dataclass
class Returning(Generic[Leg]):
    """Exchanges of gradients on their way, in the order in which they left: (whether forward gathers the parameters,
    the legs to go)."""

    flights: list[tuple[bool, list[Leg]]] = field(default_factory=list)

    def leave(self, is_gathered: bool, legs: Sequence[Leg]) -> Iterator[Leg]:
        """An exchange leaves: its first leg, and those of others that follow. What leaves again goes ahead of what
        arrives."""
        first, *rest = legs
        yield first
        for was_gathered, others in self._longest_first():
            if len(others) > 1 or (is_gathered and was_gathered):
                yield others.pop(0)
        self.flights = [(gathered, others) for gathered, others in self.flights if others]
        self.flights.append((is_gathered, rest))

    def end(self) -> Iterator[Leg]:
        """All that is left."""
        while self.flights:
            remaining = max(len(legs) for _, legs in self.flights)
            for _, legs in self.flights:
                if len(legs) == remaining:
                    yield legs.pop(0)
            self.flights = [(gathered, legs) for gathered, legs in self.flights if legs]

    def _longest_first(self) -> list[tuple[bool, list[Leg]]]:
        return sorted(self.flights, key=lambda flight: -len(flight[1]))


__all__ = ["Returning", "slots_of_forward"]
