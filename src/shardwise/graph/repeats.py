"""Equal submodules are traced once: later calls of a repeated layer become one operator, ``shardwise::repeat``.

Around the first call of a kind two operators are traced: ``enter`` with what the call may read (its tensors, then the
parameters and buffers of the module) and ``leave`` with what it returns. The nodes between them are the kind's *body*.
A later call is one ``repeat`` of the same operands in the same order, and the functionalizer emits the body in its
place (``graph.bodies``). The model's own loop still runs, so code between the layers has its effect.

Two calls are of one kind if their modules are equal (classes, attributes, shapes), are called with equal arguments
(shapes, strides, shared memory, constants) from the same line, find the same Python state (``_state``), and read equal
values of those integers in which the modules differ (``layer_idx``). Reads of these are watched while a body is traced;
reading all attributes counts as reading them all. A call is traced as it is if its module has hooks, regions, or marked
or shared parts, changes its Python state, or takes or returns anything but tensors and constants. The second call of
every kind and its last module are also traced, as *witnesses*: they must have the body's operators, or the whole model
is traced without repeats.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial, wraps
from types import FrameType
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch._subclasses.fake_tensor import is_fake
from torch.fx.node import has_side_effect
from torch.utils import _pytree as pytree

from shardwise.graph.looking import items_of
from shardwise.graph.module_state import OF_TORCH, StateReader, snapshot_state
from shardwise.graph.operator_library import composite
from shardwise.graph.origins import NOT_USER_CODE
from shardwise.graph.trees import constant_key, is_constant

LEAST = 4  # modules of a kind: the first, two witnesses and one that is not traced
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_BODIES: dict[int, tuple[torch.Tensor, ...]] = {}  # number of a body that is in use -> the results of its call
_ALL_AT_ONCE = ("__dict__", "__getstate__", "__reduce__", "__reduce_ex__")  # vars, copies
Place = tuple[str, str]  # path of a module inside another one, name of an attribute


def _enter(operands: list[torch.Tensor], number: int) -> None:
    """Mark the start of a body, while a model is captured."""


def _leave(results: list[torch.Tensor], number: int) -> None:
    """Mark the end of a body."""


def _repeat(operands: list[torch.Tensor], body: int, path: str) -> list[torch.Tensor]:
    """Return tensors like the results of the body; exists only while a model is captured."""

    def like(result: torch.Tensor) -> torch.Tensor:
        offset, strides = result.storage_offset(), result.stride()
        reach = sum((size - 1) * stride for size, stride in zip(result.shape, strides, strict=True))
        flat = torch.empty(offset + max(reach, 0) + 1, dtype=result.dtype, device=result.device)
        flat = flat.requires_grad_().clone() if result.requires_grad else flat  # no leaf: it may be written to
        return flat.as_strided(result.shape, strides, offset)

    return [like(result) for result in _BODIES[body]]


ENTER, LEAVE, REPEAT = (composite(function) for function in (_enter, _leave, _repeat))
for _operator in (ENTER, LEAVE, REPEAT):
    has_side_effect(_operator)


@dataclass
class _Kind:
    """Calls of one kind. ``leaves``: what a call returns: the position of an operand, nothing for a new tensor, or a
    constant; ``last``: the module that is traced as a witness."""

    body: int
    spec: pytree.TreeSpec
    leaves: tuple[_Leaf, ...]
    last: nn.Module
    calls: int = 1


@dataclass
class _Group:
    """Modules that are equal except for integers. ``numbers``: per module the integers that differ; ``read``: call key
    -> those that bodies read; None: such calls are not repeated."""

    modules: list[nn.Module]
    numbers: dict[int, dict[Place, int]]
    read: dict[object, frozenset[Place] | None] = field(default_factory=dict)
    kinds: dict[object, _Kind] = field(default_factory=dict)

    def values(self, module: nn.Module, places: frozenset[Place]) -> frozenset[tuple[Place, int]]:
        return frozenset((place, self.numbers[id(module)][place]) for place in places)


@dataclass
class TracedRepeats:
    """The repeats found while a model is traced. ``paths``: number of a body, or of a witness, -> path of its module;
    ``witnesses``: number of a witness -> that of its body; ``failed``: whether a witness returned something else."""

    paths: dict[int, str] = field(default_factory=dict)
    witnesses: dict[int, int] = field(default_factory=dict)
    failed: bool = False
    inside: bool = False

    def number(self, path: str) -> int:
        """Return a new number, for a body or a witness from this path."""
        self.paths[len(self.paths)] = path
        return len(self.paths) - 1


@contextmanager
def trace_repeats_once(
    module: nn.Module, repeats: TracedRepeats, annotated: Collection[str], line_of: Callable[[FrameType | None], str]
) -> Iterator[None]:
    """Trace repeated layers of ``module`` (a copy made for capture) once. ``annotated``: paths of modules whose calls
    open regions; ``line_of``: returns the user's line of a frame."""
    for group, paths in _groups(module, annotated):
        for part, path in zip(group.modules, paths, strict=True):
            part.forward = _repeating(part, path, group, repeats, line_of)
    try:
        yield
    finally:
        for number in repeats.paths:
            _BODIES.pop(number, None)


