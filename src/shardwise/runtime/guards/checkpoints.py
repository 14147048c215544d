"""Torch's distributed checkpoints, which would take a rank's shards for whole tensors, are refused.

``torch.distributed.checkpoint`` stores a plain tensor once, from one of the ranks, and gives it to all ranks when it
loads; its ``get_model_state_dict`` and ``set_model_state_dict`` hand plain tensors on as the whole. A shard is a plain
tensor. It is known by its memory, as an entry of ``par.state_dict()`` or of an optimizer's has the memory of what it
stands for. What cannot be noticed is a copy: ``{name: t.clone() for name, t in par.state_dict().items()}``.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed.checkpoint.state_dict as of_modules
import torch.distributed.checkpoint.state_dict_loader as loader
import torch.distributed.checkpoint.state_dict_saver as saver
from torch import Tensor

from shardwise.errors import ShardwiseError, problem
from shardwise.layouts.text import format_layout
from shardwise.runtime.guards.memory import Owners
from shardwise.runtime.guards.registry import Held, held_shards
from shardwise.runtime.initial.replay import leaves

# Through these all of torch's functions go: save, async_save and save_state_dict; load and load_state_dict; and the six
# that get and set the states of modules and optimizers.
_PLACES = (
    (saver, "_stateful_to_state_dict"),
    (saver, "_save_state_dict"),
    (loader, "_load_state_dict"),
    (of_modules, "_verify_options"),
)


def missing() -> list[str]:
    """What this version of torch does not have."""
    return [f"{place.__name__}.{name}" for place, name in _PLACES if not hasattr(place, name)]


def install() -> None:
    """Changes torch's functions, once per process."""
    gathers, saves, loads, states = (getattr(place, name) for place, name in _PLACES)
    wrapped = (_checking_result(gathers), _checking_first(saves), _checking_first(loads), _checking_first(states))
    for (place, name), function in zip(_PLACES, wrapped, strict=True):
        setattr(place, name, function)


def _checking_first(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function with its first argument, a module or a tree of tensors, checked before it is called."""

    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        _refuse_shards(args[0] if args else next(iter(kwargs.values()), None))
        return function(*args, **kwargs)

    return checked


def _checking_result(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        _refuse_shards(result)
        return result

    return checked


def _refuse_shards(given: Any) -> None:
    """Raise ShardwiseError if a shard is in what a distributed checkpoint is made of, or loaded into."""
    shards = list(held_shards())
    if not shards:
        return
    if isinstance(given, torch.nn.Module):
        given = [*given.parameters(), *given.buffers()]
    owners = Owners([*shards, *_gradients(shards), *_optimizer_states(shards)])
    # A rank that holds nothing of a tensor knows it by its shape, so that it does not wait for those that refuse.
    empty = {tensor.shape: held for tensor, held in shards if not tensor.numel()}
    plain = (leaf for leaf in leaves(given) if type(leaf) in (Tensor, torch.nn.Parameter))
    found = (empty.get(tensor.shape) if not tensor.numel() else owners.of(tensor) for tensor in plain)
    held = next(filter(None, found), None)
    if held is not None:
        raise ShardwiseError(_refusal(held))


def _gradients(shards: Iterable[tuple[Tensor, Held]]) -> Iterator[tuple[Tensor, Held]]:
    return ((tensor.grad, held) for tensor, held in shards if tensor.grad is not None)


def _optimizer_states(shards: Iterable[tuple[Tensor, Held]]) -> Iterator[tuple[Tensor, Held]]:
    """What optimizers keep of shards, element by element. No list of optimizers is kept anywhere: a new one has states
    as soon as it loads them, before its first step."""
    held_by_id = {id(tensor): held for tensor, held in shards}
    for optimizer in gc.get_objects():
        if not issubclass(type(optimizer), torch.optim.Optimizer):
            continue
        states: Mapping[Tensor, Any] = optimizer.state
        for parameter, state in states.items():
            held = held_by_id.get(id(parameter))
            if held is not None:
                kept = (leaf for leaf in leaves(state) if isinstance(leaf, Tensor))
                yield from ((tensor, held) for tensor in kept if tensor.shape == parameter.shape)


def _refusal(held: Held) -> str:
    return problem(
        f"torch.distributed.checkpoint takes every plain tensor for the whole of it, and this rank holds a shard of "
        f"{held.name}: one rank's part would be stored, or loaded, as if it were all of it",
        source=f"{held.name}: {format_layout(held.layout)}",
        fix='let every rank save its own part, torch.save(par.state_dict(), f"part-{sw.rank()}.pt"), and load it under '
        "the same plan with par.load_state_dict(); the optimizer's state_dict() likewise",
    )
