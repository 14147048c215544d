"""Cross entropies as operators: a loss and its gradient."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F

from shardwise.errors import problem
from shardwise.mindspore import strict
from shardwise.mindspore.ops.primitive import OfSettings, Primitive
from shardwise.mindspore.strict import Shapes, Strategy


class SoftmaxCrossEntropyWithLogits(Primitive):
    """Cross entropy over the last dim of ``(logits, labels)``, with labels as probabilities, and the gradient of the
    logits. Only the loss is differentiated."""

    lead = 0

    def compute(self, logits: Any, labels: Any) -> Any:
        logarithms = logits.log_softmax(-1)
        loss = -(labels * logarithms).sum(-1)
        return loss, (logarithms.exp() - labels).detach()

    def check_strategy(self, strategy: Strategy, shapes: Shapes, args: tuple[Any, ...]) -> None:
        strict.equal(self.title, strategy, "the strategies of logits and labels must be equal")
        strict.whole(self.title, strategy[0], (len(shapes[0]) - 1,), "the classes")


class SparseSoftmaxCrossEntropyWithLogits(OfSettings, is_grad=False):
    """Mean cross entropy, or with ``is_grad`` the gradient of the logits:
    ``SparseSoftmaxCrossEntropyWithLogits(is_grad)(logits, labels)``, with labels as class indices."""

    dims = "b... classes, b..."
    sums = True
    lead = 0

    def compute(self, logits: Any, labels: Any) -> Any:
        if self.is_grad:
            hot = F.one_hot(labels.long(), logits.shape[-1]).to(logits.dtype)
            return (logits.softmax(-1) - hot) / logits.shape[0]
        return F.cross_entropy(logits, labels.long())

    def check_strategy(self, strategy: Strategy, shapes: Shapes, args: tuple[Any, ...]) -> None:
        strict.whole(self.title, strategy[0], (len(shapes[0]) - 1,), "the classes")


class SigmoidCrossEntropyWithLogits(Primitive):
    """Binary cross entropy of the sigmoid per element of ``(logits, label)``."""

    def compute(self, logits: Any, label: Any) -> Any:
        return F.binary_cross_entropy_with_logits(logits, label, reduction="none")


class BinaryCrossEntropy(OfSettings, reduction="mean"):
    """Binary cross entropy of probabilities: ``BinaryCrossEntropy(reduction)(logits, labels, weight)``."""

    sums = True

    def _settle(self) -> None:
        if self.reduction not in ("mean", "sum", "none"):
            raise ValueError(problem(f"reduction is {self.reduction!r}", fix="one of mean, sum, none"))

    def compute(self, logits: Any, labels: Any, weight: torch.Tensor | None = None) -> Any:
        return F.binary_cross_entropy(logits, labels, weight, reduction=self.reduction)


class L2Loss(Primitive):
    """Half the sum of squares."""

    sums = True
    lead = 0

    def compute(self, x: Any) -> Any:
        return x.square().sum() / 2


__all__ = [
    "BinaryCrossEntropy", "L2Loss", "SigmoidCrossEntropyWithLogits", "SoftmaxCrossEntropyWithLogits",
    "SparseSoftmaxCrossEntropyWithLogits",
]  # fmt: skip
