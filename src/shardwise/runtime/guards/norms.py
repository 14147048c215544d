"""Compute the norm of gradients that are sharded over ranks.

Each rank takes the norm of the shards that it counts (``registry.ShardRecord.counts``), so every element of the model
is in exactly one of these norms. One all-reduce gives every rank all of them, and every rank combines them in the same
order. Gradients that are whole on every rank are added once, at the end.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import reduce

import torch
import torch.distributed as dist

from shardwise.errors import ShardwiseError
from shardwise.runtime.communicator import rank_device
from shardwise.runtime.cpu_embedding import device_of
from shardwise.runtime.guards.registry import ShardRecord, are_over_ranks, records_of


@torch.no_grad()
def clip_grad_norm(
    parameters: torch.nn.Module | torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    *,
    error_if_nonfinite: bool = False,
) -> torch.Tensor:
    """Scale gradients in place so that their norm, as one device would compute it, is at most ``max_norm``.

    Every rank calls this. It needs one all-reduce of two numbers per rank if the plan shards any of the parameters,
    otherwise none. Parameters that do not come from ``parallelize`` may be included if all ranks hold the same
    gradients of them.

    Args:
        parameters: The module that ``sw.parallelize`` returned, or some parameters; the same ones on every rank.
        max_norm: The largest norm allowed.
        norm_type: The order of the norm: any p > 0, or ``inf``.
        error_if_nonfinite: Whether to raise RuntimeError for a norm that is infinite or nan, as torch does.

    Returns:
        The norm before clipping: 0-dim, at least float32, the same bits on every rank.

    Raises:
        ShardwiseError: If ranks have different gradients of parameters that do not come from ``parallelize``, or for an
            order that is not positive.
        RuntimeError: If ``error_if_nonfinite`` and the norm is infinite or nan.
    """
    if isinstance(parameters, torch.nn.Module):
        parameters = parameters.parameters()
    elif isinstance(parameters, torch.Tensor):
        parameters = [parameters]
    listed = list({id(parameter): parameter for parameter in parameters}.values())
    places = records_of(listed)
    gradients = [(p.grad, place) for p, place in zip(listed, places, strict=True) if p.grad is not None]
    total = total_norm(
        gradients,
        norm_type,
        device=device_of(listed) if listed else rank_device(),
        across_ranks=are_over_ranks(places),
        error_if_nonfinite=error_if_nonfinite,
    )
    torch.nn.utils.clip_grads_with_norm_(listed, max_norm, total)
    return total


def total_norm(
    tensors: Sequence[tuple[torch.Tensor, ShardRecord | None]],
    norm_type: float,
    *,
    device: torch.device,
    across_ranks: bool,
    error_if_nonfinite: bool,
) -> torch.Tensor:
    """Return the norm of tensors. Those with a record lie as its layout says; the others (None) must be whole and equal
    on every rank, which is checked. ``across_ranks``: the same on every rank, true if any is a shard on any."""
    order = float(norm_type)
    if not order > 0:
        what = f"norms of sharded gradients need a positive order, got {norm_type!r}"
        raise ShardwiseError(what, fix="use norm_type=2.0, any other p > 0, or float('inf')")
    counted = [tensor for tensor, record in tensors if record is not None and record.is_shard and record.counts]
    whole = [tensor for tensor, record in tensors if record is None or not record.is_shard]
    of_shards, rest = _local_norm(counted, order, device), _local_norm(whole, order, device)
    if across_ranks:
        # Each rank fills its own row: the sum is an exact all-gather that every backend supports.
        rows = torch.zeros(dist.get_world_size(), 2, dtype=torch.float64, device=device)
        rows[dist.get_rank(), 0], rows[dist.get_rank(), 1] = of_shards, rest
        dist.all_reduce(rows)
        strangers = sum(record is None for _, record in tensors)
        if strangers:
            _check_equal(rows[:, 1], strangers)
        total = _combine(torch.cat([rows[:, 0], rows[:1, 1]]), order)
    else:
        total = rest
    if error_if_nonfinite and not total.isfinite():
        raise RuntimeError(
            f"the total norm of order {order} of the gradients is {total.item()}: they cannot be clipped "
            "(error_if_nonfinite=False scales them by it anyway)"
        )
    return total.to(reduce(torch.promote_types, (accumulator(t.dtype) for t, _ in tensors), torch.float32))


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """Return the real dtype in which a norm is computed: float32 for anything narrower."""
    return torch.promote_types(dtype.to_real() if dtype.is_complex else dtype, torch.float32)


def _local_norm(tensors: Sequence[torch.Tensor], order: float, device: torch.device) -> torch.Tensor:
    """Return the norm of some tensors on this rank, as a float64 scalar on ``device``; 0 for none."""
    groups: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for tensor in tensors:
        if tensor.numel():  # an empty shard (uneven sizes) has no norm of order inf
            groups.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    norms = [torch.zeros(1, dtype=torch.float64, device=device)]
    for (_, dtype), group in groups.items():
        wider = torch.float32 if dtype in (torch.float16, torch.bfloat16) else None
        norms.append(torch.stack(torch._foreach_norm(group, order, dtype=wider)).to(device, torch.float64))
    return _combine(torch.cat(norms), order)


def _combine(norms: torch.Tensor, order: float) -> torch.Tensor:
    """Combine norms into the norm of the concatenated tensors. They are divided by the largest first: the powers of
    high orders would overflow."""
    largest = norms.max()
    unit = torch.where(largest.isfinite() & (largest > 0), largest, torch.ones_like(largest))
    total: torch.Tensor = unit * torch.linalg.vector_norm(norms / unit, order)
    return total


def _check_equal(norms: torch.Tensor, count: int) -> None:
    """Raise ShardwiseError unless all ranks found the same norm of the tensors that are whole everywhere."""
    of_ranks = norms.tolist()
    others = [
        rank
        for rank, norm in enumerate(of_ranks)
        if norm != of_ranks[0] and not (norm != norm and of_ranks[0] != of_ranks[0])
    ]
    if others:
        shown = ", ".join(f"{of_ranks[rank]:.6g} on rank {rank}" for rank in others[:3])
        raise ShardwiseError(
            f"{count} of the tensors do not belong to a parallelized module, and ranks disagree on the norm of "
            f"the tensors that are whole on every rank: {of_ranks[0]:.6g} on rank 0, {shown}",
            fix="average their gradients over the ranks before clipping, or clip them in a separate call",
        )
