"""Jobs that outlive their ranks: who is named, what takes its place, and when a job ends all the same.

Ranks here load no torch; ``tests/train/test_recovery.py`` trains.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from launch.jobs import PROMPTLY, Job, gone
from raising import raises
from shardwise.cli import main
from shardwise.errors import LaunchError
from shardwise.launch import elastic, hang_detector, zygote
from shardwise.launch.hang_detector import HangDetector
from shardwise.launch.job import JobSettings
from shardwise.launch.restart_policy import ElasticConfig
from shardwise.runtime import private
from shardwise.runtime.heartbeat_file import Heartbeat, HeartbeatFile

BODY = """
from shardwise.runtime.generation import read_generation
from shardwise.runtime.heartbeat_file import PAGE
from shardwise.runtime.heartbeat_file import trail

generation = read_generation(os.environ).number
size = int(os.environ["WORLD_SIZE"])

def hang():
    time.sleep(60)

"""


@pytest.fixture(autouse=True)
def without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zygote, "PRELOADED", ())


def test_a_spare_then_fewer_ranks_then_a_fresh_process_take_the_place_of_a_killed_rank(
    job: Job, tmp_path: Path
) -> None:
    body = """
    print(generation, rank, size, os.environ.get("CUDA_VISIBLE_DEVICES"), os.environ["LOCAL_RANK"])
    mark(f"said{generation}")
    wait_for(f"said{generation}", size)
    if rank == (1, 0, 1, -1)[generation]:
        os.kill(os.getpid(), signal.SIGKILL)
    if generation < 3:
        time.sleep(60)
    """
    settings = ElasticConfig(min_ranks=2, spares=1)
    outcome = job(BODY + textwrap.dedent(body), 3, elastic=settings, settings=JobSettings(tmp_path / "logs"))
    assert outcome.exit_code == 0
    assert outcome.seconds < PROMPTLY
    said = [line for line in outcome.stderr.splitlines() if "goes on" in line]
    assert said == [
        "shardwise: rank 1 was killed by SIGKILL; generation 1 goes on with slot 3 in place of slot 1",
        "shardwise: rank 0 was killed by SIGKILL; generation 2 goes on with 2 ranks, without slot 0",
        "shardwise: rank 1 was killed by SIGKILL; generation 3 goes on with a fresh process on slot 2",
    ]
    assert (tmp_path / "logs" / "rank-1.log").read_text().splitlines() == [
        "0 1 3 None 1",
        "1 1 3 0,3,2 1",
        "2 1 2 3,2 1",
        "3 1 2 3,2 1",
    ]


def test_spares_are_devices_that_the_user_chose(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6")
    body = "print(os.environ['CUDA_VISIBLE_DEVICES'])\nif generation == 0 and rank == 0: sys.exit(3)"
    outcome = job(BODY + body, 2, elastic=ElasticConfig(spares=1))
    assert outcome.stdout == "4,5,6\n6,5\n"
    assert "rank 0 failed with exit code 3; generation 1 goes on with slot 2 in place of slot 0" in outcome.stderr
    with raises(LaunchError, "4 ranks", "there are 3: 4, 5, 6"):
        job(body, 2, elastic=ElasticConfig(spares=2))


def test_a_script_that_fails_the_same_way_again_ends_the_job(job: Job) -> None:
    outcome = job(BODY + "if rank == 1: raise ValueError(f'number {generation}')\nhang()", elastic=ElasticConfig())
    assert outcome.exit_code == 1
    assert "ValueError: number 0" in outcome.stderr
    assert "ValueError: number 1" in outcome.stderr
    assert outcome.last_line.startswith("shardwise: the script failed twice without a step in between")


def test_steps_in_between_count_and_losses_without_any_are_limited(job: Job) -> None:
    fails = """
    if rank == 1:
        if generation < 4:
            trail.write_to(os.environ[PAGE]); trail.step_done(generation)
            raise ValueError
        os.kill(os.getpid(), signal.SIGTERM)
    hang()
    """
    outcome = job(BODY + textwrap.dedent(fails), elastic=ElasticConfig(max_failures=2))
    assert outcome.exit_code == 128 + signal.SIGTERM
    assert outcome.stderr.count("goes on") == 5
    assert "after step 3; generation 4 goes on" in outcome.stderr
    assert outcome.last_line == "shardwise: 3 losses without a step in between: --max-failures 2"


def test_a_stopped_rank_is_named_and_replaced(job: Job, tmp_path: Path) -> None:
    body = """
    trail.write_to(os.environ[PAGE])
    if generation == 0:
        open(os.path.join(here, f"pid-{rank}"), "w").write(str(os.getpid()))
        if rank == 1: os.kill(os.getpid(), signal.SIGSTOP)
        hang()
    """
    outcome = job(BODY + textwrap.dedent(body), elastic=ElasticConfig(silent_seconds=1.5))
    assert outcome.exit_code == 0
    assert "rank 1 gave no sign of life for 2 seconds" in outcome.stderr
    assert gone([int((tmp_path / f"pid-{rank}").read_text()) for rank in range(2)])


def test_a_rank_for_which_all_others_wait_is_named_with_what_they_wait_for(job: Job) -> None:
    body = """
    trail.write_to(os.environ[PAGE])
    with trail.waiting(b"all_reduce over dp for /add (gpt.py:81), forward"):
        pass
    if generation == 0:
        trail.step_done(7)
        if rank == 2: hang()
        with trail.waiting(b"all_reduce over dp for /mul (gpt.py:82), backward"):
            time.sleep(60)
    """
    outcome = job(BODY + textwrap.dedent(body), 3, elastic=ElasticConfig(idle_seconds=0.5))
    assert outcome.exit_code == 0
    lines = outcome.stderr.splitlines()
    assert "shardwise: rank 2 came to no collective for" in lines[0]
    assert lines[1].startswith("  where:  rank 2 was in hang (script.py:")
    assert lines[2:4] == [
        "  waits:  ranks 0, 1 waited in collective 2, after step 7: all_reduce over dp for /mul (gpt.py:82), backward",
        "  waits:  rank 2 had left collective 1, after step 7: all_reduce over dp for /add (gpt.py:81), forward",
    ]


def test_the_rank_that_did_not_come_is_lost_and_not_the_one_that_gave_up(job: Job) -> None:
    body = """
    trail.write_to(os.environ[PAGE])
    if generation == 0:
        if rank == 0:
            mark("ready"); hang()
        wait_for("ready", 1)
        with trail.waiting(b"a barrier"):
            time.sleep(0.2)
            raise RuntimeError("Timed out waiting 200ms for recv")
    """
    outcome = job(BODY + textwrap.dedent(body), 2, elastic=ElasticConfig(spares=1))
    assert outcome.exit_code == 0
    assert "where:  rank 0 was in hang (script.py:" in outcome.stderr
    assert "waits:  rank 1 waited in collective 1, a barrier" in outcome.stderr.replace("collective 1, after", "")
    assert "rank 0 did not come to a collective of the others; generation 1 goes on with slot 2" in outcome.stderr


def test_a_rank_that_another_names_is_lost_and_not_a_third_that_waits_unseen(job: Job) -> None:
    body = """
    from shardwise.errors import CollectiveError
    trail.write_to(os.environ[PAGE])
    if generation == 0:
        mark("ready")
        if rank < 2: hang()
        wait_for("ready", 3)
        raise CollectiveError("activations from stage 1 timed out; rank 1 did not arrive", [1])
    """
    outcome = job(BODY + textwrap.dedent(body), 3, elastic=ElasticConfig(min_ranks=2))
    assert outcome.exit_code == 0
    assert "rank 1 did not come to a collective of the others; generation 1 goes on with 2 ranks, without slot 1" in (
        outcome.stderr
    )


def test_the_rank_whose_copies_differ_is_lost_and_the_next_generation_trusts_less(job: Job) -> None:
    body = """
    from shardwise.errors import ReplicaError
    print(read_generation(os.environ).suspect, flush=True)
    mark(f"said{generation}"); wait_for("said0", 3)  # the first that fails ends the others
    if generation == 0: raise ReplicaError("copies are not equal: rank 2 differs from ranks 0, 1", [2])
    """
    outcome = job(BODY + textwrap.dedent(body), 3, elastic=ElasticConfig(min_ranks=2))
    assert (outcome.exit_code, outcome.stdout) == (0, "False\nTrue\n")
    assert "rank 2 failed with exit code 1 (ReplicaError: copies are not equal" in outcome.stderr
    assert "generation 1 goes on with 2 ranks, without slot 2" in outcome.stderr


def test_processes_of_the_ranks_that_are_left_begin_again_like_fresh_ones(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardwise.launch.job._BUSY_SECONDS", 10.0)  # however busy this machine is
    monkeypatch.setattr("shardwise.launch.job._LEAVE_SECONDS", 60.0)
    (tmp_path / "own.py").write_text("runs = []\n")
    body = """
    import atexit, functools, json, multiprocessing, own, threading, torch, tqdm
    from torch.nn.modules import module
    def look():
        return [len(module._global_forward_hooks), multiprocessing.get_start_method(allow_none=True),
                torch.backends.cudnn.benchmark, len(own.runs), sys.argv[1:], threading.active_count(), len(sys.path),
                signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL, os.getcwd() == here, "OLD" in os.environ,
                sys.stdout is sys.__stdout__]
    seen = look()
    open(os.path.join(here, f"seen-{generation}-{rank}"), "w").write(json.dumps([os.getpid(), seen]))
    own.runs.append(generation); sys.argv.append("x"); signal.signal(signal.SIGUSR1, lambda *_: None); os.chdir(here)
    os.environ["OLD"] = "1"; sys.path.append("old"); sys.stdout = sys.stderr
    atexit.register(functools.partial(lambda name: open(name, "w"), os.path.join(here, f"exit-{generation}-{rank}")))
    module.register_module_forward_hook(lambda *_: None); multiprocessing.set_start_method("spawn")
    torch.backends.cudnn.benchmark = True; bar = tqdm.tqdm(total=1, file=sys.__stderr__)  # which has a thread
    trail.write_to(os.environ[PAGE]); trail.step_done(generation)
    mark(f"began{generation}"); wait_for(f"began{generation}-", size)
    if generation == 0 and rank == 1: os.kill(os.getpid(), signal.SIGKILL)
    if generation == 0 and rank == 2: raise ConnectionError("closed by peer")
    if generation == 0 and rank == 3: hang()  # it comes to no collective
    while generation == 0:
        try:
            with trail.waiting(b"an all_reduce"): time.sleep(0.01)
        except Exception: pass  # as a script that skips bad batches
    """
    outcome = job(BODY + textwrap.dedent(body), 4, elastic=ElasticConfig(keeps=True, preload=("torch", "torch.nn")))
    assert outcome.exit_code == 0, outcome.stderr
    assert "rank 1 was killed by SIGKILL" in outcome.stderr
    assert "generation 1 has 2 of 4 processes of the last one" in outcome.stderr
    seen = {path.name[5:]: json.loads(path.read_text()) for path in tmp_path.glob("seen-*")}
    kept = [seen[f"0-{rank}"][0] == seen[f"1-{rank}"][0] for rank in range(4)]
    assert kept == [True, False, True, False]
    assert len({str(what) for _, what in seen.values()}) == 1, seen
    assert sorted(path.name for path in tmp_path.glob("exit-*")) == [f"exit-1-{rank}" for rank in range(4)]


def test_a_generation_that_fails_without_a_step_leaves_no_process_to_the_next(job: Job) -> None:
    body = """
    print(generation, getattr(sys, "state", 0), flush=True)  # of a library, which lives on
    if generation == 1 and hasattr(sys, "state"): raise ValueError("two at a time")
    sys.state = 1
    trail.write_to(os.environ[PAGE])
    if generation == 0:
        trail.step_done(0); mark("began"); wait_for("began-", size)
        if rank == 1: os.kill(os.getpid(), signal.SIGKILL)
        while True:
            with trail.waiting(b"an all_reduce"): time.sleep(0.01)
    """
    outcome = job(BODY + textwrap.dedent(body), 2, elastic=ElasticConfig(keeps=True))
    assert (outcome.exit_code, outcome.stdout) == (0, "0 0\n1 1\n2 0\n")


def test_what_ends_well_or_is_interrupted_ends_the_job(job: Job) -> None:
    assert job("print('well')", elastic=ElasticConfig()).stdout == "well\n"
    seconds = 1.5
    threading.Timer(seconds, lambda: os.kill(os.getpid(), signal.SIGTERM)).start()
    outcome = job(BODY + "signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))\nhang()", elastic=ElasticConfig())
    assert outcome.exit_code == 130
    assert "goes on" not in outcome.stderr


def test_memory_and_processes_are_given_back(job: Job, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    body = """
    import json
    from shardwise.runtime.generation import GENERATION
    memory = json.loads(os.environ[GENERATION])["memory"]
    open(os.path.join(memory, "x"), "w").write("x")
    open(os.path.join(here, f"pid-{rank}"), "w").write(f"{os.getpid()} {os.getppid()}")
    print(memory)
    """
    outcome = job(BODY + textwrap.dedent(body), elastic=ElasticConfig())
    assert not Path(outcome.stdout.strip()).exists()
    assert gone([int(pid) for rank in range(2) for pid in (tmp_path / f"pid-{rank}").read_text().split()])


def test_memory_that_somebody_removes_takes_no_job_with_it(job: Job) -> None:
    body = """
    import json, shutil
    from shardwise.runtime.generation import GENERATION
    memory = json.loads(os.environ[GENERATION])["memory"]
    assert os.path.isdir(memory)
    if generation == 0:
        mark("began")
        wait_for("began", size)
        if rank:
            time.sleep(60)
        shutil.rmtree(memory)
        os.kill(os.getpid(), signal.SIGKILL)
    open(os.path.join(memory, f"x{rank}"), "w").write("x")
    """
    outcome = job(BODY + textwrap.dedent(body), elastic=ElasticConfig())
    assert outcome.exit_code == 0
    (said,) = (line for line in outcome.stderr.splitlines() if "was removed" in line)
    assert "steps that were kept there are lost" in said
    assert not Path(said.split()[1]).exists()


def test_nothing_outlives_a_launcher_that_is_killed(script: Callable[[str], str], tmp_path: Path) -> None:
    path = script(
        """
        open(os.path.join(here, f"pid-{rank}"), "w").write(f"{os.getpid()} {os.getppid()}")
        mark("ready"); time.sleep(60)
        """
    )
    start = (
        "import sys; from shardwise.launch import launcher, zygote; zygote.PRELOADED = ();"
        "launcher.launch(sys.argv[1:], 2, elastic=launcher.ElasticConfig())"
    )
    process = subprocess.Popen([sys.executable, "-c", start, path])
    deadline = time.monotonic() + PROMPTLY
    while len(list(tmp_path.glob("ready-*"))) < 2 and time.monotonic() < deadline:
        time.sleep(0.02)
    process.kill()
    process.wait()
    assert gone([int(pid) for rank in range(2) for pid in (tmp_path / f"pid-{rank}").read_text().split()])


def test_memory_that_a_killed_launcher_left_is_given_back(tmp_path: Path) -> None:
    left, new = tmp_path / "shardwise-memory-left", tmp_path / "shardwise-new-memory-left"
    for folder in (left, new):
        folder.mkdir(mode=0o700)
        (folder / "lock").touch()
    os.utime(new, (0, 0))
    with elastic.folder_in_memory(str(tmp_path)) as first, elastic.folder_in_memory(str(tmp_path)) as second:
        assert sorted(tmp_path.iterdir()) == sorted([Path(first), Path(second)])
    assert not list(tmp_path.iterdir())


def test_what_others_put_where_launchers_have_their_folders_is_left_alone_and_stops_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A FIFO without a writer, at which an open waits; links to folders and files of the user; another user's."""
    mine = tmp_path / "mine"
    (mine / "data").mkdir(mode=0o700, parents=True)
    (mine / "data" / "lock").touch()
    place = tmp_path / "shm"
    for name in ("memory-fifo", "memory-linked", "memory-open", "memory-another", "memory-live", "new-memory-live"):
        (place / f"shardwise-{name}").mkdir(mode=0o700, parents=True)
    os.mkfifo(place / "shardwise-memory-fifo" / "lock")
    os.symlink(mine / "data" / "lock", place / "shardwise-memory-linked" / "lock")
    os.symlink(mine / "data", place / "shardwise-memory-link")
    os.mkfifo(place / "shardwise-memory-file")
    for name in ("memory-open", "memory-another", "memory-live"):
        (place / f"shardwise-{name}" / "lock").touch()
    (place / "shardwise-memory-open").chmod(0o777)
    there = sorted(place.iterdir())
    lstat, another = os.lstat, place / "shardwise-memory-another"

    def of_another(path: os.PathLike[str]) -> os.stat_result:
        about = lstat(path)
        return os.stat_result((*about[:4], about.st_uid + 1, *about[5:])) if Path(path) == another else about

    monkeypatch.setattr(private.os, "lstat", of_another)
    with open(place / "shardwise-memory-live" / "lock") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with elastic.folder_in_memory(str(place)) as folder:
            assert sorted(place.iterdir()) == sorted([*there, Path(folder)])
    assert (mine / "data" / "lock").exists()


