"""Convolution, pooling, mirror padding and resizing of images (N, C, H, W), with the reference's index conventions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any, ClassVar

import torch
from torch.nn import functional as F

import shardwise as sw
from shardwise.errors import problem
from shardwise.mindspore.checks import channels_first, one_of
from shardwise.mindspore.named import SETTINGS
from shardwise.mindspore.ops.primitive import OfSettings
from shardwise.mindspore.strict import Faults, Shapes, Strategy

Sizes = int | Sequence[int]
MODES = ("valid", "same", "pad")
AVERAGES: dict[Any, int] = {F.avg_pool1d: 1, F.avg_pool2d: 2, F.avg_pool3d: 3}  # number of dims
DIMS = {**AVERAGES, F.max_pool1d: 1, F.max_pool2d: 2, F.max_pool3d: 3}


def same_padding(size: int, kernel: int, stride: int) -> tuple[int, int]:
    """Return the padding (before, behind) that fits ``ceil(size / stride)`` windows. An odd element goes behind."""
    total = max((-(-size // stride) - 1) * stride + kernel - size, 0)
    return total // 2, total - total // 2


def _each(size: Any, dims: int) -> tuple[int, ...]:
    return (size,) * dims if isinstance(size, int) else tuple(size)[-dims:]


def pool(function: Any, x: Any, kernel: Any, stride: Any, mode: str, padding: Any = 0, **settings: Any) -> Any:
    """Pool (N, C, ...) or (C, ...) with torch and a ``pad_mode``: "valid", "pad" by ``padding``, or "same": one window
    per stride, and means over elements inside. Raises ValueError for ``padding`` in other modes than "pad"."""
    mode, dims = one_of(*MODES)("pad_mode", mode.lower()), DIMS[function]
    if mode != "pad" and any(_each(padding, dims)):
        raise ValueError(problem(f"padding is {padding!r} with pad_mode {mode!r}", fix='pad_mode="pad"'))
    kernel, stride, sizes = _each(kernel, dims), _each(stride, dims), tuple(x.shape[-dims:])
    gaps = _each(settings.get("dilation", 1), dims)
    windows = zip(sizes, ((k - 1) * gap + 1 for k, gap in zip(kernel, gaps, strict=True)), stride, strict=True)
    pairs = [same_padding(*window) for window in windows] if mode == "same" else []
    if not any(map(any, pairs)):
        return function(x, kernel, stride, padding, **settings)
    sides = [n for pair in reversed(pairs) for n in pair]
    if function in AVERAGES:
        means = function(F.pad(x, sides), kernel, stride, **settings)
        if settings.get("divisor_override"):
            return means
        inside = torch.ones((*(1,) * (x.dim() - dims), *sizes), dtype=x.dtype, device=x.device)
        return means / function(F.pad(inside, sides), kernel, stride)
    pooled = function(F.pad(x, sides, value=float("-inf")), kernel, stride, **settings)
    return (pooled[0], _unpadded(pooled[1], pairs, sizes)) if settings.get("return_indices") else pooled


def _unpadded(indices: Any, pairs: Sequence[tuple[int, int]], sizes: Sequence[int]) -> Any:
    """Convert flat indices into padded dims to flat indices into the dims themselves."""
    padded = [size + sum(pair) for size, pair in zip(sizes, pairs, strict=True)]
    places = torch.zeros_like(indices)
    for dim, (size, (before, _)) in enumerate(zip(sizes, pairs, strict=True)):
        places = places * size + indices // prod(padded[dim + 1 :]) % padded[dim] - before
    return places


def grown(
    size: int, reach: int, stride: int, mode: str, sides: Sequence[int] = (0, 0), more: int = 0
) -> tuple[int, int]:
    """Return the first element and the number of elements of a dim that a transposed convolution makes of ``size``. In
    mode "same" it grows by the stride. In mode "pad" ``sides`` are cropped before and behind, and ``more`` is added
    behind. ``reach``: elements that a window spans."""
    if mode == "same":
        return same_padding(size * stride, reach, stride)[0], size * stride
    if mode == "pad":
        return sides[0], (size - 1) * stride + reach - sum(sides) + more
    return 0, size * stride + max(reach - stride, 0)


def fitted(x: Any, dim: int, begin: int, length: int) -> Any:
    """Return ``length`` elements of a dim from ``begin``, with zeros behind its end."""
    missing = max(begin + length - x.shape[dim], 0)
    x = F.pad(x, (0, 0) * (x.dim() - 1 - dim) + (0, missing)) if missing else x
    return x.narrow(dim, begin, length)


def transposed(
    x: Any, weight: Any, stride: Any, mode: str, sides: Sequence[int], more: Any, dilation: Any, group: int
) -> Any:
    """Compute a transposed convolution (N, C, ...) with a weight of (in, out / group, ...) without padding, and crop it
    (``grown``), which equals the padded result."""
    dims = weight.dim() - 2
    stride, more, dilation = (_each(value, dims) for value in (stride, more, dilation))
    function = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}[dims]
    whole = function(x, weight, None, stride, 0, 0, group, dilation)
    for dim in range(dims):
        reach, around = (weight.shape[2 + dim] - 1) * dilation[dim] + 1, sides[2 * dim : 2 * dim + 2]
        whole = fitted(whole, 2 + dim, *grown(x.shape[2 + dim], reach, stride[dim], mode, around, more[dim]))
    return whole


def mirrored(x: Any, paddings: Any, mode: str) -> Any:
    """Pad ``x`` by pairs per dim with 0 ("CONSTANT"), or with its mirror image without the edge element ("REFLECT") or
    with it ("SYMMETRIC")."""
    # Python numbers: the values of a new tensor are unknown during capture
    listed = paddings.tolist() if isinstance(paddings, torch.Tensor) else paddings
    pairs = [(int(before), int(behind)) for before, behind in listed]
    if mode == "CONSTANT":
        return F.pad(x, [n for pair in reversed(pairs) for n in pair])
    one_of("CONSTANT", "REFLECT", "SYMMETRIC")("the mode of padding", mode)
    edge = int(mode == "SYMMETRIC")
    for dim, (before, behind) in enumerate(pairs):
        size = x.shape[dim]
        if max(before, behind) > size - 1 + edge:
            what = f"{before} and {behind} elements before and behind dim {dim}, which has {size}, in mode {mode}"
            raise ValueError(problem(what, fix=f"at most {size - 1 + edge}"))
        if before or behind:
            first = x.narrow(dim, 1 - edge, before).flip(dim)
            last = x.narrow(dim, size - 1 + edge - behind, behind).flip(dim)
            x = torch.cat((first, x, last), dim)
    return x


def _between(size: int, count: int, like: torch.Tensor) -> torch.Tensor:
    """Return interpolation weights [count, size]: row i has those of the elements around i * size / count."""
    places = torch.arange(count, dtype=torch.float64) * (size / count)
    low = places.long()
    rows = torch.eye(size, dtype=torch.float64)
    shares = (places - low).unsqueeze(1)
    return (rows[low] * (1 - shares) + rows[(low + 1).clamp(max=size - 1)] * shares).to(like.device, like.dtype)


def bilinear(x: Any, size: Sequence[int], align_corners: bool, half_pixel_centers: bool) -> Any:
    """Resize images (N, C, H, W) bilinearly. By default element i of n lies at i * size / n, with
    ``half_pixel_centers`` at the centre of its pixel."""
    sizes = tuple(int(n) for n in size)
    if align_corners or half_pixel_centers:
        return F.interpolate(x, sizes, mode="bilinear", align_corners=align_corners)
    height, width = (_between(*pair, x) for pair in zip(x.shape[2:], sizes, strict=True))
    return torch.matmul(torch.matmul(height, x), width.T)


_CUBIC = {True: -0.75, False: -0.5}  # the kernel's coefficient by align_corners


def _cubic(size: int, count: int, align_corners: bool) -> torch.Tensor:
    """Return weights [count, size] of the four elements around each place, which is rounded to a 1024th (Keys 1981).
    Without ``align_corners`` elements outside of the image are left out, with it the last ones stand for them."""
    numbers = torch.arange(count, dtype=torch.float64)
    places = numbers * ((size - 1) / max(count - 1, 1)) if align_corners else (numbers + 0.5) * (size / count) - 0.5
    low = places.floor()
    share = ((places - low) * 1024).round() / 1024
    far = torch.stack((share + 1, share, 1 - share, 2 - share), 1)
    a = _CUBIC[align_corners]
    near = ((a + 2) * far - (a + 3)) * far**2 + 1
    weights = torch.where(far <= 1, near, ((far - 5) * far + 8) * far * a - 4 * a)
    index = low.long().unsqueeze(1) + torch.arange(-1, 3)
    if not align_corners:
        weights = torch.where((index < 0) | (index >= size), 0.0, weights)
        weights = weights / weights.sum(1, keepdim=True)
    return torch.zeros(count, size, dtype=torch.float64).scatter_add(1, index.clamp(0, size - 1), weights)


def interpolate(
    input: Any, size: Any = None, scale_factor: Any = None, mode: str = "nearest", align_corners: Any = None,
    recompute_scale_factor: Any = None,
) -> Any:  # fmt: skip
    """Resize (N, C, ...) as torch does; by mode "bicubic" with the reference's coefficients."""
    if mode != "bicubic":
        return F.interpolate(input, size, scale_factor, mode, align_corners, recompute_scale_factor)
    factors = _each(scale_factor, 2) if isinstance(scale_factor, (tuple, list)) else (scale_factor,) * 2
    sizes = _each(size, 2) if size is not None else [int(n * f) for n, f in zip(input.shape[2:], factors, strict=True)]
    height, width = (_cubic(*pair, bool(align_corners)).to(input) for pair in zip(input.shape[2:], sizes, strict=True))
    return torch.matmul(torch.matmul(height, input), width.T)


