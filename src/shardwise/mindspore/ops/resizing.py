"""Pooling, padding by what is there, and other sizes of images, as the reference counts elements."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch.nn import functional as F

from shardwise.errors import problem
from shardwise.mindspore.checks import closest
from shardwise.mindspore.tensor import as_torch

MODES = ("valid", "same", "pad")
AVERAGES: dict[Any, int] = {F.avg_pool1d: 1, F.avg_pool2d: 2, F.avg_pool3d: 3}  # over how many dims
DIMS = {**AVERAGES, F.max_pool1d: 1, F.max_pool2d: 2, F.max_pool3d: 3}


def same_padding(size: int, kernel: int, stride: int) -> tuple[int, int]:
    """The padding before and behind with which ``ceil(size / stride)`` windows fit; the odd one is behind."""
    total = max((-(-size // stride) - 1) * stride + kernel - size, 0)
    return total // 2, total - total // 2


def _each(size: Any, dims: int) -> tuple[int, ...]:
    return (size,) * dims if isinstance(size, int) else tuple(size)[-dims:]


def pool(function: Any, x: Any, kernel: Any, stride: Any, mode: str, padding: Any = 0, **settings: Any) -> Any:
    """Torch's pooling of (N, C, ...) or (C, ...) with a ``pad_mode``: "valid", "pad" by ``padding``, or "same": as many
    windows as strides, and means over what is inside. Raises ValueError for ``padding`` in other modes than "pad"."""
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
    """Places of padded dims, counted through, as places of the dims themselves."""
    padded = [size + sum(pair) for size, pair in zip(sizes, pairs, strict=True)]
    places = torch.zeros_like(indices)
    for dim, (size, (before, _)) in enumerate(zip(sizes, pairs, strict=True)):
        places = places * size + indices // prod(padded[dim + 1 :]) % padded[dim] - before
    return places


def mirrored(x: Any, paddings: Any, mode: str) -> Any:
    """``x`` padded by pairs per dim: with 0 ("CONSTANT"), or with what is there, turned round, without the element at
    the edge ("REFLECT") or with it ("SYMMETRIC")."""
    pairs = [[int(n) for n in pair] for pair in as_torch(paddings).tolist()]
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


def _between(size: int, wanted: int, like: torch.Tensor) -> torch.Tensor:
    """[wanted, size]: in row i the shares of the elements around place i * size / wanted."""
    places = torch.arange(wanted, dtype=torch.float64) * (size / wanted)
    low = places.long()
    rows = torch.eye(size, dtype=torch.float64)
    shares = (places - low).unsqueeze(1)
    return (rows[low] * (1 - shares) + rows[(low + 1).clamp(max=size - 1)] * shares).to(like.device, like.dtype)


def bilinear(x: Any, size: Sequence[int], align_corners: bool, half_pixel_centers: bool) -> Any:
    """Images (N, C, H, W) of another size, between elements. Without either setting element i of n lies at
    i * size / n, with ``half_pixel_centers`` at the middle of its share."""
    sizes = tuple(int(n) for n in size)
    if align_corners or half_pixel_centers:
        return F.interpolate(x, sizes, mode="bilinear", align_corners=align_corners)
    height, width = (_between(*pair, x) for pair in zip(x.shape[2:], sizes, strict=True))
    return torch.matmul(torch.matmul(height, x), width.T)


def nearest(x: Any, size: Sequence[int], align_corners: bool) -> Any:
    """Images of another size, by the element below; ``align_corners``: by the nearest, the ends being the ends."""
    sizes = tuple(int(n) for n in size)
    if not align_corners:
        return F.interpolate(x, sizes)
    for dim, wanted in zip((2, 3), sizes, strict=True):
        scale = (x.shape[dim] - 1) / max(wanted - 1, 1)
        places = torch.arange(wanted, dtype=torch.float64, device=x.device)
        x = x.index_select(dim, places.mul(scale).add(0.5).long())
    return x
