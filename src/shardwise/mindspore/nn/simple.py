"""Cells and losses that are one function of torch, each a line of a table. Positional arguments are those of
``construct``, keyword-only arguments those of the constructor (``named.settings_of``). Activations hold a primitive."""

from __future__ import annotations

import math
from inspect import Signature, signature
from typing import Any

import torch
from torch.nn import functional as F

from shardwise.errors import ShardwiseError, problem
from shardwise.mindspore.checks import closest, within
from shardwise.mindspore.common.initializer import initializer
from shardwise.mindspore.holding import as_gradient, holding_of, parameter_of
from shardwise.mindspore.named import TABLES, Function, WithSettings, classes_of, constructor, parameters_of
from shardwise.mindspore.nn.cell import Cell
from shardwise.mindspore.ops import arithmetic, dims, indexing
from shardwise.mindspore.ops.composite import split_norm
from shardwise.mindspore.ops.functions import FUNCTIONS
from shardwise.mindspore.ops.images import bilinear, mirrored, pool, same_padding
from shardwise.mindspore.ops.of_torch import of_functions
from shardwise.mindspore.ops.primitive import Inner
from shardwise.mindspore.ops.simple import PRIMITIVES
from shardwise.mindspore.tensor import Parameter, as_torch
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


def _pool(row: str) -> Function:
    """Return the table entry of a pooling: a function of torch, and the settings of the cell."""
    name, *words = row.split()

    def pooled(x: Any, *, kernel_size: Any, stride: Any, pad_mode: str, padding: Any, **settings: Any) -> Any:
        return pool(getattr(F, name), x, kernel_size, stride, pad_mode, padding, **settings)

    vars(pooled)["__signature__"] = Signature(parameters_of(["x", "*", *words]))
    return pooled


def _upsampled(
    x: Any, size: Any = None, scale_factor: Any = None, align_corners: bool = False, *, half_pixel_centers: bool = False
) -> Any:
    if (size is None) == (scale_factor is None):
        raise ValueError(problem(f"ResizeBilinear({size=}, {scale_factor=})", fix="one of the two"))
    if size is None:
        size = [int(n * scale_factor) for n in x.shape[2:]]
    return bilinear(x, (size,) * 2 if isinstance(size, int) else size, align_corners, half_pixel_centers)


def _clipped(x: Any, clip_norm: Any, *, axis: Any = None) -> Any:
    parameter = parameter_of(x)
    if axis is not None and parameter is not None and (holding := holding_of(parameter)) and holding.is_split:
        what = f"ClipByNorm(axis={axis!r}) of a gradient whose parameter is split as {holding.layout}"
        raise ShardwiseError(what, fix="axis=None, or ops.clip_by_global_norm")
    norm = split_norm([x]) if axis is None else None
    if norm is None:
        norm = torch.linalg.vector_norm(x, dim=axis, keepdim=True)
    return as_gradient(x * clip_norm / torch.maximum(norm, torch.as_tensor(clip_norm, dtype=x.dtype)), parameter)


def _weighted(x: torch.Tensor, size: int, sigma: float) -> torch.Tensor:
    """Return Gaussian-weighted means of windows."""
    distances = torch.arange(size, dtype=x.dtype) - (size - 1) / 2
    bell = torch.softmax(-distances.square() / (2 * sigma**2), 0)
    kernel = torch.outer(bell, bell).expand(x.shape[1], 1, size, size)
    return F.conv2d(x, kernel.to(x), groups=x.shape[1])


def _similar(
    img1: torch.Tensor, img2: torch.Tensor, *, max_val: float = 1.0, filter_size: int = 11, filter_sigma: float = 1.5,
    k1: float = 0.01, k2: float = 0.03,
) -> torch.Tensor:  # fmt: skip
    """Return the similarity [n] (Wang et al. 2004, equation 13)."""
    first, second, squares, product = (
        _weighted(x, filter_size, filter_sigma) for x in (img1, img2, img1.square() + img2.square(), img1 * img2)
    )
    c1, c2 = (k1 * max_val) ** 2, (k2 * max_val) ** 2
    of_means = (2 * first * second + c1) / (first.square() + second.square() + c1)
    rest = (2 * (product - first * second) + c2) / (squares - first.square() - second.square() + c2)
    return (of_means * rest).mean((2, 3)).mean(1)