def test_what_a_killed_launcher_left_among_temporary_files_is_deleted_by_the_next(
    script: Callable[[str], str], tmp_path: Path
) -> None:
    folder = tmp_path / "tmp"
    folder.mkdir()
    path = script("mark('ready'); time.sleep(60)")
    start = "import sys; from shardwise.launch import launcher; launcher.launch(sys.argv[1:], 1)"
    environment = {**os.environ, "TMPDIR": str(folder)}
    process = subprocess.Popen([sys.executable, "-c", start, path], env=environment)
    deadline = time.monotonic() + 6 * PROMPTLY
    while not list(tmp_path.glob("ready-*")) and time.monotonic() < deadline:
        time.sleep(0.02)
    process.kill()
    process.wait()
    (left,) = folder.iterdir()
    script("import tempfile; print(os.listdir(tempfile.gettempdir()))")
    said = subprocess.check_output([sys.executable, "-c", start, path], env=environment, text=True)
    assert left.name not in said
    assert said.count("shardwise-job-") == 1
    assert not list(folder.iterdir())


def test_a_zygote_that_is_killed_is_replaced(job: Job) -> None:
    body = "if generation == 0 and rank == 1: os.kill(os.getppid(), signal.SIGKILL); hang()\nprint(generation)"
    outcome = job(BODY + body, elastic=ElasticConfig())
    assert outcome.exit_code == 0
    assert outcome.stdout.splitlines()[-1] == "1"


