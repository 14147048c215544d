"""Sockets, listeners and polls of simulated machines.

Latency and bandwidth are those of ``Network``. A message to a machine that lost its power is lost without an error, and
one through a switch that carries nothing is sent again. A process that ends closes its connections, as the kernel does.
A connection that is closed with unread data is reset.

CPU seconds of operations are rounded up from measurements on an AMD EPYC with CPython 3.11: what a launcher does per
message is mostly JSON and HMAC.
"""

from __future__ import annotations

import itertools
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

from simulated_job.simulated_time import Process, Simulation, Task

CPU_SECONDS = {
    "register": 4e-7,  # a file with a poll
    "poll": 2e-6,
    "polled file": 1e-7,
    "send": 1.5e-5,  # a message: JSON, HMAC, the system call
    "receive": 1.5e-5,
    "byte": 4e-9,
    "accept": 3e-5,
}
_BACKLOG = 2048
_RETRANSMIT_SECONDS = 0.2


@dataclass(frozen=True)
class Network:
    """Seconds one way between two machines, and bytes per second of a machine's connection to it: Ethernet of 25 Gb/s
    with two switches on the way."""

    latency_seconds: float = 50e-6
    bytes_per_second: float = 3e9


class Readable:
    """Something that a task may wait for."""

    def __init__(self) -> None:
        self.waiting: dict[Task, None] = {}

    @property
    def is_readable(self) -> bool:
        raise NotImplementedError


class Wire:
    """All sockets of a run. ``listeners``: by (address, port); ``files``: by descriptor."""

    def __init__(self, simulation: Simulation, network: Network) -> None:
        self.simulation, self.network = simulation, network
        self.listeners: dict[tuple[str, int], ListeningSocket] = {}
        self.files: dict[int, Any] = {}
        self._descriptors = itertools.count(1000)

    def add(self, file: Any) -> int:
        descriptor = next(self._descriptors)
        self.files[descriptor] = file
        return descriptor

    def notify(self, file: Readable) -> None:
        for task in file.waiting:
            self.simulation.wake(task)

    @property
    def process(self) -> Process:
        assert self.simulation.current is not None
        return self.simulation.current.process

    # -- the names of the modules `socket` and `select` that the launcher uses ---------------------------------------

    def sockets(self) -> SimpleNamespace:
        return SimpleNamespace(
            create_connection=self.create_connection, socket=Connection, IPPROTO_TCP=socket.IPPROTO_TCP,
            TCP_NODELAY=socket.TCP_NODELAY, SHUT_WR=socket.SHUT_WR,
        )  # fmt: skip

    def selects(self) -> SimpleNamespace:
        return SimpleNamespace(poll=lambda: Poll(self), POLLIN=1)

    def listen(self, address: str, port: int) -> ListeningSocket:
        address = address or self.process.machine.address
        port = port or self.process.machine.free_port()
        if (address, port) in self.listeners:
            raise OSError(98, "Address already in use")
        return ListeningSocket(self, (address, port))

    def create_connection(self, where: tuple[str, int], timeout: float | None = None) -> Connection:
        simulation, ours = self.simulation, self.process
        where = (where[0], where[1])
        machine = ours.machine.cluster.machine_at(where[0])
        simulation.count("connects")
        if machine is None or not machine.reaches(ours.machine):
            simulation.sleep(60.0 if timeout is None else timeout)
            raise TimeoutError("timed out")
        simulation.sleep(2 * self.network.latency_seconds)
        listener = self.listeners.get(where)
        if listener is None:
            raise ConnectionRefusedError(111, "Connection refused")
        if len(listener.backlog) >= _BACKLOG:
            simulation.sleep(60.0 if timeout is None else timeout)
            raise TimeoutError("timed out")
        near, far = Connection(self, ours), Connection(self, listener.process)
        near.join(far, (ours.machine.address, 1), where)
        listener.backlog.append(far)
        self.notify(listener)
        return near

    def connect_all(self, places: Sequence[tuple[str, int]], timeout: float) -> list[Any]:
        answers = Answers(len(places))

        def connect(number: int, where: tuple[str, int]) -> None:
            try:
                answers.found[number] = self.create_connection(where, timeout)
            except OSError as error:
                answers.found[number] = error
            self.notify(answers)

        for number, where in enumerate(places):
            self.simulation.start(self.process, partial(connect, number, where))
        while not answers.is_readable:  # each that is there wakes this task
            self.simulation.wait([answers], None)
        return [answers.found[number] for number in range(len(places))]


