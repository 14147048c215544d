"""Lines of JSON between the launchers of a job's machines. Standard library only."""

from __future__ import annotations

import contextlib
import json
import select
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

_MOST_BYTES = 1 << 20  # of a line
_SEND_SECONDS = 5.0
_FINISH_SECONDS = 2.0


class HasFileno(Protocol):
    def fileno(self) -> int: ...


class Channel:
    """A connection to another launcher. ``gone``: it was closed there, or broke; ``silent``: since its last word, in
    seconds. Both ends may be used by several threads, each direction by one at a time."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._socket.settimeout(_SEND_SECONDS)
        with contextlib.suppress(OSError):
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._rest = b""
        self._sending = threading.Lock()
        self.heard = time.monotonic()
        self.gone = False

    @property
    def peer(self) -> str:
        """The other end's address."""
        try:
            return str(self._socket.getpeername()[0]).removeprefix("::ffff:")
        except OSError:
            return ""

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, **message: Any) -> None:
        """Where nobody is there to hear it, ``gone`` says so afterwards."""
        with self._sending:
            try:
                self._socket.sendall(json.dumps(message).encode() + b"\n")
            except OSError:
                self.gone = True

    def messages(self, seconds: float = 0.0) -> list[Mapping[str, Any]]:
        """What has come, waiting for it for some time at most. Whoever says what no launcher would is disconnected."""
        messages: list[Mapping[str, Any]] = []
        while not self.gone and readable([self._socket], seconds):
            seconds = 0.0
            try:
                data = self._socket.recv(1 << 16)
            except OSError:
                data = b""
            if not data:
                self.gone = True
                break
            self.heard = time.monotonic()
            *lines, self._rest = (self._rest + data).split(b"\n")
            try:
                messages += [dict(json.loads(line)) for line in lines if line.strip()]
            except (ValueError, TypeError, RecursionError):
                self.gone = True
            if len(self._rest) > _MOST_BYTES:
                self.gone = True
        return messages

    def finish(self) -> None:
        """Say no more, and wait until the other end has read all: closed with words unread, a connection is reset."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)
        limit = time.monotonic() + _FINISH_SECONDS
        while not self.gone and time.monotonic() < limit:
            self.messages(_FINISH_SECONDS / 10)

    def close(self) -> None:
        self.gone = True
        self._socket.close()


def readable(files: Sequence[HasFileno], seconds: float) -> set[int]:
    """The descriptors of those that have something to read, waited for at most so long. However many there are."""
    poll = select.poll()
    for file in files:
        poll.register(file, select.POLLIN)
    return {descriptor for descriptor, _ in poll.poll(1000 * seconds)}


__all__ = ["Channel", "readable"]
