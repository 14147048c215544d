"""Elastic jobs on several machines: who is named, who goes on, who leads, and who is refused.

Every machine is a launcher of its own on this one; ranks load no torch (``tests/train/test_lost_machines.py`` trains).
"""

from __future__ import annotations

import contextlib
import math
import re
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from launch.jobs import gone
from launch.machines import SECRET, Machines, channels
from raising import raises
from shardwise.errors import LaunchError
from shardwise.hosts import Host, free_port
from shardwise.launch import node_agent
from shardwise.launch.channel import Channel, version
from shardwise.launch.coordinator import STOPPED, Coordinator
from shardwise.launch.launcher import JobMachines, launch
from shardwise.launch.node_agent import GenerationStart, Listener, NodeAgent
from shardwise.launch.restart_policy import ElasticConfig, RestartPolicy

BODY = """
from shardwise.runtime.generation import read_generation
from shardwise.runtime.heartbeat_file import PAGE
from shardwise.runtime.heartbeat_file import trail

generation = read_generation(os.environ).number
size, local = int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_RANK"])
trail.write_to(os.environ[PAGE])
print(f"generation {generation}: rank {rank} of {size}, local {local}", flush=True)
open(os.path.join(here, f"pid-{generation}-{rank}"), "w").write(str(os.getpid()))

def step(number):
    trail.step_done(number)
    mark(f"step{number}")
    wait_for(f"step{number}-", size)

def hang():
    time.sleep(60)

"""
Start = Callable[..., Machines]


@pytest.fixture
def start(script: Callable[[str], str], tmp_path: Path) -> Iterator[Start]:
    with contextlib.ExitStack() as stack:

        def begin(body: str, **settings: Any) -> Machines:
            path = script(BODY + body)
            found = Machines(tmp_path, [path], free_port(), **settings)
            stack.callback(found.close)
            for node in range(found.num_machines):
                found.start(node)
            return found

        yield begin


def wait_until(what: Callable[[], Any]) -> None:
    deadline = time.monotonic() + 60.0
    while not what():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.05)


def pids(folder: Path, generation: int) -> list[int]:
    return [int(path.read_text()) for path in folder.glob(f"pid-{generation}-*") if path.read_text()]


def test_a_rank_of_another_machine_is_replaced_by_its_spare_and_then_done_without(start: Start, tmp_path: Path) -> None:
    body = """
if generation < 2:
    step(generation)
    if rank == 3 - generation:
        os.kill(os.getpid(), signal.SIGKILL)
    hang()
"""
    machines = start(body, settings="min_ranks=3, spares=1")
    assert machines.codes() == [0, 0]
    for node in (0, 1):
        lines = [line for line in machines.said(node).splitlines() if "goes on" in line]
        assert lines == [
            "shardwise: rank 3 was killed by SIGKILL after step 0; generation 1 goes on with slot 2 in place of slot 1 "
            "of machine 1",
            "shardwise: rank 2 was killed by SIGKILL after step 1; generation 2 goes on with 3 ranks, without slot 0 "
            "of machine 1",
        ]
    assert "generation 2: rank 2 of 3, local 0" in machines.said(1)


@pytest.mark.parametrize("lost", ["slot", "machine"])
def test_machines_keep_the_processes_of_ranks_that_are_left(start: Start, tmp_path: Path, lost: str) -> None:
    body = """
step(generation)
if generation == 0:
    if rank == 0:
        wait_for("lost", 1)
    if rank == 3 and os.path.exists(os.path.join(here, "slot")):
        os.kill(os.getpid(), signal.SIGKILL)
    while True:
        with trail.waiting(b"an all_reduce"):
            time.sleep(0.01)
"""
    (tmp_path / lost).touch()
    machines = start(body, settings="keeps=True, min_ranks=2" if lost == "machine" else "keeps=True")
    wait_until(lambda: len(list(tmp_path.glob("step0-*"))) == 4)
    before = pids(tmp_path, 0)
    if lost == "machine":
        machines.lose(1)
    (tmp_path / "lost-0").touch()
    assert {*machines.codes()} == {0}
    again = pids(tmp_path, 1)
    assert len(again) == (2 if lost == "machine" else 4)
    assert len({*before} & {*again}) == (2 if lost == "machine" else 3)
    assert "generation 1 has 2 of 2 processes of the last one" in machines.said(0)


