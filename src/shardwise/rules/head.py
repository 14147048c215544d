"""Rules of a head fused with its cross entropy (``graph/head_loss.py``)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shardwise.graph.head_loss import HEAD_LOSS, HEAD_TERMS, head_loss
from shardwise.graph.ir import Graph, Op
from shardwise.rules.arguments import at_pieces
from shardwise.rules.binding import RuleTable, build, leading_names, single
from shardwise.rules.lowerings.losses import NONE, cross_entropy_loss
from shardwise.rules.rule import FactorKind, OpRule


def _over_split_classes(
    weight: Tensor, x: Tensor, target: Tensor, ignore_index: int, label_smoothing: float, runs: Sequence[int]
) -> Tensor:
    """Return ``head_loss`` where ranks hold runs of equally many classes; else the loss of logits, which may be split
    unevenly."""
    if runs[0] != weight.shape[0]:
        return head_loss(weight, x, target, ignore_index, label_smoothing, weight.shape[0] // runs[0])
    scores = torch.nn.functional.linear(x, weight).movedim(-1, min(x.dim() - 1, 1))
    return cross_entropy_loss(scores, target, None, NONE, ignore_index, label_smoothing)


def head_loss_rule(op: Op, graph: Graph) -> OpRule:
    """``n k, ... m k, ... m -> ... m``: with the factors of the head's ``linear``. Classes are lowered."""
    rank = len(graph.by_name[op.operands[1]].shape)
    rows = (*leading_names(rank - 2), "m") if rank >= 2 else ()
    operands, kinds = [single("nk"), single([*rows, "k"]), single(rows)], dict[str, FactorKind](n="lowered", k="whole")
    return build(op, graph, operands, [single(rows)], kinds=kinds, lowering=_over_split_classes)


def head_terms_rule(op: Op, graph: Graph) -> OpRule:
    """``p n k, ... m k, ... m -> p ... m``, three results: parallel in parts of the classes and in rows."""
    rank = len(graph.by_name[op.operands[1]].shape)
    rows = (*leading_names(rank - 2), "m") if rank >= 2 else ()
    operands, kinds = [single("pnk"), single([*rows, "k"]), single(rows)], dict[str, FactorKind](n="whole", k="whole")
    return build(op, graph, operands, [single(["p", *rows])] * 3, kinds=kinds, localize=at_pieces("p"))


HEAD: RuleTable = {HEAD_LOSS: head_loss_rule, HEAD_TERMS: head_terms_rule}
