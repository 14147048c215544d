"""Taking a dim apart and putting dims together: split, slice, select, cat, stack.

Parts that start at multiples of a common length c turn the dim into a product ``(s c)``: which part, and where in
it. Which part is whole; where in it can be split. So the three parts of a fused qkv projection can be split by
heads, and ``x[..., :d / 2]`` of a rotary embedding along what is left of d. Parts that have no common length leave
the dim whole.
"""

from __future__ import annotations

from itertools import accumulate
from math import gcd

import torch

from shardwise.graph.ir import Graph, Op, Ref
from shardwise.graph.schema import arguments, by_operator
from shardwise.rules.arguments import local_size, normal_dim, replace_arguments
from shardwise.rules.binding import RuleTable, build, dim_names, rank_of, single, with_dim, without_dim
from shardwise.rules.rule import FactorKind, LocalContext, LocalOpCall, OpRule, Window
from shardwise.rules.windows import Sliding, part_of, shift_rows

aten = torch.ops.aten

_UNIT, _PARTS = "c", "s"


def _part(number: int, unit: int, name: str) -> tuple[str, ...]:
    """Return the factors of a dim of ``number`` units: the name of the whole factor where there is more than one."""
    return ((name,) if number != 1 else ()) + ((_UNIT,) if unit != 1 else ())


def _local_unit(context: LocalContext, unit: int) -> int:
    return local_size(context, _UNIT) if unit != 1 else 1