def nearest(x: Any, size: Sequence[int], align_corners: bool) -> Any:
    """Resize images by the element below, or with ``align_corners`` by the nearest one with aligned ends."""
    sizes = tuple(int(n) for n in size)
    if not align_corners:
        return F.interpolate(x, sizes)
    for dim, length in zip((2, 3), sizes, strict=True):
        scale = (x.shape[dim] - 1) / max(length - 1, 1)
        places = torch.arange(length, dtype=torch.float64, device=x.device)
        x = x.index_select(dim, places.mul(scale).add(0.5).long())
    return x


# -- primitives -------------------------------------------------------------------------------------------------------


def pair(name: str, value: Sizes, low: int = 1) -> tuple[int, int]:
    """Return (height, width) from a number, two numbers, or the last two of four. Raises ValueError for others, and if
    the first two of four, for images and channels, are not 1."""
    sizes = (value, value) if isinstance(value, int) else tuple(value)
    if any(isinstance(size, bool) or not isinstance(size, int) or size < low for size in sizes):
        raise ValueError(problem(f"{name} is {value!r}", fix=f"whole numbers from {low}"))
    if len(sizes) == 4 and sizes[:2] != (1, 1):
        what = f"{name} is {value!r}, whose first two are not 1"
        raise ValueError(problem(what, fix=f"{name}=(1, 1, {sizes[2]}, {sizes[3]})"))
    if len(sizes) not in (2, 4):
        raise ValueError(problem(f"{name} is {value!r}", fix="a whole number, or two: (height, width)"))
    return sizes[-2], sizes[-1]


