"""Explain why an exchange between ranks failed, and tell waiting ranks of a rank that has failed.

Nothing is explained until a collective or an allocation has failed. The rank whose collective failed then writes to the
key-value store where it waits, and reads where the others wait. Members of its group that wait nowhere, or elsewhere,
did not arrive. Chains of ranks that wait for each other are followed to the end.
"""

from __future__ import annotations

import atexit
import ctypes
import json
import pickle
import threading
import time
from collections.abc import Collection
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]  # documented, but not re-exported

from shardwise.errors import CollectiveError, ShardwiseError, name_ranks, problem
from shardwise.graph.origins import NOT_USER_CODE
from shardwise.runtime.generation import process_state
from shardwise.runtime.heartbeat_file import trail

_OTHERS_SECONDS = 2.0  # how long a failing rank waits for the positions of others
_POLL_SECONDS = 0.05
_NUM_NAMED = 8  # waiting ranks that a message lists

_NETWORK_ERROR_TEXTS = ("third_party/gloo", "nccl", "timed out", "timeout", "closed by peer", "reset by peer")
_MEMORY_ERROR_TEXTS = ("can't allocate memory", "not enough memory", "out of memory", "bad_alloc")


@dataclass(frozen=True, slots=True)
class BlockedRank:
    """The position at which a rank's program stopped. ``collective``: its number since the start of the program;
    ``members``: the ranks that take part in it."""

    program: str
    collective: int
    what: str
    members: tuple[int, ...]

    def __str__(self) -> str:
        return f"collective {self.collective} of {self.program}: {self.what}"


def exchange_failed(
    error: Exception, rank: int, waiting: BlockedRank, what: str, op: str, source: str, facts: list[tuple[str, str]]
) -> CollectiveError | None:
    """Explain ``error``, which ended an exchange ``what`` for which ``rank`` waited; None if it is no network error."""
    text = str(error)
    is_network = isinstance(error, dist.DistError) or any(part in text.lower() for part in _NETWORK_ERROR_TEXTS)
    if isinstance(error, ShardwiseError) or is_out_of_memory(error) or not is_network:
        return None
    late = "timed out" in text.lower() or "timeout" in text.lower()
    missing, known_of_others = _who_is_missing(waiting, rank)
    who, fix = (
        "",
        "call the module equally often on all ranks, with the same inputs and settings; or check the network",
    )
    if missing:
        names = name_ranks(missing)
        who, fix = f"; {names} did not arrive", f"read the first error of {names}, or find what ended it"
        if late:
            fix = f"check what {names} did instead (shardwise run prints where), or raise the timeout of init_ranks"
    details = [*facts, *(("ranks", fact) for fact in known_of_others)]
    if recorded := last_message(waiting.members):
        details.append(("recorded", f"{recorded} (torch's flight recorder, rank {rank})"))
    details.append(("error", text.split("\n", 1)[0]))
    what = f"{what} {'timed out' if late else 'failed, a connection was lost'}{who}"
    return CollectiveError(problem(what, op=op, source=source, fix=fix, facts=details), missing)


def _who_is_missing(here_waits: BlockedRank, rank: int) -> tuple[list[int], list[str]]:
    """Return the ranks that wait in no collective though others wait for them, and facts about the others as text."""
    others = [member for member in here_waits.members if member != rank]
    try:
        waiting = _ask(here_waits, rank)
    except Exception as error:  # the store's own rank may be gone
        return [], [
            f"rank {rank} waits here for {name_ranks(others)}; the store cannot be reached ({error})".split("\n", 1)[0]
        ]
    missing: set[int] = set()
    elsewhere: dict[int, BlockedRank] = {}
    visited, waited_for = {rank}, others
    while waited_for:
        member = waited_for.pop()
        if member in visited:
            continue
        visited.add(member)
        if member not in waiting:
            missing.add(member)
            continue
        if (waiting[member].what, waiting[member].collective) != (here_waits.what, here_waits.collective):
            elsewhere[member] = waiting[member]
        waited_for += waiting[member].members
    here = sorted(visited - missing - elsewhere.keys())
    facts = [f"{name_ranks(here)} wait{'s' * (len(here) == 1)} here"]
    if not missing and not elsewhere:
        facts = ["all of them arrived"]
    facts += [f"rank {member} waits in {elsewhere[member]}" for member in sorted(elsewhere)[:_NUM_NAMED]]
    return sorted(missing), facts


