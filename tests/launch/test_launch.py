"""The launcher: what a rank and its user see, and requests that it refuses."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from launch.gloo_ranks import TRACES
from launch.jobs import Job
from raising import raises
from shardwise.errors import LaunchError
from shardwise.hosts import Host, free_port
from shardwise.launch.job import JobSettings
from shardwise.launch.launcher import JobMachines, launch, num_cores

# ---------------------------------------------------------------------------------------------------- what a rank sees


def test_every_rank_finds_its_place_in_the_environment(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.delenv("SHARDWISE_CACHE")
    monkeypatch.delenv(TRACES, raising=False)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    outcome = job("import json; json.dump(dict(os.environ), sys.stdout)", 3, settings=JobSettings(tmp_path / "logs"))
    assert outcome.exit_code == 0
    places = [json.loads((tmp_path / "logs" / f"rank-{rank}.log").read_text()) for rank in range(3)]
    assert [place["RANK"] for place in places] == ["0", "1", "2"]
    assert [place["LOCAL_RANK"] for place in places] == ["0", "1", "2"]
    for place in places:
        assert (place["WORLD_SIZE"], place["LOCAL_WORLD_SIZE"], place["MASTER_ADDR"]) == ("3", "3", "127.0.0.1")
        assert place["OMP_NUM_THREADS"] == str(max(1, num_cores() // 3))
        internal = {name for name in place if name.startswith(("SHARDWISE_", "TORCHELASTIC_"))}
        assert internal == {"SHARDWISE_PAGE"}
    assert len({place["MASTER_PORT"] for place in places}) == 1


def test_a_number_of_threads_that_the_user_chose_stays(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert job("print(os.environ['OMP_NUM_THREADS'])").stdout == "5\n"


def test_ranks_are_forked_from_a_process_that_has_imported_what_is_preloaded(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "modules"
    folder.mkdir()
    (folder / "slow_to_import.py").write_text("import os; importer = os.getpid()")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH")))))
    body = "import slow_to_import; print(slow_to_import.importer, os.getpid(), os.environ['RANK'], *sys.argv[1:])"
    assert job(body, 2, preload=["slow_to_import"], settings=JobSettings(tmp_path)).exit_code == 0
    said = [(tmp_path / f"rank-{rank}.log").read_text().split() for rank in range(2)]
    (importer,) = {importer for importer, *_ in said}
    assert len({importer, said[0][1], said[1][1]}) == 3
    assert [rest for _, _, *rest in said] == [["0"], ["1"]]
    with raises(LaunchError, "rank 0", "has ended", fix="fewer ranks"):
        job("", 2, preload=["nowhere_to_be_found"])


def test_the_second_of_two_machines_numbers_its_ranks_on(job: Job, tmp_path: Path) -> None:
    machines = JobMachines((), 2, 1, "node0", 1234)
    body = "print(*(os.environ[n] for n in ('RANK', 'LOCAL_RANK', 'WORLD_SIZE', 'MASTER_ADDR', 'MASTER_PORT')))"
    assert job(body, 2, machines=machines, settings=JobSettings(tmp_path)).stdout == ""
    assert (tmp_path / "rank-2.log").read_text() == "2 0 4 node0 1234\n"
    assert (tmp_path / "rank-3.log").read_text() == "3 1 4 node0 1234\n"


def test_every_machine_of_a_list_starts_its_own_ranks_with_its_own_gpus(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    hosts = [Host("node0", (1, 2)), Host("node1", (4, 0, 3), (6, 5, 7))]
    names = "RANK LOCAL_RANK LOCAL_WORLD_SIZE WORLD_SIZE MASTER_ADDR MASTER_PORT CUDA_VISIBLE_DEVICES"
    body = f"print(*(os.environ.get(n, '-') for n in '{names}'.split()))"
    assert job(body, machines=JobMachines(hosts), settings=JobSettings(tmp_path)).exit_code == 0
    assert (tmp_path / "rank-1.log").read_text() == "1 0 2 5 node1 29500 -\n"
    assert (tmp_path / "rank-2.log").read_text() == "2 1 2 5 node1 29500 -\n"
    port, address = free_port(), "10.0.0.2"
    machines = JobMachines(hosts, 1, 1, address, port)
    second = job(body, machines=machines, settings=JobSettings(tmp_path))
    assert second.stdout == f"0 1 3 5 {address} {port} 6,5,7\n"
    assert (tmp_path / "rank-4.log").read_text() == f"4 0 3 5 {address} {port} 6,5,7\n"


def test_gpus_that_the_user_chose_and_a_rank_table_must_agree(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    with raises(LaunchError, "CUDA_VISIBLE_DEVICES=0,1", "6,5", source="node0"):
        job("", machines=JobMachines([Host("node0", (0, 1), (6, 5))]))


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
    outcome = job("print('out'); say('err')", 2, settings=JobSettings(tag=True))
    assert sorted(outcome.stdout.splitlines()) == ["[rank 0] out", "[rank 1] out"]
    assert sorted(outcome.stderr.splitlines()) == ["[rank 0] err", "[rank 1] err"]


def test_all_ranks_are_shown_as_they_speak(job: Job) -> None:
    outcome = job("print('out'); say('err')", 3, settings=JobSettings(show_all=True))
    assert (outcome.stdout, outcome.stderr) == ("out\n" * 3, "err\n" * 3)


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
    assert job(body, 3, settings=JobSettings(tmp_path / "a" / "b")).exit_code == 1
    logs = [(tmp_path / "a" / "b" / f"rank-{rank}.log").read_text() for rank in range(3)]
    assert all(f"out {rank}" in log and f"err {rank}" in log for rank, log in enumerate(logs))
    assert ["KeyError: 'lost'" in log for log in logs] == [False, True, False]


# ------------------------------------------------------------------------------------------------------- bad requests


@pytest.mark.parametrize(
    ("command", "num_ranks", "options", "message"),
    [
        (["nowhere.py"], 2, {}, ("no script 'nowhere.py'", "fix:")),
        ([], 2, {}, "nothing to run"),
        (["-m"], 2, {}, "nothing to run"),
        ([__file__], 0, {}, "cannot start 0 ranks"),
        ([__file__], -1, {}, "cannot start -1 ranks"),
        ([__file__], 1, {"machines": JobMachines((), 2, 2, None, 1)}, "node rank 2 is not one of 2 nodes"),
        ([__file__], None, {}, "the number of ranks is missing"),
        ([__file__], 1, {"machines": JobMachines((), 0)}, "node rank 0 is not one of 0 nodes"),
        (
            [__file__],
            1,
            {"machines": JobMachines((), 2, master_port=1)},
            ("2 nodes cannot meet without the address of node 0", "fix:"),
        ),
        (
            [__file__],
            1,
            {"machines": JobMachines((), 2, master_addr="node0")},
            "2 nodes cannot meet without a common port",
        ),
        ([__file__], 1, {"machines": JobMachines(master_port=65536)}, "65536 is not a port"),
        ([__file__], 1, {"settings": JobSettings("/dev/null/logs")}, ("cannot write logs", "--log-dir")),
    ],
)
def test_a_job_that_cannot_start_says_why(command: list[str], num_ranks: int, options: Any, message: object) -> None:
    with raises(LaunchError, message):
        launch(command, num_ranks, **options)


@pytest.mark.parametrize("hosts", [(), (Host("node0", (0,)), Host("node1", (1,)))])
def test_a_port_that_is_taken_is_named_before_any_rank_starts(job: Job, hosts: tuple[Host, ...]) -> None:
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        with raises(LaunchError, f"port {port}", "another process", fix="another --master-port"):
            job("print('started')", 1, machines=JobMachines(hosts, master_port=port))
        if hosts:  # the second machine only connects to it
            assert job("pass", 1, machines=JobMachines(hosts, node_rank=1, master_port=port)).exit_code == 0


def test_a_free_port_can_be_listened_on() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", free_port()))


def test_no_files_are_left_behind(job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(scratch))
    job("raise ValueError")
    assert os.listdir(scratch) == []
