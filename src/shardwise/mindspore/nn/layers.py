"""Layers with parameters, under the reference's names; each holds its operators as primitives, which take strategies:
``dense.matmul.shard(((2, 1), (4, 1)))``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional as F

from shardwise.errors import problem
from shardwise.mindspore.common.initializer import HeUniform, Uniform, initializer
from shardwise.mindspore.nn.activations import get_activation
from shardwise.mindspore.nn.cell import Cell
from shardwise.mindspore.ops.images import AvgPool, Conv2D, Conv2DTranspose, MaxPool, Sizes, pair
from shardwise.mindspore.ops.indexing import Gather
from shardwise.mindspore.ops.linear import BiasAdd, MatMul
from shardwise.mindspore.ops.normalization import LayerNorm as LayerNormOperator
from shardwise.mindspore.ops.shape import Reshape
from shardwise.mindspore.tensor import Parameter

HE = math.sqrt(5)  # with it, He's bound is sqrt(1 / fan_in)


def _positive(layer: str, **sizes: Any) -> None:
    for name, size in sizes.items():
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ValueError(problem(f"{layer}: {name} is {size!r}", fix="a whole number from 1"))


def _bias(init: Any, size: int, fan_in: int, dtype: torch.dtype) -> Parameter:
    return Parameter(initializer(Uniform(1 / math.sqrt(fan_in)) if init is None else init, [size], dtype), "bias")


class Dense(Cell):
    """activation(x W^T + b), with a weight of (out, in)."""

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        weight_init: Any = None,
        bias_init: Any = None,
        has_bias: bool = True,
        activation: Any = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        _positive("Dense", in_channels=in_channels, out_channels=out_channels)
        self.in_channels, self.out_channels, self.has_bias = in_channels, out_channels, has_bias
        init = HeUniform(HE) if weight_init is None else weight_init
        self.weight = Parameter(initializer(init, [out_channels, in_channels], dtype), "weight")
        if has_bias:
            self.bias = _bias(bias_init, out_channels, in_channels, dtype)
            self.bias_add = BiasAdd()
        self.matmul, self.reshape = MatMul(transpose_b=True), Reshape()
        self.activation = get_activation(activation) if isinstance(activation, str) else activation

    def construct(self, x: Any) -> Any:
        shape = tuple(x.shape)
        x = self.matmul(x if len(shape) == 2 else self.reshape(x, (-1, shape[-1])), self.weight)
        if self.has_bias:
            x = self.bias_add(x, self.bias)
        if self.activation is not None:
            x = self.activation(x)
        return x if len(shape) == 2 else self.reshape(x, (*shape[:-1], self.out_channels))


class Embedding(Cell):
    """Rows of ``embedding_table``. ``padding_idx``: that row starts as zeros."""

    def __init__(
        self,
        vocab_size: int,
        embedding_size: int,
        use_one_hot: bool = False,
        embedding_table: Any = "normal",
        dtype: torch.dtype = torch.float32,
        padding_idx: int | None = None,
    ) -> None:
        super().__init__()
        _positive("Embedding", vocab_size=vocab_size, embedding_size=embedding_size)
        self.vocab_size, self.embedding_size, self.use_one_hot = vocab_size, embedding_size, use_one_hot
        table = initializer(embedding_table, [vocab_size, embedding_size], dtype)
        if padding_idx is not None:
            table[padding_idx] = 0
        self.embedding_table = Parameter(table, "embedding_table")
        self.gather, self.array_mul = Gather(), MatMul()

    def construct(self, ids: Any) -> Any:
        if not self.use_one_hot:
            return self.gather(self.embedding_table, ids, 0)
        hot = F.one_hot(ids.long(), self.vocab_size).to(self.embedding_table.dtype)
        rows = self.array_mul(hot.reshape(-1, self.vocab_size), self.embedding_table)
        return rows.reshape(*ids.shape, self.embedding_size)


class Conv2d(Cell):
    """Convolution of images (N, C, H, W), with a weight of (out, in / group, height, width)."""

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Sizes,
        stride: Sizes = 1,
        pad_mode: str = "same",
        padding: Sizes = 0,
        dilation: Sizes = 1,
        group: int = 1,
        has_bias: bool = False,
        weight_init: Any = None,
        bias_init: Any = None,
        data_format: str = "NCHW",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        _positive("Conv2d", in_channels=in_channels, out_channels=out_channels, group=group)
        if in_channels % group or out_channels % group:
            raise ValueError(
                problem(
                    f"Conv2d: group {group} does not divide {in_channels} and {out_channels} channels", fix="a divisor"
                )
            )
        kernel = pair("kernel_size", kernel_size)
        self.has_bias, fan_in = has_bias, in_channels // group * math.prod(kernel)
        init = HeUniform(HE) if weight_init is None else weight_init
        self.weight = Parameter(initializer(init, [out_channels, in_channels // group, *kernel], dtype), "weight")
        if has_bias:
            self.bias = _bias(bias_init, out_channels, fan_in, dtype)
            self.bias_add = BiasAdd()
        self.conv2d = Conv2D(
            out_channels, kernel, pad_mode=pad_mode, pad=padding, stride=stride, dilation=dilation, group=group,
            data_format=data_format,
        )  # fmt: skip

    def construct(self, x: Any) -> Any:
        x = self.conv2d(x, self.weight)
        return self.bias_add(x, self.bias) if self.has_bias else x


class Conv2dTranspose(Cell):
    """The transposed convolution, with a weight of (in, out / group, height, width). In mode "same" images grow by the
    stride."""

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Sizes,
        stride: Sizes = 1,
        pad_mode: str = "same",
        padding: Sizes = 0,
        output_padding: Sizes = 0,
        dilation: Sizes = 1,
        group: int = 1,
        has_bias: bool = False,
        weight_init: Any = None,
        bias_init: Any = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        _positive("Conv2dTranspose", in_channels=in_channels, out_channels=out_channels, group=group)
        self.out_channels, self.has_bias = out_channels, has_bias
        self.kernel_size, self.stride = pair("kernel_size", kernel_size), pair("stride", stride)
        self.dilation, self.output_padding = pair("dilation", dilation), pair("output_padding", output_padding, 0)
        init = HeUniform(HE) if weight_init is None else weight_init
        self.weight = Parameter(
            initializer(init, [in_channels, out_channels // group, *self.kernel_size], dtype), "weight"
        )
        if has_bias:
            fan_in = out_channels // group * math.prod(self.kernel_size)
            self.bias = _bias(bias_init, out_channels, fan_in, dtype)
            self.bias_add = BiasAdd()
        self.conv2d_transpose = Conv2DTranspose(
            in_channels, kernel_size, pad_mode, padding, stride=stride, dilation=dilation, group=group
        )

    def construct(self, x: Any) -> Any:
        operator = self.conv2d_transpose
        sizes = []
        for dim in (0, 1):
            size, stride = x.shape[2 + dim], self.stride[dim]
            reach = (self.kernel_size[dim] - 1) * self.dilation[dim] + 1
            if operator.pad_mode == "same":
                sizes.append(size * stride)
            elif operator.pad_mode == "valid":
                sizes.append(size * stride + max(reach - stride, 0))
            else:
                padding = operator.pad[2 * dim] + operator.pad[2 * dim + 1]
                sizes.append((size - 1) * stride - padding + reach + self.output_padding[dim])
        x = operator(x, self.weight, (x.shape[0], self.out_channels, *sizes))
        return self.bias_add(x, self.bias) if self.has_bias else x


class _BatchNorm(Cell):
    """Normalised per channel (dim 1): in training by the batch's statistics, which are mixed into the moving ones with
    weight ``1 - momentum``; otherwise by these. ``use_batch_statistics``: always, or never, by the batch's."""

    dims: tuple[int, ...] = (4,)
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
        _positive(type(self).__name__, num_features=num_features)
        if not 0 <= momentum <= 1:
            raise ValueError(problem(f"momentum is {momentum}", fix="a number from 0 to 1"))
        if data_format != "NCHW":
            raise NotImplementedError(f"{type(self).__name__}(data_format={data_format!r}): channels are dim 1 here")
        self.num_features, self.eps, self.momentum = num_features, eps, momentum
        self.use_batch_statistics = use_batch_statistics
        self.gamma = Parameter(initializer(gamma_init, [num_features], dtype), "gamma", requires_grad=affine)
        self.beta = Parameter(initializer(beta_init, [num_features], dtype), "beta", requires_grad=affine)
        self.moving_mean: torch.Tensor
        self.moving_variance: torch.Tensor
        self.register_buffer("moving_mean", initializer(moving_mean_init, [num_features], dtype))
        self.register_buffer("moving_variance", initializer(moving_var_init, [num_features], dtype))

    def construct(self, x: Any) -> Any:
        if x.dim() not in self.dims:
            raise ValueError(
                problem(f"{type(self).__name__} got an input of shape {list(x.shape)}", fix=f"one of {self.dims} dims")
            )
        batch = self.training if self.use_batch_statistics is None else self.use_batch_statistics
        mean, variance, weight = self.moving_mean, self.moving_variance, 1 - self.momentum
        wide = x if self._float is None else x.to(mean.dtype)
        return F.batch_norm(wide, mean, variance, self.gamma, self.beta, batch, weight, self.eps).to(x.dtype)


