"""Rearranging images: pixels to channels and back, columns to windows, sampling at given places."""

from __future__ import annotations

from math import prod

import torch

from shardwise.graph.ir import Graph, Op, Ref
from shardwise.graph.schema import arguments, by_operator
from shardwise.rules.arguments import if_split
from shardwise.rules.binding import RuleTable, build, dim_names, rank_of, single
from shardwise.rules.convolution import spatial
from shardwise.rules.empty import zeros_if_empty
from shardwise.rules.rule import Dims, FactorKind, LocalContext, LocalOpCall, OpRule, Window
from shardwise.rules.window_kernels import COL2IM_WINDOW
from shardwise.rules.windows import Sliding, part_of

aten = torch.ops.aten


def _pixel_shuffle(op: Op, graph: Graph) -> OpRule:
    """``... (c r0 r1) x0 x1 -> ... c (x0 r0) (x1 r1)``, or back."""
    args, leading = arguments(op), single(dim_names(rank_of(op, graph) - 3))
    deep: Dims = (*leading, ("c", "r0", "r1"), ("x0",), ("x1",))
    wide: Dims = (*leading, ("c",), ("x0", "r0"), ("x1", "r1"))
    shuffles = "upscale_factor" in args
    factor = args["upscale_factor" if shuffles else "downscale_factor"]
    ends = (deep, wide) if shuffles else (wide, deep)
    kinds: dict[str, FactorKind] = {"r0": "whole", "r1": "whole"}
    return build(op, graph, [ends[0]], [ends[1]], kinds=kinds, sizes={"r0": factor, "r1": factor}, linear=((0,),))


def _col2im(op: Op, graph: Graph) -> OpRule:
    """``n (c k0 k1) (x0 x1) -> n c y0 y1``: every pixel is the sum over the windows that it is in."""
    args, shape = arguments(op), graph.by_name[op.operands[0]].shape
    kernel, stride, padding, dilation = (tuple(args[n]) for n in ("kernel_size", "stride", "padding", "dilation"))
    after = tuple(args["output_size"])
    span = [(kernel[i] - 1) * dilation[i] + 1 for i in range(2)]
    counts = [(after[i] + 2 * padding[i] - span[i]) // stride[i] + 1 for i in range(2)]
    assert prod(counts) == shape[-1], f"{op.target}: {counts} are not {shape[-1]} windows"
    maps = [Sliding(counts[i], kernel[i], stride[i], dilation[i], padding[i]) for i in range(2)]

    def localize(op: Op, context: LocalContext) -> LocalOpCall:
        parts = [part_of(context, f"y{i}") for i in range(2)]
        rows = [maps[i].transposed_part(*parts[i], is_split=context.is_split(f"y{i}")) for i in range(2)]
        numbers, fronts = tuple(stop - start for start, stop, _ in rows), tuple(front for *_, front in rows)
        lengths = tuple(length for _, length in parts)
        return LocalOpCall(COL2IM_WINDOW, (Ref(op.operands[0]), kernel, dilation, stride, numbers, fronts, lengths))

    batch: Dims = (("n",),) if len(shape) == 3 else ()
    # Two atoms of size 1 in a dim cannot be told apart: the rows and columns of a single window stay whole.
    whole = ("k0", "k1", *(("x0", "x1", "y0", "y1") if prod(counts) == 1 else ()))
    return build(
        op,
        graph,
        [(*batch, ("c", "k0", "k1"), ("x0", "x1"))],
        [(*batch, ("c",), ("y0",), ("y1",))],
        kinds=dict.fromkeys(whole, "whole"),
        sizes={"k0": kernel[0], "k1": kernel[1], "x0": counts[0], "x1": counts[1]},
        linear=((0,),),
        localize=if_split(localize, "y0", "y1"),
        windows={f"x{i}": Window(f"y{i}", m.transposed) for i, m in enumerate(maps) if f"x{i}" not in whole},
    )


def _grid_sampler(op: Op, graph: Graph) -> OpRule:
    """``n c x..., n y... place -> n c y...``: any place of the image may be asked for."""
    count = rank_of(op, graph) - 2
    x, y = spatial("x", count), spatial("y", count)
    operands = [single(("n", "c", *x)), single(("n", *y, "place"))]
    kinds: dict[str, FactorKind] = dict.fromkeys((*x, "place"), "whole")
    return build(op, graph, operands, [single(("n", "c", *y))], kinds=kinds, linear=((0,),))


def _fractional_max_pool(op: Op, graph: Graph) -> OpRule | None:
    """``n c x..., n c place -> n c y...`` twice: a map's samples place its windows, indices count within a map."""
    rank, count = rank_of(op, graph), len(arguments(op)["kernel_size"])
    leading = single(("n", "c")[2 - (rank - count) :])
    x, y = spatial("x", count), spatial("y", count)
    kinds: dict[str, FactorKind] = dict.fromkeys((*x, *y, "place"), "whole")
    maps = (1, *graph.by_name[op.operands[0]].shape)[-count - 2 : -count]
    if graph.by_name[op.operands[1]].shape != (*maps, count):  # PyTorch takes more samples than there are maps
        return None
    samples: Dims = (*(((),) if rank == count + 1 else ()), *leading, ("place",))
    return build(op, graph, [(*leading, *single(x)), samples], [(*leading, *single(y))] * 2, kinds=kinds)


def _by_maps(op: Op, graph: Graph) -> OpRule:
    """Whole maps, one by one: max_unpool puts values where they came from, antialiasing looks far around."""
    rank = rank_of(op, graph)
    count = 2
    leading = ("n", "c")[2 - (rank - count) :]
    x, y = spatial("x", count), spatial("y", count)
    operands = [single((*leading, *x))] * len(op.operands)
    return build(op, graph, operands, [single((*leading, *y))], kinds=dict.fromkeys((*x, *y), "whole"), linear=((0,),))


IMAGES: RuleTable = by_operator(
    {
        "pixel_shuffle pixel_unshuffle": zeros_if_empty(_pixel_shuffle),
        "col2im": zeros_if_empty(_col2im),
        "grid_sampler grid_sampler_2d grid_sampler_3d": _grid_sampler,
        "fractional_max_pool2d fractional_max_pool3d": zeros_if_empty(_fractional_max_pool),
        "max_unpool2d _upsample_bilinear2d_aa _upsample_bilinear2d_aa.vec _upsample_bicubic2d_aa "
        "_upsample_bicubic2d_aa.vec": zeros_if_empty(_by_maps),
    }
)
