"""Losses over split classes and split samples."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from shardwise.graph.precision import cast, wide
from shardwise.rules.lowerings.reductions import log_softmax, vector_norm

NONE, MEAN, SUM = 0, 1, 2  # at::Reduction


def cross_entropy_loss(
    self: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    reduction: int = MEAN,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Tensor:
    """Cross entropy over split classes: log-softmax in parts, and the label's entry found by the part that holds it."""
    class_dim = 0 if self.dim() == 1 else 1
    is_soft = target.shape == self.shape and target.dtype.is_floating_point
    if not is_soft and not label_smoothing:  # the other probabilities are never needed as such
        scores, valid = wide(self), target != ignore_index
        maximum, label = scores.detach().amax(class_dim, keepdim=True), torch.where(valid, target, 0)
        whole = [[scores.shape[class_dim]], [0], [scores.shape[class_dim]]]
        total, picked = torch.ops.shardwise.label_terms(scores, maximum, label, class_dim, *whole)
        losses = torch.where(valid, total.log() - picked, 0)
        counts = valid if weight is None else torch.where(valid, weight[label], 0)
        return cast(_reduced(losses if weight is None else losses * counts, counts.sum, reduction), self.dtype)
    log_probabilities = log_softmax(self, class_dim)
    if is_soft:
        return _soft_label_loss(log_probabilities, target, weight, reduction, label_smoothing)
    losses, counts = _label_losses(log_probabilities, target, weight, ignore_index)
    if label_smoothing:
        weighted = log_probabilities if weight is None else log_probabilities * _per_class(weight, self.dim())
        smooth = -weighted.sum(class_dim).masked_fill(target == ignore_index, 0)
        share = label_smoothing / self.shape[class_dim]
        losses = losses * (1 - label_smoothing) + smooth * share
    return _reduced(losses, counts.sum, reduction)


def nll_loss(
    self: Tensor, target: Tensor, weight: Tensor | None = None, reduction: int = MEAN, ignore_index: int = -100
) -> Tensor:
    losses, counts = _label_losses(self, target, weight, ignore_index)
    return _reduced(losses, counts.sum, reduction)


def _label_losses(scores: Tensor, target: Tensor, weight: Tensor | None, ignore_index: int) -> tuple[Tensor, Tensor]:
    """Per label: minus its entry of ``scores`` times its class weight, and what it counts in a mean."""
    class_dim = 0 if scores.dim() == 1 else 1
    valid = target != ignore_index
    safe = torch.ops.shardwise.checked_labels(torch.where(valid, target, 0), scores.shape[class_dim])
    picked = scores.gather(class_dim, safe.unsqueeze(class_dim)).squeeze(class_dim)
    losses = torch.where(valid, -picked, 0)
    if weight is None:
        return losses, valid
    counts = torch.where(valid, weight[safe], 0)
    return losses * counts, counts


def _reduced(losses: Tensor, count: Callable[[], Any], reduction: int) -> Tensor:
    if reduction == NONE:
        return losses
    return losses.sum() if reduction == SUM else losses.sum() / count()


def _per_class(weight: Tensor, rank: int) -> Tensor:
    return weight if rank == 1 else weight.reshape((-1, *(1,) * (rank - 2)))


def _soft_label_loss(
    log_probabilities: Tensor, target: Tensor, weight: Tensor | None, reduction: int, label_smoothing: float
) -> Tensor:
    rank = log_probabilities.dim()
    class_dim = 0 if rank == 1 else 1
    num_classes = log_probabilities.shape[class_dim]
    if label_smoothing:
        target = target * (1 - label_smoothing) + label_smoothing / num_classes
    products = log_probabilities * target
    losses = -(products if weight is None else products * _per_class(weight, rank)).sum(class_dim)
    return _reduced(losses, lambda: max(log_probabilities.numel() // num_classes, 1), reduction)


def cosine_embedding_loss(
    input1: Tensor, input2: Tensor, target: Tensor, margin: float = 0.0, reduction: int = MEAN
) -> Tensor:
    small = 1e-12  # PyTorch's own
    sizes = (input1.square().sum(-1) + small) * (input2.square().sum(-1) + small)
    cosine = (input1 * input2).sum(-1) / sizes.sqrt()
    dissimilar = torch.where(target == -1, (cosine - margin).clamp_min(0), 0)
    losses = torch.where(target == 1, 1 - cosine, dissimilar)
    return _reduced(losses, losses.numel, reduction)


def pairwise_distance(x1: Tensor, x2: Tensor, p: float = 2, eps: float = 1e-6, keepdim: bool = False) -> Tensor:
    return vector_norm(x1 - x2 + eps, p, -1, keepdim)


def triplet_margin_loss(
    anchor: Tensor,
    positive: Tensor,
    negative: Tensor,
    margin: float = 1.0,
    p: float = 2,
    eps: float = 1e-6,
    swap: bool = False,
    reduction: int = MEAN,
) -> Tensor:
    near = pairwise_distance(anchor, positive, p, eps)
    far = pairwise_distance(anchor, negative, p, eps)
    if swap:
        far = torch.minimum(far, pairwise_distance(positive, negative, p, eps))
    losses = (margin + near - far).clamp_min(0)
    return _reduced(losses, losses.numel, reduction)


def multi_margin_loss(
    self: Tensor, target: Tensor, p: float = 1, margin: float = 1, weight: Tensor | None = None, reduction: int = MEAN
) -> Tensor:
    """Over split samples: the classes of one stay together."""
    total: Tensor = torch.ops.aten.multi_margin_loss.default(self, target, p, margin, weight, SUM)
    return total / target.numel()


def multilabel_margin_loss(self: Tensor, target: Tensor, reduction: int = MEAN) -> Tensor:
    """Over split samples: the classes of one stay together."""
    total: Tensor = torch.ops.aten.multilabel_margin_loss.default(self, target, SUM)
    return total / self.shape[0]
