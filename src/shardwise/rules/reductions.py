"""Operators that combine the elements of some dims, and those that scan or sort along one."""

from __future__ import annotations

from functools import partial
from math import inf

import torch

from shardwise.graph.float8 import LARGEST
from shardwise.graph.ir import Graph, Op, Ref
from shardwise.graph.schema import arguments, by_operator
from shardwise.rules.arguments import (
    broadcast_shape,
    dims_of,
    normal_dim,
    of_pieces,
    operand_positions,
    same_call,
)
from shardwise.rules.binding import Linear, RuleFunction, RuleTable, build, dim_names, rank_of, single, with_dim
from shardwise.rules.elementwise import broadcast_dims
from shardwise.rules.empty import zeros_if_empty
from shardwise.rules.local_kernels import CUMULATED
from shardwise.rules.lowerings import reductions as lowerings
from shardwise.rules.rule import Dims, FactorKind, LocalContext, Localize, LocalOpCall, Lowering, OpRule, Window
from shardwise.rules.windows import Sliding

aten = torch.ops.aten


def reduce_rule(
    op: Op,
    graph: Graph,
    kind: FactorKind,
    *,
    linear: Linear = (),
    lowering: Lowering | None = None,
    localize: Localize | None = None,
) -> OpRule:
    """The reduced dims have ``kind``, the others are parallel; a kept dim has no factor in the results."""
    names, args = dim_names(rank_of(op, graph)), arguments(op)
    reduced, keepdim = dims_of(args.get("dim"), len(names)), args.get("keepdim", False)
    kept: Dims = tuple(() if i in reduced else (name,) for i, name in enumerate(names) if keepdim or i not in reduced)
    return build(
        op,
        graph,
        [single(names)],
        [kept] * len(op.results),
        kinds={names[i]: kind for i in reduced},
        linear=linear,
        lowering=lowering,
        localize=localize,
    )


def _lowered(lowering: Lowering) -> RuleFunction:
    return partial(reduce_rule, kind="lowered", lowering=lowering)


_whole = partial(reduce_rule, kind="whole")


def _extreme(kind: FactorKind, lowering: Lowering, op: Op, graph: Graph) -> OpRule:
    """amax, amin and their like: combined by ``kind`` where no gradient flows, by the lowering where one does."""
    value = graph.by_name[op.operands[0]]
    if value.requires_grad:
        return reduce_rule(op, graph, "lowered", lowering=lowering)
    combined: FactorKind = "any" if kind == "max" and value.dtype == torch.bool else kind
    return reduce_rule(op, graph, combined, localize=_neutral_if_empty(kind, value.dtype))


def _neutral_if_empty(kind: FactorKind, dtype: torch.dtype) -> Localize:
    """A rank that holds none of a reduced dim contributes the neutral element (PyTorch refuses to reduce nothing)."""
    bound: float
    if dtype.is_floating_point:
        bound = -inf if kind == "max" else inf
    elif dtype == torch.bool:
        bound = kind == "min"
    else:
        bound = torch.iinfo(dtype).min if kind == "max" else torch.iinfo(dtype).max

    def localize(op: Op, context: LocalContext) -> LocalOpCall:
        if 0 not in context.operand_shapes[0]:
            return same_call(op)
        return LocalOpCall(aten.new_full.default, (Ref(op.operands[0]), context.result_shapes[0], bound))

    return localize


def _histogram(op: Op, graph: Graph) -> OpRule | None:
    """Counts of parts add up, if the bins do not depend on the data."""
    args = arguments(op)
    if args["min"] == args["max"]:
        return None
    names = dim_names(rank_of(op, graph))
    return build(op, graph, [single(names)], [single(["bin"])], kinds={"bin": "whole", **dict.fromkeys(names, "sum")})


def along_rule(
    op: Op, graph: Graph, dim: int, *, kind: FactorKind = "whole", lowering: Lowering | None = None
) -> OpRule:
    """Scans and sorts: ``dim`` has ``kind``, the others are parallel. The result may differ in size along ``dim``."""
    names = dim_names(rank_of(op, graph))
    if not names:
        return build(op, graph, [()] * len(op.operands), [()] * len(op.results))
    whole = normal_dim(dim, len(names))
    result = tuple("y" if i == whole else name for i, name in enumerate(names))
    same = all(graph.by_name[r].shape == graph.by_name[op.operands[0]].shape for r in op.results)
    results = [single(names if same else result)] * len(op.results)
    return build(op, graph, [single(names)], results, kinds={names[whole]: kind, "y": "whole"}, lowering=lowering)


def _along(lowering: Lowering | None = None) -> RuleFunction:
    kind: FactorKind = "whole" if lowering is None else "lowered"
    return lambda op, graph: along_rule(op, graph, arguments(op)["dim"], kind=kind, lowering=lowering)


def _glu(op: Op, graph: Graph) -> OpRule:
    """``... (2 h) -> ... h``: the halves stay together."""
    names = dim_names(rank_of(op, graph))
    dim = normal_dim(arguments(op)["dim"], len(names))
    operand = with_dim(names, dim, "half", names[dim])
    return build(op, graph, [operand], [single(names)], kinds={"half": "whole"}, sizes={"half": 2})


def _cumsum(op: Op, graph: Graph) -> OpRule:
    """``... s -> ... t``: an addend s counts for the rows t from its own on. Addends are a sum, rows are parallel."""
    value = graph.by_name[op.results[0]]
    if not value.shape:
        return build(op, graph, [()], [()], linear=((0,),))
    names = dim_names(len(value.shape))
    dim = normal_dim(arguments(op)["dim"], len(names))
    return build(
        op,
        graph,
        [with_dim(names, dim, "s")],
        [with_dim(names, dim, "t")],
        kinds={"s": "sum"},
        linear=((0,),),
        localize=of_pieces(CUMULATED, "ts", lambda op: (Ref(op.operands[0]), dim, value.dtype)),
    )


