"""The options of ``set_auto_parallel_context`` as an object that training cells of programs read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shardwise.mindspore import context
from shardwise.mindspore.options import ALIASES, CHECKS


class _AutoParallelContext:
    """Access to every option by ``get_NAME()``, ``set_NAME(value)`` and ``get_NAME_is_set()``."""

    def __getattr__(self, method: str) -> Callable[..., Any]:
        verb, _, name = method.partition("_")
        option = name.removesuffix("_is_set")
        if verb not in ("get", "set") or (ALIASES.get(option, option) not in CHECKS):
            raise AttributeError(method)
        if verb == "set":
            return lambda value: context.set_auto_parallel_context(**{name: value})
        if option != name:
            return lambda: ALIASES.get(option, option) in context.options().names_set
        return lambda: context.get_auto_parallel_context(name)


_options = _AutoParallelContext()


def auto_parallel_context() -> _AutoParallelContext:
    """Return the only instance."""
    return _options
