"""What a rank holds of a parameter that a plan has split: its shard, or nothing where other ranks have its stage."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shardwise.launch import rank_groups
from shardwise.layouts.layout import Layout
from shardwise.mindspore import context
from shardwise.runtime.local_shards import shard

_HELD = "_shardwise_held"  # the attribute of a split parameter
_AVERAGED = "_shardwise_averaged"  # of the number of ranks whose gradients it sums
_PARAMETER = "_shardwise_parameter"  # the attribute of a gradient


@dataclass(frozen=True)
class Held:
    """How a parameter is kept: ``layout`` over ``ranks``, which are those of its stage."""

    layout: Layout
    ranks: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """The whole one."""
        return tuple(self.layout.shape)

    @property
    def is_split(self) -> bool:
        """Whether no rank has all of it, or some rank has nothing of it."""
        return bool(self.layout.positions) or len(self.ranks) < rank_groups.all_ranks_group().size

    def coordinates(self, rank: int) -> dict[str, int]:
        """Where one of the ranks is on the mesh."""
        return dict(self.layout.mesh.coordinates(self.ranks.index(rank)))


def holding_of(parameter: torch.Tensor) -> Held | None:
    """How a parameter is kept; None while this rank has all of it."""
    holding: Held | None = getattr(parameter, _HELD, None)
    return holding


def whole_shape(tensor: torch.Tensor) -> tuple[int, ...]:
    """The shape of the whole of which a tensor may be a shard."""
    holding = holding_of(tensor)
    return tuple(tensor.shape) if holding is None else holding.shape


def is_elsewhere(parameter: torch.Tensor) -> bool:
    """Whether the ranks of another stage have a parameter, and this one has nothing of it."""
    holding = holding_of(parameter)
    return holding is not None and dist.is_initialized() and dist.get_rank() not in holding.ranks


def hold(parameter: torch.Tensor, part: torch.Tensor, holding: Held, averaged_over: int = 1) -> None:
    """Let a parameter be this rank's part of a whole. ``averaged_over``: the ranks whose gradients are summed in it."""
    parameter.data = part
    setattr(parameter, _HELD, holding)
    setattr(parameter, _AVERAGED, averaged_over)


def own_shard(value: Any, parameter: torch.Tensor) -> Any:
    """Of a tensor in the whole shape of a split parameter, this rank's part; anything else as it is."""
    holding = holding_of(parameter)
    if holding is None or not isinstance(value, torch.Tensor) or not value.dim() or value.shape == parameter.shape:
        return value
    if is_elsewhere(parameter):
        return value.new_empty(0)
    assert tuple(value.shape) == holding.shape, "a state has the shape of its parameter"
    return shard(value, holding.layout, holding.coordinates(dist.get_rank())).clone()


def joined(holding: Held, parts: Iterable[tuple[int, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
    """The whole of which ranks have parts, and which of its elements are missing. ``parts``: (rank, part)."""
    layout, shape = holding.layout, holding.shape
    places = torch.arange(prod(shape)).reshape(shape)
    whole, missing = torch.empty(0), torch.ones(prod(shape), dtype=torch.bool)
    for rank, part in parts:
        indices = shard(places, layout, holding.coordinates(rank)).reshape(-1)
        if not whole.numel():
            whole = part.new_zeros(prod(shape))
        whole[indices], missing[indices] = part.detach().as_subclass(torch.Tensor).reshape(-1)[: indices.numel()], False
    return whole.reshape(shape), missing


def gathered(tensor: torch.Tensor, holding: Held | None) -> torch.Tensor:
    """The whole of a tensor of which the ranks hold parts; of one that nobody has split, rank 0's. All ranks call
    it."""
    part = tensor.detach().as_subclass(torch.Tensor)
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return part
    if holding is None:
        return rank_groups.broadcast(part, 0, rank_groups.all_ranks_group())
    padded = part.new_zeros(holding.layout.max_local_numel)
    padded[: part.numel()] = part.reshape(-1)
    rows = rank_groups.all_gather(padded, rank_groups.all_ranks_group()).view(dist.get_world_size(), -1)
    return joined(holding, [(rank, rows[rank]) for rank in holding.ranks])[0]


@contextmanager
def whole(cell: nn.Module) -> Iterator[None]:
    """Every rank has all parameters and buffers of a cell meanwhile; all ranks call it."""
    parts = [(x, x.data) for x in (*cell.parameters(), *cell.buffers()) if holding_of(x) is not None]
    try:
        for tensor, part in parts:
            tensor.data = gathered(part, holding_of(tensor))
        yield
    finally:
        for tensor, part in parts:
            tensor.data = part


class _Gathered(torch.autograd.Function):
    """A whole parameter of its parts. Every rank has the same cotangent, whole, and keeps its part."""

    @staticmethod
    def forward(ctx: Any, parameter: torch.Tensor) -> torch.Tensor:
        ctx.parameter = parameter
        return gathered(parameter, holding_of(parameter)).clone()

    @staticmethod
    def backward(ctx: Any, cotangent: torch.Tensor) -> torch.Tensor:
        part: torch.Tensor = own_shard(cotangent, ctx.parameter)
        return part


def with_whole_parameters(cell: nn.Module) -> dict[str, torch.Tensor]:
    """The parameters and buffers of a cell by their names, those in parts gathered; all ranks call it."""
    named = {**dict(cell.named_parameters()), **dict(cell.named_buffers())}
    apply: Any = _Gathered.apply
    return {name: apply(x) if (of := holding_of(x)) and of.layout.positions else x for name, x in named.items()}


def copies(parameter: torch.Tensor) -> int:
    """How many ranks hold the same shard of a parameter."""
    holding = holding_of(parameter)
    if holding is None:
        return context.options().stage_devices
    layout = holding.layout
    return prod(layout.mesh.sizes[axis] for axis in layout.mesh.sub_axes if axis not in layout.positions)


def averaged_over(parameter: torch.Tensor) -> int:
    """How many ranks' gradients the gradient of a parameter sums, whether or not its storage is one part of it."""
    return max(copies(parameter), getattr(parameter, _AVERAGED, 1))


def as_gradient(tensor: torch.Tensor, parameter: torch.Tensor | None) -> torch.Tensor:
    """A tensor, known as a gradient of a parameter, so that it is this rank's part as the parameter is; None: of
    none."""
    if parameter is not None:
        setattr(tensor, _PARAMETER, parameter)
    return tensor


def parameter_of(gradient: torch.Tensor) -> torch.Tensor | None:
    """The parameter of a gradient; None for one that has been computed with since, and for any other tensor."""
    parameter: torch.Tensor | None = getattr(gradient, _PARAMETER, None)
    return parameter
