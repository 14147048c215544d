"""Pooling and interpolation: every dim can be split, spatial ones through windows.

A part is pooled on a larger window of the input, with the operator's own padding and rounding; the part's rows of the
result are kept. The window starts at a multiple of the stride. So the ends of the tensor are padded as for the whole
tensor, and nothing is padded in between.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import prod
from typing import Any

import torch
from torch._ops import OpOverload

from shardwise.graph.ir import Graph, Op, Ref
from shardwise.graph.schema import arguments, by_operator
from shardwise.rules.arguments import if_split
from shardwise.rules.binding import RuleFunction, RuleTable, build, single
from shardwise.rules.convolution import per_dim, spatial
from shardwise.rules.empty import zeros_if_empty
from shardwise.rules.lowerings.reductions import max_dim
from shardwise.rules.rule import FactorKind, LocalContext, Localize, LocalOpCall, Lowering, OpRule, Ranges, Window
from shardwise.rules.window_kernels import (
    ADAPTIVE_AVG_POOLS,
    ADAPTIVE_AVG_WINDOW,
    ADAPTIVE_MAX_WINDOW,
    AVG_POOL_WINDOW,
    MAX_POOL_VALUES_WINDOW,
    MAX_POOL_WINDOW,
    RESAMPLE_WINDOW,
    Resampling,
    sample_points,
)
from shardwise.rules.windows import Sliding, clip_rows, part_of

aten = torch.ops.aten

_Rows = Callable[[int, int], Ranges]


def _over_maps(
    op: Op,
    graph: Graph,
    count: int,
    rows: list[_Rows],
    localize: Localize,
    *,
    linear: bool,
    kinds: dict[str, FactorKind] | None = None,
    lowering: Lowering | None = None,
) -> OpRule:
    """Every leading dim is parallel, spatial ones are read through windows. ``kinds``: of those that are not."""
    rank = len(graph.by_name[op.operands[0]].shape)
    leading = ("n", "c")[2 - (rank - count) :]
    kinds = kinds or {}
    windows = {f"x{i}": Window(f"y{i}", rows[i]) for i in range(count) if f"x{i}" not in kinds}
    kinds = kinds | {f"y{name[1:]}": "whole" for name in kinds}

    return build(
        op,
        graph,
        [single([*leading, *spatial("x", count)])],
        [single([*leading, *spatial("y", count)])] * len(op.results),
        kinds=kinds,
        linear=((0,),) if linear else (),
        localize=if_split(localize, *spatial("y", count)),
        lowering=lowering,
        windows=windows,
    )


def _starts(context: LocalContext, rows: list[_Rows]) -> tuple[int, ...]:
    """Return the first row of the operand that this rank holds, per spatial dim."""
    windows = [
        rows_of(*part_of(context, f"y{i}")) if context.is_split(f"y{i}") else ((0, 0),)
        for i, rows_of in enumerate(rows)
    ]
    return tuple(ranges[0][0] for ranges in windows)


def _pooling(count: int, op: Op, graph: Graph) -> OpRule:
    """Maximum and average over windows. Positions of maxima are those in the whole map."""
    args = arguments(op)
    sizes = graph.by_name[op.operands[0]].shape[-count:]
    kernel = per_dim(args["kernel_size"], count)
    stride = per_dim(args["stride"], count) if args.get("stride") else kernel
    padding, dilation = per_dim(args["padding"], count), per_dim(args.get("dilation", 1), count)
    maps = [Sliding(sizes[i], kernel[i], stride[i], dilation[i], padding[i]) for i in range(count)]
    rows: list[_Rows] = [sliding_map.aligned for sliding_map in maps]
    averages = "dilation" not in args

    def localize(op: Op, context: LocalContext) -> LocalOpCall:
        parts = [part_of(context, f"y{i}") for i in range(count)]
        split = [context.is_split(f"y{i}") for i in range(count)]
        fronts = tuple(
            sliding_map.position_in_aligned(*part) if cut else 0
            for sliding_map, part, cut in zip(maps, parts, split, strict=True)
        )
        lengths = tuple(length for _, length in parts)
        x = Ref(op.operands[0])
        if averages:
            options = (args["ceil_mode"], args["count_include_pad"], args.get("divisor_override"))
            return LocalOpCall(AVG_POOL_WINDOW, (x, kernel, stride, padding, *options, fronts, lengths))
        kernel_args = (x, kernel, stride, padding, dilation, args["ceil_mode"], fronts, lengths)
        if len(op.results) == 1:
            return LocalOpCall(MAX_POOL_VALUES_WINDOW, kernel_args)
        return LocalOpCall(MAX_POOL_WINDOW, (*kernel_args, _starts(context, rows), sizes))

    return _over_maps(op, graph, count, rows, localize, linear=averages)


def _adaptive(count: int, op: Op, graph: Graph) -> OpRule:
    """Bin y of m holds the rows ``floor(y n / m)`` to ``ceil((y + 1) n / m)``. One bin is a mean, or a maximum of the
    whole map: it is lowered to that."""
    sizes = graph.by_name[op.operands[0]].shape[-count:]
    after = graph.by_name[op.results[0]].shape[-count:]
    averages = len(op.results) == 1

    def bins(i: int, offset: int, length: int) -> list[tuple[int, int]]:
        return [(y * sizes[i] // after[i], -(-(y + 1) * sizes[i] // after[i])) for y in range(offset, offset + length)]

    def window(i: int, offset: int, length: int) -> Ranges:
        own_range = bins(i, offset, length)
        return clip_rows(own_range[0][0], own_range[-1][1], sizes[i])

    rows: list[_Rows] = [partial(window, i) for i in range(count)]

    def localize(op: Op, context: LocalContext) -> LocalOpCall:
        starts, bins_here = _starts(context, rows), []
        for i in range(count):
            uneven = context.is_split(f"y{i}") and sizes[i] % after[i] != 0
            bins_here.append(bins(i, *part_of(context, f"y{i}")) if uneven else [])
        output = tuple(part_of(context, f"y{i}")[1] for i in range(count))
        begins = tuple(begin - starts[i] for i, ranges in enumerate(bins_here) for begin, _ in ranges)
        ends = tuple(end - starts[i] for i, ranges in enumerate(bins_here) for _, end in ranges)
        kernel_args = (Ref(op.operands[0]), output, begins, ends, tuple(map(len, bins_here)))
        if averages:
            return LocalOpCall(ADAPTIVE_AVG_WINDOW, kernel_args)
        return LocalOpCall(ADAPTIVE_MAX_WINDOW, (*kernel_args, starts, sizes))

    single_bins = [f"x{i}" for i in range(count) if after[i] == 1]
    lowered = averages or len(single_bins) == count
    kinds: dict[str, FactorKind] = dict.fromkeys(single_bins, "lowered" if lowered else "whole")
    lowering = _means_first if averages else _maximum
    return _over_maps(op, graph, count, rows, localize, linear=averages, kinds=kinds, lowering=lowering)


def _means_first(x: torch.Tensor, output_size: Any) -> torch.Tensor:
    """Dims with one bin by their mean, then the others."""
    sizes = (output_size,) if isinstance(output_size, int) else tuple(output_size)
    count = len(sizes)
    alone = [i - count for i in range(count) if sizes[i] == 1]
    x = x.sum(alone, keepdim=True) / prod(x.shape[i] for i in alone)
    if all(size == 1 for size in sizes):
        return x
    pooled: torch.Tensor = ADAPTIVE_AVG_POOLS[count - 1](x, list(sizes))
    return pooled


def _maximum(x: torch.Tensor, output_size: Any) -> tuple[torch.Tensor, torch.Tensor]:
    ones = (1,) if isinstance(output_size, int) else (1,) * len(output_size)
    values, indices = max_dim(x.flatten(-len(ones)), -1)
    return values.reshape(*values.shape, *ones), indices.reshape(*indices.shape, *ones)


def _resampling(count: int, mode: str, op: Op, graph: Graph) -> OpRule:
    """Interpolation: row y reads the rows around ``y n / m``."""
    args = arguments(op)
    sizes = graph.by_name[op.operands[0]].shape[-count:]
    after = graph.by_name[op.results[0]].shape[-count:]
    align = bool(args.get("align_corners", False))
    scales = _scales(args, count)

    def window(i: int, offset: int, length: int) -> Ranges:
        """Return the rows that the first and the last row read, by the arithmetic of float32 and of float64."""
        how = Resampling(mode, align, sizes[i], after[i], scales[i])
        rows = [
            int(index.clamp(0, sizes[i] - 1))
            for y in (offset, offset + length - 1)
            for dtype in (torch.float32, torch.float64)
            for index, _ in sample_points(how, y, 1, dtype, torch.device("cpu"))
        ]
        return clip_rows(min(rows), max(rows) + 1, sizes[i])

    rows: list[_Rows] = [partial(window, i) for i in range(count)]

    def localize(op: Op, context: LocalContext) -> LocalOpCall:
        parts = [part_of(context, f"y{i}") for i in range(count)]
        split = tuple(context.is_split(f"y{i}") for i in range(count))
        output = tuple(length for _, length in parts)
        where = (split, tuple(offset for offset, _ in parts), output, _starts(context, rows))
        return LocalOpCall(RESAMPLE_WINDOW, (Ref(op.operands[0]), mode, align, output, sizes, after, scales, *where))

    copies = mode.startswith("nearest") or graph.by_name[op.results[0]].dtype.is_floating_point
    whole = () if copies else [f"y{i}" for i in range(count)]  # means of integers are rounded as the operator likes
    return _over_maps(op, graph, count, rows, localize, linear=copies, kinds=dict.fromkeys(whole, "whole"))


def _scales(args: dict[str, Any], count: int) -> tuple[float, ...]:
    """Return the scale factors that an interpolation is given, per dim; 0: none."""
    if "scale_factors" in args:
        return tuple(args["scale_factors"] or (0.0,) * count)
    names = ("scales",) if count == 1 else ("scales_d", "scales_h", "scales_w")[3 - count :]
    return tuple(args[name] or 0.0 for name in names)


_RESAMPLED = {
    "nearest": "upsample_nearest1d upsample_nearest2d upsample_nearest3d",
    "nearest-exact": "_upsample_nearest_exact1d _upsample_nearest_exact2d _upsample_nearest_exact3d",
    "linear": "upsample_linear1d upsample_bilinear2d upsample_trilinear3d",
}
_RULES: dict[OpOverload, RuleFunction] = by_operator(
    {
        **{f"max_pool{n}d max_pool{n}d_with_indices avg_pool{n}d": partial(_pooling, n) for n in (1, 2, 3)},
        "adaptive_avg_pool1d adaptive_max_pool1d": partial(_adaptive, 1),
        "adaptive_avg_pool2d _adaptive_avg_pool2d adaptive_max_pool2d": partial(_adaptive, 2),
        "adaptive_avg_pool3d _adaptive_avg_pool3d adaptive_max_pool3d": partial(_adaptive, 3),
        **{
            f"{name} {name}.vec": partial(_resampling, i, mode)
            for mode, names in _RESAMPLED.items()
            for i, name in enumerate(names.split(), 1)
        },
        "upsample_bicubic2d upsample_bicubic2d.vec": partial(_resampling, 2, "cubic"),
    }
)
POOLING: RuleTable = {target: zeros_if_empty(rule) for target, rule in _RULES.items()}
