"""Boxes of objects in images, (x0, y0, x1, y1): overlaps, offsets, and samples inside."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.nn import functional as F

import shardwise as sw
from shardwise.errors import problem
from shardwise.mindspore.checks import one_of
from shardwise.mindspore.named import Function

Tensor = torch.Tensor
Places = list[tuple[Tensor, Tensor]]  # index and weight of two elements around each position


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


def _chosen(x: Tensor, count: int = 256) -> tuple[Tensor, Tensor]:
    """Choose up to ``count`` true positions of a mask at random: [count, dims], and a mask of the valid rows."""
    chances = torch.rand(x.shape) * x
    scores, places = torch.topk(F.pad(chances.flatten(), (0, max(count - x.numel(), 0))), count)
    is_any = scores > 0
    index = torch.stack(torch.unravel_index(places * is_any, x.shape), -1)
    return index.to(torch.int32), is_any


BOXES: dict[str, Function] = {
    "bounding_box_decode": _decoded, "bounding_box_encode": _encoded, "choice_with_mask": _chosen, "iou": _overlap,
    "roi_align": _aligned,
}  # fmt: skip
