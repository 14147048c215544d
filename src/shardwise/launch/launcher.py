"""``shardwise run``: start the ranks of a job on this machine, with the environment variables of torchrun.

``launch.job`` supervises the ranks until they end. Standard library only, POSIX only.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO

from shardwise.errors import LaunchError
from shardwise.hosts import Host, free_port, listen
from shardwise.launch import bootstrap
from shardwise.launch.channel import SECRET, job_secret
from shardwise.launch.elastic import GenerationRunner, folder_in_memory, folder_of_launcher
from shardwise.launch.job import Job, JobSettings, signals_caught
from shardwise.launch.node_agent import GenerationStart, NodeAgent
from shardwise.launch.rank_environment import DEFAULT_PORT
from shardwise.launch.restart_policy import ElasticConfig, RestartPolicy
from shardwise.launch.zygote import Zygote


@dataclass(frozen=True, slots=True)
class JobMachines:
    """The machines of a job, each of which makes the same call, with its own ``node_rank``.

    Args:
        hosts: the ranks of every machine; replaces a number of ranks and ``nnodes``. The ranks meet at the host of
            rank 0.
        nnodes: number of machines.
        node_rank: index of this machine. In an elastic job, values from ``nnodes`` on are standby machines.
        master_addr: address of machine 0; needed with several machines, unless ``hosts`` names them.
        master_port: port at that address; by default a free one on a single machine, and 29500 with several ``hosts``.
    """

    hosts: Sequence[Host] = ()
    nnodes: int = 1
    node_rank: int = 0
    master_addr: str | None = None
    master_port: int | None = None


def launch(
    command: Sequence[str],
    num_ranks: int | None = None,
    machines: JobMachines | None = None,
    settings: JobSettings | None = None,
    *,
    elastic: ElasticConfig | None = None,
    preload: Sequence[str] = (),
) -> int:
    """Run ``["script.py", args...]`` or ``["-m", "module", args...]`` as several ranks on this machine.

    Ranks get the environment variables of torchrun (RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR,
    MASTER_PORT). Rank 0's stdout and every rank's stderr are printed, in whole lines.

    Args:
        command: the script or module to run, with its arguments.
        num_ranks: ranks per machine.
        machines: all machines, and which this one is; by default it is the only one.
        settings: of the output and the end of ranks.
        elastic: survive the loss of ranks and machines (``launch.elastic``). The launchers then meet at the master's
            address and port, and the ranks of every generation at a free port of rank 0's machine.
        preload: modules to import once, in a process from which the ranks are forked.

    Returns:
        The exit code: 0, or that of the rank that failed first (128 + signal number if it was killed), or 130 after
        SIGINT, SIGTERM or SIGHUP, or 1 after ``exit_grace_seconds``.

    Raises:
        LaunchError: the job cannot be started.
    """
    machines, settings = machines or JobMachines(), settings or JobSettings()
    hosts, node_rank = machines.hosts or _unnamed_hosts(num_ranks, machines.nnodes), machines.node_rank
    _check_node(hosts, node_rank, stands_by=elastic is not None)
    _check_command(command)
    here = hosts[min(node_rank, len(hosts) - 1)]
    devices = _devices(here)
    num_ranks = sum(len(host.ranks) for host in hosts)
    if elastic is not None:
        elastic.check(num_ranks)
        _check_slots(hosts, devices, len(here.ranks) + elastic.spares)

    def master() -> tuple[str, int]:
        address = _master_addr(hosts, machines.master_addr)
        return address, _master_port(hosts, machines.master_port, serves=0 in here.ranks)

    with contextlib.ExitStack() as stack:
        scratch = stack.enter_context(folder_of_launcher(tempfile.gettempdir(), "job"))
        logs = _open_logs(stack, settings.log_dir, here.ranks if node_rank < len(hosts) else [])
        caught: list[int] = []

        def make_job(folder: str, ranks: Sequence[int]) -> Job:
            logs.update(_open_logs(stack, settings.log_dir, [rank for rank in ranks if rank not in logs]))
            return Job(folder, logs, settings, caught=caught)

        slots, address = list(range(len(here.ranks))), master()
        environment = partial(_shared_environment, devices)
        stack.enter_context(signals_caught(caught))
        if elastic is not None:
            memory = stack.enter_context(folder_in_memory())
            course = RestartPolicy(elastic, num_ranks)
            agent = GenerationRunner(course, len(hosts), command, environment, make_job, scratch, memory)
            stack.callback(agent.close)
            if len(hosts) == 1:
                return agent.run_alone(master)
            name = here.name if node_rank < len(hosts) else ""  # a standby machine has no entry in `hosts`
            secret = job_secret(os.environ)
            member = NodeAgent(course, node_rank, len(hosts), address, name, slots, secret, caught)
            return agent.take_part(stack.enter_context(contextlib.closing(member)))
        shared = environment(GenerationStart(0, False, 0, num_ranks, slots, 0, address, -1))
        job = make_job(scratch, here.ranks)
        if preload:
            zygote = Zygote(shared, preload)
            stack.callback(zygote.close)
            job.spawn = zygote.spawn
        stack.callback(job.kill)
        for local_rank, rank in enumerate(here.ranks):
            job.start(command, rank, {**shared, "LOCAL_RANK": str(local_rank)})
        return job.run()


def _shared_environment(devices: Sequence[str], begin: GenerationStart) -> dict[str, str]:
    """Return the variables that this machine's ranks of a generation share. Without lost slots, ranks see all
    ``devices``."""
    slots, chosen = begin.slots, ",".join(devices)
    if slots != list(range(len(slots))):
        chosen = ",".join(devices[slot] if devices else str(slot) for slot in slots)
    shared = {
        **{name: value for name, value in os.environ.items() if not name.startswith(("TORCHELASTIC_", SECRET))},
        **({"CUDA_VISIBLE_DEVICES": chosen} if chosen else {}),
        "WORLD_SIZE": str(begin.num_ranks),
        "LOCAL_WORLD_SIZE": str(len(slots)),
        "MASTER_ADDR": begin.master[0],
        "MASTER_PORT": str(begin.master[1]),
        bootstrap.LAUNCHER_PID: str(os.getpid()),
    }
    shared.setdefault("OMP_NUM_THREADS", str(max(1, num_cores() // len(slots))))
    return shared


def _check_slots(hosts: Sequence[Host], devices: Sequence[str], num_slots: int) -> None:
    if devices and len(devices) < num_slots:
        what = f"{num_slots} ranks and spares need as many devices, and there are {len(devices)}: {', '.join(devices)}"
        raise LaunchError(what, fix="fewer --spares or ranks, or more devices")
    numbers = [rank for host in hosts for rank in host.ranks]
    if numbers != sorted(numbers):
        what = "--elastic numbers the ranks machine by machine, and this rank table does not"
        raise LaunchError(what, fix="list the machines in the order of their ranks")


def _unnamed_hosts(num_ranks: int | None, nnodes: int) -> tuple[Host, ...]:
    if num_ranks is None:
        raise LaunchError(
            "the number of ranks is missing", fix="give it with -n/--num-ranks: shardwise run -n 8 train.py"
        )
    if num_ranks < 1:
        raise LaunchError(f"cannot start {num_ranks} ranks", fix="ask for at least one: -n 8")
    return tuple(Host("", tuple(range(node * num_ranks, (node + 1) * num_ranks))) for node in range(nnodes))


def _devices(host: Host) -> list[str]:
    """Return the entries of CUDA_VISIBLE_DEVICES for a machine, from the rank table or the environment. LOCAL_RANK
    indexes them."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    devices = ",".join(map(str, host.devices)) or chosen
    if host.devices and chosen and chosen != devices:
        what = f"CUDA_VISIBLE_DEVICES={chosen}, but the rank table says {devices}"
        raise LaunchError(what, source=host.name, fix="unset CUDA_VISIBLE_DEVICES, or change the rank table")
    return [device.strip() for device in devices.split(",") if device.strip()]


