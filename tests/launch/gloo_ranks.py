"""Real gloo ranks for tests: fresh processes that run one function of a test module and send back what it returns.

They are forked from a server that has imported modules and done nothing else (multiprocessing's "forkserver"): as
clean as spawned ones, and a rank starts in milliseconds, not in the six seconds that these imports take.
"""

from __future__ import annotations

import gc
import importlib.util
import inspect
import os
import pickle
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import connection, get_context
from pathlib import Path
from types import ModuleType
from typing import Any
from uuid import uuid4

import torch
import torch.distributed as dist

from launch.shared_traces import share_plans, share_traces
from shardwise.launch.bootstrap import is_follow_up

# What a rank of a test imports sooner or later: torch, what torch.export imports when it is first called, shardwise.
PRELOADED = (
    *("torch", "torch.distributed", "torch._dynamo", "torch.export._trace", "shardwise.mindspore", "pytest"),
    "torch._inductor.fx_passes.joint_graph",  # a second of each rank that compiles
)
PRELOADED_OF_SHARDWISE = ("shardwise.api", "shardwise.proof.verify", "shardwise.runtime.parallelize", "rich.console")
# What else takes long to import, where the tests of this run import its package: a rank executes their module again.
PRELOADED_IF_HERE = {
    "hypothesis": ("hypothesis",),
    "transformers": (
        *("shardwise.transformers", "transformers.hf_trainer"),
        *(f"transformers.models.{name}.modeling_{name}" for name in ("bert", "gpt2", "llama", "t5")),
    ),
}
SELDOM = (20_000, 20, 20)  # of the garbage collector, whose passes are a seventh of the suite's seconds by default
RunRanks = Callable[..., list[Any]]  # the fixture ``run_ranks``
TRACES = "SHARDWISE_TEST_TRACES"  # the folder of a run of the tests, of all its workers (``conftest.py``)
SETTLE_SECONDS = 1.0  # how long a lost connection waits for the exception that explains it


class RankTraceback(Exception):
    """The traceback of a rank, as the cause of the exception raised in the test."""


def run_on_ranks(
    function: Callable[..., Any],
    num_ranks: int,
    args: tuple[Any, ...],
    folder: Path,
    time_limit_seconds: float,
    on_gpus: bool = False,
    is_each: bool = False,
) -> list[Any]:
    """``function(*args)`` on every rank; returns the results in the order of ranks (see the fixture ``run_ranks``).
    ``on_gpus``: every rank has an emulated GPU, and the group is of nccl; ``is_each``: ``args`` are those of several
    calls, one after another."""
    assert "<locals>" not in function.__qualname__, f"{function.__qualname__} must be a module-level function"
    context = get_context("forkserver")
    here = [name for package, names in PRELOADED_IF_HERE.items() if package in sys.modules for name in names]
    context.set_forkserver_preload([*PRELOADED, *PRELOADED_OF_SHARDWISE, *here])
    source = (function.__module__, inspect.getfile(function), function.__qualname__)
    settings = (num_ranks, time_limit_seconds, _traces(on_gpus), on_gpus, is_each)
    store, payload = str(folder / f"store-{uuid4().hex}"), pickle.dumps(args)
    processes, receivers = [], []
    try:
        for rank in range(num_ranks):
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(target=_rank, args=(sender, source, payload, store, rank, settings), daemon=True)
            process.start()
            sender.close()
            processes.append(process)
            receivers.append(receiver)
        deadline = time.monotonic() + time_limit_seconds  # the first start waits for what the server imports
        return _collect(receivers, deadline, f"{function.__name__} on {num_ranks} ranks")
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.join()
            process.close()
        for receiver in receivers:
            receiver.close()


def _traces(on_gpus: bool) -> Path:
    """Where all ranks of a run of the tests share what they trace. Kernels of GPUs are others than those of CPUs."""
    folder = Path(os.environ[TRACES], "gpus" if on_gpus else "cpus")
    folder.mkdir(exist_ok=True)
    return folder


