"""The parameters and buffers that a rank holds: their slots in the module, and checks that they still match those of
the other ranks, and that the original module has not changed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from operator import attrgetter, is_
from typing import Any, NamedTuple
from weakref import WeakSet, ref

import torch
from torch import nn
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.utils.weak import WeakTensorKeyDictionary

from shardwise.errors import LaunchError, PlanWarning, ShardwiseError, listed, warn_user
from shardwise.graph.trees import constant_key, is_constant
from shardwise.layouts.text import format_dtype
from shardwise.runtime.agree import gather_objects, raise_first
from shardwise.runtime.communicator import Communicator
from shardwise.runtime.hooks import watch_optimizers
from shardwise.runtime.signatures import ParamFlags

_REQUIRES_GRAD = attrgetter("requires_grad")


class TensorSlot(NamedTuple):
    """A module's slot for a tensor: the table of a submodule and the key in it. ``name``: the qualified name."""

    table: dict[str, torch.Tensor | None]
    key: str
    name: str
    tensor: torch.Tensor


class TensorTable:
    """The tensors of a module by name, as of the last ``refresh``. A replaced tensor (``load_state_dict(assign=True)``,
    an attribute assignment) is accepted if its shape, dtype and device are those of the old one."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._slots: list[TensorSlot] = []
        self._children = [
            (owner._modules, key, f"{path}.{key}" if path else key, child)
            for path, owner in module.named_modules()
            for key, child in owner._modules.items()
        ]
        self.modules = dict(module.named_modules())
        for path, owner in self.modules.items():
            for table in (owner._parameters, owner._buffers):
                for key, tensor in table.items():
                    if tensor is not None:
                        name = f"{path}.{key}" if path else key
                        self._slots.append(TensorSlot(table, key, name, tensor))
        self._replaced: tuple[str, ...] = ()  # names, as of the last refresh
        self._parameters = self._those_of(self._slots)

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the tensors by name; tied ones under all their names."""
        return {slot.name: slot.tensor for slot in self._slots}

    def refresh(self) -> bool:
        """Update the table and return whether tensors were replaced since the last time. Raises ShardwiseError for a
        tensor that does not fit, and if a submodule was replaced."""
        for table, key, name, child in () if _are_there(self._children) else self._children:
            if table.get(key) is not child:
                raise ShardwiseError(
                    f"the submodule {name} was replaced by a {type(table.get(key)).__name__}: the parallel "
                    "module runs the program of the old one",
                    fix="change the model before sw.plan and sw.parallelize; load new values into the existing "
                    "tensors (load_state_dict)",
                )
        self._replaced = ()
        if _are_there(self._slots):
            return False
        slots = [slot._replace(tensor=_successor(slot)) for slot in self._slots]
        self._check_ties(slots)
        pairs = zip(self._slots, slots, strict=True)
        self._replaced = tuple(after.name for before, after in pairs if before.tensor is not after.tensor)
        self._slots, self._parameters = slots, self._those_of(slots)
        return True

    @staticmethod
    def _those_of(slots: Sequence[TensorSlot]) -> list[Parameter]:
        return [slot.tensor for slot in slots if isinstance(slot.tensor, Parameter)]

    def circumstances(self) -> ParamFlags:
        """Return the flags that ranks compare: tensors replaced before this call, and frozen ones."""
        replaced = tuple(("replaced", name) for name in self._replaced)
        if all(map(_REQUIRES_GRAD, self._parameters)):
            return replaced
        frozen = [s.name for s in self._slots if isinstance(s.tensor, Parameter) and not s.tensor.requires_grad]
        return (*replaced, *(("frozen", name) for name in frozen))

    def _check_ties(self, slots: Sequence[TensorSlot]) -> None:
        """Raise ShardwiseError if some, but not all, names of a tied tensor were assigned another."""
        successor: dict[int, TensorSlot] = {}
        for before, after in zip(self._slots, slots, strict=True):
            first = successor.setdefault(id(before.tensor), after)
            if first.tensor is not after.tensor:
                what = f"{first.name} and {after.name} were one tensor at sw.parallelize, and are two now"
                fix = "assign the same tensor to all of its names, or untie them before sw.plan"
                raise ShardwiseError(what, fix=fix)


def _are_there(places: Sequence[tuple[Any, str, str, Any]]) -> bool:
    """Return whether every (table, key, name, value) still holds its value. Runs in every call, hence in C."""
    if not places:
        return True
    tables, keys, _, values = zip(*places, strict=True)
    return all(map(is_, map(dict.get, tables, keys), values))


def _successor(slot: TensorSlot) -> torch.Tensor:
    """Return the tensor now in a slot. Raises ShardwiseError if the program cannot run with it."""
    new, old = slot.table.get(slot.key), slot.tensor
    if new is old:
        return old
    if isinstance(new, torch.Tensor):
        is_same_kind = isinstance(new, Parameter) == isinstance(old, Parameter)
        if is_same_kind and (new.shape, new.dtype, new.device) == (old.shape, old.dtype, old.device):
            return new
    raise ShardwiseError(
        f"{slot.name} was replaced by {_described(new)}; this rank's part of it is {_described(old)}",
        fix="assign this rank's shard (of the same dtype, on the same device), change the values of the "
        "existing tensor (copy_, load_state_dict), or change the model before sw.plan and sw.parallelize",
    )


def _described(tensor: torch.Tensor | None) -> str:
    if not isinstance(tensor, torch.Tensor):
        return f"a {type(tensor).__name__}" if tensor is not None else "nothing"
    kind = "a parameter" if isinstance(tensor, Parameter) else "a tensor"
    return f"{kind} {format_dtype(tensor.dtype)}{list(tensor.shape)} on {tensor.device}"


def check_initial_values(
    prints: Mapping[str, int], seed: int | None, fault: ShardwiseError | None, ranks: Communicator, device: torch.device
) -> None:
    """Raise ShardwiseError on all ranks if one has a ``fault`` (the others name it). Raise LaunchError if the whole
    initial values (name -> fingerprint) or the seed differ between ranks."""
    raise_first(LaunchError, fault)
    everywhere = gather_objects((dict(prints), seed), ranks, device, "the comparison of initial values")
    first, seed_of_first = everywhere[0]
    for rank, (other, its) in enumerate(everywhere):
        if its != seed_of_first:
            what = f"ranks draw from different seeds: seed={seed_of_first} on rank 0 and seed={its} on rank {rank}"
            raise LaunchError(what, fix="pass the same seed= to sw.parallelize on every rank")
        differing = sorted(name for name in first.keys() | other.keys() if first.get(name) != other.get(name))
        if differing:
            raise LaunchError(
                f"ranks start from different values: {listed(differing)} of rank {rank} differ"
                f"{'s' * (len(differing) == 1)} from rank 0 ({len(differing)} of {len(first)} tensors)",
                fix="build the module from the same seed on every rank (torch.manual_seed, or "
                "sw.deferred(seed=...)), or load the same checkpoint on all before sw.parallelize",
                section="initial-values",
            )


# ----------------------------------------------------------------------------------------------------------------------
# Monitor of the original module, which the user still holds after ``sw.parallelize``; ranks hold copies of it. Later
# changes to it reach no rank: loaded values, changed attributes and modes, an optimizer over its parameters. Stepping
# such an optimizer raises an error. The other changes cause a warning: the module is inspected in calls 1, 2, 4, 8 and
# so on, which costs nothing in the long run.

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
