"""What the ranks of a job agree on before they compute: what rank 0 computes once (the captured graph, and the errors
of capturing it), and what each of them brings (its plan, its inputs, its initial values).

Rank 0 may take longer for it than a collective may: while it works it says so in the ranks' store, and the others wait.
"""

from __future__ import annotations

import io
import pickle
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from itertools import count
from time import monotonic, sleep
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch._ops import OpOverload

from shardwise.errors import LaunchError, ShardwiseError, problem
from shardwise.progress import show_progress
from shardwise.runtime.communicator import Communicator, group_timeout

T = TypeVar("T")
_BEATS = "shardwise/rank-0-works"
_BEAT_SECONDS = 1.0
_FIRST_PAUSE_SECONDS = 1e-3
_HALF_AN_HOUR = timedelta(minutes=30)  # torch's own time-out, where the group has none
_turns = count()  # every rank asks for rank 0 equally often


def from_rank_zero(compute: Callable[[], T]) -> T:
    """``compute()`` of rank 0 on every rank. Every rank must call this; an error that a user can mend is raised on all
    of them. It may take longer than the ranks' collectives."""
    outcome: T | ShardwiseError | None = None
    if dist.get_rank() == 0:
        try:
            with report_alive():
                outcome = compute()
        except ShardwiseError as error:
            outcome = error
    if dist.get_world_size() > 1:
        meet_rank_zero("what it computes for all")
        box: list[Any] = [None]
        if dist.get_rank() == 0:
            try:
                box = [_dump(outcome)]
            except (pickle.PicklingError, AttributeError, TypeError) as error:
                outcome = _not_sent(error)
                box = [_dump(outcome)]
        dist.broadcast_object_list(box, src=0)
        if dist.get_rank() != 0:
            outcome = _load(box[0])
    if isinstance(outcome, ShardwiseError):
        raise outcome
    assert outcome is not None
    return outcome


@contextmanager
def show_progress_once(what: str) -> Iterator[None]:
    """``progress.show_progress`` on the first rank, or where there are none."""
    with nullcontext() if dist.is_initialized() and dist.get_rank() else show_progress(what):
        yield


@contextmanager
def report_alive() -> Iterator[None]:
    """While the block runs on rank 0, the others know that it is at work. Anything else changes nothing."""
    if not dist.is_initialized() or dist.get_rank() != 0 or dist.get_world_size() == 1:
        yield
        return
    store, done = dist.distributed_c10d._get_default_store(), threading.Event()

    def beat() -> None:
        while not done.wait(_BEAT_SECONDS):
            store.add(_BEATS, 1)

    thread = threading.Thread(target=beat, daemon=True, name="shardwise-works")
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def meet_rank_zero(what: str) -> None:
    """Wait until rank 0 is here, too, as long as it works. Raises LaunchError when nothing is heard of it for as long
    as the ranks' collectives may take."""
    turn = f"shardwise/rank-0-is-here-{next(_turns)}"
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 0:
        store.set(turn, "")
        return
    patience = (group_timeout() or _HALF_AN_HOUR).total_seconds()
    heard, since, pause = -1, monotonic(), _FIRST_PAUSE_SECONDS
    while True:
        # Asked again and again: a wait that times out in the store writes lines of its own to stderr.
        failure: RuntimeError | None = None
        try:
            if store.check([turn]):
                return
            if (beats := store.add(_BEATS, 0)) != heard:
                heard, since = beats, monotonic()
        except RuntimeError as error:  # torch's DistStoreError: the store is gone
            failure = error
        if failure is not None or monotonic() - since > patience:
            raise LaunchError(
                problem(
                    f"rank {dist.get_rank()} waits for rank 0 and {what}; nothing was heard of it for "
                    f"{monotonic() - since:.0f} s",
                    fix="see what rank 0 did instead (shardwise run prints where), or allow more time in "
                    "init_ranks; sw.plan may take any time, other work before parallelize may not",
                    facts=[] if failure is None else [("error", str(failure).split("\n", 1)[0])],
                )
            ) from failure
        sleep(pause)
        pause = min(2 * pause, _BEAT_SECONDS / 4)


def meet_to_read(ranks: Communicator, call: int, number: int, what: str) -> None:
    """Wait until all ranks of a module are here to read the same output. ``number``: which one of its ``call``. Raises
    ShardwiseError where they read different ones, and CollectiveError where some do not read at all."""
    doing = f"reading an output of call {call}, {what}, which every rank must read (or outputs='whole' in parallelize),"
    if not ranks.meet((call << 16) + number, doing):
        raise ShardwiseError(
            problem(
                f"ranks read different outputs: rank {ranks.rank} reads {what}, of call {call}",
                fix="read outputs on every rank, in the same order, or give sw.parallelize outputs='whole'",
            )
        )


def wire_device(device: torch.device) -> torch.device:
    """Where a tensor must be for ranks to exchange it, whose module is on ``device``."""
    return device if device.type == "cuda" else torch.device("cpu")


def gather_objects(value: Any, ranks: Communicator, device: torch.device, what: str) -> list[Any]:
    """What every rank of a placement gives, on each of them. ``device``: that of the module; ``what`` it is for, for a
    CollectiveError."""
    device = wire_device(device)
    content = torch.frombuffer(bytearray(_dump(value)), dtype=torch.uint8)
    lengths = ranks.gather_from_all(torch.tensor([content.numel()], device=device), what).flatten().tolist()
    padded = torch.zeros(max(lengths), dtype=torch.uint8)
    padded[: content.numel()] = content
    rows = ranks.gather_from_all(padded.to(device), what).cpu()
    return [_load(row[:length].numpy().tobytes()) for row, length in zip(rows, lengths, strict=True)]


def _not_sent(error: Exception) -> ShardwiseError:
    """For a class that other processes can not find by its name: of an argument, an output, or a constant."""
    return ShardwiseError(
        problem(
            f"rank 0 can not send the other ranks what it captured: {error}",
            fix="define the classes of what the model takes and returns at the top of a module, not in a function",
        )
    )


def _dump(value: Any) -> bytes:
    buffer = io.BytesIO()
    _Pickler(buffer).dump(value)
    return buffer.getvalue()


def _load(content: bytes) -> Any:
    with warnings.catch_warnings():  # torch's own tree specs warn when they are unpickled (2.13)
        warnings.filterwarnings("ignore", message=".*LeafSpec", category=FutureWarning)
        return pickle.loads(content)


class _Pickler(pickle.Pickler):
    """Operators travel by name."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, OpOverload):
            return _operator, (value.namespace, value._opname, value._overloadname)
        return NotImplemented


def _operator(namespace: str, name: str, overload: str) -> OpOverload:
    operator: OpOverload = getattr(getattr(getattr(torch.ops, namespace), name), overload)
    return operator


__all__ = ["from_rank_zero", "gather_objects", "meet_rank_zero", "meet_to_read", "report_alive", "wire_device"]
