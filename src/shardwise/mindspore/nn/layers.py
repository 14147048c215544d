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
from shardwise.mindspore.named import SETTINGS, WithSettings
from shardwise.mindspore.nn.activations import get_activation
from shardwise.mindspore.nn.cell import Cell
from shardwise.mindspore.ops import images
from shardwise.mindspore.ops.indexing import Gather
from shardwise.mindspore.ops.linear import BiasAdd, MatMul
from shardwise.mindspore.ops.primitive import Inner
from shardwise.mindspore.ops.shape import CLASSES as SHAPES
from shardwise.mindspore.tensor import Parameter

HE = math.sqrt(5)  # with it, He's bound is sqrt(1 / fan_in)


def positive(layer: str, **sizes: Any) -> None:
    for name, size in sizes.items():
        from_on(f"{layer}: {name}", size, 1)


def _weight(init: Any, shape: list[int], dtype: torch.dtype) -> Parameter:
    return Parameter(initializer(INITIALIZERS["HeUniform"](HE) if init is None else init, shape, dtype), "weight")


def _bias(init: Any, size: int, fan_in: int, dtype: torch.dtype) -> Parameter:
    init = INITIALIZERS["Uniform"](1 / math.sqrt(fan_in)) if init is None else init
    return Parameter(initializer(init, [size], dtype), "bias")


class Layer(WithSettings, Cell):
    """A cell whose constructor arguments are those of its class statement."""


class Dense(Layer, **SETTINGS["nn.Dense"]):
    """activation(x W^T + b), with a weight of (out, in)."""

    def _settle(self, weight_init: Any, bias_init: Any, activation: Any, dtype: torch.dtype) -> None:
        positive("Dense", in_channels=self.in_channels, out_channels=self.out_channels)
        self.weight = _weight(weight_init, [self.out_channels, self.in_channels], dtype)
        bias = _bias(bias_init, self.out_channels, self.in_channels, dtype) if self.has_bias else None
        self.register_parameter("bias", bias)
        self.bias_add = BiasAdd()
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
    """Common base of convolutions."""

    title, is_transposed = "", False
    kernel_size: Any
    stride: Any
    dilation: Any

    def _settle(self, weight_init: Any, bias_init: Any, dtype: torch.dtype) -> None:
        first, second, group = self.out_channels, self.in_channels, self.group
        positive(self.title, in_channels=second, out_channels=first, group=group)
        if first % group or second % group:
            what = f"{self.title}: group {group} does not divide {second} and {first} channels"
            raise ValueError(problem(what, fix="a divisor"))
        for name in ("kernel_size", "stride", "dilation"):
            setattr(self, name, self._sizes(name, getattr(self, name)))
        first, second = (second, first) if self.is_transposed else (first, second)
        shape = [first, second // group, *self.kernel_size]
        self.weight = _weight(weight_init, shape, dtype)
        bias = _bias(bias_init, self.out_channels, math.prod(shape[1:]), dtype) if self.has_bias else None
        self.register_parameter("bias", bias)

    def _sizes(self, name: str, value: Any) -> tuple[int, ...]:
        return images.pair(name, value)


class _OfImages(_Convolution):
    """Common base of image convolutions: the bias is added by a separate operator."""

    def _settle(self, weight_init: Any, bias_init: Any, dtype: torch.dtype) -> None:
        super()._settle(weight_init, bias_init, dtype)
        if self.has_bias:
            self.bias_add = BiasAdd()


class Conv2d(_OfImages, **SETTINGS["nn.Conv2d"]):
    """Convolution of images (N, C, H, W), with a weight of (out, in / group, height, width)."""

    title = "Conv2d"

    def _settle(self, weight_init: Any, bias_init: Any, dtype: torch.dtype, data_format: str = "NCHW") -> None:
        super()._settle(weight_init, bias_init, dtype)
        self.conv2d = images.Conv2D(
            self.out_channels, self.kernel_size, pad_mode=self.pad_mode, pad=self.padding, stride=self.stride,
            dilation=self.dilation, group=self.group, data_format=data_format,
        )  # fmt: skip

    def construct(self, x: Any) -> Any:
        x = self.conv2d(x, self.weight)
        return self.bias_add(x, self.bias) if self.has_bias else x


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

    title = "Conv3d"

    def _settle(
        self, weight_init: Any, bias_init: Any, dtype: torch.dtype, padding: Any = 0, data_format: str = "NCDHW"
    ) -> None:
        self.sides = (padding,) * 6 if isinstance(padding, int) else tuple(padding)
        super()._settle(weight_init, bias_init, dtype)

    def _sizes(self, name: str, value: Any) -> tuple[int, ...]:
        return (value,) * 3 if isinstance(value, int) else tuple(value)

    def construct(self, x: Any) -> Any:
        sides = self.sides if self.pad_mode == "pad" else (0,) * 6
        if self.pad_mode == "same":
            reach = [(k - 1) * d + 1 for k, d in zip(self.kernel_size, self.dilation, strict=True)]
            sides = tuple(n for i in range(3) for n in images.same_padding(x.shape[2 + i], reach[i], self.stride[i]))
        if any(sides):
            x = F.pad(x, (*sides[4:], *sides[2:4], *sides[:2]))
        return F.conv3d(x, self.weight, self.bias if self.has_bias else None, self.stride, 0, self.dilation, self.group)


class Conv3dTranspose(Conv3d, **SETTINGS["nn.Conv3dTranspose"]):
    """The transposed convolution of volumes, with a weight of (in, out / group, depth, height, width)."""

    is_transposed = True

    def construct(self, x: Any) -> Any:
        sizes = self.stride, self.pad_mode, self.sides, self.output_padding, self.dilation, self.group
        y = images.transposed(x, self.weight, *sizes)
        return y + self.bias.reshape(-1, 1, 1, 1) if self.has_bias else y


class Conv2dTranspose(_OfImages, **SETTINGS["nn.Conv2dTranspose"]):
    """The transposed convolution, with a weight of (in, out / group, height, width). Mode "same" enlarges images by the
    stride. ``output_padding``: rows and columns of zeros behind the result, as in the reference."""

    title, is_transposed = "Conv2dTranspose", True

    def _settle(self, weight_init: Any, bias_init: Any, dtype: torch.dtype, output_padding: images.Sizes = 0) -> None:
        self.output_padding = images.pair("output_padding", output_padding, 0)
        super()._settle(weight_init, bias_init, dtype)
        self.conv2d_transpose = images.Conv2DTranspose(
            self.in_channels, self.kernel_size, self.pad_mode, self.padding, stride=self.stride,
            dilation=self.dilation, group=self.group,
        )  # fmt: skip

    def construct(self, x: Any) -> Any:
        operator = self.conv2d_transpose
        sizes = []
        for dim in (0, 1):
            reach, sides = (self.kernel_size[dim] - 1) * self.dilation[dim] + 1, operator.pad[2 * dim : 2 * dim + 2]
            sizes.append(images.grown(x.shape[2 + dim], reach, self.stride[dim], operator.pad_mode, sides, 0)[1])
        x = operator(x, self.weight, (x.shape[0], self.out_channels, *sizes))
        x = self.bias_add(x, self.bias) if self.has_bias else x
        height, width = self.output_padding
        return F.pad(x, (0, width, 0, height)) if height or width else x


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


__all__ = [
    "AvgPool2d", "Conv1d", "Conv1dTranspose", "Conv2d", "Conv2dTranspose", "Conv3d", "Conv3dTranspose", "Dense",
    "Dropout", "Embedding", "EmbeddingLookup", "MaxPool2d",
]  # fmt: skip
