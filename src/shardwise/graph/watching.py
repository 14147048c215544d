"""The line of a model after which something is no longer what it was."""

from __future__ import annotations

import gc
import sys
import sysconfig
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np

from shardwise.graph.origins import NOT_USER_CODE

Watching = Callable[[], AbstractContextManager[None]]  # what a model runs in, to be watched
_STANDARD_LIBRARY = sysconfig.get_path("stdlib")
_INSTALLED = sysconfig.get_path("purelib")  # lies inside it
_NOT_THE_MODEL = (*NOT_USER_CODE, str(Path(np.__file__).parent))


@contextmanager
def watching(lines: list[str], state: Callable[[], object]) -> Iterator[None]:
    """Appends the ``"model.py:41"`` after which the state differs from before it. Slow: for what is refused."""
    last, here = state(), ""

    def watch(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal last, here
        if not _is_users(frame.f_code.co_filename):
            return None
        now = state()
        if now != last and here:
            lines.append(here)
        last, here = now, f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
        return watch

    before, collects = sys.gettrace(), gc.isenabled()
    gc.disable()  # it calls Python of others (callbacks, finalizers) between two lines of the model
    sys.settrace(watch)
    try:
        yield
    finally:
        sys.settrace(before)
        if collects:
            gc.enable()
    if state() != last and here:  # by the last line that ran
        lines.append(here)


def _is_users(filename: str) -> bool:
    standard = filename.startswith(_STANDARD_LIBRARY) and not filename.startswith(_INSTALLED)
    return not standard and not filename.startswith(_NOT_THE_MODEL)
