"""Evaluation of graph values that are known before it runs, because they depend on no input, parameter or buffer. They
are computed on ``graph.predicates``, operator by operator.

Buffers are unknown here: a plan is made from shapes, and weights are loaded later.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake

from shardwise.graph.ir import Arg, Graph, Op, Ref, Value, map_refs
from shardwise.graph.predicates import (
    MOST_ELEMENTS,
    Abstract,
    KnownTensor,
    apply_pointwise,
    apply_view,
    collapse_constant_dims,
    filled_tensor,
    triangle,
)
from shardwise.graph.schema import arguments, is_random, is_view, operator_name

# Pointwise, and rounded by IEEE 754 on every device.
_POINTWISE = frozenset((
    "abs", "add", "bitwise_and", "bitwise_not", "bitwise_or", "bitwise_xor", "__and__", "__or__", "__xor__",
    "clamp", "clamp_max", "clamp_min", "clone", "eq", "floor_divide", "ge", "gt", "isinf", "le", "logical_and",
    "logical_not", "logical_or", "logical_xor", "lt", "masked_fill", "maximum", "minimum", "mul", "ne", "neg",
    "remainder", "rsub", "sign", "sub", "to", "where",
))  # fmt: skip
_FILLED: Mapping[str, Callable[[dict[str, Any]], Any]] = {
    "zeros": lambda args: 0,
    "ones": lambda args: 1,
    "full": lambda args: args["fill_value"],
    "scalar_tensor": lambda args: args["s"],
}
# They work along one dim: if operands are constant along others, so are results.
_ALONG_DIM = frozenset(("cumsum", "diff", "flip"))
_SHAPED = frozenset(("reshape", "view", "flatten", "unflatten", "squeeze", "unsqueeze"))


def evaluate_known_values(graph: Graph, names: set[str], constants: Mapping[str, Tensor]) -> dict[str, Abstract]:
    """Return name -> value for the wanted values and what they are computed from, as far as known. ``constants``: the
    data of sources of kind "constant"."""
    needed = set(names)
    ops: list[Op] = []
    for op in reversed(graph.ops):
        if needed.intersection(op.results):
            needed.update(op.operands)
            ops.append(op)
    known_values: dict[str, Abstract] = {}
    with torch.device("cpu"), torch.no_grad():
        for name in needed.intersection(constants):
            data = constants[name]
            constant = None if is_fake(data) or data.is_meta else collapse_constant_dims(data.cpu())
            known_values |= {} if constant is None else {name: constant}
        for op in reversed(ops):
            if len(op.results) == 1 and not graph.by_name[op.results[0]].requires_grad and not is_random(op.target):
                value = evaluate_op(op, graph.by_name[op.results[0]], known_values)
                known_values |= {} if value is None else {op.results[0]: value}
    return known_values


def evaluate_op(op: Op, result: Value, known_values: Mapping[str, Abstract]) -> Abstract | None:
    """Evaluate an operator on known values; ``result``: its shape and dtype. None: unknown."""
    name, args = operator_name(op.target), arguments(op)
    if fill := _FILLED.get(name.removeprefix("new_").removesuffix("_like")):
        number = fill(args)
        return None if isinstance(number, Ref) else filled_tensor(number, result.shape, result.dtype)
    if not set(op.operands) <= known_values.keys():
        return None
    operands = [known_values[operand] for operand in op.operands]
    if result.numel == 0 or any(0 in x.shape for x in operands):
        return None

    def function(*tensors: Tensor) -> Any:
        remaining = iter(tensors)
        call_args = tuple(_filled(arg, lambda _: next(remaining)) for arg in op.args)
        return op.target(*call_args, **{key: _filled(arg, lambda _: next(remaining)) for key, arg in op.kwargs})

    if name in _POINTWISE and operands:
        number = args.get("other")
        return apply_pointwise(name, function, operands, result.shape, number if type(number) is int else None)
    if name in ("tril", "triu"):
        return triangle(operands[0], args["diagonal"], name == "triu", result.shape)
    if name in _SHAPED:
        return apply_view(lambda tensor: tensor.view(result.shape), operands[0])
    if is_view(op.target) and len(operands) == 1:
        return apply_view(function, operands[0])
    if name == "index" and (indexed := _indexed(args, known_values, result)) is not None:
        return indexed
    along = tuple(args["dims"] if "dims" in args else (args["dim"],)) if name in _ALONG_DIM else None
    return _computed(function, operands, result, along)


def _indexed(args: Mapping[str, Any], known_values: Mapping[str, Abstract], result: Value) -> KnownTensor | None:
    """Index a tensor with an index for every dim. A dim along which the tensor is constant ignores its index."""
    table = known_values[args["self"].name]
    indices = [known_values[index.name] if isinstance(index, Ref) else None for index in args["indices"]]
    if not isinstance(table, KnownTensor) or len(indices) != len(table.shape):
        return None
    at: list[Tensor] = []
    for size, index in zip(table.core.shape, indices, strict=True):
        if not isinstance(index, KnownTensor) or index.tensor.dtype == torch.bool:
            return None
        at.append(torch.zeros((1,) * len(index.shape), dtype=torch.int64) if size == 1 else index.core)
    if prod(torch.broadcast_shapes(*(index.shape for index in at))) > MOST_ELEMENTS:
        return None
    return collapse_constant_dims(table.core[tuple(at)].expand(result.shape))


def _computed(
    function: Callable[..., Any], operands: list[Abstract], result: Value, along: tuple[int, ...] | None = None
) -> KnownTensor | None:
    """Compute integers and booleans, which are the same on every device. ``along``: the only dims in which elements
    interact (None: all may)."""
    tensors = [x.tensor for x in operands if isinstance(x, KnownTensor)]
    if len(tensors) < len(operands) or result.dtype.is_floating_point or result.dtype.is_complex:
        return None
    if any(tensor.is_floating_point() or tensor.is_complex() for tensor in tensors):
        return None
    size = result.numel
    if along is not None:
        rank = len(result.shape)
        other_dims = [dim for dim in range(rank) if dim not in {along_dim % rank for along_dim in along}]
        for dim in other_dims:
            if all(tensor.stride(dim) == 0 or tensor.shape[dim] == 1 for tensor in tensors):
                tensors = [tensor.narrow(dim, 0, 1) for tensor in tensors]
                size //= result.shape[dim]
    if max([size, *(tensor.numel() for tensor in tensors)]) > MOST_ELEMENTS:
        return None
    output = function(*tensors)
    return collapse_constant_dims(output.expand(result.shape)) if isinstance(output, Tensor) else None


def _filled(arg: Arg, tensor_of: Callable[[str], Tensor]) -> Any:
    if isinstance(arg, tuple):
        return [_filled(item, tensor_of) for item in arg]
    if isinstance(arg, torch.device):
        return torch.device("cpu")
    return map_refs(arg, tensor_of)
