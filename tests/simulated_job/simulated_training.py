"""Ranks that train: the real ``Recovery``, checkpoints and data order, on simulated collectives, stores and threads.

The module counts the samples that it has seen and sums up a function of each in their order, so whatever state is
resumed says whether it is the one after that step. Files are real ones, in memory; their operations take simulated
time, in which a rank may be lost.
"""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from shardwise.runtime import agree, rank_tree
from shardwise.runtime import faults as failures
from shardwise.runtime.generation import Generation
from shardwise.runtime.heartbeat_file import CollectiveTracker
from shardwise.train import checkpoints, data, local_folder, peers, recovery, resuming, retention, saving
from shardwise.train.files import CheckpointReader
from shardwise.train.local_folder import LocalFolder
from shardwise.train.stores import folder_of
from simulated_job.simulated_machines import Cluster, RankHere
from simulated_job.simulated_network import Readable
from simulated_job.simulated_ranks import Meeting, StoreClient, World, Worlds, guarded, take_faults, tracker_of
from simulated_job.simulated_time import Simulation, SimulationError

_MODULUS = 1_000_003
_FILE_OPERATIONS = (
    "names", "read", "read_all", "put", "write", "content", "remove", "exists", "begin", "owner", "is_complete",
    "commit", "has", "written",
)  # fmt: skip
_SLOW_OPERATIONS = {"put": 3, "write": 2, "commit": 4, "begin": 5}  # calls of the file system in each


@dataclass(frozen=True)
class Training:
    """What the ranks do. ``store_seconds``: per call of the shared file system (NFS and Lustre answer in about a
    millisecond); ``save_every``: steps between checkpoints, 0 for none."""

    folder: Path
    num_steps: int = 12
    step_seconds: float = 1.0
    num_samples: int = 40
    batch_size: int = 12
    save_every: int = 4
    blocking: bool = True
    store_seconds: float = 0.001


def samples_of_steps(training: Training) -> list[list[int]]:
    """Return the samples of each step of a run that loses nothing."""
    loader = data.DataLoader(_Samples(training.num_samples), Seen(), training.batch_size, seed=7)
    steps: list[list[int]] = []
    while len(steps) < training.num_steps:
        steps += map(list, loader.steps())
        loader.epoch += 1
    return steps[: training.num_steps]


class _Samples(torch.utils.data.Dataset[int]):
    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> int:
        return index


class Seen(torch.nn.Module):
    """``seen``: how many samples, and a sum over them that depends on their order."""

    seen: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(2, dtype=torch.int64))

    def see(self, samples: Sequence[int]) -> None:
        count, total = self.seen.tolist()
        for sample in samples:
            count, total = count + 1, (31 * total + sample + 1) % _MODULUS
        self.seen.copy_(torch.tensor([count, total]))


@dataclass
class RankState:
    """What a process of its own would have in its modules."""

    process: RankHere
    world: World
    generation: Generation
    tracker: CollectiveTracker
    failures: failures.FailureStore = field(default_factory=failures.FailureStore)
    begun: set[Path] = field(default_factory=set)
    kept: dict[Path, Any] = field(default_factory=dict)
    turns: Any = field(default_factory=itertools.count)
    world_group: Any = field(default_factory=type("Group", (), {}))
    warned: list[str] = field(default_factory=list)


