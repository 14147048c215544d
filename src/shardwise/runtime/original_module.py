"""Monitor of the original module, which the user still holds after ``sw.parallelize``; ranks hold copies of it.

Later changes to it reach no rank: loaded values, changed attributes and modes, an optimizer over its parameters.
Stepping such an optimizer raises an error. The other changes cause a warning: the module is inspected in calls 1, 2, 4,
8 and so on, which costs nothing in the long run.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from weakref import WeakSet, ref

from torch import nn
from torch.optim import Optimizer
from torch.utils.weak import WeakTensorKeyDictionary

from shardwise.errors import PlanWarning, ShardwiseError, listed, warn_user
from shardwise.graph.trees import constant_key, is_constant
from shardwise.runtime.hooks import watch_optimizers

_split = WeakTensorKeyDictionary()  # parameters of original modules -> their names
_trained = WeakTensorKeyDictionary()  # those that an optimizer has updated in the original module
_passed: WeakSet[Optimizer] = WeakSet()  # optimizers that have updated something


class OriginalModuleMonitor:
    """A weak reference to the original module and a snapshot of its state; ``parallel``: the parallel module."""

    def __init__(self, module: nn.Module, parallel: nn.Module) -> None:
        self._module, self._own = ref(module), ref(parallel)
        self._values, self._places = _values(module), dict(_places(module))
        self._calls, self._next = 0, 1
        for name, parameter in module.named_parameters():
            _split[parameter] = name
        watch_optimizers(_before_step)

    def __getstate__(self) -> dict[str, Any]:
        """Return an empty state: a copy monitors no original module."""
        return {"_module": _nothing, "_own": _nothing, "_values": {}, "_places": {}, "_calls": 0, "_next": 0}

    def look(self) -> None:
        """Warn once, in calls 1, 2, 4, 8, ..., about changes to the original module."""
        self._calls += 1
        if self._calls != self._next:
            return
        self._next *= 2
        module, parallel = self._module(), self._own()
        changed = [] if module is None or parallel is None else self._changed(module, parallel)
        if changed:
            self._next = 0
            warn_user(
                f"the original module was changed after sw.parallelize: {listed(changed)}. Ranks hold copies, so "
                "this has no effect: load values into the parallel module, and change the model before sw.plan and "
                "sw.parallelize",
                PlanWarning,
            )

    def _changed(self, module: nn.Module, parallel: nn.Module) -> list[str]:
        """Describe what changed. Values of a module that is itself trained, next to the parallel one, do not count."""
        modes = {f"{path}.training": part.training for path, part in parallel.named_modules()}
        frozen = {f"{name}.requires_grad": p.requires_grad for name, p in parallel.named_parameters()}
        followed = {key.removeprefix("."): value for key, value in (modes | frozen).items()}
        changes = [
            f"{place} is {value!r}, and was {self._places[place]!r}"
            for place, value in _places(module)
            if place in self._places
            and constant_key(value) != constant_key(self._places[place])
            and followed.get(place) != value
        ]
        if any(parameter.grad is not None for parameter in module.parameters()):
            return changes
        values, its = _values(module), dict(module.named_parameters())
        return changes + [
            f"values of {name}"
            for name, before in self._values.items()
            if values.get(name, before) != before and its[name] not in _trained
        ]


def _nothing() -> None:
    return None


def _values(module: nn.Module) -> dict[str, tuple[int, int]]:
    """Return the identity and version counter of every parameter with data."""
    return {
        name: (id(parameter), parameter._version)
        for name, parameter in module.named_parameters()
        if not parameter.is_inference()
    }


def _places(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield (path, value) of constant module attributes and of the ``requires_grad`` flags of parameters."""
    for path, part in module.named_modules():
        for name, value in vars(part).items():
            if is_constant(value):
                yield f"{path}.{name}".removeprefix("."), value
    for name, parameter in module.named_parameters():
        yield f"{name}.requires_grad", parameter.requires_grad


def _before_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise ShardwiseError if an optimizer has no gradients because its parameters belong to an original module: the
    gradients are on the shards."""
    if optimizer in _passed:
        return
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if any(parameter.grad is not None for parameter in parameters):
        _passed.add(optimizer)
        for parameter in filter(_split.__contains__, parameters):
            _trained[parameter] = None
        return
    names = [_split[parameter] for parameter in parameters if parameter in _split]
    if names:
        raise ShardwiseError(
            f"{type(optimizer).__name__} holds {listed(names)} of the original module, which get no gradients: "
            "those are on this rank's shards",
            fix="create the optimizer after sw.parallelize, from par.parameters()",
            section="original-parameters",
        )
