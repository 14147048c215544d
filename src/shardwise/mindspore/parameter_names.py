"""Names of parameters and buffers in checkpoints, and in the networks that cells wrap."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

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
