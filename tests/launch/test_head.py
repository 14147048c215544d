"""The head of a job on several machines, told what launchers say."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import asdict

import pytest

import shardwise as sw
from launch.machines import channels
from shardwise.launch.coordinator import Coordinator
from shardwise.launch.processes import Failure
from shardwise.launch.restart_policy import ElasticConfig, RestartPolicy

RANKS = 2  # of each machine


class Job:
    """A head, and the launchers of two machines as it hears of them."""

    def __init__(self) -> None:
        now = time.monotonic()
        self.head = Coordinator(
            RestartPolicy(ElasticConfig(min_ranks=1), 2 * RANKS), 0, 2, {0, 1}, now + 60, now + 60, b""
        )
        self.launchers = []
        for node in range(2):
            own, heads = channels()
            slots = list(range(RANKS))
            hello = {"hello": node, "machines": 2, "ranks": 2 * RANKS, "slots": slots, "spares": [], "port": 1}
            hello |= {"rank_port": 2, "name": f"host{node}", "version": sw.__version__}
            self.head.admit(heads, hello)
            self.launchers.append(own)
        self.head.turn()
        assert all("ranks" in self.heard(node)[0] for node in range(2))

    def heard(self, node: int) -> list[dict[str, object]]:
        return [dict(message) for message in self.launchers[node].messages() if "beat" not in message]


@pytest.fixture
def job() -> Iterator[Job]:
    made = Job()
    yield made
    for channel in (*made.launchers, *(machine.channel for machine in made.head.machines.values())):
        channel.close()


def test_a_rank_with_wrong_copies_on_a_machine_that_is_lost_costs_no_other_machine_a_slot(job: Job) -> None:
    job.launchers[1].close()
    job.head.turn()
    assert job.heard(0) == [{"stop": 0}]
    blamed = asdict(Failure(rank=0, seconds=1.0, exit_code=1, error="copies differ", blames=(3,), differs=True))
    job.launchers[0].send(ended=0, code=1, failure=blamed, absent=[], rank_port=3)
    job.head.turn()
    job.head.turn()
    (begin,) = job.heard(0)
    assert begin["slots"] == [0, 1]
    assert begin["ranks"] == [0, RANKS]
    assert begin["suspect"] is True
    assert str(begin["how"]).startswith("rank 3 failed with exit code 1")


def test_ranks_meet_at_the_port_that_was_free_last(job: Job) -> None:
    job.launchers[1].close()
    job.head.turn()
    assert job.heard(0) == [{"stop": 0}]
    job.launchers[0].send(ended=0, code=0, failure=None, absent=[], rank_port=3)
    job.launchers[0].send(port=5)
    job.head.turn()
    job.head.turn()
    (begin,) = job.heard(0)
    assert begin["master"] == ["host0", 5]


@pytest.mark.parametrize("missing", ["code", "failure", "absent", "rank_port", "blames"])
def test_an_incomplete_word_ends_its_connection_and_not_the_head(job: Job, missing: str) -> None:
    failure = asdict(Failure(rank=2, seconds=1.0, exit_code=1))
    word = {"code": 1, "failure": failure, "absent": [], "rank_port": 3}
    (failure if missing == "blames" else word).pop(missing)
    job.launchers[1].send(ended=0, **word)
    job.head.turn()
    job.head.turn()
    assert 1 not in job.head.machines
    assert job.heard(0) == [{"stop": 0}]


def test_the_first_word_of_a_head_may_be_long_and_that_of_a_stranger_may_not() -> None:
    for is_heads in (True, False):
        caller, called = channels()
        speaker, listener = (called, caller) if is_heads else (caller, called)
        speaker.send(machines=[[node, f"node-{node}.cluster.internal", 29500 + node] for node in range(3200)])
        heard = [message for _ in range(20) for message in listener.messages(0.05)]
        assert bool(heard) == is_heads
        assert listener.gone != is_heads
        speaker.close()
        listener.close()


def test_a_machine_that_refuses_a_call_is_cut_off_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    policy, now = RestartPolicy(ElasticConfig(min_ranks=1), 8), time.monotonic()
    head = Coordinator(policy, 1, 4, {2, 3}, now, now + 60, b"")
    head.addresses = {node: (f"host{node}", 1) for node in range(4)}
    answers: list[OSError] = [ConnectionRefusedError(), TimeoutError(), TimeoutError()]
    monkeypatch.setattr("shardwise.launch.coordinator.connect_all", lambda *_: answers)
    for last, cut_off, ended in ((TimeoutError(), {2, 3}, {0}), (ConnectionRefusedError(), {2}, {0, 3})):
        answers[2], now = last, now + 60
        head._call_the_missing(now)
        assert (head.cut_off, head.ended) == (cut_off, ended)


@pytest.mark.parametrize("theirs", ["9.9", None])
def test_a_launcher_of_another_version_is_refused_by_name_and_changes_nothing(job: Job, theirs: str | None) -> None:
    own, heads = channels()
    job.head.admit(heads, {"hello": 1} | ({} if theirs is None else {"version": theirs}))  # without what others say
    (answer,) = own.messages(1.0)
    own.close()
    assert answer["end"] == 1
    runs = f"machine 1 runs shardwise {theirs or 'of an unknown version'}, machine 0 {sw.__version__}"
    assert answer["why"] == f"{runs}: install the same everywhere"
    assert set(job.head.machines) == {0, 1}
    job.head.turn()
    assert not any(job.launchers[node].gone for node in (0, 1))