def _windows(x: torch.Tensor, *, ksizes: Any, strides: Any, rates: Any, padding: str = "valid") -> Any:
    """Return the windows of images (N, C, H, W) as (N, rows * columns * C, H', W'), channels last within a window."""
    (_, *kernel, _), (_, *stride, _), (_, *rate, _) = ksizes, strides, rates
    if padding.lower() == "same":
        spans = [(k - 1) * r + 1 for k, r in zip(kernel, rate, strict=True)]
        sides = list(map(same_padding, x.shape[2:], spans, stride))
        x = F.pad(x, (*sides[1], *sides[0]))
    out = [(n - (k - 1) * r - 1) // s + 1 for n, k, r, s in zip(x.shape[2:], kernel, rate, stride, strict=True)]
    windows = F.unfold(x, kernel, rate, 0, stride).unflatten(1, (x.shape[1], -1))
    return windows.transpose(1, 2).reshape(len(x), -1, *out)


def _range(*, start: Any, limit: Any = None, delta: Any = 1) -> torch.Tensor:
    """Return numbers from 0, or ``start``, up to ``limit``: int32, or float32 if one of them is a float."""
    first, end = (0, start) if limit is None else (start, limit)
    numbers = torch.arange(first, end, delta)
    return numbers.to(torch.float32 if numbers.is_floating_point() else torch.int32)


CELLS: dict[str, Any] = {
    **of_functions(TABLES["nn"]["cells"]),
    # -- image quality
    "ImageGradients": lambda images: (  # between a pixel and the one below, and the one on the right
        F.pad(images.diff(dim=2), (0, 0, 0, 1)), F.pad(images.diff(dim=3), (0, 1))),
    "PSNR": lambda img1, img2, *, max_val=1.0: 10 * torch.log10(max_val**2 / (img1 - img2).square().mean((1, 2, 3))),
    "SSIM": _similar,
    # -- activations
    "Softmax2d": lambda x: torch.softmax(x, -3),
    "Threshold": lambda x, *, threshold, value: F.threshold(x, threshold, value),
    # -- pooling
    "Unfold": _windows,
    **{name: _pool(row) for name, _, row in (row.strip().partition("=") for row in TABLES["nn"]["pooling"].split(";"))},
    **{f"MaxUnpool{dims}d": _unpool(getattr(F, f"max_unpool{dims}d")) for dims in (1, 2, 3)},
    # -- shapes
    **{f"ConstantPad{dims}d": _constant_pad(dims) for dims in (1, 2, 3)},
    **{f"{name}Pad{dims}d": _pad(mode, dims) for dims in (1, 2, 3) for name, mode in (
        ("Reflection", "reflect"), ("Replication", "replicate"))},
    "Flatten": lambda x, *, start_dim=1, end_dim=-1: x.flatten(start_dim, end_dim),
    "Identity": lambda x: x,
    "Pad": lambda x, *, paddings, mode="CONSTANT": mirrored(x, paddings, mode),
    "ResizeBilinear": _upsampled,
    "MatMul": lambda x1, x2, *, transpose_x1=False, transpose_x2=False: torch.matmul(
        x1.transpose(-1, -2) if transpose_x1 else x1, x2.transpose(-1, -2) if transpose_x2 else x2),
    "Range": _range,
    "Roll": lambda x, *, shift_size, shift_axis: torch.roll(x, shift_size, shift_axis),
    "Unflatten": lambda x, *, axis, unflattened_size: torch.unflatten(x, axis, tuple(unflattened_size)),
    "ZeroPad2d": lambda x, *, padding: _padded(x, padding, "constant", 0.0, 2),
    # -- others
    "ClipByNorm": _clipped,
    "Moments": lambda x, *, axis=None, keep_dims=False: tuple(reversed(torch.var_mean(
        x, axis, correction=0, keepdim=bool(keep_dims)))),
    "Norm": lambda x, *, axis=(), keep_dims=False: torch.linalg.vector_norm(
        x, dim=axis if axis != () else None, keepdim=keep_dims),
    "OneHot": lambda indices, *, axis=-1, depth=1, on_value=1.0, off_value=0.0, dtype=torch.float32: FUNCTIONS[
        "one_hot"](indices, depth, on_value, off_value, axis).to(dtype_of(dtype)),
    "Tril": lambda x, k=0: torch.tril(x, k), "Triu": lambda x, k=0: torch.triu(x, k),
    # -- random
    "RReLU": lambda x, *, lower=1 / 8, upper=1 / 3, training=False: F.rrelu(x, lower, upper, training),
}  # fmt: skip


class _Activation(Cell):
    """A cell that holds its operator under ``attribute``, where it may be given a strategy."""

    operator: type[Any]
    attribute: str

    def __init__(self, *settings: Any, **named: Any) -> None:
        super().__init__()
        setattr(self, self.attribute, self.operator(*settings, **named))

    def construct(self, x: Any) -> Any:
        return getattr(self, self.attribute)(x)


_OPERATORS = {**PRIMITIVES, **arithmetic.CLASSES, **dims.CLASSES}
ACTIVATIONS: dict[str, type[Cell]] = {
    name: type(name, (_Activation,), {
        "operator": (operator := _OPERATORS[of]), "attribute": attribute, "__module__": __name__,
        "__doc__": operator.__doc__, "__init__": constructor(_Activation.__init__, signature(operator))})
    for name, of, attribute in (row.split() for row in TABLES["nn"]["activations"].split(";"))
}  # fmt: skip


class GELU(Cell):
    """Gaussian error linear units, exact or with the tanh approximation (``approximate``)."""

    def __init__(self, approximate: bool = True) -> None:
        super().__init__()
        self.approximate = "tanh" if approximate else "none"
        self.gelu = Inner()

    def construct(self, x: Any) -> Any:
        return self.gelu(lambda x: F.gelu(x, approximate=self.approximate), x)


class PReLU(Cell):
    """x above 0, else w * x, with a learned w for all channels or per channel."""

    def __init__(self, channel: int = 1, w: Any = 0.25) -> None:
        super().__init__()
        self.w = Parameter(initializer(w, [channel]), "a")
        self.prelu = Inner("n c b..., c")

    def construct(self, x: Any) -> Any:
        return self.prelu(F.prelu, x, self.w)


CLASSES = classes_of(CELLS, Simple, __name__) | ACTIVATIONS
globals().update(CLASSES)
BY_NAME: dict[str, type[Cell]] = {name.lower(): kind for name, kind in ACTIVATIONS.items()} | {
    "gelu": GELU, "prelu": PReLU, **{name.lower(): CLASSES[name] for name in ("CELU", "LogSigmoid", "SeLU")}
}  # fmt: skip


def get_activation(name: str) -> Cell:
    """Return the activation of that name. Raises ValueError if there is none."""
    if name not in BY_NAME:
        raise ValueError(problem(f'there is no activation "{name}"', fix=closest(name, BY_NAME)))
    return BY_NAME[name]()


# -- losses ------------------------------------------------------------------------------------------------------------

REDUCTIONS = ("mean", "sum", "none")
WEIGHTS = ("weight", "pos_weight")  # settings that are stored as buffers


def reduced(x: torch.Tensor, reduction: str) -> torch.Tensor:
    return x.mean() if reduction == "mean" else x.sum() if reduction == "sum" else x


class LossBase(Cell):
    """Base of losses. ``get_loss`` applies weights and the reduction. Subclasses find common operators under the
    reference's names."""

    is_loss = True
    reductions = REDUCTIONS
    reduce_mean, reduce_sum = dims.REDUCTIONS["ReduceMean"](), dims.REDUCTIONS["ReduceSum"]()
    mul, cast = arithmetic.CLASSES["Mul"](), arithmetic.CLASSES["Cast"]()

    def __init__(self, reduction: str | None = "mean") -> None:
        super().__init__()
        reduction = reduction or "none"
        if reduction not in self.reductions:
            raise ValueError(problem(f"reduction is {reduction!r}", fix=f"one of {', '.join(self.reductions)}"))
        self.reduction, self.average, self.reduce = reduction, reduction != "sum", reduction != "none"

    def get_axis(self, x: torch.Tensor) -> tuple[int, ...]:
        """Return all dims of a tensor."""
        return tuple(range(x.dim()))

    def get_loss(self, x: torch.Tensor, weights: Any = 1.0) -> torch.Tensor:
        return reduced(x * weights, self.reduction)


_Loss = LossBase  # older programs import this name


class LossOfFunction(Simple, LossBase):
    """The loss ``function(*inputs, **settings)``. Weights are buffers."""

    def _take(self, values: dict[str, Any]) -> None:
        LossBase.__init__(self, values.get("reduction", "mean"))
        for name, value in values.items():
            if name in WEIGHTS or isinstance(value, torch.Tensor):
                self.register_buffer(name, None if value is None else as_torch(value))
            elif name != "reduction":
                setattr(self, name, value)


class SoftmaxCrossEntropyWithLogits(LossBase):
    """Cross entropy of the softmax over the last dim. ``sparse``: labels are class indices, else probabilities in the
    logits' shape. By default one loss per row (``reduction="none"``), as in the reference."""

    def __init__(self, sparse: bool = False, reduction: str = "none") -> None:
        super().__init__(reduction)
        self.sparse = sparse
        self.softmax_cross_entropy, self.one_hot = dims.CLASSES["SoftmaxCrossEntropyWithLogits"](), indexing.OneHot()

    def construct(self, logits: Any, labels: Any) -> Any:
        if self.sparse and not (self.softmax_cross_entropy.in_strategy or self.one_hot.in_strategy):
            return F.cross_entropy(logits, labels.long(), reduction=self.reduction)
        if self.sparse:
            labels = self.one_hot(labels, logits.shape[-1], 1.0, 0.0)
        return self.get_loss(self.softmax_cross_entropy(logits, labels.to(logits.dtype))[0])


def _focal(logits: Any, labels: Any, *, weight: Any = None, gamma: float = 2.0, reduction: str = "mean") -> Any:
    """Return (1 - p)^gamma times the cross entropy (Lin et al. 2017, equation 5), over classes in dim 1."""
    classes = labels.long() if labels.dim() < logits.dim() else labels.squeeze(1).long()
    logarithm = logits.log_softmax(1).gather(1, classes.unsqueeze(1)).squeeze(1)
    loss = -((1 - logarithm.exp()) ** gamma) * logarithm
    return reduced(loss if weight is None else loss * as_torch(weight)[classes], reduction)


# Labels are class indices over dim 1 (cross entropy also takes probabilities), or probabilities in binary ones.
LOSSES = classes_of({
    **of_functions(TABLES["nn"]["losses"]),
    **dict.fromkeys(("L1Loss", "MAELoss"), lambda logits, labels, *, reduction="mean": reduced(
        (logits - labels).abs(), reduction)),
    "MSELoss": lambda logits, labels, *, reduction="mean": reduced((logits - labels).square(), reduction),
    "SmoothL1Loss": (None, lambda logits, labels, *, beta=1.0, reduction="none": F.smooth_l1_loss(
        logits, labels, beta=beta, reduction=reduction), {"checks": {"beta": within(0, math.inf, "a number above 0")}}),
    "CTCLoss": lambda log_probs, targets, input_lengths, target_lengths, *, blank=0, reduction="mean",
    zero_infinity=False: F.ctc_loss(log_probs, targets, input_lengths, target_lengths, blank, reduction, zero_infinity),
    "DiceLoss": lambda logits, labels, *, smooth=1e-5: 1 - 2 * (logits * labels).sum() / (
        logits.square().sum() + labels.square().sum() + smooth),
    "FocalLoss": _focal,
    "MultilabelMarginLoss": lambda x, target, *, reduction="mean": F.multilabel_margin_loss(
        x, target.long(), reduction=reduction),
    "MultiMarginLoss": lambda x, target, *, p=1, margin=1.0, reduction="mean", weight=None: F.multi_margin_loss(
        x, target.long(), p, margin, weight, reduction=reduction),
    "RMSELoss": lambda logits, labels: (logits - labels).square().mean().sqrt(),
    "TripletMarginLoss": lambda x, positive, negative, own_margin=None, *, p=2, swap=False, eps=1e-6, reduction="mean",
    margin=1.0: F.triplet_margin_loss(
        x, positive, negative, float(margin if own_margin is None else own_margin), p, eps, swap, reduction=reduction),
}, LossOfFunction, __name__)  # fmt: skip
LOSSES["KLDivLoss"].reductions = (*REDUCTIONS, "batchmean")
globals().update(LOSSES)

__all__ = [*CLASSES, *LOSSES, "GELU", "LossBase", "PReLU", "SoftmaxCrossEntropyWithLogits", "get_activation"]
