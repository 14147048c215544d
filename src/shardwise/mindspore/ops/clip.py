"""Clipping tensors, all of a list alike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from shardwise.errors import ShardwiseError, problem
from shardwise.mindspore import engine
from shardwise.mindspore.holding import as_gradient, parameter_of
from shardwise.runtime.guards.norms import total_norm
from shardwise.runtime.guards.registry import Held, held_parameters
from shardwise.runtime.hosted import device_of

Tensor = torch.Tensor
Bound = Tensor | float | None


def clip_by_global_norm(
    x: Sequence[Tensor], clip_norm: float = 1.0, use_norm: Tensor | float | None = None
) -> tuple[Tensor, ...]:
    """Tensors scaled by ``clip_norm / norm`` where the 2-norm of all their elements together exceeds ``clip_norm``.

    The norm is of what is given: before gradients are reduced it is this rank's own, and before they are unscaled that
    of the scaled ones. Clip what is reduced and unscaled to clip what one device would. Of gradients whose parameters a
    plan has split it is the norm of the whole ones, on every rank, which all call it. ``use_norm``: the norm, where it
    is known already (the reference takes none). Raises ShardwiseError where parameters are split, for a tensor that
    is not known as the gradient of one.
    """
    if isinstance(x, Tensor) or not all(isinstance(tensor, Tensor) for tensor in x) or not x:
        raise TypeError(problem(f"clip_by_global_norm of {type(x).__name__}", fix="give a tuple or list of tensors"))
    if isinstance(clip_norm, bool) or not isinstance(clip_norm, int | float):
        raise TypeError(problem(f"clip_norm is {clip_norm!r}, of type {type(clip_norm).__name__}", fix="give a number"))
    if clip_norm <= 0:
        raise ValueError(problem(f"clip_norm is {clip_norm}", fix="give a number above 0"))
    if use_norm is None and (shards := _placed(x)):
        norm = total_norm(shards, 2.0, device=device_of(x), across_ranks=True, error_if_nonfinite=False)
    elif use_norm is None:
        dtype = torch.promote_types(x[0].dtype, torch.float32)
        parts = [torch.linalg.vector_norm(tensor, dtype=torch.promote_types(tensor.dtype, dtype)) for tensor in x]
        norm = torch.linalg.vector_norm(torch.stack([part.to(parts[0]) for part in parts]))
    else:
        norm = torch.as_tensor(use_norm)
    factor = clip_norm / norm.clamp(min=clip_norm)
    return tuple(as_gradient((t * factor.to(t.device)).to(t.dtype), parameter_of(t)) for t in x)


def _placed(x: Sequence[Tensor]) -> list[tuple[Tensor, Held | None]]:
    """Gradients of split parameters, with what this rank holds of these; nothing where no parameter is split."""
    if not (engine.is_split() and engine.is_outermost()):
        return []
    held_by_id = {id(parameter): own for parameter, own in held_parameters()}
    own = [parameter_of(tensor) for tensor in x]
    unknown = [place for place, parameter in enumerate(own) if parameter is None]
    if held_by_id and unknown:
        raise ShardwiseError(
            problem(
                f"clip_by_global_norm is given a tensor (number {unknown[0]}, of shape {list(x[unknown[0]].shape)}) "
                "that is not known as the gradient of a parameter, and parameters are split: of which whole it is a "
                "part, its norm on this rank does not say",
                fix="clip what value_and_grad, a HyperMap over it or unscale returned, or give use_norm",
            )
        )
    return [(tensor, held_by_id.get(id(parameter))) for tensor, parameter in zip(x, own, strict=True) if held_by_id]


def clip_by_value(x: Any, clip_value_min: Bound = None, clip_value_max: Bound = None) -> Any:
    """A tensor, or each of a tuple or list, with its elements raised to ``clip_value_min`` and lowered to
    ``clip_value_max``; where these cross, the upper bound counts."""
    if clip_value_min is None and clip_value_max is None:
        raise ValueError(problem("clip_by_value has no bound", fix="give clip_value_min, clip_value_max or both"))
    if isinstance(x, tuple | list):
        return type(x)(clip_by_value(each, clip_value_min, clip_value_max) for each in x)
    if not isinstance(x, Tensor):
        raise TypeError(
            problem(f"clip_by_value of {type(x).__name__}", fix="give a tensor, or a tuple or list of them")
        )
    low, high = (
        bound.to(x.device) if isinstance(bound, Tensor) else None if bound is None else torch.tensor(bound).to(x)
        for bound in (clip_value_min, clip_value_max)
    )
    return torch.clamp(x, low, high)
