"""The entries of torch's own databases of samples, as modules that return a loss: ``op_db``, ``module_db``."""

from __future__ import annotations

import sys
import unittest
from collections.abc import Callable, Iterator
from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.utils import _pytree as pytree

DTYPES = (torch.float64, torch.int64, torch.bool, torch.complex128)  # the first that an entry takes
MOST_ELEMENTS = 20_000  # of a sample: larger ones take long and show nothing else


class Call(nn.Module):
    """A call on sample arguments: tensors that require grad are parameters, other tensors are inputs."""

    def __init__(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        super().__init__()
        self.function = function
        leaves, self.spec = pytree.tree_flatten((args, kwargs))
        tensors = list({id(leaf): leaf for leaf in leaves if isinstance(leaf, Tensor)}.values())
        self.operands = nn.ParameterList(t.detach().clone() for t in tensors if t.requires_grad)
        self.inputs = tuple(t.detach().clone() for t in tensors if not t.requires_grad)
        order = [t for t in tensors if t.requires_grad] + [t for t in tensors if not t.requires_grad]
        positions = {id(t): position for position, t in enumerate(order)}
        self.leaves = [("tensor", positions[id(x)]) if isinstance(x, Tensor) else ("constant", x) for x in leaves]

    def forward(self, *inputs: Tensor) -> list[Tensor]:
        tensors = [tensor.clone() for tensor in (*self.operands, *inputs)]  # a call may write to them, or return a view
        leaves = [tensors[value] if kind == "tensor" else value for kind, value in self.leaves]
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        return [leaf for leaf in pytree.tree_leaves(self.function(*args, **kwargs)) if isinstance(leaf, Tensor)]


class Weighed(nn.Module):
    """The results of a call, behind a loss that weighs every element of those with a gradient."""

    def __init__(self, called: Call) -> None:
        super().__init__()
        self.called = called

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        results = self.called(*inputs)
        losses = []
        for result in results:
            if result.requires_grad:
                numbers = torch.view_as_real(result.resolve_conj()) if result.is_complex() else result
                weights = torch.arange(1, numbers.numel() + 1, device=numbers.device).to(torch.float64) % 7 - 2.5
                losses.append((numbers * weights.reshape(numbers.shape)).sum())
        return (sum(losses[1:], losses[0]), *results) if losses else tuple(results)


def database(name: str) -> dict[str, Any]:
    """``"operators"``, ``"modules"`` or ``"optimizers"``: name -> entry."""
    entries = _databases()[("operators", "modules", "optimizers").index(name)]
    if name == "optimizers":
        return {entry.optim_cls.__name__: entry for entry in entries}
    return {getattr(entry, "formatted_name", entry.name): entry for entry in entries}


def samples(entry: Any, count: int) -> Iterator[Weighed]:
    """At most ``count`` samples of an entry, spread evenly over all that it has."""
    torch.manual_seed(0)
    calls = [call for call in _calls(entry) if sum(t.numel() for t in _tensors(call)) <= MOST_ELEMENTS]
    for position in range(min(count, len(calls))):
        yield Weighed(calls[position * len(calls) // min(count, len(calls))])


def _tensors(call: Call) -> list[Tensor]:
    return [*call.parameters(), *call.buffers(), *call.inputs]


def _calls(entry: Any) -> Iterator[Call]:
    if not hasattr(entry, "module_inputs_func"):
        dtype = next((d for d in DTYPES if d in entry.dtypes), None)
        if dtype is not None:
            grad = entry.supports_autograd and dtype.is_floating_point
            for sample in entry.sample_inputs("cpu", dtype, requires_grad=grad):
                yield Call(entry.op, (sample.input, *sample.args), sample.kwargs)
        return
    for training in (True, False):
        options = {"device": "cpu", "dtype": torch.float64, "requires_grad": True, "training": training}
        for sample in entry.module_inputs_func(entry, **options):
            if sample.forward_input is not None:
                built = sample.constructor_input
                module = entry.module_cls(*built.args, **built.kwargs).double().train(training)
                args, kwargs = sample.forward_input.args, sample.forward_input.kwargs
                if isinstance(module, LazyModuleMixin):
                    module(*args, **kwargs)
                yield Call(module, tuple(args), kwargs)


@cache
def _databases() -> tuple[list[Any], list[Any], list[Any]]:
    """``op_db``, ``module_db`` and ``optim_db``. They import expecttest for a base class of tests that are not run."""
    if "expecttest" not in sys.modules:
        sys.modules["expecttest"] = stub = ModuleType("expecttest")
        stub.TestCase = unittest.TestCase  # type: ignore[attr-defined]
    from torch.testing._internal.common_methods_invocations import op_db
    from torch.testing._internal.common_modules import module_db
    from torch.testing._internal.common_optimizers import optim_db

    return op_db, module_db, optim_db
