"""This process's place among the ranks: reads the launcher's environment and joins ``torch.distributed``.

``shardwise run`` and ``torchrun`` set RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT; of
``mpirun`` (Open MPI, MPICH) the equivalents are read. A process without any of them is a world of one rank, so that a
script runs as ``python train.py`` too.
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from shardwise.errors import LaunchError, problem

REQUIRED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

# What mpirun calls them. It tells no address; one machine needs none.
MPI_NAMES: tuple[Mapping[str, str], ...] = (
    {
        "RANK": "OMPI_COMM_WORLD_RANK",
        "WORLD_SIZE": "OMPI_COMM_WORLD_SIZE",
        "LOCAL_RANK": "OMPI_COMM_WORLD_LOCAL_RANK",
        "LOCAL_WORLD_SIZE": "OMPI_COMM_WORLD_LOCAL_SIZE",
    },
    {
        "RANK": "PMI_RANK",
        "WORLD_SIZE": "PMI_SIZE",
        "LOCAL_RANK": "MPI_LOCALRANKID",
        "LOCAL_WORLD_SIZE": "MPI_LOCALNRANKS",
    },
)
MPI_MASTER = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


@dataclass(frozen=True, slots=True)
class Place:
    """Where a process stands. ``master``: (host, port) where the ranks meet, None for a world without a launcher."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    master: tuple[str, int] | None = None


def init_ranks(backend: str | None = None, timeout_seconds: float = 600.0) -> None:
    """Join the other ranks; called again, or after the script's own ``init_process_group``, it changes nothing.

    ``backend``: "nccl" or "gloo"; by default nccl if this machine has a GPU for every local rank, else gloo. With nccl
    the CUDA device ``local_rank`` becomes current. ``timeout_seconds`` bounds the wait for the others, here and in
    every collective. The group is destroyed when the process ends.

    Raises LaunchError if the environment is incomplete or contradictory, or if the backend is not the existing group's.
    """
    if dist.is_initialized():
        if backend is not None and backend != dist.get_backend():
            what = f"the ranks are already connected with {dist.get_backend()}, not {backend}"
            raise LaunchError(problem(what, fix="call init_ranks once, first, or call shardwise.finish() in between"))
        return
    place = read_place(os.environ)
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if backend is None:
        backend = "nccl" if num_gpus >= place.local_world_size else "gloo"
    if backend == "nccl" and place.local_rank >= num_gpus:
        what = f"local rank {place.local_rank} has no GPU: this machine shows {num_gpus}"
        raise LaunchError(problem(what, fix=f"start {num_gpus or 'no'} ranks here, or use the backend gloo"))
    device = torch.device("cuda", place.local_rank) if backend == "nccl" else None
    if device is not None:
        torch.cuda.set_device(device)
    _join(place, backend, timedelta(seconds=timeout_seconds), device)
    atexit.register(finish)


def _join(place: Place, backend: str, timeout: timedelta, device: torch.device | None) -> None:
    if place.master is None:
        store = dist.HashStore()  # type: ignore[attr-defined]  # documented, but not re-exported
        dist.init_process_group(backend, store=store, rank=0, world_size=1, timeout=timeout, device_id=device)
        return
    host, port = place.master
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    try:
        dist.init_process_group(
            backend,
            init_method=f"tcp://{address}",
            rank=place.rank,
            world_size=place.world_size,
            timeout=timeout,
            device_id=device,
        )
    except dist.DistError as error:
        what = f"rank {place.rank} could not meet the other {place.world_size - 1} ranks at {address}: {error}"
        fix = "check that all ranks were started, that rank 0 runs at that address and that the port is free there"
        raise LaunchError(problem(what, fix=fix)) from error


def rank() -> int:
    """This process's number, from 0; known before ``init_ranks`` too."""
    return dist.get_rank() if dist.is_initialized() else read_place(os.environ).rank


def world_size() -> int:
    """How many ranks there are; known before ``init_ranks`` too."""
    return dist.get_world_size() if dist.is_initialized() else read_place(os.environ).world_size


def device() -> torch.device:
    """Where this rank's tensors belong: its GPU under nccl, else the CPU."""
    on_gpu = dist.is_initialized() and dist.get_backend() == "nccl"
    return torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")


def finish() -> None:
    """Leave the group of ranks. Happens by itself when the process ends; called twice, it does nothing."""
    if dist.is_initialized():
        dist.destroy_process_group()


def read_place(environment: Mapping[str, str]) -> Place:
    """The place that environment variables tell. Without LOCAL_RANK all ranks are taken to be on one machine.

    >>> read_place({})
    Place(rank=0, world_size=1, local_rank=0, local_world_size=1, master=None)
    >>> read_place({"RANK": "3", "WORLD_SIZE": "8", "MASTER_ADDR": "node0", "MASTER_PORT": "29500"}).master
    ('node0', 29500)
    """
    found = {**_from_mpi(environment), **{name: environment[name] for name in REQUIRED if name in environment}}
    missing = [name for name in REQUIRED if name not in found]
    if len(missing) == len(REQUIRED):
        return Place()
    if missing:
        what = f"this process has {_list(sorted(found))} in its environment but not {_list(missing)}"
        fix = "start the script with: shardwise run -n 8 train.py (or torchrun), or unset these for a single process"
        raise LaunchError(problem(what, fix=fix))
    number, count, port = (_number(name, found[name]) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
    local = {**_from_mpi(environment), **environment}
    local_rank = _number("LOCAL_RANK", local.get("LOCAL_RANK", found["RANK"]))
    local_count = _number("LOCAL_WORLD_SIZE", local.get("LOCAL_WORLD_SIZE", found["WORLD_SIZE"]))
    for name, value, bound_name, bound in (
        ("RANK", number, "WORLD_SIZE", count),
        ("LOCAL_RANK", local_rank, "LOCAL_WORLD_SIZE", local_count),
    ):
        if not 0 <= value < bound:
            what = f"{name}={value} is not one of the ranks 0 to {bound - 1} that {bound_name}={bound} makes"
            raise LaunchError(problem(what, fix="let the launcher set both: shardwise run -n 8 train.py"))
    return Place(number, count, local_rank, local_count, (found["MASTER_ADDR"], port))


def _from_mpi(environment: Mapping[str, str]) -> dict[str, str]:
    """What mpirun tells, under our names; an address only if all ranks are on one machine."""
    for names in MPI_NAMES:
        found = {name: environment[theirs] for name, theirs in names.items() if theirs in environment}
        if "RANK" in found and "WORLD_SIZE" in found:
            return {**MPI_MASTER, **found} if found.get("LOCAL_WORLD_SIZE") == found["WORLD_SIZE"] else found
    return {}


def _number(name: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        what = f"{name}={text!r} in the environment is not a whole number"
        raise LaunchError(problem(what, fix="let the launcher set it: shardwise run -n 8 train.py")) from None


def _list(names: list[str]) -> str:
    return ", ".join(names)
