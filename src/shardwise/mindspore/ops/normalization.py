"""Softmax and norms over dims, and dropout."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F

from shardwise.errors import problem
from shardwise.mindspore import strict
from shardwise.mindspore.checks import channels_first
from shardwise.mindspore.ops.primitive import OfSettings
from shardwise.mindspore.strict import Shapes, Strategy


class Softmax(OfSettings, axis=-1):
    """exp(x) divided by its sum along ``axis``, one dim or several."""

    why = "over which it is normalised"
    axis: Any

    def _settle(self) -> None:
        self.axis = (self.axis,) if isinstance(self.axis, int) else tuple(self.axis)
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

    def compute(self, x: Any) -> Any:
        return torch.log_softmax(x, self.axis[0])


class L2Normalize(Softmax, axis=0, epsilon=1e-4):
    """x / sqrt(max(sum of x squared along ``axis``, epsilon))"""

    def _settle(self) -> None:
        super()._settle()
        self.lead = 0

    def compute(self, x: Any) -> Any:
        return x * x.square().sum(self.axis, keepdim=True).clamp(min=self.epsilon).rsqrt()


class LayerNorm(OfSettings, begin_norm_axis=1, begin_params_axis=1, epsilon=1e-7):
    """Normalisation of x over the dims from ``begin_norm_axis`` on, times gamma plus beta: ``LayerNorm(begin_norm_axis,
    begin_params_axis, epsilon)(x, gamma, beta)``. Gamma and beta have the dims from ``begin_params_axis`` on. It also
    returns mean and variance."""

    lead = 0

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


class BatchNorm(OfSettings, is_training=False, epsilon=1e-5, momentum=0.1, data_format="NCHW"):
    """Normalisation over all dims but the second: ``BatchNorm(is_training, epsilon, momentum)(x, scale, bias, mean,
    variance)``. Training uses the batch's own statistics and mixes them into ``mean`` and ``variance`` with weight
    ``momentum``. The last two of the five results repeat the statistics."""

    dims = "n c b..., c, c, c, c"
    lead = 0

    def _settle(self) -> None:
        channels_first("BatchNorm", self.data_format, "; transpose first")

    def compute(self, x: Any, scale: Any, bias: Any, mean: Any, variance: Any) -> Any:
        y = F.batch_norm(x, mean, variance, scale, bias, self.is_training, self.momentum, self.epsilon)
        return y, mean, variance, mean, variance


class Dropout(OfSettings, keep_prob=0.5, Seed0=0, Seed1=0):
    """``Dropout(keep_prob)(x)``: each element is kept with probability ``keep_prob`` and divided by it, else 0; and the
    mask. Devices draw different numbers for different elements, and equal ones for the same element."""

    lead = 0

    def _settle(self) -> None:
        if not 0 < self.keep_prob <= 1:
            raise ValueError(problem(f"keep_prob is {self.keep_prob}", fix="a number above 0, at most 1"))

    def compute(self, x: Any) -> Any:
        scale = F.dropout(torch.ones_like(x), 1 - self.keep_prob, training=True)
        return x * scale, scale != 0


__all__ = ["BatchNorm", "Dropout", "L2Normalize", "LayerNorm", "LogSoftmax", "Softmax"]
