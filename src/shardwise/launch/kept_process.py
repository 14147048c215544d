"""The process of a rank that also runs the next generation, after another rank was lost.

The next generation is the script from its first line, in a new ``__main__``, as in a fresh process. Modules of the
user are imported again. Libraries stay as they are, with what is expensive to get: the GPU's context, compiled kernels,
and what shardwise caches by content. Everything else of the old generation must be gone: process groups, threads, child
processes, hooks, and what the old script holds. Until then the process is not ready, and the launcher replaces it.
"""

from __future__ import annotations

import atexit
import faulthandler
import gc
import glob
import json
import logging
import multiprocessing
import os
import signal
import sys
import sysconfig
import threading
import time
import warnings
from collections.abc import Callable
from functools import partial
from importlib.machinery import EXTENSION_SUFFIXES
from math import inf
from multiprocessing import resource_tracker
from typing import Any, cast

from shardwise.runtime.generation import process_state
from shardwise.runtime.heartbeat_file import NEXT_FILE, PAGE, HeartbeatFile

_POLL_SECONDS = 0.01
_NOTICE_SECONDS = 1.0  # after which a process that cannot leave says what it waits for
_LIBRARIES = tuple(
    {sysconfig.get_path(kind) + os.sep for kind in ("stdlib", "platstdlib", "purelib", "platlib")}
    | {os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep}
)
_INSTALLED = tuple(f"{os.sep}{folder}{os.sep}" for folder in ("site-packages", "dist-packages"))  # anywhere
_OF_CUDNN = ("benchmark", "deterministic", "allow_tf32")
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
        self._hooks = [(hooks, dict(hooks)) for hooks in _global_hooks()]
        self._start_method = _multiprocessing()._actual_context
        self._signals = {number: signal.getsignal(number) for number in signal.valid_signals()}
        self._torch = [(put, get()) for get, put in _torch_settings()]
        self._at_exit: list[Callable[..., Any]] = []
        register = atexit.register

        def noted(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            self._at_exit.append(function)
            return register(function, *args, **kwargs)

        atexit.register = cast(Any, noted)  # the interpreter does not list what it has

    @staticmethod
    def obstacle() -> str:
        """Return why this process cannot run another generation; empty if nothing is known."""
        is_dialect = "shardwise.mindspore" in sys.modules
        return "programs in the MindSpore style keep contexts and groups for the whole process" if is_dialect else ""

    def wait_for_generation(self) -> dict[str, str]:
        """Leave the generation that has ended, wait for the launcher, and return the environment of the next one."""
        process_state.reset()
        self._forget_script()
        notice = time.monotonic() + _NOTICE_SECONDS
        while True:
            gc.collect()  # a loader's workers end with its last reference
            threads, children = {*threading.enumerate()} - self._threads, _children() - self._children
            if not threads and not children:
                break
            if time.monotonic() > notice:
                left = [*(f"the thread {one.name}" for one in threads), *(f"the process {pid}" for pid in children)]
                print(f"shardwise: process {os.getpid()} waits to be kept for {', '.join(left)}", file=sys.stderr)
                notice = inf
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
        extensions = {name.partition(".")[0] for name in sys.modules if _is_extension(name)}
        own = (name for name in sys.modules if name not in self._modules and name.partition(".")[0] not in extensions)
        users = {name for name in own if _is_users(name)} | {"__main__"}
        for function in self._at_exit:
            called = function
            while isinstance(called, partial):
                called = called.func
            if getattr(called, "__module__", "") in users:
                atexit.unregister(function)
        self._at_exit.clear()
        signal.setitimer(signal.ITIMER_REAL, 0)
        faulthandler.cancel_dump_traceback_later()
        if (monitor := getattr(getattr(sys.modules.get("tqdm"), "tqdm", None), "monitor", None)) is not None:
            monitor.exit()  # a thread that any progress bar starts, compilers' too; the next bar starts another
        for name in users & sys.modules.keys():
            vars(sys.modules.pop(name)).clear()
        sys.stdout.flush()
        sys.stderr.flush()
        for name in ("last_type", "last_value", "last_traceback"):
            vars(sys).pop(name, None)
        for name, value in self._sys.items():
            setattr(sys, name, value)
        for items, before in self._lists:
            items[:] = before
        for hooks, earlier in self._hooks:
            hooks.clear()
            hooks.update(earlier)
        _multiprocessing()._actual_context = self._start_method
        for number, handler in self._signals.items():
            if signal.getsignal(number) is not handler:
                signal.signal(number, handler)
        os.chdir(self._folder)
        for put, value in self._torch:
            put(value)
        if _uses_gpu():
            sys.modules["torch"].cuda.empty_cache()


def _is_users(name: str) -> bool:
    """Return whether a module is the user's own, and not a library's."""
    path = getattr(sys.modules[name], "__file__", None) or ""
    return path.endswith(".py") and not path.startswith(_LIBRARIES) and not any(part in path for part in _INSTALLED)


def _is_extension(name: str) -> bool:
    """Return whether a module is a C extension. Its package cannot be imported twice."""
    return (getattr(sys.modules[name], "__file__", None) or "").endswith(tuple(EXTENSION_SUFFIXES))


def _global_hooks() -> list[dict[Any, Any]]:
    """Return the hooks of all modules and of all optimizers."""
    owners = (sys.modules.get("torch.nn.modules.module"), sys.modules.get("torch.optim.optimizer"))
    named = (pair for owner in owners if owner is not None for pair in vars(owner).items())
    return [hooks for name, hooks in named if name.startswith("_global_") and isinstance(hooks, dict)]


def _multiprocessing() -> Any:
    """Return what keeps the way in which Python starts processes."""
    return cast(Any, multiprocessing.context)._default_context


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

    cudnn: Any = torch.backends.cudnn
    rules: Any = sys.modules["shardwise.rules.tables"].CUSTOM if "shardwise.rules.tables" in sys.modules else None
    settings = [
        (torch.get_default_dtype, torch.set_default_dtype),
        (torch.get_default_device, set_device),
        (torch.get_num_threads, torch.set_num_threads),
        (torch.is_grad_enabled, torch.set_grad_enabled),
        (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
        (deterministic, set_deterministic),
        (torch.is_anomaly_enabled, torch.set_anomaly_enabled),
        (partial(torch.is_autocast_enabled, "cpu"), partial(torch.set_autocast_enabled, "cpu")),
        (partial(torch.is_autocast_enabled, "cuda"), partial(torch.set_autocast_enabled, "cuda")),
        *((partial(getattr, cudnn, name), partial(setattr, cudnn, name)) for name in _OF_CUDNN),
        (seed, torch.manual_seed),  # of all devices
        (torch.get_rng_state, torch.set_rng_state),
    ]
    return settings if rules is None else [*settings, (rules.entries, rules.replace)]
