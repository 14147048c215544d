"""Progress display: long work calls ``report_progress``, and ``show_progress`` prints it on a terminal.

Nothing is shown in the first two seconds. Work that took longer leaves a line. Where standard error is no terminal, a
line is written every few seconds. The same calls end work at its deadline (``until_deadline``).
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from math import inf
from typing import TypeVar

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

SHOWN_AFTER_SECONDS = 2.0
LINE_SECONDS = 5.0  # between two lines where there is no terminal
clock = time.monotonic
_LOGGER = logging.getLogger("shardwise.progress")
_Item = TypeVar("_Item")
_listener: ContextVar[_Display | None] = ContextVar("listener", default=None)
_deadline: ContextVar[Deadline | None] = ContextVar("deadline", default=None)


def report_progress(what: str, done: int = 0, total: int = 0) -> None:
    """Report the current work and the amount of it that is done. Does nothing outside ``show_progress``. Raises
    OutOfTime if the deadline of the work has passed."""
    check_deadline()
    listener = _listener.get()
    if listener is not None:
        listener(what, done, total)


def check_deadline() -> None:
    """Raise OutOfTime if the deadline of the work has passed. For loops whose items take up to seconds and are too many
    to be reported."""
    deadline = _deadline.get()
    if deadline is not None:
        deadline.check()


def report_best(seconds: float, bound: float) -> None:
    """Report the seconds of a step of the best plan so far, and a lower bound of all plans (0: not known)."""
    listener = _listener.get()
    if listener is not None and seconds <= listener.best[0]:
        listener.best = seconds, bound or listener.best[1]


def report_verdict(text: str) -> None:
    """Show what is known already, at once and as a line of its own."""
    listener = _listener.get()
    if listener is not None:
        listener.line(text)


def is_shown() -> bool:
    """Return whether someone sees the progress: on a terminal, in lines, or as records of the logger."""
    listener = _listener.get()
    return listener is not None and listener.is_seen()


def each(items: Sequence[_Item], what: Callable[[_Item], str]) -> Iterator[_Item]:
    """Yield the items in order, and report the progress at each. ``what`` describes the work on an item."""
    for done, item in enumerate(items):
        report_progress(what(item), done, len(items))
        yield item


@contextmanager
def show_progress(what: str, *, lines: bool = False) -> Iterator[None]:
    """Show the progress of the work in this context on a terminal. A nested context updates the outer display.

    Elsewhere a line every LINE_SECONDS goes to standard error (``lines``), or to the logger ``shardwise.progress``.
    """
    if _listener.get() is not None:
        report_progress(what)
        yield
        return
    if not sys.stderr.isatty():
        write = _print_line if lines else _log_line
        is_seen = (lambda: True) if lines else (lambda: _LOGGER.isEnabledFor(logging.INFO))
        token = _listener.set(_Display(lambda text: write(f"{what}: {text}"), LINE_SECONDS, is_seen=is_seen))
        try:
            yield
        finally:
            _listener.reset(token)
        return
    console = Console(file=sys.stderr)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    start = time.monotonic()
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(what, visible=False)
        appears = threading.Timer(SHOWN_AFTER_SECONDS, lambda: progress.update(task, visible=True))
        appears.daemon = True
        appears.start()
        display = _Display(
            lambda text: progress.update(task, description=text), line=lambda text: console.print(text, markup=False)
        )
        token = _listener.set(display)
        try:
            yield
        finally:
            _listener.reset(token)
            appears.cancel()
    seconds = time.monotonic() - start
    if seconds > SHOWN_AFTER_SECONDS:
        console.print(f"{what}: {seconds:.0f} s", style="dim")


def _print_line(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _log_line(text: str) -> None:
    _LOGGER.info(text)


class _Display:
    """A listener that writes a line with the estimated time left, at the average time per item so far, and the best
    plan so far. ``every``: seconds between two lines, and before the first; ``line``: writes what stays (None: as
    ``write``); ``is_seen``: returns whether someone reads it."""

    def __init__(
        self,
        write: Callable[[str], None],
        every: float = 0.0,
        line: Callable[[str], None] | None = None,
        is_seen: Callable[[], bool] = lambda: True,
    ) -> None:
        self.write, self.every, self.line, self.is_seen = write, every, line or write, is_seen
        self.counted = self.written = clock()
        self.best: tuple[float, float] = inf, 0.0  # seconds of a step, and their lower bound

    def __call__(self, what: str, done: int, total: int) -> None:
        now = clock()
        if not done:
            self.counted = now
        if now - self.written < self.every:
            return
        self.written = now
        self.write(describe_progress(what, done, total, now - self.counted) + describe_best(*self.best))


class OutOfTime(Exception):
    """Raised where work reports its progress after its deadline. Whoever has a result so far returns it."""


STOPPED = OutOfTime, KeyboardInterrupt


@dataclass
class Deadline:
    """When work ends: ``seconds`` after ``start`` on a clock, or with the ``outer`` deadline. ``on_interrupt``: whether
    a first Ctrl-C ends it as the deadline does; ``why``: why it ended early, or ""; ``is_finishing``: what was found is
    being written up."""

    seconds: float
    clock: Callable[[], float]
    start: float
    outer: Deadline | None
    on_interrupt: bool
    why: str = ""
    is_finishing: bool = False

    def check(self) -> None:
        """Raise OutOfTime if the work has ended."""
        if self.is_finishing:
            return
        if not self.why and self.clock() - self.start >= self.seconds:
            self.why = f"after {self.seconds:.3g} s"
        if self.why:
            raise OutOfTime(self.why)
        if self.outer is not None:
            try:
                self.outer.check()
            except OutOfTime as error:
                self.why = str(error)
                raise


@contextmanager
def until_deadline(
    seconds: float, timer: Callable[[], float] = time.monotonic, *, on_interrupt: bool = True
) -> Iterator[Deadline]:
    """End the work in this context ``seconds`` from now, or at the end of an outer deadline if that is earlier.
    ``on_interrupt``: see ``Deadline``."""
    token = _deadline.set(deadline := Deadline(seconds, timer, timer(), _deadline.get(), on_interrupt))
    try:
        yield deadline
    finally:
        _deadline.reset(token)


def stop_with(has_result: bool) -> None:
    """Handle one of STOPPED, in its except block: raise it again without a result, else let all outer work end, too."""
    deadline, error = _deadline.get(), sys.exc_info()[1]
    assert error is not None, "called in an except block"
    is_interrupt = isinstance(error, KeyboardInterrupt)
    if not has_result or deadline is None or (is_interrupt and (deadline.why or not deadline.on_interrupt)):
        raise error
    while is_interrupt and deadline is not None:
        deadline.why, deadline = "by Ctrl-C", deadline.outer


def elapsed_share() -> float:
    """Return the share of the time until the nearest deadline that has passed; 0 without one."""
    deadline, share = _deadline.get(), 0.0
    while deadline is not None:
        passed = deadline.clock() - deadline.start
        share, deadline = max(share, passed / deadline.seconds if deadline.seconds else 1.0), deadline.outer
    return share


def has_stopped() -> bool:
    """Return whether work in this context ended early."""
    deadline = _deadline.get()
    return deadline is not None and bool(deadline.why)


@contextmanager
def finishing() -> Iterator[None]:
    """Suspend the deadline: what was found is written up."""
    deadline = _deadline.get()
    if deadline is None or deadline.is_finishing:
        yield
        return
    deadline.is_finishing = True
    try:
        yield
    finally:
        deadline.is_finishing = False


def describe_best(seconds: float, bound: float) -> str:
    """Format `` (best so far: step 1.2 s, 3% above the bound)``; "" if nothing was found."""
    if seconds == inf:
        return ""
    above = f", {seconds / bound - 1:.0%} above the bound" if bound else ""
    return f" (best so far: step {seconds:.3g} s{above})"


def describe_progress(what: str, done: int, total: int, seconds: float) -> str:
    """Format ``prices and search on Mesh(dp=8): 3 of 12, about 9 s left``. ``seconds``: the time since the first."""
    if total < 2:
        return what
    left = f", about {seconds / done * (total - done):.0f} s left" if done else ""
    return f"{what}: {done + 1} of {total}{left}"
