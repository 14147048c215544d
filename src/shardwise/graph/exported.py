"""Export of whole modules to files in torch's format, for inference elsewhere."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn


class _ExportedModule(nn.Module):
    """Wrapper by which subclasses of modules are traced as they are called."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *inputs: torch.Tensor) -> object:
        return self.module(*inputs)


def save_exported(module: nn.Module, inputs: Sequence[torch.Tensor], path: Path) -> None:
    """Write a module with its parameters. Dim 0 of the inputs stays dynamic, also if all examples have size 1, which
    torch would otherwise specialize."""
    batch = [x.shape[0] for x in inputs if x.dim()]
    if batch and set(batch) == {1}:
        inputs = [torch.cat([x, x]) if x.dim() else x for x in inputs]
    sizes = tuple({0: torch.export.Dim.AUTO} if x.dim() else None for x in inputs)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The tensor attributes? .* w(as|ere) assigned during export")  # LSTMs do
        program = torch.export.export(_ExportedModule(module), tuple(inputs), dynamic_shapes=(sizes,), strict=False)
    torch.export.save(program, str(path))


def load_exported(path: Path) -> nn.Module:
    """Load a module written by ``save_exported``."""
    module: nn.Module = torch.export.load(str(path)).module()
    return module
