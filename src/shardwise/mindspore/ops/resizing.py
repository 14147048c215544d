"""Pooling, mirror padding and resizing of images, with the reference's index conventions."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch.nn import functional as F

from shardwise.errors import problem
from shardwise.mindspore.checks import closest

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
    mode, dims = mode.lower(), DIMS[function]
    if mode not in MODES:
        raise ValueError(problem(f"pad_mode is {mode!r}", fix=f"one of {', '.join(MODES)}"))
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


def pairs_of(paddings: Any) -> list[tuple[int, int]]:
    """Return (before, behind) per dim as Python numbers, as the values of a new tensor are unknown during capture."""
    pairs = paddings.tolist() if isinstance(paddings, torch.Tensor) else paddings
    return [(int(before), int(behind)) for before, behind in pairs]


def mirrored(x: Any, paddings: Any, mode: str) -> Any:
    """Pad ``x`` by pairs per dim with 0 ("CONSTANT"), or with its mirror image without the edge element ("REFLECT") or
    with it ("SYMMETRIC")."""
    pairs = pairs_of(paddings)
    if mode == "CONSTANT":
        return F.pad(x, [n for pair in reversed(pairs) for n in pair])
    if mode not in ("REFLECT", "SYMMETRIC"):
        fix = closest(mode, ("CONSTANT", "REFLECT", "SYMMETRIC"))
        raise ValueError(problem(f"the mode of padding is {mode!r}", fix=fix))
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
