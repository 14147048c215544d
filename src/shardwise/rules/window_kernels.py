"""Local operators on windows: what a rank computes when the dim along which windows slide is split.

In a split dim the padding of a rank is its own: the full one at an end of the tensor, none in between. Compositions of
ATen calls, like those of ``rules.local_kernels``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional as F

from shardwise.graph.operator_library import composite

aten = torch.ops.aten


def _copied_runs(x: Tensor, dims: Sequence[int], counts: Sequence[int], *runs: Sequence[int]) -> Tensor:
    """In every one of ``dims`` the rows of its runs (``rules.windows.RowRun``: lengths, firsts, steps), of which it has
    ``counts``."""
    start = 0
    for dim, count in zip(dims, counts, strict=True):
        of_dim = zip(*(values[start : start + count] for values in runs), strict=True)
        parts = [_run(x, dim, *run) for run in of_dim]
        start += count
        x = torch.cat(parts, dim) if len(parts) > 1 else parts[0] if parts else x.narrow(dim, 0, 0)
    return x


def _run(x: Tensor, dim: int, length: int, first: int, step: int) -> Tensor:
    if step == 0:
        return x.narrow(dim, first, 1).expand([length if i == dim else -1 for i in range(x.dim())])
    last = first + (length - 1) * step
    rows: Tensor = aten.slice.Tensor(x, dim, min(first, last), max(first, last) + 1, abs(step))
    return rows.flip(dim) if step < 0 else rows


def _padded(x: Tensor, before: Sequence[int], after: Sequence[int]) -> Tensor:
    """Zeros around the last dims; negative: rows are taken away."""
    pad = [number for pair in zip(reversed(before), reversed(after), strict=True) for number in pair]
    return F.pad(x, pad) if any(pad) else x


# Of complex numbers too, which torch.convolution does not know.
_CONVOLUTIONS = (torch.conv1d, torch.conv2d, torch.conv3d)
_TRANSPOSED = (torch.conv_transpose1d, torch.conv_transpose2d, torch.conv_transpose3d)


def _conv_window(
    x: Tensor,
    weight: Tensor,
    stride: Sequence[int],
    before: Sequence[int],
    after: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> Tensor:
    """Return a convolution with as much padding before as asked for, and another after."""
    padding = [min(pair) for pair in zip(before, after, strict=True)]  # what the convolution does itself
    rest = ([rows - p for rows, p in zip(side, padding, strict=True)] for side in (before, after))
    x = _padded(x, *rest)
    batched = x.dim() == weight.dim()
    x = x if batched else x.unsqueeze(0)
    y = _CONVOLUTIONS[len(padding) - 1](x, weight, None, stride, padding, dilation, groups)
    return y if batched else y.squeeze(0)


def _conv_transpose_window(
    x: Tensor,
    weight: Tensor,
    stride: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    fronts: Sequence[int],
    lengths: Sequence[int],
) -> Tensor:
    """Return a transposed convolution without padding, of which rows ``fronts`` and on are kept, ``lengths`` of them;
    rows that it does not have are zeros."""
    count = len(stride)
    batched = x.dim() == weight.dim()
    x = x if batched else x.unsqueeze(0)
    empty = [size == 0 for size in x.shape[-count:]]
    x = _padded(x, [0] * count, [int(none) for none in empty])
    y = _TRANSPOSED[count - 1](x, weight, None, stride, [0] * count, [0] * count, groups, dilation)
    # A window without rows got one of zeros, which lies anywhere.
    y = _placed(y, [0 if none else front for none, front in zip(empty, fronts, strict=True)], lengths)
    return y if batched else y.squeeze(0)


def _valid_part(y: Tensor, fronts: Sequence[int], lengths: Sequence[int]) -> Tensor:
    """Keep the given number of rows of the last dims, from ``fronts`` on."""
    for i, (front, length) in enumerate(zip(fronts, lengths, strict=True)):
        y = y.narrow(y.dim() - len(fronts) + i, front, length)
    return y


def _max_pool_window(x: Tensor, kernel: list[int], *rest: Any) -> tuple[Tensor, Tensor]:
    """Values, and positions in the whole map, whose sizes are ``sizes`` and of which x begins at ``starts``."""
    *settings, fronts, lengths, starts, sizes = rest
    pool = (F.max_pool1d_with_indices, F.max_pool2d_with_indices, F.max_pool3d_with_indices)[len(kernel) - 1]
    values, indices = pool(x, kernel, *settings)
    indices = _global_positions(_valid_part(indices, fronts, lengths), x.shape[-len(kernel) :], starts, sizes)
    return _valid_part(values, fronts, lengths), indices


def _max_pool_values_window(x: Tensor, kernel: list[int], *rest: Any) -> Tensor:
    *settings, fronts, lengths = rest
    pool = (F.max_pool1d, F.max_pool2d, F.max_pool3d)[len(kernel) - 1]
    return _valid_part(pool(x, kernel, *settings), fronts, lengths)


def _global_positions(index: Tensor, local: Sequence[int], starts: Sequence[int], sizes: Sequence[int]) -> Tensor:
    """Flat positions in a part of a map -> flat positions in the map."""
    positions, stride = torch.zeros_like(index), 1
    for local_index, start, size in zip(reversed(local), reversed(starts), reversed(sizes), strict=True):
        positions = positions + (index % local_index + start) * stride
        index, stride = index // local_index, stride * size
    return positions


def _avg_pool_window(x: Tensor, kernel: list[int], *rest: Any) -> Tensor:
    stride, padding, ceil_mode, include_pad, divisor, fronts, lengths = rest
    if len(kernel) == 1:
        y = F.avg_pool1d(x, kernel, stride, padding, ceil_mode, include_pad)
    else:
        average = F.avg_pool2d if len(kernel) == 2 else F.avg_pool3d
        y = average(x, kernel, stride, padding, ceil_mode, include_pad, divisor)
    return _valid_part(y, fronts, lengths)


ADAPTIVE_AVG_POOLS: tuple[Any, ...] = (F.adaptive_avg_pool1d, F.adaptive_avg_pool2d, F.adaptive_avg_pool3d)
_ADAPTIVE_MAX: tuple[Any, ...] = (
    aten.adaptive_max_pool1d.default,
    aten.adaptive_max_pool2d.default,
    aten.adaptive_max_pool3d.default,
)


def _adaptive_avg_window(
    x: Tensor, output: Sequence[int], begins: Sequence[int], ends: Sequence[int], counts: Sequence[int]
) -> Tensor:
    """Adaptive average pooling. Dim i of the last ones has ``counts[i]`` bins of its own, from row ``begins`` to row
    ``ends`` each (0: the operator finds its bins)."""
    pool = ADAPTIVE_AVG_POOLS[len(output) - 1]
    bins = _bins(begins, ends, counts)
    return _over_bins(x, tuple(output), bins, lambda part, sizes, _: (pool(part, sizes),))[0]


def _adaptive_max_window(
    x: Tensor,
    output: Sequence[int],
    begins: Sequence[int],
    ends: Sequence[int],
    counts: Sequence[int],
    starts: Sequence[int],
    sizes: Sequence[int],
) -> tuple[Tensor, Tensor]:
    """Adaptive maximum pooling; positions are those in the whole map, of which x begins at ``starts``."""
    count = len(output)

    def pool(part: Tensor, out: tuple[int, ...], offsets: tuple[int, ...]) -> tuple[Tensor, ...]:
        values, indices = _ADAPTIVE_MAX[count - 1](part, list(out))
        first = [start + offset for start, offset in zip(starts, offsets, strict=True)]
        return values, _global_positions(indices, part.shape[-count:], first, sizes)

    values, indices = _over_bins(x, tuple(output), _bins(begins, ends, counts), pool)
    return values, indices


def _bins(begins: Sequence[int], ends: Sequence[int], counts: Sequence[int]) -> list[list[tuple[int, int]]]:
    pairs, start, bins = list(zip(begins, ends, strict=True)), 0, []
    for count in counts:
        bins.append(pairs[start : start + count])
        start += count
    return bins


def _over_bins(
    x: Tensor,
    output: tuple[int, ...],
    bins: Sequence[Sequence[tuple[int, int]]],
    pool: Callable[[Tensor, tuple[int, ...], tuple[int, ...]], tuple[Tensor, ...]],
    offsets: tuple[int, ...] = (),
) -> tuple[Tensor, ...]:
    """``pool`` of every combination of bins, put together."""
    i = len(offsets)
    if i == len(output):
        return pool(x, output, offsets)
    if not bins[i]:
        return _over_bins(x, output, bins, pool, (*offsets, 0))
    dim = x.dim() - len(output) + i
    single_row = (*output[:i], 1, *output[i + 1 :])
    parts = [
        _over_bins(x.narrow(dim, begin, end - begin), single_row, bins, pool, (*offsets, begin))
        for begin, end in bins[i]
    ]
    return tuple(torch.cat(results, dim) for results in zip(*parts, strict=True))


def _col2im_window(
    x: Tensor,
    kernel: Sequence[int],
    dilation: Sequence[int],
    stride: Sequence[int],
    numbers: Sequence[int],
    fronts: Sequence[int],
    lengths: Sequence[int],
) -> Tensor:
    """Return the sums over ``numbers`` windows, without padding, of which rows ``fronts`` and on are kept. What no
    window reaches is zero."""
    if 0 in numbers:
        channels = x.shape[-2] // (kernel[0] * kernel[1])
        nothing: Tensor = x.sum(-1).unflatten(-1, (channels, -1)).sum(-1)
        return nothing.reshape(*nothing.shape, 1, 1).expand(*nothing.shape, *lengths)
    sizes = [(n - 1) * s + (k - 1) * d + 1 for n, s, k, d in zip(numbers, stride, kernel, dilation, strict=True)]
    y = F.fold(x, tuple(sizes), tuple(kernel), tuple(dilation), 0, tuple(stride))
    return _placed(y, fronts, lengths)


def _placed(y: Tensor, fronts: Sequence[int], lengths: Sequence[int]) -> Tensor:
    """Rows ``fronts`` and on of the last dims, ``lengths`` of them; zeros where there are none."""
    before, after = [], []
    for size, front, length in zip(y.shape[-len(fronts) :], fronts, lengths, strict=True):
        start, stop = min(max(front, 0), size), min(max(front + length, 0), size)
        zeros = min(max(-front, 0), length)
        before.append(zeros - start)
        after.append(length - zeros - (stop - start) - (size - stop))
    return _padded(y, before, after)


def _im2col_window(
    x: Tensor,
    kernel: Sequence[int],
    dilation: Sequence[int],
    before: Sequence[int],
    after: Sequence[int],
    stride: Sequence[int],
) -> Tensor:
    return F.unfold(_padded(x, before, after), tuple(kernel), tuple(dilation), 0, tuple(stride))


# ---------------------------------------------------------------------------------------------------- interpolation

_NATIVE: dict[str, tuple[Any, ...]] = {
    "nearest": (aten.upsample_nearest1d.default, aten.upsample_nearest2d.default, aten.upsample_nearest3d.default),
    "nearest-exact": (
        aten._upsample_nearest_exact1d.default,
        aten._upsample_nearest_exact2d.default,
        aten._upsample_nearest_exact3d.default,
    ),
    "linear": (aten.upsample_linear1d.default, aten.upsample_bilinear2d.default, aten.upsample_trilinear3d.default),
    "cubic": (None, aten.upsample_bicubic2d.default, None),
}
_CUBIC = -0.75  # the coefficient of PyTorch's cubic convolution


def _resample_window(x: Tensor, mode: str, align_corners: bool, output: Sequence[int], *of_dims: Any) -> Tensor:
    """Interpolation of a part: split dims, of whose ``sizes`` rows x holds those from ``starts`` on, tap by tap for the
    rows from ``offsets`` on; the others by the operator itself. ``scales``: as the operator is given them, 0: none."""
    sizes, sizes_after, scales, split, offsets, lengths, starts = of_dims
    count = len(output)
    local_sizes = x.shape[-count:]
    native = [local_size if cut else size for local_size, size, cut in zip(local_sizes, output, split, strict=True)]
    if list(local_sizes) != native:
        scale_factors = [None if cut or not scale else scale for scale, cut in zip(scales, split, strict=True)]
        corners = () if mode.startswith("nearest") else (align_corners,)
        x = _NATIVE[mode][count - 1](x, native, *corners, *scale_factors)
    for i in range(count):
        if split[i]:
            dim = x.dim() - count + i
            how = Resampling(mode, align_corners, sizes[i], sizes_after[i], scales[i])
            x = _resampled(x, dim, how, offsets[i], lengths[i], starts[i])
    return x


@dataclass(frozen=True)
class Resampling:
    """The interpolation of a dim: its rows, those of the result, and the operator's scale (0: none)."""

    mode: str
    align_corners: bool
    size: int
    after: int
    scale: float


