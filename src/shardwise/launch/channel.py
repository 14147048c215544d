"""Authenticated JSON messages between the launchers of a job's machines.

Each end first sends a nonce. A message then is a line ``CODE JSON``. The code is an HMAC over the text and its sequence
number; its key is derived from the job's secret, both nonces and the direction. So messages cannot be replayed, within
a connection or across connections. A line is parsed only after its code was checked. Standard library only.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import re
import secrets
import select
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

from shardwise.errors import LaunchError, ShardwiseError
from shardwise.runtime.private import open_own
from shardwise.untrusted_text import read_json, shorten_repr

_MOST_BYTES = 1 << 20  # of a line
_MOST_BYTES_OF_STRANGERS = 1 << 16  # that called, before their first message
_MOST_READS = 32  # in a row: a peer may send without end
_SEND_SECONDS = 5.0
_FINISH_SECONDS = 2.0
_GREETING = b"shardwise-launcher-1 "
_REFUSED = _GREETING + b"has another secret"
_NONCE = re.compile(rb"[0-9a-f]{32}")


class HasFileno(Protocol):
    def fileno(self) -> int: ...


class Channel:
    """A connection to another launcher. ``accepted``: this end listened; ``gone``: the other end closed it, or it
    broke; ``fault``: why this end closed it; ``refused``: the other end has a different secret; ``heard``: when the
    last message came. Several threads may use it, but only one at a time in each direction."""

    def __init__(self, connection: socket.socket, secret: bytes, *, accepted: bool = False) -> None:
        self._socket = connection
        self._socket.settimeout(_SEND_SECONDS)
        with contextlib.suppress(OSError):
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._secret, self._accepted = secret, accepted
        self._nonce = secrets.token_hex(16).encode()
        self._keys: tuple[bytes, bytes] | None = None  # to send, to hear; None until the other end has sent its nonce
        self._num_sent = self._num_heard = 0
        self._waiting: list[bytes] = []  # messages to send once the keys are known
        self._rest = b""
        self._sending = threading.Lock()
        self.since = self.heard = time.monotonic()
        self.gone = self.refused = False
        self.fault = ""
        self._send_bytes(_GREETING + self._nonce)

    @property
    def peer(self) -> str:
        return self._address(self._socket.getpeername)

    @property
    def here(self) -> str:
        return self._address(self._socket.getsockname)

    @staticmethod
    def _address(end: Any) -> str:
        try:
            return str(end()[0]).removeprefix("::ffff:")
        except (OSError, IndexError):
            return ""

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, **message: Any) -> None:
        """Send a message; ``gone`` becomes True if the connection is broken."""
        text = json.dumps(message).encode()
        with self._sending:
            if self._keys is None:
                self._waiting.append(text)
            else:
                self._send_coded(self._keys[0], text)

    def _send_coded(self, key: bytes, text: bytes) -> None:
        self._send_bytes(_code(key, self._num_sent, text) + b" " + text)
        self._num_sent += 1

    def _send_bytes(self, line: bytes) -> None:
        try:
            self._socket.sendall(line + b"\n")
        except OSError:
            self.gone = True

    def messages(self, seconds: float = 0.0) -> list[Mapping[str, Any]]:
        """Return the messages received, waiting at most ``seconds``. A malformed message ends the connection."""
        messages: list[Mapping[str, Any]] = []
        limit = time.monotonic() + seconds
        for _ in range(_MOST_READS):
            left = 0.0 if messages else max(0.0, limit - time.monotonic())
            if self.gone or not wait_until_readable([self._socket], left):
                break
            try:
                data = self._socket.recv(1 << 16)
            except OSError:
                data = b""
            if not data:
                self.gone = True
                break
            *lines, self._rest = (self._rest + data).split(b"\n")
            try:
                for line in lines:
                    if (message := self._read(line)) is not None:
                        messages.append(message)
                most = _MOST_BYTES_OF_STRANGERS if self._accepted and not self._num_heard else _MOST_BYTES
                if len(self._rest) > most:
                    raise ShardwiseError(f"sent a line of more than {most:,} bytes")
            except ShardwiseError as error:
                self.end(str(error))
            if self._num_heard:
                self.heard = time.monotonic()
        return messages

    def _read(self, line: bytes) -> Mapping[str, Any] | None:
        """Return the message of a line, or None for a greeting. Raises ShardwiseError if it is malformed or forged."""
        if self._keys is None:
            nonce = line.removeprefix(_GREETING)
            if nonce == line or not _NONCE.fullmatch(nonce):
                raise ShardwiseError(f"is no launcher: sent {shorten_repr(line[:40])}")
            self._agree_on_keys(nonce)
            return None
        if line == _REFUSED and not self._accepted and not self._num_heard:
            self.refused = True
            return None
        code, _, text = line.partition(b" ")
        if not hmac.compare_digest(code, _code(self._keys[1], self._num_heard, text)):
            if self._accepted and not self._num_heard:
                with self._sending:
                    self._send_bytes(_REFUSED)
            raise ShardwiseError("sent a message that was not made with this job's secret for this connection")
        self._num_heard += 1
        try:
            message = read_json(text.decode())
        except (ShardwiseError, UnicodeDecodeError) as error:
            raise ShardwiseError(f"sent a text that is no message: {error}") from error
        if not isinstance(message, dict):
            raise ShardwiseError(f"sent {shorten_repr(message)} as a message")
        return message

    def _agree_on_keys(self, nonce: bytes) -> None:
        both = nonce + self._nonce if self._accepted else self._nonce + nonce
        of_caller, of_called = (hmac.digest(self._secret, name + both, "sha256") for name in (b"caller", b"called"))
        with self._sending:
            self._keys = (of_called, of_caller) if self._accepted else (of_caller, of_called)
            waiting, self._waiting = self._waiting, []
            for text in waiting:
                self._send_coded(self._keys[0], text)

    def end(self, fault: str) -> None:
        self.gone, self.fault = True, self.fault or fault

    def finish(self) -> None:
        """Shut down sending and drain the connection: closing a socket with unread data would reset it."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)
        limit = time.monotonic() + _FINISH_SECONDS
        while not self.gone and time.monotonic() < limit:
            self.messages(_FINISH_SECONDS / 10)

    def close(self) -> None:
        self.gone = True
        self._socket.close()


