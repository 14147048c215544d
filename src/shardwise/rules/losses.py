"""Losses. A sum over a split batch is a partial sum; a mean is lowered to a sum over a global count."""

from __future__ import annotations

from functools import partial

import torch

from shardwise.graph.ir import Graph, Op
from shardwise.graph.schema import arguments, by_operator
from shardwise.graph.stand_ins import ctc_loss
from shardwise.rules.arguments import broadcast_shape
from shardwise.rules.binding import RuleTable, build, dim_names, single
from shardwise.rules.elementwise import broadcast_dims
from shardwise.rules.lowerings import losses as lowerings
from shardwise.rules.lowerings.losses import MEAN, NONE
from shardwise.rules.rule import Dims, FactorKind, Lowering, OpRule

aten = torch.ops.aten


def _batch_kind(reduction: int) -> FactorKind:
    return "parallel" if reduction == NONE else "lowered" if reduction == MEAN else "sum"


def element_loss_rule(op: Op, graph: Graph) -> OpRule | None:
    """Losses of single elements: every dim has the kind of the reduction."""
    reduction = arguments(op)["reduction"]
    if reduction == MEAN:  # a sum over the count in the normal form
        return None
    kind = _batch_kind(reduction)
    shapes = [graph.by_name[name].shape for name in op.operands]
    total = broadcast_shape(*shapes)
    names = dim_names(len(total))
    operands = [broadcast_dims(shape, total, names) for shape in shapes]
    result: Dims = broadcast_dims(total, total, names) if kind == "parallel" else ()
    return build(op, graph, operands, [result], kinds=dict.fromkeys(names, kind))


def _class_loss(op: Op, graph: Graph, lowering: Lowering) -> OpRule | None:
    """``n c d..., n d..., c -> ()`` or ``n d...``: the classes are lowered, the rest has the kind of the reduction."""
    args = arguments(op)
    scores, target = (graph.by_name[name].shape for name in op.operands[:2])
    if not scores or 0 in scores:
        return None
    kind = _batch_kind(args["reduction"])
    batch = () if len(scores) == 1 else ("n", *dim_names(len(scores) - 2))
    dims = single((*batch[:1], "c", *batch[1:]))
    soft = scores == target and graph.by_name[op.operands[1]].dtype.is_floating_point
    operands = [dims, dims if soft else single(batch)] + [(("c",),)] * (len(op.operands) - 2)
    result = single(batch) if kind == "parallel" else ()
    kinds: dict[str, FactorKind] = dict.fromkeys(batch, kind)
    kinds["c"] = "lowered"
    return build(op, graph, operands, [result], kinds=kinds, lowering=lowering)


def _row_loss(lowering: Lowering, op: Op, graph: Graph) -> OpRule | None:
    """``... d, ... d, ..., -> ...`` or ``()``: the features of a sample are lowered, samples have the reduction's kind.
    Operands that broadcast have no rule."""
    shapes = [graph.by_name[name].shape for name in op.operands]
    rows = shapes[0][:-1]
    if not shapes[0] or any(shape not in (shapes[0], rows) for shape in shapes):
        return None
    args = arguments(op)
    kind = _batch_kind(args.get("reduction", NONE))
    names = (*dim_names(len(rows)), "d")
    operands = [single(names[: len(shape)]) for shape in shapes]
    kept: Dims = ((),) if args.get("keepdim") else ()
    result = single(names[:-1]) + kept if kind == "parallel" else ()
    return build(op, graph, operands, [result], kinds={**dict.fromkeys(names, kind), "d": "lowered"}, lowering=lowering)


def _margin_loss(lowering: Lowering, op: Op, graph: Graph) -> OpRule | None:
    """``n c, n or n c, c -> n`` or ``()``: every class of a sample is compared with every other."""
    shapes = [graph.by_name[name].shape for name in op.operands]
    if len(shapes[0]) != 2 or 0 in shapes[0]:
        return None
    kind = _batch_kind(arguments(op)["reduction"])
    operands = [single("nc"), *(single("nc"[: len(shape)]) for shape in shapes[1:2])]
    operands += [single("c")] * (len(shapes) - 2)
    result = single("n") if kind == "parallel" else ()
    return build(op, graph, operands, [result], kinds={"n": kind, "c": "whole"}, lowering=lowering)


def _ctc(op: Op, graph: Graph) -> OpRule:
    """``t n c, n s, n, n -> n``: samples are parallel unless their labels stand in one row."""
    padded = len(graph.by_name[op.operands[1]].shape) == 2
    targets = single("ns") if padded else single("s")
    kinds: dict[str, FactorKind] = {**dict.fromkeys("tcs", "whole"), "n": "parallel" if padded else "whole"}
    return build(op, graph, [single("tnc"), targets, single("n"), single("n")], [single("n")], kinds=kinds)


LOSSES: RuleTable = by_operator(
    {
        "cross_entropy_loss": partial(_class_loss, lowering=lowerings.cross_entropy_loss),
        "nll_loss nll_loss_nd nll_loss2d": partial(_class_loss, lowering=lowerings.nll_loss),
        "mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy binary_cross_entropy_with_logits "
        "kl_div soft_margin_loss poisson_nll_loss hinge_embedding_loss margin_ranking_loss": element_loss_rule,
        "cosine_embedding_loss": partial(_row_loss, lowerings.cosine_embedding_loss),
        "triplet_margin_loss": partial(_row_loss, lowerings.triplet_margin_loss),
        "pairwise_distance": partial(_row_loss, lowerings.pairwise_distance),
        "multi_margin_loss": partial(_margin_loss, lowerings.multi_margin_loss),
        "multilabel_margin_loss": partial(_margin_loss, lowerings.multilabel_margin_loss),
    },
    {ctc_loss._opoverload: _ctc},
)
