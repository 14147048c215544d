"""Exchange what ranks must agree on before they compute: rank 0's results, and each rank's plan, inputs and values.

Rank 0 may compute for longer than a collective may take. It publishes a heartbeat in the store; the others wait for it.
"""

from __future__ import annotations

import hashlib
import io
import pickle
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from itertools import count
from math import inf
from time import monotonic, sleep
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch._ops import OpOverload

from shardwise.errors import LaunchError, ShardwiseError, name_ranks
from shardwise.progress import show_progress
from shardwise.runtime.communicator import Communicator, group_timeout
from shardwise.runtime.generation import process_state
from shardwise.runtime.heartbeat_file import trail
from shardwise.runtime.rank_tree import FANOUT, RankTree, SmallGroup

T = TypeVar("T")
_BEATS = "shardwise/rank-0-works"
_BEAT_SECONDS = 1.0
_LISTEN_SECONDS = 5.0
_FIRST_PAUSE_SECONDS = 1e-3
_STORE_SECONDS = 5e-5  # per rank that polls: the store, one thread of rank 0, answers about 100,000 requests a second
_MEETING_SECONDS = 60.0
_HALF_AN_HOUR = timedelta(minutes=30)  # torch's default, for a group without a time-out
_turns = count()  # of this generation: every rank makes the same number of calls
_trees: WeakKeyDictionary[Any, RankTree] = WeakKeyDictionary()  # by default group


@process_state.at_end
def _reset_turns() -> None:
    global _turns
    _turns = count()


def rank_and_world_size() -> tuple[int, int]:
    """Return (rank, number of ranks); without a process group there is one rank."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def gather_values(value: T, group: Any = None) -> list[T]:
    """Return the values of all ranks of a group (None: of the job), by rank. Collective."""
    values: list[Any] = [value]
    num_ranks = rank_and_world_size()[1]
    if num_ranks > 1:
        values = [None] * dist.get_world_size(group)
        if len(values) == num_ranks > FANOUT:
            return rank_tree().gather(value)
        dist.all_gather_object(values, value, group=group)
    return values


def rank_tree() -> RankTree:
    """Return the tree over the ranks of the job. The first call is a collective."""
    world: Any = dist.group.WORLD
    if world not in _trees:
        _trees[world] = RankTree(f"tree-{next(_turns)}", group_timeout())
    return _trees[world]


def connect_pairs(pairs: Iterable[tuple[int, int]]) -> dict[int, SmallGroup]:
    """Return a group with each rank that is in a pair with this one; one group of all would connect each rank to each.
    Collective: both ranks of a pair give it, and other pairs do not matter."""
    rank, name = rank_and_world_size()[0], f"pairs-{next(_turns)}"
    own = sorted({(min(pair), max(pair)) for pair in pairs if rank in pair})  # in one order: each waits for its peer
    return {sum(pair) - rank: SmallGroup(name, pair, group_timeout()) for pair in own}


def raise_first(kind: type[ShardwiseError], fault: ShardwiseError | None) -> None:
    """Raise on every rank if any rank has a fault: this rank's own, else that of the first such rank. Collective."""
    faults = gather_values(None if fault is None else str(fault))
    if fault is not None:
        raise fault
    failed = next(((rank, text) for rank, text in enumerate(faults) if text is not None), None)
    if failed is not None:
        raise kind(f"rank {failed[0]}: {failed[1]}")


def patience_seconds() -> float:
    """Return the timeout in seconds when waiting for other ranks."""
    timeout = group_timeout() if rank_and_world_size()[1] > 1 else None
    return (timeout or _HALF_AN_HOUR).total_seconds()


def meet_all(what: str) -> None:
    """Wait for all ranks. Raises LaunchError with those that do not come within a minute: the modes of a process are
    its own, and a collective that some ranks make would meet another one of the others."""
    rank, num_ranks = rank_and_world_size()
    if num_ranks == 1:
        return
    store, turn = dist.distributed_c10d._get_default_store(), f"shardwise/{what}/{next(_turns)}"
    store.set(f"{turn}/{rank}", "")
    store.add(turn, 1)
    deadline = monotonic() + min(patience_seconds(), _MEETING_SECONDS)
    while store.add(turn, 0) < num_ranks:
        if monotonic() > deadline:
            missing = [other for other in range(num_ranks) if not store.check([f"{turn}/{other}"])]
            text = f"{what} is on at {name_ranks([rank])}, and not at {name_ranks(missing)}"
            raise LaunchError(text, fix="use it on every rank")
        trail.check()
        sleep(max(_FIRST_PAUSE_SECONDS, _STORE_SECONDS * num_ranks))


