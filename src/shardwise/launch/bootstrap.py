"""Entry point of every rank of ``shardwise run``: run the user's script and record when and why it fails.

The launcher must show the first failure, but processes do not exit in the order in which they fail. A peer that loses
its connection may exit while the rank that raised is still unwinding. So a failing rank writes a record (a JSON file
with a time stamp and the traceback) instead of printing the traceback, and the launcher prints the earliest record. On
SIGUSR2 a rank writes its stack to a file.

The script sees what it would see under ``python script.py``: ``__name__ == "__main__"``, its own ``sys.argv`` and
``sys.path[0]``. This file is executed by its path (with ``-P``, so that its folder is not on ``sys.path``) and imports
the standard library only: a rank that needs no torch starts at once.
"""

from __future__ import annotations

import builtins
import faulthandler
import inspect
import io
import json
import os
import random
import runpy
import signal
import sys
import threading
import time
import traceback
import types
from collections.abc import Iterator, Sequence
from typing import Any

# Set by the launcher for its ranks, and removed again before the script starts.
FAILURE_FILE = "SHARDWISE_FAILURE_FILE"  # where the record goes
LAUNCHER_PID = "SHARDWISE_LAUNCHER_PID"  # the rank ends when this process ends
KEEPS = "SHARDWISE_KEEPS"  # set where a process may run several generations, one after the other

STACK_SIGNAL = signal.SIGUSR2  # the rank writes its stack to STACK_FILE
STACK_FILE = "{failure_file}.stack"

EXIT_INTERRUPTED = 128 + signal.SIGINT
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_PARENT_POLL_SECONDS = 1.0

# A rank that loses a peer raises one of these. They show where the loss was noticed, not the root cause.
_NETWORK_ERROR_NAMES = frozenset({"DistNetworkError", "DistStoreError", "DistBackendError"})
_NETWORK_ERROR_TEXTS = (
    "connection closed by peer",
    "connection reset by peer",
    "connection refused",
    "broken pipe",
    "socket closed",
    "timed out waiting",
    "application timeout caused pair closure",
)


def is_follow_up(error: BaseException) -> bool:
    """Return whether an error, or one in its ``__cause__`` chain, reports a lost peer: probably not the root cause.

    >>> is_follow_up(RuntimeError("[pair.cc:534] Connection closed by peer [127.0.0.1]:46871"))
    True
    >>> is_follow_up(KeyError("Connection"))
    False
    """
    for link in _chain(error):
        if isinstance(link, (ConnectionError, EOFError)):
            return True
        if any(base.__name__ in _NETWORK_ERROR_NAMES for base in type(link).__mro__):
            return True
        if isinstance(link, RuntimeError) and any(text in str(link).lower() for text in _NETWORK_ERROR_TEXTS):
            return True
    return False


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        yield link
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)


def write_record(
    path: str, error: str, text: str, exit_code: int, follow_up: bool, blames: Sequence[int] = (), differs: bool = False
) -> None:
    """Write a failure record atomically.

    ``error``: type and message; ``text``: the formatted traceback; both empty when the script ended by ``sys.exit``.
    ``blames``: the ranks that the error blames; ``differs``: whether it blames them because replicas differ.
    """
    record = {
        "seconds": time.time(),
        "error": error,
        "traceback": text,
        "exit_code": exit_code,
        "follow_up": follow_up,
        "blames": list(blames),
        "differs": differs,
    }
    with open(path + ".part", "w", encoding="utf-8") as file:
        json.dump(record, file)
    os.replace(path + ".part", path)


