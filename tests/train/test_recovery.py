"""Training that loses ranks: no step, no sample and no digit of the losses is lost."""

from __future__ import annotations

import errno
import os
import random
import signal
import subprocess
import sys
import time
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import shardwise as sw
from launch.gloo_ranks import RunRanks
from shardwise.errors import PlanWarning, StragglerWarning
from shardwise.launch.launcher import launch
from shardwise.launch.restart_policy import ElasticConfig
from shardwise.plans.plan import Plan
from shardwise.runtime import agree
from shardwise.runtime.generation import Generation, current
from shardwise.runtime.heartbeat_file import HeartbeatFile, trail
from shardwise.train.peers import PeerCopy, Peers
from shardwise.train.recovery import Rounds, slowness
from train import elastic_run
from train.runs import batch, make, split

SCRIPT = str(Path(elastic_run.__file__))


@pytest.fixture(autouse=True)
def scripts_find_the_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is launched imports from the folder of the tests, as pytest does."""
    known = os.environ.get("PYTHONPATH")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (str(Path(__file__).parents[1]), known))))


def uninterrupted(folder: str, num_steps: int, kind: str) -> None:
    elastic_run.train(Path(folder), num_steps, kind, {})


def check_equal(folder: Path, expected: Path, num_steps: int) -> None:
    """Rounding differs with the order of summation, under plans for other numbers of ranks: 1e-16 a step, of losses up
    to 10, times what a chaotic run makes of it."""
    found, wanted = elastic_run.losses(folder), elastic_run.losses(expected)
    assert list(found) == list(range(1, num_steps + 1))
    for step, (loss, *place) in found.items():
        assert abs(loss - wanted[step][0]) < 1e-10
        assert place == list(wanted[step][1:])


@pytest.mark.parametrize("keeps", [pytest.param(False, marks=pytest.mark.long), True])
def test_a_killed_and_a_stopped_rank_cost_no_step(
    run_ranks: RunRanks, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, keeps: bool
) -> None:
    monkeypatch.setenv("PYTHONWARNINGS", "ignore")
    lost, whole = tmp_path / "lost", tmp_path / "whole"
    lost.mkdir()
    whole.mkdir()
    run_ranks(uninterrupted, 1, str(whole), 12, "zero")
    command = [SCRIPT, str(lost), "12", "zero", "0:6:1:SIGKILL", "1:9:0:stopped for long"]
    assert launch(command, 3, elastic=ElasticConfig(min_ranks=2, keeps=keeps)) == 0
    said = capfd.readouterr()
    assert "rank 1 was killed by SIGKILL after step 5; generation 1 goes on with 2 ranks, without slot 1" in said.err
    assert "rank 0 gave no sign of life for" in said.err
    assert "after step 8; generation 2 goes on with a fresh process on slot 0" in said.err
    assert "training goes on after step 5, which was kept in memory" in said.out
    assert "training goes on after step 8, which was kept in memory" in said.out
    check_equal(lost, whole, 12)
    assert sorted(path.name for path in (lost / "run").iterdir()) == ["log.jsonl", "step-10", "step-12", "step-5"]


# ---------------------------------------------------------------------------------------------------- what is in memory


def steps_in(memory: Path) -> list[int]:
    """Return what rank 0 finds, on every rank."""
    found = Peers(PeerCopy(memory / "steps"), is_local=True).whole_states()
    steps: list[int] = agree.gather_values([state.step for state in found])[0]
    return steps


def keeping(memory: str) -> None:
    """On a rank: states are kept, found again, distrusted, given up."""
    current.generation = Generation(0, memory)
    folder, rank = Path(memory), dist.get_rank()
    par = split("zero2")
    optimizer = torch.optim.AdamW(par.parameters(), lr=0.01)
    loader = sw.DataLoader(elastic_run.data(), par, 12, seed=5)
    batches = iter(loader)
    page = HeartbeatFile.create(folder.parent / f"page-{rank}")
    trail.write_to(folder.parent / f"page-{rank}")
    recovery = sw.Recovery(par, optimizer, data=loader)
    assert recovery.resume() == 0
    states: list[list[torch.Tensor]] = []

    def state() -> list[torch.Tensor]:
        kept = [t for p in par.parameters() for _, t in sorted(optimizer.state.get(p, {}).items())]
        return [t.detach().clone() for t in (*par.parameters(), *par.buffers(), *kept)]

    for step in range(1, 5):
        par.step(*next(batches))
        optimizer.step()
        optimizer.zero_grad()
        stops = recovery.keep(step, extra={"at": step}, stopping=step == 3 and rank == 1)
        assert stops == (step == 3)
        states.append(state())
    seen = page.read()
    assert (seen.step, seen.what, seen.waits) == (4, "the ranks meet after a step", False)
    dist.barrier()
    assert steps_in(folder) == [4, 3]

    def again(number: int, suspect: bool = False) -> tuple[int, sw.Parallel]:
        current.generation = Generation(number, memory, suspect)
        nonlocal par, optimizer
        par = sw.parallelize(make(3), par.plan, seed=8)
        optimizer = torch.optim.AdamW(par.parameters(), lr=0.5)
        other = sw.DataLoader(elastic_run.data(), par, 12, seed=5)
        new = sw.Recovery(par, optimizer, data=other)
        step = new.resume()
        assert (other.cursor, new.extra) == (12 * step, {"at": step} if step else None)
        return step, par

    assert again(1)[0] == 4
    assert all(torch.equal(a, b) for a, b in zip(state(), states[3], strict=True))
    dist.barrier()
    if rank == 1:  # was killed while it filled the slot
        (folder / "steps" / "0" / "shard-00001-of-00002.safetensors-1.note").unlink()
    dist.barrier()
    assert again(2)[0] == 3
    assert all(torch.equal(a, b) for a, b in zip(state(), states[2], strict=True))
    dist.barrier()
    assert again(3, suspect=True)[0] == 0  # no check has passed
    dist.barrier()
    assert steps_in(folder) == []


def stages_found_equal(memory: str) -> int:
    """On a rank of two stages that compare replicas in every second step: the step that is resumed after a generation
    whose copies differed."""
    current.generation = Generation(0, memory)
    how: dict[str, Any] = {"stages": 2, "micro_batch": 6, "mesh": sw.Mesh(dp=1)}
    with warnings.catch_warnings(action="ignore"):  # batch norm in parts of a batch: not what is tested here
        plan = sw.plan(make(), batch(0), 2, search="sharding_propagation", **how)
        par = sw.parallelize(make(), plan, seed=7, check_replicas=2)
    optimizer = torch.optim.AdamW(par.parameters())
    recovery = sw.Recovery(par, optimizer)
    recovery.resume()
    for step in range(1, 4):
        par.step(*batch(step))
        optimizer.step()
        recovery.keep(step)
    dist.barrier()
    current.generation = Generation(1, memory, suspect=True)
    return sw.Recovery(par, optimizer).resume()


def test_a_check_of_stages_says_which_states_are_trusted(run_ranks: RunRanks, tmp_path: Path) -> None:
    """The third step was checked: it saw the state after the second."""
    assert run_ranks(stages_found_equal, 2, str(tmp_path)) == [2, 2]


def full(memory: str) -> None:
    """On a rank: there is no room for the second copy, on one of them."""
    current.generation = Generation(0, memory)
    par = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(par.parameters())
    recovery = sw.Recovery(par, optimizer)
    recovery.resume()
    no_room = OSError(errno.ENOSPC, "No space left on device")
    with warnings.catch_warnings(record=True, action="always") as caught, mock.patch("os.posix_fallocate") as allocate:
        allocate.side_effect = no_room if dist.get_rank() else None
        for step in range(1, 3):
            par(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            recovery.keep(step)
    said = [str(one.message) for one in caught if one.category is PlanWarning]
    assert len(said) == (dist.get_rank() == 0)
    assert all("steps are not kept in memory any more ([Errno 28] No space left" in text for text in said)
    assert steps_in(Path(memory)) == []


def slow() -> int:
    """On a rank: rank 1 takes its time."""
    rounds = Rounds()
    with warnings.catch_warnings(record=True, action="always") as caught:
        for _ in range(25):
            time.sleep(0.06 if dist.get_rank() else 0.004)
            rounds.meet()
    said = [str(one.message) for one in caught if one.category is StragglerWarning]
    assert all("rank 1 is " in text and "% slower than the others" in text for text in said)
    return len(said)


def everything(memories: list[str]) -> int:
    keeping(memories[0])
    full(memories[1])
    current.generation = None
    return slow()


def test_what_is_kept_is_found_unless_it_is_torn_or_distrusted_and_slow_ranks_are_named(
    run_ranks: RunRanks, tmp_path: Path
) -> None:
    memories = [tmp_path / "one" / "memory", tmp_path / "two" / "memory"]
    for memory in memories:
        memory.mkdir(parents=True)
    assert run_ranks(everything, 2, list(map(str, memories))) == [1, 0]  # once, and by rank 0


def test_a_module_may_have_an_attribute_of_the_name_of_the_replica_check() -> None:
    module = torch.nn.Linear(4, 4)
    vars(module)["_replicas"] = "of its own"
    assert sw.Recovery(module).keep(1) is False


def test_a_straggler_is_slower_than_the_others_most_of_the_time() -> None:
    assert slowness([[0.1, 0.1, 0.13]] * 20, 2) == pytest.approx((0.13, 0.1))
    assert slowness([[0.1, 0.1, 0.13]] * 20, 0) is None
    assert slowness([[0.1, 0.1, 0.115]] * 20, 2) is None
    assert slowness([[0.1]] * 20, 0) is None  # alone on its stage
    assert slowness([[0.1, 0.1, 0.1]] * 18 + [[0.1, 0.1, 2.0]] * 2, 2) is None  # twice only
    assert slowness([[0.0001, 0.0001, 0.0005]] * 20, 2) is None  # too short to say


def test_busy_times_that_nobody_compares_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    rounds = Rounds()
    tree = mock.Mock()
    tree.largest.return_value = torch.zeros(1)
    monkeypatch.setattr(rounds, "_tree", tree)
    monkeypatch.setattr(rounds, "_on_host", False)  # as on a GPU
    for _ in range(50):
        rounds.meet()
    assert rounds._seconds == []


def test_a_stage_with_more_work_is_no_straggler_and_a_rank_slower_than_its_own_stage_is() -> None:
    rounds = Rounds([(0, 1, 2), (3, 4, 5)])
    rounds._busy.extend([[0.1, 0.1, 0.1, 0.3, 0.3, 0.4]] * 20)
    with pytest.warns(
        StragglerWarning, match=r"rank 5 is 33% slower .* 0\.4000 s of each, the others for 0\.3000 s"
    ) as said:
        rounds._name_stragglers()
    assert len(said) == 1


def test_a_plan_is_made_once_per_job_and_number_of_ranks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from shardwise.train import recovery

    made: list[int] = []

    def make() -> Plan:
        made.append(1)
        return sw.plan(torch.nn.Linear(4, 4), torch.zeros(4, 4), 2, mesh=sw.Mesh(dp=2), mode="data_parallel")

    def turn(generation: Generation | None, rank: int) -> Plan | None:
        monkeypatch.setattr(recovery, "_turns", iter(range(9)))
        monkeypatch.setattr(recovery, "rank_and_world_size", lambda: (rank, 2))
        monkeypatch.setattr(current, "generation", generation)
        return sw.planned(make)

    assert turn(None, 1) is None
    assert turn(None, 0) == make()
    made.clear()
    first = turn(Generation(0, str(tmp_path)), 0)
    assert turn(Generation(1, str(tmp_path)), 0) == first
    assert turn(Generation(1, str(tmp_path)), 1) is None
    assert len(made) == 1
    next(tmp_path.iterdir()).write_text("{}")
    assert turn(Generation(2, str(tmp_path)), 0) == first
    with pytest.raises(SystemExit):
        turn(Generation(0, str(tmp_path), rehearses=3), 0)


# ------------------------------------------------------------------------------------------------------------ long runs


@pytest.mark.long
def test_copies_that_differ_send_training_back_to_what_was_checked(
    run_ranks: RunRanks, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    lost, whole = tmp_path / "lost", tmp_path / "whole"
    lost.mkdir()
    whole.mkdir()
    run_ranks(uninterrupted, 1, str(whole), 9, "checked")
    command = [SCRIPT, str(lost), "9", "checked", "0:6:2:differ"]
    assert launch(command, 3, elastic=ElasticConfig()) == 0
    said = capfd.readouterr()
    assert "rank 2 failed with exit code 1 (ReplicaError" in said.err
    assert "training goes on after step 4, which was kept in memory" in said.out
    check_equal(lost, whole, 9)


@pytest.mark.long
def test_a_stage_that_hangs_is_named_by_what_the_others_wait_for(
    run_ranks: RunRanks, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONWARNINGS", "ignore")
    lost, whole = tmp_path / "lost", tmp_path / "whole"
    lost.mkdir()
    whole.mkdir()
    run_ranks(uninterrupted, 2, str(whole), 8, "stages")
    command = [SCRIPT, str(lost), "8", "stages", "0:4:1:hang"]
    assert launch(command, 2, elastic=ElasticConfig(idle_seconds=20.0)) == 0  # more than it takes to make a program
    said = capfd.readouterr()
    assert "rank 1 came to no collective for" in said.err
    assert "where:  rank 1 was in happens (elastic_run.py" in said.err
    assert "ahead of stage 0, backward of micro-batch 0" in said.err
    assert "training goes on after step 3, which was kept in memory" in said.out
    check_equal(lost, whole, 8)


@pytest.mark.long
@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.parametrize(
    ("num_ranks", "kind", "num_kills", "how", "num_steps"),
    [
        (8, "dp", 20, "SIGKILL", 400),
        (2, "zero", 330, "SIGKILL", 6000),
        (3, "dp", 150, "SIGKILL", 3000),
        (3, "zero", 5, "SIGSTOP", 400),
    ],
)
def test_many_losses_at_any_moment(
    run_ranks: RunRanks,
    tmp_path: Path,
    num_ranks: int,
    kind: str,
    num_kills: int,
    how: str,
    num_steps: int,
    keeps: bool,
) -> None:
    """While it trains, saves, loads, begins, and recovers from the loss before: 1,000 kills in all."""
    rng = random.Random(num_ranks)
    lost, whole = tmp_path / "lost", tmp_path / "whole"
    lost.mkdir()
    whole.mkdir()
    run_ranks(uninterrupted, num_ranks, str(whole), num_steps, kind)
    start = (
        "import sys; from shardwise.launch.launcher import launch;"
        "from shardwise.launch.restart_policy import ElasticConfig;"
        f"elastic = ElasticConfig(max_failures=100_000, silent_seconds=5.0, keeps={keeps});"
        f"sys.exit(launch(sys.argv[1:], {num_ranks}, elastic=elastic))"
    )
    pace = "0.05" if num_steps <= 400 else "0.02"  # seconds: so that the last loss finds it training
    environment = {**os.environ, "STEP_SECONDS": pace, "PYTHONWARNINGS": "ignore"}
    job = subprocess.Popen([sys.executable, "-c", start, SCRIPT, str(lost), str(num_steps), kind], env=environment)
    try:
        while not (lost / "losses").exists():
            assert job.poll() is None
            time.sleep(0.1)
        for _ in range(num_kills):
            time.sleep(rng.uniform(0, 2 + num_ranks))
            if found := ranks_of(job.pid):
                with suppress(ProcessLookupError):  # it has just ended
                    os.kill(rng.choice(found), getattr(signal, how))
        assert job.wait(timeout=1200) == 0
    finally:
        job.kill()
    check_equal(lost, whole, num_steps)


def ranks_of(launcher: int) -> list[int]:
    parents = {}
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(status.parent.name)] = int(status.read_text().rsplit(")", 1)[1].split()[1])
        except OSError:  # has ended
            continue
    zygotes = [pid for pid, parent in parents.items() if parent == launcher]
    return [pid for pid, parent in parents.items() if parent in zygotes]
