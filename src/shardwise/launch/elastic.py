"""``shardwise run --elastic``: a job that survives the loss of ranks.

The ranks of a *generation* run until all have succeeded or one is lost. A rank is lost if it was killed, raised an
error, gave no sign of life, entered no collective while all others waited in one, or held replicas that differ. The
launcher names that rank and stops the others at once. The next generation begins in fresh processes, forked from one
that has already imported torch (``launch.zygote``). The training state is in memory that outlives processes
(``train.recovery``), so the script continues after the last step that all ranks had finished.

Ranks run on *slots*: the devices of this machine, one per rank and spare. The slot of a lost rank is set aside. A spare
replaces it, or the job goes on with fewer ranks. If neither is possible, the slot gets a fresh process.

With several machines every launcher runs such generations, and one of them coordinates when they begin and end
(``launch.coordinator``). Standard library only, POSIX only.
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from shardwise.errors import LaunchError
from shardwise.launch import bootstrap, zygote
from shardwise.launch.coordinator import EXIT_ALONE, STOPPED
from shardwise.launch.hang_detector import HangDetector
from shardwise.launch.job import EXIT_INTERRUPTED, Job, print_line
from shardwise.launch.node_agent import GenerationStart, NodeAgent
from shardwise.launch.processes import Failure, KeptRank
from shardwise.launch.restart_policy import RestartPolicy, lost_rank
from shardwise.launch.zygote import Zygote
from shardwise.runtime.generation import GENERATION, Generation, plan_file
from shardwise.runtime.heartbeat_file import Heartbeat
from shardwise.runtime.private import check_own_folder, open_own

_LOCK = "lock"
_NEW_SECONDS = 3600.0  # after which an unlocked new folder is a leftover


@dataclass(slots=True)
class GenerationRunner:
    """Runs the ranks of one machine, generation after generation. ``environment``: returns the variables that all ranks
    share; ``make_job``: creates a job from a scratch folder and its ranks."""

    course: RestartPolicy
    num_machines: int
    command: Sequence[str]
    environment: Callable[[GenerationStart], dict[str, str]]
    make_job: Callable[[str, range], Job]
    scratch: str
    memory: str
    zygote: Zygote | None = None
    locks: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)  # of recreated memory folders
    planned: set[int] = field(default_factory=set)  # numbers of ranks
    kept: dict[int, KeptRank] = field(default_factory=dict)  # by slot: processes for the next generation

    def run_alone(self, master: Callable[[], tuple[str, int]]) -> int:
        """Run a job on this machine alone and return its exit code. ``master``: returns address and port of rank 0."""
        course, suspect, number = self.course, False, 0
        slots = list(range(course.num_ranks))
        spares = list(range(course.num_ranks, course.num_ranks + course.settings.spares))
        while True:
            begin = GenerationStart(number, suspect, 0, len(slots), slots, len(spares), master(), course.step)
            code, cause, absent, step = self._run_generation(begin)
            course.reach(step)
            if cause is None:
                return code
            lost, number = lost_rank(cause, absent), number + 1
            if why := course.why_end(by_the_script=bool(lost.traceback) and not lost.differs):
                print_line(why)
                return code
            self._end_kept([slots[lost.rank]])
            slots, spares, how = course.replaced(slots, spares, slots[lost.rank], len(slots))
            suspect = lost.differs
            print_line(f"rank {lost.rank} {lost.describe()}{course.after_step}; generation {number} goes on {how}")

    def take_part(self, member: NodeAgent) -> int:
        """Run this machine's part of a job and return the exit code of the job."""
        number, code = -1, 0  # of the latest generation that had ranks here
        while True:
            begin = member.wait()
            if begin == 0 and code and number == member.number:
                print_line(f"the job ended with exit code 0, and ranks of machine {member.node} did not")
                return EXIT_ALONE
            if isinstance(begin, int):
                return begin
            number = begin.number
            code, cause, absent, step = self._run_generation(begin, member)
            member.report(code, cause, absent, step)

    def _run_generation(
        self, begin: GenerationStart, member: NodeAgent | None = None
    ) -> tuple[int, Failure | None, list[int], int]:
        """Run one generation. Return (exit code, the failure that ended it, ranks that were in no collective when they
        were stopped, last finished step). The failure is None if all ranks succeeded or the user interrupted. The code
        is 0 only if every rank's is."""
        self._restore_memory()
        generation = Generation(begin.number, self.memory, begin.suspect, num_machines=self.num_machines)
        ranks = range(begin.first, begin.first + len(begin.slots))
        shared = {**self.environment(begin), GENERATION: generation.to_text()}
        job = self.make_job(tempfile.mkdtemp(prefix="generation-", dir=self.scratch), ranks)
        job.spawn, job.abandons, job.keeps = self._living_zygote(shared).spawn, True, self.course.settings.keeps
        job.halt = None if member is None else member.is_stopped
        watch = HangDetector(self.course.settings.silent_seconds, self.course.settings.idle_seconds)
        reached = begin.step

        def look(pages: dict[int, Heartbeat]) -> tuple[int, str] | None:
            nonlocal reached
            step = max((seen.step for seen in pages.values()), default=-1)
            if step > reached:
                reached = step
                if member is not None:
                    member.station.step = step
                if ranks.start == 0:
                    self._plan_ahead(generation, begin, shared)
            return watch(pages)

        job.watch = look
        try:
            self._start_ranks(job, begin, shared)
            code = job.run()
            pages = {rank.number: rank.heartbeat for rank in job.ranks}
            failed = {rank.number for rank in job.ranks if rank.failure is not None and rank.failure.error}
            stopped = job.stopped if member is None else job.ranks
            absent = [rank.number for rank in stopped if rank.number not in failed and not pages[rank.number].waits]
            if job.interrupted:  # perhaps while the other ranks were being stopped
                return EXIT_INTERRUPTED, None, [], begin.step
            if code == 0 and any(rank.process.returncode != 0 for rank in job.ranks):
                code = STOPPED
            steps = [rank.page.read().step for rank in job.ranks]
            for rank in [rank for rank in job.ranks if rank.is_ready and max(steps) >= 0]:  # see `Job._may_keep`
                local_rank = rank.number - begin.first
                self.kept[begin.slots[local_rank]] = job.release(rank, local_rank)
            return code, job.cause, absent, max(begin.step, *steps)
        finally:
            job.kill()

    def _start_ranks(self, job: Job, begin: GenerationStart, shared: dict[str, str]) -> None:
        """Start the ranks of a generation: in processes of the last one, as far as there are some, or in fresh ones."""
        self._end_kept([slot for slot in self.kept if slot not in begin.slots or slot == begin.lost])
        num_kept = 0
        for local_rank, slot in enumerate(begin.slots):
            rank, environment = begin.first + local_rank, {**shared, "LOCAL_RANK": str(local_rank)}
            kept = self.kept.get(slot)
            if kept is not None and kept.can_be(local_rank):
                job.adopt(self.kept.pop(slot), rank, environment)
                num_kept += 1
            else:
                self._end_kept([slot])
                job.start(self.command, rank, environment)
        if num_kept:
            print_line(f"generation {begin.number} has {num_kept} of {len(begin.slots)} processes of the last one")

    def _end_kept(self, slots: Iterable[int]) -> None:
        for slot in [slot for slot in slots if slot in self.kept]:
            self.kept.pop(slot).end()

    def _restore_memory(self) -> None:
        """Recreate the folder for states if it was removed (systemd does so at logout): the job then still runs."""
        try:
            if not os.path.lexists(self.memory):
                os.makedirs(self.memory, mode=0o700)
                self.locks.enter_context(_locked(self.memory))
                print_line(f"{self.memory} was removed: steps that were kept there are lost")
            check_own_folder(self.memory)
        except OSError as error:
            what = f"the folder for training states is gone: {error}"
            raise LaunchError(what, fix="restart the job: it continues from its newest checkpoint") from error

    def _plan_ahead(self, generation: Generation, begin: GenerationStart, shared: dict[str, str]) -> None:
        """Compute ahead the plan for the next loss, if the script uses ``sw.planned``: without one rank on a single
        machine, else without a machine that has as many ranks as this one."""
        now = os.path.join(self.memory, plan_file(begin.num_ranks, 0))
        lost = 1 if self.num_machines == 1 else len(begin.slots)
        size = begin.num_ranks - lost
        if size in self.planned or size < self.course.fewest or begin.num_spares or not os.path.exists(now):
            return
        self.planned.add(size)
        if os.path.exists(os.path.join(self.memory, plan_file(size, 0))):
            return
        rehearsal = replace(generation, rehearses=size).to_text()
        record = os.path.join(self.scratch, f"rehearsal-{size}.json")
        names = {GENERATION: rehearsal, "RANK": "0", "LOCAL_RANK": "0", bootstrap.FAILURE_FILE: record}
        sizes = {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(min(size, len(begin.slots)))}
        nowhere = os.open(os.devnull, os.O_WRONLY)
        with contextlib.suppress(OSError):
            self._living_zygote(shared).spawn(self.command, {**shared, **sizes, **names}, nowhere, nowhere)
        os.close(nowhere)

    def _living_zygote(self, environment: dict[str, str]) -> Zygote:
        if self.zygote is None or not self.zygote.alive:  # if it was killed, all ranks ended with it
            if self.zygote is not None:
                self.zygote.close()
            self.zygote = Zygote(environment, (*zygote.PRELOADED, *self.course.settings.preload))
        return self.zygote

    def close(self) -> None:
        self._end_kept([*self.kept])
        if self.zygote is not None:
            self.zygote.close()
        self.locks.close()


