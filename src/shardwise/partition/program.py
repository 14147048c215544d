"""The program of one rank, as data: local operator calls with local sizes, and conversions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any

import torch

from shardwise.graph.ir import Arg, Op, Ref, map_refs, refs
from shardwise.layouts.layout import Layout
from shardwise.layouts.mesh import Mesh
from shardwise.layouts.strategy import Strategy, piece_of
from shardwise.partition.buckets import Bucket
from shardwise.partition.spmd import Spmd, conversions_of
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
        piece = Piece(factor.size, *piece_of(strategy, factor.name, factor.size, index, count))
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


def busiest_rank(spmd: Spmd) -> int:
    """The rank that holds most: the last, whose pieces of uneven sizes are the largest, unless parameters are split by
    hand; then the one with most elements of all sources."""
    num_devices = spmd.mesh.num_devices
    layouts = [spmd.layouts[source.value] for source in spmd.graph.sources]
    if not any(layout.windows for layout in layouts):
        return num_devices - 1
    return max(range(num_devices), key=lambda rank: (sum(local_numel(layout, rank) for layout in layouts), rank))


# Operators whose gradients, of their first two operands, are new memory (that of a bias may be the cotangent itself).
_NEW_GRADIENTS = frozenset(
    {
        torch.ops.aten.linear.default,
        torch.ops.aten.matmul.default,
        torch.ops.aten.mm.default,
        torch.ops.aten.bmm.default,
        torch.ops.aten.convolution.default,
        torch.ops.aten.embedding.default,
    }
)
# Operators whose result is new memory that their backward does not need.
_NEW_RESULTS = _NEW_GRADIENTS | {torch.ops.aten.add.Tensor, torch.ops.aten.sub.Tensor}


def overwritable(program: Program) -> dict[str, tuple[bool, bool]]:
    """Result of a conversion -> whether its first collective may overwrite the value (in forward) and the cotangent (in
    backward), since nothing else can see that memory."""
    made_by: dict[str, Any] = {}
    uses: Counter[str] = Counter()
    consumers: dict[str, list[Any]] = {}
    for instruction in program.instructions:
        if not isinstance(instruction, LocalOp):
            for conversion in conversions_of(instruction):
                uses[conversion.value] += 1
                consumers.setdefault(conversion.value, []).append(None)
            continue
        made_by.update(dict.fromkeys(instruction.results, instruction.call.target))
        names = refs((instruction.call.args, tuple(value for _, value in instruction.call.kwargs)))
        for position, name in enumerate(names):
            uses[name] += 1
            consumers.setdefault(name, []).append(instruction.call.target if position < 2 else None)
    spmd = program.spmd
    kept = set(refs(spmd.outputs)) | {spmd.loss} | {value for _, value in spmd.mutations}
    return {
        c.result: (
            made_by.get(c.value) in _NEW_RESULTS and uses[c.value] == 1 and c.value not in kept,
            c.result not in kept and all(target in _NEW_GRADIENTS for target in consumers.get(c.result, [None])),
        )
        for c in spmd.conversions
    }
