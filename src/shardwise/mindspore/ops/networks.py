"""Functions of networks and losses, and of boxes of objects in images, (x0, y0, x1, y1): overlaps, offsets and samples
inside. They are a part of the table of ``ops.functions``."""

from __future__ import annotations

import math
from functools import wraps
from typing import Any

import torch
from torch.nn import functional as F

import shardwise as sw
from shardwise.errors import problem
from shardwise.mindspore.checks import one_of
from shardwise.mindspore.named import Function
from shardwise.mindspore.ops.dims import layer_norm
from shardwise.mindspore.ops.images import Conv2D
from shardwise.mindspore.ops.of_torch import as_int, sizes_of

Tensor = torch.Tensor
LAYOUTS = ("BSH", "SBH", "BSND", "BNSD")
EVERYTHING = 2**31 - 1
CAUSAL, CAUSAL_AT_THE_END, BAND = 2, 3, 4  # sparse modes; in the others only the mask counts


def _padding(pad_mode: str, padding: Any) -> Any:
    if pad_mode == "pad":
        sizes = sizes_of(padding)
        return sizes if len(sizes) in (1, 3) else (sizes[0], sizes[-1])
    return pad_mode


def _convolved(x: Any, weight: Any, bias: Any, stride: Any, mode: str, padding: Any, dilation: Any, groups: int) -> Any:
    pad = padding if isinstance(padding, int) or len(padding) == 4 else (padding[0],) * 2 + (padding[1],) * 2
    kernel = tuple(weight.shape[2:])
    y = Conv2D(weight.shape[0], kernel, 1, mode, pad, stride, dilation, groups)(x, weight)
    return y if bias is None else y + bias.reshape(-1, 1, 1)


def _divergence(logits: Tensor, labels: Tensor, reduction: str) -> Tensor:
    """Return the Kullback-Leibler divergence of logarithms. It avoids torch's "mean", whose meaning will change."""
    elementwise = F.kl_div(logits, labels, reduction="none")
    if reduction == "none":
        return elementwise
    return elementwise.sum() / {"sum": 1, "mean": elementwise.numel(), "batchmean": elementwise.shape[0]}[reduction]


def _log_alpha(log_probs: Tensor, targets: Tensor, *lengths_and_blank: Any) -> Any:
    """Return the log-probabilities of all prefixes of the targets [n, t, 2 s + 1]; None in a split cell."""
    if torch.compiler.is_exporting():
        return None
    return torch._ctc_loss(log_probs.detach(), targets, *lengths_and_blank)[1]


