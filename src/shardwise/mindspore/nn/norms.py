"""Layers that normalise, under the reference's names and with its parameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional as F

from shardwise.errors import problem
from shardwise.mindspore import calls
from shardwise.mindspore.checks import channels_first
from shardwise.mindspore.common.initializer import initializer
from shardwise.mindspore.communication.management import find_group
from shardwise.mindspore.nn.cell import Cell
from shardwise.mindspore.nn.layers import positive
from shardwise.mindspore.ops.communication import AllReduce
from shardwise.mindspore.ops.normalization import LayerNorm as LayerNormOperator
from shardwise.mindspore.ops.primitive import Inner
from shardwise.mindspore.tensor import Parameter


class _Scaled(Cell):
    """What is normalised, times gamma plus beta."""

    def set_scales(self, shape: list[int], gamma: Any, beta: Any, dtype: torch.dtype, learned: bool = True) -> None:
        self.gamma = Parameter(initializer(gamma, shape, dtype), "gamma", requires_grad=learned)
        self.beta = Parameter(initializer(beta, shape, dtype), "beta", requires_grad=learned)


class _BatchNorm(_Scaled):
    """Normalised per channel (dim 1): in training by the batch's statistics, which are mixed into the moving ones with
    weight ``1 - momentum``; otherwise by these. ``use_batch_statistics``: always, or never, by the batch's."""

    dims: tuple[int, ...]
    casts_parameters = False  # moving statistics and their sums keep their precision

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float = 0.9,
        affine: bool = True,
        gamma_init: Any = "ones",
        beta_init: Any = "zeros",
        moving_mean_init: Any = "zeros",
        moving_var_init: Any = "ones",
        use_batch_statistics: bool | None = None,
        data_format: str = "NCHW",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        positive(type(self).__name__, num_features=num_features)
        if not 0 <= momentum <= 1:
            raise ValueError(problem(f"momentum is {momentum}", fix="a number from 0 to 1"))
        channels_first(type(self).__name__, data_format)
        self.num_features, self.eps, self.momentum = num_features, eps, momentum
        self.use_batch_statistics = use_batch_statistics
        self.set_scales([num_features], gamma_init, beta_init, dtype, affine)
        self.moving_mean: torch.Tensor
        self.moving_variance: torch.Tensor
        self.register_buffer("moving_mean", initializer(moving_mean_init, [num_features], dtype))
        self.register_buffer("moving_variance", initializer(moving_var_init, [num_features], dtype))
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
    """BatchNorm, whose statistics are those of all ranks' rows in data_parallel mode (where cells are split, they
    always are). ``process_groups`` is taken: all ranks share their statistics."""

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


class _InstanceNorm(_Scaled):
    """Normalised per sample and channel, times gamma plus beta."""

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float = 0.1,
        affine: bool = True,
        gamma_init: Any = "ones",
        beta_init: Any = "zeros",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        positive(type(self).__name__, num_features=num_features)
        self.eps = eps
        self.set_scales([num_features], gamma_init, beta_init, dtype, affine)

    def construct(self, x: Any) -> Any:
        return F.instance_norm(x, weight=self.gamma, bias=self.beta, eps=self.eps)


InstanceNorm1d, InstanceNorm2d, InstanceNorm3d = (
    type(f"InstanceNorm{dims}d", (_InstanceNorm,), {"__module__": __name__, "__doc__": _InstanceNorm.__doc__})
    for dims in (1, 2, 3)
)


class LayerNorm(_Scaled):
    """Normalised over the last dims, times gamma plus beta."""

    def __init__(
        self,
        normalized_shape: Sequence[int],
        begin_norm_axis: int = -1,
        begin_params_axis: int = -1,
        gamma_init: Any = "ones",
        beta_init: Any = "zeros",
        epsilon: float = 1e-7,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        if not isinstance(normalized_shape, (tuple, list)):
            what = f"LayerNorm: normalized_shape is {normalized_shape!r}"
            raise TypeError(problem(what, fix=f"a tuple: ({normalized_shape},)"))
        self.set_scales(list(normalized_shape), gamma_init, beta_init, dtype)
        self.layer_norm = LayerNormOperator(begin_norm_axis, begin_params_axis, epsilon)

    def construct(self, x: Any) -> Any:
        y, _, _ = self.layer_norm(x, self.gamma, self.beta)
        return y


class GroupNorm(_Scaled):
    """Normalised over groups of channels."""

    def __init__(
        self,
        num_groups: int,
        num_channels: int,
        eps: float = 1e-5,
        affine: bool = True,
        gamma_init: Any = "ones",
        beta_init: Any = "zeros",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        positive("GroupNorm", num_groups=num_groups, num_channels=num_channels)
        if num_channels % num_groups:
            what = f"GroupNorm: {num_groups} groups of {num_channels} channels: not whole"
            raise ValueError(problem(what, fix="a divisor"))
        self.num_groups, self.eps = num_groups, eps
        self.set_scales([num_channels], gamma_init, beta_init, dtype, affine)

    def construct(self, x: Any) -> Any:
        return F.group_norm(x, self.num_groups, self.gamma, self.beta, self.eps)


__all__ = [
    "BatchNorm1d", "BatchNorm2d", "BatchNorm3d", "GroupNorm", "InstanceNorm1d", "InstanceNorm2d", "InstanceNorm3d",
    "LayerNorm", "SyncBatchNorm",
]  # fmt: skip
