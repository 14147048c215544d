"""Softmax and norms over dims, and dropout."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional as F

from shardwise.errors import problem
from shardwise.mindspore import strict
from shardwise.mindspore.ops.primitive import Primitive, Shapes, Strategy


class Softmax(Primitive):
    """exp(x) over its sum along ``axis``, one dim or several."""

    why = "over which it is normalised"

    def __init__(self, axis: int | Sequence[int] = -1) -> None:
        super().__init__(axis=axis)
        self.axis = (axis,) if isinstance(axis, int) else tuple(axis)
        self.lead = 0 if len(self.axis) > 1 else None

    def compute(self, x: Any) -> Any:
        if len(self.axis) == 1:
            return torch.softmax(x, self.axis[0])
        return torch.exp(x - x.logsumexp(self.axis, keepdim=True))

    def check_strategy(self, strategy: Strategy, shapes: Shapes, args: tuple[Any, ...]) -> None:
        dims = [strict.dim_of(self.title, axis, len(shapes[0])) for axis in self.axis]
        strict.whole(self.title, strategy[0], dims, self.why)


class LogSoftmax(Softmax):
    """The logarithm of Softmax along one dim."""

    def __init__(self, axis: int = -1) -> None:
        super().__init__(axis)

    def compute(self, x: Any) -> Any:
        return torch.log_softmax(x, self.axis[0])


class L2Normalize(Softmax):
    """x / sqrt(max(sum of x squared along ``axis``, epsilon))"""

    def __init__(self, axis: int | Sequence[int] = 0, epsilon: float = 1e-4) -> None:
        super().__init__(axis)
        self.lead = 0
        self.attrs["epsilon"] = self.epsilon = epsilon

    def compute(self, x: Any) -> Any:
        return x * x.square().sum(self.axis, keepdim=True).clamp(min=self.epsilon).rsqrt()


class LayerNorm(Primitive):
    """``LayerNorm(begin_norm_axis, begin_params_axis, epsilon)(x, gamma, beta)``: x normalised over the dims from
    ``begin_norm_axis`` on, times gamma plus beta, which have the dims from ``begin_params_axis`` on; and its mean and
    variance."""

    lead = 0

    def __init__(self, begin_norm_axis: int = 1, begin_params_axis: int = 1, epsilon: float = 1e-7) -> None:
        super().__init__(begin_norm_axis=begin_norm_axis, begin_params_axis=begin_params_axis, epsilon=epsilon)
        self.begin_norm_axis, self.begin_params_axis, self.epsilon = begin_norm_axis, begin_params_axis, epsilon

    def compute(self, x: Any, gamma: Any, beta: Any) -> Any:
        begin = self.begin_norm_axis % x.dim()
        variance, mean = torch.var_mean(x, tuple(range(begin, x.dim())), correction=0, keepdim=True)
        if self.begin_params_axis % x.dim() == begin:
            y = F.layer_norm(x, x.shape[begin:], gamma, beta, self.epsilon)
        else:
            y = F.layer_norm(x, x.shape[begin:], eps=self.epsilon) * gamma + beta
        return y, mean, variance

    def check_strategy(self, strategy: Strategy, shapes: Shapes, args: tuple[Any, ...]) -> None:
        rank = len(shapes[0])
        begin = strict.dim_of(self.title, self.begin_norm_axis, rank)
        strict.whole(self.title, strategy[0], range(begin, rank), "over which it is normalised")


class BatchNorm(Primitive):
    """``BatchNorm(is_training, epsilon, momentum)(x, scale, bias, mean, variance)``: normalised over all dims but the
    second, in training by the batch's own statistics, which are then mixed into ``mean`` and ``variance`` with weight
    ``momentum``. Five results, of which the last two repeat the statistics."""

    dims = "n c b..., c, c, c, c"
    lead = 0

    def __init__(
        self, is_training: bool = False, epsilon: float = 1e-5, momentum: float = 0.1, data_format: str = "NCHW"
    ) -> None:
        super().__init__(is_training=is_training, epsilon=epsilon, momentum=momentum, data_format=data_format)
        self.is_training, self.epsilon, self.momentum = is_training, epsilon, momentum
        if data_format != "NCHW":
            raise NotImplementedError(
                f"BatchNorm(data_format={data_format!r}): channels are dim 1 here; transpose first"
            )

    def compute(self, x: Any, scale: Any, bias: Any, mean: Any, variance: Any) -> Any:
        y = F.batch_norm(x, mean, variance, scale, bias, self.is_training, self.momentum, self.epsilon)
        return y, mean, variance, mean, variance


class Dropout(Primitive):
    """``Dropout(keep_prob)(x)``: each element is kept with probability ``keep_prob`` and divided by it, else 0; and
    which were kept. Devices draw different numbers for different elements, and equal ones for the same element."""

    lead = 0

    def __init__(self, keep_prob: float = 0.5, Seed0: int = 0, Seed1: int = 0) -> None:
        super().__init__(keep_prob=keep_prob, Seed0=Seed0, Seed1=Seed1)
        if not 0 < keep_prob <= 1:
            raise ValueError(problem(f"keep_prob is {keep_prob}", fix="a number above 0, at most 1"))
        self.keep_prob = keep_prob

    def compute(self, x: Any) -> Any:
        scale = F.dropout(torch.ones_like(x), 1 - self.keep_prob, training=True)
        return x * scale, scale != 0


__all__ = ["BatchNorm", "Dropout", "L2Normalize", "LayerNorm", "LogSoftmax", "Softmax"]
