"""Simulated time: tasks that are greenlets, a queue of events, and processes that can be killed.

The code under simulation is the real one. Where it would block (a poll, a sleep, a lock), its greenlet is parked until
an event of the queue wakes it. One thread runs everything, so the same seed gives the same run.

Operations cost CPU seconds (``CPU_SECONDS``). A task owes what it has used, its clock is ahead by as much, and it pays
when it waits the next time. Nothing else takes time: code between two waits is instantaneous.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch
from greenlet import GreenletExit, getcurrent, greenlet

_OWED_SECONDS = 0.0005  # a task pays when it owes more than that
_FEW_EVENTS = 10_000


class Process:
    """A process of a simulated machine. ``counts``: of its operations; ``cpu_seconds``: of its tasks; ``at_end``:
    called when it ends."""

    def __init__(self, machine: Any, kind: str) -> None:
        self.machine, self.kind, self.alive = machine, kind, True
        self.counts: Counter[str] = Counter()
        self.cpu_seconds = 0.0
        self.at_end: list[Callable[[], None]] = []


class Task:
    """A thread of a process."""

    __slots__ = ("alive", "greenlet", "owed", "process", "turn")

    def __init__(self, process: Process) -> None:
        self.process, self.turn, self.owed, self.alive = process, 0, 0.0, True
        self.greenlet: Any = None

    def waits(self, turn: int) -> bool:
        """Return whether it still waits as it did at that turn."""
        return self.turn == turn and self.alive and self.process.alive


class SimulationError(Exception):
    """An invariant does not hold, or nothing can happen any more."""


class Simulation:
    """The events of one run. ``trace``: what happened, as (seconds, text); ``errors``: of tasks that died of them."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.now = 0.0
        self.trace: list[tuple[float, str]] = []
        self.errors: list[str] = []
        self.current: Task | None = None
        self.num_events = 0
        self._queue: list[tuple[float, int, Any, int]] = []
        self._order = itertools.count()
        self._hub = getcurrent()
        self._tasks: list[Task] = []  # a greenlet that is collected would run its `finally` blocks
        self._closed = False

    # -- for the code under simulation -----------------------------------------------------------------------------

    def clock(self) -> float:
        """Return the current task's time."""
        return self.now + (0.0 if self.current is None else self.current.owed)

    def spend(self, seconds: float) -> None:
        if self.current is not None:
            self.current.owed += seconds
            self.current.process.cpu_seconds += seconds

    def count(self, what: str, number: int = 1) -> None:
        if self.current is not None:
            self.current.process.counts[what] += number

    def sleep(self, seconds: float) -> None:
        self._park(self.clock() + max(0.0, seconds))

    def pay(self) -> None:
        if self.current is not None and self.current.owed > _OWED_SECONDS:
            self._park(self.clock())

    def wait(self, files: Iterable[Any], seconds: float | None) -> list[Any]:
        """Return the files that are readable, waiting at most ``seconds`` (None: without limit)."""
        self.pay()
        files = list(files)
        ready = [file for file in files if file.is_readable]
        if ready or seconds == 0:
            return ready
        task = self.current
        assert task is not None
        for file in files:
            file.waiting[task] = None
        self._park(None if seconds is None else self.clock() + seconds)
        for file in files:
            file.waiting.pop(task, None)
        return [file for file in files if file.is_readable]

    def _park(self, until: float | None) -> None:
        task = self.current
        if self._closed:
            raise GreenletExit
        assert task is not None, "only a task waits"
        task.turn += 1
        task.owed = 0.0
        if until is not None:
            heapq.heappush(self._queue, (until, next(self._order), task, task.turn))
        has_grad = torch.is_grad_enabled()  # of a thread for PyTorch, so here of a task
        self._hub.switch()
        _set_grad_enabled(has_grad)
        if self._closed:
            raise GreenletExit

    # -- for the machines ------------------------------------------------------------------------------------------

    def wake(self, task: Task, seconds: float = 0.0) -> None:
        heapq.heappush(self._queue, (self.now + seconds, next(self._order), task, task.turn))

    def at(self, time: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._queue, (max(time, self.now), next(self._order), act, 0))

    def start(self, process: Process, run: Callable[[], None], seconds: float = 0.0) -> Task:
        """Start a thread of a process, after ``seconds``."""
        task = Task(process)

        def body(*_: Any) -> None:
            try:
                run()
            except GreenletExit:
                pass
            except Exception as error:
                if task.alive and process.alive:
                    self.errors.append(f"{process.kind}: {type(error).__name__}: {error}")
                    if not isinstance(error, SimulationError):
                        import traceback

                        self.errors[-1] += "\n" + traceback.format_exc()
            finally:
                task.alive = False

        task.greenlet = greenlet(body, parent=self._hub)
        self._tasks.append(task)
        self.wake(task, seconds)
        return task

    def say(self, text: str) -> None:
        self.trace.append((round(self.now, 6), text))

    def kill(self, process: Process) -> None:
        """End a process at once: its tasks never run again."""
        if process.alive:
            process.alive = False
            for act in process.at_end:
                act()
            if self.current is not None and self.current.process is process:
                raise GreenletExit

    def run(self, until: float, over: Callable[[], bool]) -> None:
        """Run events until it is ``over``, or simulated time ends. Raises SimulationError for the first error."""
        most = _FEW_EVENTS
        while self._queue and not over():
            if len(self._queue) > most:  # most are time-outs of waits that have ended
                self._queue = [
                    event for event in self._queue if not isinstance(event[2], Task) or event[2].waits(event[3])
                ]
                heapq.heapify(self._queue)
                most = _FEW_EVENTS + 2 * len(self._queue)
            time, _, what, turn = heapq.heappop(self._queue)
            if time > until:
                raise SimulationError(f"not over after {until:g} simulated seconds")
            self.now = time
            self.num_events += 1
            if not isinstance(what, Task):
                what()
            elif what.waits(turn):
                self.current = what
                what.greenlet.switch()
                _set_grad_enabled(True)
                self.current = None
            if self.errors:
                raise SimulationError(self.errors[0])
        if not over():
            raise SimulationError("nothing can happen any more")

    def close(self) -> None:
        """Let the greenlets end: whatever would block raises GreenletExit."""
        self._closed = True
        self._queue.clear()
        for task in self._tasks:
            task.process.alive = False
            if task.greenlet:
                self.current = task
                task.greenlet.throw(GreenletExit)
                torch.set_grad_enabled(True)
        self._tasks.clear()
        self.current = None


def _set_grad_enabled(is_enabled: bool) -> None:
    if torch.is_grad_enabled() != is_enabled:
        torch.set_grad_enabled(is_enabled)


class Lock:
    """A lock between tasks, which goes to the task that has waited longest."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self._holder: Task | None = None
        self._waiting: list[Task] = []

    def __enter__(self) -> None:
        task = self._simulation.current
        if self._holder is None or task is None:
            self._holder = task
            return
        self._waiting.append(task)
        while self._holder is not task:
            self._simulation._park(None)

    def __exit__(self, *_: object) -> None:
        self._holder = self._waiting.pop(0) if self._waiting else None
        if self._holder is not None:
            self._simulation.wake(self._holder)
