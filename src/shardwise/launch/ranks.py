"""Initialization of ``torch.distributed``, with errors that name the ranks that are missing or differ.

Rank and world size come from the launcher's environment variables (``launch.rank_environment``).
"""

from __future__ import annotations

import atexit
import ctypes
import os
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import (  # type: ignore[attr-defined]  # documented, but not re-exported
    HashStore,
    PrefixStore,
    Store,
    TCPStore,
)

from shardwise.costs import probe
from shardwise.errors import LaunchError, name_ranks, problem
from shardwise.hosts import listen, own_address
from shardwise.launch.rank_environment import RankEnvironment, read_place
from shardwise.runtime.communicator import backend_of, rank_device
from shardwise.runtime.generation import current, process_state, read_generation
from shardwise.runtime.gpu_watcher import abort_communicators
from shardwise.runtime.heartbeat_file import PAGE, trail

_GPU_PER_TASK = ("SLURM_GPUS_PER_TASK", "SLURM_TRES_PER_TASK")  # with either, Slurm shows a task only its own GPU
_VERDICT = "shardwise/verdict"
_FIRST_POLL_SECONDS, _LONGEST_POLL_SECONDS = 0.001, 0.05
_NOTICE_SECONDS = 30.0  # after which rank 0 prints which ranks are missing
_AT_ONCE = 64  # keys that rank 0 looks for in a request: each is a round trip, and each look costs the store time
_LATE_SECONDS = 5.0  # how much longer the other ranks wait than rank 0, for its verdict
_NUM_NAMED = 8  # ranks that a message lists
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # parameters of mallopt(3)
_KEPT_BYTES = 1 << 30
_MALLOC_CHOICES = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES", "LD_PRELOAD")


def init_ranks(backend: str | None = None, timeout_seconds: float = 600.0) -> None:
    """Join the other ranks and create the process group.

    A second call does nothing. After the script's own ``init_process_group`` it joins that group: the device that the
    group is bound to becomes current or, if nothing chose one, GPU ``local_rank``. The group is destroyed when the
    process exits. If the launcher leaves OMP_NUM_THREADS unset (mpirun, srun), torch's threads are divided among
    the ranks of a machine. With gloo the process keeps freed memory for later buffers.

    Args:
        backend: "nccl" or "gloo"; by default nccl if this machine has a GPU for every local rank, else gloo. With nccl
            the CUDA device ``local_rank`` becomes current (or the only one, if Slurm shows each task its own).
        timeout_seconds: limit of the wait for other ranks, here and in every collective.

    Raises:
        LaunchError: the environment is incomplete or contradictory, a rank is late or runs another version of torch or
            shardwise, or an existing group has another backend.
    """
    if dist.is_initialized():
        if backend is not None and backend != backend_of():
            what = f"the ranks are already connected with {backend_of()}, not {backend}"
            raise LaunchError(what, fix="call init_ranks once, first, or dist.destroy_process_group() in between")
        _join_group()
        return
    place = read_place(os.environ)
    current.generation = read_generation(os.environ)
    if current.generation is not None and current.generation.rehearses:  # there are no other ranks
        return
    if PAGE in os.environ:
        trail.write_to(os.environ[PAGE])
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    is_single_gpu = num_gpus == 1 and any(name in os.environ for name in _GPU_PER_TASK)
    gpu = 0 if is_single_gpu else place.local_rank
    if backend is None:
        backend = "nccl" if is_single_gpu or num_gpus >= place.local_world_size else "gloo"
    if backend == "nccl" and gpu >= num_gpus:
        what = f"local rank {place.local_rank} has no GPU: this machine shows {num_gpus}"
        raise LaunchError(what, fix=f"start {num_gpus or 'no'} ranks here, or use the backend gloo")
    device = torch.device("cuda", gpu) if backend == "nccl" else None
    if device is None:
        keep_freed_memory(os.environ)
    else:
        torch.cuda.set_device(device)
    if place.local_world_size > 1 and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, torch.get_num_threads() // place.local_world_size))
    _join(place, backend, timedelta(seconds=timeout_seconds), device)
    atexit.register(finish)


