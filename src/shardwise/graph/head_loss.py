"""Fusion of a language model's head with its cross entropy, so that the logits are never whole.

The logits of 8,192 tokens and 128 K words are 4 GiB in float32, and their gradient as much. Where only the loss reads
them, both operators become ``shardwise::head_loss``. What lies between the two (a flattening, a slice of positions, a
cast to a wider type) is applied to the head's input. Which heads are fused is decided once, at the capture that a plan
is made of: the operators of a plan are the same for other numbers of samples. Later captures get the decision as the
paths of the modules of these heads.

``loss = logsumexp(x W^T) - (x W^T)[label]`` needs three numbers per row: the log-sum-exp of its logits, the one of its
label and (for label smoothing) their sum. They are collected over blocks of ``BLOCK`` classes. Backward computes the
logits of a block again, whose gradient is ``exp(logit - logsumexp)`` times the cotangent. The gradient of a block of
``W`` is complete; only that of ``x`` adds up over blocks. So the head has one product more (four for three), and no
memory of the size of the logits, whatever part of them a device has: prices of parts follow from those of the whole.

Where the classes are split, ranks collect the numbers of their own classes (``shardwise::head_terms``), and
log-sum-exps of parts combine as those of blocks do. Labels must be classes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from math import prod
from typing import Any, Final

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from shardwise.errors import problem
from shardwise.graph.annotate import AnnotatedRegion
from shardwise.graph.custom_operators import global_indices
from shardwise.graph.dead_code import eliminate_dead_code
from shardwise.graph.emitter import Emitter, rewrite_graph
from shardwise.graph.ir import Arg, Graph, Op, Ref, refs
from shardwise.graph.normalize_layers import SUM
from shardwise.graph.operator_library import composite, kernel
from shardwise.graph.precision import wide
from shardwise.graph.schema import arguments


def check_labels(labels: Tensor, classes: int) -> None:
    """Raise torch's error for a label out of range. On GPUs the lookups that follow assert it, as torch does there."""
    if labels.device.type == "cpu" and (outside := (labels < 0) | (labels >= classes)).any():
        what = f"Target {labels[outside][0]} is out of bounds."
        raise IndexError(problem(what, fix=f"labels from 0 to {classes - 1}, or ignore_index"))


@kernel(lambda labels, classes: torch.empty_like(labels))
def checked_labels(labels: Tensor, classes: int) -> Tensor:
    """Return a copy of the labels after raising for one out of range."""
    check_labels(labels, classes)
    return labels.clone()


BLOCK = 8192  # classes
OUTSIDE: Final = torch.iinfo(torch.int64).max  # the label of a row whose label is no class


