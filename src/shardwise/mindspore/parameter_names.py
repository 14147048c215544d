"""Names of parameters and buffers in checkpoints, and in the networks that cells wrap."""

from __future__ import annotations

import torch
from torch import nn

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
            kept.append(name)
        module = module.get_submodule(name)
    return ".".join([*kept, leaf])


def checkpoint_names(module: nn.Module, recurse: bool = True) -> dict[str, nn.Parameter]:
    """Return the parameters by their names in checkpoints: the name that was set, else the path. Raises ValueError if
    two parameters have the same name."""
    named: dict[str, nn.Parameter] = {}
    for full_path, parameter in module.named_parameters(recurse=recurse):
        path = _without_wrappers(module, full_path)
        leaf = path.rpartition(".")[2]
        name = (
            getattr(parameter, "prefix", "")
            + ("" if getattr(parameter, "renamed", False) else path.removesuffix(leaf))
            + (getattr(parameter, "param_name", None) or leaf)
        )
        if name in named:
            raise ValueError(f"two parameters are called {name!r}: give Parameter(..., name=...) different names")
        named[name] = parameter
    return named


def checkpoint_buffers(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return the buffers by their names in checkpoints."""
    return {_without_wrappers(module, path): buffer for path, buffer in module.named_buffers()}