class SimulatedTraining:
    """The modules of the ranks of one job, and what must hold of their training."""

    def __init__(self, worlds: Worlds, training: Training) -> None:
        self.worlds, self.training = worlds, training
        self.cluster: Cluster = worlds.cluster
        self.simulation: Simulation = self.cluster.simulation
        self.expected = samples_of_steps(training)
        self.states: dict[RankHere, RankState] = {}
        self.locks: dict[Path, RankHere] = {}
        training.folder.mkdir(exist_ok=True)
        self.folder = folder_of(training.folder / "run")
        self.messages: dict[tuple[Any, ...], tuple[torch.Tensor, Readable]] = {}
        self.warned: list[str] = []
        self.resumed: list[tuple[int, int]] = []  # (generation, step)
        self.num_saved = 0
        self.cluster.on_rank_end.append(self._rank_ended)

    # -- the script ----------------------------------------------------------------------------------------------------

    def script(self, process: RankHere) -> None:
        guarded(process, lambda: self._train(process))

    def _train(self, process: RankHere) -> None:
        simulation, training = self.simulation, self.training
        simulation.sleep(1.0)
        tracker, world = tracker_of(process), self.worlds.join(process)
        memory = training.folder / f"memory-{process.machine.node}"
        generation = Generation(
            process.generation, str(memory), num_machines=len(self.cluster.machines), suspect=process.suspect
        )
        memory.mkdir(mode=0o700, exist_ok=True)
        self.states[process] = RankState(process, world, generation, tracker)
        par = Seen()
        loader = data.DataLoader(_Samples(training.num_samples), par, training.batch_size, seed=7)
        kept = recovery.Recovery(par, folder=self.folder, data=loader)
        step = kept.resume()
        self._check_state(par, step, f"rank {process.rank} resumed")
        if process.rank == 0:
            self.resumed.append((process.generation, step))
            simulation.say(f"generation {process.generation} resumes after step {step}")
        while step < training.num_steps:
            for samples in loader:
                simulation.sleep(training.step_seconds * process.machine.slow * simulation.random.uniform(0.98, 1.02))
                take_faults(process)
                with tracker.waiting(b"all_reduce"):
                    world.meet(process)
                if samples.tolist() != self.expected[step]:
                    raise SimulationError(f"step {step + 1} has {samples.tolist()}, not {self.expected[step]}")
                par.see(samples.tolist())
                step += 1
                kept.keep(step)
                self.worlds.step = max(self.worlds.step, step)
                if training.save_every and step % training.save_every == 0:
                    checkpoints.save_checkpoint(
                        self.folder / f"step-{step}", par, step=step, data=loader, blocking=training.blocking,
                        keep=retention.Keep(last=2),
                    )  # fmt: skip
                if step == training.num_steps:
                    break
        checkpoints.finish_saving(par)

    def _check_state(self, par: Seen, step: int, who: str) -> None:
        right = Seen()
        for samples in self.expected[:step]:
            right.see(samples)
        if par.seen.tolist() != right.seen.tolist():
            raise SimulationError(f"{who} the state {par.seen.tolist()}, which is not that of step {step}")

    def check_saves(self) -> int:
        """Return the step of the newest checkpoint. Raises SimulationError if one that is there is not whole."""
        complete, torn = retention.checkpoints_in(self.folder)
        if wrong := [(str(path), why) for path, why in torn if why != retention.UNFINISHED]:
            raise SimulationError(f"checkpoints that are neither whole nor absent: {wrong}")
        for path, manifest in complete.items():
            reader = CheckpointReader(path, manifest)
            par = Seen()
            part = checkpoints.state_of(par, [], 0).parts["model.seen"]
            try:
                reader.verify([("model.seen", part.boxes)])
                reader.read("model.seen", part)
            except Exception as error:
                raise SimulationError(f"{path} is there and cannot be read: {error}") from error
            self._check_state(par, manifest.step, f"{path} holds")
        return max((manifest.step for manifest in complete.values()), default=0)

    def _rank_ended(self, rank: RankHere) -> None:
        for path in [path for path, holder in self.locks.items() if holder is rank]:
            del self.locks[path]
        if rank.code:
            self.check_saves()
        self.states.pop(rank, None)

    # -- what the modules see ------------------------------------------------------------------------------------------

    @property
    def here(self) -> RankState:
        assert self.simulation.current is not None
        return self.states[self.simulation.current.process]  # type: ignore[index]

    def _distributed(self) -> SimpleNamespace:
        """Return what stands for ``torch.distributed``. Counts of messages are those of gloo's algorithms."""
        here, simulation = lambda: self.here, self.simulation

        def count(messages: float, num_bytes: float = 0.0) -> None:
            simulation.count("collectives")
            simulation.count("rank messages", round(messages))
            simulation.count("rank bytes", round(num_bytes))

        def meet(value: Any, hops: float) -> list[Any]:
            world = here().world
            values = world.meet(here().process, value, (), hops, "world")
            return [values[rank] for rank in range(world.size)]

        def all_gather_object(values: list[Any], value: Any, group: Any = None) -> None:
            size = here().world.size
            count(2 * (size - 1), 8 * (size - 1) + len(repr(value)) * (size - 1))  # their sizes, then their bytes
            values[:] = meet(value, 2 * (size - 1))

        def broadcast_object_list(box: list[Any], src: int = 0, group: Any = None) -> None:
            size = here().world.size
            count(2 * math.log2(size))
            box[:] = meet(box, 2 * math.log2(size))[src]

        return SimpleNamespace(
            is_initialized=lambda: self._is_rank,
            get_rank=lambda group=None: here().process.rank, get_world_size=lambda group=None: here().world.size,
            all_gather_object=all_gather_object, broadcast_object_list=broadcast_object_list,
            ReduceOp=torch.distributed.ReduceOp, PrefixStore=lambda name, store: name,
            ProcessGroupGloo=lambda name, rank, size, timeout: _Backend(self, name, size),
            group=_Delegate(lambda: SimpleNamespace(WORLD=self.here.world_group)),
            distributed_c10d=SimpleNamespace(_get_default_store=lambda: StoreClient(here().world, here().process)),
        )  # fmt: skip

    def _write(self, folder: Any, staged: Any, suffix: str = "") -> Any:
        self.simulation.sleep(self.training.store_seconds * self.here_or_thread.machine.slow_disk)
        return _write(folder, staged, suffix)

    @property
    def here_or_thread(self) -> RankHere:
        assert self.simulation.current is not None
        process: Any = self.simulation.current.process
        return process

    def _lock(self, path: Path, what: str = "") -> Any:
        holder = self.locks.get(path)
        if holder is not None:
            raise checkpoints.CheckpointError(f"{what or path} is being saved by rank {holder.rank}", fix="end one")
        self.locks[path] = self.here_or_thread
        return SimpleNamespace(release=lambda: self.locks.pop(path, None), is_certain=True)

    def _slowed(self, name: str) -> Callable[..., Any]:
        whole = getattr(LocalFolder, name)

        def call(folder: LocalFolder, *args: Any) -> Any:
            task = self.simulation.current
            if task is None or not isinstance(task.process, RankHere):
                return whole(folder, *args)
            operations = _SLOW_OPERATIONS.get(name, 1)
            if name == "read_all":
                operations = len(args[0])
            self.simulation.count("file operations", operations)
            for _ in range(min(operations, 4)):  # it may be lost before each of them
                self.simulation.sleep(self.training.store_seconds * task.process.machine.slow_disk)
            return whole(folder, *args)

        return call

    def replaced(self) -> list[tuple[Any, str, Any]]:
        """Return what a run replaces: module or class, name, object."""
        simulation, times = self.simulation, self.cluster.times()
        dist, threads = self._distributed(), _threads(simulation)
        warned = SimpleNamespace(warn=lambda text, *_, **__: self.warned.append(str(text)))
        current = _Delegate(lambda: SimpleNamespace(generation=self.here.generation))
        tracker = _Delegate(lambda: self.here.tracker)
        return [
            *((module, "dist", dist) for module in (agree, rank_tree, failures)),
            *((module, "trail", tracker) for module in (recovery, agree, failures, saving)),
            *((module, "time", times) for module in (recovery, saving, failures)),
            *((module, "current", current) for module in (recovery, saving)),
            *((module, "threading", threads) for module in (agree, peers, saving)),
            *((module, "show_progress_once", lambda what: nullcontext()) for module in (checkpoints, resuming)),
            *((module, "warnings", warned) for module in (recovery, saving, checkpoints, resuming)),
            *((LocalFolder, name, self._slowed(name)) for name in _FILE_OPERATIONS),
            (agree, "monotonic", times.monotonic),
            (agree, "sleep", simulation.sleep),
            (agree, "group_timeout", lambda: timedelta(seconds=600)),
            (agree, "_turns", _Turns(self)),
            (recovery, "failure_store", _Delegate(lambda: self.here.failures)),
            (recovery, "print", lambda *_, **__: None),
            (peers, "platform", SimpleNamespace(node=lambda: f"node-{self.here.process.machine.node}")),
            (local_folder, "lock", self._lock),
            (local_folder, "_kept", _Delegate(lambda: self.states[self.here_or_thread].kept)),
            (local_folder, "_begun", _Delegate(lambda: self.here.begun if self._is_rank else set())),
        ]

    @property
    def _is_rank(self) -> bool:
        return self.simulation.current is not None and self.simulation.current.process in self.states


