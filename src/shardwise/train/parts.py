"""This rank's parts of all tensors in a checkpoint, under names that do not depend on the plan.

========================================  =============================================================
``model.NAME``                            a parameter or persistent buffer of the original module
``optimizer.state.NAME.KEY``              an optimizer state of it (``exp_avg``, ``step``)
``random.RANK``                           the states of a rank's generators, as text
========================================  =============================================================

A part is a local tensor with the boxes of the global tensor that it holds. A rank need not hold every name.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import torch

from shardwise.errors import ShardwiseError
from shardwise.graph.written_out import SEED
from shardwise.layouts.boxes import Box, boxes
from shardwise.layouts.layout import Layout
from shardwise.layouts.placement import Placement
from shardwise.runtime.guards.elementwise_optimizers import is_matrixwise
from shardwise.runtime.guards.matrix_optimizers import has_states_here
from shardwise.runtime.guards.registry import Owners, held_shards, is_persistent, tensors_of
from shardwise.runtime.parallel_module import ParallelModule
from shardwise.train.names import RANDOM
from shardwise.train.values import decode, encode

MODEL, STATE = "model.", "optimizer.state."
_TEXT_BYTES = 4096  # generator states are padded to a multiple, so that their size seldom changes


@dataclass(frozen=True, slots=True)
class TensorPart:
    """A part of a global tensor of ``shape``. ``tensor``: the local elements; ``boxes``: which elements they are;
    ``held``: what every rank of a placement holds of it; None: every rank that has it, has all of it."""

    tensor: torch.Tensor
    shape: tuple[int, ...]
    boxes: tuple[Box, ...]
    held: tuple[Layout, Placement] | None = None

    @staticmethod
    def whole(tensor: torch.Tensor) -> TensorPart:
        return TensorPart(tensor, tuple(tensor.shape), (Box.whole(tensor.shape),))

    def like(self, tensor: torch.Tensor) -> TensorPart:
        return TensorPart(tensor, self.shape, self.boxes, self.held)

    def at(self, box: Box) -> torch.Tensor:
        """Return a view of the elements of a box, which must lie in one of the part's boxes."""
        return self.tensor if box.sizes == self.tensor.shape else self.tensor[box.local_rows]

    @property
    def is_split(self) -> bool:
        return [box.sizes for box in self.boxes] != [self.shape]


def splits_in(module: torch.nn.Module) -> dict[str, ParallelModule]:
    """Return the parallel modules in a module (which may be one itself), by path."""
    if isinstance(module, ParallelModule):
        return {"": module}
    return {path: submodule for path, submodule in module.named_modules() if isinstance(submodule, ParallelModule)}


def seeds_in(module: torch.nn.Module) -> dict[str, ParallelModule]:
    return {f"{path}.{SEED}".lstrip("."): split for path, split in splits_in(module).items()}


def is_seed(name: str) -> bool:
    return name.rpartition(".")[2] == SEED


def module_parts(module: torch.nn.Module) -> tuple[dict[str, TensorPart], dict[str, str]]:
    """Return this rank's parts of a module by the names of ``model.named_parameters()``, and additional names of tied
    tensors -> that name. Shards of parallel modules (also nested ones) are parts, other tensors whole. Raises
    ShardwiseError for views of shards."""
    parts: dict[str, TensorPart] = {}
    tied: dict[str, str] = {}
    names: dict[int, str] = {}
    splits = splits_in(module)
    owners = None if isinstance(module, ParallelModule) else Owners(held_shards())
    for name, tensor in tensors_of(module):
        if not is_persistent(module, name):
            continue
        first = names.setdefault(id(tensor), name)
        if first == name:
            parts[name] = _part_of(name, tensor, splits, owners)
        else:
            tied[name] = first
    parts |= {name: TensorPart.whole(split._seed) for name, split in seeds_in(module).items()}
    return parts, tied


def _part_of(
    name: str, tensor: torch.Tensor, splits: Mapping[str, ParallelModule], owners: Owners | None
) -> TensorPart:
    """Return this rank's part of a tensor. ``owners``: owners of shard memory, if not all of the module is parallel."""
    for path, split in splits.items():
        if name.startswith(f"{path}." if path else ""):
            layout = split.layouts.get(name.removeprefix(f"{path}.") if path else name)
            return _part_in(tensor, layout, split._ranks.place, split._ranks.rank)
    shard = None if owners is None else owners.of(tensor)
    if shard is None:
        return TensorPart.whole(tensor)
    coordinates = shard.ranks.coordinates
    if tuple(tensor.shape) != shard.layout.local_shape(coordinates):
        what = f"{name} is a view of this rank's shard of {shard.name}, and its place in the whole tensor is unknown"
        raise ShardwiseError(what, fix="save the parallel module itself, or whole tensors")
    return _part_in(tensor, shard.layout, shard.ranks.place, shard.ranks.rank)


def _part_in(tensor: torch.Tensor, layout: Layout | None, place: Placement, rank: int) -> TensorPart:
    if layout is None or not prod(layout.shape):
        return TensorPart.whole(tensor)
    return TensorPart(tensor, layout.shape, boxes(layout, place.coordinates(rank)), (layout, place))


# ------------------------------------------------------------------------------------------------------ training state