def _resampled(x: Tensor, dim: int, how: Resampling, offset: int, length: int, start: int) -> Tensor:
    """Rows [offset, offset + length) of ``how.after`` along one dim; x holds the rows from ``start`` on."""
    total: Tensor | None = None
    for index, weight in sample_points(how, offset, length, x.dtype, x.device):
        rows = x.index_select(dim, index.clamp(0, how.size - 1) - start)
        if weight is not None:
            rows = rows * weight.to(x.dtype).reshape([-1 if i == dim else 1 for i in range(x.dim())])
        total = rows if total is None else total + rows
    assert total is not None, "at least one tap"
    return total


def sample_points(
    how: Resampling, offset: int, length: int, dtype: torch.dtype, device: torch.device | None = None
) -> list[tuple[Tensor, Tensor | None]]:
    """Per tap the rows that it reads (maybe outside) and their weights (None: 1), as ATen computes them
    (aten/src/ATen/native/UpSample.h): nearest in float32, the others in float32 or, for float64, in that."""
    mode, size, after, scale = how.mode, how.size, how.after, how.scale
    precision = torch.float64 if dtype == torch.float64 and not mode.startswith("nearest") else torch.float32
    j = torch.arange(offset, offset + length, device=device, dtype=precision)
    if mode.startswith("nearest"):
        # Where sizes are equal or double, ATen does not look at the scale.
        ratio = 1 / scale if scale and after not in (size, 2 * size) else size / after
        exact = mode == "nearest-exact"
        ratio = 1 / scale if scale and exact and after != size else ratio
        shifted = (j + 0.5 if exact else j) * torch.tensor(ratio, dtype=precision, device=device)
        return [(shifted.floor().long(), None)]
    if how.align_corners:
        ratio = (size - 1) / (after - 1) if after > 1 else 0.0
        x = j * torch.tensor(ratio, dtype=precision, device=device)
    else:
        x = (j + 0.5) * torch.tensor(1 / scale if scale else size / after, dtype=precision, device=device) - 0.5
        x = x if mode == "cubic" else x.clamp(min=0)
    low = x.floor()
    t, first = x - low, low.long()
    if mode == "linear":
        first = first.clamp(max=size - 1)
        t = (x - first).clamp(0, 1)
        return [(first, 1 - t), (first + 1, t)]

    def near(d: Tensor) -> Tensor:
        return ((_CUBIC + 2) * d - (_CUBIC + 3)) * d * d + 1

    def far(d: Tensor) -> Tensor:
        return ((_CUBIC * d - 5 * _CUBIC) * d + 8 * _CUBIC) * d - 4 * _CUBIC

    weights = (far(t + 1), near(t), near(1 - t), far(2 - t))
    return [(first + i - 1, weight) for i, weight in enumerate(weights)]


