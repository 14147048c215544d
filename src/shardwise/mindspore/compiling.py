"""What programs say about compiling: here a cell is captured where it is split, and runs as Python elsewhere, so that
these change nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class JitConfig:
    """Taken, and without effect."""

    def __init__(self, **settings: Any) -> None:
        self.jit_config_dict = settings


def jit(fn: Any = None, *args: Any, **settings: Any) -> Any:
    """The function itself: ``@jit``, ``@jit(jit_config=...)`` or ``jit(fn)``."""
    return (lambda decorated: decorated) if fn is None else fn


ms_function = ms_class = jit_class = lazy_inline = no_inline = constexpr = _primexpr = jit


def mutable(input_data: Any, dynamic_len: bool = False) -> Any:
    """The same: numbers may change between calls anyway."""
    return input_data


@contextmanager
def no_init_parameters() -> Iterator[None]:
    """Kept for programs that use it: parameters that are made meanwhile have their values at once, as always here."""
    yield


__all__ = [
    "JitConfig", "constexpr", "jit", "jit_class", "lazy_inline", "ms_class", "ms_function", "mutable", "no_inline",
]  # fmt: skip
