"""Rank, world size and master address of a process, from the launcher's environment variables.

Every launcher has its own variables. One function each converts them to those of torchrun, which take precedence:

* ``shardwise run``, ``torchrun``: RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT
* ``mpirun`` of Open MPI: OMPI_COMM_WORLD_*; no address, which one machine does not need
* ``srun``: SLURM_PROCID and others; the first host of the list is the master
* ``mpirun`` of MPICH and Intel MPI: PMI_RANK and others; no address
* a script that starts one process per device of a rank table: RANK_TABLE_FILE and RANK_ID

MASTER_ADDR and MASTER_PORT set by the user take precedence under every launcher. A launcher that gives no port has a
job number. Every rank computes the same port from it, so that two jobs on a machine do not collide. A process without
any of these variables is a world of one rank, so that a script also runs as ``python train.py``.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from shardwise.errors import LaunchError
from shardwise.hosts import expand_counts, expand_nodelist, read_rank_table

Environment = Mapping[str, str]

PLACE = ("RANK", "WORLD_SIZE")
MASTER = ("MASTER_ADDR", "MASTER_PORT")
LOCAL = ("LOCAL_RANK", "LOCAL_WORLD_SIZE")

DEFAULT_PORT = 29500  # torchrun's, where there is no job number
# Ports computed from a job number: above what Linux hands out by itself (32768 to 60999).
FIRST_JOB_PORT, NUM_JOB_PORTS = 61440, 4096

OPEN_MPI = {
    "RANK": "OMPI_COMM_WORLD_RANK",
    "WORLD_SIZE": "OMPI_COMM_WORLD_SIZE",
    "LOCAL_RANK": "OMPI_COMM_WORLD_LOCAL_RANK",
    "LOCAL_WORLD_SIZE": "OMPI_COMM_WORLD_LOCAL_SIZE",
}
OPEN_MPI_JOB = ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid")  # either: every mpirun has its own
SLURM = {"RANK": "SLURM_PROCID", "WORLD_SIZE": "SLURM_NTASKS", "LOCAL_RANK": "SLURM_LOCALID"}
SLURM_OF_STEP = {**SLURM, "WORLD_SIZE": "SLURM_STEP_NUM_TASKS"}  # differs if srun started only a part of the job
# Only srun sets one of these. A batch script itself has SLURM_PROCID=0 but is no task. (Step numbers from
# FIRST_SPECIAL_STEP on are those of the batch script and of the shell of salloc.)
SLURM_STEP = ("SLURM_STEP_ID", "SLURM_STEPID", "SLURM_STEP_NODELIST")
FIRST_SPECIAL_STEP = 0xFFFFFFF0
MPICH = {
    "RANK": "PMI_RANK",
    "WORLD_SIZE": "PMI_SIZE",
    "LOCAL_RANK": "MPI_LOCALRANKID",
    "LOCAL_WORLD_SIZE": "MPI_LOCALNRANKS",
}
RANK_TABLE = {"RANK": "RANK_ID", "WORLD_SIZE": "RANK_SIZE"}


@dataclass(frozen=True, slots=True)
class RankEnvironment:
    """Rank and sizes of a process. ``master``: (host, port) where the ranks meet, None without a launcher;
    ``launcher``: its name for messages."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    master: tuple[str, int] | None = None
    launcher: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class _LauncherVariables:
    """The variables of a launcher. ``values``: under torchrun's names; ``names``: from torchrun's names to the
    launcher's; ``address_fix``: how the user sets the address, if the launcher does not."""

    launcher: str
    values: dict[str, str]
    names: Mapping[str, str]
    address_fix: str = ""


def read_place(environment: Environment) -> RankEnvironment:
    """Read rank, sizes and master address from the environment. Without LOCAL_RANK all ranks are on one machine.

    Raises LaunchError if the variables are incomplete or contradict each other.

    >>> read_place({})
    RankEnvironment(rank=0, world_size=1, local_rank=0, local_world_size=1, master=None, launcher='')
    >>> read_place({"RANK": "3", "WORLD_SIZE": "8", "MASTER_ADDR": "node0", "MASTER_PORT": "29500"}).master
    ('node0', 29500)
    """
    standard = {name: environment[name] for name in (*PLACE, *MASTER, *LOCAL) if name in environment}
    launched = next((variables for read in LAUNCHERS if (variables := read(environment)) is not None), None)
    if launched is None or ("RANK" in standard and standard["RANK"] != launched.values["RANK"]):
        return _place(standard, "the environment")
    for name in PLACE:
        if standard.get(name, launched.values[name]) != launched.values[name]:
            theirs = f"{launched.names[name]}={launched.values[name]}"
            what = f"{name}={standard[name]} in the environment, but {launched.launcher} says {theirs}"
            raise LaunchError(what, fix=f"unset {name}: the launcher's own variables are read")
    return _place({**launched.values, **standard}, launched.launcher, launched.address_fix)