_POOLING = "int[] stride, int[] padding, int[] dilation, bool ceil_mode, int[] fronts, int[] lengths"
COPIED_RUNS: Final = composite(_copied_runs, "int[] lengths, int[] firsts, int[] steps")
CONV_WINDOW: Final = composite(_conv_window)
CONV_TRANSPOSE_WINDOW: Final = composite(_conv_transpose_window)
MAX_POOL_WINDOW: Final = composite(_max_pool_window, f"{_POOLING}, int[] starts, int[] sizes")
MAX_POOL_VALUES_WINDOW: Final = composite(_max_pool_values_window, _POOLING)
AVG_POOL_WINDOW: Final = composite(
    _avg_pool_window,
    "int[] stride, int[] padding, bool ceil_mode, bool count_include_pad, int? divisor, int[] fronts, int[] lengths",
)
ADAPTIVE_AVG_WINDOW: Final = composite(_adaptive_avg_window)
ADAPTIVE_MAX_WINDOW: Final = composite(_adaptive_max_window)
IM2COL_WINDOW: Final = composite(_im2col_window)
COL2IM_WINDOW: Final = composite(_col2im_window)
RESAMPLE_WINDOW: Final = composite(
    _resample_window,
    "int[] sizes, int[] sizes_after, float[] scales, bool[] split, int[] offsets, int[] lengths, int[] starts",
)