def parts_rule(op: Op, graph: Graph) -> OpRule:
    """split, chunk and their like: the results tile the dim."""
    shape = graph.by_name[op.operands[0]].shape
    names = dim_names(len(shape))
    place = normal_dim(arguments(op)["dim"], len(shape))
    lengths = [graph.by_name[name].shape[place] for name in op.results]
    unit = gcd(*lengths) or 1
    numbers = [length // unit for length in lengths]
    sizes = {f"{_PARTS}{i}": number for i, number in enumerate(numbers)} | {_PARTS: sum(numbers), _UNIT: unit}
    results = [with_dim(names, place, *_part(number, unit, f"{_PARTS}{i}")) for i, number in enumerate(numbers)]
    kinds: dict[str, FactorKind] = {name: "whole" for name in sizes if name != _UNIT}

    def localize(op: Op, context: LocalContext) -> LocalOpCall:
        local = tuple(number * _local_unit(context, unit) for number in numbers)
        return LocalOpCall(aten.split_with_sizes.default, (Ref(op.operands[0]), local, place))

    operand = with_dim(names, place, *_part(sum(numbers), unit, _PARTS))
    linear = ((0,),)
    return build(op, graph, [operand], results, kinds=kinds, sizes=sizes, linear=linear, localize=localize)


def _slice_of(op: Op, graph: Graph) -> tuple[int, int, int, int]:
    """``(dim, start, length, step)`` of slice, narrow and slice_scatter."""
    args, shape = arguments(op), graph.by_name[op.operands[0]].shape
    place = normal_dim(args["dim"], len(shape))
    if "length" in args:
        return place, args["start"] % max(shape[place], 1), args["length"], 1
    start, stop, step = slice(args["start"], args["end"], args["step"]).indices(shape[place])
    return place, start, len(range(start, stop, step)), step


def _slice_dims(
    size: int, start: int, length: int, step: int
) -> tuple[tuple[str, ...], tuple[str, ...], dict[str, int]]:
    """``(operand dim, result dim, sizes)``. The unit c is splittable, everything else is whole."""
    if step == 1:
        unit = gcd(start, length, size) or 1
        number = length // unit
        sizes = {_PARTS: size // unit, "y": number, _UNIT: unit}
        return _part(size // unit, unit, _PARTS), _part(number, unit, "y"), sizes
    if size % step == 0 and start < step and length == size // step:  # every step-th: ``(c s)``, c major
        return (_UNIT, _PARTS), (_UNIT,), {_UNIT: length, _PARTS: step}
    return (_PARTS,), ("y",), {_PARTS: size, "y": length}


def slice_rule(op: Op, graph: Graph) -> OpRule:
    """The parts of the result that are not the unit are a window of those of the operand."""
    shape = graph.by_name[op.operands[0]].shape
    names = dim_names(len(shape))
    place, start, length, step = _slice_of(op, graph)
    operand, result, sizes = _slice_dims(shape[place], start, length, step)
    slides = _PARTS in operand and "y" in result
    # In units of the operand and of the result.
    sliding_map = Sliding(sizes.get(_PARTS, 1), 1, step, before=-(start // sizes.get(_UNIT, 1) if step == 1 else start))

    def localize(op: Op, context: LocalContext) -> LocalOpCall:
        first, last = 0, context.operand_shapes[0][place]
        if not (slides and context.is_split("y")):
            first, last = _local_bounds(context, start, length, step, sizes)
        return LocalOpCall(aten.slice.Tensor, (Ref(op.operands[0]), place, first, last, step))

    dims = [with_dim(names, place, *operand)]
    return build(
        op,
        graph,
        dims,
        [with_dim(names, place, *result)],
        kinds={_PARTS: "whole", "y": "parallel" if slides else "whole"},
        sizes=sizes,
        linear=((0,),),
        localize=localize,
        windows={_PARTS: Window("y", sliding_map.ranges)} if slides else {},
    )


def _local_bounds(context: LocalContext, start: int, length: int, step: int, sizes: dict[str, int]) -> tuple[int, int]:
    """Start and stop in the shard: global ones counted in units of which the rank holds a part."""
    unit = sizes.get(_UNIT, 1)
    if step != 1 or unit == 1:
        stop = start + (length - 1) * step + 1 if length else start
        if step != 1 and _UNIT in sizes:
            stop = local_size(context, _UNIT) * step
        return start, stop
    local = local_size(context, _UNIT)
    return start // unit * local, (start + length) // unit * local


def _slice_scatter(op: Op, graph: Graph) -> OpRule:
    """The source is a window of what it is put into."""
    shape = graph.by_name[op.operands[0]].shape
    names = dim_names(len(shape))
    place, start, length, step = _slice_of(op, graph)
    whole_dim, part, sizes = _slice_dims(shape[place], start, length, step)
    slides = step == 1 and _PARTS in whole_dim and "y" in part
    before = start // sizes.get(_UNIT, 1)

    def localize(op: Op, context: LocalContext) -> LocalOpCall:
        first, last = _local_bounds(context, start, length, step, sizes)
        if slides and context.is_split(_PARTS):
            offset, num_rows = part_of(context, _PARTS)
            unit = _local_unit(context, sizes[_UNIT])
            first = min(max(before - offset, 0), num_rows) * unit
            last = first + context.operand_shapes[1][place]
        return replace_arguments(op, dim=place, start=first, end=last)

    target = with_dim(names, place, *whole_dim)
    return build(
        op,
        graph,
        [target, with_dim(names, place, *part)],
        [target],
        kinds={_PARTS: "parallel" if slides else "whole", "y": "whole"},
        sizes=sizes,
        linear=((0, 1),),
        localize=localize,
        windows={"y": Window(_PARTS, shift_rows(-before, sizes["y"]))} if slides else {},
    )


def _select(op: Op, graph: Graph) -> OpRule:
    """select, select_scatter and unbind: the dim is whole."""
    names = dim_names(rank_of(op, graph))
    place = normal_dim(arguments(op)["dim"], len(names))
    dims, rest = single(names), without_dim(names, place)
    kinds: dict[str, FactorKind] = {names[place]: "whole"}
    if len(op.operands) == 2:
        return build(op, graph, [dims, rest], [dims], kinds=kinds, linear=((0, 1),))
    return build(op, graph, [dims], [rest] * len(op.results), kinds=kinds, linear=((0,),))


def _cat(op: Op, graph: Graph) -> OpRule | None:
    """Every operand is a window of the result."""
    shapes = [graph.by_name[name].shape for name in op.operands]
    rank = len(graph.by_name[op.results[0]].shape)
    if any(len(shape) != rank for shape in shapes):  # the empty 1-D tensors that cat ignores
        return None
    names = dim_names(rank)
    place = normal_dim(arguments(op)["dim"], rank)
    lengths = [shape[place] for shape in shapes]
    unit = gcd(*lengths) or 1
    numbers = [length // unit for length in lengths]
    starts = [0, *accumulate(numbers)]
    sizes = {f"{_PARTS}{i}": number for i, number in enumerate(numbers)} | {_PARTS: sum(numbers), _UNIT: unit}
    minor = (_UNIT,) if unit != 1 else ()
    operands = [with_dim(names, place, f"{_PARTS}{i}", *minor) for i in range(len(numbers))]
    result = with_dim(names, place, _PARTS, *minor)
    together = (tuple(range(len(operands))),)
    windows = {f"{_PARTS}{i}": Window(_PARTS, shift_rows(-starts[i], number)) for i, number in enumerate(numbers)}
    return build(op, graph, operands, [result], sizes=sizes, linear=together, windows=windows)


def _stack(op: Op, graph: Graph) -> OpRule:
    names = dim_names(rank_of(op, graph))
    place = arguments(op)["dim"] % (len(names) + 1)
    dims = single(names)
    result = (*dims[:place], (_PARTS,), *dims[place:])
    count = len(op.operands)
    together = (tuple(range(count)),)
    return build(op, graph, [dims] * count, [result], kinds={_PARTS: "whole"}, linear=together)


JOINS: RuleTable = by_operator(
    {
        "split.Tensor split.sizes split_with_sizes chunk tensor_split.sections tensor_split.indices": parts_rule,
        "slice.Tensor narrow": slice_rule,
        "slice_scatter": _slice_scatter,
        "select.int select_scatter unbind.int": _select,
        "cat concat concatenate": _cat,
        "stack": _stack,
    }
)
