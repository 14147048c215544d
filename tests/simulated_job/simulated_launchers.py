"""A simulated job: launchers on machines, faults, and what must hold of every run."""

from __future__ import annotations

import re
import signal
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from shardwise.garbage_collector import with_rare_gc
from shardwise.launch.elastic import GenerationRunner
from shardwise.launch.job import Job
from shardwise.launch.node_agent import GenerationStart, NodeAgent
from shardwise.launch.restart_policy import ElasticConfig, RestartPolicy
from simulated_job.simulated_machines import Cluster, Machine, RankHere, Selector
from simulated_job.simulated_network import Network
from simulated_job.simulated_ranks import Worlds, light_script
from simulated_job.simulated_start import SimulatedStart, Start
from simulated_job.simulated_time import Process, Simulation, SimulationError
from simulated_job.simulated_training import SimulatedTraining, Training

_PORT = 29500
_GOES_ON = re.compile(r"(.*); generation (\d+) goes on")
_NAMES = re.compile(r"(?:^|; )((?:rank|machine) \d+)")
_SECRET = b"of the simulation"


@dataclass(frozen=True)
class Setting:
    """A job to simulate. ``standby``: machines beyond those of the job."""

    num_machines: int
    ranks_per_machine: int = 8
    standby: int = 0
    spares: int = 0
    min_ranks: int | None = None
    silent_seconds: float = 10.0
    idle_seconds: float | None = None
    keeps: bool = False
    num_steps: int = 10
    step_seconds: float = 1.0
    seed: int = 0
    until: float = 600.0
    network: Network = field(default_factory=Network)

    @property
    def num_ranks(self) -> int:
        return self.num_machines * self.ranks_per_machine