def _ask(waiting: BlockedRank, rank: int) -> dict[int, BlockedRank]:
    """Publish where this rank waits, and read where its group's members, and the ranks they wait for, do.

    Ends when all have answered, or after ``_OTHERS_SECONDS`` without an answer.
    """
    store = dist.distributed_c10d._get_default_store()
    before: timedelta = getattr(store, "timeout")  # noqa: B009 - torch's types do not list it
    store.set_timeout(timedelta(seconds=_OTHERS_SECONDS))
    try:
        store.set(_key(rank), json.dumps(asdict(waiting)))
        waiting_ranks = {rank: waiting}
        until = time.monotonic() + _OTHERS_SECONDS
        while True:
            silent = {member for waiting in waiting_ranks.values() for member in waiting.members} - waiting_ranks.keys()
            answers = {member: answer for member in silent if (answer := _answer(store, member)) is not None}
            waiting_ranks |= answers
            if not silent or (not answers and time.monotonic() > until):
                return waiting_ranks
            if not answers:
                time.sleep(_POLL_SECONDS)
            trail.check()
    finally:
        with suppress(Exception):
            store.set_timeout(before)


def _answer(store: Store, rank: int) -> BlockedRank | None:
    if not store.check([_key(rank)]):
        return None
    content = json.loads(store.get(_key(rank)))
    return BlockedRank(**{**content, "members": tuple(content["members"])})


def _key(rank: int) -> str:
    return f"shardwise/waiting-{rank}"


def last_message(members: Collection[int]) -> str:
    """Describe the message between ``members`` that torch's flight recorder has as under way, else their last, which
    may have failed; the user's own messages count, too. "" if nothing is recorded (``TORCH_FR_BUFFER_SIZE=0``).

    Example: ``gloo:all_reduce of Float [3], number 17 of process group 0, called in train.py:40, under way``.
    """
    dump = getattr(torch._C._distributed_c10d, "_dump_fr_trace", None)
    entries: list[dict[str, Any]] = pickle.loads(dump()).get("entries", []) if dump is not None else []
    if not entries:
        return ""
    # The recorder learns late, under load much later, that a message has ended: what a later message of the same group
    # follows has ended, and a message of other ranks is not what these wait for.
    latest = {entry["process_group"][0]: entry for entry in entries}
    world = dist.distributed_c10d._world
    groups = {world.pg_names[group] for group, ranks in world.pg_group_ranks.items() if set(ranks) == set(members)}
    newest_first = sorted(latest.values(), key=lambda entry: entry["record_id"], reverse=True)
    between = [entry for entry in newest_first if entry["process_group"][0] in groups] or newest_first
    entry = next((recorded for recorded in between if _is_under_way(recorded)), between[0])
    pairs = zip(entry["input_dtypes"], entry["input_sizes"], strict=False)
    sizes = ", ".join(f"{dtype} {size}" for dtype, size in pairs) or "nothing"
    frames = (frame for frame in entry.get("frames", ()) if not frame["filename"].startswith(NOT_USER_CODE))
    where = next((f", called in {Path(frame['filename']).name}:{frame['line']}" for frame in frames), "")
    number, group = entry["collective_seq_id"] or entry["p2p_seq_id"], entry["process_group"][0]
    under_way = ", under way" if _is_under_way(entry) else ""
    return f"{entry['profiling_name']} of {sizes}, number {number} of process group {group}{where}{under_way}"