Names = Sequence[Sequence[Sequence[str]]]  # of the parameters in every group of every optimizer


@dataclass(frozen=True)
class TrainingState:
    """The state of this rank to save. ``parts``: tensors, by their names in a checkpoint; ``tied``: additional name of
    a parameter -> its name; ``plain``: states of optimizers that are no tensors, encoded, by parameter and key;
    ``values``: encoded, and equal on all ranks."""

    parts: Mapping[str, TensorPart]
    tied: Mapping[str, str]
    names: Names
    plain: Mapping[str, Mapping[str, Any]]
    values: dict[str, Any]


def state_of(par: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer], rank: int) -> TrainingState:
    """Return the state of a module, of optimizers of its parameters, and of this rank's generators. Raises
    ShardwiseError for parameters that are not the module's, and for states whose place in the whole tensor is
    unknown."""
    of_module, tied = module_parts(par)
    parts = {MODEL + name: part for name, part in of_module.items()}
    plain: dict[str, dict[str, Any]] = {}
    names = names_in_groups(optimizers, of_module)
    for optimizer, groups in zip(optimizers, names, strict=True):
        for group, names_of_group in zip(optimizer.param_groups, groups, strict=True):
            for parameter, name in zip(group["params"], names_of_group, strict=True):
                here = optimizer.state.get(parameter, {}) if has_states_here(optimizer, parameter) else {}
                for key, value in here.items():
                    full = state_name(name, key)
                    if isinstance(value, torch.Tensor):
                        parts[full] = _state_part(full, value, of_module[name], optimizer)
                    else:
                        plain.setdefault(name, {})[key] = encode(value, full)
    settings = [
        [
            {key: encode(value, f"{key} of the optimizer") for key, value in group.items() if key != "params"}
            for group in optimizer.param_groups
        ]
        for optimizer in optimizers
    ]
    parts[f"{RANDOM}{rank}"] = random_part()
    values = {"kinds": [kind_of(optimizer) for optimizer in optimizers], "settings": settings}
    return TrainingState(parts, tied, names, plain, values)


def names_in_groups(
    optimizers: Sequence[torch.optim.Optimizer], parts: Mapping[str, TensorPart]
) -> list[list[list[str]]]:
    """Return the names of the parameters in every group of every optimizer. ``parts``: of the module."""
    name_of = {id(part.tensor): name for name, part in parts.items()}
    for optimizer in optimizers:
        for position, group in enumerate(optimizer.param_groups):
            if any(id(parameter) not in name_of for parameter in group["params"]):
                what = f"group {position} of {kind_of(optimizer)} has parameters that are not the module's"
                raise ShardwiseError(what, fix="create the optimizer from par.parameters(), after sw.parallelize")
    return [[[name_of[id(p)] for p in group["params"]] for group in o.param_groups] for o in optimizers]


def kind_of(optimizer: torch.optim.Optimizer) -> str:
    return type(optimizer).__name__


def state_name(name: str, key: object) -> str:
    """Return the name of a state in a checkpoint."""
    if not isinstance(key, str) or "." in key:
        raise ShardwiseError(f"the optimizer has a state {key!r} of {name}: state names must be texts without dots")
    return f"{STATE}{name}.{key}"


def _state_part(name: str, value: torch.Tensor, parameter: TensorPart, optimizer: torch.optim.Optimizer) -> TensorPart:
    if is_matrixwise(type(optimizer)):
        return TensorPart.whole(value)
    if value.shape == parameter.tensor.shape:
        return parameter.like(value)
    if value.ndim == 0 or not parameter.is_split:
        return TensorPart.whole(value)
    raise ShardwiseError(
        f"{name} has shape {list(value.shape)}, and this rank holds {list(parameter.tensor.shape)} of the "
        f"parameter's {list(parameter.shape)}: its place in the whole state is unknown",
        fix="use an element-wise optimizer, whose states have the parameter's shape or are single numbers, or declare "
        "that it needs whole parameters: sw.matrix_optimizer",
    )


# ---------------------------------------------------------------------------------------------------------- generators


def random_states() -> dict[str, Any]:
    """Return the states of the host's random generators of Python, NumPy and torch."""
    return {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state()}


def set_random_states(states: Mapping[str, Any]) -> None:
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    torch.set_rng_state(states["torch"])


def random_part() -> TensorPart:
    """Return the states of the random generators of Python, NumPy, torch and the current CUDA device."""
    states = random_states()
    if torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state()
    text = json.dumps(encode(states, "the states of generators")).encode()
    padded = text.ljust(-(-len(text) // _TEXT_BYTES) * _TEXT_BYTES)
    return TensorPart.whole(torch.frombuffer(bytearray(padded), dtype=torch.uint8))


def restore_random(content: torch.Tensor) -> None:
    """Restore the generators from the content of ``random_part``. Raises ShardwiseError for another content."""
    try:
        states = decode(json.loads(content.numpy().tobytes()))
        set_random_states(states)
        if "cuda" in states and torch.cuda.is_available():
            torch.cuda.set_rng_state(states["cuda"])
    except (TypeError, ValueError, LookupError, RuntimeError, RecursionError) as error:
        raise ShardwiseError(f"the states of random generators in the checkpoint cannot be read: {error}") from error
