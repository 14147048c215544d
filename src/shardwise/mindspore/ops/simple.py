"""Primitives that are one function of torch or of ``ops.functions``, each a line of a table.

Positional arguments are those of the call, keyword-only arguments those of the constructor (``named.settings_of``).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch.nn import functional as F

from shardwise.errors import CaptureError, problem
from shardwise.mindspore.checks import note
from shardwise.mindspore.loss_scale import clear_status, init_status, read_status
from shardwise.mindspore.named import TABLES, Function, classes_of
from shardwise.mindspore.ops.functions import FUNCTIONS
from shardwise.mindspore.ops.images import bilinear, mirrored, nearest, pool, transposed
from shardwise.mindspore.ops.networks import attention, classes_loss, suppressed
from shardwise.mindspore.ops.of_torch import of_functions
from shardwise.mindspore.ops.primitive import Primitive, Simple
from shardwise.mindspore.tensor import Tensor
from shardwise.mindspore.tensor_methods import dims_of, dtype_of


def _momentum(
    variable: Any, sums: Any, rate: Any, gradient: Any, momentum: Any, *, use_nesterov: bool = False,
    use_locking: bool = False, gradient_scale: float = 1.0,
) -> Any:  # fmt: skip
    gradient = gradient / gradient_scale
    with torch.no_grad():
        sums.copy_(sums * momentum + gradient)
        variable.sub_((gradient + momentum * sums if use_nesterov else sums) * rate)
    return variable


def _adam(
    variable: Any, m: Any, v: Any, rate: Any, betas: tuple[Any, Any], epsilon: Any, gradient: Any, decay: Any = 0.0,
    nesterov: bool = False,
) -> Any:  # fmt: skip
    """Update the moments and the variable in place, by the given rate. ``decay``: of the weight, beside the moments."""
    with torch.no_grad():
        m.lerp_(gradient, 1 - betas[0])
        v.lerp_(gradient * gradient, 1 - betas[1])
        towards = m.lerp(gradient, 1 - betas[0]) if nesterov else m
        variable.sub_(rate * (towards / (v.sqrt() + epsilon) + decay * variable))
    return variable, m, v


def _lstm(
    x: Any, w: Any, b: Any, seq_length: Any, h: Any, c: Any, forget_bias: float, keep_prob: float, cell_clip: float
) -> Any:  # fmt: skip
    """Return a step's results for all steps of x [t, n, inputs]: the output, h, c, the gates i, j, f, o, and tanh(c).
    ``w``: [inputs + hidden, 4 * hidden], the gates in this order. Rows longer than ``seq_length`` keep their state."""
    results = []
    h, c = (x.new_zeros(x.shape[1], len(b) // 4) if state is None else state[0] for state in (h, c))
    for step, row in enumerate(x):
        i, j, f, o = (torch.cat((row, h), 1) @ w + b).chunk(4, 1)
        i, j, f, o = i.sigmoid(), j.tanh(), (f + forget_bias).sigmoid(), o.sigmoid()
        state = f * c + i * j
        state = state.clamp(-cell_clip, cell_clip) if cell_clip > 0 else state
        out = o * state.tanh()
        if seq_length is not None:
            lives = (step < seq_length).unsqueeze(1)
            out, state = torch.where(lives, out, h), torch.where(lives, state, c)
        h, c = out, state
        results.append((F.dropout(out, 1 - keep_prob, keep_prob < 1), h, c, i, j, f, o, c.tanh()))
    return tuple(map(torch.stack, zip(*results, strict=True)))


def _only(name: str, value: Any, *, kept: Any) -> Any:
    """Check for a setting's only value."""
    if value != kept:
        raise NotImplementedError(problem(f"DynamicRNN({name}={value!r})", fix=f"{name}={kept!r}; nn.LSTM, nn.GRU"))
    return value


def _hooked(x: Any, hook: Function) -> Any:
    """Return ``x`` with a gradient hook, which takes a tuple of one gradient; None keeps the gradient. Raises
    CaptureError in a split cell, where tensor hooks do not fire."""
    if torch.compiler.is_exporting():
        fix = "a cell of its own with bprop(self, x, out, dout), which returns (dx,)"
        raise CaptureError("a function of a gradient (InsertGradientOf, HookBackward) in a split cell", fix=fix)

    def called(gradient: Any) -> Any:
        changed = hook((gradient.as_subclass(Tensor),))
        return changed[0] if isinstance(changed, tuple) else changed

    y = x.view_as(x)
    if y.requires_grad:
        y.register_hook(called)
    return y


