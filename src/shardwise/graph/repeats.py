"""Equal submodules are traced once: later calls of a repeated layer become one operator, ``shardwise::repeat``.

Around the first call of a kind two operators are traced, ``enter`` with what the call may read (its tensors, then the
parameters and buffers of the module) and ``leave`` with what it returns; what lies between them is the kind's *body*. A
later call is one ``repeat`` of the same operands in the same order, and the functionalizer writes the body in its place
(``graph.bodies``). The model's own loop runs all the same, so that what it does between layers is what it does.

Two calls are of one kind if their modules are equal (classes, attributes, shapes), are called with equal arguments
(shapes, strides, what shares memory, constants) from the same line, and read equal values of those whole numbers in
which the modules differ (``layer_idx``): these are taken out of the attributes while a body is traced, so that a read
is seen. A call whose module has hooks, regions or parts with names of their own, changes its Python state or takes and
returns something else than tensors and constants is traced as it is. The second call of every kind and the last module
of it are traced, too, as *witnesses*: they must have the body's operators, or the whole model is traced plainly.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial, wraps
from types import FrameType
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch._subclasses.fake_tensor import is_fake
from torch.fx.node import has_side_effect
from torch.utils import _pytree as pytree

from shardwise.graph.state import OF_TORCH, Reader, snapshot
from shardwise.graph.trees import constant_key, is_constant

LEAST = 4  # modules of a kind: the first, two witnesses and one that is not traced
_LIBRARY = torch.library.Library("shardwise", "FRAGMENT")
_LIBRARY.define("enter(Tensor[] operands, int number) -> ()")
_LIBRARY.define("leave(Tensor[] results, int number) -> ()")
_LIBRARY.define("repeat(Tensor[] operands, int body, str path) -> Tensor[]")
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_BODIES: dict[int, tuple[torch.Tensor, ...]] = {}  # number of a body that is in use -> the results of its call
Place = tuple[str, str]  # path of a module inside another one, name of an attribute


@torch.library.impl(_LIBRARY, "enter", "CompositeImplicitAutograd")
def _enter(operands: list[torch.Tensor], number: int) -> None:
    """It exists only while a model is captured."""


@torch.library.impl(_LIBRARY, "leave", "CompositeImplicitAutograd")
def _leave(results: list[torch.Tensor], number: int) -> None:
    """It exists only while a model is captured."""


@torch.library.impl(_LIBRARY, "repeat", "CompositeImplicitAutograd")
def _repeat(operands: list[torch.Tensor], body: int, path: str) -> list[torch.Tensor]:
    """Tensors like the results of the body; it exists only while a model is captured."""

    def like(result: torch.Tensor) -> torch.Tensor:
        offset, strides = result.storage_offset(), result.stride()
        reach = sum((size - 1) * stride for size, stride in zip(result.shape, strides, strict=True))
        flat = torch.empty(offset + max(reach, 0) + 1, dtype=result.dtype, device=result.device)
        flat = flat.requires_grad_().clone() if result.requires_grad else flat  # no leaf: it may be written to
        return flat.as_strided(result.shape, strides, offset)

    return [like(result) for result in _BODIES[body]]


ENTER, LEAVE, REPEAT = (getattr(torch.ops.shardwise, name).default for name in ("enter", "leave", "repeat"))
for _operator in (ENTER, LEAVE, REPEAT):
    has_side_effect(_operator)


@dataclass
class _Kind:
    """Calls of one kind. ``leaves``: what a call returns: for an operand that is handed on its position, for a new
    tensor nothing, for a constant itself; ``last``: the module that is traced as a witness."""

    body: int
    spec: pytree.TreeSpec
    leaves: tuple[_Leaf, ...]
    last: nn.Module
    calls: int = 1


@dataclass
class _Group:
    """Modules that are equal but for whole numbers. ``numbers``: of each module those in which they differ; ``read``:
    by the key of a call those that bodies read; None: such calls are not repeated."""

    modules: list[nn.Module]
    numbers: dict[int, dict[Place, int]]
    read: dict[object, frozenset[Place] | None] = field(default_factory=dict)
    kinds: dict[object, _Kind] = field(default_factory=dict)

    def values(self, module: nn.Module, places: frozenset[Place]) -> frozenset[tuple[Place, int]]:
        return frozenset((place, self.numbers[id(module)][place]) for place in places)


@dataclass
class Repeats:
    """What was repeated while a model was traced. ``paths``: number of a body, or of a witness, -> the path of its
    module; ``witnesses``: number of a witness -> that of its body; ``failed``: a witness returned something else."""

    paths: dict[int, str] = field(default_factory=dict)
    witnesses: dict[int, int] = field(default_factory=dict)
    failed: bool = False
    inside: bool = False

    def number(self, path: str) -> int:
        """A new number, for a body or a witness from this path."""
        self.paths[len(self.paths)] = path
        return len(self.paths) - 1


@contextmanager
def repeated_calls(
    module: nn.Module, found: Repeats, annotated: Collection[str], line_of: Callable[[FrameType | None], str]
) -> Iterator[None]:
    """While ``module`` (a copy made for capture) is traced, its repeated layers are traced once. ``annotated``: paths
    of modules whose calls open regions; ``line_of``: the user's line of a frame."""
    for group, paths in _groups(module, annotated):
        for part, path in zip(group.modules, paths, strict=True):
            part.forward = _repeating(part, path, group, found, line_of)
    try:
        yield
    finally:
        for number in found.paths:
            _BODIES.pop(number, None)


