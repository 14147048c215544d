"""``Tensor`` and ``Parameter``: torch tensors under the dialect's names."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import get_default_nowrap_functions
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from shardwise.errors import problem
from shardwise.mindspore.holding import holding_of
from shardwise.mindspore.tensor_methods import CALLED, METHODS, by_caller, dtype_of


def from_numpy(array: np.ndarray[Any, Any]) -> Tensor:
    """Return a tensor that shares an array's memory."""
    return torch.from_numpy(array).as_subclass(Tensor)


class _Kind(type(torch.Tensor)):  # type: ignore[misc]  # mypy cannot name this base
    """``isinstance(x, Tensor)`` holds for all torch tensors: parameters, and tensors inside ``construct``."""

    def __instancecheck__(cls, x: Any) -> bool:
        return isinstance(x, torch.Tensor)


class Tensor(torch.Tensor, metaclass=_Kind):
    """A torch tensor with the reference's methods (``tensor_methods``): ``Tensor(data, dtype=None)``. Operators return
    such tensors again. ``Tensor(None, dtype, shape, init)`` holds zeros, or what ``init`` fills in, at once.

    While a cell is captured it is a plain torch tensor, which a graph can hold as a constant.
    """

    def __new__(
        cls, input_data: Any = None, dtype: Any = None, shape: Any = None, init: Any = None, **settings: Any
    ) -> Tensor:
        if isinstance(dtype, int) and not isinstance(dtype, bool):
            sizes = f"{input_data}, {dtype}"
            fix = f"Tensor(np.zeros(({sizes}), np.float32)), or initializer('normal', [{sizes}]) for a Parameter"
            raise TypeError(problem(f"Tensor({sizes}, ...) is no shape: its arguments are data and a dtype", fix=fix))
        dtype = None if dtype is None else dtype_of(dtype)
        if input_data is None:
            data = torch.zeros(tuple(shape or ()), dtype=dtype or torch.float32)
            if init is not None:
                data = CALLED["initializer"](init, tuple(shape or ()), data.dtype)
        else:
            data = as_torch(input_data, dtype)
        return data if torch.compiler.is_exporting() else data.as_subclass(cls)  # type: ignore[return-value]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not torch.compiler.is_exporting():
            result = super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]
            return result if func in get_default_nowrap_functions() else _wrapped(result)
        args, kwargs = pytree.tree_map(plain, (args, kwargs or {}))
        return func(*args, **kwargs)

    vars().update(METHODS, from_numpy=staticmethod(from_numpy))

    def __array__(self, dtype: Any = None) -> np.ndarray[Any, Any]:
        return np.asarray(METHODS["asnumpy"](self), dtype)

    def __float__(self) -> float:
        return float(plain(self).detach())

    def __str__(self) -> str:
        return str(METHODS["asnumpy"](self)) if _has_values(self) else repr(self)

    def __repr__(self) -> str:  # type: ignore[override]  # torch's __repr__ takes tensor_contents
        if not _has_values(self):
            return str(super().__repr__())  # type: ignore[no-untyped-call]
        formats: Any = {"float_kind": lambda x: f"{x: .8e}"}
        values = np.array2string(METHODS["asnumpy"](self), separator=", ", formatter=formats)
        space = "\n" if self.dim() > 1 else " "
        return f"Tensor(shape={list(self.shape)}, dtype={_kind(self.dtype)}, value={space}{values})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) not in memo:
            memo[id(self)] = plain(self).detach().clone().as_subclass(Tensor).requires_grad_(self.requires_grad)
        return memo[id(self)]


def _has_values(x: torch.Tensor) -> bool:
    """Return whether there are numbers to print: not during capture or in a torch.func transform."""
    unreal = torch.compiler.is_exporting() or x.is_meta or torch._C._functorch.is_functorch_wrapped_tensor(x)
    return not unreal and x.dtype != torch.bfloat16


def _kind(dtype: torch.dtype) -> str:
    """Return a dtype as the reference prints it: Float32."""
    return str(dtype).removeprefix("torch.").capitalize()


def _wrapped(result: Any) -> Any:
    """Give the tensors of an operator's result, in tuples or lists, the reference's methods."""
    if isinstance(result, (tuple, list)):
        return type(result)(_wrapped(item) for item in result)
    return as_ours(result)


def as_ours(x: Any) -> Any:
    """Give a tensor the reference's methods. Parameters, tensors of a capture and others are returned unchanged."""
    is_torchs = isinstance(x, torch.Tensor) and not issubclass(type(x), (Tensor, nn.Parameter, FakeTensor))
    return x.as_subclass(Tensor) if is_torchs else x


def plain(x: Any) -> Any:
    """Return a ``Tensor`` as a plain torch tensor with the same memory. Other values are returned unchanged."""
    if not issubclass(type(x), Tensor):
        return x
    if not torch.compiler.is_exporting():
        return x.as_subclass(torch.Tensor)
    with _disable_current_modes(), torch._C.DisableTorchFunction():  # hide the creation of a constant from tracing
        return x.as_subclass(torch.Tensor)