class _Work:
    """The handle of a collective under way."""

    def __init__(self, world: World, process: RankHere, meeting: Meeting, arrived: Callable[[], Any]) -> None:
        self._world, self._process, self._meeting, self._arrived = world, process, meeting, arrived

    def is_completed(self) -> bool:
        return self._meeting.is_complete or self._meeting.is_broken

    def wait(self, timeout: timedelta | None = None) -> None:
        self._world.wait(self._process, self._meeting, 600.0 if timeout is None else timeout.total_seconds())
        self._arrived()


class _Backend:
    """A group of gloo, by name. Counts of messages are those of its algorithms."""

    def __init__(self, training: SimulatedTraining, name: str, size: int) -> None:
        self._training, self._name, self._size = training, name, size
        training.simulation.count("rank connections", size - 1)
        state = training.here  # each member says where it listens, and asks where the others do
        StoreClient(state.world, state.process)._request(size)
        _, stride, first = name.rsplit("/", 2)
        self._ranks = range(int(first), int(first) + size * int(stride), int(stride))

    def _start(
        self, tensor: torch.Tensor, messages: int, hops: float, arrived: Callable[[list[torch.Tensor]], Any]
    ) -> _Work:
        self._count(messages, tensor)
        state = self._training.here
        meeting = state.world.arrive(state.process, tensor.clone(), self._ranks, hops, self._name)
        return _Work(
            state.world, state.process, meeting, lambda: arrived([meeting.values[rank] for rank in self._ranks])
        )

    def _count(self, messages: int, tensor: torch.Tensor) -> None:
        self._training.simulation.count("rank messages", messages)
        self._training.simulation.count("rank bytes", messages * tensor.nbytes)

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> _Work:
        return self._message(tensors[0], peer, tag, sends=True)

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> _Work:
        return self._message(tensors[0], peer, tag, sends=False)

    def _message(self, tensor: torch.Tensor, peer: int, tag: int, *, sends: bool) -> _Work:
        self._count(1, tensor)
        state, other = self._training.here, self._ranks[peer]
        ends = (state.process.rank, other) if sends else (other, state.process.rank)
        value = tensor.clone() if sends else None
        meeting = state.world.arrive(state.process, value, ends, 1, (self._name, *ends, tag))
        return _Work(
            state.world, state.process, meeting, lambda: None if sends else tensor.copy_(meeting.values[other])
        )

    def allgather(self, rows: list[list[torch.Tensor]], row: list[torch.Tensor]) -> _Work:
        def arrived(values: list[torch.Tensor]) -> None:
            for target, value in zip(rows[0], values, strict=True):
                target.copy_(value)

        return self._start(row[0], self._size - 1, self._size - 1, arrived)

    def allreduce(self, rows: list[torch.Tensor], op: Any) -> _Work:
        hops = 2 * (self._size - 1)
        return self._start(rows[0], 2, hops, lambda values: rows[0].copy_(torch.stack(values).amax(0)))

    def broadcast(self, row: torch.Tensor, root: int) -> _Work:
        hops = math.ceil(math.log2(self._size))
        return self._start(row, hops, hops, lambda values: row.copy_(values[root]))


