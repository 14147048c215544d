"""A rank's part of a split parameter: its shard, or nothing if other ranks have its stage; and how parameters are
stored: the copies over which they are sharded, the split counts that programs give them, and their names."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shardwise import Plan
from shardwise.errors import problem
from shardwise.mindspore import context, rank_groups
from shardwise.mindspore.checks import closest
from shardwise.mindspore.library import Box, Layout, boxes, parse_layout, shard

_HELD = "_shardwise_held"  # the attribute of a split parameter
_AVERAGED = "_shardwise_averaged"  # the attribute of the number of ranks whose gradients it sums
PARAMETERS = "_shardwise_parameter_plan"  # the attribute that holds ms.shard's parameter_plan
_PARAMETER = "_shardwise_parameter"  # the attribute of a gradient


@dataclass(frozen=True)
class Held:
    """Distribution of a parameter: ``layout`` over ``ranks``, the ranks of its stage."""

    layout: Layout
    ranks: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.layout.shape)

    @property
    def is_split(self) -> bool:
        """Return whether some rank lacks a part of the parameter."""
        return bool(self.layout.positions) or len(self.ranks) < rank_groups.all_ranks_group().size

    def coordinates(self, rank: int) -> dict[str, int]:
        return dict(self.layout.mesh.coordinates(self.ranks.index(rank)))


def holding_of(parameter: torch.Tensor) -> Held | None:
    """Return the distribution of a parameter. None while this rank has all of it."""
    holding: Held | None = getattr(parameter, _HELD, None)
    return holding


def whole_shape(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the shape of the whole tensor, of which ``tensor`` may be a shard."""
    holding = holding_of(tensor)
    return tuple(tensor.shape) if holding is None else holding.shape


def is_elsewhere(parameter: torch.Tensor) -> bool:
    """Return whether a parameter belongs to another stage, so that this rank has nothing of it."""
    holding = holding_of(parameter)
    return holding is not None and dist.is_initialized() and dist.get_rank() not in holding.ranks


def hold(parameter: torch.Tensor, part: torch.Tensor, holding: Held, averaged_over: int = 1) -> None:
    """Store this rank's part in a parameter. ``averaged_over``: number of ranks whose gradients its gradient sums."""
    parameter.data = part
    setattr(parameter, _HELD, holding)
    setattr(parameter, _AVERAGED, averaged_over)


def own_shard(value: Any, parameter: torch.Tensor) -> Any:
    """Return this rank's part of a tensor shaped like a whole split parameter. Other values stay unchanged."""
    holding = holding_of(parameter)
    if holding is None or not isinstance(value, torch.Tensor) or not value.dim() or value.shape == parameter.shape:
        return value
    if is_elsewhere(parameter):
        return value.new_empty(0)
    assert tuple(value.shape) == holding.shape, "a state has the shape of its parameter"
    return shard(value, holding.layout, holding.coordinates(dist.get_rank())).clone()


