"""Normalisation layers, under the reference's names and with its parameters."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F

from shardwise.errors import problem
from shardwise.mindspore import calls
from shardwise.mindspore.checks import channels_first
from shardwise.mindspore.common.initializer import initializer
from shardwise.mindspore.communication.management import find_group
from shardwise.mindspore.named import SETTINGS
from shardwise.mindspore.nn.layers import Layer, positive
from shardwise.mindspore.ops.communication import AllReduce
from shardwise.mindspore.ops.primitive import Inner
from shardwise.mindspore.ops.reductions import CLASSES as OPERATORS
from shardwise.mindspore.tensor import Parameter


class _Scaled(Layer):
    """Base of normalisations that multiply by gamma and add beta."""

    def _set_scales(self, shape: list[int], gamma: Any, beta: Any, dtype: torch.dtype, learned: bool = True) -> None:
        self.gamma = Parameter(initializer(gamma, shape, dtype), "gamma", requires_grad=learned)
        self.beta = Parameter(initializer(beta, shape, dtype), "beta", requires_grad=learned)


class _BatchNorm(_Scaled, **SETTINGS["nn.BatchNorm"]):
    """Batch normalisation per channel (dim 1). Training uses the batch's statistics and mixes them into the moving ones
    with weight ``1 - momentum``; evaluation uses the moving ones. ``use_batch_statistics`` overrides this choice."""

    dims: tuple[int, ...]
    statistics = ("moving_mean", "moving_variance")  # parameters to the reference
    casts_parameters = False  # moving statistics and their sums keep their precision

    def _settle(
        self, affine: bool, gamma_init: Any, beta_init: Any, moving_mean_init: Any, moving_var_init: Any,
        data_format: str, dtype: torch.dtype,
    ) -> None:  # fmt: skip
        positive(type(self).__name__, num_features=self.num_features)
        if not 0 <= self.momentum <= 1:
            raise ValueError(problem(f"momentum is {self.momentum}", fix="a number from 0 to 1"))
        channels_first(type(self).__name__, data_format)
        self._set_scales([self.num_features], gamma_init, beta_init, dtype, affine)
        self.moving_mean: torch.Tensor
        self.moving_variance: torch.Tensor
        for name, init in zip(self.statistics, (moving_mean_init, moving_var_init), strict=True):
            values = initializer(init, [self.num_features], dtype)
            self.register_buffer(name, Parameter(values, name, requires_grad=False))
        self.bn_train = self.bn_infer = Inner("n c b..., c, c, c, c")

    def construct(self, x: Any) -> Any:
        if x.dim() not in self.dims:
            what = f"{type(self).__name__} got an input of shape {list(x.shape)}"
            raise ValueError(problem(what, fix=f"one of {self.dims} dims"))
        batch = self.training if self.use_batch_statistics is None else self.use_batch_statistics
        mean, variance = self.moving_mean, self.moving_variance
        weight = 0.0 if calls.is_again() else 1 - self.momentum
        wide = x if self._float is None else x.to(mean.dtype)

        def normalised(x: Any, gamma: Any, beta: Any, mean: Any, variance: Any) -> Any:
            return F.batch_norm(x, mean, variance, gamma, beta, batch, weight, self.eps)

        return self.bn_train(normalised, wide, self.gamma, self.beta, mean, variance).to(x.dtype)


BatchNorm1d, BatchNorm2d, BatchNorm3d = (
    type(f"BatchNorm{n}d", (_BatchNorm,), {"dims": dims, "__module__": __name__, "__doc__": _BatchNorm.__doc__})
    for n, dims in ((1, (2, 3)), (2, (4,)), (3, (5,)))
)


class SyncBatchNorm(_BatchNorm):
    """BatchNorm over the rows of all ranks in data_parallel mode. (Statistics of split cells always cover all rows.)
    ``process_groups`` is accepted: all ranks share their statistics."""

    dims = (2, 3, 4, 5)

    def __init__(self, num_features: int, *args: Any, process_groups: Any = None, **kwargs: Any) -> None:
        super().__init__(num_features, *args, **kwargs)

    def construct(self, x: Any) -> Any:
        batch = self.training if self.use_batch_statistics is None else self.use_batch_statistics
        if not batch or calls.is_split() or find_group().size == 1:
            return super().construct(x)
        dims = [dim for dim in range(x.dim()) if dim != 1]
        count = x.numel() // x.shape[1]
        moments = torch.stack([x.sum(dims), x.square().sum(dims), torch.full_like(self.gamma, count)])
        total, squares, count = AllReduce()(moments)
        mean = total / count
        variance = squares / count - mean.square()
        with torch.no_grad():
            weight = 0.0 if calls.is_again() else 1 - self.momentum
            self.moving_mean.lerp_(mean, weight)
            self.moving_variance.lerp_(variance * count / (count - 1), weight)
        shape = (1, -1, *(1,) * (x.dim() - 2))
        scale = self.gamma * torch.rsqrt(variance + self.eps)
        return x * scale.reshape(shape) + (self.beta - mean * scale).reshape(shape)


class _InstanceNorm(_Scaled, **SETTINGS["nn.InstanceNorm"]):
    """Normalisation per sample and channel, times gamma plus beta."""

    def _settle(self, affine: bool, gamma_init: Any, beta_init: Any, dtype: torch.dtype) -> None:
        positive(type(self).__name__, num_features=self.num_features)
        self._set_scales([self.num_features], gamma_init, beta_init, dtype, affine)

    def construct(self, x: Any) -> Any:
        return F.instance_norm(x, weight=self.gamma, bias=self.beta, eps=self.eps)


InstanceNorm1d, InstanceNorm2d, InstanceNorm3d = (
    type(f"InstanceNorm{dims}d", (_InstanceNorm,), {"__module__": __name__, "__doc__": _InstanceNorm.__doc__})
    for dims in (1, 2, 3)
)


class LayerNorm(_Scaled, **SETTINGS["nn.LayerNorm"]):
    """Normalisation over the last dims, times gamma plus beta."""

    def _settle(self, gamma_init: Any, beta_init: Any, dtype: torch.dtype) -> None:
        shape = self.normalized_shape
        if not isinstance(shape, (tuple, list)):
            raise TypeError(problem(f"LayerNorm: normalized_shape is {shape!r}", fix=f"a tuple: ({shape},)"))
        self._set_scales(list(shape), gamma_init, beta_init, dtype)
        self.layer_norm = OPERATORS["LayerNorm"](self.begin_norm_axis, self.begin_params_axis, self.epsilon)

    def construct(self, x: Any) -> Any:
        y, _, _ = self.layer_norm(x, self.gamma, self.beta)
        return y


class GroupNorm(_Scaled, **SETTINGS["nn.GroupNorm"]):
    """Normalisation over groups of channels."""

    def _settle(self, affine: bool, gamma_init: Any, beta_init: Any, dtype: torch.dtype) -> None:
        groups, channels = self.num_groups, self.num_channels
        positive("GroupNorm", num_groups=groups, num_channels=channels)
        if channels % groups:
            what = f"GroupNorm: {groups} groups of {channels} channels: not whole"
            raise ValueError(problem(what, fix="a divisor"))
        self._set_scales([channels], gamma_init, beta_init, dtype, affine)

    def construct(self, x: Any) -> Any:
        return F.group_norm(x, self.num_groups, self.gamma, self.beta, self.eps)


__all__ = [
    "BatchNorm1d", "BatchNorm2d", "BatchNorm3d", "GroupNorm", "InstanceNorm1d", "InstanceNorm2d", "InstanceNorm3d",
    "LayerNorm", "SyncBatchNorm",
]  # fmt: skip
