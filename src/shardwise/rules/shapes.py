"""Views: reshaping, reordering, repeating. They move no data across a factor, so almost every dim is parallel."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import count, islice
from math import gcd, prod
from typing import Any

import torch

from shardwise.graph.ir import Graph, Op, Ref
from shardwise.graph.schema import arguments, by_operator
from shardwise.rules.arguments import (
    any_split,
    block_offset,
    flat_pieces,
    local_size,
    normal_dim,
    replace_arguments,
    same_call,
)
from shardwise.rules.binding import RuleTable, build, dim_names, rank_of, single, with_dim
from shardwise.rules.elementwise import broadcast_dims, pointwise_rule
from shardwise.rules.empty import zeros_if_empty
from shardwise.rules.local_kernels import TRIANGLE
from shardwise.rules.rule import Dims, FactorKind, LocalContext, Localize, LocalOpCall, OpRule, Ranges, Window
from shardwise.rules.window_kernels import COPIED_RUNS
from shardwise.rules.windows import (
    RowRun,
    Sliding,
    cut_runs,
    part_of,
    ranges_of_runs,
    runs_within,
    shift_rows,
    windows_of_runs,
)

aten = torch.ops.aten

_FIRST = ((0,),)


# -- reshaping ---------------------------------------------------------------------------------------------------------


def regroup(before: Sequence[int], after: Sequence[int]) -> tuple[Dims, Dims, dict[str, int], tuple[str, ...]]:
    """Relate the shapes of a reshape: ``(dims before, dims after, factor sizes, factors that must stay whole)``.

    Both shapes are read from the left. Where one dim divides the other it becomes a factor of it; where neither
    does, their common divisor is split off and the rest of the block is whole: ``(6, 4) -> (8, 3)`` is ``(d0 d1) d2
    -> (d0 d3) d4``, d0 = 2.
    """
    names = (f"d{i}" for i in count())
    sizes: dict[str, int] = {}
    whole: list[str] = []
    sides: tuple[list[list[str]], list[list[str]]] = ([[] for _ in before], [[] for _ in after])
    left = [before[0] if before else 1, after[0] if after else 1]
    place = [0, 0]
    shapes = (before, after)

    def factor(size: int, on: Sequence[int]) -> str:
        name = next(names)
        sizes[name] = size
        for side in on:
            sides[side][place[side]].append(name)
        return name

    def advance(side: int) -> None:
        place[side] += 1
        left[side] = shapes[side][place[side]] if place[side] < len(shapes[side]) else 1

    def finished(side: int) -> bool:
        return place[side] >= len(shapes[side])

    while not (finished(0) and finished(1)):
        for side in (0, 1):
            if not finished(side) and left[side] == 1:
                advance(side)
                break
        else:
            shared = gcd(left[0], left[1])
            nests = shared > 1 and shared in left
            if shared > 1:
                factor(shared, (0, 1))
                left[0], left[1] = left[0] // shared, left[1] // shared
            if not nests:
                whole += _unrelated(left, place, shapes, factor)
                for side in (0, 1):
                    advance(side)
    dims = tuple(tuple(tuple(dim) for dim in side) for side in sides)
    return dims[0], dims[1], sizes, tuple(whole)


def _unrelated(
    left: list[int],
    place: list[int],
    shapes: tuple[Sequence[int], Sequence[int]],
    factor: Callable[[int, Sequence[int]], str],
) -> list[str]:
    """The rest of a block whose dims do not nest: a whole factor per dim, up to equal numbers of elements.

    What the last dims of the block have in common is a factor of both again.
    """
    sizes: tuple[list[int], list[int]] = ([left[0]], [left[1]])
    while prod(sizes[0]) != prod(sizes[1]):
        side = 0 if prod(sizes[0]) < prod(sizes[1]) else 1
        sizes[side].append(shapes[side][place[side] + len(sizes[side])])
    shared = gcd(sizes[0][-1], sizes[1][-1])
    sizes[0][-1], sizes[1][-1] = sizes[0][-1] // shared, sizes[1][-1] // shared
    whole = []
    for side in (0, 1):
        for i, size in enumerate(sizes[side]):
            place[side] += i > 0
            if size != 1:
                whole.append(factor(size, (side,)))
    if shared != 1:
        factor(shared, (0, 1))
    return whole


def reshape_rule(op: Op, graph: Graph) -> OpRule | None:
    """Any view: the local call is a reshape to the local shape."""
    before, after = graph.by_name[op.operands[0]].shape, graph.by_name[op.results[0]].shape
    if prod(before) == 0:
        return None
    dims, result, sizes, whole = regroup(before, after)
    kinds: dict[str, FactorKind] = dict.fromkeys(whole, "whole")
    return build(op, graph, [dims], [result], kinds=kinds, sizes=sizes, linear=_FIRST, localize=_local_reshape)


def _local_reshape(op: Op, context: LocalContext) -> LocalOpCall:
    return LocalOpCall(aten.reshape.default, (Ref(op.operands[0]), context.result_shapes[0]))


# -- reordering --------------------------------------------------------------------------------------------------------


def _reordered(order: Callable[[dict[str, Any], int], Sequence[int]], op: Op, graph: Graph) -> OpRule:
    """``order``: returns the dims of the operand in the order of the result, by arguments and rank."""
    names = dim_names(rank_of(op, graph))
    dims = order(arguments(op), len(names))
    return build(op, graph, [single(names)], [single([names[i] for i in dims])], linear=_FIRST)


def _swapped(first: str, second: str, args: dict[str, Any], rank: int) -> list[int]:
    order = list(range(rank))
    if rank:
        i, j = normal_dim(args[first], rank), normal_dim(args[second], rank)
        order[i], order[j] = order[j], order[i]
    return order


def _moved(args: dict[str, Any], rank: int) -> list[int]:
    source, destination = dims_in_order(args["source"], rank), dims_in_order(args["destination"], rank)
    rest = iter(i for i in range(rank) if i not in source)
    moved = dict(zip(destination, source, strict=True))
    return [moved[i] if i in moved else next(rest) for i in range(rank)]


def dims_in_order(dim: int | Sequence[int], rank: int) -> list[int]:
    return [normal_dim(d, rank) for d in ((dim,) if isinstance(dim, int) else dim)]


def _squeeze(op: Op, graph: Graph) -> OpRule:
    """Dims of size 1 that are asked for disappear; the local call names them, since a shard may be of size 1 too."""
    shape = graph.by_name[op.operands[0]].shape
    args = arguments(op)
    chosen = dims_in_order(args["dim"], len(shape)) if "dim" in args else range(len(shape))
    gone = tuple(i for i in chosen if shape and shape[i] == 1)
    dims = broadcast_dims(shape, shape, dim_names(len(shape)))
    kept = tuple(dim for i, dim in enumerate(dims) if i not in gone)

    def localize(op: Op, context: LocalContext) -> LocalOpCall:
        return LocalOpCall(aten.squeeze.dims, (Ref(op.operands[0]), gone))

    return build(op, graph, [dims], [kept], linear=_FIRST, localize=localize)


def _unsqueeze(op: Op, graph: Graph) -> OpRule:
    names = dim_names(rank_of(op, graph))
    place = arguments(op)["dim"] % (len(names) + 1)
    dims = single(names)
    return build(op, graph, [dims], [(*dims[:place], (), *dims[place:])], linear=_FIRST)


def _diagonal(op: Op, graph: Graph) -> OpRule:
    """diagonal, its reverse diag_embed, and diagonal_scatter: the two dims and the diagonal are whole."""
    args, along = arguments(op), "y" if op.target is aten.diagonal.default else "x"
    rank = len(graph.by_name[op.results[0] if op.target is aten.diag_embed.default else op.operands[0]].shape)
    names = dim_names(rank)
    pair = {normal_dim(args["dim1"], rank), normal_dim(args["dim2"], rank)}
    square, line = single(names), single((*(name for i, name in enumerate(names) if i not in pair), along))
    kinds: dict[str, FactorKind] = dict.fromkeys((*(names[i] for i in pair), along), "whole")
    if len(op.operands) == 2:
        return build(op, graph, [square, line], [square], kinds=kinds, linear=((0, 1),))
    operand, result = (square, line) if op.target is aten.diagonal.default else (line, square)
    return build(op, graph, [operand], [result], kinds=kinds, linear=_FIRST)


def _complex_pairs(op: Op, graph: Graph) -> OpRule:
    """view_as_complex and view_as_real: the dim of (real, imaginary) is whole."""
    operand, result = graph.by_name[op.operands[0]].shape, graph.by_name[op.results[0]].shape
    names = dim_names(min(len(operand), len(result)))
    dims = [single((*names, "pair")[: len(shape)]) for shape in (operand, result)]
    return build(op, graph, dims[:1], dims[1:], kinds={"pair": "whole"}, linear=_FIRST)


# -- repeating ---------------------------------------------------------------------------------------------------------


def _expand(op: Op, graph: Graph) -> OpRule:
    """A broadcast dim is a factor of the result alone: each part repeats the operand as often as it needs."""

    def localize(op: Op, context: LocalContext) -> LocalOpCall:
        return LocalOpCall(aten.expand.default, (Ref(op.operands[0]), context.result_shapes[0]))

    return pointwise_rule(op, graph, _FIRST, localize)


def _repeat(argument: str, op: Op, graph: Graph) -> OpRule:
    """``repeat``: the result's dims are ``(r d)``, repetition major, and both can be split."""
    shape = graph.by_name[op.operands[0]].shape
    result = graph.by_name[op.results[0]].shape
    repeats = tuple(arguments(op)[argument])
    times = (1,) * (len(result) - len(repeats)) + repeats
    names = dim_names(len(result))
    dims = broadcast_dims(shape, result, names)
    padded: Dims = ((),) * (len(result) - len(shape)) + dims
    repeated: Dims = tuple(
        (() if number == 1 else (f"r{i}",)) + dim_names_here
        for i, (number, dim_names_here) in enumerate(zip(times, padded, strict=True))
    )
    sizes = {f"r{i}": number for i, number in enumerate(times) if number != 1}

    def localize(op: Op, context: LocalContext) -> LocalOpCall:
        local = tuple(local_size(context, f"r{i}") if f"r{i}" in sizes else 1 for i in range(len(times)))
        return LocalOpCall(aten.repeat.default, (Ref(op.operands[0]), local))

    return build(op, graph, [dims], [repeated], sizes=sizes, linear=_FIRST, localize=localize)


