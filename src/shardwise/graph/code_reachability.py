"""The code that a call of a module may run, found by following names.

The search starts at the ``forward`` of the modules' classes and follows globals, closures, attributes of modules, and
methods of any found class whose name is used. Calls through a container or a computed name are not found.
"""

from __future__ import annotations

import builtins
import functools
import gc
import inspect
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn

from shardwise.graph.looking import closure_of, function_of, nested_code, unwrapped
from shardwise.graph.origins import is_of_models

Cached = functools._lru_cache_wrapper
_MOST_OBJECTS = 100_000  # that are looked at in a cache


@dataclass
class ReachableCode:
    """Code found so far. ``names``: names the code uses; ``texts``: its string constants; ``values``: values of
    globals, closures and attributes of modules and owners with these names; ``caches``: functions under
    ``functools.cache`` or ``lru_cache``; ``owners``: the modules; ``functions``: functions followed; ``classes``:
    classes whose methods may be called; ``bound``: objects with bound methods, and partial functions; ``loss``: the
    loss function."""

    names: set[str] = field(default_factory=set)
    values: list[Any] = field(default_factory=list)
    caches: list[Cached[Any]] = field(default_factory=list)
    owners: list[nn.Module] = field(default_factory=list)
    texts: set[str] = field(default_factory=set)
    functions: list[FunctionType] = field(default_factory=list)
    classes: list[type] = field(default_factory=list)
    bound: list[object] = field(default_factory=list)
    loss: Callable[..., Any] | None = None
    _seen: set[int] = field(default_factory=set)
    _pending: list[FunctionType] = field(default_factory=list)

    def meet(self, value: Any) -> None:
        """Add a value that the code may use."""
        if issubclass(type(value), (MethodType, functools.partial)):
            self.bound.append(value.__self__ if type(value) is MethodType else value)
        value = function_of(value)
        if issubclass(type(value), functools.partial):
            value = value.func
        if id(value) in self._seen:
            return
        self._seen.add(id(value))
        self.values.append(value)
        if issubclass(type(value), Cached):
            self.caches.append(value)
        value = unwrapped(value)
        if type(value) is FunctionType and is_of_models(value.__code__.co_filename):
            self._pending.append(value)

    def meet_class(self, kind: type, *first: str) -> None:
        """Add a class whose methods the code may call by name, and of which it calls ``first``."""
        if id(kind) not in self._seen:
            self._seen.add(id(kind))
            self.classes.append(kind)
            for name in (*first, *self.names.intersection(vars(kind))):
                self.meet(vars(kind).get(name))

    def follow(self) -> None:
        """Add everything that the functions found so far use."""
        while self._pending:
            function = self._pending.pop()
            self.functions.append(function)
            names = _names(function.__code__)
            constants = (value for code in nested_code(function.__code__) for value in code.co_consts)
            self.texts.update(value for value in constants if isinstance(value, str))
            for kind in self.classes:
                for name in (names - self.names).intersection(vars(kind)):
                    self.meet(vars(kind)[name])
            self.names |= names
            candidates: list[Any] = [function.__globals__.get(name, getattr(builtins, name, None)) for name in names]
            candidates += closure_of(function).values()
            modules: set[ModuleType] = set()
            while candidates:
                value = candidates.pop()
                self.meet(value)
                if issubclass(type(value), ModuleType) and value not in modules:
                    modules.add(value)
                    candidates += [vars(value)[name] for name in names.intersection(vars(value))]
                elif issubclass(type(value), type) and value.__module__ != "builtins":
                    self.meet_class(value, "__init__", "__call__")


def reachable_code(
    module: nn.Module, loss: Callable[..., Any] | None = None, argument_functions: Iterable[Callable[..., Any]] = ()
) -> ReachableCode:
    """Return the code that a call of a module and of a loss may run, given the functions among its arguments."""
    owners = [*module.modules(), *(loss.modules() if isinstance(loss, nn.Module) else ())]
    code = ReachableCode(owners=owners, loss=loss)
    for owner in code.owners:
        for kind in type(owner).__mro__:
            code.meet_class(kind, "forward")
        for value in vars(owner).values():
            if not isinstance(value, dict):
                code.meet(value)
    for function in (loss, *argument_functions):
        code.meet(function)
    code.follow()
    return code


def names_in_methods(kind: type, names: Collection[str]) -> set[str]:
    """Return the names, and those with such names that are used in the methods of a user's class."""
    used, pending = set(names), [*names, "__call__"]
    while pending:
        name = pending.pop()
        method = inspect.getattr_static(kind, name, None)
        method = function_of(method)
        if isinstance(method, FunctionType) and is_of_models(method.__code__.co_filename):
            new = _names(method.__code__) - used
            used |= new
            pending += new
    return used


def _names(code: CodeType) -> set[str]:
    return {name for inner in nested_code(code) for name in inner.co_names}


@contextmanager
def empty_tensor_caches(code: ReachableCode, *, keeps: bool = True) -> Iterator[None]:
    """Empty caches that hold tensors while the context lasts, so that earlier calls do not affect the graph. Afterwards
    drop entries made with fake tensors, or (``keeps`` False, where they are float64 and the model's are not) any
    tensors. Other entries stay: settings or a shared module must not be created again."""
    _empty_tables(code)
    try:
        yield
    finally:
        if not keeps:
            _empty_tables(code)
        for cache in code.caches:
            tensors = [x for x in _contents(cache, code.owners) if isinstance(x, torch.Tensor)]
            if any(x.is_meta or type(x) not in (torch.Tensor, nn.Parameter, nn.Buffer) for x in tensors):
                cache.cache_clear()


def _empty_tables(code: ReachableCode) -> None:
    for cache in code.caches:
        objects = _contents(cache, code.owners)
        if any(isinstance(x, torch.Tensor) for x in objects) and not any(isinstance(x, nn.Module) for x in objects):
            cache.cache_clear()


def _contents(cache: Cached[Any], owners: Sequence[nn.Module]) -> list[Any]:
    """Return the nested contents of a cache, except the model's modules: the cache may decorate their methods."""
    objects: list[Any] = []
    seen = {id(cache), id(cache.__wrapped__), *map(id, owners)}
    pending: list[Any] = [cache]
    while pending and len(objects) < _MOST_OBJECTS:
        for value in gc.get_referents(pending.pop()):
            if id(value) not in seen and not isinstance(value, (type, ModuleType, FunctionType)):
                seen.add(id(value))
                objects.append(value)
                if not isinstance(value, torch.Tensor):
                    pending.append(value)
    return objects