def _is_under_way(entry: dict[str, Any]) -> bool:
    return not entry["retired"] and entry["state"] != "completed"


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an allocation failed, on the device or on the host.

    >>> is_out_of_memory(RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory"))
    True
    """
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error).lower() for text in _MEMORY_ERROR_TEXTS)


def refuse_create_graph() -> None:
    """Raise ShardwiseError if autograd records the backward; called in the backward of every communicating node.
    Collectives in backward have no gradients, so second derivatives would be incomplete."""
    if torch.is_grad_enabled():
        what = "gradients of gradients cannot flow through the collectives of a plan"
        raise ShardwiseError(what, fix="call backward or torch.autograd.grad without create_graph=True")


# ----------------------------------------------------------------------------------------------------------------------
# Propagate failures through the TCPStore: a failing rank publishes its error, and blocked ranks poll for it. A rank
# publishes a status when it leaves a call with an error, and when it asks the others to agree on a call that they may
# not be making (``runtime.signatures``). Without failures nothing is written or read: only a rank that has waited for a
# second polls, once a second. Without this store a rank's failure is known only when collectives time out.

_PATIENCE_SECONDS = 1.0  # between looks into the store
_WAIT = timedelta(seconds=0.1)  # between looks whether the generation has ended
_RAISED = "shardwise/hands-raised"


@dataclass(frozen=True, slots=True)
class RankStatus:
    """The published status of a rank. ``call``: the number of its call, among all calls of parallel modules; ``text``:
    the error with which it ``left``, or what it ``asks`` to agree on."""

    call: int
    kind: Literal["left", "asks"]
    text: str


class FailureStore:
    """The failure store of this rank. ``call``: the number of its current call, the same on all ranks; ``caller``: the
    thread that makes it."""

    def __init__(self) -> None:
        self.call, self.caller = 0, 0
        self._unfinished: set[Any] = set()  # process groups that may have a collective which nobody waits for
        self._asked: set[int] = set()  # the calls that this rank asked the others to agree on
        # By default group, whose store they are of: the numbers of the published statuses that this rank has read, and
        # rank -> its latest status, possibly of a later call.
        self._heard: WeakKeyDictionary[Any, tuple[set[int], dict[int, RankStatus]]] = WeakKeyDictionary()

    def begin(self) -> None:
        """Begin a call of a parallel module, in this thread."""
        self.call, self.caller = self.call + 1, threading.get_ident()

    def ask(self, text: str) -> None:
        """Ask all ranks to agree on the current call; the caller then waits for them."""
        self._asked.add(self.call)
        self._raise(RankStatus(self.call, "asks", text))

    def leave(self, error: BaseException) -> None:
        """Publish that this rank leaves the call with an error. A CollectiveError is not published: other ranks get it
        too and find the missing ranks themselves."""
        if isinstance(error, Exception) and not isinstance(error, CollectiveError):
            notes = getattr(error, "__notes__", [])  # where in a schedule, whose errors only wrap others
            while not isinstance(error, ShardwiseError) and isinstance(error.__cause__, Exception):
                error = error.__cause__
            first = str(error).strip().partition("\n")[0]
            text = f"{type(error).__name__}: {first}" if first else type(error).__name__
            self._raise(RankStatus(self.call, "left", ", ".join([text, *notes])))

    def wait(self, work: Any) -> None:
        """Wait for a gloo collective. Raises its error, CollectiveError if a rank has left this call, and
        ShardwiseError if one asks about another call."""
        asked = time.monotonic()
        while True:
            try:
                work.wait(_WAIT)
                return
            except RuntimeError:
                if work.is_completed():  # it failed, or has just finished
                    trail.check()
                    work.wait()
                    return
            trail.check()
            if (now := time.monotonic()) > asked + _PATIENCE_SECONDS:
                asked = now
                if (error := self.explained()) is not None:
                    self._unfinished.update(dist.distributed_c10d._world.pg_map)
                    raise error

    def keep_unfinished(self) -> None:
        """Keep unfinished groups until the process is gone. A group of gloo that is destroyed waits for its
        collectives, which may be for ranks that wait in the same way; ``abort`` does not end them."""
        for group in self._unfinished:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))  # survives the interpreter

    def _raise(self, status: RankStatus) -> None:
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return
        with suppress(RuntimeError):  # torch's DistError: the store's rank is gone, and will be named
            store = dist.distributed_c10d._get_default_store()
            store.set(_status_key(store.add(_RAISED, 1)), json.dumps([dist.get_rank(), asdict(status)]))

    def explained(self, call: int | None = None) -> ShardwiseError | None:
        """Return the error that explains why others do not arrive in a call (None: the current one): a rank has left
        it, or asks about another."""
        call = self.call if call is None else call
        statuses: dict[int, RankStatus] = {}
        with suppress(RuntimeError):  # as above
            store = dist.distributed_c10d._get_default_store()
            read, statuses = self._heard.setdefault(dist.group.WORLD, (set(), {}))
            raised = store.add(_RAISED, 0)
            # One request for each that is new: among n ranks, all would ask for n. One may be missing: its rank died.
            for number in sorted({*range(1, raised + 1)} - read):
                if store.check([_status_key(number)]):
                    read.add(number)
                    rank, published = json.loads(store.get(_status_key(number)))
                    if rank != dist.get_rank():
                        statuses[rank] = RankStatus(**published)
        latest = sorted(statuses.items())
        for rank, status in latest:
            if status.call == call and status.kind == "left":
                fix = f"see the error of rank {rank}; it does not take part in this call"
                return CollectiveError(problem(f"rank {rank} has left this call: {status.text}", fix=fix), [rank])
        for rank, status in latest:
            if status.call == call and call not in self._asked and status.kind == "asks":
                return ShardwiseError(
                    f"ranks make different calls: rank {rank} changed its call, but rank {dist.get_rank()} "
                    f"repeats its last one: {status.text}",
                    fix="make equal train(), eval(), step() and predict() calls on all ranks",
                )
        return None


def _status_key(number: int) -> str:
    return f"shardwise/hand-{number}"


# Not a cache: a process is one rank.
failure_store = FailureStore()
atexit.register(failure_store.keep_unfinished)
process_state.at_end(failure_store.__init__)  # type: ignore[misc]