def _repeat_interleave(op: Op, graph: Graph) -> OpRule:
    """Each index ``r`` times: the result's dim is ``(d r)``. Without a dim the operand is flattened first."""
    args, shape = arguments(op), graph.by_name[op.operands[0]].shape
    names = dim_names(len(shape))
    dims = single(names)
    if args["dim"] is None or not shape:
        result: Dims = ((*names, "r"),)
    else:
        place = normal_dim(args["dim"], len(shape))
        result = with_dim(names, place, names[place], "r")

    def localize(op: Op, context: LocalContext) -> LocalOpCall:
        return replace_arguments(op, repeats=local_size(context, "r"), output_size=None)

    sizes = {"r": args["repeats"]}
    return build(op, graph, [dims], [result], sizes=sizes, linear=_FIRST, localize=localize)


# -- moving along a dim ------------------------------------------------------------------------------------------------


def copied_rule(op: Op, graph: Graph, runs: Mapping[int, Sequence[RowRun]], plain: LocalOpCall | None = None) -> OpRule:
    """Operators whose results are copies of rows: ``runs`` per dim along which they move. ``plain``: the call where
    none of these is split, if it is not the operator's own."""
    names = dim_names(rank_of(op, graph))

    def localize(op: Op, context: LocalContext) -> LocalOpCall:
        if not any_split(context, [f"y{dim}" for dim in runs]):
            return plain or same_call(op)
        local: list[tuple[RowRun, ...]] = []
        for dim, lengths in runs.items():
            part = cut_runs(lengths, *part_of(context, f"y{dim}"))
            local.append(runs_within(part, ranges_of_runs(part)) if context.is_split(f"y{dim}") else part)
        flat = [run for runs_of_dim in local for run in runs_of_dim]
        columns = (tuple(run.length for run in flat), tuple(run.first for run in flat), tuple(run.step for run in flat))
        return LocalOpCall(COPIED_RUNS, (Ref(op.operands[0]), tuple(runs), tuple(map(len, local)), *columns))

    ranges = {dim: windows_of_runs(runs_of_dim) for dim, runs_of_dim in runs.items()}
    return moved_rule(op, graph, ranges, localize, names)


