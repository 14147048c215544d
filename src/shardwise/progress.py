"""What is being done, and how long it will take: long work says it (``report_progress``), a terminal shows it
(``show_progress``).

Nothing is shown where standard error is no terminal, nor before two seconds; what ended leaves a line if it took
longer.
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
_Listener = Callable[[str, int, int], None]  # what, how much of it is done, of how much (0: not known)
_listener: ContextVar[_Listener | None] = ContextVar("listener", default=None)


def report_progress(what: str, done: int = 0, total: int = 0) -> None:
    """Say what is being done from here on, and how much of it is done already. Nobody may listen."""
    listener = _listener.get()
    if listener is not None:
        listener(what, done, total)


def each(items: Sequence[_Item], what: Callable[[_Item], str]) -> Iterator[_Item]:
    """The items, one after another, each with what is being done with it."""
    for done, item in enumerate(items):
        report_progress(what(item), done, len(items))
        yield item


@contextmanager
def show_progress(what: str) -> Iterator[None]:
    """Show what is being done inside, on a terminal. Inside of another one it says what that one shows."""
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
    """Turns what is said into a line. What is left of a count is taken to last as long as what is done did."""

    def __init__(self, write: Callable[[str], None]) -> None:
        self.write = write
        self.counted = time.monotonic()

    def __call__(self, what: str, done: int, total: int) -> None:
        now = time.monotonic()
        if not done:
            self.counted = now
        self.write(describe_progress(what, done, total, now - self.counted))


def describe_progress(what: str, done: int, total: int, seconds: float) -> str:
    """``prices and search on Mesh(dp=8): 3 of 12, about 9 s left``. ``seconds``: what the done ones took."""
    if total < 2:
        return what
    left = f", about {seconds / done * (total - done):.0f} s left" if done else ""
    return f"{what}: {done + 1} of {total}{left}"


__all__ = ["describe_progress", "each", "report_progress", "show_progress"]
