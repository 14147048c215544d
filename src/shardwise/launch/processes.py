"""The process of a rank: its output, its position in the code, and its failure. Standard library only."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from shardwise.launch import bootstrap
from shardwise.runtime.heartbeat_file import NEXT_FILE, Heartbeat, HeartbeatFile

_LONGEST_LINE = 1 << 20  # bytes; a longer line is forwarded in pieces
_WAITED_IN_VAIN = ("timed out", "timeout", "did not come to")  # in the message of an error
_FRAME = re.compile(r'  File "(.*)", line (\d+) in (.*)')  # as faulthandler writes it
_LIBRARIES = (sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"), os.path.dirname(os.path.dirname(__file__)))


class Process(Protocol):
    """The part of ``subprocess.Popen`` that the launcher needs."""

    pid: int
    returncode: int | None

    def poll(self) -> int | None: ...

    def wait(self) -> int: ...


# command, environment, descriptors of stdout and stderr -> a process that leads a group of its own
Spawn = Callable[[Sequence[str], dict[str, str], int, int], Process]


@dataclass(frozen=True, slots=True)
class Failure:
    """A rank's failure. ``follow_up``: its error reports a lost peer; ``killed_by``: the signal that ended it;
    ``hangs``: how it hung, if the launcher killed it for that; ``blames``: the ranks that its error blames;
    ``differs``: whether it blames them because replicas differ."""

    rank: int
    seconds: float
    exit_code: int
    error: str = ""
    traceback: str = ""
    follow_up: bool = False
    killed_by: str = ""
    hangs: str = ""
    blames: tuple[int, ...] = ()
    differs: bool = False

    @property
    def waited_in_vain(self) -> bool:
        """Return whether the rank timed out waiting for another one, which may hang. (NCCL's watchdog aborts.)"""
        return self.killed_by == "SIGABRT" or any(text in self.error.lower() for text in _WAITED_IN_VAIN)

    @property
    def is_of_others(self) -> bool:
        """Return whether the rank only noticed that others are gone, or do not come."""
        return self.follow_up or (bool(self.blames) and not self.differs)

    def describe(self) -> str:
        """Return one line, for example ``failed with exit code 1 (ValueError: no such file)``."""
        if self.killed_by or self.hangs:
            return self.hangs or f"was killed by {self.killed_by}"
        reason = self.error.split("\n", 1)[0]
        return f"failed with exit code {self.exit_code}" + (f" ({reason})" if reason else "")


@dataclass(slots=True)
class RankProcess:
    """A running rank."""

    number: int
    process: Process
    failure_file: str
    page: HeartbeatFile
    open_pipes: int = 2
    failure: Failure | None = None
    left: Heartbeat | None = None  # what it did when it was asked to leave the generation
    seen_alive: float = field(default_factory=lambda: time.time())  # when its process was last known to run

    def signal(self, signum: int, whole_group: bool = True) -> None:
        """Send a signal, unless the rank has ended."""
        if self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                (os.killpg if whole_group else os.kill)(self.process.pid, signum)

    def leave(self) -> None:
        """Ask the rank to leave the generation, and to keep its process for the next one."""
        self.left = self.left or self.page.read()
        self.page.end_generation()

    @property
    def heartbeat(self) -> Heartbeat:
        """Return what the rank does, or did when it was asked to leave."""
        return self.left or self.page.read()

    @property
    def is_ready(self) -> bool:
        """Return whether the rank has left the generation, and its process waits for the next one."""
        return self.process.returncode is None and self.page.is_ready

    def ended(self) -> bool:
        """Return whether the process has ended; if so, kill the rest of its process group."""
        now = time.time()
        if self.process.returncode is None and self.process.poll() is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)
        if self.process.returncode is None:
            self.seen_alive = now
        return self.process.returncode is not None

    def position(self) -> str:
        """Return where the rank was when it got STACK_SIGNAL, for example ``in load (train.py:7)``.

        That is the innermost function of the user's code on its stack; empty if there is none, or no stack.
        """
        try:
            with open(bootstrap.STACK_FILE.format(failure_file=self.failure_file), encoding="utf-8") as file:
                frames = _FRAME.findall(file.read())
        except OSError:
            return ""
        user_frames = [frame for frame in frames if not frame[0].startswith((*_LIBRARIES, "<frozen"))]
        return next((f"in {name} ({os.path.basename(path)}:{line})" for path, line, name in user_frames), "")

    def look_for_failure(self) -> Failure | None:
        """Return the failure that the rank recorded, or that its exit code shows; None if there is none."""
        if self.failure is None and os.path.exists(self.failure_file):
            with open(self.failure_file, encoding="utf-8") as file:
                record = json.load(file)
            self.failure = Failure(rank=self.number, **{**record, "blames": tuple(record["blames"])})
        code = self.process.returncode
        if self.failure is None and code is not None and code != 0:
            killed_by = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
            exit_code, killed_by = (code, "") if code > 0 else (128 - code, killed_by)
            # It left no record. Failures that its end caused are younger than the moment it was last seen alive.
            # An abort is mostly native code (NCCL's watchdog) that timed out on a peer.
            aborted = killed_by == "SIGABRT"
            self.failure = Failure(self.number, self.seen_alive, exit_code, follow_up=aborted, killed_by=killed_by)
        return self.failure


@dataclass(slots=True)
class Pipe:
    """The stdout or stderr of a rank."""

    rank: RankProcess
    source: io.FileIO
    is_stdout: bool
    rest: bytes = b""

    def lines(self, data: bytes) -> list[bytes]:
        """Return the lines that ``data`` completes; with empty ``data`` (end of file), all that is left."""
        text = self.rest + data
        # A progress bar's carriage return ends a line too; one at the end of the data may be half of "\r\n".
        end = max(text.rfind(b"\n"), text.rfind(b"\r", 0, max(0, len(text) - 1))) + 1
        lines, self.rest = text[:end].splitlines(keepends=True), text[end:]
        if self.rest and (not data or len(self.rest) > _LONGEST_LINE):
            lines.append(self.rest if data or self.rest.endswith(b"\r") else self.rest + b"\n")
            self.rest = b""
        return lines


@dataclass(frozen=True, slots=True)
class KeptRank:
    """A rank that has left its generation, and whose process waits for the next one; with its output."""

    rank: RankProcess
    local_rank: int
    pipes: list[Pipe]

    def can_be(self, local_rank: int) -> bool:
        """Return whether the process can run another rank. Scripts choose a GPU by the local rank, and only once."""
        return not self.rank.ended() and (local_rank == self.local_rank or not self.rank.page.uses_gpu)

    def begin(self, environment: dict[str, str]) -> None:
        """Let the process begin the next generation. Raises OSError."""
        path = NEXT_FILE.format(page=self.rank.page.path)
        with open(path + ".part", "w", encoding="utf-8") as file:
            json.dump(environment, file)
        os.replace(path + ".part", path)
        self.rank.page.close()

    def end(self) -> None:
        """Kill the process."""
        self.rank.signal(signal.SIGKILL)
        self.rank.process.wait()
        self.rank.ended()
        self.rank.page.close()
        for pipe in self.pipes:
            pipe.source.close()


def start_process(command: Sequence[str], environment: dict[str, str], stdout: int, stderr: int) -> Process:
    """Start an interpreter on a command, as ``bootstrap`` executes it. Raises OSError."""
    return subprocess.Popen(
        [sys.executable, "-P", bootstrap.__file__, *command],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=stderr,
        process_group=0,
    )