# One machine is lost in generation 0, and comes back in generation 1.
RETURN = """
step(10 * generation)
if generation == 0:
    hang()
if generation == 1:
    wait_for("back", 1)
    time.sleep(0.5)
    step(10 * generation + 1)
    hang()
"""


@pytest.mark.parametrize("lost", [0, 1, pytest.param(2, marks=pytest.mark.long)])
def test_the_others_go_on_without_a_machine_and_take_it_back(start: Start, tmp_path: Path, lost: int) -> None:
    machines = start(RETURN, machines=3, ranks=1, settings="min_ranks=2")
    wait_until(lambda: len(list(tmp_path.glob("step0-*"))) == 3)
    first = pids(tmp_path, 0)
    machines.lose(lost)
    assert gone(first), "ranks of the lost machine end with it, and those of the others are stopped"
    wait_until(lambda: len(list(tmp_path.glob("step10-*"))) == 2)
    machines.start(lost)
    wait_until(lambda: "Traceback" not in machines.said(lost) and machines.running[lost].poll() is None)
    (tmp_path / "back-0").touch()
    assert machines.codes() == [0, 0, 0]
    left = min({0, 1, 2} - {lost})
    who = f"machine {lost}, the head, is gone" if lost == 0 else f"machine {lost} with rank {lost} is gone"
    lines = [line for line in machines.said(left).splitlines() if "goes on" in line]
    assert lines[0] == f"shardwise: {who} after step 0; generation 1 goes on with 2 ranks"
    came = rf"shardwise: machine {lost} came after step 1[01]; generation 2 goes on with 3 ranks"
    assert re.fullmatch(came, lines[-1]), lines
    assert f"generation 2: rank {lost} of 3, local 0" in machines.said(lost)


def test_a_machine_that_stands_by_takes_the_place_of_a_lost_one(start: Start, tmp_path: Path) -> None:
    machines = start("step(generation)\nif generation == 0: hang()\n", ranks=1)
    machines.start(2)
    wait_until(lambda: len(list(tmp_path.glob("step0-*"))) == 2)
    wait_until(lambda: "generation 0" not in machines.said(2) and machines.running[2].poll() is None)
    time.sleep(2.0)  # for it to have come
    machines.lose(1)
    assert machines.codes() == [0, 0]
    assert "machine 1 with rank 1 is gone after step 0; generation 1 goes on with 2 ranks" in machines.said(0)
    assert "generation 1: rank 1 of 2" in machines.said(2)


def test_a_silent_machine_is_lost_and_comes_again(start: Start, tmp_path: Path) -> None:
    """Where its launcher is stopped, its connections stay open. When it wakes up it must not lead a job of its own."""
    machines = start(RETURN, ranks=1, settings="min_ranks=1, silent_seconds=4")
    wait_until(lambda: len(list(tmp_path.glob("step0-*"))) == 2)
    machines.running[1].send_signal(signal.SIGSTOP)
    wait_until(lambda: list(tmp_path.glob("step10-*")))
    machines.running[1].send_signal(signal.SIGCONT)
    (tmp_path / "back-0").touch()
    assert machines.codes() == [0, 0]
    assert "machine 1 with rank 1 gave no sign of life for" in machines.said(0)
    assert "the others went on without this machine, which was silent" in machines.said(1)
    assert "goes on with 2 ranks" in machines.said(1)
    assert ", the head, is" not in machines.said(1)


def test_a_leading_launcher_that_was_stopped_does_not_train_beside_the_others(start: Start, tmp_path: Path) -> None:
    machines = start(RETURN, machines=3, ranks=1, settings="min_ranks=1, silent_seconds=4")
    wait_until(lambda: len(list(tmp_path.glob("step0-*"))) == 3)
    machines.running[0].send_signal(signal.SIGSTOP)
    wait_until(lambda: len(list(tmp_path.glob("step10-*"))) == 2)
    machines.running[0].send_signal(signal.SIGCONT)
    wait_until(lambda: "it asks to join again" in machines.said(0))
    (tmp_path / "back-0").touch()
    assert machines.codes() == [0, 0, 0]
    assert "machine 0, the head, is silent after step 0; generation 1 goes on with 2 ranks" in machines.said(1)
    assert "of 1, local" not in machines.said(0)
    assert "generation 2: rank 0 of 3" in machines.said(0)


