"""Layers with parameters, under the reference's names. Each holds its operators as primitives, which take strategies:
``dense.matmul.shard(((2, 1), (4, 1)))``."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.nn import functional as F

from shardwise.errors import problem
from shardwise.mindspore import calls, context
from shardwise.mindspore.checks import channels_first, from_on
from shardwise.mindspore.common.initializer import CLASSES as INITIALIZERS
from shardwise.mindspore.common.initializer import initializer
from shardwise.mindspore.communication.management import find_group
from shardwise.mindspore.named import SETTINGS, WithSettings
from shardwise.mindspore.nn.cell import Cell
from shardwise.mindspore.nn.simple import get_activation
from shardwise.mindspore.ops import images
from shardwise.mindspore.ops.arithmetic import BiasAdd, MatMul
from shardwise.mindspore.ops.communication import AllReduce
from shardwise.mindspore.ops.dims import CLASSES as REDUCTIONS
from shardwise.mindspore.ops.dims import SHAPES
from shardwise.mindspore.ops.indexing import Gather
from shardwise.mindspore.ops.primitive import Inner
from shardwise.mindspore.tensor import Parameter


def positive(layer: str, **sizes: Any) -> None:
    for name, size in sizes.items():
        from_on(f"{layer}: {name}", size, 1)


class Layer(WithSettings, Cell):
    """A cell whose constructor arguments are those of its class statement."""

    def _set_weights(self, shape: list[int], weight_init: Any, bias_init: Any, dtype: torch.dtype) -> None:
        """Set ``weight``, and ``bias``, which is None without ``has_bias``. Initial values depend on the fan-in."""
        default = INITIALIZERS["HeUniform"](math.sqrt(5))  # its bound is sqrt(1 / fan_in)
        weight = initializer(default if weight_init is None else weight_init, shape, dtype)
        self.weight, bias = Parameter(weight, "weight"), None
        if self.has_bias:
            default = INITIALIZERS["Uniform"](1 / math.sqrt(math.prod(shape[1:])))
            values = initializer(default if bias_init is None else bias_init, [self.out_channels], dtype)
            bias = Parameter(values, "bias")
        self.register_parameter("bias", bias)
        self.bias_add = BiasAdd()

    def _set_scales(self, shape: list[int], gamma: Any, beta: Any, dtype: torch.dtype, learned: bool = True) -> None:
        self.gamma = Parameter(initializer(gamma, shape, dtype), "gamma", requires_grad=learned)
        self.beta = Parameter(initializer(beta, shape, dtype), "beta", requires_grad=learned)


class Dense(Layer, **SETTINGS["nn.Dense"]):
    """activation(x W^T + b), with a weight of (out, in)."""

    def _settle(self, weight_init: Any, bias_init: Any, activation: Any, dtype: torch.dtype) -> None:
        positive("Dense", in_channels=self.in_channels, out_channels=self.out_channels)
        self._set_weights([self.out_channels, self.in_channels], weight_init, bias_init, dtype)
        self.matmul, self.reshape = MatMul(transpose_b=True), SHAPES["Reshape"]()
        self.activation = get_activation(activation) if isinstance(activation, str) else activation

    def construct(self, x: Any) -> Any:
        shape = tuple(x.shape)
        x = self.matmul(x if len(shape) == 2 else self.reshape(x, (-1, shape[-1])), self.weight)
        if self.has_bias:
            x = self.bias_add(x, self.bias)
        if self.activation is not None:
            x = self.activation(x)
        return x if len(shape) == 2 else self.reshape(x, (*shape[:-1], self.out_channels))


class _Table(Layer):
    """Common base of embeddings."""

    def _set_table(self, init: Any, dtype: torch.dtype, padding_idx: int | None = None) -> None:
        positive("Embedding", vocab_size=self.vocab_size, embedding_size=self.embedding_size)
        table = initializer(init, [self.vocab_size, self.embedding_size], dtype)
        if padding_idx is not None:
            table[padding_idx] = 0
        self.embedding_table = Parameter(table, "embedding_table")
        self.expand, self.reshape_flat, self.reshape = (SHAPES[n]() for n in ("ExpandDims", "Reshape", "Reshape"))
        self.gather, self.array_mul = Gather(), MatMul()


class Embedding(_Table, **SETTINGS["nn.Embedding"]):
    """Lookup of rows of ``embedding_table`` by flattened indices: ``gather.shard(((1, 1), (8,)))``. ``padding_idx``:
    this row starts as zeros."""

    def _settle(self, embedding_table: Any, dtype: torch.dtype, padding_idx: int | None) -> None:
        self._set_table(embedding_table, dtype, padding_idx)

    def construct(self, ids: Any) -> Any:
        flat = self.reshape_flat(self.expand(ids, -1), (-1,))
        if self.use_one_hot:
            rows = self.array_mul(
                F.one_hot(flat.long(), self.vocab_size).to(self.embedding_table.dtype), self.embedding_table
            )
        else:
            rows = self.gather(self.embedding_table, flat, 0)
        return self.reshape(rows, (*ids.shape, self.embedding_size))


class EmbeddingLookup(_Table, **SETTINGS["nn.EmbeddingLookup"]):
    """Lookup of rows of ``embedding_table``. ``slice_mode``: the dim of the table that is split over the devices:
    ``TABLE_ROW_SLICE``, ``TABLE_COLUMN_SLICE``, or none (``BATCH_SLICE``); the plan decides other splits. ``max_norm``:
    rows are clipped to this norm. ``target``: "CPU" keeps the table on the host."""

    BATCH_SLICE, FIELD_SLICE = "batch_slice", "field_slice"
    TABLE_ROW_SLICE, TABLE_COLUMN_SLICE = "table_row_slice", "table_column_slice"

    def _settle(self, param_init: Any, target: str, slice_mode: str, manual_shapes: Any, dtype: torch.dtype) -> None:
        self._set_table(param_init, dtype)
        if slice_mode == self.FIELD_SLICE or manual_shapes is not None:
            fix = "ops.Gather().add_prim_attr('manual_split', (...))"
            raise NotImplementedError(problem("EmbeddingLookup(manual_shapes=...)", fix=fix))
        self.embeddinglookup = self.gatherv2 = self.gather  # names in versions of the reference
        if target == "CPU":
            self.gather.add_prim_attr("primitive_target", "CPU")
        devices = context.options().stage_devices
        cut = {self.TABLE_ROW_SLICE: ((devices, 1), (1, 1)), self.TABLE_COLUMN_SLICE: ((1, devices), (1, 1))}
        if calls.is_split() and slice_mode in cut:
            self.gather.shard(cut[slice_mode])

    def construct(self, ids: Any) -> Any:
        rows = self.gather(self.embedding_table, ids, 0)
        if self.max_norm is None:
            return rows
        length = rows.norm(dim=-1, keepdim=True)
        return rows * torch.clamp(self.max_norm / length.clamp(min=1e-12), max=1.0)


class _Convolution(Layer):
    """Common base of convolutions. ``convolved`` computes one without its bias, which is added by an operator."""

    is_transposed = False
    kernel_size: Any
    stride: Any
    dilation: Any

    def _settle(self, weight_init: Any, bias_init: Any, dtype: torch.dtype) -> None:
        first, second, group = self.out_channels, self.in_channels, self.group
        positive(type(self).__name__, in_channels=second, out_channels=first, group=group)
        if first % group or second % group:
            what = f"{type(self).__name__}: group {group} does not divide {second} and {first} channels"
            raise ValueError(problem(what, fix="a divisor"))
        for name in ("kernel_size", "stride", "dilation"):
            setattr(self, name, self._sizes(name, getattr(self, name)))
        first, second = (second, first) if self.is_transposed else (first, second)
        self._set_weights([first, second // group, *self.kernel_size], weight_init, bias_init, dtype)

    def _sizes(self, name: str, value: Any) -> tuple[int, ...]:
        return images.pair(name, value)

    def convolved(self, x: Any) -> Any:
        raise NotImplementedError

    def construct(self, x: Any) -> Any:
        y = self.convolved(x)
        return self.bias_add(y, self.bias) if self.has_bias else y


class Conv2d(_Convolution, **SETTINGS["nn.Conv2d"]):
    """Convolution of images (N, C, H, W), with a weight of (out, in / group, height, width)."""

    def _settle(self, weight_init: Any, bias_init: Any, dtype: torch.dtype, data_format: str = "NCHW") -> None:
        super()._settle(weight_init, bias_init, dtype)
        self.conv2d = images.Conv2D(
            self.out_channels, self.kernel_size, pad_mode=self.pad_mode, pad=self.padding, stride=self.stride,
            dilation=self.dilation, group=self.group, data_format=data_format,
        )  # fmt: skip

    def convolved(self, x: Any) -> Any:
        return self.conv2d(x, self.weight)


class _OfRows(Layer):
    """Mixin, first among the bases of a class: rows (N, C, W) are computed as images of height 1."""

    def _take(self, values: dict[str, Any]) -> None:
        pad = values["padding"]
        rows = {name: (1, values[name]) for name in ("kernel_size", "stride", "dilation")}
        super()._take({**values, **rows, "padding": (0, 0, pad, pad)})

    def construct(self, x: Any) -> Any:
        return super().construct(x.unsqueeze(2)).squeeze(2)


class Conv1d(_OfRows, Conv2d, **SETTINGS["nn.Conv1d"]):
    """Convolution of rows (N, C, W), with a weight of (out, in / group, 1, width)."""


class Conv3d(_Convolution, **SETTINGS["nn.Conv3d"]):
    """Convolution of volumes (N, C, D, H, W), with a weight of (out, in / group, depth, height, width)."""

    def _sizes(self, name: str, value: Any) -> tuple[int, ...]:
        return (value,) * 3 if isinstance(value, int) else tuple(value)

    @property
    def sides(self) -> tuple[int, ...]:
        """Return ``padding`` of the six sides."""
        return (self.padding,) * 6 if isinstance(self.padding, int) else tuple(self.padding)

    def convolved(self, x: Any) -> Any:
        sides = self.sides if self.pad_mode == "pad" else (0,) * 6
        if self.pad_mode == "same":
            reach = [(k - 1) * d + 1 for k, d in zip(self.kernel_size, self.dilation, strict=True)]
            sides = tuple(n for i in range(3) for n in images.same_padding(x.shape[2 + i], reach[i], self.stride[i]))
        if any(sides):
            x = F.pad(x, (*sides[4:], *sides[2:4], *sides[:2]))
        return F.conv3d(x, self.weight, None, self.stride, 0, self.dilation, self.group)


class Conv3dTranspose(Conv3d, **SETTINGS["nn.Conv3dTranspose"]):
    """The transposed convolution of volumes, with a weight of (in, out / group, depth, height, width)."""

    is_transposed = True

    def convolved(self, x: Any) -> Any:
        sizes = self.stride, self.pad_mode, self.sides, self.output_padding, self.dilation, self.group
        return images.transposed(x, self.weight, *sizes)


class Conv2dTranspose(_Convolution, **SETTINGS["nn.Conv2dTranspose"]):
    """The transposed convolution, with a weight of (in, out / group, height, width). Mode "same" enlarges images by the
    stride. ``output_padding``: rows and columns of zeros behind the result, as in the reference."""

    is_transposed = True

    def _settle(self, weight_init: Any, bias_init: Any, dtype: torch.dtype, output_padding: images.Sizes = 0) -> None:
        self.output_padding = images.pair("output_padding", output_padding, 0)
        super()._settle(weight_init, bias_init, dtype)
        self.conv2d_transpose = images.Conv2DTranspose(
            self.in_channels, self.kernel_size, self.pad_mode, self.padding, stride=self.stride,
            dilation=self.dilation, group=self.group,
        )  # fmt: skip

    def convolved(self, x: Any) -> Any:
        operator, sizes = self.conv2d_transpose, []
        for dim in (0, 1):
            reach, sides = (self.kernel_size[dim] - 1) * self.dilation[dim] + 1, operator.pad[2 * dim : 2 * dim + 2]
            sizes.append(images.grown(x.shape[2 + dim], reach, self.stride[dim], operator.pad_mode, sides, 0)[1])
        return operator(x, self.weight, (x.shape[0], self.out_channels, *sizes))

    def construct(self, x: Any) -> Any:
        y, (height, width) = super().construct(x), self.output_padding
        return F.pad(y, (0, width, 0, height)) if height or width else y


class Conv1dTranspose(_OfRows, Conv2dTranspose, **SETTINGS["nn.Conv1d"]):
    """The transposed convolution of rows (N, C, W), with a weight of (in, out / group, 1, width)."""


class Dropout(Layer, keep_prob=None, p=None, dtype=torch.float32):
    """Dropout: in training each element is 0 with probability ``p`` (``keep_prob``: 1 - p), and the others are divided
    by 1 - p."""

    def _settle(self, keep_prob: float | None, p: float | None) -> None:
        if keep_prob is not None and p is not None:
            raise ValueError(problem(f"Dropout(keep_prob={keep_prob}, p={p})", fix="one of the two; p = 1 - keep_prob"))
        self.p = p if p is not None else 0.5 if keep_prob is None else 1 - keep_prob
        self.keep_prob = 1 - self.p
        if not 0 <= self.p < 1:
            raise ValueError(problem(f"Dropout would drop with probability {self.p}", fix="p from 0, below 1"))
        self.dropout = Inner()

    def construct(self, x: Any) -> Any:
        return self.dropout(lambda x: F.dropout(x, self.p, self.training), x)


class _Pool2d(Cell):
    """Pooling over windows of images. ``padding``: on both sides, with ``pad_mode="pad"``. Other settings
    (``dilation``, ``ceil_mode``, ``count_include_pad``, ``divisor_override``, ``return_indices``) are torch's."""

    operator: type[images.MaxPool] | type[images.AvgPool]
    attribute: str  # name of the attribute of the operator
    function: Any

    def __init__(
        self, kernel_size: images.Sizes = 1, stride: images.Sizes = 1, pad_mode: str = "valid",
        padding: images.Sizes = 0, data_format: str = "NCHW", **settings: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        channels_first(type(self).__name__, data_format)
        self.is_plain = pad_mode.lower() != "pad" and not padding and not settings
        setattr(self, self.attribute, self.operator(kernel_size, stride, pad_mode) if self.is_plain else Inner())
        self.kernel_size, self.stride, self.pad_mode = kernel_size, stride, pad_mode
        self.padding, self.settings = padding, settings

    def construct(self, x: Any) -> Any:
        operator = getattr(self, self.attribute)
        if self.is_plain:
            return operator(x)
        sizes = self.kernel_size, self.stride, self.pad_mode, self.padding
        return operator(lambda x: images.pool(type(self).function, x, *sizes, **self.settings), x)


class MaxPool2d(_Pool2d):
    """The largest element of each window."""

    operator, attribute, function = images.MaxPool, "max_pool", staticmethod(F.max_pool2d)


class AvgPool2d(_Pool2d):
    """The mean of each window."""

    operator, attribute, function = images.AvgPool, "avg_pool", staticmethod(F.avg_pool2d)


# -- normalisations ----------------------------------------------------------------------------------------------------


class _Scaled(Layer):
    """Base of normalisations that multiply by gamma and add beta, by default one of each per channel."""

    channels = "num_features"  # the setting of their number

    def _settle(self, affine: bool, gamma_init: Any, beta_init: Any, dtype: torch.dtype) -> None:
        size = getattr(self, self.channels)
        positive(type(self).__name__, **{self.channels: size})
        self._set_scales([size], gamma_init, beta_init, dtype, affine)


class _BatchNorm(_Scaled, **SETTINGS["nn.BatchNorm"]):
    """Batch normalisation per channel (dim 1). Training uses the batch's statistics and mixes them into the moving ones
    with weight ``1 - momentum``; evaluation uses the moving ones. ``use_batch_statistics`` overrides this choice."""

    dims: tuple[int, ...]
    statistics = ("moving_mean", "moving_variance")  # parameters to the reference
    casts_parameters = False  # moving statistics and their sums keep their precision

    def _settle(
        self, affine: bool, gamma_init: Any, beta_init: Any, dtype: torch.dtype, moving_mean_init: Any = "zeros",
        moving_var_init: Any = "ones", data_format: str = "NCHW",
    ) -> None:  # fmt: skip
        super()._settle(affine, gamma_init, beta_init, dtype)
        if not 0 <= self.momentum <= 1:
            raise ValueError(problem(f"momentum is {self.momentum}", fix="a number from 0 to 1"))
        channels_first(type(self).__name__, data_format)
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

    def construct(self, x: Any) -> Any:
        return F.instance_norm(x, weight=self.gamma, bias=self.beta, eps=self.eps)


InstanceNorm1d, InstanceNorm2d, InstanceNorm3d = (
    type(f"InstanceNorm{dims}d", (_InstanceNorm,), {"__module__": __name__, "__doc__": _InstanceNorm.__doc__})
    for dims in (1, 2, 3)
)


class LayerNorm(Layer, **SETTINGS["nn.LayerNorm"]):
    """Normalisation over the last dims, times gamma plus beta."""

    def _settle(self, gamma_init: Any, beta_init: Any, dtype: torch.dtype) -> None:
        shape = self.normalized_shape
        if not isinstance(shape, (tuple, list)):
            raise TypeError(problem(f"LayerNorm: normalized_shape is {shape!r}", fix=f"a tuple: ({shape},)"))
        self._set_scales(list(shape), gamma_init, beta_init, dtype)
        self.layer_norm = REDUCTIONS["LayerNorm"](self.begin_norm_axis, self.begin_params_axis, self.epsilon)

    def construct(self, x: Any) -> Any:
        y, _, _ = self.layer_norm(x, self.gamma, self.beta)
        return y


class GroupNorm(_Scaled, **SETTINGS["nn.GroupNorm"]):
    """Normalisation over groups of channels."""

    channels = "num_channels"

    def _settle(self, affine: bool, gamma_init: Any, beta_init: Any, dtype: torch.dtype) -> None:
        super()._settle(affine, gamma_init, beta_init, dtype)
        positive("GroupNorm", num_groups=self.num_groups)
        if self.num_channels % self.num_groups:
            what = f"GroupNorm: {self.num_groups} groups of {self.num_channels} channels: not whole"
            raise ValueError(problem(what, fix="a divisor"))

    def construct(self, x: Any) -> Any:
        return F.group_norm(x, self.num_groups, self.gamma, self.beta, self.eps)


__all__ = [
    "AvgPool2d", "BatchNorm1d", "BatchNorm2d", "BatchNorm3d", "Conv1d", "Conv1dTranspose", "Conv2d", "Conv2dTranspose",
    "Conv3d", "Conv3dTranspose", "Dense", "Dropout", "Embedding", "EmbeddingLookup", "GroupNorm", "InstanceNorm1d",
    "InstanceNorm2d", "InstanceNorm3d", "LayerNorm", "MaxPool2d", "SyncBatchNorm",
]  # fmt: skip
