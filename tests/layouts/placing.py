"""Random layouts, and the tensors that ranks hold under them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shardwise.layouts.conversions import Move
from shardwise.layouts.layout import Atom, Layout
from shardwise.layouts.mesh import Mesh
from shardwise.proof.virtual import VirtualCluster
from shardwise.runtime.local_shards import shard

MESHES = (
    Mesh(dp=2, tp=4),
    Mesh(a=2, b=3),
    Mesh(a=2, b=2, c=2),
    Mesh(x=8),
    Mesh(x=3, y=2),
    Mesh(x=6),
    Mesh(x=12),
)


def random_layout(rng: random.Random, mesh: Mesh, atoms: tuple[tuple[int, ...], ...], states: str = "IRP") -> Layout:
    """A layout over given atoms: half of the axes sharded, the others in one of ``states``."""
    layout = Layout(mesh, tuple(tuple(Atom(size) for size in dim) or (Atom(1),) for dim in atoms))
    positions = [(d, i) for d, dim in enumerate(atoms) for i, size in enumerate(dim) if size > 1]
    axes = list(mesh.sub_axes)
    rng.shuffle(axes)
    for axis in axes:
        if positions and rng.random() < 0.5:
            layout = layout.moved({axis: rng.choice(positions)})
        else:
            layout = layout.moved({axis: rng.choice(states)})
    return layout


def scatter(full: Tensor, layout: Layout, generator: torch.Generator) -> list[Tensor]:
    """What the ranks hold of a global tensor; partial values are random summands of it, whose sum is exact if its
    elements are integers (equal ones stay equal)."""
    bare = layout.moved(dict.fromkeys(layout.partial_axes, "I"))
    full = full.detach()
    keys = []
    for rank in range(layout.mesh.num_devices):
        coordinates = layout.mesh.coordinates(rank)
        keys.append(tuple(coordinates[axis] for axis in layout.partial_axes))
    distinct = sorted(set(keys))
    if len(distinct) == 1:
        summands = {distinct[0]: full}
    else:
        shape = (*full.shape, 2) if full.is_complex() else full.shape
        drawn = [torch.randn(shape, generator=generator, dtype=torch.float64) for _ in distinct[1:]]
        drawn = [(number * 1024).round() / 1024 for number in drawn]
        drawn = [(torch.view_as_complex(d) if full.is_complex() else d).to(full.dtype) for d in drawn]
        summands = dict(zip(distinct, [full - sum(drawn), *drawn], strict=True))
    return [
        shard(summands[keys[rank]], bare, layout.mesh.coordinates(rank)).clone()
        for rank in range(layout.mesh.num_devices)
    ]


def worst_difference(held: list[Tensor], layout: Layout, full: Tensor) -> float:
    """The largest difference on any rank from what it should hold of ``full``; partial values are summed first."""
    bare = layout.moved(dict.fromkeys(layout.partial_axes, "I"))
    worst = 0.0
    for rank in range(layout.mesh.num_devices):
        group = layout.mesh.group(layout.partial_axes, rank) if layout.partial_axes else (rank,)
        total = torch.stack([held[member].detach() for member in group]).sum(0)
        want = shard(full, bare, layout.mesh.coordinates(rank))
        assert total.shape == want.shape, f"rank {rank} holds {tuple(total.shape)} of {layout}, not {tuple(want.shape)}"
        if want.numel():
            worst = max(worst, float((total - want).abs().max()))
    return worst


def convert(cluster: VirtualCluster, tensors: Sequence[Tensor], moves: Sequence[Move]) -> list[Tensor]:
    """Every rank's tensor after the moves, differentiably."""
    converted = list(tensors)
    for move in moves:
        if not (move.entry.forward == "none" and move.entry.backward == "none"):
            converted = list(_VirtualMove.apply(cluster, (move,), *converted))
    return converted


class _VirtualMove(torch.autograd.Function):
    """A move of all ranks' tensors with its backward."""

    @staticmethod
    def forward(ctx: Any, cluster: VirtualCluster, moves: Sequence[Move], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.cluster, ctx.moves = cluster, moves
        results = cluster.perform_together(moves, tensors, backward=False)
        return tuple(_fresh(result, tensors) for result in results)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Any, ...]:
        results = ctx.cluster.perform_together(ctx.moves, cotangents, backward=True)
        return (None, None, *(_fresh(result, cotangents) for result in results))


def _fresh(result: Tensor, operands: Sequence[Tensor]) -> Tensor:
    """Return the result, cloned if it is an operand or a view: ranks must not share memory."""
    return result.clone() if any(result is tensor or result._base is not None for tensor in operands) else result
