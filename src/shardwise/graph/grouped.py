"""``shardwise::grouped_mm``: rows sorted by expert, each times the matrix of its expert (a mixture's layer).

Row ``r`` belongs to expert ``e`` if ``ends[e - 1] <= r < ends[e]``, and to none past the last end: its result is 0. A
part of the rows or of the experts is told which it has, atom by atom; every row whose expert is elsewhere gives 0, so
that results of parts of the experts add up. Nothing is computed twice: each product is of the rows that are there with
the matrices that are there, one after the other, and the host reads where they begin.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from shardwise.graph.operators import global_indices

_PARTS = "int[] row_sizes, int[] row_offsets, int[] row_lengths, int[] sizes, int[] offsets, int[] lengths"


def _blocks(ends: torch.Tensor, parts: Sequence[Sequence[int]]) -> Iterator[tuple[int, slice]]:
    """Local expert -> its local rows. Global indices ascend, so the rows of an expert stand together."""
    row_sizes, row_offsets, row_lengths, sizes, offsets, lengths = parts
    rows = global_indices(row_sizes, row_offsets, row_lengths, ends.device).flatten()
    experts = global_indices(sizes, offsets, lengths, ends.device).flatten()
    of_row = torch.searchsorted(ends.to(torch.int64), rows, right=True)
    bounds = torch.stack((torch.searchsorted(of_row, experts), torch.searchsorted(of_row, experts, right=True)))
    for expert, (start, stop) in enumerate(bounds.t().tolist()):
        if start < stop:
            yield expert, slice(start, stop)


@torch.library.custom_op(
    "shardwise::grouped_mm", mutates_args=(), schema=f"(Tensor x, Tensor weight, Tensor ends, {_PARTS}) -> Tensor"
)
def grouped_mm(x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor, *parts: Sequence[int]) -> torch.Tensor:
    """x [s, k], weight [e, k, n] -> [s, n]. ``ends``: of all experts. ``parts``: the rows of ``x`` and the experts of
    ``weight``, as sizes, offsets and lengths of their atoms."""
    result = x.new_zeros(x.shape[0], weight.shape[2])
    for expert, rows in _blocks(ends, parts):
        result[rows] = x[rows] @ weight[expert]
    return result


@grouped_mm.register_fake
def _(x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor, *parts: Sequence[int]) -> torch.Tensor:
    return x.new_empty(x.shape[0], weight.shape[2])


@torch.library.custom_op(
    "shardwise::grouped_mm_backward",
    mutates_args=(),
    schema=f"(Tensor gradient, Tensor x, Tensor weight, Tensor ends, {_PARTS}) -> (Tensor, Tensor)",
)
def _grouped_mm_backward(
    gradient: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor, *parts: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    of_x = torch.zeros_like(x)
    of_weight = torch.zeros(weight.shape, dtype=weight.dtype, device=weight.device)
    for expert, rows in _blocks(ends, parts):
        of_x[rows] = gradient[rows] @ weight[expert].t()
        of_weight[expert] = x[rows].t() @ gradient[rows]
    return of_x, of_weight


@_grouped_mm_backward.register_fake
def _(
    gradient: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor, *parts: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(x), weight.new_empty(weight.shape)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    x, weight, ends, *ctx.parts = inputs
    ctx.save_for_backward(x, weight, ends)


def _backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    of_x, of_weight = torch.ops.shardwise.grouped_mm_backward.default(gradient, *ctx.saved_tensors, *ctx.parts)
    return of_x, of_weight, *[None] * 7


grouped_mm.register_autograd(_backward, setup_context=_setup)
