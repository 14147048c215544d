"""Exported models as graphs, normalised as a capture does it, so that rules can be asked about real calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from typing import Any

import torch
from torch.fx import GraphModule, Node

from shardwise.graph.custom_operators import dropout
from shardwise.graph.emitter import Emitter
from shardwise.graph.ir import Graph, Op, Ref, Value
from shardwise.graph.schema import arguments
from shardwise.rules.arguments import dims_of

aten = torch.ops.aten

_REMOVED = (aten._assert_tensor_metadata.default,)


def graph_of(module: torch.nn.Module, inputs: Mapping[str, Any]) -> Graph:
    """The operators of a model's export."""
    exported = torch.export.export(module, (), dict(inputs), strict=False)
    trainable = set(exported.graph_signature.inputs_to_parameters)
    return graph_of_fx(exported.graph_module, trainable)


def graph_of_fx(module: GraphModule, trainable: set[str]) -> Graph:
    values = []
    for node in module.graph.nodes:
        if node.op == "placeholder":
            found = node.meta["val"]
            values.append(Value(node.name, tuple(found.shape), found.dtype, node.name in trainable))
    emitter = Emitter([*values, Value("seed", (), torch.int64)], (), _REWRITES)
    known: dict[str, Any] = {value.name: Ref(value.name) for value in values}
    outputs = _emit(module, emitter, known)
    return emitter.graph(outputs, None, ())


def _emit(module: GraphModule, emitter: Emitter, known: dict[str, Any]) -> tuple[Any, ...]:
    """Append the calls of a module, sub-modules (gradient-free regions) in place. Returns its outputs."""

    def argument(value: Any) -> Any:
        if isinstance(value, Node):
            return known[value.name]
        return tuple(map(argument, value)) if isinstance(value, (list, tuple)) else value

    for node in module.graph.nodes:
        if node.op == "get_attr":
            attribute = getattr(module, node.target)
            if isinstance(attribute, torch.Tensor):
                emitter.values[node.name] = Value(node.name, tuple(attribute.shape), attribute.dtype)
                known[node.name] = Ref(node.name)
            else:
                known[node.name] = attribute
        elif node.op == "output":
            return tuple(argument(a) for a in (node.args[0] if isinstance(node.args[0], tuple) else node.args))
        elif node.op == "call_function" and node.target not in _REMOVED:
            args = tuple(map(argument, node.args))
            known[node.name] = _called(node, args, {k: argument(v) for k, v in node.kwargs.items()}, emitter)
    return ()


def _called(node: Node, args: tuple[Any, ...], kwargs: dict[str, Any], emitter: Emitter) -> Any:
    if isinstance(node.target, torch._ops.OpOverload):
        results = emitter.apply(Op("", node.target, args, tuple(kwargs.items()), ()))
        return results[0] if len(results) == 1 else results
    if getattr(node.target, "__name__", "") == "getitem":
        return args[0][args[1]]
    inner = args[1]  # wrap_with_set_grad_enabled(enabled, module, *operands)
    assert isinstance(inner, GraphModule), f"{node.target} in an export"
    names = [n.name for n in inner.graph.nodes if n.op == "placeholder"]
    return _emit(inner, emitter, dict(zip(names, args[2:], strict=True)))


# -- what a capture normalises -----------------------------------------------------------------------------------------


def _linear(op: Op, emitter: Emitter) -> tuple[Any, ...] | None:
    if len(op.operands) == 2:
        return None
    x, weight, bias = op.args
    return (emitter.emit(aten.add.Tensor, emitter.emit(aten.linear.default, x, weight), bias),)


def _addmm(op: Op, emitter: Emitter) -> tuple[Any, ...]:
    bias, left, right = op.args
    return (emitter.emit(aten.add.Tensor, emitter.emit(aten.mm.default, left, right), bias),)


def _mean(op: Op, emitter: Emitter) -> tuple[Any, ...]:
    given = arguments(op)
    shape = emitter.value(op.args[0]).shape
    dims = dims_of(given.get("dim"), len(shape))
    total = emitter.emit(aten.sum.dim_IntList, op.args[0], dims, bool(given.get("keepdim")))
    return (emitter.emit(aten.mul.Tensor, total, 1 / prod(shape[d] for d in dims)),)


def _cross_entropy(op: Op, emitter: Emitter) -> tuple[Any, ...] | None:
    given = arguments(op)
    if given["reduction"] != 1:
        return None
    ignored = given["ignore_index"]
    total = emitter.emit(aten.cross_entropy_loss.default, op.args[0], op.args[1], None, 2, ignored)
    count = emitter.emit(aten.sum.default, emitter.emit(aten.ne.Scalar, op.args[1], ignored))
    return (emitter.emit(aten.div.Tensor, total, count),)


def _drop(x: Any, p: float, emitter: Emitter) -> Any:
    emitter.num_random_calls += 1
    shape = emitter.value(x).shape
    zeros = (0,) * len(shape)
    return emitter.emit(dropout._opoverload, x, Ref("seed"), p, emitter.num_random_calls, shape, zeros)


def _dropout(op: Op, emitter: Emitter) -> tuple[Any, ...]:
    x, p, train = op.args
    return (_drop(x, p, emitter) if train and p else x,)


def _attention(op: Op, emitter: Emitter) -> tuple[Any, ...] | None:
    given = arguments(op)
    if not given["dropout_p"]:
        return None
    query, key, value = op.args[:3]
    scale = given["scale"] or emitter.value(query).shape[-1] ** -0.5
    rows, columns = emitter.value(query).shape[-2], emitter.value(key).shape[-2]
    scores = emitter.emit(aten.mul.Tensor, emitter.emit(aten.matmul.default, query, _swap(key, emitter)), scale)
    if given["is_causal"]:
        down = emitter.emit(aten.unsqueeze.default, emitter.emit(aten.arange.default, rows), -1)
        later = emitter.emit(aten.gt.Tensor, emitter.emit(aten.arange.default, columns), down)
        scores = emitter.emit(aten.masked_fill.Scalar, scores, later, -torch.inf)
    mask = given["attn_mask"]
    if mask is not None and emitter.value(mask).dtype == torch.bool:
        hidden = emitter.emit(aten.logical_not.default, mask)
        scores = emitter.emit(aten.masked_fill.Scalar, scores, hidden, -torch.inf)
    elif mask is not None:
        scores = emitter.emit(aten.add.Tensor, scores, mask)
    probabilities = _drop(emitter.emit(aten.softmax.int, scores, -1), given["dropout_p"], emitter)
    return (emitter.emit(aten.matmul.default, probabilities, value),)


def _swap(x: Any, emitter: Emitter) -> Any:
    return emitter.emit(aten.transpose.int, x, -2, -1)


_REWRITES: dict[Any, Callable[[Op, Emitter], tuple[Any, ...] | None]] = {
    aten.linear.default: _linear,
    aten.addmm.default: _addmm,
    aten.mean.dim: _mean,
    aten.mean.default: _mean,
    aten.cross_entropy_loss.default: _cross_entropy,
    aten.dropout.default: _dropout,
    aten.scaled_dot_product_attention.default: _attention,
}
