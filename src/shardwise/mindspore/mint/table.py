"""Torch's functions and modules in ``mint``: the same names and arguments, with the dialect's tensors."""

from __future__ import annotations

from functools import wraps
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from shardwise.mindspore import calls
from shardwise.mindspore.common.initializer import initializer
from shardwise.mindspore.common.seed import set_seed
from shardwise.mindspore.named import Function, in_order
from shardwise.mindspore.nn.cell import Cell
from shardwise.mindspore.nn.wrapped import Wrapped

# Places of indices, which torch wants as int64 and the reference takes as int32 too.
_INDICES = {
    **dict.fromkeys(("gather", "scatter", "scatter_add"), (2, "index")),
    **dict.fromkeys(("cross_entropy", "nll_loss"), (1, "target")),
    "one_hot": (0, "input"),
}


def _wide(x: Any) -> Any:
    return x.long() if isinstance(x, torch.Tensor) and x.dtype == torch.int32 else x


def of_torch(home: Any, names: str) -> dict[str, Function]:
    """Return functions of a torch module by their names."""
    return {name: _ours(name, in_order(getattr(home, name))) for name in names.split()}


def _ours(name: str, function: Function) -> Function:
    """Wrap a function. If no cell is running, its results have the reference's methods."""
    place, word = _INDICES.get(name, (None, ""))

    @wraps(function, assigned=("__doc__",))
    def call(*args: Any, **kwargs: Any) -> Any:
        if place is not None:
            args = tuple(_wide(x) if at == place else x for at, x in enumerate(args))
            kwargs = {key: _wide(x) if key == word else x for key, x in kwargs.items()}
        return calls.outside(function(*args, **kwargs))

    call.__name__ = call.__qualname__ = name
    return call


TOP: dict[str, Function] = {
    **of_torch(
        torch,
        """abs absolute acos acosh add addbmm addcdiv addcmul addmm addmv all allclose amax amin any arange arccos
        arccosh arcsin arcsinh arctan arctan2 arctanh argmax argmin argsort asin asinh atan atan2 atanh baddbmm
        bernoulli bincount bitwise_and bitwise_not bitwise_or bitwise_xor bmm broadcast_to cat cdist ceil chunk clamp
        clip clone concat cos cosh count_nonzero cross cummax cummin cumprod cumsum diag diff div divide dot einsum
        empty empty_like eq equal erf erfc erfinv exp exp2 expm1 eye fix flatten flip float_power floor floor_divide
        fmod frac full full_like gather ge greater greater_equal gt histc hypot index_add index_select inverse isclose
        isfinite isinf isnan isneginf le lerp less less_equal linspace log log10 log1p log2 logaddexp logaddexp2
        logical_and logical_not logical_or logical_xor logsumexp lt masked_fill masked_select matmul max maximum mean
        median meshgrid min minimum mm mul multinomial multiply mv nan_to_num nansum narrow ne neg negative
        nonzero norm normal not_equal numel ones ones_like outer permute polar pow prod rand rand_like randint
        randint_like randn randn_like randperm ravel reciprocal remainder repeat_interleave reshape roll round rsqrt
        scatter scatter_add searchsorted select sigmoid sign sin sinc sinh softmax sort split sqrt square squeeze
        stack std std_mean sub subtract sum swapaxes t take tan tanh tensor_split tensordot tile topk trace transpose
        trapz tril triu true_divide trunc unbind unique unique_consecutive unsqueeze var var_mean where xlogy zeros
        zeros_like""",
    ),
    "item": lambda input: input.item(),
    "manual_seed": set_seed,
}
FUNCTIONAL = of_torch(
    F,
    """adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d adaptive_max_pool1d adaptive_max_pool2d avg_pool1d
    avg_pool2d avg_pool3d batch_norm binary_cross_entropy binary_cross_entropy_with_logits celu conv1d conv2d conv3d
    conv_transpose2d cosine_similarity cosine_embedding_loss cross_entropy dropout dropout2d elu embedding fold gelu
    glu grid_sample group_norm hardshrink hardsigmoid hardswish hardtanh interpolate kl_div l1_loss layer_norm
    leaky_relu linear log_softmax logsigmoid max_pool2d max_unpool2d mish mse_loss nll_loss normalize one_hot pad
    pixel_shuffle prelu relu relu6 rms_norm rrelu scaled_dot_product_attention selu sigmoid silu smooth_l1_loss softmax
    softplus softshrink softsign tanh tanhshrink threshold unfold""",
)
LINALG = of_torch(torch.linalg, "inv matrix_norm norm qr vector_norm det solve cholesky eigh svd")
SPECIAL = of_torch(torch.special, "erfc exp2 expm1 log1p log_softmax logit round sinc softmax xlogy")


def _linear(
    in_features: int, out_features: int, bias: bool = True, weight_init: Any = None, bias_init: Any = None,
    dtype: torch.dtype | None = None,
) -> nn.Module:  # fmt: skip
    layer = nn.Linear(in_features, out_features, bias, dtype=dtype)
    for parameter, init in ((layer.weight, weight_init), (layer.bias, bias_init)):
        if init is not None and parameter is not None:
            parameter.data.copy_(initializer(init, list(parameter.shape), parameter.dtype))
    return layer


_MODULES = """
    AdaptiveAvgPool1d AdaptiveAvgPool2d AdaptiveAvgPool3d AdaptiveMaxPool1d AdaptiveMaxPool2d AvgPool1d AvgPool2d
    AvgPool3d BCELoss BCEWithLogitsLoss BatchNorm1d BatchNorm2d BatchNorm3d CELU ConstantPad1d ConstantPad2d
    ConstantPad3d Conv1d Conv2d Conv3d ConvTranspose2d CosineEmbeddingLoss CosineSimilarity CrossEntropyLoss Dropout
    Dropout2d ELU Embedding Flatten Fold GELU GLU GroupNorm Hardshrink Hardsigmoid Hardswish Hardtanh Identity KLDivLoss
    L1Loss LayerNorm LeakyReLU LogSigmoid LogSoftmax MSELoss MaxPool2d MaxUnpool2d Mish MultiheadAttention NLLLoss PReLU
    PixelShuffle RMSNorm RReLU ReLU ReLU6 ReflectionPad1d ReflectionPad2d ReplicationPad1d ReplicationPad2d SELU SiLU
    Sigmoid SmoothL1Loss Softmax Softplus Softshrink Softsign Tanh Tanhshrink Threshold Unflatten Unfold Upsample
    ZeroPad2d"""


class _Loss(Wrapped):
    """A loss of class indices, which may be int32."""

    is_loss = True

    def construct(self, input: Any, target: Any, *others: Any) -> Any:
        return self.module(input, _wide(target), *others)


def _cell(name: str, make: Function) -> type[Cell]:
    base = _Loss if name.endswith("Loss") else Wrapped
    body = {"__module__": "shardwise.mindspore.mint.nn", "__doc__": "Torch's module.", "make": staticmethod(make)}
    return type(name, (base,), body)


CELLS = {name: _cell(name, in_order(getattr(nn, name))) for name in _MODULES.split()} | {
    "Linear": _cell("Linear", _linear)
}
