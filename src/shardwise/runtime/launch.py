"""``shardwise run``: starts the ranks of a job on this machine, with the environment variables of torchrun.

The start is here; ``runtime.job`` watches over the ranks until they end. Standard library only, POSIX only.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from shardwise.errors import LaunchError, problem
from shardwise.runtime import bootstrap
from shardwise.runtime.job import Job


def launch(
    command: Sequence[str],
    num_ranks: int,
    *,
    nnodes: int = 1,
    node_rank: int = 0,
    master_addr: str = "127.0.0.1",
    master_port: int | None = None,
    log_dir: str | os.PathLike[str] | None = None,
    tag: bool = False,
    grace_seconds: float = 5.0,
) -> int:
    """Run ``["script.py", args...]`` or ``["-m", "module", args...]`` as ``num_ranks`` processes here; returns the exit
    code.

    With ``nnodes > 1`` the same call is made on every machine, with its own ``node_rank`` and a common ``master_addr``
    and ``master_port``; there are ``nnodes * num_ranks`` ranks in all. Ranks find their place in the environment
    variables of torchrun (RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT). On one machine a
    free port is chosen.

    Shown are rank 0's stdout and every rank's stderr, in whole lines; with ``tag`` everything, each line behind ``[rank
    3] ``. With ``log_dir``, ``rank-3.log`` there keeps all that rank 3 wrote. After SIGTERM a rank has
    ``grace_seconds`` before SIGKILL.

    The exit code is 0, or that of the rank that failed first (128 + signal number if it was killed), or 130 after
    SIGINT, SIGTERM or SIGHUP. Raises LaunchError when the job cannot be started.
    """
    _check(command, num_ranks, nnodes, node_rank, master_port)
    if master_port is None:
        master_port = free_port()
    shared = {
        **{name: value for name, value in os.environ.items() if not name.startswith("TORCHELASTIC_")},
        "WORLD_SIZE": str(nnodes * num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": master_addr,
        "MASTER_PORT": str(master_port),
        bootstrap.LAUNCHER_PID: str(os.getpid()),
    }
    shared.setdefault("OMP_NUM_THREADS", str(max(1, num_cores() // num_ranks)))
    first = node_rank * num_ranks
    scratch = tempfile.mkdtemp(prefix="shardwise-")
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, scratch, ignore_errors=True)
        logs = _open_logs(stack, log_dir, range(first, first + num_ranks))
        job = Job(scratch, logs, tag, grace_seconds)
        stack.enter_context(job.signals_caught())
        stack.callback(job.kill)
        for local_rank in range(num_ranks):
            job.start(command, first + local_rank, {**shared, "LOCAL_RANK": str(local_rank)})
        return job.run()


def free_port() -> int:
    """A TCP port that no process of this machine listens on at the moment."""
    with socket.socket() as listener:
        listener.bind(("", 0))
        port: int = listener.getsockname()[1]
        return port


def num_cores() -> int:
    """Cores this process may use: its affinity mask, and the container's quota (cgroup v2) if that is less."""
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
    except (OSError, ValueError):
        return cores
    return cores if quota == "max" else max(1, min(cores, int(quota) // int(period)))


def _check(command: Sequence[str], num_ranks: int, nnodes: int, node_rank: int, master_port: int | None) -> None:
    """Raise one LaunchError for whatever is wrong with the request."""
    if num_ranks < 1:
        raise LaunchError(problem(f"cannot start {num_ranks} ranks", fix="ask for at least one: -n 8"))
    if nnodes < 1 or not 0 <= node_rank < nnodes:
        what = f"node rank {node_rank} is not one of {nnodes} nodes"
        raise LaunchError(problem(what, fix="number the nodes 0, 1, ...: --nnodes 2 --node-rank 1"))
    if nnodes > 1 and master_port is None:
        what = f"{nnodes} nodes cannot meet without a common port"
        raise LaunchError(problem(what, fix="give the same free port on every node: --master-port 29500"))
    if not command or (command[0] == "-m" and len(command) < 2):
        raise LaunchError(problem("nothing to run", fix="name a script: shardwise run -n 8 train.py"))
    if command[0] != "-m" and not os.path.isfile(command[0]):
        fix = "give the path of a Python script, without 'python' before it: shardwise run -n 8 train.py"
        raise LaunchError(problem(f"there is no script {command[0]!r} in {os.getcwd()}", fix=fix))


def _open_logs(
    stack: contextlib.ExitStack, log_dir: str | os.PathLike[str] | None, ranks: Sequence[int]
) -> dict[int, IO[bytes]]:
    if log_dir is None:
        return {}
    try:
        Path(log_dir).mkdir(parents=True, exist_ok=True)
        return {rank: stack.enter_context(open(Path(log_dir, f"rank-{rank}.log"), "wb")) for rank in ranks}
    except OSError as error:
        raise LaunchError(problem(f"cannot write logs: {error}", fix="choose another --log-dir")) from error
