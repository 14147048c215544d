"""``Tensor`` and ``Parameter``: torch tensors under the dialect's names."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch
from torch import nn

from shardwise.errors import problem


class Tensor(torch.Tensor):
    """``Tensor(data, dtype=None)``: a torch tensor with ``asnumpy`` and ``astype``. What operators return of it is one
    again; ``Tensor(None, dtype, shape, init)`` waits for nothing and holds zeros, or what ``init`` fills in."""

    def __new__(
        cls, input_data: Any = None, dtype: torch.dtype | None = None, shape: Any = None, init: Any = None
    ) -> Tensor:
        if isinstance(dtype, int) and not isinstance(dtype, bool):
            sizes = f"{input_data}, {dtype}"
            raise TypeError(
                problem(
                    f"Tensor({sizes}, ...) is no shape: its arguments are data and a dtype",
                    fix=f"Tensor(np.zeros(({sizes}), np.float32)), or initializer('normal', [{sizes}]) for a Parameter",
                )
            )
        if input_data is None:
            data = torch.zeros(tuple(shape or ()), dtype=dtype or torch.float32)
            if init is not None:
                from shardwise.mindspore.common.initializer import initializer

                data = initializer(init, tuple(shape or ()), data.dtype)
        else:
            data = as_torch(input_data, dtype)
        return data.as_subclass(cls)

    def asnumpy(self) -> np.ndarray[Any, Any]:
        return np.asarray(self.detach().as_subclass(torch.Tensor).cpu().numpy())

    def astype(self, dtype: torch.dtype) -> Tensor:
        return self.to(dtype).as_subclass(Tensor)


class Parameter(nn.Parameter):
    """A parameter with a name. ``name``: the one in checkpoints, by default the path of its attribute.
    ``layerwise_parallel``: every rank has another one, so its gradient is not reduced."""

    def __new__(
        cls,
        default_input: Any,
        name: str | None = None,
        requires_grad: bool = True,
        layerwise_parallel: bool = False,
        parallel_optimizer: bool = True,
    ) -> Parameter:
        data = as_torch(default_input)
        if requires_grad and not data.is_floating_point():
            requires_grad = False
        parameter = torch.Tensor._make_subclass(cls, data.detach(), requires_grad)
        parameter.param_name, parameter.layerwise_parallel, parameter.parallel_optimizer = (
            name,
            layerwise_parallel,
            parallel_optimizer,
        )
        return parameter

    param_name: str | None
    layerwise_parallel: bool
    parallel_optimizer: bool

    @property
    def name(self) -> str:
        return self.param_name or ""

    @name.setter
    def name(self, value: str) -> None:
        self.param_name = value

    def asnumpy(self) -> np.ndarray[Any, Any]:
        """What this rank holds."""
        return np.asarray(self.detach().cpu().numpy())

    def set_data(self, data: Any, slice_shape: bool = False) -> Parameter:
        """Give the parameter other values. ``slice_shape``: they may have another shape."""
        new = as_torch(data, self.dtype)
        if new.shape != self.shape and not slice_shape:
            raise ValueError(
                problem(
                    f"the parameter {self.name} has shape {list(self.shape)}, the data {list(new.shape)}",
                    fix="give data of that shape; slice_shape=True takes another one",
                )
            )
        self.data = new.to(self.device)
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Parameter:
        if id(self) not in memo:
            parameter = Parameter(self.detach().clone(), self.param_name, self.requires_grad, self.layerwise_parallel)
            memo[id(self)] = parameter
        copied: Parameter = memo[id(self)]
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        data = self.detach().as_subclass(torch.Tensor)
        return Parameter, (data, self.param_name, self.requires_grad, self.layerwise_parallel)


class ParameterTuple(tuple[Parameter, ...]):
    """Parameters in order."""

    def clone(self, prefix: str, init: Any = "same") -> ParameterTuple:
        """Copies, whose names start with ``prefix``; ``init="zeros"``: filled with zeros."""
        copies = ParameterTuple(copy.deepcopy(parameter) for parameter in self)
        for parameter in copies:
            parameter.name = f"{prefix}.{parameter.name}"
            if init == "zeros":
                parameter.data.zero_()
        return copies


def as_torch(data: Any, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Data of any kind as a plain torch tensor. Python's floats become float32, arrays keep their dtype."""
    if isinstance(data, torch.Tensor):
        plain = data.detach() if isinstance(data, nn.Parameter) else data
        plain = plain.as_subclass(torch.Tensor)
    elif isinstance(data, np.ndarray):
        plain = torch.from_numpy(np.ascontiguousarray(data)) if data.flags.writeable else torch.from_numpy(data.copy())
    else:
        plain = torch.as_tensor(data)
    return plain if dtype is None else plain.to(dtype)
