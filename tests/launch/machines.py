"""Launchers of one job, each as on a machine of its own."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from shardwise.launch.channel import Channel

_START = """
import sys
from shardwise.launch import zygote
from shardwise.launch.restart_policy import ElasticConfig
from shardwise.launch.job import JobSettings
from shardwise.launch.launcher import JobMachines, launch
if {plain}:
    zygote.PRELOADED = ()
machines = JobMachines((), {machines}, {node}, "127.0.0.1", {port})
sys.exit(launch({command}, {ranks}, machines, JobSettings(show_all={plain}), elastic=ElasticConfig({settings})))
"""

SECRET = b"of the tests"


def channels() -> tuple[Channel, Channel]:
    """Both ends of a connection, that of the caller and the other, which have greeted each other."""
    ours, theirs = socket.socketpair()
    caller, called = Channel(ours, SECRET), Channel(theirs, SECRET, accepted=True)
    caller.messages()
    called.messages()
    return caller, called


class Machines:
    """``ranks``: of each; ``settings``: of ``ElasticConfig``, as text; ``plain``: the ranks load no torch."""

    def __init__(
        self, folder: Path, command: Sequence[str], port: int, *, machines: int = 2, ranks: int = 2, settings: str = "",
        plain: bool = True,
    ) -> None:  # fmt: skip
        self.folder, self.port, self.num_machines = folder, port, machines
        self.environment = {**os.environ, "XDG_CONFIG_HOME": str(folder)}  # where the first launcher makes the secret
        self.running: dict[int, subprocess.Popen[bytes]] = {}
        self._text = {
            "command": list(command), "port": port, "machines": machines, "ranks": ranks, "settings": settings,
            "plain": plain,
        }  # fmt: skip

    def start(self, node: int, **others: object) -> None:
        text = _START.format(**{**self._text, **others}, node=node)
        with (self.folder / f"said-by-{node}").open("ab") as said:
            command = [sys.executable, "-c", text]
            self.running[node] = subprocess.Popen(command, stdout=said, stderr=said, env=self.environment)

    def said(self, node: int) -> str:
        return (self.folder / f"said-by-{node}").read_text()

    def lose(self, node: int) -> None:
        """As if its power was cut, but that the system closes its connections."""
        self.running[node].kill()
        self.running.pop(node).wait()

    def codes(self, seconds: float = 120.0) -> list[int]:
        """Of those that run, machine by machine, when they have ended."""
        return [self.running[node].wait(timeout=seconds) for node in sorted(self.running)]

    def close(self) -> None:
        for process in self.running.values():
            process.kill()
            process.wait()