def keep_freed_memory(environ: Mapping[str, str]) -> bool:
    """Make the C library keep freed memory for later allocations; return whether that succeeded.

    A communication buffer lives for part of a step. glibc returns a block of its size to the system at once, so the
    next one page-faults: concatenating 20 MiB of gradients took 6.5 ms instead of 1.0 (torch 2.13, glibc 2.36, a 2-core
    AMD EPYC). From now on the process keeps its peak size, except for blocks of 1 GiB and more. Nothing changes if
    ``environ`` has a choice of the user (``MALLOC_MMAP_THRESHOLD_``, ``MALLOC_TRIM_THRESHOLD_``, ``GLIBC_TUNABLES``, an
    allocator in ``LD_PRELOAD``) or with another C library.
    """
    if any(name in environ for name in _MALLOC_CHOICES):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return all(mallopt(which, _KEPT_BYTES) == 1 for which in (_M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD))


def _join_group() -> None:
    """Take part in the group that the script has created."""
    if PAGE in os.environ:
        trail.write_to(os.environ[PAGE])
    if current.generation is None:
        current.generation = read_generation(os.environ)
    if backend_of() != "nccl":
        return
    everyone: Any = dist.group.WORLD
    bound = everyone.bound_device_id
    local = read_place(os.environ).local_rank
    if bound is not None:
        torch.cuda.set_device(bound)
    elif torch.cuda.current_device() == 0 and local < torch.cuda.device_count():
        torch.cuda.set_device(local)  # every rank starts with GPU 0, which they cannot share under NCCL


def _join(place: RankEnvironment, backend: str, timeout: timedelta, device: torch.device | None) -> None:
    if place.master is None:
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1, timeout=timeout, device_id=device)
        return
    host, port = place.master
    try:
        store = _meet(place, host, port, timeout)
        _agree(place, store, timeout, "" if device is None else probe.gpus()[device.index].uuid)
        dist.init_process_group(
            backend,
            store=PrefixStore("default_pg", store),
            rank=place.rank,
            world_size=place.world_size,
            timeout=timeout,
            device_id=device,
        )
    except dist.DistError as error:
        what = f"rank {place.rank} could not meet the other {place.world_size - 1} ranks at {host}:{port}: {error}"
        fix = "check that all ranks were started, that rank 0 runs at that address and that the port is free there"
        raise LaunchError(what, fix=fix) from error


def _meet(place: RankEnvironment, host: str, port: int, timeout: timedelta) -> Store:
    """Connect to the ranks' store. Rank 0 serves it; under torchrun the agent does, and keeps keys of earlier
    attempts."""
    is_agents = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    serves = place.rank == 0 and not is_agents
    try:
        store = TCPStore(
            host,
            port,
            place.world_size,
            serves,
            timeout=timeout,
            wait_for_workers=False,
            multi_tenant=True,
            master_listen_fd=_listen(host, port) if serves else None,
        )
    except dist.DistNetworkError as error:
        if not serves or "EADDRINUSE" not in str(error):
            raise
        what = f"rank 0 cannot listen on port {port}: another process of this machine does"
        fix = "end that process, or choose another port: MASTER_PORT (under shardwise run: --master-port)"
        raise LaunchError(what, fix=fix) from None
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return PrefixStore(f"shardwise/attempt-{attempt}", store) if is_agents else store


def _listen(host: str, port: int) -> int | None:
    """Listen at the address that other ranks use, and return the socket's descriptor. By default torch listens on all
    addresses, and anyone who reaches the store can write to it. None: let torch listen, or report why it cannot."""
    address = own_address(host)
    if not address:
        what = f"the store listens on all addresses: {host} resolves to none that others can reach"
        print(f"shardwise: {what}", file=sys.stderr)
        return None
    try:
        return listen(address, port).detach()
    except OSError:  # another process listens there, or an earlier store of this one, which torch finds
        return None


def _agree(place: RankEnvironment, store: Store, timeout: timedelta, gpu: str) -> None:
    """Wait for every rank, and compare versions and (under NCCL) GPUs. Rank 0 decides, so that all ranks raise the same
    LaunchError. Costs three requests per rank, and one more per 64 ranks on rank 0."""
    key = f"shardwise/rank-{place.rank}"
    store.set(key, f"{_versions()}\n{gpu}")
    if place.rank == 0:
        keys = {rank: f"shardwise/rank-{rank}" for rank in range(place.world_size)}
        missing = _wait_for(keys, store, timeout.total_seconds(), f" of {place.world_size}")
        if missing:
            assert place.master is not None, "several ranks meet somewhere"
            where, who = ":".join(map(str, place.master)), f"{name_ranks(missing)} of {place.world_size}"
            what = f"{who} did not come to {where} within {timeout.total_seconds():g} seconds"
            fix = "see why in their output: they were not started, have ended, or do not reach that address"
            verdict = str(problem(what, fix=fix))
        else:
            verdict = _difference(store.multi_get(list(keys.values())))
        store.set(_VERDICT, verdict)
        if verdict:  # the store ends with this process: wait until the others have read it
            _wait_for({rank: f"{keys[rank]}-told" for rank in keys if rank not in (0, *missing)}, store, _LATE_SECONDS)
    else:
        store.wait([_VERDICT], timeout + timedelta(seconds=_LATE_SECONDS))
        verdict = store.get(_VERDICT).decode()
        if verdict:
            store.set(f"{key}-told", "")
    if verdict:
        raise LaunchError(verdict)


