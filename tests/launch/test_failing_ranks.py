"""The launcher when a rank fails, hangs or does not come: what it shows, and when it ends."""

from __future__ import annotations

import re
import signal

import pytest

from launch.jobs import PROMPTLY, Job
from shardwise.launch.job import JobSettings

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
    plain, tagged = job(body), job(body, settings=JobSettings(tag=True))
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
        settings=JobSettings(grace_seconds=0.5),
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
    outcome = job(body, 3, settings=JobSettings(exit_grace_seconds=0.2))
    assert (outcome.exit_code, outcome.seconds < PROMPTLY) == (1, True)
    first, where, fix = outcome.stderr.splitlines()
    assert first == "shardwise: rank 1 ended with exit code 0; ranks 0, 2 still ran 0.2 seconds later"
    assert re.fullmatch(r"  where:  ranks 0, 2 were in work \(script\.py:\d+\)", where)
    assert fix.startswith("  fix:    let every rank take part in the same collectives")


def test_ranks_that_run_on_after_another_has_ended_are_named_and_may(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardwise.launch.job._NOTICE_SECONDS", 0.1)
    outcome = job("if rank == 0: time.sleep(1); print('evaluated')")
    assert (outcome.exit_code, outcome.stdout) == (0, "evaluated\n")
    said, note = outcome.stderr.splitlines()
    assert said == "shardwise: rank 1 ended with exit code 0, 0 seconds ago; rank 0 still runs"
    assert note.endswith("--exit-grace SECONDS stops such ranks")
