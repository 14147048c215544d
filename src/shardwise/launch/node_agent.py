"""The network side of a launcher in an elastic job on several machines.

Every launcher has a listener (its *station*). Machine 0's runs the job's head at first (``launch.coordinator``); if
that machine is lost, the next one takes over. The listener runs in a thread, so that it answers while ranks run.
Standard library only.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from shardwise.errors import LaunchError
from shardwise.hosts import free_port, listen, own_address, route_address
from shardwise.launch.channel import (
    SECRET_FIX,
    Channel,
    as_place,
    as_text,
    connect_all,
    version,
    wait_until_readable,
    whole,
)
from shardwise.launch.coordinator import EXIT_ALONE, SURE_SECONDS, Address, Coordinator
from shardwise.launch.job import EXIT_INTERRUPTED, print_line
from shardwise.launch.processes import Failure
from shardwise.launch.restart_policy import RestartPolicy

_TURN_SECONDS = 0.1
_REST_SECONDS = 1e-5  # of the head between turns, for each machine
_BEAT_SECONDS = 0.5
_TAKE_OVER_SECONDS = 15.0  # for the other machines to notice that the head is lost
_ANSWER_SECONDS = 4.0  # for a machine that may lead next to answer at all
_HELLO_SECONDS = 2.0
_PORT_SECONDS = 10.0  # how long a free port is assumed to stay free
_MOST_STRANGERS = 64  # connections that have not identified themselves
_STRANGER_SECONDS = 5.0  # in which they must do so
_MOST_CHARACTERS = 1 << 14  # of a failure's text; its machine's launcher has printed all of it
_MOST_FAULTS = 20  # closed connections that are reported


@dataclass(frozen=True, slots=True)
class GenerationStart:
    """The head's description of a generation for one machine. ``first``: its first rank; ``num_ranks``: of all
    machines; ``num_spares``: unused slots; ``master``: where the ranks meet; ``step``: the last finished step;
    ``lost``: the slot whose rank of the last generation was lost (-1: none of this machine)."""

    number: int
    suspect: bool
    first: int
    num_ranks: int
    slots: list[int]
    num_spares: int
    master: Address
    step: int
    lost: int = -1


class Listener(threading.Thread):
    """Listens for other launchers at an ``address`` of this machine ("": all addresses). ``head``: the job's head, if
    it is here; ``seat``: its address otherwise; ``called``: the address of a head that called; ``gave_way``: whether
    the head here was replaced by that one."""

    def __init__(self, port: int, secret: bytes, address: str = "") -> None:
        super().__init__(daemon=True, name="station")
        self._listener = listen(address, port)
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]
        self.address, self._secret = address, secret
        self.head: Coordinator | None = None
        self.seat: Address | None = None
        self.called: Address | None = None
        self.gave_way = False
        self.member: Channel | None = None
        self.step = -1
        self._strangers: list[Channel] = []
        self._faults: set[tuple[str, str]] = set()
        self._closing = False
        self._lock = threading.Lock()  # of the head

    def lead(self, head: Coordinator) -> None:
        with self._lock:
            self.head, self.gave_way = head, False

    def run(self) -> None:
        beaten = 0.0
        while not self._closing:
            with self._lock:
                self._turn()
            # A turn looks at every machine, and each message would cause one: 2,048 machines send 4,096 a second.
            time.sleep(_REST_SECONDS * len(self.head.machines) if self.head is not None else 0.0)
            member = self.member  # read once: the other thread may set it to None
            if member is not None and time.monotonic() > beaten + _BEAT_SECONDS:
                beaten = time.monotonic()
                member.send(beat=self.step)

    def _turn(self) -> None:
        machines = [] if self.head is None else [machine.channel for machine in self.head.machines.values()]
        waiting = [channel for channel in (*self._strangers, *machines) if not channel.gone]
        readable = wait_until_readable([self._listener, *waiting], _TURN_SECONDS)
        if self._listener.fileno() in readable:
            with contextlib.suppress(OSError):  # none is left, it is gone already, or too many files are open
                for _ in range(_MOST_STRANGERS // 2):
                    connection, _ = self._listener.accept()
                    self._strangers.append(Channel(connection, self._secret, accepted=True))
        late = time.monotonic() - _STRANGER_SECONDS
        for stranger in list(self._strangers):
            for message in stranger.messages()[:1]:
                self._strangers.remove(stranger)
                try:
                    self._answer(stranger, message)
                except (LookupError, TypeError, ValueError) as error:
                    stranger.end(f"sent what no launcher would: {error}")
                    self._dismiss(stranger)
            if stranger in self._strangers and (stranger.gone or stranger.since < late):
                stranger.end("" if stranger.gone else f"said nothing for {_STRANGER_SECONDS:g} seconds")
                self._strangers.remove(stranger)
                self._dismiss(stranger)
        for stranger in self._strangers[:-_MOST_STRANGERS]:
            stranger.end(f"was one of more than {_MOST_STRANGERS} that said nothing")
            self._dismiss(stranger)
        self._strangers = self._strangers[-_MOST_STRANGERS:]
        if self.head is not None:
            self.head.turn(readable)

    def _dismiss(self, stranger: Channel) -> None:
        """Close a connection; report it, unless it repeats an earlier one or there were too many."""
        case = stranger.peer, stranger.fault
        if stranger.fault and case not in self._faults and len(self._faults) < _MOST_FAULTS:
            self._faults.add(case)
            print_line(f"closed a connection from {case[0]}, which {case[1]}")
        stranger.close()

    def _answer(self, stranger: Channel, message: Mapping[str, Any]) -> None:
        if "hello" in message and self.head is not None:
            self.head.admit(stranger, message)
            return
        if "hello" in message:
            stranger.send(seat=self.seat)
        else:
            precedence = whole(message["number"]), whole(message["running"], 0, 1), -whole(message["node"])
            self.called = as_place(message["come"])
            # Another one leads this job, and is ahead while this one waits for machines.
            if self.head is not None and not self.head.running and self.head.precedence < precedence:
                for machine in self.head.machines.values():
                    machine.channel.close()
                self.gave_way, self.head = True, None  # in this order: the other thread looks at the head first
        stranger.close()

    def close(self) -> None:
        self._closing = True
        if self.is_alive():
            self.join()
        if self.head is not None:
            self.head.hear()  # the last message may be that the user interrupts the job
        self._listener.close()
        machines = [] if self.head is None else [machine.channel for machine in self.head.machines.values()]
        for channel in machines:
            channel.finish()
        for channel in (*self._strangers, *machines):
            channel.close()


@dataclass
class NodeAgent:
    """This machine's agent in a job. ``course``: of the job as it starts; ``num_machines``: initial number; ``home``:
    address of machine 0's launcher; ``name``: host name of this machine for others ("": use the listening address);
    ``slots``, ``spares``: of this machine, for the next generation; ``caught``: signals sent to the launcher."""

    course: RestartPolicy
    node: int
    num_machines: int
    home: Address
    name: str
    slots: list[int]
    secret: bytes = field(repr=False)
    caught: list[int]
    spares: list[int] = field(init=False)
    station: Listener = field(init=False)
    channel: Channel | None = None
    # (node, address, port) of the generation's machines that may lead; on these of all its machines
    crew: list[tuple[int, str, int]] = field(default_factory=list)
    leader: int = 0
    number: int = -1  # of the latest generation
    unsure: bool = False  # whether a launcher may be alive that did not answer
    stopped: bool = False
    inbox: list[Mapping[str, Any]] = field(default_factory=list)
    refused: list[Address] = field(default_factory=list)  # launchers with a different secret

    def __post_init__(self) -> None:
        self.settings = self.course.settings
        self.spares = list(range(len(self.slots), len(self.slots) + self.settings.spares))
        self.all_slots = {*self.slots, *self.spares}
        self.name = self.name or (self.home[0] if self.node == 0 else "")
        self.station = self._listen()
        if self.node == 0:
            self._lead(set(range(self.num_machines)), time.monotonic() + self.settings.wait_seconds)
        self.station.start()

    def _listen(self) -> Listener:
        """Listen at the address by which others reach this machine, on a port that stays the same after a restart. Only
        machine 0 needs that port; others fall back to a free one."""
        address = own_address(self.name) if self.name else ""
        if not address and self.node != 0:
            address = route_address(*self.home)
        if not address:
            print_line(
                f"listens on all addresses: {self.name or self.home[0]} resolves to no address of this machine that"
                " others can reach"
            )
        try:
            return Listener((self.home[1] + self.node) % (1 << 16), self.secret, address)
        except OSError as error:
            if self.node == 0:
                what = f"machine 0 cannot listen on port {self.home[1]}: {error.strerror}"
                raise LaunchError(what, fix="choose another --master-port, the same on every node") from None
        return Listener(0, self.secret, address)

    def _lead(self, awaited: set[int], until_all: float) -> Coordinator:
        course, deadline = replace(self.course), time.monotonic() + self.settings.wait_seconds
        head = Coordinator(course, self.node, self.num_machines, awaited, until_all, deadline, self.secret)
        self.station.lead(head)
        return head

    def close(self) -> None:
        if self.channel is not None:
            self.channel.close()
        self.station.member = None
        self.station.close()

    # ----------------------------------------------------------------------------------------- between generations

    def wait(self) -> GenerationStart | int:
        """Wait for the next generation and return it, or the exit code of the job."""
        self.stopped = False
        limit = time.monotonic() + self.settings.wait_seconds
        sent_port = time.monotonic()  # when the head got the latest free port
        while True:
            if self.caught:
                if self.channel is not None:
                    self.channel.send(leave=EXIT_INTERRUPTED)
                return EXIT_INTERRUPTED
            if self.channel is None and not self._meet():
                if time.monotonic() > limit:
                    where = ":".join(map(str, self.home))
                    print_line(
                        f"machine {self.node} found no others at {where} in {self.settings.wait_seconds:g} seconds"
                    )
                    return EXIT_ALONE
                if not self.station.is_alive():
                    return EXIT_ALONE  # the thread died of an error, which was printed
                time.sleep(_TURN_SECONDS)
                continue
            assert self.channel is not None
            if time.monotonic() > sent_port + _PORT_SECONDS:  # a standby machine may wait for hours
                sent_port = time.monotonic()
                self.channel.send(port=free_port())
            messages = self.channel.messages(_TURN_SECONDS)
            if messages:
                limit = time.monotonic() + self.settings.wait_seconds
            self.inbox += messages
            while self.inbox:  # messages after a generation's start are left for `is_stopped`
                try:
                    answer = self._take(self.inbox.pop(0))
                except (LookupError, TypeError, ValueError) as error:
                    if self.channel is not None:
                        self.channel.end(f"sent what no launcher would: {error}")
                    self.inbox.clear()
                    break
                if answer is not None:
                    return answer
            if self._head_is_lost and (code := self._follow()) is not None:
                return code

    def _take(self, message: Mapping[str, Any]) -> GenerationStart | int | None:
        if "end" in message:
            code, why = whole(message["end"], 0, 255), as_text(message["why"])
            if why:
                print_line(why)
            return code
        if "dropped" in message:
            self._come_again()
        if "machines" in message:
            crew = [(whole(node), *as_place(where)) for node, *where in message["machines"]]
            self.crew, self.leader, self.number = crew, whole(message["head"]), whole(message["generation"])
            self.name = self.name or next((address for node, address, _ in self.crew if node == self.node), "")
        if "ranks" not in message:
            return None
        first, num_ranks = map(whole, message["ranks"])
        slots, spares = ([whole(slot) for slot in message[name]] for name in ("slots", "spares"))
        if not slots or not {*slots, *spares} <= self.all_slots:
            raise ValueError(f"{slots} and {spares} are no slots of this machine")
        whole(first + len(slots), most=num_ranks)
        how, master, step = as_text(message["how"]), as_place(message["master"]), whole(message["step"], -1)
        lost = whole(message["lost"], -1)
        self.slots, self.spares = slots, spares
        self.station.called = None  # by a head that is this one, or has lost
        if how:
            print_line(how)
        return GenerationStart(
            self.number, bool(message["suspect"]), first, num_ranks, slots, len(spares), master, step, lost
        )

    # -------------------------------------------------------------------------------------------- while ranks run

    def is_stopped(self) -> bool:
        """Return whether this machine's ranks must end: the head stops the generation, or is lost."""
        if not self.stopped and self.channel is not None:
            self.inbox += [message for message in self.channel.messages() if "beat" not in message]
            is_asked = any({"stop", "end", "dropped"} & message.keys() for message in self.inbox)
            self.stopped = is_asked or self._head_is_lost
        return self.stopped

    def report(self, code: int, lost: Failure | None, absent: Sequence[int], step: int) -> None:
        """Report to the head how this machine's ranks of the latest generation ended."""
        self.station.step = step
        if self.channel is not None:
            failure = None
            if lost is not None:
                failure = asdict(replace(lost, error=_excerpt(lost.error), traceback=_excerpt(lost.traceback)))
            self.channel.send(beat=step)
            self.channel.send(ended=self.number, code=code, failure=failure, absent=list(absent), rank_port=free_port())

    # ------------------------------------------------------------------------------------------------ finding the head

    def _meet(self) -> bool:
        station = self.station
        if station.head is not None:
            return bool(self._join((station.address or self.name or self.home[0], station.port)))
        gave_way, station.gave_way = station.gave_way, False
        if gave_way and self.number >= 0:
            self._come_again()
        places = [place for place in (station.called, station.seat, self.home) if place is not None]
        return any(self._join(place) for place in dict.fromkeys(places))

    def _join(self, where: Address) -> bool | None:
        """Return whether the head is there; None if no launcher is."""
        try:
            channel = Channel(socket.create_connection(where, timeout=_HELLO_SECONDS), self.secret)
        except OSError as error:
            self.unsure |= not isinstance(error, ConnectionRefusedError)
            return None
        channel.send(
            hello=self.node,
            version=version(),
            machines=self.num_machines,
            ranks=self.course.num_ranks,
            slots=self.slots,
            spares=self.spares,
            port=self.station.port,
            rank_port=free_port(),
            name=self.name or self.station.address or channel.here,
        )
        answer = channel.messages(_HELLO_SECONDS)
        if channel.refused and where not in self.refused:
            self.refused.append(where)
            at = ":".join(map(str, where))
            print_line(
                f"the launcher at {at} has another secret than this machine: {SECRET_FIX}; this machine keeps trying"
            )
        for message in answer:
            if "seat" in message:  # no head is there
                with contextlib.suppress(TypeError, ValueError):
                    self.station.seat = as_place(message["seat"])
                channel.close()
                return False
        if not answer or (channel.gone and not any("end" in message for message in answer)):
            channel.close()
            return False
        self.channel = self.station.member = channel
        self.inbox = list(answer)
        return True

    @property
    def _head_is_lost(self) -> bool:
        channel = self.channel
        return channel is None or channel.gone or self._silence > self.settings.silent_seconds

    @property
    def _silence(self) -> float:
        return 0.0 if self.channel is None else time.monotonic() - self.channel.heard

    def _come_again(self) -> None:
        """Join as a new machine: the others went on without this one."""
        print_line("the others went on without this machine, which was silent; it asks to join again")
        seat = next(((address, port) for node, address, port in self.crew if node == self.leader), None)
        self.station.seat = seat or self.station.seat
        self.number, self.crew = -1, []
        self._hang_up()

    def _hang_up(self) -> None:
        if self.channel is not None:
            if self.channel.fault:
                print_line(f"closed the connection to machine {self.leader}, which {self.channel.fault}")
            self.channel.close()
        self.channel = self.station.member = None

    def _follow(self) -> int | None:
        """Find the next head after the loss of this one, or take over. Return an exit code if neither is allowed."""
        silent = self._silence > SURE_SECONDS  # then the head may still be alive
        self._hang_up()
        if self.station.gave_way or self.number < 0 or self.leader == self.node:  # begin from the start
            return None
        left = [place for place in sorted(self.crew) if place[0] != self.leader]
        is_heir = any(node == self.node for node, *_ in left)
        ahead = [as_place(where) for node, *where in left if node < self.node or not is_heir]
        cut_off, unreachable = self._find_next(ahead, is_heir)
        silent |= cut_off
        if self.channel is not None or self.caught:
            return None
        if not is_heir:
            return EXIT_ALONE
        if silent and 2 * len(left) <= len(self.crew):
            what = f"machine {self.leader}, the head, is silent and may go on without this half of the machines"
            print_line(f"{what}; they end")
            return EXIT_ALONE
        if self.station.called is not None and self._join(self.station.called):  # another one was faster
            return None
        self._take_over({node for node, *where in left if as_place(where) not in unreachable}, silent)
        return None

    def _find_next(self, ahead: list[Address], is_heir: bool) -> tuple[bool, set[Address]]:
        """Join the first machine ``ahead`` once it leads, or another one that called. Pass over those that answer and
        do not lead for long, and those that never answer: a switch may have taken many of them away, so an heir asks
        all of them at once. Return (whether one that was passed over may be alive and cut off, those that never
        answered)."""
        began = since = time.monotonic()
        answered, unreachable, cut_off = set[Address](), set[Address](), False
        while ahead and not self.caught:
            if self.station.called is not None and self._join(self.station.called):  # another machine took over first
                break
            first, silent = ahead[0], set[Address]()
            asked = ahead if is_heir and first in unreachable else [first]
            if asked is ahead:
                for where, connection in zip(asked, connect_all(asked, _HELLO_SECONDS), strict=True):
                    if not isinstance(connection, OSError):
                        answered.add(where)
                        connection.close()
                    elif not isinstance(connection, ConnectionRefusedError):
                        silent.add(where)
            else:
                self.unsure = False  # only the silence of those ahead counts
                if answer := self._join(first):
                    break
                if answer is not None:
                    answered.add(first)
                elif self.unsure:
                    silent.add(first)
            now = time.monotonic()
            unreachable = (unreachable | {*asked}) - answered
            # Only an heir hurries: another one has nothing to lead, and may be cut off itself.
            hurries = is_heir and now > began + _ANSWER_SECONDS
            passed = unreachable.intersection(asked) if hurries else set[Address]()
            if now > since + _TAKE_OVER_SECONDS:
                passed.add(first)
            cut_off |= bool(passed & silent)
            ahead = [where for where in ahead if where not in passed]
            since = now if first in passed else since
            time.sleep(_TURN_SECONDS)
        return cut_off, unreachable

    def _take_over(self, awaited: set[int], silent: bool) -> None:
        head = self._lead(awaited, time.monotonic() + _TAKE_OVER_SECONDS)
        head.number = self.number + 1
        head.course.step = self.station.step
        head.addresses = {node: (address, port) for node, address, port in self.crew}
        head.least = len(self.crew) // 2 + 1 if silent else 1
        after = head.course.after_step
        how = "is silent" if silent else "is gone"
        head.how = f"machine {self.leader}, the head, {how}{after}; generation {head.number} goes on"


def _excerpt(content: str) -> str:
    """Return the beginning of a text, in valid UTF-8 and short enough for a message."""
    return content[:_MOST_CHARACTERS].encode("utf-8", "backslashreplace").decode()
