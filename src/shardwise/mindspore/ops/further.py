"""Elementwise, matrix, sequence, box and scatter functions with other names in torch: parts of the table of
``ops.functions``."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from torch.nn import functional as F

import shardwise as sw
from shardwise.errors import problem
from shardwise.mindspore.checks import one_of
from shardwise.mindspore.common.seed import drawn
from shardwise.mindspore.named import Function
from shardwise.mindspore.ops.images import pairs_of
from shardwise.mindspore.ops.networks import as_int, sizes_of
from shardwise.mindspore.tensor import as_torch
from shardwise.mindspore.tensor_methods import narrowed

Tensor = torch.Tensor
Places = list[tuple[Tensor, Tensor]]  # index and weight of two elements around each position


def _reversed(x: Tensor, seq_lengths: Tensor, seq_dim: int, batch_dim: int = 0) -> Tensor:
    along = x.movedim((batch_dim, seq_dim), (0, 1))
    places = torch.arange(along.shape[1], device=x.device)
    lengths = seq_lengths.unsqueeze(1)
    turned = torch.where(places < lengths, lengths - 1 - places, places)
    index = turned.reshape(*turned.shape, *(1,) * (along.dim() - 2)).expand(along.shape)
    return along.gather(1, index).movedim((0, 1), (batch_dim, seq_dim))


def _band(x: Tensor, lower: Any, upper: Any) -> Tensor:
    """Zero a matrix more than ``lower`` below or ``upper`` above its diagonal; a negative number keeps all."""
    low, high = int(lower), int(upper)
    x = x if low < 0 else x.triu(-low)
    return x if high < 0 else x.tril(high)


def distinct(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the distinct elements in the order in which they appear, and for each element the index of its value."""
    values, inverse = torch.unique(x.flatten(), return_inverse=True)
    places = torch.arange(x.numel(), device=x.device)
    first = places.new_full((len(values),), x.numel()).scatter_reduce(0, inverse, places, "amin")
    order = first.argsort()
    return values[order], order.argsort()[inverse].reshape(x.shape).to(torch.int32)


def _padded_unique(x: Tensor, pad_num: Any) -> tuple[Tensor, Tensor]:
    values, places = distinct(x)
    return F.pad(values, (0, x.numel() - values.numel()), value=float(pad_num)).to(x), places


