"""The launcher leaves no process behind, whoever ends it."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from launch.jobs import PROMPTLY, Job, gone
from shardwise.launch.launcher import launch


def test_what_ranks_started_ends_with_them(job: Job, tmp_path: Path) -> None:
    body = """
    import subprocess
    child = subprocess.Popen(["sleep", "60"])
    open(os.path.join(here, f"pid-{rank}"), "w").write(f"{os.getpid()} {child.pid}")
    mark("ready"); wait_for("ready", 2)
    if rank == FAILING: raise ValueError
    """
    for failing in ("0", "None"):
        outcome = job(body.replace("FAILING", failing))
        pids = [int(pid) for rank in range(2) for pid in (tmp_path / f"pid-{rank}").read_text().split()]
        assert gone(pids)
        assert outcome.seconds < PROMPTLY


START = """
import sys
from shardwise.launch.job import JobSettings
from shardwise.launch.launcher import launch
sys.exit(launch(sys.argv[1:], 3, settings=JobSettings(grace_seconds=1.0)))
"""


@dataclass(frozen=True)
class Started:
    """A launcher in a process of its own, whose three ranks run."""

    process: subprocess.Popen[str]
    pids: list[int]


@pytest.fixture
def start(script: Callable[[str], str], tmp_path: Path) -> Callable[[str], Started]:
    def run(body: str) -> Started:
        prefix = 'open(os.path.join(here, f"pid-{rank}"), "w").write(str(os.getpid()))\n'
        process = subprocess.Popen(
            [sys.executable, "-c", START, script(prefix + textwrap.dedent(body))],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        deadline = time.monotonic() + 30
        while len(list(tmp_path.glob("ready-*"))) < 3:
            assert time.monotonic() < deadline, process.communicate(timeout=1)
            time.sleep(0.01)
        return Started(process, [int((tmp_path / f"pid-{rank}").read_text()) for rank in range(3)])

    return run


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_to_the_launcher_ends_all_ranks_quietly(
    start: Callable[[str], Started], signum: signal.Signals
) -> None:
    job = start("mark('ready'); time.sleep(60)")
    job.process.send_signal(signum)
    stdout, stderr = job.process.communicate(timeout=PROMPTLY)
    assert job.process.returncode == 130
    assert (stdout, stderr) == ("", f"shardwise: {signum.name}: stopping 3 ranks\n")
    assert gone(job.pids)


def test_ctrl_c_lets_a_script_clean_up(start: Callable[[str], Started]) -> None:
    job = start(
        """
        try:
            mark("ready"); time.sleep(60)
        finally:
            print("saved")
        """
    )
    job.process.send_signal(signal.SIGINT)
    stdout, stderr = job.process.communicate(timeout=PROMPTLY)
    assert (job.process.returncode, stdout) == (130, "saved\n")
    assert "Traceback" not in stderr


def test_a_second_ctrl_c_kills_ranks_that_do_not_listen(start: Callable[[str], Started]) -> None:
    job = start("signal.signal(signal.SIGINT, signal.SIG_IGN); mark('ready'); time.sleep(60)")
    began = time.monotonic()
    job.process.send_signal(signal.SIGINT)
    time.sleep(0.3)
    job.process.send_signal(signal.SIGINT)
    job.process.communicate(timeout=PROMPTLY)
    assert time.monotonic() - began < 2.0
    assert job.process.returncode == 130
    assert gone(job.pids)


def test_ranks_do_not_outlive_a_launcher_that_is_killed(start: Callable[[str], Started]) -> None:
    job = start("mark('ready'); time.sleep(60)")
    job.process.kill()
    job.process.communicate(timeout=PROMPTLY)
    assert gone(job.pids)


def test_a_reader_that_leaves_ends_the_job(start: Callable[[str], Started]) -> None:
    job = start("mark('ready')\nwhile True: print('line')")
    assert job.process.stdout is not None
    assert job.process.stdout.readline() == "line\n"
    job.process.stdout.close()
    assert job.process.wait(timeout=PROMPTLY) == 128 + signal.SIGPIPE
    assert job.process.stderr is not None
    assert job.process.stderr.read() == ""
    job.process.stderr.close()
    assert gone(job.pids)


def test_a_job_can_be_launched_from_a_thread(script: Callable[[str], str]) -> None:
    codes: list[int] = []
    thread = threading.Thread(target=lambda: codes.append(launch([script("sys.exit(rank)")], 2)))
    thread.start()
    thread.join()
    assert codes == [1]


def test_the_launcher_restores_the_signal_handlers(job: Job) -> None:
    before = [signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM)]
    job("pass")
    assert [signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM)] == before
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, [])
