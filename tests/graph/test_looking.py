"""What a user's attribute does when it is looked at does not end capture."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwise.graph.capture import capture

METHODS = ("__len__", "__iter__", "__eq__", "__hash__", "__repr__", "__getattr__", "__bool__", "__getitem__", "items")
BASES = (object, tuple, list, dict, set, frozenset, deque, OrderedDict, str, int)


def raises(*_: Any) -> Any:
    raise NotImplementedError("this object is not to be looked at")


def odd(base: type, *methods: str) -> Any:
    return type("Odd", (base,), {**dict.fromkeys(methods, raises), "__deepcopy__": lambda self, _: self})()


class Layer(nn.Module):
    def __init__(self, kept: Any) -> None:
        super().__init__()
        self.kept, self.linear = kept, nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.kept(self.linear(x)) if callable(self.kept) else self.linear(x) * (self.kept is not None)


class Layers(nn.Module):
    def __init__(self, kept: Any) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(kept) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


class Holder:
    def __init__(self, value: Any) -> None:
        self.value = value


def in_closure(value: Any, default: Any = None) -> Callable[[Tensor], Tensor]:
    def function(x: Tensor, beside: Any = default) -> Tensor:
        return x * 2 if value is not beside else x

    return function


PLACES: dict[str, Callable[[Any], Any]] = {
    "an attribute": lambda value: value,
    "in a container": lambda value: [value, {"key": (value,)}],
    "in an object": Holder,
    "in a closure": in_closure,
    "a default": lambda value: in_closure(0, value),
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("base", BASES, ids=lambda base: base.__name__)
@pytest.mark.sampled(16)
def test_objects_whose_methods_raise_are_captured(place: str, base: type) -> None:
    """Every method of every base, and every method in every place."""
    turn = [*PLACES].index(place) + BASES.index(base)
    for method in METHODS[-turn % len(PLACES) :: len(PLACES)]:
        value = odd(base, method)
        for module in (Layer(PLACES[place](value)), Layers(PLACES[place](value))):
            graph = capture(module, (torch.ones(2, 4),)).graph
            linears = [part for part in module.modules() if isinstance(part, nn.Linear)]
            assert sum(op.name.endswith("linear/linear") for op in graph.ops) == len(linears)