# ------------------------------------------------------------------------------------------------------- modules


class _UnequalModule(Exception):
    """Raised for a module that equals no other."""


def _groups(module: nn.Module, annotated: Collection[str]) -> list[tuple[_Group, list[str]]]:
    """Group equal modules that have parts, with their paths."""
    names: dict[int, int] = {}
    for _, part in module.named_modules(remove_duplicate=False):
        names[id(part)] = names.get(id(part), 0) + 1
    modules_by_key: dict[object, list[tuple[str, nn.Module, dict[Place, int]]]] = {}
    for path, part in module.named_modules():
        inside = any(annotated_path == path or annotated_path.startswith(f"{path}.") for annotated_path in annotated)
        if not path or inside or next(part.children(), None) is None:
            continue
        if any(names[id(submodule)] > 1 for submodule in part.modules()):
            continue
        try:
            key, numbers = _structure(part)
        except _UnequalModule:
            continue
        modules_by_key.setdefault(key, []).append((path, part, numbers))
    groups = []
    for members in modules_by_key.values():
        if len(members) < LEAST:
            continue
        first = members[0][2]
        differing = [place for place in first if len({numbers[place] for _, _, numbers in members}) > 1]
        own_numbers = {id(part): {place: all_numbers[place] for place in differing} for _, part, all_numbers in members}
        groups.append((_Group([part for _, part, _ in members], own_numbers), [path for path, _, _ in members]))
    return groups


def _structure(module: nn.Module) -> tuple[object, dict[Place, int]]:
    """Return a key shared by equal modules, and their integers. Raises _UnequalModule for own hooks or marks."""
    key: list[object] = []
    numbers: dict[Place, int] = {}
    for path, part in module.named_modules():
        state = vars(part)
        if "forward" in state or _has_hooks(part) or (path and any(name.startswith("_shardwise") for name in state)):
            raise _UnequalModule
        key.append((path, type(part)))
        for name, value in state.items():
            if name in OF_TORCH:
                continue
            if type(value) is int:
                numbers[path, name] = value
                key.append(name)
            else:
                key.append((name, _attribute_key(value)))
        for kind, tensors in (("parameter", part._parameters), ("buffer", part._buffers)):
            for name, tensor in tensors.items():
                key.append((kind, name, None if tensor is None else tensor_form(tensor)))
    return tuple(key), numbers


@dataclass(frozen=True, eq=False)
class _IdentityKey:
    """Key that equals only that of the same object, which it keeps alive so that its identity is not reused."""

    value: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _IdentityKey) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


def _attribute_key(value: Any) -> object:
    """Return a key that equal attributes share. Raises _UnequalModule for a tensor."""
    if isinstance(value, torch.Tensor):
        raise _UnequalModule
    if is_constant(value):
        try:
            key = constant_key(value)
            hash(key)
        except Exception:  # whatever a user's class of numbers or texts raises
            return _IdentityKey(value)
        return key
    if isinstance(value, partial):
        return partial, _attribute_key(value.func), _attribute_key(value.args), _attribute_key(value.keywords)
    if isinstance(value, (list, tuple)):
        return type(value), tuple(map(_attribute_key, items_of(value)))
    if isinstance(value, dict):
        return type(value), tuple((_attribute_key(k), _attribute_key(v)) for k, v in items_of(value))
    return _IdentityKey(value)


def _has_hooks(module: nn.Module) -> bool:
    return any(getattr(module, hooks) for hooks in _HOOKS)


def tensor_form(tensor: torch.Tensor) -> object:
    """Return everything about a tensor except its memory."""
    return type(tensor), tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype, tensor.requires_grad


# --------------------------------------------------------------------------------------------------------- calls


@dataclass(frozen=True)
class _Leaf:
    """A leaf of what a call returns."""

    operand: int | None = None
    constant: tuple[Any] | None = None

    @property
    def key(self) -> object:
        return self.operand, None if self.constant is None else constant_key(self.constant)