def _record_exception(path: str, error: BaseException) -> None:
    """Record an uncaught exception. A script that installed its own ``sys.excepthook`` prints by that hook instead."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename in (__file__, runpy.__file__, "<frozen runpy>"):
        trace = trace.tb_next
    hook = _own_excepthook()
    text = "" if hook is not None else "".join(traceback.format_exception(type(error), error, trace))
    summary = f"{type(error).__qualname__}: {error}".removesuffix(": ")
    try:
        differs = type(error).__name__ == "ReplicaError"
        write_record(path, summary, text, 1, is_follow_up(error), getattr(error, "blames", ()), differs)
    except OSError as failure:
        print(text, f"shardwise: cannot write {path}: {failure}", sep="", file=sys.stderr)
    if hook is not None:
        hook(type(error), error, trace)


def _own_excepthook() -> Any:
    """Return the script's own ``sys.excepthook``, or None.

    The hook that ``torch.distributed`` wraps around it (to prefix every line with ``[rank3]``) does not count.
    """
    hook: Any = sys.excepthook
    if getattr(hook, "__module__", "").startswith("torch."):
        hook = inspect.getclosurevars(hook).nonlocals.get("old_hook", sys.__excepthook__)
    return None if hook is sys.__excepthook__ else hook


def _exit_code(leaving: SystemExit) -> int:
    """Return the process exit code of a ``SystemExit``; print its message, if any, as Python does."""
    if leaving.code is None:
        return 0
    if isinstance(leaving.code, int):
        return leaving.code & 0xFF
    print(leaving.code, file=sys.stderr)
    return 1


def _run_script(path: str, args: list[str]) -> None:
    sys.argv = [path, *args]
    if not os.environ.get("PYTHONSAFEPATH"):
        sys.path.insert(0, os.path.dirname(os.path.realpath(path)))
    module = types.ModuleType("__main__")
    module.__file__ = path
    module.__dict__["__builtins__"] = builtins
    sys.modules["__main__"] = module
    with io.open_code(path) as file:
        code = compile(file.read(), path, "exec", dont_inherit=True)
    exec(code, module.__dict__)


def _run_module(name: str, args: list[str]) -> None:
    sys.argv = [name, *args]
    if not os.environ.get("PYTHONSAFEPATH"):
        sys.path.insert(0, os.getcwd())
    runpy.run_module(name, run_name="__main__", alter_sys=True)


def end_with_launcher(launcher_pid: int) -> None:
    """Make this process end when the launcher ends, even if the launcher is killed."""
    if sys.platform == "linux":
        import ctypes  # here, because only Linux needs it and a rank should start quickly

        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    else:
        threading.Thread(target=_watch_parent, args=(launcher_pid,), daemon=True).start()
    if os.getppid() != launcher_pid:
        os._exit(EXIT_INTERRUPTED)


def _watch_parent(launcher_pid: int) -> None:
    while os.getppid() == launcher_pid:
        time.sleep(_PARENT_POLL_SECONDS)
    os.killpg(os.getpgrp(), signal.SIGKILL)


def replace_environment(environment: dict[str, str]) -> None:
    """Replace ``os.environ`` of a forked process."""
    os.environ.clear()
    os.environ.update(environment)


def seed_python() -> None:
    """Seed the random generators of Python and NumPy as a fresh interpreter does."""
    random.seed()
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()


def main(command: list[str]) -> None:
    """Run ``["script.py", args...]`` or ``["-m", "module", args...]`` as this rank; never returns.

    The launcher starts ranks with SIGINT blocked: a Ctrl-C during interpreter startup waits for the ``try`` below.
    """
    end_with_launcher(int(os.environ.pop(LAUNCHER_PID)))
    faulthandler.enable()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)
    keeper: Any = None
    if os.environ.pop(KEEPS, ""):
        from shardwise.launch import kept_process
        from shardwise.runtime.heartbeat_file import PAGE

        keeper = kept_process.KeptProcess(os.environ[PAGE])
    while (code := _run(command, keeper)) is None:
        try:
            environment = keeper.wait_for_generation()
            replace_environment({name: environment[name] for name in environment.keys() - {LAUNCHER_PID, KEEPS}})
            seed_python()
        except KeyboardInterrupt:
            code = EXIT_INTERRUPTED
            break
    sys.exit(code)


def _run(command: list[str], keeper: Any) -> int | None:
    """Run a generation; return the exit code of the process, or None if it may run another one (``keeper``: the
    ``KeptProcess``, or None)."""
    failure_file = os.environ.pop(FAILURE_FILE)
    stack = open(STACK_FILE.format(failure_file=failure_file), "w", encoding="utf-8")  # noqa: SIM115  # until the end
    faulthandler.register(STACK_SIGNAL, file=stack, all_threads=False)
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        if command[0] == "-m":
            _run_module(command[1], command[2:])
        else:
            _run_script(command[0], command[1:])
    except SystemExit as leaving:
        code = _exit_code(leaving)
        if code != 0:
            write_record(failure_file, "", "", exit_code=code, follow_up=False)
        return code
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BaseException as error:
        is_end = type(error).__name__ == "GenerationEnded"
        if not is_end:
            _record_exception(failure_file, error)
        differs = type(error).__name__ == "ReplicaError"
        is_of_others = is_follow_up(error) or (not differs and bool(getattr(error, "blames", ())))
        if not keeper or not (is_end or is_of_others):
            return 1
        if obstacle := keeper.obstacle():
            print(f"shardwise: process {os.getpid()} is replaced, not kept: {obstacle}", file=sys.stderr)
            return 1
        for link in _chain(error):
            traceback.clear_frames(link.__traceback__)
        return None
    return 0


if __name__ == "__main__":
    main(sys.argv[1:])