def test_too_few_ranks_wait_and_then_end(start: Start, tmp_path: Path) -> None:
    machines = start("step(generation)\nhang()\n", ranks=1, settings="wait_seconds=3")
    wait_until(lambda: len(list(tmp_path.glob("step0-*"))) == 2)
    machines.lose(1)
    assert machines.codes() == [1]
    said = machines.said(0)
    assert "waits for machine 1: 1 rank of the 2 that are needed" in said
    assert "machine 1 did not come in 3 seconds: 1 rank of the 2 that are needed" in said
    assert gone(pids(tmp_path, 0))


def test_an_error_of_the_script_ends_the_job_everywhere_with_its_traceback(start: Start) -> None:
    machines = start("if rank == 1: raise ValueError('wrong {x} here')\nhang()\n", ranks=1)
    assert machines.codes() == [1, 1]
    assert "ValueError: wrong {x} here" in machines.said(1)
    for node in (0, 1):
        assert "the script failed twice without a step in between" in machines.said(node)


def test_interrupting_one_launcher_ends_the_job(start: Start, tmp_path: Path) -> None:
    machines = start("step(0)\nhang()\n", ranks=1)
    wait_until(lambda: len(list(tmp_path.glob("step0-*"))) == 2)
    machines.running[1].terminate()
    assert machines.codes() == [130, 130]
    assert gone(pids(tmp_path, 0))


def test_a_second_launcher_of_a_machine_and_one_of_another_job_are_refused(start: Start, tmp_path: Path) -> None:
    machines = start("step(0)\nwait_for('end', 1)\n", ranks=1)
    wait_until(lambda: len(list(tmp_path.glob("step0-*"))) == 2)
    one = machines.running.pop(1)
    machines.start(1)
    assert machines.running.pop(1).wait(timeout=60) == 1
    assert "there is a machine 1 already: give every one its own --node-rank" in machines.said(1)
    machines.start(2, ranks=3)
    assert machines.running.pop(2).wait(timeout=60) == 1
    assert "machine 2 was started for 6 ranks on 2 machines, machine 0 for 2 on 2" in machines.said(2)
    machines.running[1] = one
    (tmp_path / "end-0").touch()
    assert machines.codes() == [0, 0]


@pytest.mark.parametrize("node", [0, 1])
def test_strangers_change_nothing(start: Start, tmp_path: Path, node: int) -> None:
    """At the port of the machine that leads, and of another one. A generation is lost behind it, so that both work."""
    body = """
step(generation)
if generation == 0:
    wait_for("go", 1)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    hang()
"""
    machines = start(body, ranks=1)
    wait_until(lambda: len(list(tmp_path.glob("step0-*"))) == 2)
    place = ("127.0.0.1", machines.port + node)
    secret = (tmp_path / "shardwise" / "job-secret").read_bytes().strip()
    greeting = b"shardwise-launcher-1 " + b"0" * 32 + b"\n"
    code = b"0" * 64 + b" "
    with contextlib.ExitStack() as stack:
        for _ in range(100):  # more than are listened to, which say nothing, or half of a word, as long as the job runs
            stack.enter_context(socket.create_connection(place)).sendall(b"shardwise-lau")
        for text in (
            b"GET / HTTP/1.1\r\n\r\n",
            b"[" * 100_000 + b"\n",
            b'{"beat": Infinity}\n',
            b'{"come": ["127.0.0.1", 1], "number": 9, "running": 0, "node": 1}\n',
            greeting + b'{"leave": 0}\n',
            greeting + code + b'{"hello": 1, "machines": 2, "ranks": 2, "slots": [0], "port": 1, "rank_port": 1}\n',
            greeting + code + b'{"come": ["127.0.0.1", 1], "number": 9, "running": 0, "node": 1}\n',
            greeting + greeting,
            b"\xff\n" * 9,
            b"\n" * 1000,
            b"x" * (1 << 21),
        ):
            with contextlib.suppress(OSError), socket.create_connection(place, timeout=5) as other:
                other.sendall(text)
                while other.recv(1 << 16):  # until it is closed
                    pass
        called_by_a_head = {"come": ("127.0.0.1", 1), "number": 9, "running": 0, "node": 1}
        leave: tuple[dict[str, Any], ...] = ({"leave": 0}, {"leave": 130}, called_by_a_head)
        for message in (*leave, hello(1, 2)):
            with contextlib.closing(called(place[1], b"the secret of another job")) as other:
                other.send(**message)
                wait_until(lambda: other.messages(0.1) or other.gone)
                assert other.refused
        # Whoever knows the secret is of the job, and may be wrong; what it says in one connection holds in no other.
        wrong: tuple[dict[str, Any], ...] = (
            {"beat": math.inf}, {"beat": 1 << 63}, {"leave": 0}, {"leave": 1e9}, {"beat": math.nan}, {"port": 0},
            {"port": 1 << 16}, {"beat": True}, {"ended": 0}, {"x" * (1 << 21): 0},
        )  # fmt: skip
        for message in wrong if node == 0 else ():
            with contextlib.closing(called(place[1], secret)) as other:
                other.send(**hello(7, 2))
                wait_until(lambda: other.messages(0.1))
                other.send(**message)
                wait_until(lambda: not other.messages(0.1) and other.gone)
        with contextlib.closing(called(place[1], secret)) as other:
            sent: list[bytes] = []
            mocked = mock.Mock(wraps=other._socket, sendall=lambda line: sent.append(line) or send(line))
            send, other._socket = other._socket.sendall, mocked
            other.send(hello=9)
            wait_until(lambda: other.messages(0.1) or other.gone)
        with socket.create_connection(place) as again:
            again.sendall(greeting.replace(b"0" * 32, other._nonce) + b"".join(sent))
            heard = b""
            while more := again.recv(1 << 16):
                heard += more
            assert b"has another secret" in heard
        (tmp_path / "go-0").touch()
        assert machines.codes() == [0, 0]
    said = machines.said(node)
    assert "Traceback" not in said + machines.said(1 - node)
    assert "closed a connection from 127.0.0.1, which is no launcher: sent b'GET / HTTP/1.1" in said
    assert "which sent a message that was not made with this job's secret for this connection" in said
    assert "generation 1: rank" in said