def _place(variables: Mapping[str, str], launcher: str, address_fix: str = "") -> RankEnvironment:
    needed = (*PLACE, *MASTER)
    missing = [name for name in needed if name not in variables]
    if not any(name in variables for name in needed):
        return RankEnvironment()
    if missing and address_fix:
        what = f"{launcher} started these {variables['WORLD_SIZE']} ranks on several machines without MASTER_ADDR"
        raise LaunchError(what, fix=address_fix)
    if missing:
        present = ", ".join(sorted(name for name in needed if name in variables))
        what = f"this process has {present} in its environment but not {', '.join(missing)}"
        fix = "start the script with: shardwise run -n 8 train.py (or torchrun), or unset these for a single process"
        raise LaunchError(what, fix=fix)
    number, count, port = (_number(name, variables[name]) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
    local_rank = _number("LOCAL_RANK", variables.get("LOCAL_RANK", variables["RANK"]))
    local_count = _number("LOCAL_WORLD_SIZE", variables.get("LOCAL_WORLD_SIZE", variables["WORLD_SIZE"]))
    for name, value, bound_name, bound in (
        ("RANK", number, "WORLD_SIZE", count),
        ("LOCAL_RANK", local_rank, "LOCAL_WORLD_SIZE", local_count),
    ):
        if not 0 <= value < bound:
            what = f"{name}={value} is not one of the ranks 0 to {bound - 1} that {bound_name}={bound} makes"
            raise LaunchError(what, fix="let the launcher set both: shardwise run -n 8 train.py")
    if not 0 < port < 1 << 16:
        raise LaunchError(f"MASTER_PORT={port} is not a port", fix="choose one from 1 to 65535")
    return RankEnvironment(number, count, local_rank, local_count, (variables["MASTER_ADDR"], port), launcher)


def job_port(job: str) -> str:
    """Return the port of a job: consecutive numbers get different ports; other names get one by checksum.

    >>> job_port("1000"), job_port("1001"), job_port("prterun-node0-4711@1")
    ('62440', '62441', '62616')
    """
    number = int(job) if job.isdecimal() else zlib.crc32(job.encode())
    return str(FIRST_JOB_PORT + number % NUM_JOB_PORTS)


# --------------------------------------------------------------------------------------------------- the launchers


def _open_mpi(environment: Environment) -> _LauncherVariables | None:
    variables = _renamed(environment, OPEN_MPI)
    if not _complete(variables):
        return None
    job = next((environment[name] for name in OPEN_MPI_JOB if name in environment), "")
    if job.isdecimal():  # as in Open MPI 4: 65536 times a number made of mpirun's process id, plus one
        job = str(int(job) >> 16)
    port = job_port(job) if job else str(DEFAULT_PORT)
    return _on_one_machine(variables, OPEN_MPI, port, "mpirun -x MASTER_ADDR=node0 ...")


def _mpich(environment: Environment) -> _LauncherVariables | None:
    variables = _renamed(environment, MPICH)
    if not _complete(variables):
        return None
    return _on_one_machine(variables, MPICH, str(DEFAULT_PORT), "mpirun -genv MASTER_ADDR node0 ...")


def _on_one_machine(variables: dict[str, str], names: Mapping[str, str], port: str, example: str) -> _LauncherVariables:
    if variables.get("LOCAL_WORLD_SIZE") == variables["WORLD_SIZE"]:
        return _LauncherVariables("mpirun", {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, **variables}, names)
    fix = f"name the machine on which rank 0 runs: {example}"
    return _LauncherVariables("mpirun", {"MASTER_PORT": port, **variables}, names, fix)


def _slurm(environment: Environment) -> _LauncherVariables | None:
    names = SLURM_OF_STEP if "SLURM_STEP_NUM_TASKS" in environment else SLURM
    variables = _renamed(environment, names)
    if not _complete(variables) or not any(name in environment for name in SLURM_STEP):
        return None
    if any(
        environment.get(theirs, variables[name]) != variables[name] for name, theirs in MPICH.items() if name in PLACE
    ):
        return None  # MPICH's mpirun starts its ranks from tasks of its own
    job = _number("SLURM_JOB_ID", environment.get("SLURM_JOB_ID", "0"))
    step = _number("SLURM_STEP_ID", environment.get("SLURM_STEP_ID", environment.get("SLURM_STEPID", "0")))
    if step >= FIRST_SPECIAL_STEP:
        return None
    nodelist = environment.get("SLURM_STEP_NODELIST", environment.get("SLURM_NODELIST", ""))
    try:
        hosts = expand_nodelist(nodelist) or ("",)
    except ValueError:
        what = f"cannot read Slurm's list of machines {nodelist!r}"
        raise LaunchError(what, fix="name the machine of rank 0: export MASTER_ADDR=node0") from None
    count = _slurm_local_count(environment, _number(names["WORLD_SIZE"], variables["WORLD_SIZE"]), len(hosts))
    # Jobs get consecutive numbers; a few steps of one job may run side by side.
    address = hosts[0] if len(hosts) > 1 else "127.0.0.1"
    master = {"MASTER_ADDR": address, "MASTER_PORT": job_port(str(8 * job + step))}
    return _LauncherVariables("srun", {**master, **variables, "LOCAL_WORLD_SIZE": str(count)}, names)


def _slurm_local_count(environment: Environment, world_size: int, num_hosts: int) -> int:
    """Return the tasks on this machine, from the first Slurm variable that agrees with the total number of tasks."""
    node = _number("SLURM_NODEID", environment.get("SLURM_NODEID", "0"))
    for name in ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"):
        try:
            counts = expand_counts(environment.get(name, ""))
        except ValueError:
            continue
        if sum(counts) == world_size and node < len(counts):
            return counts[node]
    per_node = environment.get("SLURM_NTASKS_PER_NODE", "")
    if per_node.isdecimal() and int(per_node) * num_hosts == world_size:
        return int(per_node)
    if num_hosts == 1:
        return world_size
    what = f"Slurm started {world_size} tasks on {num_hosts} machines and does not give the number on this one"
    raise LaunchError(what, fix="ask for the same number on each: srun --ntasks-per-node=8 ...")


def _rank_table(environment: Environment) -> _LauncherVariables | None:
    if "RANK_TABLE_FILE" not in environment or "RANK_ID" not in environment:
        return None
    path, number = environment["RANK_TABLE_FILE"], _number("RANK_ID", environment["RANK_ID"])
    hosts = read_rank_table(path)
    host = next((host for host in hosts if number in host.ranks), None)
    world_size = sum(len(host.ranks) for host in hosts)
    size = environment.get("RANK_SIZE", str(world_size))
    if host is None or _number("RANK_SIZE", size) != world_size:
        what = f"RANK_ID={number} and RANK_SIZE={size}, but {path} has the ranks 0 to {world_size - 1}"
        raise LaunchError(what, fix=f"set RANK_ID to one of them and RANK_SIZE={world_size}")
    master = next(host.name for host in hosts if 0 in host.ranks)
    values = {
        "RANK": str(number),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": str(host.ranks.index(number)),
        "LOCAL_WORLD_SIZE": str(len(host.ranks)),
        "MASTER_ADDR": "127.0.0.1" if len(hosts) == 1 else master,
        "MASTER_PORT": str(DEFAULT_PORT),
    }
    return _LauncherVariables("the rank table", values, RANK_TABLE)


# In order of precedence: an mpirun inside a Slurm job sees both kinds of variables.
LAUNCHERS: tuple[Callable[[Environment], _LauncherVariables | None], ...] = (_open_mpi, _slurm, _mpich, _rank_table)


def _renamed(environment: Environment, names: Mapping[str, str]) -> dict[str, str]:
    return {name: environment[theirs] for name, theirs in names.items() if theirs in environment}


def _complete(variables: Mapping[str, str]) -> bool:
    return all(name in variables for name in PLACE)


def _number(name: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        what = f"{name}={text!r} in the environment is not a whole number"
        raise LaunchError(what, fix="let the launcher set it: shardwise run -n 8 train.py") from None