def _versions() -> str:
    package = sys.modules["shardwise"]  # not imported: the package is a later layer
    return f"torch {torch.__version__} and shardwise {package.__version__}"


def _wait_for(keys: dict[int, str], store: Store, seconds: float, notice: str = "") -> list[int]:
    """Return the ranks whose keys do not appear in time. (``Store.wait`` would not tell which.)

    With ``notice``, a line after half a minute names the missing ranks, followed by ``notice``.
    """
    began, pause = time.monotonic(), _FIRST_POLL_SECONDS
    left = sorted(keys, reverse=True)
    while left:
        if store.check([keys[rank] for rank in left[-_AT_ONCE:]]):
            del left[-_AT_ONCE:]
            continue
        elapsed = time.monotonic() - began
        if elapsed > seconds:
            return _missing(left, keys, store)
        if notice and elapsed > _NOTICE_SECONDS:
            away = name_ranks(_missing(left, keys, store))
            print(f"shardwise: rank 0 still waits for {away}{notice}", file=sys.stderr)
            notice = ""
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_POLL_SECONDS)
    return []


def _missing(ranks: list[int], keys: dict[int, str], store: Store) -> list[int]:
    return sorted(rank for rank in ranks if not store.check([keys[rank]]))


def _difference(answers: list[bytes]) -> str:
    """Return an error text if ranks run different versions, or share a GPU under NCCL; else an empty text."""
    versions_of, gpus_of = zip(*(answer.decode().split("\n") for answer in answers), strict=True)
    if len(ranks := _by(versions_of)) > 1:
        who = "; ".join(f"{name_ranks(numbers)}: {versions}" for versions, numbers in ranks.items())
        return problem(f"the ranks run different versions: {who}", fix="install the same versions on every machine")
    shared = {gpu: numbers for gpu, numbers in _by(gpus_of).items() if gpu and len(numbers) > 1}
    if not shared:
        return ""
    who = "; ".join(f"{name_ranks(numbers)} on {gpu}" for gpu, numbers in list(shared.items())[:_NUM_NAMED])
    return problem(
        f"NCCL needs a GPU for each rank: {who}",
        fix="start a rank per GPU, let each see its own (CUDA_VISIBLE_DEVICES), or use the backend gloo",
    )


def _by(answers: Sequence[str]) -> dict[str, list[int]]:
    ranks: dict[str, list[int]] = {}
    for number, answer in enumerate(answers):
        ranks.setdefault(answer, []).append(number)
    return ranks


def rank() -> int:
    """Return the rank of this process, from 0. Works before ``init_ranks`` too."""
    return dist.get_rank() if dist.is_initialized() else read_place(os.environ).rank


def world_size() -> int:
    """Return the number of ranks. Works before ``init_ranks`` too."""
    return dist.get_world_size() if dist.is_initialized() else read_place(os.environ).world_size


def group_file() -> str:
    """Return the path in GROUP_INFO_FILE, where the ranks that hold the same shards are written; "" if unset."""
    return os.environ.get("GROUP_INFO_FILE", "")


def local_rank() -> tuple[int, int]:
    """Return (local rank, local world size); all ranks are on one machine if the launcher does not give them."""
    place = read_place(os.environ)
    if place.world_size != world_size():  # the script connected the ranks itself
        return rank(), world_size()
    return place.local_rank, place.local_world_size


def device() -> torch.device:
    """Return this rank's device: its GPU under nccl, else the CPU."""
    return rank_device()


def finish() -> None:
    """Destroy the process group. Called automatically when the process exits; a second call does nothing."""
    if dist.is_initialized():
        dist.destroy_process_group()


@process_state.at_end
def _leave_group() -> None:
    """Leave the group of a generation. Kernels that wait for a lost rank end first; with gloo, ranks that wait for this
    one get an error."""
    abort_communicators()
    atexit.unregister(finish)
    finish()