def _master_addr(hosts: Sequence[Host], chosen: str | None) -> str:
    if chosen is not None or len(hosts) == 1:
        return chosen or "127.0.0.1"
    (master,) = (host.name for host in hosts if 0 in host.ranks)
    if not master:
        what = f"{len(hosts)} nodes cannot meet without the address of node 0"
        raise LaunchError(what, fix="give the same on every node: --master-addr node0 (or a --hostfile)")
    return master


def _master_port(hosts: Sequence[Host], chosen: int | None, serves: bool) -> int:
    """Return the port at which the ranks meet. ``serves``: rank 0, which listens there, is on this machine."""
    if len(hosts) == 1 and chosen is None:
        return free_port()
    if chosen is None and not hosts[0].name:
        what = f"{len(hosts)} nodes cannot meet without a common port"
        raise LaunchError(what, fix="give the same free port on every node: --master-port 29500")
    port = DEFAULT_PORT if chosen is None else chosen
    if not 0 < port < 1 << 16:
        raise LaunchError(f"{port} is not a port", fix="choose one from 1 to 65535: --master-port 29500")
    if serves and (reason := _why_not_free(port)):
        what = f"rank 0 cannot listen on port {port} of this machine: {reason}"
        fix = "choose another --master-port" + (", the same on every node" if len(hosts) > 1 else ", or leave it out")
        raise LaunchError(what, fix=fix)
    return port


def _why_not_free(port: int) -> str:
    """Return why no process can listen on a port of this machine, on all addresses; empty if it is free."""
    try:
        listen("", port).close()
    except OSError as error:
        return "another process listens there" if error.errno == errno.EADDRINUSE else str(error.strerror)
    return ""


def num_cores() -> int:
    """Return the number of usable cores: the affinity mask, or the container's quota (cgroup v2) if that is less."""
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
    except (OSError, ValueError):
        return cores
    return cores if quota == "max" else max(1, min(cores, int(quota) // int(period)))


def _check_command(command: Sequence[str]) -> None:
    if not command or (command[0] == "-m" and len(command) < 2):
        raise LaunchError("nothing to run", fix="name a script: shardwise run -n 8 train.py")
    if command[0] != "-m" and not os.path.isfile(command[0]):
        fix = "give the path of a Python script, without 'python' before it: shardwise run -n 8 train.py"
        raise LaunchError(f"there is no script {command[0]!r} in {os.getcwd()}", fix=fix)


def _check_node(hosts: Sequence[Host], node_rank: int, *, stands_by: bool) -> None:
    """Check a node rank. ``stands_by``: whether standby machines, beyond those of the job, are allowed."""
    if not node_rank >= 0 or (node_rank >= len(hosts) and (not stands_by or len(hosts) == 1)):
        what = f"node rank {node_rank} is not one of {len(hosts)} nodes"
        raise LaunchError(what, fix="number the nodes 0, 1, ...: --nnodes 2 --node-rank 1")


def _open_logs(
    stack: contextlib.ExitStack, log_dir: str | os.PathLike[str] | None, ranks: Sequence[int]
) -> dict[int, IO[bytes]]:
    if log_dir is None:
        return {}
    try:
        Path(log_dir).mkdir(parents=True, exist_ok=True)
        return {rank: stack.enter_context(open(Path(log_dir, f"rank-{rank}.log"), "wb")) for rank in ranks}
    except OSError as error:
        raise LaunchError(f"cannot write logs: {error}", fix="choose another --log-dir") from error
