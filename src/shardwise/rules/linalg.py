"""Linear algebra on stacks of matrices: batch dims are parallel and broadcast, the dims of the matrices are whole."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shardwise.graph.ir import Graph, Op
from shardwise.graph.schema import arguments, by_operator
from shardwise.rules.arguments import broadcast_shape, normal_dim
from shardwise.rules.binding import RuleFunction, RuleTable, build, dim_names, single
from shardwise.rules.elementwise import broadcast_dims, pointwise_rule
from shardwise.rules.empty import zeros_if_empty
from shardwise.rules.rule import Dims, FactorKind, OpRule

aten = torch.ops.aten


def _batched(*ranks: int) -> RuleFunction:
    """A line of the table: the rank of the matrix, vector or scalar in every operand and result; operands that are
    optional come last, so that a call without them has fewer."""
    return lambda op, graph: batched_rule(op, graph, ranks[: len(op.operands)], ranks[-len(op.results) :])


def batched_rule(op: Op, graph: Graph, operands: Sequence[int], results: Sequence[int]) -> OpRule:
    """``operands``, ``results``: how many dims of each belong to its matrix. Results without batch dims are empty: what
    the arguments do not ask for."""
    shapes = [graph.by_name[name].shape for name in (*op.operands, *op.results)]
    ranks = [len(shape) - rank for shape, rank in zip(shapes, (*operands, *results), strict=True)]
    batch = broadcast_shape(*(shape[:rank] for shape, rank in zip(shapes[: len(op.operands)], ranks, strict=False)))
    kinds: dict[str, FactorKind] = {}

    def dims(index: int) -> Dims:
        shape = shapes[index]
        is_stack = index < len(op.operands) or shape[: ranks[index]] == batch
        rank = ranks[index] if is_stack else 0
        names = [f"x{index}_{dim}" for dim in range(len(shape) - rank)]
        kinds.update(dict.fromkeys(names, "whole"))
        return broadcast_dims(shape[:rank], batch, dim_names(len(batch))) + single(names)

    every = [dims(index) for index in range(len(shapes))]
    return build(op, graph, every[: len(op.operands)], every[len(op.operands) :], kinds=kinds)


def _solve(op: Op, graph: Graph) -> OpRule:
    """The right-hand side is a stack of vectors where it has the shape of the matrices without their last dim."""
    left, right = (graph.by_name[name].shape for name in op.operands)
    rank = 1 if len(right) == 1 or right == left[:-1] else 2
    return batched_rule(op, graph, (2, rank), (rank, 0)[: len(op.results)])


def _cross(op: Op, graph: Graph) -> OpRule:
    """Operands broadcast; the dim of the vectors is whole."""
    rule = pointwise_rule(op, graph, ((0,), (1,)))
    rank = len(graph.by_name[op.results[0]].shape)
    kinds: dict[str, FactorKind] = {dim_names(rank)[normal_dim(arguments(op)["dim"], rank)]: "whole"}
    return build(op, graph, rule.operands, rule.results, kinds=kinds, linear=((0,), (1,)))


LINALG: RuleTable = by_operator(
    {
        "cholesky cholesky_inverse inverse linalg_cholesky linalg_inv linalg_matrix_exp "
        "linalg_matrix_power linalg_pinv.atol_rtol_float linalg_pinv matrix_exp matrix_power pinverse": _batched(2, 2),
        "cholesky_solve linalg_qr linalg_solve_triangular qr": _batched(2, 2, 2),
        "det linalg_cond.p_str linalg_det linalg_matrix_rank.atol_rtol_float linalg_matrix_rank logdet": _batched(2, 0),
        "geqrf linalg_ldl_factor linalg_lu_factor": _batched(2, 2, 1),
        "linalg_cholesky_ex linalg_inv_ex": _batched(2, 2, 0),
        "linalg_cond": zeros_if_empty(_batched(2, 0)),
        "linalg_cross": _cross,
        "linalg_eig linalg_eigh linalg_householder_product orgqr": _batched(2, 1, 2),
        "linalg_eigvals linalg_eigvalsh linalg_svdvals": _batched(2, 1),
        "linalg_ldl_factor_ex linalg_lu_factor_ex _lu_with_info": _batched(2, 2, 1, 0),
        "linalg_ldl_solve linalg_lu_solve ormqr": _batched(2, 1, 2, 2),
        "linalg_lu triangular_solve": _batched(2, 2, 2, 2),
        "linalg_matrix_rank.atol_rtol_tensor": _batched(2, 0, 0, 0),
        "linalg_matrix_rank.tol_tensor linalg_slogdet slogdet": _batched(2, 0, 0),
        "linalg_pinv.atol_rtol_tensor": _batched(2, 0, 0, 2),
        "linalg_pinv.rcond_tensor": _batched(2, 0, 2),
        "linalg_solve linalg_solve_ex": _solve,
        "linalg_svd lu_solve svd": _batched(2, 2, 1, 2),
        "lu_unpack": _batched(2, 1, 2, 2, 2),
    }
)
