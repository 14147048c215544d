"""Layer, RMS, group, batch and instance norm: rules, and lowerings over split dims."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from shardwise.graph.ir import Graph, Op
from shardwise.graph.precision import cast, eps_of, wide
from shardwise.graph.schema import arguments, by_operator
from shardwise.rules.arguments import local_size, normal_dim, operand_positions, replace_arguments
from shardwise.rules.binding import RuleTable, build, dim_names, leading_names, rank_of, single
from shardwise.rules.empty import zeros_if_empty
from shardwise.rules.lowerings.reductions import count_of
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
        lowering=group_norm,
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
    """With running statistics everything is parallel. Batch statistics are written out in the normal form."""
    return None if arguments(op)["training"] else _channel_norm(op, graph, (), None)


def _instance_norm(op: Op, graph: Graph) -> OpRule | None:
    if "running_mean" in operand_positions(op) or not arguments(op)["use_input_stats"]:
        return None
    return _channel_norm(op, graph, dim_names(rank_of(op, graph) - 2), instance_norm)


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


# ------------------------------------------------------------------------------------------- lowerings: over split dims


def layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> Tensor:
    del cudnn_enable
    dims = tuple(range(input.dim() - len(normalized_shape), input.dim()))
    result = cast(_standardised(wide(input), dims, eps), input.dtype)
    result = result if weight is None else result * weight
    return result if bias is None else result + bias


def _standardised(x: Tensor, dims: tuple[int, ...], eps: float) -> Tensor:
    count = count_of(x, dims)
    centred = x - x.sum(dims, keepdim=True) / count
    return centred * (centred.square().sum(dims, keepdim=True) / count + eps).rsqrt()


def rms_norm(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    dims = tuple(range(input.dim() - len(normalized_shape), input.dim()))
    x = wide(input)
    small = eps_of(x) if eps is None else eps
    scale = (x.square().sum(dims, keepdim=True) / count_of(x, dims) + small).rsqrt()
    result = x * scale
    return cast(result if weight is None else result * weight, input.dtype)


def group_norm(
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> Tensor:
    del cudnn_enabled
    grouped = torch.unflatten(wide(input), 1, (num_groups, input.shape[1] // num_groups))
    result = _standardised(grouped, tuple(range(2, grouped.dim())), eps).flatten(1, 2)
    return cast(_affine(result, weight, bias), input.dtype)


def instance_norm(input: Tensor, weight: Tensor | None, bias: Tensor | None, *rest: Any) -> Tensor:
    *_, eps, _cudnn_enabled = rest
    result = _standardised(wide(input), tuple(range(2, input.dim())), eps)
    return cast(_affine(result, weight, bias), input.dtype)


def _affine(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """Per-channel scale and shift; channels are dim 1."""
    shape = (-1, *(1,) * (x.dim() - 2))
    x = x if weight is None else x * weight.reshape(shape)
    return x if bias is None else x + bias.reshape(shape)


NORMALIZATION: RuleTable = by_operator(
    {
        "layer_norm": partial(_trailing_norm, kind="lowered", lowering=layer_norm),
        "rms_norm": partial(_trailing_norm, kind="lowered", lowering=rms_norm),
        "native_layer_norm _fused_rms_norm": partial(_trailing_norm, kind="whole", lowering=None),
        "group_norm": zeros_if_empty(_group_norm),
        "renorm": _renorm,
        "batch_norm": zeros_if_empty(_batch_norm),
        "instance_norm": zeros_if_empty(_instance_norm),
        "_native_batch_norm_legit_no_training": zeros_if_empty(_fixed_batch_norm),
    }
)
