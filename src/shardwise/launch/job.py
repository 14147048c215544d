"""Supervision of the ranks of one machine: forward their output in whole lines, find the first failure, stop the rest.

After a failure the user must see the first failing rank's own traceback, without waiting for a timeout. Ranks therefore
do not print their tracebacks: ``bootstrap`` writes a record with a time stamp. The launcher looks for records whenever
output arrives. After the first one it holds back the errors of other ranks, which are consequences (such as a reset
connection). The remaining ranks get SIGTERM, and SIGKILL after a grace period. If the first failure is a timeout, they
are first asked for their stacks.

Every rank leads its own process group. So a Ctrl-C in the terminal reaches only the launcher, which forwards it once,
and child processes of a rank (data loader workers) end with it. Standard library only, POSIX only.
"""

from __future__ import annotations

import contextlib
import io
import os
import selectors
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import IO, TextIO

from shardwise.errors import LaunchError
from shardwise.launch import bootstrap
from shardwise.launch.hang_detector import format_positions, format_waits, name_all_ranks
from shardwise.launch.processes import Failure, KeptRank, Pipe, RankProcess, Spawn, start_process
from shardwise.runtime.heartbeat_file import PAGE, Heartbeat, HeartbeatFile

EXIT_INTERRUPTED = bootstrap.EXIT_INTERRUPTED
EXIT_BROKEN_PIPE = 128 + signal.SIGPIPE  # the reader of the output has closed it
EXIT_LEFT_BEHIND = 1  # ranks still ran after `exit_grace_seconds`

_POLL_SECONDS = 0.05
_SETTLE_SECONDS = 1.0  # how long a lost connection waits for the failure that explains it
_SETTLE_AFAR_SECONDS = 5.0  # the same, if that failure may be on another machine
_OWN_EXIT_SECONDS = 1.0  # time for a rank that has recorded its failure to exit by itself
_DRAIN_SECONDS = 1.0  # for output that is still on its way when a process has ended
_INTERRUPT_SECONDS = 3.0  # time for the script's own `except KeyboardInterrupt` and `finally`
_STACK_SECONDS = 0.3  # for a rank to write its stack
_LEAVE = 0  # in place of a signal: to leave the generation, where processes are kept
_BUSY_SECONDS = 2.0  # for a rank that is in no collective to come to one; then those that wait for it are freed
_LEAVE_SECONDS = 4.0  # for all ranks to leave
_NOTICE_SECONDS = 30.0  # how long ranks may run after another's exit code 0 before a notice is printed


@dataclass(frozen=True, slots=True)
class JobSettings:
    """What becomes of the output of ranks, and how long ranks may take to end.

    Args:
        log_dir: a folder where ``rank-3.log`` keeps the complete output of rank 3.
        tag: whether to prefix every line with ``[rank 3] ``.
        show_all: whether to print the stdout of all ranks.
        grace_seconds: time between SIGTERM and SIGKILL.
        exit_grace_seconds: how long ranks may still run after another exited with 0; by default without limit. A notice
            names them after half a minute.
    """

    log_dir: str | os.PathLike[str] | None = None
    tag: bool = False
    show_all: bool = False
    grace_seconds: float = 5.0
    exit_grace_seconds: float | None = None


