"""Updates by index: every part of the rows applies what falls into them, and sums can also be split by what is added.

A part of the indices can be applied alone only if the order does not matter and nothing is overwritten: additions are
lowered to ``self`` plus the sum of what is added to zeros. Of indices that overwrite, or that take a maximum, a product
or a mean, every part of the rows sees all.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from math import prod
from typing import Any

import torch
from torch import Tensor

from shardwise.graph.ir import Arg, Graph, Op, Ref
from shardwise.graph.schema import arguments, by_operator
from shardwise.rules.arguments import (
    at_pieces,
    broadcast_shape,
    flat_pieces,
    if_split,
    normal_dim,
    of_pieces,
    operand_positions,
)
from shardwise.rules.binding import RuleTable, build, dim_names, single, with_dim
from shardwise.rules.elementwise import broadcast_dims
from shardwise.rules.indexing import aligned_dims, index_layout
from shardwise.rules.local_kernels import INDEX_PUT_ROWS, SCATTER_ROWS, SCATTERED_SUM
from shardwise.rules.rule import Dims, FactorKind, LocalContext, LocalOpCall, OpRule

aten = torch.ops.aten

_REDUCTIONS = {"add": "sum", "multiply": "prod"}  # aten.scatter's words -> those of scatter_reduce


def _how(op: Op, args: dict[str, Any]) -> str:
    """Return the reduction of a scatter in the words of scatter_reduce, or nothing for one that overwrites."""
    if op.target is aten.scatter_add.default:
        return "sum"
    named = args.get("reduce") or ""
    return _REDUCTIONS.get(named, named)


def scatter_rule(op: Op, graph: Graph) -> OpRule | None:
    """``... v ..., ... i ... -> ... v ...``: the other dims are parallel where all sizes agree."""
    args, positions = arguments(op), operand_positions(op)
    shape, index, *sources = (graph.by_name[name].shape for name in op.operands)
    if not shape or len(shape) != len(index):  # PyTorch takes an empty index of any rank
        return None
    place = normal_dim(args["dim"], len(shape))
    operand, indices, kinds = aligned_dims(shape, index, place)
    how = _how(op, args)
    adds = op.target in (aten.scatter_add.default, aten.scatter_reduce.two) and how == "sum"
    adds = adds and args.get("include_self", True) and not kinds and index in sources
    kinds["i"] = "lowered" if adds else "whole"
    operands = [operand, indices]
    for source_dims in sources:
        if len(source_dims) != len(index):
            return None
        dims = []
        for i, (size, count) in enumerate(zip(source_dims, index, strict=True)):
            if size == count:
                dims.append(indices[i])
                continue
            dims.append((f"s{i}",))
            kinds |= dict.fromkeys((f"s{i}", *indices[i], *(() if i == place else operand[i])), "whole")
        operands.append(tuple(dims))

    def call(op: Op) -> tuple[Arg, ...]:
        x, ids, source = map(Ref, op.operands) if sources else (*map(Ref, op.operands), None)
        return x, place, ids, source, args.get("value", 1), how, args.get("include_self", True), False

    together = tuple(positions[name][0] for name in ("self", "src") if name in positions)
    additive = op.target is aten.scatter_add.default or (not how and args.get("value", 0) == 0)
    linear = (together,) if additive else ()
    lowering, local = scatter_add if adds else None, of_pieces(SCATTER_ROWS, "v", call)
    return build(op, graph, operands, [operand], kinds=kinds, linear=linear, localize=local, lowering=lowering)


def index_update_rule(op: Op, graph: Graph) -> OpRule | None:
    """index_add, index_copy, index_fill, index_reduce (rows whole): ``... v ..., i, ... i ... -> ... v ...``."""
    args, positions = arguments(op), operand_positions(op)
    shape = graph.by_name[op.operands[0]].shape
    if not shape:
        return None
    place = normal_dim(args["dim"], len(shape))
    names = dim_names(len(shape))
    dims = single(names)
    by_argument: dict[str, Dims] = {
        "self": dims,
        "index": single(["i"])[: len(graph.by_name[op.operands[1]].shape)],
        "source": with_dim(names, place, "i"),
        "value": (),
    }
    ordered = [name for _, name in sorted((p[0], name) for name, p in positions.items())]
    adds = op.target is aten.index_add.default
    fills = "source" not in positions

    def call(op: Op) -> tuple[Arg, ...]:
        x, ids = map(Ref, op.operands[:2])
        source = Ref(op.operands[2]) if len(op.operands) > 2 else None
        number = args["value"] if source is None else args.get("alpha", 1)
        return x, place, ids, source, number, "sum" if adds else "", True, fills

    kinds: dict[str, FactorKind] = {"i": "lowered" if adds else "whole"}
    reduces = op.target is aten.index_reduce.default
    if reduces:
        kinds[names[place]] = "whole"
    linear = () if fills or reduces else (tuple(positions[name][0] for name in ("self", "source")),)
    return build(
        op,
        graph,
        [by_argument[name] for name in ordered],
        [dims],
        kinds=kinds,
        linear=linear,
        localize=of_pieces(SCATTER_ROWS, [names[place]], call),
        lowering=index_add if adds else None,
    )


def index_put_rule(op: Op, graph: Graph) -> OpRule | None:
    """``x[i, j] = values``, or ``+=``, with integer indices; values broadcast."""
    layout = index_layout(op, graph)
    if layout is None:
        return _masked_put(op, graph)
    places, indices, operand, selected = layout
    values = graph.by_name[op.operands[-1]].shape
    sizes = dict(zip((d[0] for d in operand), graph.by_name[op.operands[0]].shape, strict=True))
    for dims, name in zip(indices, op.operands[1:], strict=False):
        sizes |= {dim[0]: size for dim, size in zip(dims, graph.by_name[name].shape, strict=True) if dim}
    aligned = selected[len(selected) - len(values) :]
    value_dims = tuple(dim if size == sizes[dim[0]] else () for dim, size in zip(aligned, values, strict=True))
    indexed = [f"v{i}" for i in range(len(places))]
    adds = arguments(op)["accumulate"] and places == list(range(places[0], places[0] + len(places)))

    def localize(op: Op, context: LocalContext) -> LocalOpCall:
        x, *ids, source = map(Ref, op.operands)
        counts = tuple(len(context.pieces[name]) for name in indexed)
        pieces = flat_pieces([piece for name in indexed for piece in context.pieces[name]])
        rest = (arguments(op)["accumulate"], tuple(places), counts)
        return LocalOpCall(INDEX_PUT_ROWS, (x, tuple(ids), source, *rest, *pieces))

    return build(
        op,
        graph,
        [operand, *indices, value_dims],
        [operand],
        kinds={name: "lowered" if adds else "whole" for name in sizes if name[0] == "i"},
        linear=((0, len(op.operands) - 1),),
        localize=if_split(localize, *indexed),
        lowering=index_put if adds else None,
    )


def _masked_put(op: Op, graph: Graph) -> OpRule | None:
    """``x[mask] = value``, where the value is the same wherever the mask is: every part is masked for itself."""
    args = arguments(op)["indices"]
    places = [i for i, index in enumerate(args) if index is not None]
    x, mask, values = (graph.by_name[name] for name in (*op.operands[:2], op.operands[-1]))
    if len(places) != 1 or len(op.operands) != 3 or mask.dtype != torch.bool:
        return None
    names = dim_names(len(x.shape))
    start, end = places[0], places[0] + len(mask.shape)
    behind = x.shape[end:]
    value_shape = values.shape[len(values.shape) - len(behind) :] if len(values.shape) > len(behind) else values.shape
    if prod(values.shape) != prod(value_shape):  # one value per element that is masked: their number is data
        return None
    value_dims: Dims = ((),) * (len(values.shape) - len(value_shape))
    value_dims += broadcast_dims(value_shape, behind, names[end:])
    dims = single(names)
    return build(op, graph, [dims, single(names[start:end]), value_dims], [dims], linear=((0, 2),))


def scattered_sum_rule(op: Op, graph: Graph) -> OpRule:
    """``... i ..., i or ... i ... -> ... v ...``: what is added is a sum, the rows are parallel."""
    src, index = (graph.by_name[name].shape for name in op.operands)
    place = op.args[1]
    assert isinstance(place, int), "the dim is a number"
    names = dim_names(len(src))
    added = with_dim(names, place, "i")
    rows = with_dim(names, place, "v")
    indices = added if len(index) == len(src) else single(["i"])
    localize = at_pieces("v")
    return build(op, graph, [added, indices], [rows], kinds={"i": "sum"}, linear=((0,),), localize=localize)


def masked_scatter_rule(op: Op, graph: Graph) -> OpRule | None:
    """The n-th element that is masked gets the n-th of the source: lowered to a running count and a lookup."""
    shape, mask, source = (graph.by_name[name].shape for name in op.operands)
    if broadcast_shape(shape, mask) != shape or prod(source) == 0:
        return None
    names, sources = dim_names(len(shape)), tuple(f"s{i}" for i in range(len(source)))
    dims = single(names)
    kinds: dict[str, FactorKind] = dict.fromkeys((*names, *sources), "lowered")
    operands = [dims, broadcast_dims(mask, shape, names), single(sources)]
    return build(op, graph, operands, [dims], kinds=kinds, linear=((0, 2),), lowering=masked_scatter)


# ------------------------------------------------------------------------------------------------------------ lowerings


def _added(self: Tensor, dim: int, index: Tensor, src: Tensor) -> Tensor:
    rows = self.shape[dim]
    total: Tensor = torch.ops.shardwise.scattered_sum(src, dim % self.dim(), index, [rows], [0], [rows])
    return self + total


def scatter_add(
    self: Tensor, dim: int, index: Tensor, src: Tensor, how: str = "sum", *, include_self: bool = True
) -> Tensor:
    """Also ``scatter_reduce`` with the reduction ``sum``."""
    assert (how, include_self) == ("sum", True), "only sums can be split by what is added"
    return _added(self, dim, index, src)


def index_add(self: Tensor, dim: int, index: Tensor, source: Tensor, *, alpha: float = 1) -> Tensor:
    return _added(self, dim, index, source if alpha == 1 else source * alpha)


def index_put(self: Tensor, indices: Sequence[Tensor | None], values: Tensor, accumulate: bool = False) -> Tensor:
    """Adjacent indexed dims as one, and their indices as one list."""
    assert accumulate, "only sums can be split by what is added"
    first = next(dim for dim, index in enumerate(indices) if index is not None)
    chosen = [index for index in indices if index is not None]
    sizes = self.shape[first : first + len(chosen)]
    counted = [torch.where(index < 0, index + size, index) for index, size in zip(chosen, sizes, strict=True)]
    within = [(index >= 0) & (index < size) for index, size in zip(counted, sizes, strict=True)]
    flat = sum(index * prod(sizes[i + 1 :]) for i, index in enumerate(counted))
    flat = torch.where(reduce(torch.logical_and, within), flat, prod(sizes))
    after = self.shape[first + len(chosen) :]
    addends = values.expand(*self.shape[:first], *flat.shape, *after).flatten(first, first + flat.dim() - 1)
    rows = self.flatten(first, first + len(chosen) - 1)
    return torch.unflatten(_added(rows, first, flat.flatten(), addends), first, sizes)


def masked_scatter(self: Tensor, mask: Tensor, source: Tensor) -> Tensor:
    place = (mask.expand(self.shape).flatten().cumsum(0) - 1).reshape(self.shape)
    return torch.where(mask, source.flatten()[place.clamp_min(0)], self)


UPDATES: RuleTable = by_operator(
    {
        "scatter.src scatter.value scatter.reduce scatter.value_reduce scatter_add scatter_reduce.two": scatter_rule,
        "index_add index_copy index_fill.int_Scalar index_fill.int_Tensor index_reduce": index_update_rule,
        "index_put": index_put_rule,
        "masked_scatter": masked_scatter_rule,
    },
    {SCATTERED_SUM: scattered_sum_rule},
)
