"""Layers with parameters, under the reference's names; each holds its operators as primitives, which take strategies:
``dense.matmul.shard(((2, 1), (4, 1)))``."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.nn import functional as F

from shardwise.errors import problem
from shardwise.mindspore import calls, context
from shardwise.mindspore.common.initializer import HeUniform, Uniform, initializer
from shardwise.mindspore.nn.activations import get_activation
from shardwise.mindspore.nn.cell import Cell
from shardwise.mindspore.ops.images import AvgPool, Conv2D, Conv2DTranspose, MaxPool, Sizes, pair
from shardwise.mindspore.ops.indexing import Gather
from shardwise.mindspore.ops.linear import BiasAdd, MatMul
from shardwise.mindspore.ops.primitive import Inner
from shardwise.mindspore.ops.resizing import pool, same_padding, transposed
from shardwise.mindspore.ops.shape import ExpandDims, Reshape
from shardwise.mindspore.tensor import Parameter

HE = math.sqrt(5)  # with it, He's bound is sqrt(1 / fan_in)


def positive(layer: str, **sizes: Any) -> None:
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
        positive("Dense", in_channels=in_channels, out_channels=out_channels)
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
    """Rows of ``embedding_table``, which are gathered by all indices in one dim: ``gather.shard(((1, 1), (8,)))``.
    ``padding_idx``: that row starts as zeros."""

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
        positive("Embedding", vocab_size=vocab_size, embedding_size=embedding_size)
        self.vocab_size, self.embedding_size, self.use_one_hot = vocab_size, embedding_size, use_one_hot
        table = initializer(embedding_table, [vocab_size, embedding_size], dtype)
        if padding_idx is not None:
            table[padding_idx] = 0
        self.embedding_table = Parameter(table, "embedding_table")
        self.expand, self.reshape_flat, self.reshape = ExpandDims(), Reshape(), Reshape()
        self.gather, self.array_mul = Gather(), MatMul()

    def construct(self, ids: Any) -> Any:
        flat = self.reshape_flat(self.expand(ids, -1), (-1,))
        if self.use_one_hot:
            rows = self.array_mul(
                F.one_hot(flat.long(), self.vocab_size).to(self.embedding_table.dtype), self.embedding_table
            )
        else:
            rows = self.gather(self.embedding_table, flat, 0)
        return self.reshape(rows, (*ids.shape, self.embedding_size))


class EmbeddingLookup(Embedding):
    """Rows of ``embedding_table``. ``slice_mode``: along which dim of the table the devices' parts are cut where cells
    are split: ``TABLE_ROW_SLICE``, ``TABLE_COLUMN_SLICE``, or neither (``BATCH_SLICE``); others are the plan's.
    ``max_norm``: rows are cut to this length. ``target``: "CPU" keeps the table on the host."""

    BATCH_SLICE, FIELD_SLICE = "batch_slice", "field_slice"
    TABLE_ROW_SLICE, TABLE_COLUMN_SLICE = "table_row_slice", "table_column_slice"

    def __init__(
        self,
        vocab_size: int,
        embedding_size: int,
        param_init: Any = "normal",
        target: str = "CPU",
        slice_mode: str = "batch_slice",
        manual_shapes: Any = None,
        max_norm: float | None = None,
        sparse: bool = True,
        vocab_cache_size: int = 0,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__(vocab_size, embedding_size, embedding_table=param_init, dtype=dtype)
        if slice_mode == self.FIELD_SLICE or manual_shapes is not None:
            fix = "ops.Gather().add_prim_attr('manual_split', (...))"
            raise NotImplementedError(problem("EmbeddingLookup(manual_shapes=...)", fix=fix))
        self.max_norm = max_norm
        self.embeddinglookup = self.gatherv2 = self.gather  # as versions of the reference call it
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
        positive("Conv2d", in_channels=in_channels, out_channels=out_channels, group=group)
        if in_channels % group or out_channels % group:
            raise ValueError(
                problem(
                    f"Conv2d: group {group} does not divide {in_channels} and {out_channels} channels", fix="a divisor"
                )
            )
        kernel = pair("kernel_size", kernel_size)
        self.in_channels, self.out_channels, self.group, self.has_bias = in_channels, out_channels, group, has_bias
        self.kernel_size, self.stride, self.dilation = kernel, pair("stride", stride), pair("dilation", dilation)
        self.pad_mode, self.padding, fan_in = pad_mode, padding, in_channels // group * math.prod(kernel)
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


class _OfRows(Cell):
    """Before a convolution of images among the bases of a class: rows (N, C, W) are images of height 1."""

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int,
        stride: int = 1,
        pad_mode: str = "same",
        padding: int = 0,
        dilation: int = 1,
        group: int = 1,
        has_bias: bool = False,
        weight_init: Any = None,
        bias_init: Any = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        of_images: dict[str, Any] = {
            "in_channels": in_channels, "out_channels": out_channels, "kernel_size": (1, kernel_size),
            "stride": (1, stride), "pad_mode": pad_mode, "padding": (0, 0, padding, padding),
            "dilation": (1, dilation), "group": group, "has_bias": has_bias, "weight_init": weight_init,
            "bias_init": bias_init, "dtype": dtype,
        }  # fmt: skip
        super().__init__(**of_images)

    def construct(self, x: Any) -> Any:
        return super().construct(x.unsqueeze(2)).squeeze(2)


class Conv1d(_OfRows, Conv2d):
    """Convolution of rows (N, C, W), with a weight of (out, in / group, 1, width)."""


class Conv3d(Cell):
    """Convolution of volumes (N, C, D, H, W), with a weight of (out, in / group, depth, height, width)."""

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
        data_format: str = "NCDHW",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        positive("Conv3d", in_channels=in_channels, out_channels=out_channels, group=group)
        three = [(size,) * 3 if isinstance(size, int) else tuple(size) for size in (kernel_size, stride, dilation)]
        self.kernel_size, self.stride, self.dilation = three
        self.in_channels, self.out_channels = in_channels, out_channels
        self.sides = (padding,) * 6 if isinstance(padding, int) else tuple(padding)
        self.pad_mode, self.group, self.has_bias = pad_mode, group, has_bias
        shape = [*self.channels, *self.kernel_size]
        self.weight = Parameter(initializer(HeUniform(HE) if weight_init is None else weight_init, shape, dtype),
                                "weight")  # fmt: skip
        if has_bias:
            self.bias = _bias(bias_init, out_channels, math.prod(shape[1:]), dtype)

    @property
    def channels(self) -> tuple[int, int]:
        """The first two sizes of the weight."""
        return self.out_channels, self.in_channels // self.group

    def construct(self, x: Any) -> Any:
        sides = self.sides if self.pad_mode == "pad" else (0,) * 6
        if self.pad_mode == "same":
            reach = [(k - 1) * d + 1 for k, d in zip(self.kernel_size, self.dilation, strict=True)]
            sides = tuple(n for i in range(3) for n in same_padding(x.shape[2 + i], reach[i], self.stride[i]))
        if any(sides):
            x = F.pad(x, (*sides[4:], *sides[2:4], *sides[:2]))
        return F.conv3d(x, self.weight, self.bias if self.has_bias else None, self.stride, 0, self.dilation, self.group)


class Conv3dTranspose(Conv3d):
    """The transposed convolution of volumes, with a weight of (in, out / group, depth, height, width)."""

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
        output_padding: Sizes = 0,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            in_channels, out_channels, kernel_size, stride, pad_mode, padding, dilation, group, *args, **kwargs
        )
        self.output_padding = output_padding

    @property
    def channels(self) -> tuple[int, int]:
        return self.in_channels, self.out_channels // self.group

    def construct(self, x: Any) -> Any:
        y = transposed(x, self.weight, self.stride, self.pad_mode, self.sides, self.output_padding, self.dilation,
                       self.group)  # fmt: skip
        return y + self.bias.reshape(-1, 1, 1, 1) if self.has_bias else y


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
        positive("Conv2dTranspose", in_channels=in_channels, out_channels=out_channels, group=group)
        self.in_channels, self.out_channels, self.has_bias = in_channels, out_channels, has_bias
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


class Conv1dTranspose(_OfRows, Conv2dTranspose):
    """The transposed convolution of rows (N, C, W), with a weight of (in, out / group, 1, width)."""


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
        self.keep_prob = 1 - self.p
        if not 0 <= self.p < 1:
            raise ValueError(problem(f"Dropout would drop with probability {self.p}", fix="p from 0, below 1"))
        self.dropout = Inner()

    def construct(self, x: Any) -> Any:
        return self.dropout(lambda x: F.dropout(x, self.p, self.training), x)


class _Pool2d(Cell):
    """Of each window of images one number. ``padding``: with ``pad_mode="pad"``, on both sides. Other settings
    (``dilation``, ``ceil_mode``, ``count_include_pad``, ``divisor_override``, ``return_indices``) are torch's."""

    operator: type[MaxPool] | type[AvgPool]
    attribute: str  # which holds the operator
    function: Any

    def __init__(
        self,
        kernel_size: Sizes = 1,
        stride: Sizes = 1,
        pad_mode: str = "valid",
        padding: Sizes = 0,
        data_format: str = "NCHW",
        **settings: Any,
    ) -> None:
        super().__init__()
        if data_format != "NCHW":
            raise NotImplementedError(f"{type(self).__name__}(data_format={data_format!r}): channels are dim 1 here")
        self.is_plain = pad_mode.lower() != "pad" and not padding and not settings
        setattr(self, self.attribute, self.operator(kernel_size, stride, pad_mode) if self.is_plain else Inner())
        self.kernel_size, self.stride, self.pad_mode = kernel_size, stride, pad_mode
        self.padding, self.settings = padding, settings

    def construct(self, x: Any) -> Any:
        operator = getattr(self, self.attribute)
        if self.is_plain:
            return operator(x)
        sizes = self.kernel_size, self.stride, self.pad_mode, self.padding
        return operator(lambda x: pool(type(self).function, x, *sizes, **self.settings), x)


class MaxPool2d(_Pool2d):
    """The largest element of each window."""

    operator, attribute, function = MaxPool, "max_pool", staticmethod(F.max_pool2d)


class AvgPool2d(_Pool2d):
    """The mean of each window."""

    operator, attribute, function = AvgPool, "avg_pool", staticmethod(F.avg_pool2d)


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
    "AvgPool2d", "Conv1d", "Conv1dTranspose", "Conv2d", "Conv2dTranspose", "Conv3d", "Conv3dTranspose", "Dense",
    "Dropout", "Embedding", "EmbeddingLookup", "Flatten", "Identity", "MaxPool2d",
]  # fmt: skip
