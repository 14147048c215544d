"""Scripts and jobs for the tests of the launcher."""

from __future__ import annotations

import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from launch.jobs import HEADER, Job, Outcome
from shardwise.launch.launcher import launch


@pytest.fixture
def script(tmp_path: Path) -> Callable[[str], str]:
    def write(body: str) -> str:
        path = tmp_path / "script.py"
        path.write_text(HEADER + textwrap.dedent(body))
        return str(path)

    return write


@pytest.fixture
def job(script: Callable[[str], str], capfd: pytest.CaptureFixture[str]) -> Job:
    """``job(body, num_ranks, ...)``: launch a script in this process and see what comes out."""

    def run(body: str, num_ranks: int = 2, *args: str, **options: Any) -> Outcome:
        path = script(body)
        for mark in Path(path).parent.glob("*-[0-9]"):  # of an earlier job of the same test
            mark.unlink()
        began = time.monotonic()
        code = launch([path, *args], num_ranks, **options)
        seconds = time.monotonic() - began
        captured = capfd.readouterr()
        return Outcome(code, captured.out, captured.err, seconds)

    return run
