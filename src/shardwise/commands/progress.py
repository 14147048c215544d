"""What a command is doing, and for how long, on a terminal; nothing elsewhere."""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

SHOWN_AFTER_SECONDS = 2.0


@contextmanager
def doing(what: str) -> Iterator[None]:
    """Show ``what``, with the seconds since it began. Standard error, so that what is printed can be read by another
    program."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield
        return
    start = time.monotonic()
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        progress.add_task(what)
        yield
    seconds = time.monotonic() - start
    if seconds > SHOWN_AFTER_SECONDS:
        console.print(f"{what}: {seconds:.0f} s", style="dim")


class BuildError(Exception):
    """An error of the user's own ``build()``: it is shown as his, from his first line on."""

    def __init__(self, error: BaseException, step: TracebackType | None) -> None:
        super().__init__(str(error))
        self.error, self.step = error, step

    def show(self) -> None:
        traceback.print_exception(type(self.error), self.error, self.step, file=sys.stderr)
