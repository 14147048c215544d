"""Progress display: long work calls ``report_progress``, and ``show_progress`` prints it on a terminal.

Nothing is shown if standard error is not a terminal, or in the first two seconds. Work that took longer leaves a line.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

SHOWN_AFTER_SECONDS = 2.0
_Item = TypeVar("_Item")
_Listener = Callable[[str, int, int], None]  # description, amount done, total (0: unknown)
_listener: ContextVar[_Listener | None] = ContextVar("listener", default=None)


def report_progress(what: str, done: int = 0, total: int = 0) -> None:
    """Report the current work and the amount of it that is done. Does nothing outside ``show_progress``."""
    listener = _listener.get()
    if listener is not None:
        listener(what, done, total)


def each(items: Sequence[_Item], what: Callable[[_Item], str]) -> Iterator[_Item]:
    """Yield the items in order, and report the progress at each. ``what`` describes the work on an item."""
    for done, item in enumerate(items):
        report_progress(what(item), done, len(items))
        yield item


@contextmanager
def show_progress(what: str) -> Iterator[None]:
    """Show the progress of the work in this context on a terminal. A nested context updates the outer display."""
    if _listener.get() is not None:
        report_progress(what)
        yield
        return
    if not sys.stderr.isatty():
        yield
        return
    console = Console(file=sys.stderr)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    start = time.monotonic()
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(what, visible=False)
        appears = threading.Timer(SHOWN_AFTER_SECONDS, lambda: progress.update(task, visible=True))
        appears.daemon = True
        appears.start()
        token = _listener.set(_Display(lambda text: progress.update(task, description=text)))
        try:
            yield
        finally:
            _listener.reset(token)
            appears.cancel()
    seconds = time.monotonic() - start
    if seconds > SHOWN_AFTER_SECONDS:
        console.print(f"{what}: {seconds:.0f} s", style="dim")


class _Display:
    """A listener that writes a line with the estimated time left, at the average time per item so far."""

    def __init__(self, write: Callable[[str], None]) -> None:
        self.write = write
        self.counted = time.monotonic()

    def __call__(self, what: str, done: int, total: int) -> None:
        now = time.monotonic()
        if not done:
            self.counted = now
        self.write(describe_progress(what, done, total, now - self.counted))


def describe_progress(what: str, done: int, total: int, seconds: float) -> str:
    """Format ``prices and search on Mesh(dp=8): 3 of 12, about 9 s left``. ``seconds``: the time since the first."""
    if total < 2:
        return what
    left = f", about {seconds / done * (total - done):.0f} s left" if done else ""
    return f"{what}: {done + 1} of {total}{left}"
