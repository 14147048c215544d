"""Tensors made from nothing: each rank makes its own part."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch._ops import OpOverload

from shardwise.graph.ir import Graph, Op
from shardwise.graph.schema import arguments, by_operator
from shardwise.rules.arguments import block_offset, flat_pieces, if_split, of_pieces, replace_arguments
from shardwise.rules.binding import RuleTable, build, dim_names, rule, single, whole_rule
from shardwise.rules.local_kernels import EYE_BLOCK, LINSPACE_BLOCK, RANGE_BLOCK
from shardwise.rules.rule import LocalContext, LocalOpCall, OpRule

aten = torch.ops.aten


def _of_local_size(op: Op, context: LocalContext) -> LocalOpCall:
    return replace_arguments(op, size=context.result_shapes[0])


def _filled(op: Op, graph: Graph) -> OpRule:
    """zeros, ones, full, empty: only the size changes."""
    names = dim_names(len(graph.by_name[op.results[0]].shape))
    return build(op, graph, [], [single(names)], localize=_of_local_size)


def _range(op: Op, graph: Graph) -> OpRule:
    """``start + i * step`` for the part's i."""
    args = arguments(op)
    value = graph.by_name[op.results[0]]
    start, step = args.get("start", 0), args.get("step", 1)

    def localize(op: Op, context: LocalContext) -> LocalOpCall:
        pieces = context.pieces["n"]
        offset, length = block_offset(pieces), context.result_shapes[0][0]
        integers = all(isinstance(number, int) for number in (start, step))
        if offset is not None and integers and not value.dtype.is_floating_point:
            bounds = (start + offset * step, start + (offset + length) * step, step)
            return LocalOpCall(aten.arange.start_step, bounds, (("dtype", value.dtype), ("device", args["device"])))
        return LocalOpCall(RANGE_BLOCK, (start, step, *flat_pieces(pieces), value.dtype, args["device"]))

    return build(op, graph, [], [single(["n"])], localize=if_split(localize, "n"))


def _block(kernel: OpOverload, taken: Sequence[str], names: str, op: Op, graph: Graph) -> OpRule:
    """Made by a kernel that takes some of the arguments and the part of every dim."""
    args, dtype = arguments(op), graph.by_name[op.results[0]].dtype
    before = tuple(args[name] for name in taken)
    localize = of_pieces(kernel, names, lambda op: before, dtype, args["device"])
    return build(op, graph, [], [single(names)], localize=localize)


def _spaced(op: Op, graph: Graph) -> OpRule:
    """Between numbers of tensors, logarithmic, or a window: every rank makes all of them."""
    return build(op, graph, [()] * len(op.operands), [single(["n"])], kinds={"n": "whole"})


CONSTRUCTORS: RuleTable = by_operator(
    {
        "zeros ones full empty.memory_format": _filled,
        "scalar_tensor": rule("-> ()"),
        "arange arange.start arange.start_step": _range,
        "linspace": partial(_block, LINSPACE_BLOCK, ("start", "end", "steps"), "n"),
        "linspace.Tensor_Tensor linspace.Tensor_Scalar linspace.Scalar_Tensor logspace logspace.Tensor_Tensor "
        "logspace.Tensor_Scalar logspace.Scalar_Tensor hann_window hann_window.periodic hamming_window "
        "hamming_window.periodic hamming_window.periodic_alpha hamming_window.periodic_alpha_beta kaiser_window "
        "kaiser_window.periodic kaiser_window.beta bartlett_window bartlett_window.periodic blackman_window "
        "blackman_window.periodic": _spaced,
        "eye eye.m": partial(_block, EYE_BLOCK, (), "mn"),
        "tril_indices triu_indices": whole_rule,
    }
)