def classes_loss(
    x: Tensor, labels_indices: Tensor, labels_values: Tensor, sequence_length: Tensor, *,
    preprocess_collapse_repeated: bool = False, ctc_merge_repeated: bool = True,
    ignore_longer_outputs_than_inputs: bool = False,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Return the CTC losses [n] and the gradient of the logits (None in a split cell). ``x``: logits [t, n, classes],
    whose last class is the blank; ``labels_indices``: (row, position) [k, 2]."""
    ignore_longer = ignore_longer_outputs_than_inputs
    if preprocess_collapse_repeated or not ctc_merge_repeated:
        what = f"CTCLoss({preprocess_collapse_repeated=}, {ctc_merge_repeated=})"
        raise NotImplementedError(problem(what, fix="labels as they are meant, with False and True"))
    rows, places = as_int(labels_indices).unbind(1)
    width = len(rows) if torch.compiler.is_exporting() else int(places.max()) + 1
    count, blank = x.shape[1], x.shape[2] - 1
    targets = torch.zeros(count, width, dtype=torch.int64).index_put((rows, places), as_int(labels_values))
    lengths = torch.zeros(count, dtype=torch.int64).index_add(0, rows, torch.ones_like(rows))
    arguments = (targets, as_int(sequence_length), lengths, blank)
    logarithms = x.log_softmax(2)
    losses = F.ctc_loss(logarithms, *arguments, reduction="none", zero_infinity=ignore_longer)
    if torch.compiler.is_exporting():
        return losses, None
    results = torch._ctc_loss(logarithms.detach(), *arguments, ignore_longer)
    call = torch.ops.aten._ctc_loss_backward.Tensor
    one = torch.ones_like(losses.detach())
    return losses, call(one, logarithms.detach(), *arguments[:3], *results, blank, ignore_longer)


def _layer_norm(input: Tensor, normalized_shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5) -> Any:
    return F.layer_norm(input, tuple(normalized_shape), weight, bias, eps)


def _older_layer_norm(
    input_x: Tensor, gamma: Tensor, beta: Tensor, begin_norm_axis: int = 1, begin_params_axis: int = 1,
    epsilon: float = 1e-7,
) -> Any:  # fmt: skip
    axes = {"begin_norm_axis": begin_norm_axis, "begin_params_axis": begin_params_axis}
    return layer_norm(input_x, gamma, beta, **axes, epsilon=epsilon)


@wraps(_layer_norm)
def _either_layer_norm(*args: Any, **kwargs: Any) -> Any:
    """Normalise with a shape, or as in older versions with gamma as the second argument."""
    is_older = "gamma" in kwargs or (len(args) > 1 and isinstance(args[1], Tensor))
    return (_older_layer_norm if is_older else _layer_norm)(*args, **kwargs)


def _heads(x: Tensor, width: int, layout: str) -> Tensor:
    """Reshape to (batch, heads, time, width)."""
    if layout == "BNSD":
        return x
    x = x.transpose(0, 1) if layout == "SBH" else x
    return x.reshape(*x.shape[:2], -1, width).transpose(1, 2)


def _left_out(mask: Tensor | None, rows: int, columns: int, mode: int, before: int, behind: int) -> Tensor | None:
    """Return a mask that is True for keys a query does not see, or None."""
    shift = columns - rows if mode in (CAUSAL_AT_THE_END, BAND) else 0
    ahead = torch.arange(columns) - torch.arange(rows).unsqueeze(1) - shift
    if mode in (CAUSAL, CAUSAL_AT_THE_END):
        return ahead > 0
    band = (ahead > behind) | (-ahead > before)
    if mode == BAND:
        return band
    if mask is None or min(before, behind) >= EVERYTHING:
        return None if mask is None else mask.bool()
    return mask.bool() | band


def attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, heads: int, others: tuple[Any, ...] = (),
    keep: float = 1.0, scale: float = 1.0, before: int = EVERYTHING, behind: int = EVERYTHING, layout: str = "BSH",
    mode: int = 0,
) -> Tensor:  # fmt: skip
    """Compute attention of ``heads`` heads; keys and values may have fewer. True in a mask hides a key. ``mode``: the
    reference's ``sparse_mode``: 0 and 1 by the mask, 2 and 3 causal, 4 a band from ``before`` keys back to ``behind``
    keys ahead. Raises NotImplementedError for other modes and arguments."""
    one_of(*LAYOUTS)("input_layout", layout)
    if mode not in range(5) or any(x is not None for x in others):
        what = f"sparse_mode={mode}, or one of real_shift, drop_mask, padding_mask and prefix"
        raise NotImplementedError(problem(what, op="FlashAttentionScore", fix="sparse_mode 0 to 4, and attn_mask"))
    width = query.shape[-1] if layout in ("BNSD", "BSND") else query.shape[-1] // heads
    q, k, v = (_heads(x, width, layout) for x in (query, key, value))
    k, v = (x if x.shape[1] == q.shape[1] else x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    rows, columns = q.shape[2], k.shape[2]
    if rows == columns and mode in (CAUSAL, CAUSAL_AT_THE_END):
        out = F.scaled_dot_product_attention(q, k, v, None, 1 - keep, is_causal=True, scale=scale)
    else:
        hidden = _left_out(attn_mask, rows, columns, mode, before, behind)
        out = F.scaled_dot_product_attention(q, k, v, None if hidden is None else ~hidden, 1 - keep, scale=scale)
    if layout == "BNSD":
        return out
    out = out.transpose(1, 2).reshape(q.shape[0], rows, *query.shape[2:])
    return out.reshape(q.shape[0], rows, -1).transpose(0, 1) if layout == "SBH" else out


# -- boxes -------------------------------------------------------------------------------------------------------------

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


NETWORKS: dict[str, Function] = {
    # -- boxes
    "bounding_box_decode": _decoded, "bounding_box_encode": _encoded, "choice_with_mask": _chosen, "iou": _overlap,
    "roi_align": _aligned,
    # -- networks
    "conv1d": lambda input, weight, bias=None, stride=1, pad_mode="valid", padding=0, dilation=1, groups=1:
    F.conv1d(input, weight, bias, stride, _padding(pad_mode, padding), dilation, groups),
    "conv2d": lambda input, weight, bias=None, stride=1, pad_mode="valid", padding=0, dilation=1, groups=1:
    _convolved(input, weight, bias, stride, pad_mode, padding, dilation, groups),
    "conv3d": lambda input, weight, bias=None, stride=1, pad_mode="valid", padding=0, dilation=1, groups=1:
    F.conv3d(input, weight, bias, stride, _padding(pad_mode, padding), dilation, groups),
    "flash_attention_score": lambda query, key, value, head_num, real_shift=None, drop_mask=None, padding_mask=None,
    attn_mask=None, prefix=None, actual_seq_qlen=None, actual_seq_kvlen=None, keep_prob=1.0, scalar_value=1.0,
    pre_tokens=2**31 - 1, next_tokens=2**31 - 1, inner_precise=0, input_layout="BSH", sparse_mode=0: attention(
        query, key, value, attn_mask, head_num,
        (real_shift, drop_mask, padding_mask, prefix, actual_seq_qlen, actual_seq_kvlen), keep_prob, scalar_value,
        pre_tokens, next_tokens, input_layout, sparse_mode),
    "l2_normalize": lambda input, axis=-1, epsilon=1e-4: input * torch.rsqrt(torch.clamp(torch.sum(
        torch.square(input), axis, keepdim=True), min=epsilon)),
    "layer_norm": _either_layer_norm,
    "rms_norm": lambda x, gamma, epsilon=1e-6: (
        x * (inverse := torch.rsqrt(torch.mean(torch.square(x), -1, keepdim=True) + epsilon)) * gamma, inverse),
    # -- losses
    "cross_entropy": lambda input, target, weight=None, ignore_index=-100, reduction="mean", label_smoothing=0.0:
    F.cross_entropy(input, target if target.is_floating_point() else as_int(target), weight,
                    ignore_index=ignore_index, reduction=reduction, label_smoothing=label_smoothing),
    "ctc_loss": lambda log_probs, targets, input_lengths, target_lengths, blank=0, reduction="mean",
    zero_infinity=False: (
        F.ctc_loss(log_probs, targets, input_lengths, target_lengths, blank, reduction, zero_infinity),
        _log_alpha(log_probs, targets, input_lengths, target_lengths, blank)),
    "kl_div": lambda logits, labels, reduction="mean": _divergence(logits, labels, reduction),
}  # fmt: skip
