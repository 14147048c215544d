"""Real jobs of gloo ranks under every launcher: shardwise run on two "machines", torchrun, mpirun, and as by srun."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from shardwise.hosts import free_port

TIME_LIMIT = 120.0  # seconds, for a machine that is busy with other things
OURS = (sys.executable, "-m", "shardwise.cli", "run")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run")
MPIRUN = shutil.which("mpirun")
OPEN_MPI = (
    bool(MPIRUN)
    and "Open MPI" in subprocess.run([MPIRUN, "--version"], capture_output=True, text=True, check=False).stdout
)
needs_mpirun = pytest.mark.skipif(MPIRUN is None, reason="mpirun is not installed (Debian: make openmpi)")

SUM = """
import os, sys
import torch, torch.distributed as dist
import shardwise as sw
from shardwise.launch.rank_environment import read_place

sw.init_ranks(timeout_seconds=100)
total = torch.tensor([sw.rank() + 1.0])
dist.all_reduce(total)
place = read_place(os.environ)
line = f"{place.rank}/{place.world_size} {place.local_rank}/{place.local_world_size} total {total.item():g}"
with open(os.path.join(sys.argv[1], f"rank-{place.rank}.txt"), "w") as file:
    print(line, place.master[1], file=file)
"""
PLAN_FOR_FOUR = """
import torch
import shardwise as sw

