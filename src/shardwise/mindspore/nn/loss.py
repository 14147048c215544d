"""Losses."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F

from shardwise.errors import problem
from shardwise.mindspore.nn.cell import Cell
from shardwise.mindspore.ops.arithmetic import PRIMITIVES, Cast
from shardwise.mindspore.ops.indexing import OneHot
from shardwise.mindspore.ops.losses import SoftmaxCrossEntropyWithLogits as SoftmaxCrossEntropy
from shardwise.mindspore.ops.reductions import REDUCTIONS as OVER_DIMS
from shardwise.mindspore.tensor import as_torch

REDUCTIONS = ("mean", "sum", "none")


class LossBase(Cell):
    """Base: ``get_loss`` applies the reduction, and weights. Losses made from it find the operators that they use
    under the reference's names."""

    is_loss = True
    reductions = REDUCTIONS
    reduce_mean, reduce_sum = OVER_DIMS["ReduceMean"](), OVER_DIMS["ReduceSum"]()
    mul, cast = PRIMITIVES["Mul"](), Cast()

    def __init__(self, reduction: str | None = "mean") -> None:
        super().__init__()
        reduction = reduction or "none"
        if reduction not in self.reductions:
            raise ValueError(problem(f"reduction is {reduction!r}", fix=f"one of {', '.join(self.reductions)}"))
        self.reduction, self.average, self.reduce = reduction, reduction != "sum", reduction != "none"

    def get_axis(self, x: torch.Tensor) -> tuple[int, ...]:
        """All dims of a tensor."""
        return tuple(range(x.dim()))

    def get_loss(self, x: torch.Tensor, weights: Any = 1.0) -> torch.Tensor:
        x = x * weights
        return x.mean() if self.reduction == "mean" else x.sum() if self.reduction == "sum" else x


_Loss = LossBase  # as older programs import it


class MSELoss(LossBase):
    """(logits - labels) squared."""

    def construct(self, logits: Any, labels: Any) -> Any:
        return self.get_loss((logits - labels).square())


class L1Loss(LossBase):
    """|logits - labels|"""

    def construct(self, logits: Any, labels: Any) -> Any:
        return self.get_loss((logits - labels).abs())


class MAELoss(L1Loss):
    """|logits - labels|"""


class SmoothL1Loss(LossBase):
    """0.5 d^2 / beta where d = |logits - labels| is below beta, else d - 0.5 beta. By default one loss per element."""

    def __init__(self, beta: float = 1.0, reduction: str = "none") -> None:
        super().__init__(reduction)
        if beta <= 0:
            raise ValueError(problem(f"beta is {beta}", fix="a number above 0"))
        self.beta = beta

    def construct(self, logits: Any, labels: Any) -> Any:
        return F.smooth_l1_loss(logits, labels, reduction=self.reduction, beta=self.beta)


class SoftmaxCrossEntropyWithLogits(LossBase):
    """Cross entropy of the softmax over the last dim. ``sparse``: labels are class numbers, else probabilities of the
    logits' shape. By default one loss per row (``reduction="none"``), as in the reference."""

    def __init__(self, sparse: bool = False, reduction: str = "none") -> None:
        super().__init__(reduction)
        self.sparse = sparse
        self.softmax_cross_entropy, self.one_hot = SoftmaxCrossEntropy(), OneHot()

    def construct(self, logits: Any, labels: Any) -> Any:
        if self.sparse and not (self.softmax_cross_entropy.in_strategy or self.one_hot.in_strategy):
            return F.cross_entropy(logits, labels.long(), reduction=self.reduction)
        if self.sparse:
            labels = self.one_hot(labels, logits.shape[-1], 1.0, 0.0)
        return self.get_loss(self.softmax_cross_entropy(logits, labels.to(logits.dtype))[0])


class CrossEntropyLoss(LossBase):
    """Cross entropy of the softmax over dim 1; labels are class numbers, or probabilities of the logits' shape."""

    weight: torch.Tensor | None

    def __init__(
        self, weight: Any = None, ignore_index: int = -100, reduction: str = "mean", label_smoothing: float = 0.0
    ) -> None:
        super().__init__(reduction)
        self.ignore_index, self.label_smoothing = ignore_index, label_smoothing
        self.register_buffer("weight", None if weight is None else as_torch(weight))

    def construct(self, logits: Any, labels: Any) -> Any:
        return F.cross_entropy(
            logits,
            labels if labels.is_floating_point() else labels.long(),
            self.weight,
            ignore_index=self.ignore_index,
            reduction=self.reduction,
            label_smoothing=self.label_smoothing,
        )


class NLLLoss(LossBase):
    """Minus the logits (logarithms of probabilities over dim 1) of the labels, which are class numbers."""

    weight: torch.Tensor | None

    def __init__(self, weight: Any = None, ignore_index: int = -100, reduction: str = "mean") -> None:
        super().__init__(reduction)
        self.ignore_index = ignore_index
        self.register_buffer("weight", None if weight is None else as_torch(weight))

    def construct(self, logits: Any, labels: Any) -> Any:
        return F.nll_loss(logits, labels.long(), self.weight, ignore_index=self.ignore_index, reduction=self.reduction)


class BCELoss(LossBase):
    """Binary cross entropy of probabilities. By default one loss per element."""

    weight: torch.Tensor | None

    def __init__(self, weight: Any = None, reduction: str = "none") -> None:
        super().__init__(reduction)
        self.register_buffer("weight", None if weight is None else as_torch(weight))

    def construct(self, logits: Any, labels: Any) -> Any:
        return F.binary_cross_entropy(logits, labels, self.weight, reduction=self.reduction)


class BCEWithLogitsLoss(LossBase):
    """Binary cross entropy of the sigmoid of logits. ``pos_weight``: of the labels that are 1."""

    weight: torch.Tensor | None
    pos_weight: torch.Tensor | None

    def __init__(self, reduction: str = "mean", weight: Any = None, pos_weight: Any = None) -> None:
        super().__init__(reduction)
        self.register_buffer("weight", None if weight is None else as_torch(weight))
        self.register_buffer("pos_weight", None if pos_weight is None else as_torch(pos_weight))

    def construct(self, logits: Any, labels: Any) -> Any:
        return F.binary_cross_entropy_with_logits(
            logits, labels, self.weight, reduction=self.reduction, pos_weight=self.pos_weight
        )


__all__ = [
    "BCELoss", "BCEWithLogitsLoss", "CrossEntropyLoss", "L1Loss", "LossBase", "MAELoss", "MSELoss", "NLLLoss",
    "SmoothL1Loss", "SoftmaxCrossEntropyWithLogits",
]  # fmt: skip
