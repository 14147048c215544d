"""Losses."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.nn import functional as F

from shardwise.errors import problem
from shardwise.mindspore.checks import within
from shardwise.mindspore.named import TABLES, classes_of
from shardwise.mindspore.nn.cell import Cell
from shardwise.mindspore.nn.simple import Simple
from shardwise.mindspore.ops.arithmetic import CLASSES as ELEMENTWISE
from shardwise.mindspore.ops.dims import CLASSES as OPERATORS
from shardwise.mindspore.ops.dims import REDUCTIONS as OVER_DIMS
from shardwise.mindspore.ops.indexing import OneHot
from shardwise.mindspore.ops.of_torch import of_functions
from shardwise.mindspore.tensor import as_torch

REDUCTIONS = ("mean", "sum", "none")
WEIGHTS = ("weight", "pos_weight")  # settings that are stored as buffers


def reduced(x: torch.Tensor, reduction: str) -> torch.Tensor:
    return x.mean() if reduction == "mean" else x.sum() if reduction == "sum" else x


class LossBase(Cell):
    """Base of losses. ``get_loss`` applies weights and the reduction. Subclasses find common operators under the
    reference's names."""

    is_loss = True
    reductions = REDUCTIONS
    reduce_mean, reduce_sum = OVER_DIMS["ReduceMean"](), OVER_DIMS["ReduceSum"]()
    mul, cast = ELEMENTWISE["Mul"](), ELEMENTWISE["Cast"]()

    def __init__(self, reduction: str | None = "mean") -> None:
        super().__init__()
        reduction = reduction or "none"
        if reduction not in self.reductions:
            raise ValueError(problem(f"reduction is {reduction!r}", fix=f"one of {', '.join(self.reductions)}"))
        self.reduction, self.average, self.reduce = reduction, reduction != "sum", reduction != "none"

    def get_axis(self, x: torch.Tensor) -> tuple[int, ...]:
        """Return all dims of a tensor."""
        return tuple(range(x.dim()))

    def get_loss(self, x: torch.Tensor, weights: Any = 1.0) -> torch.Tensor:
        return reduced(x * weights, self.reduction)


_Loss = LossBase  # older programs import this name


class LossOfFunction(Simple, LossBase):
    """The loss ``function(*inputs, **settings)``. Weights are buffers."""

    def _take(self, values: dict[str, Any]) -> None:
        LossBase.__init__(self, values.get("reduction", "mean"))
        for name, value in values.items():
            if name in WEIGHTS or isinstance(value, torch.Tensor):
                self.register_buffer(name, None if value is None else as_torch(value))
            elif name != "reduction":
                setattr(self, name, value)


class SoftmaxCrossEntropyWithLogits(LossBase):
    """Cross entropy of the softmax over the last dim. ``sparse``: labels are class indices, else probabilities in the
    logits' shape. By default one loss per row (``reduction="none"``), as in the reference."""

    def __init__(self, sparse: bool = False, reduction: str = "none") -> None:
        super().__init__(reduction)
        self.sparse = sparse
        self.softmax_cross_entropy, self.one_hot = OPERATORS["SoftmaxCrossEntropyWithLogits"](), OneHot()

    def construct(self, logits: Any, labels: Any) -> Any:
        if self.sparse and not (self.softmax_cross_entropy.in_strategy or self.one_hot.in_strategy):
            return F.cross_entropy(logits, labels.long(), reduction=self.reduction)
        if self.sparse:
            labels = self.one_hot(labels, logits.shape[-1], 1.0, 0.0)
        return self.get_loss(self.softmax_cross_entropy(logits, labels.to(logits.dtype))[0])


def _focal(logits: Any, labels: Any, weight: Any, gamma: float, reduction: str) -> Any:
    """Return (1 - p)^gamma times the cross entropy (Lin et al. 2017, equation 5), over classes in dim 1."""
    classes = labels.long() if labels.dim() < logits.dim() else labels.squeeze(1).long()
    logarithm = logits.log_softmax(1).gather(1, classes.unsqueeze(1)).squeeze(1)
    loss = -((1 - logarithm.exp()) ** gamma) * logarithm
    return reduced(loss if weight is None else loss * as_torch(weight)[classes], reduction)


# Labels are class indices over dim 1 (cross entropy also takes probabilities), or probabilities in binary ones.
CLASSES = classes_of({
    **of_functions(TABLES["nn"]["losses"]),
    **dict.fromkeys(("L1Loss", "MAELoss"), lambda logits, labels, *, reduction="mean": reduced(
        (logits - labels).abs(), reduction)),
    "MSELoss": lambda logits, labels, *, reduction="mean": reduced((logits - labels).square(), reduction),
    "SmoothL1Loss": (None, lambda logits, labels, *, beta=1.0, reduction="none": F.smooth_l1_loss(
        logits, labels, beta=beta, reduction=reduction), {"checks": {"beta": within(0, math.inf, "a number above 0")}}),
    "CTCLoss": lambda log_probs, targets, input_lengths, target_lengths, *, blank=0, reduction="mean",
    zero_infinity=False: F.ctc_loss(log_probs, targets, input_lengths, target_lengths, blank, reduction, zero_infinity),
    "DiceLoss": lambda logits, labels, *, smooth=1e-5: 1 - 2 * (logits * labels).sum() / (
        logits.square().sum() + labels.square().sum() + smooth),
    "FocalLoss": lambda logits, labels, *, weight=None, gamma=2.0, reduction="mean": _focal(
        logits, labels, weight, gamma, reduction),
    "MultilabelMarginLoss": lambda x, target, *, reduction="mean": F.multilabel_margin_loss(
        x, target.long(), reduction=reduction),
    "MultiMarginLoss": lambda x, target, *, p=1, margin=1.0, reduction="mean", weight=None: F.multi_margin_loss(
        x, target.long(), p, margin, weight, reduction=reduction),
    "RMSELoss": lambda logits, labels: (logits - labels).square().mean().sqrt(),
    "TripletMarginLoss": lambda x, positive, negative, own_margin=None, *, p=2, swap=False, eps=1e-6, reduction="mean",
    margin=1.0: F.triplet_margin_loss(
        x, positive, negative, float(margin if own_margin is None else own_margin), p, eps, swap, reduction=reduction),
}, LossOfFunction, __name__)  # fmt: skip
CLASSES["KLDivLoss"].reductions = (*REDUCTIONS, "batchmean")
globals().update(CLASSES)

__all__ = ["LossBase", "SoftmaxCrossEntropyWithLogits", *CLASSES]