def _copied_runs(op: Op, graph: Graph) -> OpRule:
    args = arguments(op)
    runs = iter([RowRun(*run) for run in zip(args["lengths"], args["firsts"], args["steps"], strict=True)])
    counts = dict(zip(args["dims"], args["counts"], strict=True))
    return copied_rule(op, graph, {dim: tuple(islice(runs, number)) for dim, number in counts.items()})


def moved_rule(
    op: Op,
    graph: Graph,
    ranges: Mapping[int, Callable[[int, int], Ranges]],
    localize: Localize | None,
    names: Sequence[str],
    *,
    linear: bool = True,
    more: Dims = (),
) -> OpRule:
    """Operators that read some dims through windows (``ranges``: of the rows of the result), the others as they are.
    ``more``: whole dims that the result has besides."""
    result = [f"y{i}" if i in ranges else name for i, name in enumerate(names)]
    return build(
        op,
        graph,
        [single(names)],
        [(*single(result), *more)],
        kinds={name: "whole" for dim in more for name in dim},
        linear=_FIRST if linear else (),
        localize=localize,
        windows={names[i]: Window(f"y{i}", dim_ranges) for i, dim_ranges in ranges.items()},
    )


def _roll(op: Op, graph: Graph) -> OpRule:
    """Without dims the tensor is rolled as if it were flat: whole."""
    args, shape = arguments(op), graph.by_name[op.operands[0]].shape
    if not tuple(args["dims"]):
        names = dim_names(len(shape))
        return build(op, graph, [single(names)], [single(names)], kinds=dict.fromkeys(names, "whole"), linear=_FIRST)
    shifts: dict[int, int] = {}
    for dim, shift in zip(dims_in_order(tuple(args["dims"]), len(shape)), args["shifts"], strict=True):
        shifts[dim] = (shifts.get(dim, 0) + shift) % max(shape[dim], 1)
    moved = {dim: shift for dim, shift in shifts.items() if shift}  # a whole turn would be none of a part
    x = Ref(op.operands[0])
    plain = LocalOpCall(aten.alias.default, (x,))
    if moved:
        plain = LocalOpCall(aten.roll.default, (x, tuple(moved.values()), tuple(moved)))
    runs = {d: (RowRun(shift, shape[d] - shift, 1), RowRun(shape[d] - shift, 0, 1)) for d, shift in moved.items()}
    return copied_rule(op, graph, runs, plain)


