"""Elastic jobs on several machines: who is named, who goes on, who leads, and who is refused.

Every machine is a launcher of its own on this one; ranks load no torch (``tests/train/test_lost_machines.py`` trains).
"""

from __future__ import annotations

import contextlib
import re
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from launch.jobs import gone
from launch.machines import Machines
from shardwise.errors import LaunchError
from shardwise.hosts import Host
from shardwise.launch.channel import Channel
from shardwise.launch.course import Course, Elastic
from shardwise.launch.head import Head
from shardwise.launch.launcher import free_port, launch

BODY = """
from shardwise.runtime.generation import read_generation
from shardwise.runtime.pages import PAGE
from shardwise.runtime.trail import trail

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


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_the_others_go_on_without_a_machine_and_take_it_back(start: Start, tmp_path: Path, lost: int) -> None:
    body = """
step(10 * generation)
if generation == 0:
    hang()
if generation == 1:
    wait_for("back", 1)
    time.sleep(0.5)
    step(10 * generation + 1)
    hang()
"""
    machines = start(body, machines=3, ranks=1, settings="min_ranks=2")
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
    who = f"machine {lost}, which led, is gone" if lost == 0 else f"machine {lost} with rank {lost} is gone"
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
    body = """
step(10 * generation)
if generation == 0:
    hang()
if generation == 1:
    wait_for("back", 1)
    step(10 * generation + 1)
    hang()
"""
    machines = start(body, ranks=1, settings="min_ranks=1, silent_seconds=4")
    wait_until(lambda: len(list(tmp_path.glob("step0-*"))) == 2)
    machines.running[1].send_signal(signal.SIGSTOP)
    wait_until(lambda: list(tmp_path.glob("step10-*")))
    machines.running[1].send_signal(signal.SIGCONT)
    (tmp_path / "back-0").touch()
    assert machines.codes() == [0, 0]
    assert "machine 1 with rank 1 gave no sign of life for" in machines.said(0)
    assert "the others went on without this machine, which was silent" in machines.said(1)
    assert "goes on with 2 ranks" in machines.said(1)
    assert "which led" not in machines.said(1)


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


def test_whoever_says_what_no_launcher_would_changes_nothing(start: Start, tmp_path: Path) -> None:
    machines = start("step(0)\nwait_for('end', 1)\n", ranks=1)
    wait_until(lambda: len(list(tmp_path.glob("step0-*"))) == 2)
    for text in (
        b"GET / HTTP/1.1\r\n\r\n",
        b"[" * 100_000 + b"\n",
        b'{"hello": 5}\n',
        b'{"come": 3}\n',
        b"\xff\n" * 9,
        b"x" * (1 << 21),
    ):
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", machines.port), timeout=5) as other:
            other.sendall(text)
            other.recv(100)
    (tmp_path / "end-0").touch()
    assert machines.codes() == [0, 0]


def test_half_of_a_divided_network_does_not_begin() -> None:
    """A head that took over since the first one was silent needs more than half of the machines."""
    now = time.monotonic()
    head = Head(Course(Elastic(min_ranks=1), 4), 1, 4, {1, 2, 3}, now, now + 600.0, number=1, least=3)
    ends = [socket.socketpair() for _ in range(3)]
    for node, (ours, theirs) in enumerate(ends, start=1):
        hello = {
            "hello": node,
            "machines": 4,
            "ranks": 4,
            "slots": [0],
            "spares": [],
            "port": 1,
            "rank_port": 2,
            "name": "m",
        }
        head.admit(Channel(theirs), hello)
        head.turn()
        assert head.running == (node == 3)
        ours.settimeout(1.0)
    assert b'"generation": 1' in ends[0][0].recv(1 << 16)
    for pair in ends:
        for end in pair:
            end.close()


def test_settings_that_cannot_be_are_refused(script: Callable[[str], str]) -> None:
    path = script("")
    hosts = (Host("a", (0, 2)), Host("b", (1, 3)))
    with pytest.raises(LaunchError, match="numbers the ranks machine by machine"):
        launch([path], hosts=hosts, elastic=Elastic())
    with pytest.raises(LaunchError, match="--wait-for-machines 0 leaves no time"):
        launch([path], 1, nnodes=2, master_addr="a", master_port=1, elastic=Elastic(wait_seconds=0))
    with pytest.raises(LaunchError, match="node rank 2 is not one of 2 nodes"):
        launch([path], 1, nnodes=2, node_rank=2, master_addr="a", master_port=1)
    with pytest.raises(LaunchError, match="node rank 1 is not one of 1 nodes"):
        launch([path], 1, node_rank=1, elastic=Elastic())