def from_rank_zero(compute: Callable[[], T], what: str = "what it computes for all") -> T:
    """Run ``compute()`` on rank 0 and return its result on every rank; all ranks must call this. A ShardwiseError is
    raised on all of them, and one with the text of any other error on the others. It may take longer than the time-out
    of collectives. ``what``: names the result in the error of a rank that waits in vain."""
    outcome: T | ShardwiseError | None = None
    failure: Exception | None = None
    rank, num_ranks = rank_and_world_size()
    if rank == 0:
        try:
            with report_alive():
                outcome = compute()
        except ShardwiseError as error:
            outcome = error
        except Exception as error:
            failure = error
            outcome = ShardwiseError(f"rank 0: {type(error).__name__}: {error}")
    if num_ranks > 1:
        meet_rank_zero(what)
        box: list[Any] = [None]
        if rank == 0:
            try:
                box = [_dump(outcome)]
            except (pickle.PicklingError, AttributeError, TypeError) as error:  # a class that others cannot import
                what = f"rank 0 cannot send the captured program to the other ranks: {error}"
                fix = "define the classes of the model's inputs and outputs at module level, not in a function"
                outcome = ShardwiseError(what, fix=fix)
                box = [_dump(outcome)]
        dist.broadcast_object_list(box, src=0)
        outcome = _load(box[0]) if rank else outcome
    if failure is not None:
        raise failure
    if isinstance(outcome, ShardwiseError):
        raise outcome
    assert outcome is not None
    return outcome


@contextmanager
def show_progress_once(what: str) -> Iterator[None]:
    """Show ``progress.show_progress`` on rank 0, or where there is no process group."""
    with nullcontext() if rank_and_world_size()[0] else show_progress(what):
        yield


@contextmanager
def report_alive() -> Iterator[None]:
    """Publish rank 0's heartbeat in the store while the block runs. On other ranks it does nothing."""
    rank, num_ranks = rank_and_world_size()
    if rank or num_ranks == 1:
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
    """Wait for rank 0 as long as its heartbeat continues. Raises LaunchError when there was none for the time-out of
    collectives."""
    turn = f"shardwise/rank-0-is-here-{next(_turns)}"
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 0:
        store.set(turn, "")
        return
    patience = patience_seconds()
    heard, since, pause = -1, monotonic(), _FIRST_PAUSE_SECONDS
    listened = -inf  # its heartbeat is looked for at once, then rarely: all ranks ask the same store
    longest = max(_BEAT_SECONDS / 4, _STORE_SECONDS * dist.get_world_size())
    while True:
        # Poll: a store wait that times out writes its own lines to stderr.
        failure: RuntimeError | None = None
        try:
            if store.check([turn]):
                return
            if monotonic() >= listened + min(_LISTEN_SECONDS, patience / 4):
                listened = monotonic()
                if (beats := store.add(_BEATS, 0)) != heard:
                    heard, since = beats, listened
        except RuntimeError as error:  # torch's DistStoreError: the store is gone
            failure = error
        if failure is not None or monotonic() - since > patience:
            raise LaunchError(
                f"rank {dist.get_rank()} waits for rank 0 and {what}; rank 0 sent nothing for "
                f"{monotonic() - since:.0f} s",
                fix="check what rank 0 did instead (shardwise run prints where), or raise the timeout of "
                "init_ranks; only sw.plan is exempt from it",
                facts=[] if failure is None else [("error", str(failure).split("\n", 1)[0])],
            ) from failure
        trail.check()
        sleep(pause)
        pause = min(2 * pause, longest)


def wire_device(device: torch.device) -> torch.device:
    """Return the device that a tensor must be on to be sent, for a module on ``device``."""
    return device if device.type == "cuda" else torch.device("cpu")


def gather_objects(value: Any, ranks: Communicator, device: torch.device, what: str) -> list[Any]:
    """Return the object of every rank of a placement, in rank order. Equal ones do not travel, and are one object in
    the list. ``device``: the module's; ``what``: names the exchange in a CollectiveError."""
    device, dumped = wire_device(device), _dump(value)
    digest = int.from_bytes(hashlib.blake2b(dumped, digest_size=8).digest(), "little", signed=True)
    rows = ranks.gather_from_all(torch.tensor([len(dumped), digest], device=device), what).tolist()
    if all(row == rows[0] for row in rows):
        return [value] * len(rows)
    content = torch.frombuffer(bytearray(dumped), dtype=torch.uint8).to(device)
    lengths = [length for length, _ in rows]
    return [_load(row.cpu().numpy().tobytes()) for row in ranks.gather_flat(content, lengths, what)]


def _dump(value: Any) -> bytes:
    buffer = io.BytesIO()
    _Pickler(buffer).dump(value)
    return buffer.getvalue()


def _load(content: bytes) -> Any:
    with warnings.catch_warnings():  # torch's own tree specs warn when they are unpickled (2.13)
        warnings.filterwarnings("ignore", message=".*LeafSpec", category=FutureWarning)
        return pickle.loads(content)


class _Pickler(pickle.Pickler):
    """A pickler that stores PyTorch operators by name."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, OpOverload):
            return _operator, (value.namespace, value._opname, value._overloadname)
        return NotImplemented


def _operator(namespace: str, name: str, overload: str) -> OpOverload:
    operator: OpOverload = getattr(getattr(getattr(torch.ops, namespace), name), overload)
    return operator