def wait_for_all_ranks() -> None:
    """Return when all ranks are here, so that no other finds this one gone. Works where a collective has failed."""
    store, what = dist.distributed_c10d._get_default_store(), "is at the end"
    store.set(f"rank {dist.get_rank()} {what}", "")
    store.wait([f"rank {rank} {what}" for rank in range(dist.get_world_size())])


def _collect(receivers: list[Any], deadline: float, name: str) -> list[Any]:
    """Every rank's result. Of several failures, the first that does not merely tell of a lost peer is raised."""
    results: dict[int, Any] = {}
    failures: list[tuple[bool, float, int, bytes]] = []
    waiting = dict(zip(receivers, range(len(receivers)), strict=True))
    until = deadline
    while waiting:
        ready = connection.wait(list(waiting), max(0.0, until - time.monotonic()))
        if not ready:
            break
        for receiver in ready:
            rank = waiting.pop(receiver)
            try:
                succeeded, value = pickle.loads(receiver.recv_bytes())
            except EOFError:
                succeeded, value = False, (False, time.time(), pickle.dumps((None, f"rank {rank} died")))
            if succeeded:
                results[rank] = value
            else:
                failures.append((value[0], value[1], rank, value[2]))
                until = min(until, time.monotonic() + SETTLE_SECONDS)
        if any(not follow_up for follow_up, *_ in failures):
            break
    if failures:
        _, _, rank, content = min(failures)
        error, text = pickle.loads(content)
        raise error or RuntimeError(text) from RankTraceback(f"on rank {rank}:\n\n{text}")
    if waiting:
        raise TimeoutError(f"{name}: no result from ranks {sorted(waiting.values())} in time")
    return [results[rank] for rank in range(len(receivers))]


def _rank(
    sender: Any,
    source: tuple[str, str, str],
    payload: bytes,
    store: str,
    rank: int,
    settings: tuple[int, float, Path, bool, bool],
) -> None:
    """What a rank's process does. ``settings``: number of ranks, seconds, where they share what they trace, whether
    they have emulated GPUs, and whether the function is called several times."""
    num_ranks, seconds, traces, on_gpus, is_each = settings
    share_traces(traces)
    share_plans(traces, store, rank)
    torch.set_num_threads(1)
    gc.freeze()  # what the server has imported stays
    gc.set_threshold(*SELDOM)
    try:
        backend, device = "gloo", None
        if on_gpus:
            from emulated_gpu.device import install

            install(num_ranks, rank)
            backend, device = "nccl", torch.device("cuda", rank)
        function = _load(*source)
        address = f"file://{store}"
        timeout = timedelta(seconds=seconds)
        dist.init_process_group(
            backend, init_method=address, rank=rank, world_size=num_ranks, timeout=timeout, device_id=device
        )
        dist.barrier()  # whoever is quick would else end while others still connect to it
        args = pickle.loads(payload)
        answer = pickle.dumps((True, [function(*own) for own in args] if is_each else function(*args)))
    except BaseException as error:
        text = "".join(traceback.format_exception(error))
        answer = pickle.dumps((False, (is_follow_up(error), time.time(), _pickled(error, text))))
    sender.send_bytes(answer)
    if dist.is_initialized():
        dist.destroy_process_group()


def _load(module_name: str, path: str, qualname: str) -> Callable[..., Any]:
    """The function, out of its file: a test module is not importable by its name."""
    if module_name not in sys.modules:
        for parent in [module_name.rsplit(".", count)[0] for count in range(module_name.count("."), 0, -1)]:
            if importlib.util.find_spec(parent) is None:  # pickle looks for them
                sys.modules[parent] = package = ModuleType(parent)
                package.__path__ = []  # so that it may have others inside
        spec = importlib.util.spec_from_file_location(module_name, path)
        assert spec is not None
        assert spec.loader is not None
        sys.modules[module_name] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    found: Any = sys.modules[module_name]
    for name in qualname.split("."):
        found = getattr(found, name)
    return found


def _pickled(error: BaseException, text: str) -> bytes:
    """(exception, traceback text); without the exception if it does not survive pickling."""
    try:
        content = pickle.dumps((error, text))
        pickle.loads(content)
    except Exception:  # whatever its own pickling raises
        return pickle.dumps((None, text))
    return content