def _code(key: bytes, number: int, text: bytes) -> bytes:
    return hmac.digest(key, number.to_bytes(8, "little") + text, "sha256").hex().encode()


def wait_until_readable(files: Sequence[HasFileno], seconds: float) -> set[int]:
    """Return the descriptors that are readable, waiting at most ``seconds``. Uses poll: select is limited to 1024."""
    poll = select.poll()
    for file in files:
        poll.register(file, select.POLLIN)
    return {descriptor for descriptor, _ in poll.poll(1000 * seconds)}


def connect_all(places: Sequence[tuple[str, int]], seconds: float) -> list[socket.socket | OSError]:
    """Connect to several launchers at once, and return each connection, or the error."""

    def connect(where: tuple[str, int]) -> socket.socket | OSError:
        try:
            return socket.create_connection(where, seconds)
        except OSError as error:
            return error

    with ThreadPoolExecutor(max(1, len(places))) as threads:
        return list(threads.map(connect, places))


# ---------------------------------------------------------------------------------------- what a message may contain


def version() -> str:
    """Return the version of shardwise that this process runs."""
    return str(sys.modules["shardwise"].__version__)  # not imported: the package is a later layer


def whole(value: Any, least: int = 0, most: int = (1 << 63) - 1) -> int:
    """Return ``value``. Raises ValueError unless it is an integer from ``least`` to ``most``."""
    if type(value) is not int or not least <= value <= most:
        raise ValueError(f"{shorten_repr(value)} is no number from {least} to {most}")
    return value


def as_port(value: Any) -> int:
    return whole(value, 1, (1 << 16) - 1)


def as_text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{shorten_repr(value)} is no text")
    return value


def as_place(value: Any) -> tuple[str, int]:
    """Return (name or address, port). Raises ValueError or TypeError for anything else."""
    name, number = value
    return as_text(name), as_port(number)


# ----------------------------------------------------------------------------------------------------------------------
# The shared secret that authenticates the launchers of an elastic job on several machines. Standard library only. It is
# the value of SHARDWISE_JOB_SECRET, or else the content of the file SHARDWISE_JOB_SECRET_FILE, by default
# ``shardwise/job-secret`` in the user's configuration folder. The first launcher creates a missing file.

SECRET = "SHARDWISE_JOB_SECRET"  # variables with this prefix are not passed to the ranks
SECRET_FIX = f"give every machine the same file, or the same {SECRET}"
_FILE = f"{SECRET}_FILE"
_FEWEST_BYTES, _MOST_SECRET_BYTES = 16, 4096


def job_secret(environment: Mapping[str, str]) -> bytes:
    """Return the secret of this user's jobs. Raises LaunchError for one that others can read or guess."""
    if SECRET in environment:
        return _long_enough(environment[SECRET].encode("utf-8", "surrogateescape"), SECRET)
    settings = environment.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config")
    path = environment.get(_FILE) or os.path.join(settings, "shardwise", "job-secret")
    try:
        if not os.path.lexists(path):
            _make(path)
        descriptor = open_own(path)
        with open(descriptor, "rb") as file:
            if os.fstat(descriptor).st_mode & 0o077:
                what = f"other users may read the job's secret in {path}"
                raise LaunchError(what, fix=f"chmod 600 {path}, with a new secret in it")
            return _long_enough(file.read(_MOST_SECRET_BYTES), path)
    except OSError as error:
        what = f"cannot read or make the job's secret: {error}"
        raise LaunchError(what, fix=f"set {_FILE} to a file of yours, or {SECRET} to a text") from error


def _make(path: str) -> None:
    """Create the file atomically: only the first of several launchers succeeds."""
    folder = os.path.dirname(os.path.abspath(path))
    os.makedirs(folder, mode=0o700, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=folder) as file:  # of mode 600
        file.write(secrets.token_hex(32) + "\n")
        file.flush()
        os.fsync(file.fileno())
        with contextlib.suppress(FileExistsError):
            os.link(file.name, path)


def _long_enough(content: bytes, source: str) -> bytes:
    secret = content.strip()
    if len(secret) < _FEWEST_BYTES:
        what = f"the job secret in {source} has {len(secret)} bytes, and needs at least {_FEWEST_BYTES}"
        raise LaunchError(what, fix="create one: python -c 'import secrets; print(secrets.token_hex(32))'")
    return secret
