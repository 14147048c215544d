"""How far two runs are apart, tensor by tensor.

The error of a tensor is its largest difference over the largest magnitude of the reference tensor, but not over less
than 1e-6 (gradients) or 1e-3 (others) of the largest magnitude among all tensors of its kind: a gradient that is zero
by mathematics (a key's bias) has no meaningful relative error of its own, and an optimizer that divides by its size
makes a parameter of the noise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

Key = tuple[str, str]  # kind, name
Values = dict[Key, torch.Tensor]
Local = Callable[[Key, torch.Tensor, int], torch.Tensor]  # a whole tensor -> what a rank should have of it


@dataclass(frozen=True, slots=True)
class TensorError:
    """The worst error of one tensor over all ranks and steps."""

    kind: str  # "loss", "output", "gradient", "buffer" or "parameter"
    name: str
    error: float
    rank: int


def compare(expected: Values, actual: Sequence[Values], local: Local, worst: dict[Key, TensorError]) -> None:
    """Note the worst difference of every tensor. A tensor that only one side has is an infinite difference, a gradient
    of zeros among them: an optimizer decays a parameter that has one, and skips a parameter without."""
    floor: dict[str, float] = {}
    for (kind, _), tensor in expected.items():
        floor[kind] = max(floor.get(kind, 0.0), magnitude(tensor))
    for rank, values in enumerate(actual):
        for key in expected.keys() | values.keys():
            kind, name = key
            if key not in expected or key not in values:
                error = float("inf")
            else:
                scale = max(magnitude(expected[key]), (1e-6 if kind == "gradient" else 1e-3) * floor[kind])
                error = relative_difference(local(key, expected[key], rank), values[key], scale)
            if key not in worst or error > worst[key].error or error != error:
                worst[key] = TensorError(kind, name, error, rank)


def magnitude(tensor: torch.Tensor) -> float:
    """The largest absolute value that is finite."""
    finite = tensor.abs() if tensor.dtype != torch.bool else tensor.long()
    finite = finite[torch.isfinite(finite)] if finite.is_floating_point() else finite
    return float(finite.max()) if finite.numel() else 0.0


def is_finite(tensor: torch.Tensor) -> bool:
    """Whether no element is infinite or nan."""
    return bool(tensor.detach().isfinite().all())


def relative_difference(want: torch.Tensor, have: torch.Tensor, scale: float) -> float:
    """The largest difference over ``scale``; nan equals nan, and is infinitely far from numbers."""
    if want.shape != have.shape:
        return float("inf")
    if not want.numel():
        return 0.0
    want, have = want.detach(), have.detach()
    inexact = want.is_floating_point() or want.is_complex()
    same = (want == have) | (torch.isnan(want) & torch.isnan(have)) if inexact else want == have
    wide = torch.complex128 if want.is_complex() or have.is_complex() else torch.float64
    apart = torch.where(same, torch.zeros((), dtype=torch.float64), (want.to(wide) - have.to(wide)).abs())
    worst = float(apart.nan_to_num(nan=torch.inf).max())  # no order of differences has a place for nan
    return worst / scale if scale else (0.0 if worst == 0 else float("inf"))
