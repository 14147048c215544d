"""Boxes of images: non-maximum suppression and sampling. A part of the table of ``ops.functions``."""

from __future__ import annotations

from typing import Any

import torch

import shardwise as sw
from shardwise.errors import problem
from shardwise.mindspore.checks import one_of
from shardwise.mindspore.named import Function
from shardwise.mindspore.ops.further import overlap

Tensor = torch.Tensor
Places = list[tuple[Tensor, Tensor]]  # index and weight of two elements around each position


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
    return boxes, order.to(torch.int32), _kept(overlap(boxes[:, :4], boxes[:, :4]).detach() > iou_threshold)


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


BOXES: dict[str, Function] = {
    "check_valid": _within, "choice_with_mask": _chosen, "crop_and_resize": _resized, "roi_align": _aligned,
}  # fmt: skip
