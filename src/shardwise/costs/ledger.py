"""Ledger of live memory: reference-counted storages by category, and the peak of each phase of a step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

from shardwise.programs.forms import Form

Category = Literal["parameters", "gradients", "optimizer states", "inputs", "saved", "temporaries", "communication"]
CATEGORIES: tuple[Category, ...] = get_args(Category)


@dataclass(frozen=True, slots=True)
class Peak:
    """The most bytes that are live at once, and where.

    Attributes:
        num_bytes: The bytes.
        phase: "forward", "backward" or "update".
        op: Name of the operator that runs then, or "".
        parts: Category -> bytes; their sum is ``num_bytes``.
    """

    num_bytes: int
    phase: str
    op: str
    parts: Mapping[str, int]

    @property
    def where(self) -> str:
        return f"{self.phase} of {self.op}" if self.op else self.phase


# Categories that stay for the whole step. The others are saved from forward to backward, or temporary.
STAYING: tuple[Category, ...] = ("parameters", "gradients", "optimizer states", "inputs")


def static_bytes(peak: Peak) -> int:
    """Return the bytes of a peak that stay for the whole step: parameters, gradients, optimizer states and inputs."""
    return sum(peak.parts.get(name, 0) for name in STAYING)


@dataclass(eq=False, slots=True)
class Storage:
    """A block of memory. ``owners``: number of names and messages that refer to it."""

    num_bytes: int
    category: Category
    owners: int = 0


@dataclass(frozen=True, slots=True)
class LedgerTensor:
    """A tensor: its form, and the storage that it owns or views."""

    form: Form
    storage: Storage


@dataclass
class Ledger:
    """Counts live bytes while a program's instructions are walked in order.

    Attributes:
        phase: The current phase: "forward", "backward" or "update".
        op: The current operator.
        live: Category -> bytes that are live now.
        peaks: Phase -> its peak so far.
        held: (phase, operator) -> its most live bytes so far.
        over: The peak of every operator, in the order of execution. None: not recorded.
    """

    phase: str = "forward"
    op: str = ""
    live: Counter[Category] = field(default_factory=Counter)
    peaks: dict[str, Peak] = field(default_factory=dict)
    held: dict[tuple[str, str], int] = field(default_factory=dict)
    over: list[Peak] | None = None

    def new(self, num_bytes: int, category: Category = "temporaries") -> Storage:
        """Create a storage without owners, count its bytes as live, and record a peak if there is one."""
        storage = Storage(num_bytes, category)
        self.live[category] += num_bytes
        self.note()
        return storage

    def hold(self, storage: Storage) -> Storage:
        """Add an owner to a storage, and return the storage."""
        storage.owners += 1
        return storage

    def drop(self, storage: Storage) -> None:
        """Remove an owner of a storage. The last owner frees it."""
        storage.owners -= 1
        if not storage.owners:
            self.live[storage.category] -= storage.num_bytes

    def note(self, transient: int = 0) -> None:
        """Update the peaks with the live bytes plus ``transient`` temporary bytes."""
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