SIMPLE: dict[str, Any] = {
    **of_functions(TABLES["ops"]["primitives"]),
    # -- shapes
    "DepthToSpace": lambda x, *, block_size: F.pixel_shuffle(
        x.unflatten(1, (block_size**2, -1)).transpose(1, 2).flatten(1, 2), block_size),
    "Einsum": lambda operands, *, equation: torch.einsum(equation, *operands),
    "Meshgrid": lambda inputs, *, indexing="xy": tuple(torch.meshgrid(*inputs, indexing=indexing)),
    "MirrorPad": lambda x, paddings, *, mode="REFLECT": mirrored(x, paddings, mode),
    "Pad": lambda x, *, paddings: mirrored(x, paddings, "CONSTANT"),
    "SpaceToDepth": lambda x, *, block_size: F.pixel_unshuffle(x, block_size).unflatten(
        1, (-1, block_size**2)).transpose(1, 2).flatten(1, 2),
    # -- reductions
    "ReduceStd": lambda x, *, axis=(), unbiased=True, keep_dims=False: (
        torch.std(x, dims_of(x, axis), correction=int(unbiased), keepdim=keep_dims),
        torch.mean(x, dims_of(x, axis), keepdim=keep_dims)),
    # -- networks
    "Conv3D": lambda x, weight, *, out_channel, kernel_size, mode=1, pad_mode="valid", pad=0, stride=1, dilation=1,
    group=1: F.conv3d(x, weight, None, stride, pad if pad_mode == "pad" else pad_mode, dilation, group),
    "Conv3DTranspose": lambda x, weight, bias=None, *, in_channel, out_channel, kernel_size, mode=1, pad_mode="valid",
    pad=0, stride=1, dilation=1, group=1, output_padding=0: transposed(
        x, weight, stride, pad_mode, (pad,) * 6 if isinstance(pad, int) else pad, output_padding, dilation, group),
    "Dropout2D": lambda x, *, keep_prob=0.5: (y := F.dropout2d(x, 1 - keep_prob, True), y != 0),
    "FlashAttentionScore": lambda query, key, value, real_shift=None, drop_mask=None, padding_mask=None, attn_mask=None,
    prefix=None, *, head_num, keep_prob=1.0, scale_value=1.0, pre_tokens=2**31 - 1, next_tokens=2**31 - 1,
    inner_precise=0, input_layout="BSH", sparse_mode=0: (None, None, None, attention(
        query, key, value, attn_mask, head_num, (real_shift, drop_mask, padding_mask, prefix), keep_prob, scale_value,
        pre_tokens, next_tokens, input_layout, sparse_mode)),
    "MaxPool3D": lambda x, *, kernel_size=1, strides=1, pad_mode="valid", pad_list=0, ceil_mode=None:
    pool(F.max_pool3d, x, kernel_size, strides, pad_mode, pad_list, ceil_mode=bool(ceil_mode)),
    "MaxPoolWithArgmax": lambda x, *, kernel_size=1, strides=1, pad_mode="valid": pool(
        F.max_pool2d, x, kernel_size, strides, pad_mode, 0, return_indices=True),
    "ResizeBilinear": lambda x, *, size, align_corners=False, half_pixel_centers=False: bilinear(
        x, size, align_corners, half_pixel_centers),
    "ResizeNearestNeighbor": lambda x, *, size, align_corners=False: nearest(x, size, align_corners),
    # -- boxes
    "NMSWithMask": lambda bboxes, *, iou_threshold=0.5: suppressed(bboxes, iou_threshold),
    # -- losses
    "CTCLoss": classes_loss,
    "NLLLoss": lambda logits, labels, weight, *, reduction="mean": (
        F.nll_loss(logits, labels.long(), weight, reduction=reduction), weight[labels.long()].sum()),
    # -- parameters
    "ApplyMomentum": _momentum,
    "Adam": lambda var, m, v, beta1_power, beta2_power, lr, beta1, beta2, epsilon, gradient, *, use_locking=False,
    use_nesterov=False: _adam(var, m, v, lr * (1 - beta2_power) ** 0.5 / (1 - beta1_power), (beta1, beta2), epsilon,
                              gradient, 0.0, use_nesterov),
    "AdamWeightDecay": lambda var, m, v, lr, beta1, beta2, epsilon, decay, gradient, *, use_locking=False: _adam(
        var, m, v, lr, (beta1, beta2), epsilon, gradient, decay),
    "DynamicRNN": (None, lambda x, w, b, seq_length=None, init_h=None, init_c=None, *, cell_type="LSTM",
    direction="UNIDIRECTIONAL", cell_depth=1, use_peephole=False, keep_prob=1.0, cell_clip=-1.0, num_proj=0,
    time_major=True, activation="tanh", forget_bias=0.0, is_training=True: _lstm(
        x, w, b, seq_length, init_h, init_c, forget_bias, keep_prob if is_training else 1.0, cell_clip),
        {"checks": {name: partial(_only, kept=value) for name, value in (
            ("cell_type", "LSTM"), ("direction", "UNIDIRECTIONAL"), ("cell_depth", 1), ("use_peephole", False),
            ("num_proj", 0), ("time_major", True), ("activation", "tanh"))}}),
    "Roll": lambda x, *, shift, axis=None: torch.roll(x, shift, axis),
    # -- the overflow status of Ascend devices
    "FloatStatus": lambda x: (~torch.isfinite(x)).any().float().reshape(1),
    "NPUAllocFloatStatus": init_status,
    **dict.fromkeys(("NPUClearFloatStatus", "NPUClearFloatStatusV2"), clear_status),
    **dict.fromkeys(("NPUGetFloatStatus", "NPUGetFloatStatusV2"), read_status),
    # -- new tensors
    "TruncatedNormal": lambda shape, *, dtype=torch.float32, seed=0, seed2=0: FUNCTIONS["truncated_normal"](
        shape, seed or None).to(dtype_of(dtype)),
    "Multinomial": lambda x, num_samples, *, seed=0, seed2=0, dtype=torch.int32: torch.multinomial(
        x, int(num_samples), replacement=True).to(dtype_of(dtype)),
    "Randperm": lambda n, *, max_length=1, pad=-1, dtype=torch.int32: torch.randperm(int(n), dtype=dtype_of(dtype)),
    "StandardNormal": lambda shape, *, seed=0, seed2=0: torch.randn(tuple(shape)),
    **{f"{kind}Summary": lambda name, value: note(
        "summary operators in cells write nothing; use train.SummaryCollector or SummaryRecord.add_value")
       for kind in ("Tensor", "Scalar", "Histogram", "Image")},
    "UniformInt": lambda shape, minval, maxval, *, seed=0, seed2=0: torch.randint(
        int(minval), int(maxval), tuple(shape), dtype=torch.int32),
    "UniformReal": lambda shape, *, seed=0, seed2=0: torch.rand(tuple(shape)),
    "Print": lambda *values: (values[0] if values else None, print(*values))[0], "StopGradient": lambda x: x.detach(),
    "HookBackward": lambda x, *, hook_fn, cell_id="": _hooked(x, hook_fn),
    "InsertGradientOf": lambda x, *, f: _hooked(x, lambda grads: f(grads[0])),
}  # fmt: skip


