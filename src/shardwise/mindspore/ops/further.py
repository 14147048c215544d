"""Elementwise, matrix and sequence functions with other names in torch: a part of the table of ``ops.functions``."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.nn import functional as F

from shardwise.errors import problem
from shardwise.mindspore.checks import one_of
from shardwise.mindspore.common.seed import drawn
from shardwise.mindspore.named import Function
from shardwise.mindspore.ops.networks import as_int, sizes_of
from shardwise.mindspore.ops.resizing import pairs_of
from shardwise.mindspore.tensor import as_torch

Tensor = torch.Tensor


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


def _padded_unique(x: Tensor, pad_num: Any) -> tuple[Tensor, Tensor]:
    values, places = torch.unique(x, return_inverse=True)
    return F.pad(values, (0, x.numel() - values.numel()), value=float(pad_num)).to(x), places.to(torch.int32)


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


def overlap(anchor_boxes: Tensor, gt_boxes: Tensor, mode: str = "iou") -> Tensor:
    """Return the intersection of all pairs of boxes (x0, y0, x1, y1), divided by their union ("iou") or by the area of
    the ground-truth box ("iof")."""
    one_of("iou", "iof")("mode", mode)
    first, second = anchor_boxes.unsqueeze(0), gt_boxes.unsqueeze(1)
    low, high = torch.maximum(first[..., :2], second[..., :2]), torch.minimum(first[..., 2:], second[..., 2:])
    both = (high - low).clamp(min=0).prod(-1)
    first_area, second_area = ((x[..., 2:] - x[..., :2]).prod(-1) for x in (first, second))
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


FURTHER: dict[str, Function] = {
    # -- control
    "fori_loop": _for, "scan": _scanned, "while_loop": _while,
    # -- boxes
    "bounding_box_decode": _decoded, "bounding_box_encode": _encoded, "iou": overlap,
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
    "top_k": lambda input_x, k, sorted=True: tuple(torch.topk(input_x, k, sorted=sorted)),
    "unique_with_pad": _padded_unique,
    # -- new tensors
    "fills": lambda x, value: torch.full_like(x, float(value)),
    "gamma": _gamma,
    "laplace": _laplace,
    "random_categorical": lambda logits, num_sample, seed=0: torch.multinomial(
        logits.softmax(-1), num_sample, replacement=True, generator=drawn(seed or None)),
    "random_gamma": lambda shape, alpha, seed=None: _gamma(shape, alpha, 1.0, seed),
    "random_poisson": lambda shape, rate, seed=None: torch.poisson(
        as_torch(rate).float().expand(*sizes_of(shape), *as_torch(rate).shape).contiguous(), generator=drawn(seed)),
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
