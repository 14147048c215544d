"""Ranks of a simulated job: the process group that they form, and a script that takes steps and meets the others."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from datetime import timedelta
from typing import Any

from shardwise.launch import bootstrap, ranks
from shardwise.launch.rank_environment import RankEnvironment
from shardwise.runtime.generation import GenerationEnded
from shardwise.runtime.heartbeat_file import CollectiveTracker
from simulated_job.simulated_machines import Cluster, RankHere
from simulated_job.simulated_network import Readable
from simulated_job.simulated_time import SimulationError

_BROKEN_SECONDS = 0.02  # until a rank notices that a peer has closed its connection, at most
_RETRANSMIT_SECONDS = 0.2
_LOOK_SECONDS = 0.1  # between looks of a rank that waits whether its generation has ended
_INIT_SECONDS = 1.0  # of a script, until it joins the others
_COLLECTIVE_TIMEOUT = 600.0
_SERVE_SECONDS = 1e-5  # of the store's thread, for a key


class Meeting(Readable):
    """One collective of all ranks. ``values``: by rank."""

    def __init__(self) -> None:
        super().__init__()
        self.values: dict[int, Any] = {}
        self.is_complete = self.is_broken = False

    @property
    def is_readable(self) -> bool:
        return self.is_complete or self.is_broken


class World:
    """The process group of a generation."""

    def __init__(self, worlds: Worlds, generation: int, size: int) -> None:
        self.worlds, self.generation, self.size = worlds, generation, size
        self.members: dict[int, RankHere] = {}
        self.turns: Counter[tuple[int, Hashable]] = Counter()
        self.meetings: dict[Hashable, Meeting] = {}
        self.store: dict[str, bytes] = {}  # of the ranks, which rank 0 serves
        self.served = 0.0  # until when its thread is busy
        self.awaited: dict[str, Awaited] = {}
        self.is_broken = False
        self.num_done = 0

    def arrive(self, process: RankHere, value: Any, ranks: Sequence[int], num_hops: float, group: Hashable) -> Meeting:
        """Begin a collective of the ranks of a group, whose last message arrives after ``num_hops``."""
        simulation = process.machine.cluster.simulation
        turn = self.turns[process.rank, group]
        self.turns[process.rank, group] += 1
        meeting = self.meetings.setdefault((group, turn), Meeting())
        meeting.values[process.rank] = value
        meeting.is_broken |= self.is_broken
        if len(meeting.values) == len(ranks):
            latency = process.machine.cluster.wire.network.latency_seconds
            simulation.at(simulation.clock() + latency * num_hops, lambda: self._end((group, turn), ranks))
        return meeting

    def meet(
        self,
        process: RankHere,
        value: Any = None,
        ranks: Sequence[int] = (),
        num_hops: float = 0.0,
        group: Hashable = 0,
    ) -> dict[int, Any]:
        """Return the values of the ranks of a group, by rank. Collective. Raises RuntimeError if a peer is gone."""
        ranks = ranks or range(self.size)
        meeting = self.arrive(process, value, ranks, num_hops or math.log2(max(2, len(ranks))), group)
        self.wait(process, meeting, _COLLECTIVE_TIMEOUT)
        return meeting.values

    def wait(self, process: RankHere, meeting: Meeting, seconds: float) -> None:
        """Wait for a collective. Raises RuntimeError if it is not complete after ``seconds``, or a peer is gone."""
        simulation = process.machine.cluster.simulation
        assert process.page is not None
        simulation.wait([meeting, process.page], seconds)
        if meeting.is_complete:
            return
        if process.page.has_ended:
            simulation.sleep(simulation.random.uniform(0, _LOOK_SECONDS))
            raise GenerationEnded
        if meeting.is_broken:
            simulation.sleep(simulation.random.uniform(0, _BROKEN_SECONDS))
            raise RuntimeError("[pair.cc:534] Connection closed by peer [10.0.0.1]:46871")
        raise RuntimeError(f"Timed out waiting {1000 * seconds:.0f}ms for recv operation to complete")

    def _end(self, key: Hashable, ranks: Sequence[int]) -> None:
        parts = {self.members[rank].machine.part for rank in ranks if rank in self.members}
        if len(parts) > 1:  # messages are sent again
            simulation = self.worlds.cluster.simulation
            simulation.at(simulation.now + _RETRANSMIT_SECONDS, lambda: self._end(key, ranks))
        elif not self.is_broken:
            meeting = self.meetings.pop(key)
            meeting.is_complete = True
            self.num_done += 1
            self.worlds.check_progress(self)
            self.worlds.cluster.wire.notify(meeting)

    def lose(self, rank: RankHere) -> None:
        """A member ended: its kernel closes its connections, if there is power and a network."""
        if rank.machine.powered and not self.is_broken:
            self.is_broken = True
            for meeting in self.meetings.values():
                meeting.is_broken = True
                self.worlds.cluster.wire.notify(meeting)


class Awaited(Readable):
    """A key of the store for which ranks wait."""

    is_set = False

    @property
    def is_readable(self) -> bool:
        return self.is_set


class StoreClient:
    """The store of a world as one rank reaches it: a round trip, and time of the thread that serves all of them."""

    def __init__(self, world: World, process: RankHere) -> None:
        self._world, self._process = world, process
        self._content = world.store

    def _request(self, num_keys: int = 1) -> None:
        cluster = self._process.machine.cluster
        simulation, latency = cluster.simulation, cluster.wire.network.latency_seconds
        simulation.count("store requests")
        arrives = simulation.clock() + latency
        self._world.served = max(self._world.served, arrives) + _SERVE_SECONDS * num_keys
        simulation.sleep(self._world.served + latency - simulation.clock())

    def set(self, key: str, value: str) -> None:
        self._request()
        self._content[key] = value.encode()
        if waited := self._world.awaited.get(key):
            waited.is_set = True
            self._process.machine.cluster.wire.notify(waited)

    def get(self, key: str) -> bytes:
        self._request()
        return self._content[key]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        self._request(len(keys))
        return [self._content[key] for key in keys]

    def add(self, key: str, number: int) -> int:
        self._request()
        self._content[key] = str(int(self._content.get(key, b"0")) + number).encode()
        return int(self._content[key])

    def check(self, keys: Sequence[str]) -> bool:
        self._request(len(keys))
        return all(key in self._content for key in keys)

    def wait(self, keys: Sequence[str], timeout: timedelta) -> None:
        self._request()
        for key in keys:
            if key not in self._content:
                waited = self._world.awaited.setdefault(key, Awaited())
                self._process.machine.cluster.simulation.wait([waited], timeout.total_seconds())
            if key not in self._content:
                raise RuntimeError(f"wait timeout after {timeout} for {key}")


class Worlds:
    """The process groups of a job, and what must hold of them. ``step``: the last that was finished."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self._at: dict[tuple[str, str], World] = {}
        self.step = 0
        self._trains: dict[int, World] = {}
        self.newest = -1  # generation that has finished a collective
        self.first_progress: dict[int, float] = {}  # generation -> when
        cluster.on_rank_end.append(self._rank_ended)

    def join(self, process: RankHere) -> World:
        """Join the other ranks of this generation. Collective."""
        where = process.environment["MASTER_ADDR"], process.environment["MASTER_PORT"]
        world = self._at.setdefault(where, World(self, process.generation, process.world_size))
        if world.generation != process.generation or world.members.get(process.rank, process) is not process:
            raise SimulationError(f"rank {process.rank} of generation {process.generation} meets another at {where}")
        world.members[process.rank] = process
        host, port = where
        place = RankEnvironment(process.rank, process.world_size, 0, 1, (host, int(port)))
        ranks._agree(place, StoreClient(world, process), timedelta(seconds=600), "")  # type: ignore[arg-type]
        world.meet(process)
        return world

    def _rank_ended(self, rank: RankHere) -> None:
        if rank.code == 0:
            return
        for world in self._at.values():
            if world.members.get(rank.rank) is rank:
                world.lose(rank)

    def check_progress(self, world: World) -> None:
        """Raise SimulationError if ranks of two generations train at a time."""
        simulation = self.cluster.simulation
        if self._trains.setdefault(world.generation, world) is not world or world.generation < self.newest:
            self._fail(f"generation {world.generation} takes a step beside generation {self.newest}")
        if world.generation > self.newest:
            self.newest = world.generation
            self.first_progress[world.generation] = simulation.now
            for rank in self.cluster.ranks:
                left = rank.code is None and rank.generation < world.generation
                if left and rank.machine.powered and rank.machine.part == 0:
                    self._fail(
                        f"rank {rank.rank} of generation {rank.generation} is alive on machine {rank.machine.node}, "
                        f"and generation {world.generation} trains"
                    )

    def _fail(self, text: str) -> None:
        self.cluster.simulation.errors.append(text)


