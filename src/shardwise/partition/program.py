"""The program of one rank, as data: local operator calls with local sizes, and conversions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import prod

from shardwise.graph.ir import Arg, Op, Ref, map_refs
from shardwise.layouts.layout import Layout
from shardwise.layouts.mesh import Mesh
from shardwise.layouts.strategy import Strategy
from shardwise.partition.buckets import Bucket
from shardwise.partition.spmd import Spmd
from shardwise.partition.steps import Conversion, Step
from shardwise.rules.rule import Call, LocalContext, OpRule, Piece, base_name


@dataclass(frozen=True, slots=True)
class LocalOp:
    """A local call. ``op``: name and ``source``: line of the operator it belongs to."""

    op: str
    source: str
    call: Call
    results: tuple[str, ...]


@dataclass(frozen=True)
class Program:
    """What one rank executes, in order. Names are those of the Spmd program."""

    rank: int
    spmd: Spmd
    instructions: tuple[LocalOp | Conversion | Bucket, ...]


def localize(spmd: Spmd, rank: int) -> Program:
    """The program of a rank."""
    coordinates = spmd.mesh.coordinates(rank)
    instructions: list[LocalOp | Conversion | Bucket] = []
    for step in spmd.steps:
        instructions.append(_local_op(step, spmd.mesh, coordinates) if isinstance(step, Step) else step)
    return Program(rank, spmd, tuple(instructions))


def _local_op(step: Step, mesh: Mesh, coordinates: Mapping[str, int]) -> LocalOp:
    op, rule, strategy = step.placed.op, step.placed.rule, step.placed.strategy
    if rule.localize is None:
        call = Call(op.target, op.args, op.kwargs)
    else:
        context = LocalContext(
            tuple(_local_shape(layout, tuple(coordinates.items())) for layout in step.operand_layouts),
            tuple(_local_shape(layout, tuple(coordinates.items())) for layout in step.result_layouts),
            factor_pieces(rule, strategy, mesh, coordinates),
        )
        call = rule.localize(op, context)
    renamed = _with_operands(op, call, step.operands)
    return LocalOp(op.name, op.source, renamed, op.results)


@lru_cache(maxsize=100_000)
def _local_shape(layout: Layout, coordinates: tuple[tuple[str, int], ...]) -> tuple[int, ...]:
    return layout.local_shape(dict(coordinates))


def factor_pieces(
    rule: OpRule, strategy: Strategy, mesh: Mesh, coordinates: Mapping[str, int]
) -> dict[str, tuple[Piece, ...]]:
    """The part of every (undivided) factor that the rank at ``coordinates`` works on."""
    found: dict[str, list[Piece]] = {}
    for factor in rule.factors:
        axes = strategy.axes_of.get(factor.name, ())
        count, index = 1, 0
        for axis in axes:
            count *= mesh.sizes[axis]
            index = index * mesh.sizes[axis] + coordinates[axis]
        start = index * factor.size // count
        piece = Piece(factor.size, start, (index + 1) * factor.size // count - start)
        found.setdefault(base_name(factor.name), []).append(piece)
    return {name: tuple(pieces) for name, pieces in found.items()}


def _with_operands(op: Op, call: Call, operands: tuple[str, ...]) -> Call:
    """The call with every operand under the name of its conversion. An operand that occurs twice may be in two layouts:
    the references are replaced in order of occurrence where the call keeps them all, by name otherwise."""
    occurrences = list(op.operands)
    names = list(operands)

    def rename(name: str) -> Arg:
        position = occurrences.index(name)
        result = names[position]
        if occurrences.count(name) > 1:
            del occurrences[position], names[position]
        return Ref(result)

    args = tuple(map_refs(arg, rename) for arg in call.args)
    return Call(call.target, args, tuple((key, map_refs(arg, rename)) for key, arg in call.kwargs))


def local_numel(layout: Layout, rank: int) -> int:
    """Elements that a rank holds of a tensor."""
    return prod(layout.local_shape(layout.mesh.coordinates(rank)))
