"""Which memory is live: storages with those who hold them, by category, and the most there was in each phase."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from shardwise.programs.forms import Form

Category = Literal["parameters", "gradients", "optimizer states", "inputs", "saved", "temporaries", "communication"]
CATEGORIES: tuple[Category, ...] = (
    "parameters",
    "gradients",
    "optimizer states",
    "inputs",
    "saved",
    "temporaries",
    "communication",
)


@dataclass(frozen=True, slots=True)
class Peak:
    """The most bytes that are live at once: in which ``phase`` ("forward", "backward" or "update"), at which operator,
    and what they are made of (the sum is ``num_bytes``)."""

    num_bytes: int
    phase: str
    op: str
    parts: Mapping[str, int]

    @property
    def where(self) -> str:
        return f"{self.phase} of {self.op}" if self.op else self.phase


# What a micro-batch neither saves nor holds for a moment.
STAYING: tuple[Category, ...] = ("parameters", "gradients", "optimizer states", "inputs")


def static_bytes(peak: Peak) -> int:
    """Bytes of a peak that are no micro-batch's saved values and not there for a moment."""
    return sum(peak.parts.get(name, 0) for name in STAYING)


@dataclass(eq=False, slots=True)
class Storage:
    """``owners``: names and messages that hold it."""

    num_bytes: int
    category: Category
    owners: int = 0


@dataclass(frozen=True, slots=True)
class LedgerTensor:
    """A tensor, and the storage that it is (a view on)."""

    form: Form
    storage: Storage


@dataclass
class Ledger:
    """``phase`` and ``op``: what goes on; ``live``: bytes per category; ``peaks``: the most so far, per phase;
    ``held``: per phase and operator; ``over``: the most at every operator in turn, if a list is given for that."""

    phase: str = "forward"
    op: str = ""
    live: Counter[Category] = field(default_factory=Counter)
    peaks: dict[str, Peak] = field(default_factory=dict)
    held: dict[tuple[str, str], int] = field(default_factory=dict)
    over: list[Peak] | None = None

    def new(self, num_bytes: int, category: Category = "temporaries") -> Storage:
        """Create a storage that has no owner yet."""
        storage = Storage(num_bytes, category)
        self.live[category] += num_bytes
        self.note()
        return storage

    def hold(self, storage: Storage) -> Storage:
        storage.owners += 1
        return storage

    def drop(self, storage: Storage) -> None:
        """One holder less; the last one frees it."""
        storage.owners -= 1
        if not storage.owners:
            self.live[storage.category] -= storage.num_bytes

    def note(self, transient: int = 0) -> None:
        """Record the live bytes plus ``transient`` as a candidate for the peak."""
        total = sum(self.live.values()) + transient
        where = self.phase, self.op
        if total > self.held.get(where, -1):
            self.held[where] = total
        peak = self.peaks.get(self.phase)
        if peak is None or total > peak.num_bytes:
            self.peaks[self.phase] = self._now(total, transient)
        if self.over is not None:
            last = self.over[-1] if self.over else None
            if last is None or (last.phase, last.op) != (self.phase, self.op):
                self.over.append(self._now(total, transient))
            elif total > last.num_bytes:
                self.over[-1] = self._now(total, transient)

    def _now(self, total: int, transient: int) -> Peak:
        parts: dict[str, int] = {name: self.live[name] for name in CATEGORIES}
        parts["temporaries"] += transient
        return Peak(total, self.phase, self.op, parts)

    def recategorize(self, storage: Storage, category: Category) -> None:
        """Move a storage to another category, such as a cotangent that becomes a parameter's gradient."""
        self.live[storage.category] -= storage.num_bytes
        storage.category = category
        self.live[storage.category] += storage.num_bytes
