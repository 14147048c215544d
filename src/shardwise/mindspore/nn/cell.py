"""``Cell``: a torch module whose body is ``construct``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from shardwise.mindspore import engine
from shardwise.mindspore.ops.primitive import Primitive
from shardwise.mindspore.tensor import Parameter

LATER = "follows in a later version"


class Cell(nn.Module):
    """The base of networks: override ``construct`` (or ``forward``). Cells and torch modules may hold each other.

    As in the reference a cell starts in evaluation mode; ``Model.train`` and ``set_train`` change it. ``auto_prefix``
    and ``flags`` are accepted and mean nothing here.
    """

    def __init__(self, auto_prefix: bool = True, flags: Any = None) -> None:
        super().__init__()
        self.training = False

    def construct(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"{type(self).__name__} defines neither construct nor forward")

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.construct(*args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if engine.is_outermost():
            return engine.call(self, args, kwargs)
        return super().__call__(*args, **kwargs)

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(value, Primitive) and not value.instance_name:
            value.instance_name = name
        if isinstance(value, nn.Module) and not isinstance(value, Cell):
            value.train(self.training)
        super().__setattr__(name, value)
        if isinstance(value, Parameter) and value.param_name is None:
            value.param_name = name

    # Parameters under the reference's names.

    def get_parameters(self, expand: bool = True) -> Iterator[nn.Parameter]:
        return self.parameters(recurse=expand)

    def trainable_params(self, recurse: bool = True) -> list[nn.Parameter]:
        return [parameter for parameter in self.parameters(recurse) if parameter.requires_grad]

    def untrainable_params(self, recurse: bool = True) -> list[nn.Parameter]:
        return [parameter for parameter in self.parameters(recurse) if not parameter.requires_grad]

    def parameters_dict(self, recurse: bool = True) -> dict[str, nn.Parameter]:
        """Name in checkpoints -> parameter."""
        return checkpoint_names(self, recurse)

    def parameters_and_names(self) -> Iterable[tuple[str, nn.Parameter]]:
        return self.parameters_dict().items()

    # Children.

    def cells(self) -> Iterator[nn.Module]:
        return self.children()

    def name_cells(self) -> dict[str, nn.Module]:
        return dict(self.named_children())

    def cells_and_names(self) -> Iterator[tuple[str, nn.Module]]:
        yield from self.named_modules()

    def insert_child_to_cell(self, name: str, cell: nn.Module) -> None:
        self.add_module(name, cell)

    # Modes.

    def set_train(self, mode: bool = True) -> Cell:
        self.train(mode)
        return self

    def set_grad(self, requires_grad: bool = True) -> Cell:
        """Kept for programs that call it: gradients are computed when they are asked for."""
        return self

    def to_float(self, dtype: torch.dtype) -> Cell:
        """The cell's parameters and computation in another dtype."""
        self.to(dtype)
        return self

    def shard(self, in_strategy: Any, out_strategy: Any = None, device: str = "", level: int = 0) -> Any:
        """The cell with a strategy of its inputs and outputs: see ``ms.shard``."""
        from shardwise.mindspore.ops.functional import shard

        return shard(self, in_strategy, out_strategy)

    def set_comm_fusion(self, fusion_type: int) -> Cell:
        """Gradients travel in buckets of 25 MiB anyway, which this does not change."""
        return self

    def set_data_parallel(self) -> Cell:
        """Every operator of this cell without a strategy splits its batch, whatever a search would choose."""
        for primitive in engine.primitives(self):
            primitive.data_parallel = True
        return self

    def recompute(self, **settings: Any) -> None:
        raise NotImplementedError(
            f"{type(self).__name__}.recompute(): recomputation {LATER}; torch.utils.checkpoint recomputes "
            "in stand_alone and data_parallel mode"
        )

    @property
    def pipeline_stage(self) -> int | None:
        return None

    @pipeline_stage.setter
    def pipeline_stage(self, stage: int) -> None:
        raise NotImplementedError(
            f"{type(self).__name__}.pipeline_stage = {stage}: pipeline stages {LATER}; operator-level, data-parallel "
            "and automatic plans need none"
        )


class SequentialCell(Cell):
    """Cells one after the other: ``SequentialCell(a, b)`` or ``SequentialCell([a, b])``."""

    def __init__(self, *cells: Any) -> None:
        super().__init__()
        listed = list(cells[0].values()) if len(cells) == 1 and isinstance(cells[0], dict) else cells
        if len(listed) == 1 and isinstance(listed[0], (list, tuple)):
            listed = listed[0]
        for number, cell in enumerate(listed):
            self.add_module(str(number), cell)

    def append(self, cell: nn.Module) -> SequentialCell:
        self.add_module(str(len(self._modules)), cell)
        return self

    def __len__(self) -> int:
        return len(self._modules)

    def __getitem__(self, index: int) -> nn.Module:
        return list(self.children())[index]

    def construct(self, x: Any) -> Any:
        for cell in self.children():
            x = cell(x)
        return x


class CellList(nn.ModuleList):
    """Cells in a list."""

    def __init__(self, *cells: Any) -> None:
        listed = cells[0] if len(cells) == 1 and isinstance(cells[0], (list, tuple)) else cells
        super().__init__(listed)


def checkpoint_names(module: nn.Module, recurse: bool = True) -> dict[str, nn.Parameter]:
    """The name of every parameter in checkpoints: the one it was given, else its path. Raises ValueError where two
    parameters have the same."""
    named: dict[str, nn.Parameter] = {}
    for path, parameter in module.named_parameters(recurse=recurse):
        leaf = path.rpartition(".")[2]
        param_name = getattr(parameter, "param_name", None)
        name = path if param_name is None or param_name == leaf else param_name
        if name in named:
            raise ValueError(f"two parameters are called {name!r}: give Parameter(..., name=...) different names")
        named[name] = parameter
    return named
