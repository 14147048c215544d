"""Masks of the rows of one expert, recognised in a graph: ``chosen == expert``, or a class of ``one_hot(chosen)``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from shardwise.graph.ir import Graph, Op, Value
from shardwise.graph.schema import arguments

aten = torch.ops.aten
_SAME = (aten.to.dtype, aten.alias.default, aten.detach.default, aten.clone.default, aten.contiguous.default)
_TOP = (aten.topk.default, aten.sort.default, aten.sort.stable, aten.argsort.default, aten.argsort.stable)
_RESHAPES = (aten.reshape.default, aten.view.default, aten.unflatten.int, aten.flatten.using_ints)
_SHAPES = (*_RESHAPES, aten.unsqueeze.default, aten.expand.default, aten.alias.default)


@dataclass(frozen=True, slots=True)
class ExpertMask:
    """The places where ``chosen``, its dims in ``order``, is ``expert``."""

    chosen: str
    order: tuple[int, ...]
    expert: int


def expert_mask(producers: Mapping[str, Op], values: Mapping[str, Value], name: str) -> ExpertMask | None:
    """Return the expert whose rows a mask selects, with its shape disregarded; None for another mask.

    ``producers``, ``values``: by the names of values.
    """
    while (op := producers.get(name)) is not None:
        args = arguments(op)
        if op.target is aten.eq.Scalar and isinstance(args["other"], int):
            return ExpertMask(op.operands[0], _dims(values, op.operands[0]), args["other"])
        if op.target in (aten.ne.Scalar, aten.gt.Scalar) and args["other"] == 0:
            return _class_of(producers, values, op.operands[0])
        found = _class_of(producers, values, name)
        if found is not None:
            return found
        if op.target not in _SHAPES:
            return None
        name = op.operands[0]
    return None


def hides_others(graph: Graph, name: str) -> ExpertMask | None:
    """Return the expert whose rows a mask leaves out, if it selects all others."""
    while (op := graph.producer.get(name)) is not None and op.target in _SHAPES:
        name = op.operands[0]
    negates = op is not None and op.target is aten.logical_not.default
    return expert_mask(graph.producer, graph.by_name, op.operands[0]) if op is not None and negates else None


def num_choices(graph: Graph, name: str) -> int | None:
    """Return how many numbers, from 0 on, indices of the largest of scores may be; None of other values."""
    while (op := graph.producer.get(name)) is not None and op.target in (*_SAME, *_SHAPES):
        name = op.operands[0]
    if op is None or op.target not in _TOP or name != op.results[-1]:
        return None
    shape = graph.by_name[op.operands[0]].shape
    return shape[arguments(op)["dim"]] if shape else None


def selects_once(producers: Mapping[str, Op], values: Mapping[str, Value], name: str, dims: Sequence[int]) -> bool:
    """Return whether a mask selects at most one element of its other dims for each of ``dims``: it is of one expert,
    and a row has as many different experts as indices of the largest of its scores."""
    mask, every = expert_mask(producers, values, name), _dims(values, name)
    others = [dim for dim in every if dim not in dims]
    if mask is None or len(mask.order) != len(every) or len(others) != 1:
        return False
    name, dim = mask.chosen, mask.order[others[0]]
    while (op := producers.get(name)) is not None and op.target in (*_SAME, *_RESHAPES):
        before, after = values[op.operands[0]].shape, values[name].shape
        if op.target not in _SAME:
            if dim != len(after) - 1 or before[-1:] != after[-1:]:
                return False
            dim = len(before) - 1
        name = op.operands[0]
    is_top = op is not None and op.target in _TOP and name == op.results[-1]
    return is_top and op is not None and arguments(op)["dim"] % len(values[name].shape) == dim


def _dims(values: Mapping[str, Value], name: str) -> tuple[int, ...]:
    return tuple(range(len(values[name].shape)))


def _class_of(producers: Mapping[str, Op], values: Mapping[str, Value], name: str) -> ExpertMask | None:
    """Return the expert of ``classes.select(dim, expert)`` or ``classes.unbind(dim)[expert]``."""
    op = producers.get(name)
    while op is not None and op.target in _SAME:
        name = op.operands[0]
        op = producers.get(name)
    if op is None or op.target not in (aten.select.int, aten.unbind.int):
        return None
    args, (classes,) = arguments(op), op.operands
    order = _dims_of_classes(producers, values, classes)
    dim = args["dim"] % len(values[classes].shape)
    if order is None or order[1][dim] != -1:
        return None
    expert = args["index"] if op.target is aten.select.int else op.results.index(name)
    return ExpertMask(order[0], tuple(d for d in order[1] if d != -1), expert) if expert >= 0 else None


def _dims_of_classes(
    producers: Mapping[str, Op], values: Mapping[str, Value], name: str
) -> tuple[str, tuple[int, ...]] | None:
    """Return numbers of experts, and which of its dims each dim of their classes is (-1: the classes)."""
    op = producers.get(name)
    if op is None:
        return None
    args = arguments(op)
    if op.target is aten.one_hot.default:
        return op.operands[0], (*_dims(values, op.operands[0]), -1)
    if op.target is aten.eq.Tensor and len(op.operands) == 2:
        opened, counting = (producers.get(operand) for operand in op.operands)
        is_range = counting is not None and counting.target is aten.arange.default and len(counting.args) == 1
        if opened is not None and is_range and opened.target is aten.unsqueeze.default:
            dims = _dims(values, opened.operands[0])
            at_end = arguments(opened)["dim"] in (-1, len(dims))
            return (opened.operands[0], (*dims, -1)) if at_end else None
        return None
    if op.target in _SAME:
        return _dims_of_classes(producers, values, op.operands[0])
    if op.target not in (aten.permute.default, aten.transpose.int, aten.movedim.int):
        return None
    below = _dims_of_classes(producers, values, op.operands[0])
    if below is None:
        return None
    rest = [value for key, value in args.items() if key != "self"]
    moved = torch.empty(tuple(range(2, len(values[name].shape) + 2)), device="meta")
    sizes = op.target(moved, *rest).shape
    return below[0], tuple(below[1][size - 2] for size in sizes)
