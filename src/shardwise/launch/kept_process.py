"""The process of a rank that also runs the next generation, after another rank was lost.

The next generation is the script from its first line, in a new ``__main__``, as in a fresh process. Modules of the
user are imported again. Libraries stay as they are, with what is expensive to get: the GPU's context, compiled kernels,
and what shardwise caches by content. Everything else of the old generation must be gone: process groups, threads, child
processes, hooks, and what the old script holds. Until then the process is not ready, and the launcher replaces it.
"""

from __future__ import annotations

import atexit
import gc
import glob
import json
import logging
import os
import signal
import sys
import sysconfig
import threading
import time
import warnings
from collections.abc import Callable
from multiprocessing import resource_tracker
from typing import Any, cast

from shardwise.runtime.generation import process_state
from shardwise.runtime.heartbeat_file import NEXT_FILE, PAGE, HeartbeatFile

_POLL_SECONDS = 0.01
_LIBRARIES = tuple(
    {sysconfig.get_path(kind) + os.sep for kind in ("stdlib", "platstdlib", "purelib", "platlib")}
    | {os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep}
)
_OF_SYS = ("argv", "stdin", "stdout", "stderr", "excepthook", "displayhook", "unraisablehook")


class KeptProcess:
    """This process as it is before its script begins, to which it returns between generations. ``page``: the path of
    its rank's heartbeat file."""

    def __init__(self, page: str) -> None:
        self._page = page
        self._modules, self._folder = {*sys.modules}, os.getcwd()
        self._threads, self._children = {*threading.enumerate()}, _children()
        self._sys = {name: getattr(sys, name) for name in _OF_SYS}
        changing: tuple[Any, ...] = (sys.path, sys.meta_path, warnings.filters, logging.root.handlers)
        self._lists = [(items, [*items]) for items in changing]
        self._signals = {number: signal.getsignal(number) for number in signal.valid_signals()}
        self._torch = [(put, get()) for get, put in _torch_settings()]
        self._at_exit: list[Callable[..., Any]] = []
        register = atexit.register

        def noted(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            self._at_exit.append(function)
            return register(function, *args, **kwargs)

        atexit.register = cast(Any, noted)  # the interpreter does not list what it has

    def wait_for_generation(self) -> dict[str, str]:
        """Leave the generation that has ended, wait for the launcher, and return the environment of the next one."""
        process_state.reset()
        self._forget_script()
        while not ({*threading.enumerate()} <= self._threads and _children() <= self._children):
            gc.collect()  # a loader's workers end with its last reference
            time.sleep(_POLL_SECONDS)
        gc.collect()
        page = HeartbeatFile(self._page)
        page.leave_generation(uses_gpu=_uses_gpu())
        page.close()
        path = NEXT_FILE.format(page=self._page)
        while not os.path.exists(path):
            time.sleep(_POLL_SECONDS)
        with open(path, encoding="utf-8") as file:
            environment: dict[str, str] = json.load(file)
        self._page = environment[PAGE]
        return environment

    def _forget_script(self) -> None:
        users = [name for name in sys.modules if name == "__main__" or (name not in self._modules and _is_users(name))]
        for function in self._at_exit:
            if getattr(function, "__module__", "") in users:
                atexit.unregister(function)
        self._at_exit.clear()
        for name in users:
            vars(sys.modules.pop(name)).clear()
        sys.stdout.flush()
        sys.stderr.flush()
        for name in ("last_type", "last_value", "last_traceback"):
            vars(sys).pop(name, None)
        for name, value in self._sys.items():
            setattr(sys, name, value)
        for items, before in self._lists:
            items[:] = before
        for number, handler in self._signals.items():
            if signal.getsignal(number) is not handler:
                signal.signal(number, handler)
        os.chdir(self._folder)
        for put, value in self._torch:
            put(value)
        if _uses_gpu():
            sys.modules["torch"].cuda.empty_cache()


def _is_users(name: str) -> bool:
    """Return whether a module is the user's own, and not a library's. A C extension cannot be imported twice."""
    path = getattr(sys.modules[name], "__file__", None) or ""
    return path.endswith(".py") and not path.startswith(_LIBRARIES)


def _children() -> set[int]:
    """Return the child processes, except the one that tracks shared memory for Python. Linux only."""
    children: set[int] = set()
    for path in glob.glob("/proc/self/task/*/children"):
        with open(path, encoding="ascii") as file:
            children |= {int(pid) for pid in file.read().split()}
    tracker: Any = resource_tracker
    return children - {tracker._resource_tracker._pid}


def _uses_gpu() -> bool:
    return "torch" in sys.modules and bool(sys.modules["torch"].cuda.is_initialized())


def _torch_settings() -> list[tuple[Callable[[], Any], Callable[[Any], Any]]]:
    """Return how to read and to set what a script may change in torch for its whole process."""
    torch: Any = sys.modules.get("torch")
    if torch is None:
        return []

    def set_deterministic(value: tuple[bool, bool]) -> None:
        torch.use_deterministic_algorithms(value[0], warn_only=value[1])

    def set_device(value: Any) -> None:
        if torch.get_default_device() != value:
            torch.set_default_device(value)

    def deterministic() -> tuple[bool, bool]:
        return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()

    def seed() -> int:
        return int(torch.initial_seed())

    rules: Any = sys.modules["shardwise.rules.tables"].CUSTOM if "shardwise.rules.tables" in sys.modules else None
    settings = [
        (torch.get_default_dtype, torch.set_default_dtype),
        (torch.get_default_device, set_device),
        (torch.get_num_threads, torch.set_num_threads),
        (torch.is_grad_enabled, torch.set_grad_enabled),
        (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
        (deterministic, set_deterministic),
        (seed, torch.manual_seed),  # of all devices
        (torch.get_rng_state, torch.set_rng_state),
    ]
    return settings if rules is None else [*settings, (rules.entries, rules.replace)]
