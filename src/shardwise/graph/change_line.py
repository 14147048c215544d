"""Search for the line of a model that changes some state."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from shardwise.garbage_collector import without_gc
from shardwise.graph.origins import is_of_models

Watching = Callable[[], AbstractContextManager[None]]  # the context in which a watched model runs


@contextmanager
def watch_changes(lines: list[str], state: Callable[[], object]) -> Iterator[None]:
    """Appends the ``"model.py:41"`` after which the state differs from before it. Slow: for what is refused."""
    last, here = state(), ""

    def watch(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal last, here
        if not is_of_models(frame.f_code.co_filename):
            return None
        now = state()
        if now != last and here:
            lines.append(here)
        last, here = now, f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
        return watch

    before = sys.gettrace()
    with without_gc():
        sys.settrace(watch)
        try:
            yield
        finally:
            sys.settrace(before)
    if state() != last and here:  # by the last line that ran
        lines.append(here)
