"""Guards on what the code of a call reads besides its arguments and the model's tensors: globals, closures, class
attributes, contents of objects and containers, and torch's default dtype.

Eager code reads them again in every call; a program keeps the values at capture. So a rank checks in every call that
they are unchanged: by object identity first, and by value only where the object is another.
"""

from __future__ import annotations

import builtins
import dis
import functools
import threading
from argparse import Namespace
from collections import deque
from collections.abc import Callable, Iterable, Set
from contextvars import ContextVar
from operator import call, is_
from pathlib import Path
from types import BuiltinFunctionType, CellType, FunctionType, MappingProxyType, ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import nn

from shardwise.errors import ShardwiseError, listed
from shardwise.graph.code_reachability import ReachableCode, names_in_methods
from shardwise.graph.looking import attribute, item_of, items_of, nested_code, size_of, text_of
from shardwise.graph.module_state import MOST_ITEMS, OF_TORCH, content_of, item_key
from shardwise.graph.origins import is_class_of_models, is_module_of_models
from shardwise.graph.trees import constant_key, is_constant, is_plain_tensor

_OF_USERS = (Namespace, SimpleNamespace, threading.local)  # classes of Python whose attributes are a user's


class ReadAttribute(NamedTuple):
    """A read: ``get(holder, key)`` returned ``value``."""

    get: Callable[[Any, Any], object]
    holder: Any
    key: Any
    value: object


class ClosureGuards:
    """The values read by the last ``note``, to be compared by ``check``."""

    def __init__(self, names: Iterable[str], read: Callable[[_GuardReader], object]) -> None:
        self._names, self._read = frozenset(names), read
        self.note()

    @staticmethod
    def of_code(code: ReachableCode) -> ClosureGuards:
        """Guard everything that some code uses; it is read again in every capture."""
        return ClosureGuards(_names_of(code), lambda reader: reader.read_code(code))

    @staticmethod
    def of_settings(module: nn.Module, code: ReachableCode) -> ClosureGuards:
        """Guard objects and containers of numbers and texts that are attributes of the model and named in its code. The
        creator of the model may still hold them and change them, while ranks have copies."""
        settings = {
            f"{path}.{name}" if path else name: value
            for path, owner in module.named_modules()
            for name, value in vars(owner).items()
            if name in code.names and name not in OF_TORCH and not is_constant(value) and _is_settings(value)
        }

        def read(reader: _GuardReader) -> None:
            for name, value in settings.items():
                reader.read(name, value)

        return ClosureGuards(_names_of(code), read)

    def note(self) -> None:
        """Take the present values as the expected ones."""
        self._take(self._now())

    def check(self) -> None:
        """Raise ShardwiseError if a value changed since ``note``."""
        if all(map(is_, map(call, self._gets, self._holders, self._keys), self._values)):
            return
        now = self._now()
        changed = self._reader.changed(now)
        if not changed:  # other objects with the same values
            self._take(now)
            return
        raise ShardwiseError(
            f"the code of the model or of its loss uses {changed}, which changed after the programs were "
            "captured: ranks would use the old value",
            fix="pass values that change between steps as inputs, or keep them in a buffer of the model and "
            "write to it (fill_, copy_); set constants before sw.plan and sw.parallelize",
        )

    def _now(self) -> _GuardReader:
        reader = _GuardReader(self._names)
        self._read(reader)
        return reader

    def _take(self, reader: _GuardReader) -> None:
        self._reader = reader
        self._gets = [place.get for place in reader.places]
        self._holders = [place.holder for place in reader.places]
        self._keys = [place.key for place in reader.places]
        self._values = [place.value for place in reader.places]


