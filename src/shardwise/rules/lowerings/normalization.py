"""Layer, RMS, group, batch and instance norm over split dims."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shardwise.rules.lowerings.precision import cast, wide
from shardwise.rules.lowerings.reductions import count_of


def layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> Tensor:
    del cudnn_enable
    dims = tuple(range(input.dim() - len(normalized_shape), input.dim()))
    result = cast(_standardised(wide(input), dims, eps), input.dtype)
    result = result if weight is None else result * weight
    return result if bias is None else result + bias


def _standardised(x: Tensor, dims: tuple[int, ...], eps: float) -> Tensor:
    count = count_of(x, dims)
    centred = x - x.sum(dims, keepdim=True) / count
    return centred * (centred.square().sum(dims, keepdim=True) / count + eps).rsqrt()


def rms_norm(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    dims = tuple(range(input.dim() - len(normalized_shape), input.dim()))
    x = wide(input)
    small = torch.finfo(x.dtype).eps if eps is None else eps
    scale = (x.square().sum(dims, keepdim=True) / count_of(x, dims) + small).rsqrt()
    result = x * scale
    return cast(result if weight is None else result * weight, input.dtype)


def group_norm(
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> Tensor:
    del cudnn_enabled
    grouped = torch.unflatten(wide(input), 1, (num_groups, input.shape[1] // num_groups))
    result = _standardised(grouped, tuple(range(2, grouped.dim())), eps).flatten(1, 2)
    return cast(_affine(result, weight, bias), input.dtype)


def batch_norm(input: Tensor, weight: Tensor | None, bias: Tensor | None, *rest: Any) -> Tensor:
    """Batch statistics; updating the running ones is not an operator's business (the capture makes it visible)."""
    *_, eps, _cudnn_enabled = rest
    result = _standardised(wide(input), tuple(dim for dim in range(input.dim()) if dim != 1), eps)
    return cast(_affine(result, weight, bias), input.dtype)


def instance_norm(input: Tensor, weight: Tensor | None, bias: Tensor | None, *rest: Any) -> Tensor:
    *_, eps, _cudnn_enabled = rest
    result = _standardised(wide(input), tuple(range(2, input.dim())), eps)
    return cast(_affine(result, weight, bias), input.dtype)


def _affine(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """Per-channel scale and shift; channels are dim 1."""
    shape = (-1, *(1,) * (x.dim() - 2))
    x = x if weight is None else x * weight.reshape(shape)
    return x if bias is None else x + bias.reshape(shape)
