"""The local program of one rank, as data: operator calls with local sizes, and conversions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from typing import ClassVar

from shardwise.graph.ir import refs, rename_operands
from shardwise.layouts.choice import BY_KEY
from shardwise.layouts.layout import Layout
from shardwise.layouts.mesh import Mesh
from shardwise.layouts.strategy import Strategy, piece_of
from shardwise.programs.buckets import Bucket
from shardwise.programs.spmd import SpmdProgram
from shardwise.programs.spmd_steps import Conversion, OpStep
from shardwise.rules.rule import LocalContext, LocalOpCall, OpRule, Piece, base_name


@dataclass(frozen=True, slots=True)
class LocalOp:
    """A local call. ``op``, ``source``: name and source line of its operator."""

    op: str
    source: str
    call: LocalOpCall
    results: tuple[str, ...]
    conversions: ClassVar[tuple[Conversion, ...]] = ()

    @property
    def operands(self) -> tuple[str, ...]:
        return tuple(refs((self.call.args, self.call.kwargs)))


@dataclass(frozen=True)
class LocalProgram:
    """The instructions of one rank, in order. Names are those of the Spmd program."""

    rank: int
    spmd: SpmdProgram
    instructions: tuple[LocalOp | Conversion | Bucket, ...]


def localize(spmd: SpmdProgram, rank: int) -> LocalProgram:
    """Return the local program of a rank."""
    mesh, coordinates = spmd.mesh, spmd.mesh.coordinates(rank)
    instructions = (_local_op(step, mesh, coordinates) if isinstance(step, OpStep) else step for step in spmd.steps)
    return LocalProgram(rank, spmd, tuple(instructions))


def _local_op(step: OpStep, mesh: Mesh, coordinates: Mapping[str, int]) -> LocalOp:
    op, rule, strategy = step.placed.op, step.placed.rule, step.placed.strategy
    if rule.localize is None:
        call = LocalOpCall(op.target, op.args, op.kwargs)
    else:
        shapes, results = (
            tuple(_local_shape(layout, tuple(coordinates.items())) for layout in layouts)
            for layouts in (step.operand_layouts, step.result_layouts)
        )
        call = rule.localize(op, LocalContext(shapes, results, factor_pieces(rule, strategy, mesh, coordinates)))
    if rule.kernel is not None:
        call = rule.kernel(call)
    foreign = {*refs((call.args, call.kwargs))}.difference(op.operands)
    assert not foreign, f"the local call of {op.name} reads {', '.join(sorted(foreign))}, no operands of it"
    return LocalOp(op.name, op.source, rename_operands(call, op.operands, step.operands), op.results)


@lru_cache(maxsize=100_000)
def _local_shape(layout: Layout, coordinates: tuple[tuple[str, int], ...]) -> tuple[int, ...]:
    return layout.local_shape(dict(coordinates))


def factor_pieces(
    rule: OpRule, strategy: Strategy, mesh: Mesh, coordinates: Mapping[str, int]
) -> dict[str, tuple[Piece, ...]]:
    """Return the piece of every (undivided) factor that the rank at ``coordinates`` computes."""
    pieces_of: dict[str, list[Piece]] = {}
    by_key = tuple(axis for axis in mesh.sub_axes if strategy.choice_of.get(axis) == BY_KEY)
    for factor in rule.factors:
        axes = strategy.axes_of.get(factor.name, ())
        owned = rule.keyed is not None and factor.name == rule.keyed.owned and by_key
        axes += by_key if owned else ()
        count, index = 1, 0
        for axis in axes:
            count *= mesh.sizes[axis]
            index = index * mesh.sizes[axis] + coordinates[axis]
        piece = Piece(factor.size, *piece_of(strategy, factor.name, factor.size, index, count))
        if owned:  # no row is of other devices' keys: the part is the whole, which costs.flops counts
            piece = replace(piece, size=piece.length)
        pieces_of.setdefault(base_name(factor.name), []).append(piece)
    return {name: tuple(pieces) for name, pieces in pieces_of.items()}


def busiest_rank(spmd: SpmdProgram) -> int:
    """Return the rank that holds the most: the last one, whose pieces of uneven splits are the largest. If parameters
    are split by hand, the one with the most elements of all sources."""
    num_devices = spmd.mesh.num_devices
    layouts = [spmd.layouts[source.value] for source in spmd.graph.sources]
    if not any(layout.windows for layout in layouts):
        return num_devices - 1

    def num_elements(rank: int) -> tuple[int, int]:
        coordinates = spmd.mesh.coordinates(rank)
        return sum(prod(layout.local_shape(coordinates)) for layout in layouts), rank

    return max(range(num_devices), key=num_elements)