class Custom(Primitive):
    """An operator by a function of numpy arrays: ``Custom(func, out_shape, out_dtype, func_type="pyfunc")``.

    Args:
        func: takes and returns numpy arrays.
        out_shape, out_dtype: shape and dtype of the result, or functions of those of the inputs; accepted without
            effect: the result has them.
        func_type: "pyfunc". Kernels for other devices are refused.
        bprop: returns the gradients of the inputs: ``bprop(*inputs, out, dout)``, of tensors. Without it the result
            has no gradient.
        reg_info: accepted without effect.

    Raises:
        NotImplementedError: for another ``func_type``.
        CaptureError: in a split cell, which cannot see into numpy.
    """

    def __init__(
        self, func: Any, out_shape: Any = None, out_dtype: Any = None, func_type: str = "pyfunc", bprop: Any = None,
        reg_info: Any = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.func, self.bprop = func, bprop
        if func_type != "pyfunc" or not callable(func):
            fix = "a function of torch operators, which can be split; a kernel of one's own is torch.library.custom_op"
            raise NotImplementedError(problem(f"Custom(func_type={func_type!r}): kernels for other devices", fix=fix))

    def compute(self, *args: Any) -> Any:
        if torch.compiler.is_exporting():
            raise CaptureError(
                "a function of numpy (Custom) in a split cell", op=self.title, fix="a function of torch operators"
            )
        return _OfNumpy.apply(self, *args)  # type: ignore[no-untyped-call]  # torch has no types for it


class _OfNumpy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, primitive: Custom, *args: Any) -> Any:
        arrays = (x.detach().cpu().numpy() if isinstance(x, torch.Tensor) else x for x in args)
        results = primitive.func(*arrays)
        tensors = tuple(map(torch.as_tensor, results if isinstance(results, tuple) else (results,)))
        ctx.primitive, ctx.operands, ctx.outs = primitive, args, tensors
        if primitive.bprop is None:
            ctx.mark_non_differentiable(*tensors)
        return tensors if isinstance(results, tuple) else tensors[0]

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        outs = (ctx.outs, gradients) if len(gradients) > 1 else (ctx.outs[0], gradients[0])
        grads = ctx.primitive.bprop(*ctx.operands, *outs)
        return (None, *(grads if isinstance(grads, tuple) else (grads,)))


PRIMITIVES = classes_of(SIMPLE, Simple, __name__)
globals().update(PRIMITIVES)

__all__ = list(PRIMITIVES)
