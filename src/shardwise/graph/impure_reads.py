"""Detection of what a model reads from outside while it runs: clock, environment, files, own generators, its rank.

Capture runs the model's Python once, on one rank, so such values would be the same on every rank and in every step.
Calls of C functions are visible only to a profiler, which is slow; so the names in the model's code are checked first
(``_suspects``).

Random numbers of Python's ``random`` or numpy (which time steps SpecAugment masks, which layers LayerDrop skips) are
detected by the generators' states before and after; only then the model runs once more, traced line by line, to name
the line that draws. Generators that the model makes or holds itself are among the reads.
"""

from __future__ import annotations

import cProfile
import datetime
import io
import os
import pickle
import random
import secrets
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist

from shardwise.errors import CaptureError, CaptureWarning, listed, warn_user
from shardwise.garbage_collector import without_gc
from shardwise.graph.code_reachability import ReachableCode
from shardwise.graph.origins import INSTALLED, NOT_USER_CODE, STANDARD_LIBRARY, is_standard
from shardwise.graph.user_lines import Watching, watch_changes

_SEEDS = "its own seed"
_GRADIENTS = "whether gradients are recorded"
_GENERATOR = "a generator of random numbers"
_CLOCKS = frozenset({"ctime", "gmtime", "localtime", "monotonic", "perf_counter", "process_time", "time"})
_OF_THE_SYSTEM = frozenset(
    {"getcwd", "getloadavg", "getpid", "getppid", "getrandom", "listdir", "scandir", "stat", "urandom"}
)
# What a model calls of the standard library to read, numpy, and wrappers of torch: who calls these is the reader.
_BETWEEN = (
    *(
        f"{STANDARD_LIBRARY}/{name}"
        for name in ("os.py", "random.py", "secrets.py", "uuid.py", "pathlib", "_collections_abc")
    ),
    str(Path(np.__file__).parent),
    *(str(Path(torch.__file__).parent / name) for name in ("_compile.py", "_dynamo/eval_frame.py")),
    "<frozen os>",
    "<frozen _collections_abc>",
)
_PYTHON: dict[CodeType, str] = {
    type(os.environ).__getitem__.__code__: "os.environ",
    uuid.uuid1.__code__: "the clock (uuid.uuid1)",
    dist.get_rank.__code__: "the rank (torch.distributed.get_rank)",
    torch.random.initial_seed.__code__: "the seed of random numbers (torch.initial_seed)",
    torch.random.get_rng_state.__code__: "the state of random numbers (torch.get_rng_state)",
    torch.random.manual_seed.__code__: f"{_SEEDS} (torch.manual_seed)",
    torch.random.seed.__code__: f"{_SEEDS} (torch.seed)",
    torch.random.set_rng_state.__code__: f"{_SEEDS} (torch.set_rng_state)",
}
# What a name may stand for, if a call may read.
_SUSPECTS = (
    *(getattr(time, name) for name in vars(time) if name.removesuffix("_ns") in _CLOCKS),
    *(getattr(os, name) for name in sorted(_OF_THE_SYSTEM) if hasattr(os, name)),
    *(os.environ, os.getenv, io.open, datetime.datetime, datetime.date, uuid.uuid1, uuid.uuid4),
    *(threading.get_ident, dist.get_rank),
    *(random.Random, random.SystemRandom, secrets.choice, secrets.randbelow, secrets.randbits, secrets.token_bytes),
    *(np.random.default_rng, np.random.RandomState, np.load, np.fromfile, np.loadtxt),
    *(torch.initial_seed, torch.get_rng_state, torch.seed),
    *(torch.is_grad_enabled, torch.is_inference_mode_enabled),
)
# Of paths, and of functions in whose place torch puts others.
_SUSPECT_NAMES = frozenset({"manual_seed", "read_bytes", "read_text", "set_rng_state"})


RandomState = tuple[Any, bytes]


@dataclass(frozen=True, slots=True)
class ImpureRead:
    """A read from outside. ``what``: its description; ``line``: ``model.py:41``."""

    what: str
    line: str


def _suspects(code: ReachableCode) -> bool:
    ids = {id(getattr(f, "__func__", f)) for f in _SUSPECTS}  # ``secrets`` has methods of a generator
    kinds = (np.random.Generator, np.random.RandomState, random.Random)
    return not code.names.isdisjoint(_SUSPECT_NAMES) or any(id(v) in ids or isinstance(v, kinds) for v in code.values)


@contextmanager
def _reading(reads: list[ImpureRead]) -> Iterator[None]:
    """Record what the model reads. Slow."""

    def look(frame: FrameType, event: str, called: Any) -> None:
        what = ""
        asks: FrameType | None = frame
        if event == "c_call":
            what = _of_builtin(called)
        elif event == "call" and frame.f_code in _PYTHON:
            what, asks = _PYTHON[frame.f_code], frame.f_back
        if what and (asker := _asker(asks)) is not None:
            file = asker.f_code.co_filename
            if what != "os.environ" or not file.startswith(INSTALLED):  # of a package: settings of the process
                reads.append(ImpureRead(what, f"{Path(file).name}:{asker.f_lineno}"))

    before = sys.getprofile()
    with without_gc():
        sys.setprofile(look)
        try:
            yield
        finally:
            sys.setprofile(None)
            if isinstance(before, cProfile.Profile):  # Python can only be given its functions back
                before.enable()
            else:
                sys.setprofile(before)


