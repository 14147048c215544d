"""A zygote process that imports torch once and forks the ranks.

Importing torch takes seconds of a core, per rank. ``shardwise run --elastic``, or with ``--preload``, therefore starts
one *zygote*, which imports once and then forks ranks on request. A fork takes hundredths of a second, and ranks of
later generations start from the same state. The zygote starts no thread and touches no device.

The launcher talks to it over a socket, in JSON lines. It requests ranks (their environment, with the descriptors of
their output), and receives their process ids and exit codes. This file is executed by its path, like ``bootstrap``.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

# Modules that training scripts import sooner or later, and that torch.export imports on its first call.
PRELOADED = (
    "torch",
    "torch.distributed",
    "torch._dynamo",
    "torch.export._trace",
    "shardwise.api",
    "shardwise.runtime.parallelize",
    "shardwise.train.trainer",
    "rich.progress",
)
_LEAST_URGENT = 19  # the niceness of a process that only plans ahead
_POLL_SECONDS = 0.01
_START_SECONDS = 120.0  # for the imports, on a busy machine


class Forked:
    """A process that the zygote forked, with the part of ``subprocess.Popen`` that the launcher needs."""

    def __init__(self, pid: int, zygote: Zygote) -> None:
        self.pid, self._zygote = pid, zygote
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self._zygote.exit_of(self.pid)
        return self.returncode

    def wait(self) -> int:
        while self.poll() is None:
            time.sleep(_POLL_SECONDS)
        assert self.returncode is not None
        return self.returncode


class Zygote:
    """The launcher's handle of the zygote. ``modules``: those that it imports."""

    def __init__(self, environment: dict[str, str], modules: Sequence[str]) -> None:
        near_end, far_end = socket.socketpair()
        self._socket, self._rest = near_end, b""
        self._exits: dict[int, int] = {}
        self._answers: list[dict[str, Any]] = []
        with far_end:
            self._process = subprocess.Popen(
                [sys.executable, "-P", __file__, str(far_end.fileno()), str(os.getpid()), *modules],
                env=environment,
                stdin=subprocess.DEVNULL,
                pass_fds=[far_end.fileno()],
                process_group=0,
            )

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def spawn(self, command: Sequence[str], environment: dict[str, str], stdout: int, stderr: int) -> Forked:
        """Fork a process that executes ``bootstrap`` on a command. Raises OSError if that fails."""
        request = json.dumps({"command": list(command), "environment": environment}).encode()
        socket.send_fds(self._socket, [len(request).to_bytes(8, "little")], [stdout, stderr])
        self._socket.sendall(request)
        deadline = time.monotonic() + _START_SECONDS
        while not self._answers:
            if not self._hear(_POLL_SECONDS) or time.monotonic() > deadline:
                raise OSError("the process that starts ranks has ended, or does not answer")
        answer = self._answers.pop()
        if "error" in answer:
            raise OSError(answer["error"])
        return Forked(answer["pid"], self)

    def exit_of(self, pid: int) -> int | None:
        """Return the exit code of a process, as ``Popen.returncode``; None while it runs."""
        if self._socket.fileno() < 0:
            return -signal.SIGKILL
        if pid not in self._exits and not self._hear(0) and pid not in self._exits:
            return -signal.SIGKILL  # ranks do not outlive the zygote
        return self._exits.pop(pid, None)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._socket.close()

    def _hear(self, seconds: float) -> bool:
        while select.select([self._socket], [], [], seconds)[0]:
            seconds = 0
            try:
                data = self._socket.recv(1 << 16)
            except ConnectionError:
                data = b""
            if not data:
                return False
            *lines, self._rest = (self._rest + data).split(b"\n")
            for line in lines:
                message = json.loads(line)
                if "code" in message:
                    self._exits[message["pid"]] = message["code"]
                else:
                    self._exits.pop(message.get("pid"), None)  # an unread exit code of an earlier process
                    self._answers.append(message)
        return True


# ------------------------------------------------------------------------------------------------ the zygote's own side


def _serve(connection: socket.socket) -> None:
    """Fork ranks on the launcher's requests and report their exit codes, until the launcher closes the socket."""
    wake_up, woken = os.pipe()
    os.set_blocking(woken, False)
    os.set_blocking(wake_up, False)
    signal.set_wakeup_fd(woken)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    while True:
        ready, _, _ = select.select([connection.fileno(), wake_up], [], [])
        if wake_up in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(wake_up, 4096)
        _tell_exits(connection)
        if connection.fileno() in ready:
            header, descriptors, _, _ = socket.recv_fds(connection, 8, 2)
            if not header:
                return
            request = json.loads(_exactly(connection, int.from_bytes(header, "little")))
            answer = _fork(connection, request, descriptors, (wake_up, woken))
            connection.sendall(json.dumps(answer).encode() + b"\n")


def _fork(connection: socket.socket, request: Any, output: list[int], others: Sequence[int]) -> dict[str, Any]:
    parent = os.getpid()
    try:
        pid = os.fork()
    except OSError as error:
        for descriptor in output:
            os.close(descriptor)
        return {"error": str(error)}
    if pid == 0:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.setpgid(0, 0)
        for target, source in zip((1, 2), output, strict=True):
            os.dup2(source, target)
        connection.close()
        for descriptor in (*output, *others):
            os.close(descriptor)
        _become_a_rank(request["command"], request["environment"], parent)
    with contextlib.suppress(OSError):  # the child does so too: either may be first
        os.setpgid(pid, pid)
    for descriptor in output:
        os.close(descriptor)
    return {"pid": pid}


def _become_a_rank(command: list[str], environment: dict[str, str], parent: int) -> None:
    """Set up the forked process like a fresh interpreter and run ``bootstrap``. Never returns."""
    from shardwise.launch import bootstrap
    from shardwise.runtime.generation import GENERATION

    bootstrap.replace_environment({**environment, bootstrap.LAUNCHER_PID: str(parent)})
    if json.loads(environment.get(GENERATION, "{}")).get("rehearses"):
        os.nice(_LEAST_URGENT)
    bootstrap.seed_python()
    bootstrap.main(command)


def _tell_exits(connection: socket.socket) -> None:
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            ended = json.dumps({"pid": pid, "code": os.waitstatus_to_exitcode(status)})
            connection.sendall(ended.encode() + b"\n")


def _exactly(connection: socket.socket, count: int) -> bytes:
    content = b""
    while len(content) < count:
        content += connection.recv(count - len(content))
    return content


def _main(descriptor: int, launcher_pid: int, modules: Sequence[str]) -> None:
    from shardwise.launch import bootstrap

    bootstrap.end_with_launcher(launcher_pid)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for name in modules:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # imported objects stay: ranks need not scan them, and their pages remain shared
    _serve(socket.socket(fileno=descriptor))


if __name__ == "__main__":
    _main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
