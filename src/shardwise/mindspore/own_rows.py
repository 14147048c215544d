"""The rows of a batch that each rank is given, and its rows of a whole tensor."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist

import shardwise as sw
from shardwise.mindspore import context
from shardwise.mindspore.library import Atom, Layout, shard


def rows_of(par: sw.Parallel) -> list[tuple[int, int]]:
    """Return each rank's rows (start, stop) of the whole batch. Empty: all ranks are given all of them."""
    plan = par.plan
    fed = [plan.layouts[entry.name] for entry in plan.inputs if entry.shape]
    if not fed:
        return []
    batch = max(input_entry.shape[0] for input_entry in par.latest.inputs if input_entry.shape)
    axes = [axis for atom in fed[0].dims[0] for axis in atom.axes]
    return _parts(Layout(plan.mesh, ((Atom(batch, tuple(axes)),),))) if axes else []


@lru_cache(maxsize=64)
def _parts(layout: Layout) -> list[tuple[int, int]]:
    """Return the elements (start, stop) of a dim that each rank holds."""
    numbers = torch.arange(layout.shape[0])
    parts = [shard(numbers, layout, layout.mesh.coordinates(rank)) for rank in range(layout.mesh.num_devices)]
    return [(int(part[0]), int(part[-1]) + 1) for part in parts]


def own_rows(x: Any, rows: list[tuple[int, int]]) -> Any:
    if not rows or not isinstance(x, torch.Tensor) or not x.dim() or x.shape[0] != max(stop for _, stop in rows):
        return x
    apply: Any = _Rows.apply
    return apply(x, rows)


class _Rows(torch.autograd.Function):
    """Slice of this rank's rows. Its gradient is all-gathered, since all ranks hold the whole tensor.

    Every rank differentiates a loss of its rows, so the gradient is that of the sum of these losses, or of their mean
    with ``gradients_mean``.
    """

    @staticmethod
    def forward(ctx: Any, whole: torch.Tensor, rows: list[tuple[int, int]]) -> torch.Tensor:
        ctx.rows, ctx.shape = rows, whole.shape
        start, stop = rows[dist.get_rank()]
        return whole[start:stop].clone()

    @staticmethod
    def backward(ctx: Any, cotangent: torch.Tensor) -> tuple[torch.Tensor, None]:
        parts = [torch.empty_like(cotangent) for _ in ctx.rows]
        dist.all_gather(parts, cotangent.contiguous())
        whole = cotangent.new_zeros(ctx.shape)
        for (start, stop), part in zip(ctx.rows, parts, strict=True):
            whole[start:stop] = part
        return whole / len(set(ctx.rows)) if context.options().gradients_mean else whole, None