def _of_builtin(called: Any) -> str:
    """Return a description of what a builtin function reads, or ""."""
    owner, name = getattr(called, "__self__", None), getattr(called, "__name__", "")
    if owner is time and name.removesuffix("_ns") in _CLOCKS:
        return f"the clock (time.{name})"
    if isinstance(owner, type) and issubclass(owner, datetime.date) and name in ("now", "today", "utcnow"):
        return f"the clock ({owner.__name__}.{name})"
    if owner is sys.modules[os.name] and name in _OF_THE_SYSTEM:
        return f"the system (os.{name})"
    if called is io.open:
        return "a file"
    if called is threading.get_ident:
        return "the system (threading.get_ident)"
    if called in (torch.is_grad_enabled, torch.is_inference_mode_enabled):
        return f"{_GRADIENTS} (torch.{name})"
    # Python's own generators are checked by ``reject_host_random``.
    is_own_generator = isinstance(owner, random.Random) and owner is not random._inst
    return f"{_GENERATOR} (random.Random)" if is_own_generator and name in ("random", "getrandbits") else ""


def _asker(frame: FrameType | None) -> FrameType | None:
    """Return the frame of model code that makes the query, directly or through a known helper; else None."""
    while frame is not None and frame.f_code.co_filename.startswith(_BETWEEN):
        frame = frame.f_back
    if frame is None:
        return None
    name = frame.f_code.co_filename
    return None if is_standard(name) or name.startswith(NOT_USER_CODE) else frame


def ask_gradients(reads: Sequence[ImpureRead]) -> frozenset[ImpureRead]:
    """Return the reads that query whether gradients are enabled."""
    return frozenset(read for read in reads if read.what.startswith(_GRADIENTS))


@contextmanager
def other_answers(answered: set[ImpureRead]) -> Iterator[None]:
    """Answer the model's queries of whether gradients are enabled with the opposite. ``answered``: collects them."""

    def opposite(real: Callable[[], bool]) -> Callable[[], bool]:
        def answer() -> bool:
            if (asker := _asker(sys._getframe(1))) is None:
                return real()
            line = f"{Path(asker.f_code.co_filename).name}:{asker.f_lineno}"
            answered.add(ImpureRead(f"{_GRADIENTS} (torch.{real.__name__})", line))
            return not real()

        return answer

    with ExitStack() as stack:
        for real in (torch.is_grad_enabled, torch.is_inference_mode_enabled):
            stack.enter_context(patch.object(torch, real.__name__, opposite(real)))
        yield


def _described(reads: Sequence[ImpureRead]) -> str:
    """Format reads as ``the clock (time.time), model.py:41; a file, model.py:43``."""
    return listed([f"{read.what}, {read.line}" for read in reads], "; ")


def reads_of(code: ReachableCode, run: Callable[[Watching], object]) -> tuple[ImpureRead, ...]:
    """Return what a model with this code reads from outside. ``run``: captures it again inside the given context
    manager; it is called only if the code names something that reads."""
    if not _suspects(code):
        return ()
    reads: list[ImpureRead] = []
    run(lambda: _reading(reads))
    generators = [value for value in code.values if isinstance(value, (np.random.Generator, np.random.RandomState))]
    if generators:  # a profiler does not see their calls
        lines: list[str] = []
        run(lambda: watch_changes(lines, lambda: pickle.dumps(generators)))
        reads += [ImpureRead(f"{_GENERATOR} (numpy.random)", line) for line in lines]
    return tuple(dict.fromkeys(reads))


def reject_reads(reads: Sequence[ImpureRead], what: str) -> None:
    """Raise CaptureError for seeds that are set, and for any read if ``what`` a second call does differently is known.

    Warn about other reads except generators, which every call creates.
    """
    seeds = [read for read in reads if read.what.startswith(_SEEDS)]
    if seeds:
        raise CaptureError(
            f"the model's forward sets {_described(seeds)}, but random numbers under a plan follow the seed of "
            "sw.parallelize",
            source=seeds[0].line,
            fix="set the seed outside of the model, and pass values that must be the same in every step as inputs",
        )
    if reads and what:
        raise CaptureError(
            f"the model's forward reads {_described(reads)}, and {what}",
            source=reads[0].line,
            fix="pass values that change between calls as inputs; draw with torch, without generator=",
        )
    if outside := [read for read in reads if not read.what.startswith(_GENERATOR)]:
        warn_user(
            f"forward reads state from outside of the model: {_described(outside)}. The program of a plan contains "
            "the values read during capture, and all ranks and steps use these",
            CaptureWarning,
        )


def host_random_state() -> RandomState:
    """Return the states of the generators of ``random`` and ``numpy.random``, in a comparable form."""
    return random.getstate(), pickle.dumps(np.random.get_state(legacy=False))


def reject_host_random(before: RandomState, run: Callable[[Watching], object]) -> None:
    """Raise CaptureError naming the first line of the model that draws.

    ``before``: the state when the model was captured; ``run``: captures it again inside the given context manager. If
    that run does not change the state, the draws came from another thread, or the model sets a seed in every call
    (BigBird's blocks) and every step draws the same.
    """
    drew = host_random_state()
    if drew == before:
        return
    lines: list[str] = []
    run(lambda: watch_changes(lines, host_random_state))
    after = host_random_state()
    random.setstate(drew[0])
    np.random.set_state(pickle.loads(drew[1]))
    if lines and after != drew:
        raise CaptureError(
            "the model draws random numbers in Python or numpy: every step would get the same",
            source=lines[0],
            fix="draw with torch (torch.rand, torch.bernoulli), pass the drawn values as inputs, or switch it off "
            "(Hugging Face: mask_time_prob=0, layerdrop=0)",
        )