def test_a_message_is_heard_once_in_its_place_and_direction() -> None:
    for fault in ("replayed", "swapped", "reflected", "changed", "cut"):
        ours, theirs = socket.socketpair()
        near, far = socket.socketpair()
        with contextlib.ExitStack() as stack:
            caller = stack.enter_context(contextlib.closing(Channel(ours, SECRET)))
            answers = stack.enter_context(contextlib.closing(Channel(far, SECRET, accepted=True)))
            for end in (theirs, near):  # between both: whoever is on the way
                stack.enter_context(end)
                end.settimeout(60.0)
            near.sendall(theirs.recv(1000))
            theirs.sendall(near.recv(1000))
            assert not caller.messages()
            assert not answers.messages()
            caller.send(first=1)
            caller.send(second=2)
            first, second = re.findall(rb"[^\n]+\n", theirs.recv(1000))
            near.sendall(first)
            assert answers.messages() == [{"first": 1}]
            lines = {"replayed": first, "swapped": second + second, "changed": second.replace(b"2", b"3")}
            if fault == "reflected":
                theirs.sendall(first)
                assert caller.messages() == []
                assert caller.fault
                continue
            near.sendall(lines.get(fault, second[:70] + b"\n"))
            assert answers.messages() == ([{"second": 2}] if fault == "swapped" else [])
            assert answers.gone
            assert "not made with this job's secret for this connection" in answers.fault


def test_a_launcher_with_another_secret_says_so_and_waits_in_vain(start: Start, tmp_path: Path) -> None:
    machines = start("step(0)\nwait_for('end', 1)\n", ranks=1)
    wait_until(lambda: len(list(tmp_path.glob("step0-*"))) == 2)
    machines.environment["SHARDWISE_JOB_SECRET"] = "that of quite another job"
    machines.start(2, settings="wait_seconds=2")
    assert machines.running.pop(2).wait(timeout=60) == 1
    line = (
        f"the launcher at 127.0.0.1:{machines.port} has another secret than this machine: give every machine the same"
    )
    assert machines.said(2).count(line) == 1
    (tmp_path / "end-0").touch()
    assert machines.codes() == [0, 0]


def test_a_job_ends_with_0_only_where_every_rank_did() -> None:
    """A machine whose launcher stopped its ranks, on whatever word, has not ended well."""
    now = time.monotonic()
    head = Coordinator(RestartPolicy(ElasticConfig(), 1), 0, 1, {0}, now, now + 600.0, SECRET)
    ours, theirs = channels()
    with contextlib.closing(ours), contextlib.closing(theirs):
        head.admit(theirs, hello(0, 1))
        head.turn()
        ours.send(ended=0, code=STOPPED, failure=None, absent=[], rank_port=3)
        for _ in range(3):
            head.turn()
        assert not head.over
        assert head.number == 2, "it has begun the next generation"


