"""``shardwise run --elastic``: a job that outlives its ranks.

The ranks of a *generation* run until all have ended well or one is lost: it was killed, raised an error, gave no sign
of life, came to no collective while all others waited in one, or held copies that differ. That rank is named, the
others are stopped at once, and the next generation begins in fresh processes, forked from one that has imported torch
already (``launch.zygote``). The state of training is in memory that outlives processes (``train.recovery``), so the
script goes on with the step after the last one that all ranks had finished.

Ranks stand on *slots*: the devices of this machine, as many as there are ranks and spares. The slot of a lost rank is
set aside; a spare takes its place, or the job goes on with fewer ranks. Where neither is possible the slot gets a fresh
process. Standard library only, POSIX only.
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import itertools
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from shardwise.errors import LaunchError, problem
from shardwise.launch import bootstrap
from shardwise.launch.job import Job, say
from shardwise.launch.processes import Failure
from shardwise.launch.watching import Watch
from shardwise.launch.zygote import Zygote
from shardwise.runtime.generation import GENERATION, Generation, plan_file
from shardwise.runtime.pages import Seen

_PREFIX, _LOCK = "shardwise-memory-", "lock"
_SAME_ERROR = 2  # times that an exception of the script may end a generation without a step in between


@dataclass(frozen=True, slots=True)
class Elastic:
    """``min_ranks``: fewer than these never run (None: as many as at the start); ``spares``: slots that take the places
    of lost ones; ``max_failures``: losses without a step in between after which the job ends; ``silent_seconds``: what
    a rank may go without a sign of life while others give some; ``idle_seconds``: what it may stay out of the
    collective, or the exchange of stages, in which all others wait (None: as long as that waits); ``preload``:
    further modules that are imported once for all ranks."""

    min_ranks: int | None = None
    spares: int = 0
    max_failures: int = 10
    silent_seconds: float = 60.0
    idle_seconds: float | None = None
    preload: Sequence[str] = ()

    def check(self, num_ranks: int) -> None:
        """Raises LaunchError for numbers that cannot be."""
        if self.min_ranks is not None and not 1 <= self.min_ranks <= num_ranks:
            what = f"--min-ranks {self.min_ranks} is not from 1 to the {num_ranks} ranks that start"
            raise LaunchError(problem(what, fix="give the fewest ranks with which training should go on"))
        if self.spares < 0 or self.max_failures < 0:
            raise LaunchError(problem("there cannot be fewer than 0 spares or failures", fix="give a number from 0"))
        if self.silent_seconds <= 1 or (self.idle_seconds is not None and self.idle_seconds <= 0):
            what = "a rank gives signs of life twice a second: --silent-after must be more than 1, --idle-after than 0"
            raise LaunchError(problem(what, fix="leave them out, or give some seconds"))


@dataclass(slots=True)
class Agent:
    """``environment``: of the ranks on some slots, all but what a generation adds; ``make_job``: given a folder to work
    in; ``caught``: signals that were sent to the launcher."""

    settings: Elastic
    num_ranks: int
    command: Sequence[str]
    environment: Callable[[Sequence[int]], dict[str, str]]
    make_job: Callable[[str], Job]
    scratch: str
    memory: str
    caught: list[int]
    zygote: Zygote | None = None
    step: int = -1  # the last one of which a rank said that it was done
    num_spares: int = 0  # that are left
    planned: set[int] = field(default_factory=set)  # numbers of ranks
    num_failures: int = 0  # since the last step
    num_errors: int = 0  # of the script, since the last step

    def run(self) -> int:
        """The exit code of the job."""
        slots = list(range(self.num_ranks))
        spares = list(range(self.num_ranks, self.num_ranks + self.settings.spares))
        self.num_spares, suspect = len(spares), False
        for number in itertools.count():
            code, lost = self._run_generation(Generation(number, self.memory, suspect), slots)
            if lost is None or not self._may_go_on(lost):
                return code
            slots, spares, how = self._next(slots, lost.rank, spares)
            self.num_spares, suspect = len(spares), lost.differs
            step = f" after step {self.step}" if self.step >= 0 else ""
            say(f"rank {lost.rank} {lost.describe()}{step}; generation {number + 1} goes on {how}")
        raise AssertionError("the count of generations has no end")

    def _run_generation(self, generation: Generation, slots: Sequence[int]) -> tuple[int, Failure | None]:
        """(exit code, the rank that was lost; None where all ended well, or somebody interrupts)."""
        shared = {**self.environment(slots), GENERATION: generation.to_text()}
        job = self.make_job(tempfile.mkdtemp(prefix="generation-", dir=self.scratch))
        job.spawn, job.abandons = self._living_zygote().spawn, True
        watch = Watch(self.settings.silent_seconds, self.settings.idle_seconds)

        def look(pages: dict[int, Seen]) -> tuple[int, str] | None:
            if any(seen.step > self.step for seen in pages.values()):
                self._plan_ahead(generation, slots)
            return watch(pages)

        job.watch = look
        try:
            for rank in range(len(slots)):
                job.start(self.command, rank, {**shared, "LOCAL_RANK": str(rank)})
            code = job.run()
            return code, None if job.cause is None else culprit(job, job.cause)
        finally:
            step = max((rank.page.read().step for rank in job.ranks), default=-1)
            if step > self.step:
                self.step, self.num_failures, self.num_errors = step, 0, 0
            job.kill()

    def _plan_ahead(self, generation: Generation, slots: Sequence[int]) -> None:
        """Have the plan made that the next loss will ask for, if the script makes its plans by ``sw.planned``."""
        size = len(slots) - 1
        now, later = (os.path.join(self.memory, plan_file(count, 0)) for count in (len(slots), size))
        if size in self.planned or size < self._fewest or self.num_spares or not os.path.exists(now):
            return
        self.planned.add(size)
        if os.path.exists(later):
            return
        rehearsal = replace(generation, rehearses=size).to_text()
        record = os.path.join(self.scratch, f"rehearsal-{size}.json")
        names = {GENERATION: rehearsal, "RANK": "0", "LOCAL_RANK": "0", bootstrap.FAILURE_FILE: record}
        nowhere = os.open(os.devnull, os.O_WRONLY)
        with contextlib.suppress(OSError):
            self._living_zygote().spawn(self.command, {**self.environment(slots[:-1]), **names}, nowhere, nowhere)
        os.close(nowhere)

    @property
    def _fewest(self) -> int:
        return self.num_ranks if self.settings.min_ranks is None else self.settings.min_ranks

    def _living_zygote(self) -> Zygote:
        if self.zygote is None or not self.zygote.alive:  # if somebody killed it, all ranks ended with it
            self.close()
            self.zygote = Zygote(self.environment(range(self.num_ranks)), self.settings.preload)
        return self.zygote

    def close(self) -> None:
        if self.zygote is not None:
            self.zygote.close()

    def _may_go_on(self, lost: Failure) -> bool:
        """Whether another generation is worth it; if not, a line says why."""
        self.num_failures += 1
        self.num_errors += bool(lost.traceback) and not lost.differs
        if self.num_errors >= _SAME_ERROR:
            say("the script failed twice without a step in between: another generation would fail as well")
            return False
        if self.num_failures > self.settings.max_failures:
            say(f"{self.num_failures} losses without a step in between: --max-failures {self.settings.max_failures}")
            return False
        return True

    def _next(self, slots: list[int], lost: int, spares: list[int]) -> tuple[list[int], list[int], str]:
        """(slots of the next generation, spares that are left, how it goes on)."""
        slot = slots[lost]
        if spares:
            chosen, *rest = spares
            how = f"with slot {chosen} in place of slot {slot}"
            return [chosen if one == slot else one for one in slots], rest, how
        if len(slots) > self._fewest:
            left = [one for one in slots if one != slot]
            return left, spares, f"with {len(left)} ranks, without slot {slot}"
        return slots, spares, f"with a fresh process on slot {slot}"


def culprit(job: Job, cause: Failure) -> Failure:
    """The rank that is lost: the one that failed first, or the one that it waited for."""
    if cause.differs and cause.blames:
        return replace(cause, rank=cause.blames[0])
    if not cause.waited_in_vain:
        return cause
    absent = [rank.number for rank in job.stopped if not rank.page.read().waits]
    named = [number for number in absent if number in cause.blames]  # what no page tells of is waited for, too
    lost = next(iter(named or absent or cause.blames), None)
    if lost is None:
        return cause
    return replace(cause, rank=lost, killed_by="", traceback="", hangs="did not come to a collective of the others")


@contextlib.contextmanager
def folder_in_memory(place: str = "/dev/shm") -> Iterator[str]:
    """A folder whose files are in memory that outlives processes, where the system has such. Those that launchers left
    which were killed are deleted: whoever lives has locked its own."""
    place = place if os.path.isdir(place) and os.access(place, os.W_OK) else tempfile.gettempdir()
    for left in glob.glob(os.path.join(place, f"{_PREFIX}*")):
        with contextlib.suppress(OSError), open(os.path.join(left, _LOCK)) as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(left, ignore_errors=True)
    folder = tempfile.mkdtemp(prefix="shardwise-new-", dir=place)
    try:
        with open(os.path.join(folder, _LOCK), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            locked = os.path.join(place, _PREFIX + os.path.basename(folder).removeprefix("shardwise-new-"))
            os.rename(folder, locked)
            folder = locked
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


__all__ = ["Agent", "Elastic", "culprit", "folder_in_memory"]