# ------------------------------------------------------------------------------------------------------- modules


class _Unequal(Exception):
    """A module that is like no other."""


def _groups(module: nn.Module, annotated: Collection[str]) -> list[tuple[_Group, list[str]]]:
    """Equal modules that have parts, and their paths."""
    names: dict[int, int] = {}
    for _, part in module.named_modules(remove_duplicate=False):
        names[id(part)] = names.get(id(part), 0) + 1
    found: dict[object, list[tuple[str, nn.Module, dict[Place, int]]]] = {}
    for path, part in module.named_modules():
        inside = any(own == path or own.startswith(f"{path}.") for own in annotated)
        if not path or inside or next(part.children(), None) is None:
            continue
        if any(names[id(own)] > 1 for own in part.modules()):
            continue
        try:
            key, numbers = _structure(part)
        except _Unequal:
            continue
        found.setdefault(key, []).append((path, part, numbers))
    groups = []
    for members in found.values():
        if len(members) < LEAST:
            continue
        first = members[0][2]
        differing = [place for place in first if len({numbers[place] for _, _, numbers in members}) > 1]
        own_numbers = {id(part): {place: own[place] for place in differing} for _, part, own in members}
        groups.append((_Group([part for _, part, _ in members], own_numbers), [path for path, _, _ in members]))
    return groups


def _structure(module: nn.Module) -> tuple[object, dict[Place, int]]:
    """A key that equal modules have in common, and their whole numbers. Raises _Unequal for what has its own."""
    key: list[object] = []
    numbers: dict[Place, int] = {}
    for path, part in module.named_modules():
        own = vars(part)
        if "forward" in own or _has_hooks(part) or (path and any(name.startswith("_shardwise") for name in own)):
            raise _Unequal
        key.append((path, type(part)))
        for name, value in own.items():
            if name in OF_TORCH:
                continue
            if type(value) is int:
                numbers[path, name] = value
                key.append(name)
            else:
                key.append((name, _attribute_key(value)))
        for kind, tensors in (("parameter", part._parameters), ("buffer", part._buffers)):
            for name, tensor in tensors.items():
                key.append((kind, name, None if tensor is None else _form(tensor)))
    return tuple(key), numbers


def _attribute_key(value: Any) -> object:
    if isinstance(value, torch.Tensor):
        raise _Unequal
    if is_constant(value):
        return constant_key(value)
    if isinstance(value, partial):
        return partial, _attribute_key(value.func), _attribute_key(value.args), _attribute_key(value.keywords)
    if isinstance(value, (list, tuple)):
        return type(value), tuple(map(_attribute_key, value))
    if isinstance(value, dict):
        return type(value), tuple((_attribute_key(k), _attribute_key(v)) for k, v in value.items())
    return id(value)


def _has_hooks(module: nn.Module) -> bool:
    return any(getattr(module, hooks) for hooks in _HOOKS)