def test_an_exit_that_nobody_asked_about_is_not_that_of_a_later_process_with_its_number(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ends: list[int] = []
    start = mock.Mock(side_effect=lambda *_, pass_fds, **__: ends.append(os.dup(pass_fds[0])) or mock.Mock())
    monkeypatch.setattr(zygote.subprocess, "Popen", start)
    with contextlib.closing(zygote.Zygote({}, ())) as parent, socket.socket(fileno=ends[0]) as answers:
        answers.sendall(b'{"pid": 7}\n{"pid": 7, "code": 3}\n')
        parent.spawn([], {}, 1, 2)
        answers.sendall(b'{"pid": 7}\n')
        later = parent.spawn([], {}, 1, 2)
        assert later.poll() is None
        answers.sendall(b'{"pid": 7, "code": 0}\n')
        assert later.wait() == 0
        answers.sendall(b'{"pid": 7}\n{"pid": 7, "code": 5}\n')  # it had ended before its start was read
        assert parent.spawn([], {}, 1, 2).poll() == 5


class Clock:
    def __init__(self, now: float = 100.0) -> None:
        self.now = now

    def monotonic(self) -> float:
        return self.now


def watched(
    monkeypatch: pytest.MonkeyPatch, looks: Sequence[tuple[float, Sequence[float]]], idle_seconds: float | None = None
) -> list[tuple[int, str] | None]:
    """What a watch of 60 s says at some looks: (when, the ranks' latest signs of life). Rank 0 is in no collective."""
    clock = Clock()
    monkeypatch.setattr(hang_detector, "time", clock)
    watch, found = HangDetector(60.0, idle_seconds), list[tuple[int, str] | None]()
    for clock.now, beats in looks:
        found.append(watch({rank: Heartbeat(beat, 3, 9, 100.0, bool(rank), "") for rank, beat in enumerate(beats)}))
    return found


def test_nobody_is_blamed_for_what_stops_all_ranks_or_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = [100 + 5.0 * i for i in range(40)]
    assert watched(monkeypatch, [(now, (100.0, 100.4, 100.2)) for now in ticks]) == [None] * 40  # the job was stopped
    one = watched(monkeypatch, [(now, (100.0, now, now)) for now in ticks])
    assert one[:13] == [None] * 13
    assert one[13] == (0, "gave no sign of life for 65 seconds")
    # The machine was suspended between the second look and the third, after which rank 0 never comes back.
    away = [(100.0, (100.0, 100.0)), (105.0, (105.0, 105.0)), (905.0, (105.0, 105.0)), (906.0, (105.0, 906.0))]
    assert watched(monkeypatch, away, 20.0) == [None] * 4
    later = [(now + 810, (105.0, now + 810)) for now in ticks]
    assert watched(monkeypatch, [*away, *later])[4:] == [None] * 12 + [
        (0, f"gave no sign of life for {seconds} seconds") for seconds in range(65, 205, 5)
    ]
    # All were stopped for 50 s, in which others waited for rank 0.
    stood = [(now, (min(now, 101.0), min(now, 101.0))) for now in ticks[:11]] + [(151.0, (151.0, 151.0))]
    assert watched(monkeypatch, stood, 20.0) == [None] * 12
    idle = watched(monkeypatch, [(now, (now, now)) for now in ticks[:6]], 20.0)
    assert idle == [None] * 5 + [(0, "came to no collective for 25 seconds, in which all others waited")]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"min_ranks": 3}, ("--min-ranks 3", "from 1 to the 2 ranks")),
        ({"min_ranks": 0}, ("--min-ranks 0", "from 1")),
        ({"spares": -1}, "--spares and --max-failures cannot be negative"),
        ({"silent_seconds": 0.5}, "--silent-after must be more than 1"),
    ],
)
def test_numbers_that_cannot_be_are_refused(job: Job, settings: dict[str, Any], message: object) -> None:
    with raises(LaunchError, message):
        job("", 2, elastic=ElasticConfig(**settings))