class Parameter(nn.Parameter):
    """A parameter with a name. ``name``: its name in checkpoints, by default the path of its attribute.
    ``layerwise_parallel``: every rank has its own parameter, so its gradient is not reduced. Assignments (``p += 1``,
    ``p[0] = 1``) are not differentiated."""

    def _copied(self, init: Any = "same") -> Parameter:
        copied = copy.deepcopy(self)
        if init != "same":
            copied.data.copy_(CALLED["initializer"](init, tuple(self.shape), self.dtype))
        return copied

    vars().update(by_caller(Tensor, _copied))

    def __new__(
        cls, default_input: Any, name: str | None = None, requires_grad: bool = True, layerwise_parallel: bool = False,
        parallel_optimizer: bool = True,
    ) -> Parameter:  # fmt: skip
        data = as_torch(default_input)
        data = data.clone() if isinstance(default_input, torch.Tensor) else data  # the caller's tensor stays unchanged
        if requires_grad and not data.is_floating_point():
            requires_grad = False
        parameter = torch.Tensor._make_subclass(cls, data.detach(), requires_grad)
        parameter.param_name, parameter.layerwise_parallel = name, layerwise_parallel
        parameter.parallel_optimizer = parallel_optimizer
        return parameter

    param_name: str | None
    prefix: str = ""  # set by update_parameters_name
    path: str | None = None  # in the cell whose parameters were requested last
    renamed: bool = False  # renamed since then: the name is complete
    layerwise_parallel: bool
    parallel_optimizer: bool
    comm_fusion: int = 1  # accepted without effect: gradients are reduced in buckets

    @property
    def name(self) -> str:
        """Return the name in checkpoints."""
        return self.path or self.param_name or ""

    @name.setter
    def name(self, value: str) -> None:
        self.renamed, self.param_name, self.path = self.renamed or self.path is not None, value, None

    def init_data(self, *settings: Any, **named: Any) -> Parameter:
        """Return the parameter, which has its values already."""
        return self

    def value(self) -> torch.Tensor:
        """Return its values, through which gradients flow, as in the reference."""
        return self.view_as(self) if torch.compiler.is_exporting() else self.view_as(self).as_subclass(Tensor)

    def assign_value(self, value: Any) -> Parameter:
        """Set the parameter's values."""
        return self.set_data(value)

    def asnumpy(self) -> np.ndarray[Any, Any]:
        """Return this rank's part as an array."""
        return np.asarray(self.detach().numpy(force=True))

    def set_data(self, data: Any, slice_shape: bool = False) -> Parameter:
        """Set the parameter's values. ``slice_shape``: they may have another shape."""
        new = as_torch(data, self.dtype)
        if new.shape != self.shape and not slice_shape:
            what = f"the parameter {self.name} has shape {list(self.shape)}, the data {list(new.shape)}"
            raise ValueError(problem(what, fix="give data of that shape; slice_shape=True takes another one"))
        if holding_of(self) and new.shape == self.shape:  # a program may share the memory
            self.data.copy_(new)
        else:
            self.data = new.to(self.device, copy=isinstance(data, torch.Tensor))  # the caller keeps its tensor
        return self

    def __repr__(self) -> str:  # type: ignore[override]  # torch's __repr__ takes tensor_contents
        details = f"shape={tuple(self.shape)}, dtype={_kind(self.dtype)}, requires_grad={self.requires_grad}"
        return f"Parameter (name={self.name}, {details})"

    __str__ = __repr__

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        return np.array(self.asnumpy(), dtype, copy=copy)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) not in memo:
            kept = self.param_name, self.requires_grad, self.layerwise_parallel, self.parallel_optimizer
            memo[id(self)] = Parameter(self.detach().clone(), *kept)
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        data = self.detach().as_subclass(torch.Tensor)
        return Parameter, (data, self.param_name, self.requires_grad, self.layerwise_parallel, self.parallel_optimizer)


class ParameterTuple(tuple[Parameter, ...]):
    """A tuple of parameters."""

    def clone(self, prefix: str, init: Any = "same") -> ParameterTuple:
        """Return copies whose names start with ``prefix``. ``init="zeros"``: filled with zeros."""
        copies = ParameterTuple(Parameter._copied(parameter, init) for parameter in self)
        for parameter in copies:
            parameter.name = f"{prefix}.{parameter.name}"
        return copies


def as_torch(data: Any, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Convert data of any kind to a plain torch tensor. Python's floats become float32; arrays are copied and keep
    their dtype."""
    if isinstance(data, torch.Tensor):
        tensor = data.detach() if isinstance(data, nn.Parameter) else plain(data)
        tensor = tensor if torch.compiler.is_exporting() else tensor.as_subclass(torch.Tensor)
    elif isinstance(data, np.ndarray):
        tensor = torch.from_numpy(data.copy())
    else:
        listed = isinstance(data, (list, tuple)) and any(isinstance(item, (torch.Tensor, np.ndarray)) for item in data)
        tensor = torch.as_tensor(
            np.array([np.asarray(as_torch(item)) for item in data]) if listed else data, dtype=None if listed else dtype
        )
    return tensor if dtype is None else tensor.to(dtype)


def tensor(input_data: Any = None, dtype: Any = None, shape: Any = None, init: Any = None) -> Tensor:
    """Return ``Tensor(...)``."""
    return Tensor(input_data, dtype, shape, init)


__all__ = ["Parameter", "ParameterTuple", "Tensor", "from_numpy", "tensor"]
