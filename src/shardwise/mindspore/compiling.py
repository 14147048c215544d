"""Compilation settings of programs. They have no effect: split cells are captured, and other cells run as Python."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class JitConfig:
    """Compilation settings, accepted without effect."""

    def __init__(self, **settings: Any) -> None:
        self.jit_config_dict = settings


def jit(fn: Any = None, *args: Any, **settings: Any) -> Any:
    """Return the function unchanged: ``@jit``, ``@jit(jit_config=...)`` or ``jit(fn)``."""
    return (lambda decorated: decorated) if fn is None else fn


ms_function = ms_class = jit_class = lazy_inline = no_inline = constexpr = _primexpr = jit


def mutable(input_data: Any, dynamic_len: bool = False) -> Any:
    """Return the argument unchanged: numbers may change between calls anyway."""
    return input_data


@contextmanager
def no_init_parameters() -> Iterator[None]:
    """Do nothing. Parameters made in this context get their values at once, as always here."""
    yield


__all__ = [
    "JitConfig", "constexpr", "jit", "jit_class", "lazy_inline", "ms_class", "ms_function", "mutable", "no_inline",
]  # fmt: skip
