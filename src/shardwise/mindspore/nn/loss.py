"""Losses."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F

from shardwise.errors import problem
from shardwise.mindspore.nn.cell import Cell

REDUCTIONS = ("mean", "sum", "none")


class LossBase(Cell):
    """Base: ``get_loss`` applies the reduction, and weights."""

    is_loss = True

    def __init__(self, reduction: str = "mean") -> None:
        super().__init__()
        if reduction not in REDUCTIONS:
            raise ValueError(problem(f"reduction is {reduction!r}", fix=f"one of {', '.join(REDUCTIONS)}"))
        self.reduction = reduction

    def get_loss(self, x: torch.Tensor, weights: Any = 1.0) -> torch.Tensor:
        x = x * weights
        return x.mean() if self.reduction == "mean" else x.sum() if self.reduction == "sum" else x


class MSELoss(LossBase):
    """(logits - labels) squared."""

    def construct(self, logits: Any, labels: Any) -> Any:
        return self.get_loss((logits - labels).square())


class SoftmaxCrossEntropyWithLogits(LossBase):
    """Cross entropy of the softmax over the last dim. ``sparse``: labels are class numbers, else probabilities of the
    logits' shape. By default one loss per row (``reduction="none"``), as in the reference."""

    def __init__(self, sparse: bool = False, reduction: str = "none") -> None:
        super().__init__(reduction)
        self.sparse = sparse

    def construct(self, logits: Any, labels: Any) -> Any:
        if self.sparse:
            return F.cross_entropy(logits, labels.long(), reduction=self.reduction)
        return self.get_loss(-(labels * logits.log_softmax(-1)).sum(-1))
