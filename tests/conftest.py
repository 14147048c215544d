"""What all tests share: one thread per process, repeatable random numbers and hypothesis runs, and real gloo ranks."""

from __future__ import annotations

import gc
import logging
import os
import random
import signal

os.environ["SHARDWISE_CACHE"] = "off"  # every test searches, unless it is about the cache
os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported, and for every process a test starts

from collections.abc import Callable, Iterable, Iterator
from functools import cache
from math import inf
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import settings

from launch.gloo_ranks import SELDOM, TRACES, run_on_ranks
from shardwise import progress
from shardwise.planning import suggestions

torch.set_num_threads(1)
torch.manual_seed(0)  # for what test modules make when they are imported
suggestions.MAX_REFUSED_SECONDS = -1.0  # planning suggestions takes seconds: only for tests that are about them
progress.LINE_SECONDS = inf  # no line depends on how long a test takes
settings.register_profile("repeatable", deadline=None, derandomize=True)
settings.load_profile("repeatable")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--quick", action="store_true", help="a share of every file, without processes (make test-quick)")
    parser.addoption("--seed", default="0", help="chooses the cases and the share that run")


def pytest_configure(config: pytest.Config) -> None:
    """Make the folder in which ranks share what they trace, once for all workers of the run."""
    if not hasattr(config, "workerinput"):
        folder = TemporaryDirectory(prefix="shardwise-traces-")
        os.environ[TRACES] = folder.name
        config.add_cleanup(folder.cleanup)


def pytest_report_header(config: pytest.Config) -> str:
    return f"cases chosen by --seed {config.getoption('seed')}"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark as ``long`` what this run leaves out: cases beyond the number in ``sampled``, and with ``--quick`` more."""
    tests: dict[tuple[Path, str], list[pytest.Item]] = {}
    for item in items:
        tests.setdefault((item.path, item.nodeid.partition("[")[0]), []).append(item)
    quick = config.getoption("quick")
    for (path, name), cases in tests.items():
        rng = random.Random(f"{config.getoption('seed')} {name}")
        sampled = cases[0].get_closest_marker("sampled")
        count = 1 if quick else sampled.args[0] if sampled else len(cases)
        short = [item for item in cases if item.get_closest_marker("long") is None]
        chosen = rng.sample(short, min(count, len(short)))
        if quick and cases[0].get_closest_marker("quick") is None:
            chosen = chosen if rng.random() < QUICK_SHARE and not _starts_processes(path) else []
        for item in cases:
            if item not in chosen:
                item.add_marker(pytest.mark.long)


QUICK_SHARE = 0.33  # of the tests that run in one process


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With ``--quick``, do not import files of which no test runs: reading a file takes longer than its share."""
    if not config.getoption("quick") or collection_path.suffix != ".py":
        return None
    return (_starts_processes(collection_path) and "mark.quick" not in _text(collection_path)) or None


@cache
def _starts_processes(path: Path) -> bool:
    return any(word in _text(path) for word in ("run_ranks", "run_cases", "run_on_ranks", "subprocess"))


@cache
def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def pytest_collection_finish() -> None:
    """Modules and tests stay to the end: the garbage collector need not look at them again and again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*SELDOM)


@pytest.fixture(autouse=True)
def _interrupts_are_heard() -> Iterator[None]:
    """A shell starts background jobs with SIGINT ignored, nohup with SIGHUP; all that they start inherits that."""
    before = {signum: signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGHUP)}
    for signum, usual in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
        if before[signum] == signal.SIG_IGN:
            signal.signal(signum, usual)
    yield
    for signum, handler in before.items():
        signal.signal(signum, handler)


@pytest.fixture(autouse=True)
def _same_random_numbers() -> None:
    """Every test draws the same random numbers in every run, alone or with others; sweeps draw others."""
    torch.manual_seed(0)


@pytest.fixture
def heard(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """What the API logs of its progress, line by line."""
    lines: list[str] = []
    handler, logger = logging.Handler(), logging.getLogger("shardwise.progress")
    monkeypatch.setattr(handler, "emit", lambda record: lines.append(record.getMessage()))
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    yield lines
    logger.removeHandler(handler)
    logger.setLevel(logging.NOTSET)


@pytest.fixture
def run_ranks(tmp_path: Path) -> Callable[..., list[Any]]:
    """``run_ranks(function, num_ranks, *args)``: what a module-level test function returns on each of some real gloo
    ranks.

    Every rank is a process of its own with one thread, in which ``torch.distributed`` is initialised. An exception is
    raised again here, with the rank's traceback as its cause; after ten minutes (``time_limit_seconds=``) a
    TimeoutError: on a busy machine ranks take many times as long as alone.
    """

    def run(function: Callable[..., Any], num_ranks: int, *args: Any, time_limit_seconds: float = 600.0) -> list[Any]:
        return run_on_ranks(function, num_ranks, args, tmp_path, time_limit_seconds)

    return run


@pytest.fixture
def run_cases(tmp_path: Path) -> Callable[..., list[list[Any]]]:
    """``run_cases(function, num_ranks, cases)``: per case, what the function returns for it on each rank. The ranks are
    started once for all cases, each of which is a tuple of arguments."""

    def run(function: Callable[..., Any], num_ranks: int, cases: Iterable[tuple[Any, ...]]) -> list[list[Any]]:
        ranks = run_on_ranks(function, num_ranks, tuple(cases), tmp_path, 600.0, is_each=True)
        return [list(found) for found in zip(*ranks, strict=True)]

    return run