class BatchNorm1d(_BatchNorm):
    __doc__ = _BatchNorm.__doc__
    dims = (2, 3)


class BatchNorm2d(_BatchNorm):
    __doc__ = _BatchNorm.__doc__


class LayerNorm(Cell):
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
            raise TypeError(
                problem(f"LayerNorm: normalized_shape is {normalized_shape!r}", fix=f"a tuple: ({normalized_shape},)")
            )
        shape = list(normalized_shape)
        self.gamma = Parameter(initializer(gamma_init, shape, dtype), "gamma")
        self.beta = Parameter(initializer(beta_init, shape, dtype), "beta")
        self.layer_norm = LayerNormOperator(begin_norm_axis, begin_params_axis, epsilon)

    def construct(self, x: Any) -> Any:
        y, _, _ = self.layer_norm(x, self.gamma, self.beta)
        return y


class GroupNorm(Cell):
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
        _positive("GroupNorm", num_groups=num_groups, num_channels=num_channels)
        if num_channels % num_groups:
            raise ValueError(
                problem(f"GroupNorm: {num_groups} groups of {num_channels} channels: not whole", fix="a divisor")
            )
        self.num_groups, self.eps = num_groups, eps
        self.gamma = Parameter(initializer(gamma_init, [num_channels], dtype), "gamma", requires_grad=affine)
        self.beta = Parameter(initializer(beta_init, [num_channels], dtype), "beta", requires_grad=affine)

    def construct(self, x: Any) -> Any:
        return F.group_norm(x, self.num_groups, self.gamma, self.beta, self.eps)


