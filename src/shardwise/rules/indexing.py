"""Lookups by index: a part of the rows answers for its own indices and gives 0 for the others."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shardwise.graph.ir import Graph, Op, Ref
from shardwise.graph.schema import arguments, by_operator
from shardwise.rules.arguments import broadcast_shape, flat_pieces, if_split, normal_dim, of_pieces
from shardwise.rules.binding import RuleTable, build, dim_names, leading_names, single, with_dim
from shardwise.rules.local_kernels import (
    EMBEDDING_ROWS,
    GATHER_ROWS,
    INDEX_ROWS,
    INDEX_SELECT_ROWS,
    ONE_HOT_CLASSES,
)
from shardwise.rules.rule import Dims, FactorKind, LocalContext, LocalOpCall, OpRule

aten = torch.ops.aten

_FIRST = ((0,),)


def _shapes(op: Op, graph: Graph) -> list[tuple[int, ...]]:
    return [graph.by_name[name].shape for name in op.operands]


def embedding_rule(op: Op, graph: Graph) -> OpRule:
    """``v e, ... -> ... e``: rows are a sum of which all but one part are 0."""
    args = arguments(op)
    leading = leading_names(len(_shapes(op, graph)[1]))
    padding = args["padding_idx"]
    kinds: dict[str, FactorKind] = {"v": "sum"}
    if args["scale_grad_by_freq"]:  # the frequencies are those of the whole batch
        kinds = dict.fromkeys(("v", *leading), "whole")

    localize = of_pieces(EMBEDDING_ROWS, "v", lambda op: (*map(Ref, op.operands), padding))
    result = single([*leading, "e"])
    operands = [single(["v", "e"]), single(leading)]
    return build(op, graph, operands, [result], kinds=kinds, linear=_FIRST, localize=localize)


def aligned_dims(shape: Sequence[int], index: Sequence[int], place: int) -> tuple[Dims, Dims, dict[str, FactorKind]]:
    """gather and scatter: dims off ``place`` are shared where the index covers them, whole where it is shorter."""
    operand: list[tuple[str, ...]] = []
    indices: list[tuple[str, ...]] = []
    kinds: dict[str, FactorKind] = {}
    for i, (size, index_size) in enumerate(zip(shape, index, strict=True)):
        if i == place:
            operand.append(("v",))
            indices.append(("i",))
        elif size == index_size:
            operand.append((f"d{i}",))
            indices.append((f"d{i}",))
        else:
            operand.append((f"x{i}",))
            indices.append((f"d{i}",))
            kinds |= {f"x{i}": "whole", f"d{i}": "whole"}
    return tuple(operand), tuple(indices), kinds


def gather_rule(op: Op, graph: Graph) -> OpRule | None:
    shape, index = _shapes(op, graph)
    if not shape or not index:
        return _scalar_lookup(op, graph)
    if len(shape) != len(index):  # PyTorch takes an empty index of any rank
        return None
    place = normal_dim(arguments(op)["dim"], len(shape))
    operand, indices, kinds = aligned_dims(shape, index, place)

    localize = of_pieces(GATHER_ROWS, "v", lambda op: (Ref(op.operands[0]), place, Ref(op.operands[1])))
    kinds |= {"v": "sum"}
    return build(op, graph, [operand, indices], [indices], kinds=kinds, linear=_FIRST, localize=localize)


def _scalar_lookup(op: Op, graph: Graph) -> OpRule:
    """A lookup in or by a scalar: nothing to split."""
    tensors = [single([f"x{i}"] * len(shape)) for i, shape in enumerate(_shapes(op, graph))]
    result = single(["y"] * len(graph.by_name[op.results[0]].shape))
    return build(op, graph, tensors, [result], kinds=dict.fromkeys(("x0", "x1", "y"), "whole"), linear=_FIRST)


def index_select_rule(op: Op, graph: Graph) -> OpRule:
    shape, index = _shapes(op, graph)
    if not shape or not index:
        return _scalar_lookup(op, graph)
    place = normal_dim(arguments(op)["dim"], len(shape))
    names = dim_names(len(shape))

    localize = of_pieces(INDEX_SELECT_ROWS, "v", lambda op: (Ref(op.operands[0]), place, Ref(op.operands[1])))
    operands, results = [with_dim(names, place, "v"), single(["i"])], [with_dim(names, place, "i")]
    return build(op, graph, operands, results, kinds={"v": "sum"}, linear=_FIRST, localize=localize)


def index_layout(op: Op, graph: Graph) -> tuple[list[int], list[Dims], Dims, Dims] | None:
    """``(indexed dims, dims of each index, dims of x, dims of x[indices])``: v0 ... are indexed, i0 ... index. None for
    boolean masks (their size is data)."""
    args = arguments(op)["indices"]
    places = [i for i, item in enumerate(args) if item is not None]
    values = [graph.by_name[args[i].name] for i in places]
    if not places or any(value.dtype in (torch.bool, torch.uint8) for value in values):
        return None
    total = broadcast_shape(*(value.shape for value in values))
    names = tuple(f"i{i}" for i in range(len(total)))
    indices: list[Dims] = []
    for shape in (value.shape for value in values):
        behind = zip(names[len(total) - len(shape) :], total[len(total) - len(shape) :], shape, strict=True)
        indices.append(tuple((name,) if size == whole else () for name, whole, size in behind))
    rank = len(graph.by_name[op.operands[0]].shape)
    operand = single([f"v{places.index(i)}" if i in places else f"d{i}" for i in range(rank)])
    kept = [(f"d{i}",) for i in range(rank) if i not in places]
    together = places == list(range(places[0], places[0] + len(places)))
    position = places[0] if together else 0
    result: Dims = (*kept[:position], *single(names), *kept[position:])
    return places, indices, operand, result


def index_rule(op: Op, graph: Graph) -> OpRule | None:
    """``x[:, i, j]`` with integer indices: indexed dims are sums."""
    layout = index_layout(op, graph)
    if layout is None:
        return None
    places, indices, operand, result = layout
    indexed = [f"v{i}" for i in range(len(places))]
    kinds: dict[str, FactorKind] = dict.fromkeys(indexed, "sum")

    def localize(op: Op, context: LocalContext) -> LocalOpCall:
        ids = tuple(item for item in arguments(op)["indices"] if item is not None)
        counts = tuple(len(context.pieces[name]) for name in indexed)
        pieces = flat_pieces([piece for name in indexed for piece in context.pieces[name]])
        return LocalOpCall(INDEX_ROWS, (Ref(op.operands[0]), ids, tuple(places), counts, *pieces))

    local = if_split(localize, *indexed)
    return build(op, graph, [operand, *indices], [result], kinds=kinds, linear=_FIRST, localize=local)


def one_hot_rule(op: Op, graph: Graph) -> OpRule | None:
    """Each part of the classes compares with its own; without a class count the result's size depends on data."""
    if arguments(op)["num_classes"] < 0:
        return None
    names = dim_names(len(_shapes(op, graph)[0]))
    localize = of_pieces(ONE_HOT_CLASSES, "c", lambda op: (Ref(op.operands[0]),))
    return build(op, graph, [single(names)], [single([*names, "c"])], localize=localize)


INDEXING: RuleTable = by_operator(
    {
        "embedding": embedding_rule,
        "gather": gather_rule,
        "index_select": index_select_rule,
        "index.Tensor": index_rule,
        "one_hot": one_hot_rule,
    }
)
