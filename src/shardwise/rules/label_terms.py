"""What a rank's part of the classes contributes to a cross entropy, in one operator with a lean backward.

Written with ordinary operators, the loss over split classes makes half a dozen tensors as large as the scores, in
forward and backward together; this makes two, and works in them.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from shardwise.graph.head_loss import check_labels, checked_labels
from shardwise.graph.ir import Graph, Op
from shardwise.graph.operator_library import kernel
from shardwise.rules.arguments import at_pieces
from shardwise.rules.binding import RuleTable, build, dim_names, single
from shardwise.rules.local_kernels import local_index
from shardwise.rules.rule import OpRule


@kernel(lambda scores, maximum, index, *rest: (scores.new_empty(index.shape), scores.new_empty(index.shape)))
def label_terms(
    scores: Tensor, maximum: Tensor, index: Tensor, dim: int, *atoms: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """(sum of ``exp(scores - maximum)`` over ``dim``, entry ``index`` of ``scores - maximum`` along ``dim``).

    ``scores`` [..., C, ...] floating point; ``maximum`` likewise with 1 in place of C, a constant; ``index`` without
    that dim, int64, global: ``atoms`` say which classes ``scores`` has
    (``rules.local_kernels``), and an entry that it does not have is 0. Both results have the shape of ``index``.
    """
    check_labels(index, prod(atoms[0]))
    total = (scores - maximum).exp_().sum(dim)
    if scores.shape[dim] == 0:
        return total, torch.zeros_like(total)
    local, mine = local_index(index, *atoms)
    picked = scores.gather(dim, local.unsqueeze(dim)) - maximum
    return total, torch.where(mine, picked.squeeze(dim), 0)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    scores, maximum, index, *ctx.numbers = inputs
    ctx.save_for_backward(scores, maximum, index)


def _backward(ctx: Any, of_total: Tensor, of_picked: Tensor) -> tuple[Tensor | None, ...]:
    scores, maximum, index = ctx.saved_tensors
    dim, *part = ctx.numbers
    gradient = (scores - maximum).exp_().mul_(of_total.unsqueeze(dim))
    if scores.shape[dim]:
        local, mine = local_index(index, *part)
        gradient.scatter_add_(dim, local.unsqueeze(dim), torch.where(mine, of_picked, 0).unsqueeze(dim))
    return gradient, *[None] * 6


label_terms.register_autograd(_backward, setup_context=_setup)


def checked_labels_rule(op: Op, graph: Graph) -> OpRule:
    """Parallel in every dim."""
    dims = single(dim_names(len(graph.by_name[op.operands[0]].shape)))
    return build(op, graph, [dims], [dims])


def label_terms_rule(op: Op, graph: Graph) -> OpRule:
    """Parallel in every dim but that of the classes, over which both results are sums."""
    dim = op.args[3]
    assert isinstance(dim, int), "the dim is a number"
    rank = len(graph.by_name[op.operands[0]].shape)
    names = ["c" if d == dim else name for d, name in enumerate(dim_names(rank))]
    rest = single([name for name in names if name != "c"])
    maximum = tuple(() if name == "c" else (name,) for name in names)
    operands = [single(names), maximum, rest]
    return build(op, graph, operands, [rest, rest], kinds={"c": "sum"}, localize=at_pieces("c"))


LABEL_TERMS: RuleTable = {label_terms._opoverload: label_terms_rule, checked_labels._opoverload: checked_labels_rule}
