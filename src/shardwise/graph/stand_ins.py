"""Replacements for PyTorch functions whose Python, or whose inner shapes, depend on data.

``shardwise::ctc_loss`` is connectionist temporal classification (Graves et al. 2006) as one operator: PyTorch's own has
a table whose size depends on the lengths of the labels. A grouped product runs in float32 and, in a verification, in
float64; PyTorch traces it only in bfloat16.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.modules.batchnorm import SyncBatchNorm, _BatchNorm

from shardwise.graph.grouped import experts_of, grouped_mm
from shardwise.graph.operator_library import kernel

_LABELS = "Tensor targets, Tensor input_lengths, Tensor target_lengths, int blank, bool zero_infinity"


@kernel(lambda log_probs, *rest: log_probs.new_empty(log_probs.shape[1]), _LABELS)
def ctc_loss(log_probs: Tensor, *rest: Any) -> Tensor:
    """Return losses [n], given ``log_probs`` [t, n, c], ``targets`` [n, s] or concatenated, and lengths [n]."""
    if not log_probs.shape[1]:
        return log_probs.new_zeros(0)
    losses: Tensor = torch.ops.aten._ctc_loss.Tensor(log_probs, *rest)[0]
    zero_infinity = rest[-1]
    return losses.masked_fill(losses == math.inf, 0) if zero_infinity else losses


@kernel(lambda gradient, log_probs, *rest: torch.empty_like(log_probs), _LABELS)
def _ctc_loss_backward(gradient: Tensor, log_probs: Tensor, *rest: Any) -> Tensor:
    if not log_probs.shape[1]:
        return torch.zeros_like(log_probs)
    *lengths, blank, zero_infinity = rest
    losses, table = torch.ops.aten._ctc_loss.Tensor(log_probs, *rest)
    call = torch.ops.aten._ctc_loss_backward.Tensor
    grad_log_probs: Tensor = call(gradient, log_probs, *lengths, losses, table, blank, zero_infinity)
    return grad_log_probs


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.blank, ctx.zero_infinity = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    call = torch.ops.shardwise.ctc_loss_backward.default
    return call(gradient, *ctx.saved_tensors, ctx.blank, ctx.zero_infinity), *[None] * 5


ctc_loss.register_autograd(_backward, setup_context=_setup)


def _ctc(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Tensor | Sequence[int],
    target_lengths: Tensor | Sequence[int],
    blank: int = 0,
    reduction: str = "mean",
    zero_infinity: bool = False,
) -> Tensor:
    def lengths(sizes: Tensor | Sequence[int]) -> Tensor:
        return sizes.reshape(-1) if isinstance(sizes, Tensor) else torch.tensor(tuple(sizes), dtype=torch.int64)

    single = log_probs.dim() == 2
    scores = log_probs.unsqueeze(1) if single else log_probs
    lengths_of_targets = lengths(target_lengths)
    losses: Tensor = torch.ops.shardwise.ctc_loss.default(
        scores, targets, lengths(input_lengths), lengths_of_targets, blank, zero_infinity
    )
    if reduction == "mean":
        return (losses / lengths_of_targets.clamp_min(1).to(losses.dtype)).mean()
    return losses.sum() if reduction == "sum" else losses.squeeze(0) if single else losses


def _gaussian_nll(
    input: Tensor, target: Tensor, var: Tensor | float, full: bool = False, eps: float = 1e-6, reduction: str = "mean"
) -> Tensor:
    """Compute the Gaussian loss without PyTorch's check of the variances: negative ones are not reported."""
    variance = torch.full_like(input, var) if isinstance(var, float) else var
    if variance.shape != input.shape and variance.shape == input.shape[:-1]:
        variance = variance.unsqueeze(-1)
    variance = variance + (variance.clamp(min=eps) - variance).detach()
    loss = 0.5 * (variance.log() + (input - target).square() / variance)
    if full:
        loss = loss + 0.5 * math.log(2 * math.pi)
    return loss.mean() if reduction == "mean" else loss.sum() if reduction == "sum" else loss


def _grouped_mm(
    input: Tensor,
    mat2: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Multiply rows by their expert's matrix; the operator's other forms use PyTorch's own."""
    if (input.dim(), mat2.dim()) != (2, 3) or offs is None or bias is not None or out_dtype is not None:
        other: Tensor = torch._grouped_mm(input, mat2, offs=offs, bias=bias, out_dtype=out_dtype)
        return other
    experts = mat2.shape[0]
    product: Tensor = grouped_mm(input, mat2, experts_of(offs, input.shape[0]), [experts], [0], [experts], True)
    return product


def _cumulative_batch_norm(norm: _BatchNorm, input: Tensor) -> Tensor:
    """Apply training-mode batch norm with ``momentum=None``, whose running statistics average over all batches so far.
    PyTorch's own reads the number of batches out of its tensor."""
    assert norm.running_mean is not None, "statistics are tracked"
    assert norm.running_var is not None, "statistics are tracked"
    assert norm.num_batches_tracked is not None, "batches are counted"
    norm._check_input_dim(input)
    norm.num_batches_tracked.add_(1)
    factor = 1.0 / norm.num_batches_tracked.to(norm.running_mean.dtype)
    mean, variance = norm.running_mean.clone(), norm.running_var.clone()
    result = F.batch_norm(input, mean, variance, norm.weight, norm.bias, True, 1.0, norm.eps)
    with torch.no_grad():  # mean and variance are those of the batch now
        for running, new in ((norm.running_mean, mean), (norm.running_var, variance)):
            running.copy_(running * (1.0 - factor) + new * factor)
    return result


@contextmanager
def cumulative_averages() -> Iterator[None]:
    """Trace batch norms with ``momentum=None`` with their factor as a tensor. Synchronized batch norms are included:
    the statistics of a plan are those of the whole batch."""
    original = _BatchNorm.forward

    def forward(norm: _BatchNorm, input: Tensor) -> Tensor:
        counts = norm.training and norm.momentum is None and norm.track_running_stats
        return _cumulative_batch_norm(norm, input) if counts else original(norm, input)

    with patch.object(_BatchNorm, "forward", forward), patch.object(SyncBatchNorm, "forward", forward):
        yield


@contextmanager
def grouped_experts() -> Iterator[None]:
    """Trace experts of ``transformers`` that are set to "eager", a loop over the experts that have tokens, as grouped
    products: the library lets a mixture choose between the two, and only the loop has shapes that depend on data."""
    experts = sys.modules.get("transformers.integrations.moe")
    if experts is None:
        yield
        return
    original = experts.ExpertsInterface.get_interface

    def get_interface(interface: Any, implementation: str | None, default: Callable[..., Any]) -> Callable[..., Any]:
        loops = implementation in (None, "eager")
        # A loop multiplies by F.linear, which autocast casts; so does it the products of "batched_mm".
        products = "batched_mm" if any(map(torch.is_autocast_enabled, ("cpu", "cuda"))) else "grouped_mm"
        forward: Callable[..., Any] = original(interface, products if loops else implementation, default)
        return forward

    with patch.object(experts.ExpertsInterface, "get_interface", get_interface):
        yield


STAND_INS: dict[Callable[..., Any], Callable[..., Any]] = {
    F.ctc_loss: _ctc,
    F.gaussian_nll_loss: _gaussian_nll,
    torch._grouped_mm: _grouped_mm,
}
