"""Taking a dim apart and putting dims together: split, slice, select, cat, stack.

Parts that start at multiples of a common length c turn the dim into a product ``(s c)``: which part, and where in
it. Which part is whole; where in it can be split. So the three parts of a fused qkv projection can be split by
heads, and ``x[..., :d / 2]`` of a rotary embedding along what is left of d. Parts that have no common length leave
the dim whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd

import torch

from shardwise.graph.ir import Graph, Op, Ref
from shardwise.graph.schema import arguments
from shardwise.rules.binding import RuleTable, build, dim_names, single
from shardwise.rules.calls import local_size, normal_dim, replaced
from shardwise.rules.rule import Call, Dims, FactorKind, LocalContext, OpRule

aten = torch.ops.aten

_UNIT, _PARTS = "c", "s"


def _rank(op: Op, graph: Graph) -> int:
    return len(graph.by_name[op.operands[0]].shape)


def _with(names: Sequence[str], place: int, dim: tuple[str, ...]) -> Dims:
    return tuple(dim if i == place else (name,) for i, name in enumerate(names))


def _part(number: int, unit: int, name: str) -> tuple[str, ...]:
    """The factors of a dim of ``number`` units: the name of the whole factor where there is more than one."""
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
    results = [_with(names, place, _part(number, unit, f"{_PARTS}{i}")) for i, number in enumerate(numbers)]
    kinds: dict[str, FactorKind] = {name: "whole" for name in sizes if name != _UNIT}

    def localize(op: Op, context: LocalContext) -> Call:
        local = tuple(number * _local_unit(context, unit) for number in numbers)
        return Call(aten.split_with_sizes.default, (Ref(op.operands[0]), local, place))

    operand = _with(names, place, _part(sum(numbers), unit, _PARTS))
    linear = ((0,),)
    return build(op, graph, [operand], results, kinds=kinds, sizes=sizes, linear=linear, localize=localize)


def _unbind(op: Op, graph: Graph) -> OpRule:
    names = dim_names(_rank(op, graph))
    place = normal_dim(arguments(op)["dim"], len(names))
    result = single([name for i, name in enumerate(names) if i != place])
    kinds: dict[str, FactorKind] = {names[place]: "whole"}
    return build(op, graph, [single(names)], [result] * len(op.results), kinds=kinds, linear=((0,),))


def _slice_of(op: Op, graph: Graph) -> tuple[int, int, int, int]:
    """``(dim, start, length, step)`` of slice, narrow and slice_scatter."""
    given, shape = arguments(op), graph.by_name[op.operands[0]].shape
    place = normal_dim(given["dim"], len(shape))
    if "length" in given:
        return place, given["start"] % max(shape[place], 1), given["length"], 1
    start, stop, step = slice(given["start"], given["end"], given["step"]).indices(shape[place])
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
    shape = graph.by_name[op.operands[0]].shape
    names = dim_names(len(shape))
    place, start, length, step = _slice_of(op, graph)
    operand, result, sizes = _slice_dims(shape[place], start, length, step)

    def localize(op: Op, context: LocalContext) -> Call:
        first, last = _local_bounds(context, start, length, step, sizes)
        return Call(aten.slice.Tensor, (Ref(op.operands[0]), place, first, last, step))

    kinds: dict[str, FactorKind] = {_PARTS: "whole", "y": "whole"}
    dims = [_with(names, place, operand)]
    return build(
        op,
        graph,
        dims,
        [_with(names, place, result)],
        kinds=kinds,
        sizes=sizes,
        linear=((0,),),
        localize=localize,
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
    shape = graph.by_name[op.operands[0]].shape
    names = dim_names(len(shape))
    place, start, length, step = _slice_of(op, graph)
    whole_dim, part, sizes = _slice_dims(shape[place], start, length, step)

    def localize(op: Op, context: LocalContext) -> Call:
        first, last = _local_bounds(context, start, length, step, sizes)
        return replaced(op, dim=place, start=first, end=last)

    target = _with(names, place, whole_dim)
    kinds: dict[str, FactorKind] = {_PARTS: "whole", "y": "whole"}
    operands = [target, _with(names, place, part)]
    return build(op, graph, operands, [target], kinds=kinds, sizes=sizes, linear=((0, 1),), localize=localize)


def _select(op: Op, graph: Graph) -> OpRule:
    names = dim_names(_rank(op, graph))
    place = normal_dim(arguments(op)["dim"], len(names))
    result = single([name for i, name in enumerate(names) if i != place])
    return build(op, graph, [single(names)], [result], kinds={names[place]: "whole"}, linear=((0,),))


def _select_scatter(op: Op, graph: Graph) -> OpRule:
    names = dim_names(_rank(op, graph))
    place = normal_dim(arguments(op)["dim"], len(names))
    source = single([name for i, name in enumerate(names) if i != place])
    target = single(names)
    return build(op, graph, [target, source], [target], kinds={names[place]: "whole"}, linear=((0, 1),))


def _cat(op: Op, graph: Graph) -> OpRule | None:
    shapes = [graph.by_name[name].shape for name in op.operands]
    rank = len(graph.by_name[op.results[0]].shape)
    if any(len(shape) != rank for shape in shapes):  # the empty 1-D tensors that cat ignores
        return None
    names = dim_names(rank)
    place = normal_dim(arguments(op)["dim"], rank)
    lengths = [shape[place] for shape in shapes]
    unit = gcd(*lengths) or 1
    numbers = [length // unit for length in lengths]
    sizes = {f"{_PARTS}{i}": number for i, number in enumerate(numbers)} | {_PARTS: sum(numbers), _UNIT: unit}
    operands = [_with(names, place, _part(number, unit, f"{_PARTS}{i}")) for i, number in enumerate(numbers)]
    result = _with(names, place, _part(sum(numbers), unit, _PARTS))
    kinds: dict[str, FactorKind] = {name: "whole" for name in sizes if name != _UNIT}
    together = (tuple(range(len(operands))),)
    return build(op, graph, operands, [result], kinds=kinds, sizes=sizes, linear=together)


def _stack(op: Op, graph: Graph) -> OpRule:
    names = dim_names(_rank(op, graph))
    place = arguments(op)["dim"] % (len(names) + 1)
    dims = single(names)
    result = (*dims[:place], (_PARTS,), *dims[place:])
    count = len(op.operands)
    together = (tuple(range(count)),)
    return build(op, graph, [dims] * count, [result], kinds={_PARTS: "whole"}, linear=together)


JOINS: RuleTable = {
    aten.split.Tensor: parts_rule,
    aten.split.sizes: parts_rule,
    aten.split_with_sizes.default: parts_rule,
    aten.chunk.default: parts_rule,
    aten.tensor_split.sections: parts_rule,
    aten.tensor_split.indices: parts_rule,
    aten.unbind.int: _unbind,
    aten.slice.Tensor: slice_rule,
    aten.narrow.default: slice_rule,
    aten.slice_scatter.default: _slice_scatter,
    aten.select.int: _select,
    aten.select_scatter.default: _select_scatter,
    aten.cat.default: _cat,
    aten.concat.default: _cat,
    aten.concatenate.default: _cat,
    aten.stack.default: _stack,
}
