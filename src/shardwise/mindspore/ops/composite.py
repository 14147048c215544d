"""Higher-order functions over lists of tensors: mapping, overloading by type, gradients."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from shardwise.errors import problem
from shardwise.mindspore.holding import as_gradient, parameter_of
from shardwise.mindspore.ops.clip import clip_by_global_norm, clip_by_value
from shardwise.mindspore.ops.functional import grad
from shardwise.mindspore.tensor import Tensor


class Map:
    """A map over lists: ``Map()(function, xs, ys)`` or ``Map(function)(xs, ys)`` returns a tuple of the results."""

    def __init__(self, ops: Callable[..., Any] | None = None, reverse: bool = False) -> None:
        self.ops, self.reverse = ops, reverse

    def __call__(self, *args: Any) -> tuple[Any, ...]:
        function, lists = (self.ops, args) if self.ops is not None else (args[0], args[1:])
        rows = list(zip(*lists, strict=True))
        results = [_marked(self.apply(function, row), row) for row in (reversed(rows) if self.reverse else rows)]
        return tuple(reversed(results) if self.reverse else results)

    def apply(self, function: Callable[..., Any], row: tuple[Any, ...]) -> Any:
        return function(*row)


def _marked(result: Any, row: tuple[Any, ...]) -> Any:
    """Mark a result computed from a gradient as a gradient of the same parameter, if it has the same shape."""
    if isinstance(result, torch.Tensor):
        peers = (x for x in row if isinstance(x, torch.Tensor) and x.shape == result.shape)
        return as_gradient(result, next((parameter for x in peers if (parameter := parameter_of(x)) is not None), None))
    return result


class HyperMap(Map):
    """A map that also descends into nested lists."""

    def apply(self, function: Callable[..., Any], row: tuple[Any, ...]) -> Any:
        if isinstance(row[0], (tuple, list)):
            return type(self)(reverse=self.reverse)(function, *row)
        return function(*row)


class Partial:
    """Partial application: ``Partial()(function, *args)``."""

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Callable[..., Any]:
        return partial(function, *args, **kwargs)


_KINDS: dict[str, tuple[type, ...]] = {
    "Tensor": (torch.Tensor,), "Number": (int, float), "Bool": (bool,), "Int": (int,), "Float": (float,),
    "String": (str,), "Tuple": (tuple,), "List": (list,), "None": (type(None),),
    **dict.fromkeys(("RowTensor", "COOTensor", "CSRTensor", "MapTensor"), ()),  # gradients are dense here
}  # fmt: skip


def _as_kind(x: Any, kind: Any) -> Any:
    """Convert a number to a tensor where a tensor is expected, and a tensor of one element to a number."""
    if kind == _KINDS["Tensor"] and isinstance(x, _KINDS["Number"]):
        return Tensor(x)
    return x.item() if kind == _KINDS["Number"] and isinstance(x, torch.Tensor) and x.numel() == 1 else x


class MultitypeFuncGraph:
    """A function with one body per signature of argument types: ``@scale.register("Tensor", "Number")``."""

    def __init__(self, name: str, read_value: bool = False) -> None:
        self.name = name
        self._bodies: list[tuple[tuple[Any, ...], Callable[..., Any]]] = []

    def register(self, *kinds: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        types = tuple(_KINDS[kind] if isinstance(kind, str) else kind for kind in kinds)

        def added(body: Callable[..., Any]) -> Callable[..., Any]:
            self._bodies.append((types, body))
            return body

        return added

    def __call__(self, *args: Any) -> Any:
        for types, body in self._bodies:
            if len(types) == len(args) and all(isinstance(x, arg) for x, arg in zip(args, types, strict=True)):
                return body(*args)
        for types, body in self._bodies:  # versions pass either numbers or tensors
            if len(types) == len(args):
                converted = [_as_kind(x, kind) for x, kind in zip(args, types, strict=True)]
                if all(isinstance(x, kind) for x, kind in zip(converted, types, strict=True)):
                    return body(*converted)
        types_of_args = ", ".join(type(arg).__name__ for arg in args)
        what = f"{self.name} has no body for ({types_of_args})"
        raise TypeError(problem(what, fix=f"@{self.name}.register(...) one"))


class GradOperation:
    """``GradOperation(get_all, get_by_list, sens_param)(network, weights)(*inputs)``: the gradients of the first input,
    all inputs, or the weights. ``sens_param``: the last argument is the initial gradient of the output."""

    def __init__(self, get_all: bool = False, get_by_list: bool = False, sens_param: bool = False) -> None:
        self.get_all, self.get_by_list, self.sens_param = get_all, get_by_list, sens_param

    def __call__(self, network: Callable[..., Any], weights: Any = None) -> Callable[..., Any]:
        if self.get_by_list and weights is None:
            what = "GradOperation(get_by_list=True) has no weights"
            raise ValueError(problem(what, fix="give net.trainable_params()"))

        def gradient(*inputs: Any) -> Any:
            network_inputs, sens = (inputs[:-1], inputs[-1]) if self.sens_param else (inputs, 1.0)
            positions: Any = tuple(range(len(network_inputs))) if self.get_all else None if self.get_by_list else 0
            scaled = network if not self.sens_param else lambda *args: _times(network(*args), sens)
            return grad(scaled, positions, weights if self.get_by_list else None)(*network_inputs)

        return gradient


def _times(result: Any, sens: Any) -> Any:
    """Multiply the results of a network by sensitivities, given as a tuple for several results."""
    return tuple(map(_times, result, sens)) if isinstance(sens, (tuple, list)) else result * sens


def add_flags(fn: Any = None, **flags: Any) -> Any:
    """Return the function unchanged: ``@add_flags(has_effect=True)``. Flags are for the reference's compiler."""
    return fn if fn is not None else lambda function: function


core = add_flags


__all__ = [
    "GradOperation", "HyperMap", "Map", "MultitypeFuncGraph", "Partial", "add_flags", "clip_by_global_norm",
    "clip_by_value", "core",
]  # fmt: skip
