"""A stand-in for the split model, with its class, configuration and methods, but without values."""

from __future__ import annotations

import copy
import functools
from typing import Any

import torch

from shardwise.runtime.parallel_module import ParallelModule


def front_of(par: ParallelModule) -> torch.nn.Module:
    """Return a copy of the split module on the meta device, whose ``forward`` calls the parallel module.

    Configuration, names, shapes and types of submodules can be read. A call returns the module's output, whole on every
    rank. Reading parameter values fails: they are in the ranks' shards.
    """
    front = copy.deepcopy(par.original)
    set_mode = front.train

    @functools.wraps(front.forward)  # keeps the signature of the module
    def forward(*args: Any, **kwargs: Any) -> Any:
        return par(*args, **kwargs)

    def train(mode: bool = True) -> torch.nn.Module:
        par.train(mode)
        return set_mode(mode)

    front.__dict__.update(forward=forward, train=train)
    return front
