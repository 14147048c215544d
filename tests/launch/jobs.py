"""Jobs that the tests of the launcher start: what their scripts can say, and what came of them."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

PROMPTLY = 10.0  # seconds; the scripts' own sleeps are 60
HEADER = """
import os, signal, sys, time
rank = int(os.environ["RANK"])
here = os.path.dirname(__file__)

def say(text):
    print(text, file=sys.stderr, flush=True)

def mark(name):
    open(os.path.join(here, f"{name}-{rank}"), "w").close()

def wait_for(name, count):
    while sum(entry.startswith(name) for entry in os.listdir(here)) < count:
        time.sleep(0.01)
"""


@dataclass(frozen=True)
class Outcome:
    exit_code: int
    stdout: str
    stderr: str
    seconds: float

    @property
    def last_line(self) -> str:
        return self.stderr.splitlines()[-1]


Job = Callable[..., Outcome]


def alive(pid: int) -> bool:
    """Whether a process runs (a zombie, which waits to be reaped, does not)."""
    if Path("/proc/self").exists():
        try:
            return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
        except (FileNotFoundError, ProcessLookupError):  # it may end while it is looked at
            return False
    return subprocess.run(["ps", "-p", str(pid)], capture_output=True, check=False).returncode == 0


def gone(pids: list[int]) -> bool:
    deadline = time.monotonic() + PROMPTLY
    while any(map(alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not any(map(alive, pids))
