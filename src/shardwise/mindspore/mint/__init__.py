"""``mint``: torch's functions, layers and optimizers under torch's own arguments, as newer programs use them."""

from __future__ import annotations

from functools import wraps
from typing import Any

import torch
from torch import nn as torchs
from torch.nn import functional as F

from shardwise.mindspore import calls
from shardwise.mindspore.common.initializer import initializer
from shardwise.mindspore.common.seed import set_seed
from shardwise.mindspore.mint import distributed, optim
from shardwise.mindspore.named import TABLES, Function, absent, in_order, module_of
from shardwise.mindspore.nn.cell import Cell
from shardwise.mindspore.nn.wrapped import Wrapped

# Places of indices, which torch wants as int64 and the reference takes as int32 too.
_INDICES = {
    **dict.fromkeys(("gather", "scatter", "scatter_add"), (2, "index")),
    **dict.fromkeys(("cross_entropy", "nll_loss"), (1, "target")),
    "one_hot": (0, "input"),
}


def _wide(x: Any) -> Any:
    return x.long() if isinstance(x, torch.Tensor) and x.dtype == torch.int32 else x


def of_torch(home: Any, names: str, path: str = "") -> dict[str, Function]:
    """Return functions of a torch module by their names. ``path``: that of the module here, where pickle finds them."""
    return {name: _ours(name, in_order(getattr(home, name)), path) for name in names.split()}


def _ours(name: str, function: Function, path: str = "") -> Function:
    """Wrap a function. If no cell is running, its results have the reference's methods."""
    place, word = _INDICES.get(name, (None, ""))

    @wraps(function, assigned=("__doc__",))
    def call(*args: Any, **kwargs: Any) -> Any:
        if place is not None:
            args = tuple(_wide(x) if at == place else x for at, x in enumerate(args))
            kwargs = {key: _wide(x) if key == word else x for key, x in kwargs.items()}
        return calls.outside(function(*args, **kwargs))

    call.__name__ = call.__qualname__ = name
    call.__module__ = f"{__name__}{path}"
    return call


TOP: dict[str, Function] = {
    **of_torch(torch, TABLES["mint"]["functions"]),
    "item": _ours("item", lambda input: input.item()),
    "manual_seed": set_seed,
}
FUNCTIONAL = of_torch(F, TABLES["mint"]["functional"], ".nn.functional")
LINALG = of_torch(torch.linalg, TABLES["mint"]["linalg"], ".linalg")
SPECIAL = of_torch(torch.special, TABLES["mint"]["special"], ".special")


def _linear(
    in_features: int, out_features: int, bias: bool = True, weight_init: Any = None, bias_init: Any = None,
    dtype: torch.dtype | None = None,
) -> torchs.Module:  # fmt: skip
    layer = torchs.Linear(in_features, out_features, bias, dtype=dtype)
    for parameter, init in ((layer.weight, weight_init), (layer.bias, bias_init)):
        if init is not None and parameter is not None:
            parameter.data.copy_(initializer(init, list(parameter.shape), parameter.dtype))
    return layer


class _Loss(Wrapped):
    """A loss of class indices, which may be int32."""

    is_loss = True

    def construct(self, input: Any, target: Any, *others: Any) -> Any:
        return self.module(input, _wide(target), *others)


def _cell(name: str, make: Function) -> type[Cell]:
    base = _Loss if name.endswith("Loss") else Wrapped
    body = {"__module__": f"{__name__}.nn", "__doc__": "Torch's module.", "make": staticmethod(make)}
    return type(name, (base,), body)


CELLS = {name: _cell(name, in_order(getattr(torchs, name))) for name in TABLES["mint"]["modules"].split()} | {
    "Linear": _cell("Linear", _linear)
}

linalg, special = module_of(f"{__name__}.linalg", LINALG), module_of(f"{__name__}.special", SPECIAL)
nn = module_of(f"{__name__}.nn", {**CELLS, "functional": module_of(f"{__name__}.nn.functional", FUNCTIONAL)})
__all__ = ["distributed", "linalg", "nn", "optim", "special"]
__all__ += list(TOP)
__getattr__ = absent(__name__, lambda: __all__, TOP)