class SimulatedJob:
    """``training``: what the ranks do; by default they take the setting's steps and keep nothing."""

    def __init__(self, setting: Setting, training: Training | Start | None = None) -> None:
        self.setting = setting
        self.simulation = Simulation(setting.seed)
        self.cluster = Cluster(
            self.simulation, setting.num_machines + setting.standby, setting.network, lambda rank: self.script(rank)
        )
        self.worlds = Worlds(self.cluster)
        self.training: SimulatedTraining | None = None
        if training is not None:
            kind: Any = SimulatedStart if isinstance(training, Start) else SimulatedTraining
            self.training = kind(self.worlds, training)
        self.num_steps = setting.num_steps if self.training is None else self.training.training.num_steps
        self.script = (
            light_script(self.worlds, setting.num_steps, setting.step_seconds)
            if self.training is None
            else self.training.script
        )
        self.machines = self.cluster.machines
        self.running = set[int]()  # machines with a launcher
        self.culprits: list[tuple[float, str]] = []  # injected faults: when, who

    # -- faults ------------------------------------------------------------------------------------------------------

    def rank(self, number: int) -> RankHere:
        """Return a rank that runs now."""
        return next(rank for rank in reversed(self.cluster.ranks) if rank.rank == number and rank.code is None)

    def _fault(self, culprit: str, what: str) -> None:
        self.culprits.append((self.simulation.now, culprit))
        self.simulation.say(f"fault: {culprit} {what}")

    def kill_rank(self, number: int) -> None:
        self._fault(f"rank {number}", "is killed")
        self.rank(number).end(-signal.SIGKILL)

    def stop_rank(self, number: int) -> None:
        self._fault(f"rank {number}", "is stopped")
        self.rank(number).silent = True

    def hang_rank(self, number: int) -> None:
        self._fault(f"rank {number}", "hangs")
        self.rank(number).hangs = True

    def fail_rank(self, number: int, error: Exception) -> None:
        self._fault(f"rank {number}", f"raises {type(error).__name__}")
        self.rank(number).raises = error

    def end_machine(self, node: int, *, by_power: bool = True) -> None:
        """Let a machine lose its power, or kill its launcher, whose ranks the kernel ends."""
        self._fault(f"machine {node}", "loses its power" if by_power else "loses its launcher")
        machine = self.machines[node]
        machine.powered = not by_power
        machine.end_launcher()

    def divide(self, nodes: Sequence[int]) -> None:
        """Cut machines from the network of the others."""
        for node in nodes:
            self._fault(f"machine {node}", "is cut from the network")
            self.machines[node].part = 1
        for node in {*range(len(self.machines))} - {*nodes}:  # for the others these are lost
            self.culprits.append((self.simulation.now, f"machine {node}"))

    def unite(self) -> None:
        self.simulation.say("the network is whole again")
        for machine in self.machines:
            machine.part = 0

    def when_step(self, step: int, act: Callable[[], None], seconds: float = 0.3) -> None:
        """Do something ``seconds`` after the ranks have finished a step."""

        def look() -> None:
            if self.worlds.step >= step:
                self.simulation.at(self.simulation.now + seconds, act)
            else:
                self.simulation.at(self.simulation.now + 0.05, look)

        self.simulation.at(0.0, look)

    # -- the run -----------------------------------------------------------------------------------------------------

    def start_machine(self, node: int, seconds: float = 0.0) -> None:
        machine = self.machines[node]
        machine.powered, machine.code = True, None
        machine.launcher = Process(machine, f"launcher {node}")
        machine.launcher.at_end.append(lambda: self.running.discard(node))
        self.running.add(node)
        self.simulation.start(machine.launcher, lambda: self._launch(machine), seconds)

    def run(self, starts_within: float = 0.5) -> SimulatedJob:
        """Start all launchers within some seconds, and run until each has ended."""
        replaced = () if self.training is None else self.training.replaced()
        with with_rare_gc(), self.cluster.in_place(replaced):
            try:
                for machine in self.machines:
                    self.start_machine(machine.node, self.simulation.random.uniform(0, starts_within))
                self.simulation.run(self.setting.until, self.is_over)
                self.check()
            finally:
                self.simulation.close()
        return self

    def is_over(self) -> bool:
        return not self.running

    def _launch(self, machine: Machine) -> None:
        """Do what ``launcher.launch`` does for an elastic job on several machines."""
        setting, process = self.setting, machine.launcher
        settings = ElasticConfig(
            min_ranks=setting.min_ranks, spares=setting.spares, silent_seconds=setting.silent_seconds,
            idle_seconds=setting.idle_seconds, wait_seconds=120.0, keeps=setting.keeps,
        )  # fmt: skip
        course, caught = RestartPolicy(settings, setting.num_ranks), list[int]()

        def make_job(folder: str, ranks: range) -> Job:
            return Job(folder, {}, selector=Selector(self.cluster), caught=caught)  # type: ignore[arg-type]

        runner = GenerationRunner(
            course, setting.num_machines, ["train.py"], self._environment, make_job, f"/scratch/{machine.node}",
            f"/memory/{machine.node}",
        )  # fmt: skip
        slots, home = list(range(setting.ranks_per_machine)), (self.machines[0].address, _PORT)
        member = NodeAgent(course, machine.node, setting.num_machines, home, "", slots, _SECRET, caught)
        try:
            machine.code = runner.take_part(member)
        finally:
            member.close()
            runner.close()
        self.simulation.say(f"machine {machine.node} ends with exit code {machine.code}")
        assert process is not None
        self.simulation.kill(process)

    def _environment(self, begin: GenerationStart) -> dict[str, str]:
        machine = self.cluster.here
        for rank in machine.processes.values():
            if isinstance(rank, RankHere):
                raise SimulationError(
                    f"rank {rank.rank} still runs on machine {machine.node} as generation {begin.number} begins"
                )
        return {
            "NUMBER": str(begin.number), "SUSPECT": str(begin.suspect), "STEP": str(begin.step),
            "WORLD_SIZE": str(begin.num_ranks), "MASTER_ADDR": begin.master[0], "MASTER_PORT": str(begin.master[1]),
        }  # fmt: skip

    # -- what came of it ---------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise SimulationError unless each generation followed on a fault, and the rank or machine at fault was named
        by every launcher that was there."""
        named: dict[int, str] = {}
        for when, text in self.simulation.trace:
            who, _, rest = text.partition(": ")
            found = _GOES_ON.match(rest)
            if not who.startswith("machine") or found is None:
                continue
            number, subject = int(found[2]), found[1]
            if named.setdefault(number, subject) != subject:
                raise SimulationError(f"generation {number} begins for two reasons: {subject!r} and {named[number]!r}")
            culprits = [culprit for fault, culprit in self.culprits if fault <= when]
            for name in _NAMES.findall(subject):
                if name not in culprits:
                    raise SimulationError(f"{subject!r} names {name}; at fault were {culprits}")
        if sorted(named) != list(range(1, len(named) + 1)):
            raise SimulationError(f"the generations are {sorted(named)}")
        if self.worlds.step < self.num_steps and 0 in self.codes():
            raise SimulationError(f"exit code 0 after {self.worlds.step} of {self.num_steps} steps")
        if self.training is not None:
            self.training.check_saves()

    def codes(self) -> list[int | None]:
        """Return the exit codes of the launchers that were not killed."""
        return [machine.code for machine in self.machines if machine.code is not None]

    def seconds_to_go_on(self) -> list[float]:
        """Return, for each generation behind the first, seconds from the last fault before it to its first step."""
        return [
            began - max(when for when, _ in self.culprits if when < began)
            for number, began in sorted(self.worlds.first_progress.items())
            if number
        ]

    def counts_of_launchers(self) -> list[Counter[str]]:
        return [machine.launcher.counts for machine in self.machines if machine.launcher is not None]