class _Turns:
    """``agree._turns`` of the current rank."""

    def __init__(self, training: SimulatedTraining) -> None:
        self._training = training

    def __iter__(self) -> _Turns:
        return self

    def __next__(self) -> int:
        return int(next(self._training.here.turns))


class _Delegate:
    """Stands for an object of which every rank has its own."""

    def __init__(self, find: Callable[[], Any]) -> None:
        object.__setattr__(self, "_find", find)

    def __getattr__(self, name: str) -> Any:
        return getattr(object.__getattribute__(self, "_find")(), name)

    def __contains__(self, value: object) -> bool:
        return value in object.__getattribute__(self, "_find")()

    def __setitem__(self, key: Any, value: Any) -> None:
        object.__getattribute__(self, "_find")()[key] = value


def _threads(simulation: Simulation) -> SimpleNamespace:
    """Return what stands for ``threading``: a thread is a task of the process that starts it."""

    class Thread:
        def __init__(self, target: Callable[..., None], args: Sequence[Any] = (), **_: Any) -> None:
            self._run, self._task = (lambda: target(*args)), None

        def start(self) -> None:
            assert simulation.current is not None
            self._task: Any = simulation.start(simulation.current.process, self._run)

        def is_alive(self) -> bool:
            return self._task is not None and self._task.alive

        def join(self, seconds: float = math.inf) -> None:
            until = simulation.clock() + seconds
            while self.is_alive() and simulation.clock() < until:
                simulation.sleep(0.0005)

    class Event:
        def __init__(self) -> None:
            self._is_set = False

        def set(self) -> None:
            self._is_set = True

        def is_set(self) -> bool:
            return self._is_set

        def wait(self, seconds: float) -> bool:
            until = simulation.clock() + seconds
            while not self._is_set and simulation.clock() < until:
                simulation.sleep(min(0.01, seconds))
            return self._is_set

    main = SimpleNamespace(is_alive=lambda: True)
    return SimpleNamespace(Thread=Thread, Event=Event, main_thread=lambda: main, get_ident=threading.get_ident)


_write = saving.write