class Answers(Readable):
    """Connections that threads of a process make. ``found``: what came of each so far."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count, self.found = count, dict[int, Any]()

    @property
    def is_readable(self) -> bool:
        return len(self.found) == self.count


class ListeningSocket(Readable):
    def __init__(self, wire: Wire, where: tuple[str, int]) -> None:
        super().__init__()
        self.wire, self.where, self.process = wire, where, wire.process
        self.backlog: list[Connection] = []
        self._descriptor = wire.add(self)
        wire.listeners[where] = self
        self.process.at_end.append(self.close)

    @property
    def is_readable(self) -> bool:
        return bool(self.backlog)

    def setblocking(self, blocks: bool) -> None:
        pass

    def accept(self) -> tuple[Connection, Any]:
        if not self.backlog:
            raise BlockingIOError(11, "Resource temporarily unavailable")
        self.wire.simulation.spend(CPU_SECONDS["accept"])
        self.wire.simulation.count("accepts")
        connection = self.backlog.pop(0)
        return connection, connection.theirs

    def fileno(self) -> int:
        return self._descriptor

    def getsockname(self) -> tuple[str, int]:
        return self.where

    def close(self) -> None:
        if self.wire.listeners.get(self.where) is self:
            del self.wire.listeners[self.where]
            for connection in self.backlog:
                connection.close()


class Connection(Readable):
    def __init__(self, wire: Wire, process: Process) -> None:
        super().__init__()
        self.wire, self.process = wire, process
        self.peer: Connection | None = None
        self.ours: Any = ("", 0)
        self.theirs: Any = ("", 0)
        self._data = bytearray()
        self._ended = self._reset = self._closed = self._shut = False
        self._under_way: list[tuple[Any, int]] = []
        self._arrives = 0.0  # when what was sent last is at the other end
        self._descriptor = wire.add(self)
        process.at_end.append(self.close)

    def join(self, other: Connection, ours: Any, theirs: Any) -> None:
        self.peer, other.peer = other, self
        self.ours = other.theirs = ours
        self.theirs = other.ours = theirs

    @property
    def is_readable(self) -> bool:
        return bool(self._data) or self._ended or self._reset

    def fileno(self) -> int:
        return self._descriptor

    def settimeout(self, seconds: float | None) -> None:
        pass

    def setsockopt(self, *_: object) -> None:
        pass

    def getpeername(self) -> Any:
        return self.theirs

    def getsockname(self) -> Any:
        return self.ours

    def sendall(self, data: bytes) -> None:
        simulation = self.wire.simulation
        if self._closed or self._reset or self.peer is None or self._shut:
            raise BrokenPipeError(32, "Broken pipe")
        simulation.count("messages sent")
        simulation.count("bytes sent", len(data))
        simulation.spend(CPU_SECONDS["send"] + len(data) * CPU_SECONDS["byte"])
        self._deliver(lambda peer: peer._arrive(data), len(data))

    def _deliver(self, act: Any, num_bytes: int = 0) -> None:
        self._under_way.append((act, num_bytes))
        if len(self._under_way) == 1:
            self._transmit()

    def _transmit(self) -> None:
        """Send what waits, or try again later, as TCP does."""
        peer, network, simulation = self.peer, self.wire.network, self.wire.simulation
        assert peer is not None
        here, there = self.process.machine, peer.process.machine
        if here.powered and there.powered and not here.reaches(there):
            simulation.at(simulation.now + _RETRANSMIT_SECONDS, self._transmit)
            return
        waiting, self._under_way = self._under_way, []
        for act, num_bytes in waiting if here.reaches(there) else ():
            here.sends_until = max(here.sends_until, simulation.clock()) + num_bytes / network.bytes_per_second
            self._arrives = max(self._arrives, here.sends_until + network.latency_seconds)
            simulation.at(self._arrives, lambda act=act: act(peer) if there.powered else None)

    def _arrive(self, data: bytes) -> None:
        if self._closed:
            self._deliver(Connection._be_reset)
        else:
            self._data += data
            self.wire.notify(self)

    def _be_reset(self) -> None:
        self._reset = True
        self._data.clear()
        self.wire.notify(self)

    def _end(self) -> None:
        self._ended = True
        self.wire.notify(self)

    def recv(self, count: int) -> bytes:
        simulation = self.wire.simulation
        if not self.is_readable:
            simulation.wait([self], None)
        if self._reset:
            raise ConnectionResetError(104, "Connection reset by peer")
        data = bytes(self._data[:count])
        del self._data[:count]
        simulation.count("messages received", data.count(b"\n"))
        simulation.count("bytes received", len(data))
        simulation.spend(CPU_SECONDS["receive"] * max(1, data.count(b"\n")) + len(data) * CPU_SECONDS["byte"])
        return data

    def shutdown(self, how: int) -> None:
        if not self._shut and not self._closed and self.peer is not None:
            self._shut = True
            self._deliver(Connection._end)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self.wire.files.pop(self._descriptor, None)
        if self.peer is not None and self.process.machine.powered:
            self._deliver(Connection._be_reset if self._data else Connection._end)

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Poll:
    def __init__(self, wire: Wire) -> None:
        self.wire = wire
        self.files: list[tuple[int, Any]] = []

    def register(self, file: Any, events: int) -> None:
        descriptor = file.fileno()
        self.files.append((descriptor, self.wire.files.get(descriptor)))

    def poll(self, milliseconds: float) -> list[tuple[int, int]]:
        simulation, number = self.wire.simulation, len(self.files)
        simulation.count("polls")
        simulation.count("polled files", number)
        costs = CPU_SECONDS
        simulation.spend(costs["poll"] + number * (costs["register"] + costs["polled file"]))
        # A descriptor that is closed is readable: poll reports it as invalid.
        closed = [(descriptor, 32) for descriptor, file in self.files if file is None]
        files = [file for _, file in self.files if file is not None]
        ready = set(map(id, simulation.wait(files, 0 if closed else milliseconds / 1000)))
        return closed + [(descriptor, 1) for descriptor, file in self.files if id(file) in ready]


class Pipe(Readable):
    """The reading end of the output of a rank: it is readable when the process has ended."""

    def __init__(self) -> None:
        super().__init__()
        self.ended = False

    @property
    def is_readable(self) -> bool:
        return self.ended
