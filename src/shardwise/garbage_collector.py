"""Contexts that disable Python's garbage collector, or run it rarely."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

RARE = 100_000  # new objects between collections


@contextmanager
def without_gc() -> Iterator[None]:
    """Disable the collector, which could run foreign callbacks and finalizers between two lines of a model."""
    is_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if is_enabled:
            gc.enable()


@contextmanager
def with_rare_gc() -> Iterator[None]:
    """Run the collector rarely. Planning makes millions of objects that stay, and by default every 700 of them start a
    collection. Llama 3 8B on 8 devices takes 17.9 s by default, 13.9 s without and 14.3 s here, with 8 MB more."""
    before = gc.get_threshold()
    if before[0]:  # 0: the user has turned collections off
        gc.set_threshold(max(before[0], RARE), *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