def guarded(process: RankHere, run: Callable[[], None]) -> None:
    """Run a script as ``launch.bootstrap`` does: an error becomes a record and exit code 1, or the process leaves."""
    keeps = bootstrap.KEEPS in process.environment
    try:
        run()
    except SimulationError:
        raise
    except GenerationEnded:
        process.leave()
    except Exception as error:
        bootstrap._record_exception(process.environment[bootstrap.FAILURE_FILE], error)
        if keeps and bootstrap.is_follow_up(error):
            process.leave()
        process.end(1)


def tracker_of(process: RankHere) -> CollectiveTracker:
    tracker = CollectiveTracker()
    tracker._page = process.page
    return tracker


def take_faults(process: RankHere) -> None:
    """Do what was injected into this rank: stop, hang, or raise."""
    if process.silent or process.hangs:
        process.machine.cluster.simulation.wait([], None)
    error = process.raises
    if error is not None:
        process.raises = None
        raise error


def light_script(worlds: Worlds, num_steps: int, step_seconds: float) -> Callable[[RankHere], None]:
    """Return a script that keeps nothing: its steps go on from the step that the launcher knows."""

    def script(process: RankHere) -> None:
        simulation = process.machine.cluster.simulation

        def run() -> None:
            simulation.sleep(_INIT_SECONDS)
            trail, world = tracker_of(process), worlds.join(process)
            step = max(0, int(process.environment["STEP"]))
            while step < num_steps:
                simulation.sleep(step_seconds * process.machine.slow * simulation.random.uniform(0.95, 1.05))
                take_faults(process)
                with trail.waiting(b"the ranks meet after a step"):
                    world.meet(process)
                step += 1
                trail.step_done(step)
                worlds.step = max(worlds.step, step)

        guarded(process, run)

    return script
