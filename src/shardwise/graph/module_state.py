"""Detection of Python state that a model changes while it runs: counters, flags, caches, tensors kept for later calls.

Capture runs the model's Python once, so later calls would see the state left by the first. State is compared before and
after the call. Only a model that changed some is called twice in one trace, and the second call must compute what the
first did:

* structurally: an operator is known by its target and by what its operands are (``_numbers``), so that programs over
  the same sources are equal if their results have equal numbers;
* from nothing but the sources: a value that the first call made may be used by the second if it depends on constants
  alone (a table that is made once and kept).
"""

from __future__ import annotations

import inspect
import pickle
import sys
import threading
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import BuiltinFunctionType, FunctionType, MappingProxyType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn

from shardwise.errors import listed
from shardwise.graph.ir import Graph, Ref, needed_for, refs
from shardwise.graph.looking import (
    attribute,
    closure_of,
    function_of,
    items_of,
    nested_code,
    size_of,
    text_of,
)
from shardwise.graph.origins import is_class_of_models, is_module_of_models, is_of_models
from shardwise.graph.schema import is_random
from shardwise.graph.trees import argument_key, bytes_of, constant_key, is_constant

BETWEEN_CALLS = "between two calls"  # the tag of the mark that divides a trace of two calls
OF_TORCH = frozenset(vars(nn.Module())) - {"training"}
_SEEN_BY_IDENTITY = (type, FunctionType, BuiltinFunctionType, MethodType, ModuleType, torch.Generator)
_OF_CLASSES = (bool, int, float, str, list, dict, type(None))
MOST_ITEMS = 1000  # of a container or tensor that is read item by item; a longer one is a table
_CONFIGURATIONS = ("PretrainedConfig", "PreTrainedConfig")


@dataclass(frozen=True)
class StateSnapshot:
    """State of a module's attributes, the class attributes of its modules and the numbers in their files.

    ``leaves``: location -> a key that distinguishes values; ``texts``: how values are printed; ``kept_alive``: objects
    held so that no identity is reused.
    """

    leaves: Mapping[str, object]
    texts: Mapping[str, str]
    kept_alive: Sequence[object]

    def changed(self, after: StateSnapshot) -> tuple[str, ...]:
        """Return the locations that differ."""
        places = dict.fromkeys([*self.leaves, *after.leaves])
        return tuple(p for p in places if self.leaves.get(p) != after.leaves.get(p))

    def registered(self, places: Iterable[str], after: StateSnapshot) -> tuple[str, ...]:
        """Return the places that describe parameters, whether they are trained, buffers, or backward hooks."""
        return tuple(p for p in places if any(isinstance(s.leaves.get(p), Registered) for s in (self, after)))

    def described(self, places: Iterable[str], after: StateSnapshot) -> str:
        """Describe changes, as in ``calls (0 -> 1), cache (None -> a tensor)``."""
        gone = "nothing"
        return listed([f"{p} ({self.texts.get(p, gone)} -> {after.texts.get(p, gone)})" for p in places])

    def without_tensors(self, places: Iterable[str], after: StateSnapshot) -> tuple[str, ...]:
        """Return the locations that hold no tensor afterwards."""
        return tuple(p for p in places if not str(after.texts.get(p, "")).startswith("a tensor"))


@dataclass(frozen=True)
class Registered:
    """The key of a parameter, of a buffer's shape, or of the backward hooks of a module."""

    content: object


def snapshot_state(module: nn.Module, others: Iterable[object] = ()) -> StateSnapshot:
    """Read the Python state that a call of the module may change. ``others``: values that its code names
    (``ReachableCode.values``), of which modules and the user's classes, objects and files are read."""
    reader = StateReader()
    for path, owner in module.named_modules():
        prefix = f"{path}." if path else ""
        for name, value in vars(owner).items():
            if name not in OF_TORCH:
                reader.read(f"{prefix}{name}", value)
        for name, tensor in (*owner._parameters.items(), *owner._buffers.items()):
            reader.read_registered(f"{prefix}{name}", tensor)
        hooks = (*owner._backward_hooks.values(), *owner._backward_pre_hooks.values())
        place = f"backward hooks of {path or 'the model'}"
        reader.leaf(place, Registered(tuple(map(id, hooks))), str(len(hooks)), hooks)
        for kind in type(owner).__mro__:
            reader.read_class(kind)
    for value in others:
        reader.read_other(value)
    return StateSnapshot(reader.leaves, reader.texts, reader.kept_alive)