class _BlockTerms(torch.autograd.Function):
    """``(weight [v, k], x [n, k], label [n]) -> [n], [n], [n]``: the log-sum-exp of logits, that of the label (0 if it
    is not from 0 to v) and, if ``sums``, their sum."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, x: Tensor, label: Tensor, sums: bool) -> tuple[Tensor, Tensor, Tensor]:
        log_sum = None
        picked = total = wide(x.new_zeros(x.shape[:1]))
        for begin in range(0, weight.shape[0], BLOCK):
            logits = _logits(weight[begin : begin + BLOCK], x)
            places, mine = _in_block(label, begin, logits)
            picked = picked + torch.where(mine, logits.gather(-1, places), 0).squeeze(-1)
            total = total + logits.sum(-1) if sums else total
            top = _finite(logits.amax(-1, keepdim=True))
            here = logits.sub_(top).exp_().sum(-1).log() + top.squeeze(-1)
            log_sum = here if log_sum is None else torch.logaddexp(log_sum, here)
            del logits  # ahead of the next block
        log_sum = torch.full_like(picked, -torch.inf) if log_sum is None else log_sum
        ctx.sums = sums
        ctx.save_for_backward(weight, x, label, _finite(log_sum))
        return log_sum, picked, total.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_log_sum: Tensor, of_picked: Tensor, of_total: Tensor) -> tuple[Tensor | None, ...]:
        weight, x, label, log_sum = ctx.saved_tensors
        of_weight = torch.empty_like(weight) if ctx.needs_input_grad[0] else None
        of_x = torch.zeros_like(x, dtype=log_sum.dtype) if ctx.needs_input_grad[1] else None
        for begin in range(0, weight.shape[0], BLOCK):
            rows = weight[begin : begin + BLOCK]
            logits = _logits(rows, x)
            places, mine = _in_block(label, begin, logits)
            gradient = logits.sub_(log_sum.unsqueeze(-1)).exp_().mul_(of_log_sum.unsqueeze(-1))
            gradient = gradient.add_(of_total.unsqueeze(-1)) if ctx.sums else gradient
            del logits
            gradient.scatter_add_(-1, places, torch.where(mine, of_picked.unsqueeze(-1), 0))
            gradient = gradient.to(x.dtype)
            if of_weight is not None:
                of_weight[begin : begin + BLOCK].copy_(gradient.T @ x)
            if of_x is not None:
                of_x += gradient @ rows
            del gradient
        return of_weight, None if of_x is None else of_x.to(x.dtype), None, None


def _finite(top: Tensor) -> Tensor:
    """Return 0 for a largest logit, or a log-sum-exp, of -inf, which masks all classes: exp(-inf - 0) is 0, and
    exp(-inf - -inf) is no number."""
    return top.masked_fill(top == -torch.inf, 0)


def _logits(weight: Tensor, x: Tensor) -> Tensor:
    return wide(x @ weight.T)


def _in_block(label: Tensor, begin: int, logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return the places of labels in a block of classes, and which of them are in it [n, 1]. A label that is no class
    stays outside, so that the lookup fails: nothing else checks it on GPUs."""
    label = label.unsqueeze(-1)
    local, classes = label - begin, logits.shape[-1]
    mine = (local >= 0) & (local < classes) & (label != OUTSIDE)
    return torch.where(mine, local, torch.where(label == OUTSIDE, classes, 0)), mine


def _head_terms(
    weight: Tensor, x: Tensor, label: Tensor, sums: bool, *atoms: Sequence[int]
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the numbers per part of the classes: ``weight`` [parts, v, k], ``x`` [..., k], ``label`` [...] of all
    classes; results [parts, ...] in the wide type. ``atoms``: sizes, offsets and lengths of the parts."""
    rows, index = x.reshape(label.numel(), x.shape[-1]), label.flatten()
    sizes, offsets, lengths = atoms
    starts = global_indices(sizes, offsets, lengths, device=x.device).flatten() * weight.shape[1]
    inside = (index >= 0) & (index < prod(sizes) * weight.shape[1])
    terms = [
        _BlockTerms.apply(of_part, rows, torch.where(inside, index - start, OUTSIDE), sums)  # type: ignore[no-untyped-call]
        for of_part, start in zip(weight, starts, strict=True)
    ]
    if not terms:
        nothing = wide(x.new_zeros((0, *label.shape)))
        return nothing, nothing, nothing
    log_sum, picked, total = (torch.stack(some).reshape(len(terms), *label.shape) for some in zip(*terms, strict=True))
    return log_sum, picked, total


def head_loss(
    weight: Tensor, x: Tensor, target: Tensor, ignore_index: int, label_smoothing: float, parts: int = 1
) -> Tensor:
    """Return the cross entropy of every row of ``x`` [..., k] with the classes ``weight`` [n, k]; 0 for labels that are
    ignored. ``parts``: of the classes, whose numbers are collected apart."""
    classes = weight.shape[0]
    valid = target != ignore_index
    label = checked_labels(torch.where(valid, target, 0), classes)
    terms = torch.ops.shardwise.head_terms(
        weight.unflatten(0, (parts, classes // parts)), x, label, bool(label_smoothing), [parts], [0], [parts]
    )
    top = terms[0].detach().amax(0)
    losses = (terms[0] - top).exp().sum(0).log() + top - (1 - label_smoothing) * terms[1].sum(0)
    if label_smoothing:
        losses = losses - label_smoothing / classes * terms[2].sum(0)
    return torch.where(valid, losses, 0)


HEAD_TERMS: Final = composite(_head_terms)
HEAD_LOSS: Final = composite(
    head_loss,
    schema="head_loss(Tensor weight, Tensor x, Tensor target, int ignore_index, float label_smoothing) -> Tensor",
)


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
