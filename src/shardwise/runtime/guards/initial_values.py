"""Guard ``torch.nn.init`` against shards, whose shape would give other values than the whole tensor's."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import is_fake

from shardwise.errors import ShardwiseError, problem
from shardwise.runtime.guards.registry import held_shards
from shardwise.runtime.guards.tensor_owners import Owners

# Functions that draw (their inner helpers), and those that depend on positions. Constants are the same in all parts.
_DRAWING = ("_no_grad_uniform_", "_no_grad_normal_", "_no_grad_trunc_normal_", "_calculate_fan_in_and_fan_out")
_PLACING = ("dirac_", "eye_", "orthogonal_", "sparse_")


def missing() -> list[str]:
    """Return the names that this version of torch lacks."""
    return [f"torch.nn.init.{name}" for name in (*_DRAWING, *_PLACING) if not hasattr(torch.nn.init, name)]


def install() -> None:
    """Make them refuse shards."""
    for name in (*_DRAWING, *_PLACING):
        setattr(torch.nn.init, name, _refusing(getattr(torch.nn.init, name)))


def _refusing(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def checked(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        has_data = not (tensor.is_meta or is_fake(tensor)) and type(tensor) in (torch.Tensor, torch.nn.Parameter)
        record = Owners(held_shards()).of(tensor) if has_data else None
        if record is not None:
            raise ShardwiseError(
                problem(
                    f"torch.nn.init on a shard of {record.name}: values would be drawn for the shape of the shard",
                    fix="initialise the model before sw.parallelize, or pass init= to sw.parallelize",
                )
            )
        return function(tensor, *args, **kwargs)

    return checked


__all__ = ["install", "missing"]