def joined(holding: Held, parts: Iterable[tuple[int, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Join the ranks' parts. Return the whole tensor and a mask of missing elements. ``parts``: (rank, part)."""
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
    """Gather a split tensor. A tensor that is not split is broadcast from rank 0. All ranks must call it."""
    part = tensor.detach().as_subclass(torch.Tensor)
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return part
    if holding is None:
        return rank_groups.broadcast(part, 0, rank_groups.all_ranks_group())
    padded = part.new_zeros(holding.layout.max_local_numel)
    padded[: part.numel()] = part.reshape(-1)
    rows = rank_groups.all_gather(padded, rank_groups.all_ranks_group()).view(dist.get_world_size(), -1)
    return joined(holding, [(rank, rows[rank]) for rank in holding.ranks])[0]


class _Gathered(torch.autograd.Function):
    """All-gather of a parameter. Every rank has the same whole cotangent and keeps its part."""

    @staticmethod
    def forward(ctx: Any, parameter: torch.Tensor) -> torch.Tensor:
        ctx.parameter = parameter
        return gathered(parameter, holding_of(parameter)).clone()

    @staticmethod
    def backward(ctx: Any, cotangent: torch.Tensor) -> Any:
        return own_shard(cotangent, ctx.parameter)


def with_whole_parameters(cell: nn.Module) -> dict[str, torch.Tensor]:
    """Return a cell's parameters and buffers by name, gathering the split ones. All ranks must call it."""
    named = {**dict(cell.named_parameters()), **dict(cell.named_buffers())}
    apply: Any = _Gathered.apply
    return {name: apply(x) if (of := holding_of(x)) and of.is_split else x for name, x in named.items()}


def copies(parameter: torch.Tensor) -> int:
    """Return the number of ranks that hold the same shard of a parameter."""
    holding = holding_of(parameter)
    if holding is None:
        return context.options().stage_devices
    layout = holding.layout
    return prod(layout.mesh.sizes[axis] for axis in layout.mesh.sub_axes if axis not in layout.positions)


def averaged_over(parameter: torch.Tensor) -> int:
    """Return the number of ranks whose gradients a parameter's gradient sums, even if its storage is sharded."""
    return max(copies(parameter), getattr(parameter, _AVERAGED, 1))


def as_gradient(tensor: torch.Tensor, parameter: torch.Tensor | None) -> torch.Tensor:
    """Mark a tensor as the gradient of a parameter, so that it is sharded like the parameter. None marks nothing."""
    if parameter is not None:
        setattr(tensor, _PARAMETER, parameter)
    return tensor


def parameter_of(gradient: torch.Tensor) -> torch.Tensor | None:
    """Return the parameter of a gradient. None for results computed from gradients and for other tensors."""
    parameter: torch.Tensor | None = getattr(gradient, _PARAMETER, None)
    return parameter


def shard_axes(plan: Plan, ranks: int) -> tuple[str, ...]:
    """Return the axes of the nearest ``ranks`` copies of parameters. Raises ValueError if there are fewer."""
    copied = copied_axes(plan)
    axes = [axis for axis in plan.mesh.sub_axes if any(axis in replicated for replicated in copied.values())]
    most, taken = plan.mesh.size_of(axes), list[str]()
    while axes and plan.mesh.size_of(taken) < ranks:
        taken.insert(0, axes.pop())
    if plan.mesh.size_of(taken) != ranks:
        what = f"optimizer_weight_shard_size is {ranks}, and parameters have at most {most} copies"
        raise ValueError(problem(what, fix=f"a power of two that divides {most}; -1: all of them"))
    return tuple(taken)


def copied_axes(plan: Plan) -> dict[str, frozenset[str]]:
    """Return for each parameter the axes along which the ranks that use it have equal copies."""
    stored, copied = plan.layouts, dict[str, frozenset[str]]()
    for entry in plan.conversions:
        if entry.value in stored:
            states = parse_layout(entry.target, plan.mesh).state_of
            replicated = {axis for axis, state in states.items() if state == "R"}
            copied[entry.value] = copied.get(entry.value, frozenset()) | replicated
    return copied


def parameter_plans(cell: nn.Module) -> dict[str, Any]:
    """Return the split counts of ``ms.shard(parameter_plan=)`` by parameter. Raises ValueError for unknown ones."""
    named, counts_by_name = dict(cell.named_parameters()), dict[str, Any]()
    for module in cell.modules():
        for candidate in (module, *vars(module).values()):
            plan = getattr(candidate, "__dict__", {}).get(PARAMETERS) or {}
            for key, counts in plan.items():
                path = key.removeprefix("self.")
                names = [n for n, p in named.items() if f".{n}".endswith(f".{path}") or getattr(p, "name", "") == path]
                if not names:
                    raise ValueError(problem(f"parameter_plan names {key!r}", fix=closest(path, named)))
                counts_by_name |= dict.fromkeys(names, counts)
    return counts_by_name


def held_by(plan: Plan) -> dict[str, Held]:
    """Return the distribution of each parameter and buffer of a plan by its path in the network."""
    entries = ((stage, entry) for stage in reversed(plan.stages) for entry in (*stage.parameters, *stage.buffers))
    return {unwrapped(e.name): Held(stage.layouts[e.name], stage.placement.ranks) for stage, e in entries}


def boxes_of(holding: Held | None, rank: int, like: Held) -> tuple[Box, ...]:
    """Return a rank's boxes of a parameter. Without a distribution it is the whole parameter."""
    if holding is None:
        return (Box.whole(like.shape),)
    return boxes(holding.layout, holding.coordinates(rank)) if rank in holding.ranks else ()


def save_group(plan: Plan, rank: int, file: str) -> None:
    """Write the ranks with the same parts as this one, whose checkpoints can replace its own if that is lost."""
    holdings = held_by(plan).values()
    parts = {other: [boxes_of(holding, other, holding) for holding in holdings] for stage in plan.stages
             for other in stage.placement.ranks}  # fmt: skip
    Path(file).parent.mkdir(parents=True, exist_ok=True)
    Path(file).write_text(json.dumps([other for other in sorted(parts) if parts[other] == parts[rank]]))


# -- names of parameters and buffers in checkpoints, and in the networks that cells wrap -------------------------------

# Attributes of torch's modules that the reference calls otherwise.
_LINEARS = {"linear1": "dense1", "linear2": "dense2"}
RENAMED: dict[type[nn.Module], dict[str, str]] = {
    nn.TransformerEncoderLayer: _LINEARS, nn.TransformerDecoderLayer: _LINEARS,
}  # fmt: skip
# Attributes in which cells hold the wrapped network: they lengthen its paths.
WRAPPING = ("network", "_backbone", "_network")


def unwrapped(path: str) -> str:
    """Return a path in a network without the cells around it."""
    first, _, rest = path.partition(".")
    return unwrapped(rest) if first in WRAPPING and rest else path


def _without_wrappers(module: nn.Module, path: str) -> str:
    """Return a parameter's path without the cells that only wrap a network."""
    *names, leaf = path.split(".")
    kept = []
    for name in names:
        if not getattr(module, "is_wrapper", False):
            kept.append(RENAMED.get(type(module), {}).get(name, name))
        module = module.get_submodule(name)
    return ".".join([*kept, leaf])


def _name(module: nn.Module, full_path: str, parameter: torch.Tensor) -> str:
    """Return the name that was set, else the path."""
    path = _without_wrappers(module, full_path)
    leaf = path.rpartition(".")[2]
    own_path = "" if getattr(parameter, "renamed", False) else path.removesuffix(leaf)
    prefix: str = getattr(parameter, "prefix", "")
    return prefix + own_path + (getattr(parameter, "param_name", None) or leaf)


def checkpoint_names(module: nn.Module, recurse: bool = True) -> dict[str, nn.Parameter]:
    """Return the parameters by their names in checkpoints: the name that was set, else the path. Raises ValueError if
    two parameters have the same name."""
    named: dict[str, nn.Parameter] = {}
    for full_path, parameter in module.named_parameters(recurse=recurse):
        name = _name(module, full_path, parameter)
        if name in named:
            raise ValueError(f"two parameters are called {name!r}: give Parameter(..., name=...) different names")
        named[name] = parameter
    return named


def reference_parameters(module: nn.Module, recurse: bool = True) -> dict[str, nn.Parameter]:
    """Return what the reference counts as parameters: also the moving statistics of normalisations, which stand before
    the other parameters of their layer and are buffers here."""
    names = {id(parameter): name for name, parameter in checkpoint_names(module, recurse).items()}
    listed: dict[str, Any] = {}
    for path, part in module.named_modules() if recurse else (("", module),):
        for leaf in getattr(part, "statistics", ()):
            statistic = getattr(part, leaf)
            listed[_name(module, f"{path}.{leaf}".lstrip("."), statistic)] = statistic
        for parameter in part._parameters.values():
            if parameter is not None and id(parameter) in names:
                listed.setdefault(names[id(parameter)], parameter)
    return listed


def checkpoint_buffers(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return the buffers by their names in checkpoints."""
    return {_name(module, path, buffer): buffer for path, buffer in module.named_buffers()}
