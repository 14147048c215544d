"""``shardwise::grouped_mm``: multiplies every row by the matrix of its expert (a mixture-of-experts layer).

Row ``r`` of the result is row ``r // each`` of ``x`` times the matrix of expert ``experts[r]``; it is 0 if there is no
such expert. Rows may be in any order, so that they are split as the samples are: only local rows are sorted. A shard of
the experts gets the numbers of its experts, atom by atom. Rows of experts elsewhere give 0, so results of shards add
up. There is one product per local expert, one after another, and the host reads the number of rows per expert.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from shardwise.graph.custom_operators import global_indices

_PARTS = "int[] sizes, int[] offsets, int[] lengths"


def _groups(
    x: torch.Tensor, experts: torch.Tensor, parts: Sequence[Sequence[int]]
) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    """Return (local expert, its rows of the result, its rows of ``x``), both ascending, for experts that have rows.

    Raises IndexError for a negative expert.
    """
    sizes, offsets, lengths = parts
    by_expert, order = experts.to(torch.int64).sort(stable=True)
    mine = global_indices(sizes, offsets, lengths, experts.device).flatten()
    bounds = torch.stack((torch.searchsorted(by_expert, mine), torch.searchsorted(by_expert, mine, right=True)), dim=1)
    first = by_expert[:1] if by_expert.shape[0] else bounds.new_zeros(1)
    lowest, *flat = torch.cat((first, bounds.flatten())).tolist()
    if lowest < 0:
        raise IndexError(f"grouped_mm: a row is of expert {lowest}; experts are counted from 0")
    rows_per_token = experts.shape[0] // max(x.shape[0], 1)
    for expert, (start, stop) in enumerate(zip(flat[::2], flat[1::2], strict=True)):
        if start < stop:
            rows = order[start:stop]
            yield expert, rows, rows if rows_per_token == 1 else rows // rows_per_token


@torch.library.custom_op(
    "shardwise::grouped_mm", mutates_args=(), schema=f"(Tensor x, Tensor weight, Tensor experts, {_PARTS}) -> Tensor"
)
def grouped_mm(x: torch.Tensor, weight: torch.Tensor, experts: torch.Tensor, *parts: Sequence[int]) -> torch.Tensor:
    """Multiply x [t, k] by weight [e, k, n] for experts [t * each] -> [t * each, n]. ``parts``: the experts of
    ``weight``, as sizes, offsets and lengths of their atoms."""
    result = x.new_zeros(experts.shape[0], weight.shape[2])
    for expert, rows, of_x in _groups(x, experts, parts):
        result[rows] = x[of_x] @ weight[expert]
    return result


@grouped_mm.register_fake
def _(x: torch.Tensor, weight: torch.Tensor, experts: torch.Tensor, *parts: Sequence[int]) -> torch.Tensor:
    return x.new_empty(experts.shape[0], weight.shape[2])


@torch.library.custom_op(
    "shardwise::grouped_mm_backward",
    mutates_args=(),
    schema=f"(Tensor gradient, Tensor x, Tensor weight, Tensor experts, {_PARTS}) -> (Tensor, Tensor)",
)
def _grouped_mm_backward(
    gradient: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, experts: torch.Tensor, *parts: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    of_x = torch.zeros_like(x)
    of_weight = torch.zeros(weight.shape, dtype=weight.dtype, device=weight.device)
    each_once = x.shape[0] == experts.shape[0]
    for expert, rows, from_x in _groups(x, experts, parts):
        of_rows = gradient[rows]
        torch.mm(x[from_x].t(), of_rows, out=of_weight[expert])
        if each_once:
            of_x[from_x] = of_rows @ weight[expert].t()
        else:
            of_x.index_add_(0, from_x, of_rows @ weight[expert].t())
    return of_x, of_weight


@_grouped_mm_backward.register_fake
def _(
    gradient: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, experts: torch.Tensor, *parts: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(x), weight.new_empty(weight.shape)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    x, weight, experts, *ctx.parts = inputs
    ctx.save_for_backward(x, weight, experts)


def _backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    of_x, of_weight = torch.ops.shardwise.grouped_mm_backward.default(gradient, *ctx.saved_tensors, *ctx.parts)
    return of_x, of_weight, *[None] * 4


grouped_mm.register_autograd(_backward, setup_context=_setup)


@torch.library.custom_op(
    "shardwise::order_by_owner", mutates_args=(), schema="(Tensor keys, int[] ends) -> (Tensor, Tensor)"
)
def order_by_owner(keys: torch.Tensor, ends: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the positions of keys [rows] sorted by owner, and how many keys each owner has [1, owners]. Owner i has
    the keys below ``ends[i]`` that no owner before it has. The last one gets the keys that are no one's, and the first
    the negative ones: the product that reads them there makes zeros of those and refuses these."""
    owners = torch.searchsorted(torch.tensor(ends[:-1], dtype=torch.int64, device=keys.device), keys.long(), right=True)
    return owners.argsort(stable=True), owners.bincount(minlength=len(ends)).unsqueeze(0)


@order_by_owner.register_fake
def _(keys: torch.Tensor, ends: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    return keys.new_empty(keys.shape, dtype=torch.int64), keys.new_empty((1, len(ends)), dtype=torch.int64)


def experts_of(ends: torch.Tensor, rows: int) -> torch.Tensor:
    """Return the expert of each of ``rows`` sorted rows. ``ends``: one past the last row of each expert."""
    return torch.searchsorted(ends, torch.arange(rows, dtype=ends.dtype, device=ends.device), right=True)