sw.init_ranks(timeout_seconds=100)
model, x = torch.nn.Linear(8, 8), torch.ones(8, 8)
plan = sw.plan(model, (x,), sw.Cluster.local(4), loss=lambda y: y.sum(), mode="stand_alone")
sw.parallelize(model, plan)
"""

Start = Callable[..., subprocess.Popen[str]]


def clean_environment(**more: str) -> dict[str, str]:
    """Without what a launcher of this test run may have set."""
    theirs = ("SLURM_", "OMPI_", "PMI_", "PMIX_", "TORCHELASTIC_")
    own = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(theirs) and name not in own}
    return {**kept, "OMP_NUM_THREADS": "1", **more}


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """``start(arguments, **environment)``: a process; none of those started, nor of their children, is left."""
    started: list[subprocess.Popen[str]] = []

    def run(arguments: list[str], **environment: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            arguments,
            cwd=tmp_path,
            env=clean_environment(**environment),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        started.append(process)
        return process

    yield run
    for process in started:
        if process.poll() is None:
            process.terminate()  # mpirun ends its ranks
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def ended_well(*processes: subprocess.Popen[str]) -> None:
    for process in processes:
        _, stderr = process.communicate(timeout=TIME_LIMIT)
        assert process.returncode == 0, stderr


@pytest.fixture
def script(tmp_path: Path) -> Callable[[str], str]:
    def write(body: str) -> str:
        path = tmp_path / "train.py"
        path.write_text(body)
        return str(path)

    return write


def answers(folder: Path) -> list[str]:
    """What the ranks found, in their order, without the port."""
    found = sorted(folder.glob("rank-*.txt"))
    return [path.read_text().rsplit(" ", 1)[0] for path in found]


def mpirun(num_ranks: int, *command: str) -> list[str]:
    assert MPIRUN is not None
    options = ["--allow-run-as-root", "--oversubscribe", "--bind-to", "none"] if OPEN_MPI else []
    return [MPIRUN, *options, "-n", str(num_ranks), *command]


def test_torchrun_starts_ranks_and_starts_them_again(
    start: Start, script: Callable[[str], str], tmp_path: Path
) -> None:
    """All ranks that an agent starts meet in its one store, those of an earlier attempt as well."""
    fails_once = f"{SUM}\nif os.environ['TORCHELASTIC_RESTART_COUNT'] == '0':\n    os._exit(7 * sw.rank())"
    options = ("--standalone", "--nproc-per-node", "2", "--max-restarts", "1")
    ended_well(start([*TORCHRUN, *options, script(fails_once), str(tmp_path)]))
    assert answers(tmp_path) == ["0/2 0/2 total 3", "1/2 1/2 total 3"]


@needs_mpirun
def test_two_mpiruns_at_once_start_ranks_that_do_not_mix(
    start: Start, script: Callable[[str], str], tmp_path: Path
) -> None:
    folders = [tmp_path / "first", tmp_path / "second"]
    path = script(SUM)
    for folder in folders:
        folder.mkdir()
    with TemporaryDirectory() as first, TemporaryDirectory() as second:  # two that make one folder at once may fail
        own = zip(folders, (first, second), strict=True)
        ended_well(*[start(mpirun(2, sys.executable, path, str(folder)), TMPDIR=place) for folder, place in own])
    for folder in folders:
        assert answers(folder) == ["0/2 0/2 total 3", "1/2 1/2 total 3"]
    if OPEN_MPI:
        ports = {path.read_text().split()[-1] for folder in folders for path in folder.glob("rank-*.txt")}
        assert len(ports) == 2


@needs_mpirun
@pytest.mark.long
def test_mpirun_ends_promptly_where_the_port_is_taken(
    start: Start, script: Callable[[str], str], tmp_path: Path
) -> None:
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        job = start(mpirun(2, sys.executable, script(SUM), str(tmp_path)), MASTER_PORT=str(port))
        _, stderr = job.communicate(timeout=TIME_LIMIT)
    assert job.returncode != 0
    assert f"LaunchError: rank 0 cannot listen on port {port}: another process of this machine does" in stderr


def test_tasks_started_as_srun_starts_them_meet(start: Start, script: Callable[[str], str], tmp_path: Path) -> None:
    job = {
        # The port is computed from the number of the job: here one that is free.
        "MASTER_PORT": str(free_port()),
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_STEP_ID": "0",
        "SLURM_NTASKS": "2",
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_STEP_TASKS_PER_NODE": "2",
        "SLURM_NODEID": "0",
    }
    command = [sys.executable, script(SUM), str(tmp_path)]
    ended_well(*[start(command, **job, SLURM_PROCID=str(rank), SLURM_LOCALID=str(rank)) for rank in range(2)])
    assert answers(tmp_path) == ["0/2 0/2 total 3", "1/2 1/2 total 3"]


@pytest.mark.long
def test_two_machines_of_a_hostfile_start_one_job(start: Start, script: Callable[[str], str], tmp_path: Path) -> None:
    (tmp_path / "hosts.txt").write_text("127.0.0.1 slots=1\nlocalhost slots=2  # this machine, too\n")
    common = [*OURS, "--hostfile", "hosts.txt", "--master-port", str(free_port())]
    command = [script(SUM), str(tmp_path)]
    ended_well(*[start([*common, "--node-rank", str(node), *command]) for node in range(2)])
    assert answers(tmp_path) == ["0/3 0/1 total 6", "1/3 0/2 total 6", "2/3 1/2 total 6"]


def test_a_machine_finds_itself_in_a_rank_table(start: Start, script: Callable[[str], str], tmp_path: Path) -> None:
    servers = [
        {"server_id": "192.0.2.77", "device": [{"device_id": "0", "rank_id": "0"}]},
        {"server_id": "127.0.0.1", "device": [{"device_id": "0", "rank_id": "1"}, {"device_id": "1", "rank_id": "2"}]},
    ]
    (tmp_path / "table.json").write_text(json.dumps({"server_list": servers}))
    path = script("import os; print(*(os.environ[n] for n in ('RANK', 'LOCAL_RANK', 'WORLD_SIZE', 'MASTER_ADDR')))")
    job = start([*OURS, "--rank-table", "table.json", "--tag", path])
    stdout, stderr = job.communicate(timeout=TIME_LIMIT)
    assert sorted(stdout.splitlines()) == ["[rank 1] 1 0 3 192.0.2.77", "[rank 2] 2 1 3 192.0.2.77"], stderr


@pytest.mark.long
def test_ranks_of_another_number_than_the_plan_is_for_say_both(start: Start, script: Callable[[str], str]) -> None:
    job = start([*OURS, "-n", "2", script(PLAN_FOR_FOUR)])
    _, stderr = job.communicate(timeout=TIME_LIMIT)
    assert job.returncode == 1
    assert stderr.count("Traceback") == 1
    assert "PlanError: the plan is for 4 devices (Mesh(" in stderr
    assert "2 ranks are running\n  fix:    start 4 ranks, or plan for 2\n" in stderr
