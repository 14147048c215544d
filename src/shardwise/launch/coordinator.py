"""The head of an elastic job on several machines, which starts, stops and restarts generations.

One launcher runs it. It learns from every machine when its ranks have ended, or that the machine is gone. It then makes
the others stop their ranks, and assigns the ranks of the next generation. Standard library only.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from shardwise.launch.channel import Channel, as_place, as_port, as_text, connect_all, version, whole
from shardwise.launch.hang_detector import count_ranks, name_all_ranks
from shardwise.launch.job import print_line
from shardwise.launch.processes import Failure
from shardwise.launch.restart_policy import RestartPolicy, lost_rank

Address = tuple[str, int]

EXIT_ALONE = 1  # the job did not get the machines that it needs
STOPPED = -1  # in place of an exit code
SURE_SECONDS = 3.0  # several heartbeats (two a second): a peer that closes after such a silence may still be alive
_BEAT_SECONDS = 0.5
_AWAY_SECONDS = 2.0  # without a turn: then this machine was suspended, and the silence of others does not count
_TELL_SECONDS = 30.0
_NUM_HEIRS = 64  # machines that may lead next: only these are told where all are, which is a long list
_CALL_LIMIT = 0.3
_MOST_VERSION = 40
_CALL_SECONDS = 2.0  # between calls to a machine that is missing
_CALLED_AT_ONCE = 64
_MOST_UNANSWERED = 2  # calls, after which a machine is not awaited


@dataclass(frozen=True, slots=True)
class MachineReport:
    """A machine's report of how its ranks ended. ``code``: 0 if each exited with 0, ``STOPPED`` if the launcher stopped
    them on request; ``absent``: ranks that were in no collective when they were stopped."""

    code: int
    failure: Failure | None
    absent: tuple[int, ...]


@dataclass(slots=True)
class Machine:
    """A connected launcher. ``address``, ``port``: where it listens; ``rank_port``: a free port for its ranks' store;
    ``ranks``: its ranks in the generation (empty: it stands by); ``ended``: its report; ``lost``: the slot of a lost
    rank, whose process must not run the next generation (-1: none)."""

    node: int
    address: str
    port: int
    rank_port: int
    channel: Channel
    slots: list[int]
    spares: list[int]
    ranks: range = range(0)
    ended: MachineReport | None = None
    lost: int = -1


@dataclass(slots=True)
class Coordinator:
    """The head of the job. ``num_machines``: maximum of a generation; ``number``: of the next generation; ``awaited``:
    nodes to wait for until ``until_all``, after which fewer suffice; ``least``: minimum number of machines (in a
    network partition only one side may go on)."""

    course: RestartPolicy
    node: int
    num_machines: int
    awaited: set[int]
    until_all: float
    deadline: float
    secret: bytes = field(repr=False)
    number: int = 0
    least: int = 1
    how: str = ""  # the message to print when the next generation begins
    suspect: bool = False
    machines: dict[int, Machine] = field(default_factory=dict)
    addresses: dict[int, Address] = field(default_factory=dict)  # where machines listened, connected or not
    running: bool = False
    stopping: bool = False
    lost: list[tuple[int, range, str]] = field(default_factory=list)  # machines: node, its ranks, how
    unsure: bool = False  # whether a lost machine may still be alive
    began_at: int = -1  # the course's step when the generation began
    over: bool = False
    turned: float = field(default_factory=lambda: time.monotonic())
    beaten: float = 0.0
    called: float = 0.0
    num_calls: int = 0
    unanswered: Counter[int] = field(default_factory=Counter)  # calls since a machine took one
    cut_off: set[int] = field(default_factory=set)  # machines to which a call was lost: they may follow another head
    ended: set[int] = field(default_factory=set)  # machines that refused the last call: no launcher is there
    tell_at: float = field(default_factory=lambda: time.monotonic() + _TELL_SECONDS)  # when to print who is missing

    # ------------------------------------------------------------------------------------------------------- hearing

    def admit(self, channel: Channel, hello: Mapping[str, Any]) -> None:
        """Admit a launcher. If its node is connected already, it was started twice or reconnected early."""
        node = whole(hello["hello"])
        theirs, ours = str(hello.get("version", "of an unknown version"))[:_MOST_VERSION], version()
        if theirs != ours:  # what else it says may mean something else, or be missing
            why = f"machine {node} runs shardwise {theirs}, machine {self.node} {ours}: install the same everywhere"
            _turn_away(channel, why)
            return
        machines, ranks = whole(hello["machines"]), whole(hello["ranks"])
        where = as_place((hello["name"], hello["port"]))
        rank_port = as_port(hello["rank_port"])
        slots, spares = ([whole(slot) for slot in hello[name]] for name in ("slots", "spares"))
        if not where[0] or len({*slots, *spares}) < len(slots) + len(spares):
            raise ValueError(f"no name, or slots that are given twice: {slots}, {spares}")
        if machines != self.num_machines or ranks != self.course.num_ranks:
            why = (
                f"machine {node} was started for {ranks} ranks on {machines} machines, machine {self.node} for "
                f"{self.course.num_ranks} on {self.num_machines}: give the same on every machine"
            )
            _turn_away(channel, why)
            return
        before = self.machines.get(node)
        if before is not None and not before.channel.gone and time.monotonic() < before.channel.heard + _AWAY_SECONDS:
            _turn_away(channel, f"there is a machine {node} already: give every one its own --node-rank")
            return
        if before is not None:
            self._lose(before, "is gone")
        self.addresses[node] = where
        self.machines[node] = Machine(node, *where, rank_port, channel, slots, spares)

    def turn(self, readable: Container[int] | None = None) -> None:
        """Run one iteration: read messages, detect lost machines, send heartbeats, and decide what to do.
        ``readable``: descriptors of the connections that have some (None: unknown)."""
        now = time.monotonic()
        away, self.turned = now - self.turned > _AWAY_SECONDS, now
        for machine in list(self.machines.values()):
            was_silent = away or now - machine.channel.heard > SURE_SECONDS
            if away:
                machine.channel.heard = now
            if readable is None or machine.channel.fileno() in readable:
                self._hear(machine)
            silent = now - machine.channel.heard
            if machine.channel.gone:
                self._lose(machine, "is gone", may_live=was_silent)
            elif silent > self.course.settings.silent_seconds:
                machine.channel.send(dropped=True)  # it may read this later, and reconnect
                self._lose(machine, f"gave no sign of life for {silent:.0f} seconds", may_live=True)
        if now > self.beaten + _BEAT_SECONDS:
            self.beaten = now
            for machine in self.machines.values():
                machine.channel.send(beat=0)
        if not self.over:
            self._call_the_missing(now)
            self._go_on(now)

    def hear(self) -> None:
        """Read the machines' last messages before the launcher exits."""
        for machine in list(self.machines.values()):
            self._hear(machine)

    def _hear(self, machine: Machine) -> None:
        for message in machine.channel.messages():
            try:
                self._take(machine, message)
            except (LookupError, TypeError, ValueError) as error:
                machine.channel.end(f"sent what no launcher would: {error}")
                return

    def _take(self, machine: Machine, message: Mapping[str, Any]) -> None:
        if "beat" in message:
            self.course.reach(whole(message["beat"], -1))
        elif "ended" in message and message["ended"] == self.number - 1:
            failure = _failure(message["failure"], machine.ranks) if message["failure"] is not None else None
            absent = tuple(whole(rank) for rank in message["absent"])
            code = whole(message["code"], STOPPED, 255)
            machine.ended, machine.rank_port = MachineReport(code, failure, absent), as_port(message["rank_port"])
        elif "port" in message:
            machine.rank_port = as_port(message["port"])
        elif "leave" in message:
            self.finish(whole(message["leave"], 1, 255), f"machine {machine.node} ends the job")

    def _lose(self, machine: Machine, how: str, *, may_live: bool = False) -> None:
        if machine.channel.fault:
            print_line(f"closed the connection to machine {machine.node}, which {machine.channel.fault}")
        machine.channel.close()
        del self.machines[machine.node]
        if machine.ranks and self.running:
            self.lost.append((machine.node, machine.ranks, how))
            self.unsure |= may_live

    def _call_the_missing(self, now: float) -> None:
        """Call missing machines: a restarted machine asks the first one, which may be lost itself. A call may block, so
        some are called at a time, and all of these at once."""
        missing = sorted(self.addresses.keys() - self.machines.keys() - {self.node})
        if now < self.called + _CALL_SECONDS * _CALLED_AT_ONCE / max(_CALLED_AT_ONCE, len(missing)) or not missing:
            return
        self.called = now
        start = self.num_calls % len(missing)
        chosen = (missing[start:] + missing[:start])[:_CALLED_AT_ONCE]
        self.num_calls += len(chosen)
        number, running, node = self.precedence
        channels: list[Channel] = []
        for other, connection in zip(
            chosen, connect_all([self.addresses[other] for other in chosen], _CALL_LIMIT), strict=True
        ):
            if isinstance(connection, OSError):
                self.unanswered[other] += 1
                refused = isinstance(connection, ConnectionRefusedError)
                now_in, no_longer_in = (self.ended, self.cut_off) if refused else (self.cut_off, self.ended)
                now_in.add(other)
                no_longer_in.discard(other)
                continue
            del self.unanswered[other]
            self.ended.discard(other)
            channels.append(Channel(connection, self.secret))
            channels[-1].send(come=self.addresses.get(self.node), number=number, running=running, node=-node)
        until = time.monotonic() + _CALL_LIMIT
        for channel in channels:  # sends after the other end's greeting; the other end closes when it has read
            channel.messages(max(0.0, until - time.monotonic()))
            channel.close()

    @property
    def precedence(self) -> tuple[int, int, int]:
        """Return what decides which of two heads leads: two machines may take over from a lost head within a second."""
        return self.number, int(self.running), -self.node

    # ------------------------------------------------------------------------------------------------------- deciding

    @property
    def _active(self) -> list[Machine]:
        return [machine for machine in self.machines.values() if machine.ranks]

    def _go_on(self, now: float) -> None:
        if not self.running:
            self._gather(now)
        elif not self.stopping:
            codes = [machine.ended.code for machine in self._active if machine.ended]
            if self.lost or any(codes):
                self._stop()
            elif len(codes) == len(self._active):
                self.finish(0)
            elif self._standing_by and len(self._active) < self.num_machines and self.course.step > self.began_at:
                self._stop()
        elif all(machine.ended for machine in self._active):
            self._decide(now)

    @property
    def _standing_by(self) -> list[Machine]:
        return [machine for machine in self.machines.values() if not machine.ranks and machine.slots]

    def _stop(self) -> None:
        self.stopping = True
        for machine in self._active:
            machine.channel.send(stop=self.number - 1)

    def _decide(self, now: float) -> None:
        self.running = self.stopping = self.suspect = False
        reports = [machine.ended for machine in self._active if machine.ended]
        failures = [report.failure for report in reports if report.failure is not None]
        cause = min(failures, key=lambda failure: (failure.follow_up, failure.seconds), default=None)
        code = next((report.code for report in reports if report.code > 0 and report.failure is None), 0)
        # Silent machines may go on by themselves if they are more than half, so this side needs at least half.
        self.least = -(-(len(self._active) + len(self.lost)) // 2) if self.unsure else 1
        lost, self.lost, self.unsure = self.lost, [], False
        if code:
            self.finish(code)
        elif lost and (cause is None or cause.follow_up or cause.waited_in_vain):
            gone = "; ".join(f"machine {node} with {name_all_ranks(ranks)} {how}" for node, ranks, how in lost)
            text = f"{gone}{self.course.after_step}"
            if why := self.course.why_end(by_the_script=False):
                self.finish(EXIT_ALONE, f"{text}; {why}")
            else:
                self._regather(now, f"{text}; generation {self.number} goes on")
        elif cause is not None:
            self._lose_a_rank(cause, [rank for report in reports for rank in report.absent], now)
        else:
            came = f"{name_machines(machine.node for machine in self._standing_by)} came"
            came = came if self._standing_by else "a machine stopped its ranks"
            self._regather(now, f"{came}{self.course.after_step}; generation {self.number} goes on")

    def _lose_a_rank(self, cause: Failure, absent: list[int], now: float) -> None:
        lost = lost_rank(cause, absent)
        text = f"rank {lost.rank} {lost.describe()}{self.course.after_step}"
        if why := self.course.why_end(by_the_script=bool(lost.traceback) and not lost.differs):
            self.finish(lost.exit_code, f"{text}; {why}")
            return
        active = self._active
        self.suspect = lost.differs
        home = next((machine for machine in active if lost.rank in machine.ranks), None)
        if home is None:  # its machine is gone as well
            self._regather(now, f"{text}; generation {self.number} goes on")
            return
        total = sum(len(machine.slots) for machine in active)
        home.lost = slot = home.slots[lost.rank - home.ranks.start]
        home.slots, home.spares, how = self.course.replaced(home.slots, home.spares, slot, total)
        self._regather(now, f"{text}; generation {self.number} goes on {how} of machine {home.node}")

    def _regather(self, now: float, how: str) -> None:
        self.how, self.awaited = how, set()
        self.until_all, self.deadline = now, now + self.course.settings.wait_seconds
        self.tell_at = now + 1.0
        for machine in self.machines.values():
            machine.ranks = range(0)

    def _gather(self, now: float) -> None:
        chosen = sorted(self.machines.values(), key=lambda machine: machine.node)
        chosen = [machine for machine in chosen if machine.slots][: self.num_machines]
        total = sum(len(machine.slots) for machine in chosen)
        awaited = {node for node in self.awaited if self.unanswered[node] < _MOST_UNANSWERED}
        all_here = awaited <= self.machines.keys() or now >= self.until_all
        missing = name_machines(set(range(self.num_machines)) - self.machines.keys())
        counts = f"{count_ranks(total)} of the {self.course.fewest} that are needed"
        least = self.least
        if (self.awaited & self.cut_off) - self.machines.keys():
            least = max(least, len(self.addresses.keys() - (self.ended - self.machines.keys())) // 2 + 1)
        if len(chosen) < least:
            counts += f", on {len(chosen)} of the {least} machines without which the others may go on"
        if all_here and total >= self.course.fewest and len(chosen) >= least:
            self._begin(chosen, total)
        elif now >= self.deadline:
            self.finish(
                EXIT_ALONE, f"{missing} did not come in {self.course.settings.wait_seconds:g} seconds: {counts}"
            )
        elif now >= self.tell_at:
            self.tell_at = now + _TELL_SECONDS
            print_line(f"waits for {missing}: {counts}")

    def _begin(self, chosen: list[Machine], total: int) -> None:
        first, start = chosen[0], 0
        places = [(machine.node, machine.address, machine.port) for machine in chosen]
        heirs = {self.node, *[node for node, *_ in places if node != self.node][:_NUM_HEIRS]}
        known = [place for place in places if place[0] in heirs]
        how = f"{self.how} with {count_ranks(total)}" if self.how.endswith("goes on") else self.how
        for machine in self.machines.values():
            machine.ranks, machine.ended = range(0), None
        for machine in chosen:
            machine.ranks = range(start, start + len(machine.slots))
            start += len(machine.slots)
            machine.channel.send(
                generation=self.number,
                head=self.node,
                machines=places if machine.node in heirs else known,
                ranks=(machine.ranks.start, total),
                slots=machine.slots,
                spares=machine.spares,
                master=(first.address, first.rank_port),
                suspect=self.suspect,
                step=self.course.step,
                lost=machine.lost,
                how=how,
            )
        for machine in self._standing_by:
            machine.channel.send(generation=self.number, head=self.node, machines=known)
        for machine in chosen:
            machine.lost = -1
        self.number += 1
        self.running, self.how, self.began_at = True, "", self.course.step

    def finish(self, code: int, why: str = "") -> None:
        """End the job and tell every machine the exit code."""
        self.over = True
        for machine in self.machines.values():
            machine.channel.send(end=code, why=why)


def _turn_away(channel: Channel, why: str) -> None:
    channel.send(end=EXIT_ALONE, why=why)
    channel.close()


def name_machines(nodes: Iterable[int]) -> str:
    """Return ``machine 3`` or ``machines 0, 1``."""
    numbers = sorted(nodes)
    return f"machine{'s' * (len(numbers) != 1)} {', '.join(map(str, numbers))}"


def _failure(record: Mapping[str, Any], ranks: range) -> Failure:
    failure = Failure(**{**record, "blames": tuple(whole(rank) for rank in record["blames"])})
    if failure.rank not in ranks or type(failure.seconds) not in (int, float):
        raise ValueError(f"rank {failure.rank} at {failure.seconds} is none of {ranks}")
    whole(failure.exit_code, 1, 255)
    for name in ("error", "traceback", "killed_by", "hangs"):
        as_text(record[name])
    return failure