@dataclass(frozen=True)
class _RepeatedCall:
    """A call of a module's ``forward`` from a ``path``. ``operands``: tensor arguments, then the module's tensors."""

    key: object
    operands: list[torch.Tensor]
    path: str
    forward: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def argument_ids(self) -> list[int]:
        """Return the identities of the arguments' leaves, which the call may replace by others."""
        return list(map(id, pytree.tree_leaves((self.args, self.kwargs))))


def _key_of(module: nn.Module, operands: list[torch.Tensor], arguments: Any, group: _Group, line: str) -> object:
    """Return the key of a call's kind; None for a call that is traced as it is."""
    leaves, spec = pytree.tree_flatten(arguments)
    constants = [leaf for leaf in leaves if not isinstance(leaf, torch.Tensor)]
    if not all(map(is_constant, constants)) or len(constants) == len(leaves) or not all(map(is_fake, operands)):
        return None
    if any(map(_has_hooks, module.modules())) or torch._C._functorch.maybe_current_level() is not None:
        return None
    if any(tensor._has_symbolic_sizes_strides for tensor in operands):  # sizes that depend on data cannot be compared
        return None
    memory: dict[int, int] = {}
    with torch._C.DisableTorchFunction():  # this query is not the model's
        forms = tuple(
            (tensor_form(t), t.storage_offset(), memory.setdefault(t.untyped_storage()._cdata, len(memory)))
            for t in operands
        )
    places = tuple(None if isinstance(leaf, torch.Tensor) else (constant_key(leaf),) for leaf in leaves)
    try:
        key = forms, places, spec, line, _state(module, group.numbers[id(module)]), _modes()
        hash(key)
    except Exception:  # _UnequalModule, or whatever a user's constants raise when compared
        return None
    return key


@dataclass(frozen=True)
class _ModuleState:
    """Python state of a call. ``kept_alive``: objects held so that no identity is reused."""

    attributes: tuple[object, ...]
    shared: tuple[tuple[str, object], ...]
    kept_alive: list[object] = field(compare=False)


def _state(module: nn.Module, numbers: Mapping[Place, int]) -> _ModuleState:
    """Return state that a call may read in Python and a model's loop may change between calls: attributes, contents of
    objects that layers share, and of their classes and files. ``numbers``: the group's integers, handled separately.
    Raises _UnequalModule if one of these changed, and for a tensor."""
    attributes: list[object] = []
    shared = StateReader(thorough=True)
    for path, part in module.named_modules():
        for name, value in vars(part).items():
            if name in OF_TORCH or name == "forward":  # that of ``_repeating``
                continue
            if (path, name) not in numbers:
                attributes.append((path, name, _attribute_key(value)))
                shared.read(f"{path}.{name}", value)
            elif type(value) is not int or value != numbers[path, name]:
                raise _UnequalModule
        for kind in type(part).__mro__:
            shared.read_class(kind)
    return _ModuleState(tuple(attributes), tuple(shared.leaves.items()), shared.kept_alive)


def _own_tensors(module: nn.Module) -> list[torch.Tensor]:
    named = (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False))
    return [tensor for _, tensor in named]