def _form(tensor: torch.Tensor) -> object:
    """What is known of a tensor but for its memory."""
    return type(tensor), tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype, tensor.requires_grad


# --------------------------------------------------------------------------------------------------------- calls


@dataclass(frozen=True)
class _Leaf:
    """A leaf of what a call returns."""

    operand: int | None = None
    constant: tuple[Any] | None = None


@dataclass(frozen=True)
class _Call:
    """``operands``: the tensors that a call is given, then those of its module."""

    key: object
    operands: list[torch.Tensor]

    @staticmethod
    def of(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], line: str) -> _Call | None:
        """None for a call that is traced as it is."""
        leaves, spec = pytree.tree_flatten((args, dict(kwargs)))
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        constants = [leaf for leaf in leaves if not isinstance(leaf, torch.Tensor)]
        operands = [*tensors, *_own_tensors(module)]
        if not all(map(is_constant, constants)) or not tensors or not all(map(is_fake, operands)):
            return None
        if any(map(_has_hooks, module.modules())) or torch._C._functorch.maybe_current_level() is not None:
            return None
        memory: dict[int, int] = {}
        forms = tuple(
            (_form(t), t.storage_offset(), memory.setdefault(t.untyped_storage()._cdata, len(memory))) for t in operands
        )
        places = tuple(None if isinstance(leaf, torch.Tensor) else (constant_key(leaf),) for leaf in leaves)
        return _Call((forms, places, spec, line, _state(module), _modes()), operands)


def _state(module: nn.Module) -> object:
    """What a call may read in Python and a model's loop may change from call to call: attributes, what is inside of
    objects that layers share, class attributes, numbers of the user's files. (Whole numbers are looked at apart.)"""
    found: list[object] = []
    shared = Reader.empty()
    for path, part in module.named_modules():
        found.append(part.training)
        for name, value in vars(part).items():
            if (
                name not in OF_TORCH and name != "forward" and type(value) is not int
            ):  # forward is that of ``_repeating``
                found.append((name, _content(f"{path}.{name}", value, shared)))
        for kind in type(part).__mro__:
            shared.read_class(kind)
    return tuple(found), tuple(shared.leaves.items())


def _content(place: str, value: Any, shared: Reader) -> object:
    """The key of an attribute; of an object, which is the same one in all layers, its parts go to ``shared``."""
    try:
        key = _attribute_key(value)
    except _Unequal:
        return id(value)
    if key == id(value):
        shared.read(place, value)
    return key


def _numbers(module: nn.Module) -> dict[Place, int]:
    return {
        (path, name): value
        for path, part in module.named_modules()
        for name, value in vars(part).items()
        if name not in OF_TORCH and type(value) is int
    }


def _own_tensors(module: nn.Module) -> list[torch.Tensor]:
    named = (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False))
    return [tensor for _, tensor in named]


