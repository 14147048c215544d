"""The cross entropy of a head's logits, block by block of classes, without the logits.

``loss = logsumexp(x W^T) - (x W^T)[label]`` needs three numbers per row: the log-sum-exp of its logits, the one of its
label and (for label smoothing) their sum. They are collected over blocks of ``BLOCK`` classes. Backward computes the
logits of a block again, whose gradient is ``exp(logit - logsumexp)`` times the cotangent. The gradient of a block of
``W`` is complete; only that of ``x`` adds up over blocks. So the head has one product more (four for three), and no
memory of the size of the logits, whatever part of them a device has: prices of parts follow from those of the whole.

Where the classes are split, ranks collect the numbers of their own classes (``shardwise::head_terms``), and
log-sum-exps of parts combine as those of blocks do.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, Final

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from shardwise.graph.custom_operators import global_indices
from shardwise.graph.labels import checked_labels
from shardwise.graph.operator_library import composite
from shardwise.graph.precision import wide

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