class Dropout(Cell):
    """In training each element is 0 with probability ``p`` (``keep_prob``: 1 - p), and the others are divided by
    1 - p."""

    def __init__(
        self, keep_prob: float | None = None, p: float | None = None, dtype: torch.dtype = torch.float32
    ) -> None:
        super().__init__()
        if keep_prob is not None and p is not None:
            raise ValueError(problem(f"Dropout(keep_prob={keep_prob}, p={p})", fix="one of the two; p = 1 - keep_prob"))
        self.p = p if p is not None else 0.5 if keep_prob is None else 1 - keep_prob
        if not 0 <= self.p < 1:
            raise ValueError(problem(f"Dropout would drop with probability {self.p}", fix="p from 0, below 1"))

    def construct(self, x: Any) -> Any:
        return F.dropout(x, self.p, self.training)


class MaxPool2d(Cell):
    """The largest element of each window."""

    def __init__(self, kernel_size: Sizes = 1, stride: Sizes = 1, pad_mode: str = "valid") -> None:
        super().__init__()

        self.max_pool = MaxPool(kernel_size, stride, pad_mode)

    def construct(self, x: Any) -> Any:
        return self.max_pool(x)


class AvgPool2d(Cell):
    """The mean of each window."""

    def __init__(self, kernel_size: Sizes = 1, stride: Sizes = 1, pad_mode: str = "valid") -> None:
        super().__init__()

        self.avg_pool = AvgPool(kernel_size, stride, pad_mode)

    def construct(self, x: Any) -> Any:
        return self.avg_pool(x)


class Flatten(Cell):
    """The dims from ``start_dim`` to ``end_dim`` in one."""

    def __init__(self, start_dim: int = 1, end_dim: int = -1) -> None:
        super().__init__()
        self.start_dim, self.end_dim = start_dim, end_dim

    def construct(self, x: Any) -> Any:
        return x.flatten(self.start_dim, self.end_dim)


class Identity(Cell):
    """x"""

    def construct(self, x: Any) -> Any:
        return x


__all__ = [
    "AvgPool2d", "BatchNorm1d", "BatchNorm2d", "Conv2d", "Conv2dTranspose", "Dense", "Dropout", "Embedding", "Flatten",
    "GroupNorm", "Identity", "LayerNorm", "MaxPool2d",
]  # fmt: skip
