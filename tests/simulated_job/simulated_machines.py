"""Machines: processes, files, clocks, power; and what the launcher's modules see of them.

``Cluster.replaced`` is the list of names that a run replaces in modules of shardwise. Everything else in them is the
real code.
"""

from __future__ import annotations

import io
import itertools
import json
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

from shardwise.launch import bootstrap, channel, coordinator, elastic, hang_detector, job, node_agent, processes, ranks
from shardwise.runtime import heartbeat_file
from shardwise.runtime.heartbeat_file import NEXT_FILE, HeartbeatFile
from simulated_job.simulated_network import CPU_SECONDS, Network, Pipe, Readable, Wire
from simulated_job.simulated_time import Lock, Process, Simulation

_FORK_SECONDS = 0.02
_IMPORT_SECONDS = 4.0  # of torch, once per machine and job
_LEAVE_SECONDS = 0.2  # of a process to leave a generation, at most
LEFT = 256  # in place of an exit code: of a rank whose process has left its generation
_BEAT_SECONDS = 0.5
_SKEW_SECONDS = 0.01  # of a wall clock that is kept by NTP
_FIRST_PID = 100

Script = Callable[["RankHere"], None]


class Machine:
    """``powered``: False ends everything without a word; ``part``: of a network that is divided; ``slow``,
    ``slow_disk``: by which factor its ranks compute, and write, slower."""

    def __init__(self, cluster: Cluster, node: int) -> None:
        self.cluster, self.node = cluster, node
        self.address = f"10.{node >> 8}.{node & 255}.1"
        self.powered, self.part = True, 0
        self.slow = self.slow_disk = 1.0
        self.sends_until = 0.0
        self.files: dict[str, str] = {}
        self.processes: dict[int, RankHere | Waiting] = {}
        self.launcher: Process | None = None
        self.code: int | None = None  # with which the launcher ended
        self.said: list[str] = []
        random = cluster.simulation.random
        self.booted = random.uniform(1e3, 1e6)  # monotonic clocks of machines have nothing in common
        self.skew = random.uniform(-_SKEW_SECONDS, _SKEW_SECONDS)
        self._ports = itertools.count(random.randrange(32768, 50000))
        self._pids = itertools.count(_FIRST_PID)

    def reaches(self, other: Machine) -> bool:
        return self.powered and other.powered and self.part == other.part

    def free_port(self) -> int:
        return next(self._ports)

    def new_pid(self) -> int:
        return next(self._pids)

    def end_launcher(self) -> None:
        for rank in list(self.processes.values()):  # the kernel ends ranks with their launcher
            rank.end(-signal.SIGKILL)
        if self.launcher is not None:
            self.cluster.simulation.kill(self.launcher)


class Handle:
    """A process as the launcher sees it: one rank, or one after the other."""

    def __init__(self, machine: Machine) -> None:
        self.pid, self._machine = machine.new_pid(), machine
        self.process: Any = None
        self.returncode: int | None = None

    def poll(self) -> int | None:
        self.returncode = self.process.code
        return self.returncode

    def wait(self) -> int:
        while self.poll() is None:
            self._machine.cluster.simulation.sleep(0.001)
        assert self.returncode is not None
        return self.returncode


class Waiting(Readable, Process):
    """The process of a rank that has left its generation, until the next one."""

    silent = False

    def __init__(self, rank: RankHere) -> None:
        Readable.__init__(self)
        Process.__init__(self, rank.machine, "rank between generations")
        self.handle, self.outputs, self.page = rank.handle, rank.outputs, rank.page
        self.code: int | None = None
        self.handle.process = self.machine.processes[self.handle.pid] = self

    @property
    def is_readable(self) -> bool:
        return self._next in self.machine.files

    @property
    def _next(self) -> str:
        return NEXT_FILE.format(page=self.page.path)

    def run(self) -> None:
        cluster = self.machine.cluster
        cluster.parked[self._next, self.machine.node] = self
        self.page.leave_generation(uses_gpu=False)
        cluster.simulation.wait([self], None)
        RankHere(self.machine, json.loads(self.machine.files[self._next]), self.outputs, self.handle).start()
        cluster.simulation.kill(self)

    def end(self, code: int) -> None:
        self.code = code
        self.machine.processes.pop(self.handle.pid, None)
        self.machine.cluster.simulation.kill(self)