class _GuardReader:
    """Reads values down to numbers, texts, tensors and identities. ``leaves``: location -> a key that distinguishes
    values; ``texts``: how values are printed."""

    def __init__(self, names: frozenset[str]) -> None:
        self.names = names
        self.places: list[ReadAttribute] = []
        self.leaves: dict[str, object] = {}
        self.texts: dict[str, str] = {}
        self.numbers: set[str] = set()  # where there is a number, a text or a tensor
        self._seen: set[int] = set()

    def changed(self, after: _GuardReader) -> str:
        """Describe the differences, as in ``model.py: SCALE (2.0 -> 3.0)``, or return "". New functions, classes and
        containers inside a container do not count: it may be a registry or a cache."""
        one_sided: list[str] = []
        for before, other in ((self, after), (after, self)):
            alone = [where for where in before.leaves if where not in other.leaves]
            whole = tuple(where for where in alone if where not in before.numbers)
            one_sided += [where for where in alone if not where.startswith(whole)]
        both = [where for where, key in self.leaves.items() if after.leaves.get(where, key) != key]
        names = dict.fromkeys([*both, *one_sided])
        return listed([f"{p} ({self.texts.get(p, 'none')} -> {after.texts.get(p, 'none')})" for p in names])

    # -- places --------------------------------------------------------------------------------------------------------

    def read_code(self, code: ReachableCode) -> None:
        loss = code.loss if isinstance(code.loss, nn.Module) else None
        of_loss = set() if loss is None else set(map(id, loss.modules()))
        self._seen.update(set(map(id, code.owners)) - of_loss)
        self._at(lambda _, __: torch.get_default_dtype(), None, None, "torch's default dtype")
        for function in code.functions:
            file = Path(function.__code__.co_filename).name
            instructions = (i for inner in nested_code(function.__code__) for i in dis.get_instructions(inner))
            for name in {i.argval for i in instructions if i.opname in ("LOAD_GLOBAL", "LOAD_NAME")}:
                if not hasattr(builtins, name) or name in function.__globals__:
                    self._at(dict.get, function.__globals__, name, f"{file}: {name}")
            for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
                self._at(_content, cell, None, f"{function.__qualname__}: {name}")
            for value in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
                self.read(f"a default of {function.__qualname__}", value)
        for kind in code.classes:
            self._read_class(kind, self.names)
        for bound in code.bound:
            name = type(bound).__name__
            if isinstance(bound, functools.partial):
                self.read(f"positional arguments of a {name}", bound.args)
                self.read(f"arguments of a {name}", bound.keywords)
            elif isinstance(bound, nn.Module):  # maybe the model as it was before it was split
                self._read_attributes(name, vars(bound), self.names - OF_TORCH - {"training"})
            else:
                self.read(f"the {name}", bound)
        if loss is not None:
            self.read("the loss", loss)

    def _at(self, get: Callable[[Any, Any], object], holder: Any, key: Any, where: str) -> None:
        """Guard ``get(holder, key)`` and read its value."""
        value = get(holder, key)
        self.places.append(ReadAttribute(get, holder, key, value))
        self.read(where, value)

    def _if(self, is_so: Callable[[Any, Any], bool], holder: Any, key: Any) -> None:
        """Guard a predicate that is true now."""
        self.places.append(ReadAttribute(is_so, holder, key, True))

    # -- values --------------------------------------------------------------------------------------------------------

    def read(self, where: str, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            self.numbers.add(where)
            self._read_tensor(where, value)
        elif is_constant(value):
            if not isinstance(value, (type, FunctionType, BuiltinFunctionType)):
                self.numbers.add(where)
            self._leaf(where, constant_key(value), (attribute(value, "__qualname__") or text_of(value))[:40])
        elif id(value) in self._seen:
            self._leaf(where, type(value), f"a {type(value).__name__}")
        else:
            self._seen.add(id(value))
            self._read_parts(where, value)

    def _read_parts(self, where: str, value: Any) -> None:
        text = f"a {type(value).__name__}"
        if isinstance(value, ModuleType):
            self._leaf(where, id(value), value.__name__)
            if is_module_of_models(value):
                self._read_attributes(value.__name__, vars(value), self.names)
        elif isinstance(value, nn.Module):
            self._leaf(where, id(value), text)
            self._read_module(where, value)
        elif isinstance(value, ContextVar):
            self._leaf(where, id(value), text)
            self._at(_in_context, value, None, f"{where}, in its context")
        elif isinstance(value, (dict, list, tuple, deque, set)):
            self._leaf(where, type(value), f"{size_of(value)} items")
            self._read_items(where, value)
        elif _is_of_a_user(value):
            self._leaf(where, type(value), text)
            names = names_in_methods(type(value), self.names)
            self._read_attributes(where, attribute(value, "__dict__") or {}, names)
            for kind in type(value).__mro__:
                if is_class_of_models(kind):
                    self._read_class(kind, names)
        else:
            self._leaf(where, id(value), text)

    def _read_items(self, where: str, value: Any) -> None:
        self._if(lambda container, length: size_of(container) == length, value, size_of(value))
        if size_of(value) > MOST_ITEMS:
            return
        if isinstance(value, dict):
            for key, _ in items_of(value):
                self._at(dict.get, value, key, f"{where}[{text_of(key)}]")
        elif isinstance(value, set):
            items = frozenset(items_of(value))
            self._leaf(where, frozenset(map(item_key, items)), f"{len(items)} items")
            self._if(set.__eq__, value, items)
        else:
            for i in range(size_of(value)):
                self._at(_item, value, i, f"{where}[{i}]")

    def _read_attributes(self, where: str, table: dict[str, Any], names: Set[str]) -> None:
        for name in sorted(names & table.keys()):
            self._at(dict.get, table, name, f"{where}.{name}")

    def _read_module(self, where: str, module: nn.Module) -> None:
        """Read a module that is not a part of the model; programs hold copies of its numbers."""
        for path, owner in module.named_modules():
            prefix = f"{where}.{path}" if path else where
            if id(owner) in self._seen and owner is not module:
                continue
            self._seen.add(id(owner))
            for name in sorted((self.names.intersection(vars(owner)) - OF_TORCH) | {"training"}):
                self._at(dict.get, vars(owner), name, f"{prefix}.{name}")
            for table in (owner._parameters, owner._buffers):
                for name in table:
                    self._at(dict.get, table, name, f"{prefix}.{name}")

    def _read_class(self, kind: type, names: Set[str]) -> None:
        if id(kind) in self._seen:
            return
        self._seen.add(id(kind))
        table = vars(kind)
        self._if(lambda names, length: len(names) == length, table, len(table))
        for name in sorted(names & table.keys()):
            self._at(MappingProxyType.get, table, name, f"{kind.__qualname__}.{name}")

    def _read_tensor(self, where: str, tensor: torch.Tensor) -> None:
        text = f"a tensor {list(tensor.shape)}"
        if tensor.numel() <= MOST_ITEMS and tensor.device.type == "cpu" and is_plain_tensor(tensor):
            copy = tensor.detach().clone()  # .data is written to without a version
            text = text if tensor.numel() > 4 else str(copy.tolist())
            self._leaf(where, content_of(copy), text)
            self._if(torch.equal, tensor, copy)
        elif tensor.is_inference() or not is_plain_tensor(tensor):
            self._leaf(where, id(tensor), text)
        else:
            state = tensor._version, tensor.data_ptr()
            self._leaf(where, (id(tensor), *state), f"{text} after {tensor._version} writes")
            self._if(lambda x, state: (x._version, x.data_ptr()) == state, tensor, state)

    def _leaf(self, where: str, key: object, text: str) -> None:
        self.leaves[where], self.texts[where] = key, text


def _names_of(code: ReachableCode) -> frozenset[str]:
    """Return the names of attributes that code may use, by name or through ``getattr``."""
    return frozenset(code.names | code.texts | {"forward"})


def _is_settings(value: Any, depth: int = 4) -> bool:
    """Return whether a value holds only numbers and texts, so that keeping it keeps no tensor alive."""
    if is_constant(value):
        return True
    if isinstance(value, (list, tuple, dict, set)) and size_of(value) <= MOST_ITEMS:
        items: Iterable[Any] = dict.values(value) if isinstance(value, dict) else items_of(value)
    elif _is_of_a_user(value):
        items = (attribute(value, "__dict__") or {}).values()
    else:
        return False
    return depth > 0 and all(_is_settings(item, depth - 1) for item in items)


def _is_of_a_user(value: object) -> bool:
    """Return whether an object's class allows user code to set its attributes."""
    return isinstance(value, _OF_USERS) or is_class_of_models(type(value))


# What a place is read by, with a holder and a key.


def _content(cell: CellType, _: None) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # empty
        return None


def _in_context(variable: ContextVar[Any], _: None) -> object:
    try:
        return variable.get()
    except LookupError:  # it was never set
        return None


def _item(container: Any, i: int) -> object:
    return item_of(container, i) if i < size_of(container) else None
