"""Cells and losses that are one function of torch, each a line of a table. Positional arguments are those of
``construct``, keyword-only arguments those of the constructor (``named.settings_of``)."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F

from shardwise.errors import ShardwiseError, problem
from shardwise.mindspore.holding import as_gradient, holding_of, parameter_of
from shardwise.mindspore.named import Function, WithSettings, classes_of
from shardwise.mindspore.nn.cell import Cell
from shardwise.mindspore.nn.loss import REDUCTIONS, LossOfFunction, reduced
from shardwise.mindspore.ops.clip import split_norm
from shardwise.mindspore.ops.functions import FUNCTIONS
from shardwise.mindspore.ops.images import bilinear, interpolate, mirrored, pool
from shardwise.mindspore.ops.simple import of_functions
from shardwise.mindspore.tensor import as_torch
from shardwise.mindspore.tensor_methods import dtype_of


class Simple(WithSettings, Cell):
    """The cell ``function(*inputs, **settings)``. The setting ``training`` is the cell's mode."""

    function: Function

    def construct(self, *inputs: Any, **named: Any) -> Any:
        return type(self).function(*inputs, **named, **self._chosen())


def _padded(x: Any, padding: Any, mode: str, value: float | None = None, dims: int = 0) -> Any:
    """Pad a tensor. ``padding``: per side, last dim first, or one number for all sides of the last ``dims`` dims."""
    return F.pad(x, (padding,) * 2 * dims if isinstance(padding, int) else tuple(padding), mode, value)


def _pad(mode: str, dims: int) -> Function:
    return lambda x, *, padding: _padded(x, padding, mode, None, dims)


def _constant_pad(dims: int) -> Function:
    return lambda x, *, padding, value: _padded(x, padding, "constant", value, dims)


def _unpool(function: Function) -> Function:
    return lambda x, indices, output_size=None, *, kernel_size, stride=None, padding=0: function(
        x, indices, kernel_size, stride, padding, output_size
    )


def _upsampled(x: Any, size: Any, factor: Any, align: bool, centers: bool) -> Any:
    if (size is None) == (factor is None):
        what = f"ResizeBilinear(size={size}, scale_factor={factor})"
        raise ValueError(problem(what, fix="one of the two"))
    sizes = [int(n * factor) for n in x.shape[2:]] if size is None else (size,) * 2 if isinstance(size, int) else size
    return bilinear(x, sizes, align, centers)


def _clipped(x: Any, clip_norm: Any, axis: Any) -> Any:
    parameter = parameter_of(x)
    if axis is not None and parameter is not None and (holding := holding_of(parameter)) and holding.is_split:
        what = f"ClipByNorm(axis={axis!r}) of a gradient whose parameter is split as {holding.layout}"
        raise ShardwiseError(what, fix="axis=None, or ops.clip_by_global_norm")
    norm = split_norm([x]) if axis is None else None
    if norm is None:
        norm = torch.linalg.vector_norm(x, dim=axis, keepdim=True)
    return as_gradient(x * clip_norm / torch.maximum(norm, torch.as_tensor(clip_norm, dtype=x.dtype)), parameter)


def _focal(logits: Any, labels: Any, weight: Any, gamma: float, reduction: str) -> Any:
    """Return (1 - p)^gamma times the cross entropy (Lin et al. 2017, equation 5), over classes in dim 1."""
    classes = labels.long() if labels.dim() < logits.dim() else labels.squeeze(1).long()
    logarithm = logits.log_softmax(1).gather(1, classes.unsqueeze(1)).squeeze(1)
    loss = -((1 - logarithm.exp()) ** gamma) * logarithm
    return reduced(loss if weight is None else loss * as_torch(weight)[classes], reduction)


def _dice(logits: Any, label: Any, smooth: float) -> Any:
    both, squares = (logits * label).sum(), logits.square().sum() + label.square().sum()
    return 1 - 2 * both / (squares + smooth)


def _weighted(x: torch.Tensor, size: int, sigma: float) -> torch.Tensor:
    """Return Gaussian-weighted means of windows."""
    distances = torch.arange(size, dtype=x.dtype) - (size - 1) / 2
    bell = torch.softmax(-distances.square() / (2 * sigma**2), 0)
    kernel = torch.outer(bell, bell).expand(x.shape[1], 1, size, size)
    return F.conv2d(x, kernel.to(x), groups=x.shape[1])