def _four(pad: Sizes) -> tuple[int, int, int, int]:
    sizes = (pad,) * 4 if isinstance(pad, int) else tuple(pad)
    if len(sizes) != 4:
        raise ValueError(problem(f"pad is {pad!r}", fix="a whole number, or four: (top, bottom, left, right)"))
    return sizes[0], sizes[1], sizes[2], sizes[3]


class _Windowed(OfSettings):
    """An operator that slides a window over height and width."""

    def _set_windows(self, kernel: Sizes, stride: Sizes, pad_mode: str, pad: Sizes, dilation: Sizes) -> None:
        mode = one_of(*MODES)("pad_mode", pad_mode.lower())
        self.attrs = {"pad_mode": mode, "pad": pad, **self.attrs}
        self.kernel_size, self.stride = pair("kernel_size", kernel), pair("stride", stride)
        self.dilation = pair("dilation", dilation)
        self.pad_mode, self.pad = mode, _four(pad)
        if mode != "pad" and any(self.pad):
            raise ValueError(problem(f"pad is {pad!r} with pad_mode {mode!r}", fix='pad_mode="pad"'))

    @property
    def reach(self) -> tuple[int, int]:
        height, width = ((k - 1) * d + 1 for k, d in zip(self.kernel_size, self.dilation, strict=True))
        return height, width

    def padding(self, shape: Sequence[int]) -> tuple[int, int, int, int]:
        if self.pad_mode == "valid":
            return (0, 0, 0, 0)
        if self.pad_mode == "pad":
            return self.pad
        top, bottom = same_padding(shape[-2], self.reach[0], self.stride[0])
        left, right = same_padding(shape[-1], self.reach[1], self.stride[1])
        return top, bottom, left, right

    def faults(self, strategy: Strategy, shapes: Shapes, args: tuple[Any, ...]) -> Faults:
        """Allow a split of height and width only in mode "same", or in mode "valid" if windows do not overlap."""
        counts = strategy[0]
        for dim in (2, 3):
            kernel, stride = self.reach[dim - 2], self.stride[dim - 2]
            if counts[dim] > 1 and (self.pad_mode == "pad" or (self.pad_mode == "valid" and kernel > stride)):
                yield (
                    f"the strategy {counts} splits dim {dim} in {counts[dim]} parts, but in {self.pad_mode} mode with "
                    f"kernel {kernel} (dilated) and stride {stride} it cannot be split",
                    "1 for height and width, pad_mode='same', or set_auto_parallel_context(strict=False)",
                )