def _blocks_to_batch(x: Tensor, block_shape: Any, paddings: Any) -> Tensor:
    """Pad and rearrange (n, c, h, w) -> (n * b0 * b1, c, h / b0, w / b1), with the positions in blocks first."""
    rows, columns = sizes_of(block_shape) * (2 if isinstance(block_shape, int) else 1)
    (top, bottom), (left, right) = pairs_of(paddings)
    n, c, h, w = (x := F.pad(x, (left, right, top, bottom))).shape
    if h % rows or w % columns:
        raise ValueError(problem(f"{h} by {w} in blocks of {rows} by {columns}", fix="paddings that make them divide"))
    blocks = x.reshape(n, c, h // rows, rows, w // columns, columns).permute(3, 5, 0, 1, 2, 4)
    return blocks.reshape(n * rows * columns, c, h // rows, w // columns)


def _batch_to_blocks(x: Tensor, block_shape: Any, crops: Any) -> Tensor:
    rows, columns = sizes_of(block_shape) * (2 if isinstance(block_shape, int) else 1)
    (top, bottom), (left, right) = pairs_of(crops)
    n, c, h, w = x.shape
    blocks = x.reshape(rows, columns, n // rows // columns, c, h, w).permute(2, 3, 4, 0, 5, 1)
    whole = blocks.reshape(n // rows // columns, c, h * rows, w * columns)
    return whole[:, :, top : h * rows - bottom, left : w * columns - right]


def _laplace(shape: Any, mean: Any, scale: Any, seed: Any = None) -> Tensor:
    first, second = (torch.empty(sizes_of(shape)).exponential_(generator=drawn(seed)) for _ in range(2))
    drawn_numbers: Tensor = mean + scale * (first - second)
    return drawn_numbers


def _gamma(shape: Any, alpha: Any, beta: Any, seed: Any = None) -> Tensor:
    concentration, rate = torch.broadcast_tensors(as_torch(alpha).float(), as_torch(beta).float())
    wide = concentration.expand(*sizes_of(shape), *concentration.shape).contiguous()
    sample: Tensor = torch._standard_gamma(wide, generator=drawn(seed)).div(rate)
    return sample


def _written(x: Any, index: Any, value: Any, change: str) -> Any:
    """Replace slices of dim 0, or add to them, in a copy."""
    rows = as_int(as_torch(index).reshape(-1))
    function = {"update": torch.Tensor.index_copy, "add": torch.Tensor.index_add}[change]
    return function(x, 0, rows, value.reshape(len(rows), *x.shape[1:]))


def _lrn(
    x: Tensor, depth_radius: int = 5, bias: float = 1.0, alpha: float = 1.0, beta: float = 0.5,
    norm_region: str = "ACROSS_CHANNELS",
) -> Tensor:  # fmt: skip
    """Return x / (bias + alpha * the sum of squares of the channels up to ``depth_radius`` away)**beta."""
    one_of("ACROSS_CHANNELS")("norm_region", norm_region)
    width = 2 * depth_radius + 1  # torch divides alpha by it
    return F.local_response_norm(x, width, alpha * width, beta, bias)


def _while(cond_func: Function, loop_func: Function, init_val: Any) -> Any:
    while cond_func(init_val):
        init_val = loop_func(init_val)
    return init_val


def _for(lower: Any, upper: Any, loop_func: Function, init_val: Any) -> Any:
    for place in range(int(lower), int(upper)):
        init_val = loop_func(place, init_val)
    return init_val


def _scanned(loop_func: Function, init: Any, xs: Any, length: int | None = None) -> tuple[Any, Any]:
    """Scan ``carry, y = loop_func(carry, x)`` along dim 0 of ``xs``. Return the last carry, and every y."""
    ys = []
    for place in range(len(xs) if length is None else length):
        init, y = loop_func(init, None if xs is None else xs[place])
        ys.append(y)
    return init, torch.stack(ys) if ys and isinstance(ys[0], Tensor) else ys


def _overlap(anchor_boxes: Tensor, gt_boxes: Tensor, mode: str = "iou") -> Tensor:
    """Return the intersection of all pairs of boxes (x0, y0, x1, y1), divided by their union ("iou") or by the area of
    the ground-truth box ("iof"). Border pixels belong to boxes."""
    one_of("iou", "iof")("mode", mode)
    first, second = anchor_boxes.unsqueeze(0), gt_boxes.unsqueeze(1)
    low, high = torch.maximum(first[..., :2], second[..., :2]), torch.minimum(first[..., 2:], second[..., 2:])
    both = (high - low + 1).clamp(min=0).prod(-1)
    first_area, second_area = ((x[..., 2:] - x[..., :2] + 1).prod(-1) for x in (first, second))
    return both / ((first_area + second_area - both) if mode == "iou" else second_area)


def _centres(boxes: Tensor) -> tuple[Tensor, Tensor]:
    """Return centres and sizes of boxes whose border pixels belong to them."""
    return (boxes[..., :2] + boxes[..., 2:]) * 0.5, boxes[..., 2:] - boxes[..., :2] + 1.0


def _encoded(anchor_box: Tensor, groundtruth_box: Tensor, means: Any = (0.0,) * 4, stds: Any = (1.0,) * 4) -> Tensor:
    """Encode boxes as offsets from anchors and logarithms of size ratios (Ren et al. 2015, equation 2)."""
    (at, size), (to, target_size) = _centres(anchor_box), _centres(groundtruth_box)
    far = torch.cat(((to - at) / size, torch.log(target_size / size)), -1)
    return (far - torch.tensor(means).to(far)) / torch.tensor(stds).to(far)


def _decoded(
    anchor_box: Tensor, deltas: Tensor, max_shape: Any, means: Any = (0.0,) * 4, stds: Any = (1.0,) * 4,
    wh_ratio_clip: float = 0.016,
) -> Tensor:  # fmt: skip
    """Decode the boxes of ``_encoded`` and clip them to an image (height, width)."""
    far = deltas * torch.tensor(stds).to(deltas) + torch.tensor(means).to(deltas)
    limit, (at, size) = abs(math.log(wh_ratio_clip)), _centres(anchor_box)
    centre, box_size = at + far[..., :2] * size, size * far[..., 2:].clamp(-limit, limit).exp()
    boxes = torch.cat((centre - (box_size - 1) * 0.5, centre + (box_size - 1) * 0.5), -1)
    height, width = max_shape
    return torch.minimum(boxes.clamp(min=0), torch.tensor([width - 1, height - 1] * 2).to(boxes))


@torch.library.custom_op("shardwise::kept_boxes", mutates_args=())
def _kept(close: Tensor) -> Tensor:
    """Return a mask of the boxes to keep, best first: no kept box before it may be ``close`` [n, n]."""
    kept = torch.ones(len(close), dtype=torch.bool, device=close.device)
    for place in range(len(close)):
        kept[place] = not bool((close[place, :place] & kept[:place]).any())
    return kept


@_kept.register_fake
def _(close: Tensor) -> Tensor:
    return close.new_empty(len(close))


sw.rule(_kept, "a b -> c", whole=("a", "b", "c"))  # each result depends on all better boxes


def suppressed(bboxes: Tensor, iou_threshold: float = 0.5) -> tuple[Tensor, Tensor, Tensor]:
    """Suppress boxes (x0, y0, x1, y1, score) [n, 5] that overlap a better one by more than the threshold. Return the
    boxes by descending score, their indices, and a mask of those kept."""
    order = torch.argsort(bboxes[:, 4].detach(), descending=True, stable=True)
    boxes = bboxes.index_select(0, order)
    return boxes, order.to(torch.int32), _kept(_overlap(boxes[:, :4], boxes[:, :4]).detach() > iou_threshold)


def _around(places: Tensor, size: int, margin: float) -> Places:
    """Return the two elements around each position with weights: 0 if it is more than ``margin`` outside."""
    inside = (places >= -margin) & (places <= size - 1 + margin)
    clamped = places.clamp(0, size - 1)
    low = clamped.floor()
    share = clamped - low
    return [(low.long(), (1 - share) * inside), ((low + 1).clamp(max=size - 1).long(), share * inside)]


def _sampled(x: Tensor, numbers: Tensor, rows: Places, columns: Places) -> Tensor:
    """Sample images (b, c, h, w) in boxes and return (n, y, x, c). ``numbers`` [n]: image of each box; ``rows`` [n, y]
    and ``columns`` [n, x]: positions."""
    height, width = x.shape[2:]
    pixels = x.movedim(1, -1).reshape(-1, x.shape[1])
    first = (numbers.long() * height).reshape(-1, 1, 1)
    parts = [
        pixels[(first + row.unsqueeze(2)) * width + column.unsqueeze(1)]
        * (of_row.unsqueeze(2) * of_column.unsqueeze(1)).unsqueeze(-1)
        for row, of_row in rows
        for column, of_column in columns
    ]
    return torch.stack(parts).sum(0)


def _aligned(
    features: Tensor, rois: Tensor, pooled_height: int, pooled_width: int, spatial_scale: float, sample_num: int = 2,
    roi_end_mode: int = 1,
) -> Tensor:  # fmt: skip
    """Average ``sample_num`` by ``sample_num`` values per cell of a grid over boxes (image, x0, y0, x1, y1) [n, 5] (He
    et al. 2017): [n, c, height, width]. ``roi_end_mode``: 1 includes the last pixel, 0 makes boxes at least one pixel
    large."""
    if sample_num < 1:
        raise NotImplementedError(problem(f"ROIAlign(sample_num={sample_num})", fix="samples per side, from 1"))
    begin, end = rois[:, 1:3] * spatial_scale, (rois[:, 3:5] + roi_end_mode) * spatial_scale
    size = end - begin if roi_end_mode else (end - begin).clamp(min=1)

    def places(dim: int, cells: int) -> Places:
        shares = (torch.arange(cells * sample_num) + 0.5) / (cells * sample_num)
        far = begin[:, dim, None] + shares.to(size) * size[:, dim, None]
        return _around(far, features.shape[3 - dim], 1.0)

    values = _sampled(features, rois[:, 0], places(1, pooled_height), places(0, pooled_width))
    grid = values.reshape(len(rois), pooled_height, sample_num, pooled_width, sample_num, -1)
    return grid.mean((2, 4)).movedim(-1, 1)


def _resized(
    image: Tensor, boxes: Tensor, box_indices: Tensor, crop_size: Any, method: str = "bilinear",
    extrapolation_value: float = 0.0,
) -> Tensor:  # fmt: skip
    """Resize image parts (b, h, w, c): [n, height, width, c]. ``boxes`` (y0, x0, y1, x1) range from 0 to 1."""
    one_of("bilinear", "nearest")("method", method)

    def far(low: int, count: int) -> Tensor:
        begin, end = boxes[:, low, None], boxes[:, low + 2, None]
        shares = torch.linspace(0, 1, count) if count > 1 else torch.full((1,), 0.5)
        return (begin + shares.to(boxes) * (end - begin)) * (image.shape[1 + low] - 1)

    places = [far(dim, int(crop_size[dim])) for dim in (0, 1)]
    positions = [place.round() if method == "nearest" else place for place in places]
    around = [_around(place, image.shape[1 + dim], 0.0) for dim, place in enumerate(positions)]
    rows, columns = ((place >= 0) & (place <= image.shape[1 + dim] - 1) for dim, place in enumerate(places))
    inside = (rows.unsqueeze(2) & columns.unsqueeze(1)).unsqueeze(-1)
    return torch.where(inside, _sampled(image.movedim(-1, 1), box_indices, *around), extrapolation_value)


def _within(bboxes: Tensor, img_metas: Tensor) -> Tensor:
    """Return whether boxes (x0, y0, x1, y1) lie inside an image (height, width, ratio)."""
    height, width = img_metas[0] * img_metas[2], img_metas[1] * img_metas[2]
    ends = (bboxes[..., 2] <= width - 1) & (bboxes[..., 3] <= height - 1)
    return (bboxes[..., :2] >= 0).all(-1) & ends


def _chosen(x: Tensor, count: int = 256) -> tuple[Tensor, Tensor]:
    """Choose up to ``count`` true positions of a mask at random: [count, dims], and a mask of the valid rows."""
    chances = torch.rand(x.shape) * x
    scores, places = torch.topk(torch.nn.functional.pad(chances.flatten(), (0, max(count - x.numel(), 0))), count)
    is_any = scores > 0
    index = torch.stack(torch.unravel_index(places * is_any, x.shape), -1)
    return index.to(torch.int32), is_any


# Updates at indices that combine with the present values. ``tensor_scatter_*`` and ``scatter_nd_*`` address elements
# (or slices) by the last dim of ``indices``, ``scatter_*`` slices along dim 0. ``unsorted_segment_*`` reduce slices
# that share an id.
# Name -> torch's reduction, and the function applied to the updates.
_KINDS: dict[str, tuple[str, Function]] = {
    "add": ("sum", lambda x: x), "sub": ("sum", torch.neg), "mul": ("prod", lambda x: x),
    "div": ("prod", torch.reciprocal), "max": ("amax", lambda x: x), "min": ("amin", lambda x: x),
}  # fmt: skip


def _combined(rows: Tensor, numbers: Tensor, updates: Tensor, kind: str) -> Tensor:
    """Combine the rows ``numbers`` (m) of ``rows`` (n, ...) with ``updates`` (m, ...)."""
    reduction, change = _KINDS[kind]
    index = numbers.long().reshape(-1, *(1,) * (rows.dim() - 1)).expand(-1, *rows.shape[1:])
    return rows.scatter_reduce(0, index, change(updates).to(rows), reduction)


def _at_rows(input_x: Tensor, indices: Tensor, updates: Tensor, kind: str = "add") -> Tensor:
    return _combined(input_x, indices.reshape(-1), updates.reshape(-1, *input_x.shape[1:]), kind)


def _at_elements(input_x: Tensor, indices: Tensor, updates: Tensor, kind: str = "add") -> Tensor:
    depth = indices.shape[-1]
    sizes, rest = input_x.shape[:depth], input_x.shape[depth:]
    strides = torch.tensor([math.prod(sizes[place + 1 :]) for place in range(depth)])
    numbers = (indices.long() * strides).sum(-1).reshape(-1)
    rows = _combined(input_x.reshape(math.prod(sizes), -1), numbers, updates.reshape(len(numbers), -1), kind)
    return rows.reshape(*sizes, *rest)


def _segments(input_x: Tensor, segment_ids: Tensor, num_segments: Any, kind: str = "max") -> Tensor:
    """Reduce segments. Empty ones hold the least number of the dtype for "max", the largest for "min", 1 for "mul"."""
    slices = input_x.shape[segment_ids.dim() :]
    info = torch.finfo(input_x.dtype) if input_x.is_floating_point() else torch.iinfo(input_x.dtype)
    start = {"max": info.min, "min": info.max, "mul": 1}[kind]
    return _at_rows(input_x.new_full((int(num_segments), *slices), start), segment_ids, input_x, kind)


FURTHER: dict[str, Function] = {
    # -- control
    "fori_loop": _for, "scan": _scanned, "while_loop": _while,
    # -- boxes
    "bounding_box_decode": _decoded, "bounding_box_encode": _encoded, "check_valid": _within,
    "choice_with_mask": _chosen, "crop_and_resize": _resized, "iou": _overlap, "roi_align": _aligned,
    # -- updates at indices
    **{f"tensor_scatter_{kind}": partial(_at_elements, kind=kind) for kind in _KINDS if kind != "add"},
    "unsorted_segment_max": partial(_segments, kind="max"),
    "unsorted_segment_min": partial(_segments, kind="min"),
    "unsorted_segment_prod": partial(_segments, kind="mul"),
    # -- elements
    "mul_no_nan": lambda x, y: torch.where(y == 0, 0, x * y),
    "truncate_div": lambda x, y: torch.div(x, y, rounding_mode="trunc"),
    # -- matrices
    "matrix_band_part": _band,
    "matrix_diag_part": lambda x: torch.diagonal(x, dim1=-2, dim2=-1),
    "matrix_set_diag": lambda x, diagonal: torch.diagonal_scatter(x, diagonal, dim1=-2, dim2=-1),
    # -- norms
    "lp_norm": lambda input, axis, p=2, keep_dims=False, epsilon=1e-12: torch.linalg.vector_norm(
        input, p, axis, keepdim=keep_dims).clamp(min=epsilon),
    "lrn": _lrn,
    # -- shapes
    "batch_to_space_nd": _batch_to_blocks,
    "space_to_batch_nd": _blocks_to_batch,
    "col2im": lambda input_x, output_size, kernel_size, dilation, padding_value, stride: F.fold(
        input_x.flatten(1, 2), sizes_of(output_size), kernel_size, dilation, padding_value, stride),
    "dyn_shape": lambda input_x: torch.tensor(input_x.shape),
    "reverse_sequence": _reversed,
    # -- indices
    "inplace_add": lambda x, v, indices: _written(x, indices, v, "add"),
    "inplace_sub": lambda x, v, indices: _written(x, indices, -v, "add"),
    "inplace_update": lambda x, v, indices: _written(x, indices, v, "update"),
    "top_k": lambda input_x, k, sorted=True: narrowed(torch.topk(input_x, k, sorted=sorted)),
    "unique_with_pad": _padded_unique,
    # -- new tensors
    "fills": lambda x, value: torch.full_like(x, float(value)),
    "gamma": _gamma,
    "laplace": _laplace,
    "random_categorical": lambda logits, num_sample, seed=0: torch.multinomial(
        logits.softmax(-1), num_sample, replacement=True, generator=drawn(seed or None)),
    "random_gamma": lambda shape, alpha, seed=None: _gamma(shape, alpha, 1.0, seed),
    "random_poisson": lambda shape, rate, seed=None, dtype=torch.int64: torch.poisson(
        as_torch(rate).float().expand(*sizes_of(shape), *as_torch(rate).shape).contiguous(),
        generator=drawn(seed)).to(dtype),
    "truncated_normal": lambda shape, seed=None: torch.nn.init.trunc_normal_(
        torch.empty(sizes_of(shape)), generator=drawn(seed)),
    "standard_laplace": lambda shape, seed=None: _laplace(shape, 0.0, 1.0, seed),
    # -- others
    "eps": lambda x: torch.full_like(x, torch.finfo(x.dtype).eps),
    "print_": lambda *values: print(*values),
    "deepcopy": lambda input_x: input_x.clone(),
    "scalar_cast": lambda input_x, input_y: torch.tensor(input_x).to(input_y).item(),
    "type_as": lambda input, other: input.to(other.dtype),
    "typeof": lambda x: x.dtype,
}  # fmt: skip
SCATTERS: dict[str, Function] = {  # these change a parameter
    **{f"scatter_{kind}": partial(_at_rows, kind=kind) for kind in _KINDS if kind != "add"},
    **{f"scatter_nd_{kind}": partial(_at_elements, kind=kind) for kind in _KINDS},
}
