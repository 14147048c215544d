"""What an operator's rule says, once the sizes are known.

A rule describes an operator by its *factors*, the dimensions of its iteration space. A matrix product
``m k, k n -> m n`` has three: m and n appear in the result, k is summed over. Where a factor may be split follows:

* an operand that has a split factor is sharded on it, an operand that lacks it is replicated;
* a result that has it is sharded; a result that lacks it is partial, with the factor's reduction.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from inspect import signature
from typing import Any, Literal

from torch._ops import OpOverload

from shardwise.graph.ir import Arg, Op

FactorKind = Literal[
    "parallel",  # in every result: splitting it splits the work
    "sum",  # in no result: each part computes a summand
    "max",  # in no result, combined by maximum; gradient-free values only (inside lowerings)
    "min",
    "any",
    "lowered",  # may be split, by replacing the operator with its lowering
    "whole",  # may not be split
]


def base_name(factor: str) -> str:
    """Return the undivided factor that a part belongs to: ``n.1`` -> ``n``."""
    return factor.partition(".")[0]


@dataclass(frozen=True, slots=True)
class Factor:
    """A dimension of the iteration space: its name in the rule, its size and what splitting it means."""

    name: str
    size: int
    kind: FactorKind = "parallel"


# The factors of one tensor, per dim, major first: ``(("m",), ("h", "d"))`` is a matrix whose columns are h*d. A dim
# of size 1 that is broadcast has no factor: ``()``.
Dims = tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True)
class Piece:
    """The part of one factor (or of one atom of it) that a rank holds: ``length`` of ``size``, from ``offset``."""

    size: int
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class LocalContext:
    """What ``localize`` may know: the local shapes on this rank, and the rank's part of every factor.

    ``pieces[factor]`` lists the factor's atoms, major first: one Piece unless the graph made the factor a product.
    """

    operand_shapes: tuple[tuple[int, ...], ...]
    result_shapes: tuple[tuple[int, ...], ...]
    pieces: dict[str, tuple[Piece, ...]]

    def is_split(self, factor: str) -> bool:
        return any(piece.length != piece.size for piece in self.pieces[factor])


@dataclass(frozen=True, slots=True)
class LocalOpCall:
    """A local operator call: what a rank executes in place of the op. ``target`` is an OpOverload (ATen or
    ``shardwise::``)."""

    target: OpOverload
    args: tuple[Arg, ...]
    kwargs: tuple[tuple[str, Arg], ...] = ()


# Rows [start, stop) of a factor, in the order in which a rank holds them; they do not overlap.
Ranges = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Window:
    """An operand's factor that is read through windows: ``ranges(offset, length)`` are the rows of it that a part of
    the result's factor ``factor`` needs (a convolution's output rows: their input rows and a margin). None for a part
    of length 0."""

    factor: str
    ranges: Callable[[int, int], Ranges]


Localize = Callable[[Op, LocalContext], LocalOpCall]
# A lowering is an ordinary function over tensors, called like the operator (same args and kwargs), that computes the
# same result with operators that all have rules. It is traced with fake tensors; its operators are then split like any
# others.
# One that has a parameter ``runs`` gets the split of the first operand: per dim the length of the contiguous runs
# that every rank holds (the whole dim where it is not split, or unevenly). It may work on runs first and on what they
# gave afterwards: ``x.unflatten(dim, (n // run, run))`` splits what is in one rank from what is not.
Lowering = Callable[..., Any]


def takes_runs(lowering: Lowering) -> bool:
    """Return whether the lowering wants to know the runs."""
    return "runs" in signature(lowering).parameters


@dataclass(frozen=True, slots=True)
class OpRule:
    """The rule of one op of a graph.

    ``factors`` in the order in which split counts are mapped to mesh axes (order of first appearance in operands, then
    results). ``operands`` follow ``op.operands``; ``results`` follow ``op.results``.
    ``linear``: groups of operand positions; the operator is jointly linear in each group while the others are held
    fixed (add: ``((0, 1),)``; mul and matmul: ``((0,), (1,))``; cast, view: ``((0,),)``), so partial sums may pass
    through. ``localize``: the call with the sizes that a rank needs (None: the same arguments work on shards).
    ``lowering``: the program that replaces the operator when a ``lowered`` factor is split.
    ``windows``: factors of operands that are whole by themselves, but of which a part of a parallel factor of the
    result needs a window only; both by the names that they had before they were divided into atoms.
    ``variants``: other rules of the operator, which hold where a strategy names the factor that only they have.
    ``kernel``: what a rank calls in place of a local call, with the same result (None: that call itself).
    """

    factors: tuple[Factor, ...]
    operands: tuple[Dims, ...]
    results: tuple[Dims, ...]
    linear: tuple[tuple[int, ...], ...] = ()
    localize: Localize | None = None
    lowering: Lowering | None = None
    windows: tuple[tuple[str, Window], ...] = ()
    variants: tuple[tuple[str, OpRule], ...] = ()
    kernel: Callable[[LocalOpCall], LocalOpCall] | None = None

    def factor(self, name: str) -> Factor:
        for factor in self.factors:
            if factor.name == name:
                return factor
        raise KeyError(name)

    def parts_of(self, base: str) -> tuple[Factor, ...]:
        """Return the atoms of an undivided factor, major first."""
        return tuple(factor for factor in self.factors if base_name(factor.name) == base)

    @property
    def is_product(self) -> bool:
        """Return whether it sums over a factor that operands have in common: matmul, convolution, attention."""
        summed = {name for dims in self.operands for dim in dims for name in dim}
        summed -= {name for dims in self.results for dim in dims for name in dim}
        return any(sum(any(name in dim for dim in dims) for dims in self.operands) > 1 for name in summed)

    def with_kinds(self, kinds: dict[str, FactorKind]) -> OpRule:
        """Return the rule with the kinds of some factors replaced."""
        factors = tuple(replace(f, kind=kinds.get(f.name, f.kind)) for f in self.factors)
        return replace(self, factors=factors)

    def __str__(self) -> str:
        def dims(tensor: Dims) -> str:
            return " ".join(d[0] if len(d) == 1 else "(" + " ".join(d) + ")" if d else "1" for d in tensor)

        seen = {name: f"window({window.factor})" for name, window in self.windows}
        kinds = [f"{f.name}:{seen.get(base_name(f.name), f.kind)}" for f in self.factors if f.kind != "parallel"]
        text = ", ".join(map(dims, self.operands)) + " -> " + ", ".join(map(dims, self.results))
        return text + ("  " + " ".join(kinds) if kinds else "")