@dataclass
class StateReader:
    """Reads Python values, down to numbers, texts and identities. ``thorough``: also read configurations of
    transformers, objects in class attributes, and everything in a file that the methods of a class use."""

    leaves: dict[str, object] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)
    kept_alive: list[object] = field(default_factory=list)
    seen: set[int] = field(default_factory=set)
    thorough: bool = False

    def read(self, place: str, value: Any) -> None:
        try:
            self._read(place, value)
        except Exception:  # whatever a user's object raises when it is looked at: it is then known by its identity
            self.leaf(place, id(value), type(value).__name__, value)

    def _read(self, place: str, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            self.leaf(place, ("tensor", id(value)), f"a tensor {list(value.shape)}", value)
        elif isinstance(value, (nn.Module, *_SEEN_BY_IDENTITY)):
            kind: type = type(value)
            self.leaf(place, id(value), kind.__name__, value)
            self._read_function(function_of(value))
        elif is_constant(value):
            self.leaf(place, constant_key(value), text_of(value)[:40], None)
        elif id(value) in self.seen or (_is_configuration(value) and not self.thorough):
            self.leaf(place, id(value), type(value).__name__, value)
        else:
            self.seen.add(id(value))
            self.kept_alive.append(value)
            self._read_parts(place, value)

    def _read_parts(self, place: str, value: Any) -> None:
        if isinstance(value, dict):
            self.leaf(place, ("items", size_of(value)), f"{size_of(value)} items", None)
            for key, item in items_of(value):
                self.read(f"{place}[{text_of(key)}]", item)
        elif isinstance(value, set):
            items = items_of(value)
            self.leaf(place, ("set", frozenset(map(item_key, items))), f"{len(items)} items", None)
        elif isinstance(value, (list, tuple, deque)):
            self.leaf(place, ("items", size_of(value)), f"{size_of(value)} items", None)
            for i, item in enumerate(items_of(value)):
                self.read(f"{place}[{i}]", item)
        elif isinstance(attributes := attribute(value, "__dict__"), (dict, MappingProxyType)):
            for name, item in attributes.items():
                self.read(f"{place}.{name}", item)
        else:
            self.leaf(place, _pickled(value), type(value).__name__, value)

    def read_registered(self, place: str, tensor: torch.Tensor | None) -> None:
        """Read a parameter: its identity, and whether it is trained; or a buffer: whether it exists, and its shape."""
        if isinstance(tensor, nn.Parameter):
            text = f"a {'' if tensor.requires_grad else 'frozen '}parameter {list(tensor.shape)}"
            self.leaf(place, Registered((id(tensor), tensor.requires_grad)), text, tensor)
        elif tensor is not None:
            self.leaf(place, Registered((tensor.shape, tensor.dtype)), f"a buffer {list(tensor.shape)}", None)

    def read_other(self, value: Any) -> None:
        """Read a value outside of the model that its code names: attributes of modules, functions and objects, numbers
        and containers of classes and files, unless they belong to Python or torch."""
        kind = type(value)  # (isinstance asks an object for its __class__)
        if issubclass(kind, ModuleType):
            if is_module_of_models(value):
                self._read_file(value)
        elif issubclass(kind, type):
            self.read_class(value)
        elif kind is FunctionType:
            self._read_function(value)
        elif issubclass(kind, nn.Module) or is_class_of_models(type(value)):
            if id(value) in self.seen or _is_configuration(value):
                return
            self.seen.add(id(value))
            self.kept_alive.append(value)
            for name, item in (attribute(value, "__dict__") or {}).items():
                if name not in OF_TORCH:
                    self._read_plain(f"{type(value).__name__}.{name}", item)

    def _read_plain(self, place: str, value: Any) -> None:
        """Read a number, a text, or the direct contents of a container that is no table."""
        if isinstance(value, (list, dict, set, deque)) and size_of(value) <= MOST_ITEMS:
            items = items_of(value)
            self.leaf(place, tuple(map(item_key, items)), f"{len(items)} items", tuple(items))
        elif (
            isinstance(value, (bool, int, float, str, type(None), threading.local))
            or type(value).__module__ == "itertools"
        ):
            self.read(place, value)
        elif isinstance(value, ContextVar):
            self.read(place, value.get(None))

    def _read_function(self, function: Any) -> None:
        """Read what a user's function keeps between calls: its closure, defaults and attributes."""
        if not isinstance(function, FunctionType) or id(function) in self.seen:
            return
        self.seen.add(id(function))
        code = function.__code__
        if not is_of_models(code.co_filename):
            return
        defaults = function.__defaults__ or ()
        names = code.co_varnames[: code.co_argcount]
        kept = [*zip(names[len(names) - len(defaults) :], defaults, strict=True)]
        kept += [*(function.__kwdefaults__ or {}).items(), *vars(function).items(), *closure_of(function).items()]
        for name, value in kept:
            if isinstance(value, FunctionType):
                self._read_function(value)
            elif not isinstance(value, _SEEN_BY_IDENTITY) and _is_content(value):
                self.read(f"{function.__qualname__}: {name}", value)

    def read_class(self, kind: type) -> None:
        """Read numbers, texts and containers in attributes of a user's class, state kept by its methods, and numbers
        and containers in its file."""
        if id(kind) in self.seen or not is_class_of_models(kind):
            return
        self.seen.add(id(kind))
        for name, value in vars(kind).items():
            if not name.startswith("__") and (isinstance(value, _OF_CLASSES) or (self.thorough and _is_content(value))):
                self.read(f"{kind.__name__}.{name}", value)
            self._read_function(function_of(value))
        module = sys.modules[kind.__module__]
        if self.thorough:
            for name in _names_used(kind, module):
                if _is_content(value := vars(module).get(name)):
                    self.read(f"{kind.__module__}.{name}", value)
        else:
            self._read_file(module)

    def _read_file(self, module: ModuleType) -> None:
        if id(module) in self.seen:
            return
        self.seen.add(id(module))
        for name, value in vars(module).items():
            if not name.startswith("__") and not isinstance(value, (str, type(None))):
                self._read_plain(f"{module.__name__}.{name}", value)

    def leaf(self, place: str, key: object, text: str, kept_alive: object) -> None:
        self.leaves[place], self.texts[place] = key, text
        self.kept_alive.append(kept_alive)


def _is_configuration(value: Any) -> bool:
    """Return whether it is a configuration of transformers: models fill in missing values in the first call."""
    return any(kind.__name__ in _CONFIGURATIONS and "transformers" in kind.__module__ for kind in type(value).__mro__)


def _is_content(value: Any) -> bool:
    """Return whether the contents of a value in a class or file are read: numbers, texts, containers, objects of a
    user's classes."""
    package = type(value).__module__.partition(".")[0]
    is_users = package not in sys.stdlib_module_names and package not in ("torch", "shardwise")
    return is_users or isinstance(value, (*_OF_CLASSES, set, tuple))


def _names_used(kind: type, module: ModuleType) -> list[str]:
    """Return the names used by the methods of a class, and by functions of its file that they name."""
    names: dict[str, None] = {}
    pending = list(vars(kind).values())
    while pending:
        function = function_of(pending.pop())
        if isinstance(function, FunctionType):
            used = [name for code in nested_code(inspect.unwrap(function).__code__) for name in code.co_names]
            new = [name for name in used if name not in names]
            names |= dict.fromkeys(new)
            pending += [vars(module).get(name) for name in new]
    return list(names)


def item_key(item: Any) -> object:
    """Return a key of an item of a container: of its value, or else of its identity."""
    if isinstance(item, tuple):
        return tuple(map(item_key, item))
    return constant_key(item) if is_constant(item) else id(item)


def _pickled(value: Any) -> object:
    """Return the content of an object without attributes (a number generator, an iterator), or its identity."""
    try:
        with torch._C.DisableTorchFunction():  # a tensor in it is looked at, not used
            return pickle.dumps(value)
    except Exception:  # whatever an object raises that cannot be pickled: it is then known by its identity
        return id(value)


def trace_difference(graph: Graph, constants: Mapping[str, torch.Tensor], half: int) -> str:
    """Describe what a second call computes differently from the first, in a trace of both; "" if nothing.

    ``graph``: functional and simplified, because a cast to the same dtype returns its operand, and later readers of the
    operand would seem to read the cast. Its outputs: those of the first call, the mark, those of the second. ``half``:
    the number of outputs of one call.
    """
    numbers = _numbers(graph, constants)
    outputs = [numbers[o.name] if isinstance(o, Ref) else constant_key(o) for o in graph.outputs]
    mark = graph.outputs[half]
    assert isinstance(mark, Ref), "the mark between the calls is a value"
    if outputs[:half] != outputs[half + 1 :]:
        return "its next call would compute something else"
    boundary = next(i for i, op in enumerate(graph.ops) if mark.name in op.results)
    first = {name for op in graph.ops[:boundary] for name in op.results}
    constants_of_graph = (source.value for source in graph.sources if source.kind == "constant")
    constant = graph.made_from(constants_of_graph, lambda op: not is_random(op.target))
    sources = {numbers[source.value] for source in graph.sources}
    _, read = needed_for(refs(graph.outputs[half + 1 :]), graph.ops[boundary + 1 :])
    carried = {n for n in read & first if n not in constant and numbers[n] not in sources}
    return "its next call would use a tensor made by this call" if carried else ""


def _numbers(graph: Graph, constants: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """Number values such that those computed equally from the same sources have the same number."""
    numbers: dict[object, int] = {}
    of: dict[str, int] = {}

    def number(key: object) -> int:
        return numbers.setdefault(key, len(numbers))

    for source in graph.sources:
        data = constants.get(source.value)
        of[source.value] = number(("source", source.value) if data is None else content_of(data))
    for op in graph.ops:
        called = op.target, argument_key((op.args, op.kwargs), of.__getitem__)
        of.update((name, number((called, i))) for i, name in enumerate(op.results))
    return of


def content_of(data: torch.Tensor) -> object:
    """Return a key of the numbers in a tensor."""
    return data.dtype, tuple(data.shape), bytes_of(data)
