"""Compares two runs tensor by tensor.

The error of a tensor is its largest difference divided by the largest magnitude of the reference tensor. The divisor is
at least 1e-6 (gradients) or 1e-3 (others) of the largest magnitude among all tensors of its kind. A gradient that is
mathematically zero (a key's bias) has no meaningful relative error of its own, and an optimizer that divides by its
size turns the noise into a parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

Key = tuple[str, str]  # kind, name
Values = dict[Key, torch.Tensor]
Local = Callable[[Key, torch.Tensor], torch.Tensor | None]  # (key, whole tensor) -> the shard


@dataclass(frozen=True, slots=True)
class TensorError:
    """The worst error of one tensor over all ranks and steps."""

    kind: str  # "loss", "output", "gradient", "buffer" or "parameter"
    name: str
    error: float
    rank: int


def compare(
    expected: Values, actual: Values, rank: int, worst: dict[Key, TensorError], local: Local = lambda _, whole: whole
) -> None:
    """Record the worst difference of every tensor of a rank in ``worst``. ``local``: returns the shard expected on the
    rank, None if it holds no part. A tensor that only one side has counts as infinite, even a gradient of zeros: an
    optimizer decays parameters with a gradient, and skips those without."""
    sizes = {key: magnitude(tensor) for key, tensor in expected.items()}
    floor: dict[str, float] = {}
    for (kind, _), size in sizes.items():
        floor[kind] = max(floor.get(kind, 0.0), size)
    for key in expected.keys() | actual.keys():
        kind, name = key
        error = float("inf")
        want = local(key, expected[key]) if key in expected else None
        if want is None and key not in actual:
            continue
        if want is not None and key in actual:
            least = 1e-3 * floor[kind]
            if kind == "gradient":
                is_wide = expected[key].dtype in (torch.float64, torch.complex128)  # else rounding is far larger
                least = 1e-6 * max(floor[kind], natural_gradient(sizes, name) if is_wide else 0.0)
            error = relative_difference(want, actual[key], max(sizes[key], least))
        if key not in worst or error > worst[key].error or error != error:
            worst[key] = TensorError(kind, name, error, rank)


def magnitude(tensor: torch.Tensor) -> float:
    """Return the largest finite absolute value."""
    tensor, exact = tensor.detach(), not (tensor.is_floating_point() or tensor.is_complex())
    finite = (tensor.double() if exact else tensor).abs()  # torch has no abs of bool and of most unsigned types
    finite = finite[torch.isfinite(finite)] if finite.is_floating_point() else finite
    return float(finite.max()) if finite.numel() else 0.0


def natural_gradient(sizes: Mapping[Key, float], name: str) -> float:
    """Return the gradient of a parameter for which moving it by its own magnitude changes the loss by all of the loss.
    ``sizes``: the magnitudes of all values.

    A gradient of 1e-16 of that is the rounding of a gradient that is zero: it moves the loss by less than its rounding.
    """
    size = sizes.get(("parameter", name), 0.0)
    loss = max((magnitude for (kind, _), magnitude in sizes.items() if kind == "loss"), default=0.0)
    return loss / size if size else 0.0


def is_finite(tensor: torch.Tensor) -> bool:
    return bool(tensor.detach().isfinite().all())


def relative_difference(want: torch.Tensor, have: torch.Tensor, scale: float) -> float:
    """Return the largest difference divided by ``scale``; nan equals nan, and is infinitely far from numbers."""
    if want.shape != have.shape:
        return float("inf")
    if not want.numel():
        return 0.0
    want, have = want.detach(), have.detach()
    inexact = want.is_floating_point() or want.is_complex()
    same = (want == have) | (torch.isnan(want) & torch.isnan(have)) if inexact else want == have
    wide = torch.complex128 if want.is_complex() or have.is_complex() else torch.float64
    difference = torch.where(same, torch.zeros((), dtype=torch.float64), (want.to(wide) - have.to(wide)).abs())
    worst = float(difference.nan_to_num(nan=torch.inf).max())  # nan does not compare
    return worst / scale if scale else (0.0 if worst == 0 else float("inf"))
