"""The sixteen conversions between states: which collective in forward, which in backward.

This table and the rules are all there is to parallelism: data, tensor, sequence, context and expert parallelism and
ZeRO are choices of layouts. The backward of a conversion L -> T is the forward of dual(T) -> dual(L), where the dual
layout is that of the cotangent (S and I stay, R becomes P, P becomes whole everywhere); ``tests/layouts`` checks the
table against that identity.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Literal

from shardwise.layouts.holdings import num_exchanged, num_halo_rows
from shardwise.layouts.layout import PARTIAL_KINDS, Layout, Windows
from shardwise.rules.keyed_rows import copies_of

Primitive = Literal[
    "none",  # the same tensor
    "slice",  # keep the own slice of the whole
    "zero_pad",  # place the own slice in zeros
    "keep_one",  # the whole on coordinate 0, zeros elsewhere
    "all_gather",
    "reduce_scatter",
    "all_reduce",
    "all_to_all",
    "halo_exchange",  # from slices to windows: rows go to the devices whose windows they are in
    "halo_add",  # from windows to slices: rows go back to the device whose slice they are in, and are added there
    "take_window",  # the same two where every device has all rows of its window
    "add_window",
    "row_exchange",  # from slices to the rows of keys that a device owns, or back: as many rows as the keys say
]

COLLECTIVES = frozenset(
    {"all_gather", "reduce_scatter", "all_reduce", "all_to_all", "halo_exchange", "halo_add", "row_exchange"}
)


@dataclass(frozen=True, slots=True)
class Cell:
    """One entry of the table: the primitive applied to the value, and the one applied to the cotangent."""

    forward: Primitive
    backward: Primitive


CELLS: dict[tuple[str, str], Cell] = {
    ("S", "S"): Cell("all_to_all", "all_to_all"),
    ("S", "I"): Cell("all_gather", "slice"),
    ("S", "R"): Cell("all_gather", "reduce_scatter"),
    ("S", "P"): Cell("zero_pad", "slice"),
    ("I", "S"): Cell("slice", "all_gather"),
    ("I", "I"): Cell("none", "none"),
    ("I", "R"): Cell("none", "all_reduce"),
    ("I", "P"): Cell("keep_one", "none"),
    ("R", "S"): Cell("slice", "zero_pad"),
    ("R", "I"): Cell("none", "keep_one"),
    ("R", "R"): Cell("none", "none"),
    ("R", "P"): Cell("keep_one", "keep_one"),
    ("P", "S"): Cell("reduce_scatter", "all_gather"),
    ("P", "I"): Cell("all_reduce", "none"),
    ("P", "R"): Cell("all_reduce", "all_reduce"),
    ("P", "P"): Cell("none", "none"),
}

# From slices to windows, and from the whole (replicated, or without gradient) to windows.
WINDOW_CELLS = {"halo": Cell("halo_exchange", "halo_add"), "local": Cell("take_window", "add_window")}
# From slices of the rows to keyed rows, and back.
KEYED_CELL = Cell("row_exchange", "row_exchange")


@dataclass(frozen=True)
class Move:
    """One step of a redistribution: one collective over the product of sub-axes ``axes`` (in device order), all of
    which go from one state to another.

    Axes may leave and arrive at several atoms at once. From sharded to sharded, ``axes`` are those along which the
    devices exchange anything, the order of axes on an atom may change, and the atoms of a dim need not nest.
    The windows of the target that the source lacks (one at most) are cut; those of the source that the target lacks,
    which tile their atom, are *closed*: cutting them, backwards.
    """

    source: Layout
    target: Layout
    axes: tuple[str, ...]

    @cached_property
    def cell(self) -> tuple[str, str]:
        first = self.axes[0]
        return self.source.state_of[first], self.target.state_of[first]

    @property
    def reduction(self) -> str:
        """``sum``, or the kind of a gradient-free partial value."""
        return PARTIAL_KINDS.get(self.cell[0], "sum")

    @cached_property
    def cut(self) -> Windows | None:
        """The windows that the move makes."""
        if not self.target.windows or self.target.windows == self.source.windows or self.reverse is not None:
            return None
        (added,) = [window for window in self.target.windows if window not in self.source.windows]
        return added

    @cached_property
    def reverse(self) -> Move | None:
        """Return the move that cuts the windows that this move closes, or None."""
        closes = len(self.source.windows) > len(self.target.windows)
        return Move(self.target, self.source, self.axes) if closes else None

    @cached_property
    def is_keyed(self) -> bool:
        """Return whether rows go to the devices that own their keys, or return from there."""
        return any(map(copies_of, self.cell))

    @property
    def entry(self) -> Cell:  # looked up every time: tests break the tables
        if self.is_keyed:
            return KEYED_CELL
        if self.reverse is not None:
            return Cell(self.reverse.entry.backward, self.reverse.entry.forward)
        if self.cut is not None:
            return WINDOW_CELLS["halo" if any(num_halo_rows(self.source, self.cut)) else "local"]
        source, target = self.cell
        return CELLS["P" if source in PARTIAL_KINDS else source, "P" if target in PARTIAL_KINDS else target]

    def primitive(self, backward: bool) -> Primitive:
        return self.entry.backward if backward else self.entry.forward

    def ends(self, backward: bool) -> tuple[Layout, Layout]:
        """Return the layouts before and after the move, in one direction."""
        return (self.target, self.source) if backward else (self.source, self.target)

    def num_sent(self, backward: bool = False) -> float:
        """Elements that the busiest rank sends: the bandwidth-optimal (ring, pairwise) algorithm of each collective."""
        if self.reverse is not None:
            return self.reverse.num_sent(not backward)
        primitive, (before, after) = self.primitive(backward), self.ends(backward)
        if primitive == "all_to_all":
            return num_exchanged(before, after)[0]
        if primitive == "row_exchange":
            devices = self.source.mesh.size_of(self.axes)
            return num_sent(primitive, devices, self.keyed_end.max_local_numel, 0)
        if self.cut is not None:
            return self.num_halo(backward)
        n = self.source.mesh.size_of(self.axes)
        return num_sent(primitive, n, before.max_local_numel, after.max_local_numel)

    @property
    def keyed_end(self) -> Layout:
        return self.target if copies_of(self.cell[1]) else self.source

    def num_halo(self, backward: bool) -> int:
        """Elements that the busiest rank sends when windows are cut, or added back."""
        assert self.cut is not None, "a move that cuts windows"
        rows = num_halo_rows(self.source, self.cut)[backward]
        return rows * self.target.max_local_numel // self.cut.largest if rows else 0


def num_sent(primitive: Primitive, num_devices: int, before: float, after: float) -> float:
    """Elements that the busiest of ``num_devices`` ranks sends in a collective other than all-to-all, whose largest
    local tensor has ``before`` elements at first and ``after`` in the end."""
    if primitive == "all_gather":
        return (num_devices - 1) * before
    if primitive == "reduce_scatter":
        return (num_devices - 1) * after
    if primitive == "all_reduce":
        return 2 * (num_devices - 1) * before / num_devices
    if primitive == "row_exchange":  # keys of all devices equally often
        return (num_devices - 1) * before / num_devices
    return 0


@dataclass(frozen=True, slots=True)
class Collective:
    """A collective as the plan lists it and the virtual cluster records it: what one rank takes part in.

    ``kind``: that of the table, or ``collective_permute``, an all-to-all in which every rank sends to one rank at most.
    ``num_bytes``: bytes of the whole message on the busiest rank (the gathered tensor of an all_gather, the input of
    the others). A ``halo_exchange`` (in either direction) counts the rows that leave the rank. A ``row_exchange``
    counts as many rows for all ranks: how many they are depends on data.
    """

    kind: str
    axes: tuple[str, ...]
    num_bytes: int


def collective_of(move: Move, itemsize: int, *, backward: bool = False) -> Collective | None:
    """Return the collective that a move performs in forward or backward, or None."""
    return _collective(move, move.entry, itemsize, backward)


@lru_cache(maxsize=8192)
def _collective(move: Move, entry: Cell, itemsize: int, backward: bool) -> Collective | None:
    if move.reverse is not None:
        return collective_of(move.reverse, itemsize, backward=not backward)
    primitive = entry.backward if backward else entry.forward
    if primitive not in COLLECTIVES:
        return None
    if move.cut is not None:
        return Collective("halo_exchange", move.axes, move.num_halo(backward) * itemsize)
    before, after = move.ends(backward)
    if move.is_keyed:
        return Collective("row_exchange", move.axes, move.keyed_end.max_local_numel * itemsize)
    whole = after if primitive == "all_gather" else before
    kind: str = primitive
    if primitive == "all_to_all" and num_exchanged(before, after)[1]:
        kind = "collective_permute"
    return Collective(kind, move.axes, whole.max_local_numel * itemsize)
