"""What this rank holds of everything that a checkpoint keeps, by names that no plan changes.

========================================  =============================================================
``model.NAME``                            a parameter or persistent buffer of the original module
``optimizer.state.NAME.KEY``              what an optimizer keeps of it (``exp_avg``, ``step``)
``random.RANK``                           the states of a rank's generators, as text
========================================  =============================================================

A part is a local tensor with the boxes of the global one that it holds. Ranks need not hold every name.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import torch

from shardwise.errors import ShardwiseError, problem
from shardwise.graph.normalize_random import SEED
from shardwise.layouts.boxes import Box, boxes
from shardwise.layouts.layout import Layout
from shardwise.runtime.guards.registry import held_shards
from shardwise.runtime.guards.tensor_owners import Owners
from shardwise.runtime.parallel_module import ParallelModule
from shardwise.train.values import decode, encode

MODEL, STATE, RANDOM = "model.", "optimizer.state.", "random."
_TEXT_BYTES = 4096  # states of generators are padded to a multiple: their size seldom changes


@dataclass(frozen=True, slots=True)
class TensorPart:
    """``tensor``: what this rank holds of a global tensor of ``shape``. Its ``boxes`` say which elements."""

    tensor: torch.Tensor
    shape: tuple[int, ...]
    boxes: tuple[Box, ...]

    @staticmethod
    def whole(tensor: torch.Tensor) -> TensorPart:
        return TensorPart(tensor, tuple(tensor.shape), (Box.whole(tensor.shape),))

    def like(self, tensor: torch.Tensor) -> TensorPart:
        """The same boxes of another tensor."""
        return TensorPart(tensor, self.shape, self.boxes)

    def at(self, box: Box) -> torch.Tensor:
        """A view of the local elements of a box that lies in one of the part's own."""
        view = self.tensor
        if box.sizes == view.shape:
            return view
        for dim, (start, size) in enumerate(zip(box.at, box.sizes, strict=True)):
            view = view.narrow(dim, start, size)
        return view

    @property
    def is_split(self) -> bool:
        return [box.sizes for box in self.boxes] != [self.shape]


@dataclass(frozen=True)
class ModuleParts:
    """By canonical names, those of ``model.named_parameters()``; ``tied``: further name -> canonical name."""

    parts: Mapping[str, TensorPart]
    tied: Mapping[str, str]


def splits_in(module: torch.nn.Module) -> dict[str, ParallelModule]:
    """The parallel modules that a module is, or has in it, by path."""
    if isinstance(module, ParallelModule):
        return {"": module}
    return {path: submodule for path, submodule in module.named_modules() if isinstance(submodule, ParallelModule)}


def seeds_in(module: torch.nn.Module) -> dict[str, ParallelModule]:
    """The parallel modules, by the name of the number that their random numbers follow from."""
    return {f"{path}.{SEED}".lstrip("."): split for path, split in splits_in(module).items()}


def is_seed(name: str) -> bool:
    return name.rpartition(".")[2] == SEED


def module_parts(module: torch.nn.Module) -> ModuleParts:
    """What this rank holds of a module: of what is parallel its shards, also inside of other modules, else the whole.
    Raises ShardwiseError for views of shards."""
    parts: dict[str, TensorPart] = {}
    tied: dict[str, str] = {}
    names: dict[int, str] = {}
    splits = splits_in(module)
    owners = None if isinstance(module, ParallelModule) else Owners(held_shards())
    for name, tensor in _persistent(module):
        first = names.setdefault(id(tensor), name)
        if first == name:
            parts[name] = _part_of(name, tensor, splits, owners)
        else:
            tied[name] = first
    parts |= {name: TensorPart.whole(split._seed) for name, split in seeds_in(module).items()}
    return ModuleParts(parts, tied)