def called(port: int, secret: bytes = SECRET) -> Channel:
    return Channel(socket.create_connection(("127.0.0.1", port)), secret)


def hello(node: int, machines: int) -> dict[str, Any]:
    named = {"slots": [0], "spares": [], "port": 1, "rank_port": 2, "name": "m", "version": version()}
    return {"hello": node, "machines": machines, "ranks": machines, **named}


@pytest.mark.parametrize(
    ("lost", "how", "goes_on"),
    [
        ((2,), "silent", True),
        ((1, 2), "silent", False),
        ((1, 2), "closed", True),
        ((1, 2), "closed behind a silence", False),
        ((1, 2), "closed while the head was away", False),
    ],
)
def test_a_head_goes_on_without_machines_that_may_live_only_with_half(
    lost: tuple[int, ...], how: str, goes_on: bool
) -> None:
    """The others, if they are more than half, go on without it."""
    now = time.monotonic()
    head = Coordinator(RestartPolicy(ElasticConfig(min_ranks=1), 3), 0, 3, {0, 1, 2}, now, now + 600.0, SECRET)
    with contextlib.ExitStack() as stack:
        ends: list[Channel] = []
        for node in range(3):
            ours, theirs = channels()
            ends.append(stack.enter_context(contextlib.closing(ours)))
            head.admit(stack.enter_context(contextlib.closing(theirs)), hello(node, 3))
        head.turn()
        assert head.running
        for node in lost:
            head.machines[node].channel.heard -= 100.0 * (how in ("silent", "closed behind a silence"))
            if how != "silent":
                ends[node].close()
        head.turned -= 100.0 * (how == "closed while the head was away")
        head.turn()
        for node in {0, 1, 2} - {*lost}:
            ends[node].send(ended=0, code=0, failure=None, absent=[], rank_port=3)
        head.turn()
        head.turn()
        assert (head.running, head.number) == (goes_on, 1 + goes_on)
        assert not head.over


@pytest.mark.parametrize(
    ("number", "running", "node", "gives_way"),
    [(1, 0, 2, False), (2, 0, 2, True), (0, 1, 0, False), (1, 1, 2, True), (1, 0, 0, True)],
)
def test_a_head_that_waits_gives_way_to_one_that_is_ahead_or_of_an_earlier_machine(
    number: int, running: int, node: int, gives_way: bool
) -> None:
    now = time.monotonic()
    head = Coordinator(RestartPolicy(ElasticConfig(), 2), 1, 3, set(), now, now + 600.0, SECRET, number=1)
    with contextlib.closing(Listener(0, SECRET)) as station:
        station.lead(head)
        station.start()
        with contextlib.closing(called(station.port)) as other:
            other.send(come=("127.0.0.1", 5), number=number, running=running, node=node)
            wait_until(lambda: other.messages(0.1) or other.gone)
        assert station.called == ("127.0.0.1", 5)
        assert (station.head is None, station.gave_way) == (gives_way, gives_way)