def _modes() -> object:
    """The modes of torch on which the trace of a call depends."""
    casting = tuple((torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in ("cpu", "cuda"))
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.get_default_dtype(), casting


def _repeating(
    module: nn.Module, path: str, group: _Group, found: Repeats, line_of: Callable[[FrameType | None], str]
) -> Callable[..., Any]:
    """The forward of a module of a group."""
    original = module.forward

    @wraps(original)
    def forward(*args: Any, **kwargs: Any) -> Any:
        if found.inside or found.failed:
            return original(*args, **kwargs)
        call = _Call.of(module, args, kwargs, line_of(sys._getframe(1)))
        numbers, hidden = _numbers(module), group.numbers[id(module)]
        if call is None or any(numbers.get(place) != value for place, value in hidden.items()):
            return original(*args, **kwargs)
        visible = tuple(item for item in numbers.items() if item[0] not in hidden)
        call = replace(call, key=(call.key, visible))
        read = group.read.get(call.key, frozenset())
        if read is None:
            return original(*args, **kwargs)
        key = call.key, group.values(module, read)
        kind = group.kinds.get(key)
        if kind is None:
            return _first(module, path, group, found, call, original, args, kwargs)
        kind.calls += 1
        if kind.calls == 2 or module is kind.last:
            return _witness(kind, path, found, call, original, args, kwargs)
        results = iter(REPEAT(call.operands, kind.body, path))
        leaves = [_returned(leaf, call.operands, results) for leaf in kind.leaves]
        return pytree.tree_unflatten(leaves, kind.spec)

    return forward


def _returned(leaf: _Leaf, operands: list[torch.Tensor], results: Iterator[torch.Tensor]) -> Any:
    if leaf.constant is not None:
        return leaf.constant[0]
    return next(results) if leaf.operand is None else operands[leaf.operand]


def _first(
    module: nn.Module,
    path: str,
    group: _Group,
    found: Repeats,
    call: _Call,
    original: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Traces the first call of a kind, and notes whether others may be repeats of it."""
    number = found.number(path)
    state, modes = snapshot(module), _modes()
    given = list(map(id, pytree.tree_leaves((args, kwargs))))
    with _reads(module, group.numbers[id(module)]) as reads:
        result, spec, leaves, results = _traced(found, number, call, original, args, kwargs)
    known = group.read.get(call.key)
    closed = (
        leaves is not None
        and not reads.written
        and not state.changed(snapshot(module))
        and modes == _modes()
        and given == list(map(id, pytree.tree_leaves((args, kwargs))))
        and list(map(id, call.operands[len(call.operands) - len(own := _own_tensors(module)) :])) == list(map(id, own))
        and (known is None or reads.seen <= known)
    )
    if not closed or leaves is None:
        group.read[call.key] = None
        return result
    read = group.read[call.key] = reads.seen if known is None else known
    values = group.values(module, read)
    last = [own for own in group.modules if group.values(own, read) == values][-1]
    group.kinds[call.key, values] = _Kind(number, spec, leaves, last)
    _BODIES[number] = tuple(results)
    return result


def _witness(
    kind: _Kind,
    path: str,
    found: Repeats,
    call: _Call,
    original: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Traces a call that could be a repeat, to be compared with the body."""
    number = found.number(path)
    found.witnesses[number] = kind.body
    result, spec, leaves, _ = _traced(found, number, call, original, args, kwargs)
    found.failed |= (
        spec != kind.spec or leaves is None or list(map(_leaf_key, leaves)) != list(map(_leaf_key, kind.leaves))
    )
    return result


def _leaf_key(leaf: _Leaf) -> object:
    return leaf.operand, None if leaf.constant is None else constant_key(leaf.constant)


def _traced(
    found: Repeats,
    number: int,
    call: _Call,
    original: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> tuple[Any, pytree.TreeSpec, tuple[_Leaf, ...] | None, list[torch.Tensor]]:
    """A call between ``enter`` and ``leave``: its result, what that is made of (None: of something that a repeat could
    not return), and its new tensors."""
    ENTER(call.operands, number)
    found.inside = True
    try:
        result = original(*args, **kwargs)
    finally:
        found.inside = False
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


@dataclass
class _Reads:
    """``seen``: the hidden numbers that were read; ``written``: one was changed."""

    seen: frozenset[Place] = frozenset()
    written: bool = False


@contextmanager
def _reads(module: nn.Module, numbers: Mapping[Place, int]) -> Iterator[_Reads]:
    """While it lasts, whole numbers are taken out of the attributes of a module, so that a read of one is seen."""
    reads = _Reads()
    hidden: dict[tuple[int, str], Place] = {}
    for place in numbers:
        owner = module.get_submodule(place[0])
        kind = type(owner)
        if hasattr(kind, place[1]) or kind.__getattr__ is not nn.Module.__getattr__:
            reads.seen |= {place}  # a read would not be seen
        elif kind.__getattribute__ is not object.__getattribute__:
            reads.seen |= {place}
        else:
            hidden[id(owner), place[1]] = place
            del vars(owner)[place[1]]
    original = nn.Module.__getattr__

    def watched(owner: nn.Module, name: str) -> Any:
        place = hidden.get((id(owner), name))
        if place is None:
            return original(owner, name)
        reads.seen |= {place}
        return numbers[place]

    try:
        with patch.object(nn.Module, "__getattr__", watched):
            yield reads
    finally:
        for path, name in hidden.values():
            owner = module.get_submodule(path)
            reads.written |= name in vars(owner)
            vars(owner)[name] = numbers[path, name]


__all__ = ["ENTER", "LEAVE", "REPEAT", "Repeats", "repeated_calls"]
