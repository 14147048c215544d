"""Fusion of a language model's head with its cross entropy, so that the logits are never whole.

The logits of 8,192 tokens and 128 K words are 4 GiB in float32, and their gradient as much. Where only the loss reads
them, both operators become ``shardwise::head_loss``, which computes them in blocks of classes (``graph/head_loss.py``).
What lies between the two (a flattening, a slice of positions, a cast to a wider type) is applied to the head's input.

Which heads are fused is decided once, at the capture that a plan is made of: the operators of a plan are the same for
other numbers of samples. Later captures get the decision as the paths of the modules of these heads.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from math import prod

import torch

from shardwise.graph.annotate import AnnotatedRegion
from shardwise.graph.dead_code import eliminate_dead_code
from shardwise.graph.emitter import Emitter, rewrite_graph
from shardwise.graph.head_loss import HEAD_LOSS
from shardwise.graph.ir import Arg, Graph, Op, Ref, refs
from shardwise.graph.normalize_losses import SUM
from shardwise.graph.schema import arguments

aten = torch.ops.aten
FEWEST_LOGITS = 1 << 30  # of a device: 4 GiB in float32; fewer are not worth another product of the head
_FLATTENS = (aten.reshape.default, aten.view.default, aten.flatten.using_ints)
_COPIES = (aten.clone.default, aten.contiguous.default)
_CASTS = (aten.to.dtype, aten._to_copy.default)
_MOVES = (*_FLATTENS, *_COPIES, *_CASTS, aten.slice.Tensor)


def fuse_head_losses(graph: Graph, regions: Mapping[str, AnnotatedRegion], modules: Collection[str] | int) -> Graph:
    """Return the graph with heads and their cross entropies as one operator. ``modules``: the paths of those with fused
    heads; or the number of devices: those whose logits are large on each even if all split them, unless the user gave
    strategies that the fused operator does not have. ``regions``: the user's strategies by scope."""
    graph = eliminate_dead_code(graph)
    losses = [op for op in graph.ops if op.target == aten.cross_entropy_loss.default]
    found = {loss.name: head for loss in losses if (head := _head_of(loss, graph)) is not None}
    if isinstance(modules, int):
        sizes = {loss.name: prod(graph.by_name[loss.operands[0]].shape) for loss in losses}
        large = {head.module for name, (head, _) in found.items() if sizes[name] >= modules * FEWEST_LOGITS}
        modules = large - {
            head.module
            for name, (head, between) in found.items()
            if not _allowed(regions, head, (graph.op_by_name[name], *between))
        }
    heads = {name: head for name, head in found.items() if head[0].module in modules}

    def rewrite(op: Op, emitter: Emitter) -> tuple[Arg, ...] | None:
        head = heads.get(emitter.origin.name)
        return None if head is None else (_fused(op, head[0], head[1], graph, emitter),)

    return rewrite_graph(graph, {aten.cross_entropy_loss.default: rewrite}) if heads else graph


def fused_heads(operators: Iterable[tuple[str, str]]) -> frozenset[str]:
    """Return the paths of the modules with fused heads. ``operators``: name and target of those of a graph or plan."""
    return frozenset(name.rpartition("/")[0] for name, target in operators if target == str(HEAD_LOSS))


def _allowed(regions: Mapping[str, AnnotatedRegion], head: Op, others: Iterable[Op]) -> bool:
    """Return whether the strategies of the user are also those of the fused operator: of the head alone, as text, with
    whole rows of ``k`` and parts of equal sizes."""
    if any(op.scope in regions and (op.scope != head.scope or op.target not in _MOVES) for op in others):
        return False
    if (region := regions.get(head.scope)) is None:
        return True
    text = region.strategy
    if not isinstance(text, str) or region.out_strategy is not None or "{" in text:
        return False
    return "k" not in {part.partition("@")[0].strip() for part in text.split()}


def _head_of(loss: Op, graph: Graph) -> tuple[Op, tuple[Op, ...]] | None:
    """Return the product that makes the logits of a cross entropy, and what lies between them; None: it is no head, or
    something else reads the logits."""
    args = arguments(loss)
    scores, target = (graph.by_name[args[name].name] for name in ("self", "target"))
    if args["weight"] is not None or target.dtype.is_floating_point or len(scores.shape) != 2:
        return None
    kept = {name for output in graph.outputs for name in refs(output)} | {name for name, _ in graph.constraints}
    kept |= {name for _, name in graph.mutations}
    name, between = scores.name, list[Op]()
    while name not in kept and len(graph.consumers[name]) == 1 and (op := graph.producer.get(name)) is not None:
        if op.target == aten.linear.default:
            rank = len(graph.by_name[op.results[0]].shape)
            slices = (other.operands[0] for other in between if other.target == aten.slice.Tensor)
            fits = len(op.operands) == 2 and all(len(graph.by_name[sliced].shape) == rank for sliced in slices)
            return (op, tuple(reversed(between))) if fits else None
        if not _moves_rows(op, graph):
            return None
        between.append(op)
        name = op.operands[0]
    return None


def _moves_rows(op: Op, graph: Graph) -> bool:
    """Return whether an operator selects or flattens rows of logits, or casts them to a wider type."""
    before, after = (graph.by_name[name] for name in (op.operands[0], op.results[0]))
    if op.target in _FLATTENS:
        return after.shape == (prod(before.shape[:-1]), before.shape[-1])
    if op.target == aten.slice.Tensor:
        return bool(arguments(op)["dim"] % len(before.shape) < len(before.shape) - 1)
    if op.target in _CASTS:
        return after.dtype.is_floating_point and torch.promote_types(before.dtype, after.dtype) == after.dtype
    return op.target in _COPIES


def _fused(loss: Op, head: Op, between: tuple[Op, ...], graph: Graph, emitter: Emitter) -> Ref:
    """Emit the fused operator. ``loss``: with operands of the new graph. The operator has the place of the head, whose
    strategies are its own."""
    args, origin = arguments(loss), emitter.origin
    x, weight = (emitter.known[name] for name in head.operands)
    for op in between:
        if op.target == aten.slice.Tensor:
            x = emitter.emit(op.target, x, *op.args[1:])
    target, lead = args["target"], emitter.value(x).shape[:-1]
    if len(lead) > 1:
        target = emitter.emit(aten.reshape.default, target, lead)
    emitter.origin = head
    losses = emitter.emit(HEAD_LOSS, weight, x, target, args["ignore_index"], args["label_smoothing"])
    emitter.origin = origin
    if args["reduction"] == SUM:
        return emitter.emit(aten.sum.default, losses)
    losses = losses if len(lead) <= 1 else emitter.emit(aten.reshape.default, losses, (prod(lead),))
    dtype = graph.by_name[origin.results[0]].dtype
    return losses if emitter.value(losses).dtype == dtype else emitter.emit(aten.to.dtype, losses, dtype)