def _modes() -> object:
    """Return the torch modes on which the trace of a call depends."""
    casting = tuple((torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in ("cpu", "cuda"))
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.get_default_dtype(), casting


def _repeating(
    module: nn.Module, path: str, group: _Group, repeats: TracedRepeats, line_of: Callable[[FrameType | None], str]
) -> Callable[..., Any]:
    original = module.forward

    @wraps(original)
    def forward(*args: Any, **kwargs: Any) -> Any:
        if repeats.inside or repeats.failed:
            return original(*args, **kwargs)
        tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        operands = [*tensors, *_own_tensors(module)]
        key = _key_of(module, operands, (args, kwargs), group, line_of(sys._getframe(1)))
        read = group.read.get(key, frozenset())
        if key is None or read is None:
            return original(*args, **kwargs)
        call = _RepeatedCall(key, operands, path, original, args, kwargs)
        kind = group.kinds.get((key, group.values(module, read)))
        if kind is None:
            return _first(module, group, repeats, call)
        kind.calls += 1
        if kind.calls == 2 or module is kind.last:
            return _witness(kind, repeats, call)
        results, leaves = iter(REPEAT(operands, kind.body, path)), list[Any]()
        for leaf in kind.leaves:
            if leaf.constant is not None:
                leaves.append(leaf.constant[0])
            else:
                leaves.append(next(results) if leaf.operand is None else operands[leaf.operand])
        return pytree.tree_unflatten(leaves, kind.spec)

    return forward


def _first(module: nn.Module, group: _Group, repeats: TracedRepeats, call: _RepeatedCall) -> Any:
    """Trace the first call of a kind, and record whether others may be repeats of it."""
    number = repeats.number(call.path)
    state, modes, argument_ids = snapshot_state(module), _modes(), call.argument_ids()
    with _reads(module, group.numbers[id(module)]) as touched:
        result, spec, leaves, results = _traced(repeats, number, call)
    read = frozenset(touched)
    first = group.read.get(call.key)
    own_tensors = _own_tensors(module)
    closed = (
        leaves is not None
        and not state.changed(snapshot_state(module))
        and modes == _modes()
        and argument_ids == call.argument_ids()
        and list(map(id, call.operands[len(call.operands) - len(own_tensors) :])) == list(map(id, own_tensors))
        and (first is None or read <= first)
    )
    if not closed or leaves is None:
        group.read[call.key] = None
        return result
    read = group.read[call.key] = read if first is None else first
    values = group.values(module, read)
    last = [member for member in group.modules if group.values(member, read) == values][-1]
    group.kinds[call.key, values] = _Kind(number, spec, leaves, last)
    _BODIES[number] = tuple(results)
    return result


def _witness(kind: _Kind, repeats: TracedRepeats, call: _RepeatedCall) -> Any:
    """Trace a call that could be a repeat, to be compared with the body."""
    number = repeats.number(call.path)
    repeats.witnesses[number] = kind.body
    result, spec, leaves, _ = _traced(repeats, number, call)
    same = leaves is not None and [leaf.key for leaf in leaves] == [leaf.key for leaf in kind.leaves]
    repeats.failed |= spec != kind.spec or not same
    return result


def _traced(
    repeats: TracedRepeats, number: int, call: _RepeatedCall
) -> tuple[Any, pytree.TreeSpec, tuple[_Leaf, ...] | None, list[torch.Tensor]]:
    """Trace a call between ``enter`` and ``leave``. Return its result, the result's leaves (None: a repeat could not
    return it), and its new tensors."""
    ENTER(call.operands, number)
    repeats.inside = True
    try:
        result = call.forward(*call.args, **call.kwargs)
    finally:
        repeats.inside = False
    flat, spec = pytree.tree_flatten(result)
    places = {id(operand): position for position, operand in reversed(list(enumerate(call.operands)))}
    memory = {operand.untyped_storage()._cdata for operand in call.operands}
    leaves: list[_Leaf] = []
    results: list[torch.Tensor] = []
    for leaf in flat:
        if not isinstance(leaf, torch.Tensor):
            if not is_constant(leaf):
                return result, spec, None, []
            leaves.append(_Leaf(constant=(leaf,)))
        elif id(leaf) in places:
            leaves.append(_Leaf(places[id(leaf)]))
        elif not is_fake(leaf) or leaf.untyped_storage()._cdata in memory:
            return result, spec, None, []
        else:
            memory.add(leaf.untyped_storage()._cdata)
            leaves.append(_Leaf())
            results.append(leaf)
    LEAVE(results, number)
    return result, spec, tuple(leaves), results


@contextmanager
def _reads(module: nn.Module, numbers: Mapping[Place, int]) -> Iterator[set[Place]]:
    """Watch reads and writes of a module's integers while the context lasts. Yields those touched."""
    touched: set[Place] = set()
    watched: dict[int, dict[str, Place]] = {}
    for path, name in numbers:
        owner = module.get_submodule(path)
        if type(owner).__getattribute__ is not object.__getattribute__:
            touched.add((path, name))  # a read may not be seen
        watched.setdefault(id(vars(owner)), {})[name] = path, name

    def touch(owner: nn.Module, name: str) -> None:
        places = watched.get(id(object.__getattribute__(owner, "__dict__")), {})  # that a proxy of export has, too
        if name in places:
            touched.add(places[name])
        elif name in _ALL_AT_ONCE and not sys._getframe(2).f_code.co_filename.startswith(NOT_USER_CODE):
            touched.update(places.values())

    def read(owner: nn.Module, name: str) -> Any:
        touch(owner, name)
        return object.__getattribute__(owner, name)

    def write(owner: nn.Module, name: str, value: Any) -> None:
        touch(owner, name)
        original(owner, name, value)

    original = nn.Module.__setattr__
    with patch.object(nn.Module, "__getattribute__", read), patch.object(nn.Module, "__setattr__", write):
        yield touched
