"""Layer, RMS, group, batch and instance norm."""

from __future__ import annotations

from functools import partial

import torch

from shardwise.graph.ir import Graph, Op
from shardwise.graph.schema import arguments, by_operator
from shardwise.rules.arguments import local_size, normal_dim, operand_positions, replace_arguments
from shardwise.rules.binding import RuleTable, build, dim_names, leading_names, rank_of, single
from shardwise.rules.empty import zeros_if_empty
from shardwise.rules.lowerings import normalization as lowerings
from shardwise.rules.rule import Dims, FactorKind, Lowering, OpRule

aten = torch.ops.aten


def _trailing_norm(op: Op, graph: Graph, kind: FactorKind, lowering: Lowering | None) -> OpRule:
    """``... n`` with weight and bias ``n``: leading dims are parallel, the normalised ones have ``kind``."""
    rank = rank_of(op, graph)
    count = len(arguments(op)["normalized_shape"])
    leading = leading_names(rank - count)
    normalised = ("n",) if count == 1 else tuple(f"n{i}" for i in range(count))
    dims = single([*leading, *normalised])
    affine = [single(normalised)] * (len(op.operands) - 1)
    statistics: Dims = (*single(leading), *(() for _ in normalised))
    results = [dims, *([statistics] * (len(op.results) - 1))]
    return build(op, graph, [dims, *affine], results, kinds=dict.fromkeys(normalised, kind), lowering=lowering)


def _group_norm(op: Op, graph: Graph) -> OpRule:
    """``n (g c) x...``: groups and samples are parallel, what a group averages over is lowered."""
    rank = rank_of(op, graph)
    spatial = dim_names(rank - 2)
    dims: Dims = (("n",), ("g", "c"), *single(spatial))
    affine: list[Dims] = [(("g", "c"),)] * (len(op.operands) - 1)
    return build(
        op,
        graph,
        [dims, *affine],
        [dims],
        kinds=dict.fromkeys(("c", *spatial), "lowered"),
        sizes={"g": arguments(op)["num_groups"]},
        localize=lambda op, context: replace_arguments(op, num_groups=local_size(context, "g")),
        lowering=lowerings.group_norm,
    )


def _channel_norm(op: Op, graph: Graph, averaged: tuple[str, ...], lowering: Lowering | None) -> OpRule:
    """``n c x...`` with per-channel tensors ``c``; ``averaged`` factors share statistics. Further results are empty."""
    rank = rank_of(op, graph)
    dims = single(["n", "c", *dim_names(rank - 2)][:rank])
    per_channel: list[Dims] = [(("c",),)] * (len(op.operands) - 1)
    empty = [single([f"empty{i}"]) for i in range(len(op.results) - 1)]
    kinds: dict[str, FactorKind] = dict.fromkeys(averaged, "lowered")
    kinds |= {name: "whole" for dims_of_one in empty for (name,) in dims_of_one}
    return build(op, graph, [dims, *per_channel], [dims, *empty], kinds=kinds, lowering=lowering)


def _batch_norm(op: Op, graph: Graph) -> OpRule | None:
    """With running statistics everything is parallel; with batch statistics the averaged dims are lowered.

    Training with running statistics updates them in place: no rule (normalisation writes it out).
    """
    if not arguments(op)["training"]:
        return _channel_norm(op, graph, (), None)
    if "running_mean" in operand_positions(op):
        return None
    return _channel_norm(op, graph, ("n", *dim_names(rank_of(op, graph) - 2)), lowerings.batch_norm)


def _instance_norm(op: Op, graph: Graph) -> OpRule | None:
    if "running_mean" in operand_positions(op) or not arguments(op)["use_input_stats"]:
        return None
    return _channel_norm(op, graph, dim_names(rank_of(op, graph) - 2), lowerings.instance_norm)


def _fixed_batch_norm(op: Op, graph: Graph) -> OpRule | None:
    """The decomposed form for evaluation; its saved statistics are empty tensors, which have no dims to split."""
    if any(0 not in graph.by_name[name].shape for name in op.results[1:]):
        return None
    return _channel_norm(op, graph, (), None)


def _renorm(op: Op, graph: Graph) -> OpRule:
    """Split the slices along ``dim`` only: the norm of each is over all other dims."""
    rank = rank_of(op, graph)
    names, place = dim_names(rank), normal_dim(arguments(op)["dim"], rank)
    kinds: dict[str, FactorKind] = {name: "whole" for i, name in enumerate(names) if i != place}
    return build(op, graph, [single(names)], [single(names)], kinds=kinds)


NORMALIZATION: RuleTable = by_operator(
    {
        "layer_norm": partial(_trailing_norm, kind="lowered", lowering=lowerings.layer_norm),
        "rms_norm": partial(_trailing_norm, kind="lowered", lowering=lowerings.rms_norm),
        "native_layer_norm _fused_rms_norm": partial(_trailing_norm, kind="whole", lowering=None),
        "group_norm": zeros_if_empty(_group_norm),
        "renorm": _renorm,
        "batch_norm": zeros_if_empty(_batch_norm),
        "instance_norm": zeros_if_empty(_instance_norm),
        "_native_batch_norm_legit_no_training": zeros_if_empty(_fixed_batch_norm),
    }
)
