"""What stands for the model that was split: its class, configuration and methods, without values."""

from __future__ import annotations

import copy
import functools
from typing import Any

import torch

from shardwise.runtime.parallel_module import ParallelModule


def front_of(par: ParallelModule) -> torch.nn.Module:
    """A copy on meta of the module that was split, whose call is a call of all ranks' parts.

    What reads the configuration, names, shapes or types of submodules finds them; a call gives what the module would
    give, whole on every rank; what reads values fails, for they are in the parts.
    """
    front = copy.deepcopy(par.original)
    set_mode = front.train

    @functools.wraps(front.forward)  # whoever asks for its signature gets that of the module
    def forward(*args: Any, **kwargs: Any) -> Any:
        return par(*args, **kwargs)

    def train(mode: bool = True) -> torch.nn.Module:
        par.train(mode)
        return set_mode(mode)

    front.__dict__.update(forward=forward, train=train)
    return front


__all__ = ["front_of"]
