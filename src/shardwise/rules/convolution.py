"""Convolution and pooling: batch and channels can be split, spatial dims only where the windows do not overlap.

Where stride and kernel agree and nothing is padded (the patches of a vision transformer, 1x1 convolutions) a spatial
dim is ``(y k)``: which window, and where in it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch

from shardwise.graph.ir import Graph, Op
from shardwise.graph.schema import arguments, operator_name
from shardwise.rules.binding import Linear, RuleFunction, RuleTable, build, single
from shardwise.rules.calls import local_size, operand_positions, replaced
from shardwise.rules.empty import zeros_if_empty
from shardwise.rules.rule import Call, Dims, FactorKind, LocalContext, OpRule

aten = torch.ops.aten


def _spatial(letter: str, count: int) -> tuple[str, ...]:
    return tuple(f"{letter}{i}" for i in range(count))


def convolution_rule(op: Op, graph: Graph) -> OpRule:
    """``n (g ci) x..., (g co) ci k..., (g co) -> n (g co) y...``; transposed: the weight is ``(g ci) co k...``.

    Input channels are a sum; with a bias they are lowered, because the bias must be added once.
    """
    given = arguments(op)
    weight_shape = graph.by_name[op.operands[1]].shape
    count = len(weight_shape) - 2
    batched = len(graph.by_name[op.operands[0]].shape) == len(weight_shape)
    groups = int(given["groups"])
    transposed = bool(given.get("transposed", "output_padding" in given))
    group: tuple[str, ...] = ("g",) if groups > 1 else ()
    batch: Dims = (("n",),) if batched else ()
    kernel, y = (single(_spatial(letter, count)) for letter in "ky")
    apart = () if transposed else _disjoint(op, graph, count)
    x: Dims = tuple(_windows(i, weight_shape[i + 2]) if i in apart else (f"x{i}",) for i in range(count))
    channels_in, channels_out = (*group, "ci"), (*group, "co")
    weight: Dims = (channels_in, ("co",), *kernel) if transposed else (channels_out, ("ci",), *kernel)
    bias = "bias" in operand_positions(op)
    operands: list[Dims] = [(*batch, channels_in, *x), weight] + ([(channels_out,)] if bias else [])
    kinds: dict[str, FactorKind] = dict.fromkeys((*_spatial("x", count), *_spatial("k", count)), "whole")
    kinds |= {f"y{i}": "whole" for i in range(count) if i not in apart}
    kinds["ci"] = "lowered" if bias else "sum"

    def localize(op: Op, context: LocalContext) -> Call:
        return replaced(op, groups=local_size(context, "g") if group else 1)

    linear: Linear = ((0, 2), (1, 2)) if bias else ((0,), (1,))
    return build(
        op,
        graph,
        operands,
        [(*batch, channels_out, *y)],
        kinds=kinds,
        sizes={"g": groups} if group else {},
        linear=linear,
        localize=localize,
        lowering=_bias_apart(op.target) if bias else None,
    )


def _disjoint(op: Op, graph: Graph, count: int) -> tuple[int, ...]:
    """The spatial dims that windows tile without overlap, gap, padding or rest."""
    given = arguments(op)
    before, kernel, after = (graph.by_name[name].shape[-count:] for name in (*op.operands[:2], op.results[0]))

    def each(name: str) -> tuple[int, ...]:
        value = tuple(given[name])
        return value * count if len(value) == 1 else value

    padding = given["padding"]
    padded = (0 if padding == "valid" else 1,) * count if isinstance(padding, str) else each("padding")
    strides, dilations = each("stride"), each("dilation")
    return tuple(
        i
        for i in range(count)
        if strides[i] == kernel[i]
        and before[i] == after[i] * kernel[i]
        and padded[i] == 0
        and (dilations[i] == 1 or kernel[i] == 1)
    )


def _windows(dim: int, kernel: int) -> tuple[str, ...]:
    return (f"y{dim}",) if kernel == 1 else (f"y{dim}", f"k{dim}")


@cache  # one function per operator, so that its capture can be reused
def _bias_apart(target: Any) -> Callable[..., Any]:
    """The convolution without bias, then the bias."""

    def lowering(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return target(input, weight, None, *args, **kwargs) + bias.reshape(-1, *(1,) * (weight.dim() - 2))

    return lowering


def _pooling(num_spatial: int) -> RuleFunction:
    """Every leading dim is parallel. Positions that a pooling returns count within one map, so they need no shift."""

    def function(op: Op, graph: Graph) -> OpRule:
        rank = len(graph.by_name[op.operands[0]].shape)
        leading = ("n", "c")[2 - (rank - num_spatial) :]
        dims = single([*leading, *_spatial("x", num_spatial)])
        result = single([*leading, *_spatial("y", num_spatial)])
        kinds: dict[str, FactorKind] = {n: "whole" for letter in "xy" for n in _spatial(letter, num_spatial)}
        name = operator_name(op.target)
        averages = "avg" in name or "upsample" in name
        linear = ((0,),) if averages else ()
        return build(op, graph, [dims], [result] * len(op.results), kinds=kinds, linear=linear)

    return function


def _table(targets: Sequence[Any], function: RuleFunction) -> RuleTable:
    return dict.fromkeys(targets, zeros_if_empty(function))


CONVOLUTION: RuleTable = {
    **_table(
        (
            aten.convolution.default,
            aten.conv1d.default,
            aten.conv1d.padding,
            aten.conv2d.default,
            aten.conv2d.padding,
            aten.conv3d.default,
            aten.conv3d.padding,
            aten.conv_transpose1d.default,
            aten.conv_transpose2d.input,
            aten.conv_transpose3d.input,
        ),
        convolution_rule,
    ),
    **_table((aten.max_pool1d.default, aten.avg_pool1d.default, aten.adaptive_avg_pool1d.default), _pooling(1)),
    **_table(
        (
            aten.max_pool2d.default,
            aten.max_pool2d_with_indices.default,
            aten.avg_pool2d.default,
            aten.adaptive_avg_pool2d.default,
            aten._adaptive_avg_pool2d.default,
            aten.adaptive_max_pool2d.default,
            aten.upsample_nearest2d.default,
            aten.upsample_nearest2d.vec,
            aten.upsample_bilinear2d.default,
            aten.upsample_bilinear2d.vec,
        ),
        _pooling(2),
    ),
    **_table((aten.max_pool3d.default, aten.avg_pool3d.default, aten.adaptive_avg_pool3d.default), _pooling(3)),
}