class RankHere(Process):
    """The process of a rank, as long as it is one."""

    def __init__(
        self, machine: Machine, environment: dict[str, str], outputs: Sequence[Pipe], handle: Handle | None = None
    ) -> None:
        super().__init__(machine, "rank")
        self.environment, self.outputs = environment, outputs
        self.handle = handle or Handle(machine)
        self.handle.process, self.pid = self, self.handle.pid
        self.rank, self.world_size = int(environment["RANK"]), int(environment["WORLD_SIZE"])
        self.generation = int(environment["NUMBER"])
        self.code: int | None = None
        self.silent = False  # stopped: it neither runs nor gives a sign of life
        self.hangs = False  # it comes to no collective any more
        self.raises: Exception | None = None
        self.suspect = environment["SUSPECT"] == "True"
        self.page = machine.cluster.pages[environment["SHARDWISE_PAGE"]]
        self.page.process = self
        machine.processes[self.pid] = self
        machine.cluster.ranks.append(self)

    def start(self) -> None:
        script = self.machine.cluster.script

        def run() -> None:
            script(self)
            self.end(0)

        self.machine.cluster.simulation.start(self, run)

    def leave(self) -> None:
        """Leave the generation, as ``launch.kept_process`` does."""
        simulation = self.machine.cluster.simulation
        simulation.sleep(simulation.random.uniform(_LEAVE_SECONDS / 10, _LEAVE_SECONDS))
        waiting = Waiting(self)
        simulation.start(waiting, waiting.run)
        self._finish(LEFT)

    def end(self, code: int) -> None:
        """End it with an exit code."""
        if self.code is None:
            self.machine.processes.pop(self.pid, None)
            self.machine.cluster.simulation.at(0.0, self._close_outputs)
            self._finish(code)

    def _finish(self, code: int) -> None:
        self.code = code
        self.machine.cluster.rank_ended(self)
        self.machine.cluster.simulation.kill(self)

    def _close_outputs(self) -> None:
        for pipe in self.outputs:
            pipe.ended = True
            self.machine.cluster.wire.notify(pipe)


class Page(Readable, HeartbeatFile):
    """A heartbeat file in memory. Its rank beats twice a second: what it wrote last is known when the page is read. It
    is readable when the generation has ended."""

    def __init__(self, cluster: Cluster, path: str) -> None:
        Readable.__init__(self)
        self.path, self._memory = path, bytearray(2048)  # type: ignore[assignment]
        self._cluster = cluster
        self.process: RankHere | None = None
        self.beat(0.0)
        self.step(-1)

    @property
    def is_readable(self) -> bool:
        return self.has_ended

    def end_generation(self) -> None:
        super().end_generation()
        self._cluster.wire.notify(self)

    def read(self) -> Any:
        process = self.process
        if process is not None and process.code is None and not process.silent:
            now = self._cluster.monotonic()
            self.beat(now - (now % _BEAT_SECONDS))
        return super().read()

    def close(self) -> None:
        pass


class Zygote:
    """Starts ranks as ``launch.zygote`` does."""

    def __init__(self, cluster: Cluster, environment: dict[str, str], modules: Sequence[str]) -> None:
        self._cluster, self.alive = cluster, True
        self._ready = cluster.simulation.clock() + _IMPORT_SECONDS

    def spawn(self, command: Sequence[str], environment: dict[str, str], stdout: int, stderr: int) -> Handle:
        simulation, wire = self._cluster.simulation, self._cluster.wire
        simulation.sleep(max(0.0, self._ready - simulation.clock()) + _FORK_SECONDS)
        process = RankHere(wire.process.machine, environment, [wire.files[stdout], wire.files[stderr]])
        process.start()
        return process.handle

    def close(self) -> None:
        self.alive = False


