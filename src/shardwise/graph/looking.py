"""Safe inspection of user objects, whose methods may raise or have effects. Containers are read by Python's own methods
whatever their classes override (an ``Irrep`` of e3nn is a tuple whose length raises)."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from types import CodeType, FunctionType, MethodType
from typing import Any

_CONTAINERS: tuple[Any, ...] = (dict, list, tuple, set, frozenset, deque)


def attribute(value: object, name: str) -> Any:
    """Return an attribute, or None if there is none or reading it raises."""
    try:
        return getattr(value, name, None)
    except Exception:  # whatever a user's __getattr__ raises
        return None


def function_of(value: Any) -> Any:
    """Return the function of a property or method, anything else as it is. Checks ``type``, because ``isinstance``
    reads ``__class__``."""
    kind = type(value)
    if issubclass(kind, property):
        return value.fget
    return value.__func__ if issubclass(kind, (MethodType, classmethod, staticmethod)) else value


def unwrapped(value: Any) -> Any:
    """Return the function that a decorated one wraps, or the value."""
    wrapped = attribute(value, "__wrapped__")
    return wrapped if type(wrapped) is FunctionType else value


def nested_code(code: CodeType) -> Iterator[CodeType]:
    """Yield the code, and that of the functions and classes inside it."""
    yield code
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from nested_code(inner)


def closure_of(function: FunctionType) -> dict[str, Any]:
    """Return the variables of a closure, without those that are not set yet."""
    closure = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with suppress(ValueError):  # an empty cell
            closure[name] = cell.cell_contents
    return closure


def text_of(value: object) -> str:
    """Return ``repr``, or the name of the type if that raises."""
    try:
        return repr(value)
    except Exception:  # whatever a user's __repr__ raises
        return f"a {type(value).__name__}"


def size_of(container: Any) -> int:
    """Return the number of items of a container."""
    size: int = _base(container).__len__(container)
    return size


def items_of(container: Any) -> list[Any]:
    """Return the items of a container; for a dict, its pairs."""
    return list(dict.items(container)) if isinstance(container, dict) else list(_base(container).__iter__(container))


def item_of(container: Any, index: int) -> Any:
    """Return an item of a list, tuple or deque."""
    return _base(container).__getitem__(container, index)


def _base(container: Any) -> Any:
    kind = type(container)
    return kind if kind in _CONTAINERS else next(base for base in _CONTAINERS if issubclass(kind, base))
