"""What an operator does along one axis of a mesh, and in which layouts its tensors are then.

A choice is made for every operator and every sub-axis: the devices along the axis *split* a factor, *repeat* the work,
or *pass* a partial sum through. It says where each operand and each result is on that axis (``ShardPositions``): in a
state, or split at a place. Where a tensor is on all axes is its layout (``layout_of``). Strategies, propagation and the
domains of the search all ask this file: there is no other way from a choice to a layout.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Literal, NamedTuple

from shardwise.errors import LayoutError
from shardwise.layouts.layout import PARTIAL_KINDS, Atom, Layout
from shardwise.layouts.mesh import Mesh
from shardwise.rules.keyed_rows import KeyedRows, copies_of
from shardwise.rules.rule import Dims, FactorKind, OpRule

# The state of a result that lacks a factor which is split.
REDUCTION_STATES = {kind: state for state, kind in PARTIAL_KINDS.items()}


@dataclass(frozen=True, slots=True)
class Split:
    """The devices along the axis have different parts of a factor."""

    factor: str

    def __str__(self) -> str:
        return self.factor


@dataclass(frozen=True, slots=True)
class Repeat:
    """The devices along the axis do the same work, on what they all have: for consumers that do the same work too
    (``I``), or different work (``R``)."""

    state: Literal["I", "R"]

    def __str__(self) -> str:
        return self.state


@dataclass(frozen=True, slots=True)
class PassSum:
    """A partial sum passes through the operator, which is linear in the operands of a ``group`` of its rule."""

    group: int

    def __str__(self) -> str:
        return f"P{self.group or ''}"


@dataclass(frozen=True, slots=True)
class ByKey:
    """The devices along the axis have the rows whose keys they own: tokens at their experts."""

    def __str__(self) -> str:
        return "K"


AxisChoice = Split | Repeat | PassSum | ByKey
# Operator -> sub-axis -> its choice.
Choices = dict[str, dict[str, AxisChoice]]

INVARIANT, REPLICATED, BY_KEY = Repeat("I"), Repeat("R"), ByKey()


def splits_owners(choice: AxisChoice, rule: OpRule) -> bool:
    """Return whether a choice splits the owners of keys that rows could follow: gathered rows, or travelling ones."""
    return rule.keyed is not None and isinstance(choice, Split) and choice.factor == rule.keyed.owned


def parse_choice(word: str) -> AxisChoice:
    """``I``, ``R``, ``K``, ``P`` or ``P1`` (the second group), or a factor, which is written in lower case."""
    states: dict[str, AxisChoice] = {"I": INVARIANT, "R": REPLICATED, "K": BY_KEY}
    if word in states:
        return states[word]
    group = re.fullmatch(r"P([0-9]{0,4})", word)
    return PassSum(int(group.group(1) or 0)) if group else Split(word)


class ShardPosition(NamedTuple):
    """Where an axis splits a tensor: the dim, the stride of the atom in the dim, and its size."""

    dim: int
    stride: int
    size: int

    @staticmethod
    def of(dim: int, sizes: Sequence[int], index: int) -> ShardPosition:
        """Return the position of an atom of a dim, whose atoms have these sizes. Empty atoms count as one in strides,
        so that their neighbours stay distinct."""
        return ShardPosition(dim, prod(max(size, 1) for size in sizes[index + 1 :]), sizes[index])


# Where a tensor is on one axis: "I", "R", "P" (or another partial kind), "K1" (or another keyed state), or the place
# that the axis splits.
Where = str | ShardPosition


@dataclass(frozen=True, slots=True)
class ShardPositions:
    """Where the tensors of an operator are on an axis, for every choice. ``operands``, ``results``: of each tensor,
    factor -> its place."""

    operands: tuple[Mapping[str, ShardPosition], ...]
    results: tuple[Mapping[str, ShardPosition], ...]
    linear: tuple[tuple[int, ...], ...]
    kinds: Mapping[str, FactorKind]
    keyed: KeyedRows | None = None

    @staticmethod
    def of(rule: OpRule) -> ShardPositions:
        """Those of a rule. Who splits a result splits what it reads through windows in the same place."""
        return _places_of(
            OpRule(rule.factors, rule.operands, rule.results, rule.linear, windows=rule.windows, keyed=rule.keyed)
        )

    def operand(self, position: int, choice: AxisChoice) -> Where:
        """Return the placement required of an operand."""
        if isinstance(choice, Split):
            return self.operands[position].get(choice.factor, "R")
        if isinstance(choice, Repeat):
            return choice.state
        if isinstance(choice, ByKey):
            assert self.keyed is not None, "the operator takes keyed rows"
            where = self.keyed.operands[position]
            return self.operands[position].get(where, where)
        return "P" if position in self.linear[choice.group] else "R"

    def result(self, position: int, choice: AxisChoice) -> Where:
        """Return the placement of a result."""
        if isinstance(choice, Split):
            place = self.results[position].get(choice.factor)
            return REDUCTION_STATES.get(self.kinds[choice.factor], "I") if place is None else place
        if isinstance(choice, ByKey):
            assert self.keyed is not None, "the operator takes keyed rows"
            return self.keyed.results[position]
        return choice.state if isinstance(choice, Repeat) else "P"

    def choice_of_operand(self, position: int, where: Where) -> AxisChoice | None:
        """Return the choice that wants an operand there; None if there is none."""
        if isinstance(where, ShardPosition):
            return _split_at(self.operands[position], where)
        if where in ("I", "R"):
            return INVARIANT if where == "I" else REPLICATED
        if copies_of(where):
            return BY_KEY if self.keyed is not None and self.keyed.operands[position] == where else None
        return next((PassSum(i) for i, group in enumerate(self.linear) if where == "P" and position in group), None)

    def split_of_result(self, position: int, place: ShardPosition) -> Split | None:
        """Return the split that leaves a result split at a place; None if there is none."""
        return _split_at(self.results[position], place)


@lru_cache(maxsize=4096)
def _places_of(rule: OpRule) -> ShardPositions:
    sizes = {factor.name: factor.size for factor in rule.factors}
    operands = tuple(_places(dims, sizes) for dims in rule.operands)
    for base, window in rule.windows:
        parts, through = rule.parts_of(base), rule.parts_of(window.factor)[0].name
        for places in operands:
            if parts[0].name in places and all(part.size for part in parts):
                places[through] = places[parts[0].name]
    kinds = {factor.name: factor.kind for factor in rule.factors}
    results = tuple(_places(dims, sizes) for dims in rule.results)
    return ShardPositions(operands, results, rule.linear, kinds, rule.keyed)


def _places(dims: Dims, sizes: Mapping[str, int]) -> dict[str, ShardPosition]:
    places: dict[str, ShardPosition] = {}
    for dim, factors in enumerate(dims):
        of_dim = [sizes[factor] for factor in factors]
        places |= {factor: ShardPosition.of(dim, of_dim, i) for i, factor in enumerate(factors)}
    return places


def _split_at(places: Mapping[str, ShardPosition], place: ShardPosition) -> Split | None:
    return next((Split(factor) for factor, other in places.items() if other == place), None)


def layout_of(where: Mapping[str, Where], atoms: tuple[tuple[int, ...], ...], mesh: Mesh) -> Layout:
    """Return the layout over the given atoms that has the states in ``where`` (invariant on axes not named). Axes that
    share a position are major first, in the order of ``where``. Raises LayoutError for a position that is no atom."""
    axes: dict[tuple[int, int], list[str]] = {}
    states: list[tuple[str, str]] = []
    for axis, at in where.items():
        if isinstance(at, ShardPosition):
            places = (
                i for i in reversed(range(len(atoms[at.dim]))) if ShardPosition.of(at.dim, atoms[at.dim], i) == at
            )
            atom = next(places, None)
            if atom is None:
                what = f"dim {at.dim} of {atoms} has no atom of size {at.size} with stride {at.stride}"
                raise LayoutError(what)
            axes.setdefault((at.dim, atom), []).append(axis)
        elif at != "I":
            states.append((axis, at))
    states.sort(key=lambda item: mesh.order[item[0]])
    dims = tuple(
        tuple(Atom(size, tuple(axes.get((d, i), ()))) for i, size in enumerate(sizes)) for d, sizes in enumerate(atoms)
    )
    return Layout(mesh, dims, tuple(states))


def where_of(layout: Layout) -> dict[str, Where]:
    """Invert ``layout_of``: sub-axis -> state or place; those that share a place are major first."""
    where: dict[str, Where] = {}
    for axis, (dim, atom) in layout.positions.items():
        where[axis] = ShardPosition.of(dim, layout.atoms[dim], atom)
    return where | {axis: state for axis, state in layout.state_of.items() if axis not in where}