@dataclass(slots=True)
class Job:
    """The ranks of this machine. A single thread forwards their output and checks the processes."""

    scratch: str
    logs: dict[int, IO[bytes]]
    settings: JobSettings = JobSettings()
    abandons: bool = False  # whether to kill the other ranks at once after a failure: their state is kept elsewhere
    keeps: bool = False  # whether ranks may leave after a failure instead, so that their processes run on
    spawn: Spawn = start_process
    halt: Callable[[], bool] | None = None  # whether ranks of other machines have ended, so that these must end too
    watch: Callable[[dict[int, Heartbeat]], tuple[int, str] | None] | None = None  # pages -> (a rank that hangs, how)
    ranks: list[RankProcess] = field(default_factory=list)
    selector: selectors.BaseSelector = field(default_factory=selectors.DefaultSelector)
    caught: list[int] = field(default_factory=list)  # signals sent to the launcher
    failing: float | None = None  # when the first failure was noticed (monotonic seconds)
    cause: Failure | None = None  # the failure that ends the job
    shown: bool = False  # whether the cause's traceback has been
    hidden: list[tuple[int, bytes]] = field(default_factory=list)  # stderr since the first failure
    # Signals to send: when, which, to whom
    schedule: list[tuple[float, int, list[RankProcess]]] = field(default_factory=list)
    exit_code: int | None = None  # None until it is decided
    first_exit: float | None = None  # when a rank was first seen to have ended with 0 before others (monotonic seconds)
    noticed: bool = False  # whether the notice was printed
    interrupted: bool = False  # whether the launcher got a signal
    stopped: list[RankProcess] = field(default_factory=list)  # ranks that are asked for their stacks, then stopped

    def start(self, command: Sequence[str], number: int, environment: dict[str, str]) -> None:
        """Start one rank, with SIGINT blocked until ``bootstrap`` is ready for it."""
        failure_file, page, names = self._files_of(number)
        read_out, write_out = os.pipe()
        read_err, write_err = os.pipe()
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            heartbeat = HeartbeatFile.create(page)
            process = self.spawn(command, {**environment, **names}, write_out, write_err)
        except OSError as error:
            os.close(read_out)
            os.close(read_err)
            what = f"cannot start rank {number}: {error}"
            raise LaunchError(what, fix="start fewer ranks, or raise the limits on processes and memory") from error
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            os.close(write_out)
            os.close(write_err)
        rank = RankProcess(number, process, failure_file, heartbeat)
        self.ranks.append(rank)
        for descriptor, is_stdout in ((read_out, True), (read_err, False)):
            source = io.FileIO(descriptor)
            self.selector.register(source, selectors.EVENT_READ, Pipe(rank, source, is_stdout))

    def adopt(self, kept: KeptRank, number: int, environment: dict[str, str]) -> None:
        """Begin one rank in the process of a rank of the last generation. Raises OSError."""
        failure_file, page, names = self._files_of(number)
        rank = RankProcess(number, kept.rank.process, failure_file, HeartbeatFile.create(page), len(kept.pipes))
        kept.begin({**environment, **names})
        self.ranks.append(rank)
        for pipe in kept.pipes:
            pipe.rank = rank
            self.selector.register(pipe.source, selectors.EVENT_READ, pipe)

    def release(self, rank: RankProcess, local_rank: int) -> KeptRank:
        """Take a rank that is ready for the next generation out of this job."""
        self.ranks.remove(rank)
        pipes = [key.data for key in self.selector.get_map().values() if key.data.rank is rank]
        for pipe in pipes:
            self.selector.unregister(pipe.source)
        return KeptRank(rank, local_rank, pipes)

    def _files_of(self, number: int) -> tuple[str, str, dict[str, str]]:
        """Return (failure file, page, the environment variables of a rank alone)."""
        failure_file, page = (os.path.join(self.scratch, f"rank-{number}.{kind}") for kind in ("json", "page"))
        names = {"RANK": str(number), bootstrap.FAILURE_FILE: failure_file, PAGE: page}
        return failure_file, page, {**names, bootstrap.KEEPS: "1"} if self.keeps else names

    def run(self) -> int:
        try:
            while [rank for rank in self.ranks if not (rank.ended() or rank.is_ready)] or self._waits_for_others:
                self._turn()
            deadline = time.monotonic() + _DRAIN_SECONDS
            while self._is_open and time.monotonic() < deadline:
                self._turn()
            while time.monotonic() < deadline and (ready := self.selector.select(0)):  # of processes that run on
                for key, _ in ready:
                    self._read(key.data)
            self._judge(settled=True)
            if self.cause is not None:
                self._show_cause()
                self._summarize(self.cause)
            elif self.stopped:
                self._summarize_left_behind()
            return self.exit_code or 0
        except BrokenPipeError:
            # The reader of our output has gone (`| head`). Python would complain once more when it flushes stdout at
            # exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return EXIT_BROKEN_PIPE

    def kill(self) -> None:
        """Kill all ranks and close their pipes."""
        for rank in self.ranks:
            rank.signal(signal.SIGKILL)
        for rank in self.ranks:
            rank.process.wait()
            rank.ended()
            rank.page.close()
        for key in list(self.selector.get_map().values()):
            key.data.source.close()
        self.selector.close()

    def _turn(self) -> None:
        for key, _ in self.selector.select(_POLL_SECONDS):
            self._read(key.data)
        if self.caught:
            self._interrupt()
        if self.halt is not None and self.exit_code is None and self.halt():
            self.exit_code, self.schedule = 0, self._ending(time.monotonic(), self.ranks)
        if self.watch is not None and self.failing is None and self.exit_code is None:
            self._look_for_hangs(self.watch)
        self._judge(settled=self._is_settled)
        if self.exit_code is None and self.failing is None:
            self._look_for_left_behind()
        while self.schedule and self.schedule[0][0] <= time.monotonic():
            _, signum, ranks = self.schedule.pop(0)
            for rank in ranks:
                if signum == _LEAVE:
                    rank.leave()
                elif not rank.is_ready:
                    rank.signal(signum, whole_group=signum in (signal.SIGTERM, signal.SIGKILL))

    # ------------------------------------------------------------------------------------------------ failures

    def _judge(self, settled: bool) -> None:
        """Decide which failure ends the job: the earliest. A follow-up failure counts only once ``settled``."""
        if self.exit_code is not None:
            if self.cause is not None and not self.shown:
                self._show_cause_when_complete(self.cause)
            return
        for rank in self.ranks:
            rank.ended()  # a killed rank leaves only its exit code
        failures = [failure for rank in self.ranks if (failure := rank.look_for_failure()) is not None]
        if not failures:
            return
        if self.failing is None:
            self.failing = time.monotonic()
        cause = min(failures, key=lambda failure: (failure.follow_up, failure.seconds))
        if cause.follow_up and not settled and (self.halt or not all(rank.ended() for rank in self.ranks)):
            return
        self.cause, self.exit_code = cause, cause.exit_code
        others = [rank for rank in self.ranks if rank.failure is None]
        failed = [rank for rank in self.ranks if rank.failure is not None]
        if cause.waited_in_vain:
            self.stopped = [rank for rank in others if not rank.ended()]
        self._stop(others, failed)

    @property
    def _is_open(self) -> bool:
        """Return whether output of ranks that have ended may be on its way."""
        return any(not key.data.rank.is_ready for key in self.selector.get_map().values())

    @property
    def _is_settled(self) -> bool:
        seconds = _SETTLE_SECONDS if self.halt is None else _SETTLE_AFAR_SECONDS
        return self.failing is not None and time.monotonic() > self.failing + seconds

    @property
    def _waits_for_others(self) -> bool:
        """Return whether to wait for a failure on another machine: all ranks here ended because they lost peers."""
        if self.halt is None:
            return False
        self._judge(settled=self._is_settled)
        return self.failing is not None and self.exit_code is None

    def _stop(self, others: list[RankProcess], failed: list[RankProcess]) -> None:
        """Schedule the signals that end all ranks; those in ``self.stopped`` are first asked for their stacks."""
        now = time.monotonic()
        after = now + (_STACK_SECONDS if self.stopped else 0)
        self.schedule = [
            (now, bootstrap.STACK_SIGNAL, self.stopped),
            (after, signal.SIGTERM, others),
            (now + _OWN_EXIT_SECONDS, signal.SIGTERM, failed),
            (after + (0 if self.abandons else self.settings.grace_seconds), signal.SIGKILL, self.ranks),
        ]
        if self._may_keep:
            leaving = [rank for rank in failed if rank.failure is not None and rank.failure.is_of_others]
            failed = [rank for rank in failed if rank not in leaving]
            ends_itself = (now + _OWN_EXIT_SECONDS, signal.SIGTERM, failed)
            leave, *kill = self._ending(after, [*others, *leaving])
            self.schedule = [self.schedule[0], leave, ends_itself, *kill]

    def _ending(self, when: float, others: list[RankProcess]) -> list[tuple[float, int, list[RankProcess]]]:
        """Return the schedule that ends the ranks of an elastic job. A rank that waits for another leaves when that one
        has closed its connections: so first those are killed that compute and do not come to a collective."""
        if not self._may_keep:
            return [(when, signal.SIGKILL, self.ranks)]
        busy = [rank for rank in others if not rank.page.read().waits]
        return [
            (when, _LEAVE, others),
            (when + _BUSY_SECONDS, signal.SIGKILL, busy),
            (when + _LEAVE_SECONDS, signal.SIGKILL, self.ranks),
        ]

    @property
    def _may_keep(self) -> bool:
        """Return whether processes may run the next generation. One that finished no step may have failed for what its
        processes kept."""
        return self.keeps and any(rank.page.read().step >= 0 for rank in self.ranks)

    def _look_for_hangs(self, watch: Callable[[dict[int, Heartbeat]], tuple[int, str] | None]) -> None:
        running = {rank.number: rank for rank in self.ranks if not rank.ended()}
        hanging = watch({number: rank.page.read() for number, rank in running.items()})
        if hanging is None:
            return
        number, hangs = hanging
        running[number].signal(bootstrap.STACK_SIGNAL, whole_group=False)
        time.sleep(_STACK_SECONDS)
        running[number].failure = Failure(number, time.time(), 128 + signal.SIGKILL, hangs=hangs)
        running[number].signal(signal.SIGKILL)

    def _look_for_left_behind(self) -> None:
        """Print a notice, or end the job, if ranks still run long after another exited with 0."""
        done = [rank.number for rank in self.ranks if rank.process.returncode == 0]
        running = [rank for rank in self.ranks if rank.process.returncode is None]
        if not done or not running:
            return
        now = time.monotonic()
        if self.first_exit is None:
            self.first_exit = now
        numbers, elapsed = [rank.number for rank in running], now - self.first_exit
        if self.settings.exit_grace_seconds is not None and elapsed >= self.settings.exit_grace_seconds:
            self.exit_code, self.stopped = EXIT_LEFT_BEHIND, running
            self._stop(running, [])
        elif elapsed >= _NOTICE_SECONDS and not self.noticed:
            self.noticed = True
            still = f"{name_all_ranks(numbers)} still run{'s' * (len(numbers) == 1)}"
            note = "a collective with a rank that has ended never completes; --exit-grace SECONDS stops such ranks"
            done_for = f"{name_all_ranks(done)} ended with exit code 0, {elapsed:.0f} seconds ago"
            print_line(f"{done_for}; {still}\n  note:   {note}")

    def _interrupt(self) -> None:
        """Forward a signal to the ranks; a second one kills them."""
        signum = self.caught[0]
        self.interrupted = True
        is_second = self.exit_code == EXIT_INTERRUPTED
        self.caught.clear()
        now = time.monotonic()
        if is_second or self.cause is not None:
            self.schedule = [(now, signal.SIGKILL, self.ranks)]
            return
        self.exit_code = EXIT_INTERRUPTED
        later = now + (_INTERRUPT_SECONDS if signum == signal.SIGINT else 0)
        self.schedule = [
            (now, signal.SIGINT if signum == signal.SIGINT else signal.SIGTERM, self.ranks),
            (later, signal.SIGTERM, self.ranks),
            (later + self.settings.grace_seconds, signal.SIGKILL, self.ranks),
        ]
        print_line(f"{signal.Signals(signum).name}: stopping {len(self.ranks)} ranks")

    def _show_cause_when_complete(self, cause: Failure) -> None:
        (rank,) = (rank for rank in self.ranks if rank.number == cause.rank)
        assert self.failing is not None
        if rank.open_pipes == 0 or time.monotonic() > self.failing + _SETTLE_SECONDS + _OWN_EXIT_SECONDS:
            self._show_cause()

    def _show_cause(self) -> None:
        if self.shown or self.cause is None:
            return
        self.shown = True
        number = self.cause.rank
        self._show(number, [line for rank, line in self.hidden if rank == number])
        self.hidden = [(rank, line) for rank, line in self.hidden if rank != number]
        self._show(number, self.cause.traceback.encode("utf-8", "backslashreplace").splitlines(keepends=True))

    def _summarize(self, cause: Failure) -> None:
        for rank in self.ranks:
            if rank.number in self.logs and (failure := rank.look_for_failure()) is not None:
                self.logs[rank.number].write(failure.traceback.encode("utf-8", "backslashreplace"))
        if self.settings.tag:
            for number, line in self.hidden:
                self._show(number, [line])
        also: dict[str, list[int]] = {}
        num_stopped = 0
        for rank in self.ranks:
            failure = rank.look_for_failure()
            if failure is not None and failure.error and not failure.follow_up:
                also.setdefault(failure.describe(), []).append(rank.number)
            elif rank.process.returncode != 0 and rank.number != cause.rank:
                num_stopped += 1
        text = f"rank {cause.rank} {cause.describe()}"
        if num_stopped:
            text += f"; stopped the other {num_stopped} rank{'s' * (num_stopped > 1)}"
        lines = [text]
        for reason, numbers in also.items():
            if later := [number for number in numbers if number != cause.rank]:
                lines.append(f"  also:   {name_all_ranks(later)} {reason}")
        if cause.killed_by == "SIGKILL":
            lines.append(
                "  fix:    most often the system ran out of memory (see dmesg): fewer ranks, a smaller batch or model"
            )
        done = [rank.number for rank in self.ranks if rank.process.returncode == 0]
        if cause.follow_up and done:
            lines.append(f"  note:   {name_all_ranks(done)} had already ended, with exit code 0")
        if self.hidden and not self.settings.tag:
            lines.append(
                f"  hidden: {len(self.hidden)} later error lines of other ranks "
                "(--tag shows, --log-dir keeps all output)"
            )
        print_line("\n".join([*lines, *self._positions()]))

    def _summarize_left_behind(self) -> None:
        stopped = [rank.number for rank in self.stopped]
        done = [rank.number for rank in self.ranks if rank.number not in stopped]
        later = f"{name_all_ranks(stopped)} still ran {self.settings.exit_grace_seconds:g} seconds later"
        fix = "  fix:    let every rank take part in the same collectives, or give more time: --exit-grace SECONDS"
        print_line("\n".join([f"{name_all_ranks(done)} ended with exit code 0; {later}", *self._positions(), fix]))

    def _positions(self) -> list[str]:
        """Return lines on where ranks were before they were stopped, and in which collective the others waited."""
        hung = [rank for rank in self.ranks if rank.failure is not None and rank.failure.hangs]
        lines = format_positions([(rank.number, rank.position()) for rank in [*hung, *self.stopped]])
        if self.cause is not None and (self.cause.waited_in_vain or self.cause.hangs):
            lines += format_waits([(rank.number, rank.page.read()) for rank in self.ranks])
        return lines

    # -------------------------------------------------------------------------------------------------- output

    def _read(self, pipe: Pipe) -> None:
        data = os.read(pipe.source.fileno(), 1 << 16)
        if not data:
            self.selector.unregister(pipe.source)
            pipe.source.close()
            pipe.rank.open_pipes -= 1
        elif pipe.rank.number in self.logs:
            self.logs[pipe.rank.number].write(data)
            self.logs[pipe.rank.number].flush()
        number = pipe.rank.number
        if not pipe.is_stdout and self._has_failed() and not (self.shown and self.cause and self.cause.rank == number):
            self.hidden += [(number, line) for line in pipe.lines(data)]
            return
        lines = pipe.lines(data)
        if number == 0 or self.settings.tag or self.settings.show_all or not pipe.is_stdout:
            self._show(number, lines, pipe.is_stdout)

    def _has_failed(self) -> bool:
        """Return whether any rank has failed, from the record files: ``_judge`` may not have run yet."""
        if self.exit_code == EXIT_INTERRUPTED:
            return False
        return self.failing is not None or any(os.path.exists(rank.failure_file) for rank in self.ranks)

    def _show(self, rank: int, lines: Sequence[bytes], is_stdout: bool = False) -> None:
        prefix = f"[rank {rank}] ".encode() if self.settings.tag else b""
        _write(sys.stdout if is_stdout else sys.stderr, b"".join(prefix + line for line in lines))


@contextlib.contextmanager
def signals_caught(caught: list[int]) -> Iterator[None]:
    """Append SIGINT, SIGTERM and SIGHUP to ``caught`` instead of exiting. Works only in the main thread."""

    def note(signum: int, frame: FrameType | None) -> None:
        caught.append(signum)

    before = {}
    try:
        for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(signum) is not signal.SIG_IGN:  # as nohup sets it
                with contextlib.suppress(ValueError):
                    before[signum] = signal.signal(signum, note)
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


def print_line(text: str) -> None:
    _write(sys.stderr, f"shardwise: {text}\n".encode("utf-8", "backslashreplace"))


def _write(stream: TextIO, data: bytes) -> None:
    """Write bytes unchanged, or as text to a stream without a buffer (in a notebook)."""
    buffer = getattr(stream, "buffer", None)
    if buffer is not None:
        buffer.write(data)
    else:
        stream.write(data.decode("utf-8", "replace"))
    stream.flush()