class Selector:
    """``selectors.DefaultSelector`` over simulated pipes."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._keys: dict[int, Any] = {}

    def register(self, file: Any, events: int, data: Any) -> None:
        self._keys[file.fileno()] = SimpleNamespace(fileobj=file, data=data)

    def unregister(self, file: Any) -> None:
        del self._keys[file.fileno()]

    def get_map(self) -> dict[int, Any]:
        return self._keys

    def select(self, seconds: float) -> list[tuple[Any, int]]:
        simulation, files = self._cluster.simulation, self._cluster.wire.files
        simulation.spend(CPU_SECONDS["poll"])
        if not self._keys:
            simulation.sleep(seconds)
            return []
        seconds = max(seconds, self._cluster.look_seconds)
        ready = set(map(id, simulation.wait([files[number] for number in self._keys], seconds)))
        if not ready:
            return []
        return [(key, 1) for number, key in list(self._keys.items()) if id(files[number]) in ready]

    def close(self) -> None:
        self._keys.clear()


class Cluster:
    """Machines of one job. ``script``: what every rank runs; ``ranks``: all that were ever started; ``look_seconds``:
    between looks of a launcher at its ranks, at least."""

    def __init__(self, simulation: Simulation, num_machines: int, network: Network, script: Script) -> None:
        self.simulation, self.script = simulation, script
        self.wire = Wire(simulation, network)
        self.machines = [Machine(self, node) for node in range(num_machines)]
        self._at = {machine.address: machine for machine in self.machines}
        self.ranks: list[RankHere] = []
        self.look_seconds = 0.0
        self.pages: dict[str, Page] = {}
        self.parked: dict[tuple[str, int], Waiting] = {}  # by the file that they wait for, and machine
        self.on_rank_end: list[Callable[[RankHere], None]] = []

    def machine_at(self, address: str) -> Machine | None:
        return self._at.get(address)

    def rank_ended(self, rank: RankHere) -> None:
        for act in self.on_rank_end:
            act(rank)

    @property
    def here(self) -> Machine:
        task = self.simulation.current
        assert task is not None
        machine: Machine = task.process.machine
        return machine

    # -- the modules of the standard library, as the launcher sees them ----------------------------------------------

    def monotonic(self) -> float:
        task = self.simulation.current
        assert task is not None
        booted: float = task.process.machine.booted
        return self.simulation.now + task.owed + booted

    def times(self) -> SimpleNamespace:
        return SimpleNamespace(
            monotonic=self.monotonic, perf_counter=self.monotonic, sleep=self.simulation.sleep,
            time=lambda: 1.8e9 + self.simulation.clock() + self.here.skew,
        )  # fmt: skip

    def _os(self) -> SimpleNamespace:
        path = SimpleNamespace(
            join=os.path.join, basename=os.path.basename, exists=self._exists, lexists=self._exists,
            dirname=os.path.dirname,
        )  # fmt: skip
        return SimpleNamespace(
            path=path, pipe=self._pipe, close=lambda descriptor: None, read=lambda descriptor, count: b"",
            killpg=self._signal, kill=self._signal, replace=self._replace, makedirs=lambda *_, **__: None,
            devnull=os.devnull,
        )  # fmt: skip

    def _exists(self, path: str) -> bool:
        return path in self.here.files or path.startswith("/memory/")

    def _replace(self, source: str, target: str) -> None:
        self.here.files[target] = self.here.files.pop(source)
        if waiting := self.parked.pop((target, self.here.node), None):
            self.wire.notify(waiting)

    def _open(self, path: str, mode: str = "r", encoding: str = "") -> Any:
        files = self.here.files
        if "w" not in mode:
            if path not in files:
                raise FileNotFoundError(2, "No such file", path)
            return io.StringIO(files[path])

        class Written(io.StringIO):
            def close(self) -> None:
                if not self.closed:
                    files[path] = self.getvalue()
                super().close()

        return Written()

    def _pipe(self) -> tuple[int, int]:
        pipe = Pipe()
        return self.wire.add(pipe), self.wire.add(pipe)

    def _signal(self, pid: int, signum: int) -> None:
        rank = self.here.processes.get(pid)
        if rank is None:
            raise ProcessLookupError(pid)
        if signum in (signal.SIGKILL, signal.SIGTERM, signal.SIGINT) and not (rank.silent and signum != signal.SIGKILL):
            rank.end(-signum)

    def _create_page(self, path: str) -> Page:
        self.pages[path] = Page(self, path)
        return self.pages[path]

    def _write(self, stream: Any, data: bytes) -> None:
        machine = self.here
        text = data.decode().removeprefix("shardwise: ").rstrip("\n")
        if not text:
            return
        machine.said.append(text)
        self.simulation.say(f"machine {machine.node}: {text}")

    def _mkdtemp(self, prefix: str, dir: str) -> str:
        return f"{dir}/{prefix}{len(self.here.said)}-{next(self.here._pids)}"

    def _source(self, descriptor: int) -> Any:
        return SimpleNamespace(fileno=lambda: descriptor, close=lambda: self.wire.files.pop(descriptor, None))

    def _listener(self) -> type[node_agent.Listener]:
        simulation, wire = self.simulation, self.wire

        class Station(node_agent.Listener):
            """The thread of the real one is a task."""

            def start(self) -> None:
                self._task = simulation.start(wire.process, self.run)

            def is_alive(self) -> bool:
                return hasattr(self, "_task") and self._task.alive

            def join(self, timeout: float | None = None) -> None:
                while self._task.alive:
                    simulation.sleep(0.001)

        return Station

    def _listen(self, address: str, port: int) -> Any:
        return self.wire.listen(address, port)

    def replaced(self) -> list[tuple[ModuleType, str, Any]]:
        """Return what a run replaces: module, name, object."""
        times, files, sockets = self.times(), self._os(), self.wire.sockets()
        threads = SimpleNamespace(
            Lock=lambda: Lock(self.simulation), Thread=threading.Thread, get_ident=threading.get_ident
        )
        clocked = (channel, coordinator, elastic, hang_detector, job, node_agent, processes, bootstrap)
        return [
            *((module, "time", times) for module in (*clocked, heartbeat_file, ranks)),
            *((module, "os", files) for module in (job, processes, elastic, bootstrap)),
            *((module, "open", self._open) for module in (processes, bootstrap)),
            *((module, "socket", sockets) for module in (channel, node_agent)),
            *((module, "connect_all", self.wire.connect_all) for module in (coordinator, node_agent)),
            *((module, "threading", threads) for module in (channel, node_agent)),
            (channel, "select", self.wire.selects()),
            (node_agent, "listen", self._listen),
            (node_agent, "free_port", lambda: self.here.free_port()),
            (node_agent, "own_address", lambda name: self.here.address if name else ""),
            (node_agent, "route_address", lambda name, port: self.here.address),
            (node_agent, "Listener", self._listener()),
            (elastic, "Zygote", lambda environment, modules: Zygote(self, environment, modules)),
            (elastic, "check_own_folder", lambda folder: None),
            (elastic, "tempfile", SimpleNamespace(mkdtemp=self._mkdtemp)),
            (job, "io", SimpleNamespace(FileIO=self._source)),
            (job, "_write", self._write),
            (job, "HeartbeatFile", SimpleNamespace(create=self._create_page)),
        ]

    @contextmanager
    def in_place(self, more: Sequence[tuple[Any, str, Any]] = ()) -> Iterator[None]:
        """Replace these names, and ``more``, for the duration of a block."""
        missing = object()
        before = []
        try:
            for module, name, new in (*self.replaced(), *more):
                before.append((module, name, vars(module).get(name, missing)))
                setattr(module, name, new)
            yield
        finally:
            for module, name, old in reversed(before):
                delattr(module, name) if old is missing else setattr(module, name, old)


__all__ = ["Cluster", "Machine", "Page", "RankHere", "Readable", "Script", "Selector"]
