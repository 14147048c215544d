"""The launcher: what it shows, when it ends, and that it leaves nothing behind."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from shardwise.errors import LaunchError
from shardwise.hosts import Host
from shardwise.runtime.launch import free_port, launch, num_cores

PROMPTLY = 10.0  # seconds; the scripts' own sleeps are 60
HEADER = """
import os, signal, sys, time
rank = int(os.environ["RANK"])
here = os.path.dirname(__file__)

def say(text):
    print(text, file=sys.stderr, flush=True)

def mark(name):
    open(os.path.join(here, f"{name}-{rank}"), "w").close()

def wait_for(name, count):
    while sum(entry.startswith(name) for entry in os.listdir(here)) < count:
        time.sleep(0.01)
"""


@dataclass(frozen=True)
class Outcome:
    exit_code: int
    stdout: str
    stderr: str
    seconds: float

    @property
    def last_line(self) -> str:
        return self.stderr.splitlines()[-1]


Job = Callable[..., Outcome]


@pytest.fixture(autouse=True)
def interrupts_are_heard() -> Iterator[None]:
    """A shell starts background jobs with SIGINT ignored, nohup with SIGHUP; all that they start inherits that."""
    before = {signum: signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGHUP)}
    for signum, usual in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
        if before[signum] == signal.SIG_IGN:
            signal.signal(signum, usual)
    yield
    for signum, handler in before.items():
        signal.signal(signum, handler)


@pytest.fixture
def script(tmp_path: Path) -> Callable[[str], str]:
    def write(body: str) -> str:
        path = tmp_path / "script.py"
        path.write_text(HEADER + textwrap.dedent(body))
        return str(path)

    return write


@pytest.fixture
def job(script: Callable[[str], str], capfd: pytest.CaptureFixture[str]) -> Job:
    """``job(body, num_ranks, ...)``: launch a script in this process and see what comes out."""

    def run(body: str, num_ranks: int = 2, *args: str, **options: Any) -> Outcome:
        path = script(body)
        for mark in Path(path).parent.glob("*-[0-9]"):  # of an earlier job of the same test
            mark.unlink()
        began = time.monotonic()
        code = launch([path, *args], num_ranks, **options)
        seconds = time.monotonic() - began
        captured = capfd.readouterr()
        return Outcome(code, captured.out, captured.err, seconds)

    return run


def alive(pid: int) -> bool:
    """Whether a process runs (a zombie, which waits to be reaped, does not)."""
    status = Path(f"/proc/{pid}/stat")
    if status.parent.parent.joinpath("self").exists():
        return status.exists() and status.read_text().rsplit(")", 1)[1].split()[0] != "Z"
    return subprocess.run(["ps", "-p", str(pid)], capture_output=True, check=False).returncode == 0


def gone(pids: list[int]) -> bool:
    """Whether some processes end within a moment."""
    deadline = time.monotonic() + PROMPTLY
    while any(map(alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not any(map(alive, pids))


# ---------------------------------------------------------------------------------------------------- what a rank sees


def test_every_rank_finds_its_place_in_the_environment(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    outcome = job("import json; json.dump(dict(os.environ), sys.stdout)", 3, log_dir=tmp_path / "logs")
    assert outcome.exit_code == 0
    places = [json.loads((tmp_path / "logs" / f"rank-{rank}.log").read_text()) for rank in range(3)]
    assert [place["RANK"] for place in places] == ["0", "1", "2"]
    assert [place["LOCAL_RANK"] for place in places] == ["0", "1", "2"]
    for place in places:
        assert (place["WORLD_SIZE"], place["LOCAL_WORLD_SIZE"], place["MASTER_ADDR"]) == ("3", "3", "127.0.0.1")
        assert place["OMP_NUM_THREADS"] == str(max(1, num_cores() // 3))
        assert not [name for name in place if name.startswith(("SHARDWISE_", "TORCHELASTIC_"))]
    assert len({place["MASTER_PORT"] for place in places}) == 1


def test_a_number_of_threads_that_the_user_chose_stays(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert job("print(os.environ['OMP_NUM_THREADS'])").stdout == "5\n"


def test_the_second_of_two_machines_numbers_its_ranks_on(job: Job, tmp_path: Path) -> None:
    place = {"nnodes": 2, "node_rank": 1, "master_addr": "node0", "master_port": 1234}
    body = "print(*(os.environ[n] for n in ('RANK', 'LOCAL_RANK', 'WORLD_SIZE', 'MASTER_ADDR', 'MASTER_PORT')))"
    assert job(body, 2, log_dir=tmp_path, **place).stdout == ""
    assert (tmp_path / "rank-2.log").read_text() == "2 0 4 node0 1234\n"
    assert (tmp_path / "rank-3.log").read_text() == "3 1 4 node0 1234\n"


def test_every_machine_of_a_list_starts_its_own_ranks_with_its_own_gpus(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    hosts = [Host("node0", (1, 2)), Host("node1", (4, 0, 3), (6, 5, 7))]
    names = "RANK LOCAL_RANK LOCAL_WORLD_SIZE WORLD_SIZE MASTER_ADDR MASTER_PORT CUDA_VISIBLE_DEVICES"
    body = f"print(*(os.environ.get(n, '-') for n in '{names}'.split()))"
    assert job(body, None, hosts=hosts, log_dir=tmp_path).exit_code == 0
    assert (tmp_path / "rank-1.log").read_text() == "1 0 2 5 node1 29500 -\n"
    assert (tmp_path / "rank-2.log").read_text() == "2 1 2 5 node1 29500 -\n"
    port, address = free_port(), "10.0.0.2"
    second = job(body, None, hosts=hosts, node_rank=1, log_dir=tmp_path, master_addr=address, master_port=port)
    assert second.stdout == f"0 1 3 5 {address} {port} 6,5,7\n"
    assert (tmp_path / "rank-4.log").read_text() == f"4 0 3 5 {address} {port} 6,5,7\n"


def test_gpus_that_the_user_chose_and_a_rank_table_must_agree(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    with pytest.raises(LaunchError, match="CUDA_VISIBLE_DEVICES=0,1, but the rank table says 6,5"):
        job("", None, hosts=[Host("node0", (0, 1), (6, 5))])


def test_a_script_runs_as_python_would_run_it(job: Job, tmp_path: Path) -> None:
    (tmp_path / "sibling.py").write_text("WORD = 'sibling'\n")
    (tmp_path / "emit.py").write_text("WORD = 'the script\\'s own emit, not one beside the launcher'\n")
    outcome = job(
        """
        import pickle, emit, sibling
        class Local: pass
        assert isinstance(pickle.loads(pickle.dumps(Local())), Local)
        print(__name__, sys.argv[1:], sys.path[0] == here, sibling.WORD, emit.WORD)
        """,
        1,
        "--lr",
        "3",
    )
    assert outcome.stdout == "__main__ ['--lr', '3'] True sibling the script's own emit, not one beside the launcher\n"


def test_a_module_runs_as_python_m_would_run_it(capfd: pytest.CaptureFixture[str]) -> None:
    assert launch(["-m", "base64", "-t"], 2) == 0
    assert "b'Aladdin:open sesame'" in capfd.readouterr().out


# ----------------------------------------------------------------------------------------------------- what is shown


def test_rank_0_speaks_for_all_but_every_error_line_is_shown(job: Job) -> None:
    outcome = job("print('out', rank); say(f'err {rank}')", 3)
    assert outcome.stdout == "out 0\n"
    assert sorted(outcome.stderr.splitlines()) == ["err 0", "err 1", "err 2"]


def test_with_tags_every_rank_is_shown_behind_its_number(job: Job) -> None:
    outcome = job("print('out'); say('err')", 2, tag=True)
    assert sorted(outcome.stdout.splitlines()) == ["[rank 0] out", "[rank 1] out"]
    assert sorted(outcome.stderr.splitlines()) == ["[rank 0] err", "[rank 1] err"]


def test_lines_that_ranks_write_in_pieces_are_not_mixed(job: Job) -> None:
    outcome = job(
        """
        for _ in range(20):
            for piece in ("a" * 9, "b" * 9, "\\n"):
                sys.stderr.write(piece); sys.stderr.flush(); time.sleep(0.001)
        sys.stderr.write("no newline at the end")
        """,
        4,
    )
    expected = ["a" * 9 + "b" * 9] * 80 + ["no newline at the end"] * 4
    assert sorted(outcome.stderr.splitlines()) == expected


def test_a_progress_bar_is_forwarded_as_it_moves(job: Job) -> None:
    assert job("print('1%', end='\\r'); print('2%', end='\\r'); print('done\\r')", 1).stdout == "1%\r2%\rdone\r\n"


def test_a_large_output_arrives_whole(job: Job) -> None:
    outcome = job("for i in range(100_000): print(f'line {i}')\nsys.stdout.write('x' * 3_000_000)")
    assert outcome.stdout.splitlines()[:-1] == [f"line {i}" for i in range(100_000)]
    assert outcome.stdout.endswith("\n" + "x" * 3_000_000 + "\n")


def test_bytes_that_are_not_utf8_pass_unchanged(script: Callable[[str], str], capfdbinary: Any) -> None:
    assert launch([script("sys.stdout.buffer.write(b'\\xff\\xfe\\n')")], 1) == 0
    assert capfdbinary.readouterr().out == b"\xff\xfe\n"


def test_a_log_file_keeps_all_that_a_rank_wrote(job: Job, tmp_path: Path) -> None:
    body = """
    print('out', rank); say(f'err {rank}'); mark('ready')
    wait_for('ready', 3)
    if rank == 1: raise KeyError('lost')
    time.sleep(60)
    """
    assert job(body, 3, log_dir=tmp_path / "a" / "b").exit_code == 1
    logs = [(tmp_path / "a" / "b" / f"rank-{rank}.log").read_text() for rank in range(3)]
    assert all(f"out {rank}" in log and f"err {rank}" in log for rank, log in enumerate(logs))
    assert ["KeyError: 'lost'" in log for log in logs] == [False, True, False]


# ---------------------------------------------------------------------------------------------------- when a rank fails


def test_the_failing_rank_is_shown_first_and_ends_the_job_promptly(job: Job) -> None:
    outcome = job(
        """
        def broken(): raise RuntimeError("the real cause\\nsecond line")
        mark("ready"); wait_for("ready", 8)
        if rank == 3: broken()
        time.sleep(60)
        """,
        8,
    )
    assert outcome.exit_code == 1
    assert outcome.seconds < PROMPTLY
    lines = outcome.stderr.splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert lines[1].endswith("in <module>")
    assert lines[-3:] == [
        "RuntimeError: the real cause",
        "second line",
        "shardwise: rank 3 failed with exit code 1 (RuntimeError: the real cause); stopped the other 7 ranks",
    ]
    assert "bootstrap" not in outcome.stderr


def test_what_the_others_suffer_from_it_is_not_shown(job: Job) -> None:
    outcome = job(
        """
        if rank == 1:
            try:
                raise ValueError("the real cause")
            finally:
                mark("leaving")  # as a connection that is closed while the exception is on its way
                time.sleep(0.3)
        wait_for("leaving", 1)
        say("reset reset reset")
        raise ConnectionResetError("Connection reset by peer")
        """,
        4,
    )
    assert outcome.stderr.count("Traceback") == 1
    assert "Connection" not in outcome.stderr
    assert (
        "shardwise: rank 1 failed with exit code 1 (ValueError: the real cause); stopped the other 3 ranks"
        in outcome.stderr
    )


def test_error_lines_after_the_failure_are_counted_or_shown_behind_it(job: Job) -> None:
    body = """
    if rank == 1: raise ValueError("the real cause")
    signal.signal(signal.SIGTERM, lambda *_: (say("peer lost"), os._exit(1)))
    mark("ready"); time.sleep(60)
    """.replace("if rank == 1:", "if rank == 1: wait_for('ready', 1);")
    plain, tagged = job(body), job(body, tag=True)
    assert "peer lost" not in plain.stderr
    assert plain.last_line.startswith("  hidden: 1 later error lines of other ranks")
    assert tagged.stderr.index("[rank 1] ValueError") < tagged.stderr.index("[rank 0] peer lost")


def test_ranks_that_failed_on_their_own_are_mentioned(job: Job) -> None:
    outcome = job("mark('x'); wait_for('x', 3); raise ValueError('bad config')", 3)
    assert outcome.stderr.count("Traceback") == 1
    assert re.search(r"^shardwise: rank \d failed with exit code 1 \(ValueError: bad config\)", outcome.stderr, re.M)


def test_a_lost_peer_that_is_noticed_by_nobody_else_is_the_failure_itself(job: Job) -> None:
    outcome = job(
        "if rank == 0: wait_for('left', 1); time.sleep(0.2); raise ConnectionResetError('peer')\nmark('left')"
    )
    assert "shardwise: rank 0 failed with exit code 1 (ConnectionResetError: peer)" in outcome.stderr
    assert outcome.last_line == "  note:   rank 1 had already ended, with exit code 0"


@pytest.mark.parametrize(("leave", "code", "shown"), [("sys.exit(7)", 7, ""), ("sys.exit('no data')", 1, "no data\n")])
def test_the_exit_code_is_that_of_the_failing_rank(job: Job, leave: str, code: int, shown: str) -> None:
    outcome = job(f"if rank == 1: {leave}\ntime.sleep(60)")
    assert outcome.exit_code == code
    assert outcome.seconds < PROMPTLY
    assert outcome.stderr == f"{shown}shardwise: rank 1 failed with exit code {code}; stopped the other 1 rank\n"


def test_a_rank_that_vanishes_without_a_word_is_named(job: Job) -> None:
    outcome = job("if rank == 1: os._exit(9)\ntime.sleep(60)", 3)
    assert outcome.exit_code == 9
    assert outcome.stderr == "shardwise: rank 1 failed with exit code 9; stopped the other 2 ranks\n"


def test_a_killed_rank_is_named_before_the_connections_it_took_down(job: Job) -> None:
    outcome = job(
        """
        if rank == 2: wait_for("ready", 1); mark("gone"); os.kill(os.getpid(), signal.SIGKILL)
        mark("ready"); wait_for("gone", 1)
        if rank == 0: raise ConnectionResetError("Connection reset by peer")
        time.sleep(60)
        """,
        3,
    )
    assert outcome.exit_code == 128 + signal.SIGKILL
    assert outcome.seconds < PROMPTLY
    first, hint = outcome.stderr.splitlines()
    assert first == "shardwise: rank 2 was killed by SIGKILL; stopped the other 2 ranks"
    assert "out of memory" in hint


def test_a_crash_in_native_code_shows_where_python_was(job: Job) -> None:
    outcome = job("def crash(): os.kill(os.getpid(), signal.SIGSEGV)\nif rank == 0: crash()\ntime.sleep(60)")
    assert outcome.exit_code == 128 + signal.SIGSEGV
    assert "in crash" in outcome.stderr
    assert outcome.last_line == "shardwise: rank 0 was killed by SIGSEGV; stopped the other 1 rank"


def test_a_rank_that_does_not_listen_is_killed_after_the_grace_time(job: Job) -> None:
    outcome = job(
        """
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        mark("deaf"); wait_for("deaf", 2)
        if rank == 1: raise ValueError("over")
        time.sleep(60)
        """,
        grace_seconds=0.5,
    )
    assert 0.5 < outcome.seconds < PROMPTLY
    assert outcome.last_line.endswith("(ValueError: over); stopped the other 1 rank")


def test_a_failing_rank_that_cannot_end_is_ended(job: Job) -> None:
    body = "import threading; threading.Thread(target=time.sleep, args=(60,)).start(); raise ValueError('over')"
    outcome = job(body, 1)
    assert (outcome.exit_code, outcome.seconds < PROMPTLY) == (1, True)
    assert outcome.last_line == "shardwise: rank 0 failed with exit code 1 (ValueError: over)"


def test_a_script_with_its_own_way_to_show_exceptions_uses_it(job: Job) -> None:
    outcome = job("sys.excepthook = lambda kind, error, trace: say(f'beautiful: {error}')\nraise ValueError('x')", 1)
    assert outcome.stderr == "beautiful: x\nshardwise: rank 0 failed with exit code 1 (ValueError: x)\n"


def test_a_syntax_error_in_the_script_is_shown_as_python_shows_it(job: Job) -> None:
    outcome = job("x = = 1", 1)
    assert "    x = = 1\n        ^\nSyntaxError: invalid syntax" in outcome.stderr


# ---------------------------------------------------------------------------------------- when a rank does not come


def test_a_rank_for_which_others_waited_in_vain_is_shown_where_it_hangs(job: Job) -> None:
    outcome = job(
        """
        def load():
            mark("loading")
            time.sleep(60)
        if rank == 1: load()
        wait_for("loading", 1)
        raise RuntimeError("Timed out waiting 5000ms for recv operation to complete")
        """
    )
    assert (outcome.exit_code, outcome.seconds < PROMPTLY) == (1, True)
    first, second = outcome.stderr.splitlines()[-2:]
    assert first.startswith("shardwise: rank 0 failed with exit code 1 (RuntimeError: Timed out waiting 5000ms")
    assert first.endswith("; stopped the other 1 rank")
    assert re.fullmatch(r"  where:  rank 1 was in load \(script\.py:\d+\)", second)


def test_ranks_that_are_left_behind_are_stopped_after_the_time_that_was_allowed(job: Job) -> None:
    body = "def work(): mark('at'); time.sleep(60)\nif rank == 1: wait_for('at', 2); sys.exit()\nwork()"
    outcome = job(body, 3, exit_grace_seconds=0.2)
    assert (outcome.exit_code, outcome.seconds < PROMPTLY) == (1, True)
    first, where, fix = outcome.stderr.splitlines()
    assert first == "shardwise: rank 1 ended with exit code 0; ranks 0, 2 still ran 0.2 seconds later"
    assert re.fullmatch(r"  where:  ranks 0, 2 were in work \(script\.py:\d+\)", where)
    assert fix.startswith("  fix:    let every rank take part in the same collectives")


def test_ranks_that_run_on_after_another_has_ended_are_named_and_may(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardwise.runtime.job._NOTICE_SECONDS", 0.1)
    outcome = job("if rank == 0: time.sleep(1); print('evaluated')")
    assert (outcome.exit_code, outcome.stdout) == (0, "evaluated\n")
    said, note = outcome.stderr.splitlines()
    assert said == "shardwise: rank 1 ended with exit code 0, 0 seconds ago; rank 0 still runs"
    assert note.endswith("--exit-grace SECONDS stops such ranks")


# ---------------------------------------------------------------------------------------------------- no orphans


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


START = "import sys; from shardwise.runtime.launch import launch; sys.exit(launch(sys.argv[1:], 3, grace_seconds=1.0))"


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


# ------------------------------------------------------------------------------------------------------- bad requests


@pytest.mark.parametrize(
    ("command", "num_ranks", "options", "message"),
    [
        (["nowhere.py"], 2, {}, r"there is no script 'nowhere.py' in .*\n  fix: "),
        ([], 2, {}, "nothing to run"),
        (["-m"], 2, {}, "nothing to run"),
        ([__file__], 0, {}, "cannot start 0 ranks"),
        ([__file__], -1, {}, "cannot start -1 ranks"),
        ([__file__], 1, {"nnodes": 2, "node_rank": 2, "master_port": 1}, "node rank 2 is not one of 2 nodes"),
        ([__file__], None, {}, "the number of ranks is missing"),
        ([__file__], 1, {"nnodes": 0}, "node rank 0 is not one of 0 nodes"),
        ([__file__], 1, {"nnodes": 2, "master_port": 1}, "2 nodes cannot meet without the address of node 0\n  fix: "),
        ([__file__], 1, {"nnodes": 2, "master_addr": "node0"}, "2 nodes cannot meet without a common port"),
        ([__file__], 1, {"master_port": 65536}, "65536 is not a port"),
        ([__file__], 1, {"log_dir": "/dev/null/logs"}, "cannot write logs: .*\n  fix: .*--log-dir"),
    ],
)
def test_a_job_that_cannot_start_says_why(command: list[str], num_ranks: int, options: Any, message: str) -> None:
    with pytest.raises(LaunchError, match=message):
        launch(command, num_ranks, **options)


@pytest.mark.parametrize("hosts", [(), (Host("node0", (0,)), Host("node1", (1,)))])
def test_a_port_that_is_taken_is_named_before_any_rank_starts(job: Job, hosts: tuple[Host, ...]) -> None:
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        message = f"cannot listen on port {port} of this machine: another process does\n  fix: .* another --master-port"
        with pytest.raises(LaunchError, match=message):
            job("print('started')", 1, hosts=hosts, master_port=port)
        if hosts:  # the second machine only connects to it
            assert job("pass", 1, hosts=hosts, node_rank=1, master_port=port).exit_code == 0


def test_a_free_port_can_be_listened_on() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", free_port()))


def test_no_files_are_left_behind(job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(scratch))
    job("raise ValueError")
    assert os.listdir(scratch) == []
