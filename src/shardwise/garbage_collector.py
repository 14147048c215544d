"""Python's collector of reference cycles, kept away for a while."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

FEW = 100_000  # new objects from one collection to the next


@contextmanager
def without_gc() -> Iterator[None]:
    """Without the collector, which calls Python of others (callbacks, finalizers) between two lines of a model."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


@contextmanager
def with_rare_gc() -> Iterator[None]:
    """With few collections. Planning makes millions of objects that stay, and by default one is made for every 700 of
    them: a fifth of its seconds (measured: Llama 3 8B on 8 devices, 17.9 s with, 13.9 without, 14.3 so, 8 MB more)."""
    before = gc.get_threshold()
    if before[0]:  # 0: somebody wants none
        gc.set_threshold(max(before[0], FEW), *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