class Conv2D(_Windowed, **SETTINGS["ops.Conv2D"]):
    """``Conv2D(out_channel, kernel_size, ...)(x, weight)``; ``weight`` is (out, in / group, height, width)."""

    dims = "n in h w, out in kh kw"
    sums = True

    def _settle(
        self, kernel_size: Sizes, mode: int, pad_mode: str, pad: Sizes, stride: Sizes, dilation: Sizes, data_format: str
    ) -> None:
        self._set_windows(kernel_size, stride, pad_mode, pad, dilation)
        channels_first("Conv2D", data_format, "; transpose first")

    def compute(self, x: Any, weight: Any, padding: Any) -> Any:
        return F.conv2d(x, weight, None, self.stride, padding, self.dilation, self.group)

    def prepared(self, strategy: Strategy | None, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the convolution's padding. Where it is asymmetric, images are padded first."""
        x, weight = args
        top, bottom, left, right = self.padding(x.shape)
        if (top, left) == (bottom, right):
            return x, weight, (top, left)
        pad = F.pad if strategy is None else sw.shard(F.pad, strategy[:1])
        return pad(x, (left, right, top, bottom)), weight, (0, 0)

    def faults(self, strategy: Strategy, shapes: Shapes, args: tuple[Any, ...]) -> Faults:
        images, (co, ci, *kernel) = strategy
        if prod(kernel) != 1:
            yield f"the strategy {strategy[1]} splits the kernel's height or width", f"({co}, {ci}, 1, 1)"
        if self.group != 1 and (co > 1 or images[1] > 1 or ci > 1):
            what = f"the group is {self.group}, the cout can not be split or the cin can not be split, but get cin "
            yield f"{what}{images[1]}, {ci}, cout {co}", "1 for the channels of a grouped convolution"
        if images[1] != ci:
            what = f"the shard num of cin of x is {images[1]}, but the shard num of cin of the weight is {ci}"
            yield what, "both are the channels that the convolution sums over: split them equally"
        yield from super().faults(strategy, shapes, args)


class Conv2DTranspose(OfSettings, **SETTINGS["ops.Conv2DTranspose"]):
    """The gradient of Conv2D with respect to its input, of shape ``input_size``: ``Conv2DTranspose(out_channel,
    kernel_size, ...)(dout, weight, input_size)``; ``weight`` is (channels of dout, out / group, height, width)."""

    dims = "n in h w, in out kh kw"
    lead = 0

    def _settle(
        self, kernel_size: Sizes, pad_mode: str, pad: Sizes, pad_list: Any, mode: int, stride: Sizes, dilation: Sizes,
        data_format: str,
    ) -> None:  # fmt: skip
        self.pad_mode, self.pad = pad_mode.lower(), _four(pad)
        self.attrs |= {"pad_mode": self.pad_mode, "pad": pad}
        self.kernel_size, self.stride = pair("kernel_size", kernel_size), pair("stride", stride)
        self.dilation = pair("dilation", dilation)

    def compute(self, dout: Any, weight: Any, input_size: Sequence[int]) -> Any:
        """Compute without padding and crop to ``input_size``, which equals the padded result."""
        whole = F.conv_transpose2d(dout, weight, None, self.stride, 0, 0, self.group, self.dilation)
        for dim in (0, 1):
            reach = (self.kernel_size[dim] - 1) * self.dilation[dim] + 1
            begin = self.pad[2 * dim] if self.pad_mode == "pad" else 0
            if self.pad_mode == "same":
                begin = same_padding(input_size[2 + dim], reach, self.stride[dim])[0]
            whole = fitted(whole, 2 + dim, begin, input_size[2 + dim])
        return whole


class _Pool(_Windowed, kernel_size=1, strides=1, pad_mode="valid", data_format="NCHW"):
    function: ClassVar[Callable[..., Any]]

    def _settle(self, kernel_size: Sizes, strides: Sizes, pad_mode: str, data_format: str) -> None:
        self.attrs = {"kernel_size": kernel_size, "strides": strides}
        self._set_windows(kernel_size, strides, pad_mode, 0, 1)
        channels_first(self.name, data_format, "; transpose first")
        self.lead = 0 if self.pad_mode == "same" else None

    def compute(self, x: Any) -> Any:
        return pool(type(self).function, x, self.kernel_size, self.stride, self.pad_mode)


class MaxPool(_Pool):
    """The largest element of each window."""

    function = staticmethod(F.max_pool2d)


class AvgPool(_Pool):
    """The mean of each window, over what is inside the image."""

    function = staticmethod(F.avg_pool2d)


class Conv2DBackpropInput(Conv2DTranspose):
    """The old name of Conv2DTranspose."""


__all__ = ["AvgPool", "Conv2D", "Conv2DBackpropInput", "Conv2DTranspose", "MaxPool"]