def answered(*messages: dict[str, Any], close: bool = False) -> tuple[GenerationStart | int, NodeAgent]:
    """What a launcher does that hears all of this from a head at once, and nothing more."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        course = RestartPolicy(ElasticConfig(wait_seconds=3.0), 2)
        member = NodeAgent(course, 1, 2, listener.getsockname()[:2], "", [0], SECRET, [])

        def answer() -> None:
            connection, _ = listener.accept()
            channel = Channel(connection, SECRET, accepted=True)
            assert channel.messages(60.0)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 0)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CORK, 1)  # the end travels with the words
            for message in messages:
                channel.send(**message)
            if close:
                channel.close()
            else:
                kept.append(channel)

        kept: list[Channel] = []
        thread = threading.Thread(target=answer)
        thread.start()
        with contextlib.closing(member):
            found = member.wait()
            thread.join()
            member.is_stopped()
        for channel in kept:
            channel.close()
        return found, member


def test_a_stop_that_comes_with_the_beginning_of_a_generation_is_heard() -> None:
    places = [(0, "127.0.0.1", 1), (1, "127.0.0.1", 2)]
    begin = {"generation": 0, "head": 0, "machines": places, "ranks": (1, 2), "slots": [0], "spares": []}
    begin |= {"master": ("127.0.0.1", 3), "suspect": False, "step": -1, "lost": -1, "how": ""}
    found, member = answered(begin, {"stop": 0})
    assert isinstance(found, GenerationStart)
    assert member.stopped
    found, member = answered(begin, {"beat": 0}, {"beat": 0})
    assert not member.stopped


def test_a_head_that_called_in_an_earlier_generation_makes_nobody_unsure(monkeypatch: pytest.MonkeyPatch) -> None:
    def connect(where: tuple[str, int], timeout: float) -> socket.socket:
        if where == stale:
            raise TimeoutError
        raise ConnectionRefusedError

    monkeypatch.setattr(node_agent, "_ANSWER_SECONDS", 0.2)
    stale = ("10.0.0.9", 5)
    for called_at, candidate, least in ((stale, "10.0.0.1", 1), (None, stale[0], 2), (stale, stale[0], 2)):
        member = NodeAgent(RestartPolicy(ElasticConfig(), 3), 2, 3, ("127.0.0.1", 1), "", [0], SECRET, [])
        with mock.patch.object(socket, "create_connection", connect):
            member.crew, member.number = [(0, "10.0.0.0", 5), (1, candidate, 5), (2, "10.0.0.2", 5)], 0
            member.station.called = called_at
            assert member._follow() is None
        assert member.station.head is not None
        assert member.station.head.least == least
        member.close()
    begin = {"ranks": [0, 1], "slots": [0], "spares": [], "how": "", "master": ["a", 1], "step": 0, "suspect": False}
    begin["lost"] = -1
    member.station.called = stale
    member._take(begin)
    assert member.station.called is None


def test_the_end_of_a_job_is_heard_from_a_head_that_closes_behind_it() -> None:
    assert answered({"end": 7, "why": ""}, close=True)[0] == 7


def test_interrupting_the_head_that_waits_for_machines_ends_the_job() -> None:
    course = RestartPolicy(ElasticConfig(), 3)
    member = NodeAgent(course, 0, 3, ("127.0.0.1", free_port()), "", [0], SECRET, [])
    with contextlib.closing(called(member.station.port)) as other:
        other.send(**hello(1, 3))
        wait_until(lambda: other.messages(0.1))
        wait_until(member._meet)
        member.station._closing = True  # as when the other thread has just looked around
        member.station.join()
        member.caught.append(signal.SIGTERM)
        assert member.wait() == 130
        thread = threading.Thread(target=member.close)
        thread.start()
        heard: list[Any] = []
        wait_until(lambda: heard.extend(other.messages(0.1)) or other.gone)
        other.close()
        thread.join()
    assert [message["end"] for message in heard if "end" in message] == [130]


def test_half_of_a_divided_network_does_not_begin() -> None:
    """A head that took over since the first one was silent needs more than half of the machines."""
    now = time.monotonic()
    head = Coordinator(
        RestartPolicy(ElasticConfig(min_ranks=1), 4), 1, 4, {1, 2, 3}, now, now + 600.0, SECRET, number=1, least=3
    )
    ends = [channels() for _ in range(3)]
    for node, (_, theirs) in enumerate(ends, start=1):
        head.admit(theirs, hello(node, 4))
        head.turn()
        assert head.running == (node == 3)
    assert any(message.get("generation") == 1 for message in ends[0][0].messages(60.0))
    for pair in ends:
        for end in pair:
            end.close()


def test_settings_that_cannot_be_are_refused(script: Callable[[str], str]) -> None:
    path = script("")
    hosts = (Host("a", (0, 2)), Host("b", (1, 3)))
    with raises(LaunchError, "--elastic"):
        launch([path], machines=JobMachines(hosts), elastic=ElasticConfig())
    with raises(LaunchError, "--wait-for-machines", 0):
        launch([path], 1, JobMachines((), 2, 0, "a", 1), elastic=ElasticConfig(wait_seconds=0))
    with raises(LaunchError, "node rank 2", "2 nodes", fix="--node-rank 1"):
        launch([path], 1, JobMachines((), 2, 2, "a", 1))
    with raises(LaunchError, "node rank 1", "1 nodes", fix="--node-rank 1"):
        launch([path], 1, JobMachines(node_rank=1), elastic=ElasticConfig())
