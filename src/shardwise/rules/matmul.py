"""Contractions: linear layers, matrix products of every rank, einsum."""

from __future__ import annotations

from dataclasses import replace

import torch

from shardwise.graph.einsum import DOTS, terms_of
from shardwise.graph.float8 import FLOAT8_LINEAR
from shardwise.graph.ir import Graph, Op
from shardwise.graph.schema import arguments, by_operator
from shardwise.rules.binding import RuleTable, build, dim_names, leading_names, rule, single
from shardwise.rules.elementwise import broadcast_dims
from shardwise.rules.rule import Dims, FactorKind, OpRule

aten = torch.ops.aten

_SUM: dict[str, FactorKind] = {"k": "sum"}
_BILINEAR = ((0,), (1,))


def linear_rule(op: Op, graph: Graph) -> OpRule | None:
    """``... m k, n k -> ... m n``. A bias is added apart in the normal form."""
    if len(op.operands) != 2:
        return None
    rank = len(graph.by_name[op.operands[0]].shape)
    names = (*leading_names(rank - 2), "m") if rank >= 2 else ()
    weight_rank = len(graph.by_name[op.operands[1]].shape)
    x = single([*names, "k"])
    weight = single(["n", "k"] if weight_rank == 2 else ["k"])
    result = single([*names, "n"] if weight_rank == 2 else names)
    return build(op, graph, [x, weight], [result], kinds=_SUM, linear=_BILINEAR)


def matmul_rule(op: Op, graph: Graph) -> OpRule:
    """torch.matmul: vectors, matrices, and batches that broadcast."""
    left, right = (graph.by_name[name].shape for name in op.operands)
    count = max(len(left), len(right)) - 2
    batch = leading_names(max(count, 0))
    left_matrix = single(["k"] if len(left) == 1 else ["m", "k"])
    right_matrix = single(["k"] if len(right) == 1 else ["k", "n"])
    result_shape = graph.by_name[op.results[0]].shape

    def batched(shape: tuple[int, ...], matrix: Dims) -> Dims:
        num_batch_dims = len(shape) - len(matrix)
        positions = range(len(batch) - num_batch_dims, len(batch))
        return tuple((batch[i],) if shape[i - positions.start] == result_shape[i] else () for i in positions) + matrix

    result = single(batch) + left_matrix[:-1] + (right_matrix[1:])
    return build(
        op, graph, [batched(left, left_matrix), batched(right, right_matrix)], [result], kinds=_SUM, linear=_BILINEAR
    )


def float8_linear_rule(op: Op, graph: Graph) -> OpRule:
    """``... m k, n k, -> ... m n`` with scales of whole tensors, or of rows ``... m``, ``n`` and ``k``. Rounding is not
    linear: no partial sum passes, and backward takes the largest cotangent of all ranks."""
    rank, by_rows = len(graph.by_name[op.operands[0]].shape), len(op.operands) == 5
    rows = (*leading_names(rank - 2), "m") if rank >= 2 else ()
    scales = [single(rows), single("n"), single("k")] if by_rows else [(), ()]
    operands, result = [single([*rows, "k"]), single("nk"), *scales], single([*rows, "n"])
    largest: tuple[int, ...] | None = tuple(range(len(rows) + 1))
    if by_rows:  # only those of x need rounded cotangents
        largest = (len(rows),) if graph.by_name[op.operands[0]].requires_grad else None
    return replace(build(op, graph, operands, [result], kinds=_SUM), largest=largest)


def cdist_rule(op: Op, graph: Graph) -> OpRule:
    """``... m d, ... n d -> ... m n``: batches broadcast, the coordinates are whole."""
    result = graph.by_name[op.results[0]].shape
    names = dim_names(len(result) - 2)
    batches = [broadcast_dims(graph.by_name[name].shape[:-2], result[:-2], names) for name in op.operands]
    operands = [(*batch, (row,), ("d",)) for batch, row in zip(batches, "mn", strict=True)]
    return build(op, graph, operands, [single([*names, "m", "n"])], kinds={"d": "whole"})


def einsum_rule(op: Op, graph: Graph) -> OpRule | None:
    """Any equation without a repeated index inside one operand; indices that are summed away are ``sum``."""
    terms, right = terms_of(str(arguments(op)["equation"]))
    shapes = [graph.by_name[name].shape for name in op.operands]
    widest = max(len(shape) - len(term.replace(DOTS, "")) for term, shape in zip(terms, shapes, strict=True))

    def names(term: str, rank: int) -> list[str]:
        """Dims of the ellipsis align at its end. ``b0``, ``b1`` ... are names that no letter has."""
        before, _, after = term.partition(DOTS)
        dots = range(widest - rank + len(before) + len(after), widest)
        return [*map(_letter, before), *(f"b{i}" for i in dots), *map(_letter, after)]

    spelled = [names(term, len(shape)) for term, shape in zip(terms, shapes, strict=True)]
    result = names(right, len(graph.by_name[op.results[0]].shape))
    if any(len(set(term)) != len(term) for term in spelled):
        return None
    sizes: dict[str, int] = {}
    for term, shape in zip(spelled, shapes, strict=True):
        for name, size in zip(term, shape, strict=True):
            sizes[name] = size if sizes.get(name, 1) == 1 else sizes[name]
    operands = [
        tuple((name,) if size == sizes[name] else () for name, size in zip(term, shape, strict=True))
        for term, shape in zip(spelled, shapes, strict=True)
    ]
    kinds: dict[str, FactorKind] = {name: "sum" for name in sizes if name not in result}
    multilinear = tuple((i,) for i in range(len(operands)))
    return build(op, graph, operands, [single(result)], kinds=kinds, linear=multilinear)


def _letter(letter: str) -> str:
    """Factor names are lower case: ``A`` becomes ``a_``."""
    return letter if letter.islower() else f"{letter.lower()}_"


MATMUL: RuleTable = by_operator(
    {
        "linear": linear_rule,
        "matmul": matmul_rule,
        "mm": rule("m k, k n -> m n", reduction=_SUM, linear=_BILINEAR),
        "bmm": rule("b m k, b k n -> b m n", reduction=_SUM, linear=_BILINEAR),
        "mv": rule("m k, k -> m", reduction=_SUM, linear=_BILINEAR),
        "dot vdot": rule("k, k -> ()", reduction=_SUM, linear=_BILINEAR),
        "cdist": cdist_rule,
        "outer": rule("m, n -> m n", linear=_BILINEAR),
        "einsum": einsum_rule,
    },
    {FLOAT8_LINEAR: float8_linear_rule},
)