def _persistent(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters(remove_duplicate=False)
    for name, buffer in module.named_buffers(remove_duplicate=False):
        path, _, key = name.rpartition(".")
        if key not in module.get_submodule(path)._non_persistent_buffers_set:
            yield name, buffer


def _part_of(
    name: str, tensor: torch.Tensor, splits: Mapping[str, ParallelModule], owners: Owners | None
) -> TensorPart:
    """``owners``: of the memory of shards, where not all of the module is parallel."""
    for path, split in splits.items():
        if name.startswith(f"{path}." if path else ""):
            layout = split.layouts.get(name.removeprefix(f"{path}.") if path else name)
            return _part_in(tensor, layout, split.coordinates)
    shard = None if owners is None else owners.of(tensor)
    if shard is None:
        return TensorPart.whole(tensor)
    coordinates = shard.ranks.coordinates
    if tuple(tensor.shape) != shard.layout.local_shape(coordinates):
        raise ShardwiseError(
            problem(
                f"{name} is a view of this rank's part of {shard.name}: nothing says which part of the whole it is",
                fix="save the parallel module itself, or whole tensors",
            )
        )
    return _part_in(tensor, shard.layout, coordinates)


def _part_in(tensor: torch.Tensor, layout: Layout | None, coordinates: Mapping[str, int]) -> TensorPart:
    if layout is None or not prod(layout.shape):
        return TensorPart.whole(tensor)
    return TensorPart(tensor, layout.shape, boxes(layout, coordinates))


# ---------------------------------------------------------------------------------------------------------- optimizers


@dataclass(frozen=True)
class OptimizerParts:
    """``parts``: states that are tensors, by full name; ``plain``: other states, encoded, by parameter and key;
    ``names``: of the parameters in every group of every optimizer; ``settings``: the groups' options, encoded."""

    parts: Mapping[str, TensorPart]
    plain: Mapping[str, Mapping[str, Any]]
    names: Sequence[Sequence[Sequence[str]]]
    kinds: Sequence[str]
    settings: Sequence[Sequence[Mapping[str, Any]]]


def optimizer_parts(optimizers: Sequence[torch.optim.Optimizer], module: ModuleParts) -> OptimizerParts:
    """What this rank holds of optimizers of a module's parameters. Raises ShardwiseError for parameters of others, and
    for states of which nobody can say which part of the whole they are."""
    parts: dict[str, TensorPart] = {}
    plain: dict[str, dict[str, Any]] = {}
    names = names_in_groups(optimizers, module)
    for optimizer, groups in zip(optimizers, names, strict=True):
        for group, names_of_group in zip(optimizer.param_groups, groups, strict=True):
            for parameter, name in zip(group["params"], names_of_group, strict=True):
                for key, value in optimizer.state.get(parameter, {}).items():
                    full = state_name(name, key)
                    if isinstance(value, torch.Tensor):
                        parts[full] = _state_part(full, value, module.parts[name])
                    else:
                        plain.setdefault(name, {})[key] = encode(value, full)
    settings = [
        [
            {key: encode(value, f"{key} of the optimizer") for key, value in group.items() if key != "params"}
            for group in optimizer.param_groups
        ]
        for optimizer in optimizers
    ]
    return OptimizerParts(parts, plain, names, [kind_of(optimizer) for optimizer in optimizers], settings)


def names_in_groups(optimizers: Sequence[torch.optim.Optimizer], module: ModuleParts) -> list[list[list[str]]]:
    """The names of the parameters in every group of every optimizer."""
    known = {id(part.tensor): name for name, part in module.parts.items()}
    for optimizer in optimizers:
        for position, group in enumerate(optimizer.param_groups):
            if any(id(parameter) not in known for parameter in group["params"]):
                raise ShardwiseError(
                    problem(
                        f"group {position} of {kind_of(optimizer)} has parameters that are not the module's",
                        fix="make the optimizer of par.parameters(), after sw.parallelize",
                    )
                )
    return [[[known[id(p)] for p in group["params"]] for group in o.param_groups] for o in optimizers]


def kind_of(optimizer: torch.optim.Optimizer) -> str:
    return type(optimizer).__name__


def state_name(name: str, key: object) -> str:
    """The name of a state in a checkpoint."""
    if not isinstance(key, str) or "." in key:
        raise ShardwiseError(f"the optimizer keeps {key!r} of {name}: a checkpoint names states by texts without dots")
    return f"{STATE}{name}.{key}"


def _state_part(name: str, value: torch.Tensor, parameter: TensorPart) -> TensorPart:
    if value.shape == parameter.tensor.shape:
        return parameter.like(value)
    if value.ndim == 0 or not parameter.is_split:
        return TensorPart.whole(value)
    raise ShardwiseError(
        problem(
            f"{name} has shape {list(value.shape)}, and this rank holds {list(parameter.tensor.shape)} of the "
            f"parameter's {list(parameter.shape)}: nothing says which part of the whole it is",
            fix="use an element-wise optimizer, whose states have the parameter's shape or are single numbers",
        )
    )


# ---------------------------------------------------------------------------------------------------------- generators


def random_part() -> TensorPart:
    """The states of the generators of Python, NumPy, torch and the current CUDA device."""
    states: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state()
    text = json.dumps(encode(states, "the states of generators")).encode()
    padded = text.ljust(-(-len(text) // _TEXT_BYTES) * _TEXT_BYTES)
    return TensorPart.whole(torch.frombuffer(bytearray(padded), dtype=torch.uint8))


def restore_random(content: torch.Tensor) -> None:
    """Set the generators to what ``random_part`` found. Raises ShardwiseError for another content."""
    try:
        states = decode(json.loads(content.numpy().tobytes()))
        random.setstate(states["python"])
        np.random.set_state(states["numpy"])
        torch.set_rng_state(states["torch"])
        if "cuda" in states and torch.cuda.is_available():
            torch.cuda.set_rng_state(states["cuda"])
    except (TypeError, ValueError, LookupError, RuntimeError, RecursionError) as error:
        raise ShardwiseError(f"the states of random generators in the checkpoint cannot be read: {error}") from error


__all__ = [
    "MODEL",
    "RANDOM",
    "STATE",
    "ModuleParts",
    "OptimizerParts",
    "TensorPart",
    "is_seed",
    "kind_of",
    "module_parts",
    "names_in_groups",
    "optimizer_parts",
    "random_part",
    "restore_random",
    "seeds_in",
    "splits_in",
    "state_name",
]