def _diff(op: Op, graph: Graph) -> OpRule:
    """Neighbours are subtracted: row y reads the rows y to y + n. With something prepended or appended the dim is
    whole."""
    args, shape = arguments(op), graph.by_name[op.operands[0]].shape
    names = dim_names(len(shape))
    dim = normal_dim(args["dim"], len(names))

    operands = [with_dim(names, dim, f"x{i}") for i in range(len(op.operands))]
    linear = (tuple(range(len(operands))),)
    if len(operands) == 1:
        windows = {"x0": Window("y", Sliding(shape[dim], args["n"] + 1, 1).ranges)}
        return build(op, graph, operands, [with_dim(names, dim, "y")], linear=linear, windows=windows)
    kinds: dict[str, FactorKind] = dict.fromkeys((*(f"x{i}" for i in range(len(operands))), "y"), "whole")
    return build(op, graph, operands, [with_dim(names, dim, "y")], kinds=kinds, linear=linear)


def _search(op: Op, graph: Graph) -> OpRule | None:
    """searchsorted, bucketize: how many bounds lie below a value is the sum of how many do among parts of them (one row
    of bounds)."""
    positions = operand_positions(op)
    bounds = positions["sorted_sequence" if "sorted_sequence" in positions else "boundaries"][0]
    if len(op.operands) != 2 or len(graph.by_name[op.operands[bounds]].shape) != 1:
        return None
    names = dim_names(len(graph.by_name[op.results[0]].shape))
    operands = [single(["bound"] if i == bounds else names) for i in range(2)]
    return build(op, graph, operands, [single(names)], kinds={"bound": "sum"})


def _is_in(op: Op, graph: Graph) -> OpRule:
    """The elements that are looked for are whole."""
    names = dim_names(len(graph.by_name[op.results[0]].shape))
    positions = operand_positions(op)
    tests = [f"t{i}" for i in range(len(graph.by_name[op.operands[-1]].shape))]
    operands = [single(dims) for name, dims in (("elements", names), ("test_elements", tests)) if name in positions]
    return build(op, graph, operands, [single(names)], kinds=dict.fromkeys(tests, "whole"))


def _cosine(op: Op, graph: Graph) -> OpRule | None:
    left, right = (graph.by_name[name].shape for name in op.operands)
    dim = normal_dim(arguments(op)["dim"], len(left))
    if not left or len(left) != len(right) or left[dim] != right[dim]:
        return None
    names, whole = dim_names(len(left)), broadcast_shape(left, right)
    *operands, every = (broadcast_dims(shape, whole, names) for shape in (left, right, whole))
    results, lowering = [every[:dim] + every[dim + 1 :]], lowerings.cosine_similarity
    return build(op, graph, operands, results, kinds={names[dim]: "lowered"}, lowering=lowering)


REDUCTIONS: RuleTable = by_operator(
    {
        "sum sum.dim_IntList": partial(reduce_rule, kind="sum", linear=((0,),)),
        "count_nonzero count_nonzero.dim_IntList nansum": partial(reduce_rule, kind="sum"),
        "histc": _histogram,
        "amax": partial(_extreme, "max", lowerings.amax),
        "amin": partial(_extreme, "min", lowerings.amin),
        "max": partial(_extreme, "max", lowerings.max_all),
        "min": partial(_extreme, "min", lowerings.min_all),
        "any any.dim any.dims": partial(reduce_rule, kind="any"),
        "all all.dim all.dims": partial(reduce_rule, kind="min"),  # False is below True
        "prod": _lowered(lowerings.prod_all),
        "prod.dim_int": _lowered(lowerings.prod_dim),
        "max.dim": _lowered(lowerings.max_dim),
        "min.dim": _lowered(lowerings.min_dim),
        "argmax": _lowered(lowerings.argmax),
        "argmin": _lowered(lowerings.argmin),
        # An order statistic depends on all values at once: whole, like a sort.
        "median median.dim nanmedian nanmedian.dim kthvalue mode": _whole,
        "quantile.scalar nanquantile.scalar": zeros_if_empty(_whole),
        **{f"{name}.correction": _lowered(lowering) for name, lowering in lowerings.MOMENTS.items()},
        "logsumexp": _lowered(lowerings.logsumexp),
        "linalg_vector_norm": _lowered(lowerings.vector_norm),
        "norm.Scalar norm.ScalarOpt_dim": _lowered(lowerings.norm),
        "cosine_similarity": _cosine,
        "softmax.int": _along(lowerings.softmax),
        "log_softmax.int": _along(lowerings.log_softmax),
        "_softmax": _along(lowerings.internal_softmax),
        "_log_softmax": _along(lowerings.internal_log_softmax),
        "_safe_softmax": _along(lowerings.safe_softmax),
        "cumsum": _cumsum,
        "cumprod": _along(lowerings.cumprod),
        "logcumsumexp": _along(lowerings.logcumsumexp),
        "cummax": _along(lowerings.cummax),
        "cummin": _along(lowerings.cummin),
        # Sorting over devices moves as much as gathering, in more messages. Which of equal values sort and topk take is
        # up to their kernels, which must see the whole row to choose as on one device.
        "sort sort.stable argsort argsort.stable topk": _along(),
        "searchsorted.Tensor bucketize.Tensor": _search,
        "isin.Tensor_Tensor isin.Tensor_Scalar isin.Scalar_Tensor": _is_in,
        "diff": _diff,
        "glu": _glu,
    },
    {LARGEST: partial(reduce_rule, kind="max")},
)