@contextlib.contextmanager
def _locked(folder: str) -> Iterator[None]:
    """Lock a launcher's folder for as long as the launcher lives."""
    check_own_folder(folder)
    with open(open_own(os.path.join(folder, _LOCK), os.O_RDWR | os.O_CREAT), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def folder_of_launcher(place: str, kind: str) -> Iterator[str]:
    """Create a folder ``shardwise-KIND-...`` in a place shared with other users. Folders of this user's killed
    launchers are deleted: a running launcher holds the lock of its own."""
    for left in glob.glob(os.path.join(place, f"shardwise-{kind}-*")):
        with contextlib.suppress(OSError):
            check_own_folder(left)
            with open(open_own(os.path.join(left, _LOCK))) as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(left, ignore_errors=True)
    for left in glob.glob(os.path.join(place, f"shardwise-new-{kind}-*")):  # killed before it had locked its own
        with contextlib.suppress(OSError):
            check_own_folder(left)
            if time.time() > os.lstat(left).st_mtime + _NEW_SECONDS:
                shutil.rmtree(left, ignore_errors=True)
    folder = tempfile.mkdtemp(prefix=f"shardwise-new-{kind}-", dir=place)
    try:
        with _locked(folder):
            locked = os.path.join(place, os.path.basename(folder).replace("-new", "", 1))
            os.rename(folder, locked)
            folder = locked
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def folder_in_memory(place: str = "/dev/shm") -> contextlib.AbstractContextManager[str]:
    """Create a folder in shared memory, which outlives processes; in the temporary folder if there is none."""
    place = place if os.path.isdir(place) and os.access(place, os.W_OK) else tempfile.gettempdir()
    return folder_of_launcher(place, "memory")