def _similar(
    img1: torch.Tensor, img2: torch.Tensor, max_val: float = 1.0, filter_size: int = 11, filter_sigma: float = 1.5,
    k1: float = 0.01, k2: float = 0.03,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Return the similarity per channel [n, c], and its part without means (Wang et al. 2004, equation 13)."""
    first, second, squares, product = (
        _weighted(x, filter_size, filter_sigma) for x in (img1, img2, img1.square() + img2.square(), img1 * img2)
    )
    c1, c2 = (k1 * max_val) ** 2, (k2 * max_val) ** 2
    of_means = (2 * first * second + c1) / (first.square() + second.square() + c1)
    rest = (2 * (product - first * second) + c2) / (squares - first.square() - second.square() + c2)
    return (of_means * rest).mean((2, 3)), rest.mean((2, 3))


def _at_scales(img1: torch.Tensor, img2: torch.Tensor, power_factors: Any, **settings: Any) -> torch.Tensor:
    """Return the similarity at several scales, each half the previous one (Wang et al. 2003, equation 7)."""
    parts = []
    for level, power in enumerate(power_factors):
        whole, rest = _similar(img1, img2, **settings)
        parts.append((whole if level + 1 == len(power_factors) else rest).relu() ** power)
        img1, img2 = F.avg_pool2d(img1, 2), F.avg_pool2d(img2, 2)
    return torch.stack(parts).prod(0).mean(1)


def _slopes(images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the differences between each pixel and the one below, and the one on the right; 0 at the ends."""
    return F.pad(images.diff(dim=2), (0, 0, 0, 1)), F.pad(images.diff(dim=3), (0, 1))


def _middle(image: torch.Tensor, central_fraction: float) -> torch.Tensor:
    begins = [int((size - size * central_fraction) / 2) for size in image.shape[-2:]]
    height, width = (size - 2 * begin for size, begin in zip(image.shape[-2:], begins, strict=True))
    return image[..., begins[0] : begins[0] + height, begins[1] : begins[1] + width]


# Cells and losses that compute a function of ``ops.functions`` (``ops.simple.of_functions``).
def _range(start: Any, limit: Any, delta: Any) -> torch.Tensor:
    """Return numbers from 0, or ``start``, up to ``limit``: int32, or float32 if one of them is a float."""
    first, end = (0, start) if limit is None else (start, limit)
    numbers = torch.arange(first, end, delta)
    return numbers.to(torch.float32 if numbers.is_floating_point() else torch.int32)


_CELLS_OF_FUNCTIONS = """
    CELU=celu alpha=1.0; GLU=glu axis=-1; HShrink=hardshrink lambd=0.5; HardShrink=hardshrink lambd=0.5;
    Hardtanh=hardtanh min_val=-1.0 max_val=1.0; LogSigmoid=logsigmoid; SeLU=selu; SoftShrink=soft_shrink lambd=0.5;
    Softmin=softmin axis=-1; Softplus=softplus; Softsign=softsign; Tanhshrink=tanhshrink; LRN=lrn depth_radius=5
    bias=1.0 alpha=1.0 beta=0.5 norm_region='ACROSS_CHANNELS'; AdaptiveAvgPool1d=adaptive_avg_pool1d output_size;
    AdaptiveAvgPool2d=adaptive_avg_pool2d output_size; AdaptiveAvgPool3d=adaptive_avg_pool3d output_size;
    AdaptiveMaxPool1d=adaptive_max_pool1d output_size; AdaptiveMaxPool2d=adaptive_max_pool2d output_size
    return_indices=False; AdaptiveMaxPool3d=adaptive_max_pool3d output_size return_indices=False; LPPool1d=lp_pool1d
    norm_type kernel_size stride=None ceil_mode=False; LPPool2d=lp_pool2d norm_type kernel_size stride=None
    ceil_mode=False; ChannelShuffle=channel_shuffle groups; PixelShuffle=pixel_shuffle upscale_factor;
    PixelUnshuffle=pixel_unshuffle downscale_factor; ReduceLogSumExp=logsumexp axis keep_dims=False;
    PairwiseDistance=pairwise_distance p=2.0 eps=1e-6 keepdim=False; LGamma=lgamma; DiGamma=digamma;
    MatInverse=inverse; MatDet=det; MatrixDiag=matrix_diag; MatrixDiagPart=matrix_diag_part;
    MatrixSetDiag=matrix_set_diag"""
_LOSSES_OF_FUNCTIONS = """
    CosineEmbeddingLoss=cosine_embedding_loss margin=0.0 reduction='mean'; GaussianNLLLoss=gaussian_nll_loss full=False
    eps=1e-6 reduction='mean'; HingeEmbeddingLoss=hinge_embedding_loss margin=1.0 reduction='mean';
    HuberLoss=huber_loss reduction='mean' delta=1.0; KLDivLoss=kl_div reduction='mean';
    MarginRankingLoss=margin_ranking_loss margin=0.0 reduction='mean';
    MultiLabelSoftMarginLoss=multilabel_soft_margin_loss weight=None reduction='mean'; PoissonNLLLoss=poisson_nll_loss
    log_input=True full=False eps=1e-8 reduction='mean'; SoftMarginLoss=soft_margin_loss reduction='mean'"""
CELLS: dict[str, Any] = {
    **of_functions(_CELLS_OF_FUNCTIONS),
    # -- image quality
    "CentralCrop": lambda image, *, central_fraction: _middle(image, central_fraction),
    "ImageGradients": lambda images: _slopes(images),
    "MSSSIM": lambda img1, img2, *, max_val=1.0, power_factors=(0.0448, 0.2856, 0.3001, 0.2363, 0.1333), filter_size=11,
    filter_sigma=1.5, k1=0.01, k2=0.03: _at_scales(
        img1, img2, power_factors, max_val=max_val, filter_size=filter_size, filter_sigma=filter_sigma, k1=k1, k2=k2),
    "PSNR": lambda img1, img2, *, max_val=1.0: 10 * torch.log10(max_val**2 / (img1 - img2).square().mean((1, 2, 3))),
    "SSIM": lambda img1, img2, *, max_val=1.0, filter_size=11, filter_sigma=1.5, k1=0.01, k2=0.03: _similar(
        img1, img2, max_val, filter_size, filter_sigma, k1, k2)[0].mean(1),
    # -- activations
    "Softmax2d": lambda x: torch.softmax(x, -3),
    "Threshold": lambda x, *, threshold, value: F.threshold(x, threshold, value),
    # -- pooling
    "AvgPool1d": lambda x, *, kernel_size=1, stride=1, pad_mode="valid", padding=0, ceil_mode=False,
    count_include_pad=True: pool(F.avg_pool1d, x, kernel_size, stride, pad_mode, padding, ceil_mode=ceil_mode,
                                 count_include_pad=count_include_pad),
    "MaxPool1d": lambda x, *, kernel_size=1, stride=1, pad_mode="valid", padding=0, dilation=1, return_indices=False,
    ceil_mode=False: pool(F.max_pool1d, x, kernel_size, stride, pad_mode, padding, dilation=dilation,
                          return_indices=return_indices, ceil_mode=ceil_mode),
    "AvgPool3d": lambda x, *, kernel_size=1, stride=1, pad_mode="valid", padding=0, ceil_mode=False,
    count_include_pad=True, divisor_override=None: pool(
        F.avg_pool3d, x, kernel_size, stride, pad_mode, padding, ceil_mode=ceil_mode,
        count_include_pad=count_include_pad, divisor_override=divisor_override),
    "MaxPool3d": lambda x, *, kernel_size=1, stride=1, pad_mode="valid", padding=0, dilation=1, return_indices=False,
    ceil_mode=False: pool(F.max_pool3d, x, kernel_size, stride, pad_mode, padding, dilation=dilation,
                          return_indices=return_indices, ceil_mode=ceil_mode),
    **{f"MaxUnpool{dims}d": _unpool(getattr(F, f"max_unpool{dims}d")) for dims in (1, 2, 3)},
    # -- shapes
    **{f"ConstantPad{dims}d": _constant_pad(dims) for dims in (1, 2, 3)},
    **{f"{name}Pad{dims}d": _pad(mode, dims) for dims in (1, 2, 3) for name, mode in (
        ("Reflection", "reflect"), ("Replication", "replicate"))},
    "Flatten": ("Flattening of the dims from ``start_dim`` to ``end_dim``.",
                lambda x, *, start_dim=1, end_dim=-1: x.flatten(start_dim, end_dim)),
    "Identity": ("The identity function.", lambda x: x),
    "Pad": lambda x, *, paddings, mode="CONSTANT": mirrored(x, paddings, mode),
    "ResizeBilinear": lambda x, size=None, scale_factor=None, align_corners=False, *, half_pixel_centers=False:
    _upsampled(x, size, scale_factor, align_corners, half_pixel_centers),
    "MatMul": lambda x1, x2, *, transpose_x1=False, transpose_x2=False: torch.matmul(
        x1.transpose(-1, -2) if transpose_x1 else x1, x2.transpose(-1, -2) if transpose_x2 else x2),
    "Range": lambda *, start, limit=None, delta=1: _range(start, limit, delta),
    "Roll": lambda x, *, shift_size, shift_axis: torch.roll(x, shift_size, shift_axis),
    "Unflatten": lambda x, *, axis, unflattened_size: torch.unflatten(x, axis, tuple(unflattened_size)),
    "Upsample": lambda x, *, size=None, scale_factor=None, mode="nearest", align_corners=None,
    recompute_scale_factor=None: interpolate(x, size, scale_factor, mode, align_corners, recompute_scale_factor),
    "ZeroPad2d": lambda x, *, padding: _padded(x, padding, "constant", 0.0, 2),
    # -- others
    "ClipByNorm": lambda x, clip_norm, *, axis=None: _clipped(x, clip_norm, axis),
    "L1Regularizer": lambda weights, *, scale: scale * weights.abs().sum(),
    "Moments": lambda x, *, axis=None, keep_dims=False: tuple(reversed(torch.var_mean(
        x, axis, correction=0, keepdim=bool(keep_dims)))),
    "Norm": lambda x, *, axis=(), keep_dims=False: torch.linalg.vector_norm(
        x, dim=axis if axis != () else None, keepdim=keep_dims),
    "OneHot": lambda indices, *, axis=-1, depth=1, on_value=1.0, off_value=0.0, dtype=torch.float32: FUNCTIONS[
        "one_hot"](indices, depth, on_value, off_value, axis).to(dtype_of(dtype)),
    "Tril": lambda x, k=0: torch.tril(x, k), "Triu": lambda x, k=0: torch.triu(x, k),
    # -- random
    "Dropout1d": lambda x, *, p=0.5, training=False: F.dropout1d(x, p, training),
    "Dropout2d": lambda x, *, p=0.5, training=False: F.dropout2d(x, p, training),
    "Dropout3d": lambda x, *, p=0.5, training=False: F.dropout3d(x, p, training),
    "RReLU": lambda x, *, lower=1 / 8, upper=1 / 3, training=False: F.rrelu(x, lower, upper, training),
}  # fmt: skip
LOSSES: dict[str, Function] = {
    **of_functions(_LOSSES_OF_FUNCTIONS),
    "CTCLoss": lambda log_probs, targets, input_lengths, target_lengths, *, blank=0, reduction="mean",
    zero_infinity=False: F.ctc_loss(log_probs, targets, input_lengths, target_lengths, blank, reduction, zero_infinity),
    "DiceLoss": lambda logits, labels, *, smooth=1e-5: _dice(logits, labels, smooth),
    "FocalLoss": lambda logits, labels, *, weight=None, gamma=2.0, reduction="mean": _focal(
        logits, labels, weight, gamma, reduction),
    "MultilabelMarginLoss": lambda x, target, *, reduction="mean": F.multilabel_margin_loss(
        x, target.long(), reduction=reduction),
    "MultiMarginLoss": lambda x, target, *, p=1, margin=1.0, reduction="mean", weight=None: F.multi_margin_loss(
        x, target.long(), p, margin, weight, reduction=reduction),
    "RMSELoss": lambda logits, labels: (logits - labels).square().mean().sqrt(),
    "TripletMarginLoss": lambda x, positive, negative, own_margin=None, *, p=2, swap=False, eps=1e-6, reduction="mean",
    margin=1.0: F.triplet_margin_loss(
        x, positive, negative, float(margin if own_margin is None else own_margin), p, eps, swap, reduction=reduction),
}  # fmt: skip


CLASSES = {
    **classes_of(CELLS, Simple, __name__), **classes_of(LOSSES, LossOfFunction, __name__),
    **classes_of({"KLDivLoss": LOSSES["KLDivLoss"]}, LossOfFunction, __name__, reductions=(*REDUCTIONS, "batchmean")),
}  # fmt: skip
globals().update(CLASSES)

__all__ = list(CLASSES)