def _flip(op: Op, graph: Graph) -> OpRule:
    """flip; fliplr and flipud have no argument for their dim."""
    shape = graph.by_name[op.operands[0]].shape
    fixed_dims = {aten.fliplr.default: (1,), aten.flipud.default: (0,)}.get(op.target)
    dims = dims_in_order(fixed_dims or tuple(arguments(op)["dims"]), len(shape))
    turned = {dim: windows_of_runs((RowRun(shape[dim], shape[dim] - 1, -1),)) for dim in dims if shape}
    return moved_rule(op, graph, turned, None, dim_names(len(shape)))


def _pad(op: Op, graph: Graph) -> OpRule:
    """Padding with 0, or with the tensor's own values, is linear."""
    args, shape = arguments(op), graph.by_name[op.operands[0]].shape
    padding, mode = tuple(args["pad"]), args.get("mode", "constant")
    around = {len(shape) - 1 - i // 2: (padding[i], padding[i + 1]) for i in range(0, len(padding), 2)}
    around = {dim: pair for dim, pair in around.items() if any(pair)}
    if mode != "constant":
        return copied_rule(op, graph, {dim: _mirrored(mode, shape[dim], *pair) for dim, pair in around.items()})

    def localize(op: Op, context: LocalContext) -> LocalOpCall:
        local = [0] * len(padding)
        for dim, pair in around.items():
            before, after = pair
            if context.is_split(f"y{dim}"):
                (offset, length), size_here = part_of(context, f"y{dim}"), context.operand_shapes[0][dim]
                # Rows that are taken away (negative padding) are not in the window.
                before = min(max(pair[0] - offset, 0), length)
                after = length - before - size_here
            position = 2 * (len(shape) - 1 - dim)
            local[position : position + 2] = before, after
        return replace_arguments(op, pad=tuple(local))

    ranges = {dim: shift_rows(-before, shape[dim]) for dim, (before, _) in around.items()}
    return moved_rule(op, graph, ranges, localize, dim_names(len(shape)), linear=not args["value"])


def _mirrored(mode: str, size: int, before: int, after: int) -> tuple[RowRun, ...]:
    """The rows of a dim that is padded with its own."""
    lead, tail = max(before, 0), max(after, 0)
    first = {
        "reflect": RowRun(lead, before, -1),
        "replicate": RowRun(lead, 0, 0),
        "circular": RowRun(lead, size - lead, 1),
    }
    last = {
        "reflect": RowRun(tail, size - 2, -1),
        "replicate": RowRun(tail, size - 1, 0),
        "circular": RowRun(tail, 0, 1),
    }
    return first[mode], RowRun(size + min(before, 0) + min(after, 0), max(-before, 0), 1), last[mode]


def _unfold(op: Op, graph: Graph) -> OpRule:
    """``d -> y window``: the windows of a part read the rows from its first to its last."""
    args, shape = arguments(op), graph.by_name[op.operands[0]].shape
    if not shape:
        return build(op, graph, [()], [(("window",),)], kinds={"window": "whole"}, linear=_FIRST)
    place = normal_dim(args["dimension"], len(shape))
    sliding_map = Sliding(shape[place], args["size"], args["step"])

    names = dim_names(len(shape))
    return moved_rule(op, graph, {place: sliding_map.ranges}, None, names, more=(("window",),))


def _triangle(op: Op, graph: Graph, *, upper: bool) -> OpRule:
    """tril and triu: a part of the rows or columns moves the diagonal."""
    names = (*dim_names(rank_of(op, graph) - 2), "m", "n")
    diagonal = arguments(op)["diagonal"]

    def localize(op: Op, context: LocalContext) -> LocalOpCall:
        rows, columns = context.pieces["m"], context.pieces["n"]
        first_row, first_column = block_offset(rows), block_offset(columns)
        if first_row is not None and first_column is not None:
            return LocalOpCall(op.target, (Ref(op.operands[0]), diagonal + first_row - first_column))
        return LocalOpCall(TRIANGLE, (Ref(op.operands[0]), diagonal, upper, *flat_pieces(rows), *flat_pieces(columns)))

    return build(op, graph, [single(names)], [single(names)], linear=_FIRST, localize=localize)


SHAPES: RuleTable = by_operator(
    {
        "reshape flatten.using_ints unflatten.int ravel": reshape_rule,
        "transpose.int swapdims": partial(_reordered, partial(_swapped, "dim0", "dim1")),
        "swapaxes": partial(_reordered, partial(_swapped, "axis0", "axis1")),
        "permute": partial(_reordered, lambda args, rank: dims_in_order(args["dims"], rank)),
        "t mT mH adjoint": partial(_reordered, lambda _, rank: [*range(rank - 2), *range(rank)[-2:][::-1]]),
        "numpy_T": partial(_reordered, lambda _, rank: range(rank)[::-1]),
        "movedim.int movedim.intlist moveaxis.int moveaxis.intlist": partial(_reordered, _moved),
        "squeeze squeeze.dim squeeze.dims": _squeeze,
        "unsqueeze": _unsqueeze,
        "diagonal diag_embed diagonal_scatter": _diagonal,
        "view_as_complex view_as_real": _complex_pairs,
        "expand broadcast_to": _expand,
        "repeat": partial(_repeat, "repeats"),
        "tile": partial(_repeat, "dims"),
        "repeat_interleave.self_int": _repeat_interleave,
        "roll": _roll,
        "flip fliplr flipud": _flip,
        "pad": zeros_if_empty(_pad),
        "constant_pad_nd": _pad,
        "unfold": zeros_if_empty(_unfold),
        "tril": partial(_triangle, upper=False),
        "triu": partial(_triangle, upper=True),
    },
    {COPIED_RUNS: _copied_runs},
)
