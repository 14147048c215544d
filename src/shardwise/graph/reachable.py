"""The code that a call of a module may run, as far as it can be followed by names.

From the ``forward`` of the modules' classes, through globals, closures, attributes of modules, and methods that any of
the classes has under a name that is used. What is called through a container or a computed name is not found.
"""

from __future__ import annotations

import builtins
import functools
import sysconfig
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

import numpy as np
from torch import nn

from shardwise.graph.origins import NOT_USER_CODE

Cached = functools._lru_cache_wrapper
_INSTALLED = sysconfig.get_path("purelib")
_STANDARD = sysconfig.get_path("stdlib")  # the former lies inside it
_NOT_FOLLOWED = (*NOT_USER_CODE, str(Path(np.__file__).parent))


@dataclass
class Reached:
    """``names``: that the code uses; ``values``: what globals, closures and attributes of modules and owners with these
    names are; ``caches``: functions under ``functools.cache`` or ``lru_cache``."""

    names: set[str] = field(default_factory=set)
    values: list[Any] = field(default_factory=list)
    caches: list[Cached[Any]] = field(default_factory=list)
    _classes: list[type] = field(default_factory=list)
    _seen: set[int] = field(default_factory=set)
    _pending: list[FunctionType] = field(default_factory=list)

    def meet(self, value: Any) -> None:
        """A value that the code may use."""
        value = getattr(value, "fget", None) or getattr(value, "__func__", value)
        if isinstance(value, functools.partial):
            value = value.func
        if id(value) in self._seen:
            return
        self._seen.add(id(value))
        self.values.append(value)
        if isinstance(value, Cached):
            self.caches.append(value)
        value = getattr(value, "__wrapped__", value)
        if isinstance(value, FunctionType) and _is_followed(value.__code__.co_filename):
            self._pending.append(value)

    def meet_class(self, kind: type, *first: str) -> None:
        """A class whose methods the code may call by their names, and calls ``first``."""
        if id(kind) not in self._seen:
            self._seen.add(id(kind))
            self._classes.append(kind)
            for name in (*first, *self.names.intersection(vars(kind))):
                self.meet(vars(kind).get(name))

    def follow(self) -> None:
        """Everything that the functions met so far use."""
        while self._pending:
            function = self._pending.pop()
            names = set(_names(function.__code__))
            for kind in self._classes:
                for name in (names - self.names).intersection(vars(kind)):
                    self.meet(vars(kind)[name])
            self.names |= names
            found = [function.__globals__.get(name, getattr(builtins, name, None)) for name in names]
            for cell in function.__closure__ or ():
                with suppress(ValueError):  # a cell that is empty yet
                    found.append(cell.cell_contents)
            modules: set[ModuleType] = set()
            while found:
                value = found.pop()
                self.meet(value)
                if isinstance(value, ModuleType) and value not in modules:
                    modules.add(value)
                    found += [vars(value)[name] for name in names.intersection(vars(value))]
                elif isinstance(value, type) and value.__module__ != "builtins":
                    self.meet_class(value, "__init__", "__call__")


def reached(module: nn.Module, loss: Callable[..., Any] | None = None) -> Reached:
    """What a call of a module, and of a loss, may run."""
    found = Reached()
    for owner in (*module.modules(), *([loss] if isinstance(loss, nn.Module) else [])):
        for kind in type(owner).__mro__:
            found.meet_class(kind, "forward")
        for value in vars(owner).values():
            if not isinstance(value, dict):
                found.meet(value)
    found.meet(loss)
    found.follow()
    return found


def _is_followed(filename: str) -> bool:
    is_standard = filename.startswith(_STANDARD) and not filename.startswith(_INSTALLED)
    return not is_standard and not filename.startswith(_NOT_FOLLOWED)


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _names(inner)


@contextmanager
def emptied(caches: list[Cached[Any]]) -> Iterator[None]:
    """With caches empty before and after: what was called earlier changes no graph, and what runs on tensors without
    data leaves none."""
    for one in caches:
        one.cache_clear()
    try:
        yield
    finally:
        for one in caches:
            one.cache_clear()


__all__ = ["Reached", "emptied", "reached"]
