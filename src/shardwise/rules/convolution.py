"""Convolution: batch, channels and spatial dims can be split.

A part of the result's rows reads a window of the input's rows, of which neighbours may hold some. Where stride and
kernel agree and nothing is padded (the patches of a vision transformer, 1x1 convolutions) windows do not overlap, and a
spatial dim is ``(y k)``: which window, and where in it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from shardwise.graph.ir import Graph, Op, Ref
from shardwise.graph.schema import arguments, aten_operators
from shardwise.rules.arguments import any_split, if_split, local_size, replace_arguments
from shardwise.rules.binding import RuleTable, build, single
from shardwise.rules.empty import zeros_if_empty
from shardwise.rules.rule import Dims, FactorKind, LocalContext, LocalOpCall, OpRule, Window
from shardwise.rules.window_kernels import CONV_TRANSPOSE_WINDOW, CONV_WINDOW, IM2COL_WINDOW
from shardwise.rules.windows import Sliding, part_of

aten = torch.ops.aten


def spatial(letter: str, count: int) -> tuple[str, ...]:
    return tuple(f"{letter}{i}" for i in range(count))


def convolution_rule(op: Op, graph: Graph) -> OpRule | None:
    """``n (g ci) x..., (g co) ci k... -> n (g co) y...``, x through windows of y; transposed: the weight is
    ``(g ci) co k...``. A bias is added apart in the normal form.
    """
    if len(op.operands) != 2:
        return None
    args = arguments(op)
    weight_shape = graph.by_name[op.operands[1]].shape
    count = len(weight_shape) - 2
    batched = len(graph.by_name[op.operands[0]].shape) == len(weight_shape)
    groups = int(args["groups"])
    transposed = bool(args.get("transposed", "output_padding" in args))
    group: tuple[str, ...] = ("g",) if groups > 1 else ()
    batch: Dims = (("n",),) if batched else ()
    kernel, y = (single(spatial(letter, count)) for letter in "ky")
    disjoint = () if transposed else _disjoint(op, graph, count)
    tiles = [(f"y{i}", f"k{i}")[: 1 + (weight_shape[i + 2] > 1)] for i in range(count)]  # which window, where in it
    x: Dims = tuple(tiles[i] if i in disjoint else (f"x{i}",) for i in range(count))
    channels_in, channels_out = (*group, "ci"), (*group, "co")
    weight: Dims = (channels_in, ("co",), *kernel) if transposed else (channels_out, ("ci",), *kernel)
    kinds: dict[str, FactorKind] = dict.fromkeys(spatial("k", count), "whole")
    kinds["ci"] = "sum"
    maps = _maps(op, graph, count)
    sliding = {i: sliding_map for i, sliding_map in enumerate(maps) if i not in disjoint}
    windows = {
        f"x{i}": Window(f"y{i}", sliding_map.transposed if transposed else sliding_map.ranges)
        for i, sliding_map in sliding.items()
    }

    def localize(op: Op, context: LocalContext) -> LocalOpCall:
        own_groups = local_size(context, "g") if group else 1
        if not any_split(context, [f"y{i}" for i in sliding]):
            return replace_arguments(op, groups=own_groups)
        tensors = (Ref(op.operands[0]), Ref(op.operands[1]))
        strides = tuple(sliding_map.stride for sliding_map in maps)
        dilations = tuple(sliding_map.dilation for sliding_map in maps)
        parts = {i: part_of(context, f"y{i}") for i in range(count)}
        if transposed:
            split = [context.is_split(f"y{i}") for i in range(count)]
            fronts = tuple(maps[i].transposed_part(*parts[i], is_split=split[i])[2] for i in range(count))
            lengths = tuple(length for _, length in parts.values())
            return LocalOpCall(CONV_TRANSPOSE_WINDOW, (*tensors, strides, dilations, own_groups, fronts, lengths))
        pads = [sliding_map.padding(*parts[i]) if i in sliding else (0, 0) for i, sliding_map in enumerate(maps)]
        ends = tuple(zip(*pads, strict=True))
        return LocalOpCall(CONV_WINDOW, (*tensors, strides, *ends, dilations, own_groups))

    return build(
        op,
        graph,
        [(*batch, channels_in, *x), weight],
        [(*batch, channels_out, *y)],
        kinds=kinds,
        sizes={"g": groups} if group else {},
        linear=((0,), (1,)),
        localize=localize,
        windows=windows,
    )


def _maps(op: Op, graph: Graph, count: int) -> tuple[Sliding, ...]:
    """Return how the windows slide along every spatial dim."""
    args = arguments(op)
    sizes, kernel = (graph.by_name[name].shape[-count:] for name in op.operands[:2])
    strides, dilations = (per_dim(args[name], count) for name in ("stride", "dilation"))
    padding = args["padding"]
    maps = []
    for i in range(count):
        sliding_map = Sliding(sizes[i], kernel[i], strides[i], dilations[i])
        if isinstance(padding, str):
            total = sliding_map.span - 1 if padding == "same" else 0
            maps.append(replace(sliding_map, before=total // 2, after=total - total // 2))
        else:
            pad = per_dim(padding, count)[i]
            maps.append(replace(sliding_map, before=pad, after=pad))
    return tuple(maps)


def per_dim(value: Any, count: int) -> tuple[int, ...]:
    """One number per spatial dim: an argument may give one for all."""
    numbers = (value,) if isinstance(value, int) else tuple(value)
    return numbers * count if len(numbers) == 1 else numbers


def _disjoint(op: Op, graph: Graph, count: int) -> tuple[int, ...]:
    """Return the spatial dims that windows tile without overlap, gap, padding or rest."""
    after = graph.by_name[op.results[0]].shape[-count:]
    return tuple(
        i
        for i, sliding_map in enumerate(_maps(op, graph, count))
        if sliding_map.stride == sliding_map.count
        and sliding_map.size == after[i] * sliding_map.count
        and sliding_map.before == 0
        and (sliding_map.dilation == 1 or sliding_map.count == 1)
    )


def _im2col(op: Op, graph: Graph) -> OpRule:
    """``n c x0 x1 -> n (c k0 k1) (y0 y1)``: the columns of every window."""
    args = arguments(op)
    before, after = (graph.by_name[name].shape for name in (op.operands[0], op.results[0]))
    batch: Dims = (("n",),) if len(before) == 4 else ()
    kernel, stride, padding, dilation = (tuple(args[n]) for n in ("kernel_size", "stride", "padding", "dilation"))
    maps = tuple(Sliding(before[i - 2], kernel[i], stride[i], dilation[i], padding[i], padding[i]) for i in range(2))
    sizes = {f"k{i}": kernel[i] for i in range(2)}
    sizes |= {f"y{i}": (maps[i].size + 2 * padding[i] - maps[i].span) // stride[i] + 1 for i in range(2)}
    assert sizes["y0"] * sizes["y1"] == after[-1], f"{op.target}: {sizes} are not {after[-1]} windows"

    def localize(op: Op, context: LocalContext) -> LocalOpCall:
        pads = [sliding_map.padding(*part_of(context, f"y{i}")) for i, sliding_map in enumerate(maps)]
        ends = tuple(zip(*pads, strict=True))
        return LocalOpCall(IM2COL_WINDOW, (Ref(op.operands[0]), kernel, dilation, *ends, stride))

    return build(
        op,
        graph,
        [(*batch, ("c",), ("x0",), ("x1",))],
        [(*batch, ("c", "k0", "k1"), ("y0", "y1"))],
        kinds={"k0": "whole", "k1": "whole"},
        sizes=sizes,
        linear=((0,),),
        localize=if_split(localize, "y0", "y1"),
        windows={f"x{i}": Window(f"y{i}", sliding_map.ranges) for i, sliding_map in enumerate(maps)},
    )


CONVOLUTIONS = tuple(
    aten_operators(
        "convolution conv1d conv1d.padding conv2d conv2d.padding conv3d conv3d.padding conv_transpose1d "
        "conv_transpose2d.input conv_transpose3d.input"
    )
)
CONVOLUTION: RuleTable = {
    **dict.fromkeys(CONVOLUTIONS, zeros_if_empty(convolution_rule)),
    aten.im2col.default: zeros_if_empty(_im2col),
}
