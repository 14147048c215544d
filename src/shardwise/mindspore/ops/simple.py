"""Primitives that are one function of torch or of ``ops.functions``, each a line of a table.

Positional arguments are those of the call, keyword-only arguments those of the constructor (``named.settings_of``).
"""

from __future__ import annotations

from inspect import Parameter, Signature
from typing import Any

import torch
from torch.nn import functional as F

from shardwise.errors import CaptureError
from shardwise.mindspore.loss_scale import clear_status, init_status, read_status
from shardwise.mindspore.named import Function, classes_of, parameters_of
from shardwise.mindspore.notes import note
from shardwise.mindspore.ops.functions import FUNCTIONS
from shardwise.mindspore.ops.further import distinct, suppressed
from shardwise.mindspore.ops.images import bilinear, mirrored, nearest, pairs_of, pool, transposed
from shardwise.mindspore.ops.networks import attention, classes_loss
from shardwise.mindspore.ops.primitive import Simple
from shardwise.mindspore.tensor import Tensor
from shardwise.mindspore.tensor_methods import dims_of, dtype_of


def _print(*values: Any) -> Any:
    print(*values)
    return values[0] if values else None


def _depth_to_space(x: Any, block: int) -> Any:
    n, c, h, w = x.shape
    blocks = x.reshape(n, block, block, c // block**2, h, w).permute(0, 3, 4, 1, 5, 2)
    return blocks.reshape(n, c // block**2, h * block, w * block)


def _momentum(variable: Any, sums: Any, rate: Any, gradient: Any, momentum: Any, nesterov: bool) -> Any:
    with torch.no_grad():
        sums.copy_(sums * momentum + gradient)
        variable.sub_((gradient + momentum * sums if nesterov else sums) * rate)
    return variable


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


def _unwritten(name: Any, value: Any) -> None:
    note("summary operators in cells write nothing; use train.SummaryCollector or SummaryRecord.add_value")


def _flat(paddings: Any) -> list[int]:
    return [n for pair in reversed(pairs_of(paddings)) for n in pair]


# Primitives that compute a function of ``ops.functions``: NAME=FUNCTION, and the settings of the constructor.
_OF_FUNCTIONS = """
    Acosh=acosh; Asinh=asinh; Atanh=atanh; Addcdiv=addcdiv; Addcmul=addcmul; BitwiseAnd=bitwise_and;
    BitwiseOr=bitwise_or; BitwiseXor=bitwise_xor; Conj=conj; Digamma=digamma; Erfinv=erfinv; Hypot=hypot; Imag=imag;
    Invert=invert; Lerp=lerp; Lgamma=lgamma; LogicalXor=logical_xor; MaskedFill=masked_fill; MulNoNan=mul_no_nan;
    NanToNum=nan_to_num; Real=real; Sinc=sinc; TruncateDiv=truncate_div; TruncateMod=truncate_mod; Xdivy=xdivy;
    Xlogy=xlogy; Cdist=cdist p=2.0; Cummax=cummax axis; Cummin=cummin axis; FastGeLU=fast_gelu; LogSigmoid=logsigmoid;
    LRN=lrn depth_radius=5 bias=1.0 alpha=1.0 beta=0.5 norm_region='ACROSS_CHANNELS'; Logit=logit eps=None;
    PReLU=prelu; SiLU=silu; CeLU=celu alpha=1.0; HShrink=hardshrink lambd=0.5; LpNorm=lp_norm axis p=2 keep_dims=False
    epsilon=1e-12; AdaptiveAvgPool2D=adaptive_avg_pool2d output_size; SmoothL1Loss=smooth_l1_loss beta=1.0
    reduction='none'; SoftShrink=soft_shrink lambd=0.5; BatchToSpaceND=batch_to_space_nd block_shape crops;
    SpaceToBatchND=space_to_batch_nd block_shape paddings; BoundingBoxDecode=bounding_box_decode max_shape
    means=(0.0,0.0,0.0,0.0) stds=(1.0,1.0,1.0,1.0) wh_ratio_clip=0.016; BoundingBoxEncode=bounding_box_encode
    means=(0.0,0.0,0.0,0.0) stds=(1.0,1.0,1.0,1.0); IOU=iou mode='iou'; AccumulateNV2=accumulate_n;
    ApproximateEqual=approximate_equal tolerance=1e-5; Cross=cross dim=None; DynamicShape=dyn_shape;
    MatrixInverse=inverse; LogMatrixDeterminant=log_matrix_determinant; Trace=trace; ReverseSequence=reverse_sequence
    seq_dim batch_dim=0; IndexAdd=index_add axis; InplaceAdd=inplace_add indices; InplaceSub=inplace_sub indices;
    InplaceUpdate=inplace_update indices; MaskedSelect=masked_select; NonZero=nonzero; InTopK=intopk k;
    UniqueWithPad=unique_with_pad; TensorShape=dyn_shape; TensorDot=tensor_dot axes; TypeAs=type_as; Gamma=gamma
    seed=None; StandardLaplace=standard_laplace seed=None; RandomCategorical=random_categorical; Assign=assign;
    AssignAdd=assign_add; AssignSub=assign_sub; LinSpace=linspace; BCEWithLogitsLoss=binary_cross_entropy_with_logits
    reduction='mean'; Fills=fills; Gcd=gcd; Lcm=lcm; MatrixBandPart=matrix_band_part; ScalarCast=scalar_cast;
    Trunc=trunc; ScatterNdUpdate=scatter_nd_update use_locking=True; TensorScatterElements=tensor_scatter_elements
    axis=0; RmsNorm=rms_norm epsilon=1e-6; KLDivLoss=kl_div reduction='mean'; ScatterNd=scatter_nd;
    ScatterAdd=scatter_add use_locking=False; ScatterUpdate=scatter_update use_locking=True; ScatterSub=scatter_sub
    use_locking=False; ScatterNdAdd=scatter_nd_add use_locking=False; ScatterNdSub=scatter_nd_sub use_locking=False;
    TensorScatterSub=tensor_scatter_sub; TensorScatterMax=tensor_scatter_max; ScatterMax=scatter_max use_locking=False;
    TensorScatterMin=tensor_scatter_min; ScatterMin=scatter_min use_locking=False; TensorScatterMul=tensor_scatter_mul;
    ScatterMul=scatter_mul use_locking=False; TensorScatterDiv=tensor_scatter_div; ScatterDiv=scatter_div
    use_locking=False; ScatterNdMax=scatter_nd_max use_locking=False; ScatterNdMin=scatter_nd_min use_locking=False;
    ScatterNdMul=scatter_nd_mul use_locking=False; ScatterNdDiv=scatter_nd_div use_locking=False;
    AdaptiveAvgPool3D=adaptive_avg_pool3d output_size; AffineGrid=affine_grid align_corners=False;
    AdaptiveMaxPool2D=adaptive_max_pool2d output_size return_indices=True; Angle=angle; Bucketize=bucketize boundaries
    right=False; Cholesky=cholesky upper=False; Complex=complex; CholeskyInverse=cholesky_inverse upper=False;
    ComplexAbs=abs; CheckValid=check_valid; CropAndResize=crop_and_resize method='bilinear' extrapolation_value=0.0;
    Eps=eps; Ger=outer; CTCGreedyDecoder=ctc_greedy_decoder merge_repeated=True; Igamma=igamma; Igammac=igammac;
    CTCLossV2=ctc_loss blank=0 reduction='none' zero_infinity=False; HammingWindow=hamming_window;
    GridSampler2D=grid_sample mode='bilinear' padding_mode='zeros' align_corners=False; GridSampler3D=grid_sample
    mode='bilinear' padding_mode='zeros' align_corners=False; Heaviside=heaviside; IndexFill=index_fill;
    IsClose=isclose rtol=1e-5 atol=1e-8 equal_nan=False; LeftShift=bitwise_left_shift; RightShift=bitwise_right_shift;
    MaskedScatter=masked_scatter; MatrixDeterminant=det; MatrixExp=matrix_exp; MatrixPower=matrix_power n;
    NextAfter=nextafter; Mvlgamma=mvlgamma p; Polar=polar; Polygamma=polygamma; Qr=qr; Quantile=quantile;
    RandomChoiceWithMask=choice_with_mask count=256; RandomGamma=random_gamma seed=None; RandomPoisson=random_poisson
    seed=None; Zeta=zeta; RandomShuffle=shuffle seed=None; Renorm=renorm p dim maxnorm; ROIAlign=roi_align
    pooled_height pooled_width spatial_scale sample_num=2 roi_end_mode=1; SoftMarginLoss=soft_margin_loss
    reduction='mean'; UnravelIndex=unravel_index; TripletMarginLoss=triplet_margin_loss p=2 swap=False eps=1e-6
    reduction='mean'; UniqueConsecutive=unique_consecutive return_idx=False return_counts=False axis=None;
    ReduceLogSumExp=logsumexp axis keep_dims=False; Im2Col=unfold kernel_size stride=1 dilation=1 padding=0;
    UnsortedSegmentMax=unsorted_segment_max; UnsortedSegmentMin=unsorted_segment_min;
    UnsortedSegmentProd=unsorted_segment_prod"""


class OfFunction:
    """The function of a table line. Its keyword-only arguments are the settings (``named.settings_of``)."""

    def __init__(self, line: str) -> None:
        self.name, *settings = line.split()
        operands = Parameter("operands", Parameter.VAR_POSITIONAL)
        self.__signature__ = Signature([operands, *parameters_of(["*", *settings])])

    def __call__(self, *operands: Any, use_locking: bool = False, **settings: Any) -> Any:
        return FUNCTIONS[self.name](*operands, **settings)


def of_functions(rows: str) -> dict[str, Function]:
    """Return table entries of rows ``NAME=FUNCTION SETTING=DEFAULT ...``, separated by semicolons."""
    return {name: OfFunction(line) for name, _, line in (row.strip().partition("=") for row in rows.split(";"))}


SIMPLE: dict[str, Function] = {
    **of_functions(_OF_FUNCTIONS),
    # -- activations
    "ReLUV2": lambda x: (torch.relu(x), x > 0),
    # -- shapes
    "DepthToSpace": lambda x, *, block_size: _depth_to_space(x, block_size),
    "Diag": lambda x: torch.diag(x), "DiagPart": lambda x: torch.diagonal(x),
    "Einsum": lambda operands, *, equation: torch.einsum(equation, *operands),
    "Meshgrid": lambda inputs, *, indexing="xy": tuple(torch.meshgrid(*inputs, indexing=indexing)),
    "MirrorPad": lambda x, paddings, *, mode="REFLECT": mirrored(x, paddings, mode),
    "Pad": lambda x, *, paddings: F.pad(x, _flat(paddings)),
    "ReverseV2": lambda x, *, axis: torch.flip(x, tuple(axis)),
    "SpaceToDepth": lambda x, *, block_size: x.reshape(
        *x.shape[:2], x.shape[2] // block_size, block_size, x.shape[3] // block_size, block_size
    ).permute(0, 3, 5, 1, 2, 4).flatten(1, 3),
    "Tril": lambda x, *, diagonal=0: torch.tril(x, diagonal), "Triu": lambda x, *, diagonal=0: torch.triu(x, diagonal),
    "InvertPermutation": lambda x: torch.argsort(torch.as_tensor(x)),
    "Unique": lambda x: distinct(x),
    # -- reductions
    "ReduceStd": lambda x, *, axis=(), unbiased=True, keep_dims=False: (
        torch.std(x, dims_of(x, axis), correction=int(unbiased), keepdim=keep_dims),
        torch.mean(x, dims_of(x, axis), keepdim=keep_dims)),
    "SquareSumAll": lambda x, y: (x.square().sum(), y.square().sum()),
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
    "CTCLoss": lambda x, labels_indices, labels_values, sequence_length, *, preprocess_collapse_repeated=False,
    ctc_merge_repeated=True, ignore_longer_outputs_than_inputs=False: classes_loss(
        x, labels_indices, labels_values, sequence_length, ignore_longer_outputs_than_inputs,
        (preprocess_collapse_repeated, ctc_merge_repeated)),
    "NLLLoss": lambda logits, labels, weight, *, reduction="mean": (
        F.nll_loss(logits, labels.long(), weight, reduction=reduction), weight[labels.long()].sum()),
    # -- parameters
    "ApplyMomentum": lambda variable, accumulation, learning_rate, gradient, momentum, *, use_nesterov=False,
    use_locking=False, gradient_scale=1.0: _momentum(
        variable, accumulation, learning_rate, gradient / gradient_scale, momentum, use_nesterov),
    "Roll": lambda x, *, shift, axis=None: torch.roll(x, shift, axis),
    # -- the overflow status of Ascend devices
    "FloatStatus": lambda x: (~torch.isfinite(x)).any().float().reshape(1),
    "NPUAllocFloatStatus": init_status,
    **dict.fromkeys(("NPUClearFloatStatus", "NPUClearFloatStatusV2"), clear_status),
    **dict.fromkeys(("NPUGetFloatStatus", "NPUGetFloatStatusV2"), read_status),
    "Median": lambda x, *, global_median=False, axis=0, keep_dims=False, ignore_nan=False: FUNCTIONS[
        "nanmedian" if ignore_nan else "median"](x.flatten() if global_median else x, 0 if global_median else axis,
                                                 keep_dims and not global_median),
    "SearchSorted": lambda sorted_sequence, values, *, dtype=torch.int64, right=False: torch.searchsorted(
        sorted_sequence, values, right=right).to(dtype_of(dtype)),
    # -- new tensors
    "TruncatedNormal": lambda shape, *, dtype=torch.float32, seed=0, seed2=0: FUNCTIONS["truncated_normal"](
        shape, seed or None).to(dtype_of(dtype)),
    "Multinomial": lambda x, num_samples, *, seed=0, seed2=0, dtype=torch.int32: torch.multinomial(
        x, int(num_samples), replacement=True).to(dtype_of(dtype)),
    "DType": lambda x: x.dtype, "Rank": lambda x: x.dim(),
    "Randperm": lambda n, *, max_length=1, pad=-1, dtype=torch.int32: torch.randperm(int(n), dtype=dtype_of(dtype)),
    "ScalarToArray": lambda x: torch.tensor(x),
    "ScalarToTensor": lambda x, dtype=torch.float32: torch.tensor(x, dtype=dtype_of(dtype)),
    "Size": lambda x: x.numel(),
    "StandardNormal": lambda shape, *, seed=0, seed2=0: torch.randn(tuple(shape)),
    **{f"{kind}Summary": _unwritten for kind in ("Tensor", "Scalar", "Histogram", "Image")},
    "TupleToArray": lambda x: torch.tensor(x, dtype=torch.int32 if isinstance(x[0], int) else None),
    "UniformInt": lambda shape, minval, maxval, *, seed=0, seed2=0: torch.randint(
        int(minval), int(maxval), tuple(shape), dtype=torch.int32),
    "UniformReal": lambda shape, *, seed=0, seed2=0: torch.rand(tuple(shape)),
    "Print": _print, "StopGradient": lambda x: x.detach(),
    "HookBackward": lambda x, *, hook_fn, cell_id="": _hooked(x, hook_fn),
    "InsertGradientOf": lambda x, *, f: _hooked(x, lambda grads: f(grads[0])),
}  # fmt: skip


PRIMITIVES = classes_of(SIMPLE, Simple, __name__)
globals().update(PRIMITIVES)

__all__ = list(PRIMITIVES)