def test_options_without_elastic_are_refused(script: Callable[[str], str], capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "-n", "2", "--spares", "1", script("")]) == 2
    assert "need --elastic" in capfd.readouterr().err


def test_the_command_line_says_the_settings(monkeypatch: pytest.MonkeyPatch, script: Callable[[str], str]) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(
        "shardwise.cli.launch", lambda *_, **options: seen.append((options["elastic"], options["preload"])) or 0
    )
    options = "--elastic --min-ranks 1 --spares 2 --max-failures 5 --silent-after 3 --idle-after 60 --preload a,b.c"
    options += " --wait-for-machines 7 --keep-processes"
    main(["run", "-n", "2", *options.split(), script("")])
    main(["run", "-n", "2", "--preload", "a", script("")])
    assert seen == [(ElasticConfig(1, 2, 5, 3.0, 60.0, 7.0, ("a", "b.c"), True), ("a", "b.c")), (None, ("a",))]


def test_a_page_says_what_was_written_on_it(tmp_path: Path) -> None:
    page = HeartbeatFile.create(tmp_path / "page")
    other = HeartbeatFile(tmp_path / "page")
    other.beat(1.5)
    other.step(3)
    other.enter(9, 2.5, ("ü" * 2000).encode())
    seen = page.read()
    assert (seen.beat, seen.step, seen.collective, seen.since, seen.waits) == (1.5, 3, 9, 2.5, True)
    assert seen.what.startswith("üüü")
    other.leave(4.0)
    assert not page.read().waits
    assert HangDetector(10.0)({}) is None


def test_an_interruption_beside_a_loss_ends_the_job(job: Job) -> None:
    body = """
    if rank == 0:
        with open(f"/proc/{os.getppid()}/stat") as stat:  # the launcher started the process that ranks are forked from
            os.kill(int(stat.read().rsplit(")", 1)[1].split()[1]), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGKILL)
    hang()
    """
    outcome = job(BODY + textwrap.dedent(body), 2, elastic=ElasticConfig())
    assert outcome.exit_code == 130
    assert "goes on" not in outcome.stderr
