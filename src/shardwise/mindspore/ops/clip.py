"""Clipping of tensors by norm and by value."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from shardwise.errors import ShardwiseError, problem
from shardwise.mindspore import calls
from shardwise.mindspore.checks import number
from shardwise.mindspore.holding import as_gradient, parameter_of
from shardwise.mindspore.library import device_of, held_parameters, total_norm

Tensor = torch.Tensor
Bound = Tensor | float | None


def clip_by_global_norm(
    x: Sequence[Tensor], clip_norm: float = 1.0, use_norm: Tensor | float | None = None
) -> tuple[Tensor, ...]:
    """Scale tensors by ``clip_norm / norm`` if the 2-norm of all their elements together exceeds ``clip_norm``.

    The norm is that of the arguments. Before gradients are reduced it is this rank's own, and before they are unscaled
    it is that of the scaled gradients. Clip reduced and unscaled gradients to match a single device. For gradients of
    split parameters it is the norm of the whole gradients, and all ranks must call it.

    Args:
        x: tensors, in a tuple or list.
        clip_norm: the largest norm.
        use_norm: the norm, if it is already known (the reference does not take it).

    Raises:
        ShardwiseError: if parameters are split and a tensor is not known as the gradient of one.
    """
    if isinstance(x, Tensor) or not all(isinstance(tensor, Tensor) for tensor in x) or not x:
        raise TypeError(problem(f"clip_by_global_norm of {type(x).__name__}", fix="give a tuple or list of tensors"))
    if number("clip_norm", clip_norm) <= 0:
        raise ValueError(problem(f"clip_norm is {clip_norm}", fix="give a number above 0"))
    norm = torch.as_tensor(use_norm) if use_norm is not None else _norm(x)
    return _scaled(x, clip_norm / norm.clamp(min=clip_norm))


def _scaled(x: Sequence[Tensor], factor: Tensor) -> tuple[Tensor, ...]:
    return tuple(as_gradient((t * factor.to(t.device)).to(t.dtype), parameter_of(t)) for t in x)


def clip_by_norm(x: Any, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False) -> Any:
    """Scale tensors so that their common norm is at most ``max_norm``. Split gradients are handled as in
    ``clip_by_global_norm``."""
    listed = [x] if isinstance(x, Tensor) else list(x)
    norm = _norm(listed, norm_type)
    if error_if_nonfinite and not torch.isfinite(norm):
        raise RuntimeError(problem(f"the norm is {float(norm)}", fix="error_if_nonfinite=False"))
    scaled = _scaled(listed, (max_norm / (norm + 1e-6)).clamp(max=1.0))
    return scaled[0] if isinstance(x, Tensor) else type(x)(scaled)


def _norm(x: Sequence[Tensor], order: float = 2.0) -> Tensor:
    """Return the norm of all elements together, in float32 at least; of split gradients that of the whole ones. Raises
    ValueError where there are none."""
    if not x:
        raise ValueError(problem("clipping by the norm of no tensors", fix="give at least one tensor"))
    norm = split_norm(x, order)
    if norm is not None:
        return norm
    dtype = torch.promote_types(x[0].dtype, torch.float32)
    parts = [torch.linalg.vector_norm(t, order, dtype=torch.promote_types(t.dtype, dtype)) for t in x]
    whole: Tensor = torch.linalg.vector_norm(torch.stack([part.to(parts[0]) for part in parts]), order)
    return whole


def split_norm(x: Sequence[Tensor], order: float = 2.0) -> Tensor | None:
    """Return the norm of the whole gradients of split parameters. None: no parameter is split."""
    if not (calls.is_split() and calls.is_outermost()):
        return None
    held_by_id = {id(parameter): holding for parameter, holding in held_parameters()}
    if not held_by_id:
        return None
    parameters = [parameter_of(tensor) for tensor in x]
    unknown = next((place for place, parameter in enumerate(parameters) if parameter is None), None)
    if unknown is not None:
        what = (
            f"tensor {unknown}, of shape {list(x[unknown].shape)}, cannot be clipped by a norm: it is not known as the "
            "gradient of a parameter. Parameters are split, so the norm of this rank's part is not that of the whole"
        )
        fix = "clip what value_and_grad, a HyperMap over it or unscale returned, or clip_by_global_norm with use_norm"
        raise ShardwiseError(what, fix=fix)
    placed = [(tensor, held_by_id.get(id(parameter))) for tensor, parameter in zip(x, parameters, strict=True)]
    return total_norm(placed, order, device=device_of(x), across_ranks=True, error_if_nonfinite=False)


def clip_by_value(x: Any, clip_value_min: Bound = None, clip_value_max: Bound = None) -> Any:
    """Clamp a tensor, or each of a tuple or list, to ``clip_value_min`` and ``clip_value_max``. If these cross, the
    upper bound applies."""
    if clip_value_min is None and clip_value_max is None:
        raise ValueError(problem("clip_by_value has no bound", fix="give clip_value_min, clip_value_max or both"))
    if isinstance(x, tuple | list):
        return type(x)(clip_by_value(tensor, clip_value_min, clip_value_max) for tensor in x)
    if not isinstance(x, Tensor):
        what = f"clip_by_value of {type(x).__name__}"
        raise TypeError(problem(what, fix="give a tensor, or a tuple or list of them"))
    low, high = (
        bound.to(x.device) if isinstance(bound, Tensor) else None if bound is None else torch.tensor(bound).to(x)
        for bound in (clip_value_min, clip_value_max)
    )
    return torch.clamp(x, low, high)
