"""What an operator's rule says, once the sizes are known.

A rule describes an operator by its *factors*, the dimensions of its iteration space. A matrix product
``m k, k n -> m n`` has three: m and n appear in the result, k is summed over. Where a factor may be split follows:

* an operand that has a split factor is sharded on it, an operand that lacks it is replicated;
* a result that has it is sharded; a result that lacks it is partial, with the factor's reduction.

A rule does not say how much arithmetic an operator does. A product (matmul, convolution, attention) also needs its
FLOPs in ``costs/flops.py`` (``FLOPS``). Without them, its price does not scale its arithmetic with the split, and
``recompute="cheap"`` computes it again in backward.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from inspect import signature
from typing import Any, Literal

from torch._ops import OpOverload

from shardwise.graph.ir import Arg, Op
from shardwise.rules.keyed_rows import KeyedRows

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
    """The part of one factor (or of one atom of it) that a rank holds.

    It has the indices from ``offset`` to ``offset + length`` of ``size``.
    """

    size: int
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class LocalContext:
    """The local sizes that ``localize`` receives: the shapes on this rank, and the rank's part of every factor.

    ``pieces[factor]`` has one Piece per atom of the factor, major first. A factor has several atoms where the graph
    divides it (``n`` into ``n.0 n.1``), for example because a view splits the dim.
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


# Disjoint row ranges [start, stop) of a factor, in the order in which a rank holds them.
Ranges = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Window:
    """Describes which rows of an operand's factor a part of the result reads.

    In a convolution, output rows read their input rows and a halo on both sides.

    Attributes:
        factor: The result's factor that is split, such as the output rows.
        ranges: ``ranges(offset, length)`` returns the operand's rows that result indices ``offset`` to
            ``offset + length`` read. A part of length 0 reads no rows.
    """

    factor: str
    ranges: Callable[[int, int], Ranges]


Localize = Callable[[Op, LocalContext], LocalOpCall]
# A lowering is a function over tensors with the operator's args and kwargs. It computes the same result with operators
# that all have rules. It is traced with fake tensors, and its operators are then split like any others.
# A lowering with a parameter ``runs`` also receives, per dim of the first operand, the length of the contiguous runs
# that every rank holds. The length is the whole dim if the dim is not split, or split unevenly. Such a lowering can
# work within runs first, then over the results of the runs: ``x.unflatten(dim, (n // run, run))`` separates the two.
Lowering = Callable[..., Any]


def takes_runs(lowering: Lowering) -> bool:
    """Return whether the lowering has a parameter ``runs``."""
    return "runs" in signature(lowering).parameters


@dataclass(frozen=True, slots=True)
class OpRule:
    """The rule of one op of a graph.

    Attributes:
        factors: The dimensions of the iteration space, by first appearance in operands, then results. Split counts are
            mapped to mesh axes in this order.
        operands: The factors of each operand, per dim, in the order of ``op.operands``.
        results: The factors of each result, per dim, in the order of ``op.results``.
        linear: Groups of operand positions. The operator is jointly linear in each group while the other operands are
            fixed, so partial sums pass through. Add has ``((0, 1),)``, mul and matmul ``((0,), (1,))``, a cast or view
            ``((0,),)``.
        localize: Returns the call with a rank's sizes. None: the same arguments work on shards.
        lowering: The function that replaces the operator when a ``lowered`` factor is split.
        windows: Pairs (x, ``Window``). Factor x of an operand has kind ``whole``. But a rank with a part of the
            result's factor ``Window.factor`` reads only a window of x. Both names are those of undivided factors
            (``base_name``).
        variants: Pairs (factor, rule). A strategy that names the factor uses this rule (``user_choices.variant``).
        kernel: Replaces a rank's local call by another call with the same result. None: the local call runs.
        keyed: What it does with rows that follow keys. None: it cannot take them.
        largest: The dims of its result over which backward takes the largest cotangent of all ranks (``graph.float8``).
            Its backward is not linear, so cotangents must be whole: no axis is ``R``. None: it takes none.
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
    keyed: KeyedRows | None = None
    largest: tuple[int, ...] | None = None

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
        """Return whether it sums over a factor that several operands have: matmul, convolution, attention.

        ``SpmdProgram.place_of`` uses this. Prices and recomputation use ``costs.flops.FLOPS``, a list made by hand.
        """
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
