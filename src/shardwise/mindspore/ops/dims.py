"""Operators over dims: reductions, scans, sorting, norms, dropout, cross entropies with their gradients; and those that
rearrange, repeat, join, cut or create tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn import functional as F

from shardwise.errors import problem
from shardwise.mindspore import strict
from shardwise.mindspore.checks import channels_first, fraction, one_of
from shardwise.mindspore.named import classes_of
from shardwise.mindspore.ops.of_torch import of_functions, sizes_of
from shardwise.mindspore.ops.primitive import OfSettings, Primitive, Simple, Whole, along
from shardwise.mindspore.strict import Faults, Shapes, Strategy
from shardwise.mindspore.tensor_methods import dims_of, narrowed, product

Axes = int | Sequence[int]


def _over_dims(function: Any) -> Callable[..., Any]:
    return lambda x, axis=(), *, keep_dims=False: function(x, dims_of(x, axis), keep_dims)


REDUCTIONS = classes_of({
    f"Reduce{name}": (
        "``ReduceSum(keep_dims)(x, axis)`` over any dims, by default all. Split dims are reduced over the devices.",
        _over_dims(function),
        {"sums": function in (torch.sum, torch.mean), "lead": 0 if function is product else None})
    for name, function in (
        ("Sum", torch.sum), ("Mean", torch.mean), ("Max", torch.amax), ("Min", torch.amin), ("All", torch.all),
        ("Any", torch.any), ("Prod", product))
}, Simple, __name__)  # fmt: skip


def _summed(x: Any, axis: int, *, exclusive: bool = False, reverse: bool = False) -> Any:
    y = (x.flip(axis) if reverse else x).cumsum(axis)
    y = y.flip(axis) if reverse else y
    return y - x if exclusive else y


def _multiplied(x: Any, axis: int, *, exclusive: bool = False, reverse: bool = False) -> Any:
    y = x.flip(axis) if reverse else x
    if exclusive:
        y = torch.cat((torch.ones_like(y.narrow(axis, 0, 1)), y.narrow(axis, 0, y.shape[axis] - 1)), axis)
    y = y.cumprod(axis)
    return y.flip(axis) if reverse else y


def layer_norm(
    x: Any, gamma: Any, beta: Any, *, begin_norm_axis: int = 1, begin_params_axis: int = 1, epsilon: float = 1e-7
) -> tuple[Any, Any, Any]:
    """Normalise the dims from ``begin_norm_axis`` on. Return also mean and variance."""
    begin = begin_norm_axis % x.dim()
    variance, mean = torch.var_mean(x, tuple(range(begin, x.dim())), correction=0, keepdim=True)
    if begin_params_axis % x.dim() == begin:
        return F.layer_norm(x, x.shape[begin:], gamma, beta, epsilon), mean, variance
    return F.layer_norm(x, x.shape[begin:], eps=epsilon) * gamma + beta, mean, variance


def _batch_norm(
    x: Any, scale: Any, bias: Any, mean: Any, variance: Any, *, is_training: bool = False, epsilon: float = 1e-5,
    momentum: float = 0.1, data_format: str = "NCHW",
) -> tuple[Any, ...]:  # fmt: skip
    mean, variance = mean.detach(), variance.detach()
    y = F.batch_norm(x, mean, variance, scale, bias, is_training, momentum, epsilon)
    if is_training:
        dims = [dim for dim in range(x.dim()) if dim != 1]
        variance, mean = torch.var_mean(x.detach(), dims, correction=0)
    return y, mean, variance, mean, variance


def _dropped(x: Any, *, keep_prob: float = 0.5, Seed0: int = 0, Seed1: int = 0) -> tuple[Any, Any]:
    scale = F.dropout(torch.ones_like(x), 1 - keep_prob, training=True)
    return x * scale, (scale != 0).to(x.dtype)


def _cross_entropy(logits: Any, labels: Any) -> tuple[Any, Any]:
    logarithms = logits.log_softmax(-1)
    return -(labels * logarithms).sum(-1), (logarithms.exp() - labels).detach()


def _sparse_cross_entropy(logits: Any, labels: Any, *, is_grad: bool = False) -> Any:
    if is_grad:
        hot = F.one_hot(labels.long(), logits.shape[-1]).to(logits.dtype)
        return (logits.softmax(-1) - hot) / logits.shape[0]
    return F.cross_entropy(logits, labels.long())


def _normalised(self: Any, shapes: Shapes, args: tuple[Any, ...]) -> Whole:
    return {0: (sizes_of(self.axis), "over which it is normalised")}


def _from_begin(self: Any, shapes: Shapes, args: tuple[Any, ...]) -> Whole:
    begin = strict.dim_of(self.title, self.begin_norm_axis, len(shapes[0]))
    return {0: (range(begin, len(shapes[0])), "over which it is normalised")}


def _last(why: str) -> Callable[..., Whole]:
    return lambda self, shapes, args: {0: ((-1,), why)}


# Along one dim one operator of torch, along several dims several.
_SOFTMAX = {"lead": property(lambda self: 0 if len(sizes_of(self.axis)) > 1 else None), "whole": _normalised}
CLASSES = classes_of({
    # -- reductions; the first four return the index of the largest or smallest element of a dim
    "ArgMaxWithValue": lambda x, *, axis=0, keep_dims=False: torch.max(x, axis, keep_dims)[::-1],
    "ArgMinWithValue": lambda x, *, axis=0, keep_dims=False: torch.min(x, axis, keep_dims)[::-1],
    "Argmax": lambda x, *, axis=-1, output_type=torch.int32: x.argmax(axis).to(output_type),
    "Argmin": lambda x, *, axis=-1, output_type=torch.int32: x.argmin(axis).to(output_type),
    "Sort": (None, lambda x, *, axis=-1, descending=False: narrowed(x.sort(axis, descending=descending)), {
        "whole": along("which it sorts")}),
    "TopK": (None, lambda x, k, *, sorted=True: narrowed(x.topk(k, -1, sorted=sorted)), {
        "whole": _last("of which it finds the largest elements")}),
    # -- losses
    "BinaryCrossEntropy": (None, lambda logits, labels, weight=None, *, reduction="mean": F.binary_cross_entropy(
        logits, labels, weight, reduction=reduction), {
            "sums": True, "checks": {"reduction": one_of("mean", "sum", "none")}}),
    "SigmoidCrossEntropyWithLogits": lambda logits, label: F.binary_cross_entropy_with_logits(
        logits, label, reduction="none"),
}, Simple, __name__, lead=None) | classes_of({
    # -- scans
    "CumProd": (None, _multiplied, {"whole": along("along which it accumulates", 1)}),
    "CumSum": (None, _summed, {"whole": along("along which it accumulates", 1)}),
    # -- norms
    "BatchNorm": (None, _batch_norm, {
        "dims": "n c b..., c, c, c, c",
        "checks": {"data_format": lambda _, value: channels_first("BatchNorm", value, "; transpose first")}}),
    "Dropout": (None, _dropped, {"checks": {"keep_prob": fraction}}),
    "L2Normalize": (None, lambda x, *, axis=0, epsilon=1e-4: (
        x * x.square().sum(axis, keepdim=True).clamp(min=epsilon).rsqrt()), {"whole": _normalised}),
    "LayerNorm": (None, layer_norm, {"whole": _from_begin}),
    "LogSoftmax": (None, lambda x, *, axis=-1: torch.log_softmax(x, sizes_of(axis)[0]), _SOFTMAX),
    "Softmax": (None, lambda x, *, axis=-1: torch.softmax(x, sizes_of(axis)[0]) if len(sizes_of(axis)) == 1
                else torch.exp(x - x.logsumexp(axis, keepdim=True)), _SOFTMAX),
    # -- losses
    "L2Loss": (None, lambda x: x.square().sum() / 2, {"sums": True}),
    "SoftmaxCrossEntropyWithLogits": (None, _cross_entropy, {
        "whole": _last("the classes"), "same": "the strategies of logits and labels must be equal"}),
    "SparseSoftmaxCrossEntropyWithLogits": (None, _sparse_cross_entropy, {
        "whole": _last("the classes"), "dims": "b... classes, b...", "sums": True}),
}, Simple, __name__)  # fmt: skip


# -- shapes ------------------------------------------------------------------------------------------------------------


def _squeezed(x: Any, axis: Any) -> Any:
    axes = sizes_of(axis) or tuple(d for d, size in enumerate(x.shape) if size == 1)
    for dim in axes:
        if x.shape[dim] != 1:
            raise ValueError(problem(f"Squeeze of dim {dim}, which has size {x.shape[dim]}", fix="a dim of size 1"))
    return x.squeeze(axes)


class Split(OfSettings, axis=0, output_num=1):
    """The parts of a dim in ``output_num`` equal sizes, as a tuple."""

    whole = along("which is cut into parts")

    def compute(self, x: Any) -> Any:
        size, count = x.shape[self.axis], self.output_num
        if size % count:
            what = f"{self.title}: dim {self.axis} of size {size} in {count} parts: {size} % {count} = {size % count}"
            raise ValueError(problem(what, fix="a number that divides it"))
        return x.split(size // count, self.axis)


class _Cut(Primitive):
    """A part of a tensor, by slices. A dim that is split must be taken whole."""

    lead = 0

    def slices(self, shape: Sequence[int], *args: Any) -> tuple[Any, ...]:
        raise NotImplementedError

    def compute(self, x: Any, *args: Any) -> Any:
        return x[self.slices(x.shape, *args)]

    def faults(self, strategy: Strategy, shapes: Shapes, args: tuple[Any, ...]) -> Faults:
        (counts,), (shape,) = strategy, shapes
        taken = self.slices(shape, *args[1:])
        plain = [cut for cut in taken if cut is not None and cut is not Ellipsis]
        if len(plain) < len(taken):  # new dims and ellipses shift positions
            yield from strict.whole(counts, range(len(shape)), "and a mask is not 0")
        for dim, cut in enumerate(plain):
            if not isinstance(cut, slice) or cut.indices(shape[dim]) != (0, shape[dim], 1):
                text = f"{cut.start}:{cut.stop}:{cut.step}" if isinstance(cut, slice) else cut
                yield from strict.whole(counts, (dim,), f"of which {text} is taken (a split dim must be taken whole)")


class StridedSlice(OfSettings, _Cut, begin_mask=0, end_mask=0, ellipsis_mask=0, new_axis_mask=0, shrink_axis_mask=0):
    """``StridedSlice()(x, begin, end, strides)``. Bit i of a mask applies to entry i: ``begin_mask`` and ``end_mask``
    ignore it, ``ellipsis_mask`` makes it "...", ``new_axis_mask`` a new dim, ``shrink_axis_mask`` an index."""

    def slices(self, shape: Sequence[int], *args: Any) -> tuple[Any, ...]:
        begin, end, strides = args
        cuts: list[Any] = []
        for i, (start, stop, step) in enumerate(zip(begin, end, strides, strict=True)):
            on = {name for name, mask in self.attrs.items() if name.endswith("_mask") and mask >> i & 1}
            if "ellipsis_mask" in on:
                cuts.append(Ellipsis)
            elif "new_axis_mask" in on:
                cuts.append(None)
            elif "shrink_axis_mask" in on:
                cuts.append(start)
            else:
                cuts.append(slice(None if "begin_mask" in on else start, None if "end_mask" in on else stop, step))
        return tuple(cuts)


class Slice(_Cut):
    """A slice: ``Slice()(x, begin, size)``; a size of -1 takes the rest."""

    def slices(self, shape: Sequence[int], *args: Any) -> tuple[Any, ...]:
        begin, size = args
        return tuple(
            slice(start, None if length == -1 else start + length) for start, length in zip(begin, size, strict=True)
        )


# The operators of the last table take no strategy: their layout follows from their neighbours', or every device makes
# its part of a new tensor.
SHAPES = {
    **classes_of({
        **of_functions("ExpandDims=expand_dims; Tile; Transpose"),
        "BroadcastTo": (None, lambda x, *, shape: x.expand(shape), {
            "checks": {"shape": lambda _, shape: tuple(shape)}}),
        "Concat": (None, lambda tensors, *, axis=0: torch.cat(tuple(tensors), axis), {
            "whole": lambda self, shapes, args: dict.fromkeys(
                range(len(shapes)), ((self.axis,), "along which the inputs are joined"))}),
        "Squeeze": lambda x, *, axis=(): _squeezed(x, axis),
        **dict.fromkeys(("Pack", "Stack"), lambda tensors, *, axis=0: torch.stack(tuple(tensors), axis)),
        "Unstack": (None, lambda x, *, axis=0, num=None: x.unbind(axis), {"whole": along("which is cut into parts")}),
    }, Simple, __name__, lead=None),
    **classes_of({
        **of_functions("Eye; Fill; Ones; Range; Reshape; Shape; Zeros"),
        "Depend": lambda value, expr: value,  # code runs in order anyway
        "Flatten": lambda x: x.reshape(x.shape[0], -1),
    }, Simple, __name__, lead=None, splittable=False),
}  # fmt: skip
globals().update(CLASSES | REDUCTIONS | SHAPES)

__all__ = ["Slice", "Split", "StridedSlice", *CLASSES, *REDUCTIONS, *SHAPES]
